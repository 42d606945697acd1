//! Root mean square normalisation of rows, `y = x / sqrt(mean(x^2) + eps) * weight`. Called by nn before attention, the
//! MLP and the head; rotary uses its rows for the query/key norm. Zhang and Sennrich, "Root Mean Square Layer
//! Normalization" (2019).
//!
//! The gradient of the weight is summed within fixed blocks of rows, then over the blocks in index order: no bit of it
//! depends on the number of threads.

use candle_core::{DType, Tensor};
use rayon::prelude::*;

use super::add::{self, CHUNK};
use super::ctx::{Ctx, Value};
use super::gemm::Store;
use super::gpu::{Arg, kernels};
use super::simd::{LANES, Simd, dot, fold, simd_fn};
use super::storage;
use crate::error::{Error, Result};

const OP: &str = "rms_norm";

/// Rows of one partial sum of a weight's gradient; a change of it changes results.
pub(super) const BLOCK: usize = 64;

/// What the backward needs of the forward.
#[derive(Clone, Copy)]
pub struct Saved<'a> {
    /// The input (N, C).
    pub x: &'a Tensor,
    /// The gain (C).
    pub weight: &'a Tensor,
    /// The second output of `forward` (N).
    pub rstd: &'a Tensor,
}

/// Normalises x (N, C) with gain `weight` (C); returns y (N, C) and the factors 1 / sqrt(mean(x^2) + eps) (N).
pub fn forward(ctx: &mut Ctx, x: &Tensor, weight: &Tensor, eps: f32) -> Result<(Value, Value)> {
    if ctx.has_gpu() {
        let (c, n) = (weight.elem_count(), rows_of(x.elem_count(), weight.elem_count())?);
        ctx.launch(4 * c);
        let (y, rstd) = (ctx.output(x.dtype(), x.shape())?, ctx.output(DType::F32, n)?);
        let args = [Arg::read(x), Arg::read(weight), Arg::write(&y), Arg::write(&rstd)];
        ctx.dispatch(&kernels::RMS_NORM, x.dtype(), &args, &[n.into(), c.into(), eps.into()], n.div_ceil(8))?;
        return Ok((y, rstd));
    }
    let (shape, x, weight) = (x.shape(), storage::read::<f32>(OP, x)?, storage::read::<f32>(OP, weight)?);
    let (family, c, n) = (ctx.family(), weight.len(), rows_of(x.len(), weight.len())?);
    ctx.launch(4 * c);
    let (mut y, mut rstd) = (ctx.vec::<f32>(n * c), ctx.vec::<f32>(n));
    let (x, weight): (&[f32], &[f32]) = (&x, &weight);
    let rows = (CHUNK / c).max(1);
    let tasks = y.par_chunks_mut(rows * c).zip(rstd.par_chunks_mut(rows)).zip(x.par_chunks(rows * c));
    tasks.for_each(|((y, rstd), x)| forward_rows(family, x, weight, eps, y, rstd));
    Ok((ctx.value(y, shape), ctx.value(rstd, n)))
}

/// x (N, C) += residual (N, C), in place; then `forward` of x.
pub fn forward_add(ctx: &mut Ctx, x: &Tensor, residual: &Tensor, weight: &Tensor, eps: f32) -> Result<(Value, Value)> {
    if !ctx.has_gpu() || x.elem_count() != residual.elem_count() {
        add::add_assign(ctx, x, residual)?;
        return forward(ctx, x, weight, eps);
    }
    let (c, n) = (weight.elem_count(), rows_of(x.elem_count(), weight.elem_count())?);
    ctx.launch(4 * c);
    let (y, rstd) = (ctx.output(x.dtype(), x.shape())?, ctx.output(DType::F32, n)?);
    let args = [Arg::update(x), Arg::read(residual), Arg::read(weight), Arg::write(&y), Arg::write(&rstd)];
    ctx.dispatch(&kernels::RMS_NORM_ADD, x.dtype(), &args, &[n.into(), c.into(), eps.into()], n.div_ceil(8))?;
    Ok((y, rstd))
}

