//! Rotary positions of queries and keys, after their optional RMS norm; values pass through. Called by nn between the
//! fused projection and attention.
//!
//! Pairs are (i, i + D/2), as in Hugging Face's models, and the angle of pair i at position t is t / theta^(2i/D),
//! computed in f64. Su et al., "RoFormer" (2021); the norm of queries and keys: Dehghani et al., "Scaling Vision
//! Transformers to 22 Billion Parameters" (2023). The gradients of the gains are summed over fixed blocks of rows in order.

use candle_core::{DType, Tensor};
use rayon::prelude::*;

use super::ctx::{Ctx, Value};
use super::gemm::Store;
use super::gpu::{Arg, kernels};
use super::heads::Heads;
use super::rms_norm::{self, BLOCK};
use super::simd::{Simd, simd_fn};
use super::storage::{self, Read};
use crate::error::{Error, Result};

const OP: &str = "rotary";

/// Cosine and sine of every angle, each (T, D/2).
#[derive(Clone, Debug)]
pub struct Table {
    pub cos: Tensor,
    pub sin: Tensor,
}

impl Table {
    /// The angles of positions 0..`positions` for heads of `head_dim` columns, which must be even.
    pub fn new(positions: usize, head_dim: usize, theta: f64) -> Result<Self> {
        if head_dim == 0 || !head_dim.is_multiple_of(2) {
            return Err(Error::op(OP, "an even head_dim", head_dim.to_string()));
        }
        let half = head_dim / 2;
        let angle = |i: usize| (i / half) as f64 * theta.powf(-((i % half) as f64) / half as f64);
        let table = |f: fn(f64) -> f64| (0..positions * half).map(|i| f(angle(i)) as f32).collect();
        let tensor = |v: Vec<f32>| storage::tensor(v, (positions, half));
        Ok(Self { cos: tensor(table(f64::cos)), sin: tensor(table(f64::sin)) })
    }
}

/// Gains of the query and key norms, each (D), and the norms' epsilon.
#[derive(Clone, Copy)]
pub struct Norms<'a> {
    pub query: &'a Tensor,
    pub key: &'a Tensor,
    pub eps: f32,
}

/// What the backward needs of the forward.
#[derive(Clone, Copy)]
pub struct Saved<'a> {
    /// The input (N, (H+2K)D); read only if there are norms.
    pub qkv: &'a Tensor,
    /// The second output of `forward` (N, H+K).
    pub rstd: &'a Tensor,
    pub norms: Option<Norms<'a>>,
    pub table: &'a Table,
    pub heads: Heads,
    /// T, the length of a sequence.
    pub seq: usize,
}

/// Normalises and rotates qkv (N, (H+2K)D), sequences of `seq` = T rows. Returns it and the norms' factors (N, H+K), or (0) without norms.
pub fn forward(
    ctx: &mut Ctx,
    qkv: &Tensor,
    heads: Heads,
    norms: Option<Norms>,
    table: &Table,
    seq: usize,
) -> Result<(Value, Value)> {
    check(heads, norms, table, seq)?;
    let (family, shape, n) = (ctx.family(), qkv.shape(), rows_of(qkv.elem_count(), heads, seq)?);
    ctx.launch(0);
    if ctx.has_gpu() {
        return forward_gpu(ctx, qkv, heads, (norms, table), (n, seq));
    }
    let (qkv, inputs) = (storage::read::<f32>(OP, qkv)?, Inputs::new(heads, norms, table, seq)?);
    let (x, rows) = (&*qkv, inputs.rows());
    let (width, rotated) = (heads.qkv_size(), heads.attention + heads.key_value);
    let mut y = ctx.vec::<f32>(n * width);
    let mut rstd = ctx.vec::<f32>(if norms.is_some() { n * rotated } else { 0 });
    // Without norms there is nothing to save, but each task still gets its (empty) share.
    let mut shares: Vec<&mut [f32]> = rstd.chunks_mut(BLOCK * rotated).collect();
    shares.resize_with(n.div_ceil(BLOCK), Default::default);
    let tasks = y.par_chunks_mut(BLOCK * width).zip(shares).enumerate();
    tasks.for_each(|(block, (y, rstd))| {
        let first = block * BLOCK;
        forward_rows(family, rows, first, &x[first * width..][..y.len()], y, rstd);
    });
    let rstd_shape = if norms.is_some() { vec![n, rotated] } else { vec![0] };
    Ok((ctx.value(y, shape), ctx.value(rstd, rstd_shape)))
}

