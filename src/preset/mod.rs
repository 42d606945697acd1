//! Everything that defines a run, as one TOML: model, tokenizer, data, optimizer, schedule, batch.
//!
//! A preset file is complete; flags override it key by key (`keys.rs`); the resolved one is saved in the run and reads back
//! to the same. Unknown keys are errors with the nearest name. Called by the recipes and by cli, which makes a flag of
//! every key.

mod keys;

pub use keys::keys;

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
    #[serde(serialize_with = "keys::shortest")]
    pub rms_norm_eps: f32,
    pub rope_theta: f64,
    pub tie_word_embeddings: bool,
    #[serde(serialize_with = "keys::shortest")]
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
    /// Names of sets, cards, files and folders, with weights: wikitext-2:0.7,./my-notes:0.3
    pub source: String,
    /// The share held out.
    pub validation: f64,
    /// stories: bytes of training text.
    pub bytes: u64,
    /// Train on files that are not text.
    pub allow_binary: bool,
    /// replace | refuse
    pub invalid_utf8: String,
    /// keep | lf
    pub line_endings: String,
    /// The field or column of jsonl, csv and parquet that is the text.
    pub field: String,
    /// Text between documents of a plain file; empty for none.
    pub separator: String,
    /// Leave out documents that came before.
    pub deduplicate: bool,
    /// across | within | off
    pub pack: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Optimizer {
    /// adamw, or muon for the matrices inside the blocks and adamw for the rest.
    pub kind: String,
    pub learning_rate: f64,
    #[serde(serialize_with = "keys::shortest")]
    pub beta1: f32,
    #[serde(serialize_with = "keys::shortest")]
    pub beta2: f32,
    #[serde(serialize_with = "keys::shortest")]
    pub epsilon: f32,
    #[serde(serialize_with = "keys::shortest")]
    pub weight_decay: f32,
    /// Muon's.
    #[serde(serialize_with = "keys::shortest")]
    pub momentum: f32,
    /// Highest global gradient norm; 0 does not clip.
    #[serde(serialize_with = "keys::shortest")]
    pub clip: f32,
    /// Decay of averaged weights, which validation and export then use; 0 keeps none.
    #[serde(serialize_with = "keys::shortest")]
    pub ema: f32,
    /// Standard deviations at which a spiking step is skipped; 0 skips only what is not finite.
    #[serde(serialize_with = "keys::shortest")]
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
    ("tiny", include_str!("../../presets/tiny.toml")),
    ("small", include_str!("../../presets/small.toml")),
    ("medium", include_str!("../../presets/medium.toml")),
    ("large", include_str!("../../presets/large.toml")),
    ("huge", include_str!("../../presets/huge.toml")),
    ("mega", include_str!("../../presets/mega.toml")),
    ("behemoth", include_str!("../../presets/behemoth.toml")),
    ("shakespeare", include_str!("../../presets/shakespeare.toml")),
];

/// The resolved preset's name in the folder of a run.
pub const SAVED: &str = "preset.toml";

impl Preset {
    /// A built-in preset, the TOML file of that path, or the one saved in the folder of a run.
    pub fn load(name: &str) -> Result<Self> {
        if let Some((_, text)) = BUILT_IN.iter().find(|(n, _)| *n == name) {
            return Self::parse(text, Path::new(name));
        }
        let mut path = Path::new(name).to_owned();
        if path.is_dir() && path.join(SAVED).is_file() {
            path = path.join(SAVED);
        } else if !name.ends_with(".toml") {
            let names = BUILT_IN.map(|(n, _)| n);
            let hint = nearest(name, names).unwrap_or_else(|| format!("one of: {}; or a .toml file", names.join(", ")));
            return Err(Error::usage(format!("unknown preset `{name}`")).with_hint(hint));
        }
        Self::open(&path)
    }

