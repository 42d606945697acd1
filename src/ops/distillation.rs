//! The output head and the loss of a student against its teacher in one, over chunks of rows, so that neither model's V-wide
//! logits are ever all in memory. Called by `model::gpt` through the objective of distillation.
//!
//! A row's loss is alpha T^2 D + (1 - alpha) (-ln p(target)), with D a divergence between the teacher's distribution q and the
//! student's p, both softened by the temperature T (Hinton et al., "Distilling the Knowledge in a Neural Network", 2015: T^2
//! keeps gradients comparable). D is KL(q|p), KL(p|q) (Gu et al., "MiniLLM", 2023) or their Jensen-Shannon mean (Agarwal et
//! al., "On-Policy Distillation", 2023).

use candle_core::{DType, Tensor};
use rayon::prelude::*;

use super::cross_entropy::{Chunk, IGNORE, Output, Wanted, over_chunks, over_chunks_gpu, row_nll, total};
use super::ctx::Ctx;
use super::gemm::{self, Matrix, Store};
use super::gpu::{self, Arg, Product, kernels};
use super::simd::{self, Family, LANES, simd_fn};
use super::storage;
use crate::error::{Error, Result};

const OP: &str = "distillation";

/// How far two distributions are apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Divergence {
    /// KL(q|p): the student covers all that the teacher does.
    Forward,
    /// KL(p|q): the student does nothing that the teacher does not.
    Reverse,
    JensenShannon,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    pub divergence: Divergence,
    /// Divides the logits of both.
    pub temperature: f32,
    /// The divergence's share of the loss; the targets have the rest.
    pub alpha: f32,
}

/// What the teacher says of N rows.
#[derive(Clone, Copy)]
pub enum Teacher<'a> {
    /// Its last hidden states (N, Ct) and its head (V, Ct).
    Model { x: &'a Tensor, weight: &'a Tensor },
    /// For each row the ids and ln q of the `k` likeliest tokens; the others share what is left. Without temperature.
    Top { k: usize, ids: &'a [u32], logprobs: &'a [f32] },
}

/// The loss of x (N, C) under the head `weight` (V, C) against a teacher of the same vocabulary. Rows whose target is `IGNORE`
/// do not count.
pub fn forward(
    ctx: &mut Ctx,
    (x, weight): (&Tensor, &Tensor),
    teacher: Teacher,
    targets: &[u32],
    (settings, scale): (Settings, f32),
    wanted: Wanted,
) -> Result<Output> {
    let ((n, c), (v, columns)) = (x.dims2()?, weight.dims2()?);
    check((n, c, columns), v, teacher, targets)?;
    if ctx.has_gpu() {
        return forward_gpu(ctx, (x, weight), teacher, targets, (settings, scale), wanted);
    }
    let family = ctx.family();
    let factor = if matches!(wanted, Wanted::None) { 0.0 } else { scale };
    let (losses, dx) = match teacher {
        Teacher::Model { x: hidden, weight: head } => {
            let channels = head.dims2()?.1;
            let (hidden, head) = (storage::read::<f32>(OP, hidden)?, storage::read::<f32>(OP, head)?);
            let head = Matrix::new(&head, v, channels);
            let packed = gemm::pack(ctx, head.t());
            let done = over_chunks(ctx, OP, x, weight, wanted, &mut |ctx, rows, logits, losses| {
                let m = rows.len();
                let hidden = Matrix::new(&hidden[rows.start * channels..rows.end * channels], m, channels);
                let (mut teacher, mut scratch) = (ctx.vec(m * v), ctx.vec(m * v));
                gemm::multiply_packed(ctx, hidden, (head.t(), &packed), &mut teacher, Store::Set);
                let parts = (logits.par_chunks_mut(v), teacher.par_chunks_mut(v), scratch.par_chunks_mut(v));
                let each = parts.into_par_iter().zip(&targets[rows]).zip(losses.par_iter_mut());
                each.for_each(|(((logits, teacher, scratch), target), loss)| {
                    *loss = row(family, logits, (teacher, scratch), *target, settings, factor);
                });
                ctx.recycle(teacher);
                ctx.recycle(scratch);
            });
            packed.recycle(ctx);
            done?
        }
        Teacher::Top { k, ids, logprobs } => {
            over_chunks(ctx, OP, x, weight, wanted, &mut |_, rows, logits, losses| {
                let top = ids[rows.start * k..rows.end * k].par_chunks(k).zip(logprobs[rows.start * k..].par_chunks(k));
                let each = logits.par_chunks_mut(v).zip(top).zip(&targets[rows]).zip(losses.par_iter_mut());
                each.for_each(|(((logits, (ids, logprobs)), target), loss)| {
                    *loss = row_of_top(logits, ids, logprobs, *target, settings, factor);
                });
            })?
        }
    };
    let loss = total(ctx, &losses, scale);
    Ok(Output { loss, nll: ctx.value(losses, n), dx: dx.map(|dx| ctx.value(dx, (n, c))) })
}

