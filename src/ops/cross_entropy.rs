//! The output head and the cross-entropy in one, over chunks of rows, so that V-wide logits are never all in memory.
//! Called by `model::gpt`.
//!
//! Where gradients are asked for they are made in the same pass: a chunk's logits become its dlogits in place, which
//! give its rows of dx and its share of dW. The number of targets is known before, so nothing has to be scaled later.

use std::ops::Range;

use candle_core::{DType, Tensor};
use rayon::prelude::*;

use super::add;
use super::ctx::{Ctx, Value};
use super::gemm::{self, Matrix, Store, gemm};
use super::gpu::{self, Arg, Product, kernels};
use super::linear::product_gpu;
use super::simd::{self, Family, simd_fn};
use super::storage;
use crate::error::{Error, Result};

/// A target that is not predicted.
pub const IGNORE: u32 = u32::MAX;

pub struct Output {
    /// (1): the sum over the valid targets of -ln p, times the scale.
    pub loss: Value,
    /// (N): -ln p of each target, 0 where ignored.
    pub nll: Value,
    /// (N, C): the gradient of x, if it was asked for.
    pub dx: Option<Value>,
}

/// The gradients that are asked for.
#[derive(Clone, Copy)]
pub enum Wanted<'a> {
    None,
    /// Of x, the head being frozen.
    Input,
    /// Of x, and of the head (V, C) into this slot.
    InputAndHead(&'a Tensor, Store),
}

/// Logits that a chunk holds at most; fixed, so that sums do not depend on anything but the shapes.
const CHUNK_LOGITS: usize = 1 << 20;

/// The loss of x (N, C) under the head `weight` (V, C) for `targets` (N), and what is wanted of its gradients.
pub fn forward(
    ctx: &mut Ctx,
    x: &Tensor,
    weight: &Tensor,
    targets: &[u32],
    scale: f32,
    wanted: Wanted,
) -> Result<Output> {
    let ((n, c), (v, columns)) = (x.dims2()?, weight.dims2()?);
    if c != columns || targets.len() != n {
        let expected = format!("x (N, {columns}) and N targets");
        return Err(Error::op("cross_entropy", expected, format!("x ({n}, {c}) and {} targets", targets.len())));
    }
    if let Some(at) = targets.iter().position(|t| *t != IGNORE && *t as usize >= v) {
        let found = format!("id {} at position {at}", targets[at]);
        return Err(Error::op("cross_entropy", format!("targets below {v}"), found));
    }
    let family = ctx.family();
    let factor = (!matches!(wanted, Wanted::None)).then_some(scale);
    if ctx.has_gpu() {
        return over_chunks_gpu(ctx, (x, weight), targets, (scale, wanted), &mut |ctx, chunk| {
            let Chunk { rows, logits, targets, losses } = chunk;
            let args = [Arg::update(logits), Arg::read(targets).at(rows.start), Arg::write(losses).at(rows.start)];
            let numbers = [v.into(), usize::from(factor.is_some()).into(), scale.into()];
            ctx.dispatch(&kernels::CROSS_ENTROPY, logits.dtype(), &args, &numbers, rows.len())
        });
    }
    let (nll, dx) = over_chunks(ctx, "cross_entropy", x, weight, wanted, &mut |_, rows, logits, nll| {
        rows_nll(family, logits, v, &targets[rows], nll, factor);
    })?;
    Ok(Output { loss: total(ctx, &nll, scale), nll: ctx.value(nll, n), dx: dx.map(|dx| ctx.value(dx, (n, c))) })
}

/// (1): the sum of the rows' losses, times the scale.
pub(super) fn total(ctx: &mut Ctx, losses: &[f32], scale: f32) -> Value {
    let sum: f64 = losses.iter().map(|x| f64::from(*x)).sum();
    let mut loss = ctx.vec(1);
    loss[0] = (sum * f64::from(scale)) as f32;
    ctx.value(loss, 1)
}

/// What is done with a chunk: its rows, their logits (M, V), which become their gradients if those are asked for, and the
/// losses to fill in.
pub(super) type Rows<'a> = dyn FnMut(&mut Ctx, Range<usize>, &mut [f32], &mut [f32]) + 'a;

