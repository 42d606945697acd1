//! The decoder written once more in plain candle ops, in f64: no fused op, no tape, masks in full. The oracle for
//! logits and, through candle's autograd, for every gradient.

use std::collections::BTreeMap;

use candle_core::{D, DType, Device, Result, Tensor, Var};
use gpt::model::config::{GptConfig, ModelType};
use gpt::random::{Purpose, Stream};

/// Weights by Hugging Face name, as f64 variables.
pub type Weights = BTreeMap<String, Var>;

/// A small config that uses everything: grouped heads, a window on every other layer, an odd feed-forward width.
pub fn small_config(model_type: ModelType, tied: bool) -> GptConfig {
    let window = if model_type == ModelType::Qwen3 { Some(5) } else { None };
    GptConfig {
        model_type,
        vocab_size: 64,
        hidden_size: 24,
        intermediate_size: 40,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 8,
        max_position_embeddings: 40,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        tie_word_embeddings: tied,
        windows: vec![window, None],
    }
}

/// Random f32 weights, large enough that every part of the model matters.
pub fn random_weight(name: &str, shape: &[usize]) -> Vec<f32> {
    let stream = Stream::new(5, Purpose::Test);
    let salt = name.bytes().fold(7u64, |h, b| (h.wrapping_mul(31) + u64::from(b)) & 0xFF_FFFF);
    let (centre, spread) = if shape.len() == 1 { (1.0, 0.2) } else { (0.0, 0.25) };
    (0..shape.iter().product::<usize>()).map(|i| centre + spread * stream.normal(salt, i as u32)).collect()
}

/// Logits (B, T, V) of `ids` (B rows of equal length).
pub fn logits(config: &GptConfig, weights: &Weights, ids: &[Vec<u32>]) -> Result<Tensor> {
    logits_of(config, &|name| weights[name].as_tensor().clone(), ids)
}

/// The same for weights that are made of variables.
pub fn logits_of(config: &GptConfig, w: &dyn Fn(&str) -> Tensor, ids: &[Vec<u32>]) -> Result<Tensor> {
    let (batch, seq) = (ids.len(), ids[0].len());
    let flat = Tensor::from_vec(ids.concat(), batch * seq, &Device::Cpu)?;
    let mut x = w("model.embed_tokens.weight").index_select(&flat, 0)?.reshape((batch, seq, config.hidden_size))?;
    for (layer, window) in config.windows.iter().enumerate() {
        let w = |name: &str| w(&format!("model.layers.{layer}.{name}.weight"));
        let h = norm(config, &x, &w("input_layernorm"))?;
        let heads = |name: &str, n: usize| {
            linear(&h, &w(&format!("self_attn.{name}_proj")))?
                .reshape((batch, seq, n, config.head_dim))?
                .transpose(1, 2)
        };
        let (mut q, mut k) = (heads("q", config.num_attention_heads)?, heads("k", config.num_key_value_heads)?);
        if config.qk_norm() {
            q = norm(config, &q, &w("self_attn.q_norm"))?;
            k = norm(config, &k, &w("self_attn.k_norm"))?;
        }
        let (q, k) = (rotate(config, &q)?, repeat(config, &rotate(config, &k)?)?);
        let v = repeat(config, &heads("v", config.num_key_value_heads)?)?;
        let scores = (q.contiguous()?.matmul(&k.transpose(2, 3)?.contiguous()?)? / (config.head_dim as f64).sqrt())?;
        let scores = scores.broadcast_add(&mask(seq, *window)?)?;
        let p = softmax(&scores)?;
        let attended = p.matmul(&v.contiguous()?)?.transpose(1, 2)?.reshape((batch, seq, config.attention_size()))?;
        x = (x + linear(&attended, &w("self_attn.o_proj"))?)?;
        let h = norm(config, &x, &w("post_attention_layernorm"))?;
        let gate = linear(&h, &w("mlp.gate_proj"))?;
        let gated = ((&gate / (gate.neg()?.exp()? + 1.0)?)? * linear(&h, &w("mlp.up_proj"))?)?;
        x = (x + linear(&gated, &w("mlp.down_proj"))?)?;
    }
    let head = if config.tie_word_embeddings { "model.embed_tokens.weight" } else { "lm_head.weight" };
    linear(&norm(config, &x, &w("model.norm.weight"))?, &w(head))
}

