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

const FAMILIES: [&str; 4] = ["gpt2", "llama2", "llama3", "qwen2"];

fn family(name: &str) -> Tokenizer {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tokenizers").join(name);
    Tokenizer::open(&folder).unwrap()
}

/// Pairs of a text that has all kinds of words.
fn trained(vocab: usize) -> Tokenizer {
    let mut words = train::Words::default();
    let text = "it's 42 o'clock; the cat sat on the mat, and they'll say émoji 😀 or 漢字 twice: the cat sat on the mat\n\n ok";
    words.add(&[text.as_bytes(), b"  the  other text, the cat"]);
    train::byte_pairs(&words, vocab).unwrap()
}

fn of_characters() -> Tokenizer {
    train::characters(&"abc é漢\n\u{2581}".chars().collect()).unwrap()
}

/// tests/golden/tokenizers is written by scripts/peers/tokenizers_golden.py.
#[test]
fn ids_are_those_of_transformers() {
    for name in FAMILIES {
        let tokenizer = family(name);
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tokenizers").join(name);
        let golden = std::fs::read_to_string(folder.join("golden.json")).unwrap();
        let golden: Vec<serde_json::Value> = serde_json::from_str(&golden).unwrap();
        assert!(golden.len() > 25);
        for row in golden {
            let text = row["text"].as_str().unwrap();
            let ids: Vec<u32> = serde_json::from_value(row["ids"].clone()).unwrap();
            assert_eq!(tokenizer.encode(text).unwrap(), ids, "{name}: {text:?}");
        }
    }
}

#[test]
fn the_short_way_gives_the_ids_of_the_long_one() {
    let is_short = |t: &Tokenizer| matches!(&t.kind, Kind::Json(json) if json.words.is_some());
    for (name, short) in FAMILIES.into_iter().zip([true, false, true, true]) {
        assert_eq!(is_short(&family(name)), short, "{name}");
    }
    let tokenizers = [family("gpt2"), family("llama3"), family("qwen2"), trained(300)];
    for tokenizer in &tokenizers {
        let Kind::Json(json) = &tokenizer.kind else { panic!("not bytes") };
        for i in 0..300 {
            let text = random_text(i, 80);
            let long = json.encode(&text).unwrap();
            // Twice: from the model, and from the table.
            assert_eq!(tokenizer.encode(&text).unwrap(), long, "{text:?}");
            assert_eq!(tokenizer.encode(&text).unwrap(), long, "{text:?}");
        }
        let special = "a<|endoftext|>b";
        assert_eq!(tokenizer.encode(special).unwrap(), json.encode(special).unwrap());
        assert!(tokenizer.encode(special).unwrap().contains(&tokenizer.end_of_text()));
    }
}

/// Text of every plane, with much of what splits words.
fn random_text(seed: u64, length: u64) -> String {
    let pieces = [
        " ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "the", "The", "12", "3456", "é", "e\u{301}", "漢字", "😀", "...",
        "\u{a0}",
    ];
    (0..length)
        .map(|j| match random(length * seed + j) {
            r if r % 4 == 0 => char::from_u32((r / 4 % 0x11_0000) as u32).map_or("x".into(), String::from),
            r if r % 4 == 1 => char::from_u32((r / 4 % 0x250) as u32).map_or("y".into(), String::from),
            r => pieces[r / 4 % pieces.len()].to_owned(),
        })
        .collect()
}

