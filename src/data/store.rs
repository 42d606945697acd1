//! Documents on their way into one text: kept in memory while they are few, else written to the cache, and taken up again
//! after an interruption. Called by `text`.
//!
//! ```text
//! <cache>/texts/<key>/{text, ends, info.json}      made under <key>.part/ and renamed when whole
//! ```
//!
//! The key is a hash of the files (path, size, time of change) and of how they were read, so that a text is prepared once.

use std::collections::{BTreeMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::format::{Documents, Note};
use super::numbers::Numbers;
use super::place::{Claim, Place};
use super::progress::Progress;
use crate::error::{Error, Result};
use crate::files::atomic;

/// A text up to this long stays in memory, and is read anew each time.
pub const SMALL: usize = 1 << 26;

/// A text and the ends of its documents in it.
#[derive(Clone, Debug)]
pub struct Text {
    pub bytes: Numbers<u8>,
    /// Counted from `base`.
    pub ends: Numbers<u64>,
    pub base: u64,
}

impl Text {
    pub fn new(bytes: impl Into<Numbers<u8>>, ends: impl Into<Numbers<u64>>) -> Self {
        Self { bytes: bytes.into(), ends: ends.into(), base: 0 }
    }

    /// A hash of the bytes and of where documents end: two texts of which it is equal are the same text, whatever file, format
    /// or cache they come from. Reads all of it, interruptibly.
    pub fn content(&self, progress: &mut dyn Progress) -> Result<[u8; 32]> {
        let unreadable = |e| Error::failed(format!("reading the text: {e}"));
        let mut hash = Sha256::new();
        let mut reader = self.bytes.reader()?;
        let mut block = vec![0; 1 << 20];
        loop {
            let n = reader.read(&mut block).map_err(unreadable)?;
            if n == 0 {
                break;
            }
            hash.update(&block[..n]);
            progress.at(0)?;
        }
        self.ends.iter().for_each(|end| hash.update((end - self.base).to_le_bytes()));
        Ok(hash.finalize().into())
    }

    /// Documents `range`, which are next to each other.
    pub fn documents(&self, range: std::ops::Range<usize>) -> Self {
        let end = |d: usize| if d == 0 { self.base } else { self.ends[d - 1] };
        let (start, stop) = (end(range.start), end(range.end));
        let bytes = self.bytes.part((start - self.base) as usize..(stop - self.base) as usize);
        Self { bytes, ends: self.ends.part(range), base: start }
    }

    /// Document `d`, from its first byte to behind its last.
    pub fn document(&self, d: usize) -> std::ops::Range<usize> {
        let start = if d == 0 { self.base } else { self.ends[d - 1] };
        (start - self.base) as usize..(self.ends[d] - self.base) as usize
    }
}

/// What was left out or replaced, by how often.
pub type Notes = BTreeMap<Note, u64>;

/// What is known of a text besides itself; `info.json`.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
struct Info {
    bytes: u64,
    documents: u64,
    /// Files that were read whole.
    files: usize,
    notes: Notes,
}

const INFO: &str = "info.json";

/// Collects documents.
pub struct Store<'a> {
    place: &'a Place,
    key: String,
    deduplicate: bool,
    seen: HashSet<[u8; 16]>,
    memory: (Vec<u8>, Vec<u64>),
    spilled: Option<Spilled>,
    /// Bytes so far, and where the document that is being read begins.
    len: u64,
    start: u64,
    hash: Sha256,
    notes: Notes,
    small: usize,
}

/// A text on the disk.
struct Spilled {
    folder: PathBuf,
    text: BufWriter<File>,
    ends: BufWriter<File>,
    documents: u64,
    _claim: Claim,
}

/// Where to begin: at the text that is there, or at that file of the input.
pub enum Begun<'a> {
    Whole(Text, Notes),
    At(usize, Box<Store<'a>>),
}

