//! Text to token ids and back: bytes, or any tokenizer.json. Called by data and the recipes; the engine never sees one.
//!
//! Always saved as a tokenizer.json that transformers reads to the same ids. Byte lengths of tokens are exact.

mod cut;
pub mod stream;
pub mod train;
mod words;

use std::collections::HashSet;
use std::path::Path;
use std::sync::OnceLock;

use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

/// The name of the token that ends a text.
const END_OF_TEXT: &str = "<|endoftext|>";

/// More ids than any vocabulary has: a larger one is a damaged file, and would only ask for memory.
const MOST_IDS: usize = 1 << 24;

pub struct Tokenizer {
    kind: Kind,
    /// Raw bytes of each id; empty for special tokens.
    bytes: Vec<Vec<u8>>,
    end_of_text: u32,
    json: String,
}

enum Kind {
    Bytes,
    Json(Box<Json>),
}

struct Json {
    inner: tokenizers::Tokenizer,
    /// Whether the letters of its tokens stand for bytes.
    byte_level: bool,
    /// Whether the model drops what it has no token for, without a word; then every text is checked.
    drops: bool,
    /// The token of each byte by itself, where it has all of them.
    byte_ids: Option<Vec<u32>>,
    /// Where a long text may be cut; found when first asked for.
    cuts: OnceLock<cut::Cuts>,
    /// The short way to the ids, where there is one.
    words: Option<words::Words>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "Tokenizer({}, {} ids)", if self.is_bytes() { "bytes" } else { "json" }, self.len())
    }
}

impl Tokenizer {
    /// 256 bytes, whose ids are their values, and the end of text, 256.
    pub fn bytes() -> Self {
        let mut bytes: Vec<Vec<u8>> = (0..=255u8).map(|b| vec![b]).collect();
        bytes.push(Vec::new());
        Self { kind: Kind::Bytes, bytes, end_of_text: 256, json: bytes_json() }
    }

    /// A tokenizer.json, or the one in a folder.
    pub fn open(path: &Path) -> Result<Self> {
        let path = &if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
        Self::parse(read_text(path)?, path)
    }

    /// The text of a tokenizer.json; `path` names it in errors, and a tokenizer_config.json may stand beside it.
    fn parse(json: String, path: &Path) -> Result<Self> {
        if json == bytes_json() {
            return Ok(Self::bytes());
        }
        // The tokenizers crate panics on some texts that are not JSON.
        serde_json::from_str::<serde::de::IgnoredAny>(&json)
            .map_err(|e| Error::file(path, "a tokenizer.json", format!("text that is not JSON ({e})")))?;
        let damaged = |e: tokenizers::Error| Error::file(path, "a tokenizer.json", e.to_string());
        let mut inner: tokenizers::Tokenizer = json.parse().map_err(damaged)?;
        // Files made for other tasks cut and fill every text; here a text is always whole.
        inner.with_truncation(None).map_err(damaged)?;
        inner.with_padding(None);
        let size = inner.get_vocab(true).values().max().map_or(0, |id| *id as usize + 1);
        if size == 0 {
            return Err(Error::file(path, "a tokenizer.json", "one without any token"));
        }
        if size > MOST_IDS {
            return Err(Error::file(path, format!("ids below {MOST_IDS}"), format!("the id {}", size - 1)));
        }
        let byte_level = byte_level(&inner);
        let spelling = Spelling::of(&inner, byte_level);
        let special = inner.get_added_tokens_decoder();
        let bytes = (0..size as u32).map(|id| match (inner.id_to_token(id), special.get(&id)) {
            (None, _) => Vec::new(),
            (Some(_), Some(added)) if added.special => Vec::new(),
            (Some(token), Some(_)) => token.into_bytes(),
            (Some(token), None) => spelling.bytes(&token),
        });
        let bytes = bytes.collect();
        let end_of_text = end_of_text(&inner, path)?;
        let drops = match inner.get_model() {
            tokenizers::ModelWrapper::BPE(bpe) => bpe.get_unk_token().is_none() && !bpe.byte_fallback,
            _ => false,
        };
        let drops = drops && !(byte_level && byte_level_alphabet().iter().all(|c| has(&inner, *c)));
        let byte_ids = byte_ids(&inner, byte_level);
        let words = words::Words::of(&inner, byte_level_alphabet()).filter(|_| byte_level && !drops);
        let kind = Kind::Json(Box::new(Json { inner, byte_level, drops, byte_ids, cuts: OnceLock::new(), words }));
        Ok(Self { kind, bytes, end_of_text, json })
    }

