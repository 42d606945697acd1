//! Hugging Face's config.json, read in both of transformers' generations and written so that old and new tools read it.

use std::path::Path;

use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::model::config::{GptConfig, ModelType};

/// The text of config.json. Key order is fixed.
pub fn write(config: &GptConfig, end_of_text: u32) -> Result<String> {
    let windowed = config.windows.iter().flatten().next().copied();
    let one_kind = config.windows.iter().all(|w| *w == windowed);
    if windowed.is_some() && (config.model_type == ModelType::Llama || config.model_type == ModelType::Mistral && !one_kind) {
        let what = format!("{} has no such pattern of windows", config.model_type.name());
        return Err(Error::usage(what).with_hint("use model_type qwen3"));
    }
    let architecture = match config.model_type {
        ModelType::Qwen3 => "Qwen3ForCausalLM",
        ModelType::Llama => "LlamaForCausalLM",
        ModelType::Mistral => "MistralForCausalLM",
    };
    let mut json = json!({
        "architectures": [architecture],
        "model_type": config.model_type.name(),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": number(f64::from(config.rms_norm_eps), config.rms_norm_eps),
        "rope_theta": config.rope_theta,
        "rope_parameters": { "rope_type": "default", "rope_theta": config.rope_theta },
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": "silu",
        "attention_bias": false,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": true,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "torch_dtype": "float32",
        "dtype": "float32",
    });
    match config.model_type {
        ModelType::Qwen3 => {
            let kind = |w: &Option<usize>| if w.is_some() { "sliding_attention" } else { "full_attention" };
            json["use_sliding_window"] = windowed.is_some().into();
            json["sliding_window"] = windowed.into();
            json["max_window_layers"] = if windowed.is_some() { 0 } else { config.num_hidden_layers }.into();
            json["layer_types"] = config.windows.iter().map(kind).collect();
        }
        ModelType::Mistral => json["sliding_window"] = windowed.into(),
        ModelType::Llama => json["mlp_bias"] = false.into(),
    }
    Ok(serde_json::to_string_pretty(&json).expect("a map of plain values") + "\n")
}

/// An f32 as the shortest decimal that is still that f32: 1e-6, not 9.999999974752427e-7.
fn number(wide: f64, narrow: f32) -> f64 {
    narrow.to_string().parse().unwrap_or(wide)
}

/// Reads config.json at `path`. Missing keys have transformers' defaults; what this decoder cannot compute is refused.
pub fn read(path: &Path) -> Result<GptConfig> {
    let text = std::fs::read_to_string(path).map_err(|e| Error::io("read", path, e))?;
    let json: Value = serde_json::from_str(&text).map_err(|e| Error::file(path, "a model's config.json", e.to_string()))?;
    Reader { path, json }.config()
}

struct Reader<'a> {
    path: &'a Path,
    json: Value,
}

