//! RMSNorm with a gain (Zhang and Sennrich, arXiv 1910.07467).

use std::sync::Arc;

use crate::error::Result;
use crate::nn::parameter::Parameter;
use crate::ops::{ctx::Ctx, rms_norm};
use crate::tape::{Tape, Var};

#[derive(Clone, Debug)]
pub struct RmsNorm {
    pub weight: Arc<Parameter>,
    pub eps: f32,
}

impl RmsNorm {
    /// x (N, C) -> (N, C), each row scaled to unit mean square and by the gain.
    pub fn forward(&self, ctx: &mut Ctx, tape: &mut Tape, x: &Var) -> Result<Var> {
        let (y, rstd) = rms_norm::forward(ctx, x.value(), self.weight.master(), self.eps)?;
        if !self.weight.is_trainable() && !x.needs_gradient() {
            return Ok(Var::constant(y));
        }
        let (weight, x) = (Arc::clone(&self.weight), x.clone());
        Ok(tape.record(y, move |ctx, dy, gradients| {
            let saved = rms_norm::Saved { x: x.value(), weight: weight.master(), rstd: &rstd };
            gradients.write(ctx, &x, |ctx, dx, dx_store| match weight.is_trainable() {
                true => weight.write_gradient(|dw, dw_store| {
                    rms_norm::backward(ctx, saved, &dy, (dx, dx_store), Some((dw, dw_store)))
                }),
                false => rms_norm::backward(ctx, saved, &dy, (dx, dx_store), None),
            })
        }))
    }
}