/// From dout (N, (H+2K)D): writes the gradient of qkv to `dqkv` and those of the query and key gains, unless they are frozen, to `dnorms`.
pub fn backward(
    ctx: &mut Ctx,
    saved: Saved,
    dout: &Tensor,
    (dqkv, store): (&Tensor, Store),
    dnorms: Option<[(&Tensor, Store); 2]>,
) -> Result<()> {
    let Saved { heads, norms, .. } = saved;
    check(heads, norms, saved.table, saved.seq)?;
    let family = ctx.family();
    let (n, width, d) = (rows_of(dout.elem_count(), heads, saved.seq)?, heads.qkv_size(), heads.dim);
    let rotated = if norms.is_some() { heads.attention + heads.key_value } else { 0 };
    let sizes = (saved.qkv.elem_count(), dqkv.elem_count(), saved.rstd.elem_count());
    if sizes != (n * width, n * width, n * rotated) || dnorms.is_some() && norms.is_none() {
        let found = format!("qkv {}, dqkv {}, rstd {}", sizes.0, sizes.1, sizes.2);
        return Err(Error::op(OP, format!("{n} rows of {width}, no gain gradients without norms"), found));
    }
    if let Some((gradient, _)) = dnorms.into_iter().flatten().find(|(gradient, _)| gradient.elem_count() != d) {
        return Err(Error::op(OP, format!("a gain's gradient of {d}"), gradient.elem_count().to_string()));
    }
    ctx.launch(0);
    if ctx.has_gpu() {
        return backward_gpu(ctx, saved, dout, (dqkv, store), dnorms);
    }
    let (qkv, rstd) = (storage::read::<f32>(OP, saved.qkv)?, storage::read::<f32>(OP, saved.rstd)?);
    let (dout, mut dqkv) = (storage::read::<f32>(OP, dout)?, storage::write::<f32>(OP, dqkv)?);
    let inputs = Inputs::new(heads, norms, saved.table, saved.seq)?;
    // Of each block: the gradients of both gains, and room for one un-rotated head.
    let mut partial = ctx.vec::<f32>(n.div_ceil(BLOCK) * 3 * d);
    let (x, rstd, dy, rows) = (&*qkv, &*rstd, &*dout, inputs.rows());
    let tasks = dqkv.par_chunks_mut(BLOCK * width).zip(partial.par_chunks_mut(3 * d)).enumerate();
    tasks.for_each(|(block, (dx, partial))| {
        let first = block * BLOCK;
        let (x, dy) = (&x[first * width..][..dx.len()], &dy[first * width..][..dx.len()]);
        backward_rows(family, rows, first, x, &rstd[first * rotated..], dy, dx, store, partial);
    });
    for (i, (gradient, store)) in dnorms.into_iter().flatten().enumerate() {
        let mut gradient = storage::write::<f32>(OP, gradient)?;
        rms_norm::add_blocks(&partial, 3 * d, i * d, &mut gradient, store);
    }
    ctx.recycle(partial);
    Ok(())
}

/// Rows of one partial sum of the gains' gradients on a GPU, as kernels/metal/rotary.metal has it.
const GPU_BLOCK: usize = 16;

/// The gains for a kernel: where there are none, anything.
fn gains<'a>(norms: Option<Norms<'a>>, none: &'a Tensor) -> ([Arg<'a>; 2], usize, f32) {
    match norms {
        Some(Norms { query, key, eps }) => ([Arg::read(query), Arg::read(key)], 1, eps),
        None => ([Arg::read(none); 2], 0, 0.0),
    }
}

