//! The global norm of all gradients. Called once a step; each gradient is read once.

use candle_core::Tensor;
use rayon::prelude::*;

use super::add::CHUNK;
use super::ctx::Ctx;
use super::scalars::Scalar;
use super::simd::{self, simd_fn};
use super::storage;
use crate::error::Result;

simd_fn! {
pub(super) fn sum_of_squares<S>(x: &[f32]) -> f64 {
    // Short f32 chains, summed in f64: no overflow below 1e19 and no loss in long sums.
    x.chunks(256).map(|x| f64::from(simd::dot::<S>(x, x))).sum()
}
}

/// Σ x², the partial sums of fixed chunks added in order.
pub(super) fn square_sum(ctx: &Ctx, x: &[f32]) -> f64 {
    let family = ctx.family();
    let partial: Vec<f64> = x.par_chunks(CHUNK).map(|x| sum_of_squares(family, x)).collect();
    partial.iter().sum()
}

/// Writes the norm over all `gradients` to `scalars`; anything not finite in them stays visible in it.
pub fn forward(ctx: &mut Ctx, gradients: &[Tensor], scalars: &Tensor) -> Result<()> {
    ctx.launch(0);
    let mut sum = 0f64;
    for gradient in gradients {
        sum += square_sum(ctx, &storage::read::<f32>("gradient_norm", gradient)?);
    }
    storage::write::<f32>("gradient_norm", scalars)?[Scalar::GradientNorm as usize] = sum.sqrt() as f32;
    Ok(())
}
