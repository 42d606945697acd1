//! Attention of a step's lanes over the pages of their rows, read in place. Called by `engine::model` after `project`.
//!
//! One lane and key/value head is a task. It walks the blocks of 64 absolute positions in order with a running maximum
//! and sum (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018), so no buffer grows with the
//! length. Wholly masked blocks are skipped and masked keys add exact zeros; all 64 slots go through the same vector
//! code, so the order of every sum depends only on position, window and sinks (arXiv 2309.17453 for the latter).

use std::ops::Range;

use super::page::{CacheType, PAGE, Page, Stored, head_len};
use super::pages::Table;
use super::{Layer, Pass, Tables, rms_norm, rotate};
use crate::ops::gemm::Bf16x2;
use crate::ops::heads::MAX_DIM;
use crate::ops::simd::{self, Family, simd_fn};
use crate::ops::team::Member;

impl<T: Tables> Pass<'_, T> {
    /// attention = softmax(q k / sqrt(D)) v over the visible positions of each lane's row, the lanes' own included.
    pub(super) fn attend(&self, member: &Member, layer: &Layer, index: usize) {
        let (lanes, heads) = (self.lanes, self.sizes.heads);
        let tasks = || member.share(lanes.len() * heads.key_value).map(|i| (i / heads.key_value, i % heads.key_value));
        if lanes.windows(2).all(|pair| pair[0].row != pair[1].row) {
            tasks().for_each(|(lane, head)| self.turn(layer, index, lane, head));
        } else {
            // Two lanes of a row may share an element of a page, so a head is one member's in all of them; and a lane sees
            // what others have appended.
            let heads = member.share(heads.key_value);
            heads.for_each(|head| (0..lanes.len()).for_each(|lane| self.turn(layer, index, lane, head)));
            member.sync();
        }
        let (size, part) = (heads.attention_size(), heads.group() * heads.dim);
        let mut ahead = tasks().skip(1);
        for (i, head) in tasks() {
            let (lane, table) = (lanes[i], self.tables.table(index, lanes[i].row));
            let after = ahead.next().and_then(|(i, head)| {
                let (lane, table) = (lanes[i], self.tables.table(index, lanes[i].row));
                let first =
                    if table.sinks() > 0 { 0 } else { (lane.position + 1).saturating_sub(table.window()) / PAGE };
                table.page(first).map(|page| (page, head))
            });
            // SAFETY: the queries and the output of this task are this member's, and nobody writes visible slots now.
            unsafe {
                let query = self.query.read(i * 2 * size, 2 * size);
                let moved = table.sinks() > 0 && lane.position > lane.sink_position;
                let query = Query {
                    window: &query[head * part..][..part],
                    sinks: if moved { &query[size + head * part..][..part] } else { &[] },
                    position: lane.position,
                    table,
                    head,
                    after,
                };
                attend_group(self.family, query, self.attention.part(i * size + head * part, part));
            }
        }
    }

    /// Normalises and rotates the queries and the key of one key/value head, the queries for the sinks too where that
    /// differs, and writes key and value to the lane's page.
    fn turn(&self, layer: &Layer, index: usize, i: usize, head: usize) {
        let (family, heads, eps, lane) = (self.family, self.sizes.heads, self.sizes.rms_norm_eps, self.lanes[i]);
        let (dim, size, part) = (heads.dim, heads.attention_size(), heads.group() * heads.dim);
        let (here, there) = self.angles[i * 2 * dim..][..2 * dim].split_at(dim);
        let norms = layer.qk_norm.as_ref();
        // SAFETY: these heads' parts of the lane are this member's, in every buffer and in the page.
        unsafe {
            let row = |at: usize, len: usize| self.qkv.part(i * heads.qkv_size() + at, len);
            let (from, key) = (row(head * part, part), row(size + head * dim, dim));
            let value = row(size + heads.key_value * dim + head * dim, dim);
            let query = self.query.part(i * 2 * size + head * part, part);
            query.copy_from_slice(from);
            if let Some([weight, _]) = norms {
                query.chunks_exact_mut(dim).for_each(|head| rms_norm(family, head, weight, eps));
            }
            if lane.position != lane.sink_position {
                let sinks = self.query.part(i * 2 * size + size + head * part, part);
                sinks.copy_from_slice(query);
                sinks.chunks_exact_mut(dim).for_each(|head| rotate(family, head, there));
            }
            query.chunks_exact_mut(dim).for_each(|head| rotate(family, head, here));
            if let Some([_, weight]) = norms {
                rms_norm(family, key, weight, eps);
            }
            rotate(family, key, here);
            let page = self.tables.table(index, lane.row).page(lane.position / PAGE);
            page.expect("the lane's page was reserved").write(head, lane.position % PAGE, key, value);
        }
    }
}

