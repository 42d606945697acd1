//! The low-rank correction of a frozen linear layer, y += scale (x A^T) B^T (Hu et al., "LoRA", arXiv 2106.09685), forward,
//! backward and merged into the weight. Called by `nn::lora` and, for merging, by `checkpoint`.
//!
//! A fused layer (query, key, value) has one A for all of its parts, so that x is read once; each part has columns of y and
//! rows of B of its own.

use std::ops::Range;

use candle_core::Tensor;
use rayon::prelude::*;

use super::ctx::{Ctx, Value};
use super::gemm::{Matrix, Store, gemm, gemm_columns};
use super::storage;
use crate::error::{Error, Result};

const OP: &str = "lora";

/// A part of the layer that is corrected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its outputs in the layer.
    pub columns: Range<usize>,
    /// Its rows of B, as many.
    pub rows: Range<usize>,
}

/// The correction of a layer with S corrected parts.
#[derive(Clone, Copy)]
pub struct Factors<'a> {
    /// (S r, in): `r` rows a part.
    pub a: &'a Tensor,
    /// (outputs of the parts, r)
    pub b: &'a Tensor,
    pub segments: &'a [Segment],
    pub scale: f32,
}

impl Factors<'_> {
    /// (in, r), if all sizes fit to rows of `outputs`.
    fn sizes(&self, outputs: usize) -> Result<(usize, usize)> {
        let ((ranks, input), (rows, rank)) = (self.a.dims2()?, self.b.dims2()?);
        let fits = |s: &Segment| s.columns.len() == s.rows.len() && s.columns.end <= outputs && s.rows.end <= rows;
        if ranks != rank * self.segments.len() || !self.segments.iter().all(fits) {
            let found = format!("A of {ranks} rows, B of ({rows}, {rank}), {:?}", self.segments);
            return Err(Error::op(OP, format!("factors of parts of {outputs} outputs"), found));
        }
        Ok((input, rank))
    }
}

/// Adds the correction for x (N, in) to y (N, out). Returns u = scale x A^T (N, S r), which the backward needs.
pub fn forward(ctx: &mut Ctx, x: &Tensor, factors: Factors, y: &Tensor) -> Result<Value> {
    let ((n, k), (_, out)) = (x.dims2()?, y.dims2()?);
    let (input, rank) = factors.sizes(out)?;
    if k != input || y.dims()[0] != n {
        return Err(Error::op(
            OP,
            format!("x (N, {input}) and y of N rows"),
            format!("{:?}, {:?}", x.dims(), y.dims()),
        ));
    }
    let (a, b) = (storage::read::<f32>(OP, factors.a)?, storage::read::<f32>(OP, factors.b)?);
    ctx.launch(4 * (a.len() + b.len()));
    let (x, mut y) = (storage::read::<f32>(OP, x)?, storage::write::<f32>(OP, y)?);
    let ranks = a.len() / input;
    let mut u = ctx.vec(n * ranks);
    gemm(ctx, Matrix::new(&x, n, input), Matrix::new(&a, ranks, input).t(), &mut u, Store::Set);
    u.iter_mut().for_each(|u| *u *= factors.scale);
    for (i, Segment { columns, rows }) in factors.segments.iter().enumerate() {
        let b = Matrix::new(&b[rows.start * rank..rows.end * rank], rows.len(), rank);
        gemm_columns(ctx, part(&u, ranks, i * rank..(i + 1) * rank), b.t(), (&mut y, out, columns.start), Store::Add);
    }
    Ok(ctx.value(u, (n, ranks)))
}

/// From dy (N, out): the gradients of A and B into their slots. Returns that of x A^T (N, S r).
pub fn backward(
    ctx: &mut Ctx,
    (x, u): (&Tensor, &Tensor),
    factors: Factors,
    dy: &Tensor,
    (da, a_store): (&Tensor, Store),
    (db, b_store): (&Tensor, Store),
) -> Result<Value> {
    let (n, out) = dy.dims2()?;
    let (input, rank) = factors.sizes(out)?;
    let (x, u, dy) = (storage::read::<f32>(OP, x)?, storage::read::<f32>(OP, u)?, storage::read::<f32>(OP, dy)?);
    let b = storage::read::<f32>(OP, factors.b)?;
    let (mut da, mut db) = (storage::write::<f32>(OP, da)?, storage::write::<f32>(OP, db)?);
    let ranks = rank * factors.segments.len();
    if (x.len(), u.len(), da.len(), db.len()) != (n * input, n * ranks, ranks * input, b.len()) {
        let found = format!("x {}, u {}, da {}, db {}", x.len(), u.len(), da.len(), db.len());
        return Err(Error::op(OP, format!("gradients for {n} rows"), found));
    }
    ctx.launch(4 * b.len());
    let mut du = ctx.vec(n * ranks);
    for (i, Segment { columns, rows }) in factors.segments.iter().enumerate() {
        let (dy, own) = (part(&dy, out, columns.clone()), i * rank..(i + 1) * rank);
        let elements = rows.start * rank..rows.end * rank;
        gemm(ctx, dy.t(), part(&u, ranks, own.clone()), &mut db[elements.clone()], b_store);
        let b = Matrix::new(&b[elements], rows.len(), rank);
        gemm_columns(ctx, dy, b, (&mut du, ranks, own.start), Store::Set);
    }
    du.iter_mut().for_each(|du| *du *= factors.scale);
    gemm(ctx, Matrix::new(&du, n, ranks).t(), Matrix::new(&x, n, input), &mut da, a_store);
    Ok(ctx.value(du, (n, ranks)))
}

