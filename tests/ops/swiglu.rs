//! Parity of SwiGLU.

use candle_core::{Tensor, Var};
use gpt::ops::{ctx::Ctx, gemm::Store, swiglu};

use crate::support::*;

const SHAPES: [(usize, usize); 7] = [(1, 1), (5, 6), (63, 32), (64, 17), (65, 80), (130, 64), (2, 9000)];

struct Case {
    n: usize,
    f: usize,
    gate_up: Vec<f32>,
    dy: Vec<f32>,
}

impl Case {
    fn new(n: usize, f: usize, size: f32) -> Self {
        Self { n, f, gate_up: normal(1, 2 * n * f).iter().map(|x| x * size).collect(), dy: normal(2, n * f) }
    }

    /// y and the gradient, which is written over or added to `start`.
    fn run(&self, ctx: &mut Ctx, start: Option<f32>) -> [Vec<f32>; 2] {
        let (n, f) = (self.n, self.f);
        poison(ctx, &[n * f]);
        let gate_up = tensor(self.gate_up.clone(), &[n, 2 * f]);
        let y = swiglu::forward(ctx, &gate_up).unwrap();
        assert_eq!(y.dims(), [n, f]);
        let dx = tensor(vec![start.unwrap_or(f32::NAN); 2 * n * f], &[n, 2 * f]);
        let store = if start.is_some() { Store::Add } else { Store::Set };
        swiglu::backward(ctx, &gate_up, &tensor(self.dy.clone(), &[n, f]), (&dx, store)).unwrap();
        [values(&y), values(&dx)]
    }
}

/// The gradient by candle's autograd, with the gate as g / (1 + e^-g).
fn oracle(case: &Case) -> Vec<f32> {
    let cpu = &candle_core::Device::Cpu;
    let x = Var::from_tensor(&Tensor::from_slice(&case.gate_up, (case.n, 2 * case.f), cpu).unwrap()).unwrap();
    let (gate, up) = (x.narrow(1, 0, case.f).unwrap(), x.narrow(1, case.f, case.f).unwrap());
    let below = (gate.neg().unwrap().exp().unwrap() + 1.0).unwrap();
    let y = ((gate / below).unwrap() * up).unwrap();
    let dy = Tensor::from_slice(&case.dy, (case.n, case.f), cpu).unwrap();
    values((y * dy).unwrap().sum_all().unwrap().backward().unwrap().get(&x).unwrap())
}

#[test]
fn agrees_with_the_reference_and_with_autograd() {
    for mut ctx in contexts() {
        for (n, f) in SHAPES {
            for size in [1.0, 8.0] {
                let what = format!("{} {n}x{f} of size {size}", ctx.family().name());
                let case = Case::new(n, f, size);
                let [y, dx] = case.run(&mut ctx, None);
                assert_close(&what, &y, &narrowed(&swiglu::reference(&case.gate_up, f)), 2e-6);
                assert_close(&format!("{what}: gradient"), &dx, &oracle(&case), 2e-5);
            }
        }
    }
}

#[test]
fn large_gates_neither_overflow_nor_vanish() {
    for mut ctx in contexts() {
        let case = Case::new(7, 40, 1e4);
        let [y, dx] = case.run(&mut ctx, None);
        assert_close("y", &y, &narrowed(&swiglu::reference(&case.gate_up, 40)), 2e-6);
        assert!(dx.iter().all(|x| x.is_finite()));
        // Where the gate is far above zero the unit is linear: the gradient of `up` is dy gate.
        for (i, dy) in case.dy.iter().enumerate().filter(|(i, _)| case.gate_up[i / 40 * 80 + i % 40] > 100.0) {
            let at = i / 40 * 80 + i % 40;
            assert_close("gradient of up", &[dx[at + 40]], &[dy * case.gate_up[at]], 1e-6);
        }
    }
}

#[test]
fn gradients_predict_the_change_of_the_loss() {
    for mut ctx in contexts() {
        let case = Case::new(5, 33, 1.0);
        let [_, dx] = case.run(&mut ctx, None);
        let loss = |x: &[f32]| weighted(&swiglu::reference(x, 33), &case.dy);
        assert_slope("gradient", loss, &case.gate_up, &dx, 1e-4);
    }
}

#[test]
fn adding_keeps_what_was_there_and_the_number_of_threads_changes_no_bit() {
    for mut ctx in contexts() {
        let case = Case::new(300, 80, 1.0);
        let one = on_threads(1, || case.run(&mut ctx, None));
        assert!([2, 3].into_iter().all(|threads| on_threads(threads, || case.run(&mut ctx, None)) == one));
        let sum: Vec<f32> = one[1].iter().map(|v| v + 3.0).collect();
        assert_eq!(case.run(&mut ctx, Some(3.0))[1], sum);
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let mut ctx = contexts().remove(0);
    assert!(swiglu::forward(&mut ctx, &normal_tensor(1, &[3, 5])).is_err());
    let (x, dy, dx) = (normal_tensor(1, &[3, 4]), normal_tensor(2, &[3, 3]), unset(&[3, 4]));
    assert!(swiglu::backward(&mut ctx, &x, &dy, (&dx, Store::Set)).is_err());
}
