//! The text of files, folders and archives, and its two splits. Called by `data::open`.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::archive::{self, Meter};
use super::encoding;
use super::format::{self, Documents, Format, Note};
use super::numbers::Numbers;
use super::place::Place;
use super::progress::Progress;
use super::store::{Begun, Notes, SMALL, Store, Text};
use super::{LineEndings, Reading};
use crate::error::{Error, Result};
use crate::files::atomic;

/// The documents of the two splits.
#[derive(Debug)]
pub struct Splits {
    pub train: Text,
    pub validation: Text,
    /// Whether the source has documents; one plain text is none.
    pub documents: bool,
    pub notes: Notes,
}

/// Files that are read one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inputs {
    pub files: Vec<Input>,
    /// Whether files that are not text are left out instead of refused.
    pub lenient: bool,
    /// Links to nowhere, pipes and the like that were passed over.
    pub skipped: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Input {
    pub path: PathBuf,
    /// The one member of an archive that is meant; all of them if none is named.
    pub member: Option<String>,
}

impl Inputs {
    pub fn file(path: &Path) -> Self {
        Self { files: vec![Input { path: path.to_owned(), member: None }], lenient: false, skipped: 0 }
    }
}

/// What is read of a source, before anything is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// To be cut in two.
    Whole(Inputs),
    /// Already cut: training and held-out text.
    Cut(Inputs, Inputs),
}

/// The files of a path: itself, the two splits of a folder that has files named so, or all files below a folder.
pub fn source(path: &Path) -> Result<Source> {
    let kind = std::fs::metadata(path).map_err(|e| Error::io("read", path, e))?;
    if kind.is_file() {
        return Ok(Source::Whole(Inputs::file(path)));
    }
    if !kind.is_dir() {
        return Err(Error::file(path, "a file or a folder", "a device or a pipe")
            .with_hint("a run reads its text again when it is resumed: write it to a file first"));
    }
    let mut found = Found::default();
    found.collect(path)?;
    let top = |names: &[&str]| {
        let is = |file: &&PathBuf| {
            let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
            file.parent() == Some(path) && names.contains(&name.split('.').next().unwrap_or_default())
        };
        found.files.iter().find(is)
    };
    if let (Some(train), Some(held_out)) = (top(&["train"]), top(&["val", "validation", "valid"])) {
        return Ok(Source::Cut(Inputs::file(train), Inputs::file(held_out)));
    }
    let files: Vec<Input> = found.files.into_iter().map(|path| Input { path, member: None }).collect();
    if files.is_empty() {
        return Err(Error::file(path, "a folder with text files", format!("{} files, none of them text", found.other)));
    }
    Ok(Source::Whole(Inputs { files, lenient: true, skipped: found.other }))
}

/// A share of a large text is held out up to this many bytes: more would mostly take longer to validate on.
const MOST_HELD_OUT: usize = 1 << 20;

/// Reads a source and cuts off the held-out share, if it is not cut already.
pub fn read(source: &Source, reading: &Reading, place: &Place, progress: &mut dyn Progress) -> Result<Splits> {
    let inputs = match source {
        Source::Cut(train, held_out) => {
            let (train, documents, mut notes) = text(train, reading, place, progress)?;
            let (validation, _, more) = text(held_out, reading, place, progress)?;
            more.into_iter().for_each(|(note, count)| *notes.entry(note).or_default() += count);
            return Ok(Splits { train, validation, documents, notes });
        }
        Source::Whole(inputs) => inputs,
    };
    let (text, documents, notes) = text(inputs, reading, place, progress)?;
    let share = reading.validation.min(MOST_HELD_OUT as f64 / text.bytes.len() as f64);
    if share < reading.validation {
        progress.note("the last MiB is held out: a larger part would only take longer to validate on".to_owned());
    }
    let (train, validation) = match documents {
        false => cut(&text, share),
        true => match border(&text, share) {
            Some(border) => (text.documents(0..border), text.documents(border..text.ends.len())),
            None => cut_each(&text, share),
        },
    };
    Ok(Splits { train, validation, documents, notes })
}

