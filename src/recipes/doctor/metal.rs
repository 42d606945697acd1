//! `gpt doctor --metal`: every kernel against the CPU, errors and speeds, for the first run on a Mac.
//!
//! What runs are the ops, with the same numbers on both; the tests run the same checks in an emulator, and hold them to use
//! every kernel of the table.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use candle_core::{DType, Tensor};

use crate::engine::sampler::Sampler;
use crate::engine::{Engine, RowSettings, Sampling, WeightType};
use crate::error::{Error, Result};
use crate::model::config::{GptConfig, ModelType};
use crate::model::gpt::random_weights;
use crate::nn::cache::{CacheSettings, CacheType, Quantization};
use crate::ops::attention::{self, Attention};
use crate::ops::cross_entropy::{self, Wanted};
use crate::ops::ctx::Ctx;
use crate::ops::decode::gpu::weight::{DeviceFormat, DeviceWeight, dequantise, embed};
use crate::ops::decode::gpu::weight::{Normed, gate_up_product, norm_product, residual_product};
use crate::ops::distillation::{self, Divergence, Settings, Teacher};
use crate::ops::dropout::{self, Mask};
use crate::ops::gemm::Store;
use crate::ops::gpu::{Arg, kernels};
use crate::ops::guard::{self, Guard};
use crate::ops::heads::Heads;
use crate::ops::linear::{self, Weight};
use crate::ops::lora::{self, Factors, Segment};
use crate::ops::scalars::{Scalar, Scalars};
use crate::ops::simd::Family;
use crate::ops::{adamw, add, embedding, gradient_norm, muon, rms_norm, rotary, storage, swiglu};
use crate::random::{Purpose, Stream};

/// One check, as `--json` prints it.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Check {
    pub name: String,
    /// The largest difference from the CPU, as a share of the largest number; NaN if the GPU failed.
    pub error: f64,
    pub allowed: f64,
    pub passed: bool,
    /// Of one call on the GPU, everything included.
    pub milliseconds: f64,
    /// Why it could not be run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// The keys of `--json`.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Kernels {
    pub device: String,
    pub passed: bool,
    pub checks: Vec<Check>,
}

/// How large the checks are.
#[derive(Clone, Copy)]
pub struct Scale {
    /// Rows of activations.
    pub rows: usize,
    /// C; a multiple of 256, so that every format of blocks has rows of it.
    pub channels: usize,
    pub vocab: usize,
    /// Ids of a prompt, and tokens that follow it.
    pub prompt: usize,
    pub tokens: usize,
    /// Calls that a time is the best of.
    pub repeats: usize,
}

impl Scale {
    /// Large enough that a kernel takes longer than its launch.
    pub const FULL: Scale = Scale { rows: 2048, channels: 768, vocab: 32_000, prompt: 700, tokens: 100, repeats: 5 };
}

/// Runs all checks on the GPU that this process has started.
pub fn run(family: Family) -> Result<Kernels> {
    let ctx = Ctx::open(family);
    if !ctx.has_gpu() {
        let reason = crate::ops::gpu::missing().unwrap_or_else(|| "--device cpu was asked for".into());
        return Err(Error::failed(format!("there is no Metal here: {reason}")));
    }
    Ok(checks(&mut Ctx::cpu(family), &ctx, Scale::FULL))
}

type Outputs = Vec<Vec<f32>>;
type Body = dyn Fn(&mut Ctx, Scale) -> Result<Outputs>;

/// Runs all checks on both contexts.
pub fn checks(cpu: &mut Ctx, gpu: &Ctx, scale: Scale) -> Kernels {
    let one = |(name, allowed, body): (String, f64, Box<Body>)| {
        let compared = compare(cpu, &mut gpu.fork(), scale, &*body);
        let (error, milliseconds, failure) = match compared {
            Ok((error, milliseconds)) => (error, milliseconds, None),
            Err(e) => (f64::NAN, f64::NAN, Some(e.to_string())),
        };
        Check { name, error, allowed, passed: error <= allowed, milliseconds, failure }
    };
    let checks: Vec<Check> = all().into_iter().map(one).collect();
    Kernels { device: gpu.description(), passed: checks.iter().all(|check| check.passed), checks }
}

