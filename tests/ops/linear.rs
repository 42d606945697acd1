//! linear against its f64 reference and candle's autograd.

use candle_core::{Device, Tensor, Var};
use gpt::ops::blocks::{BlockMatrix, Format};
use gpt::ops::ctx::Ctx;
use gpt::ops::gemm::{Precision, Store};
use gpt::ops::linear::{self, Panels, Weight};
use gpt::ops::simd::Family;

use super::support::{assert_close, contexts, normal, normal_tensor, values};

const SHAPES: [(usize, usize, usize); 5] = [(1, 6, 5), (3, 33, 65), (65, 128, 33), (1030, 33, 6), (5, 1100, 70)];

/// A sum of k products of size one grows like sqrt(k) and is rounded k times: well below this.
fn tolerance(k: usize) -> f32 {
    3e-7 * k.max(16) as f32
}

#[test]
fn forward_is_the_plain_product_plus_the_residual() {
    for mut ctx in contexts() {
        for (n, input, output) in SHAPES {
            for size in [1.0, 1e4] {
                let what = format!("{} {n} x {input} -> {output}, times {size}", ctx.family().name());
                let x = (normal_tensor(1, &[n, input]) * size).unwrap();
                let (w, residual) = (normal_tensor(2, &[output, input]), normal_tensor(3, &[n, output]));
                let want = linear::reference(&values(&x), &values(&w), input);
                let want = Vec::from_iter(want.iter().map(|w| *w as f32));
                let tolerance = tolerance(input) * size as f32;
                let y = linear::forward(&mut ctx, &x, fresh(&w, &Panels::default()), None, None).unwrap();
                assert_close(&what, &values(&y), &want, tolerance);
                let y = linear::forward(&mut ctx, &x, fresh(&w, &Panels::default()), Some(&residual), None).unwrap();
                let sum: Vec<f32> = want.iter().zip(values(&residual)).map(|(w, r)| w + r).collect();
                assert_close(&what, &values(&y), &sum, tolerance);
            }
        }
    }
}

#[test]
fn gradients_are_those_of_autograd_set_or_added() {
    for mut ctx in contexts() {
        for (n, input, output) in SHAPES {
            let what = format!("{} {n} x {input} -> {output}", ctx.family().name());
            let x = Var::from_tensor(&normal_tensor(1, &[n, input])).unwrap();
            let w = Var::from_tensor(&normal_tensor(2, &[output, input])).unwrap();
            let dy = normal_tensor(3, &[n, output]);
            let y = x.matmul(&w.t().unwrap()).unwrap();
            let grads = (y * &dy).unwrap().sum_all().unwrap().backward().unwrap();
            for store in [Store::Set, Store::Add] {
                let (dx, dw) = (normal_tensor(4, &[n, input]), normal_tensor(5, &[output, input]));
                let keep = if store == Store::Add { 1.0 } else { 0.0 };
                let want_dx = ((&dx * keep).unwrap() + grads.get(&x).unwrap()).unwrap();
                let want_dw = ((&dw * keep).unwrap() + grads.get(&w).unwrap()).unwrap();
                linear::backward_input(&mut ctx, &dy, fresh(&w, &Panels::default()), (&dx, store), None).unwrap();
                linear::backward_weight(&mut ctx, &dy, &x, (&dw, store)).unwrap();
                assert_close(&what, &values(&dx), &values(&want_dx), 2.0 * tolerance(output));
                assert_close(&what, &values(&dw), &values(&want_dw), 2.0 * tolerance(n));
            }
        }
    }
}

#[test]
fn shapes_that_do_not_fit_are_named() {
    let mut ctx = contexts().remove(0);
    let (x, w) = (normal_tensor(1, &[4, 6]), normal_tensor(2, &[5, 7]));
    let message = linear::forward(&mut ctx, &x, fresh(&w, &Panels::default()), None, None).unwrap_err().to_string();
    assert!(message.contains("a weight of (5, 6)") && message.contains("(5, 7)"), "{message}");
    let w = normal_tensor(2, &[5, 6]);
    let residual = normal_tensor(3, &[4, 6]);
    assert!(
        linear::forward(&mut ctx, &x, fresh(&w, &Panels::default()), Some(&residual), None)
            .unwrap_err()
            .to_string()
            .contains("residual")
    );
    let vector = Tensor::from_vec(normal(1, 6), 6, &Device::Cpu).unwrap();
    assert!(linear::forward(&mut ctx, &vector, fresh(&w, &Panels::default()), None, None).is_err());
}

fn fresh<'a>(tensor: &'a Tensor, panels: &'a Panels) -> Weight<'a> {
    Weight::Dense { tensor, kept: Some((panels, 0)) }
}

/// The same bits with kept panels as with fresh ones, also once the weight has another version.
#[test]
fn panels_are_made_again_when_the_weight_has_changed() {
    for precision in [Precision::F32, Precision::Bf16] {
        let mut ctx = Ctx::cpu(Family::detect());
        ctx.set_precision(precision);
        let (x, panels) = (normal_tensor(1, &[5, 33]), Panels::default());
        for version in 0..3 {
            let (w, dy) = (normal_tensor(10 + version, &[70, 33]), normal_tensor(20, &[5, 70]));
            let kept = Weight::Dense { tensor: &w, kept: Some((&panels, version)) };
            let other = Panels::default();
            let want = values(&linear::forward(&mut ctx, &x, fresh(&w, &other), None, None).unwrap());
            let (dx, dx_kept) = (normal_tensor(3, &[5, 33]), normal_tensor(4, &[5, 33]));
            linear::backward_input(&mut ctx, &dy, fresh(&w, &other), (&dx, Store::Set), None).unwrap();
            for _ in 0..2 {
                assert_eq!(
                    values(&linear::forward(&mut ctx, &x, kept, None, None).unwrap()),
                    want,
                    "version {version}"
                );
                linear::backward_input(&mut ctx, &dy, kept, (&dx_kept, Store::Set), None).unwrap();
                assert_eq!(values(&dx_kept), values(&dx), "version {version}");
            }
        }
    }
}

/// A frozen weight in blocks is, forward and backward, the weight that they stand for.
#[test]
fn blocks_multiply_as_the_numbers_that_they_stand_for() {
    for precision in [Precision::F32, Precision::Bf16] {
        for mut ctx in contexts() {
            ctx.set_precision(precision);
            for format in [Format::Q8_0, Format::Q4_0] {
                let (n, input, output) = (5, 96, 70);
                let blocks = BlockMatrix::quantize(format, &normal(1, output * input), input).unwrap();
                let mut whole = vec![f32::NAN; output * input];
                blocks.unpack(ctx.family(), &mut whole);
                let whole = Tensor::from_vec(whole, (output, input), &Device::Cpu).unwrap();
                let dense = Weight::Dense { tensor: &whole, kept: None };
                let (x, dy) = (normal_tensor(2, &[n, input]), normal_tensor(3, &[n, output]));
                let y = linear::forward(&mut ctx, &x, Weight::Blocks(&blocks), None, None).unwrap();
                assert_eq!(values(&y), values(&linear::forward(&mut ctx, &x, dense, None, None).unwrap()));
                let (dx, want) = (normal_tensor(4, &[n, input]), normal_tensor(4, &[n, input]));
                linear::backward_input(&mut ctx, &dy, Weight::Blocks(&blocks), (&dx, Store::Add), None).unwrap();
                linear::backward_input(&mut ctx, &dy, dense, (&want, Store::Add), None).unwrap();
                assert_eq!(values(&dx), values(&want));
            }
        }
    }
}
