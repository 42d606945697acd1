//! The low-rank correction of a frozen linear layer, y += scale (x A^T) B^T (Hu et al., "LoRA", arXiv 2106.09685), forward,
//! backward and merged into the weight. Called by `nn::lora` and, for merging, by `checkpoint`.
//!
//! A fused layer (query, key, value) has one A for all of its parts; each part has columns of y and rows of B of its own. Where
//! A sees the layer's own input, the layer's products are taken with the merged weight, whose making costs as many operations
//! as a few rows of x, and u = x A^T and du = dy B beside them, so that x and dy are read once more only, for dA and dB.
//! `forward` and `backward_input` are for an input of A that is not the layer's, because some of it is dropped.
//!
//! Operations for N rows: u, du, dA and dB, 4 N r (in + out) in all, and 4 r in out for merging twice; the layer itself has
//! 4 N in out.

mod gpu;

use std::ops::Range;

use candle_core::Tensor;
use rayon::prelude::*;

use super::ctx::{Ctx, Value};
use super::gemm::{self, Factor, Matrix, Side, Store, Tile, gemm_columns, multiply_panel, pack_panel, panel_width};
use super::linear::{self, Weight};
use super::simd::{Family, Simd, simd_fn};
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
    /// Refuses factors for a layer of other sizes (out, in).
    pub fn check(&self, (out, input): (usize, usize)) -> Result<()> {
        match self.sizes(out)?.0 {
            own if own == input => Ok(()),
            own => Err(Error::op(OP, format!("factors for {input} inputs"), own.to_string())),
        }
    }

    /// Some rows and columns of the layer's weight with the correction, into `to`. Without it they stand in `from`, in rows that
    /// lie so far apart, or in `to` itself. `a` and `b` are the factors' numbers.
    pub fn correct(
        &self,
        family: Family,
        (a, b): (&[f32], &[f32]),
        (rows, columns): (Range<usize>, Range<usize>),
        from: Option<(&[f32], usize)>,
        to: &mut [f32],
    ) {
        let rank = b.len() / self.b.dims()[0].max(1);
        let (input, width) = (a.len() / (rank * self.segments.len()), columns.len());
        let mut next = rows.start;
        // The last round has no segment, and the rows after all of them.
        let segments = self.segments.iter().map(Some).chain([None]).enumerate();
        for (i, segment) in segments {
            let own = segment.map_or(rows.end..rows.end, |s| {
                let start = s.columns.start.clamp(next, rows.end);
                start..s.columns.end.clamp(start, rows.end)
            });
            if let Some((from, stride)) = from {
                for at in next - rows.start..own.start - rows.start {
                    to[at * width..][..width].copy_from_slice(&from[at * stride..][..width]);
                }
            }
            next = own.end;
            let Some(segment) = segment.filter(|_| !own.is_empty()) else { continue };
            let first = segment.rows.start + own.start - segment.columns.start;
            let b = &b[first * rank..(first + own.len()) * rank];
            let a = &a[i * rank * input + columns.start..];
            let (start, end) = (own.start - rows.start, own.end - rows.start);
            let to = &mut to[start * width..end * width];
            let from = from.map(|(from, stride)| (&from[start * stride..], stride));
            corrected_rows(family, from, (a, input), (b, rank), self.scale, width, to);
        }
    }

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

/// A whole dense weight (out, in) with the correction added.
pub fn corrected(ctx: &mut Ctx, weight: &Tensor, factors: Factors) -> Result<Value> {
    let (out, input) = weight.dims2()?;
    factors.check((out, input))?;
    if ctx.has_gpu() {
        return gpu::corrected(ctx, weight, factors);
    }
    let mut merged = ctx.vec::<f32>(out * input);
    let from = storage::read::<f32>(OP, weight)?;
    let (a, b) = (storage::read::<f32>(OP, factors.a)?, storage::read::<f32>(OP, factors.b)?);
    factors.correct(ctx.family(), (&a, &b), (0..out, 0..input), Some((&from, input)), &mut merged);
    Ok(ctx.value(merged, (out, input)))
}

/// A layer's product with a weight that has the correction in it, and u = x A^T (N, S r), which the backward needs.
pub fn layer_forward(
    ctx: &mut Ctx,
    x: &Tensor,
    weight: Weight,
    residual: Option<&Tensor>,
    factors: Factors,
) -> Result<(Value, Value)> {
    let (input, rank) = factors.sizes(weight.dims()?.0)?;
    if ctx.has_gpu() {
        return gpu::layer_forward(ctx, x, weight, residual, factors);
    }
    let (n, ranks) = (x.dims2()?.0, rank * factors.segments.len());
    let a = storage::read::<f32>(OP, factors.a)?;
    let mut u = ctx.vec(n * ranks);
    let side = Side { matrix: Matrix::new(&a, ranks, input).t(), to: &mut u };
    let y = linear::forward(ctx, x, weight, residual, Some(side))?;
    Ok((y, ctx.value(u, (n, ranks))))
}

