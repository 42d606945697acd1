//! Causal attention of grouped query heads, optionally within a window, and its backward. Called by nn in training.
//!
//! Flash attention: blocks of queries walk over blocks of keys with an online softmax, so that no buffer grows with T
//! squared; the backward recomputes the probabilities from the saved logarithms of the softmax's sums. Dao et al.,
//! "FlashAttention" (2022) and Dao, "FlashAttention-2" (2023). No result depends on the number of threads.

mod cpu;
mod gpu;

use candle_core::Tensor;

use super::ctx::{Ctx, Value};
use super::gemm::Store;
use super::heads::Heads;
use super::storage;
use crate::error::{Error, Result};

const OP: &str = "attention";

/// The shape of an attention.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// B, the number of sequences.
    pub batch: usize,
    /// T, the tokens of each.
    pub seq: usize,
    pub heads: Heads,
    /// The number of keys that a token sees, itself included; `None` sees all that came before.
    pub window: Option<usize>,
    /// For each of the N tokens, the first one of its sequence that it may see: where its document begins. They do not fall
    /// within a sequence. `None` lets it see all that came before.
    pub starts: Option<&'a [u32]>,
}

/// Which keys the queries of one sequence see.
#[derive(Clone, Copy)]
struct Sight<'a> {
    window: Option<usize>,
    starts: Option<&'a [u32]>,
}

impl Sight<'_> {
    /// The first key that the query at `position` sees; the last is its own. It does not fall from one to the next.
    fn first_key(&self, position: usize) -> usize {
        let window = self.window.map_or(0, |window| (position + 1).saturating_sub(window));
        self.starts.map_or(window, |starts| window.max(starts[position] as usize))
    }
}

/// What the backward needs of the forward.
#[derive(Clone, Copy)]
pub struct Saved<'a> {
    /// The input (N, (H+2K)D).
    pub qkv: &'a Tensor,
    /// The first output (N, H D).
    pub out: &'a Tensor,
    /// The second output (B H T).
    pub lse: &'a Tensor,
}

/// From qkv (N, (H+2K)D), N = B T: softmax(q k^T / sqrt(D)) v of every head (N, H D), and the logarithms of the
/// softmax's sums (B H T).
pub fn forward(ctx: &mut Ctx, qkv: &Tensor, shape: Attention) -> Result<(Value, Value)> {
    shape.check()?;
    if ctx.has_gpu() {
        expect("qkv", qkv.elem_count(), shape.batch * shape.seq * shape.heads.qkv_size())?;
        return gpu::forward(ctx, qkv, shape);
    }
    let qkv = storage::read::<f32>(OP, qkv)?;
    let (n, width) = (shape.batch * shape.seq, shape.heads.attention_size());
    expect("qkv", qkv.len(), n * shape.heads.qkv_size())?;
    ctx.launch(0);
    let (mut out, mut lse) = (ctx.vec::<f32>(n * width), ctx.vec::<f32>(n * shape.heads.attention));
    if n > 0 {
        cpu::forward(ctx.family(), shape, &qkv, &mut out, &mut lse);
    }
    Ok((ctx.value(out, (n, width)), ctx.value(lse, n * shape.heads.attention)))
}

/// From dout (N, H D): writes the gradients of queries, keys and values to `dqkv` (N, (H+2K)D).
pub fn backward(
    ctx: &mut Ctx,
    saved: Saved,
    dout: &Tensor,
    shape: Attention,
    (dqkv, store): (&Tensor, Store),
) -> Result<()> {
    shape.check()?;
    if ctx.has_gpu() {
        let sizes = [saved.qkv, dqkv, saved.out, dout, saved.lse].map(Tensor::elem_count);
        check_backward(shape, sizes)?;
        return gpu::backward(ctx, saved, dout, shape, (dqkv, store));
    }
    let (qkv, out) = (storage::read::<f32>(OP, saved.qkv)?, storage::read::<f32>(OP, saved.out)?);
    let (lse, dout) = (storage::read::<f32>(OP, saved.lse)?, storage::read::<f32>(OP, dout)?);
    let mut dqkv = storage::write::<f32>(OP, dqkv)?;
    check_backward(shape, [qkv.len(), dqkv.len(), out.len(), dout.len(), lse.len()])?;
    ctx.launch(0);
    if shape.batch * shape.seq > 0 {
        let inputs = cpu::Inputs { qkv: &qkv, out: &out, lse: &lse, dout: &dout };
        cpu::backward(ctx.family(), shape, inputs, &mut dqkv, store);
    }
    Ok(())
}

