//! The memory of one layer's keys and values for one row: pages of 64 positions in a table keyed by absolute block.
//!
//! Written by `project`, read in place by `attend`; `nn::cache` decides when pages are shared, dropped and cut back.
//! Position p is visible to the token at t iff p <= t and (p > t - W or p < S): W the window, S the sinks. Pages are
//! counted references, so rows can share a prefix; writing to a shared page copies it first. Pages of the sinks are
//! pinned; the others stand in a queue of consecutive blocks, whose front is dropped as the window moves on.

use std::collections::VecDeque;
use std::sync::Arc;

use super::aligned::{Aligned, prefetch};
use crate::ops::heads::Heads;

/// Positions of a page. Blocks start at multiples of it, so the order of all sums over keys depends only on (t, W, S).
pub const PAGE: usize = 64;

/// Keys and values of 64 positions, all key/value heads. Keys lie `[K][D][64]`, so that 64 scores are one vector
/// loop over D; values lie `[K][64][D]`. Slots that no position was written to are zero or stale, never read as visible.
#[derive(Clone)]
pub struct Page {
    // Stored as f32. A narrower type becomes an enum here: only `write` and the two readers know the layout.
    keys: Aligned,
    values: Aligned,
}

impl Page {
    fn new(heads: Heads) -> Self {
        let len = heads.key_value * heads.dim * PAGE;
        Self { keys: Aligned::zeros(len), values: Aligned::zeros(len) }
    }

    fn write(&mut self, dim: usize, slot: usize, key: &[f32], value: &[f32]) {
        // Each element of a key lies in a line of its own: ask for all of them before the first store waits for one.
        for i in 0..key.len() {
            prefetch::<f32, 1>(self.keys.as_ptr().wrapping_add(i * PAGE + slot));
        }
        for (to, from) in self.keys[slot..].iter_mut().step_by(PAGE).zip(key) {
            *to = *from;
        }
        for (head, from) in value.chunks_exact(dim).enumerate() {
            self.values[(head * PAGE + slot) * dim..][..dim].copy_from_slice(from);
        }
    }

    /// Keys of one head, (D, 64).
    #[inline(always)]
    pub(super) fn keys(&self, head: usize, dim: usize) -> &[f32] {
        &self.keys[head * dim * PAGE..][..dim * PAGE]
    }

    /// Values of one head, (64, D).
    #[inline(always)]
    pub(super) fn values(&self, head: usize, dim: usize) -> &[f32] {
        &self.values[head * dim * PAGE..][..dim * PAGE]
    }
}

/// One layer's pages of one row. A clone shares them.
#[derive(Clone)]
pub struct Table {
    heads: Heads,
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
    pub fn new(heads: Heads, window: usize, sinks: usize) -> Self {
        assert!(window >= 1, "a window of no keys sees nothing");
        let first = sinks.div_ceil(PAGE);
        Self { heads, window, sinks, pinned: VecDeque::new(), first, recent: VecDeque::new() }
    }

    pub fn heads(&self) -> Heads {
        self.heads
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

    /// Stores key and value (K * D each) of a position: the next one, or one that was written before.
    pub fn write(&mut self, position: usize, key: &[f32], value: &[f32]) {
        let (block, heads) = (position / PAGE, self.heads);
        let pinned = self.sinks.div_ceil(PAGE);
        let page = if block < pinned {
            grow(&mut self.pinned, block, heads)
        } else {
            grow(&mut self.recent, block - self.first, heads)
        };
        Arc::make_mut(page).write(heads.dim, position % PAGE, key, value);
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
        let page = self.page(position / PAGE).expect("the test wrote it");
        page.values(0, self.heads.dim)[position % PAGE * self.heads.dim]
    }

    /// Memory of the pages, in bytes; shared ones count in each table.
    pub fn bytes(&self) -> usize {
        (self.pinned.len() + self.recent.len()) * 2 * self.heads.key_value * self.heads.dim * PAGE * 4
    }
}

/// Page `i` of a list that `i` may be one past the end of.
fn grow(pages: &mut VecDeque<Arc<Page>>, i: usize, heads: Heads) -> &mut Arc<Page> {
    assert!(i <= pages.len(), "positions are written in order");
    if i == pages.len() {
        pages.push_back(Arc::new(Page::new(heads)));
    }
    &mut pages[i]
}
