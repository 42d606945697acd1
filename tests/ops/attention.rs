//! Parity of attention.

use candle_core::{D, DType, Device, Tensor, Var};
use gpt::ops::attention::{self, Attention, Saved};
use gpt::ops::{ctx::Ctx, gemm::Store, heads::Heads};

use crate::support::*;

const LENGTHS: [usize; 6] = [1, 5, 63, 64, 65, 130];
const WINDOWS: [Option<usize>; 6] = [None, Some(1), Some(2), Some(17), Some(64), Some(1000)];
/// (H, K, D), taken in turn.
const HEADS: [(usize, usize, usize); 7] =
    [(1, 1, 6), (2, 1, 32), (3, 1, 64), (2, 2, 80), (6, 2, 32), (3, 3, 6), (1, 1, 64)];

struct Case {
    shape: Attention<'static>,
    /// Where the documents begin that the tokens see, for all sequences.
    starts: Option<Vec<u32>>,
    qkv: Vec<f32>,
    dout: Vec<f32>,
}

/// The output, the logarithms, the gradient.
type Results = [Vec<f32>; 3];

impl Case {
    /// Queries and keys of size `scores`.sqrt(), so that scores are of size `scores`; values of size `value`.
    fn new(
        (batch, seq): (usize, usize),
        heads: (usize, usize, usize),
        window: Option<usize>,
        sizes: (f32, f32),
    ) -> Self {
        let heads = Heads { attention: heads.0, key_value: heads.1, dim: heads.2 };
        let shape = Attention { batch, seq, heads, window, starts: None };
        let (width, rotated) = (heads.qkv_size(), (heads.attention + heads.key_value) * heads.dim);
        let mut qkv = normal(1, batch * seq * width);
        for row in qkv.chunks_exact_mut(width) {
            row[..rotated].iter_mut().for_each(|x| *x *= sizes.0.sqrt());
            row[rotated..].iter_mut().for_each(|x| *x *= sizes.1);
        }
        Self { shape, starts: None, qkv, dout: normal(2, batch * seq * heads.attention_size()) }
    }

    /// The same with documents of a few lengths, others in each sequence.
    fn with_documents(mut self) -> Self {
        let Attention { batch, seq, .. } = self.shape;
        let mut starts = Vec::new();
        for sequence in 0..batch {
            let (mut start, mut length) = (0, 1 + sequence);
            starts.extend((0..seq).map(|t| {
                if t >= start + length {
                    (start, length) = (t, 2 * length + 1);
                }
                start as u32
            }));
        }
        self.starts = Some(starts);
        self
    }