/// The gradient of x from `du` (N, S r), which `backward` returned, under A (S r, in).
pub fn backward_input(ctx: &mut Ctx, du: &Tensor, a: &Tensor, (dx, store): (&Tensor, Store)) -> Result<()> {
    let ((n, ranks), (rows, input)) = (du.dims2()?, a.dims2()?);
    if ranks != rows {
        return Err(Error::op(OP, format!("du of ({n}, {rows})"), format!("{:?}", du.dims())));
    }
    let (du, a) = (storage::read::<f32>(OP, du)?, storage::read::<f32>(OP, a)?);
    ctx.launch(4 * a.len());
    let mut dx = storage::write::<f32>(OP, dx)?;
    gemm(ctx, Matrix::new(&du, n, ranks), Matrix::new(&a, ranks, input), &mut dx, store);
    Ok(())
}

/// The gradients of the factors of one part from that of the merged weight (out, in): dB = scale dW A^T, dA = scale B^T dW.
pub fn backward_merged(
    ctx: &mut Ctx,
    factors: Factors,
    dweight: &Tensor,
    (da, a_store): (&Tensor, Store),
    (db, b_store): (&Tensor, Store),
) -> Result<()> {
    let (out, input) = dweight.dims2()?;
    let (columns, rank) = factors.sizes(out)?;
    if columns != input || factors.segments.len() != 1 || factors.segments[0].rows != (0..out) {
        return Err(Error::op(OP, format!("one part of ({out}, {input})"), format!("{:?}", factors.segments)));
    }
    let (a, b) = (storage::read::<f32>(OP, factors.a)?, storage::read::<f32>(OP, factors.b)?);
    ctx.launch(4 * (a.len() + b.len()));
    let scaled = |ctx: &Ctx, x: &[f32]| {
        let mut copy = ctx.vec(x.len());
        copy.iter_mut().zip(x).for_each(|(to, x)| *to = factors.scale * x);
        copy
    };
    let (a, b) = (scaled(ctx, &a), scaled(ctx, &b));
    let dweight = storage::read::<f32>(OP, dweight)?;
    let dweight = Matrix::new(&dweight, out, input);
    let (mut da, mut db) = (storage::write::<f32>(OP, da)?, storage::write::<f32>(OP, db)?);
    gemm(ctx, dweight, Matrix::new(&a, rank, input).t(), &mut db, b_store);
    gemm(ctx, Matrix::new(&b, out, rank).t(), dweight, &mut da, a_store);
    ctx.recycle(a);
    ctx.recycle(b);
    Ok(())
}

/// Columns of a matrix with rows of `width`.
fn part(data: &[f32], width: usize, columns: Range<usize>) -> Matrix<'_> {
    let data_rows = data.len() / width;
    let start = columns.start.min(data.len());
    Matrix { data: &data[start..], rows: data_rows, cols: columns.len(), row_stride: width, col_stride: 1 }
}

/// weight (out, in) += scale B A, with A (r, in) and B (out, r).
pub fn merge(weight: &mut [f32], a: &[f32], b: &[f32], rank: usize, scale: f32) {
    let input = a.len() / rank.max(1);
    weight.par_chunks_exact_mut(input.max(1)).zip(b.par_chunks_exact(rank.max(1))).for_each(|(weight, b)| {
        for (b, a) in b.iter().zip(a.chunks_exact(input)) {
            weight.iter_mut().zip(a).for_each(|(w, a)| *w += scale * b * a);
        }
    });
}

/// What `forward` adds, in plain f64: rows of x of `input` elements.
pub fn reference(
    x: &[f32],
    a: &[f32],
    b: &[f32],
    input: usize,
    segments: &[Segment],
    out: usize,
    scale: f32,
) -> Vec<f64> {
    let rank = a.len() / input / segments.len();
    let mut y = vec![0f64; x.len() / input * out];
    for (x, y) in x.chunks_exact(input).zip(y.chunks_exact_mut(out)) {
        let dot = |a: &[f32]| x.iter().zip(a).map(|(x, a)| f64::from(*x) * f64::from(*a)).sum::<f64>();
        let u: Vec<f64> = a.chunks_exact(input).map(dot).collect();
        for (i, Segment { columns, rows }) in segments.iter().enumerate() {
            for (column, row) in columns.clone().zip(rows.clone()) {
                let b = &b[row * rank..][..rank];
                let u = &u[i * rank..][..rank];
                y[column] += f64::from(scale) * b.iter().zip(u).map(|(b, u)| f64::from(*b) * u).sum::<f64>();
            }
        }
    }
    y
}