    pub fn is_bytes(&self) -> bool {
        matches!(self.kind, Kind::Bytes)
    }

    /// The ids of a text, without special tokens around it. A character that has no token is an error, never left out.
    ///
    /// Bytes stay bytes even where they spell the name of a special token; a tokenizer.json takes it for the token.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let Kind::Json(json) = &self.kind else { return Ok(text.bytes().map(u32::from).collect()) };
        if json.drops {
            let mut seen = HashSet::new();
            if let Some(lacking) = text.chars().find(|c| seen.insert(*c) && json.lacks(*c)) {
                return Err(no_token(lacking));
            }
        }
        if let Some(ids) = json.words.as_ref().and_then(|words| words.encode(&json.inner, text)) {
            return Ok(ids);
        }
        json.encode(text)
    }

    /// The ids of bytes that may be no text: what is not UTF-8 becomes the tokens of single bytes, where there are such.
    pub fn encode_bytes(&self, bytes: &[u8]) -> Result<Vec<u32>> {
        let Kind::Json(json) = &self.kind else { return Ok(bytes.iter().map(|b| u32::from(*b)).collect()) };
        if let Ok(text) = std::str::from_utf8(bytes) {
            return self.encode(text);
        }
        let byte_ids = json.byte_ids.as_ref().ok_or_else(|| {
            Error::usage("the text has bytes that are not UTF-8, for which the tokenizer has no tokens")
                .with_hint("leave --allow-binary out, or use a tokenizer of bytes")
        })?;
        let mut ids = Vec::new();
        for chunk in bytes.utf8_chunks() {
            ids.extend(self.encode(chunk.valid())?);
            ids.extend(chunk.invalid().iter().map(|byte| byte_ids[usize::from(*byte)]));
        }
        Ok(ids)
    }

    /// The first place from byte `from` on where the text can be cut so that the ids of both parts together are the ids of
    /// the whole. None if this tokenizer, or this text, has no such place.
    pub fn cut(&self, text: &[u8], from: usize) -> Option<usize> {
        match &self.kind {
            Kind::Bytes => (from < text.len()).then_some(from),
            Kind::Json(json) => json.cuts.get_or_init(|| cut::Cuts::find(&json.inner)).next(text, from),
        }
    }

    /// The bytes that an id stands for; none for special tokens, padding and unknown ids.
    pub fn bytes_of(&self, id: u32) -> &[u8] {
        self.bytes.get(id as usize).map_or(&[], Vec::as_slice)
    }

    /// How many bytes each id stands for.
    pub fn byte_lengths(&self) -> Vec<u32> {
        self.bytes.iter().map(|b| b.len() as u32).collect()
    }

    pub fn decode(&self, ids: &[u32]) -> Vec<u8> {
        ids.iter().flat_map(|id| self.bytes_of(*id)).copied().collect()
    }

    pub fn end_of_text(&self) -> u32 {
        self.end_of_text
    }

    /// Ids in use.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The ids rounded up to a multiple of 64, as the model's tables have them.
    pub fn vocab_size(&self) -> usize {
        self.len().next_multiple_of(64)
    }

    /// The text of its tokenizer.json.
    pub fn to_json(&self) -> &str {
        &self.json
    }

    /// The text of its tokenizer_config.json.
    pub fn config_json(&self, context: usize) -> String {
        let end = match &self.kind {
            Kind::Bytes => END_OF_TEXT.to_owned(),
            Kind::Json(json) => json.inner.id_to_token(self.end_of_text).unwrap_or_default(),
        };
        let config = json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": end,
            "bos_token": end,
            "pad_token": end,
            "model_max_length": context,
            "clean_up_tokenization_spaces": false,
            "add_bos_token": false,
        });
        serde_json::to_string_pretty(&config).expect("a map of plain values") + "\n"
    }

    /// sha256 of the tokenizer.json: two models share a tokenizer if these are equal.
    pub fn hash(&self) -> String {
        Sha256::digest(self.json.as_bytes()).iter().map(|b| format!("{b:02x}")).collect()
    }
}

