//! AdamW (Loshchilov and Hutter, arXiv 1711.05101) in one pass over memory, with the averaged weights kept beside.

use candle_core::{DType, Tensor};
use rayon::prelude::*;

use super::add::CHUNK;
use super::ctx::Ctx;
use super::gpu::{Arg, kernels};
use super::scalars::Scalar;
use super::simd::simd_fn;
use super::storage;
use crate::error::{Error, Result};

#[derive(Clone, Copy, Debug)]
pub struct Adamw {
    pub beta1: f32,
    pub beta2: f32,
    pub epsilon: f32,
    /// Decoupled: p -= lr * weight_decay * p.
    pub weight_decay: f32,
}

/// The tensors of one parameter, all of its shape.
#[derive(Clone, Copy)]
pub struct Target<'a> {
    pub master: &'a Tensor,
    pub gradient: &'a Tensor,
    pub first: &'a Tensor,
    pub second: &'a Tensor,
    /// The averaged weights, if kept.
    pub ema: Option<&'a Tensor>,
}

/// The decay of the averaged weights at this step: short at first, so that the start is forgotten.
pub(super) fn ema_decay(scalars: &[f32]) -> f32 {
    let updates = scalars[Scalar::Updates as usize];
    scalars[Scalar::EmaDecay as usize].min((1.0 + updates) / (10.0 + updates))
}

/// The numbers of a step that are the same for every element.
#[derive(Clone, Copy)]
struct Step {
    clip: f32,
    /// lr * weight_decay.
    decay: f32,
    /// lr over the first moment's bias correction.
    rate: f32,
    /// One over the square root of the second moment's bias correction.
    second_scale: f32,
    ema: f32,
}

/// One update; nothing at all when `Skip` is set.
pub fn step(ctx: &mut Ctx, target: Target, adamw: Adamw, scalars: &Tensor) -> Result<()> {
    ctx.launch(0);
    let lengths = [target.gradient, target.first, target.second].map(Tensor::elem_count);
    if lengths.iter().any(|len| *len != target.master.elem_count()) {
        let expected = format!("gradient and moments of {} elements", target.master.elem_count());
        return Err(Error::op("adamw", expected, format!("{lengths:?}")));
    }
    if ctx.has_gpu() {
        return step_gpu(ctx, target, adamw, scalars);
    }
    let s = storage::read::<f32>("adamw", scalars)?.to_vec();
    if s[Scalar::Skip as usize] != 0.0 {
        return Ok(());
    }
    let t = f64::from(s[Scalar::Updates as usize]) + 1.0;
    let lr = s[Scalar::LearningRate as usize];
    let step = Step {
        clip: s[Scalar::Clip as usize],
        decay: lr * adamw.weight_decay,
        rate: (f64::from(lr) / (1.0 - f64::from(adamw.beta1).powf(t))) as f32,
        second_scale: (1.0 / (1.0 - f64::from(adamw.beta2).powf(t)).sqrt()) as f32,
        ema: ema_decay(&s),
    };
    let gradient = storage::read::<f32>("adamw", target.gradient)?;
    let mut master = storage::write::<f32>("adamw", target.master)?;
    let mut first = storage::write::<f32>("adamw", target.first)?;
    let mut second = storage::write::<f32>("adamw", target.second)?;
    let family = ctx.family();
    let moments = first.par_chunks_mut(CHUNK).zip(second.par_chunks_mut(CHUNK));
    master.par_chunks_mut(CHUNK).zip(gradient.par_chunks(CHUNK)).zip(moments).for_each(|((p, g), (m, v))| {
        update(family, p, g, m, v, adamw, step);
    });
    drop((first, second));
    average(ctx, &master, target.ema, step.ema)
}

fn step_gpu(ctx: &mut Ctx, target: Target, adamw: Adamw, scalars: &Tensor) -> Result<()> {
    let Target { master, gradient, first, second, ema } = target;
    let Adamw { beta1, beta2, epsilon, weight_decay } = adamw;
    let (count, log) = (master.elem_count(), |beta: f32| f64::from(beta).ln() as f32);
    let numbers = [
        count.into(),
        beta1.into(),
        beta2.into(),
        log(beta1).into(),
        log(beta2).into(),
        epsilon.into(),
        weight_decay.into(),
    ];
    let args = [Arg::update(master), Arg::read(gradient), Arg::update(first), Arg::update(second), Arg::read(scalars)];
    ctx.dispatch(&kernels::ADAMW, DType::F32, &args, &numbers, count.div_ceil(256))?;
    average_gpu(ctx, master, ema, scalars)
}

/// `average` on a GPU, which finds the decay in the scalars.
pub(super) fn average_gpu(ctx: &mut Ctx, master: &Tensor, ema: Option<&Tensor>, scalars: &Tensor) -> Result<()> {
    let Some(ema) = ema else { return Ok(()) };
    let count = master.elem_count();
    if ema.elem_count() != count {
        return Err(Error::op("ema", format!("{count} elements"), ema.elem_count().to_string()));
    }
    let args = [Arg::read(master), Arg::update(ema), Arg::read(scalars)];
    ctx.dispatch(&kernels::AVERAGE, DType::F32, &args, &[count.into()], count.div_ceil(256))
}

simd_fn! {
fn update<S>(p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], adamw: Adamw, step: Step) {
    let Adamw { beta1, beta2, epsilon, .. } = adamw;
    for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
        let g = g * step.clip;
        *m = S::fma(beta1, *m, (1.0 - beta1) * g);
        *v = S::fma(beta2, *v, (1.0 - beta2) * g * g);
        // One subtraction: 1 - decay would lose the decay's lower bits.
        *p -= S::fma(step.decay, *p, step.rate * *m / S::fma(v.sqrt(), step.second_scale, epsilon));
    }
}
}

/// ema = decay * ema + (1 - decay) * master.
pub(super) fn average(ctx: &Ctx, master: &[f32], ema: Option<&Tensor>, decay: f32) -> Result<()> {
    let Some(ema) = ema else { return Ok(()) };
    let mut ema = storage::write::<f32>("ema", ema)?;
    if ema.len() != master.len() {
        return Err(Error::op("ema", format!("{} elements", master.len()), ema.len().to_string()));
    }
    let family = ctx.family();
    ema.par_chunks_mut(CHUNK).zip(master.par_chunks(CHUNK)).for_each(|(e, p)| average_chunk(family, e, p, decay));
    Ok(())
}

simd_fn! {
fn average_chunk<S>(e: &mut [f32], p: &[f32], decay: f32) {
    for (e, p) in e.iter_mut().zip(p) {
        *e = S::fma(decay, *e, (1.0 - decay) * p);
    }
}
}
