//! `gpt data info` and `gpt inspect`: what a data set or a checkpoint is.

use std::path::PathBuf;

use super::plan;
use crate::checkpoint::{self, model_folder::ModelFolder};
use crate::data::{self, stories};
use crate::error::Result;
use crate::preset::Preset;
use crate::tokenizer::Tokenizer;

/// The keys of `gpt data info --json`.
#[derive(Clone, Debug, serde::Serialize)]
pub struct DataInfo {
    pub name: String,
    /// Of raw text.
    pub bytes: u64,
    pub tokens: usize,
    pub splits: Vec<Split>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entropy_bpb: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_bpb: Option<f64>,
    /// stories: expected bits and bytes of a story, and the bytes of the longest with its end token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub story: Option<[f64; 3]>,
    /// The beginning of the training text.
    pub beginning: String,
}

#[derive(Clone, Debug, serde::Serialize)]
pub struct Split {
    pub name: &'static str,
    pub bytes: u64,
    pub tokens: usize,
    pub documents: usize,
}

/// Opens a data set as training would, with the tokenizer of that file or bytes.
pub fn data(source: &str, validation: f64, tokenizer: Option<&PathBuf>) -> Result<DataInfo> {
    let tokenizer = match tokenizer {
        Some(path) => Tokenizer::open(path)?,
        None => Tokenizer::bytes(),
    };
    let defaults = plan::request(&Preset::load("tiny")?);
    let request = data::Request { source: source.into(), validation, ..defaults };
    let corpus = data::open(&request, &tokenizer)?;
    let split = |name, tokens: &data::tokens::Tokens| Split {
        name,
        bytes: tokens.text_bytes(),
        tokens: tokens.len(),
        documents: tokens.documents().count().max(1),
    };
    let splits = vec![split("train", &corpus.train), split("validation", &corpus.validation)];
    let start = corpus.train.slice(0..corpus.train.len().min(400));
    let source = stories::source();
    Ok(DataInfo {
        bytes: splits.iter().map(|s| s.bytes).sum(),
        tokens: splits.iter().map(|s| s.tokens).sum(),
        splits,
        entropy_bpb: corpus.entropy_bpb,
        source_bpb: corpus.source_bpb,
        story: corpus.entropy_bpb.map(|_| [source.bits_per_story, source.bytes_per_story, source.longest as f64]),
        beginning: String::from_utf8_lossy(&tokenizer.decode(&start)).into_owned(),
        name: corpus.name,
    })
}

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
    let tensors = folder.weights.list().map(|(name, dtype, shape)| TensorInfo {
        name: name.to_owned(),
        shape: shape.to_vec(),
        dtype,
    });
    Ok(Inspection {
        kind: "hugging_face_folder",
        model_type: c.model_type.name(),
        parameters: c.parameters(),
        tensors: tensors.collect(),
        metadata: serde_json::json!({
            "num_hidden_layers": c.num_hidden_layers,
            "hidden_size": c.hidden_size,
            "intermediate_size": c.intermediate_size,
            "num_attention_heads": c.num_attention_heads,
            "num_key_value_heads": c.num_key_value_heads,
            "head_dim": c.head_dim,
            "vocab_size": c.vocab_size,
            "max_position_embeddings": c.max_position_embeddings,
            "tie_word_embeddings": c.tie_word_embeddings,
        }),
        checkpoint: place,
    })
}
