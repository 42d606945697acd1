//! Causal self-attention with grouped heads and an optional window, forward and backward, without any buffer that grows
//! with T squared. Called by `nn::attention`.
//!
//! Dao et al., arXiv 2205.14135 and 2307.08691: blocks of queries meet blocks of keys, the softmax is kept up online, and
//! the backward recomputes probabilities from the saved log-sum-exp. A task is one (batch, key/value head); blocks that the
//! mask empties are never visited, and only blocks that its edge crosses are masked.

use std::cell::RefCell;

use candle_core::Tensor;
use rayon::prelude::*;

use super::ctx::{Ctx, Value};
use super::gemm::{Matrix, Store, Tile, multiply_panel, pack_panel, panel_width};
use super::heads::Heads;
use super::simd::{self, Family, simd_fn};
use super::storage;
use crate::error::{Error, Result};

const OP: &str = "attention";

/// Queries of a block: whole register tiles of every family.
const QUERIES: usize = 48;
/// Keys of a block.
const KEYS: usize = 64;

#[derive(Clone, Copy, Debug)]
pub struct Attention {
    pub batch: usize,
    pub seq: usize,
    pub heads: Heads,
    /// Key j is visible to query i if j <= i and, with a window, j > i - window.
    pub window: Option<usize>,
}

impl Attention {
    fn check(&self, qkv: &Tensor) -> Result<()> {
        let (n, width) = qkv.dims2()?;
        if n != self.batch * self.seq || width != self.heads.qkv_size() || self.window == Some(0) {
            let expected = format!("({} x {}, {}) and a window above 0", self.batch, self.seq, self.heads.qkv_size());
            return Err(Error::op(OP, expected, format!("({n}, {width})")));
        }
        Ok(())
    }

    /// The first key that query i sees.
    fn first_key(&self, i: usize) -> usize {
        self.window.map_or(0, |w| (i + 1).saturating_sub(w))
    }

    fn scale(&self) -> f32 {
        1.0 / (self.heads.dim as f32).sqrt()
    }

    /// Whether some query of `queries` does not see some key of `keys`.
    fn needs_mask(&self, queries: (usize, usize), keys: (usize, usize)) -> bool {
        keys.1 > queries.0 + 1 || self.first_key(queries.1 - 1) > keys.0
    }

    /// Sets the scores of keys that a query does not see to minus infinity.
    fn mask(&self, scores: &mut [f32], queries: (usize, usize), keys: (usize, usize)) {
        for (row, i) in scores.chunks_exact_mut(KEYS).zip(queries.0..queries.1) {
            let width = keys.1 - keys.0;
            let from = self.first_key(i).saturating_sub(keys.0).min(width);
            let to = (i + 1).saturating_sub(keys.0).min(width);
            row[..from].fill(f32::NEG_INFINITY);
            row[to..width].fill(f32::NEG_INFINITY);
        }
    }
}

/// What the backward needs of the forward.
#[derive(Clone, Copy)]
pub struct Saved<'a> {
    pub qkv: &'a Tensor,
    pub out: &'a Tensor,
    pub lse: &'a Tensor,
}

/// One (batch, key/value head) of a fused row buffer.
#[derive(Clone, Copy)]
struct Group<'a> {
    shape: Attention,
    family: Family,
    /// Rows of this sequence, (T, (H + 2 K) D).
    qkv: &'a [f32],
    head: usize,
}

impl<'a> Group<'a> {
    fn strided(&self, column: usize) -> Matrix<'a> {
        let Attention { seq, heads, .. } = self.shape;
        let data = &self.qkv[column..];
        Matrix { data, rows: seq, cols: heads.dim, row_stride: heads.qkv_size(), col_stride: 1 }
    }

    /// The queries (T, D) of the group's query head number `g`.
    fn queries(&self, g: usize) -> Matrix<'a> {
        let heads = self.shape.heads;
        self.strided((self.head * heads.group() + g) * heads.dim)
    }

    fn keys(&self) -> Matrix<'a> {
        let heads = self.shape.heads;
        self.strided((heads.attention + self.head) * heads.dim)
    }

    fn values(&self) -> Matrix<'a> {
        let heads = self.shape.heads;
        self.strided((heads.attention + heads.key_value + self.head) * heads.dim)
    }
}