fn forward_gpu(
    ctx: &mut Ctx,
    qkv: &Tensor,
    heads: Heads,
    (norms, table): (Option<Norms>, &Table),
    (n, seq): (usize, usize),
) -> Result<(Value, Value)> {
    let rotated = heads.attention + heads.key_value;
    let y = ctx.output(qkv.dtype(), qkv.shape())?;
    let rstd = ctx.output(DType::F32, if norms.is_some() { vec![n, rotated] } else { vec![0] })?;
    let ([query, key], normed, eps) = gains(norms, qkv);
    let all = rotated + heads.key_value;
    let numbers =
        [all.into(), rotated.into(), heads.dim.into(), heads.attention.into(), seq.into(), normed.into(), eps.into()];
    let args =
        [Arg::read(qkv), Arg::read(&table.cos), Arg::read(&table.sin), query, key, Arg::write(&y), Arg::write(&rstd)];
    ctx.dispatch(&kernels::ROTARY, qkv.dtype(), &args, &numbers, (all.div_ceil(8), n))?;
    Ok((y, rstd))
}

fn backward_gpu(
    ctx: &mut Ctx,
    saved: Saved,
    dout: &Tensor,
    (dqkv, store): (&Tensor, Store),
    dnorms: Option<[(&Tensor, Store); 2]>,
) -> Result<()> {
    let Saved { qkv, rstd, norms, table, heads, seq } = saved;
    let (n, rotated, d) = (dout.elem_count() / heads.qkv_size(), heads.attention + heads.key_value, heads.dim);
    let blocks = n.div_ceil(GPU_BLOCK);
    let partial = ctx.output(DType::F32, blocks * 2 * d)?;
    let ([query, key], normed, _) = gains(norms, qkv);
    let numbers = [
        n.into(),
        (rotated + heads.key_value).into(),
        rotated.into(),
        d.into(),
        heads.attention.into(),
        seq.into(),
        normed.into(),
        store.into(),
    ];
    let args = [
        Arg::read(qkv),
        Arg::read(rstd),
        Arg::read(&table.cos),
        Arg::read(&table.sin),
        query,
        key,
        Arg::read(dout),
        Arg::update(dqkv),
        Arg::write(&partial),
    ];
    ctx.dispatch(&kernels::ROTARY_BACKWARD, dout.dtype(), &args, &numbers, blocks)?;
    for (i, (gradient, store)) in dnorms.into_iter().flatten().enumerate() {
        rms_norm::add_blocks_gpu(ctx, &partial, (blocks, 2 * d, i * d), gradient, store)?;
    }
    Ok(())
}

/// What both directions read, borrowed and checked.
struct Inputs<'a> {
    heads: Heads,
    seq: usize,
    cos: Read<'a, f32>,
    sin: Read<'a, f32>,
    norms: Option<([Read<'a, f32>; 2], f32)>,
}

/// Holds tables and gains to the sizes of heads and sequences.
fn check(heads: Heads, norms: Option<Norms>, table: &Table, seq: usize) -> Result<()> {
    heads.check(OP)?;
    let half = heads.dim / 2;
    let fits = table.cos.dims() == table.sin.dims() && table.cos.dims().last() == Some(&half);
    if !fits || table.cos.elem_count() < seq * half || heads.dim % 2 == 1 {
        let expected = format!("angles of {seq} positions for heads of {}", heads.dim);
        return Err(Error::op(OP, expected, format!("{:?}", table.cos.shape())));
    }
    let Some(Norms { query, key, .. }) = norms else { return Ok(()) };
    let gains = [query, key].map(Tensor::elem_count);
    match gains == [heads.dim; 2] {
        true => Ok(()),
        false => Err(Error::op(OP, format!("gains of {}", heads.dim), format!("{gains:?}"))),
    }
}

/// N, which must be whole sequences.
fn rows_of(elements: usize, heads: Heads, seq: usize) -> Result<usize> {
    let (width, n) = (heads.qkv_size(), elements / heads.qkv_size());
    if n * width != elements || seq == 0 || !n.is_multiple_of(seq) {
        let expected = format!("sequences of {seq} rows of {width}");
        return Err(Error::op(OP, expected, format!("{elements} elements")));
    }
    Ok(n)
}

impl<'a> Inputs<'a> {
    /// Opens what `check` has passed.
    fn new(heads: Heads, norms: Option<Norms<'a>>, table: &'a Table, seq: usize) -> Result<Self> {
        let (cos, sin) = (storage::read::<f32>(OP, &table.cos)?, storage::read::<f32>(OP, &table.sin)?);
        let norms = match norms {
            None => None,
            Some(Norms { query, key, eps }) => {
                Some(([storage::read::<f32>(OP, query)?, storage::read::<f32>(OP, key)?], eps))
            }
        };
        Ok(Self { heads, seq, cos, sin, norms })
    }

    fn rows(&self) -> Rows<'_> {
        let gains = self.norms.as_ref().map(|([query, key], eps)| ([&**query, &**key], *eps));
        Rows { heads: self.heads, seq: self.seq, cos: &self.cos, sin: &self.sin, gains }
    }
}