/// The text of all files, whether it has documents, and what was left out.
fn text(inputs: &Inputs, reading: &Reading, place: &Place, progress: &mut dyn Progress) -> Result<(Text, bool, Notes)> {
    let single = match &inputs.files[..] {
        [one] if !inputs.lenient => Some(one),
        _ => None,
    };
    let plain = single.filter(|one| is_plain(&one.path) || one.member.is_some());
    let documents = plain.is_none() || !reading.separator.is_empty();
    if let Some(one) = plain.filter(|one| one.member.is_none() && !documents)
        && let Some(text) = as_it_is(&one.path, reading, progress)?
    {
        return Ok((text, false, Notes::new()));
    }
    let (text, mut notes) = prepared(inputs, reading, place, progress)?;
    if inputs.skipped > 0 {
        *notes.entry(Note::Skipped).or_default() += inputs.skipped;
    }
    if text.bytes.is_empty() {
        let (path, skipped) = (&inputs.files[0].path, notes.get(&Note::Skipped).copied().unwrap_or(0));
        let (expected, found) = match inputs.lenient {
            true => ("a folder with text files", format!("{skipped} files, none of them text")),
            false => ("text", "an empty file".to_owned()),
        };
        return Err(Error::file(if inputs.lenient { path.parent().unwrap_or(path) } else { path }, expected, found));
    }
    Ok((text, documents, notes))
}

/// Whether a file is neither an archive nor in another format than text.
fn is_plain(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    !archive::is_packed(&name) && Format::of(&name) == Format::Plain
}

/// A file that is its own text: UTF-8 (or any bytes, if those are asked for) of which nothing is taken away.
fn as_it_is(path: &Path, reading: &Reading, progress: &mut dyn Progress) -> Result<Option<Text>> {
    if reading.cleaning != super::Cleaning::None {
        return Ok(None);
    }
    let unreadable = |e| Error::io("read", path, e);
    let len = std::fs::metadata(path).map_err(unreadable)?.len();
    let text = |bytes: Numbers<u8>| Ok(Some(Text::new(bytes, vec![len])));
    let scan = |bytes: &mut dyn std::io::Read, progress: &mut dyn Progress| {
        let mut text = encoding::Text::new(bytes, reading.invalid(), LineEndings::Keep);
        let (mut read, mut returns) = (0, false);
        loop {
            match text.block() {
                // Whatever it is, the slower way says it better.
                Err(_) => return Ok(false),
                Ok([]) => break,
                Ok(block) => {
                    returns |= reading.line_endings == LineEndings::Lf && block.contains(&b'\r');
                    read += block.len() as u64;
                }
            }
            progress.at(read)?;
        }
        Ok::<_, Error>(read == len && text.invalid_bytes == 0 && !returns)
    };
    if len == 0 {
        return Ok(None);
    }
    if len <= SMALL as u64 {
        // In memory a text stays what it is, even if somebody edits the file meanwhile.
        let bytes = std::fs::read(path).map_err(unreadable)?;
        let fits = bytes.len() as u64 == len && scan(&mut &bytes[..], progress)?;
        return if fits { text(bytes.into()) } else { Ok(None) };
    }
    progress.begin(&format!("reading {}", path.display()), Some(len));
    let mut file = std::fs::File::open(path).map_err(unreadable)?;
    let fits = scan(&mut file, progress);
    progress.end();
    if fits? { text(Numbers::open(path, 0, len as usize)?) } else { Ok(None) }
}

/// All documents of all files as one text, from the cache if it is there.
fn prepared(inputs: &Inputs, reading: &Reading, place: &Place, progress: &mut dyn Progress) -> Result<(Text, Notes)> {
    let (key, total) = key(inputs, reading)?;
    let (first, mut store) = match Store::begin(place, key, reading.deduplicate, progress)? {
        Begun::Whole(text, notes) => return Ok((text, notes)),
        Begun::At(first, store) => (first, store),
    };
    let what = match &inputs.files[..] {
        [one] => format!("reading {}", one.path.display()),
        files => format!("reading {} files", files.len()),
    };
    progress.begin(&what, Some(total));
    let mut read = 0;
    for (number, input) in inputs.files.iter().enumerate() {
        let meter = Meter::default();
        if number >= first {
            let mut watched = Watched { store: &mut store, progress: &mut *progress, read, meter: &meter };
            let result = file(input, inputs.lenient, reading, &meter, &mut watched);
            if let Err(e) = result.and_then(|()| store.file_is_whole(number + 1)) {
                progress.end();
                return Err(e);
            }
        }
        read += std::fs::metadata(&input.path).map_or(0, |m| m.len());
    }
    progress.end();
    store.finish()
}

