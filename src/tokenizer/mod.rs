//! Text to token ids and back: bytes, or any tokenizer.json. Called by data and the recipes; the engine never sees one.
//!
//! Always saved as a tokenizer.json that transformers reads to the same ids. Byte lengths of tokens are exact.

pub mod stream;

use std::path::Path;

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

/// The name of the token that ends a text.
const END_OF_TEXT: &str = "<|endoftext|>";

pub struct Tokenizer {
    kind: Kind,
    /// Raw bytes of each id; empty for special tokens.
    bytes: Vec<Vec<u8>>,
    end_of_text: u32,
    json: String,
}

enum Kind {
    Bytes,
    Json(Box<tokenizers::Tokenizer>),
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
        let json = std::fs::read_to_string(path).map_err(|e| Error::io("read", path, e))?;
        if json == bytes_json() {
            return Ok(Self::bytes());
        }
        let damaged = |e: tokenizers::Error| Error::file(path, "a tokenizer.json", e.to_string());
        let inner: tokenizers::Tokenizer = json.parse().map_err(damaged)?;
        let size = inner.get_vocab(true).values().max().map_or(0, |id| *id as usize + 1);
        if size == 0 {
            return Err(Error::file(path, "a tokenizer.json", "one without any token"));
        }
        let byte_level = json.contains("\"ByteLevel\"");
        let special = inner.get_added_tokens_decoder();
        let bytes = (0..size as u32).map(|id| match (inner.id_to_token(id), special.get(&id)) {
            (None, _) => Vec::new(),
            (Some(_), Some(added)) if added.special => Vec::new(),
            (Some(token), Some(_)) => token.into_bytes(),
            (Some(token), None) => token_bytes(&token, byte_level),
        });
        let bytes = bytes.collect();
        let end_of_text = end_of_text(&inner, path)?;
        Ok(Self { kind: Kind::Json(Box::new(inner)), bytes, end_of_text, json })
    }

    pub fn is_bytes(&self) -> bool {
        matches!(self.kind, Kind::Bytes)
    }

    /// The ids of a text, without special tokens around it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let Kind::Json(inner) = &self.kind else { return Ok(text.bytes().map(u32::from).collect()) };
        let failed = |e: tokenizers::Error| Error::failed(format!("the tokenizer cannot encode the text: {e}"));
        let ids = inner.encode(text, false).map_err(failed)?.get_ids().to_vec();
        if ids.is_empty() && !text.is_empty() {
            let lost = text.chars().find(|c| inner.encode(c.to_string(), false).is_ok_and(|e| e.is_empty()));
            let what = format!("the tokenizer has no token for {:?}", lost.unwrap_or_default());
            return Err(Error::usage(what).with_hint("leave it out, or use a tokenizer that falls back to bytes"));
        }
        Ok(ids)
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
            Kind::Json(inner) => inner.id_to_token(self.end_of_text).unwrap_or_default(),
        };
        let config = serde_json::json!({
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

/// The raw bytes of a token's text in the vocabulary.
fn token_bytes(token: &str, byte_level: bool) -> Vec<u8> {
    if byte_level {
        let alphabet = byte_level_alphabet();
        let byte = |c: char| alphabet.iter().position(|a| *a == c).map(|b| b as u8);
        if let Some(bytes) = token.chars().map(byte).collect() {
            return bytes;
        }
    }
    let hex = token.strip_prefix("<0x").and_then(|t| t.strip_suffix('>'));
    match hex.and_then(|h| u8::from_str_radix(h, 16).ok()) {
        Some(byte) => vec![byte],
        None => token.replace('\u{2581}', " ").into_bytes(),
    }
}

/// The id that ends a text: what tokenizer_config.json beside it says, else the first of the usual names.
fn end_of_text(inner: &tokenizers::Tokenizer, path: &Path) -> Result<u32> {
    let config = path.with_file_name("tokenizer_config.json");
    let config: Option<serde_json::Value> =
        std::fs::read_to_string(config).ok().and_then(|text| serde_json::from_str(&text).ok());
    let eos = config.as_ref().map(|c| &c["eos_token"]);
    let said = eos.and_then(|e| e.as_str().or_else(|| e["content"].as_str()));
    let usual = [END_OF_TEXT, "<|end_of_text|>", "</s>", "<|im_end|>", "<eos>"];
    let found = said.into_iter().chain(usual).find_map(|name| inner.token_to_id(name));
    found.ok_or_else(|| {
        Error::file(path, "a token that ends a text", format!("none of {}", usual.join(" ")))
            .with_hint("name it as eos_token in a tokenizer_config.json beside it")
    })
}

fn bytes_json() -> String {
    let alphabet = byte_level_alphabet();
    let vocab: serde_json::Map<String, serde_json::Value> =
        alphabet.iter().enumerate().map(|(byte, letter)| (letter.to_string(), byte.into())).collect();
    let byte_level = serde_json::json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false
    });
    let json = serde_json::json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [{
            "id": 256, "content": END_OF_TEXT, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true
        }],
        "normalizer": null,
        "pre_tokenizer": byte_level.clone(),
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": []
        }
    });
    serde_json::to_string_pretty(&json).expect("a map of plain values") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXTS: [&str; 5] = ["", "plain text\n", "émoji 😀 and 漢字", "tab\tnul\0 \u{7f}", "<0x41> \u{2581} Ġ"];

    #[test]
    fn the_saved_byte_tokenizer_gives_the_same_ids_in_the_tokenizers_crate() {
        let ours = Tokenizer::bytes();
        let theirs: tokenizers::Tokenizer = ours.to_json().parse().unwrap();
        for text in TEXTS {
            let ids = ours.encode(text).unwrap();
            assert_eq!(theirs.encode(text, false).unwrap().get_ids(), ids, "{text:?}");
            assert_eq!(ours.decode(&ids), text.as_bytes());
            assert_eq!(theirs.decode(&ids, false).unwrap(), text);
        }
        assert_eq!(theirs.token_to_id(END_OF_TEXT), Some(256));
        assert_eq!((ours.len(), ours.vocab_size()), (257, 320));
        assert!(ours.bytes_of(256).is_empty() && ours.bytes_of(300).is_empty());
    }

    #[test]
    fn a_saved_byte_tokenizer_opens_as_bytes_and_others_keep_exact_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokenizer.json");
        std::fs::write(&path, Tokenizer::bytes().to_json()).unwrap();
        assert!(Tokenizer::open(dir.path()).unwrap().is_bytes());
        // The same alphabet with one merge is a BPE of its own: "Ġa" is the two bytes " a".
        let merged = Tokenizer::bytes().to_json().replace("\"merges\": []", "\"merges\": [[\"Ġ\", \"a\"]]");
        let merged =
            merged.replace("\"id\": 256", "\"id\": 257").replacen("\"vocab\": {", "\"vocab\": { \"Ġa\": 256,", 1);
        std::fs::write(&path, merged).unwrap();
        let bpe = Tokenizer::open(&path).unwrap();
        assert_eq!(bpe.bytes_of(256), b" a");
        for text in TEXTS.into_iter().chain(["a a a"]) {
            let ids = bpe.encode(text).unwrap();
            assert_eq!(bpe.decode(&ids), text.as_bytes());
            let lengths = bpe.byte_lengths();
            assert_eq!(ids.iter().map(|id| lengths[*id as usize] as usize).sum::<usize>(), text.len());
        }
        assert_eq!(bpe.end_of_text(), 257);
    }

    #[test]
    fn damaged_files_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokenizer.json");
        for text in ["", "{}", "<html>", "{\"version\": \"1.0\"}"] {
            std::fs::write(&path, text).unwrap();
            let error = Tokenizer::open(&path).unwrap_err().to_string();
            assert!(error.contains("tokenizer.json"), "{error}");
        }
        assert!(Tokenizer::open(&dir.path().join("none.json")).is_err());
    }
}
