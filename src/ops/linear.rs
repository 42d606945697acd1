//! The linear layer's three products: y = x W^T, dx = dy W, dW = dy^T x. Called by `nn::linear`.

use std::ops::Range;

use candle_core::Tensor;
use parking_lot::Mutex;

use super::add;
use super::blocks::BlockMatrix;
use super::ctx::{Ctx, Value};
use super::gemm::{Kept, Made, Matrix, Side, Store, gemm, gemm_made};
use super::gpu::{self, Arg, Product};
use super::lora::{self, Factors};
use super::simd::Family;
use super::storage::{self, Read};
use crate::error::{Error, Result};

/// What is kept of a weight between products: its panels for each of the two that it is the right operand of.
#[derive(Debug, Default)]
pub struct Panels {
    forward: Mutex<Kept>,
    backward: Mutex<Kept>,
}

/// A weight (out, in) as products see it.
#[derive(Clone, Copy)]
pub enum Weight<'a> {
    /// In f32, with what is kept of it and its version, if anything is: two with the same panels and version have the same
    /// content.
    Dense { tensor: &'a Tensor, kept: Option<(&'a Panels, u64)> },
    /// In blocks, which become numbers for the time of a product.
    Blocks(&'a BlockMatrix),
    /// One of these with a correction, which is added for the time of a product.
    Corrected(&'a Weight<'a>, Factors<'a>),
}

impl Weight<'_> {
    /// (out, in)
    pub fn dims(&self) -> Result<(usize, usize)> {
        match self {
            Weight::Dense { tensor, .. } => Ok(tensor.dims2()?),
            Weight::Blocks(blocks) => Ok((blocks.rows(), blocks.columns())),
            Weight::Corrected(weight, _) => weight.dims(),
        }
    }

    fn numbers(&self) -> Result<Numbers<'_>> {
        let op = "linear";
        Ok(match self {
            Weight::Dense { tensor, .. } => Numbers::Dense(storage::read::<f32>(op, tensor)?, self.dims()?),
            Weight::Blocks(blocks) => Numbers::Blocks(blocks),
            Weight::Corrected(weight, factors) => {
                factors.check(self.dims()?)?;
                let read = [storage::read::<f32>(op, factors.a)?, storage::read::<f32>(op, factors.b)?];
                Numbers::Corrected(Box::new(weight.numbers()?), read, *factors)
            }
        })
    }

    fn bytes(&self) -> Result<usize> {
        Ok(match self {
            Weight::Dense { tensor, .. } => 4 * tensor.elem_count(),
            Weight::Blocks(blocks) => blocks.as_bytes().len(),
            Weight::Corrected(weight, factors) => {
                weight.bytes()? + 4 * (factors.a.elem_count() + factors.b.elem_count())
            }
        })
    }
}

/// A weight opened for reading.
enum Numbers<'a> {
    Dense(Read<'a, f32>, (usize, usize)),
    Blocks(&'a BlockMatrix),
    Corrected(Box<Numbers<'a>>, [Read<'a, f32>; 2], Factors<'a>),
}

/// Numbers that are made for one product.
struct MadeWeight<'a>(&'a Numbers<'a>, Family);

impl Made for MadeWeight<'_> {
    fn dims(&self) -> (usize, usize) {
        match self.0 {
            Numbers::Dense(_, dims) => *dims,
            Numbers::Blocks(blocks) => (blocks.rows(), blocks.columns()),
            Numbers::Corrected(weight, ..) => MadeWeight(weight, self.1).dims(),
        }
    }

    fn fill(&self, rows: Range<usize>, columns: Range<usize>, to: &mut [f32]) {
        let width = columns.len();
        match self.0 {
            Numbers::Dense(numbers, (_, k)) => {
                for (row, to) in rows.zip(to.chunks_exact_mut(width)) {
                    to.copy_from_slice(&numbers[row * k..][columns.clone()]);
                }
            }
            Numbers::Blocks(blocks) => {
                for (row, to) in rows.zip(to.chunks_exact_mut(width)) {
                    blocks.unpack_part(self.1, row, columns.start, to);
                }
            }
            Numbers::Corrected(weight, [a, b], factors) => {
                let from = match &**weight {
                    Numbers::Dense(numbers, (_, k)) => Some((&numbers[rows.start * k + columns.start..], *k)),
                    other => {
                        MadeWeight(other, self.1).fill(rows.clone(), columns.clone(), to);
                        None
                    }
                };
                factors.correct(self.1, (a, b), (rows, columns), from, to);
            }
        }
    }
}

