//! The weights of a model packed for decoding, and the forward pass as a list of decode ops.
//!
//! Used by `Engine` only. Weights come one by one under Hugging Face's names and are dropped once packed.

use crate::error::{Error, Result};
use crate::model::config::GptConfig;
use crate::ops::ctx::Ctx;
use crate::ops::decode::aligned::Arena;
use crate::ops::decode::attend::attend;
use crate::ops::decode::head::{Head, embed, head};
use crate::ops::decode::layer::{down, gate_up, out, project};
use crate::ops::decode::pages::Table;
use crate::ops::decode::weight::{Weight, WeightType};
use crate::ops::decode::{Lane, Layer, Sizes, Tables, Workspace};
use crate::ops::heads::Heads;

use super::row::Row;

pub struct Model {
    layers: Vec<Layer>,
    head: Head,
}

/// The sizes of the decode list that a config asks for.
pub fn sizes(config: &GptConfig) -> Sizes {
    Sizes {
        heads: Heads {
            attention: config.num_attention_heads,
            key_value: config.num_key_value_heads,
            dim: config.head_dim,
        },
        hidden_size: config.hidden_size,
        intermediate_size: config.intermediate_size,
        rms_norm_eps: config.rms_norm_eps,
        rope_theta: config.rope_theta,
    }
}

/// Asks the caller for weights and holds him to the shapes.
struct Source<'a, F> {
    get: F,
    config: &'a GptConfig,
    kind: WeightType,
}

impl<F: FnMut(&str, &[usize]) -> Result<Vec<f32>>> Source<'_, F> {
    fn get(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let data = (self.get)(name, shape)?;
        let len = shape.iter().product::<usize>();
        if data.len() != len {
            return Err(Error::op("engine", format!("{len} elements of `{name}`"), data.len().to_string()));
        }
        Ok(data)
    }

    fn layer(&mut self, arena: &mut Arena, index: usize) -> Result<Layer> {
        let (config, kind) = (self.config, self.kind);
        let (c, f, d) = (config.hidden_size, config.intermediate_size, config.head_dim);
        let (q, kv) = (config.attention_size(), config.num_key_value_heads * d);
        let name = |part: &str| format!("model.layers.{index}.{part}.weight");
        let mut get = |part: &str, shape: &[usize]| self.get(&name(part), shape);
        let qkv =
            [get("self_attn.q_proj", &[q, c])?, get("self_attn.k_proj", &[kv, c])?, get("self_attn.v_proj", &[kv, c])?];
        let qk_norm = match config.qk_norm() {
            true => Some([get("self_attn.q_norm", &[d])?, get("self_attn.k_norm", &[d])?]),
            false => None,
        };
        Ok(Layer {
            input_layernorm: get("input_layernorm", &[c])?,
            qkv_proj: Weight::pack(arena, kind, &qkv.each_ref().map(|w| &w[..]), c)?,
            qk_norm,
            o_proj: Weight::pack(arena, kind, &[&get("self_attn.o_proj", &[c, q])?], q)?,
            post_attention_layernorm: get("post_attention_layernorm", &[c])?,
            gate_up_proj: Weight::pack(
                arena,
                kind,
                &[&get("mlp.gate_proj", &[f, c])?, &get("mlp.up_proj", &[f, c])?],
                c,
            )?,
            down_proj: Weight::pack(arena, kind, &[&get("mlp.down_proj", &[c, f])?], f)?,
        })
    }

    fn head(&mut self, arena: &mut Arena) -> Result<Head> {
        let (v, c, kind) = (self.config.vocab_size, self.config.hidden_size, self.kind);
        let table = self.get("model.embed_tokens.weight", &[v, c])?;
        let norm = self.get("model.norm.weight", &[c])?;
        if self.config.tie_word_embeddings {
            return Ok(Head { embed_tokens: None, norm, lm_head: Weight::pack(arena, kind, &[&table], c)? });
        }
        let lm_head = Weight::pack(arena, kind, &[&self.get("lm_head.weight", &[v, c])?], c)?;
        Ok(Head { embed_tokens: Some(table), norm, lm_head })
    }
}

/// The rows of a step as the decode ops of one layer see them.
struct Batch<'a, 'r> {
    rows: &'a mut [&'r mut Row],
    layer: usize,
}

impl Tables for Batch<'_, '_> {
    fn table(&self, row: usize) -> &Table {
        self.rows[row].cache.table(self.layer)
    }

    fn table_mut(&mut self, row: usize) -> &mut Table {
        self.rows[row].cache.table_mut(self.layer)
    }
}

impl Model {
    pub fn load(
        config: &GptConfig,
        kind: WeightType,
        get: impl FnMut(&str, &[usize]) -> Result<Vec<f32>>,
    ) -> Result<Self> {
        config.validate()?;
        let mut source = Source { get, config, kind };
        let arena = &mut Arena::default();
        let head = source.head(arena)?;
        let layers = (0..config.num_hidden_layers).map(|i| source.layer(arena, i)).collect::<Result<_>>()?;
        Ok(Self { layers, head })
    }

    /// Bytes that one step reads, however many lanes it has; the lanes' token vectors come on top.
    pub fn bytes(&self) -> usize {
        self.head.bytes() + self.layers.iter().map(Layer::bytes).sum::<usize>()
    }

    /// Runs the lanes through all layers and appends their keys and values to the rows; the lanes' ids must be < V.
    pub fn run(
        &self,
        ctx: &mut Ctx,
        ws: &mut Workspace,
        rows: &mut [&mut Row],
        lanes: &[Lane],
        ids: &[u32],
    ) -> Result<()> {
        embed(ctx, &self.head, ws, lanes, ids)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let mut batch = Batch { rows, layer: index };
            project(ctx, layer, ws, &mut batch)?;
            attend(ctx, ws, &batch)?;
            out(ctx, layer, ws)?;
            gate_up(ctx, layer, ws)?;
            down(ctx, layer, ws)?;
        }
        Ok(())
    }

    /// Logits (outputs, V) of some of the lanes of the last `run`.
    pub fn logits<'w>(&self, ctx: &mut Ctx, ws: &'w mut Workspace, outputs: &[usize]) -> Result<&'w mut [f32]> {
        head(ctx, &self.head, ws, outputs)
    }
}
