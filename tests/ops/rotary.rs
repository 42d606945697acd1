//! Parity of rotary positions with and without query/key norm.

use candle_core::{D, Device, Tensor, Var};
use gpt::ops::{ctx::Ctx, gemm::Store, heads::Heads, rotary};

use crate::support::*;

const THETA: f64 = 10_000.0;
const EPS: f32 = 1e-6;

/// (B, T, H, K, D)
const SHAPES: [(usize, usize, usize, usize, usize); 7] = [
    (1, 1, 1, 1, 2),
    (2, 5, 2, 1, 6),
    (1, 63, 3, 3, 32),
    (3, 64, 2, 2, 64),
    (2, 65, 6, 2, 80),
    (1, 130, 3, 1, 64),
    (7, 13, 1, 1, 34),
];

struct Case {
    batch: usize,
    seq: usize,
    heads: Heads,
    qkv: Vec<f32>,
    gains: Option<[Vec<f32>; 2]>,
    dout: Vec<f32>,
}

/// What a run gives: the output, the gradient of qkv, and those of the gains (empty without norms).
type Results = [Vec<f32>; 4];

impl Case {
    fn new(
        (batch, seq, attention, key_value, dim): (usize, usize, usize, usize, usize),
        norms: bool,
        size: f32,
    ) -> Self {
        let heads = Heads { attention, key_value, dim };
        let len = batch * seq * heads.qkv_size();
        let qkv = normal(1, len).iter().map(|x| x * size).collect();
        let gains = norms.then(|| [normal(2, dim), normal(3, dim)]);
        Self { batch, seq, heads, qkv, gains, dout: normal(4, len) }
    }

    fn reference(&self, qkv: &[f32]) -> Vec<f64> {
        let gains = self.gains.as_ref().map(|[query, key]| ([&query[..], &key[..]], EPS));
        rotary::reference(qkv, self.heads, gains, THETA, self.seq)
    }

    fn run(&self, ctx: &mut Ctx, start: Option<f32>) -> Results {
        let (n, d) = (self.batch * self.seq, self.heads.dim);
        let shape = [n, self.heads.qkv_size()];
        let rotated = self.heads.attention + self.heads.key_value;
        poison(ctx, &[shape[0] * shape[1], n * rotated, n.div_ceil(64) * 3 * d]);
        let table = rotary::Table::new(self.seq + 3, d, THETA).unwrap();
        let qkv = tensor(self.qkv.clone(), &shape);
        let gains = self.gains.clone().map(|gains| gains.map(|gain| tensor(gain, &[d])));
        let norms = gains.as_ref().map(|[query, key]| rotary::Norms { query, key, eps: EPS });
        let (y, rstd) = rotary::forward(ctx, &qkv, self.heads, norms, &table, self.seq).unwrap();
        assert_eq!(y.dims(), shape);
        assert_eq!(rstd.elem_count(), if norms.is_some() { n * rotated } else { 0 });

        let filled = |shape: &[usize]| tensor(vec![start.unwrap_or(f32::NAN); shape.iter().product()], shape);
        let store = if start.is_some() { Store::Add } else { Store::Set };
        let (dqkv, dgains) = (filled(&shape), [filled(&[d]), filled(&[d])]);
        let dnorms = norms.map(|_| [(&dgains[0], store), (&dgains[1], store)]);
        let saved = rotary::Saved { qkv: &qkv, rstd: &rstd, norms, table: &table, heads: self.heads, seq: self.seq };
        rotary::backward(ctx, saved, &tensor(self.dout.clone(), &shape), (&dqkv, store), dnorms).unwrap();
        let [query, key] = dgains.map(|gain| if norms.is_some() { values(&gain) } else { Vec::new() });
        [values(&y), values(&dqkv), query, key]
    }

    /// The gradients by candle's autograd on plain ops.
    fn oracle(&self) -> [Vec<f32>; 3] {
        let (n, d, half) = (self.batch * self.seq, self.heads.dim, self.heads.dim / 2);
        let width = self.heads.qkv_size();
        let variable = |v: &[f32], shape: &[usize]| Var::from_slice(v, shape, &Device::Cpu).unwrap();
        let qkv = variable(&self.qkv, &[n, width]);
        let gains = self.gains.clone().map(|gains| gains.map(|gain| variable(&gain, &[d])));
        let angle = |i: usize| (i / half % self.seq) as f64 * THETA.powf(-2.0 * (i % half) as f64 / d as f64);
        let table = |f: fn(f64) -> f64| {
            let values: Vec<f32> = (0..n * half).map(|i| f(angle(i)) as f32).collect();
            Tensor::from_vec(values, (n, half), &Device::Cpu).unwrap()
        };
        let (cos, sin) = (table(f64::cos), table(f64::sin));
        let mut columns = Vec::new();
        for h in 0..self.heads.attention + 2 * self.heads.key_value {
            let mut x = qkv.narrow(1, h * d, d).unwrap();
            if h < self.heads.attention + self.heads.key_value {
                if let Some(gains) = &gains {
                    let mean = x.sqr().unwrap().mean_keepdim(D::Minus1).unwrap();
                    x = x.broadcast_div(&(mean + f64::from(EPS)).unwrap().sqrt().unwrap()).unwrap();
                    x = x.broadcast_mul(&gains[usize::from(h >= self.heads.attention)]).unwrap();
                }
                let (a, b) = (x.narrow(1, 0, half).unwrap(), x.narrow(1, half, half).unwrap());
                let first = ((&a * &cos).unwrap() - (&b * &sin).unwrap()).unwrap();
                let second = ((&b * &cos).unwrap() + (&a * &sin).unwrap()).unwrap();
                x = Tensor::cat(&[first, second], 1).unwrap();
            }
            columns.push(x);
        }
        let dout = Tensor::from_slice(&self.dout, (n, width), &Device::Cpu).unwrap();
        let loss = (Tensor::cat(&columns, 1).unwrap() * dout).unwrap().sum_all().unwrap();
        let gradients = loss.backward().unwrap();
        let gain = |i: usize| gains.as_ref().map(|g| values(gradients.get(&g[i]).unwrap())).unwrap_or_default();
        [values(gradients.get(&qkv).unwrap()), gain(0), gain(1)]
    }
}