/// The query heads of one key/value head at one position.
#[derive(Clone, Copy)]
struct Query<'a> {
    /// (G, D), rotated to `position`.
    window: &'a [f32],
    /// The same rotated for the sinks; empty where that is the same rotation.
    sinks: &'a [f32],
    position: usize,
    table: &'a Table,
    /// The key/value head.
    head: usize,
    /// The page and head that is looked at next.
    after: Option<(&'a Page, usize)>,
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

/// The heads of `query` over all visible blocks; `out` (G, D).
fn attend_group(family: Family, query: Query, out: &mut [f32]) {
    match query.table.kind() {
        CacheType::F32 => walk_group::<f32>(family, query, out),
        CacheType::Bf16 => walk_group::<Bf16x2>(family, query, out),
    }
}

fn walk_group<E: Stored>(family: Family, query: Query, out: &mut [f32]) {
    let Query { table, head, after, .. } = query;
    let dim = table.heads().dim;
    let (mut window, mut sinks) = ([E::default(); MAX_DIM], [E::default(); MAX_DIM]);
    let (window, sinks) = (&mut window[..dim.div_ceil(E::STEPS)], &mut sinks[..dim.div_ceil(E::STEPS)]);
    // Room for one head of a quantised page.
    let mut expanded = Vec::new();
    for (i, out) in out.chunks_exact_mut(dim).enumerate() {
        convert(family, &query.window[i * dim..][..dim], window);
        if !query.sinks.is_empty() {
            convert(family, &query.sinks[i * dim..][..dim], sinks);
        }
        out.fill(0.0);
        let mut walk = Walk {
            family,
            window,
            sinks: if query.sinks.is_empty() { None } else { Some(sinks) },
            head,
            max: f32::NEG_INFINITY,
            sum: 0.0,
            out,
        };
        let mut block = 0;
        while block <= query.position / PAGE {
            let visible = Visible::of(block, query.position, table);
            if visible.is_empty() {
                // Between the sinks and the window: go on where the window starts.
                block = (block + 1).max((query.position + 1).saturating_sub(table.window()) / PAGE);
                continue;
            }
            let more = block < query.position / PAGE;
            let next = if more { table.page(block + 1).map(|page| (page, head)) } else { after };
            let page = table.page(block).expect("visible positions were written and are kept");
            walk.block(page, next, visible, &mut expanded);
            block += 1;
        }
        divide(family, walk.out, walk.sum);
    }
}

simd_fn! {
/// Numbers as elements.
fn convert<S, type E: Stored>(x: &[f32], elements: &mut [E]) {
    fill::<E>(x, elements);
}
}

#[inline(always)]
fn fill<E: Stored>(x: &[f32], elements: &mut [E]) {
    if E::STEPS == 1 {
        for (to, x) in elements.iter_mut().zip(x) {
            *to = E::new(*x, 0.0);
        }
    } else {
        for (to, x) in elements.iter_mut().zip(x.as_chunks::<2>().0) {
            *to = E::new(x[0], x[1]);
        }
    }
}

simd_fn! {
fn divide<S>(out: &mut [f32], sum: f32) {
    let inverse = 1.0 / sum;
    for x in out {
        *x *= inverse;
    }
}
}

/// One query on its way over the blocks: the running softmax.
struct Walk<'a, E> {
    family: Family,
    window: &'a [E],
    sinks: Option<&'a [E]>,
    head: usize,
    max: f32,
    sum: f32,
    out: &'a mut [f32],
}