/// Which side of the weight a product is on.
#[derive(Clone, Copy, PartialEq)]
enum Direction {
    Forward,
    Backward,
}

fn operand(w: &[f32], (out, k): (usize, usize), direction: Direction) -> Matrix<'_> {
    match direction {
        Direction::Forward => Matrix::new(w, out, k).t(),
        Direction::Backward => Matrix::new(w, out, k),
    }
}

/// a W^T, or a W, and the product beside it.
fn multiply(
    ctx: &mut Ctx,
    a: Matrix,
    (weight, direction): (Weight, Direction),
    (to, store): (&mut [f32], Store),
    side: Option<Side>,
) -> Result<()> {
    let (dims, family) = (weight.dims()?, ctx.family());
    ctx.launch(weight.bytes()?);
    let numbers = weight.numbers()?;
    if let (Numbers::Dense(w, _), Weight::Dense { kept, .. }) = (&numbers, weight) {
        let operand = operand(w, dims, direction);
        match (kept, direction) {
            (None, _) => gemm(ctx, a, operand, to, store),
            (Some((panels, version)), Direction::Forward) => {
                panels.forward.lock().gemm(ctx, a, (operand, version), to, store);
            }
            (Some((panels, version)), Direction::Backward) => {
                panels.backward.lock().gemm(ctx, a, (operand, version), to, store);
            }
        }
        if let Some(Side { matrix, to }) = side {
            gemm(ctx, a, matrix, to, Store::Set);
        }
        return Ok(());
    }
    let none = &mut [][..];
    let side = side.unwrap_or(Side {
        matrix: Matrix { data: &[], rows: a.cols, cols: 0, row_stride: 0, col_stride: 0 },
        to: none,
    });
    let made = MadeWeight(&numbers, family);
    gemm_made(ctx, a, (&made, direction == Direction::Forward), (to, store), side);
    Ok(())
}

/// x (N, in) times weight (out, in) transposed, plus `residual` (N, out) where given: (N, out). With a side, that product of x,
/// too.
pub fn forward(
    ctx: &mut Ctx,
    x: &Tensor,
    weight: Weight,
    residual: Option<&Tensor>,
    side: Option<Side>,
) -> Result<Value> {
    let ((n, k), (out, columns)) = (x.dims2()?, weight.dims()?);
    if k != columns {
        return Err(Error::op("linear", format!("a weight of ({out}, {k})"), format!("({out}, {columns})")));
    }
    if let Some(residual) = residual.filter(|r| r.dims() != [n, out]) {
        return Err(Error::op("linear", format!("a residual of ({n}, {out})"), format!("{:?}", residual.dims())));
    }
    if ctx.has_gpu() {
        ctx.launch(weight.bytes()?);
        let tensor = &dense_gpu(ctx, weight)?;
        let y = ctx.output(x.dtype(), (n, out))?;
        let (a, b) = (gpu::Matrix::new(x, n, k), gpu::Matrix::new(tensor, out, k).t());
        ctx.multiply(&Product { a, b, c: Arg::write(&y) })?;
        if let Some(residual) = residual {
            add::add_assign(ctx, &y, residual)?;
        }
        return Ok(y);
    }
    let mut y = ctx.vec(n * out);
    let store = match residual {
        None => Store::Set,
        Some(residual) => {
            add::copy_to(&storage::read::<f32>("linear", residual)?, &mut y);
            Store::Add
        }
    };
    let x = storage::read::<f32>("linear", x)?;
    multiply(ctx, Matrix::new(&x, n, k), (weight, Direction::Forward), (&mut y, store), side)?;
    Ok(ctx.value(y, (n, out)))
}

