//! RMSNorm with a gain (Zhang and Sennrich, arXiv 1910.07467).

use std::sync::Arc;

use crate::error::Result;
use crate::nn::parameter::Parameter;
use crate::ops::ctx::{Ctx, Value};
use crate::ops::rms_norm;
use crate::tape::{Tape, Var};

#[derive(Clone, Debug)]
pub struct RmsNorm {
    pub weight: Arc<Parameter>,
    pub eps: f32,
}

impl RmsNorm {
    /// x (N, C) -> (N, C), each row scaled to unit mean square and by the gain.
    pub fn forward(&self, ctx: &mut Ctx, tape: &mut Tape, x: &Var) -> Result<Var> {
        let normed = rms_norm::forward(ctx, x.value(), self.weight.master(), self.eps)?;
        self.record(tape, x, normed)
    }

    /// The residual stream x (N, C) with a change (N, C) added, which becomes it in place, and the norm of the sum.
    pub fn forward_sum(&self, ctx: &mut Ctx, tape: &mut Tape, x: &Var, change: &Var) -> Result<(Var, Var)> {
        let normed = rms_norm::forward_add(ctx, change.value(), x.value(), self.weight.master(), self.eps)?;
        let sum = change.value().clone();
        let (x, change) = (x.clone(), change.clone());
        let sum = match x.needs_gradient() || change.needs_gradient() {
            false => Var::constant(sum),
            true => tape.record(sum, move |ctx, dy, gradients| {
                gradients.give(ctx, &x, dy.clone())?;
                gradients.give(ctx, &change, dy)
            }),
        };
        let normed = self.record(tape, &sum, normed)?;
        Ok((sum, normed))
    }

    /// Notes how y, the norm of x, came about; `rstd` is what the backward needs of it.
    fn record(&self, tape: &mut Tape, x: &Var, (y, rstd): (Value, Value)) -> Result<Var> {
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
