//! Text to token ids and back: bytes, or any tokenizer.json. Called by data and the recipes; the engine never sees one.
//!
//! Always saved as a tokenizer.json that transformers reads to the same ids. Byte lengths of tokens are exact.

pub mod stream;

use std::collections::HashSet;
use std::path::Path;

use sha2::{Digest, Sha256};
use tokenizers::{Normalizer, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

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
        let json = read_text(path)?;
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
        let letters = byte_level.then(byte_level_letters);
        let special = inner.get_added_tokens_decoder();
        let bytes = (0..size as u32).map(|id| match (inner.id_to_token(id), special.get(&id)) {
            (None, _) => Vec::new(),
            (Some(_), Some(added)) if added.special => Vec::new(),
            (Some(token), Some(_)) => token.into_bytes(),
            (Some(token), None) => token_bytes(&token, letters.as_ref()),
        });
        let bytes = bytes.collect();
        let end_of_text = end_of_text(&inner, path)?;
        let drops = match inner.get_model() {
            tokenizers::ModelWrapper::BPE(bpe) => bpe.get_unk_token().is_none() && !bpe.byte_fallback,
            _ => false,
        };
        let drops = drops && !(byte_level && byte_level_alphabet().iter().all(|c| has(&inner, *c)));
        let kind = Kind::Json(Box::new(Json { inner, byte_level, drops }));
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
        let encoding = json.inner.encode_fast(text, false).map_err(|e| {
            // Models that have neither an unknown token nor bytes refuse the text; which character it was they do not say.
            let lacking = text.chars().find(|c| json.inner.encode_fast(c.to_string(), false).is_err());
            lacking.map_or_else(|| Error::failed(format!("the tokenizer cannot encode the text: {e}")), no_token)
        })?;
        Ok(encoding.get_ids().to_vec())
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

impl Json {
    /// Whether the model sees `c` and has no token for it. What a normalizer or pre-tokenizer takes away is not lacking.
    fn lacks(&self, c: char) -> bool {
        let mut text = [0; 4];
        let text: &str = c.encode_utf8(&mut text);
        let Some(pieces) = pieces(&self.inner, text) else { return false };
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

/// What the model gets to see of a text.
fn pieces(inner: &tokenizers::Tokenizer, text: &str) -> Option<String> {
    let mut text = PreTokenizedString::from(text);
    if let Some(normalizer) = inner.get_normalizer() {
        text.normalize(|piece| normalizer.normalize(piece)).ok()?;
    }
    if let Some(pre_tokenizer) = inner.get_pre_tokenizer() {
        pre_tokenizer.pre_tokenize(&mut text).ok()?;
    }
    let splits = text.get_splits(OffsetReferential::Original, OffsetType::None);
    Some(splits.into_iter().map(|(piece, ..)| piece).collect())
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

/// The raw bytes of a token's text in the vocabulary: by the ByteLevel `letters`, else as sentencepiece writes it.
fn token_bytes(token: &str, letters: Option<&Vec<Option<u8>>>) -> Vec<u8> {
    if let Some(letters) = letters {
        let byte = |c: char| letters.get(c as usize).copied().flatten();
        return token.chars().map(byte).collect::<Option<_>>().unwrap_or_else(|| token.into());
    }
    let hex = token.strip_prefix("<0x").and_then(|t| t.strip_suffix('>')).filter(|h| h.len() == 2 && !h.contains('+'));
    match hex.and_then(|h| u8::from_str_radix(h, 16).ok()) {
        Some(byte) => vec![byte],
        None => token.replace('\u{2581}', " ").into_bytes(),
    }
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
        let config: serde_json::Value =
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

    /// Numbers that look random (splitmix64): the layer below has none.
    fn random(i: u64) -> usize {
        let x = i.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        ((x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB) >> 33) as usize
    }

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

    /// A BPE of single characters; `change` edits its JSON before it is opened.
    fn characters(change: impl Fn(&mut serde_json::Value)) -> Result<Tokenizer> {
        let mut json = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null,
            "added_tokens": [{"id": 4, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true}],
            "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": null,
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                "vocab": {"a": 0, "b": 1, "é": 2, "ByteLevel": 3}, "merges": []}
        });
        change(&mut json);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokenizer.json");
        std::fs::write(&path, json.to_string()).unwrap();
        Tokenizer::open(&path)
    }

    #[test]
    fn a_character_without_a_token_is_named_wherever_it_stands() {
        let tokenizer = characters(|_| {}).unwrap();
        assert_eq!(tokenizer.encode("abé").unwrap(), [0, 1, 2]);
        for text in ["x", "abxa", "aébx", "ab\n"] {
            let error = tokenizer.encode(text).unwrap_err();
            let lacking = if text.contains('x') { "'x'" } else { "'\\n'" };
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains(lacking), "{text:?}: {error}");
        }
        // What the pre-tokenizer takes away was not lacking, and an unknown token is a token.
        let words = characters(|json| json["pre_tokenizer"] = serde_json::json!({"type": "Whitespace"})).unwrap();
        assert_eq!(words.encode("a b\n").unwrap(), [0, 1]);
        let unknown = characters(|json| json["model"]["unk_token"] = "ByteLevel".into()).unwrap();
        assert_eq!(unknown.encode("axb").unwrap(), [0, 3, 1]);
        // A word model that has neither says which character it was, too.
        let model = serde_json::json!({"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "none"});
        let error = characters(|json| json["model"] = model.clone()).unwrap().encode("x").unwrap_err();
        assert!(error.to_string().contains("'x'"), "{error}");
    }

    #[test]
    fn a_byte_level_alphabet_with_a_hole_is_noticed() {
        let byte_level = serde_json::json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false
        });
        let tokenizer = characters(|json| json["pre_tokenizer"] = byte_level.clone()).unwrap();
        assert_eq!(tokenizer.encode("ab").unwrap(), [0, 1]);
        // The letter "é" is the byte 0xE9; the character é is two other bytes.
        assert_eq!(tokenizer.bytes_of(2), [0xE9]);
        assert!(tokenizer.encode("aé").unwrap_err().to_string().contains("'é'"));
    }

    #[test]
    fn a_token_named_byte_level_does_not_make_letters_bytes() {
        assert_eq!(characters(|_| {}).unwrap().bytes_of(2), "é".as_bytes());
    }

    #[test]
    fn a_text_is_never_cut_or_filled() {
        let tokenizer = characters(|json| {
            json["truncation"] = serde_json::json!({
                "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0
            });
            json["padding"] = serde_json::json!({
                "strategy": {"Fixed": 20}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 3,
                "pad_type_id": 0, "pad_token": "ByteLevel"
            });
        });
        assert_eq!(tokenizer.unwrap().encode("ababab").unwrap(), [0, 1, 0, 1, 0, 1]);
    }

    #[test]
    fn the_end_of_text_is_the_one_that_the_config_names() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokenizer.json");
        std::fs::write(&path, characters(|_| {}).unwrap().to_json()).unwrap();
        let config = dir.path().join("tokenizer_config.json");
        let opened = |text: &str| {
            std::fs::write(&config, text).unwrap();
            Tokenizer::open(dir.path()).map(|t| t.end_of_text())
        };
        assert_eq!(opened(r#"{"eos_token": "b"}"#).unwrap(), 1);
        assert_eq!(opened(r#"{"eos_token": {"content": "a"}}"#).unwrap(), 0);
        assert_eq!(opened(r#"{"eos_token": null}"#).unwrap(), 4);
        for (text, found) in [(r#"{"eos_token": "<none>"}"#, "`<none>`"), ("<html>", "expected value")] {
            let error = opened(text).unwrap_err().to_string();
            assert!(error.contains("tokenizer_config.json") && error.contains(found), "{error}");
        }
        std::fs::remove_file(&config).unwrap();
        assert_eq!(Tokenizer::open(&path).unwrap().end_of_text(), 4);
        let error = characters(|json| json["added_tokens"] = serde_json::json!([])).unwrap_err();
        assert!(error.to_string().contains("<|endoftext|> <|end_of_text|>"), "{error}");
    }

    #[test]
    fn sentencepiece_tokens_have_exact_bytes() {
        assert_eq!(token_bytes("\u{2581}the", None), b" the");
        assert_eq!(token_bytes("<0x0A>", None), b"\n");
        for text in ["<0x+1>", "<0x1>", "<0xGG>", "<0x414>"] {
            assert_eq!(token_bytes(text, None), text.as_bytes());
        }
    }

    #[test]
    fn damage_anywhere_is_an_error_or_harmless() {
        let whole = Tokenizer::bytes().to_json().to_owned().into_bytes();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tokenizer.json");
        for i in 0..600 {
            let mut text = whole.clone();
            let at = random(2 * i) % text.len();
            match i % 3 {
                0 => text.truncate(at),
                1 => text[at] = (random(2 * i + 1) % 256) as u8,
                _ => drop(text.splice(at..at, *b"9")),
            }
            std::fs::write(&path, &text).unwrap();
            if let Ok(tokenizer) = Tokenizer::open(&path) {
                assert!(tokenizer.len() <= MOST_IDS);
                let _ = tokenizer.encode("a b é");
            }
        }
        // JSON that is whole but says something else at one place.
        let json: serde_json::Value = serde_json::from_slice(&whole).unwrap();
        let parts = ["/added_tokens", "/added_tokens/0", "/added_tokens/0/id", "/pre_tokenizer", "/decoder", "/model"];
        let deeper =
            ["/decoder/type", "/pre_tokenizer/type", "/model/type", "/model/vocab", "/model/merges", "/normalizer"];
        for place in parts.into_iter().chain(deeper) {
            for value in ["0", "null", "[]", "{}", "\"x\"", "[[\"x\", \"y\"]]", "{\"type\": \"Sequence\"}"] {
                let mut json = json.clone();
                *json.pointer_mut(place).unwrap() = serde_json::from_str(value).unwrap();
                std::fs::write(&path, json.to_string()).unwrap();
                if let Ok(tokenizer) = Tokenizer::open(&path) {
                    let _ = tokenizer.encode("a b é");
                }
            }
        }
        let error = characters(|json| json["model"]["vocab"]["ByteLevel"] = 4_000_000_000u32.into()).unwrap_err();
        assert!(error.to_string().contains("the id 4000000000"), "{error}");
    }

    #[test]
    fn random_text_goes_through_the_saved_byte_tokenizer_and_back() {
        let ours = Tokenizer::bytes();
        let theirs: tokenizers::Tokenizer = ours.to_json().parse().unwrap();
        for i in 0..200 {
            // Every plane, with ASCII, Latin and CJK often.
            let text: String = (0..60)
                .filter_map(|j| {
                    char::from_u32((random(60 * i + j) % [0x80, 0x250, 0xA000, 0x11_0000][j as usize % 4]) as u32)
                })
                .collect();
            let ids = ours.encode(&text).unwrap();
            assert_eq!(theirs.encode(text.as_str(), false).unwrap().get_ids(), ids);
            assert_eq!(ours.decode(&ids), text.as_bytes());
        }
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
