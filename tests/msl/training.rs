//! Whole training steps over emulated kernels against those of the CPU.

use gpt::model::config::ModelType;
use gpt::ops::ctx::Ctx;
use gpt::ops::simd::Family;
use gpt::trainer::optimizer::Kind;

use super::emulator;
use super::scenes::train;

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
