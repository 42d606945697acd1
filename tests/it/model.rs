//! The whole model against the f64 reference and candle's autograd: logits, loss, every gradient.

use gpt::model::config::{GptConfig, ModelType};
use gpt::model::gpt::{Batch, Gpt};
use gpt::nn::dropout::Dropout;
use gpt::ops::cross_entropy::IGNORE;
use gpt::ops::{ctx::Ctx, gemm::Precision, simd::Family, storage};
use gpt::random::{Purpose, Stream};

use crate::reference;

fn model(config: &GptConfig) -> Gpt {
    Gpt::build(config, &mut |name, shape| Ok(reference::random_weight(name, shape))).unwrap()
}

fn ids(salt: u64, rows: usize, seq: usize, vocab: usize) -> Vec<Vec<u32>> {
    let stream = Stream::new(9, Purpose::Test);
    let at = |r: usize, t: usize| stream.word(salt, (r * seq + t) as u32) % vocab as u32;
    (0..rows).map(|r| (0..seq).map(|t| at(r, t)).collect()).collect()
}

fn batch(inputs: &[Vec<u32>], targets: &[Vec<u32>]) -> Batch {
    Batch::new(inputs.concat(), targets.concat(), inputs[0].len())
}

fn configs() -> Vec<GptConfig> {
    [ModelType::Qwen3, ModelType::Llama]
        .into_iter()
        .flat_map(|m| [true, false].map(|tied| reference::small_config(m, tied)))
        .collect()
}

#[test]
fn loss_and_every_gradient_equal_candles_autograd() {
    for family in Family::ALL.into_iter().filter(|f| f.available()) {
        for config in configs() {
            let (rows, seq) = (3, 13);
            let (inputs, targets) = (ids(1, rows, seq, config.vocab_size), ids(2, rows, seq, config.vocab_size));
            let weights = reference::weights(&config);
            let loss = reference::nll(&reference::logits(&config, &weights, &inputs).unwrap(), &targets).unwrap();
            let oracle = loss.backward().unwrap();

            let (mut ctx, model) = (Ctx::cpu(family), model(&config));
            let got = model.accumulate(&mut ctx, &batch(&inputs, &targets), 1.0, Dropout::off()).unwrap();
            let got = storage::read::<f32>("test", &got).unwrap()[0];
            let want = loss.to_scalar::<f64>().unwrap();
            assert!((f64::from(got) / want - 1.0).abs() < 1e-5, "{}: loss {got}, expected {want}", family.name());
            for parameter in model.parameters() {
                assert!(parameter.has_gradient(), "{} got no gradient", parameter.name());
                let gradient = storage::read::<f32>("test", parameter.gradient()).unwrap();
                let columns = gradient.len() / parameter.parts.last().unwrap().rows.end;
                for part in &parameter.parts {
                    let want = oracle.get(weights[&part.name].as_tensor()).unwrap().flatten_all().unwrap();
                    let want = want.to_vec1::<f64>().unwrap();
                    let got = &gradient[part.rows.start * columns..part.rows.end * columns];
                    let size = want.iter().map(|x| x * x).sum::<f64>().sqrt();
                    let error = got.iter().zip(&want).map(|(g, w)| (f64::from(*g) - w).powi(2)).sum::<f64>().sqrt();
                    assert!(size > 1e-3, "{}: the oracle's gradient is too small to tell", part.name);
                    // f32 sums over tens of terms; a wrong formula errs by a tenth or more.
                    assert!(error / size < 2e-5, "{} {}: off by {:.1e}", family.name(), part.name, error / size);
                }
            }
        }
    }
}

/// bf16 rounds factors to 8 bits: errors of a few thousandths that average out, and never a wrong formula's tenths.
#[test]
fn products_in_bf16_give_nearly_the_same_loss_and_gradients() {
    for family in Family::ALL.into_iter().filter(|f| f.available()) {
        for config in configs() {
            let batch = batch(&ids(1, 3, 13, config.vocab_size), &ids(2, 3, 13, config.vocab_size));
            let run = |precision| {
                let (mut ctx, model) = (Ctx::cpu(family), model(&config));
                ctx.set_precision(precision);
                let loss = model.accumulate(&mut ctx, &batch, 1.0, Dropout::off()).unwrap();
                let read = |t: &candle_core::Tensor| storage::read::<f32>("test", t).unwrap().to_vec();
                (read(&loss)[0], model.parameters().iter().map(|p| read(p.gradient())).collect::<Vec<_>>())
            };
            let ((wide, wide_gradients), (narrow, gradients)) = (run(Precision::F32), run(Precision::Bf16));
            assert!(wide != narrow && (narrow / wide - 1.0).abs() < 5e-3, "{}: {narrow} against {wide}", family.name());
            for (wide, narrow) in wide_gradients.iter().zip(&gradients) {
                let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
                let off = norm(&mut wide.iter().zip(narrow).map(|(w, n)| w - n)) / norm(&mut wide.iter().copied());
                assert!(off < 0.06, "{}: a gradient is off by {off}", family.name());
            }
        }
    }
}

