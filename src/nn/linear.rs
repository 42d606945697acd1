//! A linear layer without bias: y = x W^T, with the residual stream added in the same pass where there is one, and with a
//! low-rank correction where the layer has one.

use std::sync::Arc;

use crate::error::Result;
use crate::nn::dropout::Dropout;
use crate::nn::lora::Lora;
use crate::nn::parameter::Parameter;
use crate::ops::ctx::Ctx;
use crate::ops::gemm::Store;
use crate::ops::linear::{self, Weight};
use crate::ops::{dropout, lora};
use crate::tape::{Tape, Var};

#[derive(Clone, Debug)]
pub struct Linear {
    pub weight: Arc<Parameter>,
    /// Only beside a frozen weight.
    pub lora: Option<Arc<Lora>>,
}

impl Linear {
    /// x (N, in) -> (N, out); with `residual` (N, out), their sum. `pass` is for the correction.
    pub fn forward(
        &self,
        ctx: &mut Ctx,
        tape: &mut Tape,
        x: &Var,
        residual: Option<&Var>,
        pass: Dropout,
    ) -> Result<Var> {
        if let Some(lora) = &self.lora {
            return self.corrected(lora, ctx, tape, (x, residual), pass);
        }
        let y = linear::forward(ctx, x.value(), self.weight.matrix(), residual.map(|r| &**r.value()), None)?;
        let (weight, x, residual) = (Arc::clone(&self.weight), x.clone(), residual.cloned());
        Ok(tape.record(y, move |ctx, dy, gradients| {
            if weight.is_trainable() {
                weight.write_gradient(|dw, store| linear::backward_weight(ctx, &dy, x.value(), (dw, store)))?;
            }
            gradients.write(ctx, &x, |ctx, dx, store| {
                linear::backward_input(ctx, &dy, weight.matrix(), (dx, store), None)
            })?;
            match residual {
                Some(residual) => gradients.give(ctx, &residual, dy),
                None => Ok(()),
            }
        }))
    }

    fn corrected(
        &self,
        lora: &Arc<Lora>,
        ctx: &mut Ctx,
        tape: &mut Tape,
        (x, residual): (&Var, Option<&Var>),
        pass: Dropout,
    ) -> Result<Var> {
        let mask = lora.mask(pass);
        let add = residual.map(|r| &**r.value());
        let (y, u, input) = match mask {
            None => {
                let weight = self.weight.matrix();
                let merged = Weight::Corrected(&weight, lora.factors());
                let (y, u) = lora::layer_forward(ctx, x.value(), merged, add, lora.factors())?;
                (y, u, x.value().clone())
            }
            Some(mask) => {
                let y = linear::forward(ctx, x.value(), self.weight.matrix(), add, None)?;
                let input = dropout::forward(ctx, x.value(), mask)?;
                let u = lora::forward(ctx, &input, lora.factors(), &y)?;
                (y, u, input)
            }
        };
        let (weight, lora) = (Arc::clone(&self.weight), Arc::clone(lora));
        let (x, residual) = (x.clone(), residual.cloned());
        Ok(tape.record(y, move |ctx, dy, gradients| {
            let factors = lora.factors();
            let mut du = None;
            gradients.write(ctx, &x, |ctx, dx, store| {
                let plain = weight.matrix();
                let Some(mask) = mask else {
                    let merged = Weight::Corrected(&plain, factors);
                    du = Some(lora::layer_backward_input(ctx, &dy, merged, factors, (dx, store))?);
                    return Ok(());
                };
                let outer = lora::layer_backward_input(ctx, &dy, plain, factors, (dx, store))?;
                let masked = ctx.output(dx.dtype(), dx.shape())?;
                lora::backward_input(ctx, &outer, factors, (&masked, Store::Set))?;
                du = Some(outer);
                dropout::backward(ctx, &masked, mask, (dx, Store::Add))
            })?;
            let du = match du {
                Some(du) => du,
                None => lora::backward_outer(ctx, &dy, factors)?,
            };
            lora.backward(ctx, (&input, &u), (&dy, &du))?;
            match residual {
                Some(residual) => gradients.give(ctx, &residual, dy),
                None => Ok(()),
            }
        }))
    }
}
