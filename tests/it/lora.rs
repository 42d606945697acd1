//! Models with adapters: loss and gradients against candle's autograd and finite differences, merging, memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use gpt::model::config::{GptConfig, ModelType};
use gpt::model::gpt::{Adaptation, Batch, Gpt};
use gpt::nn::dropout::Dropout;
use gpt::nn::lora::{LoraSettings, Target, names};
use gpt::nn::parameter::Parameter;
use gpt::ops::blocks::{BlockMatrix, Format};
use gpt::ops::{ctx::Ctx, simd::Family, storage};
use gpt::random::{Purpose, Stream};

use crate::reference;

/// Sizes that blocks of 32 divide.
fn config(model_type: ModelType, tied: bool) -> GptConfig {
    GptConfig { hidden_size: 32, intermediate_size: 64, ..reference::small_config(model_type, tied) }
}

fn configs() -> Vec<GptConfig> {
    [ModelType::Qwen3, ModelType::Llama].into_iter().flat_map(|m| [true, false].map(|tied| config(m, tied))).collect()
}

fn adaptation(base: Option<Format>, targets: &[Target]) -> Adaptation {
    let lora = LoraSettings { rank: 3, alpha: 5.0, dropout: 0.0, rslora: false, targets: targets.to_vec() };
    Adaptation { base, lora, seed: 1 }
}

/// Values of a factor, large enough that the correction matters: B would be zero at first.
fn factor(name: &str, len: usize) -> Vec<f32> {
    let salt = name.bytes().fold(3u64, |h, b| (h.wrapping_mul(31) + u64::from(b)) & 0xFF_FFFF);
    (0..len).map(|i| 0.2 * Stream::new(6, Purpose::Test).normal(salt, i as u32)).collect()
}

fn model(config: &GptConfig, adaptation: &Adaptation) -> Gpt {
    let model = Gpt::adapted(config, adaptation, &mut |n, shape| Ok(reference::random_weight(n, shape))).unwrap();
    for parameter in model.trainable() {
        let columns = parameter.master().dims()[1];
        let mut to = storage::write::<f32>("test", parameter.master()).unwrap();
        for part in &parameter.parts {
            let rows = part.rows.start * columns..part.rows.end * columns;
            to[rows.clone()].copy_from_slice(&factor(&part.name, rows.len()));
        }
    }
    model
}

fn batch(config: &GptConfig, rows: usize, seq: usize) -> (Vec<Vec<u32>>, Vec<Vec<u32>>, Batch) {
    let ids = |salt| -> Vec<Vec<u32>> {
        let at = |i: usize| Stream::new(9, Purpose::Test).word(salt, i as u32) % config.vocab_size as u32;
        (0..rows).map(|r| (0..seq).map(|t| at(r * seq + t)).collect()).collect()
    };
    let (inputs, targets) = (ids(1), ids(2));
    let batch = Batch::new(inputs.concat(), targets.concat(), seq);
    (inputs, targets, batch)
}

fn read(tensor: &Tensor) -> Vec<f32> {
    storage::read::<f32>("test", tensor).unwrap().to_vec()
}

/// The weight as the base keeps it.
fn kept(name: &str, shape: &[usize], base: Option<Format>) -> Vec<f32> {
    let weight = reference::random_weight(name, shape);
    let (Some(format), [_, columns]) = (base, shape) else { return weight };
    let mut back = vec![0.0; weight.len()];
    BlockMatrix::quantize(format, &weight, *columns).unwrap().unpack(Family::detect(), &mut back);
    back
}

/// The model in candle's f64: constants for the base, variables for the factors.
struct Oracle {
    config: GptConfig,
    base: BTreeMap<String, Tensor>,
    factors: BTreeMap<String, Var>,
    lora: LoraSettings,
}

impl Oracle {
    fn new(config: &GptConfig, Adaptation { base, lora, .. }: &Adaptation) -> Self {
        let wide = |data: Vec<f32>, shape: &[usize]| {
            Tensor::from_vec(data, shape, &Device::Cpu).unwrap().to_dtype(DType::F64).unwrap()
        };
        let weights = Gpt::tensor_shapes(config).into_iter();
        let factors = Gpt::adapter_shapes(config, lora).into_iter().map(|(name, shape)| {
            let data = factor(&name, shape.iter().product());
            (name, Var::from_tensor(&wide(data, &shape)).unwrap())
        });
        Self {
            config: GptConfig { tie_word_embeddings: false, ..config.clone() },
            factors: factors.collect(),
            base: weights.map(|(n, shape)| (n.clone(), wide(kept(&n, &shape, *base), &shape))).collect(),
            lora: lora.clone(),
        }
    }

