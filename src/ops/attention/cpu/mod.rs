//! Attention on the CPU: what forward and backward share. One task is one (sequence, key/value head) with all query heads
//! of its group, so gradients of keys and values are summed by one task in one order.
//!
//! Blocks of `QUERIES` x `KEYS` go through the register tiles of `gemm`. Keys and values of a head are packed into panels
//! once a task, in scratch that a thread keeps; it grows with T, never with T squared. Wholly masked blocks are skipped.

mod backward;
mod forward;

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::Range;

pub use backward::{Inputs, backward};
pub use forward::forward;

use super::{Attention, Sight};
use crate::ops::gemm::{Matrix, Store, Tile, multiply_panel, pack_panel, panel_width};
use crate::ops::simd::{Family, LANES, simd_fn};

/// Queries of a block: whole register tiles in every family.
const QUERIES: usize = 48;
/// Keys of a block: whole panels in every family.
const KEYS: usize = 64;

/// The sizes that every task shares.
#[derive(Clone, Copy)]
struct Plan<'a> {
    family: Family,
    shape: Attention<'a>,
    /// Width of the panels over keys, which `KEYS` is a multiple of.
    key_width: usize,
    /// Width of the panels over the columns of a head.
    dim_width: usize,
    /// D rounded up to whole panels: the stride of sums over keys or queries.
    padded: usize,
}

impl<'a> Plan<'a> {
    fn new(family: Family, shape: Attention<'a>) -> Self {
        let dim_width = panel_width(family, shape.heads.dim);
        let padded = shape.heads.dim.next_multiple_of(dim_width);
        Self { family, shape, key_width: panel_width(family, shape.seq.min(KEYS)), dim_width, padded }
    }

    /// Elements of panels over all keys, `[T / width][D][width]`.
    fn key_panels(&self) -> usize {
        self.shape.seq.next_multiple_of(self.key_width) * self.shape.heads.dim
    }

    /// The blocks of queries of a sequence.
    fn query_blocks(&self) -> usize {
        self.shape.seq.div_ceil(QUERIES)
    }

    fn queries(&self, block: usize) -> Range<usize> {
        block * QUERIES..(block * QUERIES + QUERIES).min(self.shape.seq)
    }

    /// The blocks of keys of which a block of queries sees anything.
    fn meetings(sight: Sight<'a>, queries: Range<usize>) -> impl Iterator<Item = Meeting> {
        let first = sight.first_key(queries.start) / KEYS;
        (first..queries.end.div_ceil(KEYS)).map(move |block| Meeting::new(sight, &queries, block * KEYS))
    }

    /// A head's rows of one sequence as a matrix (T, D); `column` is the head's first.
    fn head<'b>(&self, data: &'b [f32], sequence: usize, column: usize, stride: usize) -> Matrix<'b> {
        let Attention { seq, heads, .. } = self.shape;
        let data = &data[sequence * seq * stride + column..];
        Matrix { data, rows: seq, cols: heads.dim, row_stride: stride, col_stride: 1 }
    }

    /// Packs the transposed rows, `[T / width][D][width]`: the right side of a product that gives a row of keys.
    fn pack_keys(&self, head: Matrix, packed: &mut [f32]) {
        let panels = packed.chunks_exact_mut(self.shape.heads.dim * self.key_width).enumerate();
        panels.for_each(|(panel, packed)| pack_panel(self.family, head.t(), panel, self.key_width, packed));
    }

    /// Packs rows as they are, `[padded / width][rows][width]`: the right side of a product that gives a row of a head.
    fn pack_rows(&self, rows: Matrix, packed: &mut [f32]) {
        let panels = packed[..rows.rows * self.padded].chunks_exact_mut(rows.rows * self.dim_width).enumerate();
        panels.for_each(|(panel, packed)| pack_panel(self.family, rows, panel, self.dim_width, packed));
    }

    /// Products of rows of a head, lying close, with the keys of a meeting: its rows of `to`, of stride `KEYS`.
    fn times_keys(&self, rows: &[f32], packed: &[f32], meeting: &Meeting, to: &mut [f32]) {
        let (dim, width) = (self.shape.heads.dim, self.key_width);
        let a = Matrix::new(&rows[meeting.rows.start * dim..meeting.rows.end * dim], meeting.rows.len(), dim);
        for start in (0..meeting.columns).step_by(width) {
            let panel = &packed[(meeting.first_key + start) * dim..][..dim * width];
            let out = Tile { c: &mut to[start..], stride: KEYS, cols: width, store: Store::Set };
            multiply_panel(self.family, width, a, panel, out);
        }
    }

    /// `to` += a (m, k) times rows `first..first + k` of what `pack_rows` packed of `total` rows; `to` has stride `padded`.
    fn add_product(&self, a: Matrix, packed: &[f32], (first, total): (usize, usize), to: &mut [f32]) {
        let width = self.dim_width;
        for start in (0..self.padded).step_by(width) {
            let panel = &packed[start * total + first * width..][..a.cols * width];
            let out = Tile { c: &mut to[start..], stride: self.padded, cols: width, store: Store::Add };
            multiply_panel(self.family, width, a, panel, out);
        }
    }
}

