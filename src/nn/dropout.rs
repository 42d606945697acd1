//! Dropout whose mask is recomputed from its address, never stored.

use crate::error::Result;
use crate::ops::{ctx::Ctx, dropout};
use crate::random::{Purpose, Stream};
use crate::tape::{Tape, Var};

/// The dropout of one forward pass: each use in it gets a mask of its own.
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    probability: f32,
    stream: Stream,
    position: u64,
}

impl Dropout {
    /// Masks for micro-batch `micro` of `step`; a probability of 0 does nothing.
    pub fn new(probability: f32, seed: u64, step: u64, micro: u64) -> Self {
        Self { probability, stream: Stream::new(seed, Purpose::Dropout), position: (step << 16) | (micro << 8) }
    }

    /// No dropout: validation.
    pub fn off() -> Self {
        Self::new(0.0, 0, 0, 0)
    }

    /// x with a share of its elements zeroed and the rest scaled up; `site` tells the uses of a pass apart (below 256).
    pub fn forward(&self, ctx: &mut Ctx, tape: &mut Tape, x: Var, site: u64) -> Result<Var> {
        if self.probability == 0.0 {
            return Ok(x);
        }
        let position = self.position | site;
        let mask = dropout::Mask { probability: self.probability, stream: self.stream, position };
        let y = dropout::forward(ctx, x.value(), mask)?;
        Ok(tape.record(y, move |ctx, dy, gradients| {
            gradients.write(ctx, &x, |ctx, dx, store| dropout::backward(ctx, &dy, mask, (dx, store)))
        }))
    }
}
