//! What a file holds: itself, or the members of a zip or tar, with gzip or zstd around any of them. Called by `text`.
//!
//! Nothing is unpacked to the disk, so no member's name can lead anywhere. What comes out of a compressed file is bounded
//! by what went in, so that a few kilobytes cannot fill a disk.

use std::cell::Cell;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;
use std::rc::Rc;

use crate::error::{Error, Result};

/// Below this nothing is called a bomb; above it, no text is packed this many times over.
const HARMLESS: u64 = 1 << 30;
const MOST_PACKED: u64 = 250;

/// One stream of bytes with the name that says its format.
pub struct Member<'a> {
    pub name: &'a str,
    pub reader: &'a mut dyn Read,
    /// Whether it is a file by itself and can be opened by its path.
    pub is_file: bool,
}

/// Bytes read of a file so far, shared with whoever shows progress.
#[derive(Clone, Debug, Default)]
pub struct Meter(Rc<Cell<u64>>);

impl Meter {
    pub fn read(&self) -> u64 {
        self.0.get()
    }
}

/// The endings of files that hold others.
const PACKED: [&str; 6] = [".zip", ".tar", ".gz", ".tgz", ".zst", ".tzst"];

/// Whether a file of that name holds others, or is compressed.
pub fn is_packed(name: &str) -> bool {
    PACKED.iter().any(|ending| name.to_lowercase().ends_with(ending))
}

/// Calls `visit` for the file, or for each file in it in the order in which they lie there.
pub fn visit(path: &Path, meter: &Meter, visit: &mut dyn FnMut(Member) -> Result<()>) -> Result<()> {
    let unreadable = |e| Error::io("read", path, e);
    let file = File::open(path).map_err(unreadable)?;
    let packed = file.metadata().map_err(unreadable)?.len();
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let lower = name.to_lowercase();
    let counted = Counted { inner: file, meter: meter.clone() };
    let left = HARMLESS.max(packed.saturating_mul(MOST_PACKED));
    let outer = |endings: &[&str]| endings.iter().find(|e| lower.ends_with(*e)).map(|e| &name[..name.len() - e.len()]);
    if outer(&[".zip"]).is_some() {
        return zip(path, counted, left, visit);
    }
    if outer(&[".tar"]).is_some() {
        return tar(path, BufReader::new(counted), visit);
    }
    if let Some(inner) = outer(&[".tgz", ".gz"]) {
        let reader = Bounded { reader: flate2::read::MultiGzDecoder::new(BufReader::new(counted)), left };
        return unpacked(path, inner, lower.ends_with(".tgz"), reader, visit);
    }
    if let Some(inner) = outer(&[".tzst", ".zst"]) {
        let reader = zstd::stream::read::Decoder::new(counted).map_err(|e| damaged(path, e))?;
        return unpacked(path, inner, lower.ends_with(".tzst"), Bounded { reader, left }, visit);
    }
    let mut reader = counted;
    visit(Member { name: &name, reader: &mut reader, is_file: true })
}

fn unpacked(
    path: &Path,
    inner: &str,
    is_tar: bool,
    mut reader: impl Read,
    visit: &mut dyn FnMut(Member) -> Result<()>,
) -> Result<()> {
    match is_tar || inner.to_lowercase().ends_with(".tar") {
        true => tar(path, reader, visit),
        false => visit(Member { name: inner, reader: &mut reader, is_file: false }),
    }
}

fn zip(path: &Path, file: Counted, mut left: u64, visit: &mut dyn FnMut(Member) -> Result<()>) -> Result<()> {
    let said = |e: ::zip::result::ZipError| match e {
        ::zip::result::ZipError::Io(e) => damaged(path, e),
        e => Error::file(path, "a zip archive", e.to_string()),
    };
    let meter = file.meter.clone();
    // The directory of an archive stands at its end; what is read of it is not progress.
    let mut archive = ::zip::ZipArchive::new(BufReader::new(file.inner)).map_err(said)?;
    for index in 0..archive.len() {
        let member = archive.by_index(index).map_err(said)?;
        let name = member.name().map_err(said)?.into_owned();
        let size = member.compressed_size();
        if member.is_file() {
            let mut reader = Bounded { reader: member, left };
            visit(Member { name: &name, reader: &mut reader, is_file: false })?;
            left = reader.left;
        }
        meter.0.set(meter.0.get() + size);
    }
    Ok(())
}

fn tar(path: &Path, reader: impl Read, visit: &mut dyn FnMut(Member) -> Result<()>) -> Result<()> {
    let mut archive = ::tar::Archive::new(reader);
    for entry in archive.entries().map_err(|e| damaged(path, e))? {
        let mut entry = entry.map_err(|e| damaged(path, e))?;
        if entry.header().entry_type().is_file() {
            let name = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
            visit(Member { name: &name, reader: &mut entry, is_file: false })?;
        }
    }
    Ok(())
}

/// What went wrong while reading: the system's word, or what is wrong with the file.
pub fn damaged(path: &Path, e: std::io::Error) -> Error {
    use std::io::ErrorKind::{InvalidData, InvalidInput, Other, UnexpectedEof};
    match e.kind() {
        InvalidData | InvalidInput | Other | UnexpectedEof => {
            Error::file(path, "a whole file of its kind", e.to_string()).with_hint("it may be cut off: fetch it again")
        }
        _ => Error::io("read", path, e),
    }
}

struct Counted {
    inner: File,
    meter: Meter,
}

impl Read for Counted {
    fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
        let n = self.inner.read(to)?;
        self.meter.0.set(self.meter.0.get() + n as u64);
        Ok(n)
    }
}

struct Bounded<R> {
    reader: R,
    left: u64,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
        let n = self.reader.read(to)?;
        self.left = self.left.checked_sub(n as u64).ok_or_else(|| {
            std::io::Error::other(format!(
                "a compressed file that grows more than {MOST_PACKED} times: unpack it yourself if you trust it"
            ))
        })?;
        Ok(n)
    }
}
