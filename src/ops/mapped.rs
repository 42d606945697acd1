//! A file's numbers as a slice: the system reads what is touched, and may drop it again. Called by data for texts and ids.
//!
//! Numbers are little-endian, as on every machine that this runs on. It lies here because mapping takes `unsafe`.

use std::fs::File;
use std::marker::PhantomData;
use std::ops::{Deref, Range};
use std::path::Path;

use memmap2::{Advice, Mmap};

use crate::error::{Error, Result};

/// Numbers of which every bit pattern is one.
pub trait Plain: Copy + Send + Sync + sealed::Sealed + 'static {}
impl<T: Copy + Send + Sync + sealed::Sealed + 'static> Plain for T {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for u8 {}
    impl Sealed for u16 {}
    impl Sealed for u32 {}
    impl Sealed for u64 {}
}

/// `len` numbers of a file from a byte on.
#[derive(Debug)]
pub struct Mapped<T> {
    /// None for no numbers: an empty range cannot be mapped.
    map: Option<Mmap>,
    len: usize,
    kind: PhantomData<T>,
}

impl<T: Plain> Mapped<T> {
    /// Maps `len` numbers from byte `start` on, which must be a multiple of their size; an error if the file is shorter.
    ///
    /// The file must stay as it is while it is mapped: data maps files that it made itself under names that are never
    /// written again, and large texts of the user, whose change while a run reads them ends the run (SIGBUS) at worst.
    pub fn open(path: &Path, start: u64, len: usize) -> Result<Self> {
        let unreadable = |e| Error::io("map", path, e);
        let file = File::open(path).map_err(unreadable)?;
        let has = file.metadata().map_err(unreadable)?.len();
        let size = size_of::<T>() as u64;
        let end = (len as u64).checked_mul(size).and_then(|bytes| bytes.checked_add(start)).unwrap_or(u64::MAX);
        if end > has || !start.is_multiple_of(size) {
            return Err(Error::file(path, format!("{end} bytes"), format!("{has}")));
        }
        if len == 0 {
            return Ok(Self { map: None, len, kind: PhantomData });
        }
        let mut options = memmap2::MmapOptions::new();
        options.offset(start).len(len * size_of::<T>());
        // SAFETY: the mapping is private to reading, and inside the file, as was checked. That nobody shortens or writes
        // the file meanwhile is the caller's promise above; numbers of any bits are valid, so a changed file cannot make
        // an invalid value.
        let map = unsafe { options.map(&file) }.map_err(unreadable)?;
        Ok(Self { map: Some(map), len, kind: PhantomData })
    }

    /// Asks the system to read a range soon, without waiting for it.
    pub fn prefetch(&self, range: Range<usize>) {
        let Some(map) = &self.map else { return };
        let size = size_of::<T>();
        // Advice: where it cannot be taken, the pages come when they are touched.
        let _ = map.advise_range(Advice::WillNeed, range.start * size, range.len() * size);
    }
}

impl<T: Plain> Deref for Mapped<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let Some(map) = &self.map else { return &[] };
        assert!(map.as_ptr().cast::<T>().is_aligned() && map.len() >= self.len * size_of::<T>());
        // SAFETY: aligned and inside the map, as just checked; T is plain; the map lives as long as the slice.
        unsafe { std::slice::from_raw_parts(map.as_ptr().cast::<T>(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_from_any_aligned_place() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let bytes: Vec<u8> = (0..16u16).flat_map(|n| (n * 257).to_le_bytes()).collect();
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(&*Mapped::<u8>::open(&path, 3, 4).unwrap(), &bytes[3..7]);
        let shorts = Mapped::<u16>::open(&path, 2, 15).unwrap();
        assert_eq!(&*shorts, (1..16).map(|n| n * 257).collect::<Vec<u16>>());
        shorts.prefetch(3..9);
        assert_eq!(Mapped::<u64>::open(&path, 8, 3).unwrap()[0], u64::from_le_bytes(bytes[8..16].try_into().unwrap()));
        assert!(Mapped::<u32>::open(&path, 32, 0).unwrap().is_empty());
        for (start, len) in [(0, 9), (28, 2), (2, 1), (4, usize::MAX)] {
            assert!(Mapped::<u32>::open(&path, start, len).is_err(), "{start}, {len}");
        }
    }
}
