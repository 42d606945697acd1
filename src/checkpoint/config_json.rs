//! Hugging Face's config.json, read in both of transformers' generations and written so that old and new tools read it.
//!
//! Called by `model_folder`, and by `recipes` before a run starts so that no model is trained that cannot be saved. What
//! must stay true: a key that is there is understood or refused, never replaced by a default; a key that is missing
//! has transformers' default (configuration_qwen3.py, configuration_llama.py, configuration_mistral.py of 4.57 and 5.24).

use std::path::Path;

use serde_json::{Map, Value, json};

use super::foreign;
use crate::error::{Error, Result};
use crate::model::config::{GptConfig, ModelType};

/// The text of config.json. Key order is fixed. Refuses what the model_type cannot say.
pub fn write(config: &GptConfig, end_of_text: u32) -> Result<String> {
    refuse_what_cannot_be_said(config)?;
    let windowed = config.windows.iter().flatten().next().copied();
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
            // Tools that know no layer_types slide from this layer on.
            let first = config.windows.iter().position(Option::is_some);
            json["max_window_layers"] = first.unwrap_or(config.num_hidden_layers).into();
            json["layer_types"] = config.windows.iter().map(kind).collect();
        }
        ModelType::Mistral => json["sliding_window"] = windowed.into(),
        ModelType::Llama => json["mlp_bias"] = false.into(),
    }
    Ok(serde_json::to_string_pretty(&json).expect("a map of plain values") + "\n")
}

fn refuse_what_cannot_be_said(config: &GptConfig) -> Result<()> {
    let name = config.model_type.name();
    let mut sizes = config.windows.iter().flatten();
    let first = sizes.next();
    if sizes.any(|w| Some(w) != first) {
        let what =
            format!("{name} has one size of window, not {:?}", config.windows.iter().flatten().collect::<Vec<_>>());
        return Err(Error::usage(what).with_hint("give all windowed layers the same sliding_window"));
    }
    let (any, all) = (first.is_some(), config.windows.iter().all(Option::is_some));
    if any && (config.model_type == ModelType::Llama || config.model_type == ModelType::Mistral && !all) {
        return Err(Error::usage(format!("{name} has no such pattern of windows")).with_hint("use model_type qwen3"));
    }
    if config.model_type == ModelType::Llama && !config.hidden_size.is_multiple_of(config.num_attention_heads) {
        let what = format!(
            "transformers refuses a llama whose hidden_size {} is no multiple of its {} heads",
            config.hidden_size, config.num_attention_heads
        );
        return Err(Error::usage(what).with_hint("use model_type qwen3, or other sizes"));
    }
    Ok(())
}

/// An f32 as the shortest decimal that is still that f32: 1e-6, not 9.999999974752427e-7.
fn number(wide: f64, narrow: f32) -> f64 {
    narrow.to_string().parse().unwrap_or(wide)
}

/// Reads config.json at `path`. What this decoder cannot compute is refused by name.
pub fn read(path: &Path) -> Result<GptConfig> {
    Reader { path, json: foreign::read_json(path)? }.config()
}

/// No model has larger sizes; what does is damage that would only end in a failed allocation.
const LARGEST: u64 = 1 << 24;
const MOST_LAYERS: usize = 4096;

struct Reader<'a> {
    path: &'a Path,
    json: Map<String, Value>,
}