    fn shape(&self) -> Attention<'_> {
        Attention { starts: self.starts.as_deref(), ..self.shape }
    }

    fn rows(&self) -> usize {
        self.shape.batch * self.shape.seq
    }

    fn run(&self, ctx: &mut Ctx, start: Option<f32>) -> Results {
        self.run_in(ctx, DType::F32, start)
    }

    /// `run` with tensors of another type than f32, which only a GPU takes.
    fn run_in(&self, ctx: &mut Ctx, dtype: DType, start: Option<f32>) -> Results {
        let (n, heads) = (self.rows(), self.shape.heads);
        poison(ctx, &[n * heads.attention_size(), n * heads.attention]);
        let of = |values: Vec<f32>, columns: usize| tensor(values, &[n, columns]).to_dtype(dtype).unwrap();
        let qkv = of(self.qkv.clone(), heads.qkv_size());
        let (out, lse) = attention::forward(ctx, &qkv, self.shape()).unwrap();
        assert_eq!((out.dims(), lse.dims()), (&[n, heads.attention_size()][..], &[n * heads.attention][..]));
        let dqkv = of(vec![start.unwrap_or(f32::NAN); self.qkv.len()], heads.qkv_size());
        let store = if start.is_some() { Store::Add } else { Store::Set };
        let dout = of(self.dout.clone(), heads.attention_size());
        let saved = Saved { qkv: &qkv, out: &out, lse: &lse };
        attention::backward(ctx, saved, &dout, self.shape(), (&dqkv, store)).unwrap();
        [&*out, &*lse, &dqkv].map(|t| values(&t.to_dtype(DType::F32).unwrap()))
    }

    /// The same with inputs that `dtype` can hold.
    fn rounded(mut self, dtype: DType) -> Self {
        for numbers in [&mut self.qkv, &mut self.dout] {
            let rounded = tensor(numbers.clone(), &[numbers.len()]).to_dtype(dtype).unwrap();
            *numbers = values(&rounded.to_dtype(DType::F32).unwrap());
        }
        self
    }

    /// The output and the gradient by candle's autograd on plain f64 ops.
    fn oracle(&self) -> [Vec<f32>; 2] {
        let (Attention { batch, seq, heads, window, starts }, cpu) = (self.shape(), &Device::Cpu);
        let Heads { attention, key_value, dim } = heads;
        let wide: Vec<f64> = self.qkv.iter().map(|&x| f64::from(x)).collect();
        let qkv = Var::from_slice(&wide, (batch, seq, attention + 2 * key_value, dim), cpu).unwrap();
        let head = |h: usize| qkv.narrow(2, h, 1).unwrap().squeeze(2).unwrap();
        let hidden = |b: usize, i: usize, j: usize| {
            j > i || window.is_some_and(|w| i - j >= w) || starts.is_some_and(|s| j < s[b * seq + i] as usize)
        };
        let masked = |at: usize| hidden(at / seq / seq, at / seq % seq, at % seq);
        let mask = (0..batch * seq * seq).map(|at| if masked(at) { -1e30 } else { 0.0 }).collect::<Vec<f64>>();
        let mask = Tensor::from_vec(mask, (batch, seq, seq), cpu).unwrap();
        let mut out = Vec::new();
        for h in 0..attention {
            let key = attention + h / heads.group();
            let scores = head(h).contiguous().unwrap().matmul(&head(key).t().unwrap().contiguous().unwrap()).unwrap();
            let scores = (scores / (dim as f64).sqrt()).unwrap().broadcast_add(&mask).unwrap();
            let p = candle_nn::ops::softmax(&scores, D::Minus1).unwrap();
            out.push(p.matmul(&head(key + key_value).contiguous().unwrap()).unwrap());
        }
        let out = Tensor::stack(&out, 2).unwrap();
        let dout: Vec<f64> = self.dout.iter().map(|&x| f64::from(x)).collect();
        let dout = Tensor::from_vec(dout, out.shape(), cpu).unwrap();
        let gradients = (&out * dout).unwrap().sum_all().unwrap().backward().unwrap();
        [&out, gradients.get(&qkv).unwrap()].map(|t| values(&t.to_dtype(DType::F32).unwrap().contiguous().unwrap()))
    }
}

#[test]
fn agrees_with_the_reference_and_with_autograd() {
    let grid = LENGTHS.into_iter().flat_map(|seq| WINDOWS.map(|window| (seq, window)));
    for (i, (seq, window)) in grid.enumerate() {
        for heads in [HEADS[i % HEADS.len()], HEADS[(i + 3) % HEADS.len()]] {
            let case = Case::new((1 + i % 2, seq), heads, window, (1.0, 1.0));
            let case = if (i / 2) % 2 == 0 { case } else { case.with_documents() };
            let ((out, lse), [autograd_out, dqkv]) = (attention::reference(&case.qkv, case.shape()), case.oracle());
            for mut ctx in contexts() {
                let what = format!("{} {:?}", ctx.family().name(), case.shape);
                let found = case.run(&mut ctx, None);
                // Sums of up to 130 terms of size one in f32.
                assert_close(&what, &found[0], &narrowed(&out), 3e-6);
                assert_close(&what, &found[0], &autograd_out, 3e-6);
                assert_close(&format!("{what}: lse"), &found[1], &narrowed(&lse), 1e-6);
                assert_close(&format!("{what}: dqkv"), &found[2], &dqkv, 1e-5);
            }
        }
    }
}

