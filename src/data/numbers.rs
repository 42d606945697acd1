//! Numbers in memory or in a mapped file, cheap to clone and to take a part of: texts, document ends, ids.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ops::mapped::{Mapped, Plain};

/// A part of numbers that others may hold, too.
#[derive(Debug)]
pub struct Numbers<T: Plain> {
    whole: Arc<Whole<T>>,
    range: Range<usize>,
}

#[derive(Debug)]
enum Whole<T: Plain> {
    Memory(Vec<T>),
    File { map: Mapped<T>, path: PathBuf, start: u64 },
}

impl<T: Plain> Clone for Numbers<T> {
    fn clone(&self) -> Self {
        Self { whole: Arc::clone(&self.whole), range: self.range.clone() }
    }
}

impl<T: Plain> From<Vec<T>> for Numbers<T> {
    fn from(numbers: Vec<T>) -> Self {
        Self { range: 0..numbers.len(), whole: Arc::new(Whole::Memory(numbers)) }
    }
}

impl<T: Plain> Numbers<T> {
    /// `len` numbers of a file from byte `start` on.
    pub fn open(path: &Path, start: u64, len: usize) -> Result<Self> {
        let map = Mapped::open(path, start, len)?;
        Ok(Self { whole: Arc::new(Whole::File { map, path: path.to_owned(), start }), range: 0..len })
    }

    /// A part of this part.
    pub fn part(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len(), "a part of {} numbers", self.len());
        let range = self.range.start + range.start..self.range.start + range.end;
        Self { whole: Arc::clone(&self.whole), range }
    }

    /// Asks the system to have a range ready soon.
    pub fn prefetch(&self, range: Range<usize>) {
        if let Whole::File { map, .. } = &*self.whole {
            map.prefetch(self.range.start + range.start..self.range.start + range.end);
        }
    }
}

impl Numbers<u8> {
    /// Reads it from the beginning. Unlike going through the map this leaves no page behind that counts as this process's
    /// memory, so that a text of any size is read in little.
    pub fn reader(&self) -> Result<Box<dyn Read + Send + '_>> {
        match &*self.whole {
            Whole::Memory(_) => Ok(Box::new(&**self)),
            Whole::File { path, start, .. } => {
                let from = SeekFrom::Start(start + self.range.start as u64);
                let open = File::open(path).and_then(|mut file| file.seek(from).map(|_| file));
                Ok(Box::new(open.map_err(|e| Error::io("read", path, e))?.take(self.len() as u64)))
            }
        }
    }
}

impl<T: Plain> Deref for Numbers<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &*self.whole {
            Whole::Memory(numbers) => &numbers[self.range.clone()],
            Whole::File { map, .. } => &map[self.range.clone()],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_parts_and_readers_see_the_same_numbers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        std::fs::write(&path, (0..100).collect::<Vec<u8>>()).unwrap();
        for whole in [Numbers::open(&path, 10, 90).unwrap(), Numbers::from((10..100).collect::<Vec<u8>>())] {
            let part = whole.part(5..50).part(10..20);
            assert_eq!(&*part, (25..35).collect::<Vec<u8>>());
            let mut read = Vec::new();
            part.reader().unwrap().read_to_end(&mut read).unwrap();
            assert_eq!(read, &*part);
            part.prefetch(2..4);
        }
    }
}
