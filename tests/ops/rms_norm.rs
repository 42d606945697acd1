//! Parity of the RMS norm.

use candle_core::{D, Tensor, Var};
use gpt::ops::{ctx::Ctx, gemm::Store, rms_norm};

use crate::support::*;

const SHAPES: [(usize, usize); 8] = [(1, 1), (1, 6), (5, 32), (63, 64), (64, 17), (65, 80), (130, 128), (3, 1000)];
const EPS: f32 = 1e-6;

struct Case {
    n: usize,
    c: usize,
    x: Vec<f32>,
    weight: Vec<f32>,
    dy: Vec<f32>,
}

impl Case {
    fn new(n: usize, c: usize, size: f32) -> Self {
        let x = normal(1, n * c).iter().map(|x| x * size).collect();
        Self { n, c, x, weight: normal(2, c), dy: normal(3, n * c) }
    }

    /// y, dx and dweight; the gradients are written over or added to `start`.
    fn run(&self, ctx: &mut Ctx, start: Option<f32>) -> [Vec<f32>; 3] {
        let (n, c) = (self.n, self.c);
        poison(ctx, &[n * c, n, n.div_ceil(64) * c]);
        let (x, weight) = (tensor(self.x.clone(), &[n, c]), tensor(self.weight.clone(), &[c]));
        let (y, rstd) = rms_norm::forward(ctx, &x, &weight, EPS).unwrap();
        assert_eq!((y.dims(), rstd.dims()), (&[n, c][..], &[n][..]));
        let filled = |shape: &[usize]| tensor(vec![start.unwrap_or(f32::NAN); shape.iter().product()], shape);
        let (dx, dweight) = (filled(&[n, c]), filled(&[c]));
        let store = if start.is_some() { Store::Add } else { Store::Set };
        let saved = rms_norm::Saved { x: &x, weight: &weight, rstd: &rstd };
        rms_norm::backward(ctx, saved, &tensor(self.dy.clone(), &[n, c]), (&dx, store), Some((&dweight, store)))
            .unwrap();
        let frozen = filled(&[n, c]);
        rms_norm::backward(ctx, saved, &tensor(self.dy.clone(), &[n, c]), (&frozen, store), None).unwrap();
        assert_eq!(values(&frozen), values(&dx), "a frozen gain");
        [values(&y), values(&dx), values(&dweight)]
    }
}

/// y, dx and dweight of plain candle ops.
fn oracle(case: &Case) -> [Vec<f32>; 3] {
    let cpu = &candle_core::Device::Cpu;
    let x = Var::from_tensor(&Tensor::from_slice(&case.x, (case.n, case.c), cpu).unwrap()).unwrap();
    let weight = Var::from_tensor(&Tensor::from_slice(&case.weight, case.c, cpu).unwrap()).unwrap();
    let rms = (x.sqr().unwrap().mean_keepdim(D::Minus1).unwrap() + f64::from(EPS)).unwrap().sqrt().unwrap();
    let y = x.broadcast_div(&rms).unwrap().broadcast_mul(&weight).unwrap();
    let dy = Tensor::from_slice(&case.dy, (case.n, case.c), cpu).unwrap();
    let gradients = (&y * dy).unwrap().sum_all().unwrap().backward().unwrap();
    [values(&y), values(gradients.get(&x).unwrap()), values(gradients.get(&weight).unwrap())]
}

