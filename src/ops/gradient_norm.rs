//! The global norm of all gradients. Called once a step; each gradient is read once.

use candle_core::{DType, Tensor};
use rayon::prelude::*;

use super::add::CHUNK;
use super::ctx::Ctx;
use super::gpu::{Arg, kernels};
use super::scalars::Scalar;
use super::simd::{self, simd_fn};
use super::storage;
use crate::error::Result;

simd_fn! {
pub(super) fn sum_of_squares<S>(x: &[f32]) -> f64 {
    // Short f32 chains, summed in f64: no overflow below 1e19 and no loss in long sums.
    let mut sum = 0f64;
    for x in x.chunks(256) {
        sum += f64::from(simd::dot::<S>(x, x));
    }
    sum
}
}

/// Σ x², the partial sums of fixed chunks added in order.
pub(super) fn square_sum(ctx: &Ctx, x: &[f32]) -> f64 {
    let family = ctx.family();
    let partial: Vec<f64> = x.par_chunks(CHUNK).map(|x| sum_of_squares(family, x)).collect();
    partial.iter().sum()
}

/// Numbers whose norm one threadgroup takes, as kernels/metal/gradient_norm.metal has it.
const PIECE: usize = 4096;

/// Writes the norm over several tensors to a place of one, on a GPU.
pub(super) fn norm_gpu<'a>(
    ctx: &mut Ctx,
    tensors: impl Iterator<Item = Arg<'a>> + Clone,
    (to, place): (&Tensor, usize),
) -> Result<()> {
    let pieces: usize = tensors.clone().map(|x| x.len().div_ceil(PIECE)).sum();
    let norms = ctx.output(DType::F32, pieces)?;
    let mut first = 0;
    for x in tensors {
        let count = x.len().div_ceil(PIECE);
        let args = [x, Arg::write(&norms).at(first)];
        ctx.dispatch(&kernels::NORM_OF_PIECES, DType::F32, &args, &[x.len().into()], count)?;
        first += count;
    }
    let args = [Arg::read(&norms), Arg::write(to)];
    ctx.dispatch(&kernels::NORM_OF_NORMS, DType::F32, &args, &[pieces.into(), place.into()], 1)
}

/// Writes the norm over all `gradients` to `scalars`; anything not finite in them stays visible in it.
pub fn forward(ctx: &mut Ctx, gradients: &[Tensor], scalars: &Tensor) -> Result<()> {
    ctx.launch(0);
    if ctx.has_gpu() {
        return norm_gpu(ctx, gradients.iter().map(Arg::read), (scalars, Scalar::GradientNorm as usize));
    }
    let mut sum = 0f64;
    for gradient in gradients {
        sum += square_sum(ctx, &storage::read::<f32>("gradient_norm", gradient)?);
    }
    storage::write::<f32>("gradient_norm", scalars)?[Scalar::GradientNorm as usize] = sum.sqrt() as f32;
    Ok(())
}