/// From dy (N, C): writes the gradients of the input to `dx` (N, C) and, unless it is frozen, of the gain to `dweight` (C).
pub fn backward(
    ctx: &mut Ctx,
    saved: Saved,
    dy: &Tensor,
    (dx, dx_store): (&Tensor, Store),
    dweight: Option<(&Tensor, Store)>,
) -> Result<()> {
    if ctx.has_gpu() {
        return backward_gpu(ctx, saved, dy, (dx, dx_store), dweight);
    }
    let (x, weight) = (storage::read::<f32>(OP, saved.x)?, storage::read::<f32>(OP, saved.weight)?);
    let (rstd, dy) = (storage::read::<f32>(OP, saved.rstd)?, storage::read::<f32>(OP, dy)?);
    let mut dx = storage::write::<f32>(OP, dx)?;
    let (family, c, n) = (ctx.family(), weight.len(), rows_of(x.len(), weight.len())?);
    let gain = dweight.map_or(c, |(slot, _)| slot.elem_count());
    check_backward((n, c), (rstd.len(), dy.len(), dx.len(), gain))?;
    ctx.launch(4 * c);
    let mut partial = ctx.vec::<f32>(n.div_ceil(BLOCK) * c);
    let (x, weight, rstd, dy): (&[f32], &[f32], &[f32], &[f32]) = (&x, &weight, &rstd, &dy);
    let tasks = partial.par_chunks_mut(c).zip(dx.par_chunks_mut(BLOCK * c)).enumerate();
    tasks.for_each(|(block, (sums, dx))| {
        let first = block * BLOCK;
        let (x, dy) = (&x[first * c..][..dx.len()], &dy[first * c..][..dx.len()]);
        backward_rows(family, x, weight, &rstd[first..], dy, dx, dx_store, sums);
    });
    if let Some((slot, store)) = dweight {
        add_blocks(&partial, c, 0, &mut storage::write::<f32>(OP, slot)?, store);
    }
    ctx.recycle(partial);
    Ok(())
}

fn backward_gpu(
    ctx: &mut Ctx,
    saved: Saved,
    dy: &Tensor,
    (dx, store): (&Tensor, Store),
    dweight: Option<(&Tensor, Store)>,
) -> Result<()> {
    let Saved { x, weight, rstd } = saved;
    let (c, n) = (weight.elem_count(), rows_of(x.elem_count(), weight.elem_count())?);
    let gain = dweight.map_or(c, |(slot, _)| slot.elem_count());
    check_backward((n, c), (rstd.elem_count(), dy.elem_count(), dx.elem_count(), gain))?;
    ctx.launch(4 * c);
    let blocks = n.div_ceil(BLOCK);
    let partial = ctx.output(DType::F32, blocks * c)?;
    let args = [Arg::read(x), Arg::read(weight), Arg::read(rstd), Arg::read(dy), Arg::update(dx), Arg::write(&partial)];
    ctx.dispatch(&kernels::RMS_NORM_BACKWARD, x.dtype(), &args, &[n.into(), c.into(), store.into()], blocks)?;
    match dweight {
        Some((slot, store)) => add_blocks_gpu(ctx, &partial, (blocks, c, 0), slot, store),
        None => Ok(()),
    }
}

/// `add_blocks` for a GPU: so many blocks, their length, and the offset in each.
pub(super) fn add_blocks_gpu(
    ctx: &mut Ctx,
    partial: &Tensor,
    (blocks, stride, offset): (usize, usize, usize),
    to: &Tensor,
    store: Store,
) -> Result<()> {
    let columns = to.elem_count();
    let numbers = [blocks.into(), stride.into(), offset.into(), columns.into(), store.into()];
    let args = [Arg::read(partial), Arg::update(to)];
    ctx.dispatch(&kernels::ADD_BLOCKS, DType::F32, &args, &numbers, columns.div_ceil(256))
}

fn rows_of(elements: usize, c: usize) -> Result<usize> {
    if c == 0 || !elements.is_multiple_of(c) {
        return Err(Error::op(OP, format!("rows of {c} elements"), format!("{elements} elements")));
    }
    Ok(elements / c)
}