/// Where a block of queries and a block of keys see each other.
struct Meeting {
    /// Position of the block's first key.
    first_key: usize,
    /// The queries that see any of the keys, counted from the block's first query.
    rows: Range<usize>,
    /// The first of the keys that the queries see at all.
    columns: usize,
    /// For each of `rows`, if anything in the block is hidden: position of the first of them.
    masked_from: Option<usize>,
}

impl Meeting {
    fn new(sight: Sight, queries: &Range<usize>, first_key: usize) -> Self {
        let columns = (first_key + KEYS).min(queries.end) - first_key;
        let start = queries.start.max(first_key);
        // The last key is seen by itself and the queries after it up to one whose window or document begins later.
        let (mut end, last) = (queries.end, first_key + columns - 1);
        while sight.first_key(end - 1) > last {
            end -= 1;
        }
        let whole = last <= start && sight.first_key(end - 1) <= first_key;
        Self {
            first_key,
            rows: start - queries.start..end - queries.start,
            columns,
            masked_from: (!whole || !columns.is_multiple_of(LANES)).then_some(start),
        }
    }

    /// `columns` in whole vectors; the columns past it are hidden by `mask`.
    fn lanes(&self) -> usize {
        self.columns.next_multiple_of(LANES)
    }

    /// Gives hidden scores a probability of exactly zero.
    fn mask(&self, sight: Sight, scores: &mut [f32]) {
        let Some(start) = self.masked_from else { return };
        for (i, scores) in scores.chunks_exact_mut(KEYS).take(self.rows.len()).enumerate() {
            let query = start + i;
            let hidden_before = sight.first_key(query).saturating_sub(self.first_key).min(KEYS);
            let hidden_after = (query + 1 - self.first_key).min(self.columns);
            scores[..hidden_before].fill(f32::NEG_INFINITY);
            scores[hidden_after..self.lanes()].fill(f32::NEG_INFINITY);
        }
    }

    /// The meeting's rows of a block of probabilities, and the same transposed.
    fn block<'a>(&self, data: &'a [f32]) -> Matrix<'a> {
        Matrix { data, rows: self.rows.len(), cols: self.columns, row_stride: KEYS, col_stride: 1 }
    }
}

simd_fn! {
/// `to` (len, D) = `factor` times rows `range` of a head.
fn copy_rows<S>(head: Matrix, range: Range<usize>, factor: f32, to: &mut [f32]) {
    for (position, to) in range.zip(to.chunks_exact_mut(head.cols)) {
        let from = &head.data[position * head.row_stride..][..head.cols];
        to.iter_mut().zip(from).for_each(|(to, from)| *to = from * factor);
    }
}
}

simd_fn! {
/// Stores `factor` times `from` as a row of an output.
fn store_row<S>(to: &mut [f32], from: &[f32], factor: f32, store: Store) {
    to.iter_mut().zip(from).for_each(|(to, from)| store.put(to, from * factor));
}
}

/// An output's rows, lent to tasks that write different columns of them.
#[derive(Clone, Copy)]
struct Columns<'a> {
    data: *mut f32,
    len: usize,
    stride: usize,
    borrowed: PhantomData<&'a mut [f32]>,
}

// SAFETY: elements are reached through `slice` alone, whose callers promise that no two tasks hold the same one.
unsafe impl Sync for Columns<'_> {}

impl<'a> Columns<'a> {
    fn new(data: &'a mut [f32], stride: usize) -> Self {
        Self { data: data.as_mut_ptr(), len: data.len(), stride, borrowed: PhantomData }
    }

