//! Self-attention of one block: fused query/key/value projection, head norms and rotation, attention, output projection.

use std::sync::Arc;

use crate::error::Result;
use crate::nn::{dropout::Dropout, linear::Linear, parameter::Parameter};
use crate::ops::{attention, ctx::Ctx, heads::Heads, rotary};
use crate::tape::{Tape, Var};

/// How N rows are sequences.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// T, the tokens of each.
    pub seq: usize,
    /// For each row, where in its sequence the document that it sees begins; `None` if each sees all before it.
    pub starts: Option<Arc<[u32]>>,
}

impl Layout {
    /// Sequences of which each token sees all before it.
    pub fn of(seq: usize) -> Self {
        Self { seq, starts: None }
    }
}

#[derive(Clone, Debug)]
pub struct SelfAttention {
    pub qkv: Linear,
    pub out: Linear,
    /// Gains of the query and key norms, where the model has them.
    pub norms: Option<[Arc<Parameter>; 2]>,
    pub eps: f32,
    pub heads: Heads,
    pub window: Option<usize>,
    pub table: Arc<rotary::Table>,
}

impl SelfAttention {
    /// x (N, C) -> the concatenated heads (N, H D), before the output projection.
    pub fn forward(&self, ctx: &mut Ctx, tape: &mut Tape, x: &Var, layout: &Layout, dropout: Dropout) -> Result<Var> {
        let qkv = self.qkv.forward(ctx, tape, x, None, dropout)?;
        let rotated = self.rotate(ctx, tape, &qkv, layout.seq)?;
        self.attend(ctx, tape, &rotated, layout)
    }

    fn rotate(&self, ctx: &mut Ctx, tape: &mut Tape, qkv: &Var, seq: usize) -> Result<Var> {
        let (heads, eps) = (self.heads, self.eps);
        let (norms, table) = (self.norms.clone(), Arc::clone(&self.table));
        let (y, rstd) = rotary::forward(ctx, qkv.value(), heads, borrow(&self.norms, eps), &table, seq)?;
        let qkv = qkv.clone();
        Ok(tape.record(y, move |ctx, dy, gradients| {
            let norm_views = borrow(&norms, eps);
            let saved = rotary::Saved { qkv: qkv.value(), rstd: &rstd, norms: norm_views, table: &table, heads, seq };
            gradients.write(ctx, &qkv, |ctx, dqkv, store| match &norms {
                Some([query, key]) if query.is_trainable() => query.write_gradient(|dq, q_store| {
                    key.write_gradient(|dk, k_store| {
                        rotary::backward(ctx, saved, &dy, (dqkv, store), Some([(dq, q_store), (dk, k_store)]))
                    })
                }),
                _ => rotary::backward(ctx, saved, &dy, (dqkv, store), None),
            })
        }))
    }

    fn attend(&self, ctx: &mut Ctx, tape: &mut Tape, qkv: &Var, layout: &Layout) -> Result<Var> {
        let Layout { seq, starts } = layout.clone();
        let (heads, window, batch) = (self.heads, self.window, qkv.value().dims()[0] / seq);
        let shape = attention::Attention { batch, seq, heads, window, starts: starts.as_deref() };
        let (out, lse) = attention::forward(ctx, qkv.value(), shape)?;
        let (qkv, saved_out) = (qkv.clone(), out.clone());
        Ok(tape.record(out, move |ctx, dout, gradients| {
            let saved = attention::Saved { qkv: qkv.value(), out: &saved_out, lse: &lse };
            let shape = attention::Attention { batch, seq, heads, window, starts: starts.as_deref() };
            gradients.write(ctx, &qkv, |ctx, dqkv, store| attention::backward(ctx, saved, &dout, shape, (dqkv, store)))
        }))
    }
}

fn borrow(norms: &Option<[Arc<Parameter>; 2]>, eps: f32) -> Option<rotary::Norms<'_>> {
    norms.as_ref().map(|[query, key]| rotary::Norms { query: query.master(), key: key.master(), eps })
}
