//! A model as Hugging Face keeps it: config.json, model.safetensors, tokenizer.json and their companions in one folder.
//!
//! Written by `recipes` for the run itself and its `best/`; opened by everything that takes a CHECKPOINT. An adapter's folder
//! opens as its base with the adapter.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::adapter::{self, Adapter};
use super::config_json;
use super::foreign;
use super::weights::{Made, StoredType, Tensors, Weights};
use crate::error::{Error, Result};
use crate::files::atomic::{self, Fill};
use crate::model::config::GptConfig;
use crate::model::gpt::Gpt;
use crate::nn::parameter::NamedTensor;
use crate::ops::blocks::{BlockMatrix, Format};
use crate::ops::simd::Family;

pub use super::weights::SINGLE as MODEL;

/// The companions of the weights, as texts.
#[derive(Clone, Debug)]
pub struct Companions {
    pub end_of_text: u32,
    /// What an empty prompt starts from: the end of text between documents, a line break in plain text.
    pub start: u32,
    pub tokenizer_json: String,
    pub tokenizer_config_json: String,
}

impl Companions {
    /// Writes what lies beside the weights.
    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        let generation = serde_json::json!({
            "bos_token_id": self.start,
            "eos_token_id": self.end_of_text,
            "do_sample": true,
            "temperature": 0.8,
        });
        let generation = serde_json::to_string_pretty(&generation).expect("a map of plain values") + "\n";
        let files = [
            ("generation_config.json", &generation),
            ("tokenizer.json", &self.tokenizer_json),
            ("tokenizer_config.json", &self.tokenizer_config_json),
        ];
        files.iter().try_for_each(|(name, text)| atomic::write(&folder.join(name), text.as_bytes()))
    }
}

/// Writes a whole model folder. Each file is replaced by rename; the weights come last, so a folder without them is no model.
/// Only for the one writer of the folder: what a killed one left is removed.
pub fn write(folder: &Path, config: &GptConfig, tensors: &[NamedTensor], companions: &Companions) -> Result<()> {
    let config = config_json::write(config, companions.end_of_text)?;
    atomic::create_folder(folder)?;
    atomic::sweep(folder)?;
    companions.write(folder)?;
    let files: [(&str, &dyn Fill); 2] = [("config.json", &config.as_bytes()), (MODEL, &Tensors(tensors))];
    files.iter().try_for_each(|(name, content)| atomic::write(&folder.join(name), content))
}

/// A complete model folder, ours or anybody's, and the adapters that its weights are read with.
pub struct ModelFolder {
    /// The folder that was opened.
    pub path: PathBuf,
    /// Of the model with its adapters: one that corrects a tied head unties it.
    pub config: GptConfig,
    /// Of the base.
    pub weights: Weights,
    /// Where the base lies.
    pub base: PathBuf,
    /// In the order in which they are added, each with its share.
    pub adapters: Vec<(Adapter, f32)>,
    /// Blocks in which the base is read: those that the adapters were trained over.
    blocks: Option<Format>,
    /// Whether the base's head is its table.
    tied: bool,
}

impl ModelFolder {
    pub fn open(path: &Path) -> Result<Self> {
        if !adapter::is_adapter(path) {
            return Self::open_model(path);
        }
        let base = Adapter::open(path)?.find_base()?;
        Ok(Self { path: path.to_owned(), ..Self::open_model(&base)?.with_adapter(path, 1.0)? })
    }

    /// The same with an adapter on top, times `scale`.
    pub fn with_adapter(mut self, path: &Path, scale: f32) -> Result<Self> {
        let adapter = Adapter::open(path)?;
        let shapes = adapter::shapes(
            &GptConfig { tie_word_embeddings: self.tied, ..self.config.clone() },
            adapter.settings.rank,
        );
        adapter.check(&self.base, &|| super::hash(&self.base), &shapes)?;
        if adapter.blocks != self.blocks && !self.adapters.is_empty() {
            let name = |blocks: Option<Format>| blocks.map_or("floating point", Format::name);
            let what = format!("{} was trained over a base in {}", path.display(), name(adapter.blocks));
            return Err(Error::usage(format!("{what}, the one before it in {}", name(self.blocks)))
                .with_hint("merge one of them first, or train both over the same"));
        }
        self.blocks = adapter.blocks;
        if adapter.settings.targets.contains(&crate::nn::lora::Target::Head) {
            self.config.tie_word_embeddings = false;
        }
        self.adapters.push((adapter, scale));
        Ok(self)
    }

    /// A weight of the model, with the shape that its config calls for: the base's, with the adapters' corrections.
    pub fn get(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let table = name == "lm_head.weight" && self.tied;
        let mut weight = self.weights.get(if table { "model.embed_tokens.weight" } else { name }, shape)?;
        if let (Some(format), [_, columns]) = (self.blocks, shape) {
            BlockMatrix::quantize(format, &weight, *columns)?.unpack(Family::detect(), &mut weight);
        }
        self.adapters.iter().try_for_each(|(adapter, scale)| adapter.add_to(name, shape, &mut weight, *scale))?;
        Ok(weight)
    }