#[test]
fn agrees_with_the_reference_and_with_autograd() {
    for mut ctx in contexts() {
        for (n, c) in SHAPES {
            // Rows of size 1e-3 are where eps begins to count.
            for size in [1.0, 1e3, 1e-3] {
                let what = format!("{} {n}x{c} of size {size}", ctx.family().name());
                let case = Case::new(n, c, size);
                let [y, dx, dweight] = case.run(&mut ctx, None);
                assert_close(&what, &y, &narrowed(&rms_norm::reference(&case.x, &case.weight, EPS)), 2e-6);
                let [_, want_dx, want_dweight] = oracle(&case);
                // dx is as large as 1 / size; compare it at size one.
                let scaled = |v: &[f32]| v.iter().map(|v| v * size).collect::<Vec<_>>();
                assert_close(&format!("{what}: dx"), &scaled(&dx), &scaled(&want_dx), 2e-5);
                // A sum of up to 130 rows, in another order.
                assert_close(&format!("{what}: dweight"), &dweight, &want_dweight, 2e-5);
            }
        }
    }
}

#[test]
fn gradients_predict_the_change_of_the_loss() {
    for mut ctx in contexts() {
        let case = Case::new(5, 33, 1.0);
        let [_, dx, dweight] = case.run(&mut ctx, None);
        let loss_x = |x: &[f32]| weighted(&rms_norm::reference(x, &case.weight, EPS), &case.dy);
        assert_slope("dx", loss_x, &case.x, &dx, 1e-4);
        let loss_weight = |weight: &[f32]| weighted(&rms_norm::reference(&case.x, weight, EPS), &case.dy);
        assert_slope("dweight", loss_weight, &case.weight, &dweight, 1e-4);
    }
}

#[test]
fn adding_keeps_what_was_there() {
    for mut ctx in contexts() {
        let case = Case::new(130, 80, 1.0);
        let [_, dx, dweight] = case.run(&mut ctx, None);
        let [_, more_dx, more_dweight] = case.run(&mut ctx, Some(3.0));
        let plus = |v: &[f32]| v.iter().map(|v| v + 3.0).collect::<Vec<_>>();
        assert_close("dx", &more_dx, &plus(&dx), 1e-6);
        assert_close("dweight", &more_dweight, &plus(&dweight), 1e-6);
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    for mut ctx in contexts() {
        let case = Case::new(700, 48, 1.0);
        let one = on_threads(1, || case.run(&mut ctx, None));
        assert!([2, 3].into_iter().all(|threads| on_threads(threads, || case.run(&mut ctx, None)) == one));
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let mut ctx = contexts().remove(0);
    let (x, weight) = (normal_tensor(1, &[3, 5]), normal_tensor(2, &[4]));
    assert!(rms_norm::forward(&mut ctx, &x, &weight, EPS).is_err());
    let (x, weight, rstd) = (normal_tensor(1, &[3, 4]), normal_tensor(2, &[4]), normal_tensor(3, &[2]));
    let saved = rms_norm::Saved { x: &x, weight: &weight, rstd: &rstd };
    let targets = (unset(&[3, 4]), unset(&[4]));
    assert!(rms_norm::backward(&mut ctx, saved, &x, (&targets.0, Store::Set), Some((&targets.1, Store::Set))).is_err());
}

#[test]
fn the_norm_of_a_sum_is_that_and_leaves_the_sum() {
    for mut ctx in contexts() {
        for (n, c) in SHAPES {
            let case = Case::new(n, c, 1.0);
            let (change, weight) = (tensor(case.dy.clone(), &[n, c]), tensor(case.weight.clone(), &[c]));
            let residual = tensor(case.x.clone(), &[n, c]);
            let (y, rstd) = rms_norm::forward_add(&mut ctx, &change, &residual, &weight, EPS).unwrap();
            let sum: Vec<f32> = case.x.iter().zip(&case.dy).map(|(x, dy)| x + dy).collect();
            assert_eq!((values(&change), values(&residual)), (sum.clone(), case.x.clone()));
            assert_close("y", &values(&y), &narrowed(&rms_norm::reference(&sum, &case.weight, EPS)), 2e-6);
            assert_eq!(rstd.dims(), [n]);
        }
        let short = tensor(vec![1.0; 3], &[3]);
        assert!(rms_norm::forward_add(&mut ctx, &short, &tensor(vec![1.0; 6], &[6]), &short, EPS).is_err());
    }
}
