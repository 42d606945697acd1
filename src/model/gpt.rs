//! The whole decoder: its parameters, their initial values, and the forward that training differentiates.
//!
//! Called by the trainer and by eval; the engine has the other forward (decode) over the same parameters, and a test holds
//! them equal. Block (pre-norm, Llama style): x += out(attention(norm(x))); x += down(swiglu(norm(x))).

use std::sync::Arc;

use super::config::GptConfig;
use candle_core::Tensor;

use crate::error::{Error, Result};
use crate::nn::attention::{Layout, SelfAttention};
use crate::nn::dropout::Dropout;
use crate::nn::embedding::Embedding;
use crate::nn::linear::Linear;
use crate::nn::lora::{self, Lora, LoraSettings};
use crate::nn::mlp::Mlp;
use crate::nn::norm::RmsNorm;
use crate::nn::parameter::{NamedTensor, Parameter, Part, Role, Whole};
use crate::ops::blocks::Format;
use crate::ops::cross_entropy::{self, Output, Wanted};
use crate::ops::ctx::{Ctx, Value};
use crate::ops::gemm::Store;
use crate::ops::{heads::Heads, rotary};
use crate::random::{Purpose, Stream};
use crate::tape::{Tape, Var};

/// B sequences, row after row. A target of `cross_entropy::IGNORE` is not predicted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    pub inputs: Vec<u32>,
    pub targets: Vec<u32>,
    pub layout: Layout,
    /// Number of the first sequence in the run's stream of windows.
    pub window: u64,
}

/// What is made of the last hidden states (N, C) under the head (V, C), and the gradients that are wanted of it.
pub type HeadLoss<'a> = dyn FnMut(&mut Ctx, &Tensor, &Tensor, Wanted) -> Result<Output> + 'a;

/// A model that is adapted: what stays as it is, and what is learned beside it.
#[derive(Clone, Debug)]
pub struct Adaptation {
    /// Blocks for the matrices of the base; f32 if not given.
    pub base: Option<Format>,
    pub lora: LoraSettings,
    /// Of the initial values of the factors.
    pub seed: u64,
}

impl Batch {
    /// Sequences of `seq` tokens, each of which sees all before it.
    pub fn new(inputs: Vec<u32>, targets: Vec<u32>, seq: usize) -> Self {
        Self { inputs, targets, layout: Layout::of(seq), window: 0 }
    }

    /// Targets that count.
    pub fn valid(&self) -> usize {
        self.targets.iter().filter(|t| **t != cross_entropy::IGNORE).count()
    }
}

#[derive(Clone, Debug)]
struct Block {
    index: u64,
    input_norm: RmsNorm,
    attention: SelfAttention,
    post_attention_norm: RmsNorm,
    mlp: Mlp,
}

impl Block {
    /// x (N, C) -> (N, C).
    fn forward(&self, ctx: &mut Ctx, tape: &mut Tape, x: &Var, layout: &Layout, dropout: Dropout) -> Result<Var> {
        let normed = self.input_norm.forward(ctx, tape, x)?;
        let heads = self.attention.forward(ctx, tape, &normed, layout, dropout)?;
        let heads = dropout.forward(ctx, tape, heads, 2 * self.index + 1)?;
        let change = self.attention.out.forward(ctx, tape, &heads, None, dropout)?;
        let (x, normed) = self.post_attention_norm.forward_sum(ctx, tape, x, &change)?;
        let gated = self.mlp.forward(ctx, tape, &normed, dropout)?;
        let gated = dropout.forward(ctx, tape, gated, 2 * self.index + 2)?;
        self.mlp.down.forward(ctx, tape, &gated, Some(&x), dropout)
    }
}