impl Reader<'_> {
    fn config(&self) -> Result<GptConfig> {
        let names = ModelType::ALL.map(ModelType::name);
        let found = self.json["model_type"].as_str().unwrap_or("none");
        let model_type = ModelType::ALL.into_iter().find(|t| t.name() == found).ok_or_else(|| {
            Error::file(self.path, format!("model_type {}", names.join(" or ")), format!("`{found}`"))
        })?;
        self.refuse_what_is_not_computed()?;
        let (hidden_size, heads) = (self.size("hidden_size")?, self.size("num_attention_heads")?);
        let layers = self.size("num_hidden_layers")?;
        let head_dim = match (self.json["head_dim"].as_u64(), model_type) {
            (Some(d), _) => d as usize,
            (None, ModelType::Qwen3) => 128,
            (None, _) => hidden_size / heads.max(1),
        };
        let config = GptConfig {
            model_type,
            vocab_size: self.size("vocab_size")?,
            hidden_size,
            intermediate_size: self.size("intermediate_size")?,
            num_hidden_layers: layers,
            num_attention_heads: heads,
            num_key_value_heads: self.json["num_key_value_heads"].as_u64().map_or(heads, |k| k as usize),
            head_dim,
            max_position_embeddings: self.size("max_position_embeddings")?,
            rms_norm_eps: self.json["rms_norm_eps"].as_f64().unwrap_or(1e-6) as f32,
            rope_theta: self.rope_theta(),
            tie_word_embeddings: self.json["tie_word_embeddings"].as_bool().unwrap_or(false),
            windows: self.windows(model_type, layers)?,
        };
        config.validate().map_err(|e| Error::file(self.path, "a shape that can work", e.to_string()))?;
        Ok(config)
    }

    fn size(&self, key: &str) -> Result<usize> {
        let wrong = || Error::file(self.path, format!("a whole number `{key}`"), self.json[key].to_string());
        self.json[key].as_u64().map(|n| n as usize).ok_or_else(wrong)
    }

    fn rope_theta(&self) -> f64 {
        let nested = self.json["rope_parameters"]["rope_theta"].as_f64();
        self.json["rope_theta"].as_f64().or(nested).unwrap_or(10_000.0)
    }

    fn refuse_what_is_not_computed(&self) -> Result<()> {
        let scaling = self.json["rope_scaling"].as_object().or_else(|| self.json["rope_parameters"].as_object());
        let kind = scaling.and_then(|s| s.get("rope_type").or_else(|| s.get("type"))).and_then(Value::as_str);
        let act = self.json["hidden_act"].as_str().unwrap_or("silu");
        let checks = [
            (kind.is_none_or(|k| k == "default"), "plain rotary positions", format!("rope_type `{}`", kind.unwrap_or("?"))),
            (act == "silu", "hidden_act silu", format!("`{act}`")),
            (self.json["attention_bias"] != true, "attention without bias", "attention_bias true".to_owned()),
            (self.json["mlp_bias"] != true, "layers without bias", "mlp_bias true".to_owned()),
            (self.json["quantization_config"].is_null(), "weights in floating point", "a quantization_config".to_owned()),
        ];
        match checks.into_iter().find(|(fine, ..)| !fine) {
            None => Ok(()),
            Some((_, expected, found)) => Err(Error::file(self.path, expected, found)),
        }
    }

    fn windows(&self, model_type: ModelType, layers: usize) -> Result<Vec<Option<usize>>> {
        let window = self.json["sliding_window"].as_u64().map(|w| w as usize);
        match model_type {
            ModelType::Llama => Ok(vec![None; layers]),
            ModelType::Mistral => Ok(vec![window; layers]),
            ModelType::Qwen3 if self.json["use_sliding_window"] != true => Ok(vec![None; layers]),
            ModelType::Qwen3 => {
                if let Some(types) = self.json["layer_types"].as_array() {
                    return Ok(types.iter().map(|t| window.filter(|_| t == "sliding_attention")).collect());
                }
                // Without layer_types the layers from max_window_layers on slide, as in transformers.
                let first = self.json["max_window_layers"].as_u64().unwrap_or(28) as usize;
                Ok((0..layers).map(|l| window.filter(|_| l >= first)).collect())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(model_type: ModelType, windows: Vec<Option<usize>>) -> GptConfig {
        GptConfig {
            model_type,
            vocab_size: 320,
            hidden_size: 128,
            intermediate_size: 384,
            num_hidden_layers: 2,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 32,
            max_position_embeddings: 512,
            rms_norm_eps: 1e-6,
            rope_theta: 10_000.0,
            tie_word_embeddings: true,
            windows,
        }
    }

    fn read_text(text: &str) -> Result<GptConfig> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        std::fs::write(&path, text).unwrap();
        read(&path)
    }

    #[test]
    fn every_config_comes_back_in_both_generations() {
        let cases = [
            config(ModelType::Qwen3, vec![None, None]),
            config(ModelType::Qwen3, vec![Some(64), None]),
            config(ModelType::Mistral, vec![Some(64), Some(64)]),
            config(ModelType::Llama, vec![None, None]),
        ];
        for config in cases {
            let text = write(&config, 256).unwrap();
            assert!(text.contains("1e-6") || text.contains("1e-06") || text.contains("0.000001"), "{text}");
            assert_eq!(read_text(&text).unwrap(), config);
            let mut old: Value = serde_json::from_str(&text).unwrap();
            let mut new = old.clone();
            old.as_object_mut().unwrap().remove("rope_parameters");
            new.as_object_mut().unwrap().remove("rope_theta");
            assert_eq!(read_text(&old.to_string()).unwrap(), config);
            assert_eq!(read_text(&new.to_string()).unwrap(), config);
        }
        assert!(write(&config(ModelType::Llama, vec![Some(4), None]), 0).is_err());
        assert!(write(&config(ModelType::Mistral, vec![Some(4), None]), 0).is_err());
    }

    #[test]
    fn what_cannot_be_computed_is_refused_by_name() {
        let good: Value = serde_json::from_str(&write(&config(ModelType::Llama, vec![None, None]), 0).unwrap()).unwrap();
        for (key, value, said) in [
            ("model_type", json!("gpt2"), "gpt2"),
            ("attention_bias", json!(true), "attention_bias"),
            ("hidden_act", json!("gelu"), "gelu"),
            ("rope_scaling", json!({"rope_type": "yarn"}), "yarn"),
            ("quantization_config", json!({"bits": 4}), "quantization_config"),
            ("hidden_size", json!("128"), "hidden_size"),
            ("num_key_value_heads", json!(3), "heads"),
        ] {
            let mut json = good.clone();
            json[key] = value;
            let error = read_text(&json.to_string()).unwrap_err().to_string();
            assert!(error.contains("config.json") && error.contains(said), "{error}");
        }
        assert!(read_text("<html>").unwrap_err().to_string().contains("config.json"));
    }
}
