//! Speed of single ops: `cargo bench --bench ops`, or `cargo bench --bench ops -- gemm` for some of them.
//!
//! Rates are floating-point operations a second ("elem/s" in criterion's words), so they can be held against the
//! machine's peak and other libraries' products.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use gpt::ops::ctx::Ctx;
use gpt::ops::gemm::{Matrix, Precision, Store, gemm};
use gpt::ops::simd::Family;
use gpt::random::{Purpose, Stream};

fn numbers(position: u64, len: usize) -> Vec<f32> {
    let stream = Stream::new(1, Purpose::Test);
    (0..len).map(|i| stream.normal(position, i as u32)).collect()
}

/// y = x W^T, dx = dy W and dW = dy^T x of linear layers: rows, inputs, outputs.
const LINEAR: [(usize, usize, usize); 6] =
    [(1024, 128, 768), (2048, 384, 1152), (2048, 384, 2048), (2048, 1024, 384), (1024, 768, 3072), (1024, 2048, 768)];

fn products(c: &mut Criterion) {
    for precision in [Precision::F32, Precision::Bf16] {
        let mut ctx = Ctx::cpu(Family::detect());
        ctx.set_precision(precision);
        for (m, k, n) in LINEAR {
            let mut group = c.benchmark_group(format!("gemm {} {m}x{k}x{n}", precision.name()));
            group.throughput(Throughput::Elements(2 * (m * k * n) as u64));
            let (x, w, dy) = (numbers(1, m * k), numbers(2, n * k), numbers(3, m * n));
            let (x, w, dy) = (Matrix::new(&x, m, k), Matrix::new(&w, n, k), Matrix::new(&dy, m, n));
            let (mut y, mut dx, mut dw) = (vec![0.0; m * n], vec![0.0; m * k], vec![0.0; n * k]);
            group.bench_function("forward", |b| b.iter(|| gemm(&mut ctx, x, w.t(), &mut y, Store::Set)));
            group.bench_function("backward_input", |b| b.iter(|| gemm(&mut ctx, dy, w, &mut dx, Store::Set)));
            group.bench_function("backward_weight", |b| b.iter(|| gemm(&mut ctx, dy.t(), x, &mut dw, Store::Set)));
            group.finish();
        }
    }
}

/// Everything runs on a worker of the pool, as training does.
fn on_the_pool(c: &mut Criterion) {
    rayon::ThreadPoolBuilder::new().build().expect("threads start").install(|| products(c));
}

criterion_group!(benches, on_the_pool);
criterion_main!(benches);
