//! The numbers of a step that live on the device: learning rate, loss, norm, the decision to skip, spike statistics.
//! Written by the trainer and by `gradient_norm` and `guard`, read by the optimizers; one small f32 tensor.

use candle_core::Tensor;

use super::ctx::Ctx;
use super::gpu::{Arg, kernels};
use super::storage;
use crate::error::Result;

/// Index of a scalar. The order is part of the checkpoint format: append only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Scalar {
    LearningRate,
    Loss,
    /// Global gradient norm before clipping.
    GradientNorm,
    /// Factor on every gradient.
    Clip,
    /// 1 if this step leaves the weights alone.
    Skip,
    /// Updates done before this step; skipped steps are none.
    Updates,
    EmaDecay,
    LossMean,
    LossVariance,
    NormMean,
    NormVariance,
    /// Steps that went into the four above.
    Observed,
}

pub const COUNT: usize = 12;

#[derive(Debug)]
pub struct Scalars {
    tensor: Tensor,
}

impl Scalars {
    pub fn new() -> Self {
        Self { tensor: storage::tensor(vec![0f32; COUNT], COUNT) }
    }

    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    pub fn get(&self, scalar: Scalar) -> Result<f32> {
        Ok(storage::read::<f32>("scalars", &self.tensor)?[scalar as usize])
    }

    pub fn set(&self, scalar: Scalar, value: f32) -> Result<()> {
        storage::write::<f32>("scalars", &self.tensor)?[scalar as usize] = value;
        Ok(())
    }

    /// Adds the one element of `value`, on the device.
    pub fn add(&self, ctx: &mut Ctx, scalar: Scalar, value: &Tensor) -> Result<()> {
        ctx.launch(0);
        if ctx.has_gpu() {
            let args = [Arg::update(&self.tensor).at(scalar as usize), Arg::read(value)];
            return ctx.dispatch(&kernels::ADD, value.dtype(), &args, &[1usize.into()], 1);
        }
        let value = storage::read::<f32>("scalars", value)?[0];
        storage::write::<f32>("scalars", &self.tensor)?[scalar as usize] += value;
        Ok(())
    }
}

impl Default for Scalars {
    fn default() -> Self {
        Self::new()
    }
}
