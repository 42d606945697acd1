//! Rotary positions on the fused query/key/value rows, after the norm of each query and key head where the model has one.
//! Called by `nn::attention`. Su et al., arXiv 2104.09864; pairs are (i, i + D/2), as Hugging Face has them.

use candle_core::Tensor;
use rayon::prelude::*;

use super::ctx::{Ctx, Value};
use super::gemm::Store;
use super::heads::Heads;
use super::rms_norm::{BLOCK, add_blocks, backward_row, inverse_rms};
use super::simd::simd_fn;
use super::storage;
use crate::error::{Error, Result};

const OP: &str = "rotary";

/// Cosines and sines of position t and pair i, (T, D/2) each.
#[derive(Debug)]
pub struct Table {
    cos: Vec<f32>,
    sin: Vec<f32>,
    half: usize,
}

impl Table {
    /// Angles t * theta^(-2 i / D) for `positions` positions, in f64.
    pub fn new(positions: usize, head_dim: usize, theta: f64) -> Result<Self> {
        if head_dim == 0 || head_dim % 2 != 0 {
            return Err(Error::op(OP, "an even head_dim", head_dim.to_string()));
        }
        let half = head_dim / 2;
        let frequency = |i: usize| theta.powf(-2.0 * i as f64 / head_dim as f64);
        let angles: Vec<f64> =
            (0..positions).flat_map(|t| (0..half).map(move |i| t as f64 * frequency(i))).collect();
        let cos = angles.iter().map(|a| a.cos() as f32).collect();
        Ok(Self { cos, sin: angles.iter().map(|a| a.sin() as f32).collect(), half })
    }

    fn at(&self, t: usize) -> (&[f32], &[f32]) {
        (&self.cos[t * self.half..][..self.half], &self.sin[t * self.half..][..self.half])
    }
}

/// The gains (D) of the query and key norms.
#[derive(Clone, Copy)]
pub struct Norms<'a> {
    pub query: &'a Tensor,
    pub key: &'a Tensor,
    pub eps: f32,
}

/// What the backward needs of the forward.
#[derive(Clone, Copy)]
pub struct Saved<'a> {
    pub qkv: &'a Tensor,
    pub rstd: &'a Tensor,
    pub norms: Option<Norms<'a>>,
    pub table: &'a Table,
    pub heads: Heads,
    pub seq: usize,
}

fn check(qkv: &Tensor, heads: Heads, table: &Table, seq: usize) -> Result<usize> {
    let (n, width) = qkv.dims2()?;
    let known = table.cos.len() / table.half;
    if width != heads.qkv_size() || table.half * 2 != heads.dim || seq == 0 || seq > known || n % seq != 0 {
        let expected = format!("(B T, {}) with T up to {known}", heads.qkv_size());
        return Err(Error::op(OP, expected, format!("({n}, {width}) in sequences of {seq}")));
    }
    Ok(n)
}

/// Normalises (with `norms`) and rotates the query and key heads of qkv (N, (H + 2 K) D), values copied; row n stands at
/// position n mod `seq`. Also returns the norms' factors (N, H + K), empty without norms.
pub fn forward(
    ctx: &mut Ctx,
    qkv: &Tensor,
    heads: Heads,
    norms: Option<Norms>,
    table: &Table,
    seq: usize,
) -> Result<(Value, Value)> {
    let n = check(qkv, heads, table, seq)?;
    ctx.launch(0);
    let gains = match norms {
        Some(norms) => Some((storage::read::<f32>(OP, norms.query)?, storage::read::<f32>(OP, norms.key)?)),
        None => None,
    };
    let gains = gains.as_ref().map(|(q, k)| (&**q, &**k));
    let (width, rotated) = (heads.qkv_size(), heads.attention + heads.key_value);
    let mut y = ctx.vec::<f32>(n * width);
    let mut rstd = ctx.vec::<f32>(n * rotated);
    let (family, x) = (ctx.family(), storage::read::<f32>(OP, qkv)?);
    let x: &[f32] = &x;
    let eps = norms.map_or(0.0, |n| n.eps);
    let blocks = y.par_chunks_mut(BLOCK * width).zip(rstd.par_chunks_mut(BLOCK * rotated)).enumerate();
    blocks.for_each(|(block, (y, rstd))| {
        for (i, (y, rstd)) in y.chunks_exact_mut(width).zip(rstd.chunks_exact_mut(rotated)).enumerate() {
            let row = block * BLOCK + i;
            let x = &x[row * width..][..width];
            y[rotated * heads.dim..].copy_from_slice(&x[rotated * heads.dim..]);
            forward_row(family, x, heads, gains, eps, table.at(row % seq), y, rstd);
        }
    });
    if norms.is_none() {
        ctx.recycle(rstd);
        let none = ctx.vec::<f32>(0);
        return Ok((ctx.value(y, (n, width)), ctx.value(none, 0)));
    }
    Ok((ctx.value(y, (n, width)), ctx.value(rstd, (n, rotated))))
}

