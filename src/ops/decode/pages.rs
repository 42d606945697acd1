//! The memory of one layer's keys and values for one row: pages of 64 positions in a table keyed by absolute block.
//!
//! Written by `project`, read in place by `attend`; `nn::cache` decides when pages are shared, dropped and cut back.
//! Position p is visible to the token at t iff p <= t and (p > t - W or p < S): W the window, S the sinks. Pages are
//! counted references, so rows can share a prefix; writing to a shared page copies it first. Pages of the sinks are
//! pinned; the others stand in a queue of consecutive blocks, whose front is dropped as the window moves on.

use std::collections::VecDeque;
use std::sync::Arc;

use super::aligned::{Aligned, prefetch};
use super::skinny::Lane;
use crate::ops::gemm::Bf16x2;
use crate::ops::heads::Heads;

/// Positions of a page. Blocks start at multiples of it, so the order of all sums over keys depends only on (t, W, S).
pub const PAGE: usize = 64;

/// What keys and values are kept in. The text depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheType {
    #[default]
    F32,
    Bf16,
}

/// Keys and values of 64 positions, all key/value heads.
#[derive(Clone)]
pub(super) enum Page {
    F32(Halves<f32>),
    Bf16(Halves<Bf16x2>),
}

impl Page {
    fn new(kind: CacheType, heads: Heads) -> Self {
        match kind {
            CacheType::F32 => Page::F32(Halves::new(heads)),
            CacheType::Bf16 => Page::Bf16(Halves::new(heads)),
        }
    }

    /// Stores key and value (D each) of one head at a slot.
    ///
    /// # Safety
    /// Nobody else reads or writes this head's part meanwhile.
    pub(super) unsafe fn write(&self, head: usize, slot: usize, key: &[f32], value: &[f32]) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Page::F32(halves) => halves.write(head, slot, key, value),
                Page::Bf16(halves) => halves.write(head, slot, key, value),
            }
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Page::F32(halves) => 4 * (halves.keys.len() + halves.values.len()),
            Page::Bf16(halves) => 4 * (halves.keys.len() + halves.values.len()),
        }
    }
}

/// An element of the cache: a number, or two bf16 that a dot product takes together.
pub(super) trait Stored: Lane + 'static {
    /// The halves of a page of this type.
    fn of(page: &Page) -> Option<&Halves<Self>>;
}

impl Stored for f32 {
    fn of(page: &Page) -> Option<&Halves<f32>> {
        if let Page::F32(halves) = page { Some(halves) } else { None }
    }
}

impl Stored for Bf16x2 {
    fn of(page: &Page) -> Option<&Halves<Bf16x2>> {
        if let Page::Bf16(halves) = page { Some(halves) } else { None }
    }
}

/// Keys lie `[K][D][64]`, so that 64 scores are one vector loop over D; values lie `[K][64][D]`. In bf16 an element holds two
/// neighbours of the dimension that a product sums over: of D in the keys, of the slots in the values. Slots that no position
/// was written to are zero or stale, never read as visible.
#[derive(Clone)]
pub(super) struct Halves<E: Stored> {
    keys: Aligned<E>,
    values: Aligned<E>,
}

impl<E: Stored> Halves<E> {
    fn new(heads: Heads) -> Self {
        let halves = |dim: usize, slots: usize| Aligned::zeros(heads.key_value * dim * slots);
        Self { keys: halves(heads.dim.div_ceil(E::STEPS), PAGE), values: halves(heads.dim, PAGE / E::STEPS) }
    }

    /// # Safety
    /// Nobody else reads or writes this head's part meanwhile.
    unsafe fn write(&self, head: usize, slot: usize, key: &[f32], value: &[f32]) {
        let dim = key.len();
        let (rows, pairs) = (dim.div_ceil(E::STEPS), PAGE / E::STEPS);
        // SAFETY: the parts of one head, which the caller has for himself.
        let (keys, values) = unsafe {
            let keys = self.keys.cells().part(head * rows * PAGE, rows * PAGE);
            (keys, self.values.cells().part((head * pairs + slot / E::STEPS) * dim, dim))
        };
        // Each element of a key lies in a line of its own: ask for all of them before the first store waits for one.
        for i in 0..rows {
            prefetch::<E, 1>(keys.as_ptr().wrapping_add(i * PAGE + slot));
        }
        for (to, key) in keys[slot..].iter_mut().step_by(PAGE).zip(key.chunks(E::STEPS)) {
            *to = E::new(key[0], key.get(1).copied().unwrap_or(0.0));
        }
        for (to, value) in values.iter_mut().zip(value) {
            *to = to.with(slot % E::STEPS, *value);
        }
    }

    /// Keys (D, 64) and values (64, D) of one head.
    ///
    /// # Safety
    /// Nobody writes this head's part while they live.
    #[inline(always)]
    pub(super) unsafe fn head(&self, head: usize, dim: usize) -> (&[E], &[E]) {
        let (keys, values) = (dim.div_ceil(E::STEPS) * PAGE, dim * (PAGE / E::STEPS));
        // SAFETY: the caller's promise.
        unsafe { (self.keys.cells().read(head * keys, keys), self.values.cells().read(head * values, values)) }
    }

