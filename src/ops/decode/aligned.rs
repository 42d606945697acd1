//! Zeroed memory on cache-line borders, for what decoding streams: packed weights and cache pages.
//!
//! A 64-byte vector load that crosses a line costs two accesses, and `Vec<f32>` promises only an element's own. Weights share
//! blocks that the kernel may back with 2 MB pages (an `Arena`): streaming 40 MB of weights in 4 KB pages ran at
//! 0.75 to 0.85 of the speed, because the hardware's prefetch stops at each page's end.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::cells::Cells;

const LINE: usize = 64;
const HUGE_PAGE: usize = 2 << 20;
/// Address space that an arena asks for at a time; what is never handed out is never touched.
const BLOCK: usize = 64 << 20;

/// Memory of its own, freed with the last piece.
struct Block {
    start: *mut u8,
    layout: Layout,
}

// SAFETY: a block is plain memory; access goes through the `Aligned` pieces, which never overlap.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Block {
    fn new(bytes: usize, align: usize) -> Arc<Self> {
        let layout = Layout::from_size_align(bytes.max(LINE), align).expect("less than half the address space");
        // SAFETY: the size is not zero.
        let start = unsafe { alloc(layout) };
        if start.is_null() {
            handle_alloc_error(layout);
        }
        if align == HUGE_PAGE {
            advise_huge_pages(start, layout.size());
        }
        Arc::new(Self { start, layout })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and the last piece is gone.
        unsafe { dealloc(self.start, self.layout) }
    }
}

#[cfg(target_os = "linux")]
fn advise_huge_pages(start: *mut u8, bytes: usize) {
    unsafe extern "C" {
        fn madvise(start: *mut std::ffi::c_void, bytes: usize, advice: std::ffi::c_int) -> std::ffi::c_int;
    }
    const MADV_HUGEPAGE: std::ffi::c_int = 14;
    // SAFETY: whole pages of memory that this block owns; the advice changes no content, and its failure no meaning.
    let _ = unsafe { madvise(start.cast(), bytes, MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn advise_huge_pages(_: *mut u8, _: usize) {}

/// Hands out pieces of large blocks, one after the other.
#[derive(Default)]
pub struct Arena {
    block: Option<Arc<Block>>,
    used: usize,
}

impl Arena {
    /// `len` zeroed elements that stay where they are for as long as the piece lives.
    pub fn zeros<T: Plain>(&mut self, len: usize) -> Aligned<T> {
        let bytes = (len * size_of::<T>()).next_multiple_of(LINE);
        let block = match self.block.take() {
            Some(block) if block.layout.size() - self.used >= bytes => block,
            _ => {
                self.used = 0;
                Block::new(bytes.next_multiple_of(HUGE_PAGE).max(BLOCK), HUGE_PAGE)
            }
        };
        let piece = Aligned::at(&block, self.used, len);
        self.used += bytes;
        self.block = Some(block);
        piece
    }
}

/// Numbers for which zeroed bytes are zero.
///
/// # Safety
/// Every bit pattern is a value, and the alignment divides a cache line.
pub unsafe trait Plain: Copy {}
// SAFETY: plain numbers of four bytes.
unsafe impl Plain for f32 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: a plain number of two bytes.
unsafe impl Plain for u16 {}
// SAFETY: a byte.
unsafe impl Plain for u8 {}

/// A fixed number of elements, zero at first, starting on a 64-byte border.
pub struct Aligned<T = f32> {
    block: Arc<Block>,
    offset: usize,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Plain> Aligned<T> {
    /// Zeroed memory of its own.
    pub fn zeros(len: usize) -> Self {
        Self::at(&Block::new(len * size_of::<T>(), LINE), 0, len)
    }

    /// The piece of `len` elements at a byte offset that no other piece covers.
    fn at(block: &Arc<Block>, offset: usize, len: usize) -> Self {
        assert!(offset.is_multiple_of(LINE) && offset + len * size_of::<T>() <= block.layout.size());
        // SAFETY: inside the block, and handed out to nobody else.
        unsafe { block.start.add(offset).write_bytes(0, len * size_of::<T>()) };
        Self { block: Arc::clone(block), offset, len, element: PhantomData }
    }
}

impl<T: Plain> Aligned<T> {
    /// The piece as bytes, in the machine's order.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: plain numbers without padding, borrowed as the piece is.
        unsafe { std::slice::from_raw_parts(self.as_ptr().cast(), self.len * size_of::<T>()) }
    }

    /// The same to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and every pattern of bytes is a value.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr().cast(), self.len * size_of::<T>()) }
    }

    /// Keeps the piece in main memory until it is dropped.
    pub fn lock(&self) -> std::io::Result<()> {
        let (start, bytes) = (self.bytes().as_ptr(), self.bytes().len());
        if bytes == 0 {
            return Ok(());
        }
        let start = std::ptr::NonNull::new(start.cast_mut()).expect("a slice's start").cast();
        // SAFETY: memory of this process; locking changes no content. It ends with the unmapping of the pages.
        unsafe { nix::sys::mman::mlock(start, bytes) }.map_err(std::io::Error::from)
    }

    /// The piece as memory that several threads may work on; meanwhile nobody may use it in another way.
    #[inline(always)]
    pub(super) fn cells(&self) -> Cells<'_, T> {
        // SAFETY: `at` checked the range and initialised it; the rule of `Cells` is its users' promise.
        unsafe { Cells::from_raw(self.block.start.add(self.offset).cast(), self.len) }
    }
}

impl<T: Plain> Clone for Aligned<T> {
    fn clone(&self) -> Self {
        let mut copy = Self::zeros(self.len);
        copy.copy_from_slice(self);
        copy
    }
}

impl<T: Plain> Deref for Aligned<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `at` checked the range and initialised it; no other piece covers it, so borrows of this piece are all
        // there are.
        unsafe { std::slice::from_raw_parts(self.block.start.add(self.offset).cast(), self.len) }
    }
}

impl<T: Plain> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above; the borrow of the piece is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.block.start.add(self.offset).cast(), self.len) }
    }
}

/// Asks for the cache lines of N elements from `at` on, which may lie past the end of any memory.
#[inline(always)]
pub(super) fn prefetch<T, const N: usize>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    for line in 0..(N * size_of::<T>()).div_ceil(LINE) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint: no address faults, and SSE is part of every x86-64.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast::<i8>().wrapping_add(LINE * line)) };
    }
    // Stable Rust has no such hint elsewhere.
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_zero_aligned_apart_and_outlive_their_arena() {
        let mut arena = Arena::default();
        let lengths = [1, 16, 17, 0, 1000, BLOCK / 4, 5];
        let mut pieces: Vec<Aligned<f32>> = lengths.iter().map(|len| arena.zeros(*len)).collect();
        drop(arena);
        for (i, piece) in pieces.iter_mut().enumerate() {
            assert!(piece.iter().all(|x| *x == 0.0), "a piece overlaps the ones before");
            assert_eq!((piece.len(), piece.as_ptr() as usize % LINE), (lengths[i], 0));
            piece.fill(1.0 + i as f32);
        }
        let copy = pieces[2].clone();
        pieces[2].fill(-1.0);
        assert!(copy.iter().all(|x| *x == 3.0) && pieces[1][15] == 2.0 && pieces[4][0] == 5.0);
    }
}
