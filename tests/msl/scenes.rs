//! Small uses of every kernel, through the ops that dispatch them: training steps, distillation, decoding with every kind of
//! cache, products with every format of weights.

use gpt::engine::{RowSettings, Sampling, WeightType};
use gpt::model::config::ModelType;
use gpt::model::gpt::{Batch, Gpt, random_weights};
use gpt::nn::attention::Layout;
use gpt::nn::cache::{CacheSettings, CacheType, Quantization};
use gpt::ops::attention::{self, Attention};
use gpt::ops::ctx::Ctx;
use gpt::ops::decode::gpu::weight::{self, DeviceFormat, DeviceWeight, Normed};
use gpt::ops::gemm::Store;
use gpt::ops::heads::Heads;
use gpt::ops::simd::Family;
use gpt::ops::{add, embedding, linear::Weight, rms_norm, storage};
use gpt::random::{Purpose, Stream};
use gpt::recipes::doctor::metal::{self, Scale};
use gpt::trainer::objective::NextToken;
use gpt::trainer::optimizer::{Kind, Settings};
use gpt::trainer::step::{StepRecord, Trainer};

use super::decode;

/// The self-test's smallest.
pub const SMALL: Scale = Scale { rows: 20, channels: 256, vocab: 300, prompt: 66, tokens: 3, repeats: 1 };

pub fn numbers(salt: u64, len: usize) -> Vec<f32> {
    let stream = Stream::new(17, Purpose::Test);
    (0..len).map(|i| stream.normal(salt, i as u32)).collect()
}

pub fn tensor(salt: u64, shape: &[usize]) -> candle_core::Tensor {
    storage::tensor(numbers(salt, shape.iter().product()), shape)
}

/// Plays all scenes, each with a context of its own.
pub fn play(ctx: &dyn Fn() -> Ctx) {
    train(ctx(), Kind::Adamw, (ModelType::Qwen3, Some(5)), 2);
    train(ctx(), Kind::Muon, (ModelType::Llama, None), 1);
    elements(&mut ctx());
    attend(&mut ctx(), (20, 70), Some(33));
    attend(&mut ctx(), (40, 37), None);
    metal::checks(&mut Ctx::cpu(Family::detect()), &ctx(), SMALL);
    DeviceFormat::ALL.into_iter().for_each(|format| products(&mut ctx(), format));
    write(ctx);
}

/// A trainer of a small model.
pub fn trainer(ctx: Ctx, kind: Kind, (model_type, windows): (ModelType, Vec<Option<usize>>)) -> Trainer {
    let mut config = decode::config(model_type, (4, 2, 8), windows);
    config.hidden_size = 24;
    config.intermediate_size = 40;
    let model = Gpt::build(&config, &mut random_weights(&config, 1)).unwrap();
    let settings = Settings {
        kind,
        beta1: 0.9,
        beta2: 0.99,
        epsilon: 1e-8,
        weight_decay: 0.1,
        momentum: 0.95,
        clip: 1.0,
        ema: 0.9,
        spike_threshold: 6.0,
    };
    Trainer::new(ctx, model, settings, 0.1, 3).unwrap()
}

/// Its next step, of two micro-batches.
pub fn step(trainer: &mut Trainer) -> StepRecord {
    let (batch, seq) = (2, 11);
    let id = |i: usize| ((i * i + 3 * i) as u64 + trainer.step) as u32 % 50;
    let ids: Vec<u32> = (0..batch * (seq + 1)).map(id).collect();
    let part = |from: usize| ids.chunks(seq + 1).flat_map(|ids| ids[from..from + seq].to_vec()).collect();
    let micro = || Batch { inputs: part(0), targets: part(1), layout: Layout::of(seq), window: 0 };
    trainer.train_step(&mut NextToken, &[micro(), micro()], 1e-2).unwrap()
}

/// What a run of small steps reports, and the weights after it.
pub fn train(
    ctx: Ctx,
    kind: Kind,
    (model_type, window): (ModelType, Option<usize>),
    steps: usize,
) -> (Vec<StepRecord>, Vec<Vec<f32>>) {
    let mut trainer = trainer(ctx, kind, (model_type, vec![window, None]));
    let records = (0..steps).map(|_| step(&mut trainer)).collect();
    let weights = trainer.model.trainable().map(|p| storage::read::<f32>("test", p.master()).unwrap().to_vec());
    (records, weights.collect())
}