/// `Inputs` as slices, for the loops.
#[derive(Clone, Copy)]
struct Rows<'a> {
    heads: Heads,
    seq: usize,
    cos: &'a [f32],
    sin: &'a [f32],
    /// Gains of query and key, and epsilon.
    gains: Option<([&'a [f32]; 2], f32)>,
}

impl<'a> Rows<'a> {
    /// Cosines and sines of a row's position.
    #[inline(always)]
    fn angles(&self, row: usize) -> (&'a [f32], &'a [f32]) {
        let (half, position) = (self.heads.dim / 2, row % self.seq);
        (&self.cos[position * half..][..half], &self.sin[position * half..][..half])
    }
}

simd_fn! {
/// Rows `first..` of the forward.
fn forward_rows<S>(rows: Rows, first: usize, x: &[f32], y: &mut [f32], rstd: &mut [f32]) {
    let Heads { attention, key_value, dim } = rows.heads;
    let (width, rotated) = (rows.heads.qkv_size(), attention + key_value);
    for (r, (x, y)) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)).enumerate() {
        let (cos, sin) = rows.angles(first + r);
        for h in 0..rotated {
            let (x, y) = (&x[h * dim..][..dim], &mut y[h * dim..][..dim]);
            match rows.gains {
                None => turn::<S>(x, cos, sin, y),
                Some((gains, eps)) => {
                    let factor = rms_norm::inverse_rms::<S>(x, eps);
                    rstd[r * rotated + h] = factor;
                    turn_scaled::<S>(x, factor, gains[usize::from(h >= attention)], cos, sin, y);
                }
            }
        }
        y[rotated * dim..].copy_from_slice(&x[rotated * dim..]);
    }
}
}

simd_fn! {
/// Rows `first..` of the backward; `partial` gets the sums of both gains' gradients.
fn backward_rows<S>(rows: Rows, first: usize, x: &[f32], rstd: &[f32], dy: &[f32], dx: &mut [f32], store: Store, partial: &mut [f32]) {
    let Heads { attention, key_value, dim } = rows.heads;
    let (width, rotated) = (rows.heads.qkv_size(), attention + key_value);
    let (sums, turned) = partial.split_at_mut(2 * dim);
    sums.fill(0.0);
    let (query_sums, key_sums) = sums.split_at_mut(dim);
    for (r, ((x, dy), dx)) in x.chunks_exact(width).zip(dy.chunks_exact(width)).zip(dx.chunks_exact_mut(width)).enumerate() {
        let (cos, sin) = rows.angles(first + r);
        for h in 0..rotated {
            let (x, dx) = (&x[h * dim..][..dim], &mut dx[h * dim..][..dim]);
            turn_back::<S>(&dy[h * dim..][..dim], cos, sin, turned);
            match rows.gains {
                None => dx.iter_mut().zip(&*turned).for_each(|(dx, g)| store.put(dx, *g)),
                Some((gains, _)) => {
                    let (gain, sums) =
                        if h < attention { (gains[0], &mut *query_sums) } else { (gains[1], &mut *key_sums) };
                    rms_norm::backward_row::<S>(x, gain, rstd[r * rotated + h], turned, (dx, store), sums);
                }
            }
        }
        let values = rotated * dim..;
        dx[values.clone()].iter_mut().zip(&dy[values]).for_each(|(dx, g)| store.put(dx, *g));
    }
}
}