#[test]
fn recomputing_blocks_changes_no_gradient() {
    let config = reference::small_config(ModelType::Qwen3, true);
    let batch = batch(&ids(1, 2, 11, 64), &ids(2, 2, 11, 64));
    let gradients = |recompute: bool| {
        let (mut ctx, mut model) = (Ctx::cpu(Family::detect()), model(&config));
        model.recompute = recompute;
        model.accumulate(&mut ctx, &batch, 0.1, Dropout::new(0.2, 1, 3, 0)).unwrap();
        let read = |p: &std::sync::Arc<gpt::nn::parameter::Parameter>| {
            storage::read::<f32>("test", p.gradient()).unwrap().to_vec()
        };
        model.parameters().iter().map(read).collect::<Vec<_>>()
    };
    assert_eq!(gradients(false), gradients(true));
}

/// Positions count on within a window, so that rotations, and with them the last bits, differ from those of a document alone.
#[test]
fn documents_that_share_a_window_and_do_not_see_each_other_train_as_if_alone() {
    for config in configs() {
        let lengths = [1, 4, 7, 3];
        let seq = lengths.iter().sum();
        let (inputs, targets) = (ids(1, 2, seq, 64), ids(2, 2, seq, 64));
        let read = |t: &candle_core::Tensor| storage::read::<f32>("test", t).unwrap().to_vec();
        let gradients = |model: &Gpt| model.parameters().iter().map(|p| read(p.gradient())).collect::<Vec<_>>();
        let mut ctx = Ctx::cpu(Family::detect());
        let (together, apart, across) = (model(&config), model(&config), model(&config));
        let starts: Vec<u32> = lengths
            .iter()
            .scan(0, |at, n| {
                *at += n;
                Some(vec![(*at - n) as u32; *n])
            })
            .flatten()
            .collect();
        let mut packed = batch(&inputs, &targets);
        let loss = read(&across.accumulate(&mut ctx, &packed, 1.0, Dropout::off()).unwrap())[0];
        packed.layout.starts = Some([&starts[..], &starts].concat().into());
        let packed_loss = read(&together.accumulate(&mut ctx, &packed, 1.0, Dropout::off()).unwrap())[0];
        let mut alone_loss = 0.0;
        for (inputs, targets) in inputs.iter().zip(&targets) {
            let mut at = 0;
            for n in lengths {
                let one = Batch::new(inputs[at..at + n].to_vec(), targets[at..at + n].to_vec(), n);
                alone_loss += read(&apart.accumulate(&mut ctx, &one, 1.0, Dropout::off()).unwrap())[0];
                at += n;
            }
        }
        assert!((packed_loss / alone_loss - 1.0).abs() < 1e-6, "{packed_loss} against {alone_loss}");
        assert!((packed_loss / loss - 1.0).abs() > 1e-4, "seeing the documents before changes the loss");
        for (packed, alone) in gradients(&together).iter().zip(&gradients(&apart)) {
            let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
            let off = norm(&mut packed.iter().zip(alone).map(|(a, b)| a - b)) / norm(&mut alone.iter().copied());
            assert!(off < 1e-5, "a gradient is off by {off}");
        }
    }
}

#[test]
fn micro_batches_add_up_to_the_whole() {
    let config = reference::small_config(ModelType::Qwen3, false);
    let (inputs, mut targets) = (ids(1, 4, 9, 64), ids(2, 4, 9, 64));
    targets[0][2..].fill(IGNORE);
    let whole = batch(&inputs, &targets);
    let scale = 1.0 / whole.valid() as f32;
    let (mut ctx, one, four) = (Ctx::cpu(Family::detect()), model(&config), model(&config));
    one.accumulate(&mut ctx, &whole, scale, Dropout::off()).unwrap();
    for row in 0..4 {
        four.accumulate(&mut ctx, &batch(&inputs[row..=row], &targets[row..=row]), scale, Dropout::off()).unwrap();
    }
    for (a, b) in one.parameters().iter().zip(four.parameters()) {
        let (a, b) = (a.gradient(), b.gradient());
        let (a, b) = (storage::read::<f32>("test", a).unwrap(), storage::read::<f32>("test", b).unwrap());
        assert!(a.iter().zip(b.iter()).all(|(a, b)| (a - b).abs() < 1e-6 * (1.0 + a.abs())));
    }
}

#[test]
fn a_steady_step_takes_all_its_memory_from_the_free_list() {
    let config = reference::small_config(ModelType::Qwen3, true);
    let (mut ctx, model) = (Ctx::cpu(Family::detect()), model(&config));
    let batch = batch(&ids(1, 2, 11, 64), &ids(2, 2, 11, 64));
    let mut step = || {
        model.accumulate(&mut ctx, &batch, 1.0, Dropout::off()).unwrap();
        ctx.free_bytes()
    };
    let first = step();
    assert!(first > 0);
    assert_eq!((step(), step()), (first, first), "the free list must neither grow nor shrink");
}
