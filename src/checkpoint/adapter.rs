//! An adapter as PEFT keeps it: adapter_config.json and adapter_model.safetensors in one folder. Ours also hold the hash of
//! their base and the blocks that it was trained over, in `auto_mapping`, which is PEFT's place for what is known of a base.
//!
//! Written by `recipes` for a run and its `best/`; read through `model_folder`, which adds adapters to the weights of a base.
//! What must stay true: rank, alpha and targets come from the folder alone, so that nothing has to be said again.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::foreign;
use super::model_folder::Companions;
use super::weights::{Tensors, Weights};
use crate::error::{Error, Result};
use crate::files::atomic::{self, Fill};
use crate::model::gpt::{Adaptation, Gpt};
use crate::nn::lora::{self, LoraSettings, Target};
use crate::nn::parameter::NamedTensor;
use crate::ops::blocks::Format;
use crate::ops::simd::Family;

pub const CONFIG: &str = "adapter_config.json";
pub const MODEL: &str = "adapter_model.safetensors";

/// What an adapter was trained beside.
#[derive(Clone, Debug, PartialEq)]
pub struct Base {
    pub path: PathBuf,
    /// As `checkpoint::hash` says it.
    pub sha256: String,
}

/// Whether a folder holds an adapter and no whole model.
pub fn is_adapter(folder: &Path) -> bool {
    folder.join(CONFIG).is_file() && !folder.join("config.json").exists()
}

/// Writes a whole adapter folder; the weights come last. Only for the one writer of the folder.
pub fn write(
    folder: &Path,
    base: &Base,
    adaptation: &Adaptation,
    tensors: &[NamedTensor],
    companions: &Companions,
) -> Result<()> {
    atomic::create_folder(folder)?;
    atomic::sweep(folder)?;
    let config = serde_json::to_string_pretty(&config(base, adaptation)).expect("a map of plain values") + "\n";
    companions.write(folder)?;
    let files: [(&str, &dyn Fill); 2] = [(CONFIG, &config.as_bytes()), (MODEL, &Tensors(tensors))];
    files.iter().try_for_each(|(name, content)| atomic::write(&folder.join(name), content))
}

fn config(base: &Base, Adaptation { base: format, lora, .. }: &Adaptation) -> Value {
    let modules: Vec<&str> = lora.targets.iter().map(|target| target.module()).collect();
    json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.path.display().to_string(),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": false,
        "init_lora_weights": true,
        "inference_mode": true,
        "modules_to_save": null,
        "auto_mapping": { "base_sha256": base.sha256, "base_blocks": format.map(Format::name) },
    })
}

/// An opened adapter.
pub struct Adapter {
    pub path: PathBuf,
    /// Its dropout is that of training.
    pub settings: LoraSettings,
    /// Blocks that the base was trained in.
    pub blocks: Option<Format>,
    base: Option<PathBuf>,
    base_sha256: Option<String>,
    weights: Weights,
}

impl Adapter {
    pub fn open(path: &Path) -> Result<Self> {
        if !path.join(CONFIG).is_file() {
            let found = if path.is_dir() { "none" } else { "no folder" };
            return Err(Error::file(path, format!("an adapter's folder with {CONFIG}"), found)
                .with_hint("gpt finetune makes one; so does PEFT's save_pretrained"));
        }
        let config = Config { path: path.join(CONFIG), json: foreign::read_json(&path.join(CONFIG))? };
        config.refuse_what_is_not_computed()?;
        let weights = Weights::open(&path.join(MODEL))?;
        let known = config.json.get("auto_mapping").and_then(Value::as_object);
        let text = |key: &str| known.and_then(|k| k.get(key)).and_then(Value::as_str);
        let format =
            |name| Format::named(name).ok_or_else(|| config.wrong("base_blocks", "a block format", &json!(name)));
        let blocks = text("base_blocks").map(format).transpose()?;
        let base = config.json.get("base_model_name_or_path").and_then(Value::as_str).filter(|name| !name.is_empty());
        let targets = Target::ALL.into_iter().filter(|target| {
            let inside = format!("{}.lora_A.weight", target.module());
            weights.list().any(|(name, ..)| name.ends_with(&inside))
        });
        let settings = LoraSettings {
            rank: config.size("r")?,
            alpha: config.number("lora_alpha")? as f32,
            dropout: config.json.get("lora_dropout").and_then(Value::as_f64).unwrap_or(0.0) as f32,
            rslora: config.json.get("use_rslora").and_then(Value::as_bool).unwrap_or(false),
            targets: targets.collect(),
        };
        settings.validate().map_err(|e| Error::file(&config.path, "settings of an adapter", e.to_string()))?;
        let (base, base_sha256) = (base.map(PathBuf::from), text("base_sha256").map(str::to_owned));
        Ok(Self { path: path.to_owned(), settings, blocks, base, base_sha256, weights })
    }

