//! Tests of `config_json`: both generations as transformers writes them, ours back again, and every refusal.

use super::*;

/// What transformers 4.57.6 and 5.24.0 wrote for small models (`to_json_string`); tests/golden/README.md says how.
macro_rules! golden {
    ($name:literal) => {
        [
            include_str!(concat!("../../../tests/golden/config/transformers4-", $name, ".json")),
            include_str!(concat!("../../../tests/golden/config/transformers5-", $name, ".json")),
        ]
    };
}

fn config(model_type: ModelType, windows: Vec<Option<usize>>) -> GptConfig {
    GptConfig {
        model_type,
        vocab_size: 320,
        hidden_size: 128,
        intermediate_size: 384,
        num_hidden_layers: windows.len(),
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 32,
        max_position_embeddings: 512,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        tie_word_embeddings: false,
        windows,
    }
}

fn read_text(text: &str) -> Result<GptConfig> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.json");
    std::fs::write(&path, text).unwrap();
    read(&path)
}

fn object(config: &GptConfig) -> Map<String, Value> {
    serde_json::from_str(&write(config, 256).unwrap()).unwrap()
}

fn read_object(json: &Map<String, Value>) -> Result<GptConfig> {
    read_text(&serde_json::to_string(json).unwrap())
}

#[test]
fn both_generations_of_transformers_are_read() {
    let half = vec![None, None, Some(64), Some(64)];
    let cases = [
        (golden!("qwen3"), GptConfig { tie_word_embeddings: true, ..config(ModelType::Qwen3, vec![None; 4]) }),
        (golden!("qwen3_window"), config(ModelType::Qwen3, half)),
        (golden!("llama"), GptConfig { num_key_value_heads: 4, ..config(ModelType::Llama, vec![None; 4]) }),
        (golden!("mistral"), config(ModelType::Mistral, vec![Some(64); 4])),
    ];
    for (texts, expected) in cases {
        for text in texts {
            assert_eq!(read_text(text).unwrap(), expected, "{text}");
        }
    }
}

#[test]
fn every_config_comes_back_in_both_generations() {
    let cases = [
        config(ModelType::Qwen3, vec![None, None]),
        config(ModelType::Qwen3, vec![Some(64), None]),
        config(ModelType::Qwen3, vec![None, Some(64)]),
        config(ModelType::Mistral, vec![Some(64), Some(64)]),
        config(ModelType::Mistral, vec![None, None]),
        config(ModelType::Llama, vec![None, None]),
        GptConfig { rms_norm_eps: 1e-5, rope_theta: 500_000.0, ..config(ModelType::Llama, vec![None]) },
    ];
    for config in cases {
        let text = write(&config, 256).unwrap();
        assert_eq!(text, write(&config, 256).unwrap());
        assert!(!text.contains("9999"), "the shortest decimals: {text}");
        assert_eq!(read_text(&text).unwrap(), config);
        for missing in ["rope_parameters", "rope_theta"] {
            let mut json = object(&config);
            json.shift_remove(missing).unwrap();
            assert_eq!(read_object(&json).unwrap(), config, "without {missing}");
        }
    }
}

#[test]
fn tools_without_layer_types_slide_from_the_right_layer() {
    for (windows, first) in [(vec![None, None, Some(8)], 2), (vec![Some(8); 3], 0), (vec![None; 3], 3)] {
        let config = config(ModelType::Qwen3, windows);
        let mut json = object(&config);
        assert_eq!(json["max_window_layers"], first);
        json.shift_remove("layer_types");
        assert_eq!(read_object(&json).unwrap(), config);
    }
}

#[test]
fn what_a_family_cannot_say_is_not_written() {
    for (config, said) in [
        (config(ModelType::Llama, vec![Some(4), Some(4)]), "no such pattern"),
        (config(ModelType::Mistral, vec![Some(4), None]), "no such pattern"),
        (config(ModelType::Qwen3, vec![Some(4), Some(8)]), "one size of window"),
        (GptConfig { hidden_size: 130, ..config(ModelType::Llama, vec![None]) }, "no multiple"),
    ] {
        let error = write(&config, 0).unwrap_err();
        assert!(error.to_string().contains(said) && error.hint().is_some(), "{error}");
    }
}