/// A (T, D) matrix packed as the right-hand side of both kinds of products.
#[derive(Default)]
struct Panels {
    /// Its transpose by blocks of keys: [T / KEYS][panels][D][width].
    transposed: Vec<f32>,
    /// Itself by blocks of keys: [T / KEYS][panels][KEYS][width].
    plain: Vec<f32>,
}

/// Panel widths for KEYS-wide and D-wide products.
#[derive(Clone, Copy)]
struct Widths {
    keys: usize,
    dim: usize,
}

impl Widths {
    fn of(family: Family, dim: usize) -> Self {
        Self { keys: panel_width(family, KEYS), dim: panel_width(family, dim) }
    }
}

fn block_len(seq: usize, block: usize) -> usize {
    KEYS.min(seq - block * KEYS)
}

/// Packs x^T for products (rows, D) x (D, KEYS).
fn pack_transposed(x: Matrix, width: usize, to: &mut Vec<f32>) {
    let (blocks, d) = (x.rows.div_ceil(KEYS), x.cols);
    to.resize(blocks * KEYS * d, 0.0);
    for (block, to) in to.chunks_exact_mut(KEYS * d).enumerate() {
        let part = x.rows(block * KEYS, block * KEYS + block_len(x.rows, block)).t();
        for (panel, to) in to.chunks_exact_mut(width * d).enumerate() {
            if panel * width < part.cols { pack_panel(part, panel, width, to) } else { to.fill(0.0) }
        }
    }
}

/// Packs x for products (rows, KEYS) x (KEYS, D); rows past the last are zero.
fn pack_plain(x: Matrix, width: usize, to: &mut Vec<f32>) {
    let (blocks, d) = (x.rows.div_ceil(KEYS), x.cols);
    let panels = d.div_ceil(width);
    to.resize(blocks * KEYS * panels * width, 0.0);
    for (block, to) in to.chunks_exact_mut(KEYS * panels * width).enumerate() {
        let rows = block_len(x.rows, block);
        let part = x.rows(block * KEYS, block * KEYS + rows);
        for (panel, to) in to.chunks_exact_mut(KEYS * width).enumerate() {
            pack_panel(part, panel, width, &mut to[..rows * width]);
            to[rows * width..].fill(0.0);
        }
    }
}

/// out (rows, columns, `stride` apart) = a times all panels of one block.
fn product(
    family: Family,
    width: usize,
    a: Matrix,
    panels: &[f32],
    out: &mut [f32],
    stride: usize,
    cols: usize,
    store: Store,
) {
    for (panel, packed) in panels.chunks_exact(a.cols * width).enumerate() {
        let column = panel * width;
        let tile = Tile { c: &mut out[column..], stride, cols: width.min(cols - column), store };
        multiply_panel(family, width, a, packed, tile);
    }
}

/// qkv (B T, (H + 2 K) D) -> the heads' outputs (B T, H D) and the log-sum-exp of each row of scores (B, H, T).
pub fn forward(ctx: &mut Ctx, qkv: &Tensor, shape: Attention) -> Result<(Value, Value)> {
    shape.check(qkv)?;
    ctx.launch(0);
    let Attention { batch, seq, heads, .. } = shape;
    let (d, group) = (heads.dim, heads.group());
    let family = ctx.family();
    let x = storage::read::<f32>(OP, qkv)?;
    let x: &[f32] = &x;
    // Head-major (B, H, T, D) while the tasks write it, so that each owns one slice.
    let mut by_head = ctx.vec::<f32>(batch * seq * heads.attention_size());
    let mut lse = ctx.vec::<f32>(batch * heads.attention * seq);
    let tasks = by_head.par_chunks_mut((group * seq * d).max(1)).zip(lse.par_chunks_mut((group * seq).max(1)));
    tasks.enumerate().for_each(|(task, (out, lse))| {
        let (b, head) = (task / heads.key_value, task % heads.key_value);
        let qkv = &x[b * seq * heads.qkv_size()..][..seq * heads.qkv_size()];
        with_scratch(|scratch| forward_group(Group { shape, family, qkv, head }, scratch, out, lse));
    });
    let mut out = ctx.vec::<f32>(by_head.len());
    interleave(&by_head, shape, &mut out);
    ctx.recycle(by_head);
    Ok((ctx.value(out, (batch * seq, heads.attention_size())), ctx.value(lse, batch * heads.attention * seq)))
}