/// The documents of one file or of the members of an archive.
fn file(input: &Input, lenient: bool, reading: &Reading, meter: &Meter, to: &mut Watched) -> Result<()> {
    let path = &input.path;
    let packed = archive::is_packed(&path.file_name().unwrap_or_default().to_string_lossy());
    let mut found = false;
    archive::visit(path, meter, &mut |member| {
        if input.member.as_ref().is_some_and(|wanted| !is_member(member.name, wanted)) {
            return Ok(());
        }
        found = true;
        if !member.is_file && Format::of(member.name) == Format::Parquet {
            to.note(Note::Skipped, 1);
            return Ok(());
        }
        match format::read(path, member.name, member.reader, reading, to)? {
            None => Ok(()),
            Some(_) if input.member.is_none() && (lenient || packed) => {
                to.store.abandon()?;
                to.note(Note::Skipped, 1);
                Ok(())
            }
            Some(e) => Err(e),
        }
    })?;
    match &input.member {
        Some(wanted) if !found => Err(Error::file(path, format!("the member {wanted}"), "an archive without it")),
        _ => Ok(()),
    }
}

/// Whether a member's name is the wanted one, in whatever folder of the archive.
fn is_member(name: &str, wanted: &str) -> bool {
    name == wanted || name.ends_with(&format!("/{wanted}"))
}

/// Shows how far the files are read while documents go by.
struct Watched<'a, 'b> {
    store: &'a mut Store<'b>,
    progress: &'a mut dyn Progress,
    /// Bytes of the files before this one.
    read: u64,
    meter: &'a Meter,
}

impl Documents for Watched<'_, '_> {
    fn text(&mut self, piece: &[u8]) -> Result<()> {
        self.progress.at(self.read + self.meter.read())?;
        self.store.text(piece)
    }

    fn end(&mut self) -> Result<()> {
        self.store.end()
    }

    fn note(&mut self, what: Note, count: u64) {
        self.store.note(what, count);
    }
}

/// A hash of what is read and how, and the bytes of all files.
fn key(inputs: &Inputs, reading: &Reading) -> Result<(String, u64)> {
    let mut hash = Sha256::new();
    let mut total = 0;
    hash.update(b"text 1\0");
    hash.update(serde_json::to_vec(&Reading { validation: 0.0, ..reading.clone() }).expect("plain values"));
    for input in &inputs.files {
        let unreadable = |e| Error::io("read", &input.path, e);
        let path = input.path.canonicalize().map_err(unreadable)?;
        let data = std::fs::metadata(&path).map_err(unreadable)?;
        let changed = data.modified().map_err(unreadable)?.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        total += data.len();
        let fields = (path.to_string_lossy(), &input.member, data.len(), changed.as_nanos().to_string());
        hash.update(serde_json::to_vec(&fields).expect("plain values"));
    }
    Ok((atomic::hex(&hash.finalize()), total))
}

/// The first part and the held-out rest of one plain text, cut where a character begins.
fn cut(text: &Text, validation: f64) -> (Text, Text) {
    let at = cut_at(&text.bytes, validation);
    let part = |range: std::ops::Range<usize>| {
        let len = range.len() as u64;
        Text::new(text.bytes.part(range), if len > 0 { vec![len] } else { Vec::new() })
    };
    (part(0..at), part(at..text.bytes.len()))
}

fn cut_at(text: &[u8], validation: f64) -> usize {
    let at = ((text.len() as f64) * (1.0 - validation)).round() as usize;
    // A continuation byte of UTF-8 is 10xxxxxx, and a character has three at most; with more this is no text.
    let begins = |at: &usize| text.get(*at).is_none_or(|byte| byte & 0xC0 != 0x80);
    (at..=at + 3).find(begins).unwrap_or(at).min(text.len())
}

/// Below this many documents each is cut in two; from here on whole documents are held out.
const FEW: usize = 10;