/// Holds the sizes of rstd, dy, dx and dweight to rows (n, c).
fn check_backward((n, c): (usize, usize), found: (usize, usize, usize, usize)) -> Result<()> {
    if found != (n, n * c, n * c, c) {
        let (rstd, dy, dx, gain) = found;
        let found = format!("rstd {rstd}, dy {dy}, dx {dx}, dweight {gain}");
        return Err(Error::op(OP, format!("gradients of {n} x {c}"), found));
    }
    Ok(())
}

/// `to` (+)= the sum over blocks, in order, of what starts at `offset` in each block of `partial`.
pub(super) fn add_blocks(partial: &[f32], block: usize, offset: usize, to: &mut [f32], store: Store) {
    if store == Store::Set {
        to.fill(0.0);
    }
    for partial in partial.chunks_exact(block) {
        to.iter_mut().zip(&partial[offset..]).for_each(|(to, x)| *to += x);
    }
}

simd_fn! {
fn forward_rows<S>(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32], rstd: &mut [f32]) {
    let c = weight.len();
    for ((x, y), rstd) in x.chunks_exact(c).zip(y.chunks_exact_mut(c)).zip(rstd) {
        *rstd = inverse_rms::<S>(x, eps);
        for i in 0..c {
            y[i] = x[i] * *rstd * weight[i];
        }
    }
}
}

simd_fn! {
fn backward_rows<S>(x: &[f32], weight: &[f32], rstd: &[f32], dy: &[f32], dx: &mut [f32], store: Store, sums: &mut [f32]) {
    let c = weight.len();
    sums.fill(0.0);
    for (((x, dy), dx), rstd) in x.chunks_exact(c).zip(dy.chunks_exact(c)).zip(dx.chunks_exact_mut(c)).zip(rstd) {
        backward_row::<S>(x, weight, *rstd, dy, (dx, store), sums);
    }
}
}

/// 1 / sqrt(mean(x^2) + eps).
#[inline(always)]
pub(super) fn inverse_rms<S: Simd>(x: &[f32], eps: f32) -> f32 {
    1.0 / (dot::<S>(x, x) / x.len() as f32 + eps).sqrt()
}

/// One row of the backward: dx = rstd (weight dy - x rstd^2 mean(weight dy x)), sums += dy x rstd.
#[inline(always)]
pub(super) fn backward_row<S: Simd>(
    x: &[f32],
    weight: &[f32],
    rstd: f32,
    dy: &[f32],
    (dx, store): (&mut [f32], Store),
    sums: &mut [f32],
) {
    let c = x.len();
    let (weight, dy, dx, sums) = (&weight[..c], &dy[..c], &mut dx[..c], &mut sums[..c]);
    let mean = dot3::<S>(x, weight, dy) / c as f32 * rstd * rstd;
    for i in 0..c {
        sums[i] = S::fma(dy[i] * rstd, x[i], sums[i]);
        store.put(&mut dx[i], rstd * S::fma(-mean, x[i], weight[i] * dy[i]));
    }
}

/// Σ a b c in sixteen chains.
#[inline(always)]
fn dot3<S: Simd>(a: &[f32], b: &[f32], c: &[f32]) -> f32 {
    let mut acc = [0f32; LANES];
    let ((a, a_tail), (b, b_tail), (c, c_tail)) =
        (a.as_chunks::<LANES>(), b.as_chunks::<LANES>(), c.as_chunks::<LANES>());
    for ((a, b), c) in a.iter().zip(b).zip(c) {
        for i in 0..LANES {
            acc[i] = S::fma(a[i], b[i] * c[i], acc[i]);
        }
    }
    for (i, ((a, b), c)) in a_tail.iter().zip(b_tail).zip(c_tail).enumerate() {
        acc[i] = S::fma(*a, b * c, acc[i]);
    }
    fold(acc)
}

/// `forward` of rows x (N, C) in plain f64.
pub fn reference(x: &[f32], weight: &[f32], eps: f32) -> Vec<f64> {
    let row = |x: &[f32]| {
        let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / x.len() as f64;
        let rstd = 1.0 / (mean + f64::from(eps)).sqrt();
        x.iter().zip(weight).map(|(&x, &w)| f64::from(x) * rstd * f64::from(w)).collect::<Vec<_>>()
    };
    x.chunks_exact(weight.len()).flat_map(row).collect()
}