/// The error, and the milliseconds of the fastest call.
fn compare(cpu: &mut Ctx, gpu: &mut Ctx, scale: Scale, body: &Body) -> Result<(f64, f64)> {
    let want = body(cpu, scale)?;
    let (mut error, mut best) = (0f64, f64::INFINITY);
    for _ in 0..scale.repeats {
        let start = Instant::now();
        let got = body(gpu, scale)?;
        best = best.min(start.elapsed().as_secs_f64() * 1e3);
        let lengths = |outputs: &Outputs| outputs.iter().map(Vec::len).collect::<Vec<_>>();
        if lengths(&want) != lengths(&got) {
            return Err(Error::op(
                "doctor",
                format!("outputs of {:?}", lengths(&want)),
                format!("{:?}", lengths(&got)),
            ));
        }
        for (want, got) in want.iter().zip(&got) {
            let size = want.iter().fold(0f32, |most, x| most.max(x.abs())).max(1e-30);
            let off = want.iter().zip(got).map(|(a, b)| f64::from((a - b).abs() / size));
            // Once it is NaN it stays that.
            error = off.fold(error, |most, off| if most.is_nan() || off <= most { most } else { off });
        }
    }
    Ok((error, best))
}

/// Normal numbers, drawn once: drawing them would take longer than what is measured.
fn numbers(salt: u64, len: usize) -> Vec<f32> {
    static DRAWN: Mutex<BTreeMap<(u64, usize), Vec<f32>>> = Mutex::new(BTreeMap::new());
    let stream = Stream::new(23, Purpose::Test);
    let draw = || (0..len).map(|i| stream.normal(salt, i as u32)).collect();
    let mut drawn = DRAWN.lock().unwrap_or_else(PoisonError::into_inner);
    drawn.entry((salt, len)).or_insert_with(draw).clone()
}

fn tensor(salt: u64, shape: &[usize]) -> Tensor {
    storage::tensor(numbers(salt, shape.iter().product()), shape)
}

fn values(tensor: &Tensor) -> Result<Vec<f32>> {
    Ok(storage::read::<f32>("doctor", tensor)?.to_vec())
}

/// What two context types compute alike, to the rounding of f32 sums in another order.
const CLOSE: f64 = 1e-5;

fn all() -> Vec<(String, f64, Box<Body>)> {
    let mut all: Vec<(String, f64, Box<Body>)> = vec![
        ("add, copy".into(), 0.0, Box::new(elements)),
        ("embedding".into(), CLOSE, Box::new(embeddings)),
        ("rms_norm".into(), CLOSE, Box::new(norms)),
        ("rotary".into(), CLOSE, Box::new(|ctx, scale| rotaries(ctx, scale, true))),
        ("rotary, without norms".into(), CLOSE, Box::new(|ctx, scale| rotaries(ctx, scale, false))),
        ("swiglu".into(), CLOSE, Box::new(gates)),
        ("dropout".into(), 0.0, Box::new(drops)),
        ("linear (candle's products)".into(), CLOSE, Box::new(products)),
        ("lora".into(), CLOSE, Box::new(corrections)),
        ("cross_entropy".into(), CLOSE, Box::new(losses)),
        ("adamw, gradient_norm, guard".into(), CLOSE, Box::new(|ctx, scale| steps(ctx, scale, false))),
        // Five products of nearly orthogonal matrices after one another.
        ("muon".into(), 1e-3, Box::new(|ctx, scale| steps(ctx, scale, true))),
    ];
    all.push(("sampling".into(), 0.0, Box::new(choices)));
    for dim in [32, 64, 128, 256] {
        all.push((format!("attention, heads of {dim}"), CLOSE, Box::new(move |ctx, scale| attend(ctx, scale, dim))));
    }
    for divergence in [Divergence::Forward, Divergence::Reverse, Divergence::JensenShannon] {
        let name = format!("distillation, {divergence:?}");
        all.push((name, 1e-4, Box::new(move |ctx, scale| distil(ctx, scale, divergence))));
    }
    for format in DeviceFormat::ALL {
        let name = format!("decoding products, {}", format.name());
        all.push((name, CLOSE, Box::new(move |ctx, scale| skinny(ctx, scale, format))));
    }
    for (kind, bits) in [CacheType::F32, CacheType::Bf16].into_iter().flat_map(|k| [(k, 0), (k, 8), (k, 4)]) {
        let name =
            format!("decoding, cache of {kind:?}{}", if bits > 0 { format!(" in {bits} bits") } else { String::new() });
        // Over bf16 pages the CPU rounds queries and weights of keys, too.
        let allowed = if kind == CacheType::Bf16 { 1e-2 } else { 1e-4 };
        all.push((name, allowed, Box::new(move |ctx, scale| decode(ctx, scale, (kind, bits)))));
    }
    all
}