/// The first document that is held out, so that the share is met as nearly as documents allow; nothing where they are
/// few or so unlike in length that the share would be missed by more than half of itself.
fn border(text: &Text, validation: f64) -> Option<usize> {
    let documents = text.ends.len();
    if validation == 0.0 {
        return Some(documents);
    }
    if documents < FEW {
        return None;
    }
    let total = text.bytes.len() as u64;
    let wanted = total as f64 * validation;
    let off = |d: usize| ((total - (text.ends[d - 1] - text.base)) as f64 - wanted).abs();
    // The ends increase, so the share held out falls: the best border is on either side of where it meets the share.
    let meets = text.ends.partition_point(|end| (total - (end - text.base)) as f64 > wanted);
    let best = [meets, meets + 1].into_iter().filter(|d| (1..documents).contains(d));
    best.min_by(|a, b| off(*a).total_cmp(&off(*b))).filter(|d| off(*d) <= wanted / 2.0)
}

/// Every document cut in two; of a text that is too long to be copied only the one in which the share is met.
fn cut_each(text: &Text, validation: f64) -> (Text, Text) {
    if text.bytes.len() > SMALL {
        let at = cut_at(&text.bytes, validation);
        let first = text.ends.partition_point(|end| (end - text.base) as usize <= at);
        let mut before: Vec<u64> = text.ends[..first].iter().map(|end| end - text.base).collect();
        if before.last() != Some(&(at as u64)) && at > 0 {
            before.push(at as u64);
        }
        let after: Vec<u64> = text.ends[first..].iter().map(|end| end - text.base - at as u64).collect();
        let (train, held_out) = (text.bytes.part(0..at), text.bytes.part(at..text.bytes.len()));
        return (Text::new(train, before), Text::new(held_out, after));
    }
    let mut parts = [(Vec::new(), Vec::new()), (Vec::new(), Vec::new())];
    for document in (0..text.ends.len()).map(|d| &text.bytes[text.document(d)]) {
        let (train, held_out) = document.split_at(cut_at(document, validation));
        for ((bytes, ends), piece) in parts.iter_mut().zip([train, held_out]) {
            if !piece.is_empty() {
                bytes.extend_from_slice(piece);
                ends.push(bytes.len() as u64);
            }
        }
    }
    let [train, held_out] = parts.map(|(bytes, ends)| Text::new(bytes, ends));
    (train, held_out)
}

/// The files below a folder in the order of their paths.
#[derive(Default)]
struct Found {
    files: Vec<PathBuf>,
    /// Links to nowhere, pipes, sockets: reading them would fail or never end.
    other: u64,
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
    use crate::data::encoding::Invalid;
    use crate::data::progress::Told;

    fn place() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    fn share(validation: f64) -> Reading {
        Reading { validation, field: "text".into(), ..Reading::default() }
    }

    fn any() -> Reading {
        Reading { any_bytes: true, ..share(0.1) }
    }

    struct Documents {
        train: Vec<Vec<u8>>,
        validation: Vec<Vec<u8>>,
        documents: bool,
        notes: Notes,
    }

    fn documents(text: &Text) -> Vec<Vec<u8>> {
        (0..text.ends.len()).map(|d| text.bytes[text.document(d)].to_vec()).collect()
    }

    fn read(path: &Path, reading: &Reading) -> Result<Documents> {
        let cache = place();
        let splits = super::read(&source(path)?, reading, &Place::new(cache.path()), &mut Told::default())?;
        let Splits { train, validation, documents: separate, notes } = splits;
        Ok(Documents { train: documents(&train), validation: documents(&validation), documents: separate, notes })
    }

    fn skipped(of: &Documents) -> u64 {
        of.notes.get(&Note::Skipped).copied().unwrap_or(0)
    }

    #[test]
    fn a_file_is_cut_by_bytes_at_a_character() {
        let dir = place();
        let path = dir.path().join("a.txt");
        let text = "aäé€😀b".repeat(50);
        std::fs::write(&path, &text).unwrap();
        for held_out in [0.0, 0.1, 0.333, 0.5, 1.0] {
            let s = read(&path, &share(held_out)).unwrap();
            assert_eq!([s.train.concat(), s.validation.concat()].concat(), text.as_bytes());
            assert!(std::str::from_utf8(&s.train.concat()).is_ok());
        }
    }

