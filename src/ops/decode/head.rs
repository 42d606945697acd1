//! The two ends of the decode list: `embed` and `head`. Called by `engine::model`.

use super::weight::{Weight, multiply};
use super::{Lane, Workspace, rms_norm};
use crate::error::Result;
use crate::ops::ctx::Ctx;
use crate::ops::gemm::Store;

/// The token table and the output head; one packed matrix serves as both when they are tied.
pub struct Head {
    /// (V, C) row-major, if it is not the head's matrix too.
    pub embed_tokens: Option<Vec<f32>>,
    /// (C)
    pub norm: Vec<f32>,
    /// (V, C)
    pub lm_head: Weight,
}

impl Head {
    /// Bytes of what `head` reads.
    pub fn bytes(&self) -> usize {
        self.lm_head.bytes() + 4 * self.norm.len()
    }
}

/// Starts a step: room for its lanes, their angles, and the token vectors as the residual stream. Ids must be < V.
pub fn embed(ctx: &mut Ctx, weights: &Head, ws: &mut Workspace, lanes: &[Lane], ids: &[u32]) -> Result<()> {
    ctx.launch(ids.len() * ws.sizes.hidden_size * 4);
    ws.begin(lanes);
    let width = ws.sizes.hidden_size;
    for (x, id) in ws.x.chunks_exact_mut(width).zip(ids) {
        match &weights.embed_tokens {
            Some(table) => x.copy_from_slice(&table[*id as usize * width..][..width]),
            None => weights.lm_head.unpack_row(*id as usize, x),
        }
    }
    Ok(())
}

/// Norm and logits of the lanes `outputs`: (outputs, V), valid until the next step.
pub fn head<'a>(ctx: &mut Ctx, weights: &Head, ws: &'a mut Workspace, outputs: &[usize]) -> Result<&'a mut [f32]> {
    ctx.launch(weights.bytes());
    let width = ws.sizes.hidden_size;
    for (y, lane) in ws.normed.chunks_exact_mut(width).zip(outputs) {
        y.copy_from_slice(&ws.x[lane * width..][..width]);
        rms_norm(ctx.family(), y, &weights.norm, ws.sizes.rms_norm_eps);
    }
    ws.logits.resize(outputs.len() * weights.lm_head.outputs(), 0.0);
    multiply(ctx, &ws.normed[..outputs.len() * width], &weights.lm_head, &mut ws.logits, Store::Set);
    Ok(&mut ws.logits)
}
