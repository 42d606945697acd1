//! What a teacher said of the windows of a stream, on the disk: several students, or a run that is repeated, ask it once.
//!
//! One file for a teacher, a stream and a k: `<cache>/teachers/<key>.top`, a record for each window at its place. A record is
//! a mark that it is whole, the ids and the logarithms of all rows.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::PathBuf;

use crate::data::place::Place;
use crate::error::{Error, Result};
use crate::trainer::objective::Memory;

pub struct TeacherFile {
    path: PathBuf,
    file: File,
    k: usize,
    /// Rows of a window.
    seq: usize,
}

/// What stands before a record that is whole.
const WHOLE: [u8; 8] = *b"teacher\n";

impl TeacherFile {
    /// Opens the file of that key, or makes it.
    pub fn open(place: &Place, key: &str, k: usize, seq: usize) -> Result<Self> {
        let path = place.folder("teachers")?.join(format!("{key}.top"));
        let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let file = open.map_err(|e| Error::io("open", &path, e))?;
        Ok(Self { path, file, k, seq })
    }

    fn record(&self) -> u64 {
        (WHOLE.len() + 8 * self.k * self.seq) as u64
    }
}

impl Memory for TeacherFile {
    fn k(&self) -> usize {
        self.k
    }

    fn get(&mut self, window: u64) -> Result<Option<(Vec<u32>, Vec<f32>)>> {
        let mut bytes = vec![0; self.record() as usize];
        let from = SeekFrom::Start(window * self.record());
        match self.file.seek(from).and_then(|_| self.file.read_exact(&mut bytes)) {
            Err(e) if e.kind() == ErrorKind::UnexpectedEof => return Ok(None),
            other => other.map_err(|e| Error::io("read", &self.path, e))?,
        }
        let Some(numbers) = bytes.strip_prefix(&WHOLE) else { return Ok(None) };
        let (words, _) = numbers.as_chunks::<4>();
        let (ids, logprobs) = words.split_at(words.len() / 2);
        let ids = ids.iter().map(|word| u32::from_le_bytes(*word)).collect();
        Ok(Some((ids, logprobs.iter().map(|word| f32::from_le_bytes(*word)).collect())))
    }

    fn put(&mut self, window: u64, ids: &[u32], logprobs: &[f32]) -> Result<()> {
        let mut bytes = vec![0; WHOLE.len()];
        ids.iter().for_each(|id| bytes.extend(id.to_le_bytes()));
        logprobs.iter().for_each(|l| bytes.extend(l.to_le_bytes()));
        let start = window * self.record();
        // The mark comes last: a record that was broken off has none.
        let written = self.file.seek(SeekFrom::Start(start)).and_then(|_| {
            self.file.write_all(&bytes)?;
            self.file.seek(SeekFrom::Start(start))?;
            self.file.write_all(&WHOLE)
        });
        written.map_err(|e| Error::io("write", &self.path, e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_come_back_in_any_order_and_broken_ones_do_not() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place::new(dir.path());
        let open = || TeacherFile::open(&place, "key", 2, 3).unwrap();
        let record =
            |n: u32| ((n..n + 6).collect::<Vec<_>>(), (0..6).map(|i| -(i as f32) / n as f32).collect::<Vec<_>>());
        for window in [4, 0, 2] {
            assert!(open().get(window).unwrap().is_none());
            let (ids, logprobs) = record(window as u32 + 1);
            open().put(window, &ids, &logprobs).unwrap();
            assert_eq!(open().get(window).unwrap(), Some((ids, logprobs)));
        }
        assert!(open().get(1).unwrap().is_none() && open().get(3).unwrap().is_none());
        let path = dir.path().join("teachers/key.top");
        let length = std::fs::metadata(&path).unwrap().len();
        File::options().write(true).open(&path).unwrap().set_len(length - 1).unwrap();
        assert!(open().get(4).unwrap().is_none() && open().get(2).unwrap().is_some());
    }
}