/// The gradient of the layer's x from dy (N, out) under a weight, and du, that of x A^T without the scale (N, S r).
pub fn layer_backward_input(
    ctx: &mut Ctx,
    dy: &Tensor,
    weight: Weight,
    factors: Factors,
    dx: (&Tensor, Store),
) -> Result<Value> {
    if ctx.has_gpu() {
        linear::backward_input(ctx, dy, weight, dx, None)?;
        return gpu::outer(ctx, dy, factors);
    }
    outer(ctx, dy, factors, |ctx, side| linear::backward_input(ctx, dy, weight, dx, Some(side)))
}

/// du alone, for a layer whose x needs no gradient.
pub fn backward_outer(ctx: &mut Ctx, dy: &Tensor, factors: Factors) -> Result<Value> {
    let (n, out) = dy.dims2()?;
    if ctx.has_gpu() {
        factors.sizes(out)?;
        return gpu::outer(ctx, dy, factors);
    }
    let read = storage::read::<f32>(OP, dy)?;
    outer(ctx, dy, factors, |ctx, Side { matrix, to }| {
        gemm::gemm(ctx, Matrix::new(&read, n, out), matrix, to, Store::Set);
        Ok(())
    })
}

/// Runs a product of dy with B beside it, spread over the layer's outputs: (out, S r), zero where a part has no share.
fn outer(
    ctx: &mut Ctx,
    dy: &Tensor,
    factors: Factors,
    product: impl FnOnce(&mut Ctx, Side) -> Result<()>,
) -> Result<Value> {
    let (n, out) = dy.dims2()?;
    let (_, rank) = factors.sizes(out)?;
    let ranks = rank * factors.segments.len();
    let mut spread = ctx.zeros::<f32>(out * ranks);
    {
        let b = storage::read::<f32>(OP, factors.b)?;
        for (i, Segment { columns, rows }) in factors.segments.iter().enumerate() {
            for (column, row) in columns.clone().zip(rows.clone()) {
                spread[column * ranks + i * rank..][..rank].copy_from_slice(&b[row * rank..][..rank]);
            }
        }
    }
    let mut du = ctx.vec(n * ranks);
    product(ctx, Side { matrix: Matrix::new(&spread, out, ranks), to: &mut du })?;
    ctx.recycle(spread);
    Ok(ctx.value(du, (n, ranks)))
}

/// Adds the correction for x (N, in) to y (N, out). Returns u = x A^T (N, S r).
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
    ctx.launch(4 * (factors.a.elem_count() + factors.b.elem_count()));
    if ctx.has_gpu() {
        return gpu::forward(ctx, x, factors, y);
    }
    let (a, b) = (storage::read::<f32>(OP, factors.a)?, storage::read::<f32>(OP, factors.b)?);
    let (x, mut y) = (storage::read::<f32>(OP, x)?, storage::write::<f32>(OP, y)?);
    let ranks = rank * factors.segments.len();
    let mut u = ctx.vec(n * ranks);
    gemm_columns(ctx, Matrix::new(&x, n, input), Matrix::new(&a, ranks, input).t(), (&mut u, ranks, 0), Store::Set);
    let scaled = times(ctx, &u, factors.scale);
    for (i, Segment { columns, rows }) in factors.segments.iter().enumerate() {
        let b = Matrix::new(&b[rows.start * rank..rows.end * rank], rows.len(), rank);
        let u = part(&scaled, ranks, i * rank..(i + 1) * rank);
        gemm_columns(ctx, u, b.t(), (&mut y, out, columns.start), Store::Add);
    }
    ctx.recycle(scaled);
    Ok(ctx.value(u, (n, ranks)))
}

fn times(ctx: &Ctx, x: &[f32], scale: f32) -> Vec<f32> {
    let mut scaled = ctx.vec(x.len());
    scaled.iter_mut().zip(x).for_each(|(to, x)| *to = scale * x);
    scaled
}

/// Rows that a task of the backward takes, and those of them that stay in the caches from one product to the next. Fixed, so
/// that sums do not depend on the number of threads.
const BLOCK: usize = 256;
const ROWS: usize = 64;