impl Reader<'_> {
    fn config(&self) -> Result<GptConfig> {
        let model_type = self.model_type()?;
        self.refuse_what_is_not_computed()?;
        let (hidden_size, heads) = (self.size("hidden_size")?, self.size("num_attention_heads")?);
        let layers = self.size("num_hidden_layers")?;
        if layers > MOST_LAYERS {
            return Err(self.wrong(format!("num_hidden_layers up to {MOST_LAYERS}"), layers.to_string()));
        }
        let key_value_heads = match (self.json.contains_key("num_key_value_heads"), model_type) {
            (false, ModelType::Mistral) => 8,
            (false, ModelType::Qwen3) => 32,
            _ => self.optional_size("num_key_value_heads")?.unwrap_or(heads),
        };
        let head_dim = match (self.optional_size("head_dim")?, model_type) {
            (Some(d), _) => d,
            (None, ModelType::Qwen3) => 128,
            (None, _) => hidden_size / heads,
        };
        let config = GptConfig {
            model_type,
            vocab_size: self.size("vocab_size")?,
            hidden_size,
            intermediate_size: self.size("intermediate_size")?,
            num_hidden_layers: layers,
            num_attention_heads: heads,
            num_key_value_heads: key_value_heads,
            head_dim,
            max_position_embeddings: self.size("max_position_embeddings")?,
            rms_norm_eps: self.positive(&self.json, "rms_norm_eps")?.unwrap_or(1e-6) as f32,
            rope_theta: self.rope_theta()?,
            tie_word_embeddings: self.flag("tie_word_embeddings")?,
            windows: self.windows(model_type, layers)?,
        };
        config.validate().map_err(|e| self.wrong("a shape that can work", e.to_string()))?;
        Ok(config)
    }

    fn wrong(&self, expected: impl Into<String>, found: impl Into<String>) -> Error {
        Error::file(self.path, expected, found)
    }

    /// The value of a key; null is as good as missing.
    fn value<'a>(&self, json: &'a Map<String, Value>, key: &str) -> Option<&'a Value> {
        json.get(key).filter(|v| !v.is_null())
    }

    fn model_type(&self) -> Result<ModelType> {
        let names = ModelType::ALL.map(ModelType::name);
        let found = self.value(&self.json, "model_type");
        let known = ModelType::ALL.into_iter().find(|t| found.is_some_and(|v| v == t.name()));
        known.ok_or_else(|| {
            let found = found.map_or("no model_type".into(), foreign::kind);
            self.wrong(format!("model_type {}", names.join(" or ")), found)
        })
    }

    fn size(&self, key: &str) -> Result<usize> {
        self.optional_size(key)?.ok_or_else(|| self.wrong(format!("a whole number `{key}`"), "none"))
    }

    fn optional_size(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.value(&self.json, key) else { return Ok(None) };
        let size = value.as_u64().filter(|n| (1..=LARGEST).contains(n));
        let wrong = || self.wrong(format!("a whole number `{key}` from 1 to {LARGEST}"), foreign::kind(value));
        size.map(|n| Some(n as usize)).ok_or_else(wrong)
    }

    fn positive(&self, json: &Map<String, Value>, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.value(json, key) else { return Ok(None) };
        let number = value.as_f64().filter(|x| *x > 0.0 && x.is_finite());
        number.map(Some).ok_or_else(|| self.wrong(format!("a positive number `{key}`"), foreign::kind(value)))
    }

    fn flag(&self, key: &str) -> Result<bool> {
        let Some(value) = self.value(&self.json, key) else { return Ok(false) };
        value.as_bool().ok_or_else(|| self.wrong(format!("`{key}` true or false"), foreign::kind(value)))
    }

    /// The rotary settings that are there: `rope_scaling` (up to version 4, and first in 5), `rope_parameters` (since 5).
    fn rotary(&self) -> Result<Vec<&Map<String, Value>>> {
        let mut settings = Vec::new();
        for key in ["rope_scaling", "rope_parameters"] {
            match self.value(&self.json, key) {
                Some(Value::Object(object)) if !object.is_empty() => settings.push(object),
                None | Some(Value::Object(_)) => {}
                Some(other) => return Err(self.wrong(format!("`{key}` an object"), foreign::kind(other))),
            }
        }
        Ok(settings)
    }

    /// As transformers 5: the value inside goes before the one at the top level.
    fn rope_theta(&self) -> Result<f64> {
        for json in self.rotary()?.into_iter().chain([&self.json]) {
            if let Some(theta) = self.positive(json, "rope_theta")? {
                return Ok(theta);
            }
        }
        Ok(10_000.0)
    }

    fn refuse_what_is_not_computed(&self) -> Result<()> {
        let rotary = self.rotary()?;
        for json in &rotary {
            if let Some((name, _)) = json.iter().find(|(_, v)| v.is_object()) {
                return Err(self.wrong("one kind of rotary positions for all layers", format!("one for `{name}`")));
            }
            let kind = self.value(json, "rope_type").or_else(|| self.value(json, "type"));
            // The one key that stands for itself: {"rope_theta": 10000.0}.
            let plain = kind.map_or(json.keys().all(|k| k == "rope_theta"), |k| k == "default");
            if !plain {
                let found = kind.map_or("a scaling without rope_type".into(), |k| format!("rope_type {k}"));
                return Err(self.wrong("plain rotary positions (rope_type default)", found));
            }
        }
        for json in rotary.into_iter().chain([&self.json]) {
            if let Some(factor) = self.value(json, "partial_rotary_factor").filter(|f| f.as_f64() != Some(1.0)) {
                return Err(self.wrong("whole heads rotated", format!("partial_rotary_factor {factor}")));
            }
        }
        for (key, expected) in [("attention_bias", "attention without bias"), ("mlp_bias", "layers without bias")] {
            if self.flag(key)? {
                return Err(self.wrong(expected, format!("{key} true")));
            }
        }
        // `swish` is transformers' other name of the same function.
        if let Some(act) = self.value(&self.json, "hidden_act").filter(|a| *a != "silu" && *a != "swish") {
            return Err(self.wrong("hidden_act silu", foreign::kind(act)));
        }
        match self.value(&self.json, "quantization_config") {
            Some(_) => Err(self.wrong("weights in floating point", "a quantization_config")),
            None => Ok(()),
        }
    }

    fn windows(&self, model_type: ModelType, layers: usize) -> Result<Vec<Option<usize>>> {
        let window = match self.json.contains_key("sliding_window") {
            true => self.optional_size("sliding_window")?,
            false => Some(4096),
        };
        let types = self.layer_types()?;
        match model_type {
            ModelType::Qwen3 if !self.flag("use_sliding_window")? => Ok(vec![None; layers]),
            ModelType::Qwen3 => {
                // Without layer_types the layers from max_window_layers on slide, as in transformers.
                let first = self.optional_or_zero("max_window_layers")?.unwrap_or(28);
                let types = types.unwrap_or_else(|| (0..layers).map(|l| l >= first).collect());
                if types.len() != layers {
                    return Err(self.wrong(format!("{layers} layer_types, one a layer"), types.len().to_string()));
                }
                Ok(types.into_iter().map(|slides| window.filter(|_| slides)).collect())
            }
            ModelType::Llama | ModelType::Mistral => {
                let window = window.filter(|_| model_type == ModelType::Mistral);
                // transformers ignores layer_types here and other tools follow them: two models in one file.
                if types.is_some_and(|types| types.iter().any(|slides| *slides != window.is_some())) {
                    let all = if window.is_some() { "sliding" } else { "full" };
                    return Err(self.wrong(
                        format!("{all} attention in every layer of a {}", model_type.name()),
                        "other layer_types",
                    ));
                }
                Ok(vec![window; layers])
            }
        }
    }

    fn optional_or_zero(&self, key: &str) -> Result<Option<usize>> {
        if self.json.get(key).and_then(Value::as_u64) == Some(0) {
            return Ok(Some(0));
        }
        self.optional_size(key)
    }

    /// For each layer whether it has a window, if the file says so.
    fn layer_types(&self) -> Result<Option<Vec<bool>>> {
        let Some(value) = self.value(&self.json, "layer_types") else { return Ok(None) };
        let list = value.as_array().ok_or_else(|| self.wrong("`layer_types` a list", foreign::kind(value)))?;
        let kinds = list.iter().map(|t| match t.as_str() {
            Some("sliding_attention") => Ok(true),
            Some("full_attention") => Ok(false),
            _ => Err(self.wrong("layer_types full_attention or sliding_attention", foreign::kind(t))),
        });
        kinds.collect::<Result<Vec<bool>>>().map(Some)
    }
}

#[cfg(test)]
mod tests;