/// (B, H, T, D) -> (B T, H D).
fn interleave(by_head: &[f32], shape: Attention, out: &mut [f32]) {
    let Attention { seq, heads, .. } = shape;
    let (d, h, width) = (heads.dim, heads.attention, heads.attention_size());
    out.par_chunks_mut((64 * width).max(1)).enumerate().for_each(|(chunk, out)| {
        for (row, out) in out.chunks_exact_mut(width).enumerate() {
            let (b, t) = ((chunk * 64 + row) / seq, (chunk * 64 + row) % seq);
            for (head, out) in out.chunks_exact_mut(d).enumerate() {
                out.copy_from_slice(&by_head[((b * h + head) * seq + t) * d..][..d]);
            }
        }
    });
}

/// Memory of one task, kept by its thread; linear in T.
#[derive(Default)]
struct Scratch {
    keys: Panels,
    values: Panels,
    queries: Panels,
    douts: Panels,
    scores: Vec<f32>,
    dscores: Vec<f32>,
    dq: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
    delta: Vec<f32>,
}

fn with_scratch(f: impl FnOnce(&mut Scratch)) {
    thread_local!(static SCRATCH: RefCell<Scratch> = RefCell::default());
    SCRATCH.with_borrow_mut(f);
}

fn forward_group(group: Group, scratch: &mut Scratch, out: &mut [f32], lse: &mut [f32]) {
    let Attention { seq, heads, .. } = group.shape;
    let (d, widths) = (heads.dim, Widths::of(group.family, heads.dim));
    pack_transposed(group.keys(), widths.keys, &mut scratch.keys.transposed);
    pack_plain(group.values(), widths.dim, &mut scratch.values.plain);
    scratch.scores.resize(QUERIES * KEYS, 0.0);
    for (g, (out, lse)) in out.chunks_exact_mut(seq * d).zip(lse.chunks_exact_mut(seq)).enumerate() {
        let queries = group.queries(g);
        for (block, (out, lse)) in out.chunks_mut(QUERIES * d).zip(lse.chunks_mut(QUERIES)).enumerate() {
            let first = block * QUERIES;
            let rows = (first, first + lse.len());
            forward_block(group, widths, queries.rows(rows.0, rows.1), rows, scratch, out, lse);
        }
    }
}

fn forward_block(
    group: Group,
    widths: Widths,
    queries: Matrix,
    rows: (usize, usize),
    scratch: &mut Scratch,
    out: &mut [f32],
    lse: &mut [f32],
) {
    let (shape, family, d) = (group.shape, group.family, group.shape.heads.dim);
    let count = rows.1 - rows.0;
    let mut state = Softmax { max: [f32::NEG_INFINITY; QUERIES], sum: [0.0; QUERIES] };
    out.fill(0.0);
    let blocks = shape.first_key(rows.0) / KEYS..(rows.1 - 1) / KEYS + 1;
    for block in blocks {
        let keys = (block * KEYS, block * KEYS + block_len(shape.seq, block));
        let scores = &mut scratch.scores[..count * KEYS];
        let packed = &scratch.keys.transposed[block * KEYS * d..][..KEYS * d];
        product(family, widths.keys, queries, packed, scores, KEYS, KEYS, Store::Set);
        scale_rows(family, scores, shape.scale());
        if shape.needs_mask(rows, keys) || keys.1 - keys.0 < KEYS {
            shape.mask(scores, rows, keys);
            let width = keys.1 - keys.0;
            scores.chunks_exact_mut(KEYS).for_each(|row| row[width..].fill(f32::NEG_INFINITY));
        }
        online(family, scores, d, &mut state, out);
        let size = d.div_ceil(widths.dim) * widths.dim * KEYS;
        let values = &scratch.values.plain[block * size..][..size];
        product(family, widths.dim, Matrix::new(scores, count, KEYS), values, out, d, d, Store::Add);
    }
    for ((out, lse), (max, sum)) in out.chunks_exact_mut(d).zip(lse).zip(state.max.iter().zip(&state.sum)) {
        let inverse = 1.0 / sum;
        out.iter_mut().for_each(|o| *o *= inverse);
        *lse = max + sum.ln();
    }
}