/// The gradients of A and B into their slots, from x (N, in), u (N, S r), dy (N, out) and du (N, S r).
pub fn backward(
    ctx: &mut Ctx,
    (x, u): (&Tensor, &Tensor),
    (dy, du): (&Tensor, &Tensor),
    factors: Factors,
    (da, a_store): (&Tensor, Store),
    (db, b_store): (&Tensor, Store),
) -> Result<()> {
    let (n, out) = dy.dims2()?;
    let (input, rank) = factors.sizes(out)?;
    let (ranks, rows) = (rank * factors.segments.len(), factors.b.dims()[0]);
    let found = [x, u, du, da, db].map(Tensor::elem_count);
    if found != [n * input, n * ranks, n * ranks, ranks * input, rows * rank] {
        let found = format!("x, u, du, da, db of {found:?}");
        return Err(Error::op(OP, format!("gradients for {n} rows"), found));
    }
    ctx.launch(0);
    if ctx.has_gpu() {
        return gpu::backward(ctx, (x, u), (dy, du), factors, (da, a_store), (db, b_store));
    }
    let (x, u) = (storage::read::<f32>(OP, x)?, storage::read::<f32>(OP, u)?);
    let (dy, du) = (storage::read::<f32>(OP, dy)?, storage::read::<f32>(OP, du)?);
    let (mut da, mut db) = (storage::write::<f32>(OP, da)?, storage::write::<f32>(OP, db)?);
    let (x, dy) = (Matrix::new(&x, n, input), Matrix::new(&dy, n, out));
    // Of each block of rows, its own dA, and dB^T of each segment.
    let (size, family) = (da.len() + db.len(), ctx.family());
    let mut partial = ctx.vec::<f32>(n.div_ceil(BLOCK) * size);
    partial.par_chunks_exact_mut(size.max(1)).enumerate().for_each(|(block, partial)| {
        partial.fill(0.0);
        let (da, db) = partial.split_at_mut(ranks * input);
        let end = (block * BLOCK + BLOCK).min(n);
        for start in (block * BLOCK..end).step_by(ROWS) {
            let end = (start + ROWS).min(end);
            add_turned_product(family, part(&du, ranks, 0..ranks).rows(start, end), x.rows(start, end), da);
            for (i, Segment { columns, rows }) in factors.segments.iter().enumerate() {
                let dy = Matrix { data: &dy.data[columns.start..], cols: columns.len(), ..dy };
                let to = &mut db[rows.start * rank..rows.end * rank];
                let u = part(&u, ranks, i * rank..(i + 1) * rank).rows(start, end);
                add_turned_product(family, u, dy.rows(start, end), to);
            }
        }
    });
    // The blocks in order, one after the other into the first; then that to where it belongs.
    let own = size.min(partial.len());
    let (first, others) = partial.split_at_mut(own);
    for other in others.chunks_exact(size.max(1)) {
        first.iter_mut().zip(other).for_each(|(sum, x)| *sum += x);
    }
    put_sums(factors, first, (&mut da, a_store), (&mut db, b_store));
    ctx.recycle(partial);
    Ok(())
}

/// Sums of dA and of each segment's dB^T, without the scale (nothing, if there were no rows), into the slots.
fn put_sums(factors: Factors, sums: &[f32], da: (&mut [f32], Store), db: (&mut [f32], Store)) {
    for (to, store) in [(&mut *da.0, da.1), (&mut *db.0, db.1)] {
        if store == Store::Set {
            to.fill(0.0);
        }
    }
    if sums.is_empty() {
        return;
    }
    let (a_sums, b_sums) = sums.split_at(da.0.len());
    da.0.iter_mut().zip(a_sums).for_each(|(to, x)| *to += factors.scale * x);
    let rank = db.0.len() / factors.b.dims()[0].max(1);
    for Segment { rows, .. } in factors.segments {
        let own = rows.start * rank..rows.end * rank;
        let (to, from) = (&mut db.0[own.clone()], &b_sums[own]);
        to.chunks_exact_mut(rank).enumerate().for_each(|(row, to)| {
            to.iter_mut().enumerate().for_each(|(i, to)| *to += factors.scale * from[i * rows.len() + row]);
        });
    }
}

/// C (m, n) += A^T B for A (k, m) and B (k, n) of a few rows.
fn add_turned_product(family: Family, a: Matrix, b: Matrix, c: &mut [f32]) {
    let width = panel_width(family, b.cols);
    f32::with_scratch(b.rows * width, |packed| {
        for column in (0..b.cols).step_by(width) {
            pack_panel(family, b, column / width, width, packed);
            let cols = width.min(b.cols - column);
            let out = Tile { c: &mut c[column..], stride: b.cols, cols, store: Store::Add };
            multiply_panel(family, width, a.t(), packed, out);
        }
    });
}