fn elements(ctx: &mut Ctx, scale: Scale) -> Result<Outputs> {
    let shape = [scale.rows, scale.channels];
    let (x, y) = (tensor(1, &shape), tensor(2, &shape));
    add::add_assign(ctx, &x, &y)?;
    Ok(vec![values(&*add::copy(ctx, &x)?)?])
}

fn embeddings(ctx: &mut Ctx, scale: Scale) -> Result<Outputs> {
    let (table, dy) = (tensor(1, &[500, scale.channels]), tensor(2, &[scale.rows, scale.channels]));
    let ids: Vec<u32> = (0..scale.rows as u32).map(|i| i * i % 500).collect();
    let y = embedding::forward(ctx, Weight::Dense { tensor: &table, kept: None }, &ids)?;
    let gradient = tensor(3, &[500, scale.channels]);
    embedding::backward(ctx, &ids, &dy, (&gradient, Store::Set))?;
    Ok(vec![values(&y)?, values(&gradient)?])
}

fn norms(ctx: &mut Ctx, scale: Scale) -> Result<Outputs> {
    let shape = [scale.rows, scale.channels];
    let (x, weight, dy) = (tensor(1, &shape), tensor(2, &shape[1..]), tensor(3, &shape));
    let (y, rstd) = rms_norm::forward(ctx, &x, &weight, 1e-6)?;
    let (dx, dweight) = (tensor(4, &shape), tensor(5, &shape[1..]));
    let saved = rms_norm::Saved { x: &x, weight: &weight, rstd: &rstd };
    rms_norm::backward(ctx, saved, &dy, (&dx, Store::Add), Some((&dweight, Store::Set)))?;
    let sum = tensor(6, &shape);
    let (normed, _) = rms_norm::forward_add(ctx, &sum, &x, &weight, 1e-6)?;
    Ok(vec![values(&y)?, values(&dx)?, values(&dweight)?, values(&sum)?, values(&normed)?])
}

/// Heads of 64 that are as wide as C.
fn heads(scale: Scale) -> Heads {
    Heads { attention: scale.channels / 64, key_value: scale.channels / 128, dim: 64 }
}

fn rotaries(ctx: &mut Ctx, scale: Scale, normed: bool) -> Result<Outputs> {
    let (heads, seq) = (heads(scale), scale.rows / 2);
    let shape = [2 * seq, heads.qkv_size()];
    let (qkv, dout, dqkv) = (tensor(1, &shape), tensor(2, &shape), tensor(3, &shape));
    let (query, key) = (tensor(4, &[heads.dim]), tensor(5, &[heads.dim]));
    let table = &rotary::Table::new(seq, heads.dim, 10_000.0)?;
    let norms = normed.then_some(rotary::Norms { query: &query, key: &key, eps: 1e-6 });
    let (y, rstd) = rotary::forward(ctx, &qkv, heads, norms, table, seq)?;
    let gains = [tensor(6, &[heads.dim]), tensor(7, &[heads.dim])];
    let saved = rotary::Saved { qkv: &qkv, rstd: &rstd, norms, table, heads, seq };
    let slots = normed.then_some([(&gains[0], Store::Set), (&gains[1], Store::Add)]);
    rotary::backward(ctx, saved, &dout, (&dqkv, Store::Set), slots)?;
    Ok(vec![values(&y)?, values(&dqkv)?, values(&gains[0])?, values(&gains[1])?])
}