/// The running maximum and sum of each query's softmax.
struct Softmax {
    max: [f32; QUERIES],
    sum: [f32; QUERIES],
}

simd_fn! {
fn scale_rows<S>(scores: &mut [f32], scale: f32) {
    scores.iter_mut().for_each(|s| *s *= scale);
}
}

simd_fn! {
/// Turns a block's scores into probabilities against the running maximum, and rescales what was summed before.
fn online<S>(scores: &mut [f32], d: usize, state: &mut Softmax, out: &mut [f32]) {
    for (i, (row, out)) in scores.chunks_exact_mut(KEYS).zip(out.chunks_exact_mut(d)).enumerate() {
        let max = simd::max(row).max(state.max[i]);
        if max == f32::NEG_INFINITY {
            // A window has not reached this block for this query.
            row.fill(0.0);
            continue;
        }
        row.iter_mut().for_each(|s| *s = simd::exp::<S>(*s - max));
        let keep = simd::exp::<S>(state.max[i] - max);
        state.sum[i] = S::fma(state.sum[i], keep, simd::sum(row));
        state.max[i] = max;
        if keep != 1.0 {
            out.iter_mut().for_each(|o| *o *= keep);
        }
    }
}
}

/// The gradient of qkv (all of its columns) from that of the output (B T, H D).
pub fn backward(ctx: &mut Ctx, saved: Saved, dout: &Tensor, shape: Attention, dqkv: (&Tensor, Store)) -> Result<()> {
    shape.check(saved.qkv)?;
    ctx.launch(0);
    let Attention { batch, seq, heads, .. } = shape;
    let (d, group, family) = (heads.dim, heads.group(), ctx.family());
    let (x, out) = (storage::read::<f32>(OP, saved.qkv)?, storage::read::<f32>(OP, saved.out)?);
    let (lse, dout) = (storage::read::<f32>(OP, saved.lse)?, storage::read::<f32>(OP, dout)?);
    let (x, out, lse, dout): (&[f32], &[f32], &[f32], &[f32]) = (&x, &out, &lse, &dout);
    // Task-major while the tasks write it: (B, K, [group queries, key, value], T, D).
    let size = (group + 2) * seq * d;
    let mut by_task = ctx.vec::<f32>(batch * heads.key_value * size);
    by_task.par_chunks_mut(size.max(1)).enumerate().for_each(|(task, to)| {
        let (b, head) = (task / heads.key_value, task % heads.key_value);
        let qkv = &x[b * seq * heads.qkv_size()..][..seq * heads.qkv_size()];
        let rows = b * seq * heads.attention_size()..(b + 1) * seq * heads.attention_size();
        let lse = &lse[(b * heads.attention + head * group) * seq..][..group * seq];
        let incoming = Incoming { out: &out[rows.clone()], dout: &dout[rows], lse };
        with_scratch(|scratch| backward_group(Group { shape, family, qkv, head }, incoming, scratch, to));
    });
    let mut to = storage::write::<f32>(OP, dqkv.0)?;
    scatter(&by_task, shape, &mut to, dqkv.1);
    ctx.recycle(by_task);
    Ok(())
}

