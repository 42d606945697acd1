//! What the parity tests share: numbers to test on, families to run, and the comparison.

use candle_core::{Device, Tensor};
use gpt::ops::{ctx::Ctx, simd::Family, storage};
use gpt::random::{Purpose, Stream};

/// A context for every kernel family that this machine can run.
pub fn contexts() -> Vec<Ctx> {
    Family::ALL.into_iter().filter(|f| f.available()).map(Ctx::cpu).collect()
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