fn attend(ctx: &mut Ctx, scale: Scale, dim: usize) -> Result<Outputs> {
    let heads = Heads { attention: 4, key_value: 2, dim };
    let shape = Attention { batch: 2, seq: scale.rows / 2, heads, window: Some(scale.rows / 3), starts: None };
    let n = scale.rows / 2 * 2;
    let (qkv, dout) = (tensor(1, &[n, heads.qkv_size()]), tensor(2, &[n, heads.attention_size()]));
    let (out, lse) = attention::forward(ctx, &qkv, shape)?;
    let dqkv = tensor(3, &[n, heads.qkv_size()]);
    attention::backward(ctx, attention::Saved { qkv: &qkv, out: &out, lse: &lse }, &dout, shape, (&dqkv, Store::Set))?;
    Ok(vec![values(&out)?, values(&lse)?, values(&dqkv)?])
}

fn gates(ctx: &mut Ctx, scale: Scale) -> Result<Outputs> {
    let (x, dy) = (tensor(1, &[scale.rows, 2 * scale.channels]), tensor(2, &[scale.rows, scale.channels]));
    let (y, dx) = (swiglu::forward(ctx, &x)?, tensor(3, &[scale.rows, 2 * scale.channels]));
    swiglu::backward(ctx, &x, &dy, (&dx, Store::Set))?;
    Ok(vec![values(&y)?, values(&dx)?])
}

fn drops(ctx: &mut Ctx, scale: Scale) -> Result<Outputs> {
    let x = tensor(1, &[scale.rows, scale.channels]);
    let mask = Mask { probability: 0.25, stream: Stream::new(9, Purpose::Dropout), position: 1 << 33 };
    let (y, dx) = (dropout::forward(ctx, &x, mask)?, tensor(2, &[scale.rows, scale.channels]));
    dropout::backward(ctx, &x, mask, (&dx, Store::Add))?;
    Ok(vec![values(&y)?, values(&dx)?])
}

fn products(ctx: &mut Ctx, scale: Scale) -> Result<Outputs> {
    let (n, k, out) = (scale.rows - 1, scale.channels, scale.channels + 33);
    let (x, weight, dy) = (tensor(1, &[n, k]), tensor(2, &[out, k]), tensor(3, &[n, out]));
    let dense = Weight::Dense { tensor: &weight, kept: None };
    let y = linear::forward(ctx, &x, dense, Some(&dy), None)?;
    let (dx, dweight) = (tensor(4, &[n, k]), tensor(5, &[out, k]));
    linear::backward_input(ctx, &dy, dense, (&dx, Store::Add), None)?;
    linear::backward_weight(ctx, &dy, &x, (&dweight, Store::Set))?;
    Ok(vec![values(&y)?, values(&dx)?, values(&dweight)?])
}

