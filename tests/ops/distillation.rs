//! The student's head and loss against the f64 reference, candle's autograd and finite differences.

use candle_core::{D, Tensor, Var};
use gpt::ops::cross_entropy::{IGNORE, Wanted};
use gpt::ops::distillation::{self, Divergence, Settings, Teacher};
use gpt::ops::gemm::Store;
use gpt::random::{Purpose, Stream};

use super::support::{assert_close, contexts, normal_tensor, tensor, values};

const DIVERGENCES: [Divergence; 3] = [Divergence::Forward, Divergence::Reverse, Divergence::JensenShannon];

fn targets(n: usize, v: usize) -> Vec<u32> {
    let stream = Stream::new(3, Purpose::Test);
    (0..n as u32).map(|i| if i % 5 == 2 { IGNORE } else { stream.word(0, i) % v as u32 }).collect()
}

fn wide(t: &Tensor) -> Vec<f64> {
    values(t).into_iter().map(f64::from).collect()
}

/// Logits (N, V) of x (N, C) under w (V, C).
fn logits(x: &[f64], w: &[f64], c: usize) -> Vec<f64> {
    x.chunks(c).flat_map(|x| w.chunks(c).map(|w| x.iter().zip(w).map(|(a, b)| a * b).sum::<f64>())).collect()
}

/// The loss by plain tensor operations, whose gradients candle's autograd gives.
fn oracle(x: &Var, w: &Var, teacher: &Tensor, targets: &[u32], settings: Settings) -> Tensor {
    let v = w.dims()[0];
    let student = x.matmul(&w.t().unwrap()).unwrap();
    let soft =
        |t: &Tensor| candle_nn::ops::log_softmax(&(t / f64::from(settings.temperature)).unwrap(), D::Minus1).unwrap();
    let (p, q) = (soft(&student), soft(teacher));
    let kl = |a: &Tensor, b: &Tensor| (a.exp().unwrap() * (a - b).unwrap()).unwrap().sum(D::Minus1).unwrap();
    let d = match settings.divergence {
        Divergence::Forward => kl(&q, &p),
        Divergence::Reverse => kl(&p, &q),
        Divergence::JensenShannon => {
            let m = ((p.exp().unwrap() + q.exp().unwrap()).unwrap() * 0.5).unwrap().log().unwrap();
            ((kl(&q, &m) + kl(&p, &m)).unwrap() * 0.5).unwrap()
        }
    };
    let mut onehot = vec![0f32; targets.len() * v];
    let mut counted = vec![0f32; targets.len()];
    for (i, target) in targets.iter().enumerate().filter(|(_, t)| **t != IGNORE) {
        (onehot[i * v + *target as usize], counted[i]) = (1.0, 1.0);
    }
    let nll = candle_nn::ops::log_softmax(&student, D::Minus1).unwrap();
    let nll = (nll * tensor(onehot, &[targets.len(), v])).unwrap().sum_all().unwrap().neg().unwrap();
    let alpha = f64::from(settings.alpha);
    let d = (d * tensor(counted, &[targets.len()])).unwrap().sum_all().unwrap();
    ((d * (alpha * f64::from(settings.temperature).powi(2))).unwrap() + (nll * (1.0 - alpha)).unwrap()).unwrap()
}

#[test]
fn loss_and_gradients_are_the_plain_formula_and_those_of_autograd() {
    for mut ctx in contexts() {
        for (n, v, c, ct) in [(1, 7, 5, 9), (65, 320, 33, 16), (1100, 64, 8, 24)] {
            for (i, divergence) in DIVERGENCES.into_iter().enumerate() {
                for (temperature, alpha) in [(1.0, 1.0), (2.0, 0.7), (0.5, 0.0)] {
                    let settings = Settings { divergence, temperature, alpha };
                    let what = format!("{} N={n} V={v} {settings:?}", ctx.family().name());
                    let x = Var::from_tensor(&normal_tensor(1 + i as u64, &[n, c])).unwrap();
                    let w = Var::from_tensor(&(normal_tensor(2, &[v, c]) * 0.4).unwrap()).unwrap();
                    let (tx, tw) = (normal_tensor(3, &[n, ct]), (normal_tensor(4, &[v, ct]) * 0.3).unwrap());
                    let (targets, scale) = (targets(n, v), 1.0 / n as f32);
                    let teacher = Teacher::Model { x: &tx, weight: &tw };
                    let dw = normal_tensor(5, &[v, c]);
                    let got = distillation::forward(
                        &mut ctx,
                        (&x, &w),
                        teacher,
                        &targets,
                        (settings, scale),
                        Wanted::InputAndHead(&dw, Store::Set),
                    )
                    .unwrap();
                    let (student, said) = (logits(&wide(&x), &wide(&w), c), logits(&wide(&tx), &wide(&tw), ct));
                    let want = distillation::reference(&student, &said, v, &targets, settings) as f32;
                    assert_close(&what, &values(&got.loss), &[want], 2e-5);
                    let loss = oracle(&x, &w, &tx.matmul(&tw.t().unwrap()).unwrap(), &targets, settings);
                    let gradients = loss.backward().unwrap();
                    let scaled = |t: &Tensor| values(&(t * n as f64).unwrap().contiguous().unwrap());
                    assert_close(
                        &format!("{what}: dx"),
                        &scaled(&got.dx.unwrap()),
                        &values(gradients.get(&x).unwrap()),
                        3e-5,
                    );
                    assert_close(&format!("{what}: dw"), &scaled(&dw), &values(gradients.get(&w).unwrap()), 3e-4);
                }
            }
        }
    }
}