/// Adds scale du A to the gradient of x, for `du` (N, S r) and A (S r, in).
pub fn backward_input(ctx: &mut Ctx, du: &Tensor, factors: Factors, (dx, store): (&Tensor, Store)) -> Result<()> {
    let ((n, ranks), (rows, input)) = (du.dims2()?, factors.a.dims2()?);
    if ranks != rows {
        return Err(Error::op(OP, format!("du of ({n}, {rows})"), format!("{:?}", du.dims())));
    }
    ctx.launch(4 * factors.a.elem_count());
    if ctx.has_gpu() {
        return gpu::backward_input(ctx, du, factors, (dx, store));
    }
    let (du, a) = (storage::read::<f32>(OP, du)?, storage::read::<f32>(OP, factors.a)?);
    let scaled = times(ctx, &du, factors.scale);
    let mut dx = storage::write::<f32>(OP, dx)?;
    gemm_columns(ctx, Matrix::new(&scaled, n, ranks), Matrix::new(&a, ranks, input), (&mut dx, input, 0), store);
    ctx.recycle(scaled);
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
    ctx.launch(4 * (factors.a.elem_count() + factors.b.elem_count()));
    if ctx.has_gpu() {
        return gpu::backward_merged(ctx, factors, dweight, (da, a_store), (db, b_store));
    }
    let (a, b) = (storage::read::<f32>(OP, factors.a)?, storage::read::<f32>(OP, factors.b)?);
    let (a, b) = (times(ctx, &a, factors.scale), times(ctx, &b, factors.scale));
    let dweight = storage::read::<f32>(OP, dweight)?;
    let dweight = Matrix::new(&dweight, out, input);
    let (mut da, mut db) = (storage::write::<f32>(OP, da)?, storage::write::<f32>(OP, db)?);
    gemm::gemm(ctx, dweight, Matrix::new(&a, rank, input).t(), &mut db, b_store);
    gemm::gemm(ctx, Matrix::new(&b, out, rank).t(), dweight, &mut da, a_store);
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
pub fn merge(family: Family, weight: &mut [f32], (a, b, rank): (&[f32], &[f32], usize), scale: f32) {
    let input = a.len() / rank.max(1);
    let rows = weight.par_chunks_mut((TALL * input).max(1)).zip(b.par_chunks((TALL * rank).max(1)));
    rows.for_each(|(to, b)| corrected_rows(family, None, (a, input), (b, rank), scale, input, to));
}

/// Columns whose sums stay in registers while the rows of A go by, and rows that share what is read of A.
const WIDE: usize = 64;
const TALL: usize = 4;

simd_fn! {
/// to (rows, columns) = from + scale B A, or += where there is no other `from`, for rows of B (rows, r) and the first columns of
/// A and of `from`, whose rows lie as far apart as is said with them.
fn corrected_rows<S>(from: Option<(&[f32], usize)>, a: (&[f32], usize), b: (&[f32], usize), scale: f32, columns: usize, to: &mut [f32]) {
    let (b, rank) = b;
    let rows = to.len() / columns;
    let whole = rows / TALL * TALL;
    for row in (0..whole).step_by(TALL) {
        let to = &mut to[row * columns..(row + TALL) * columns];
        few_rows::<S, TALL>(from.map(|(from, stride)| (&from[row * stride..], stride)), a, &b[row * rank..(row + TALL) * rank], scale, columns, to);
    }
    for row in whole..rows {
        let to = &mut to[row * columns..(row + 1) * columns];
        few_rows::<S, 1>(from.map(|(from, stride)| (&from[row * stride..], stride)), a, &b[row * rank..(row + 1) * rank], scale, columns, to);
    }
}
}

/// The same for M rows.
#[inline(always)]
fn few_rows<S: Simd, const M: usize>(
    from: Option<(&[f32], usize)>,
    (a, stride): (&[f32], usize),
    b: &[f32],
    scale: f32,
    columns: usize,
    to: &mut [f32],
) {
    let rank = b.len() / M;
    for first in (0..columns / WIDE * WIDE).step_by(WIDE) {
        let mut sums = [[0f32; WIDE]; M];
        for p in 0..rank {
            let a: &[f32; WIDE] = a[p * stride + first..].first_chunk().expect("a block lies inside the row");
            for m in 0..M {
                let b = b[m * rank + p];
                for i in 0..WIDE {
                    sums[m][i] = S::fma(b, a[i], sums[m][i]);
                }
            }
        }
        for m in 0..M {
            let to: &mut [f32; WIDE] =
                to[m * columns + first..].first_chunk_mut().expect("a block lies inside the row");
            if let Some((from, stride)) = from {
                *to = *from[m * stride + first..].first_chunk().expect("a block lies inside the row");
            }
            for i in 0..WIDE {
                to[i] = S::fma(scale, sums[m][i], to[i]);
            }
        }
    }
    for column in columns / WIDE * WIDE..columns {
        for m in 0..M {
            let sum = (0..rank).fold(0.0, |sum, p| S::fma(b[m * rank + p], a[p * stride + column], sum));
            let to = &mut to[m * columns + column];
            *to = S::fma(scale, sum, from.map_or(*to, |(from, stride)| from[m * stride + column]));
        }
    }
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
