//! The memory of one layer's keys and values for one row: pages of 64 positions in a table keyed by absolute block.
//!
//! Written and read in place by `attend`; `nn::cache` decides when pages are shared, dropped and cut back.
//! Position p is visible to the token at t iff p <= t and (p > t - W or p < S): W the window, S the sinks. Pages are
//! counted references, so rows can share a prefix; writing to a shared page copies it first. Pages of the sinks are
//! pinned; the others stand in a queue of consecutive blocks, whose front is dropped as the window moves on.

use std::collections::VecDeque;
use std::sync::Arc;

use super::gpu::pool::Pools;
#[cfg(test)]
use super::page::Stored;
use super::page::{CacheType, PAGE, Page, Quantization};
use crate::error::Result;
use crate::ops::heads::Heads;

/// One layer's pages of one row. A clone shares them.
#[derive(Clone)]
pub struct Table {
    heads: Heads,
    kind: CacheType,
    quantization: Option<Quantization>,
    /// Where pages lie, if that is the memory of a GPU.
    pools: Option<Pools>,
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
    pub fn new(heads: Heads, kind: CacheType, quantization: Option<Quantization>, window: usize, sinks: usize) -> Self {
        assert!(window >= 1, "a window of no keys sees nothing");
        let first = sinks.div_ceil(PAGE);
        let (pinned, recent) = (VecDeque::new(), VecDeque::new());
        Self { heads, kind, quantization, pools: None, window, sinks, pinned, first, recent }
    }

    /// The same with its pages in the memory of a GPU, which must hold pages of its kind.
    pub fn in_pools(self, pools: Option<Pools>) -> Self {
        Self { pools, ..self }
    }

    /// An empty page for a block.
    fn new_page(&self, block: usize) -> Page {
        let quantization = self.quantization.filter(|q| block * PAGE >= q.start);
        match &self.pools {
            None => Page::new(self.kind, quantization, self.heads),
            Some(pools) => Page::Device(pools.of(quantization.is_some()).page()),
        }
    }

    /// The number of a block's page in its pool on a GPU; 0 where there is none.
    pub(super) fn device_page(&self, block: usize) -> u32 {
        if let Some(Page::Device(page)) = self.page(block) { page.id() } else { 0 }
    }

    /// The handles of all pages on a GPU, which tell them apart for ever.
    pub fn device_pages(&self) -> impl Iterator<Item = u64> {
        let handle = |page: &Arc<Page>| if let Page::Device(page) = &**page { page.handle() } else { 0 };
        self.pinned.iter().chain(&self.recent).map(handle)
    }

    /// The blocks whose pages are kept.
    pub(super) fn blocks(&self) -> impl Iterator<Item = usize> {
        (0..self.pinned.len()).chain(self.first..self.first + self.recent.len())
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
        let known = self.page(block).is_some();
        let new = (!known).then(|| Arc::new(self.new_page(block)));
        let (pages, i) =
            if block < pinned { (&mut self.pinned, block) } else { (&mut self.recent, block - self.first) };
        assert!(i <= pages.len(), "positions are written in order");
        pages.extend(new);
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
        let page = f32::of(self.page(position / PAGE).expect("the test wrote it")).expect("pages of f32");
        // SAFETY: the table is borrowed, and no pass runs.
        unsafe { page.head(0, self.heads.dim).1[position % PAGE * self.heads.dim] }
    }

    /// Appends the pages of the first `len` positions, and which they are, to `bytes`.
    pub fn write_to(&self, bytes: &mut Vec<u8>, len: usize) -> Result<()> {
        // A page that is only reserved for the next position is left out.
        let blocks = len.div_ceil(PAGE);
        let pinned = self.pinned.len().min(blocks);
        let recent = self.recent.len().min(blocks.saturating_sub(self.first));
        for number in [pinned, self.first, recent] {
            bytes.extend((number as u64).to_le_bytes());
        }
        self.pinned.iter().take(pinned).chain(self.recent.iter().take(recent)).try_for_each(|page| page.save(bytes))
    }

    /// Takes the pages that `write_to` appended for `len` positions from the start of `bytes`, into an empty table made in the
    /// same way; `None` if they are not there.
    pub fn read_from(&mut self, bytes: &mut &[u8], len: usize) -> Option<()> {
        let mut number = || usize::try_from(u64::from_le_bytes(*bytes.split_off(..8)?.first_chunk()?)).ok();
        let (pinned, first, recent) = (number()?, number()?, number()?);
        let (most, blocks) = (self.sinks.div_ceil(PAGE), len.div_ceil(PAGE));
        let seen = (len + 1).saturating_sub(self.window) / PAGE;
        let whole = pinned == blocks.min(most) && first.checked_add(recent)? == blocks.max(most);
        if !whole || first < most || first > seen.max(most) {
            return None;
        }
        for block in (0..pinned).chain(first..first + recent) {
            let mut page = self.new_page(block);
            page.load(bytes)?;
            let pages = if block < most { &mut self.pinned } else { &mut self.recent };
            pages.push_back(Arc::new(page));
        }
        self.first = first;
        Some(())
    }

    /// Pages of this table's kind that a text of `len` positions takes at most, with so many to take back: bytes.
    pub fn bytes_at(&self, len: usize, rewind: usize) -> usize {
        let pinned = self.sinks.div_ceil(PAGE);
        let blocks = len.div_ceil(PAGE);
        // The window may begin and end within a page.
        let recent =
            blocks.saturating_sub(pinned).min((self.window.saturating_add(rewind)).div_ceil(PAGE).saturating_add(1));
        let kept = (0..pinned.min(blocks)).chain(blocks - recent..blocks);
        let size = |quantization| Page::new(self.kind, quantization, self.heads).bytes();
        let (plain, narrow) = (size(None), size(self.quantization));
        kept.map(|block| if self.quantization.is_some_and(|q| block * PAGE >= q.start) { narrow } else { plain }).sum()
    }

    /// Memory of the pages, in bytes; shared ones count in each table.
    pub fn bytes(&self) -> usize {
        self.pinned.iter().chain(&self.recent).map(|page| page.bytes()).sum()
    }
}
