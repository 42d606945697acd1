//! Attention of a step's lanes over the pages of their rows, read in place. Called by `engine::model` after `project`.
//!
//! One lane and key/value head is a task. It walks the blocks of 64 absolute positions in order with a running maximum
//! and sum (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018), so no buffer grows with the
//! length. Wholly masked blocks are skipped and masked keys add exact zeros; all 64 slots go through the same vector
//! code, so the order of every sum depends only on position, window and sinks (arXiv 2309.17453 for the latter).

use std::ops::Range;

use super::aligned::prefetch;
use super::pages::{PAGE, Table};
use super::{Tables, Workspace, each_part};
use crate::error::Result;
use crate::ops::ctx::Ctx;
use crate::ops::simd::{self, Simd, simd_fn};

/// attention = softmax(q k / sqrt(D)) v over the visible positions of each lane's row.
pub fn attend(ctx: &mut Ctx, ws: &mut Workspace, tables: &impl Tables) -> Result<()> {
    ctx.launch(0);
    let (family, heads) = (ctx.family(), ws.sizes.heads);
    let (size, part) = (heads.attention_size(), heads.group() * heads.dim);
    let (lanes, query) = (&ws.lanes, &ws.query);
    let task = |i: usize, out: &mut [f32]| {
        let (lane, head) = (lanes[i / heads.key_value], i % heads.key_value);
        let query = &query[i / heads.key_value * 2 * size..][..2 * size];
        let table = tables.table(lane.row);
        let moved = table.sinks() > 0 && lane.position > lane.sink_position;
        let query = Query {
            window: &query[head * part..][..part],
            sinks: if moved { &query[size + head * part..][..part] } else { &[] },
            position: lane.position,
        };
        attend_group(family, query, table, head, out);
    };
    let keys: usize = lanes.iter().map(|lane| lane.position.min(tables.table(lane.row).window())).sum();
    // Keys and values, at what one core reads and multiplies in a nanosecond, roughly.
    let nanoseconds = (keys * heads.attention * heads.dim * 8) as f64 / 40.0;
    each_part(ctx, nanoseconds, &mut ws.attention, part, task);
    Ok(())
}

/// The query heads of one key/value head at one position.
#[derive(Clone, Copy)]
struct Query<'a> {
    /// (G, D), rotated to `position`.
    window: &'a [f32],
    /// The same rotated for the sinks; empty where that is the same rotation.
    sinks: &'a [f32],
    position: usize,
}

/// The visible slots of a block: those before `sinks` and those in `start..end`.
#[derive(Clone, Copy)]
struct Visible {
    sinks: usize,
    start: usize,
    end: usize,
}

impl Visible {
    #[inline(always)]
    fn of(block: usize, position: usize, table: &Table) -> Self {
        let slot = |p: usize| p.saturating_sub(block * PAGE).min(PAGE);
        let oldest = (position + 1).saturating_sub(table.window());
        Self { sinks: slot(table.sinks().min(position + 1)), start: slot(oldest), end: slot(position + 1) }
    }

    #[inline(always)]
    fn is_empty(self) -> bool {
        self.sinks == 0 && self.start >= self.end
    }
}

simd_fn! {
/// The heads of `query` over all visible blocks; `out` (G, D).
fn attend_group<S>(query: Query, table: &Table, head: usize, out: &mut [f32]) {
    let dim = table.heads().dim;
    for (i, out) in out.chunks_exact_mut(dim).enumerate() {
        let (window, sinks) = (&query.window[i * dim..][..dim], query.sinks.get(i * dim..(i + 1) * dim));
        let mut state = State { max: f32::NEG_INFINITY, sum: 0.0, out };
        state.out.fill(0.0);
        let mut block = 0;
        while block <= query.position / PAGE {
            let visible = Visible::of(block, query.position, table);
            if visible.is_empty() {
                // Between the sinks and the window: go on where the window starts.
                block = (block + 1).max((query.position + 1).saturating_sub(table.window()) / PAGE);
                continue;
            }
            let page = table.page(block).expect("visible positions were written and are kept");
            // While one half of a block is worked on, the other and then the next block's are on their way.
            let (keys, values) = (page.keys(head, dim), page.values(head, dim));
            let next = table.page(block + 1).map_or(keys, |page| page.keys(head, dim));
            let mut scores = score::<S>(window, keys, values);
            if let (Some(query), true) = (sinks, visible.sinks > 0) {
                let turned = score::<S>(query, keys, values);
                scores[..visible.sinks].copy_from_slice(&turned[..visible.sinks]);
            }
            state.add::<S>(scores, visible, values, next);
            block += 1;
        }
        let sum = state.sum;
        state.out.iter_mut().for_each(|x| *x /= sum);
    }
}
}

