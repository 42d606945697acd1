//! Held-out loss of a model over windows of text: nats a token, perplexity, bits a byte.
//!
//! Called by the train recipe for validation and by `gpt eval`; both walk the same windows in the same order, so they give
//! the same number. Sums are f64, in window order.

use crate::data::windows::Window;
use crate::error::Result;
use crate::model::gpt::{Batch, Gpt};
use crate::ops::cross_entropy::IGNORE;
use crate::ops::{ctx::Ctx, storage};

// Windows come from data, which may not know ops: the two layers must mean the same target by this number.
const _: () = assert!(crate::data::windows::IGNORE == IGNORE);

/// What a text cost a model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Evaluation {
    /// Sum of -ln p over the predicted tokens.
    pub nll: f64,
    /// Predicted tokens, end-of-text tokens included.
    pub tokens: u64,
    /// Bytes of raw text that they stand for; an end-of-text token stands for none.
    pub bytes: u64,
}

impl Evaluation {
    /// Mean nats a token.
    pub fn loss(&self) -> f64 {
        self.nll / self.tokens as f64
    }

    pub fn perplexity(&self) -> f64 {
        self.loss().exp()
    }

    /// Bits a byte of raw text: comparable across tokenizers.
    pub fn bits_per_byte(&self) -> f64 {
        self.nll / std::f64::consts::LN_2 / self.bytes as f64
    }
}

/// Tokens a forward of evaluation holds at most (at least one window).
const TOKENS_AT_ONCE: usize = 4096;

/// Runs `model` over `windows` without dropout or gradients.
pub fn evaluate(ctx: &mut Ctx, model: &Gpt, windows: impl Iterator<Item = Window>) -> Result<Evaluation> {
    // Its shapes are not those of a training step: what either left in the free list would only lie beside the other's.
    ctx.trim();
    let mut total = Evaluation::default();
    let rows = (TOKENS_AT_ONCE / model.config.max_position_embeddings).max(1);
    let mut windows = windows.peekable();
    while windows.peek().is_some() {
        let together: Vec<Window> = windows.by_ref().take(rows).collect();
        total.bytes += together.iter().map(|w| w.bytes as u64).sum::<u64>();
        let batch = padded(&together, model.config.max_position_embeddings);
        total.tokens += batch.valid() as u64;
        let nll = model.nll(ctx, &batch)?;
        total.nll += storage::read::<f32>("evaluate", &nll)?.iter().map(|x| f64::from(*x)).sum::<f64>();
    }
    ctx.trim();
    Ok(total)
}

/// Windows as one batch: a shorter one is filled with tokens that nothing before them sees and no loss counts.
fn padded(windows: &[Window], context: usize) -> Batch {
    let longest = windows.iter().map(|w| w.inputs.len()).max().unwrap_or(0);
    // Few different lengths, so that buffers are used again.
    let seq = longest.next_multiple_of(64).min(context);
    let mut batch = Batch::new(Vec::new(), Vec::new(), seq);
    for window in windows {
        batch.inputs.extend(&window.inputs);
        batch.targets.extend(&window.targets);
        let fill = seq - window.inputs.len();
        batch.inputs.extend(std::iter::repeat_n(0, fill));
        batch.targets.extend(std::iter::repeat_n(IGNORE, fill));
    }
    batch
}
