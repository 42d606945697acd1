//! Copying and adding whole tensors: the residual stream and the sums of gradients. Called by the tape and by nn.

use candle_core::Tensor;
use rayon::prelude::*;

use super::ctx::{Ctx, Value};
use super::gpu::{Arg, kernels};
use super::storage;
use crate::error::{Error, Result};

/// Elements a task works on in element-wise loops: large enough to hide the hand-off, small enough to share.
pub(super) const CHUNK: usize = 16 * 1024;

/// x += y, element by element.
pub fn add_assign(ctx: &mut Ctx, x: &Tensor, y: &Tensor) -> Result<()> {
    ctx.launch(0);
    if x.elem_count() != y.elem_count() {
        return Err(Error::op("add", format!("{} elements", x.elem_count()), y.elem_count().to_string()));
    }
    if ctx.has_gpu() {
        let (args, n) = ([Arg::update(x), Arg::read(y)], x.elem_count());
        return ctx.dispatch(&kernels::ADD, x.dtype(), &args, &[n.into()], n.div_ceil(256));
    }
    let y = storage::read::<f32>("add", y)?;
    let mut x = storage::write::<f32>("add", x)?;
    let (x, y): (&mut [f32], &[f32]) = (&mut x, &y);
    x.par_chunks_mut(CHUNK).zip(y.par_chunks(CHUNK)).for_each(|(x, y)| x.iter_mut().zip(y).for_each(|(x, y)| *x += y));
    Ok(())
}

/// A copy of x in memory of its own.
pub fn copy(ctx: &mut Ctx, x: &Tensor) -> Result<Value> {
    ctx.launch(0);
    if ctx.has_gpu() {
        let (y, n) = (ctx.output(x.dtype(), x.shape())?, x.elem_count());
        ctx.dispatch(&kernels::COPY, x.dtype(), &[Arg::read(x), Arg::write(&y)], &[n.into()], n.div_ceil(256))?;
        return Ok(y);
    }
    let from = storage::read::<f32>("copy", x)?;
    let mut to = ctx.vec::<f32>(from.len());
    copy_to(&from, &mut to);
    Ok(ctx.value(to, x.shape()))
}

/// x = value, on a GPU.
pub(super) fn fill(ctx: &mut Ctx, x: &Tensor, value: f32) -> Result<()> {
    let n = x.elem_count();
    ctx.dispatch(&kernels::FILL, x.dtype(), &[Arg::write(x)], &[n.into(), value.into()], n.div_ceil(256))
}

/// Copies a slice to another of its length, in parallel.
pub(super) fn copy_to(from: &[f32], to: &mut [f32]) {
    to.par_chunks_mut(CHUNK).zip(from.par_chunks(CHUNK)).for_each(|(to, from)| to.copy_from_slice(from));
}