fn corrections(ctx: &mut Ctx, scale: Scale) -> Result<Outputs> {
    let (n, k, rank) = (scale.rows.min(256), scale.channels, 8);
    let out = 2 * k;
    // Two parts of three are corrected.
    let segments = &[Segment { columns: 0..k, rows: 0..k }, Segment { columns: k + k / 2..out, rows: k..k + k / 2 }];
    let (a, b) = (tensor(1, &[2 * rank, k]), tensor(2, &[k + k / 2, rank]));
    let factors = Factors { a: &a, b: &b, segments, scale: 0.5 };
    let (x, weight, dy) = (tensor(3, &[n, k]), tensor(4, &[out, k]), tensor(5, &[n, out]));
    let dense = Weight::Dense { tensor: &weight, kept: None };
    let merged = Weight::Corrected(&dense, factors);
    let (y, u) = lora::layer_forward(ctx, &x, merged, None, factors)?;
    let (dx, da, db) = (tensor(6, &[n, k]), tensor(7, &[2 * rank, k]), tensor(8, &[k + k / 2, rank]));
    let du = lora::layer_backward_input(ctx, &dy, merged, factors, (&dx, Store::Set))?;
    lora::backward(ctx, (&x, &u), (&dy, &du), factors, (&da, Store::Set), (&db, Store::Add))?;
    Ok(vec![values(&y)?, values(&dx)?, values(&da)?, values(&db)?])
}

fn losses(ctx: &mut Ctx, scale: Scale) -> Result<Outputs> {
    let (n, c, v) = (scale.rows.min(256), scale.channels, scale.vocab);
    let (x, head, slot) = (tensor(1, &[n, c]), tensor(2, &[v, c]), tensor(3, &[v, c]));
    let targets: Vec<u32> =
        (0..n as u32).map(|i| if i % 7 == 3 { cross_entropy::IGNORE } else { i * 31 % v as u32 }).collect();
    let wanted = Wanted::InputAndHead(&slot, Store::Set);
    let output = cross_entropy::forward(ctx, &x, &head, &targets, 1.0 / n as f32, wanted)?;
    let dx = output.dx.as_deref().map_or(Ok(Vec::new()), values)?;
    Ok(vec![values(&output.loss)?, values(&output.nll)?, dx, values(&slot)?])
}

fn distil(ctx: &mut Ctx, scale: Scale, divergence: Divergence) -> Result<Outputs> {
    let (n, c, v) = (scale.rows.min(64), 64, scale.vocab.min(2048));
    let (x, head, hidden) = (tensor(1, &[n, c]), tensor(2, &[v, c]), tensor(3, &[n, c]));
    let targets: Vec<u32> = (0..n as u32).map(|i| i % v as u32).collect();
    let ids: Vec<u32> = (0..n as u32).flat_map(|row| (0..4).map(move |k| (row + 17 * k) % v as u32)).collect();
    let logprobs = vec![0.2f32.ln(); 4 * n];
    let mut outputs = Vec::new();
    for (teacher, temperature) in [
        (Teacher::Model { x: &hidden, weight: &head }, 2.0),
        (Teacher::Top { k: 4, ids: &ids, logprobs: &logprobs }, 1.0),
    ] {
        let settings = Settings { divergence, temperature, alpha: 0.7 };
        let found = distillation::forward(ctx, (&x, &head), teacher, &targets, (settings, 1.0), Wanted::Input)?;
        outputs.push(values(&found.nll)?);
        outputs.push(found.dx.as_deref().map_or(Ok(Vec::new()), values)?);
    }
    Ok(outputs)
}

fn steps(ctx: &mut Ctx, scale: Scale, with_muon: bool) -> Result<Outputs> {
    let shape = [scale.channels, scale.channels / 2];
    let [master, gradient, first, second, ema] = [1, 2, 3, 4, 5].map(|salt| tensor(salt, &shape));
    storage::write::<f32>("doctor", &second)?.iter_mut().for_each(|x| *x = x.abs());
    let scalars = Scalars::new();
    for (scalar, value) in [(Scalar::LearningRate, 1e-2), (Scalar::EmaDecay, 0.9), (Scalar::Loss, 2.0)] {
        scalars.set(scalar, value)?;
    }
    let loss = tensor(6, &[1]);
    scalars.add(ctx, Scalar::Loss, &loss)?;
    let s = scalars.tensor();
    gradient_norm::forward(ctx, std::slice::from_ref(&gradient), s)?;
    guard::decide(ctx, s, Guard { max_norm: 1.0, ..Guard::default() })?;
    if with_muon {
        let parts = vec![0..shape[0] / 2, shape[0] / 2..shape[0]];
        let target = muon::Target { master: &master, gradient: &gradient, momentum: &first, ema: Some(&ema), parts };
        muon::step(ctx, &[target], muon::Muon::default(), s)?;
    } else {
        let adamw = adamw::Adamw { beta1: 0.9, beta2: 0.99, epsilon: 1e-8, weight_decay: 0.1 };
        let (gradient, ema) = (&gradient, Some(&ema));
        let target = adamw::Target { master: &master, gradient, first: &first, second: &second, ema };
        adamw::step(ctx, target, adamw, s)?;
    }
    guard::finish(ctx, s)?;
    Ok(vec![values(&master)?, values(&first)?, values(&second)?, values(&ema)?, values(s)?])
}

