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

/// The tensors of one parameter (rows, columns).
#[derive(Clone, Copy)]
pub struct Target<'a> {
    pub master: &'a Tensor,
    pub gradient: &'a Tensor,
    pub momentum: &'a Tensor,
    pub ema: Option<&'a Tensor>,
}

/// One update of every part; nothing at all when `Skip` is set.
pub fn step(ctx: &mut Ctx, target: Target, parts: &[Range<usize>], muon: Muon, scalars: &Tensor) -> Result<()> {
    ctx.launch(0);
    let s = storage::read::<f32>("muon", scalars)?.to_vec();
    if s[Scalar::Skip as usize] != 0.0 {
        return Ok(());
    }
    let (_, columns) = target.master.dims2()?;
    let (lr, clip) = (s[Scalar::LearningRate as usize], s[Scalar::Clip as usize]);
    let gradient = storage::read::<f32>("muon", target.gradient)?;
    let mut momentum = storage::write::<f32>("muon", target.momentum)?;
    let mut master = storage::write::<f32>("muon", target.master)?;
    let beta = muon.momentum;
    for part in parts {
        let span = part.start * columns..part.end * columns;
        let (g, m, p) = (&gradient[span.clone()], &mut momentum[span.clone()], &mut master[span]);
        let mut update = ctx.vec::<f32>(g.len());
        let chunks = update.par_chunks_mut(CHUNK).zip(g.par_chunks(CHUNK)).zip(m.par_chunks_mut(CHUNK));
        chunks.for_each(|((u, g), m)| {
            for ((u, g), m) in u.iter_mut().zip(g).zip(m) {
                let g = g * clip;
                *m = beta * *m + (1.0 - beta) * g;
                // Nesterov: the momentum as it will be after one more such gradient.
                *u = beta * *m + (1.0 - beta) * g;
            }
        });
        orthogonalize(ctx, &mut update, part.len(), columns, muon.iterations);
        let (keep, rate) = (1.0 - lr * muon.weight_decay, -lr * 0.2 * (part.len().max(columns) as f32).sqrt());
        let chunks = p.par_chunks_mut(CHUNK).zip(update.par_chunks(CHUNK));
        chunks.for_each(|(p, u)| p.iter_mut().zip(u).for_each(|(p, u)| *p = keep * *p + rate * u));
        ctx.recycle(update);
    }
    average(ctx, &master, target.ema, ema_decay(&s))
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
