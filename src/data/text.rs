//! Text from a file or a folder, and its two splits.

use std::collections::HashSet;
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

/// How a source is read.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reading {
    /// The share held out, from the end.
    pub validation: f64,
    /// Take what is not text, too.
    pub any_bytes: bool,
    /// Refuse a single byte that is not UTF-8: tokenizers of characters cannot take it.
    pub utf8: bool,
}

/// Reads a file or all text files below a folder and cuts off the held-out share.
pub fn read(path: &Path, reading: Reading) -> Result<Splits> {
    let kind = std::fs::metadata(path).map_err(|e| Error::io("read", path, e))?;
    if kind.is_dir() { folder(path, reading) } else { file(path, reading) }
}

fn file(path: &Path, reading: Reading) -> Result<Splits> {
    let text = std::fs::read(path).map_err(|e| Error::io("read", path, e))?;
    if text.is_empty() {
        return Err(Error::file(path, "text", "an empty file"));
    }
    if !reading.any_bytes
        && let Some(what) = not_text(&text)
    {
        let hint = match utf16(&text) {
            true => "save it as UTF-8; or --allow-binary trains on any bytes",
            false => "--allow-binary trains on any bytes",
        };
        return Err(Error::file(path, "text", what).with_hint(hint));
    }
    require_utf8(path, &text, reading)?;
    let (train, held_out) = cut(text, reading.validation);
    Ok(Splits { train: vec![train], validation: vec![held_out], ..Splits::default() })
}

/// What makes `text` no text, if anything: NUL bytes, or too much that is not UTF-8.
fn not_text(text: &[u8]) -> Option<String> {
    if utf16(text) {
        return Some("UTF-16, which is not UTF-8".into());
    }
    if let Some(at) = text.iter().position(|b| *b == 0) {
        return Some(format!("binary data (a NUL byte at offset {at})"));
    }
    // A few bad bytes happen in real text; a tenth of it being invalid does not.
    let invalid: usize = text.utf8_chunks().map(|c| c.invalid().len()).sum();
    (invalid * 10 > text.len()).then(|| format!("binary data ({invalid} of {} bytes are not UTF-8)", text.len()))
}

/// Whether `text` begins with a byte order mark of UTF-16; neither is possible in UTF-8.
fn utf16(text: &[u8]) -> bool {
    text.starts_with(&[0xFF, 0xFE]) || text.starts_with(&[0xFE, 0xFF])
}

fn require_utf8(path: &Path, text: &[u8], reading: Reading) -> Result<()> {
    match std::str::from_utf8(text) {
        Err(e) if reading.utf8 => {
            let found = format!("a byte at offset {} that is not UTF-8", e.valid_up_to());
            Err(Error::file(path, "UTF-8 text for this tokenizer", found)
                .with_hint("convert it to UTF-8, or train on bytes (without --tokenizer)"))
        }
        _ => Ok(()),
    }
}

/// The first part and the held-out rest of a text, cut where a character begins.
fn cut(mut text: Vec<u8>, validation: f64) -> (Vec<u8>, Vec<u8>) {
    let at = ((text.len() as f64) * (1.0 - validation)).round() as usize;
    // A continuation byte of UTF-8 is 10xxxxxx, and a character has three at most; with more this is no text.
    let begins = |at: &usize| text.get(*at).is_none_or(|byte| byte & 0xC0 != 0x80);
    let at = (at..=at + 3).find(begins).unwrap_or(at);
    let held_out = text.split_off(at.min(text.len()));
    (text, held_out)
}

