//! The shape of a model: what Hugging Face's config.json says, under its names, and what follows from it.
//!
//! One decoder covers model_type qwen3 (query/key norm), llama and mistral. Read and written by `checkpoint`, filled from a
//! preset by `recipes`, used by everything that builds or runs a model.

use crate::error::{Error, Result};
use crate::ops::heads::MAX_DIM;

/// The Hugging Face family whose model code computes the same function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ModelType {
    Qwen3,
    Llama,
    Mistral,
}

impl ModelType {
    pub const ALL: [ModelType; 3] = [ModelType::Qwen3, ModelType::Llama, ModelType::Mistral];

    pub fn name(self) -> &'static str {
        match self {
            ModelType::Qwen3 => "qwen3",
            ModelType::Llama => "llama",
            ModelType::Mistral => "mistral",
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct GptConfig {
    pub model_type: ModelType,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub num_hidden_layers: usize,
    pub num_attention_heads: usize,
    pub num_key_value_heads: usize,
    pub head_dim: usize,
    /// The context: the longest sequence that the model was trained on.
    pub max_position_embeddings: usize,
    pub rms_norm_eps: f32,
    pub rope_theta: f64,
    pub tie_word_embeddings: bool,
    /// For each layer the number of keys a token sees, itself included; `None` sees all.
    pub windows: Vec<Option<usize>>,
}

impl GptConfig {
    /// Whether queries and keys are normalised per head before the rotation.
    pub fn qk_norm(&self) -> bool {
        self.model_type == ModelType::Qwen3
    }

    /// Width of the fused query/key/value projection: (H + 2 K) D.
    pub fn qkv_size(&self) -> usize {
        (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim
    }

    /// Width of the attention output: H D.
    pub fn attention_size(&self) -> usize {
        self.num_attention_heads * self.head_dim
    }

    /// Trainable numbers; a tied head is counted once.
    pub fn parameters(&self) -> usize {
        let (c, f, d) = (self.hidden_size, self.intermediate_size, self.head_dim);
        let norms = 2 * c + if self.qk_norm() { 2 * d } else { 0 };
        let layer = c * self.qkv_size() + c * self.attention_size() + 3 * c * f + norms;
        let tables = if self.tie_word_embeddings { 1 } else { 2 };
        tables * self.vocab_size * c + self.num_hidden_layers * layer + c
    }

    /// Multiply-adds times two of one token's forward and backward in training at that context (causal attention counted
    /// at half the square), without the optimizer: 6 N + 6 L H D T for full layers.
    pub fn training_flops_per_token(&self, context: usize) -> f64 {
        let matrices = self.parameters() - self.vocab_size * self.hidden_size * usize::from(!self.tie_word_embeddings);
        let attention: usize =
            self.windows.iter().map(|w| w.unwrap_or(context).min(context) * self.attention_size()).sum();
        6.0 * (matrices + attention) as f64
    }

    /// Refuses shapes that cannot work, naming the field and the way out.
    pub fn validate(&self) -> Result<()> {
        let fields = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            ("head_dim", self.head_dim),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        if let Some((name, _)) = fields.iter().find(|(_, value)| *value == 0) {
            return Err(Error::usage(format!("model.{name} is 0")).with_hint("give it a positive value"));
        }
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads) {
            let what = format!(
                "{} attention heads do not divide into {} key/value heads",
                self.num_attention_heads, self.num_key_value_heads
            );
            return Err(Error::usage(what).with_hint("choose --kv-heads so that it divides --heads"));
        }
        if !self.head_dim.is_multiple_of(2) {
            let what = format!("head_dim {} is odd, but rotary positions turn pairs", self.head_dim);
            return Err(Error::usage(what).with_hint("choose an even model.head_dim"));
        }
        if self.head_dim > MAX_DIM {
            let what = format!("head_dim {} is larger than {MAX_DIM}", self.head_dim);
            return Err(Error::usage(what).with_hint("use more and narrower heads"));
        }
        if self.windows.len() != self.num_hidden_layers {
            let what = format!("{} layer types for {} layers", self.windows.len(), self.num_hidden_layers);
            return Err(Error::usage(what).with_hint("give one entry a layer, or none"));
        }
        if self.windows.contains(&Some(0)) {
            return Err(Error::usage("a sliding window of 0 keys sees nothing").with_hint("use at least 1"));
        }
        Ok(())
    }
}