/// The letter that stands for each byte in GPT-2's ByteLevel alphabet: printable bytes themselves, the rest from U+0100 on.
fn byte_level_alphabet() -> [char; 256] {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut next = 0x100;
    std::array::from_fn(|b| {
        if printable(b as u8) {
            return char::from(b as u8);
        }
        next += 1;
        char::from_u32(next - 1).expect("below U+0200 every number is a character")
    })
}

impl Json {
    /// The ids of a text from the tokenizers crate.
    fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.inner.encode_fast(text, false).map_err(|e| {
            // Models that have neither an unknown token nor bytes refuse the text; which character it was they do not say.
            let lacking = text.chars().find(|c| self.inner.encode_fast(c.to_string(), false).is_err());
            lacking.map_or_else(|| Error::failed(format!("the tokenizer cannot encode the text: {e}")), no_token)
        })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Whether the model sees `c` and has no token for it. What a normalizer or pre-tokenizer takes away is not lacking.
    fn lacks(&self, c: char) -> bool {
        let mut text = [0; 4];
        let text: &str = c.encode_utf8(&mut text);
        let Some(pieces) = cut::pieces(&self.inner, text).map(|p| p.concat()) else { return false };
        if self.byte_level {
            // A letter for each byte, any of which may be the one that is dropped.
            return pieces.chars().any(|letter| !has(&self.inner, letter));
        }
        // A letter known only inside of words is no loss.
        !pieces.is_empty() && !has(&self.inner, c) && self.inner.encode_fast(text, false).is_ok_and(|e| e.is_empty())
    }
}

fn has(inner: &tokenizers::Tokenizer, letter: char) -> bool {
    inner.token_to_id(letter.encode_utf8(&mut [0; 4])).is_some()
}

fn no_token(c: char) -> Error {
    Error::usage(format!("the tokenizer has no token for {c:?}"))
        .with_hint("leave it out, or use a tokenizer that falls back to bytes")
}

/// Whether the letters of its tokens stand for bytes. The vocabulary is no evidence: "ByteLevel" may be a token.
fn byte_level(inner: &tokenizers::Tokenizer) -> bool {
    let parts = (inner.get_pre_tokenizer(), inner.get_decoder());
    serde_json::to_string(&parts).is_ok_and(|text| text.contains("\"type\":\"ByteLevel\""))
}

/// The byte of each letter of the ByteLevel alphabet, by its number.
fn byte_level_letters() -> Vec<Option<u8>> {
    let mut letters = vec![None; 0x200];
    for (byte, letter) in byte_level_alphabet().into_iter().enumerate() {
        letters[letter as usize] = Some(byte as u8);
    }
    letters
}

/// How a vocabulary writes the bytes of its tokens.
enum Spelling {
    /// A letter a byte.
    ByteLevel(Vec<Option<u8>>),
    /// As text; with U+2581 for a space, and `<0x0A>` for a byte, where its decoder reads them so.
    Text { spaces: bool, bytes: bool },
}

impl Spelling {
    fn of(inner: &tokenizers::Tokenizer, byte_level: bool) -> Self {
        if byte_level {
            return Self::ByteLevel(byte_level_letters());
        }
        let decoder = serde_json::to_string(&inner.get_decoder()).unwrap_or_default();
        let fallback = match inner.get_model() {
            tokenizers::ModelWrapper::BPE(bpe) => bpe.byte_fallback,
            tokenizers::ModelWrapper::Unigram(unigram) => unigram.byte_fallback(),
            _ => false,
        };
        Self::Text { spaces: decoder.contains('\u{2581}'), bytes: fallback || decoder.contains("\"ByteFallback\"") }
    }

