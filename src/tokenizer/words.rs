//! Ids by way of words: a text is split by the tokenizer's own pattern, and the model is asked once for each word.
//!
//! The tokenizers crate makes several strings for every word of a text, which takes most of its time. Where a tokenizer does
//! nothing but split by a pattern and look up byte pairs (GPT-2, Llama 3, Qwen, and those trained here), the same ids come
//! from the same pattern and a table of the words that were seen. Called by `Tokenizer::encode`, which goes the long way where
//! this one says nothing.

use std::sync::Mutex;

use ahash::AHashMap;
use fancy_regex::Regex;
use memchr::memmem::Finder;
use serde_json::Value;
use tokenizers::{Model, ModelWrapper, Tokenizer};

/// GPT-2's pattern, which the pre-tokenizer "ByteLevel" has within.
pub const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Words that a table holds before it begins anew, and the longest that it takes.
const MOST_WORDS: usize = 1 << 19;
const LONGEST: usize = 64;

/// More added tokens than this are not looked for one by one.
const MOST_ADDED: usize = 64;

pub struct Words {
    pattern: Regex,
    /// Tokens that stand for themselves wherever they are found: a text with one goes the long way.
    added: Vec<Finder<'static>>,
    /// The letters of the byte-level alphabet.
    letters: [char; 256],
    /// Whether only ASCII is certain to be left as it is by the normalizer.
    ascii: bool,
    /// Tables that no thread uses right now.
    tables: Mutex<Vec<Table>>,
}

/// Ids of words.
#[derive(Default)]
struct Table {
    words: AHashMap<Box<str>, (u32, u32)>,
    ids: Vec<u32>,
}

impl Words {
    /// If this tokenizer is of that kind.
    pub fn of(tokenizer: &Tokenizer, letters: [char; 256]) -> Option<Self> {
        let ModelWrapper::BPE(model) = tokenizer.get_model() else { return None };
        if model.dropout.is_some() {
            return None;
        }
        let normalizer = serde_json::to_value(tokenizer.get_normalizer()).ok()?;
        let ascii = match (&normalizer, normalizer["type"].as_str()) {
            (Value::Null, _) => false,
            (_, Some("NFC")) => true,
            _ => return None,
        };
        let pattern = pattern(&serde_json::to_value(tokenizer.get_pre_tokenizer()).ok()?)?;
        let added = tokenizer.get_added_tokens_decoder();
        if added.len() > MOST_ADDED || added.values().any(|token| token.content.is_empty()) {
            return None;
        }
        let added = added.values().map(|token| Finder::new(&token.content).into_owned()).collect();
        Some(Self { pattern: Regex::new(&pattern).ok()?, added, letters, ascii, tables: Mutex::default() })
    }

    /// The ids of a text, if they can be had this way.
    pub fn encode(&self, tokenizer: &Tokenizer, text: &str) -> Option<Vec<u32>> {
        if self.ascii && !text.is_ascii() || self.added.iter().any(|token| token.find(text.as_bytes()).is_some()) {
            return None;
        }
        // A lock that another thread left while it panicked holds whole tables: they are put there by one push.
        let lock = || self.tables.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut table = lock().pop().unwrap_or_default();
        let mut ids = Vec::with_capacity(text.len() / 2);
        let mut end = 0;
        for word in self.pattern.find_iter(text) {
            let word = word.ok()?;
            if word.start() > end {
                self.word(tokenizer, &mut table, &text[end..word.start()], &mut ids)?;
            }
            self.word(tokenizer, &mut table, word.as_str(), &mut ids)?;
            end = word.end();
        }
        if end < text.len() {
            self.word(tokenizer, &mut table, &text[end..], &mut ids)?;
        }
        lock().push(table);
        Some(ids)
    }

    fn word(&self, tokenizer: &Tokenizer, table: &mut Table, word: &str, ids: &mut Vec<u32>) -> Option<()> {
        if let Some((start, end)) = table.words.get(word) {
            ids.extend_from_slice(&table.ids[*start as usize..*end as usize]);
            return Some(());
        }
        let letters: String = word.bytes().map(|byte| self.letters[usize::from(byte)]).collect();
        let tokens = tokenizer.get_model().tokenize(&letters).ok()?;
        ids.extend(tokens.iter().map(|token| token.id));
        if word.len() <= LONGEST {
            if table.words.len() >= MOST_WORDS {
                *table = Table::default();
            }
            let start = table.ids.len() as u32;
            table.ids.extend(tokens.iter().map(|token| token.id));
            table.words.insert(word.into(), (start, table.ids.len() as u32));
        }
        Some(())
    }
}

/// The pattern by which a pre-tokenizer splits, if it does nothing else but spell bytes as letters.
fn pattern(pre_tokenizer: &Value) -> Option<String> {
    let byte_level = |part: &Value, splits: bool| {
        part["type"] == "ByteLevel" && part["add_prefix_space"] == false && part["use_regex"] == splits
    };
    if byte_level(pre_tokenizer, true) {
        return Some(GPT2.to_owned());
    }
    let [split, spelling] = &pre_tokenizer["pretokenizers"].as_array()?[..] else { return None };
    let isolated = split["type"] == "Split" && split["behavior"] == "Isolated" && split["invert"] == false;
    let pattern = split["pattern"]["Regex"].as_str().filter(|_| isolated && byte_level(spelling, false))?;
    Some(pattern.to_owned())
}
