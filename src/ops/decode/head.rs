//! The two ends of the decode list: `embed` and `head`. Called by `engine::model`.

use super::weight::Weight;
use super::{Pass, Tables, Workspace};
use crate::ops::gemm::Store;
use crate::ops::team::Member;

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

impl Workspace {
    /// The lanes' token vectors as the residual stream of the pass that was begun. Ids must be < V.
    pub fn embed(&mut self, weights: &Head, ids: &[u32]) {
        let width = self.sizes.hidden_size;
        for (x, id) in self.x.chunks_exact_mut(width).zip(ids) {
            match &weights.embed_tokens {
                Some(table) => x.copy_from_slice(&table[*id as usize * width..][..width]),
                None => weights.lm_head.unpack_row(*id as usize, x),
            }
        }
    }
}

impl<T: Tables> Pass<'_, T> {
    /// Norm and logits of the lanes that were asked for.
    pub fn head(&self, member: &Member, weights: &Head) {
        let (weight, outputs) = (&weights.lm_head, self.outputs);
        let rows = self.normed_rows(member, weight, &weights.norm, outputs.len(), |i| outputs[i]);
        // SAFETY: the columns of this member's panels are its own.
        unsafe { weight.multiply(self.family, rows, weight.share(member), self.logits, Store::Set) };
    }
}