fn forward_gpu(
    ctx: &mut Ctx,
    (x, weight): (&Tensor, &Tensor),
    teacher: Teacher,
    targets: &[u32],
    (settings, scale): (Settings, f32),
    wanted: Wanted,
) -> Result<Output> {
    let Settings { divergence, temperature, alpha } = settings;
    let (v, divergence) = (weight.dims2()?.0, divergence as usize);
    let top = match teacher {
        Teacher::Model { .. } => None,
        Teacher::Top { ids, logprobs, .. } => Some((ctx.upload(ids, ids.len()), ctx.upload(logprobs, logprobs.len()))),
    };
    over_chunks_gpu(ctx, (x, weight), targets, (scale, wanted), &mut |ctx, chunk| {
        let Chunk { rows, logits, targets, losses } = chunk;
        let scratch = ctx.output(DType::F32, logits.shape())?;
        let (targets, losses) = (Arg::read(targets).at(rows.start), Arg::write(losses).at(rows.start));
        match (teacher, &top) {
            (Teacher::Top { k, .. }, Some((ids, logprobs))) => {
                let (ids, logprobs) = (Arg::read(ids).at(rows.start * k), Arg::read(logprobs).at(rows.start * k));
                let args = [Arg::update(logits), ids, logprobs, targets, losses, Arg::update(&scratch)];
                let numbers = [v.into(), k.into(), divergence.into(), alpha.into(), scale.into()];
                ctx.dispatch(&kernels::DISTILLATION_TOP, DType::F32, &args, &numbers, rows.len())
            }
            (Teacher::Model { x, weight }, _) => {
                let channels = weight.dims2()?.1;
                let a = gpu::Matrix::new(x, x.dims()[0], channels).from_row(rows.start).first_rows(rows.len());
                ctx.multiply(&Product { a, b: gpu::Matrix::new(weight, v, channels).t(), c: Arg::write(&scratch) })?;
                let args = [Arg::update(logits), Arg::read(&scratch), targets, losses];
                let numbers = [v.into(), divergence.into(), temperature.into(), alpha.into(), scale.into()];
                ctx.dispatch(&kernels::DISTILLATION, DType::F32, &args, &numbers, rows.len())
            }
            (Teacher::Top { .. }, None) => unreachable!("it was uploaded above"),
        }
    })
}

fn check((n, c, columns): (usize, usize, usize), v: usize, teacher: Teacher, targets: &[u32]) -> Result<()> {
    let wrong = |expected: String, found: String| Err(Error::op(OP, expected, found));
    if c != columns || targets.len() != n {
        return wrong(format!("x (N, {columns}) and N targets"), format!("x ({n}, {c}) and {} targets", targets.len()));
    }
    if let Some(at) = targets.iter().position(|t| *t != IGNORE && *t as usize >= v) {
        return wrong(format!("targets below {v}"), format!("id {} at position {at}", targets[at]));
    }
    match teacher {
        Teacher::Model { x, weight } => match (x.dims2()?, weight.dims2()?) {
            ((rows, a), (vocab, b)) if rows == n && vocab == v && a == b => Ok(()),
            (x, weight) => wrong(format!("a teacher of {n} rows and {v} ids"), format!("{x:?} and {weight:?}")),
        },
        Teacher::Top { k, ids, logprobs } => {
            let fits = k > 0 && k < v && ids.len() == n * k && logprobs.len() == n * k;
            match fits && ids.iter().all(|id| (*id as usize) < v) {
                true => Ok(()),
                false => wrong(format!("{n} rows of less than {v} ids"), format!("{} ids, {k} a row", ids.len())),
            }
        }
    }
}