#[derive(Debug)]
pub struct Gpt {
    pub config: GptConfig,
    /// Whether blocks are computed again in the backward pass instead of keeping their activations.
    pub recompute: bool,
    embedding: Embedding,
    blocks: Vec<Arc<Block>>,
    norm: RmsNorm,
    head: Arc<Parameter>,
    head_lora: Option<Arc<Lora>>,
    parameters: Vec<Arc<Parameter>>,
    adaptation: Option<Adaptation>,
}

/// Where a model's initial weights come from: each row range by name and shape (rows, columns), or (length).
pub type Source<'a> = dyn FnMut(&str, &[usize]) -> Result<Vec<f32>> + 'a;

impl Gpt {
    /// A model with random weights of `seed`.
    pub fn random(config: &GptConfig, seed: u64) -> Result<Self> {
        Self::build(config, &mut random_weights(config, seed))
    }

    /// A model whose weights `source` gives, asked for under Hugging Face's names; all are trained.
    pub fn build(config: &GptConfig, source: &mut Source) -> Result<Self> {
        Self::build_as(config, None, source)
    }

    /// The same, frozen, with adapters that are trained.
    pub fn adapted(config: &GptConfig, adaptation: &Adaptation, source: &mut Source) -> Result<Self> {
        adaptation.lora.validate()?;
        Self::build_as(config, Some(adaptation), source)
    }

    fn build_as(config: &GptConfig, adaptation: Option<&Adaptation>, source: &mut Source) -> Result<Self> {
        config.validate()?;
        let mut made = Builder { source, parameters: Vec::new(), adaptation, sites: 0 };
        let c = config.hidden_size;
        let table = Arc::new(rotary::Table::new(config.max_position_embeddings, config.head_dim, config.rope_theta)?);
        let embedding = made.matrix(Role::Table, &[("model.embed_tokens.weight", config.vocab_size)], c)?;
        let mut blocks = Vec::new();
        for index in 0..config.num_hidden_layers {
            blocks.push(Arc::new(made.block(config, index, &table)?));
        }
        let norm = RmsNorm { weight: made.gain("model.norm.weight", c)?, eps: config.rms_norm_eps };
        let head = match config.tie_word_embeddings {
            true => Arc::clone(&embedding),
            false => made.matrix(Role::Table, &[("lm_head.weight", config.vocab_size)], c)?,
        };
        // A tied head is corrected as a head; the table stays.
        let head_part = [Part { name: "lm_head.weight".into(), rows: 0..config.vocab_size }];
        let head_lora = made.lora(&head_part, c);
        let parameters = made.parameters;
        let embedding = Embedding { weight: embedding };
        let (config, adaptation) = (config.clone(), adaptation.cloned());
        Ok(Self { config, recompute: false, embedding, blocks, norm, head, head_lora, parameters, adaptation })
    }