    /// The SHA-256 of all that makes the weights.
    pub fn hash(&self) -> Result<String> {
        let mut sum = super::hash(&self.base)?;
        for (adapter, scale) in &self.adapters {
            let both = format!("{sum} {} {scale}", super::hash(&adapter.path)?);
            sum = atomic::hex(&Sha256::digest(both));
        }
        Ok(sum)
    }

    fn open_model(path: &Path) -> Result<Self> {
        if !path.is_dir() {
            let found = if path.exists() { "a file" } else { "nothing" };
            return Err(Error::file(path, "a folder with a model", found).with_hint(no_model(path)));
        }
        if !path.join("config.json").exists() {
            return Err(Error::file(path, "a folder with a config.json", "none").with_hint(no_model(path)));
        }
        let config = config_json::read(&path.join("config.json"))?;
        let folder = Self {
            path: path.to_owned(),
            base: path.to_owned(),
            tied: config.tie_word_embeddings,
            config,
            weights: Weights::open_folder(path)?,
            adapters: Vec::new(),
            blocks: None,
        };
        folder.check_names()?;
        Ok(folder)
    }

    /// Every tensor must be one that the config calls for: a stray one means that the two do not belong together.
    fn check_names(&self) -> Result<()> {
        let wanted: HashSet<String> = Gpt::tensor_shapes(&self.config).into_iter().map(|(name, _)| name).collect();
        // A tied head stored a second time, and the constants that old versions of transformers stored.
        let known = |name: &str| wanted.contains(name) || name == "lm_head.weight" || name.ends_with(".inv_freq");
        let stray = self.weights.list().find(|(name, ..)| !known(name));
        match stray {
            None => Ok(()),
            Some((name, _, shape)) => Err(Error::Tensor {
                path: self.path.clone(),
                tensor: name.to_owned(),
                expected: format!("only tensors of a {} model", self.config.model_type.name()),
                found: format!("shape {shape:?}"),
            }),
        }
    }

    /// The model, trainable.
    pub fn model(&self) -> Result<Gpt> {
        Gpt::build(&self.config, &mut |name, shape| self.get(name, shape))
    }
}

/// What belongs to a model beside its config and weights, and is copied with it.
const COMPANIONS: [&str; 9] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
];

/// Writes the model of `folder`, its adapters in its weights, as a model of its own: in `stored`, or each tensor as the base has
/// it. One tensor is in memory at a time.
pub fn write_merged(folder: &ModelFolder, to: &Path, stored: Option<StoredType>) -> Result<()> {
    atomic::create_folder(to)?;
    let named = |name: &str| if folder.weights.contains(name) { name } else { "model.embed_tokens.weight" }.to_owned();
    let of_base = |name: &str| folder.weights.stored(&named(name)).unwrap_or(StoredType::F32);
    let tensors: Vec<_> = Gpt::tensor_shapes(&folder.config)
        .into_iter()
        .map(|(name, shape)| {
            let stored = stored.unwrap_or_else(|| of_base(&name));
            (name, shape, stored)
        })
        .collect();
    let mut config = foreign::read_json(&folder.base.join("config.json"))?;
    config.insert("tie_word_embeddings".into(), folder.config.tie_word_embeddings.into());
    if let Some(stored) = stored {
        let keys = ["torch_dtype", "dtype"].into_iter().filter(|key| config.contains_key(*key)).collect::<Vec<_>>();
        keys.into_iter().for_each(|key| drop(config.insert(key.into(), stored.torch_name().into())));
    }
    let config = serde_json::to_string_pretty(&config).expect("it was read as JSON") + "\n";
    for name in COMPANIONS {
        let place =
            [&folder.path, &folder.base].map(|place| place.join(name)).into_iter().find(|place| place.is_file());
        if let Some(place) = place {
            let bytes = std::fs::read(&place).map_err(|e| Error::io("read", &place, e))?;
            atomic::write(&to.join(name), bytes.as_slice())?;
        }
    }
    atomic::write(&to.join("config.json"), config.as_bytes())?;
    let weights = Made { tensors: &tensors, get: &|name, shape| folder.get(name, shape) };
    atomic::write(&to.join(MODEL), weights)
}

/// What to do about a folder that holds no model.
pub(super) fn no_model(folder: &Path) -> String {
    match folder.join("steps").is_dir() {
        true => format!("this run has no model yet: gpt train --resume --out {}", folder.display()),
        false => "name a folder that holds config.json and model.safetensors".into(),
    }
}

#[cfg(test)]
mod tests;
