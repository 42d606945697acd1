//! The fused head and loss against the f64 reference, candle's autograd and finite differences.

use candle_core::{D, Device, Tensor, Var};
use gpt::ops::cross_entropy::{self, IGNORE, Output, Wanted};
use gpt::ops::ctx::Ctx;
use gpt::ops::gemm::Store;
use gpt::ops::simd::Family;
use gpt::random::{Purpose, Stream};

use super::support::{assert_close, contexts, normal_tensor, values};

const SHAPES: [(usize, usize, usize); 6] =
    [(1, 5, 6), (3, 320, 33), (65, 1000, 128), (1030, 320, 6), (1030, 5, 33), (2100, 1000, 6)];

/// Targets of which every fourth is ignored, if wanted.
fn targets(n: usize, vocab: usize, ignored: bool) -> Vec<u32> {
    let stream = Stream::new(3, Purpose::Test);
    let target = |i: u32| if ignored && i % 4 == 1 { IGNORE } else { stream.word(0, i) % vocab as u32 };
    (0..n as u32).map(target).collect()
}

fn to_f32(x: &[f64]) -> Vec<f32> {
    x.iter().map(|x| *x as f32).collect()
}

#[test]
fn loss_and_gradients_are_the_plain_formula() {
    for mut ctx in contexts() {
        for (n, vocab, channels) in SHAPES {
            for (size, ignored) in [(1.0, false), (1.0, true), (2e3, true)] {
                let what = format!("{} N={n} V={vocab} C={channels} x{size}", ctx.family().name());
                let (x, w) = (normal_tensor(1, &[n, channels]), normal_tensor(2, &[vocab, channels]));
                // Divided by sqrt(C), logits are of size one, or `size`: up to 1e4.
                let w = (w * (size / (channels as f64).sqrt())).unwrap();
                let (targets, scale) = (targets(n, vocab, ignored), 3.0 / n as f32);
                let want = cross_entropy::reference(&values(&x), &values(&w), channels, &targets, f64::from(scale));
                // Logits have a relative error of about C * 1e-7; large ones carry it into nll and the probabilities,
                // and dx sums V weights of `size` whose factors have that error.
                let error = 2e-7 * size as f32 * (channels as f32).sqrt();
                for store in [Store::Set, Store::Add] {
                    let dw = normal_tensor(5, &[vocab, channels]);
                    let old = if store == Store::Add { values(&dw) } else { vec![0.0; vocab * channels] };
                    let wanted = Wanted::InputAndHead(&dw, store);
                    let got = cross_entropy::forward(&mut ctx, &x, &w, &targets, scale, wanted).unwrap();
                    let frozen = cross_entropy::forward(&mut ctx, &x, &w, &targets, scale, Wanted::Input).unwrap();
                    assert_eq!(values(&frozen.dx.unwrap()), values(got.dx.as_ref().unwrap()), "{what}: a frozen head");
                    assert_close(&what, &values(&got.loss), &[want.loss as f32], 3e-6 + 3.0 * error);
                    assert_close(&what, &values(&got.nll), &to_f32(&want.nll), 3e-6 + 5.0 * error);
                    let row = scale * size as f32;
                    let dx: Vec<f32> = values(&got.dx.unwrap()).iter().map(|g| g / row).collect();
                    let want_dx: Vec<f32> = want.dx.iter().map(|g| *g as f32 / row).collect();
                    assert_close(&what, &dx, &want_dx, 3e-6 + 20.0 * error);
                    let want_dw: Vec<f32> = old.iter().zip(&want.dweight).map(|(o, g)| o + *g as f32).collect();
                    assert_close(&what, &values(&dw), &want_dw, 3e-6 + 20.0 * error);
                }
                let plain = cross_entropy::forward(&mut ctx, &x, &w, &targets, scale, Wanted::None).unwrap();
                assert!(plain.dx.is_none());
                assert_close(&what, &values(&plain.nll), &to_f32(&want.nll), 3e-6 + 5.0 * error);
            }
        }
    }
}

#[test]
fn gradients_are_those_of_autograd() {
    for mut ctx in contexts() {
        for (n, vocab, channels) in SHAPES {
            let what = format!("{} N={n} V={vocab} C={channels}", ctx.family().name());
            let x = Var::from_tensor(&normal_tensor(1, &[n, channels])).unwrap();
            let w = Var::from_tensor(&(normal_tensor(2, &[vocab, channels]) * 0.3).unwrap()).unwrap();
            let (targets, scale) = (targets(n, vocab, false), 1.0 / n as f32);
            let logits = x.matmul(&w.t().unwrap()).unwrap();
            let logs = candle_nn::ops::log_softmax(&logits, D::Minus1).unwrap();
            let index = Tensor::from_slice(&targets, (n, 1), &Device::Cpu).unwrap();
            let loss = (logs.gather(&index, 1).unwrap().sum_all().unwrap() * f64::from(-scale)).unwrap();
            let grads = loss.backward().unwrap();
            let dw = normal_tensor(5, &[vocab, channels]);
            let got = cross_entropy::forward(&mut ctx, &x, &w, &targets, scale, Wanted::InputAndHead(&dw, Store::Set))
                .unwrap();
            // Gradients are of size `scale`: times 1/scale both are of size one.
            let scaled = |t: &Tensor| values(&(t / f64::from(scale)).unwrap().contiguous().unwrap());
            assert_close(&what, &values(&got.loss), &[loss.to_scalar::<f32>().unwrap()], 1e-5);
            assert_close(&what, &scaled(&got.dx.unwrap()), &scaled(grads.get(&x).unwrap()), 2e-5);
            assert_close(&what, &scaled(&dw), &scaled(grads.get(&w).unwrap()), 1e-4);
        }
    }
}