    /// The head (V, C) as it works: with its correction, if it has one.
    pub fn head(&self, ctx: &mut Ctx) -> Result<Whole<'_>> {
        Ok(match &self.head_lora {
            Some(lora) => Whole::Made(lora.merged(ctx, &self.head)?),
            None => self.head.whole(ctx)?,
        })
    }

    /// All weights in a fixed order, a tied one once.
    pub fn parameters(&self) -> &[Arc<Parameter>] {
        &self.parameters
    }

    /// Those that are trained: all, or the adapters'.
    pub fn trainable(&self) -> impl Iterator<Item = &Arc<Parameter>> + Clone {
        self.parameters.iter().filter(|p| p.is_trainable())
    }

    /// What is learned beside a frozen base, if this is a model with adapters.
    pub fn adaptation(&self) -> Option<&Adaptation> {
        self.adaptation.as_ref()
    }

    /// The weights by name; of a model with adapters those of the adapters.
    pub fn tensors(&self) -> Result<Vec<NamedTensor>> {
        let mut tensors = Vec::new();
        for parameter in self.trainable() {
            tensors.extend(parameter.split(parameter.master())?);
        }
        Ok(tensors)
    }

    /// Name and shape of every tensor of an adapter, in the order of the parameters.
    pub fn adapter_shapes(config: &GptConfig, settings: &LoraSettings) -> Vec<(String, Vec<usize>)> {
        let mut weights = Self::tensor_shapes(config);
        if config.tie_word_embeddings {
            weights.push(("lm_head.weight".to_owned(), vec![config.vocab_size, config.hidden_size]));
        }
        weights.retain(|(name, _)| settings.corrects(name));
        let factors = |(name, shape): (String, Vec<usize>)| {
            let [a, b] = lora::names(&name);
            [(a, vec![settings.rank, shape[1]]), (b, vec![shape[0], settings.rank])]
        };
        weights.into_iter().flat_map(factors).collect()
    }

    /// Name and shape of every tensor of a model of `config`, in the order of the parameters.
    pub fn tensor_shapes(config: &GptConfig) -> Vec<(String, Vec<usize>)> {
        let (c, f, d, v) = (config.hidden_size, config.intermediate_size, config.head_dim, config.vocab_size);
        let (q, kv) = (config.attention_size(), config.num_key_value_heads * d);
        let mut shapes = vec![("model.embed_tokens.weight".to_owned(), vec![v, c])];
        for layer in 0..config.num_hidden_layers {
            let mut add = |part: &str, shape: &[usize]| {
                shapes.push((format!("model.layers.{layer}.{part}.weight"), shape.to_vec()));
            };
            add("input_layernorm", &[c]);
            [("q", q), ("k", kv), ("v", kv)].iter().for_each(|(p, n)| add(&format!("self_attn.{p}_proj"), &[*n, c]));
            if config.qk_norm() {
                ["q", "k"].iter().for_each(|p| add(&format!("self_attn.{p}_norm"), &[d]));
            }
            add("self_attn.o_proj", &[c, q]);
            add("post_attention_layernorm", &[c]);
            add("mlp.gate_proj", &[f, c]);
            add("mlp.up_proj", &[f, c]);
            add("mlp.down_proj", &[c, f]);
        }
        shapes.push(("model.norm.weight".to_owned(), vec![c]));
        if !config.tie_word_embeddings {
            shapes.push(("lm_head.weight".to_owned(), vec![v, c]));
        }
        shapes
    }

    /// The normed output of the last block, (N, C): what the head reads.
    pub fn hidden(
        &self,
        ctx: &mut Ctx,
        tape: &mut Tape,
        inputs: &[u32],
        layout: &Layout,
        dropout: Dropout,
    ) -> Result<Var> {
        let seq = layout.seq;
        if seq == 0 || !inputs.len().is_multiple_of(seq) || seq > self.config.max_position_embeddings {
            let expected = format!("whole sequences of 1 to {} tokens", self.config.max_position_embeddings);
            return Err(Error::op("gpt", expected, format!("{} tokens in sequences of {seq}", inputs.len())));
        }
        let mut x = self.embedding.forward(ctx, tape, inputs)?;
        x = dropout.forward(ctx, tape, x, 0)?;
        for block in &self.blocks {
            x = if self.recompute && tape.is_recording() {
                let (block, layout) = (Arc::clone(block), layout.clone());
                tape.checkpoint(ctx, &x, move |ctx, tape, x| block.forward(ctx, tape, x, &layout, dropout))?
            } else {
                block.forward(ctx, tape, &x, layout, dropout)?
            };
        }
        self.norm.forward(ctx, tape, &x)
    }

    /// Forward and backward of one micro-batch: adds to the gradient slots and returns the loss (1), the sum over valid
    /// targets of -ln p times `scale`.
    pub fn accumulate(&self, ctx: &mut Ctx, batch: &Batch, scale: f32, dropout: Dropout) -> Result<Value> {
        self.accumulate_with(ctx, batch, dropout, &mut |ctx, x, w, wanted| {
            cross_entropy::forward(ctx, x, w, &batch.targets, scale, wanted)
        })
    }

    /// The same for any loss of the head.
    pub fn accumulate_with(
        &self,
        ctx: &mut Ctx,
        batch: &Batch,
        dropout: Dropout,
        loss: &mut HeadLoss,
    ) -> Result<Value> {
        let mut tape = Tape::new();
        let hidden = self.hidden(ctx, &mut tape, &batch.inputs, &batch.layout, dropout)?;
        let output = self.head_loss(ctx, hidden.value(), loss)?;
        let dx = output.dx.expect("it was asked for");
        tape.run(ctx, &hidden, dx)?;
        Ok(output.loss)
    }

    /// The loss with the gradient of x, and that of the head or of its correction into their slots.
    fn head_loss(&self, ctx: &mut Ctx, x: &Tensor, loss: &mut HeadLoss) -> Result<Output> {
        let head = self.head(ctx)?;
        if let Some(lora) = &self.head_lora {
            let whole = ctx.output(head.dtype(), head.shape())?;
            let output = loss(ctx, x, &head, Wanted::InputAndHead(&whole, Store::Set))?;
            lora.backward_merged(ctx, &whole)?;
            return Ok(output);
        }
        if !self.head.is_trainable() {
            return loss(ctx, x, &head, Wanted::Input);
        }
        let mut output = None;
        self.head.write_gradient(|dw, store| {
            output = Some(loss(ctx, x, &head, Wanted::InputAndHead(dw, store))?);
            Ok(())
        })?;
        Ok(output.expect("the closure ran, or its error was returned"))
    }

    /// What the head reads, (N, C), without dropout. Records nothing.
    pub fn states(&self, ctx: &mut Ctx, batch: &Batch) -> Result<Var> {
        self.hidden(ctx, &mut Tape::inference(), &batch.inputs, &batch.layout, Dropout::off())
    }

    /// -ln p of every target, (N); 0 where ignored. Records nothing.
    pub fn nll(&self, ctx: &mut Ctx, batch: &Batch) -> Result<Value> {
        let hidden = self.states(ctx, batch)?;
        let head = self.head(ctx)?;
        Ok(cross_entropy::forward(ctx, hidden.value(), &head, &batch.targets, 1.0, Wanted::None)?.nll)
    }
}

