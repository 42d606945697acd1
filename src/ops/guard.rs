//! Decides on the device whether a step may change the weights, and how far its gradients are scaled down.
//!
//! A step is skipped when its loss or gradient norm is not finite, or lies more than `spike_threshold` standard deviations
//! above its running mean. Skipped steps do not enter the statistics, so one spike does not excuse the next. The
//! idea of skipping by z-score is that of llm.c's outlier detector.

use candle_core::{DType, Tensor};

use super::ctx::Ctx;
use super::gpu::{Arg, kernels};
use super::scalars::Scalar;
use super::storage;
use crate::error::Result;

#[derive(Clone, Copy, Debug)]
pub struct Guard {
    /// Highest gradient norm; larger ones are scaled down to it. 0 does not clip.
    pub max_norm: f32,
    /// 0 skips only what is not finite.
    pub spike_threshold: f32,
    /// Steps observed before a spike can be told.
    pub observe: u32,
}

impl Default for Guard {
    fn default() -> Self {
        Self { max_norm: 0.0, spike_threshold: 0.0, observe: 64 }
    }
}

/// Share of the past in the running mean and variance.
const MEMORY: f32 = 0.98;

const MOST_VARIANCE: f32 = 1e30;

/// Sets `Clip` and `Skip` from `Loss` and `GradientNorm`, and folds a step that is not skipped into the statistics.
pub fn decide(ctx: &mut Ctx, scalars: &Tensor, guard: Guard) -> Result<()> {
    ctx.launch(0);
    if ctx.has_gpu() {
        let numbers = [guard.max_norm.into(), guard.spike_threshold.into(), (guard.observe as f32).into()];
        return ctx.dispatch(&kernels::GUARD_DECIDE, DType::F32, &[Arg::update(scalars)], &numbers, 1);
    }
    let mut s = storage::write::<f32>("guard", scalars)?;
    let (loss, norm) = (s[Scalar::Loss as usize], s[Scalar::GradientNorm as usize]);
    let ready = guard.spike_threshold > 0.0 && s[Scalar::Observed as usize] >= guard.observe as f32;
    let spikes = |x: f32, mean: f32, variance: f32| {
        // The floor keeps a plateau, whose variance is nearly nothing, from making a spike of any ripple.
        let deviation = variance.sqrt().max(0.01 * mean.abs());
        x - mean > guard.spike_threshold * deviation
    };
    let spike = spikes(loss, s[Scalar::LossMean as usize], s[Scalar::LossVariance as usize])
        || spikes(norm, s[Scalar::NormMean as usize], s[Scalar::NormVariance as usize]);
    let skip = !loss.is_finite() || !norm.is_finite() || (ready && spike);
    s[Scalar::Skip as usize] = if skip { 1.0 } else { 0.0 };
    let clipped = guard.max_norm > 0.0 && norm > guard.max_norm;
    s[Scalar::Clip as usize] = if clipped { guard.max_norm / norm } else { 1.0 };
    if !skip {
        s[Scalar::Observed as usize] += 1.0;
        // A plain average of the first steps, then a running one.
        let share = (1.0 / s[Scalar::Observed as usize]).max(1.0 - MEMORY);
        for (x, mean, variance) in
            [(loss, Scalar::LossMean, Scalar::LossVariance), (norm, Scalar::NormMean, Scalar::NormVariance)]
        {
            let (mean, variance) = (mean as usize, variance as usize);
            let off = x - s[mean];
            s[mean] += share * off;
            // Bounded, so that one huge value does not make every later one ordinary for ever.
            s[variance] = (1.0 - share) * (s[variance] + share * (off * off).min(MOST_VARIANCE));
        }
    }
    Ok(())
}

/// Counts the update, if there was one.
pub fn finish(ctx: &mut Ctx, scalars: &Tensor) -> Result<()> {
    ctx.launch(0);
    if ctx.has_gpu() {
        return ctx.dispatch(&kernels::GUARD_FINISH, DType::F32, &[Arg::update(scalars)], &[], 1);
    }
    let mut s = storage::write::<f32>("guard", scalars)?;
    if s[Scalar::Skip as usize] == 0.0 {
        s[Scalar::Updates as usize] += 1.0;
    }
    Ok(())
}
