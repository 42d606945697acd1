//! New tokenizers from text: byte pairs (Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units", 2016,
//! on bytes as in GPT-2) and characters. Called by the tokenizer recipe.
//!
//! The result depends on the text alone, not on threads or hashing: words are counted, and counts add up in any order; of
//! pairs equally frequent the trainer takes the one of the lowest ids.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use ahash::AHashMap;
use compact_str::CompactString;
use fancy_regex::Regex;
use rayon::prelude::*;
use serde_json::{Value, json};
use tokenizers::AddedToken;
use tokenizers::models::bpe::{BPE, BpeTrainer};

use super::words::GPT2;
use super::{END_OF_TEXT, Tokenizer, byte_level_alphabet, byte_level_part, tokenizer_json};
use crate::error::{Error, Result};

/// Text that is counted: pairs are counted in 32 bits by the trainer, and no vocabulary gets better from more.
pub const MOST_BYTES: u64 = 1 << 30;

/// Different words that are kept at most; beyond, the rarest are forgotten.
const MOST_WORDS: usize = 1 << 19;

/// The smallest vocabulary: 256 bytes and the end of text.
pub const SMALLEST: usize = 257;

/// How often each word comes.
#[derive(Default)]
pub struct Words(AHashMap<CompactString, u64>);

impl Words {
    /// Counts the words of pieces that begin and end where words do, with all threads. Bytes that are no text count as U+FFFD.
    pub fn add(&mut self, pieces: &[&[u8]]) {
        let texts: Vec<_> = pieces.iter().map(|piece| String::from_utf8_lossy(piece)).collect();
        let counted: Vec<_> = texts.par_iter().map(|text| count(text)).collect();
        for (word, n) in counted.into_iter().flatten() {
            match self.0.get_mut(word) {
                Some(count) => *count += n,
                None => drop(self.0.insert(word.into(), n)),
            }
        }
        let mut least = 2;
        while self.0.len() > MOST_WORDS {
            self.0.retain(|_, n| *n >= least);
            least *= 2;
        }
    }
}

/// Where words end anyway: for cutting a long text before its words are counted.
pub fn cut_words(text: &[u8], from: usize) -> Option<usize> {
    super::cut::Cuts::of_words().next(text, from)
}

/// The words of a text by GPT-2's pattern.
fn count(text: &str) -> AHashMap<&str, u64> {
    static PATTERN: LazyLock<Regex> = LazyLock::new(|| Regex::new(GPT2).expect("the pattern is constant"));
    let mut words = AHashMap::new();
    for word in PATTERN.find_iter(text) {
        let word = word.expect("the pattern looks no further back than a character");
        *words.entry(word.as_str()).or_default() += 1;
    }
    words
}

/// Refuses sizes that no vocabulary of byte pairs has.
pub fn check_vocab(vocab_size: usize) -> Result<()> {
    if (SMALLEST..=super::MOST_IDS).contains(&vocab_size) {
        return Ok(());
    }
    Err(Error::usage(format!("a vocabulary of {vocab_size}"))
        .with_hint(format!("--vocab takes {SMALLEST} (256 bytes and the end of text) to {}", super::MOST_IDS)))
}

/// A byte-level BPE of at most `vocab_size` ids. Fewer if the text has no more pairs.
pub fn byte_pairs(words: &Words, vocab_size: usize) -> Result<Tokenizer> {
    check_vocab(vocab_size)?;
    let trainer = BpeTrainer::builder()
        .show_progress(false)
        .vocab_size(vocab_size)
        .min_frequency(2)
        .initial_alphabet(byte_level_alphabet().into_iter().collect())
        .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
        .build();
    let mut model = BPE::default();
    let letters = byte_level_alphabet();
    let spell = |word: &CompactString| word.bytes().map(|byte| letters[usize::from(byte)]).collect::<CompactString>();
    let words = words.0.iter().map(|(word, n)| (spell(word), *n)).collect();
    trainer.do_train(&words, &mut model).map_err(|e| Error::failed(format!("training the tokenizer: {e}")))?;
    let model = serde_json::to_value(&model).map_err(|e| Error::failed(format!("writing the tokenizer: {e}")))?;
    let vocab = model["vocab"].as_object().into_iter().flatten();
    let vocab = vocab.map(|(token, id)| (token.clone(), id.as_u64().unwrap_or_default())).collect();
    assemble(vocab, model["merges"].clone(), false, (byte_level_part(true), byte_level_part(true)))
}

/// A token for each of these characters, and 256 for the bytes of all others: the end of text, the bytes `<0x00>` to `<0xFF>`,
/// then the characters in their order.
pub fn characters(known: &BTreeSet<char>) -> Result<Tokenizer> {
    let bytes = (0..=255u8).map(|byte| format!("<0x{byte:02X}>"));
    let names = std::iter::once(END_OF_TEXT.to_owned()).chain(bytes).chain(known.iter().map(char::to_string));
    let vocab = names.zip(0..).collect();
    // Lines are words, so that no text is one word.
    let lines = json!({
        "type": "Split", "pattern": {"String": "\n"}, "behavior": "MergedWithPrevious", "invert": false
    });
    let decoder = json!({"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]});
    assemble(vocab, json!([]), true, (lines, decoder))
}

/// A tokenizer of this vocabulary, which has the end of text, in any order.
fn assemble(
    mut vocab: Vec<(String, u64)>,
    merges: Value,
    byte_fallback: bool,
    parts: (Value, Value),
) -> Result<Tokenizer> {
    vocab.sort_by_key(|(_, id)| *id);
    let end = vocab.iter().find(|(token, _)| token == END_OF_TEXT).map_or(0, |(_, id)| *id);
    let vocab = vocab.into_iter().map(|(token, id)| (token, id.into())).collect();
    let text = tokenizer_json(vocab, merges, end, byte_fallback, parts);
    Tokenizer::parse(text, std::path::Path::new("tokenizer.json"))
}
