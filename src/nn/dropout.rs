//! Dropout whose mask is recomputed from its address, never stored.

use crate::error::Result;
use crate::ops::{ctx::Ctx, dropout};
use crate::random::{Purpose, Stream};
use crate::tape::{Tape, Var};

/// The dropout of one forward pass: each use in it gets a mask of its own.
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    probability: f32,
    seed: u64,
    position: u64,
    training: bool,
}

impl Dropout {
    /// Masks for micro-batch `micro` of `step`; a probability of 0 does nothing.
    pub fn new(probability: f32, seed: u64, step: u64, micro: u64) -> Self {
        Self { probability, seed, position: (step << 16) | (micro << 8), training: true }
    }

    /// No dropout, in adapters neither: validation.
    pub fn off() -> Self {
        Self { training: false, ..Self::new(0.0, 0, 0, 0) }
    }

    /// The mask of an adapter's input, if the pass drops anything there. Adapters have a probability and sites of their own.
    pub fn adapter_mask(&self, probability: f32, site: u64) -> Option<dropout::Mask> {
        let stream = Stream::new(self.seed, Purpose::AdapterDropout);
        let mask = dropout::Mask { probability, stream, position: self.position | site & 0xff };
        (self.training && probability > 0.0).then_some(mask)
    }

    /// x with a share of its elements zeroed and the rest scaled up; `site` tells the uses of a pass apart (below 256).
    pub fn forward(&self, ctx: &mut Ctx, tape: &mut Tape, x: Var, site: u64) -> Result<Var> {
        if self.probability == 0.0 {
            return Ok(x);
        }
        let stream = Stream::new(self.seed, Purpose::Dropout);
        let mask = dropout::Mask { probability: self.probability, stream, position: self.position | site };
        let y = dropout::forward(ctx, x.value(), mask)?;
        Ok(tape.record(y, move |ctx, dy, gradients| {
            gradients.write(ctx, &x, |ctx, dx, store| dropout::backward(ctx, &dy, mask, (dx, store)))
        }))
    }
}
