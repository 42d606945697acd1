//! The built-in data set `stories`: short children's stories written by a probabilistic grammar.
//!
//! Called by the preparation of data sets, and by the evaluation, which compares a model's loss with the entropy of the
//! source. What must stay true: a story is a pure function of its seed and index; its `bits` are exactly -log2 of its
//! probability, which holds because every text has one derivation (the tests prove it, with `check.rs`); [`source`] is
//! exact, not sampled; no story is longer than [`Source::longest`]. The stories themselves are in `grammar.txt`.

#[cfg(test)]
mod check;
mod grammar;
#[cfg(test)]
mod tests;
mod walk;

use crate::random::{Purpose, Stream};
use std::sync::LazyLock;

/// The text of the built-in grammar.
const TEXT: &str = include_str!("grammar.txt");

static GRAMMAR: LazyLock<grammar::Grammar> =
    LazyLock::new(|| grammar::read(TEXT).expect("the built-in grammar is well formed: the tests read it"));

static SOURCE: LazyLock<Source> = LazyLock::new(|| {
    let walk::Measure { bits, bytes, longest } = walk::measure(&GRAMMAR);
    Source { bits_per_story: bits, bytes_per_story: bytes, longest: longest + 1 }
});

/// One story.
#[derive(Clone, Debug, PartialEq)]
pub struct Story {
    /// One paragraph of plain ASCII, without a newline.
    pub text: String,
    /// -log2 of the probability of the text with its end.
    pub bits: f64,
}

/// What the source of the stories is known to be: exact expectations over all stories.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Source {
    /// The entropy of a story with its end.
    pub bits_per_story: f64,
    /// The expected length of a story's text, without the end token.
    pub bytes_per_story: f64,
    /// No story has more bytes than this, one byte for its end token included.
    pub longest: usize,
}

impl Source {
    /// The entropy in bits per byte of text: no model's mean loss over enough stories is below it.
    pub fn entropy_bpb(&self) -> f64 {
        self.bits_per_story / self.bytes_per_story
    }
}

/// Story `index` of the endless stream of `seed`.
pub fn story(seed: u64, index: u64) -> Story {
    let stream = Stream::new(seed, Purpose::Stories);
    let mut draws = 0;
    let (text, bits) = walk::write(&GRAMMAR, || {
        draws += 1;
        stream.uniform_f64(index, draws - 1)
    });
    Story { text, bits }
}

/// The exact expectations over all stories.
pub fn source() -> &'static Source {
    &SOURCE
}

/// -log2 of the probability of a text with its end, recomputed from the text alone; nothing if it is not a story.
pub fn parse(text: &str) -> Option<f64> {
    walk::parse(&GRAMMAR, text)
}
