//! A linear layer without bias: y = x W^T, with the residual stream added in the same pass where there is one.

use std::sync::Arc;

use crate::error::Result;
use crate::nn::parameter::Parameter;
use crate::ops::{ctx::Ctx, linear};
use crate::tape::{Tape, Var};

#[derive(Clone, Debug)]
pub struct Linear {
    pub weight: Arc<Parameter>,
}

impl Linear {
    /// x (N, in) -> (N, out); with `residual` (N, out), their sum.
    pub fn forward(&self, ctx: &mut Ctx, tape: &mut Tape, x: &Var, residual: Option<&Var>) -> Result<Var> {
        let y = linear::forward(ctx, x.value(), self.weight.matrix(), residual.map(|r| &**r.value()))?;
        let (weight, x, residual) = (Arc::clone(&self.weight), x.clone(), residual.cloned());
        Ok(tape.record(y, move |ctx, dy, gradients| {
            weight.write_gradient(|dw, store| linear::backward_weight(ctx, &dy, x.value(), (dw, store)))?;
            gradients
                .write(ctx, &x, |ctx, dx, store| linear::backward_input(ctx, &dy, weight.matrix(), (dx, store)))?;
            match residual {
                Some(residual) => gradients.give(ctx, &residual, dy),
                None => Ok(()),
            }
        }))
    }
}