/// The gradient of x (N, in) from dy (N, out). With a side, that product of dy, too.
pub fn backward_input(
    ctx: &mut Ctx,
    dy: &Tensor,
    weight: Weight,
    dx: (&Tensor, Store),
    side: Option<Side>,
) -> Result<()> {
    let (n, out) = dy.dims2()?;
    if ctx.has_gpu() {
        ctx.launch(weight.bytes()?);
        let tensor = &dense_gpu(ctx, weight)?;
        let b = gpu::Matrix::new(tensor, out, weight.dims()?.1);
        return product_gpu(ctx, gpu::Matrix::new(dy, n, out), b, dx);
    }
    let dy = storage::read::<f32>("linear", dy)?;
    let mut to = storage::write::<f32>("linear", dx.0)?;
    multiply(ctx, Matrix::new(&dy, n, out), (weight, Direction::Backward), (&mut to, dx.1), side)
}

/// The gradient of the weight (out, in) from dy (N, out) and x (N, in).
pub fn backward_weight(ctx: &mut Ctx, dy: &Tensor, x: &Tensor, dweight: (&Tensor, Store)) -> Result<()> {
    let ((n, out), (_, k)) = (dy.dims2()?, x.dims2()?);
    ctx.launch(0);
    if ctx.has_gpu() {
        return product_gpu(ctx, gpu::Matrix::new(dy, n, out).t(), gpu::Matrix::new(x, n, k), dweight);
    }
    let (dy, x) = (storage::read::<f32>("linear", dy)?, storage::read::<f32>("linear", x)?);
    let mut to = storage::write::<f32>("linear", dweight.0)?;
    gemm(ctx, Matrix::new(&dy, n, out).t(), Matrix::new(&x, n, k), &mut to, dweight.1);
    Ok(())
}

/// A weight as a GPU's products take it, whole, with what was made for that.
struct Dense(Tensor, #[allow(dead_code)] Option<Value>);

impl std::ops::Deref for Dense {
    type Target = Tensor;
    fn deref(&self) -> &Tensor {
        &self.0
    }
}

fn dense_gpu(ctx: &mut Ctx, weight: Weight) -> Result<Dense> {
    let made = match weight {
        Weight::Dense { tensor, .. } => return Ok(Dense(tensor.clone(), None)),
        Weight::Blocks(blocks) => blocks.numbers(ctx)?,
        Weight::Corrected(weight, factors) => {
            let base = dense_gpu(ctx, *weight)?;
            lora::corrected(ctx, &base, factors)?
        }
    };
    Ok(Dense((*made).clone(), Some(made)))
}

/// The product of a and b on a GPU, stored or added.
pub(super) fn product_gpu(ctx: &mut Ctx, a: gpu::Matrix, b: gpu::Matrix, (to, store): (&Tensor, Store)) -> Result<()> {
    if store == Store::Set {
        return ctx.multiply(&Product { a, b, c: Arg::write(to) });
    }
    let c = ctx.output(to.dtype(), to.shape())?;
    ctx.multiply(&Product { a, b, c: Arg::write(&c) })?;
    add::add_assign(ctx, to, &c)
}

/// y of `forward` without residual by the plain formula; `x` has rows of `input` elements, `weight` too.
pub fn reference(x: &[f32], weight: &[f32], input: usize) -> Vec<f64> {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    x.chunks(input).flat_map(|x| weight.chunks(input).map(move |w| dot(x, w))).collect()
}
