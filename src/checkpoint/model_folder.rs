//! A model as Hugging Face keeps it: config.json, model.safetensors, tokenizer.json and their companions in one folder.

use std::path::{Path, PathBuf};

use super::weights::{self, Weights};
use super::{atomic, config_json};
use crate::error::{Error, Result};
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
pub fn write(folder: &Path, config: &GptConfig, tensors: &[NamedTensor], companions: &Companions) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, e))?;
    let generation = serde_json::json!({
        "bos_token_id": companions.start,
        "eos_token_id": companions.end_of_text,
        "do_sample": true,
        "temperature": 1.0,
    });
    let generation = serde_json::to_string_pretty(&generation).expect("a map of plain values") + "\n";
    let files = [
        ("config.json", config_json::write(config, companions.end_of_text)?.into_bytes()),
        ("generation_config.json", generation.into_bytes()),
        ("tokenizer.json", companions.tokenizer_json.clone().into_bytes()),
        ("tokenizer_config.json", companions.tokenizer_config_json.clone().into_bytes()),
        ("model.safetensors", weights::to_bytes(tensors)?),
    ];
    files.iter().try_for_each(|(name, bytes)| atomic::write(&folder.join(name), bytes))
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
            return Err(Error::file(path, "a folder with a model", found)
                .with_hint("name a folder that holds config.json and model.safetensors"));
        }
        let config = config_json::read(&path.join("config.json"))?;
        let folder = Self { path: path.to_owned(), config, weights: Weights::open_folder(path)? };
        folder.check_names()?;
        Ok(folder)
    }

    /// Every tensor must be one that the config calls for: a stray one means that the two do not belong together.
    fn check_names(&self) -> Result<()> {
        let wanted = Gpt::tensor_shapes(&self.config);
        let known = |name: &str| {
            wanted.iter().any(|(n, _)| n == name) || name == "lm_head.weight" || name.ends_with("inv_freq")
        };
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