    /// The preset in a file.
    pub fn open(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|e| Error::io("read", path, e))?;
        Self::parse(&text, path)
    }

    /// The model's config for a vocabulary.
    pub fn gpt_config(&self, vocab_size: usize) -> Result<GptConfig> {
        let m = &self.model;
        one_of("model.model_type", &m.model_type, &ModelType::ALL.map(ModelType::name))?;
        let model_type = ModelType::ALL.into_iter().find(|t| t.name() == m.model_type).expect("it is one of them");
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

    /// Refuses numbers that no run can have, naming the key and what it may be.
    pub fn validate(&self) -> Result<()> {
        let (m, o, s, t) = (&self.model, &self.optimizer, &self.schedule, &self.train);
        for (key, value, most) in [
            ("model.num_hidden_layers", m.num_hidden_layers as u64, 1 << 10),
            ("model.hidden_size", m.hidden_size as u64, 1 << 16),
            ("model.intermediate_size", m.intermediate_size as u64, 1 << 18),
            ("model.num_attention_heads", m.num_attention_heads as u64, 1 << 10),
            ("model.num_key_value_heads", m.num_key_value_heads as u64, 1 << 10),
            ("model.head_dim", m.head_dim as u64, 1 << 10),
            ("model.max_position_embeddings", m.max_position_embeddings as u64, 1 << 20),
            ("train.batch", t.batch as u64, 1 << 20),
            ("train.accumulate", t.accumulate as u64, 1 << 20),
            ("train.eval_every", t.eval_every, u64::MAX),
            ("train.save_every", t.save_every, u64::MAX),
            ("train.keep", t.keep as u64, u64::MAX),
        ] {
            if value == 0 || value > most {
                let most = if most == u64::MAX { String::new() } else { format!(" and at most {most}") };
                return Err(Error::usage(format!("{key} is {value}")).with_hint(format!("it must be at least 1{most}")));
            }
        }
        for (key, value) in [
            ("model.dropout", f64::from(m.dropout)),
            ("data.validation", self.data.validation),
            ("optimizer.beta1", f64::from(o.beta1)),
            ("optimizer.beta2", f64::from(o.beta2)),
            ("optimizer.momentum", f64::from(o.momentum)),
            ("optimizer.ema", f64::from(o.ema)),
        ] {
            check(key, value, (0.0..1.0).contains(&value), "at least 0 and below 1")?;
        }
        for (key, value) in [
            ("optimizer.learning_rate", o.learning_rate),
            ("optimizer.epsilon", f64::from(o.epsilon)),
            ("model.rms_norm_eps", f64::from(m.rms_norm_eps)),
            ("model.rope_theta", m.rope_theta),
        ] {
            check(key, value, value > 0.0, "above 0")?;
        }
        for (key, value) in [
            ("optimizer.weight_decay", f64::from(o.weight_decay)),
            ("optimizer.clip", f64::from(o.clip)),
            ("optimizer.spike_threshold", f64::from(o.spike_threshold)),
            ("train.epochs", t.epochs),
            ("train.max_epochs", t.max_epochs),
        ] {
            check(key, value, value >= 0.0, "at least 0")?;
        }
        for (key, value) in
            [("schedule.final_fraction", s.final_fraction), ("schedule.decay_fraction", s.decay_fraction)]
        {
            check(key, value, (0.0..=1.0).contains(&value), "from 0 to 1")?;
        }
        self.validate_choices()?;
        self.gpt_config(64).map(|_| ())
    }

    /// The keys that name one of a few things.
    fn validate_choices(&self) -> Result<()> {
        let t = &self.train;
        one_of("optimizer.kind", &self.optimizer.kind, &["adamw", "muon"])?;
        one_of("schedule.kind", &self.schedule.kind, &["cosine", "linear", "wsd", "constant"])?;
        one_of("train.dtype", &t.dtype, &["auto", "f32", "bf16"])?;
        if t.steps == 0 && t.epochs == 0.0 && t.tokens == 0 {
            let what = "the run has no length: steps, epochs and tokens are all 0";
            return Err(Error::usage(what).with_hint("give --steps, --epochs or --tokens"));
        }
        Ok(())
    }
}

fn check(key: &str, value: f64, good: bool, range: &str) -> Result<()> {
    let bad = || Err(Error::usage(format!("{key} is {value}")).with_hint(format!("it must be {range}")));
    if good && value.is_finite() { Ok(()) } else { bad() }
}

