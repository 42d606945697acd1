//! Parity of dropout.

use candle_core::{Device, Tensor, Var};
use gpt::ops::{ctx::Ctx, dropout, gemm::Store};
use gpt::random::{Purpose, Stream};

use crate::support::*;

const LENGTHS: [usize; 8] = [1, 3, 127, 128, 129, 5000, 16 * 1024 + 1, 70_003];

fn mask(probability: f32, position: u64) -> dropout::Mask {
    dropout::Mask { probability, stream: Stream::new(5, Purpose::Dropout), position }
}

/// y and the gradient for dy, which is written over or added to `start`.
fn run(ctx: &mut Ctx, x: &[f32], dy: &[f32], mask: dropout::Mask, start: Option<f32>) -> [Vec<f32>; 2] {
    let shape = [x.len()];
    poison(ctx, &shape);
    let y = dropout::forward(ctx, &tensor(x.to_vec(), &shape), mask).unwrap();
    assert_eq!(y.dims(), shape);
    let dx = tensor(vec![start.unwrap_or(f32::NAN); x.len()], &shape);
    let store = if start.is_some() { Store::Add } else { Store::Set };
    dropout::backward(ctx, &tensor(dy.to_vec(), &shape), mask, (&dx, store)).unwrap();
    [values(&y), values(&dx)]
}

#[test]
fn agrees_with_the_reference_and_with_autograd() {
    for mut ctx in contexts() {
        for (len, p) in LENGTHS.into_iter().flat_map(|len| [0.0, 0.1, 0.5, 0.99].map(|p| (len, p))) {
            let (x, dy, mask) = (normal(1, len), normal(2, len), mask(p, 1 << 33 | 7));
            let [y, dx] = run(&mut ctx, &x, &dy, mask, None);
            let what = format!("{} {len} at {p}", ctx.family().name());
            assert_close(&what, &y, &narrowed(&dropout::reference(&x, mask)), 1e-6);
            // The mask as a constant factor, multiplied by candle.
            let factors = narrowed(&dropout::reference(&vec![1.0; len], mask));
            let variable = Var::from_slice(&x, len, &Device::Cpu).unwrap();
            let constant = |v: &[f32]| Tensor::from_slice(v, len, &Device::Cpu).unwrap();
            let y = (variable.as_tensor() * constant(&factors)).unwrap();
            let gradients = (y * constant(&dy)).unwrap().sum_all().unwrap().backward().unwrap();
            assert_close(&format!("{what}: gradient"), &dx, &values(gradients.get(&variable).unwrap()), 1e-6);
        }
    }
}

#[test]
fn gradients_predict_the_change_of_the_loss() {
    for mut ctx in contexts() {
        let (x, dy, mask) = (normal(1, 300), normal(2, 300), mask(0.3, 2));
        let [_, dx] = run(&mut ctx, &x, &dy, mask, None);
        assert_slope("gradient", |x| weighted(&dropout::reference(x, mask), &dy), &x, &dx, 1e-4);
    }
}

#[test]
fn the_share_of_zeros_is_the_probability_and_positions_differ() {
    for mut ctx in contexts() {
        let (n, p) = (200_000usize, 0.1);
        let ones = vec![1f32; n];
        let [y, _] = run(&mut ctx, &ones, &ones, mask(p, 3), None);
        let dropped = y.iter().filter(|y| **y == 0.0).count() as f64 / n as f64;
        let deviation = (f64::from(p) * (1.0 - f64::from(p)) / n as f64).sqrt();
        assert!((dropped - f64::from(p)).abs() < 4.0 * deviation, "{dropped} dropped");
        let [other, _] = run(&mut ctx, &ones, &ones, mask(p, 4), None);
        assert_ne!(y, other);
    }
}

#[test]
fn a_dropped_element_hides_what_is_not_finite() {
    for mut ctx in contexts() {
        let x = vec![f32::INFINITY; 1000];
        let [y, _] = run(&mut ctx, &x, &x, mask(0.5, 3), None);
        assert!(y.iter().all(|y| *y == 0.0 || *y == f32::INFINITY) && y.contains(&0.0));
    }
}

#[test]
fn every_family_and_number_of_threads_drops_the_same_elements() {
    let (x, dy) = (normal(1, 40_000), normal(2, 40_000));
    let mut all = Vec::new();
    for mut ctx in contexts() {
        all.extend([1, 2, 3].map(|threads| on_threads(threads, || run(&mut ctx, &x, &dy, mask(0.2, 9), None))));
        let sum: Vec<f32> = all[0][1].iter().map(|v| v + 3.0).collect();
        // Adding may be fused with the multiplication, so it need not round twice.
        assert_close("sum", &run(&mut ctx, &x, &dy, mask(0.2, 9), Some(3.0))[1], &sum, 1e-6);
    }
    assert!(all.iter().all(|results| *results == all[0]));
}

#[test]
fn impossible_probabilities_are_refused() {
    let mut ctx = contexts().remove(0);
    for p in [1.0, -0.1, f32::NAN] {
        assert!(dropout::forward(&mut ctx, &normal_tensor(1, &[4]), mask(p, 0)).is_err(), "probability {p}");
    }
}
