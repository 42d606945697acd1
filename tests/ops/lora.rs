//! lora against its f64 reference, candle's autograd and finite differences.

use candle_core::{Tensor, Var};
use gpt::ops::gemm::Store;
use gpt::ops::linear::{self, Weight};
use gpt::ops::lora::{self, Factors, Segment};

use super::support::{assert_close, contexts, normal, normal_tensor, tensor, unset, values};

/// (rows, inputs, outputs, rank, corrected columns)
type Shape = (usize, usize, usize, usize, &'static [(usize, usize)]);

const SHAPES: [Shape; 6] = [
    (600, 48, 32, 2, &[(8, 32)]),
    (1, 6, 5, 1, &[(0, 5)]),
    (3, 33, 64, 4, &[(0, 32), (48, 64)]),
    (65, 40, 96, 8, &[(0, 32), (32, 64), (64, 96)]),
    (200, 64, 130, 3, &[(100, 130)]),
    (7, 128, 33, 40, &[(0, 33)]),
];

fn segments(columns: &[(usize, usize)]) -> Vec<Segment> {
    let mut rows = 0;
    let next = |(start, end): &(usize, usize)| {
        let own = rows..rows + end - start;
        rows = own.end;
        Segment { columns: *start..*end, rows: own }
    };
    columns.iter().map(next).collect()
}

/// A (S r, in) and B (rows, r).
fn factors((_, input, _, rank, columns): Shape) -> [Tensor; 2] {
    let rows = columns.iter().map(|(start, end)| end - start).sum();
    [normal_tensor(1, &[rank * columns.len(), input]), normal_tensor(2, &[rows, rank])]
}

#[test]
fn forward_adds_the_plain_formula_to_the_corrected_columns_alone() {
    for mut ctx in contexts() {
        for shape in SHAPES {
            let (n, input, out, _, columns) = shape;
            let what = format!("{} {shape:?}", ctx.family().name());
            let ([a, b], segments) = (factors(shape), segments(columns));
            let (x, before) = (normal_tensor(3, &[n, input]), normal(4, n * out));
            let y = tensor(before.clone(), &[n, out]);
            let u = lora::forward(&mut ctx, &x, Factors { a: &a, b: &b, segments: &segments, scale: 0.5 }, &y).unwrap();
            assert_close(&what, &values(&u), &values(&x.matmul(&a.t().unwrap()).unwrap()), 1e-4);
            let added = lora::reference(&values(&x), &values(&a), &values(&b), input, &segments, out, 0.5);
            let want: Vec<f32> = before.iter().zip(&added).map(|(y, add)| (f64::from(*y) + add) as f32).collect();
            assert_close(&what, &values(&y), &want, 2e-4);
            let corrected = |i: usize| columns.iter().any(|(start, end)| (*start..*end).contains(&(i % out)));
            let y = values(&y);
            assert!((0..n * out).all(|i| corrected(i) || y[i] == before[i]), "{what}: other columns");
        }
    }
}

/// The correction of candle tensors, (N, out).
fn oracle(x: &Tensor, a: &Tensor, b: &Tensor, (n, _, out, rank, columns): Shape, scale: f64) -> Tensor {
    let (mut parts, mut at, mut row) = (Vec::new(), 0, 0);
    let zeros = |width: usize| Tensor::zeros((n, width), x.dtype(), x.device()).unwrap();
    for (i, (start, end)) in columns.iter().enumerate() {
        if *start > at {
            parts.push(zeros(start - at));
        }
        let a = a.narrow(0, i * rank, rank).unwrap();
        let b = b.narrow(0, row, end - start).unwrap();
        let u = x.matmul(&a.t().unwrap()).unwrap();
        parts.push((u.matmul(&b.t().unwrap()).unwrap() * scale).unwrap());
        (at, row) = (*end, row + end - start);
    }
    if at < out {
        parts.push(zeros(out - at));
    }
    Tensor::cat(&parts, 1).unwrap()
}

#[test]
fn gradients_are_those_of_autograd_set_or_added() {
    for mut ctx in contexts() {
        for shape in SHAPES {
            let (n, input, out, _, columns) = shape;
            let what = format!("{} {shape:?}", ctx.family().name());
            let ([a, b], segments) = (factors(shape).map(|t| Var::from_tensor(&t).unwrap()), segments(columns));
            let x = Var::from_tensor(&normal_tensor(3, &[n, input])).unwrap();
            let dy = normal_tensor(5, &[n, out]);
            let gradients = (oracle(&x, &a, &b, shape, 0.5) * &dy).unwrap().sum_all().unwrap().backward().unwrap();
            let factors = Factors { a: &a, b: &b, segments: &segments, scale: 0.5 };
            let u = lora::forward(&mut ctx, &x, factors, &normal_tensor(4, &[n, out])).unwrap();
            let du = lora::backward_outer(&mut ctx, &dy, factors).unwrap();
            for store in [Store::Set, Store::Add] {
                let slot = |t: &Tensor| if store == Store::Set { unset(t.dims()) } else { normal_tensor(6, t.dims()) };
                let slots = [slot(&a), slot(&b), slot(&x)];
                let kept = slots.each_ref().map(values);
                let [da, db, dx] = &slots;
                lora::backward(&mut ctx, (&x, &u), (&dy, &du), factors, (da, store), (db, store)).unwrap();
                lora::backward_input(&mut ctx, &du, factors, (dx, store)).unwrap();
                for ((got, var), kept) in slots.iter().zip([&a, &b, &x]).zip(kept) {
                    let want = values(&gradients.get(var).unwrap().contiguous().unwrap());
                    let size = want.iter().map(|x| x.abs()).fold(1f32, f32::max);
                    let kept = |i: usize| if store == Store::Add { kept[i] } else { 0.0 };
                    let got: Vec<f32> = values(got).iter().enumerate().map(|(i, x)| (x - kept(i)) / size).collect();
                    assert_close(&what, &got, &want.iter().map(|x| x / size).collect::<Vec<_>>(), 1e-5);
                }
            }
        }
    }
}

/// The merged weight gives the same outputs, and its gradient those of the factors.
#[test]
fn a_merged_correction_is_the_correction() {
    for mut ctx in contexts() {
        let (n, input, out, rank) = (9, 24, 20, 4);
        let shape: Shape = (n, input, out, rank, &[(0, 20)]);
        let ([a, b], segments) = (factors(shape), segments(&[(0, out)]));
        let (x, dy) = (normal_tensor(3, &[n, input]), normal_tensor(5, &[n, out]));
        let factors = Factors { a: &a, b: &b, segments: &segments, scale: 0.5 };
        let y = tensor(vec![0.0; n * out], &[n, out]);
        let u = lora::forward(&mut ctx, &x, factors, &y).unwrap();
        let base = normal(7, out * input);
        let mut weight = base.clone();
        lora::merge(ctx.family(), &mut weight, (&values(&a), &values(&b), rank), 0.5);
        let plain = linear::reference(&values(&x), &base, input);
        let want: Vec<f32> = values(&y).iter().zip(plain).map(|(y, plain)| y + plain as f32).collect();
        let weight = tensor(weight, &[out, input]);
        let merged = Weight::Dense { tensor: &weight, kept: None };
        let (got, beside) = lora::layer_forward(&mut ctx, &x, merged, None, factors).unwrap();
        assert_close("y", &values(&got), &want, 5e-5);
        assert_close("u", &values(&beside), &values(&u), 1e-5);
        let (dx, want_dx) = (unset(x.dims()), dy.matmul(&weight).unwrap());
        let du = lora::layer_backward_input(&mut ctx, &dy, merged, factors, (&dx, Store::Set)).unwrap();
        assert_close("dx", &values(&dx), &values(&want_dx), 5e-5);
        assert_close("du", &values(&du), &values(&lora::backward_outer(&mut ctx, &dy, factors).unwrap()), 1e-5);
        let (da, db) = (unset(a.dims()), unset(b.dims()));
        lora::backward(&mut ctx, (&x, &u), (&dy, &du), factors, (&da, Store::Set), (&db, Store::Set)).unwrap();
        let dweight = dy.t().unwrap().matmul(&x).unwrap();
        let (merged_da, merged_db) = (unset(a.dims()), unset(b.dims()));
        let slots = ((&merged_da, Store::Set), (&merged_db, Store::Set));
        lora::backward_merged(&mut ctx, factors, &dweight, slots.0, slots.1).unwrap();
        assert_close("da", &values(&merged_da), &values(&da), 1e-4);
        assert_close("db", &values(&merged_db), &values(&db), 1e-4);
    }
}

#[test]
fn gradients_are_finite_differences() {
    let mut ctx = contexts().remove(0);
    let shape: Shape = (4, 6, 9, 2, &[(1, 4), (5, 9)]);
    let (n, input, out, _, columns) = shape;
    let ([a, b], segments) = (factors(shape), segments(columns));
    let (x, dy) = (normal_tensor(3, &[n, input]), normal_tensor(5, &[n, out]));
    let loss = |a: &[f32], b: &[f32], x: &[f32]| -> f64 {
        let y = lora::reference(x, a, b, input, &segments, out, 0.7);
        y.iter().zip(values(&dy)).map(|(y, dy)| y * f64::from(dy)).sum()
    };
    let factors = Factors { a: &a, b: &b, segments: &segments, scale: 0.7 };
    let u = lora::forward(&mut ctx, &x, factors, &normal_tensor(4, &[n, out])).unwrap();
    let du = lora::backward_outer(&mut ctx, &dy, factors).unwrap();
    let slots = [unset(a.dims()), unset(b.dims()), unset(x.dims())];
    let factor_slots = ((&slots[0], Store::Set), (&slots[1], Store::Set));
    lora::backward(&mut ctx, (&x, &u), (&dy, &du), factors, factor_slots.0, factor_slots.1).unwrap();
    lora::backward_input(&mut ctx, &du, factors, (&slots[2], Store::Set)).unwrap();
    let all = [values(&a), values(&b), values(&x)];
    for (which, slot) in slots.iter().enumerate() {
        for (i, got) in values(slot).iter().enumerate() {
            let at = |step: f32| {
                let mut moved = all.clone();
                moved[which][i] += step;
                loss(&moved[0], &moved[1], &moved[2])
            };
            let slope = (at(1e-2) - at(-1e-2)) / 2e-2;
            assert!((slope - f64::from(*got)).abs() < 1e-3 * (1.0 + slope.abs()), "{which} {i}: {got}, {slope}");
        }
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let shape = SHAPES[0];
    let (n, input, out, _, columns) = shape;
    let ([a, b], segments) = (factors(shape), segments(columns));
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let mut ctx = contexts().remove(0);
            let (x, y) = (normal_tensor(3, &[n, input]), normal_tensor(4, &[n, out]));
            let factors = Factors { a: &a, b: &b, segments: &segments, scale: 0.5 };
            let u = lora::forward(&mut ctx, &x, factors, &y).unwrap();
            let du = lora::backward_outer(&mut ctx, &y, factors).unwrap();
            let (da, db) = (unset(a.dims()), unset(b.dims()));
            lora::backward(&mut ctx, (&x, &u), (&y, &du), factors, (&da, Store::Set), (&db, Store::Set)).unwrap();
            [values(&y), values(&da), values(&db), values(&du)]
        })
    };
    assert!(run(1) == run(2) && run(1) == run(3));
}

#[test]
fn factors_that_do_not_fit_are_refused() {
    let mut ctx = contexts().remove(0);
    let shape = SHAPES[2];
    let ([a, b], segments) = (factors(shape), segments(shape.4));
    let (x, y) = (normal_tensor(3, &[3, 33]), normal_tensor(4, &[3, 64]));
    let whole = Factors { a: &a, b: &b, segments: &segments, scale: 1.0 };
    assert!(lora::forward(&mut ctx, &x, Factors { segments: &segments[..1], ..whole }, &y).is_err());
    assert!(lora::forward(&mut ctx, &x, whole, &normal_tensor(4, &[3, 63])).is_err());
    assert!(lora::forward(&mut ctx, &normal_tensor(3, &[3, 32]), whole, &y).is_err());
    assert!(lora::forward(&mut ctx, &x, whole, &normal_tensor(4, &[4, 64])).is_err());
}