/// (B, K, [group queries, key, value], T, D) -> (B T, (H + 2 K) D).
fn scatter(by_task: &[f32], shape: Attention, to: &mut [f32], store: Store) {
    let Attention { seq, heads, .. } = shape;
    let (d, group, width) = (heads.dim, heads.group(), heads.qkv_size());
    to.par_chunks_mut((64 * width).max(1)).enumerate().for_each(|(chunk, to)| {
        for (row, to) in to.chunks_exact_mut(width).enumerate() {
            let (b, t) = ((chunk * 64 + row) / seq, (chunk * 64 + row) % seq);
            for (column, to) in to.chunks_exact_mut(d).enumerate() {
                let (head, slot) = match column.checked_sub(heads.attention) {
                    None => (column / group, column % group),
                    Some(c) => (c % heads.key_value, group + c / heads.key_value),
                };
                let from = (((b * heads.key_value + head) * (group + 2) + slot) * seq + t) * d;
                to.iter_mut().zip(&by_task[from..from + d]).for_each(|(to, x)| store.put(to, *x));
            }
        }
    });
}

/// What comes back to one sequence: out and dout (T, H D), and the group's log-sum-exps (H / K, T).
#[derive(Clone, Copy)]
struct Incoming<'a> {
    out: &'a [f32],
    dout: &'a [f32],
    lse: &'a [f32],
}

fn backward_group(group: Group, incoming: Incoming, scratch: &mut Scratch, to: &mut [f32]) {
    let Attention { seq, heads, .. } = group.shape;
    let (d, widths) = (heads.dim, Widths::of(group.family, heads.dim));
    pack_transposed(group.keys(), widths.keys, &mut scratch.keys.transposed);
    pack_plain(group.keys(), widths.dim, &mut scratch.keys.plain);
    pack_transposed(group.values(), widths.keys, &mut scratch.values.transposed);
    scratch.scores.resize(KEYS.max(QUERIES) * KEYS, 0.0);
    scratch.dscores.resize(KEYS.max(QUERIES) * KEYS, 0.0);
    for buffer in [&mut scratch.dk, &mut scratch.dv] {
        buffer.clear();
        buffer.resize(seq * d, 0.0);
    }
    for g in 0..heads.group() {
        let column = (group.head * heads.group() + g) * d;
        let data = &incoming.dout[column..];
        let dout = Matrix { data, rows: seq, cols: d, row_stride: heads.attention_size(), col_stride: 1 };
        // Blocks of queries are as long as those of keys here, so that they too serve as right-hand sides.
        pack_plain(group.queries(g), widths.dim, &mut scratch.queries.plain);
        pack_plain(dout, widths.dim, &mut scratch.douts.plain);
        scratch.delta.clear();
        scratch.delta.extend((0..seq).map(|t| {
            let span = t * heads.attention_size() + column..t * heads.attention_size() + column + d;
            dot(group.family, &incoming.out[span.clone()], &incoming.dout[span])
        }));
        scratch.dq.clear();
        scratch.dq.resize(seq * d, 0.0);
        let lse = &incoming.lse[g * seq..][..seq];
        for block in 0..seq.div_ceil(KEYS) {
            backward_queries(group, widths, (group.queries(g), dout), lse, block, scratch);
        }
        to[g * seq * d..][..seq * d].copy_from_slice(&scratch.dq);
    }
    let rest = &mut to[heads.group() * seq * d..];
    rest[..seq * d].copy_from_slice(&scratch.dk);
    rest[seq * d..].copy_from_slice(&scratch.dv);
}

