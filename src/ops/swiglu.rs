//! The gated activation of the MLP, `silu(gate) * up`. Called by nn between the two products. Shazeer, "GLU Variants
//! Improve Transformer" (2020).

use candle_core::Tensor;
use rayon::prelude::*;

use super::add::CHUNK;
use super::ctx::{Ctx, Value};
use super::gemm::Store;
use super::gpu::{Arg, kernels};
use super::simd::{sigmoid, simd_fn};
use super::storage;
use crate::error::{Error, Result};

const OP: &str = "swiglu";

/// y (N, F) from gate_up (N, 2F): the first F columns of a row are the gate, the others what it scales.
pub fn forward(ctx: &mut Ctx, gate_up: &Tensor) -> Result<Value> {
    let (family, (n, f)) = (ctx.family(), sizes(gate_up)?);
    ctx.launch(0);
    if ctx.has_gpu() {
        let (y, count) = (ctx.output(gate_up.dtype(), (n, f))?, n * f);
        let args = [Arg::read(gate_up), Arg::write(&y)];
        ctx.dispatch(&kernels::SWIGLU, y.dtype(), &args, &[count.into(), f.into()], count.div_ceil(256))?;
        return Ok(y);
    }
    let gate_up = storage::read::<f32>(OP, gate_up)?;
    let mut y = ctx.vec::<f32>(n * f);
    let (x, rows): (&[f32], _) = (&gate_up, rows_of_task(f));
    y.par_chunks_mut(rows * f).zip(x.par_chunks(rows * 2 * f)).for_each(|(y, x)| forward_rows(family, f, x, y));
    Ok(ctx.value(y, (n, f)))
}

/// From dy (N, F): writes the gradient of gate_up to `dgate_up` (N, 2F).
pub fn backward(ctx: &mut Ctx, gate_up: &Tensor, dy: &Tensor, dgate_up: (&Tensor, Store)) -> Result<()> {
    let (family, (n, f)) = (ctx.family(), sizes(gate_up)?);
    if (dy.elem_count(), dgate_up.0.elem_count()) != (n * f, gate_up.elem_count()) {
        let found = format!("dy {}, dgate_up {}", dy.elem_count(), dgate_up.0.elem_count());
        return Err(Error::op(OP, format!("gradients of {n} x {f}"), found));
    }
    ctx.launch(0);
    if ctx.has_gpu() {
        let (args, count) = ([Arg::read(gate_up), Arg::read(dy), Arg::update(dgate_up.0)], n * f);
        let numbers = [count.into(), f.into(), dgate_up.1.into()];
        return ctx.dispatch(&kernels::SWIGLU_BACKWARD, dy.dtype(), &args, &numbers, count.div_ceil(256));
    }
    let (gate_up, dy) = (storage::read::<f32>(OP, gate_up)?, storage::read::<f32>(OP, dy)?);
    let (mut dx, store) = (storage::write::<f32>(OP, dgate_up.0)?, dgate_up.1);
    let (x, dy, rows): (&[f32], &[f32], _) = (&gate_up, &dy, rows_of_task(f));
    let tasks = dx.par_chunks_mut(rows * 2 * f).zip(x.par_chunks(rows * 2 * f)).zip(dy.par_chunks(rows * f));
    tasks.for_each(|((dx, x), dy)| backward_rows(family, f, x, dy, dx, store));
    Ok(())
}

/// (N, F) of a gate_up of any rank whose last dimension is 2F.
fn sizes(gate_up: &Tensor) -> Result<(usize, usize)> {
    match gate_up.dims().last() {
        Some(&width) if width > 0 && width % 2 == 0 => Ok((gate_up.elem_count() / width, width / 2)),
        _ => Err(Error::op(OP, "rows of gate and up", format!("{:?}", gate_up.shape()))),
    }
}

fn rows_of_task(f: usize) -> usize {
    (CHUNK / (2 * f)).max(1)
}

simd_fn! {
fn forward_rows<S>(f: usize, x: &[f32], y: &mut [f32]) {
    for (x, y) in x.chunks_exact(2 * f).zip(y.chunks_exact_mut(f)) {
        let (gate, up) = x.split_at(f);
        for i in 0..f {
            y[i] = gate[i] * sigmoid::<S>(gate[i]) * up[i];
        }
    }
}
}

simd_fn! {
fn backward_rows<S>(f: usize, x: &[f32], dy: &[f32], dx: &mut [f32], store: Store) {
    for ((x, dy), dx) in x.chunks_exact(2 * f).zip(dy.chunks_exact(f)).zip(dx.chunks_exact_mut(2 * f)) {
        let ((gate, up), (dgate, dup)) = (x.split_at(f), dx.split_at_mut(f));
        for i in 0..f {
            let s = sigmoid::<S>(gate[i]);
            // silu' = s + gate s (1 - s)
            let slope = S::fma(gate[i] * s, 1.0 - s, s);
            store.put(&mut dgate[i], dy[i] * up[i] * slope);
            store.put(&mut dup[i], dy[i] * gate[i] * s);
        }
    }
}
}

/// `forward` of rows of 2F in plain f64.
pub fn reference(gate_up: &[f32], f: usize) -> Vec<f64> {
    let element = |gate: f32, up: f32| f64::from(gate) / (1.0 + (-f64::from(gate)).exp()) * f64::from(up);
    let row = |x: &[f32]| (0..f).map(|i| element(x[i], x[f + i])).collect::<Vec<_>>();
    gate_up.chunks_exact(2 * f).flat_map(row).collect()
}