impl<'a> Store<'a> {
    /// Looks for the text of that key, whole or begun.
    pub fn begin(place: &'a Place, key: String, deduplicate: bool, progress: &mut dyn Progress) -> Result<Begun<'a>> {
        let mut store = Self {
            place,
            key,
            deduplicate,
            seen: HashSet::new(),
            memory: (Vec::new(), Vec::new()),
            spilled: None,
            len: 0,
            start: 0,
            hash: Sha256::new(),
            notes: Notes::new(),
            small: SMALL,
        };
        if let Some((text, notes)) = store.whole()? {
            return Ok(Begun::Whole(text, notes));
        }
        let part = store.part();
        if !part.join(INFO).is_file() || deduplicate {
            return Ok(Begun::At(0, Box::new(store)));
        }
        let claim = Claim::take(&part, progress)?;
        // The one that was waited for may have finished.
        if let Some((text, notes)) = store.whole()? {
            return Ok(Begun::Whole(text, notes));
        }
        match store.resume(claim) {
            Ok(files) => Ok(Begun::At(files, Box::new(store))),
            // What cannot be taken up is made anew.
            Err(_) => {
                Ok(Begun::At(0, Box::new(Self { spilled: None, notes: Notes::new(), len: 0, start: 0, ..store })))
            }
        }
    }

    fn folder(&self) -> PathBuf {
        self.place.path().join("texts").join(&self.key)
    }

    fn part(&self) -> PathBuf {
        self.place.path().join("texts").join(format!("{}.part", self.key))
    }

    fn whole(&self) -> Result<Option<(Text, Notes)>> {
        let folder = self.folder();
        let Some(info) = read_info(&folder) else { return Ok(None) };
        let text = Numbers::open(&folder.join("text"), 0, info.bytes as usize);
        let ends = Numbers::<u64>::open(&folder.join("ends"), 0, info.documents as usize);
        let (Ok(text), Ok(ends)) = (text, ends) else { return Ok(None) };
        // The last end says whether these files belong together.
        if ends.last().copied().unwrap_or(0) != info.bytes {
            return Ok(None);
        }
        Ok(Some((Text::new(text, ends), info.notes)))
    }

    /// Opens what was written up to the last whole file of the input, and cuts off what came after.
    fn resume(&mut self, claim: Claim) -> Result<usize> {
        let folder = self.part();
        let info = read_info(&folder).ok_or_else(|| Error::file(&folder, "a text that was begun", "something else"))?;
        let mut spilled = Spilled::open(folder, claim, false)?;
        spilled.cut(info.bytes, info.documents)?;
        self.spilled = Some(spilled);
        (self.len, self.start) = (info.bytes, info.bytes);
        self.notes = info.notes;
        Ok(info.files)
    }

    /// `files` of the input are whole: if the text is on the disk, that is written down for the next time.
    pub fn file_is_whole(&mut self, files: usize) -> Result<()> {
        let Some(spilled) = &mut self.spilled else { return Ok(()) };
        spilled.flush()?;
        let info = Info { bytes: self.len, documents: spilled.documents, files, notes: self.notes.clone() };
        atomic::write(&spilled.folder.join(INFO), info_json(&info))
    }

    /// The text, in memory or under its name in the cache.
    pub fn finish(mut self) -> Result<(Text, Notes)> {
        let Some(mut spilled) = self.spilled.take() else {
            return Ok((Text::new(self.memory.0, self.memory.1), self.notes));
        };
        spilled.flush()?;
        for file in [spilled.text.get_ref(), spilled.ends.get_ref()] {
            file.sync_all().map_err(|e| Error::io("write", &spilled.folder, e))?;
        }
        let info = Info { bytes: self.len, documents: spilled.documents, files: 0, notes: self.notes.clone() };
        atomic::write(&spilled.folder.join(INFO), info_json(&info))?;
        let folder = self.folder();
        atomic::remove(&folder)?;
        std::fs::rename(&spilled.folder, &folder).map_err(|e| Error::io("rename", &spilled.folder, e))?;
        atomic::sync_folder(folder.parent().unwrap_or(Path::new(".")))?;
        self.whole()?.ok_or_else(|| Error::file(&folder, "the text that was just written", "another"))
    }

    /// From now on everything goes to the disk.
    fn spill(&mut self) -> Result<()> {
        self.place.folder("texts")?;
        let folder = self.part();
        let claim = Claim::take(&folder, &mut super::progress::Told::default())?;
        let mut spilled = Spilled::open(folder, claim, true)?;
        let (text, ends) = std::mem::take(&mut self.memory);
        spilled.write(&text)?;
        ends.into_iter().try_for_each(|end| spilled.end(end))?;
        self.spilled = Some(spilled);
        Ok(())
    }

    /// Forgets the document that is being read.
    pub fn abandon(&mut self) -> Result<()> {
        self.hash = Sha256::new();
        self.take_back()
    }

    /// Takes back the document that is being read.
    fn take_back(&mut self) -> Result<()> {
        self.len = self.start;
        match &mut self.spilled {
            None => self.memory.0.truncate(self.start as usize),
            Some(spilled) => spilled.cut(self.start, spilled.documents)?,
        }
        Ok(())
    }
}

impl Documents for Store<'_> {
    fn text(&mut self, piece: &[u8]) -> Result<()> {
        if self.deduplicate {
            self.hash.update(piece);
        }
        self.len += piece.len() as u64;
        if self.spilled.is_none() && self.len > self.small as u64 {
            self.spill()?;
        }
        match &mut self.spilled {
            None => self.memory.0.extend_from_slice(piece),
            Some(spilled) => spilled.write(piece)?,
        }
        Ok(())
    }

