//! `gpt inspect`: what a checkpoint holds.

use std::path::PathBuf;

use crate::checkpoint::{self, model_folder::ModelFolder};
use crate::error::Result;

/// The keys of `gpt inspect --json`.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Inspection {
    pub checkpoint: PathBuf,
    pub kind: &'static str,
    pub model_type: &'static str,
    pub parameters: usize,
    pub tensors: Vec<TensorInfo>,
    pub metadata: serde_json::Value,
}

#[derive(Clone, Debug, serde::Serialize)]
pub struct TensorInfo {
    pub name: String,
    pub shape: Vec<usize>,
    pub dtype: String,
}

/// Opens a checkpoint and lists what is in it.
pub fn inspect(checkpoint: Option<&PathBuf>) -> Result<Inspection> {
    let place = checkpoint::resolve(checkpoint.map(PathBuf::as_path))?;
    let folder = ModelFolder::open(&place)?;
    let c = &folder.config;
    let info = |(name, dtype, shape): (&str, String, &[usize])| TensorInfo {
        name: name.to_owned(),
        shape: shape.to_vec(),
        dtype,
    };
    let adapter = folder.adapters.first().map(|(adapter, _)| adapter);
    let mut metadata = serde_json::json!({
        "num_hidden_layers": c.num_hidden_layers,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "max_position_embeddings": c.max_position_embeddings,
        "tie_word_embeddings": c.tie_word_embeddings,
    });
    if let Some(adapter) = adapter {
        let settings = &adapter.settings;
        metadata["base"] = folder.base.display().to_string().into();
        metadata["rank"] = settings.rank.into();
        metadata["alpha"] = settings.alpha.into();
        metadata["targets"] = settings.targets.iter().map(|target| target.name()).collect();
    }
    Ok(Inspection {
        kind: if adapter.is_some() { "peft_adapter" } else { "hugging_face_folder" },
        model_type: c.model_type.name(),
        parameters: c.parameters(),
        tensors: match adapter {
            Some(adapter) => adapter.list().map(info).collect(),
            None => folder.weights.list().map(info).collect(),
        },
        metadata,
        checkpoint: place,
    })
}