#[test]
fn gradients_are_finite_differences_of_the_loss() {
    let mut ctx = Ctx::cpu(Family::detect());
    let (n, vocab, channels) = (7, 11, 5);
    let (x, w) = (values(&normal_tensor(1, &[n, channels])), values(&normal_tensor(2, &[vocab, channels])));
    let targets = targets(n, vocab, true);
    let tensor = |v: &[f32], rows| Tensor::from_slice(v, (rows, channels), &Device::Cpu).unwrap();
    let dw = tensor(&w, vocab);
    let (x_t, w_t) = (tensor(&x, n), tensor(&w, vocab));
    let got =
        cross_entropy::forward(&mut ctx, &x_t, &w_t, &targets, 0.5, Wanted::InputAndHead(&dw, Store::Set)).unwrap();
    let loss = |x: &[f32], w: &[f32]| cross_entropy::reference(x, w, channels, &targets, 0.5).loss;
    // Central differences with a step exact in f32: the cubic term is about step^2.
    let step = 1.0 / 256.0;
    let slope = |v: &[f32], loss: &dyn Fn(&[f32]) -> f64| -> Vec<f32> {
        let moved = |i: usize, by: f32| {
            let mut v = v.to_vec();
            v[i] += by;
            loss(&v)
        };
        (0..v.len()).map(|i| ((moved(i, step) - moved(i, -step)) / (2.0 * f64::from(step))) as f32).collect()
    };
    assert_close("dx", &values(&got.dx.unwrap()), &slope(&x, &|x| loss(x, &w)), 3e-5);
    assert_close("dweight", &values(&dw), &slope(&w, &|w| loss(&x, w)), 3e-5);
}

#[test]
fn an_all_ignored_batch_and_an_empty_one_cost_nothing() {
    for mut ctx in contexts() {
        for n in [0, 3, 1030] {
            let (x, w, dw) = (normal_tensor(1, &[n, 6]), normal_tensor(2, &[5, 6]), normal_tensor(3, &[5, 6]));
            let ignored = vec![IGNORE; n];
            let got =
                cross_entropy::forward(&mut ctx, &x, &w, &ignored, 1.0, Wanted::InputAndHead(&dw, Store::Set)).unwrap();
            let zero = |t: &Tensor| values(t).iter().all(|v| *v == 0.0);
            assert!(zero(&got.loss) && zero(&got.nll) && zero(&got.dx.unwrap()) && zero(&dw), "N={n}");
        }
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let (x, w) = (normal_tensor(1, &[1030, 33]), normal_tensor(2, &[320, 33]));
    let targets = targets(1030, 320, true);
    let run = |threads| {
        let mut ctx = Ctx::cpu(Family::detect());
        let dw = normal_tensor(3, &[320, 33]);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let forward = || cross_entropy::forward(&mut ctx, &x, &w, &targets, 0.1, Wanted::InputAndHead(&dw, Store::Add));
        let Output { loss, nll, dx } = pool.install(forward).unwrap();
        [values(&loss), values(&nll), values(&dx.unwrap()), values(&dw)]
    };
    assert!(run(1) == run(2) && run(1) == run(3));
}

#[test]
fn not_finite_logits_and_wrong_targets_are_seen() {
    for mut ctx in contexts() {
        let w = normal_tensor(2, &[20, 6]);
        for bad in [f32::NAN, f32::INFINITY] {
            let mut x = values(&normal_tensor(1, &[4, 6]));
            x[7] = bad;
            let x = Tensor::from_vec(x, (4, 6), &Device::Cpu).unwrap();
            let got = cross_entropy::forward(&mut ctx, &x, &w, &[1, 2, 3, 4], 1.0, Wanted::None).unwrap();
            assert!(!values(&got.loss)[0].is_finite(), "{bad}");
        }
        let x = normal_tensor(1, &[2, 6]);
        let message = cross_entropy::forward(&mut ctx, &x, &w, &[3, 20], 1.0, Wanted::None).err().unwrap().to_string();
        assert!(message.contains("id 20 at position 1"), "{message}");
        assert!(cross_entropy::forward(&mut ctx, &x, &w, &[3], 1.0, Wanted::None).is_err());
    }
}