    fn end(&mut self) -> Result<()> {
        if self.len == self.start {
            return Ok(());
        }
        if self.deduplicate {
            let hash = std::mem::take(&mut self.hash).finalize();
            let hash: [u8; 16] = hash[..16].try_into().expect("a sha256 has 32 bytes");
            if !self.seen.insert(hash) {
                self.note(Note::Duplicates, 1);
                return self.take_back();
            }
        }
        self.start = self.len;
        match &mut self.spilled {
            None => self.memory.1.push(self.len),
            Some(spilled) => spilled.end(self.len)?,
        }
        Ok(())
    }

    fn note(&mut self, what: Note, count: u64) {
        *self.notes.entry(what).or_default() += count;
    }
}

impl Spilled {
    fn open(folder: PathBuf, claim: Claim, anew: bool) -> Result<Self> {
        if anew {
            atomic::remove(&folder)?;
            atomic::create_folder(&folder)?;
        }
        let file = |name: &str| {
            let path = folder.join(name);
            let open = OpenOptions::new().write(true).create(true).truncate(false).open(&path);
            Ok::<_, Error>(BufWriter::with_capacity(1 << 20, open.map_err(|e| Error::io("open", &path, e))?))
        };
        let (text, ends) = (file("text")?, file("ends")?);
        Ok(Self { folder, text, ends, documents: 0, _claim: claim })
    }

    fn write(&mut self, piece: &[u8]) -> Result<()> {
        self.text.write_all(piece).map_err(|e| Error::io("write", self.folder.join("text"), e))
    }

    fn end(&mut self, end: u64) -> Result<()> {
        self.documents += 1;
        self.ends.write_all(&end.to_le_bytes()).map_err(|e| Error::io("write", self.folder.join("ends"), e))
    }

    fn flush(&mut self) -> Result<()> {
        self.text.flush().and_then(|()| self.ends.flush()).map_err(|e| Error::io("write", &self.folder, e))
    }

