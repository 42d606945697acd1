//! The token table.

use std::sync::Arc;

use crate::error::Result;
use crate::nn::parameter::Parameter;
use crate::ops::{ctx::Ctx, embedding};
use crate::tape::{Tape, Var};

#[derive(Clone, Debug)]
pub struct Embedding {
    pub weight: Arc<Parameter>,
}

impl Embedding {
    /// N token ids -> (N, C).
    pub fn forward(&self, ctx: &mut Ctx, tape: &mut Tape, ids: &[u32]) -> Result<Var> {
        let y = embedding::forward(ctx, self.weight.matrix(), ids)?;
        if !self.weight.is_trainable() {
            return Ok(Var::constant(y));
        }
        let (weight, ids) = (Arc::clone(&self.weight), ids.to_vec());
        Ok(tape.record(y, move |ctx, dy, _| {
            weight.write_gradient(|dw, store| embedding::backward(ctx, &ids, &dy, (dw, store)))
        }))
    }
}
