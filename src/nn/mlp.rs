//! The feed-forward layer: down(silu(gate x) * up x) (Shazeer, arXiv 2002.05202).

use crate::error::Result;
use crate::nn::{dropout::Dropout, linear::Linear};
use crate::ops::{ctx::Ctx, swiglu};
use crate::tape::{Tape, Var};

#[derive(Clone, Debug)]
pub struct Mlp {
    pub gate_up: Linear,
    pub down: Linear,
}

impl Mlp {
    /// x (N, C) -> the gated activations (N, F), before the down projection.
    pub fn forward(&self, ctx: &mut Ctx, tape: &mut Tape, x: &Var, dropout: Dropout) -> Result<Var> {
        let gate_up = self.gate_up.forward(ctx, tape, x, None, dropout)?;
        let y = swiglu::forward(ctx, gate_up.value())?;
        Ok(tape.record(y, move |ctx, dy, gradients| {
            gradients.write(ctx, &gate_up, |ctx, dx, store| swiglu::backward(ctx, gate_up.value(), &dy, (dx, store)))
        }))
    }
}
