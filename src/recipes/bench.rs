//! `gpt bench`: how fast training and decoding are here.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use crate::checkpoint::model_folder::ModelFolder;
use crate::device;
use crate::engine::{Engine, Row, RowSettings, Sampling, WeightType};
use crate::error::{Error, Result};
use crate::model::config::GptConfig;
use crate::model::gpt::{Adaptation, Batch, Gpt, random_weights};
pub use crate::nn::lora::LoraSettings;
use crate::ops::gemm::Precision;
use crate::ops::{ctx::Ctx, gpu::counting::Counting, rates, simd::Family};
use crate::preset::Preset;
use crate::random::{Purpose, Stream};
use crate::tokenizer::Tokenizer;
use crate::trainer::objective::NextToken;
use crate::trainer::step::Trainer;

use super::{plan, sample};

/// What `gpt bench` was asked to do.
#[derive(Clone, Debug)]
pub struct BenchConfig {
    /// What to decode with, instead of random weights of the preset.
    pub checkpoint: Option<PathBuf>,
    pub preset: String,
    pub given: Vec<(String, String)>,
    pub batch: usize,
    pub context: usize,
    /// Of the products of training: f32, bf16 or auto.
    pub dtype: String,
    /// Trains adapters alone.
    pub adaptation: Option<Adaptation>,
    /// What the weights of decoding are kept in.
    pub kind: WeightType,
    /// Steps that are timed, after a few that are not.
    pub steps: usize,
    pub family: Family,
}

/// The keys of `--json`.
#[derive(Clone, Debug, serde::Serialize)]
pub struct BenchSummary {
    pub mode: &'static str,
    pub preset: String,
    pub parameters: usize,
    pub batch: usize,
    pub context: usize,
    pub dtype: &'static str,
    pub device: &'static str,
    pub kernels: &'static str,
    pub threads: usize,
    /// All rows together; from the median step.
    pub tokens_per_second: f64,
    pub milliseconds_per_step: f64,
    pub tflops: f64,
    /// What a large product reaches here in the same precision, and the share of it above.
    pub matmul_tflops: f64,
    pub matmul_share: f64,
    pub gbytes_per_second: f64,
    /// What reading that many bytes again and again reaches here, and the share of it above.
    pub stream_gbytes_per_second: f64,
    pub stream_share: f64,
    pub peak_memory_bytes: u64,
}

fn numbers(len: usize, vocab: usize) -> Vec<u32> {
    let stream = Stream::new(0, Purpose::Test);
    (0..len as u32).map(|i| stream.word(0, i) % vocab as u32).collect()
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn preset(config: &BenchConfig) -> Result<Preset> {
    let mut preset = Preset::load(&config.preset)?;
    preset.set("model.max_position_embeddings", &config.context.to_string())?;
    // What other tools train with; --set optimizer.kind=muon times the presets' own.
    preset.set("optimizer.kind", "adamw")?;
    preset.set("train.dtype", &config.dtype)?;
    config.given.iter().try_for_each(|(key, value)| preset.set(key, value))?;
    if config.batch == 0 || config.steps == 0 {
        return Err(Error::usage("--batch and --steps must be above 0"));
    }
    preset.validate()?;
    Ok(preset)
}

/// Whole training steps (forward, backward, clipping, optimizer) on random tokens.
pub fn train(config: &BenchConfig) -> Result<BenchSummary> {
    let preset = preset(config)?;
    let vocab = Tokenizer::bytes().vocab_size();
    let shape = preset.gpt_config(vocab)?;
    let mut model = match &config.adaptation {
        None => Gpt::random(&shape, 0)?,
        Some(adaptation) => Gpt::adapted(&shape, adaptation, &mut random_weights(&shape, 0))?,
    };
    let trained: usize = model.trainable().map(|p| p.elements()).sum();
    let frozen = model.parameters().iter().filter(|p| !p.is_trainable()).map(|p| p.elements()).sum::<usize>();
    model.recompute = preset.train.recompute;
    let mut ctx = Ctx::open(config.family);
    let precision = plan::precision(&preset, config.family)?;
    ctx.set_precision(precision);
    let mut trainer = Trainer::new(ctx, model, plan::optimizer(&preset)?, preset.model.dropout, 0)?;
    let tokens = config.batch * config.context;
    let batch = Batch::new(numbers(tokens, 256), numbers(tokens + 1, 256)[1..].to_vec(), config.context);
    let warm_up = (config.steps / 5).clamp(1, 5);
    let mut times = Vec::new();
    for step in 0..warm_up + config.steps {
        let start = Instant::now();
        trainer.train_step(&mut NextToken, std::slice::from_ref(&batch), 1e-4)?;
        if step >= warm_up {
            times.push(start.elapsed().as_secs_f64());
        }
    }
    let work = Work {
        // A frozen weight has no gradient of its own: a third of its products are not taken.
        flops: (shape.training_flops_per_token(config.context) - 2.0 * frozen as f64) * tokens as f64,
        // Optimizer traffic: weight, gradient and two moments read, three of them written.
        bytes: 4 * 7 * trained,
        tokens,
    };
    summary(("train", precision.name()), config, &shape, median(times), work, &mut trainer.ctx)
}

/// The model that is decoded, in an engine of that context.
fn opened(config: &BenchConfig, ctx: Ctx) -> Result<(GptConfig, Engine)> {
    let preset = preset(config)?;
    match &config.checkpoint {
        Some(path) => {
            let folder = ModelFolder::open(path)?;
            let weights = |name: &str, shape: &[usize]| folder.get(name, shape);
            let engine = Engine::new(ctx, &folder.config, config.kind, weights)?;
            Ok((folder.config, engine))
        }
        None => {
            let shape = preset.gpt_config(Tokenizer::bytes().vocab_size())?;
            let engine = sample::engine(&Gpt::random(&shape, 0)?, config.kind, ctx)?;
            Ok((shape, engine))
        }
    }
}

/// What a token of all rows costs on a GPU: counted, not run, so it needs none.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Counted {
    pub mode: &'static str,
    pub preset: String,
    pub layers: usize,
    pub batch: usize,
    pub dtype: &'static str,
    /// Tokens that the following are averages over.
    pub tokens: usize,
    pub dispatches: f64,
    pub dispatches_per_layer: f64,
    pub bindings: f64,
    pub command_buffers: f64,
    /// One in each command buffer.
    pub encoders: f64,
    pub uploaded_bytes: f64,
    pub downloaded_bytes: f64,
}