/// What no step of training does at these sizes.
fn elements(ctx: &mut Ctx) {
    let (x, y) = (tensor(1, &[5, 60]), tensor(2, &[5, 60]));
    add::add_assign(ctx, &x, &y).unwrap();
    add::copy(ctx, &x).unwrap();
    let table = tensor(3, &[7, 60]);
    let ids = [6, 0, 6, 6, 2];
    embedding::forward(ctx, Weight::Dense { tensor: &table, kept: None }, &ids).unwrap();
    embedding::backward(ctx, &ids, &y, (&table, Store::Set)).unwrap();
    // More rows than a block of the gain's gradient.
    let (x, dy, weight) = (tensor(4, &[70, 6]), tensor(5, &[70, 6]), tensor(6, &[6]));
    let (_, rstd) = rms_norm::forward(ctx, &x, &weight, 1e-3).unwrap();
    let (dx, dweight) = (tensor(7, &[70, 6]), tensor(8, &[6]));
    let saved = rms_norm::Saved { x: &x, weight: &weight, rstd: &rstd };
    rms_norm::backward(ctx, saved, &dy, (&dx, Store::Set), Some((&dweight, Store::Set))).unwrap();
}

/// Two documents in each of two sequences.
fn attend(ctx: &mut Ctx, (dim, seq): (usize, usize), window: Option<usize>) {
    let heads = Heads { attention: 2, key_value: 1, dim };
    let starts: Vec<u32> = (0..2 * seq).map(|i| if i % seq < 31 { 0 } else { 31 }).collect();
    let shape = Attention { batch: 2, seq, heads, window, starts: Some(&starts) };
    let (qkv, dout) = (tensor(1, &[2 * seq, heads.qkv_size()]), tensor(2, &[2 * seq, heads.attention_size()]));
    let (out, lse) = attention::forward(ctx, &qkv, shape).unwrap();
    let dqkv = tensor(3, &[2 * seq, heads.qkv_size()]);
    let saved = attention::Saved { qkv: &qkv, out: &out, lse: &lse };
    attention::backward(ctx, saved, &dout, shape, (&dqkv, Store::Set)).unwrap();
}

fn products(ctx: &mut Ctx, format: DeviceFormat) {
    let (k, outputs) = (512, 19);
    let bytes: Vec<u8> = match format {
        DeviceFormat::F32 => numbers(5, outputs * k).iter().flat_map(|x| x.to_le_bytes()).collect(),
        DeviceFormat::F16 => {
            numbers(5, outputs * k).iter().flat_map(|x| half::f16::from_f32(*x).to_le_bytes()).collect()
        }
        // Scales of about one, whatever they are, and any codes.
        _ => (0..outputs * format.row_bytes(k)).map(|i| [0x3C, 0x5A, 0x3B, 0x11][i * 7 % 4]).collect(),
    };
    let weight = DeviceWeight::from_bytes(format, outputs, k, &bytes).unwrap();
    for rows in [1, 3, 9] {
        let (x, norm) = (tensor(6, &[rows, k]), tensor(7, &[k]));
        let y = tensor(8, &[rows, outputs]);
        let normed = Normed { x: &x, norm: &norm, eps: 1e-6, select: None };
        weight::norm_product(ctx, normed, &weight, rows, &y).unwrap();
        weight::residual_product(ctx, &x, &weight, rows, &y).unwrap();
        weight::gate_up_product(ctx, normed, (&weight, &weight), rows, &y).unwrap();
    }
    let ids = storage::tensor(vec![18u32, 0], 2);
    weight::embed(ctx, &weight, &ids, 2, &tensor(9, &[2, k])).unwrap();
    weight::dequantise(ctx, &weight, &tensor(9, &[outputs, k])).unwrap();
}

/// Texts with every kind of cache.
fn write(ctx: &dyn Fn() -> Ctx) {
    let warm = |top_k| Sampling { temperature: 0.9, top_k, seed: 3, ..Sampling::default() };
    for kind in [CacheType::F32, CacheType::Bf16] {
        for quantization in [None, Some(8), Some(4)] {
            let quantization = quantization.map(|bits| Quantization { bits, group: 8, start: 64 });
            let config = decode::config(ModelType::Qwen3, (2, 1, 16), vec![Some(40), None]);
            let cache = CacheSettings { window: Some(50), sinks: 3, kind: Some(kind), quantization };
            let settings = RowSettings { sampling: warm(4), cache, ..RowSettings::default() };
            let mut engine = decode::engine(ctx(), &config, WeightType::F32);
            decode::texts(&mut engine, &[70, 2], &settings, 2);
        }
    }
}
