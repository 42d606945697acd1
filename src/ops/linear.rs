//! The linear layer's three products: y = x W^T, dx = dy W, dW = dy^T x. Called by `nn::linear`.

use candle_core::Tensor;
use parking_lot::Mutex;

use super::add;
use super::blocks::BlockMatrix;
use super::ctx::{Ctx, Value};
use super::gemm::{Kept, Matrix, Side, Store, gemm, gemm_beside};
use super::storage;
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
}

impl Weight<'_> {
    /// (out, in)
    pub fn dims(&self) -> Result<(usize, usize)> {
        Ok(match self {
            Weight::Dense { tensor, .. } => tensor.dims2()?,
            Weight::Blocks(blocks) => (blocks.rows(), blocks.columns()),
        })
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
    let (out, k) = weight.dims()?;
    let fresh = |ctx: &mut Ctx, w: &[f32], to: &mut [f32], side| match side {
        Some(side) => gemm_beside(ctx, a, operand(w, (out, k), direction), (to, store), side),
        None => gemm(ctx, a, operand(w, (out, k), direction), to, store),
    };
    match weight {
        Weight::Dense { tensor, kept } => {
            ctx.launch(4 * out * k);
            let w = storage::read::<f32>("linear", tensor)?;
            let Some((panels, version)) = kept else {
                fresh(ctx, &w, to, side);
                return Ok(());
            };
            let kept = match direction {
                Direction::Forward => &panels.forward,
                Direction::Backward => &panels.backward,
            };
            kept.lock().gemm(ctx, a, (operand(&w, (out, k), direction), version), to, store);
            if let Some(Side { matrix, to }) = side {
                gemm(ctx, a, matrix, to, Store::Set);
            }
        }
        Weight::Blocks(blocks) => {
            ctx.launch(blocks.as_bytes().len());
            let mut w = ctx.vec(out * k);
            blocks.unpack(ctx.family(), &mut w);
            fresh(ctx, &w, to, side);
            ctx.recycle(w);
        }
    }
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
    let dy = storage::read::<f32>("linear", dy)?;
    let mut to = storage::write::<f32>("linear", dx.0)?;
    multiply(ctx, Matrix::new(&dy, n, out), (weight, Direction::Backward), (&mut to, dx.1), side)
}

/// The gradient of the weight (out, in) from dy (N, out) and x (N, in).
pub fn backward_weight(ctx: &mut Ctx, dy: &Tensor, x: &Tensor, dweight: (&Tensor, Store)) -> Result<()> {
    let ((n, out), (_, k)) = (dy.dims2()?, x.dims2()?);
    ctx.launch(0);
    let (dy, x) = (storage::read::<f32>("linear", dy)?, storage::read::<f32>("linear", x)?);
    let mut to = storage::write::<f32>("linear", dweight.0)?;
    gemm(ctx, Matrix::new(&dy, n, out).t(), Matrix::new(&x, n, k), &mut to, dweight.1);
    Ok(())
}

/// y of `forward` without residual by the plain formula; `x` has rows of `input` elements, `weight` too.
pub fn reference(x: &[f32], weight: &[f32], input: usize) -> Vec<f64> {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    x.chunks(input).flat_map(|x| weight.chunks(input).map(move |w| dot(x, w))).collect()
}