    /// Goes back to so many bytes and documents; refused if there are less.
    fn cut(&mut self, bytes: u64, documents: u64) -> Result<()> {
        self.flush()?;
        for (file, len) in [(self.text.get_mut(), bytes), (self.ends.get_mut(), 8 * documents)] {
            let said = |e| Error::io("cut", &self.folder, e);
            if file.metadata().map_err(said)?.len() < len {
                return Err(Error::file(&self.folder, format!("{len} bytes"), "less"));
            }
            file.set_len(len).and_then(|()| file.seek(SeekFrom::Start(len))).map_err(said)?;
        }
        self.documents = documents;
        Ok(())
    }
}

fn read_info(folder: &Path) -> Option<Info> {
    serde_json::from_slice(&std::fs::read(folder.join(INFO)).ok()?).ok()
}

fn info_json(info: &Info) -> Vec<u8> {
    serde_json::to_vec(info).expect("plain numbers")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::progress::Told;

    fn begin(place: &Place, deduplicate: bool, small: usize) -> (usize, Store<'_>) {
        match Store::begin(place, "key".into(), deduplicate, &mut Told::default()).unwrap() {
            Begun::At(files, store) => (files, Store { small, ..*store }),
            Begun::Whole(..) => panic!("nothing is there yet"),
        }
    }

    fn put(store: &mut Store, document: &str) {
        // In pieces, as files are read.
        document.as_bytes().chunks(3).for_each(|piece| store.text(piece).unwrap());
        store.end().unwrap();
    }

    fn texts(text: &Text) -> Vec<String> {
        let document = |d| String::from_utf8(text.bytes[text.document(d)].to_vec()).unwrap();
        (0..text.ends.len()).map(document).collect()
    }

    #[test]
    fn memory_and_disk_hold_the_same_documents() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place::new(dir.path());
        for deduplicate in [false, true] {
            let all: &[&str] = &["one", "", "second", "one", "third", "second"];
            let kept: &[&str] =
                if deduplicate { &["one", "second", "third"] } else { &["one", "second", "one", "third", "second"] };
            for small in [0, 5, SMALL] {
                let (_, mut store) = begin(&place, deduplicate, small);
                all.iter().for_each(|d| put(&mut store, d));
                let (text, notes) = store.finish().unwrap();
                assert_eq!(texts(&text), kept);
                assert_eq!(notes.get(&Note::Duplicates).copied(), deduplicate.then_some(2));
                let part = text.documents(1..3);
                assert_eq!(texts(&part), kept[1..3]);
                if small < SMALL {
                    let Begun::Whole(again, told) =
                        Store::begin(&place, "key".into(), deduplicate, &mut Told::default()).unwrap()
                    else {
                        panic!("it was prepared")
                    };
                    assert_eq!((texts(&again), told), (texts(&text), notes));
                    atomic::remove(&dir.path().join("texts/key")).unwrap();
                }
            }
        }
    }

    #[test]
    fn what_was_begun_is_taken_up_after_the_last_whole_file() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place::new(dir.path());
        let (_, mut store) = begin(&place, false, 0);
        put(&mut store, "first");
        store.note(Note::Replaced, 2);
        store.file_is_whole(1).unwrap();
        put(&mut store, "half a file");
        drop(store);
        let (files, mut store) = begin(&place, false, 0);
        assert_eq!(files, 1);
        put(&mut store, "second");
        let (text, notes) = store.finish().unwrap();
        assert_eq!(texts(&text), ["first", "second"]);
        assert_eq!(notes.get(&Note::Replaced), Some(&2));
    }

    #[test]
    fn damage_in_the_cache_is_made_anew() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place::new(dir.path());
        let make = || {
            let (files, mut store) = begin(&place, false, 0);
            assert_eq!(files, 0);
            put(&mut store, "text");
            store.finish().unwrap();
        };
        make();
        for (name, content) in [("ends", &b"x"[..]), ("ends", &[0; 8]), ("text", b"t"), ("info.json", b"<html>")] {
            std::fs::write(dir.path().join("texts/key").join(name), content).unwrap();
            make();
        }
    }
}