/// The initial weights of a model, to be asked for in the order of its parameters.
pub fn random_weights(config: &GptConfig, seed: u64) -> impl FnMut(&str, &[usize]) -> Result<Vec<f32>> {
    let (stream, layers) = (Stream::new(seed, Purpose::Init), config.num_hidden_layers);
    let mut position = 0;
    move |name, shape| {
        position += 1;
        let Some(std) = initial_std(name, shape, layers) else { return Ok(vec![1.0; shape.iter().product()]) };
        Ok((0..shape.iter().product::<usize>()).map(|i| std * stream.normal(position, i as u32)).collect())
    }
}

/// The standard deviation of a weight's initial values; `None` for a gain, which starts at one.
fn initial_std(name: &str, shape: &[usize], layers: usize) -> Option<f32> {
    let [_, columns] = shape else { return None };
    if name.contains("embed_tokens") || name.contains("lm_head") {
        return Some(0.02);
    }
    // Keeps the variance of an activation through a product; the projections that write to the residual stream start
    // smaller, so that its variance does not grow with depth (Radford et al., 2019).
    let std = 0.5 / (*columns as f32).sqrt();
    let writes = name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight");
    Some(if writes { std / (2.0 * layers as f32).sqrt() } else { std })
}

struct Builder<'a, 'b> {
    source: &'a mut Source<'b>,
    parameters: Vec<Arc<Parameter>>,
    adaptation: Option<&'a Adaptation>,
    /// Layers that can have adapters, so far.
    sites: u64,
}

