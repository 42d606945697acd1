//! Muon: momentum whose matrix is brought near to an orthogonal one before it is applied (Jordan et al., 2024).
//!
//! Each part (q, k, v; gate, up) is a matrix of its own. The update is scaled by 0.2 sqrt(max(rows, columns)), so that it is
//! as large as AdamW's and one learning rate and decay fit both (Liu et al., arXiv 2502.16982).

use std::ops::Range;

use candle_core::{DType, Tensor};
use rayon::prelude::*;

use super::adamw::{average, average_gpu, ema_decay};
use super::ctx::{Ctx, Value};
use super::gemm::{Matrix, Store, gemm};
use super::gpu::{self, Arg, Product, kernels};
use super::gradient_norm::{norm_gpu, square_sum};
use super::scalars::Scalar;
use super::simd::simd_fn;
use super::storage;
use crate::error::{Error, Result};

#[derive(Clone, Copy, Debug)]
pub struct Muon {
    pub momentum: f32,
    /// Decoupled: p -= lr * weight_decay * p.
    pub weight_decay: f32,
    /// Newton-Schulz steps.
    pub iterations: usize,
}

impl Default for Muon {
    fn default() -> Self {
        Self { momentum: 0.95, weight_decay: 0.0, iterations: 5 }
    }
}

/// The tensors of one parameter (rows, columns), and the row ranges that are matrices of their own.
#[derive(Clone)]
pub struct Target<'a> {
    pub master: &'a Tensor,
    pub gradient: &'a Tensor,
    pub momentum: &'a Tensor,
    pub ema: Option<&'a Tensor>,
    pub parts: Vec<Range<usize>>,
}

/// One matrix to update.
struct Job<'a> {
    gradient: &'a [f32],
    momentum: &'a mut [f32],
    master: &'a mut [f32],
    rows: usize,
    columns: usize,
}

/// One update of every part of every target; nothing at all when `Skip` is set. Matrices are small and many, so each is
/// worked on by one thread.
pub fn step(ctx: &mut Ctx, targets: &[Target], muon: Muon, scalars: &Tensor) -> Result<()> {
    ctx.launch(0);
    if ctx.has_gpu() {
        return targets.iter().try_for_each(|target| step_gpu(ctx, target, muon, scalars));
    }
    let s = storage::read::<f32>("muon", scalars)?.to_vec();
    if s[Scalar::Skip as usize] != 0.0 {
        return Ok(());
    }
    let mut opened = Vec::with_capacity(targets.len());
    for target in targets {
        opened.push((
            storage::read::<f32>("muon", target.gradient)?,
            storage::write::<f32>("muon", target.momentum)?,
            storage::write::<f32>("muon", target.master)?,
        ));
    }
    let mut jobs = Vec::new();
    for (target, (gradient, momentum, master)) in targets.iter().zip(&mut opened) {
        let (_, columns) = target.master.dims2()?;
        let parts = target.parts()?;
        let (mut gradient, mut momentum, mut master): (&[f32], &mut [f32], &mut [f32]) = (gradient, momentum, master);
        for rows in parts {
            let (g, g_rest) = gradient.split_at(rows * columns);
            let (m, m_rest) = momentum.split_at_mut(rows * columns);
            let (p, p_rest) = master.split_at_mut(rows * columns);
            jobs.push(Job { gradient: g, momentum: m, master: p, rows, columns });
            (gradient, momentum, master) = (g_rest, m_rest, p_rest);
        }
    }
    let (lr, clip) = (s[Scalar::LearningRate as usize], s[Scalar::Clip as usize]);
    let shared: &Ctx = ctx;
    jobs.into_par_iter().for_each(|job| update(&mut shared.fork(), job, muon, lr, clip));
    for (target, (_, _, master)) in targets.iter().zip(&opened) {
        average(ctx, master, target.ema, ema_decay(&s))?;
    }
    Ok(())
}

impl Target<'_> {
    /// The rows of each part, which must be all there are.
    fn parts(&self) -> Result<Vec<usize>> {
        let (_, columns) = self.master.dims2()?;
        let parts: Vec<_> = self.parts.iter().map(Range::len).collect();
        let found = [self.gradient, self.momentum, self.master].map(Tensor::elem_count);
        if found != [parts.iter().sum::<usize>() * columns; 3] {
            let expected = format!("gradient, momentum and master in parts of {parts:?} rows of {columns}");
            return Err(Error::op("muon", expected, format!("{found:?} elements")));
        }
        Ok(parts)
    }
}

fn step_gpu(ctx: &mut Ctx, target: &Target, muon: Muon, scalars: &Tensor) -> Result<()> {
    let Target { master, gradient, momentum, ema, .. } = *target;
    let ((_, columns), count) = (master.dims2()?, master.elem_count());
    let update = ctx.output(DType::F32, count)?;
    let args = [Arg::read(gradient), Arg::update(momentum), Arg::write(&update), Arg::read(scalars)];
    let numbers = [count.into(), muon.momentum.into()];
    ctx.dispatch(&kernels::MUON_GATHER, DType::F32, &args, &numbers, count.div_ceil(256))?;
    let mut first = 0;
    for rows in target.parts()? {
        let count = rows * columns;
        let part = ctx.output(DType::F32, count)?;
        let args = [Arg::read(&update).at(first), Arg::write(&part)];
        ctx.dispatch(&kernels::COPY, DType::F32, &args, &[count.into()], count.div_ceil(256))?;
        let part = orthogonalize_gpu(ctx, part, rows, columns, muon.iterations)?;
        let args = [Arg::update(master).at(first), Arg::read(&part), Arg::read(scalars)];
        let scale = 0.2 * (rows.max(columns) as f32).sqrt();
        let numbers = [count.into(), muon.weight_decay.into(), scale.into()];
        ctx.dispatch(&kernels::MUON_APPLY, DType::F32, &args, &numbers, count.div_ceil(256))?;
        first += count;
    }
    average_gpu(ctx, master, ema, scalars)
}