    #[test]
    fn what_is_no_text_is_refused_with_the_place_and_the_way_out() {
        let dir = place();
        let path = dir.path().join("x");
        let said = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            read(&path, &share(0.1)).err().unwrap().to_string()
        };
        assert!(said(b"").contains("an empty file"));
        assert!(said(b"abc\0def").contains("NUL byte at offset 3"));
        assert!(said(&[0xFF; 40]).contains("40 of 40 bytes are not UTF-8"));
        assert!(read(&path, &any()).is_ok(), "any bytes may be trained on when asked for");
        assert!(read(&dir.path().join("none"), &share(0.1)).err().unwrap().to_string().contains("none"));
        std::fs::remove_file(&path).unwrap();
        assert!(read(dir.path(), &share(0.1)).err().unwrap().to_string().contains("none of them text"));
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
        let s = read(dir.path(), &share(0.25)).unwrap();
        assert_eq!((s.train.len(), s.validation.len(), skipped(&s)), (9, 3, 1));
        assert_eq!(s.train[0], b"text 1");
        std::fs::write(dir.path().join("train.txt"), "t").unwrap();
        std::fs::write(dir.path().join("val.txt"), "v").unwrap();
        let s = read(dir.path(), &share(0.25)).unwrap();
        assert_eq!((s.train, s.validation, s.documents), (vec![b"t".to_vec()], vec![b"v".to_vec()], false));
    }

    #[test]
    fn any_bytes_are_cut_where_the_share_says() {
        assert_eq!(cut_at(&[0x80; 100], 0.1), 90);
        let dir = place();
        std::fs::write(dir.path().join("a.bin"), [0, 1, 2]).unwrap();
        assert_eq!(skipped(&read(dir.path(), &any()).unwrap()), 0, "a folder takes any bytes when asked to, too");
    }

    #[test]
    fn bad_bytes_are_replaced_and_counted_or_refused_with_their_place() {
        let dir = place();
        let path = dir.path().join("latin.txt");
        std::fs::write(&path, b"caf\xE9 au lait, and more plain text after it").unwrap();
        for place in [&path, dir.path()] {
            let s = read(place, &share(0.0)).unwrap();
            assert_eq!(s.train.concat(), "caf\u{FFFD} au lait, and more plain text after it".as_bytes());
            assert_eq!(s.notes.get(&Note::Replaced), Some(&1));
            let error = read(place, &Reading { invalid: Invalid::Refuse, ..share(0.1) }).err().unwrap();
            assert!(error.to_string().contains("latin.txt") && error.to_string().contains("offset 3"), "{error}");
        }
        assert!(read(&path, &any()).unwrap().train.concat().starts_with(b"caf\xE9"));
        std::fs::write(&path, b"\xFF\xFEa\0b\0").unwrap();
        assert_eq!(read(&path, &share(0.0)).unwrap().train, [b"ab"]);
    }

    #[test]
    #[cfg(unix)]
    fn links_and_pipes_neither_repeat_nor_hang() {
        let dir = place();
        std::fs::write(dir.path().join("a.txt"), "hello").unwrap();
        std::os::unix::fs::symlink(".", dir.path().join("loop")).unwrap();
        std::os::unix::fs::symlink("nowhere", dir.path().join("broken")).unwrap();
        nix::unistd::mkfifo(&dir.path().join("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let s = read(dir.path(), &share(0.0)).unwrap();
        assert_eq!((skipped(&s), s.train), (2, vec![b"hello".to_vec()]));
        let error = read(&dir.path().join("pipe"), &any()).err().unwrap();
        assert!(error.to_string().contains("a device or a pipe"), "{error}");
    }

    #[test]
    fn whole_documents_are_held_out_by_their_bytes() {
        let texts = |lengths: [usize; 12]| {
            let ends: Vec<u64> = (1..=12).map(|n| lengths[..n].iter().sum::<usize>() as u64).collect();
            Text::new(vec![b'x'; lengths.iter().sum()], ends)
        };
        let mut lengths = [100; 12];
        assert_eq!(border(&texts(lengths), 0.25), Some(9));
        // A long document at the beginning: a tenth of 2,100 bytes is two of the short ones, not one.
        lengths[0] = 1000;
        assert_eq!(border(&texts(lengths), 0.1), Some(10));
        // A long one at the end is nearly everything: then each is cut.
        lengths[11] = 10_000;
        assert_eq!(border(&texts(lengths), 0.1), None);
        assert_eq!(border(&texts([100; 12]), 0.0), Some(12));
        let dir = place();
        for (i, n) in lengths.into_iter().enumerate() {
            std::fs::write(dir.path().join(format!("{i:02}")), "x".repeat(n)).unwrap();
        }
        let s = read(dir.path(), &share(0.1)).unwrap();
        assert_eq!((s.train.concat().len(), s.validation.concat().len()), (10_800, 1_200));
    }
}