/// Lengths, windows and documents that end at, before and after the blocks of the GPU's kernels (32 rows that meet 32, 16 or
/// 8), in heads of each width that they are compiled for: full, and padded.
#[test]
fn borders_of_blocks() {
    let cases = [
        ((1, 33), (2, 1, 256), None, &[][..]),
        ((2, 40), (2, 1, 250), Some(9), &[7, 1, 24, 8]),
        ((1, 97), (4, 2, 128), Some(33), &[]),
        ((2, 80), (3, 1, 66), Some(31), &[31, 1, 48]),
        ((1, 96), (2, 2, 40), Some(32), &[]),
        ((2, 95), (4, 2, 32), None, &[32, 31, 32]),
        ((1, 100), (4, 1, 34), Some(20), &[33, 30, 1, 36]),
    ];
    for (i, ((batch, seq), heads, window, documents)) in cases.into_iter().enumerate() {
        let mut case = Case::new((batch, seq), heads, window, (1.0, 1.0));
        if !documents.is_empty() {
            let starts = documents.iter().scan(0, |start, length| {
                *start += length;
                Some((*length, *start - length))
            });
            let starts: Vec<u32> = starts.flat_map(|(length, start)| vec![start as u32; length]).collect();
            case.starts = Some(starts.repeat(batch));
        }
        let ((out, lse), [_, dqkv]) = (attention::reference(&case.qkv, case.shape()), case.oracle());
        let start = (i % 2 == 0).then_some(3.0);
        let dqkv: Vec<f32> = dqkv.iter().map(|x| x + start.unwrap_or(0.0)).collect();
        for mut ctx in contexts() {
            let what = format!("{} {:?}", ctx.family().name(), case.shape);
            let found = case.run(&mut ctx, start);
            // Sums of up to 256 terms of size one in f32.
            assert_close(&what, &found[0], &narrowed(&out), 3e-6);
            assert_close(&format!("{what}: lse"), &found[1], &narrowed(&lse), 1e-6);
            assert_close(&format!("{what}: dqkv"), &found[2], &dqkv, 1e-5);
        }
    }
}

#[test]
fn halves_agree_with_the_reference_on_their_numbers() {
    let shapes = [((2, 40), (4, 2, 6)), ((1, 70), (2, 1, 64)), ((1, 35), (2, 2, 80)), ((1, 40), (2, 1, 256))];
    for (dtype, rounding) in [(DType::F16, 2f32.powi(-11)), (DType::BF16, 2f32.powi(-8))] {
        for (shape, heads) in shapes {
            let case = Case::new(shape, heads, Some(33), (1.0, 1.0)).with_documents().rounded(dtype);
            let ((out, lse), [_, dqkv]) = (attention::reference(&case.qkv, case.shape()), case.oracle());
            for mut ctx in contexts().into_iter().filter(Ctx::has_gpu) {
                let what = format!("{dtype:?} {:?}", case.shape);
                let found = case.run_in(&mut ctx, dtype, None);
                assert_close(&what, &found[0], &narrowed(&out), rounding);
                assert_close(&format!("{what}: lse"), &found[1], &narrowed(&lse), 1e-6);
                // The gradients are rounded, and before them the output, whose sum with dout they take off.
                assert_close(&format!("{what}: dqkv"), &found[2], &dqkv, 4.0 * rounding);
                let added = case.run_in(&mut ctx, dtype, Some(2.0));
                let dqkv: Vec<f32> = dqkv.iter().map(|x| x + 2.0).collect();
                assert_close(&format!("{what}: sum"), &added[2], &dqkv, 4.0 * rounding);
            }
        }
    }
}

#[test]
fn large_scores_and_values_stay_exact() {
    for (window, heads) in [(None, (2, 1, 64)), (Some(17), (3, 3, 32))] {
        let case = Case::new((2, 130), heads, window, (4e3, 1e3));
        let ((out, lse), [_, dqkv]) = (attention::reference(&case.qkv, case.shape()), case.oracle());
        assert!(lse.iter().any(|x| *x > 9e3), "the scores are meant to reach 1e4");
        for mut ctx in contexts() {
            let found = case.run(&mut ctx, None);
            assert!(found.iter().flatten().all(|x| x.is_finite()));
            // A score of 1e4 is rounded to 5e-4 at best, which is the relative error of its probability; gradients of
            // queries and keys multiply that by values of 1e3 and keys of 63.
            let scaled = |v: &[f32], by: f32| v.iter().map(|v| v / by).collect::<Vec<_>>();
            assert_close("out", &scaled(&found[0], 1e3), &scaled(&narrowed(&out), 1e3), 3e-3);
            assert_close("lse", &scaled(&found[1], 1e4), &scaled(&narrowed(&lse), 1e4), 1e-6);
            assert_close("dqkv", &scaled(&found[2], 6.3e4), &scaled(&dqkv, 6.3e4), 1e-2);
        }
    }
}

#[test]
fn gradients_predict_the_change_of_the_loss() {
    for mut ctx in contexts() {
        for window in [None, Some(5)] {
            let case = Case::new((2, 13), (4, 2, 8), window, (1.0, 1.0));
            let [_, _, dqkv] = case.run(&mut ctx, None);
            let loss = |qkv: &[f32]| weighted(&attention::reference(qkv, case.shape).0, &case.dout);
            assert_slope("dqkv", loss, &case.qkv, &dqkv, 1e-4);
        }
    }
}