#[test]
fn every_text_and_every_bytes_come_back() {
    let exact = [Tokenizer::bytes(), family("gpt2"), family("llama3"), trained(300), of_characters()];
    let texts = (0..300).map(|i| random_text(i, 30)).chain(TEXTS.map(str::to_owned));
    for text in texts {
        for tokenizer in &exact {
            let ids = tokenizer.encode(&text).unwrap();
            assert_eq!(tokenizer.decode(&ids), text.as_bytes(), "{tokenizer:?} {text:?}");
            let lengths = tokenizer.byte_lengths();
            assert_eq!(ids.iter().map(|id| lengths[*id as usize] as usize).sum::<usize>(), text.len());
        }
        // Llama 2 puts a space before a text; Qwen 2 composes characters first.
        if !text.is_empty() {
            let llama = family("llama2");
            assert_eq!(
                llama.decode(&llama.encode(&text).unwrap()),
                format!(" {text}").replace('\u{2581}', " ").as_bytes()
            );
        }
    }
    for i in 0..300u64 {
        let bytes: Vec<u8> = (0..50).map(|j| (random(50 * i + j) % 256) as u8).collect();
        for tokenizer in &exact {
            assert_eq!(tokenizer.decode(&tokenizer.encode_bytes(&bytes).unwrap()), bytes, "{tokenizer:?}");
        }
    }
}

#[test]
fn a_text_is_cut_where_its_ids_are_not_changed() {
    let tokenizers = [family("gpt2"), family("llama3"), family("qwen2"), trained(300), of_characters()];
    for (i, tokenizer) in tokenizers.iter().enumerate() {
        let Kind::Json(json) = &tokenizer.kind else { panic!("not bytes") };
        let cuts = cut::Cuts::find(&json.inner);
        let expected =
            if i == 4 { "Cuts { lines: true, spaces: false }" } else { "Cuts { lines: true, spaces: true }" };
        assert_eq!(format!("{cuts:?}"), expected);
        let mut tried = 0;
        for seed in 0..400 {
            let text = random_text(seed, 60);
            let whole = tokenizer.encode(&text).unwrap();
            let mut from = 0;
            while let Some(at) = tokenizer.cut(text.as_bytes(), from) {
                let (left, right) = text.as_bytes().split_at(at);
                let parts = [left, right].map(|part| tokenizer.encode_bytes(part).unwrap()).concat();
                assert_eq!(parts, whole, "{at} of {text:?}");
                (from, tried) = (at + 1, tried + 1);
            }
        }
        assert!(tried > 100, "{tried} cuts were tried");
    }
    assert_eq!(family("llama2").cut(b"one\ntwo three", 0), None, "each part would get a space of its own");
}

#[test]
fn a_trained_tokenizer_is_the_same_every_time_and_survives_being_saved() {
    let first = trained(320);
    for threads in [1, 2, 4] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        for _ in 0..7 {
            assert_eq!(pool.install(|| trained(320)).to_json(), first.to_json());
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    std::fs::write(&path, first.to_json()).unwrap();
    let opened = Tokenizer::open(&path).unwrap();
    assert_eq!((opened.len(), opened.end_of_text()), (first.len(), first.end_of_text()));
    assert_eq!(opened.encode("the cat").unwrap(), first.encode("the cat").unwrap());
    assert!(first.encode("the cat sat on the mat").unwrap().len() < 12, "pairs were found");
    // The smallest has no pairs; one larger than the text has pairs for ends early; others are refused.
    assert_eq!(trained(257).len(), 257);
    assert!(trained(5000).len() < 1000);
    assert_eq!(train::byte_pairs(&train::Words::default(), 256).unwrap_err().exit_code(), 2);
}

#[test]
fn characters_have_tokens_and_all_others_their_bytes() {
    let tokenizer = of_characters();
    assert_eq!(tokenizer.len(), 257 + 8);
    let ids = tokenizer.encode("ab").unwrap();
    assert_eq!(ids.iter().map(|id| tokenizer.bytes_of(*id)).collect::<Vec<_>>(), [b"a", b"b"]);
    // A character that the text never had, and names of byte tokens in a text.
    assert_eq!(tokenizer.encode("😀").unwrap().len(), 4);
    assert_eq!(tokenizer.decode(&tokenizer.encode("😀<0x41>\u{2581}").unwrap()), "😀<0x41>\u{2581}".as_bytes());
}