    fn loss(&self, inputs: &[Vec<u32>], targets: &[Vec<u32>]) -> Tensor {
        let weight = |name: &str| {
            // A head of its own, or the tied table.
            let base = self.base.get(name).unwrap_or(&self.base["model.embed_tokens.weight"]).clone();
            let [a, b] = names(name);
            match (self.factors.get(&a), self.factors.get(&b)) {
                (Some(a), Some(b)) => (base + (b.matmul(a).unwrap() * f64::from(self.lora.scale())).unwrap()).unwrap(),
                _ => base,
            }
        };
        reference::nll(&reference::logits_of(&self.config, &weight, inputs).unwrap(), targets).unwrap()
    }
}

#[test]
fn loss_and_every_gradient_equal_candles_autograd_over_frozen_numbers_and_blocks() {
    for family in Family::ALL.into_iter().filter(|f| f.available()) {
        for config in configs() {
            for (base, dropout) in [
                (None, 0.0),
                (None, 1e-9),
                (Some(Format::Q8_0), 0.0),
                (Some(Format::Q4_0), 0.0),
                (Some(Format::Q4_0), 1e-9),
            ] {
                let mut adaptation = adaptation(base, &Target::ALL);
                // Drops nothing, but takes the way of inputs of which something is dropped.
                adaptation.lora.dropout = dropout;
                let (inputs, targets, batch) = batch(&config, 3, 13);
                let oracle = Oracle::new(&config, &adaptation);
                let loss = oracle.loss(&inputs, &targets);
                let gradients = loss.backward().unwrap();
                let (mut ctx, model) = (Ctx::cpu(family), model(&config, &adaptation));
                let got = read(&model.accumulate(&mut ctx, &batch, 1.0, Dropout::new(0.0, 1, 0, 0)).unwrap())[0];
                let want = loss.to_scalar::<f64>().unwrap();
                let what = format!("{} {base:?} {:?}", family.name(), config.model_type);
                assert!((f64::from(got) / want - 1.0).abs() < 1e-5, "{what}: loss {got}, expected {want}");
                let mut seen = 0;
                for parameter in model.parameters() {
                    assert_eq!(parameter.has_gradient(), parameter.is_trainable(), "{what}: {}", parameter.name());
                    for (part, got) in gradient(parameter) {
                        let want = gradients.get(oracle.factors[&part].as_tensor()).unwrap().flatten_all().unwrap();
                        let want = want.to_vec1::<f64>().unwrap();
                        let size = want.iter().map(|x| x * x).sum::<f64>().sqrt();
                        let error = got.iter().zip(&want).map(|(g, w)| (f64::from(*g) - w).powi(2)).sum::<f64>().sqrt();
                        assert!(size > 1e-3, "{part}: the oracle's gradient is too small to tell");
                        assert!(error / size < 2e-5, "{what} {part}: off by {:.1e}", error / size);
                        seen += 1;
                    }
                }
                assert_eq!(seen, 2 * (7 * config.num_hidden_layers + 1), "A and B of every projection");
            }
        }
    }
}

/// The gradient of each part of a trained parameter.
fn gradient(parameter: &Parameter) -> Vec<(String, Vec<f32>)> {
    if !parameter.is_trainable() {
        return Vec::new();
    }
    let parts = parameter.split(parameter.gradient()).unwrap();
    parts.into_iter().map(|part| (part.name, part.data)).collect()
}

