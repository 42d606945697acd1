//! Text from a file or a folder, and its two splits.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// The documents of the two splits. One plain file is one document.
#[derive(Debug, Default)]
pub struct Splits {
    pub train: Vec<Vec<u8>>,
    pub validation: Vec<Vec<u8>>,
    /// Whether the source had several documents.
    pub documents: bool,
    /// Files of a folder that were passed over because they are not text.
    pub skipped: usize,
}

/// Reads `path` and holds the last `validation` share out. `any_bytes` takes what is not text, too.
pub fn read(path: &Path, validation: f64, any_bytes: bool) -> Result<Splits> {
    let kind = std::fs::metadata(path).map_err(|e| Error::io("read", path, e))?;
    if kind.is_dir() { folder(path, validation, any_bytes) } else { file(path, validation, any_bytes) }
}

fn file(path: &Path, validation: f64, any_bytes: bool) -> Result<Splits> {
    let text = std::fs::read(path).map_err(|e| Error::io("read", path, e))?;
    if text.is_empty() {
        return Err(Error::file(path, "text", "an empty file"));
    }
    if !any_bytes && let Some(what) = not_text(&text) {
        return Err(Error::file(path, "text", what).with_hint("--allow-binary trains on any bytes"));
    }
    let (train, held_out) = cut(text, validation);
    Ok(Splits { train: vec![train], validation: vec![held_out], ..Splits::default() })
}

/// What makes `text` no text, if anything: NUL bytes, or too much that is not UTF-8.
fn not_text(text: &[u8]) -> Option<String> {
    if let Some(at) = text.iter().position(|b| *b == 0) {
        return Some(format!("binary data (a NUL byte at offset {at})"));
    }
    // A few bad bytes happen in real text; a tenth of it being invalid does not.
    let invalid: usize = text.utf8_chunks().map(|c| c.invalid().len()).sum();
    (invalid * 10 > text.len()).then(|| format!("binary data ({invalid} of {} bytes are not UTF-8)", text.len()))
}

/// The first part and the held-out rest of a text, cut where a character begins.
fn cut(mut text: Vec<u8>, validation: f64) -> (Vec<u8>, Vec<u8>) {
    let mut at = ((text.len() as f64) * (1.0 - validation)).round() as usize;
    // A continuation byte of UTF-8 is 10xxxxxx.
    while at < text.len() && text[at] & 0xC0 == 0x80 {
        at += 1;
    }
    let held_out = text.split_off(at.min(text.len()));
    (text, held_out)
}

fn folder(path: &Path, validation: f64, any_bytes: bool) -> Result<Splits> {
    let named = |names: &[&str]| names.iter().map(|n| path.join(n)).find(|p| p.is_file());
    if let (Some(train), Some(held_out)) = (named(&["train.txt"]), named(&["val.txt", "validation.txt", "valid.txt"])) {
        let whole = |p: PathBuf| Ok::<_, Error>(file(&p, 0.0, any_bytes)?.train);
        return Ok(Splits { train: whole(train)?, validation: whole(held_out)?, ..Splits::default() });
    }
    let mut paths = Vec::new();
    collect(path, &mut paths)?;
    let (mut texts, mut skipped) = (Vec::new(), 0);
    for path in &paths {
        let text = std::fs::read(path).map_err(|e| Error::io("read", path, e))?;
        if text.is_empty() || not_text(&text).is_some() {
            skipped += 1;
        } else {
            texts.push(text);
        }
    }
    if texts.is_empty() {
        let found = format!("{} files, none of them text", paths.len());
        return Err(Error::file(path, "a folder with text files", found));
    }
    let mut splits = Splits { documents: true, skipped, ..Splits::default() };
    if texts.len() < FEW {
        for (train, held_out) in texts.into_iter().map(|t| cut(t, validation)) {
            splits.train.push(train);
            if !held_out.is_empty() {
                splits.validation.push(held_out);
            }
        }
    } else {
        let keep = ((texts.len() as f64) * (1.0 - validation)).round() as usize;
        splits.validation = texts.split_off(keep.min(texts.len()));
        splits.train = texts;
    }
    Ok(splits)
}

/// Below this many documents each is cut in two; from here on whole documents are held out.
const FEW: usize = 10;

/// All files below `folder` in the order of their paths; hidden ones are left out.
fn collect(folder: &Path, paths: &mut Vec<PathBuf>) -> Result<()> {
    let entries = std::fs::read_dir(folder).map_err(|e| Error::io("read", folder, e))?;
    let mut found: Vec<PathBuf> = Vec::new();
    for entry in entries {
        found.push(entry.map_err(|e| Error::io("read", folder, e))?.path());
    }
    found.sort();
    for path in found {
        let hidden = path.file_name().is_some_and(|n| n.to_string_lossy().starts_with('.'));
        if hidden {
            continue;
        }
        if path.is_dir() { collect(&path, paths)? } else { paths.push(path) }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    #[test]
    fn a_file_is_cut_by_bytes_at_a_character() {
        let dir = place();
        let path = dir.path().join("a.txt");
        let text = "aäé€😀b".repeat(50);
        std::fs::write(&path, &text).unwrap();
        for share in [0.0, 0.1, 0.333, 0.5, 1.0] {
            let s = read(&path, share, false).unwrap();
            assert_eq!([s.train[0].clone(), s.validation[0].clone()].concat(), text.as_bytes());
            assert!(std::str::from_utf8(&s.train[0]).is_ok());
        }
    }

    #[test]
    fn what_is_no_text_is_refused_with_the_place_and_the_way_out() {
        let dir = place();
        let path = dir.path().join("x");
        let said = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            read(&path, 0.1, false).unwrap_err().to_string()
        };
        assert!(said(b"").contains("an empty file"));
        assert!(said(b"abc\0def").contains("NUL byte at offset 3"));
        assert!(said(&[0xFF; 40]).contains("40 of 40 bytes are not UTF-8"));
        assert!(read(&path, 0.1, true).is_ok(), "any bytes may be trained on when asked for");
        assert!(read(&dir.path().join("none"), 0.1, false).unwrap_err().to_string().contains("none"));
        std::fs::remove_file(&path).unwrap();
        assert!(read(dir.path(), 0.1, false).unwrap_err().to_string().contains("none of them text"));
    }

    #[test]
    fn a_folder_is_read_in_order_and_cut_between_documents() {
        let dir = place();
        std::fs::create_dir(dir.path().join("sub")).unwrap();
        for i in 0..12 {
            let place = if i % 2 == 0 { "sub/" } else { "" };
            std::fs::write(dir.path().join(format!("{place}{i:02}.txt")), format!("text {i}")).unwrap();
        }
        std::fs::write(dir.path().join(".hidden"), "no").unwrap();
        std::fs::write(dir.path().join("image.png"), [0, 1, 2]).unwrap();
        let s = read(dir.path(), 0.25, false).unwrap();
        assert_eq!((s.train.len(), s.validation.len(), s.skipped), (9, 3, 1));
        assert_eq!(s.train[0], b"text 1");
        std::fs::write(dir.path().join("train.txt"), "t").unwrap();
        std::fs::write(dir.path().join("val.txt"), "v").unwrap();
        let s = read(dir.path(), 0.25, false).unwrap();
        assert_eq!((s.train, s.validation, s.documents), (vec![b"t".to_vec()], vec![b"v".to_vec()], false));
    }
}
