//! A linear layer without bias: y = x W^T, with the residual stream added in the same pass where there is one, and with a
//! low-rank correction where the layer has one.

use std::sync::Arc;

use crate::error::Result;
use crate::nn::dropout::Dropout;
use crate::nn::lora::Lora;
use crate::nn::parameter::Parameter;
use crate::ops::{ctx::Ctx, linear};
use crate::tape::{Tape, Var};

#[derive(Clone, Debug)]
pub struct Linear {
    pub weight: Arc<Parameter>,
    pub lora: Option<Arc<Lora>>,
}

impl Linear {
    /// x (N, in) -> (N, out); with `residual` (N, out), their sum. `dropout` is the pass's, for the correction.
    pub fn forward(
        &self,
        ctx: &mut Ctx,
        tape: &mut Tape,
        x: &Var,
        residual: Option<&Var>,
        dropout: Dropout,
    ) -> Result<Var> {
        let y = linear::forward(ctx, x.value(), self.weight.matrix(), residual.map(|r| &**r.value()))?;
        let correction = match &self.lora {
            Some(lora) => Some((Arc::clone(lora), lora.forward(ctx, x.value(), &y, dropout)?)),
            None => None,
        };
        let (weight, x, residual) = (Arc::clone(&self.weight), x.clone(), residual.cloned());
        Ok(tape.record(y, move |ctx, dy, gradients| {
            if weight.is_trainable() {
                weight.write_gradient(|dw, store| linear::backward_weight(ctx, &dy, x.value(), (dw, store)))?;
            }
            gradients
                .write(ctx, &x, |ctx, dx, store| linear::backward_input(ctx, &dy, weight.matrix(), (dx, store)))?;
            if let Some((lora, saved)) = correction {
                lora.backward(ctx, &saved, &dy, &x, gradients)?;
            }
            match residual {
                Some(residual) => gradients.give(ctx, &residual, dy),
                None => Ok(()),
            }
        }))
    }
}