fn update(ctx: &mut Ctx, job: Job, muon: Muon, lr: f32, clip: f32) {
    let Job { gradient, momentum, master, rows, columns } = job;
    let mut update = ctx.vec::<f32>(gradient.len());
    gather(ctx.family(), gradient, momentum, &mut update, muon.momentum, clip);
    orthogonalize(ctx, &mut update, rows, columns, muon.iterations);
    let rate = lr * 0.2 * (rows.max(columns) as f32).sqrt();
    apply(ctx.family(), master, &update, lr * muon.weight_decay, rate);
    ctx.recycle(update);
}

simd_fn! {
/// The momentum with this gradient in it, and in `update` as it will be after one more such gradient (Nesterov).
fn gather<S>(gradient: &[f32], momentum: &mut [f32], update: &mut [f32], beta: f32, clip: f32) {
    for ((u, g), m) in update.iter_mut().zip(gradient).zip(momentum) {
        let g = (1.0 - beta) * clip * g;
        *m = S::fma(beta, *m, g);
        *u = S::fma(beta, *m, g);
    }
}
}

simd_fn! {
fn apply<S>(master: &mut [f32], update: &[f32], decay: f32, rate: f32) {
    for (p, u) in master.iter_mut().zip(update) {
        *p -= S::fma(decay, *p, rate * u);
    }
}
}

simd_fn! {
/// p = c p + b g, and a more on the diagonal of its `small` columns.
fn polynomial<S>(p: &mut [f32], g: &[f32], small: usize, a: f32, b: f32, c: f32) {
    for (p, g) in p.iter_mut().zip(g) {
        *p = S::fma(c, *p, b * g);
    }
    for i in 0..small {
        p[i * small + i] += a;
    }
}
}

simd_fn! {
fn scale_all<S>(x: &mut [f32], factor: f32) {
    for x in x {
        *x *= factor;
    }
}
}

/// The coefficients of the iteration.
const A: f32 = 3.4445;
const B: f32 = -4.7750;
const C: f32 = 2.0315;

/// Brings the singular values of x (rows, columns) near to one, by the quintic Newton-Schulz iteration
/// X <- a X + (b A + c A A) X with A = X X^T, on the smaller side.
pub fn orthogonalize(ctx: &mut Ctx, x: &mut [f32], rows: usize, columns: usize, iterations: usize) {
    let norm = square_sum(ctx, x).sqrt() as f32;
    scale_all(ctx.family(), x, 1.0 / (norm + 1e-7));
    let small = rows.min(columns);
    let (mut gram, mut poly) = (ctx.vec::<f32>(small * small), ctx.vec::<f32>(small * small));
    let mut next = ctx.vec::<f32>(x.len());
    for _ in 0..iterations {
        let wide = Matrix::new(x, rows, columns);
        let (left, right) = if rows <= columns { (wide, wide.t()) } else { (wide.t(), wide) };
        gemm(ctx, left, right, &mut gram, Store::Set);
        let square = Matrix::new(&gram, small, small);
        gemm(ctx, square, square, &mut poly, Store::Set);
        polynomial(ctx.family(), &mut poly, &gram, small, A, B, C);
        let poly = Matrix::new(&poly, small, small);
        let (left, right) = if rows <= columns { (poly, wide) } else { (wide, poly) };
        gemm(ctx, left, right, &mut next, Store::Set);
        x.copy_from_slice(&next);
    }
    ctx.recycle(gram);
    ctx.recycle(poly);
    ctx.recycle(next);
}

/// `orthogonalize` on a GPU.
fn orthogonalize_gpu(ctx: &mut Ctx, mut x: Value, rows: usize, columns: usize, iterations: usize) -> Result<Value> {
    let (count, small) = (rows * columns, rows.min(columns));
    let norm = ctx.output(DType::F32, 1)?;
    norm_gpu(ctx, std::iter::once(Arg::read(&x)), (&norm, 0))?;
    let args = [Arg::update(&x), Arg::read(&norm)];
    ctx.dispatch(&kernels::MUON_NORMALISE, DType::F32, &args, &[count.into()], count.div_ceil(256))?;
    let (gram, poly) = (ctx.output(DType::F32, small * small)?, ctx.output(DType::F32, small * small)?);
    for _ in 0..iterations {
        let wide = gpu::Matrix::new(&x, rows, columns);
        let (a, b) = if rows <= columns { (wide, wide.t()) } else { (wide.t(), wide) };
        ctx.multiply(&Product { a, b, c: Arg::write(&gram) })?;
        let square = gpu::Matrix::new(&gram, small, small);
        ctx.multiply(&Product { a: square, b: square, c: Arg::write(&poly) })?;
        let (args, count) = ([Arg::update(&poly), Arg::read(&gram)], small * small);
        let numbers = [count.into(), small.into(), A.into(), B.into(), C.into()];
        ctx.dispatch(&kernels::MUON_POLYNOMIAL, DType::F32, &args, &numbers, count.div_ceil(256))?;
        let next = ctx.output(DType::F32, (rows, columns))?;
        let poly = gpu::Matrix::new(&poly, small, small);
        let (a, b) = if rows <= columns { (poly, wide) } else { (wide, poly) };
        ctx.multiply(&Product { a, b, c: Arg::write(&next) })?;
        x = next;
    }
    Ok(x)
}