/// Sum of -ln p of `targets` under `logits`.
pub fn nll(logits: &Tensor, targets: &[Vec<u32>]) -> Result<Tensor> {
    let targets = Tensor::from_vec(targets.concat(), (targets.concat().len(), 1), &Device::Cpu)?;
    let logits = logits.flatten_to(1)?;
    let max = logits.max_keepdim(D::Minus1)?.detach();
    let shifted = logits.broadcast_sub(&max)?;
    let log_sum = shifted.exp()?.sum_keepdim(D::Minus1)?.log()?;
    (log_sum - shifted.gather(&targets, 1)?)?.sum_all()
}

fn linear(x: &Tensor, w: &Tensor) -> Result<Tensor> {
    let (batch, seq, columns) = x.dims3()?;
    x.reshape((batch * seq, columns))?.matmul(&w.t()?)?.reshape((batch, seq, w.dim(0)?))
}

fn norm(config: &GptConfig, x: &Tensor, w: &Tensor) -> Result<Tensor> {
    let scale = (x.sqr()?.mean_keepdim(D::Minus1)? + f64::from(config.rms_norm_eps))?.sqrt()?;
    x.broadcast_div(&scale)?.broadcast_mul(w)
}

/// Pairs (i, i + D/2) turned by position * theta^(-2i/D), as Hugging Face does.
fn rotate(config: &GptConfig, x: &Tensor) -> Result<Tensor> {
    let (seq, half) = (x.dim(2)?, config.head_dim / 2);
    let angle = |t: usize, i: usize| t as f64 * config.rope_theta.powf(-2.0 * i as f64 / config.head_dim as f64);
    let table = |f: fn(f64) -> f64| {
        let values: Vec<f64> = (0..seq).flat_map(|t| (0..half).map(move |i| f(angle(t, i)))).collect();
        Tensor::from_vec(values, (seq, half), &Device::Cpu)
    };
    let (cos, sin) = (table(f64::cos)?, table(f64::sin)?);
    let (a, b) = (x.narrow(3, 0, half)?, x.narrow(3, half, half)?);
    let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let second = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
    Tensor::cat(&[first, second], 3)
}

/// Each key/value head for all query heads of its group.
fn repeat(config: &GptConfig, x: &Tensor) -> Result<Tensor> {
    let group = config.num_attention_heads / config.num_key_value_heads;
    let (batch, heads, seq, dim) = x.dims4()?;
    x.unsqueeze(2)?.expand((batch, heads, group, seq, dim))?.reshape((batch, heads * group, seq, dim))
}

/// 0 where key j is visible to query i, a large negative number elsewhere.
fn mask(seq: usize, window: Option<usize>) -> Result<Tensor> {
    let visible = |i: usize, j: usize| j <= i && window.is_none_or(|w| j + w > i);
    let values: Vec<f64> =
        (0..seq).flat_map(|i| (0..seq).map(move |j| if visible(i, j) { 0.0 } else { -1e30 })).collect();
    Tensor::from_vec(values, (seq, seq), &Device::Cpu)
}

fn softmax(x: &Tensor) -> Result<Tensor> {
    let shifted = x.broadcast_sub(&x.max_keepdim(D::Minus1)?.detach())?.exp()?;
    shifted.broadcast_div(&shifted.sum_keepdim(D::Minus1)?)
}

/// `random_weight` as f64 variables for every weight that a model of `config` asks for.
pub fn weights(config: &GptConfig) -> Weights {
    let mut weights = Weights::new();
    gpt::model::gpt::Gpt::build(config, &mut |name, shape| {
        let data = random_weight(name, shape);
        let wide: Vec<f64> = data.iter().map(|x| f64::from(*x)).collect();
        let tensor = Tensor::from_vec(wide, shape, &Device::Cpu)?.to_dtype(DType::F64)?;
        weights.insert(name.to_owned(), Var::from_tensor(&tensor)?);
        Ok(data)
    })
    .unwrap();
    weights
}