impl Attention<'_> {
    /// What scores are multiplied by: 1 / sqrt(D).
    fn scale(&self) -> f32 {
        (1.0 / (self.heads.dim as f64).sqrt()) as f32
    }

    /// What the queries of a sequence see.
    fn sight(&self, sequence: usize) -> Sight<'_> {
        let starts = self.starts.map(|starts| &starts[sequence * self.seq..][..self.seq]);
        Sight { window: self.window, starts }
    }

    fn check(&self) -> Result<()> {
        if self.window == Some(0) {
            return Err(Error::op(OP, "a window of at least the token itself", "0"));
        }
        if let Some(starts) = self.starts {
            expect("starts", starts.len(), self.batch * self.seq)?;
            let wrong = |starts: &[u32]| !starts.is_sorted() || starts.iter().zip(0..).any(|(start, t)| *start > t);
            if starts.chunks(self.seq.max(1)).any(wrong) {
                return Err(Error::op(OP, "starts at or before their tokens, in order", "others"));
            }
        }
        self.heads.check(OP)
    }
}

fn expect(what: &str, found: usize, expected: usize) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(Error::op(OP, format!("{what} of {expected} elements"), found.to_string()))
}

/// Holds the elements of qkv, dqkv, out, dout and lse to a shape.
fn check_backward(shape: Attention, [qkv, dqkv, out, dout, lse]: [usize; 5]) -> Result<()> {
    let (n, heads) = (shape.batch * shape.seq, shape.heads);
    expect("qkv", qkv, n * heads.qkv_size())?;
    expect("dqkv", dqkv, n * heads.qkv_size())?;
    expect("out", out, n * heads.attention_size())?;
    expect("dout", dout, n * heads.attention_size())?;
    expect("lse", lse, n * heads.attention)
}

/// `forward` in plain f64: the output and the logarithms.
pub fn reference(qkv: &[f32], shape: Attention) -> (Vec<f64>, Vec<f64>) {
    let (heads, seq) = (shape.heads, shape.seq);
    let (d, width, h_count) = (heads.dim, heads.qkv_size(), heads.attention);
    let mut out = vec![0f64; shape.batch * seq * h_count * d];
    let mut lse = vec![0f64; shape.batch * h_count * seq];
    let head = |b: usize, t: usize, h: usize| &qkv[(b * seq + t) * width + h * d..][..d];
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    for (b, h, t) in (0..lse.len()).map(|i| (i / seq / h_count, i / seq % h_count, i % seq)) {
        let key = h_count + h / heads.group();
        let keys = shape.sight(b).first_key(t)..t + 1;
        let score = |j: usize| dot(head(b, t, h), head(b, j, key)) / (d as f64).sqrt();
        let scores: Vec<f64> = keys.clone().map(score).collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - top).exp()).sum();
        lse[(b * h_count + h) * seq + t] = top + sum.ln();
        let out = &mut out[((b * seq + t) * h_count + h) * d..][..d];
        for (j, score) in keys.zip(&scores) {
            let value = head(b, j, key + heads.key_value);
            out.iter_mut().zip(value).for_each(|(o, v)| *o += (score - top).exp() / sum * f64::from(*v));
        }
    }
    (out, lse)
}
