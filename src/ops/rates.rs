//! What this machine reaches on the two things that bound everything else: products and reads. Called by `gpt bench`, so that
//! its figures can be given as shares of them, measured in the same process.

use std::time::Instant;

use rayon::prelude::*;

use candle_core::DType;

use super::add;
use super::ctx::Ctx;
use super::gemm::{self, Matrix, Store};
use super::gpu::{self, Arg, Product};
use super::simd::{self, simd_fn};
use super::storage;
use crate::error::Result;

/// Seconds that a measurement lasts at least.
const LONG_ENOUGH: f64 = 0.2;

/// Floating-point operations a second of the best of several products of 768 x 768 x 768, the right side packed before, in the
/// context's precision.
pub fn matmul(ctx: &mut Ctx) -> Result<f64> {
    if ctx.has_gpu() {
        return matmul_gpu(ctx);
    }
    const N: usize = 768;
    let a: Vec<f32> = (0..N * N).map(|i| (i % 17) as f32 - 8.0).collect();
    let mut c = vec![0.0; N * N];
    let b = Matrix::new(&a, N, N).t();
    let packed = gemm::pack(ctx, b);
    let best = fastest(|| gemm::multiply_packed(ctx, Matrix::new(&a, N, N), (b, &packed), &mut c, Store::Set));
    packed.recycle(ctx);
    Ok(2.0 * (N * N * N) as f64 / best)
}

/// The same of products of 2048 x 2048 x 2048 on a GPU.
fn matmul_gpu(ctx: &mut Ctx) -> Result<f64> {
    const N: usize = 2048;
    let [a, b] = [0; 2].map(|_| storage::tensor(vec![1f32; N * N], (N, N)));
    let c = ctx.output(DType::F32, (N, N))?;
    let mut done = Ok(());
    let best = fastest(|| {
        let (a, b) = (gpu::Matrix::new(&a, N, N), gpu::Matrix::new(&b, N, N));
        let product = ctx.multiply(&Product { a, b, c: Arg::write(&c) });
        done = product.and_then(|()| ctx.wait());
    });
    done.map(|()| 2.0 * (N * N * N) as f64 / best)
}

/// Bytes a second at which all threads read `bytes` again and again: from a cache if they fit into one.
pub fn stream(ctx: &mut Ctx, bytes: usize) -> Result<f64> {
    if ctx.has_gpu() {
        return stream_gpu(ctx, bytes);
    }
    let data = vec![1f32; (bytes / 4).max(1024)];
    // As many parts as the products of decoding have tasks, so that a part stays with its core's cache.
    let part = data.len().div_ceil(2 * rayon::current_num_threads());
    let mut sums = vec![0f32; data.len().div_ceil(part)];
    let best = fastest(|| {
        let parts = sums.par_iter_mut().zip(data.par_chunks(part)).with_max_len(1);
        parts.for_each(|(sum, data)| *sum = sum_of(ctx.family(), data));
    });
    assert!(sums.iter().all(|sum| *sum > 0.0), "the sums are used, so they are computed");
    Ok((data.len() * 4) as f64 / best)
}

/// The same on a GPU: half of the bytes are read, and as many are written.
fn stream_gpu(ctx: &mut Ctx, bytes: usize) -> Result<f64> {
    let count = (bytes / 8).max(1 << 20);
    let data = storage::tensor(vec![1f32; count], count);
    let mut done = Ok(());
    let best = fastest(|| done = add::copy(ctx, &data).map(drop).and_then(|()| ctx.wait()));
    done.map(|()| (8 * count) as f64 / best)
}

/// The shortest time of a call, over at least `LONG_ENOUGH` seconds of calls.
fn fastest(mut f: impl FnMut()) -> f64 {
    let (start, mut best) = (Instant::now(), f64::INFINITY);
    while start.elapsed().as_secs_f64() < LONG_ENOUGH {
        let call = Instant::now();
        f();
        best = best.min(call.elapsed().as_secs_f64());
    }
    best
}

simd_fn! {
/// In eight times sixteen chains, so that the additions do not bound the reads.
fn sum_of<S>(data: &[f32]) -> f32 {
    const WIDE: usize = 128;
    let mut acc = [0f32; WIDE];
    let (whole, rest) = data.as_chunks::<WIDE>();
    for x in whole {
        for i in 0..WIDE {
            acc[i] += x[i];
        }
    }
    simd::sum(&acc) + simd::sum(rest)
}
}