#[inline(always)]
fn turn<S: Simd>(x: &[f32], cos: &[f32], sin: &[f32], y: &mut [f32]) {
    let half = cos.len();
    let (sin, (x0, x1), (y0, y1)) = (&sin[..half], x.split_at(half), y.split_at_mut(half));
    let (x1, y0, y1) = (&x1[..half], &mut y0[..half], &mut y1[..half]);
    for i in 0..half {
        y0[i] = S::fma(x0[i], cos[i], -x1[i] * sin[i]);
        y1[i] = S::fma(x1[i], cos[i], x0[i] * sin[i]);
    }
}

/// `turn` of x * factor * gain.
#[inline(always)]
fn turn_scaled<S: Simd>(x: &[f32], factor: f32, gain: &[f32], cos: &[f32], sin: &[f32], y: &mut [f32]) {
    let half = cos.len();
    let (sin, (x0, x1), (y0, y1)) = (&sin[..half], x.split_at(half), y.split_at_mut(half));
    let (x1, y0, y1, (gain0, gain1)) = (&x1[..half], &mut y0[..half], &mut y1[..half], gain.split_at(half));
    let gain1 = &gain1[..half];
    for i in 0..half {
        let (a, b) = (x0[i] * factor * gain0[i], x1[i] * factor * gain1[i]);
        y0[i] = S::fma(a, cos[i], -b * sin[i]);
        y1[i] = S::fma(b, cos[i], a * sin[i]);
    }
}

/// The inverse turn, which is the transposed one.
#[inline(always)]
fn turn_back<S: Simd>(y: &[f32], cos: &[f32], sin: &[f32], x: &mut [f32]) {
    let half = cos.len();
    let (sin, (y0, y1), (x0, x1)) = (&sin[..half], y.split_at(half), x.split_at_mut(half));
    let (y1, x0, x1) = (&y1[..half], &mut x0[..half], &mut x1[..half]);
    for i in 0..half {
        x0[i] = S::fma(y0[i], cos[i], y1[i] * sin[i]);
        x1[i] = S::fma(y1[i], cos[i], -y0[i] * sin[i]);
    }
}

/// `forward` of rows of (H+2K)D in plain f64; `gains` are those of query and key and epsilon.
pub fn reference(qkv: &[f32], heads: Heads, gains: Option<([&[f32]; 2], f32)>, theta: f64, seq: usize) -> Vec<f64> {
    let (width, d) = (heads.qkv_size(), heads.dim);
    let mut out: Vec<f64> = qkv.iter().map(|&x| f64::from(x)).collect();
    for (row, out) in out.chunks_exact_mut(width).enumerate() {
        for h in 0..heads.attention + heads.key_value {
            let head = &mut out[h * d..][..d];
            if let Some((gains, eps)) = gains {
                let x: Vec<f32> = head.iter().map(|&x| x as f32).collect();
                head.copy_from_slice(&rms_norm::reference(&x, gains[usize::from(h >= heads.attention)], eps));
            }
            for i in 0..d / 2 {
                let angle = (row % seq) as f64 * theta.powf(-2.0 * i as f64 / d as f64);
                let (a, b) = (head[i], head[i + d / 2]);
                head[i] = a * angle.cos() - b * angle.sin();
                head[i + d / 2] = b * angle.cos() + a * angle.sin();
            }
        }
    }
    out
}