/// The loss of a row of the student's logits, which become their gradient times `factor`; the teacher's are used up.
fn row(
    family: Family,
    logits: &mut [f32],
    (teacher, student): (&mut [f32], &mut [f32]),
    target: u32,
    settings: Settings,
    factor: f32,
) -> f32 {
    let Settings { divergence, temperature, alpha } = settings;
    if target == IGNORE {
        logits.fill(0.0);
        return 0.0;
    }
    student.copy_from_slice(logits);
    let hard = match alpha < 1.0 {
        true => (1.0 - alpha) * row_nll(family, logits, target as usize, (1.0 - alpha) * factor, true),
        false => {
            logits.fill(0.0);
            0.0
        }
    };
    log_softmax(family, student, temperature);
    log_softmax(family, teacher, temperature);
    let weight = alpha * temperature * factor;
    let d = match divergence {
        Divergence::Forward => forward_row(family, logits, teacher, student, weight),
        Divergence::Reverse => reverse_row(family, logits, teacher, student, weight),
        Divergence::JensenShannon => jensen_shannon_row(family, logits, teacher, student, weight),
    };
    hard + alpha * temperature * temperature * d
}

simd_fn! {
/// x = ln softmax(x / temperature).
fn log_softmax<S>(x: &mut [f32], temperature: f32) {
    let max = simd::max(x);
    let mut sum = 0f32;
    for part in x.chunks_mut(64) {
        let mut e = [0f32; 64];
        for i in 0..part.len() {
            part[i] = (part[i] - max) / temperature;
            e[i] = simd::exp::<S>(part[i]);
        }
        sum += simd::sum(&e);
    }
    let log = sum.ln();
    for i in 0..x.len() {
        x[i] -= log;
    }
}
}

simd_fn! {
/// KL(q|p) of logarithms; adds its gradient to `gradient`.
fn forward_row<S>(gradient: &mut [f32], teacher: &[f32], student: &[f32], weight: f32) -> f32 {
    let mut d = [0f32; LANES];
    let parts = gradient.chunks_mut(LANES).zip(teacher.chunks(LANES).zip(student.chunks(LANES)));
    for (gradient, (teacher, student)) in parts {
        for i in 0..gradient.len() {
            let (q, p) = (simd::exp::<S>(teacher[i]), simd::exp::<S>(student[i]));
            d[i] += q * (teacher[i] - student[i]);
            gradient[i] += weight * (p - q);
        }
    }
    simd::sum(&d)
}
}

simd_fn! {
/// KL(p|q) of logarithms; adds its gradient to `gradient`.
fn reverse_row<S>(gradient: &mut [f32], teacher: &[f32], student: &[f32], weight: f32) -> f32 {
    let mut d = [0f32; LANES];
    for (teacher, student) in teacher.chunks(LANES).zip(student.chunks(LANES)) {
        for i in 0..student.len() {
            d[i] += simd::exp::<S>(student[i]) * (student[i] - teacher[i]);
        }
    }
    let d = simd::sum(&d);
    for i in 0..gradient.len() {
        gradient[i] += weight * simd::exp::<S>(student[i]) * (student[i] - teacher[i] - d);
    }
    d
}
}

simd_fn! {
/// Half of KL(q|m) and of KL(p|m) with m the mean of both; adds its gradient to `gradient`. The teacher's are used up.
fn jensen_shannon_row<S>(gradient: &mut [f32], teacher: &mut [f32], student: &[f32], weight: f32) -> f32 {
    let (mut d, mut mean) = (0f32, 0f32);
    for i in 0..gradient.len() {
        let (q, p) = (simd::exp::<S>(teacher[i]), simd::exp::<S>(student[i]));
        let log = (0.5 * (p + q)).max(f32::MIN_POSITIVE).ln();
        d += 0.5 * (q * (teacher[i] - log) + p * (student[i] - log));
        // From here on half of ln p - ln m, from whose mean under p the gradient is counted.
        teacher[i] = 0.5 * (student[i] - log);
        mean += p * teacher[i];
    }
    for i in 0..gradient.len() {
        gradient[i] += weight * simd::exp::<S>(student[i]) * (teacher[i] - mean);
    }
    d
}
}

