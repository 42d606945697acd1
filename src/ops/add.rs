//! Copying and adding whole tensors: the residual stream and the sums of gradients. Called by the tape and by nn.

use candle_core::Tensor;
use rayon::prelude::*;

use super::ctx::{Ctx, Value};
use super::storage;
use crate::error::{Error, Result};

/// Elements a task works on in element-wise loops: large enough to hide the hand-off, small enough to share.
pub(super) const CHUNK: usize = 16 * 1024;

/// x += y, element by element.
pub fn add_assign(ctx: &mut Ctx, x: &Tensor, y: &Tensor) -> Result<()> {
    ctx.launch(0);
    let y = storage::read::<f32>("add", y)?;
    let mut x = storage::write::<f32>("add", x)?;
    if x.len() != y.len() {
        return Err(Error::op("add", format!("{} elements", x.len()), y.len().to_string()));
    }
    let (x, y): (&mut [f32], &[f32]) = (&mut x, &y);
    x.par_chunks_mut(CHUNK).zip(y.par_chunks(CHUNK)).for_each(|(x, y)| x.iter_mut().zip(y).for_each(|(x, y)| *x += y));
    Ok(())
}

/// A copy of x in memory of its own.
pub fn copy(ctx: &mut Ctx, x: &Tensor) -> Result<Value> {
    ctx.launch(0);
    let from = storage::read::<f32>("copy", x)?;
    let mut to = ctx.vec::<f32>(from.len());
    copy_to(&from, &mut to);
    Ok(ctx.value(to, x.shape()))
}

/// Copies a slice to another of its length, in parallel.
pub(super) fn copy_to(from: &[f32], to: &mut [f32]) {
    to.par_chunks_mut(CHUNK).zip(from.par_chunks(CHUNK)).for_each(|(to, from)| to.copy_from_slice(from));
}
