//! The weights of a model packed for decoding, and the forward pass as a list of decode ops.
//!
//! Used by `Engine` only. Weights come one by one under Hugging Face's names and are dropped once packed.

use candle_core::Tensor;

use crate::error::{Error, Result};
use crate::model::config::GptConfig;
use crate::ops::ctx::Ctx;
use crate::ops::decode::aligned::Arena;
use crate::ops::decode::gpu::weight::DeviceWeight;
use crate::ops::decode::gpu::{Decoder, DeviceHead, DeviceLayer};
use crate::ops::decode::head::Head;
use crate::ops::decode::pages::Table;
use crate::ops::decode::weight::{Weight, WeightType, nanoseconds};
use crate::ops::decode::{Lane, Layer, Sizes, Tables, Workspace};
use crate::ops::heads::Heads;
use crate::ops::storage;

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

    fn layer(&mut self, index: usize) -> Result<LayerParts> {
        let config = self.config;
        let (c, f, d) = (config.hidden_size, config.intermediate_size, config.head_dim);
        let (q, kv) = (config.attention_size(), config.num_key_value_heads * d);
        let name = |part: &str| format!("model.layers.{index}.{part}.weight");
        let mut get = |part: &str, shape: &[usize]| self.get(&name(part), shape);
        Ok(LayerParts {
            input_layernorm: get("input_layernorm", &[c])?,
            qkv: [
                get("self_attn.q_proj", &[q, c])?,
                get("self_attn.k_proj", &[kv, c])?,
                get("self_attn.v_proj", &[kv, c])?,
            ],
            qk_norm: match config.qk_norm() {
                true => Some([get("self_attn.q_norm", &[d])?, get("self_attn.k_norm", &[d])?]),
                false => None,
            },
            o_proj: get("self_attn.o_proj", &[c, q])?,
            post_attention_layernorm: get("post_attention_layernorm", &[c])?,
            gate_proj: get("mlp.gate_proj", &[f, c])?,
            up_proj: get("mlp.up_proj", &[f, c])?,
            down_proj: get("mlp.down_proj", &[c, f])?,
        })
    }

    fn head(&mut self) -> Result<HeadParts> {
        let (v, c) = (self.config.vocab_size, self.config.hidden_size);
        let table = self.get("model.embed_tokens.weight", &[v, c])?;
        let norm = self.get("model.norm.weight", &[c])?;
        let own = !self.config.tie_word_embeddings;
        let lm_head = own.then(|| self.get("lm_head.weight", &[v, c])).transpose()?;
        Ok(HeadParts { table, norm, lm_head })
    }
}

/// The ends of a model as they come.
struct HeadParts {
    table: Vec<f32>,
    norm: Vec<f32>,
    /// If it is not the table.
    lm_head: Option<Vec<f32>>,
}

/// The weights of a layer as they come.
struct LayerParts {
    input_layernorm: Vec<f32>,
    qkv: [Vec<f32>; 3],
    qk_norm: Option<[Vec<f32>; 2]>,
    o_proj: Vec<f32>,
    post_attention_layernorm: Vec<f32>,
    gate_proj: Vec<f32>,
    up_proj: Vec<f32>,
    down_proj: Vec<f32>,
}

impl LayerParts {
    fn pack(self, arena: &mut Arena, kind: WeightType, config: &GptConfig) -> Result<Layer> {
        let (c, q, f) = (config.hidden_size, config.attention_size(), config.intermediate_size);
        Ok(Layer {
            input_layernorm: self.input_layernorm,
            qkv_proj: Weight::pack(arena, kind, &self.qkv.each_ref().map(|w| &w[..]), c)?,
            qk_norm: self.qk_norm,
            o_proj: Weight::pack(arena, kind, &[&self.o_proj], q)?,
            post_attention_layernorm: self.post_attention_layernorm,
            gate_proj: Weight::pack(arena, kind, &[&self.gate_proj], c)?,
            up_proj: Weight::pack(arena, kind, &[&self.up_proj], c)?,
            down_proj: Weight::pack(arena, kind, &[&self.down_proj], f)?,
        })
    }

    fn upload(self, kind: WeightType, config: &GptConfig, own_window: Option<usize>) -> Result<DeviceLayer> {
        let (c, q, f) = (config.hidden_size, config.attention_size(), config.intermediate_size);
        Ok(DeviceLayer {
            input_layernorm: vector(self.input_layernorm),
            qkv_proj: DeviceWeight::pack(kind, &self.qkv.each_ref().map(|w| &w[..]), c)?,
            qk_norm: self.qk_norm.map(|norms| norms.map(vector)),
            o_proj: DeviceWeight::pack(kind, &[&self.o_proj], q)?,
            post_attention_layernorm: vector(self.post_attention_layernorm),
            gate_proj: DeviceWeight::pack(kind, &[&self.gate_proj], c)?,
            up_proj: DeviceWeight::pack(kind, &[&self.up_proj], c)?,
            down_proj: DeviceWeight::pack(kind, &[&self.down_proj], f)?,
            own_window,
        })
    }
}

fn vector(numbers: Vec<f32>) -> Tensor {
    let len = numbers.len();
    storage::tensor(numbers, len)
}

/// The decode list of a GPU for these weights.
pub fn upload(
    config: &GptConfig,
    kind: WeightType,
    get: impl FnMut(&str, &[usize]) -> Result<Vec<f32>>,
) -> Result<Decoder> {
    config.validate()?;
    let mut source = Source { get, config };
    let HeadParts { table, norm, lm_head: own } = source.head()?;
    let pack = |kind, matrix: &[f32]| DeviceWeight::pack(kind, &[matrix], config.hidden_size);
    let head = match own {
        None => DeviceHead { embed_tokens: None, norm: vector(norm), lm_head: pack(kind, &table)? },
        Some(lm_head) => DeviceHead {
            embed_tokens: Some(pack(WeightType::F32, &table)?),
            norm: vector(norm),
            lm_head: pack(kind, &lm_head)?,
        },
    };
    drop(table);
    let windows = config.windows.iter().enumerate();
    let layers = windows.map(|(index, own)| source.layer(index)?.upload(kind, config, *own)).collect::<Result<_>>()?;
    Ok(Decoder::new(sizes(config), layers, head))
}

/// The rows of a step as the decode ops see them.
pub struct Batch<'a, 'r>(pub &'a [&'r mut Row]);

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
        let mut source = Source { get, config };
        let arena = &mut Arena::default();
        let HeadParts { table, norm, lm_head: own } = source.head()?;
        let lm_head = Weight::pack(arena, kind, &[own.as_ref().unwrap_or(&table)], config.hidden_size)?;
        let head = Head { embed_tokens: own.is_some().then_some(table), norm, lm_head };
        let layers = (0..config.num_hidden_layers).map(|i| source.layer(i)?.pack(arena, kind, config));
        let layers = layers.collect::<Result<_>>()?;
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
