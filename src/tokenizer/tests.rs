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
    let merged = merged.replace("\"id\": 256", "\"id\": 257").replacen("\"vocab\": {", "\"vocab\": { \"Ġa\": 256,", 1);
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
fn tokens_have_exact_bytes_in_every_spelling() {
    let (sentencepiece, plain) =
        (Spelling::Text { spaces: true, bytes: true }, Spelling::Text { spaces: false, bytes: false });
    assert_eq!(sentencepiece.bytes("\u{2581}the"), b" the");
    assert_eq!(sentencepiece.bytes("<0x0A>"), b"\n");
    for text in ["<0x+1>", "<0x1>", "<0xGG>", "<0x414>"] {
        assert_eq!(sentencepiece.bytes(text), text.as_bytes());
    }
    for text in ["\u{2581}", "<0x0A>"] {
        assert_eq!(plain.bytes(text), text.as_bytes(), "a token by that name where nothing reads it otherwise");
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
