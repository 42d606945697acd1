//! The key/value cache of one row: a page table a layer, one length, and the rule for what may be dropped or cut back.
//!
//! Owned by `engine::Row`. The decode ops write and read the tables in place; this file keeps them of one length, shares
//! them between rows (a clone shares every page until it writes to it) and forgets what no token can see any more.

use crate::error::{Error, Result};
use crate::ops::decode::gpu::pool::Pools;
pub use crate::ops::decode::page::{CacheType, Quantization};
use crate::ops::decode::pages::Table;
use crate::ops::heads::Heads;

/// Sinks that full layers keep when the text outgrows the window.
pub const DEFAULT_SINKS: usize = 4;

/// What a row keeps of its past. The text it makes depends on these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheSettings {
    /// Keys that a full layer sees, the token itself included; `None` is the model's context. Layers that the model's
    /// own config windows keep theirs.
    pub window: Option<usize>,
    /// First positions that full layers see for ever.
    pub sinks: usize,
    /// What numbers are kept in; `None` is f32 for weights of f32, else bf16.
    pub kind: Option<CacheType>,
    pub quantization: Option<Quantization>,
}

impl Default for CacheSettings {
    fn default() -> Self {
        Self { window: None, sinks: DEFAULT_SINKS, kind: None, quantization: None }
    }
}

impl CacheSettings {
    pub fn validate(&self) -> Result<()> {
        if self.window == Some(0) {
            return Err(Error::usage("a cache window of 0 keys sees nothing").with_hint("use at least 1"));
        }
        match self.quantization {
            Some(Quantization { bits, .. }) if bits != 4 && bits != 8 => {
                Err(Error::usage(format!("a cache of {bits} bits is not possible")).with_hint("use 8 or 4"))
            }
            Some(Quantization { group, .. }) if group < 8 || group % 8 != 0 => {
                let what = format!("groups of {group} numbers are not possible");
                Err(Error::usage(what).with_hint("use a multiple of 8; 64 is usual"))
            }
            _ => Ok(()),
        }
    }

    /// Window and sinks of a layer whose own window the config gives, in a model of that context.
    pub fn layer(&self, own: Option<usize>, context: usize) -> (usize, usize) {
        match own {
            Some(window) => (window, 0),
            None => (self.window.unwrap_or(context), self.sinks),
        }
    }
}

/// Keys and values of one row.
#[derive(Clone)]
pub struct Cache {
    tables: Vec<Table>,
    len: usize,
    /// Positions that may be taken back at any time: pages that these can need are kept.
    rewind: usize,
}

impl Cache {
    /// An empty cache with one (window, sinks) a layer.
    pub fn new(
        heads: Heads,
        (kind, quantization): (CacheType, Option<Quantization>),
        layers: impl IntoIterator<Item = (usize, usize)>,
        rewind: usize,
    ) -> Self {
        let tables =
            layers.into_iter().map(|(window, sinks)| Table::new(heads, kind, quantization, window, sinks)).collect();
        Self { tables, len: 0, rewind }
    }

    /// The same with its pages in the memory of a GPU.
    pub fn in_pools(mut self, pools: &Pools) -> Self {
        self.tables = self.tables.into_iter().map(|table| table.in_pools(Some(pools.clone()))).collect();
        self
    }

