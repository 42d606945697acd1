//! Memory that the members of a team work on at once, each on its own part.
//!
//! Used by the ops of the decode list, whose phases keep one rule: between two syncs an element has one writer and no other
//! reader, or only readers.

use std::marker::PhantomData;

/// A borrowed slice of which several threads hold parts.
#[derive(Clone, Copy)]
pub struct Cells<'a, T> {
    start: *mut T,
    len: usize,
    borrowed: PhantomData<&'a mut [T]>,
}

// SAFETY: elements are reached through unsafe functions alone, whose callers keep the rule above.
unsafe impl<T: Send> Send for Cells<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send + Sync> Sync for Cells<'_, T> {}

impl<'a, T> Cells<'a, T> {
    pub fn new(data: &'a mut [T]) -> Self {
        Self { start: data.as_mut_ptr(), len: data.len(), borrowed: PhantomData }
    }

    /// `len` elements from `start` on, which nobody reads or writes meanwhile but through this.
    ///
    /// # Safety
    /// They are initialised and borrowed for 'a by the caller alone.
    pub(super) unsafe fn from_raw(start: *mut T, len: usize) -> Self {
        Self { start, len, borrowed: PhantomData }
    }

    /// `len` elements from `at` on, to write.
    ///
    /// # Safety
    /// While the slice lives nobody else reads or writes these elements.
    #[inline(always)]
    pub unsafe fn part(self, at: usize, len: usize) -> &'a mut [T] {
        assert!(at + len <= self.len, "elements past the end");
        // SAFETY: the range was checked, the memory is borrowed exclusively for 'a, and the caller excludes other users.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), len) }
    }

    /// `len` elements from `at` on, to read.
    ///
    /// # Safety
    /// While the slice lives nobody writes these elements.
    #[inline(always)]
    pub unsafe fn read(self, at: usize, len: usize) -> &'a [T] {
        assert!(at + len <= self.len, "elements past the end");
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts(self.start.add(at), len) }
    }
}

impl Cells<'_, f32> {
    /// Stores sums from element `at` on, or adds them.
    ///
    /// # Safety
    /// Nobody else reads or writes these elements meanwhile.
    #[inline(always)]
    pub unsafe fn put(self, at: usize, sums: &[f32], add: bool) {
        // SAFETY: the caller's promise.
        let y = unsafe { self.part(at, sums.len()) };
        if add {
            y.iter_mut().zip(sums).for_each(|(y, sum)| *y += sum);
        } else {
            y.copy_from_slice(sums);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_write_their_own_parts_and_then_read_all() {
        let mut data = vec![1f32; 64];
        let cells = Cells::new(&mut data);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                // SAFETY: the parts of the threads do not overlap, and nobody reads yet.
                scope.spawn(move || unsafe { cells.put(thread * 16, &[thread as f32; 16], true) });
            }
        });
        // SAFETY: nobody writes any more.
        let all = unsafe { cells.read(0, 64) };
        assert!(all.iter().enumerate().all(|(i, x)| *x == 1.0 + (i / 16) as f32));
        assert!(std::panic::catch_unwind(|| unsafe { cells.read(60, 5).len() }).is_err(), "past the end");
    }
}
