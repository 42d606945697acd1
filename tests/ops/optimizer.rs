//! gradient_norm, guard, adamw and muon against f64 references over several steps.

// A parameter of one part has a list of one range; not the numbers in it.
#![allow(clippy::single_range_in_vec_init)]

use candle_core::Tensor;
use gpt::ops::adamw::{self, Adamw};
use gpt::ops::ctx::Ctx;
use gpt::ops::guard::{self, Guard};
use gpt::ops::muon::{self, Muon};
use gpt::ops::scalars::{Scalar, Scalars};
use gpt::ops::simd::Family;
use gpt::ops::{gradient_norm, storage};

use super::support::{assert_close, contexts, narrowed, normal, normal_tensor, on_threads, tensor, values};

fn zeros(shape: &[usize]) -> Tensor {
    storage::tensor(vec![0f32; shape.iter().product()], shape)
}

fn scalars(all: &[(Scalar, f32)]) -> Scalars {
    let scalars = Scalars::new();
    all.iter().for_each(|(scalar, value)| scalars.set(*scalar, *value).unwrap());
    scalars
}

#[test]
fn the_norm_is_that_of_all_gradients_and_hides_nothing() {
    for mut ctx in contexts() {
        let s = Scalars::new();
        let mut norm = |tensors: &[Tensor]| {
            gradient_norm::forward(&mut ctx, tensors, s.tensor()).unwrap();
            s.get(Scalar::GradientNorm).unwrap()
        };
        let tensors = [normal_tensor(1, &[7, 33]), normal_tensor(2, &[3, 16 * 1024]), normal_tensor(3, &[1])];
        let all = tensors.iter().flat_map(values);
        let want = all.map(|x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        assert!((f64::from(norm(&tensors)) / want - 1.0).abs() < 1e-6);
        for bad in [f32::NAN, f32::INFINITY] {
            let mut last = normal(1, 40_001);
            last[40_000] = bad;
            assert!(!norm(&[tensor(last, &[40_001])]).is_finite(), "{bad} must stay visible");
        }
        assert_eq!(norm(&[]), 0.0);
    }
}

#[test]
fn the_guard_clips_and_skips_only_what_is_far_off() {
    let mut ctx = Ctx::cpu(Family::detect());
    let guard = Guard { max_norm: 2.0, spike_threshold: 6.0, observe: 20 };
    let s = Scalars::new();
    let mut step = |loss: f32, norm: f32| {
        s.set(Scalar::Loss, loss).unwrap();
        s.set(Scalar::GradientNorm, norm).unwrap();
        guard::decide(&mut ctx, s.tensor(), guard).unwrap();
        guard::finish(&mut ctx, s.tensor()).unwrap();
        (s.get(Scalar::Skip).unwrap() == 1.0, s.get(Scalar::Clip).unwrap())
    };
    let noise = normal(1, 200);
    assert_eq!(step(9.0, 1.0), (false, 1.0), "a spike cannot be told before there is anything to compare with");
    for x in &noise {
        assert!(!step(3.0 + 0.1 * x, 1.0 + 0.05 * x).0, "ordinary noise is no spike");
    }
    assert_eq!(step(3.0, 1.5), (true, 1.0), "ten deviations of the norm");
    assert!(step(12.0, 1.0).0 && step(12.0, 1.0).0, "one spike does not excuse the next");
    assert!(step(f32::NAN, 1.0).0 && step(3.0, f32::INFINITY).0);
    assert!(!step(3.0, 1.0).0, "and it recovers");
    assert_eq!(s.get(Scalar::Updates).unwrap(), 202.0, "skipped steps are no updates");
    assert_eq!(scalars(&[]).get(Scalar::Updates).unwrap(), 0.0);
    let calm = Scalars::new();
    calm.set(Scalar::GradientNorm, 8.0).unwrap();
    guard::decide(&mut ctx, calm.tensor(), guard).unwrap();
    assert_eq!(calm.get(Scalar::Clip).unwrap(), 0.25);
}

#[test]
fn adamw_is_the_plain_formula_over_several_steps() {
    let adamw = Adamw { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1 };
    for mut ctx in contexts() {
        let n = 16_500;
        let (master, first, second) = (tensor(normal(1, n), &[n]), zeros(&[n]), zeros(&[n]));
        let ema = zeros(&[n]);
        let mut plain: Vec<[f64; 4]> = values(&master).iter().map(|p| [f64::from(*p), 0.0, 0.0, 0.0]).collect();
        let s = scalars(&[(Scalar::LearningRate, 0.02), (Scalar::Clip, 0.5), (Scalar::EmaDecay, 0.9)]);
        for step in 0..5 {
            let gradient = tensor(normal(10 + step, n), &[n]);
            let skip = step == 2;
            s.set(Scalar::Skip, f32::from(skip)).unwrap();
            let target =
                adamw::Target { master: &master, gradient: &gradient, first: &first, second: &second, ema: Some(&ema) };
            adamw::step(&mut ctx, target, adamw, s.tensor()).unwrap();
            if skip {
                continue;
            }
            let updates = f64::from(s.get(Scalar::Updates).unwrap());
            let decay = ((1.0 + updates) / (10.0 + updates)).min(0.9);
            for ([p, m, v, e], g) in plain.iter_mut().zip(values(&gradient)) {
                let g = f64::from(g) * 0.5;
                *m = 0.9 * *m + 0.1 * g;
                *v = 0.95 * *v + 0.05 * g * g;
                let (m, v) = (*m / (1.0 - 0.9f64.powf(updates + 1.0)), *v / (1.0 - 0.95f64.powf(updates + 1.0)));
                *p -= 0.02 * (0.1 * *p + m / (v.sqrt() + 1e-8));
                *e = decay * *e + (1.0 - decay) * *p;
            }
            guard::finish(&mut ctx, s.tensor()).unwrap();
        }
        let column = |i: usize| narrowed(&plain.iter().map(|row| row[i]).collect::<Vec<_>>());
        assert_close("master", &values(&master), &column(0), 3e-6);
        assert_close("average", &values(&ema), &column(3), 3e-6);
    }
}

/// A Muon update of one matrix from rest: what it adds to a zero weight, over its scale.
fn direction(ctx: &mut Ctx, gradient: &Tensor, parts: Vec<std::ops::Range<usize>>) -> Vec<f32> {
    let shape = gradient.dims();
    let (master, momentum) = (zeros(shape), zeros(shape));
    let s = scalars(&[(Scalar::LearningRate, 1.0), (Scalar::Clip, 1.0)]);
    let target = muon::Target { master: &master, gradient, momentum: &momentum, ema: None, parts };
    muon::step(ctx, &[target], Muon::default(), s.tensor()).unwrap();
    values(&master)
}

#[test]
fn muon_makes_every_direction_about_equally_long() {
    for mut ctx in contexts() {
        for (rows, columns) in [(33, 70), (70, 33), (64, 64)] {
            let gradient = normal_tensor(4, &[rows, columns]);
            let scale = -0.2 * (rows.max(columns) as f32).sqrt();
            let update = direction(&mut ctx, &gradient, vec![0..rows]);
            let u = tensor(update.iter().map(|x| x / scale).collect(), &[rows, columns]);
            let gram = if rows <= columns { u.matmul(&u.t().unwrap()) } else { u.t().unwrap().matmul(&u) }.unwrap();
            // The squared length along each axis: singular values lie in about [0.6, 1.25] after five iterations.
            let small = rows.min(columns);
            for i in 0..small {
                let squared = values(&gram)[i * small + i];
                assert!((0.3..1.7).contains(&squared), "{rows} x {columns}: {squared}");
            }
            // It points where the gradient does.
            let along: f32 = values(&u).iter().zip(values(&gradient)).map(|(u, g)| u * g).sum();
            assert!(along > 0.0);
        }
    }
}

#[test]
fn muon_parts_are_matrices_of_their_own_at_every_thread_count() {
    let gradient = normal_tensor(5, &[90, 40]);
    let run =
        |threads| on_threads(threads, || direction(&mut Ctx::cpu(Family::detect()), &gradient, vec![0..40, 40..90]));
    let whole = run(1);
    assert!(whole == run(2) && whole == run(3));
    let mut ctx = Ctx::cpu(Family::detect());
    let cut = |rows: std::ops::Range<usize>| {
        let part = values(&gradient)[rows.start * 40..rows.end * 40].to_vec();
        direction(&mut ctx.fork(), &tensor(part, &[rows.len(), 40]), vec![0..rows.len()])
    };
    assert_eq!([cut(0..40), cut(40..90)].concat(), whole);
    assert_ne!(direction(&mut ctx, &gradient, vec![0..90]), whole);
}

#[test]
fn muon_decays_keeps_momentum_and_leaves_a_skipped_step_alone() {
    let mut ctx = Ctx::cpu(Family::detect());
    let shape = [12, 20];
    let (master, momentum, ema) = (normal_tensor(1, &shape), zeros(&shape), zeros(&shape));
    let before = values(&master);
    let s = scalars(&[(Scalar::LearningRate, 0.5), (Scalar::Clip, 1.0), (Scalar::EmaDecay, 0.9), (Scalar::Skip, 1.0)]);
    let gradient = zeros(&shape);
    let step = |ctx: &mut Ctx| {
        let target = muon::Target {
            master: &master,
            gradient: &gradient,
            momentum: &momentum,
            ema: Some(&ema),
            parts: vec![0..12],
        };
        muon::step(ctx, &[target], Muon { weight_decay: 0.1, ..Muon::default() }, s.tensor()).unwrap();
    };
    step(&mut ctx);
    assert!(values(&master) == before && values(&ema).iter().all(|e| *e == 0.0));
    s.set(Scalar::Skip, 0.0).unwrap();
    step(&mut ctx);
    let want: Vec<f32> = before.iter().map(|p| p * 0.95).collect();
    assert_close("decay alone", &values(&master), &want, 1e-6);
    // The first average forgets its start: decay (1 + 0) / (10 + 0).
    assert_close("average", &values(&ema), &want.iter().map(|p| 0.9 * p).collect::<Vec<_>>(), 1e-6);
}
