//! Whole training steps over emulated kernels against those of the CPU.

use std::sync::Arc;

use gpt::model::config::ModelType;
use gpt::ops::ctx::Ctx;
use gpt::ops::gpu::counting::Counting;
use gpt::ops::simd::Family;
use gpt::ops::storage;
use gpt::trainer::optimizer::Kind;

use super::emulator;
use super::scenes::{step, train, trainer};

#[test]
fn steps_are_those_of_the_cpu() {
    if !emulator::available() {
        return;
    }
    for (kind, model) in [(Kind::Adamw, (ModelType::Qwen3, Some(5))), (Kind::Muon, (ModelType::Llama, None))] {
        let (cpu, weights) = train(Ctx::cpu(Family::detect()), kind, model, 3);
        let (gpu, emulated) = train(emulator::ctx(), kind, model, 3);
        for (a, b) in cpu.iter().zip(&gpu) {
            assert!((a.loss - b.loss).abs() < 1e-5 * a.loss, "{a:?} and {b:?}");
            assert!((a.gradient_norm - b.gradient_norm).abs() < 1e-4 * a.gradient_norm, "{a:?} and {b:?}");
        }
        assert!(cpu.iter().zip(&gpu).all(|(a, b)| !a.skipped && !b.skipped));
        // An update divides by the size of the gradient: where that is nearly nothing its sign may differ, and so the whole step.
        let pairs = weights.iter().flatten().zip(emulated.iter().flatten());
        let far = pairs.clone().filter(|(a, b)| (**a - **b).abs() > 1e-4).count();
        assert!(far * 200 < pairs.count(), "{far} weights are more than 1e-4 apart");
    }
}

#[test]
fn a_step_looks_into_nothing_before_it_is_done() {
    for kind in [Kind::Adamw, Kind::Muon] {
        let reads = [1, 4].map(|layers| {
            let ctx = Ctx::gpu(Arc::new(Counting), Family::detect());
            let mut trainer = trainer(ctx, kind, (ModelType::Qwen3, vec![None; layers]));
            step(&mut trainer);
            let before = storage::reads();
            step(&mut trainer);
            let counts = trainer.ctx.take_counts();
            // One for each micro-batch of both steps, and what the optimizer does goes off with the record's first read.
            assert_eq!(counts.command_buffers, 4);
            storage::reads() - before
        });
        // The learning rate and the loss are set before, and three numbers of the record are read after.
        assert_eq!(reads, [5, 5]);
    }
}
