//! What the parity tests share: numbers to test on, families to run, and the comparison.

use crate::emulator;
use candle_core::{Device, Tensor};
use gpt::ops::{ctx::Ctx, simd::Family, storage};
use gpt::random::{Purpose, Stream};

/// A context for every kernel family that this machine can run, and one that emulates Metal if it can.
pub fn contexts() -> Vec<Ctx> {
    let families = Family::ALL.into_iter().filter(|f| f.available()).map(Ctx::cpu);
    families.chain(emulator::available().then(emulator::ctx)).collect()
}

/// Standard normal numbers, the same for the same `salt`.
pub fn normal(salt: u64, len: usize) -> Vec<f32> {
    let stream = Stream::new(11, Purpose::Test);
    (0..len).map(|i| stream.normal(salt, i as u32)).collect()
}

/// `normal` as a tensor on the CPU.
pub fn normal_tensor(salt: u64, shape: &[usize]) -> Tensor {
    Tensor::from_vec(normal(salt, shape.iter().product()), shape, &Device::Cpu).unwrap()
}

/// The elements of a contiguous f32 tensor.
pub fn values(tensor: &Tensor) -> Vec<f32> {
    storage::read::<f32>("test", tensor).unwrap().to_vec()
}

/// Fails unless |got - want| <= tolerance * (1 + |want|) everywhere; `what` names the case.
#[track_caller]
pub fn assert_close(what: &str, got: &[f32], want: &[f32], tolerance: f32) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= tolerance * (1.0 + w.abs()), "{what}: element {i} is {g}, expected {w}");
    }
}

/// `values` as a tensor that owns its storage, so that an op may write it.
pub fn tensor(values: Vec<f32>, shape: &[usize]) -> Tensor {
    storage::tensor(values, shape)
}

/// A gradient target full of NaN: whatever `Store::Set` leaves unwritten shows.
pub fn unset(shape: &[usize]) -> Tensor {
    tensor(vec![f32::NAN; shape.iter().product()], shape)
}

/// Puts NaN vectors of those lengths on the free list: an output element that an op leaves unwritten shows.
pub fn poison(ctx: &mut Ctx, lengths: &[usize]) {
    lengths.iter().for_each(|&length| ctx.recycle(vec![f32::NAN; length]));
}

/// Runs `f` inside a pool of that many threads.
pub fn on_threads<R: Send>(threads: usize, f: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(f)
}

/// f64 results of a reference as f32.
pub fn narrowed(values: &[f64]) -> Vec<f32> {
    values.iter().map(|&v| v as f32).collect()
}

/// Σ a b, the loss that has `b` as the gradient of `a`.
pub fn weighted(a: &[f64], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * f64::from(*b)).sum()
}

/// Fails unless the gradient predicts how `loss` changes along a random direction, to `tolerance` of the change.
#[track_caller]
pub fn assert_slope(what: &str, loss: impl Fn(&[f32]) -> f64, x: &[f32], gradient: &[f32], tolerance: f64) {
    let direction = normal(99, x.len());
    let moved = |h: f32| x.iter().zip(&direction).map(|(x, d)| x + h * d).collect::<Vec<f32>>();
    let (up, down) = (moved(1e-3), moved(-1e-3));
    let change = loss(&up) - loss(&down);
    // The differences of the rounded points, so that rounding x itself costs nothing.
    let steps = up.iter().zip(&down).map(|(u, d)| f64::from(*u) - f64::from(*d));
    let predicted: f64 = gradient.iter().zip(steps).map(|(g, s)| f64::from(*g) * s).sum();
    let size = gradient.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt() * 1e-3;
    assert!((change - predicted).abs() <= tolerance * size, "{what}: changes by {change}, predicted {predicted}");
}
