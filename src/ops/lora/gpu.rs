//! Low-rank corrections on a GPU: the products of the layer's own size are matrix products, with B spread over its outputs.
//!
//! Called by the functions of the same names in `lora`. Sizes are checked there.

use candle_core::{DType, Tensor};

use super::{Factors, Segment};
use crate::error::Result;
use crate::ops::ctx::{Ctx, Value};
use crate::ops::gemm::Store;
use crate::ops::gpu::{Arg, Matrix, Product, kernels};
use crate::ops::linear::{self, Weight};

const NONE: u32 = u32::MAX;

/// A product into a tensor of its own.
fn product(ctx: &mut Ctx, a: Matrix, b: Matrix) -> Result<Value> {
    let c = ctx.output(DType::F32, (a.rows, b.columns))?;
    ctx.multiply(&Product { a, b, c: Arg::write(&c) })?;
    Ok(c)
}

/// to (+)= scale x.
fn scale(ctx: &mut Ctx, x: &Tensor, factor: f32, (to, store): (&Tensor, Store)) -> Result<()> {
    let (args, count) = ([Arg::read(x), Arg::update(to)], to.elem_count());
    let numbers = [count.into(), factor.into(), store.into()];
    ctx.dispatch(&kernels::LORA_SCALE, DType::F32, &args, &numbers, count.div_ceil(256))
}

/// (S r, in), and the whole of A as a matrix.
fn a_of<'a>(factors: &Factors<'a>) -> Result<Matrix<'a>> {
    let (ranks, input) = factors.a.dims2()?;
    Ok(Matrix::new(factors.a, ranks, input))
}

/// B over all `out` outputs: (out, S r).
fn spread(ctx: &mut Ctx, factors: Factors, out: usize) -> Result<Value> {
    let (rank, ranks) = (factors.b.dims2()?.1, factors.a.dims2()?.0);
    let mut places = vec![NONE; 2 * out];
    for (i, Segment { columns, rows }) in factors.segments.iter().enumerate() {
        for (column, row) in columns.clone().zip(rows.clone()) {
            places[2 * column..][..2].copy_from_slice(&[row as u32, i as u32]);
        }
    }
    let places = ctx.upload(&places, 2 * out);
    let (spread, count) = (ctx.output(DType::F32, (out, ranks))?, out * ranks);
    let args = [Arg::read(factors.b), Arg::read(&places), Arg::write(&spread)];
    let numbers = [count.into(), ranks.into(), rank.into()];
    ctx.dispatch(&kernels::LORA_SPREAD, DType::F32, &args, &numbers, count.div_ceil(256))?;
    Ok(spread)
}

/// The weight (out, in) with the correction added.
pub fn corrected(ctx: &mut Ctx, weight: &Tensor, factors: Factors) -> Result<Value> {
    let (out, ranks) = (weight.dims2()?.0, factors.a.dims2()?.0);
    let spread = spread(ctx, factors, out)?;
    let change = product(ctx, Matrix::new(&spread, out, ranks), a_of(&factors)?)?;
    let (merged, count) = (ctx.output(DType::F32, weight.shape())?, weight.elem_count());
    let args = [Arg::read(weight), Arg::read(&change), Arg::write(&merged)];
    let numbers = [count.into(), factors.scale.into()];
    ctx.dispatch(&kernels::LORA_MERGE, DType::F32, &args, &numbers, count.div_ceil(256))?;
    Ok(merged)
}

pub fn layer_forward(
    ctx: &mut Ctx,
    x: &Tensor,
    weight: Weight,
    residual: Option<&Tensor>,
    factors: Factors,
) -> Result<(Value, Value)> {
    let (n, input) = x.dims2()?;
    let y = linear::forward(ctx, x, weight, residual, None)?;
    let u = product(ctx, Matrix::new(x, n, input), a_of(&factors)?.t())?;
    Ok((y, u))
}