/// Counts what decoding as in `decode` hands to a GPU.
pub fn count(config: &BenchConfig) -> Result<Counted> {
    let ctx = Ctx::gpu(Arc::new(Counting), config.family);
    let (shape, mut engine) = opened(config, ctx)?;
    let mut rows = rows(&engine, config.batch)?;
    let mut step = || engine.step(&mut rows.iter_mut().collect::<Vec<_>>()).map(drop);
    (0..3).try_for_each(|_| step())?;
    engine.take_counts();
    let mut step = || engine.step(&mut rows.iter_mut().collect::<Vec<_>>()).map(drop);
    (0..config.steps).try_for_each(|_| step())?;
    let counts = engine.take_counts();
    let each = |count: u64| count as f64 / config.steps as f64;
    // Outside of the layers: token vectors, the head, and the choice.
    let ends = 3.0;
    Ok(Counted {
        mode: "count",
        preset: named(config),
        layers: shape.num_hidden_layers,
        batch: config.batch,
        dtype: config.kind.name(),
        tokens: config.steps,
        dispatches: each(counts.dispatches),
        dispatches_per_layer: (each(counts.dispatches) - ends) / shape.num_hidden_layers as f64,
        bindings: each(counts.bindings),
        command_buffers: each(counts.command_buffers),
        encoders: each(counts.command_buffers),
        uploaded_bytes: each(counts.uploaded),
        downloaded_bytes: each(counts.downloaded),
    })
}

/// Rows that begin with one token each.
fn rows(engine: &Engine, batch: usize) -> Result<Vec<Row>> {
    let settings = RowSettings { sampling: Sampling::greedy(), ..RowSettings::default() };
    (0..batch).map(|row| engine.row(&[row as u32 % 256], settings.clone())).collect()
}

/// Greedy decoding of `batch` rows that begin with one token each.
pub fn decode(config: &BenchConfig) -> Result<BenchSummary> {
    let (shape, mut engine) = opened(config, Ctx::open(config.family))?;
    let mut rows = rows(&engine, config.batch)?;
    let mut times = Vec::new();
    for step in 0..config.steps + 3 {
        let start = Instant::now();
        engine.step(&mut rows.iter_mut().collect::<Vec<_>>())?;
        if step >= 3 {
            times.push(start.elapsed().as_secs_f64());
        }
    }
    let work = Work {
        flops: 2.0 * shape.parameters() as f64 * config.batch as f64,
        bytes: engine.weight_bytes(),
        tokens: config.batch,
    };
    let ctx = &mut Ctx::open(config.family);
    ctx.set_precision(if config.kind == WeightType::F32 { Precision::F32 } else { Precision::fastest(config.family) });
    summary(("decode", config.kind.name()), config, &shape, median(times), work, ctx)
}

/// What is measured: the checkpoint, or the preset.
fn named(config: &BenchConfig) -> String {
    config.checkpoint.as_ref().map_or_else(|| config.preset.clone(), |path| path.display().to_string())
}

/// What one step does.
struct Work {
    flops: f64,
    bytes: usize,
    tokens: usize,
}

fn summary(
    (mode, dtype): (&'static str, &'static str),
    config: &BenchConfig,
    shape: &GptConfig,
    seconds: f64,
    work: Work,
    ctx: &mut Ctx,
) -> Result<BenchSummary> {
    let peak_memory_bytes = device::peak_memory();
    let (flops, bytes) = (work.flops / seconds, work.bytes as f64 / seconds);
    let (matmul, stream) = (rates::matmul(ctx)?, rates::stream(ctx, work.bytes)?);
    Ok(BenchSummary {
        mode,
        preset: named(config),
        parameters: shape.parameters(),
        batch: config.batch,
        context: config.context,
        dtype,
        device: ctx.device_name(),
        kernels: config.family.name(),
        threads: rayon::current_num_threads(),
        tokens_per_second: work.tokens as f64 / seconds,
        milliseconds_per_step: seconds * 1e3,
        tflops: flops / 1e12,
        matmul_tflops: matmul / 1e12,
        matmul_share: flops / matmul,
        gbytes_per_second: bytes / 1e9,
        stream_gbytes_per_second: stream / 1e9,
        stream_share: bytes / stream,
        peak_memory_bytes,
    })
}
