//! `gpt doctor --metal` in the emulator: every check passes, and together they use every kernel of the table.

use std::collections::BTreeSet;
use std::sync::Arc;

use gpt::ops::ctx::Ctx;
use gpt::ops::gpu::kernels::ALL;
use gpt::ops::simd::Family;
use gpt::recipes::doctor::metal::checks;

use super::emulator::{Emulator, available};
use super::scenes::SMALL;

#[test]
fn the_self_test_passes_and_leaves_no_kernel_out() {
    if !available() {
        return;
    }
    let emulator = Arc::new(Emulator::recording());
    let gpu = Ctx::gpu(emulator.clone(), Family::detect());
    let found = checks(&mut Ctx::cpu(Family::detect()), &gpu, SMALL);
    let wrong: Vec<_> = found.checks.iter().filter(|check| !check.passed).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    let used = emulator.records.as_ref().unwrap().lock().unwrap();
    let used: BTreeSet<&str> = used.iter().map(|record| record.function.as_str()).collect();
    let is_used = |kernel: &&&gpt::ops::gpu::Kernel| kernel.functions().iter().any(|f| used.contains(f.as_str()));
    let unused: Vec<_> = ALL.iter().filter(|kernel| !is_used(kernel)).map(|kernel| kernel.name).collect();
    assert!(unused.is_empty(), "{unused:?}");
}
