//! Speed of single ops: `cargo bench --bench ops`, or `cargo bench --bench ops -- "gemm bf16"` for some of them.
//!
//! Products are given as operations a second and decoding's as bytes of weights a second, so that they can be held against
//! the machine's peak and other libraries.

use std::hint::black_box;
use std::time::Instant;

use criterion::{Bencher, Criterion, Throughput, criterion_group, criterion_main};
use gpt::ops::attention::{self, Attention};
use gpt::ops::ctx::Ctx;
use gpt::ops::decode::aligned::Arena;
use gpt::ops::decode::weight::{Weight, WeightType, multiply};
use gpt::ops::gemm::{Matrix, Precision, Store, gemm};
use gpt::ops::heads::Heads;
use gpt::ops::simd::Family;
use gpt::ops::storage;
use gpt::random::{Purpose, Stream};

fn numbers(position: u64, len: usize) -> Vec<f32> {
    let stream = Stream::new(1, Purpose::Test);
    (0..len).map(|i| stream.normal(position, i as u32)).collect()
}

/// Times `f` on a worker of the pool, where training and decoding run too.
fn on_the_pool(b: &mut Bencher, mut f: impl FnMut() + Send) {
    b.iter_custom(|rounds| {
        rayon::scope(|_| {
            let start = Instant::now();
            (0..rounds).for_each(|_| f());
            start.elapsed()
        })
    });
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
            group.bench_function("forward", |b| on_the_pool(b, || gemm(&mut ctx, x, w.t(), &mut y, Store::Set)));
            group.bench_function("backward_input", |b| on_the_pool(b, || gemm(&mut ctx, dy, w, &mut dx, Store::Set)));
            group.bench_function("backward_weight", |b| {
                on_the_pool(b, || gemm(&mut ctx, dy.t(), x, &mut dw, Store::Set))
            });
            group.finish();
        }
    }
}

/// Forward and backward of medium's attention.
fn attention_of_medium(c: &mut Criterion) {
    let shape = Attention {
        batch: 8,
        seq: 256,
        heads: Heads { attention: 6, key_value: 6, dim: 64 },
        window: None,
        starts: None,
    };
    let (n, width) = (shape.batch * shape.seq, shape.heads.attention_size());
    let qkv = storage::tensor(numbers(1, n * shape.heads.qkv_size()), (n, shape.heads.qkv_size()));
    let (dout, dqkv) = (storage::tensor(numbers(2, n * width), (n, width)), qkv.copy().expect("a copy in memory"));
    let mut ctx = Ctx::cpu(Family::detect());
    let mut group = c.benchmark_group("attention medium 8x256");
    group.bench_function("forward", |b| {
        on_the_pool(b, || drop(black_box(attention::forward(&mut ctx, &qkv, shape).expect("shapes fit"))))
    });
    let (out, lse) = attention::forward(&mut ctx, &qkv, shape).expect("shapes fit");
    let saved = attention::Saved { qkv: &qkv, out: &out, lse: &lse };
    group.bench_function("backward", |b| {
        on_the_pool(b, || attention::backward(&mut ctx, saved, &dout, shape, (&dqkv, Store::Set)).expect("shapes fit"))
    });
    group.finish();
}

/// Rows times a weight of huge's, in every type.
fn rows_of_decoding(c: &mut Criterion) {
    let (n, k) = (4096, 768);
    let ctx = Ctx::cpu(Family::detect());
    for kind in WeightType::all() {
        let weight = Weight::pack(&mut Arena::default(), kind, &[&numbers(1, n * k)], k).expect("whole blocks");
        let mut group = c.benchmark_group(format!("decode {} {k}x{n}", kind.name()));
        group.throughput(Throughput::Bytes(weight.bytes() as u64));
        for rows in [1, 4, 8, 32] {
            let (x, mut y) = (numbers(2, rows * k), vec![0.0; rows * n]);
            group.bench_function(format!("{rows} rows"), |b| {
                on_the_pool(b, || multiply(&ctx, &x, &weight, &mut y, Store::Set))
            });
        }
        group.finish();
    }
}

criterion_group!(benches, products, attention_of_medium, rows_of_decoding);
criterion_main!(benches);