#[test]
fn gradients_are_finite_differences_of_the_oracle() {
    for base in [None, Some(Format::Q4_0)] {
        let config = config(ModelType::Qwen3, true);
        let adaptation = adaptation(base, &Target::ALL);
        let (inputs, targets, batch) = batch(&config, 2, 9);
        let (mut ctx, model) = (Ctx::cpu(Family::detect()), model(&config, &adaptation));
        model.accumulate(&mut ctx, &batch, 1.0, Dropout::off()).unwrap();
        let mut oracle = Oracle::new(&config, &adaptation);
        for (name, gradient) in model.trainable().flat_map(|p| gradient(p)) {
            let index = gradient.len() / 2;
            let mut at = |step: f64| {
                let var = oracle.factors[&name].clone();
                let mut moved = var.flatten_all().unwrap().to_vec1::<f64>().unwrap();
                moved[index] += step;
                let moved = Tensor::from_vec(moved, var.dims(), &Device::Cpu).unwrap();
                oracle.factors.insert(name.clone(), Var::from_tensor(&moved).unwrap());
                let loss = oracle.loss(&inputs, &targets).to_scalar::<f64>().unwrap();
                oracle.factors.insert(name.clone(), var);
                loss
            };
            let (slope, got) = ((at(1e-5) - at(-1e-5)) / 2e-5, f64::from(gradient[index]));
            let size = gradient.iter().map(|g| f64::from(g * g)).sum::<f64>().sqrt() / (gradient.len() as f64).sqrt();
            assert!((slope - got).abs() < 2e-4 * (size + got.abs()), "{base:?} {name}: {got}, slope {slope}");
        }
    }
}

/// A model of the merged weights.
fn merged(config: &GptConfig, Adaptation { base, lora, .. }: &Adaptation) -> Gpt {
    let untied = config.tie_word_embeddings && lora.targets.contains(&Target::Head);
    let config = GptConfig { tie_word_embeddings: config.tie_word_embeddings && !untied, ..config.clone() };
    Gpt::build(&config, &mut |name, shape| {
        let table = untied && name == "lm_head.weight";
        let mut weight = kept(if table { "model.embed_tokens.weight" } else { name }, shape, *base);
        if lora.corrects(name) {
            let [a, b] = names(name).map(|n| (n.clone(), if n.contains("lora_A") { shape[1] } else { shape[0] }));
            let [a, b] = [a, b].map(|(name, side)| factor(&name, side * lora.rank));
            gpt::ops::lora::merge(Family::detect(), &mut weight, (&a, &b, lora.rank), lora.scale());
        }
        Ok(weight)
    })
    .unwrap()
}

#[test]
fn base_and_adapter_give_the_logits_of_the_merged_model_for_every_subset_of_targets() {
    for config in [config(ModelType::Qwen3, true), config(ModelType::Llama, false)] {
        let (_, _, batch) = batch(&config, 2, 9);
        let mut ctx = Ctx::cpu(Family::detect());
        let mut logits = |model: &Gpt| {
            let states = model.states(&mut ctx, &batch).unwrap();
            let head = model.head(&mut ctx).unwrap();
            read(&states.value().matmul(&head.t().unwrap()).unwrap())
        };
        let base = logits(&Gpt::build(&config, &mut |n, s| Ok(reference::random_weight(n, s))).unwrap());
        for subset in 1..1u32 << Target::ALL.len() {
            let targets: Vec<_> = Target::ALL.into_iter().filter(|t| subset >> *t as u32 & 1 == 1).collect();
            let adaptation = adaptation(None, &targets);
            let adapted = logits(&model(&config, &adaptation));
            let merged = logits(&merged(&config, &adaptation));
            let size = base.iter().fold(1f32, |most, x| most.max(x.abs()));
            let off = |other: &[f32]| adapted.iter().zip(other).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max) / size;
            assert!(off(&merged) < 1e-5, "{targets:?}: merged is off by {}", off(&merged));
            assert!(off(&base) > 1e-3, "{targets:?}: the base gives the same logits");
        }
    }
}

#[test]
fn a_new_adapter_changes_nothing_and_learns_at_once() {
    let config = config(ModelType::Qwen3, true);
    let (_, _, batch) = batch(&config, 2, 9);
    let mut ctx = Ctx::cpu(Family::detect());
    let base = Gpt::build(&config, &mut |n, s| Ok(reference::random_weight(n, s))).unwrap();
    let adaptation = adaptation(None, &Target::ALL);
    let fresh = Gpt::adapted(&config, &adaptation, &mut |n, s| Ok(reference::random_weight(n, s))).unwrap();
    assert_eq!(read(&base.nll(&mut ctx, &batch).unwrap()), read(&fresh.nll(&mut ctx, &batch).unwrap()));
    fresh.accumulate(&mut ctx, &batch, 1.0, Dropout::off()).unwrap();
    let reached = fresh.trainable().flat_map(|p| gradient(p)).filter(|(name, _)| name.contains("lora_B"));
    assert!(reached.into_iter().all(|(_, gradient)| gradient.iter().any(|g| *g != 0.0)));
}