#[test]
fn adding_keeps_what_was_there() {
    for mut ctx in contexts() {
        let case = Case::new((2, 70), (4, 2, 32), Some(40), (1.0, 1.0));
        let sum: Vec<f32> = case.run(&mut ctx, None)[2].iter().map(|v| v + 3.0).collect();
        assert_close("sum", &case.run(&mut ctx, Some(3.0))[2], &sum, 1e-6);
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    for mut ctx in contexts() {
        // One head, whose queries several threads share, and many.
        for ((batch, seq), heads) in [((1, 500), (1, 1, 32)), ((2, 130), (6, 3, 16))] {
            let case = Case::new((batch, seq), heads, None, (1.0, 1.0));
            let one = on_threads(1, || case.run(&mut ctx, None));
            assert!([2, 3, 8].into_iter().all(|threads| on_threads(threads, || case.run(&mut ctx, None)) == one));
        }
    }
}

#[test]
fn later_and_windowed_out_tokens_change_nothing() {
    for mut ctx in contexts() {
        let case = Case::new((1, 130), (2, 1, 32), Some(17), (1.0, 1.0));
        let [out, ..] = case.run(&mut ctx, None);
        let width = case.shape.heads.qkv_size();
        let mut other = Case::new((1, 130), (2, 1, 32), Some(17), (1.0, 1.0));
        other.qkv[80 * width..81 * width].iter_mut().for_each(|x| *x += 1.0);
        let [changed, ..] = other.run(&mut ctx, None);
        for (row, (a, b)) in out.chunks_exact(64).zip(changed.chunks_exact(64)).enumerate() {
            assert_eq!(a != b, (80..97).contains(&row), "{}: row {row}", ctx.family().name());
        }
    }
}

#[test]
fn memory_grows_with_the_length_not_with_its_square() {
    let mut ctx = contexts().remove(0);
    let case = Case::new((1, 4096), (1, 1, 64), None, (1.0, 1.0));
    let mut fresh = Ctx::cpu(ctx.family());
    let qkv = tensor(case.qkv.clone(), &[4096, 192]);
    let (out, lse) = attention::forward(&mut fresh, &qkv, case.shape).unwrap();
    let (dqkv, saved) = (unset(&[4096, 192]), Saved { qkv: &qkv, out: &out, lse: &lse });
    attention::backward(&mut fresh, saved, &normal_tensor(2, &[4096, 64]), case.shape, (&dqkv, Store::Set)).unwrap();
    drop((out, lse));
    assert_eq!(fresh.free_bytes(), 4096 * (64 + 1) * 4, "only the two outputs came from the context");

    // T squared would be 1 GiB for this one; whatever the other tests hold at this moment is far less.
    let before = peak_bytes();
    let case = Case::new((1, 16_384), (1, 1, 16), Some(8), (1.0, 1.0));
    assert!(case.run(&mut ctx, None).iter().flatten().all(|x| x.is_finite()));
    assert!(peak_bytes() - before < 256 << 20, "{} bytes more", peak_bytes() - before);
}

/// The most memory this process ever held; 0 where the system does not say.
fn peak_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.map_or(0, |line| line.trim().trim_end_matches(" kB").trim().parse::<usize>().unwrap() << 10)
}

#[test]
fn empty_and_impossible_shapes() {
    let mut ctx = contexts().remove(0);
    let heads = Heads { attention: 2, key_value: 1, dim: 4 };
    let shape = Attention { batch: 1, seq: 3, heads, window: None, starts: None };
    let mut forward = |rows: usize, shape| attention::forward(&mut ctx, &normal_tensor(1, &[rows, 16]), shape);
    assert!(forward(3, shape).is_ok());
    assert_eq!(forward(0, Attention { batch: 0, ..shape }).unwrap().0.dims(), [0, 8]);
    assert_eq!(forward(0, Attention { seq: 0, ..shape }).unwrap().0.dims(), [0, 8]);
    assert!(forward(4, shape).is_err());
    assert!(forward(3, Attention { window: Some(0), ..shape }).is_err());
    for starts in [&[0, 0][..], &[1, 1, 1], &[0, 1, 0], &[0, 0, 3]] {
        assert!(forward(3, Attention { starts: Some(starts), ..shape }).is_err(), "{starts:?}");
    }
    assert!(forward(3, Attention { starts: Some(&[0, 1, 1]), ..shape }).is_ok());
    assert!(forward(3, Attention { heads: Heads { attention: 3, key_value: 2, dim: 4 }, ..shape }).is_err());
}