    /// The raw bytes of a token.
    fn bytes(&self, token: &str) -> Vec<u8> {
        let (spaces, bytes) = match self {
            Self::ByteLevel(letters) => {
                let byte = |c: char| letters.get(c as usize).copied().flatten();
                return token.chars().map(byte).collect::<Option<_>>().unwrap_or_else(|| token.into());
            }
            Self::Text { spaces, bytes } => (*spaces, *bytes),
        };
        let hex = token.strip_prefix("<0x").and_then(|t| t.strip_suffix('>')).filter(|h| bytes && h.len() == 2);
        match hex.filter(|h| !h.contains('+')).and_then(|h| u8::from_str_radix(h, 16).ok()) {
            Some(byte) => vec![byte],
            None if spaces => token.replace('\u{2581}', " ").into_bytes(),
            None => token.into(),
        }
    }
}

/// The token of each byte by itself.
fn byte_ids(inner: &tokenizers::Tokenizer, byte_level: bool) -> Option<Vec<u32>> {
    let alphabet = byte_level_alphabet();
    let name = |byte: u8| match byte_level {
        true => alphabet[usize::from(byte)].to_string(),
        false => format!("<0x{byte:02X}>"),
    };
    (0..=255).map(|byte| inner.token_to_id(&name(byte))).collect()
}

/// A file that must be UTF-8.
fn read_text(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path).map_err(|e| Error::io("read", path, e))?;
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Error::file(path, "JSON text", format!("a byte at offset {at} that is not UTF-8"))
    })
}

/// The id that ends a text: what tokenizer_config.json beside it says, else the first of the usual names.
fn end_of_text(inner: &tokenizers::Tokenizer, path: &Path) -> Result<u32> {
    let beside = path.with_file_name("tokenizer_config.json");
    if beside.exists() {
        let config: Value =
            serde_json::from_str(&read_text(&beside)?).map_err(|e| Error::file(&beside, "JSON text", e.to_string()))?;
        let eos = &config["eos_token"];
        if let Some(said) = eos.as_str().or_else(|| eos["content"].as_str()) {
            return inner.token_to_id(said).ok_or_else(|| {
                let expected = format!("an eos_token that {} has", path.display());
                Error::file(&beside, expected, format!("`{said}`")).with_hint("name one of its tokens as eos_token")
            });
        }
    }
    let usual = [END_OF_TEXT, "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>"];
    usual.into_iter().find_map(|name| inner.token_to_id(name)).ok_or_else(|| {
        Error::file(path, "a token that ends a text", format!("none of {}", usual.join(" ")))
            .with_hint("name it as eos_token in a tokenizer_config.json beside it")
    })
}

/// The tokenizer.json of bytes: its text says that a folder's tokenizer is this one.
fn bytes_json() -> String {
    let alphabet = byte_level_alphabet().into_iter().enumerate();
    let vocab = alphabet.map(|(byte, letter)| (letter.to_string(), byte.into())).collect();
    tokenizer_json(vocab, Value::Array(Vec::new()), 256, false, (byte_level_part(false), byte_level_part(false)))
}

/// The part of a tokenizer.json that spells bytes as letters, and may split by GPT-2's pattern.
fn byte_level_part(splits: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": splits})
}

/// The text of a BPE's tokenizer.json: its vocabulary in the order of its ids, the end of text, pre-tokenizer and decoder.
fn tokenizer_json(
    vocab: Map<String, Value>,
    merges: Value,
    end_of_text: u64,
    byte_fallback: bool,
    (pre_tokenizer, decoder): (Value, Value),
) -> String {
    let json = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [{
            "id": end_of_text, "content": END_OF_TEXT, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true
        }],
        "normalizer": null,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": null,
        "decoder": decoder,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": byte_fallback, "ignore_merges": false,
            "vocab": vocab, "merges": merges
        }
    });
    serde_json::to_string_pretty(&json).expect("a map of plain values") + "\n"
}

#[cfg(test)]
mod tests;