#[test]
fn recomputing_blocks_and_dropout_of_adapters_repeat_themselves() {
    let config = config(ModelType::Qwen3, true);
    let (_, _, batch) = batch(&config, 2, 11);
    let gradients = |recompute: bool, dropout: f32, pass: Dropout| {
        let mut adaptation = adaptation(Some(Format::Q8_0), &Target::ALL);
        adaptation.lora.dropout = dropout;
        let (mut ctx, mut model) = (Ctx::cpu(Family::detect()), model(&config, &adaptation));
        model.recompute = recompute;
        model.accumulate(&mut ctx, &batch, 0.1, pass).unwrap();
        model.trainable().map(|p: &Arc<Parameter>| read(p.gradient())).collect::<Vec<_>>()
    };
    let (on, other) = (Dropout::new(0.0, 1, 3, 0), Dropout::new(0.0, 1, 4, 0));
    assert_eq!(gradients(false, 0.3, on), gradients(true, 0.3, on));
    assert_ne!(gradients(false, 0.3, on), gradients(false, 0.3, other), "another step has another mask");
    assert_ne!(gradients(false, 0.3, on), gradients(false, 0.0, on));
    assert_eq!(gradients(false, 0.3, Dropout::off()), gradients(false, 0.0, on));
}

/// With a mask that is known the adapter's gradients are those of the masked input: dropout of 0 in expectation.
#[test]
fn dropout_of_adapters_is_right_on_average() {
    let config = GptConfig { num_hidden_layers: 1, windows: vec![None], ..config(ModelType::Llama, false) };
    let (_, _, batch) = batch(&config, 2, 11);
    let mut adaptation = adaptation(None, &[Target::Head, Target::Down]);
    let mut ctx = Ctx::cpu(Family::detect());
    let plain = model(&config, &adaptation);
    let want = read(&plain.accumulate(&mut ctx, &batch, 0.01, Dropout::off()).unwrap())[0];
    adaptation.lora.dropout = 0.2;
    let dropped = model(&config, &adaptation);
    let mut losses = Vec::new();
    for step in 0..200 {
        losses.push(read(&dropped.accumulate(&mut ctx, &batch, 0.01, Dropout::new(0.0, 1, step, 0)).unwrap())[0]);
    }
    let mean = losses.iter().sum::<f32>() / losses.len() as f32;
    assert!(losses.iter().any(|loss| (loss / want - 1.0).abs() > 1e-3), "masks change the loss");
    assert!((mean / want - 1.0).abs() < 0.02, "mean {mean}, without dropout {want}");
}

#[test]
fn a_base_in_blocks_takes_the_memory_of_its_file_and_a_steady_step_takes_no_more() {
    let config = config(ModelType::Qwen3, true);
    let (_, _, batch) = batch(&config, 2, 11);
    for (format, bits) in [(Format::Q8_0, 8.5), (Format::Q4_0, 4.5)] {
        let (mut ctx, model) = (Ctx::cpu(Family::detect()), model(&config, &adaptation(Some(format), &Target::ALL)));
        let resident: usize = model.parameters().iter().filter(|p| !p.is_trainable()).map(|p| p.bytes()).sum();
        let file: f64 = Gpt::tensor_shapes(&config)
            .iter()
            .map(|(_, shape)| shape.iter().product::<usize>() as f64 * if shape.len() == 2 { bits / 8.0 } else { 4.0 })
            .sum();
        assert!(resident as f64 <= 1.1 * file, "{resident} bytes, the file has {file}");
        let mut step = || {
            model.accumulate(&mut ctx, &batch, 1.0, Dropout::off()).unwrap();
            ctx.free_bytes()
        };
        let first = step();
        assert_eq!((step(), step()), (first, first), "the free list must neither grow nor shrink");
    }
}