/// The kernels of decoding against plain products of what the weights stand for; the CPU's own have other roundings.
fn skinny(ctx: &mut Ctx, scale: Scale, format: DeviceFormat) -> Result<Outputs> {
    let (k, outputs, eps) = (scale.channels, scale.channels + 3, 1e-6);
    // Whatever these bytes are, the numbers are finite and of size one.
    let bytes: Vec<u8> = match format {
        DeviceFormat::F32 => numbers(5, outputs * k).iter().flat_map(|x| x.to_le_bytes()).collect(),
        _ => (0..outputs * format.row_bytes(k)).map(|i| [0x3C, 0x3A, 0x3B, 0x39][i * 7 % 4]).collect(),
    };
    let weight = DeviceWeight::from_bytes(format, outputs, k, &bytes)?;
    let norm = tensor(7, &[k]);
    let ids = storage::tensor(vec![outputs as u32 - 1, 0], 2);
    let mut found = Vec::new();
    for rows in [1, 4, 8] {
        let (x, y) = (tensor(6, &[rows, k]), tensor(8, &[rows, outputs]));
        let (plain, gated) = (tensor(9, &[rows, outputs]), tensor(9, &[rows, outputs]));
        if ctx.has_gpu() {
            let normed = Normed { x: &x, norm: &norm, eps, select: None };
            norm_product(ctx, normed, &weight, rows, &plain)?;
            residual_product(ctx, &x, &weight, rows, &y)?;
            gate_up_product(ctx, normed, (&weight, &weight), rows, &gated)?;
        } else {
            let numbers = tensor(0, &[outputs, k]);
            storage::write::<f32>("doctor", &numbers)?.copy_from_slice(&weight.numbers()?);
            let dense = Weight::Dense { tensor: &numbers, kept: None };
            let normed = rms_norm::forward(ctx, &x, &norm, eps)?.0;
            let product = linear::forward(ctx, &normed, dense, None, None)?;
            let added = linear::forward(ctx, &x, dense, None, None)?;
            add::add_assign(ctx, &y, &added)?;
            let mut to = storage::write::<f32>("doctor", &gated)?;
            for (to, x) in to.iter_mut().zip(values(&product)?) {
                *to = x / (1.0 + (-x).exp()) * x;
            }
            drop(to);
            storage::write::<f32>("doctor", &plain)?.copy_from_slice(&values(&product)?);
        }
        found.extend([values(&plain)?, values(&y)?, values(&gated)?]);
    }
    let (rows, whole) = (tensor(9, &[2, k]), tensor(9, &[outputs, k]));
    if ctx.has_gpu() {
        embed(ctx, &weight, &ids, 2, &rows)?;
        dequantise(ctx, &weight, &whole)?;
        found.extend([values(&rows)?, values(&whole)?]);
    } else {
        let numbers = weight.numbers()?;
        found.extend([[&numbers[(outputs - 1) * k..], &numbers[..k]].concat(), numbers]);
    }
    Ok(found)
}