/// The running softmax of one head.
struct State<'a> {
    max: f32,
    sum: f32,
    out: &'a mut [f32],
}

impl State<'_> {
    #[inline(always)]
    fn add<S: Simd>(&mut self, scores: [f32; PAGE], visible: Visible, values: &[f32], next: &[f32]) {
        let Visible { sinks, start, end } = visible;
        let scale = 1.0 / (self.out.len() as f32).sqrt();
        let mut weights = [0f32; PAGE];
        for j in 0..PAGE {
            let seen = (j < sinks) | ((j >= start) & (j < end));
            weights[j] = if seen { scores[j] * scale } else { f32::NEG_INFINITY };
        }
        let max = self.max.max(simd::max(&weights));
        if max > self.max {
            // The first time this is e^-inf = 0 on zeros.
            let shrink = simd::exp::<S>(self.max - max);
            self.sum *= shrink;
            self.out.iter_mut().for_each(|x| *x *= shrink);
            self.max = max;
        }
        for weight in &mut weights {
            *weight = simd::exp::<S>(*weight - max);
        }
        self.sum += simd::sum(&weights);
        if sinks < start {
            accumulate::<S>(self.out, &weights, values, next, 0..sinks);
            accumulate::<S>(self.out, &weights, values, next, start..end);
        } else {
            accumulate::<S>(self.out, &weights, values, next, 0..end);
        }
    }
}

/// 64 products of a query with the keys (D, 64) of a block, each one chain over D.
#[inline(always)]
fn score<S: Simd>(query: &[f32], keys: &[f32], next: &[f32]) -> [f32; PAGE] {
    let mut acc = [0f32; PAGE];
    for ((i, q), keys) in query.iter().enumerate().zip(keys.as_chunks::<PAGE>().0) {
        prefetch::<f32, PAGE>(next.as_ptr().wrapping_add(i * PAGE));
        for j in 0..PAGE {
            acc[j] = S::fma(*q, keys[j], acc[j]);
        }
    }
    acc
}

/// out += the sum of weight times value over `slots`, in order. Slots that are not visible hold stale
/// memory: they are left out, which adds the same as a weight of zero would.
#[inline(always)]
fn accumulate<S: Simd>(out: &mut [f32], weights: &[f32; PAGE], values: &[f32], next: &[f32], slots: Range<usize>) {
    let mut done = 0;
    while out.len() - done >= 64 {
        columns::<S, 64>(out, done, weights, values, next, slots.clone());
        done += 64;
    }
    while out.len() - done >= 16 {
        columns::<S, 16>(out, done, weights, values, next, slots.clone());
        done += 16;
    }
    while done < out.len() {
        columns::<S, 1>(out, done, weights, values, next, slots.clone());
        done += 1;
    }
}

/// `accumulate` for N columns from `first` on.
#[inline(always)]
fn columns<S: Simd, const N: usize>(
    out: &mut [f32],
    first: usize,
    weights: &[f32; PAGE],
    values: &[f32],
    next: &[f32],
    slots: Range<usize>,
) {
    let dim = out.len();
    assert!(first + N <= dim && slots.end <= PAGE && values.len() == dim * PAGE);
    let out: &mut [f32; N] = (&mut out[first..first + N]).try_into().expect("N columns");
    let mut acc = *out;
    let (values, next) = (values.as_ptr(), next.as_ptr());
    for j in slots {
        prefetch::<f32, N>(next.wrapping_add(j * dim + first));
        // SAFETY: j < PAGE and first + N <= dim, so the row lies inside the dim * PAGE values.
        let row = unsafe { &*values.add(j * dim + first).cast::<[f32; N]>() };
        for i in 0..N {
            acc[i] = S::fma(weights[j], row[i], acc[i]);
        }
    }
    *out = acc;
}