fn folder(path: &Path, reading: Reading) -> Result<Splits> {
    let named = |names: &[&str]| names.iter().map(|n| path.join(n)).find(|p| p.is_file());
    if let (Some(train), Some(held_out)) = (named(&["train.txt"]), named(&["val.txt", "validation.txt", "valid.txt"])) {
        let whole = |p: PathBuf| Ok::<_, Error>(file(&p, Reading { validation: 0.0, ..reading })?.train);
        return Ok(Splits { train: whole(train)?, validation: whole(held_out)?, ..Splits::default() });
    }
    let mut found = Found::default();
    found.collect(path)?;
    let (mut texts, mut skipped) = (Vec::new(), found.other);
    for path in &found.files {
        let text = std::fs::read(path).map_err(|e| Error::io("read", path, e))?;
        if text.is_empty() || !reading.any_bytes && not_text(&text).is_some() {
            skipped += 1;
        } else {
            require_utf8(path, &text, reading)?;
            texts.push(text);
        }
    }
    if texts.is_empty() {
        let found = format!("{skipped} files, none of them text");
        return Err(Error::file(path, "a folder with text files", found));
    }
    let mut splits = Splits { documents: true, skipped, ..Splits::default() };
    if let Some(border) = border(&texts, reading.validation) {
        splits.validation = texts.split_off(border);
        splits.train = texts;
        return Ok(splits);
    }
    for (train, held_out) in texts.into_iter().map(|t| cut(t, reading.validation)) {
        splits.train.extend(Some(train).filter(|t| !t.is_empty()));
        splits.validation.extend(Some(held_out).filter(|t| !t.is_empty()));
    }
    Ok(splits)
}

/// Below this many documents each is cut in two; from here on whole documents are held out.
const FEW: usize = 10;

/// The first document that is held out, so that the share is met as nearly as documents allow; nothing where they are
/// few or so unlike in length that the share would be missed by more than half of itself.
fn border(texts: &[Vec<u8>], validation: f64) -> Option<usize> {
    if texts.len() < FEW || validation == 0.0 {
        return None;
    }
    let total: usize = texts.iter().map(Vec::len).sum();
    let wanted = total as f64 * validation;
    let mut best: Option<(f64, usize)> = None;
    let mut held_out = total;
    for (d, text) in texts.iter().enumerate().take(texts.len() - 1) {
        held_out -= text.len();
        let off = (held_out as f64 - wanted).abs();
        if best.is_none_or(|(least, _)| off < least) {
            best = Some((off, d + 1));
        }
    }
    best.filter(|(off, _)| *off <= wanted / 2.0).map(|(_, border)| border)
}

/// The files below a folder in the order of their paths.
#[derive(Default)]
struct Found {
    files: Vec<PathBuf>,
    /// Links to nowhere, pipes, sockets: reading them would fail or never end.
    other: usize,
    /// Folders that were entered, by their real paths: a link may lead back into one.
    entered: HashSet<PathBuf>,
}