    /// Where the keys of a head lie.
    #[inline(always)]
    pub(super) fn keys_at(&self, head: usize, dim: usize) -> *const E {
        self.keys.as_ptr().wrapping_add(head * dim.div_ceil(E::STEPS) * PAGE)
    }
}

/// One layer's pages of one row. A clone shares them.
#[derive(Clone)]
pub struct Table {
    heads: Heads,
    kind: CacheType,
    window: usize,
    sinks: usize,
    /// Blocks 0.. that hold sinks.
    pinned: VecDeque<Arc<Page>>,
    /// The block of `recent`'s front.
    first: usize,
    recent: VecDeque<Arc<Page>>,
}

impl Table {
    /// An empty table. `window` >= 1.
    pub fn new(heads: Heads, kind: CacheType, window: usize, sinks: usize) -> Self {
        assert!(window >= 1, "a window of no keys sees nothing");
        let first = sinks.div_ceil(PAGE);
        Self { heads, kind, window, sinks, pinned: VecDeque::new(), first, recent: VecDeque::new() }
    }

    pub fn heads(&self) -> Heads {
        self.heads
    }

    pub fn kind(&self) -> CacheType {
        self.kind
    }

    pub fn window(&self) -> usize {
        self.window
    }

    pub fn sinks(&self) -> usize {
        self.sinks
    }

    /// The position from which the query is turned for the sinks as if it stood here: past it the window has left
    /// position 0 behind, and a growing distance to the sinks would be one that the model never saw.
    pub fn sink_position(&self, position: usize) -> usize {
        position.min(self.sinks.saturating_add(self.window - 1))
    }

    /// Makes the page of a position one that this table may write to: the next position, or one that was written before.
    pub fn reserve(&mut self, position: usize) {
        let (block, pinned) = (position / PAGE, self.sinks.div_ceil(PAGE));
        let new = || Arc::new(Page::new(self.kind, self.heads));
        let (pages, i) =
            if block < pinned { (&mut self.pinned, block) } else { (&mut self.recent, block - self.first) };
        assert!(i <= pages.len(), "positions are written in order");
        if i == pages.len() {
            pages.push_back(new());
        }
        Arc::make_mut(&mut pages[i]);
    }

    /// Stores key and value (K * D each) of a position: the next one, or one that was written before.
    #[cfg(test)]
    pub(crate) fn write(&mut self, position: usize, key: &[f32], value: &[f32]) {
        self.reserve(position);
        let page = self.page(position / PAGE).expect("just reserved");
        for (head, (key, value)) in key.chunks(self.heads.dim).zip(value.chunks(self.heads.dim)).enumerate() {
            // SAFETY: the table is borrowed exclusively.
            unsafe { page.write(head, position % PAGE, key, value) };
        }
    }

    /// The page of a block, unless it was dropped or is not written yet.
    #[inline]
    pub(super) fn page(&self, block: usize) -> Option<&Page> {
        match self.pinned.get(block) {
            Some(page) => Some(page),
            None => block.checked_sub(self.first).and_then(|i| self.recent.get(i)).map(|page| &**page),
        }
    }

    /// Drops the pages that no token at or after `position` can see.
    pub fn release(&mut self, position: usize) {
        let oldest = (position + 1).saturating_sub(self.window);
        while (self.first + 1) * PAGE <= oldest {
            self.recent.pop_front();
            self.first += 1;
        }
    }

    /// The positions that were dropped: empty if none.
    pub fn dropped(&self) -> std::ops::Range<usize> {
        self.sinks.div_ceil(PAGE) * PAGE..self.first * PAGE
    }

    /// Whether the token at `len`, and all after it, find the keys they see after a cut to `len` positions.
    pub fn can_truncate(&self, len: usize) -> bool {
        let dropped = self.dropped();
        let oldest = (len + 1).saturating_sub(self.window);
        dropped.is_empty() || len <= dropped.start || oldest >= dropped.end
    }

    /// Forgets the positions from `len` on; `can_truncate` must hold.
    pub fn truncate(&mut self, len: usize) {
        debug_assert!(self.can_truncate(len));
        let pinned = self.sinks.div_ceil(PAGE);
        let blocks = len.div_ceil(PAGE);
        self.pinned.truncate(blocks);
        if blocks <= pinned {
            self.first = pinned;
        }
        self.recent.truncate(blocks.saturating_sub(self.first));
    }

    /// Whether the page of a position is there.
    #[cfg(test)]
    pub(crate) fn holds(&self, position: usize) -> bool {
        self.page(position / PAGE).is_some()
    }

    /// The first value of a position.
    #[cfg(test)]
    pub(crate) fn value(&self, position: usize) -> f32 {
        let (page, slot) = (self.page(position / PAGE).expect("the test wrote it"), position % PAGE * self.heads.dim);
        // SAFETY: the table is borrowed, and no pass runs.
        unsafe {
            match page {
                Page::F32(halves) => halves.head(0, self.heads.dim).1[slot],
                Page::Bf16(halves) => {
                    let at = position % PAGE / 2 * self.heads.dim;
                    halves.head(0, self.heads.dim).1[at].values()[position % 2]
                }
            }
        }
    }

    /// Memory of the pages, in bytes; shared ones count in each table.
    pub fn bytes(&self) -> usize {
        self.pinned.iter().chain(&self.recent).map(|page| page.bytes()).sum()
    }
}