/// Walks over chunks of rows of x (N, C): the logits under `weight` (V, C), what `each` makes of them, and the gradients
/// that are wanted. Gives the losses (N), and dx (N C) if that is one of them.
pub(super) fn over_chunks(
    ctx: &mut Ctx,
    op: &'static str,
    x: &Tensor,
    weight: &Tensor,
    wanted: Wanted,
    each: &mut Rows,
) -> Result<(Vec<f32>, Option<Vec<f32>>)> {
    let ((n, c), (v, _)) = (x.dims2()?, weight.dims2()?);
    ctx.launch(4 * v * c);
    let (x, w) = (storage::read::<f32>(op, x)?, storage::read::<f32>(op, weight)?);
    let mut gradient = match wanted {
        Wanted::InputAndHead(slot, store) => Some((storage::write::<f32>(op, slot)?, store)),
        _ => None,
    };
    let head = Matrix::new(&w, v, c);
    let packed = gemm::pack(ctx, head.t());
    let rows = (CHUNK_LOGITS / v).clamp(64, 1024);
    let mut losses = ctx.vec::<f32>(n);
    let mut dx = (!matches!(wanted, Wanted::None)).then(|| ctx.vec::<f32>(n * c));
    if let (0, Some((slot, Store::Set))) = (n, &mut gradient) {
        slot.fill(0.0);
    }
    for start in (0..n).step_by(rows) {
        let end = (start + rows).min(n);
        let (m, x) = (end - start, Matrix::new(&x[start * c..end * c], end - start, c));
        let mut logits = ctx.vec(m * v);
        gemm::multiply_packed(ctx, x, (head.t(), &packed), &mut logits, Store::Set);
        each(ctx, start..end, &mut logits, &mut losses[start..end]);
        let dlogits = Matrix::new(&logits, m, v);
        if let Some(dx) = &mut dx {
            gemm(ctx, dlogits, head, &mut dx[start * c..end * c], Store::Set);
        }
        if let Some((slot, store)) = &mut gradient {
            gemm(ctx, dlogits.t(), x, slot, if start == 0 { *store } else { Store::Add });
        }
        ctx.recycle(logits);
    }
    packed.recycle(ctx);
    Ok((losses, dx))
}

/// Logits that a chunk holds at most on a GPU, which wants large products.
const GPU_CHUNK_LOGITS: usize = 1 << 24;

/// A chunk on a GPU.
pub(super) struct Chunk<'a> {
    pub rows: Range<usize>,
    /// Of the chunk (M, V).
    pub logits: &'a Tensor,
    /// Of all rows (N).
    pub targets: &'a Tensor,
    pub losses: &'a Tensor,
}

/// What is done with a chunk on a GPU: as `Rows`.
pub(super) type RowsGpu<'a> = dyn FnMut(&mut Ctx, Chunk) -> Result<()> + 'a;

/// `over_chunks` on a GPU.
pub(super) fn over_chunks_gpu(
    ctx: &mut Ctx,
    (x, weight): (&Tensor, &Tensor),
    targets: &[u32],
    (scale, wanted): (f32, Wanted),
    each: &mut RowsGpu,
) -> Result<Output> {
    let ((n, c), (v, _)) = (x.dims2()?, weight.dims2()?);
    ctx.launch(4 * v * c);
    let (targets, losses) = (ctx.upload(targets, n), ctx.output(DType::F32, n)?);
    let dx = (!matches!(wanted, Wanted::None)).then(|| ctx.output(x.dtype(), (n, c))).transpose()?;
    let (x, head) = (gpu::Matrix::new(x, n, c), gpu::Matrix::new(weight, v, c));
    if let (0, Wanted::InputAndHead(slot, Store::Set)) = (n, wanted) {
        add::fill(ctx, slot, 0.0)?;
    }
    let most = (GPU_CHUNK_LOGITS / v).clamp(64, 4096);
    for start in (0..n).step_by(most) {
        let m = most.min(n - start);
        let (logits, x) = (ctx.output(weight.dtype(), (m, v))?, x.from_row(start).first_rows(m));
        ctx.multiply(&Product { a: x, b: head.t(), c: Arg::write(&logits) })?;
        each(ctx, Chunk { rows: start..start + m, logits: &logits, targets: &targets, losses: &losses })?;
        let dlogits = gpu::Matrix::new(&logits, m, v);
        if let Some(dx) = &dx {
            ctx.multiply(&Product { a: dlogits, b: head, c: Arg::write(dx).at(start * c) })?;
        }
        if let Wanted::InputAndHead(slot, store) = wanted {
            product_gpu(ctx, dlogits.t(), x, (slot, if start == 0 { store } else { Store::Add }))?;
        }
    }
    let loss = ctx.output(DType::F32, 1)?;
    let args = [Arg::read(&losses), Arg::write(&loss)];
    ctx.dispatch(&kernels::SUM_LOSSES, DType::F32, &args, &[n.into(), scale.into()], 1)?;
    Ok(Output { loss, nll: losses, dx })
}