impl Found {
    /// All files below `folder`; hidden ones are left out.
    fn collect(&mut self, folder: &Path) -> Result<()> {
        let unreadable = |e| Error::io("read", folder, e);
        if !self.entered.insert(folder.canonicalize().map_err(unreadable)?) {
            return Ok(());
        }
        let entries = std::fs::read_dir(folder).map_err(unreadable)?;
        let mut paths =
            entries.map(|e| e.map(|e| e.path())).collect::<std::io::Result<Vec<_>>>().map_err(unreadable)?;
        paths.sort();
        for path in paths {
            if path.file_name().is_some_and(|n| n.to_string_lossy().starts_with('.')) {
                continue;
            }
            match std::fs::metadata(&path) {
                Ok(kind) if kind.is_dir() => self.collect(&path)?,
                Ok(kind) if kind.is_file() => self.files.push(path),
                _ => self.other += 1,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    fn share(validation: f64) -> Reading {
        Reading { validation, ..Reading::default() }
    }

    const ANY: Reading = Reading { validation: 0.1, any_bytes: true, utf8: false };

    #[test]
    fn a_file_is_cut_by_bytes_at_a_character() {
        let dir = place();
        let path = dir.path().join("a.txt");
        let text = "aäé€😀b".repeat(50);
        std::fs::write(&path, &text).unwrap();
        for held_out in [0.0, 0.1, 0.333, 0.5, 1.0] {
            let s = read(&path, share(held_out)).unwrap();
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
            read(&path, share(0.1)).unwrap_err().to_string()
        };
        assert!(said(b"").contains("an empty file"));
        assert!(said(b"abc\0def").contains("NUL byte at offset 3"));
        assert!(said(&[0xFF; 40]).contains("40 of 40 bytes are not UTF-8"));
        assert!(read(&path, ANY).is_ok(), "any bytes may be trained on when asked for");
        assert!(read(&dir.path().join("none"), share(0.1)).unwrap_err().to_string().contains("none"));
        std::fs::remove_file(&path).unwrap();
        assert!(read(dir.path(), share(0.1)).unwrap_err().to_string().contains("none of them text"));
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
        let s = read(dir.path(), share(0.25)).unwrap();
        assert_eq!((s.train.len(), s.validation.len(), s.skipped), (9, 3, 1));
        assert_eq!(s.train[0], b"text 1");
        std::fs::write(dir.path().join("train.txt"), "t").unwrap();
        std::fs::write(dir.path().join("val.txt"), "v").unwrap();
        let s = read(dir.path(), share(0.25)).unwrap();
        assert_eq!((s.train, s.validation, s.documents), (vec![b"t".to_vec()], vec![b"v".to_vec()], false));
    }

    #[test]
    fn any_bytes_are_cut_where_the_share_says() {
        let (train, held_out) = cut(vec![0x80; 100], 0.1);
        assert_eq!((train.len(), held_out.len()), (90, 10));
        let dir = place();
        std::fs::write(dir.path().join("a.bin"), [0, 1, 2]).unwrap();
        assert_eq!(read(dir.path(), ANY).unwrap().skipped, 0, "a folder takes any bytes when asked to, too");
    }

    #[test]
    fn one_bad_byte_passes_as_bytes_and_is_named_for_a_tokenizer() {
        let dir = place();
        let path = dir.path().join("latin.txt");
        std::fs::write(&path, b"caf\xE9 au lait, and more plain text after it").unwrap();
        assert!(read(&path, share(0.1)).is_ok());
        for place in [&path, dir.path()] {
            let error = read(place, Reading { utf8: true, ..share(0.1) }).unwrap_err();
            assert!(error.to_string().contains("latin.txt") && error.to_string().contains("offset 3"), "{error}");
        }
        std::fs::write(&path, b"\xFF\xFEa\0b\0").unwrap();
        let error = read(&path, share(0.1)).unwrap_err();
        assert!(error.to_string().contains("UTF-16") && error.hint().unwrap().contains("save it as UTF-8"));
    }

    #[test]
    #[cfg(unix)]
    fn links_and_pipes_neither_repeat_nor_hang() {
        let dir = place();
        std::fs::write(dir.path().join("a.txt"), "hello").unwrap();
        std::os::unix::fs::symlink(".", dir.path().join("loop")).unwrap();
        std::os::unix::fs::symlink("nowhere", dir.path().join("broken")).unwrap();
        nix::unistd::mkfifo(&dir.path().join("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let s = read(dir.path(), share(0.0)).unwrap();
        assert_eq!((s.train, s.skipped), (vec![b"hello".to_vec()], 2));
    }

    #[test]
    fn whole_documents_are_held_out_by_their_bytes() {
        let texts = |lengths: [usize; 12]| lengths.map(|n| vec![b'x'; n]);
        let mut lengths = [100; 12];
        assert_eq!(border(&texts(lengths), 0.25), Some(9));
        // A long document at the beginning: a tenth of 2,100 bytes is two of the short ones, not one.
        lengths[0] = 1000;
        assert_eq!(border(&texts(lengths), 0.1), Some(10));
        // A long one at the end is nearly everything: then each is cut.
        lengths[11] = 10_000;
        assert_eq!(border(&texts(lengths), 0.1), None);
        assert_eq!(border(&texts([100; 12]), 0.0), None);
        let dir = place();
        for (i, n) in lengths.into_iter().enumerate() {
            std::fs::write(dir.path().join(format!("{i:02}")), "x".repeat(n)).unwrap();
        }
        let s = read(dir.path(), share(0.1)).unwrap();
        assert_eq!((s.train.concat().len(), s.validation.concat().len()), (10_800, 1_200));
    }
}