#[test]
fn agrees_with_the_reference_and_with_autograd() {
    for mut ctx in contexts() {
        for (shape, norms) in SHAPES.into_iter().flat_map(|shape| [(shape, false), (shape, true)]) {
            let case = Case::new(shape, norms, 1.0);
            let what = format!("{} {shape:?} norms {norms}", ctx.family().name());
            let [y, dqkv, query, key] = case.run(&mut ctx, None);
            assert_close(&what, &y, &narrowed(&case.reference(&case.qkv)), 2e-6);
            let [want_dqkv, want_query, want_key] = case.oracle();
            assert_close(&format!("{what}: dqkv"), &dqkv, &want_dqkv, 5e-5);
            // Sums over up to 400 heads of rows, in another order.
            assert_close(&format!("{what}: query gain"), &query, &want_query, 1e-4);
            assert_close(&format!("{what}: key gain"), &key, &want_key, 1e-4);
        }
    }
}

#[test]
fn large_rows_stay_finite_and_exact() {
    for mut ctx in contexts() {
        for norms in [false, true] {
            let case = Case::new((2, 65, 2, 1, 32), norms, 1e3);
            let results = case.run(&mut ctx, None);
            // A rotated element is the difference of two of size 1e3: the error is relative to those.
            let scaled = |v: &[f32]| v.iter().map(|v| v / 1e3).collect::<Vec<_>>();
            let want = narrowed(&case.reference(&case.qkv));
            assert_close("large", &scaled(&results[0]), &scaled(&want), 2e-6);
            assert!(results.iter().flatten().all(|x| x.is_finite()));
        }
    }
}

#[test]
fn gradients_predict_the_change_of_the_loss() {
    for mut ctx in contexts() {
        for norms in [false, true] {
            let case = Case::new((2, 9, 2, 1, 10), norms, 1.0);
            let [_, dqkv, query, _] = case.run(&mut ctx, None);
            assert_slope("dqkv", |qkv| weighted(&case.reference(qkv), &case.dout), &case.qkv, &dqkv, 1e-4);
            if let Some([query_gain, key_gain]) = &case.gains {
                let loss = |gain: &[f32]| {
                    let gains = Some(([gain, &key_gain[..]], EPS));
                    weighted(&rotary::reference(&case.qkv, case.heads, gains, THETA, case.seq), &case.dout)
                };
                assert_slope("query gain", loss, query_gain, &query, 1e-4);
            }
        }
    }
}

#[test]
fn adding_keeps_what_was_there() {
    for mut ctx in contexts() {
        for norms in [false, true] {
            let case = Case::new((2, 65, 4, 2, 32), norms, 1.0);
            let (set, added) = (case.run(&mut ctx, None), case.run(&mut ctx, Some(3.0)));
            for (set, added) in set.iter().zip(&added).skip(1) {
                assert_close("sum", added, &set.iter().map(|v| v + 3.0).collect::<Vec<_>>(), 1e-6);
            }
        }
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    for mut ctx in contexts() {
        let case = Case::new((3, 130, 4, 2, 32), true, 1.0);
        let one = on_threads(1, || case.run(&mut ctx, None));
        assert!([2, 3].into_iter().all(|threads| on_threads(threads, || case.run(&mut ctx, None)) == one));
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let mut ctx = contexts().remove(0);
    assert!(rotary::Table::new(4, 5, THETA).is_err(), "odd heads have no pairs");
    let heads = Heads { attention: 2, key_value: 1, dim: 4 };
    let table = rotary::Table::new(4, 4, THETA).unwrap();
    let forward = |ctx: &mut Ctx, rows: usize, heads: Heads, seq: usize| {
        rotary::forward(ctx, &normal_tensor(1, &[rows, 16]), heads, None, &table, seq).is_ok()
    };
    assert!(forward(&mut ctx, 8, heads, 4));
    assert!(!forward(&mut ctx, 8, heads, 8), "more positions than angles");
    assert!(!forward(&mut ctx, 7, heads, 4), "half a sequence");
    assert!(!forward(&mut ctx, 8, heads, 0));
    assert!(!forward(&mut ctx, 8, Heads { attention: 3, key_value: 2, dim: 4 }, 4), "K does not divide H");
    assert!(!forward(&mut ctx, 8, Heads { attention: 2, key_value: 1, dim: 2 }, 4), "angles of another width");
}
