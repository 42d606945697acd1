//! Everything that defines a run, as one TOML: model, tokenizer, data, optimizer, schedule, batch.
//!
//! A preset file is complete; flags override it key by key; the resolved one is saved in the run. Unknown keys are errors with
//! the nearest name. Called by the recipes and by cli, which makes a flag of every key.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result, nearest};
use crate::model::config::{GptConfig, ModelType};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Preset {
    pub name: String,
    pub model: Model,
    pub tokenizer: TokenizerChoice,
    pub data: Data,
    pub optimizer: Optimizer,
    pub schedule: Schedule,
    pub train: Train,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// qwen3 | llama | mistral
    pub model_type: String,
    pub num_hidden_layers: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    /// The context in tokens.
    pub max_position_embeddings: usize,
    /// Keys that a token of a windowed layer sees, itself included; 0 for full attention everywhere.
    pub sliding_window: usize,
    /// With a window: every so many layers one is full; 0 for none.
    pub full_attention_every: usize,
    pub rms_norm_eps: f32,
    pub rope_theta: f64,
    pub tie_word_embeddings: bool,
    pub dropout: f32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenizerChoice {
    /// "bytes", or the path of a tokenizer.json.
    pub file: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Data {
    /// stories, a file or a folder.
    pub source: String,
    /// The share held out.
    pub validation: f64,
    /// stories: bytes of training text.
    pub bytes: u64,
    /// Train on files that are not text.
    pub allow_binary: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Optimizer {
    /// adamw, or muon for the matrices inside the blocks and adamw for the rest.
    pub kind: String,
    pub learning_rate: f64,
    pub beta1: f32,
    pub beta2: f32,
    pub epsilon: f32,
    pub weight_decay: f32,
    /// Muon's.
    pub momentum: f32,
    /// Highest global gradient norm; 0 does not clip.
    pub clip: f32,
    /// Decay of averaged weights, which validation and export then use; 0 keeps none.
    pub ema: f32,
    /// Standard deviations at which a spiking step is skipped; 0 skips only what is not finite.
    pub spike_threshold: f32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// cosine | linear | wsd | constant
    pub kind: String,
    /// Steps.
    pub warmup: u64,
    /// Learning rate at the end over the highest.
    pub final_fraction: f64,
    /// wsd: share of the run over which the rate falls.
    pub decay_fraction: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Train {
    /// Windows of a micro-batch, and micro-batches of a step.
    pub batch: usize,
    pub accumulate: usize,
    /// The horizon: the first of these three that is not 0.
    pub steps: u64,
    pub epochs: f64,
    pub tokens: u64,
    /// Passes over the data after which a run ends at the latest; 0 for no such limit.
    pub max_epochs: f64,
    /// auto | f32
    pub dtype: String,
    pub seed: u64,
    pub eval_every: u64,
    /// Held-out tokens of a validation during the run (the last one takes all); 0 takes all each time.
    pub eval_tokens: u64,
    pub save_every: u64,
    /// Saved states kept.
    pub keep: usize,
    /// Validations without a better one after which the run stops; 0 never stops early.
    pub patience: usize,
    /// Compute blocks again in the backward pass instead of keeping their activations.
    pub recompute: bool,
}

/// The presets that are built in, by name.
pub const BUILT_IN: [(&str, &str); 8] = [
    ("tiny", include_str!("../presets/tiny.toml")),
    ("small", include_str!("../presets/small.toml")),
    ("medium", include_str!("../presets/medium.toml")),
    ("large", include_str!("../presets/large.toml")),
    ("huge", include_str!("../presets/huge.toml")),
    ("mega", include_str!("../presets/mega.toml")),
    ("behemoth", include_str!("../presets/behemoth.toml")),
    ("shakespeare", include_str!("../presets/shakespeare.toml")),
];

impl Preset {
    /// A built-in preset, or the TOML file of that path.
    pub fn load(name: &str) -> Result<Self> {
        if let Some((_, text)) = BUILT_IN.iter().find(|(n, _)| *n == name) {
            return Self::parse(text, Path::new(name));
        }
        let path = Path::new(name);
        if !name.ends_with(".toml") {
            let names = BUILT_IN.map(|(n, _)| n);
            let hint = nearest(name, names).unwrap_or_else(|| format!("one of: {}; or a .toml file", names.join(", ")));
            return Err(Error::usage(format!("unknown preset `{name}`")).with_hint(hint));
        }
        let text = std::fs::read_to_string(path).map_err(|e| Error::io("read", path, e))?;
        Self::parse(&text, path)
    }

    /// Reads a complete preset; `place` names it in errors.
    pub fn parse(text: &str, place: &Path) -> Result<Self> {
        toml::from_str(text).map_err(|e| {
            let unknown = e.message().split('`').nth(1).filter(|_| e.message().starts_with("unknown field"));
            let hint = unknown.and_then(|key| nearest(key, keys().iter().map(String::as_str)));
            let what = format!("{}: {}", place.display(), e.to_string().trim_end());
            Error::usage(what).with_hint(hint.unwrap_or_else(|| "compare with the files in presets/".into()))
        })
    }

    /// The preset as TOML that `parse` reads back to the same.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("plain tables of numbers and strings always have a TOML form")
    }

    /// Sets one key ("model.hidden_size") from text, as `--set` and the flags do.
    pub fn set(&mut self, key: &str, value: &str) -> Result<()> {
        let mut table = self.table();
        let unknown = || {
            let hint = nearest(key, keys().iter().map(String::as_str));
            let hint = hint.unwrap_or_else(|| "`gpt presets tiny` shows every key".into());
            Error::usage(format!("unknown key `{key}`")).with_hint(hint)
        };
        let (section, name) = key.split_once('.').ok_or_else(unknown)?;
        let slot =
            table.get_mut(section).and_then(|t| t.as_table_mut()).and_then(|t| t.get_mut(name)).ok_or_else(unknown)?;
        let bad = |expected: &str| {
            Error::usage(format!("{key}: `{value}` is not {expected}"))
                .with_hint(format!("it is `{slot_now}` now", slot_now = show(&self.get(key))))
        };
        *slot = match slot {
            toml::Value::Integer(_) => toml::Value::Integer(whole(value).ok_or_else(|| bad("a whole number"))?),
            toml::Value::Float(_) => {
                let number: f64 = value.parse().map_err(|_| bad("a number"))?;
                toml::Value::Float(Some(number).filter(|n| n.is_finite()).ok_or_else(|| bad("a finite number"))?)
            }
            toml::Value::Boolean(_) => toml::Value::Boolean(value.parse().map_err(|_| bad("true or false"))?),
            _ => toml::Value::String(value.to_owned()),
        };
        *self = table.try_into().map_err(|e: toml::de::Error| Error::usage(format!("{key}: {}", e.message())))?;
        Ok(())
    }

    /// The value of a key, if there is such a key.
    pub fn get(&self, key: &str) -> Option<toml::Value> {
        let (section, name) = key.split_once('.')?;
        self.table().get(section)?.as_table()?.get(name).cloned()
    }

    fn table(&self) -> toml::Table {
        toml::Table::try_from(self).expect("plain structs always have a TOML form")
    }

    /// The model's config for a vocabulary.
    pub fn gpt_config(&self, vocab_size: usize) -> Result<GptConfig> {
        let m = &self.model;
        let names = ModelType::ALL.map(ModelType::name);
        let model_type = ModelType::ALL.into_iter().find(|t| t.name() == m.model_type).ok_or_else(|| {
            Error::usage(format!("model.model_type `{}`", m.model_type))
                .with_hint(format!("one of: {}", names.join(", ")))
        })?;
        let full = |layer: usize| m.full_attention_every > 0 && (layer + 1).is_multiple_of(m.full_attention_every);
        let window = |layer: usize| (m.sliding_window > 0 && !full(layer)).then_some(m.sliding_window);
        let config = GptConfig {
            model_type,
            vocab_size,
            hidden_size: m.hidden_size,
            intermediate_size: m.intermediate_size,
            num_hidden_layers: m.num_hidden_layers,
            num_attention_heads: m.num_attention_heads,
            num_key_value_heads: m.num_key_value_heads,
            head_dim: m.head_dim,
            max_position_embeddings: m.max_position_embeddings,
            rms_norm_eps: m.rms_norm_eps,
            rope_theta: m.rope_theta,
            tie_word_embeddings: m.tie_word_embeddings,
            windows: (0..m.num_hidden_layers).map(window).collect(),
        };
        config.validate()?;
        Ok(config)
    }

    /// Takes over the shape of a model that is to be trained on.
    pub fn adopt(&mut self, config: &GptConfig) {
        let full = |layer: &usize| config.windows[*layer].is_none();
        let windowed = config.windows.iter().flatten().next().copied();
        let m = &mut self.model;
        m.model_type = config.model_type.name().to_owned();
        m.num_hidden_layers = config.num_hidden_layers;
        m.hidden_size = config.hidden_size;
        m.intermediate_size = config.intermediate_size;
        m.num_attention_heads = config.num_attention_heads;
        m.num_key_value_heads = config.num_key_value_heads;
        m.head_dim = config.head_dim;
        m.max_position_embeddings = config.max_position_embeddings;
        m.sliding_window = windowed.unwrap_or(0);
        m.full_attention_every = match windowed {
            Some(_) => (0..config.num_hidden_layers).find(full).map_or(0, |layer| layer + 1),
            None => 0,
        };
        m.rms_norm_eps = config.rms_norm_eps;
        m.rope_theta = config.rope_theta;
        m.tie_word_embeddings = config.tie_word_embeddings;
    }

    /// Refuses numbers that no run can have.
    pub fn validate(&self) -> Result<()> {
        let t = &self.train;
        let zero = [
            ("train.batch", t.batch as u64),
            ("train.accumulate", t.accumulate as u64),
            ("train.eval_every", t.eval_every),
            ("train.save_every", t.save_every),
            ("train.keep", t.keep as u64),
        ];
        if let Some((key, _)) = zero.iter().find(|(_, value)| *value == 0) {
            return Err(Error::usage(format!("{key} is 0")).with_hint("use at least 1"));
        }
        if t.steps == 0 && t.epochs <= 0.0 && t.tokens == 0 {
            let what = "the run has no length: steps, epochs and tokens are all 0";
            return Err(Error::usage(what).with_hint("give --steps, --epochs or --tokens"));
        }
        let o = &self.optimizer;
        let shares = [
            ("model.dropout", f64::from(self.model.dropout)),
            ("optimizer.beta1", f64::from(o.beta1)),
            ("optimizer.beta2", f64::from(o.beta2)),
            ("optimizer.momentum", f64::from(o.momentum)),
            ("optimizer.ema", f64::from(o.ema)),
            ("data.validation", self.data.validation),
        ];
        if let Some((key, value)) = shares.iter().find(|(_, value)| !(0.0..1.0).contains(value)) {
            return Err(Error::usage(format!("{key} is {value}")).with_hint("it must be at least 0 and below 1"));
        }
        if o.learning_rate <= 0.0 || o.epsilon <= 0.0 {
            return Err(Error::usage("optimizer.learning_rate and optimizer.epsilon must be above 0"));
        }
        if !["auto", "f32"].contains(&t.dtype.as_str()) {
            let what = format!("dtype `{}` is not available for training in this version", t.dtype);
            return Err(Error::usage(what).with_hint("use --dtype f32"));
        }
        self.gpt_config(64).map(|_| ())
    }
}

/// Digits with optional `_` and a k, M or G for a thousand, a million, a milliard.
fn whole(text: &str) -> Option<i64> {
    let text = text.replace('_', "");
    let (digits, factor) = match text.chars().last()? {
        'k' | 'K' => (&text[..text.len() - 1], 1_000),
        'M' => (&text[..text.len() - 1], 1_000_000),
        'G' => (&text[..text.len() - 1], 1_000_000_000),
        _ => (text.as_str(), 1),
    };
    digits.parse::<i64>().ok()?.checked_mul(factor).filter(|n| *n >= 0)
}

fn show(value: &Option<toml::Value>) -> String {
    match value {
        Some(toml::Value::String(text)) => text.clone(),
        Some(value) => value.to_string(),
        None => String::new(),
    }
}

/// Every key, as "section.name".
pub fn keys() -> Vec<String> {
    let tiny = Preset::load("tiny").expect("a test parses every built-in preset");
    let mut keys = Vec::new();
    for (section, value) in tiny.table() {
        keys.extend(value.as_table().into_iter().flat_map(|t| t.keys()).map(|name| format!("{section}.{name}")));
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_built_in_preset_is_complete_valid_and_of_the_size_it_says() {
        // Millions of parameters with the byte vocabulary.
        let sizes = [0.9, 5.0, 10.7, 27.0, 85.0, 309.0, 735.0, 0.9];
        for ((name, _), millions) in BUILT_IN.iter().zip(sizes) {
            let preset = Preset::load(name).unwrap();
            assert_eq!(preset.name, *name);
            preset.validate().unwrap();
            let found = preset.gpt_config(320).unwrap().parameters() as f64 / 1e6;
            assert!((found / millions - 1.0).abs() < 0.1, "{name} has {found:.2} M parameters, not {millions}");
            assert_eq!(Preset::parse(&preset.to_toml(), Path::new("x")).unwrap(), preset);
        }
    }

    #[test]
    fn keys_are_set_by_name_and_type() {
        let mut preset = Preset::load("tiny").unwrap();
        preset.set("model.hidden_size", "256").unwrap();
        preset.set("train.tokens", "2M").unwrap();
        preset.set("optimizer.learning_rate", "1e-3").unwrap();
        preset.set("data.source", "7").unwrap();
        assert_eq!((preset.model.hidden_size, preset.train.tokens), (256, 2_000_000));
        assert_eq!((preset.optimizer.learning_rate, preset.data.source.as_str()), (1e-3, "7"));
        let said = |e: Error| format!("{e} / {}", e.hint().unwrap_or_default());
        assert!(said(preset.set("model.hiden_size", "1").unwrap_err()).contains("`model.hidden_size`"));
        assert!(said(preset.set("train.batch", "many").unwrap_err()).contains("not a whole number"));
        assert!(said(preset.set("train.batch", "-1").unwrap_err()).contains("not a whole number"));
        assert!(said(preset.set("model.dropout", "nan").unwrap_err()).contains("finite"));
        assert!(said(Preset::load("tinny").unwrap_err()).contains("`tiny`"));
        let text = preset.to_toml().replace("hidden_size = 256", "hidden_sise = 256");
        assert!(said(Preset::parse(&text, Path::new("a.toml")).unwrap_err()).contains("hidden_size"));
    }

    #[test]
    fn impossible_runs_are_refused() {
        for (key, value) in [
            ("train.batch", "0"),
            ("train.steps", "0"),
            ("model.dropout", "1"),
            ("model.num_key_value_heads", "3"),
            ("model.head_dim", "31"),
            ("model.model_type", "gpt5"),
            ("train.dtype", "f8"),
            ("optimizer.beta1", "1.5"),
        ] {
            let mut preset = Preset::load("tiny").unwrap();
            preset.train.epochs = 0.0;
            preset.train.tokens = 0;
            preset.set(key, value).unwrap();
            let error = preset.validate().unwrap_err();
            assert_eq!(error.exit_code(), 2, "{key}");
        }
    }
}