/// The same where only the teacher's likeliest tokens are known: the others are one token of what is left, for both models.
fn row_of_top(logits: &mut [f32], ids: &[u32], logprobs: &[f32], target: u32, settings: Settings, factor: f32) -> f32 {
    if target == IGNORE {
        logits.fill(0.0);
        return 0.0;
    }
    let max = simd::max(logits);
    let sum: f64 = logits.iter().map(|x| f64::from(x - max).exp()).sum();
    let log = |x: f32| f64::from(x - max) - sum.ln();
    let p: Vec<f64> = ids.iter().map(|id| log(logits[*id as usize]).exp()).collect();
    let q: Vec<f64> = logprobs.iter().map(|l| f64::from(*l).exp()).collect();
    let rest = |known: &[f64]| (1.0 - known.iter().sum::<f64>()).max(1e-9);
    let (p_rest, q_rest) = (rest(&p), rest(&q));
    // D and its derivative by p, for one of the tokens.
    let parts = |p: f64, q: f64| match settings.divergence {
        Divergence::Forward => (q * (q / p).ln(), -q / p),
        Divergence::Reverse => (p * (p / q).ln(), (p / q).ln()),
        Divergence::JensenShannon => {
            let m = 0.5 * (p + q);
            (0.5 * (q * (q / m).ln() + p * (p / m).ln()), 0.5 * (p / m).ln())
        }
    };
    let known: Vec<(f64, f64)> = p.iter().zip(&q).map(|(p, q)| parts(p.max(1e-30), q.max(1e-30))).collect();
    let (d_rest, g_rest) = parts(p_rest, q_rest);
    let d: f64 = known.iter().map(|(d, _)| d).sum::<f64>() + d_rest;
    let mean: f64 = p.iter().zip(&known).map(|(p, (_, g))| p * g).sum::<f64>() + p_rest * g_rest;
    let (alpha, hard) = (f64::from(settings.alpha), 1.0 - f64::from(settings.alpha));
    let nll = -log(logits[target as usize]);
    let factor = f64::from(factor);
    for x in logits.iter_mut() {
        let p = log(*x).exp();
        *x = (factor * p * (alpha * (g_rest - mean) + hard)) as f32;
    }
    for ((id, p), (_, g)) in ids.iter().zip(&p).zip(&known) {
        logits[*id as usize] = (factor * p * (alpha * (g - mean) + hard)) as f32;
    }
    logits[target as usize] -= (factor * hard) as f32;
    (alpha * d + hard * nll) as f32
}

/// The mean of the rows' losses in f64, by the plain formula, from logits (N, V) of both.
pub fn reference(student: &[f64], teacher: &[f64], v: usize, targets: &[u32], settings: Settings) -> f64 {
    let t = f64::from(settings.temperature);
    let softmax = |x: &[f64], t: f64| {
        let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let e: Vec<f64> = x.iter().map(|x| ((x - max) / t).exp()).collect();
        let sum: f64 = e.iter().sum();
        e.into_iter().map(|e| e / sum).collect::<Vec<_>>()
    };
    let kl = |a: &[f64], b: &[f64]| {
        let terms = a.iter().zip(b).map(|(a, b)| if *a > 0.0 { a * (a / b).ln() } else { 0.0 });
        terms.sum::<f64>()
    };
    let rows = student.chunks(v).zip(teacher.chunks(v)).zip(targets).filter(|(_, target)| **target != IGNORE);
    let losses = rows.map(|((student, teacher), target)| {
        let (p, q) = (softmax(student, t), softmax(teacher, t));
        let d = match settings.divergence {
            Divergence::Forward => kl(&q, &p),
            Divergence::Reverse => kl(&p, &q),
            Divergence::JensenShannon => {
                let m: Vec<f64> = p.iter().zip(&q).map(|(p, q)| 0.5 * (p + q)).collect();
                0.5 * (kl(&q, &m) + kl(&p, &m))
            }
        };
        let alpha = f64::from(settings.alpha);
        alpha * t * t * d - (1.0 - alpha) * softmax(student, 1.0)[*target as usize].ln()
    });
    losses.sum::<f64>() / targets.len() as f64
}
