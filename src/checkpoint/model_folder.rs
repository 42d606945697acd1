//! A model as Hugging Face keeps it: config.json, model.safetensors, tokenizer.json and their companions in one folder.
//!
//! Written by `recipes` for the run itself and its `best/`; opened by everything that takes a CHECKPOINT.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use super::config_json;
use super::weights::{Tensors, Weights};
use crate::error::{Error, Result};
use crate::files::atomic::{self, Fill};
use crate::model::config::GptConfig;
use crate::model::gpt::Gpt;
use crate::nn::parameter::NamedTensor;

/// The companions of the weights, as texts.
#[derive(Clone, Debug)]
pub struct Companions {
    pub end_of_text: u32,
    /// What an empty prompt starts from: the end of text between documents, a line break in plain text.
    pub start: u32,
    pub tokenizer_json: String,
    pub tokenizer_config_json: String,
}

/// Writes a whole model folder. Each file is replaced by rename; the weights come last, so a folder without them is no model.
/// Only for the one writer of the folder: what a killed one left is removed.
pub fn write(folder: &Path, config: &GptConfig, tensors: &[NamedTensor], companions: &Companions) -> Result<()> {
    let config = config_json::write(config, companions.end_of_text)?;
    atomic::create_folder(folder)?;
    atomic::sweep(folder)?;
    let generation = serde_json::json!({
        "bos_token_id": companions.start,
        "eos_token_id": companions.end_of_text,
        "do_sample": true,
        "temperature": 0.8,
    });
    let generation = serde_json::to_string_pretty(&generation).expect("a map of plain values") + "\n";
    let files: [(&str, &dyn Fill); 5] = [
        ("config.json", &config.as_bytes()),
        ("generation_config.json", &generation.as_bytes()),
        ("tokenizer.json", &companions.tokenizer_json.as_bytes()),
        ("tokenizer_config.json", &companions.tokenizer_config_json.as_bytes()),
        ("model.safetensors", &Tensors(tensors)),
    ];
    files.iter().try_for_each(|(name, content)| atomic::write(&folder.join(name), content))
}

/// A complete model folder, ours or anybody's.
pub struct ModelFolder {
    pub path: PathBuf,
    pub config: GptConfig,
    pub weights: Weights,
}

impl ModelFolder {
    pub fn open(path: &Path) -> Result<Self> {
        if !path.is_dir() {
            let found = if path.exists() { "a file" } else { "nothing" };
            return Err(Error::file(path, "a folder with a model", found).with_hint(no_model(path)));
        }
        if !path.join("config.json").exists() {
            return Err(Error::file(path, "a folder with a config.json", "none").with_hint(no_model(path)));
        }
        let config = config_json::read(&path.join("config.json"))?;
        let folder = Self { path: path.to_owned(), config, weights: Weights::open_folder(path)? };
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
        Gpt::build(&self.config, &mut |name, shape| self.weights.get(name, shape))
    }
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
