//! Zeroed f32 memory on cache-line borders, for what decoding streams: packed weights and cache pages.
//!
//! A 64-byte vector load that crosses a line costs two accesses, and `Vec<f32>` promises only four bytes.

use std::ops::{Deref, DerefMut};

const LINE: usize = 16;

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; LINE]);

/// A fixed number of f32, zero at first, starting on a 64-byte border.
#[derive(Clone)]
pub struct Aligned {
    lines: Vec<Line>,
    len: usize,
}

impl Aligned {
    pub fn zeros(len: usize) -> Self {
        Self { lines: vec![Line([0.0; LINE]); len.div_ceil(LINE)], len }
    }
}

impl Deref for Aligned {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        // SAFETY: a `Line` is sixteen f32 and nothing else (64 bytes, its alignment), so the lines are
        // `lines.len() * LINE >= len` consecutive f32.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }
}

impl DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as above; the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }
}