/// du = dy B, B spread: (N, S r).
pub fn outer(ctx: &mut Ctx, dy: &Tensor, factors: Factors) -> Result<Value> {
    let ((n, out), ranks) = (dy.dims2()?, factors.a.dims2()?.0);
    let spread = spread(ctx, factors, out)?;
    product(ctx, Matrix::new(dy, n, out), Matrix::new(&spread, out, ranks))
}

pub fn forward(ctx: &mut Ctx, x: &Tensor, factors: Factors, y: &Tensor) -> Result<Value> {
    let ((n, input), (_, out), ranks) = (x.dims2()?, y.dims2()?, factors.a.dims2()?.0);
    let u = product(ctx, Matrix::new(x, n, input), a_of(&factors)?.t())?;
    let spread = spread(ctx, factors, out)?;
    let change = product(ctx, Matrix::new(&u, n, ranks), Matrix::new(&spread, out, ranks).t())?;
    scale(ctx, &change, factors.scale, (y, Store::Add))?;
    Ok(u)
}

/// From u and dy: the gradients of A, scale du^T x, and of B, the rows of scale dy^T u that it has.
pub fn backward(
    ctx: &mut Ctx,
    (x, u): (&Tensor, &Tensor),
    (dy, du): (&Tensor, &Tensor),
    factors: Factors,
    da: (&Tensor, Store),
    db: (&Tensor, Store),
) -> Result<()> {
    let ((n, out), (ranks, input)) = (dy.dims2()?, factors.a.dims2()?);
    let da_sums = product(ctx, Matrix::new(du, n, ranks).t(), Matrix::new(x, n, input))?;
    scale(ctx, &da_sums, factors.scale, da)?;
    let db_sums = product(ctx, Matrix::new(dy, n, out).t(), Matrix::new(u, n, ranks))?;
    gather(ctx, &db_sums, factors, db)
}

/// Rows of dB from the gradient of B spread.
fn gather(ctx: &mut Ctx, dspread: &Tensor, factors: Factors, (db, store): (&Tensor, Store)) -> Result<()> {
    let ((rows, rank), ranks) = (factors.b.dims2()?, factors.a.dims2()?.0);
    let mut places = vec![0u32; 2 * rows];
    for (i, Segment { columns, rows }) in factors.segments.iter().enumerate() {
        for (column, row) in columns.clone().zip(rows.clone()) {
            places[2 * row..][..2].copy_from_slice(&[column as u32, i as u32]);
        }
    }
    let (places, count) = (ctx.upload(&places, 2 * rows), rows * rank);
    let args = [Arg::read(dspread), Arg::read(&places), Arg::update(db)];
    let numbers = [count.into(), ranks.into(), rank.into(), factors.scale.into(), store.into()];
    ctx.dispatch(&kernels::LORA_GATHER, DType::F32, &args, &numbers, count.div_ceil(256))
}

pub fn backward_input(ctx: &mut Ctx, du: &Tensor, factors: Factors, dx: (&Tensor, Store)) -> Result<()> {
    let (n, ranks) = du.dims2()?;
    let change = product(ctx, Matrix::new(du, n, ranks), a_of(&factors)?)?;
    scale(ctx, &change, factors.scale, dx)
}

pub fn backward_merged(
    ctx: &mut Ctx,
    factors: Factors,
    dweight: &Tensor,
    da: (&Tensor, Store),
    db: (&Tensor, Store),
) -> Result<()> {
    let ((out, input), rank) = (dweight.dims2()?, factors.a.dims2()?.0);
    let whole = Matrix::new(dweight, out, input);
    let db_sums = product(ctx, whole, a_of(&factors)?.t())?;
    scale(ctx, &db_sums, factors.scale, db)?;
    let da_sums = product(ctx, Matrix::new(factors.b, out, rank).t(), whole)?;
    scale(ctx, &da_sums, factors.scale, da)
}
