//! Ids of a text on the disk, mapped: a header, the ids as u16 or u32, the documents' starts as u64. Called by `encode`.
//!
//! ```text
//!   0  magic "gpt-ids\n"
//!   8  version u32, bytes of an id u32 (2 or 4)
//!  16  sha256 of the tokenizer.json
//!  48  ids u64, documents u64 (0: one plain text), bytes of text u64
//!  72  zero
//! 128  ids, zero up to a multiple of 8, where each document starts
//! ```
//!
//! All numbers are little-endian. A file gets its name when it is whole; `Writer` takes up one that was begun.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::numbers::Numbers;
use crate::error::{Error, Result};
use crate::files::atomic;

const MAGIC: &[u8; 8] = b"gpt-ids\n";
const VERSION: u32 = 1;
const HEADER: usize = 128;

/// Ids in the width that their tokenizer needs.
#[derive(Clone, Debug)]
pub enum Ids {
    Short(Numbers<u16>),
    Long(Numbers<u32>),
}

impl Ids {
    pub fn len(&self) -> usize {
        match self {
            Self::Short(ids) => ids.len(),
            Self::Long(ids) => ids.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The ids of a range.
    pub fn slice(&self, range: std::ops::Range<usize>) -> Vec<u32> {
        match self {
            Self::Short(ids) => ids[range].iter().map(|id| u32::from(*id)).collect(),
            Self::Long(ids) => ids[range].to_vec(),
        }
    }

    /// Asks the system to have a range ready soon.
    pub fn prefetch(&self, range: std::ops::Range<usize>) {
        match self {
            Self::Short(ids) => ids.prefetch(range),
            Self::Long(ids) => ids.prefetch(range),
        }
    }
}

/// What a file holds.
#[derive(Clone, Debug)]
pub struct Loaded {
    pub ids: Ids,
    /// Where each document's end-of-text token stands; none for one plain text.
    pub starts: Numbers<u64>,
    /// Bytes of the text that the ids stand for.
    pub text_bytes: u64,
}

/// Bytes that an id of a vocabulary of `size` takes.
pub fn width(size: usize) -> u32 {
    if size <= 1 << 16 { 2 } else { 4 }
}

struct Header {
    width: u32,
    tokenizer: [u8; 32],
    ids: u64,
    documents: u64,
    text_bytes: u64,
}

impl Header {
    fn to_bytes(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.width.to_le_bytes());
        bytes[16..48].copy_from_slice(&self.tokenizer);
        for (at, number) in [(48, self.ids), (56, self.documents), (64, self.text_bytes)] {
            bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    fn parse(bytes: &[u8; HEADER]) -> Result<Self, String> {
        let short = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        if &bytes[..8] != MAGIC {
            return Err("another kind of file".into());
        }
        if short(8) != VERSION {
            return Err(format!("version {} of them", short(8)));
        }
        let width = short(12);
        if width != 2 && width != 4 {
            return Err(format!("ids of {width} bytes"));
        }
        let tokenizer = bytes[16..48].try_into().expect("32 bytes");
        Ok(Self { width, tokenizer, ids: long(48), documents: long(56), text_bytes: long(64) })
    }

    /// Where the starts begin, if numbers as large as these can be at all.
    fn starts_at(&self) -> Option<u64> {
        let ids = self.ids.checked_mul(u64::from(self.width))?;
        ids.checked_add(HEADER as u64)?.checked_next_multiple_of(8)
    }

    fn file_size(&self) -> Option<u64> {
        self.starts_at()?.checked_add(self.documents.checked_mul(8)?)
    }
}

/// Maps the ids of a file that was made with this tokenizer.
pub fn open(path: &Path, tokenizer: &[u8; 32]) -> Result<Loaded> {
    let unreadable = |e| Error::io("read", path, e);
    let wrong = |found: String| Error::file(path, "token ids", found).with_hint("remove it; it is made again");
    let mut file = File::open(path).map_err(unreadable)?;
    let mut bytes = [0; HEADER];
    let size = file.metadata().map_err(unreadable)?.len();
    file.read_exact(&mut bytes).map_err(|_| wrong(format!("a file of {size} bytes")))?;
    let header = Header::parse(&bytes).map_err(&wrong)?;
    if &header.tokenizer != tokenizer {
        return Err(wrong("those of another tokenizer".into()));
    }
    let (Some(starts_at), true) = (header.starts_at(), header.file_size() == Some(size)) else {
        return Err(wrong(format!("{} ids in {size} bytes", header.ids)));
    };
    let (start, ids) = (HEADER as u64, header.ids as usize);
    let ids = match header.width {
        2 => Ids::Short(Numbers::open(path, start, ids)?),
        _ => Ids::Long(Numbers::open(path, start, ids)?),
    };
    let starts = Numbers::<u64>::open(path, starts_at, header.documents as usize)?;
    if !starts.is_sorted() || starts.last().is_some_and(|last| *last >= header.ids) {
        return Err(wrong("documents outside of it".into()));
    }
    Ok(Loaded { ids, starts, text_bytes: header.text_bytes })
}

/// How far a file was written: enough to go on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Mark {
    /// Bytes of the text that were encoded.
    pub text: u64,
    pub ids: u64,
    pub documents: u64,
    pub text_bytes: u64,
}

/// Writes ids as they come.
pub struct Writer {
    path: PathBuf,
    file: BufWriter<File>,
    starts: BufWriter<File>,
    width: u32,
    pub mark: Mark,
}

impl Writer {
    /// Goes on with what was begun for `path`, or begins.
    pub fn open(path: &Path, width: u32) -> Result<Self> {
        let mark = std::fs::read(part(path, "mark")).ok().and_then(|json| serde_json::from_slice::<Mark>(&json).ok());
        let mark = mark.unwrap_or_default();
        Self::at(path, width, mark).or_else(|_| Self::at(path, width, Mark::default()))
    }

    fn at(path: &Path, width: u32, mark: Mark) -> Result<Self> {
        let open = |path: PathBuf, len: u64| {
            let said = |e| Error::io("open", &path, e);
            let mut file = OpenOptions::new().write(true).create(true).truncate(false).open(&path).map_err(said)?;
            if mark != Mark::default() && file.metadata().map_err(said)?.len() < len {
                return Err(Error::file(&path, format!("{len} bytes"), "less"));
            }
            file.set_len(len).and_then(|()| file.seek(SeekFrom::Start(len))).map_err(said)?;
            Ok(BufWriter::with_capacity(1 << 20, file))
        };
        let file = open(part(path, "ids"), HEADER as u64 + mark.ids * u64::from(width))?;
        let starts = open(part(path, "starts"), 8 * mark.documents)?;
        Ok(Self { path: path.to_owned(), file, starts, width, mark })
    }

    fn failed(&self, e: std::io::Error) -> Error {
        Error::io("write", &self.path, e)
    }

    /// The next document begins here, with its end-of-text token.
    pub fn document(&mut self, end_of_text: u32) -> Result<()> {
        let start = self.mark.ids.to_le_bytes();
        self.starts.write_all(&start).map_err(|e| self.failed(e))?;
        self.mark.documents += 1;
        self.ids(&[end_of_text])
    }

    pub fn ids(&mut self, ids: &[u32]) -> Result<()> {
        let bytes: Vec<u8> = match self.width {
            2 => ids.iter().flat_map(|id| (*id as u16).to_le_bytes()).collect(),
            _ => ids.iter().flat_map(|id| id.to_le_bytes()).collect(),
        };
        self.mark.ids += ids.len() as u64;
        self.file.write_all(&bytes).map_err(|e| self.failed(e))
    }

    /// Writes down how far the text is done.
    pub fn save_mark(&mut self) -> Result<()> {
        let flushed = self.file.flush().and_then(|()| self.starts.flush());
        flushed.map_err(|e| self.failed(e))?;
        let json = serde_json::to_vec(&self.mark).expect("plain numbers");
        atomic::write(&part(&self.path, "mark"), json)
    }

    /// Puts the file together and gives it its name.
    pub fn finish(mut self, tokenizer: [u8; 32]) -> Result<()> {
        let Mark { ids, documents, text_bytes, .. } = self.mark;
        let header = Header { width: self.width, tokenizer, ids, documents, text_bytes };
        let size = HEADER as u64 + ids * u64::from(self.width);
        let padding = [0; 8];
        let padding = &padding[..(size.next_multiple_of(8) - size) as usize];
        let written = self.starts.flush().and_then(|()| {
            self.file.write_all(padding)?;
            std::io::copy(&mut File::open(part(&self.path, "starts"))?, &mut self.file)?;
            self.file.seek(SeekFrom::Start(0))?;
            self.file.write_all(&header.to_bytes())?;
            self.file.flush()?;
            self.file.get_ref().sync_all()?;
            std::fs::rename(part(&self.path, "ids"), &self.path)
        });
        written.map_err(|e| self.failed(e))?;
        atomic::sync_folder(self.path.parent().unwrap_or(Path::new(".")))?;
        atomic::remove(&part(&self.path, "starts"))?;
        atomic::remove(&part(&self.path, "mark"))
    }
}

/// A file that a file is made from.
fn part(path: &Path, what: &str) -> PathBuf {
    path.with_extension(format!("part.{what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKENIZER: [u8; 32] = [7; 32];

    fn ids(loaded: &Loaded) -> Vec<u32> {
        loaded.ids.slice(0..loaded.ids.len())
    }

    #[test]
    fn ids_and_documents_come_back_also_after_an_interruption() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.tok");
        for width in [2, 4] {
            let mut writer = Writer::open(&path, width).unwrap();
            writer.document(9).unwrap();
            writer.ids(&[1, 2, 3]).unwrap();
            (writer.mark.text, writer.mark.text_bytes) = (30, 30);
            writer.save_mark().unwrap();
            // Written, but not marked as done.
            writer.document(9).unwrap();
            writer.ids(&[8; 1000]).unwrap();
            drop(writer);
            let mut writer = Writer::open(&path, width).unwrap();
            assert_eq!((writer.mark.text, writer.mark.ids), (30, 4));
            writer.document(9).unwrap();
            writer.ids(&[4]).unwrap();
            writer.mark.text_bytes += 5;
            writer.finish(TOKENIZER).unwrap();
            let loaded = open(&path, &TOKENIZER).unwrap();
            assert_eq!((ids(&loaded), loaded.text_bytes), (vec![9, 1, 2, 3, 9, 4], 35));
            assert_eq!(&*loaded.starts, [0, 4]);
            assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left beside it");
            assert!(open(&path, &[8; 32]).unwrap_err().to_string().contains("another tokenizer"));
        }
    }

    #[test]
    fn damage_anywhere_is_an_error_or_harmless() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.tok");
        let mut writer = Writer::open(&path, 2).unwrap();
        for document in 0..5 {
            writer.document(9).unwrap();
            writer.ids(&[document; 7]).unwrap();
        }
        writer.finish(TOKENIZER).unwrap();
        let whole = std::fs::read(&path).unwrap();
        for len in 0..whole.len() {
            std::fs::write(&path, &whole[..len]).unwrap();
            assert!(open(&path, &TOKENIZER).is_err(), "{len} bytes");
        }
        for at in 0..HEADER {
            for value in [0, 1, 0x7F, 0xFF] {
                let mut bytes = whole.clone();
                bytes[at] = value;
                std::fs::write(&path, &bytes).unwrap();
                if let Ok(loaded) = open(&path, &TOKENIZER) {
                    assert_eq!(ids(&loaded).len(), 40);
                }
            }
        }
        for html in ["", "<html>", &"<html>".repeat(100)] {
            std::fs::write(&path, html).unwrap();
            assert!(open(&path, &TOKENIZER).is_err());
        }
    }
}
