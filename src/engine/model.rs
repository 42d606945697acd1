//! The weights of a model packed for decoding, and the forward pass as a list of decode ops.
//!
//! Used by `Engine` only. Weights come one by one under Hugging Face's names and are dropped once packed.

use crate::error::{Error, Result};
use crate::model::config::GptConfig;
use crate::ops::ctx::Ctx;
use crate::ops::decode::aligned::Arena;
use crate::ops::decode::head::Head;
use crate::ops::decode::pages::Table;
use crate::ops::decode::weight::{Weight, WeightType, nanoseconds};
use crate::ops::decode::{Lane, Layer, Sizes, Tables, Workspace};
use crate::ops::heads::Heads;

use super::row::Row;

pub struct Model {
    layers: Vec<Layer>,
    head: Head,
    /// H D
    attention_size: usize,
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
            gate_proj: Weight::pack(arena, kind, &[&get("mlp.gate_proj", &[f, c])?], c)?,
            up_proj: Weight::pack(arena, kind, &[&get("mlp.up_proj", &[f, c])?], c)?,
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

/// The rows of a step as the decode ops see them.
struct Batch<'a, 'r>(&'a [&'r mut Row]);

impl Tables for Batch<'_, '_> {
    fn table(&self, layer: usize, row: usize) -> &Table {
        self.0[row].cache.table(layer)
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
        Ok(Self { layers, head, attention_size: config.attention_size() })
    }

    /// Bytes that one step reads, however many lanes it has; the lanes' token vectors come on top.
    pub fn bytes(&self) -> usize {
        self.head.bytes() + self.layers.iter().flat_map(Layer::bytes).sum::<usize>()
    }

    /// Keeps the matrices in main memory.
    pub fn lock(&self) -> std::io::Result<()> {
        let layers = self.layers.iter().flat_map(Layer::matrices);
        layers.chain([&self.head.lm_head]).try_for_each(Weight::lock)
    }

    /// Runs the lanes through all layers and appends their keys and values to the rows; the lanes' ids must be < V. Then
    /// the workspace holds the logits (outputs, V) of some of the lanes.
    pub fn run(
        &self,
        ctx: &mut Ctx,
        ws: &mut Workspace,
        rows: &mut [&mut Row],
        (lanes, ids): (&[Lane], &[u32]),
        outputs: &[usize],
    ) {
        ws.begin(lanes, outputs, self.head.lm_head.outputs(), ctx.team().threads());
        ws.embed(&self.head, ids);
        lanes.iter().for_each(|lane| rows[lane.row].cache.reserve(lane.position));
        self.count(ctx, ws.token_bytes() * lanes.len(), outputs);
        let batch = Batch(rows);
        let pass = ws.pass(ctx.family(), &batch);
        ctx.team().run(self.nanoseconds(&batch, lanes), 5 * self.layers.len() + 1, |member| {
            self.layers.iter().enumerate().for_each(|(index, layer)| pass.layer(member, layer, index));
            if !outputs.is_empty() {
                pass.head(member, &self.head);
            }
        });
    }

    /// Notes the ops of a pass and what they read.
    fn count(&self, ctx: &mut Ctx, token_bytes: usize, outputs: &[usize]) {
        ctx.launch(token_bytes);
        self.layers.iter().flat_map(Layer::bytes).for_each(|bytes| ctx.launch(bytes));
        if !outputs.is_empty() {
            ctx.launch(self.head.bytes());
        }
    }

    /// What a pass takes on one thread, roughly.
    fn nanoseconds(&self, batch: &Batch, lanes: &[Lane]) -> f64 {
        let work = self.layers.iter().map(Layer::parameters).sum::<usize>() * lanes.len();
        let keys: usize = lanes.iter().map(|lane| lane.position.min(batch.table(0, lane.row).window())).sum();
        // Keys and values, at what one core reads and multiplies in a nanosecond.
        nanoseconds(self.bytes(), work) + (keys * self.layers.len() * self.attention_size * 8) as f64 / 40.0
    }
}