    /// Positions stored.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn table(&self, layer: usize) -> &Table {
        &self.tables[layer]
    }

    /// The pages of all layers on a GPU, told apart for ever.
    pub fn device_pages(&self) -> impl Iterator<Item = u64> {
        self.tables.iter().flat_map(Table::device_pages)
    }

    /// Makes room for the keys and values of a position, the next one or an earlier one, in every layer.
    pub fn reserve(&mut self, position: usize) {
        self.tables.iter_mut().for_each(|table| table.reserve(position));
    }

    /// Where a query at `position` is rotated to for the sinks: the same in all layers that have any.
    pub fn sink_position(&self, position: usize) -> usize {
        let full = self.tables.iter().find(|table| table.sinks() > 0);
        full.map_or(position, |table| table.sink_position(position))
    }

    /// Notes that every layer has written `count` positions more, and drops the pages that no permitted cut can need.
    pub fn advance(&mut self, count: usize) {
        self.len += count;
        let oldest = self.len.saturating_sub(self.rewind);
        self.tables.iter_mut().for_each(|table| table.release(oldest));
    }

    /// Cuts back to the first `len` positions, as if the rest had never been. Fails, changing nothing, if a page that the
    /// next token would see was dropped, or if there are fewer positions.
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        if len > self.len {
            return Err(Error::op("truncate", format!("at most {} positions", self.len), len.to_string()));
        }
        if len == self.len {
            return Ok(()); // A page that is reserved for the next position stays.
        }
        if let Some(table) = self.tables.iter().find(|table| !table.can_truncate(len)) {
            let dropped = table.dropped();
            let what = format!("cannot go back to position {len}: {}..{} were dropped", dropped.start, dropped.end);
            return Err(Error::failed(what).with_hint(format!("at most {} positions can be taken back", self.rewind)));
        }
        self.tables.iter_mut().for_each(|table| table.truncate(len));
        self.len = len;
        Ok(())
    }

    /// Appends all pages to `bytes`.
    pub fn write_to(&self, bytes: &mut Vec<u8>) -> Result<()> {
        bytes.extend((self.len as u64).to_le_bytes());
        self.tables.iter().try_for_each(|table| table.write_to(bytes, self.len))
    }

    /// Takes what `write_to` appended, into an empty cache made in the same way; `None` if that is not what `bytes` are.
    pub fn read_from(&mut self, mut bytes: &[u8]) -> Option<()> {
        self.len = usize::try_from(u64::from_le_bytes(*bytes.split_off(..8)?.first_chunk()?)).ok()?;
        self.tables.iter_mut().try_for_each(|table| table.read_from(&mut bytes, self.len))?;
        bytes.is_empty().then_some(())
    }

    /// The most memory that a text of `len` positions takes.
    pub fn bytes_at(&self, len: usize) -> usize {
        self.tables.iter().map(|table| table.bytes_at(len, self.rewind)).sum()
    }

    /// Memory of the pages; those shared with other rows count here too.
    pub fn bytes(&self) -> usize {
        self.tables.iter().map(Table::bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADS: Heads = Heads { attention: 1, key_value: 1, dim: 2 };

    fn fill(cache: &mut Cache, to: usize) {
        for position in cache.len()..to {
            let x = [position as f32; 2];
            cache.tables.iter_mut().for_each(|table| table.write(position, &x, &x));
            cache.advance(1);
        }
    }

    #[test]
    fn memory_is_bounded_by_window_sinks_and_rewind() {
        for (window, sinks, pages) in [(1, 0, 3), (64, 4, 5), (100, 130, 8)] {
            let mut cache = Cache::new(HEADS, (CacheType::F32, None), [(window, sinks)], 64);
            fill(&mut cache, 5000);
            assert!(cache.bytes() <= pages * 64 * 2 * 2 * 4, "window {window}: {} bytes", cache.bytes());
        }
    }

    #[test]
    fn cuts_within_the_rewind_succeed_and_deeper_ones_change_nothing() {
        for (window, sinks) in [(1, 0), (5, 3), (64, 4), (200, 70)] {
            for len in [1, 63, 64, 65, 300, 1000] {
                let mut full = Cache::new(HEADS, (CacheType::F32, None), [(window, sinks), (2000, 0)], 64);
                fill(&mut full, len);
                for to in 0..=len {
                    let mut cache = full.clone();
                    let before = (cache.len(), cache.bytes());
                    match cache.truncate(to) {
                        Ok(()) => {
                            fill(&mut cache, to);
                            assert_eq!(cache.len(), to);
                            let table = cache.table(0);
                            for p in (0..to).filter(|p| p + window > to || *p < sinks) {
                                assert!(table.holds(p), "window {window}, {len} cut to {to}: position {p} is gone");
                            }
                            fill(&mut cache, to + 70);
                        }
                        Err(_) => {
                            assert!(to + 64 < len, "window {window}: {len} to {to} must be permitted");
                            assert_eq!((cache.len(), cache.bytes()), before);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_clone_shares_pages_until_one_side_writes() {
        let mut first = Cache::new(HEADS, (CacheType::F32, None), [(1000, 0)], 64);
        fill(&mut first, 70);
        let mut second = first.clone();
        let value = |cache: &Cache, p: usize| cache.table(0).value(p);
        second.truncate(66).unwrap();
        second.tables[0].write(66, &[-1.0; 2], &[-1.0; 2]);
        assert_eq!((value(&first, 66), value(&second, 66)), (66.0, -1.0));
        assert_eq!((value(&first, 65), value(&second, 65)), (65.0, 65.0));
    }
}