    /// Where its base lies: where it lay in training, else a folder of that name beside the adapter.
    pub fn find_base(&self) -> Result<PathBuf> {
        let hint = format!("name the base: BASE --adapter {}", self.path.display());
        let Some(named) = &self.base else {
            return Err(Error::file(self.path.join(CONFIG), "the name of a base", "none").with_hint(hint));
        };
        let real = self.path.canonicalize().unwrap_or_else(|_| self.path.clone());
        let beside = named.file_name().map(|name| real.with_file_name(name));
        let mut places = [Some(named.clone()), beside].into_iter().flatten();
        places.find(|place| place.join("config.json").is_file()).ok_or_else(|| {
            Error::file(&self.path, format!("its base at {}", named.display()), "no model there").with_hint(hint)
        })
    }

    /// Refuses a base that is not the one it was trained beside, as far as that is known, and one of other shapes.
    pub fn check(
        &self,
        base: &Path,
        sha256: &dyn Fn() -> Result<String>,
        shapes: &[(String, Vec<usize>)],
    ) -> Result<()> {
        if let Some(expected) = &self.base_sha256 {
            let found = sha256()?;
            if found != *expected {
                let short = |sum: &str| sum.chars().take(12).collect::<String>();
                let expected =
                    format!("the base that {} was trained beside, sha256 {}...", self.path.display(), short(expected));
                return Err(Error::file(base, expected, format!("sha256 {}...", short(&found)))
                    .with_hint("an adapter works with its own base only: name that, or fine-tune this one"));
            }
        }
        // PEFT also saves the head itself, as it is in the base, where that is adapted.
        for (name, _, shape) in self.weights.list().filter(|(name, ..)| !name.ends_with(".base_layer.weight")) {
            let known = shapes.iter().find(|(known, _)| known == name);
            if known.is_none_or(|(_, wanted)| wanted != shape) {
                return Err(Error::Tensor {
                    path: self.path.join(MODEL),
                    tensor: name.to_owned(),
                    expected: known
                        .map_or("factors of projections of the base".into(), |(_, s)| format!("shape {s:?}")),
                    found: format!("shape {shape:?}"),
                });
            }
        }
        Ok(())
    }

    /// Adds its correction of the weight of that name (out, in), times `scale`, if it has one.
    pub fn add_to(&self, name: &str, shape: &[usize], weight: &mut [f32], scale: f32) -> Result<()> {
        let [a, b] = lora::names(name);
        let (rank, [out, input]) = (self.settings.rank, shape) else { return Ok(()) };
        if !self.weights.contains(&a) {
            return Ok(());
        }
        let (a, b) = (self.weights.get(&a, &[rank, *input])?, self.weights.get(&b, &[*out, rank])?);
        crate::ops::lora::merge(Family::detect(), weight, (&a, &b, rank), scale * self.settings.scale());
        Ok(())
    }

    /// (name, dtype, shape) of every tensor.
    pub fn list(&self) -> impl Iterator<Item = (&str, String, &[usize])> {
        self.weights.list()
    }
}

struct Config {
    path: PathBuf,
    json: Map<String, Value>,
}

impl Config {
    fn wrong(&self, key: &str, expected: &str, found: &Value) -> Error {
        Error::file(&self.path, format!("{key}: {expected}"), found.to_string())
    }

    fn number(&self, key: &str) -> Result<f64> {
        let found = self.json.get(key).unwrap_or(&Value::Null);
        found.as_f64().ok_or_else(|| self.wrong(key, "a number", found))
    }

    fn size(&self, key: &str) -> Result<usize> {
        let found = self.json.get(key).unwrap_or(&Value::Null);
        let size = found.as_u64().and_then(|size| usize::try_from(size).ok());
        size.ok_or_else(|| self.wrong(key, "a whole number", found))
    }

    /// Every kind of adapter but the plain one.
    fn refuse_what_is_not_computed(&self) -> Result<()> {
        let empty = |v: &Value| match v {
            Value::Null => true,
            Value::Bool(on) => !on,
            Value::Array(list) => list.is_empty(),
            Value::Object(map) => map.is_empty(),
            Value::String(text) => text.is_empty() || text == "none",
            Value::Number(_) => false,
        };
        if let Some(kind) = self.json.get("peft_type").filter(|kind| *kind != "LORA") {
            return Err(self.wrong("peft_type", "LORA", kind));
        }
        for key in
            ["use_dora", "fan_in_fan_out", "bias", "lora_bias", "rank_pattern", "alpha_pattern", "modules_to_save"]
        {
            if let Some(found) = self.json.get(key).filter(|found| !empty(found)) {
                return Err(self.wrong(key, "nothing of that kind", found));
            }
        }
        Ok(())
    }
}

/// Name and shape of every tensor that an adapter of a base can have.
pub fn shapes(config: &crate::model::config::GptConfig, rank: usize) -> Vec<(String, Vec<usize>)> {
    let every = LoraSettings { targets: Target::ALL.to_vec(), ..LoraSettings::of_rank(rank) };
    Gpt::adapter_shapes(config, &every)
}