simd_fn! {
fn forward_row<S>(
    x: &[f32],
    heads: Heads,
    gains: Option<(&[f32], &[f32])>,
    eps: f32,
    angles: (&[f32], &[f32]),
    y: &mut [f32],
    rstd: &mut [f32],
) {
    let (d, half) = (heads.dim, heads.dim / 2);
    let (cos, sin) = (&angles.0[..half], &angles.1[..half]);
    for (head, ((x, y), rstd)) in x.chunks_exact(d).zip(y.chunks_exact_mut(d)).zip(rstd).enumerate() {
        let ((x0, x1), (y0, y1)) = (x.split_at(half), y.split_at_mut(half));
        let (x0, x1, y0, y1) = (&x0[..half], &x1[..half], &mut y0[..half], &mut y1[..half]);
        match gains {
            None => {
                for i in 0..half {
                    y0[i] = S::fma(x0[i], cos[i], -(x1[i] * sin[i]));
                    y1[i] = S::fma(x1[i], cos[i], x0[i] * sin[i]);
                }
            }
            Some((query, key)) => {
                let (w0, w1) = (if head < heads.attention { query } else { key }).split_at(half);
                let (w0, w1) = (&w0[..half], &w1[..half]);
                *rstd = inverse_rms::<S>(x, eps);
                for i in 0..half {
                    let (a, b) = (x0[i] * *rstd * w0[i], x1[i] * *rstd * w1[i]);
                    y0[i] = S::fma(a, cos[i], -(b * sin[i]));
                    y1[i] = S::fma(b, cos[i], a * sin[i]);
                }
            }
        }
    }
}
}

/// The gradients of qkv and, with norms, of the query and key gains, from that of the output.
pub fn backward(
    ctx: &mut Ctx,
    saved: Saved,
    dout: &Tensor,
    (dqkv, store): (&Tensor, Store),
    dnorms: Option<[(&Tensor, Store); 2]>,
) -> Result<()> {
    let Saved { qkv, norms, table, heads, seq, .. } = saved;
    let n = check(qkv, heads, table, seq)?;
    ctx.launch(0);
    let (width, rotated, d) = (heads.qkv_size(), heads.attention + heads.key_value, heads.dim);
    let gains = match norms {
        Some(norms) => Some((storage::read::<f32>(OP, norms.query)?, storage::read::<f32>(OP, norms.key)?)),
        None => None,
    };
    let gains = gains.as_ref().map(|(q, k)| (&**q, &**k));
    let (x, rstd, dout) = (
        storage::read::<f32>(OP, qkv)?,
        storage::read::<f32>(OP, saved.rstd)?,
        storage::read::<f32>(OP, dout)?,
    );
    let mut dx = storage::write::<f32>(OP, dqkv)?;
    let mut partial = ctx.zeros::<f32>(n.div_ceil(BLOCK) * 2 * d);
    let family = ctx.family();
    let (x, rstd, dout): (&[f32], &[f32], &[f32]) = (&x, &rstd, &dout);
    dx.par_chunks_mut(BLOCK * width).zip(partial.par_chunks_mut(2 * d)).enumerate().for_each(|(block, (dx, sums))| {
        let mut scratch = vec![0f32; d];
        for (i, dx) in dx.chunks_exact_mut(width).enumerate() {
            let row = block * BLOCK + i;
            let (x, dy) = (&x[row * width..][..width], &dout[row * width..][..width]);
            let values = rotated * d..;
            dx[values.clone()].iter_mut().zip(&dy[values]).for_each(|(dx, dy)| store.put(dx, *dy));
            let rstd = if gains.is_some() { &rstd[row * rotated..][..rotated] } else { &[] };
            backward_heads(family, x, heads, gains, rstd, table.at(row % seq), dy, (dx, store), sums, &mut scratch);
        }
    });
    if let Some([query, key]) = dnorms {
        for (offset, (slot, store)) in [(0, query), (d, key)] {
            add_blocks(&partial, 2 * d, offset, &mut storage::write::<f32>(OP, slot)?, store);
        }
    }
    ctx.recycle(partial);
    Ok(())
}