#[test]
fn missing_keys_have_the_defaults_of_transformers() {
    let without = |model_type, keys: &[&str]| {
        let mut json = object(&config(model_type, vec![None, None]));
        json.insert("num_attention_heads".into(), 32.into());
        json.insert("hidden_size".into(), 1024.into());
        keys.iter().for_each(|key| _ = json.shift_remove(*key));
        read_object(&json).unwrap()
    };
    let keys =
        ["num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_parameters", "tie_word_embeddings"];
    for (model_type, kv, head_dim) in
        [(ModelType::Qwen3, 32, 128), (ModelType::Llama, 32, 32), (ModelType::Mistral, 8, 32)]
    {
        let config = without(model_type, &keys);
        assert_eq!((config.num_key_value_heads, config.head_dim), (kv, head_dim), "{model_type:?}");
        assert_eq!((config.rms_norm_eps, config.rope_theta, config.tie_word_embeddings), (1e-6, 10_000.0, false));
    }
    assert_eq!(without(ModelType::Mistral, &["sliding_window"]).windows, [Some(4096); 2]);
    // null is not missing there: no window, and as many key/value heads as heads.
    let mut json = object(&config(ModelType::Mistral, vec![None, None]));
    json.insert("num_key_value_heads".into(), Value::Null);
    let config = read_object(&json).unwrap();
    assert_eq!((config.windows, config.num_key_value_heads), (vec![None, None], 4));
}

#[test]
fn what_cannot_be_computed_is_refused_by_name() {
    let qwen3 = object(&config(ModelType::Qwen3, vec![Some(4), None]));
    for (key, value, said) in [
        ("model_type", json!("gpt2"), "expected model_type qwen3 or llama or mistral, found \"gpt2\""),
        ("model_type", Value::Null, "found no model_type"),
        ("attention_bias", json!(true), "attention_bias true"),
        ("mlp_bias", json!(true), "mlp_bias true"),
        ("hidden_act", json!("gelu"), "found \"gelu\""),
        ("rope_scaling", json!({"rope_type": "yarn", "factor": 4.0}), "rope_type \"yarn\""),
        ("rope_scaling", json!({"type": "linear", "factor": 2.0}), "rope_type \"linear\""),
        ("rope_scaling", json!({"factor": 2.0}), "without rope_type"),
        ("rope_parameters", json!({"rope_type": "llama3", "rope_theta": 1e4}), "rope_type \"llama3\""),
        ("rope_parameters", json!({"full_attention": {"rope_type": "default"}}), "one for `full_attention`"),
        ("rope_parameters", json!("default"), "`rope_parameters` an object"),
        ("partial_rotary_factor", json!(0.5), "partial_rotary_factor 0.5"),
        ("quantization_config", json!({"bits": 4}), "quantization_config"),
        ("layer_types", json!(["chunked_attention", "full_attention"]), "chunked_attention"),
        ("layer_types", json!(["full_attention"]), "expected 2 layer_types, one a layer, found 1"),
        ("hidden_size", json!("128"), "`hidden_size`"),
        ("hidden_size", json!(0), "`hidden_size`"),
        ("vocab_size", json!(-1), "`vocab_size`"),
        ("num_hidden_layers", json!(16_000_000), "num_hidden_layers up to"),
        ("num_hidden_layers", json!(1u64 << 60), "num_hidden_layers"),
        ("num_key_value_heads", json!(3), "key/value heads"),
        ("head_dim", json!("64"), "`head_dim`"),
        ("rms_norm_eps", json!("1e-5"), "`rms_norm_eps`"),
        ("rope_theta", json!(-1.0), "`rope_theta`"),
        ("tie_word_embeddings", json!("true"), "`tie_word_embeddings`"),
        ("sliding_window", json!("4096"), "`sliding_window`"),
    ] {
        let mut json = qwen3.clone();
        if key == "rope_theta" {
            json.shift_remove("rope_parameters");
        }
        json.insert(key.into(), value.clone());
        let error = read_object(&json).expect_err(&format!("{key} {value}")).to_string();
        assert!(error.contains("config.json") && error.contains(said), "{key} {value}: {error}");
    }
    let mut json = object(&config(ModelType::Llama, vec![None, None]));
    json.insert("layer_types".into(), json!(["sliding_attention", "full_attention"]));
    assert!(read_object(&json).unwrap_err().to_string().contains("full attention in every layer of a llama"));
}

#[test]
fn files_that_are_no_config_are_named() {
    for (text, said) in [
        ("", "an empty file"),
        ("<!DOCTYPE html>", "a web page (HTML)"),
        ("version https://git-lfs.github.com/spec/v1", "a git-lfs pointer"),
        ("[1]", "a list of 1"),
        ("{\"model_type\": \"qw", "18 bytes that are not valid JSON"),
    ] {
        let error = read_text(text).unwrap_err().to_string();
        assert!(error.contains("config.json") && error.contains(said), "{error}");
    }
}