/// Tokens of fixed logits for several temperatures and limits: the same ids.
fn choices(ctx: &mut Ctx, scale: Scale) -> Result<Outputs> {
    let vocab = scale.vocab;
    let settings: Vec<Sampling> = [(0.0, 0), (1.0, 0), (0.7, 1), (0.9, 40), (2.0, vocab - 1)]
        .into_iter()
        .zip(1..)
        .map(|((temperature, top_k), seed)| Sampling { temperature, top_k, seed: seed << 31, ..Sampling::default() })
        .collect();
    // Rounded, so that there are ties.
    let logits: Vec<f32> = numbers(1, settings.len() * vocab).iter().map(|x| (x * 8.0).round() / 8.0).collect();
    if !ctx.has_gpu() {
        let mut sampler = Sampler::new(ctx.family());
        let rows = logits.chunks(vocab).zip(&settings).enumerate();
        // As many ids before as the position says.
        let ids = rows.map(|(i, (row, s))| sampler.sample(s, &vec![0; 10 + i], 0, &mut row.to_vec()));
        return Ok(vec![ids.map(|id| Ok(id? as f32)).collect::<Result<_>>()?]);
    }
    let count = settings.len();
    let outputs = settings
        .iter()
        .enumerate()
        .flat_map(|(i, s)| [i as u32, s.seed as u32, (s.seed >> 32) as u32, s.top_k as u32, s.temperature.to_bits()]);
    let outputs: Vec<u32> = outputs.collect();
    let lanes: Vec<u32> = (0..count as u32).flat_map(|i| [i, 9 + i]).collect();
    let [outputs, lanes] = [outputs, lanes].map(|words| ctx.upload(&words, words.len()));
    let logits = ctx.upload(&logits, logits.len());
    let [ids, reported] = [ctx.output(DType::U32, count)?, ctx.output(DType::U32, count)?];
    let next = ctx.output(DType::U32, 2 * count)?;
    let args = [
        Arg::read(&logits),
        Arg::read(&outputs),
        Arg::read(&lanes),
        Arg::write(&ids),
        Arg::write(&next),
        Arg::write(&reported),
    ];
    let numbers = [vocab.into(), (Purpose::Sampling as u32).into()];
    ctx.dispatch(&kernels::SAMPLE, DType::F32, &args, &numbers, count)?;
    Ok(vec![storage::read::<u32>("doctor", &reported)?.iter().map(|id| *id as f32).collect()])
}

/// A small model's text and its last logits, through the engine.
fn decode(ctx: &mut Ctx, scale: Scale, (kind, bits): (CacheType, usize)) -> Result<Outputs> {
    let config = GptConfig {
        model_type: ModelType::Qwen3,
        vocab_size: scale.vocab.min(4096),
        hidden_size: scale.channels.min(256),
        intermediate_size: scale.channels.min(256) * 2,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 32,
        max_position_embeddings: 64,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        tie_word_embeddings: true,
        windows: vec![Some(40), None],
    };
    let mut engine = Engine::new(ctx.fork(), &config, WeightType::F32, random_weights(&config, 4))?;
    let quantization = (bits > 0).then_some(Quantization { bits, group: 16, start: 64 });
    let cache = CacheSettings {
        window: Some(scale.prompt * 3 / 4),
        kind: Some(kind),
        quantization,
        ..CacheSettings::default()
    };
    let sampling = Sampling { temperature: 0.9, top_k: 20, seed: 5, ..Sampling::default() };
    let settings = RowSettings { sampling, cache, ..RowSettings::default() };
    let prompt: Vec<u32> = (0..scale.prompt as u32).map(|i| i * i % config.vocab_size as u32).collect();
    let mut rows = [engine.row(&prompt, settings.clone())?, engine.row(&prompt[..3], settings)?];
    for _ in 0..scale.tokens {
        engine.step(&mut rows.iter_mut().collect::<Vec<_>>())?;
    }
    // The same ids on both devices, so that the logits can be compared even where a tie has parted the texts.
    let mut logits = Vec::new();
    engine.logits(&prompt, cache, |_, part| {
        logits.extend_from_slice(part);
        Ok(())
    })?;
    Ok(vec![logits])
}