simd_fn! {
fn backward_heads<S>(
    x: &[f32],
    heads: Heads,
    gains: Option<(&[f32], &[f32])>,
    rstd: &[f32],
    angles: (&[f32], &[f32]),
    dy: &[f32],
    dx: (&mut [f32], Store),
    sums: &mut [f32],
    turned: &mut [f32],
) {
    let (d, half) = (heads.dim, heads.dim / 2);
    let (cos, sin) = (&angles.0[..half], &angles.1[..half]);
    let (query_sums, key_sums) = sums.split_at_mut(d);
    for head in 0..heads.attention + heads.key_value {
        let span = head * d..head * d + d;
        let (dy, dx, store) = (&dy[span.clone()], &mut dx.0[span.clone()], dx.1);
        {
            // The rotation's transpose turns back.
            let ((d0, d1), (t0, t1)) = (dy.split_at(half), turned.split_at_mut(half));
            let (d0, d1, t0, t1) = (&d0[..half], &d1[..half], &mut t0[..half], &mut t1[..half]);
            for i in 0..half {
                t0[i] = S::fma(d0[i], cos[i], d1[i] * sin[i]);
                t1[i] = S::fma(d1[i], cos[i], -(d0[i] * sin[i]));
            }
        }
        let is_query = head < heads.attention;
        match gains {
            None => dx.iter_mut().zip(&*turned).for_each(|(dx, t)| store.put(dx, *t)),
            Some((query, key)) => {
                let (gain, sums) = if is_query { (query, &mut *query_sums) } else { (key, &mut *key_sums) };
                backward_row::<S>(&x[span], gain, rstd[head], turned, (dx, store), sums);
            }
        }
    }
}
}

/// `forward` of one row at position t, in f64.
pub fn reference(x: &[f32], heads: Heads, gains: Option<(&[f32], &[f32])>, eps: f32, theta: f64, t: usize) -> Vec<f64> {
    let (d, half) = (heads.dim, heads.dim / 2);
    let mut y: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
    for head in 0..heads.attention + heads.key_value {
        let y = &mut y[head * d..][..d];
        if let Some((query, key)) = gains {
            let gain = if head < heads.attention { query } else { key };
            let rstd = 1.0 / (y.iter().map(|y| y * y).sum::<f64>() / d as f64 + f64::from(eps)).sqrt();
            y.iter_mut().zip(gain).for_each(|(y, w)| *y *= rstd * f64::from(*w));
        }
        for i in 0..half {
            let (sin, cos) = (t as f64 * theta.powf(-2.0 * i as f64 / d as f64)).sin_cos();
            (y[i], y[i + half]) = (y[i] * cos - y[i + half] * sin, y[i + half] * cos + y[i] * sin);
        }
    }
    y
}