/// With all tokens but one known, the others are that one: the loss is the one of the whole distribution.
#[test]
fn a_teacher_of_which_the_likeliest_tokens_are_known_is_the_teacher() {
    for mut ctx in contexts() {
        let (n, v, c) = (9, 12, 6);
        let (x, w) = (normal_tensor(1, &[n, c]), normal_tensor(2, &[v, c]));
        let (tx, tw) = (normal_tensor(3, &[n, c]), normal_tensor(4, &[v, c]));
        let said = logits(&wide(&tx), &wide(&tw), c);
        let (k, targets) = (v - 1, targets(n, v));
        let (mut ids, mut logprobs) = (Vec::new(), Vec::new());
        for row in said.chunks(v) {
            let sum = row.iter().map(|x| x.exp()).sum::<f64>().ln();
            let mut order: Vec<u32> = (0..v as u32).collect();
            order.sort_by(|a, b| row[*b as usize].total_cmp(&row[*a as usize]));
            ids.extend(&order[..k]);
            logprobs.extend(order[..k].iter().map(|id| (row[*id as usize] - sum) as f32));
        }
        for divergence in DIVERGENCES {
            let settings = Settings { divergence, temperature: 1.0, alpha: 0.8 };
            let mut run = |teacher| {
                let dw = normal_tensor(5, &[v, c]);
                let out = distillation::forward(
                    &mut ctx,
                    (&x, &w),
                    teacher,
                    &targets,
                    (settings, 0.1),
                    Wanted::InputAndHead(&dw, Store::Set),
                )
                .unwrap();
                [values(&out.loss), values(&out.dx.unwrap()), values(&dw)]
            };
            let whole = run(Teacher::Model { x: &tx, weight: &tw });
            let top = run(Teacher::Top { k, ids: &ids, logprobs: &logprobs });
            for (whole, top) in whole.iter().zip(&top) {
                assert_close(&format!("{divergence:?}"), top, whole, 2e-5);
            }
        }
    }
}

/// With few tokens known the gradient is still that of the loss.
#[test]
fn gradients_from_a_few_known_tokens_are_finite_differences() {
    let mut ctx = contexts().remove(0);
    let (n, v, c, k) = (3, 9, 4, 2);
    let (x, w) = (normal_tensor(1, &[n, c]), normal_tensor(2, &[v, c]));
    let (ids, logprobs) = ([0u32, 3, 8, 1, 2, 5], [0.5f32, 0.3, 0.6, 0.1, 0.25, 0.2].map(f32::ln));
    let teacher = Teacher::Top { k, ids: &ids, logprobs: &logprobs };
    for divergence in DIVERGENCES {
        let settings = Settings { divergence, temperature: 1.0, alpha: 0.6 };
        let targets = [3, IGNORE, 7];
        let dw = normal_tensor(5, &[v, c]);
        let mut run = |x: &Tensor, wanted: Wanted| {
            distillation::forward(&mut ctx, (x, &w), teacher, &targets, (settings, 1.0), wanted).unwrap()
        };
        let dx = values(&run(&x, Wanted::InputAndHead(&dw, Store::Set)).dx.unwrap());
        for i in 0..n * c {
            let mut at = |step: f32| {
                let mut moved = values(&x);
                moved[i] += step;
                values(&run(&tensor(moved, &[n, c]), Wanted::None).loss)[0]
            };
            let slope = (at(1e-2) - at(-1e-2)) / 2e-2;
            assert!((slope - dx[i]).abs() < 2e-3, "{divergence:?} {i}: {slope} against {}", dx[i]);
        }
    }
}