/// The loss of each row of logits (M, V); with `scale` they become (softmax - onehot) * scale.
fn rows_nll(family: Family, logits: &mut [f32], v: usize, targets: &[u32], nll: &mut [f32], scale: Option<f32>) {
    const ROWS: usize = 8;
    let rows = logits.par_chunks_mut(ROWS * v).zip(targets.par_chunks(ROWS)).zip(nll.par_chunks_mut(ROWS));
    rows.for_each(|((logits, targets), nll)| {
        for ((logits, target), nll) in logits.chunks_exact_mut(v).zip(targets).zip(nll) {
            *nll = match *target {
                IGNORE => {
                    logits.fill(0.0);
                    0.0
                }
                target => row_nll(family, logits, target as usize, scale.unwrap_or(0.0), scale.is_some()),
            };
        }
    });
}

simd_fn! {
/// -ln p of the target; with `gradient` the logits become (softmax - onehot) * scale, else anything.
pub(super) fn row_nll<S>(logits: &mut [f32], target: usize, scale: f32, gradient: bool) -> f32 {
    let max = simd::max(logits);
    let at_target = logits[target];
    for x in logits.iter_mut() {
        *x = simd::exp::<S>(*x - max);
    }
    let sum = simd::sum(logits);
    if gradient {
        let factor = scale / sum;
        for x in logits.iter_mut() {
            *x *= factor;
        }
        logits[target] -= scale;
    }
    sum.ln() + (max - at_target)
}
}

/// Hands out ln softmax of each row's logits under `weight` (V, C), one after the other.
pub fn log_softmax_rows(ctx: &mut Ctx, x: &Tensor, weight: &Tensor, each: &mut dyn FnMut(&[f32])) -> Result<()> {
    let v = weight.dims2()?.0;
    over_chunks(ctx, "cross_entropy", x, weight, Wanted::None, &mut |_, _, logits, _| {
        for row in logits.chunks_exact_mut(v) {
            let max = simd::max(row);
            let sum: f64 = row.iter().map(|x| f64::from(x - max).exp()).sum();
            let log = sum.ln() as f32 + max;
            row.iter_mut().for_each(|x| *x -= log);
            each(row);
        }
    })?;
    Ok(())
}

/// What `reference` returns, all by the plain formula in f64.
pub struct Reference {
    pub loss: f64,
    pub nll: Vec<f64>,
    pub dx: Vec<f64>,
    pub dweight: Vec<f64>,
}

/// The same as `forward` with a gradient that is set, in f64 loops over rows of `channels` elements.
pub fn reference(x: &[f32], weight: &[f32], channels: usize, targets: &[u32], scale: f64) -> Reference {
    let mut nll = vec![0f64; targets.len()];
    let (mut dx, mut dweight) = (vec![0f64; x.len()], vec![0f64; weight.len()]);
    for (i, target) in targets.iter().enumerate().filter(|(_, target)| **target != IGNORE) {
        let x = &x[i * channels..][..channels];
        let dot = |w: &[f32]| x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum::<f64>();
        let logits: Vec<f64> = weight.chunks(channels).map(dot).collect();
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|l| (l - max).exp()).sum();
        nll[i] = sum.ln() + max - logits[*target as usize];
        for (v, logit) in logits.iter().enumerate() {
            let hit = if v == *target as usize { 1.0 } else { 0.0 };
            let dlogit = ((logit - max).exp() / sum - hit) * scale;
            for c in 0..channels {
                dx[i * channels + c] += dlogit * f64::from(weight[v * channels + c]);
                dweight[v * channels + c] += dlogit * f64::from(x[c]);
            }
        }
    }
    Reference { loss: nll.iter().sum::<f64>() * scale, nll, dx, dweight }
}