    /// Elements `column..column + len` of a row.
    ///
    /// # Safety
    /// While the slice lives nobody else may hold any of these elements.
    unsafe fn slice(self, row: usize, column: usize, len: usize) -> &'a mut [f32] {
        let start = row * self.stride + column;
        assert!(start + len <= self.len, "row {row} lies outside the output");
        // SAFETY: the range was checked, `data` is borrowed exclusively for 'a, and the caller excludes other holders.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(start), len) }
    }
}

/// Runs `f` on scratch of those lengths, which this thread keeps for the next task. The contents are what the last task
/// left. `f` must not hand work to the pool: a stolen task would find the scratch in use.
fn with_scratch<const N: usize>(lengths: [usize; N], f: impl FnOnce([&mut [f32]; N])) {
    thread_local!(static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) });
    SCRATCH.with_borrow_mut(|scratch| {
        let total = scratch_len(&lengths);
        if scratch.len() < total {
            *scratch = vec![0.0; total];
        }
        // Each part starts at a cache line, else most vector loads would touch two.
        let offset = scratch.as_ptr().align_offset(64).min(LANES);
        let mut rest = &mut scratch[offset..];
        f(lengths.map(|len| {
            let (part, after) = std::mem::take(&mut rest).split_at_mut(len.next_multiple_of(LANES));
            rest = after;
            &mut part[..len]
        }));
    });
}

/// Elements that scratch of those parts takes.
fn scratch_len(lengths: &[usize]) -> usize {
    lengths.iter().map(|len| len.next_multiple_of(LANES)).sum::<usize>() + LANES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::heads::Heads;

    #[test]
    fn meetings_cover_each_visible_pair_once_and_hide_the_others() {
        let heads = Heads { attention: 1, key_value: 1, dim: 4 };
        for seq in [1, 5, 48, 49, 63, 64, 65, 130, 200] {
            // Documents of all lengths, of one, and of one token each.
            let lengths: [&dyn Fn(usize) -> u32; 3] = [
                &|t| {
                    [0, 1, 3, 7, 60, 64, 65, 129, 190][..].iter().copied().filter(|s| *s <= t as u32).max().unwrap_or(0)
                },
                &|_| 0,
                &|t| t as u32,
            ];
            let documents = lengths.map(|start| (0..seq).map(start).collect::<Vec<u32>>());
            let starts = documents.iter().map(|s| Some(&s[..])).chain([None]);
            for (starts, window) in starts.flat_map(|s| {
                [None, Some(1), Some(2), Some(17), Some(64), Some(100), Some(usize::MAX)].map(|window| (s, window))
            }) {
                let shape = Attention { batch: 1, seq, heads, window, starts };
                let plan = Plan::new(Family::detect(), shape);
                let mut seen = vec![0; seq * seq];
                for queries in (0..plan.query_blocks()).map(|block| plan.queries(block)) {
                    for meeting in Plan::meetings(shape.sight(0), queries.clone()) {
                        let mut scores = vec![1f32; QUERIES * KEYS];
                        meeting.mask(shape.sight(0), &mut scores);
                        for (row, scores) in meeting.rows.clone().zip(scores.chunks_exact(KEYS)) {
                            let visible = scores[..meeting.lanes()].iter().enumerate().filter(|(_, s)| s.is_finite());
                            visible.for_each(|(j, _)| seen[(queries.start + row) * seq + meeting.first_key + j] += 1);
                        }
                    }
                }
                for (i, j) in (0..seq * seq).map(|at| (at / seq, at % seq)) {
                    let own = starts.is_none_or(|s| j >= s[i] as usize);
                    let visible = j <= i && window.is_none_or(|w| i - j < w) && own;
                    assert_eq!(seen[i * seq + j], usize::from(visible), "T {seq}, window {window:?}: {i} sees {j}");
                }
            }
        }
    }

    #[test]
    fn scratch_grows_with_the_length_not_with_its_square() {
        for family in Family::ALL {
            let parts = |seq| {
                let heads = Heads { attention: 1, key_value: 1, dim: 64 };
                let plan = Plan::new(family, Attention { batch: 1, seq, heads, window: None, starts: None });
                [scratch_len(&forward::scratch(&plan)), scratch_len(&backward::scratch(&plan))]
            };
            for (short, long) in parts(4096).into_iter().zip(parts(8192)) {
                assert!(long <= 2 * short && short < 6 * 4096 * 64, "{}: {short}, then {long}", family.name());
            }
        }
    }
}