/// One block of queries against every block of keys that it sees.
fn backward_queries(
    group: Group,
    widths: Widths,
    (queries, dout): (Matrix, Matrix),
    lse: &[f32],
    block: usize,
    scratch: &mut Scratch,
) {
    let (shape, family, d) = (group.shape, group.family, group.shape.heads.dim);
    let rows = (block * KEYS, block * KEYS + block_len(shape.seq, block));
    let (queries, dout) = (queries.rows(rows.0, rows.1), dout.rows(rows.0, rows.1));
    let (lse, delta) = (&lse[rows.0..rows.1], &scratch.delta[rows.0..rows.1]);
    let plain = d.div_ceil(widths.dim) * widths.dim * KEYS;
    let at = |block: usize, size: usize| block * size..(block + 1) * size;
    for other in shape.first_key(rows.0) / KEYS..block + 1 {
        let keys = (other * KEYS, other * KEYS + block_len(shape.seq, other));
        let (scores, dscores) = (&mut scratch.scores[..KEYS * KEYS], &mut scratch.dscores[..KEYS * KEYS]);
        let count = (rows.1 - rows.0) * KEYS;
        let transposed = at(other, KEYS * d);
        let packed = &scratch.keys.transposed[transposed.clone()];
        product(family, widths.keys, queries, packed, &mut scores[..count], KEYS, KEYS, Store::Set);
        let packed = &scratch.values.transposed[transposed];
        product(family, widths.keys, dout, packed, &mut dscores[..count], KEYS, KEYS, Store::Set);
        scale_rows(family, &mut scores[..count], shape.scale());
        if shape.needs_mask(rows, keys) || keys.1 - keys.0 < KEYS {
            shape.mask(&mut scores[..count], rows, keys);
            let width = keys.1 - keys.0;
            scores[..count].chunks_exact_mut(KEYS).for_each(|row| row[width..].fill(f32::NEG_INFINITY));
        }
        probabilities(family, &mut scores[..count], &mut dscores[..count], lse, delta, shape.scale());
        // Rows of queries that do not exist must add nothing to the keys' sums.
        scores[count..].fill(0.0);
        dscores[count..].fill(0.0);
        let transposed = |data| Matrix { data, rows: keys.1 - keys.0, cols: KEYS, row_stride: 1, col_stride: KEYS };
        let span = keys.0 * d..keys.1 * d;
        let douts = &scratch.douts.plain[at(block, plain)];
        product(family, widths.dim, transposed(scores), douts, &mut scratch.dv[span.clone()], d, d, Store::Add);
        let packed = &scratch.queries.plain[at(block, plain)];
        product(family, widths.dim, transposed(dscores), packed, &mut scratch.dk[span], d, d, Store::Add);
        let rows_of_dq = &mut scratch.dq[rows.0 * d..rows.1 * d];
        let packed = &scratch.keys.plain[at(other, plain)];
        let dscores = Matrix::new(&dscores[..count], rows.1 - rows.0, KEYS);
        product(family, widths.dim, dscores, packed, rows_of_dq, d, d, Store::Add);
    }
}

simd_fn! {
/// scores -> P = exp(scores - lse), dscores (holding dP) -> dS = P (dP - delta) scale.
fn probabilities<S>(scores: &mut [f32], dscores: &mut [f32], lse: &[f32], delta: &[f32], scale: f32) {
    let rows = scores.chunks_exact_mut(KEYS).zip(dscores.chunks_exact_mut(KEYS));
    for ((p, ds), (lse, delta)) in rows.zip(lse.iter().zip(delta)) {
        for (p, ds) in p.iter_mut().zip(ds) {
            *p = simd::exp::<S>(*p - lse);
            *ds = *p * (*ds - delta) * scale;
        }
    }
}
}

simd_fn! {
fn dot<S>(a: &[f32], b: &[f32]) -> f32 {
    simd::dot::<S>(a, b)
}
}

/// One query row's output and log-sum-exp over the keys it sees, in f64; k and v are rows of D.
pub fn reference(q: &[f32], k: &[&[f32]], v: &[&[f32]]) -> (Vec<f64>, f64) {
    let scale = 1.0 / (q.len() as f64).sqrt();
    let score = |k: &&[f32]| q.iter().zip(*k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum::<f64>() * scale;
    let scores: Vec<f64> = k.iter().map(score).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
    let mut out = vec![0f64; q.len()];
    for (s, v) in scores.iter().zip(v) {
        out.iter_mut().zip(*v).for_each(|(o, v)| *o += (s - max).exp() / sum * f64::from(*v));
    }
    (out, max + sum.ln())
}