fn one_of(key: &str, value: &str, known: &[&str]) -> Result<()> {
    if known.contains(&value) {
        return Ok(());
    }
    let choices = format!("one of: {}", known.join(", "));
    let hint = nearest(value, known.iter().copied()).map_or(choices.clone(), |near| format!("{near} It is {choices}"));
    Err(Error::usage(format!("{key} is `{value}`, which is not known")).with_hint(hint))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_built_in_preset_is_complete_valid_and_of_the_size_it_says() {
        // Layers, hidden size, heads, intermediate size, context, and millions of parameters with the byte vocabulary.
        let table = [
            ("tiny", [4, 128, 4, 384, 512], 0.9),
            ("small", [6, 256, 4, 768, 512], 5.0),
            ("medium", [6, 384, 6, 1024, 512], 10.7),
            ("large", [8, 512, 8, 1536, 512], 27.0),
            ("huge", [12, 768, 12, 2048, 1024], 85.0),
            ("mega", [24, 1024, 16, 2816, 1024], 309.0),
            ("behemoth", [36, 1280, 20, 3584, 4096], 735.0),
            ("shakespeare", [4, 128, 4, 384, 64], 0.9),
        ];
        assert_eq!(table.len(), BUILT_IN.len());
        for (name, shape, millions) in table {
            let preset = Preset::load(name).unwrap();
            assert_eq!(preset.name, name);
            preset.validate().unwrap();
            let m = &preset.model;
            let (heads, context) = (m.num_attention_heads, m.max_position_embeddings);
            assert_eq!([m.num_hidden_layers, m.hidden_size, heads, m.intermediate_size, context], shape, "{name}");
            let found = preset.gpt_config(320).unwrap().parameters() as f64 / 1e6;
            assert!((found / millions - 1.0).abs() < 0.1, "{name} has {found:.2} M parameters, not {millions}");
            assert_eq!(Preset::parse(&preset.to_toml(), Path::new("x")).unwrap(), preset);
        }
    }

    #[test]
    fn behemoth_sees_everything_in_every_fourth_layer() {
        let config = Preset::load("behemoth").unwrap().gpt_config(320).unwrap();
        assert_eq!(config.windows[..5], [Some(1024), Some(1024), Some(1024), None, Some(1024)]);
        assert_eq!(config.windows.iter().filter(|w| w.is_none()).count(), 9);
    }

    #[test]
    fn impossible_runs_are_refused_with_their_key_and_a_way_out() {
        for (key, value) in [
            ("train.batch", "0"),
            ("train.steps", "0"),
            ("model.dropout", "1"),
            ("model.num_key_value_heads", "3"),
            ("model.head_dim", "31"),
            ("model.hidden_size", "1000000000"),
            ("model.model_type", "gpt5"),
            ("model.rope_theta", "0"),
            ("train.dtype", "f8"),
            ("train.dtype", "f16"),
            ("optimizer.beta1", "1.5"),
            ("optimizer.kind", "adamv"),
            ("optimizer.weight_decay", "-1"),
            ("schedule.kind", "cosin"),
            ("schedule.final_fraction", "2"),
        ] {
            let mut preset = Preset::load("tiny").unwrap();
            preset.train.epochs = 0.0;
            preset.train.tokens = 0;
            preset.set(key, value).unwrap();
            let error = preset.validate().unwrap_err();
            assert_eq!(error.exit_code(), 2, "{key}");
            assert!(error.hint().is_some(), "{key}: {error}");
        }
    }

    #[test]
    fn an_unknown_preset_names_the_nearest() {
        let error = Preset::load("tinny").unwrap_err();
        assert!(error.hint().unwrap().contains("`tiny`"));
        assert_eq!(error.exit_code(), 2);
        assert!(Preset::load("zzz").unwrap_err().hint().unwrap().contains("shakespeare"));
        assert_eq!(Preset::load("/nowhere/x.toml").unwrap_err().exit_code(), 1);
    }
}