impl Builder<'_, '_> {
    /// One buffer of `columns` columns from row ranges (name, rows).
    fn matrix(&mut self, role: Role, ranges: &[(&str, usize)], columns: usize) -> Result<Arc<Parameter>> {
        let (mut parts, mut data, mut row) = (Vec::new(), Vec::new(), 0);
        for (name, rows) in ranges {
            data.extend((self.source)(name, &[*rows, columns])?);
            parts.push(Part { name: (*name).to_owned(), rows: row..row + rows });
            row += rows;
        }
        let shape = [row, columns];
        Ok(self.keep(match self.adaptation {
            None => Parameter::new(role, parts, &shape, data),
            Some(adaptation) => Parameter::frozen(role, parts, &shape, data, adaptation.base)?,
        }))
    }

    /// A layer of row ranges (name, rows), with the correction that its adaptation asks for.
    fn linear(&mut self, ranges: &[(&str, usize)], columns: usize) -> Result<Linear> {
        let weight = self.matrix(Role::Matrix, ranges, columns)?;
        let lora = self.lora(&weight.parts, columns);
        Ok(Linear { weight, lora })
    }

    fn lora(&mut self, parts: &[Part], columns: usize) -> Option<Arc<Lora>> {
        let adaptation = self.adaptation?;
        self.sites += 1;
        let lora = Arc::new(Lora::new(&adaptation.lora, parts, columns, (adaptation.seed, self.sites))?);
        self.parameters.extend([Arc::clone(&lora.a), Arc::clone(&lora.b)]);
        Some(lora)
    }

    fn gain(&mut self, name: &str, len: usize) -> Result<Arc<Parameter>> {
        let data = (self.source)(name, &[len])?;
        let parts = vec![Part { name: name.to_owned(), rows: 0..len }];
        Ok(self.keep(match self.adaptation {
            None => Parameter::new(Role::Gain, parts, &[len], data),
            Some(_) => Parameter::frozen(Role::Gain, parts, &[len], data, None)?,
        }))
    }

    fn keep(&mut self, parameter: Parameter) -> Arc<Parameter> {
        let parameter = Arc::new(parameter);
        self.parameters.push(Arc::clone(&parameter));
        parameter
    }

    fn block(&mut self, config: &GptConfig, index: usize, table: &Arc<rotary::Table>) -> Result<Block> {
        let name = |part: &str| format!("model.layers.{index}.{part}.weight");
        let (c, f, d, eps) = (config.hidden_size, config.intermediate_size, config.head_dim, config.rms_norm_eps);
        let heads = Heads { attention: config.num_attention_heads, key_value: config.num_key_value_heads, dim: d };
        let (q, kv) = (config.attention_size(), config.num_key_value_heads * d);
        let input_norm = RmsNorm { weight: self.gain(&name("input_layernorm"), c)?, eps };
        let [q_name, k_name, v_name] = ["q", "k", "v"].map(|p| name(&format!("self_attn.{p}_proj")));
        let qkv = self.linear(&[(&q_name, q), (&k_name, kv), (&v_name, kv)], c)?;
        let norms = match config.qk_norm() {
            true => Some([self.gain(&name("self_attn.q_norm"), d)?, self.gain(&name("self_attn.k_norm"), d)?]),
            false => None,
        };
        let out = self.linear(&[(&name("self_attn.o_proj"), c)], q)?;
        let post_attention_norm = RmsNorm { weight: self.gain(&name("post_attention_layernorm"), c)?, eps };
        let gate_up = self.linear(&[(&name("mlp.gate_proj"), f), (&name("mlp.up_proj"), f)], c)?;
        let down = self.linear(&[(&name("mlp.down_proj"), c)], f)?;
        Ok(Block {
            index: index as u64,
            input_norm,
            attention: SelfAttention {
                qkv,
                out,
                norms,
                eps,
                heads,
                window: config.windows[index],
                table: Arc::clone(table),
            },
            post_attention_norm,
            mlp: Mlp { gate_up, down },
        })
    }
}