impl<E: Stored> Walk<'_, E> {
    /// Adds the visible positions of a block. While one half of it is worked on, the other and then `next` are on their
    /// way from memory.
    fn block(&mut self, page: &Page, next: Option<(&Page, usize)>, visible: Visible, room: &mut Vec<E>) {
        let dim = self.out.len();
        // SAFETY: what a pass writes to pages is written before anybody looks at it.
        let (keys, values) = unsafe {
            match (E::of(page), page) {
                (Some(halves), _) => halves.head(self.head, dim),
                (None, Page::Quantized(quantized)) => {
                    let (keys, values) = head_len::<E>(dim);
                    room.resize(keys + values, E::default());
                    let (keys, values) = room.split_at_mut(keys);
                    quantized.expand(self.family, self.head, dim, keys, values);
                    (&*keys, &*values)
                }
                _ => unreachable!("a table's pages are of its type or quantised"),
            }
        };
        let score = |query: &[E]| {
            let [scores] = E::rows_tile::<1, PAGE>(self.family, query, query.len(), keys, PAGE, values.as_ptr());
            scores
        };
        let mut scores = score(self.window);
        if let (Some(query), true) = (self.sinks, visible.sinks > 0) {
            scores[..visible.sinks].copy_from_slice(&score(query)[..visible.sinks]);
        }
        let mut weights = [E::default(); PAGE];
        soften(self.family, &mut scores, visible, (&mut self.max, &mut self.sum, self.out), &mut weights);
        let next = next.and_then(|(page, head)| Some(E::of(page)?.keys_at(head, dim))).unwrap_or(keys.as_ptr());
        let Visible { sinks, start, end } = visible;
        if sinks < start {
            self.accumulate(&weights, values, next, 0..sinks);
        }
        self.accumulate(&weights, values, next, if sinks < start { start } else { 0 }..end);
    }

    /// out += the sum of weight times value over `slots`, in order; what else lies in their elements has a weight of zero.
    fn accumulate(&mut self, weights: &[E; PAGE], values: &[E], next: *const E, slots: Range<usize>) {
        let dim = self.out.len();
        let (from, to) = (slots.start / E::STEPS, slots.end.div_ceil(E::STEPS));
        let weights = &weights[from..to.max(from)];
        let mut done = 0;
        macro_rules! columns {
            ($n:literal) => {
                while dim - done >= $n {
                    let at = from * dim + done;
                    let ahead = next.wrapping_add(at);
                    let [sums] = E::rows_tile::<1, $n>(self.family, weights, weights.len(), &values[at..], dim, ahead);
                    self.out[done..].iter_mut().zip(sums).for_each(|(out, sum)| *out += sum);
                    done += $n;
                }
            };
        }
        if slots.is_empty() {
            return;
        }
        columns!(64);
        columns!(16);
        columns!(1);
    }
}

simd_fn! {
/// Scores to softmax weights, zero where not visible, relative to the running maximum and sum; the output so far is brought
/// to the same maximum.
fn soften<S, type E: Stored>(scores: &mut [f32; PAGE], visible: Visible, running: (&mut f32, &mut f32, &mut [f32]), weights: &mut [E; PAGE]) {
    let (Visible { sinks, start, end }, (running_max, running_sum, out)) = (visible, running);
    let scale = 1.0 / (out.len() as f32).sqrt();
    for j in 0..PAGE {
        let seen = (j < sinks) | ((j >= start) & (j < end));
        scores[j] = if seen { scores[j] * scale } else { f32::NEG_INFINITY };
    }
    let max = running_max.max(simd::max(scores));
    if max > *running_max {
        // The first time this is e^-inf = 0 on zeros.
        let shrink = simd::exp::<S>(*running_max - max);
        *running_sum *= shrink;
        for x in out {
            *x *= shrink;
        }
        *running_max = max;
    }
    for score in scores.iter_mut() {
        *score = simd::exp::<S>(*score - max);
    }
    *running_sum += simd::sum(scores);
    fill::<E>(scores, weights);
}
}
