//! Muon: momentum whose matrix is brought near to an orthogonal one before it is applied (Jordan et al., 2024).
//!
//! Each part (q, k, v; gate, up) is a matrix of its own. The update is scaled by 0.2 sqrt(max(rows, columns)), so that it is
//! as large as AdamW's and one learning rate and decay fit both (Liu et al., arXiv 2502.16982).

use std::ops::Range;

use candle_core::Tensor;
use rayon::prelude::*;

use super::adamw::{average, ema_decay};
use super::add::CHUNK;
use super::ctx::Ctx;
use super::gemm::{Matrix, Store, gemm};
use super::gradient_norm::square_sum;
use super::scalars::Scalar;
use super::storage;
use crate::error::Result;

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
        let (mut gradient, mut momentum, mut master): (&[f32], &mut [f32], &mut [f32]) = (gradient, momentum, master);
        for part in &target.parts {
            let rows = part.len();
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

fn update(ctx: &mut Ctx, job: Job, muon: Muon, lr: f32, clip: f32) {
    let Job { gradient, momentum, master, rows, columns } = job;
    let beta = muon.momentum;
    let mut update = ctx.vec::<f32>(gradient.len());
    for ((u, g), m) in update.iter_mut().zip(gradient).zip(momentum) {
        let g = g * clip;
        *m = beta * *m + (1.0 - beta) * g;
        // Nesterov: the momentum as it will be after one more such gradient.
        *u = beta * *m + (1.0 - beta) * g;
    }
    orthogonalize(ctx, &mut update, rows, columns, muon.iterations);
    let (keep, rate) = (1.0 - lr * muon.weight_decay, -lr * 0.2 * (rows.max(columns) as f32).sqrt());
    master.iter_mut().zip(&update).for_each(|(p, u)| *p = keep * *p + rate * u);
    ctx.recycle(update);
}

/// Brings the singular values of x (rows, columns) near to one, by the quintic Newton-Schulz iteration
/// X <- a X + (b A + c A A) X with A = X X^T, on the smaller side.
pub fn orthogonalize(ctx: &mut Ctx, x: &mut [f32], rows: usize, columns: usize, iterations: usize) {
    const A: f32 = 3.4445;
    const B: f32 = -4.7750;
    const C: f32 = 2.0315;
    let norm = square_sum(ctx, x).sqrt() as f32;
    let scale = 1.0 / (norm + 1e-7);
    x.par_chunks_mut(CHUNK).for_each(|x| x.iter_mut().for_each(|x| *x *= scale));
    let small = rows.min(columns);
    let (mut gram, mut poly) = (ctx.vec::<f32>(small * small), ctx.vec::<f32>(small * small));
    let mut next = ctx.vec::<f32>(x.len());
    for _ in 0..iterations {
        let wide = Matrix::new(x, rows, columns);
        let (left, right) = if rows <= columns { (wide, wide.t()) } else { (wide.t(), wide) };
        gemm(ctx, left, right, &mut gram, Store::Set);
        let square = Matrix::new(&gram, small, small);
        gemm(ctx, square, square, &mut poly, Store::Set);
        poly.iter_mut().zip(&gram).for_each(|(p, g)| *p = C * *p + B * g);
        (0..small).for_each(|i| poly[i * small + i] += A);
        let poly = Matrix::new(&poly, small, small);
        let (left, right) = if rows <= columns { (poly, wide) } else { (wide, poly) };
        gemm(ctx, left, right, &mut next, Store::Set);
        x.copy_from_slice(&next);
    }
    ctx.recycle(gram);
    ctx.recycle(poly);
    ctx.recycle(next);
}
