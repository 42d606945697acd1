//! The products of decoding with weights of every format, against candle's blocks and sums in f64.

use candle_core::quantized::QTensor;
use candle_core::{Device, Tensor};
use gpt::ops::blocks::{BLOCK, Format};
use gpt::ops::ctx::Ctx;
use gpt::ops::decode::gpu::weight::{self, DeviceFormat, DeviceWeight, Normed};
use gpt::ops::decode::weight::WeightType;
use gpt::ops::{rms_norm, storage};
use gpt::random::{Purpose, Stream};

use super::emulator::{available, ctx};

const EPS: f32 = 1e-5;
const OUTPUTS: [usize; 4] = [1, 7, 33, 130];
const ROWS: [usize; 8] = [1, 2, 3, 4, 5, 8, 9, 17];
/// Of the sum of all terms without their signs: a lane adds up to 33 of them, which round to 2^-24 each, then 32 lanes are
/// added; most of these errors cancel. The largest seen is 2e-7.
const TOLERANCE: f64 = 1e-6;

fn normal(salt: u64, len: usize) -> Vec<f32> {
    let stream = Stream::new(11, Purpose::Test);
    (0..len).map(|i| stream.normal(salt, i as u32)).collect()
}

fn values(tensor: &Tensor) -> Vec<f32> {
    storage::read::<f32>("test", tensor).unwrap().to_vec()
}

fn tensor(values: Vec<f32>) -> Tensor {
    let len = values.len();
    storage::tensor(values, len)
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Columns that a format can have: with and without a part of a step of 256 at the end.
fn columns(format: DeviceFormat) -> &'static [usize] {
    match format.block_len() {
        1 => &[1, 7, 32, 100, 259, 512, 1056],
        32 => &[32, 96, 256, 512, 1056],
        _ => &[256, 512, 1024],
    }
}

/// A weight that candle quantised, and the numbers that it stands for to candle.
fn random_weight(format: DeviceFormat, salt: u64, (rows, columns): (usize, usize)) -> (DeviceWeight, Vec<f32>) {
    let plain = Tensor::from_vec(normal(salt, rows * columns), (rows, columns), &Device::Cpu).unwrap();
    let quantised = QTensor::quantize(&plain, format.of_candle()).unwrap();
    let bytes = quantised.data().unwrap();
    assert_eq!(bytes.len(), rows * format.row_bytes(columns), "{}", format.name());
    let weight = DeviceWeight::from_bytes(format, rows, columns, &bytes).unwrap();
    (weight, values(&quantised.dequantize(&Device::Cpu).unwrap().flatten_all().unwrap()))
}

/// What each output of x W^T is, and the sum of its terms without their signs.
fn product(x: &[f64], weight: &[f32], columns: usize) -> Vec<(f64, f64)> {
    let one = |x: &[f64], w: &[f32]| {
        let terms = x.iter().zip(w).map(|(x, w)| x * f64::from(*w));
        terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()))
    };
    x.chunks_exact(columns).flat_map(|x| weight.chunks_exact(columns).map(move |w| one(x, w))).collect()
}

/// Fails unless the outputs are as wanted, and what comes after them in the buffer is as it was.
#[track_caller]
fn assert_outputs(what: &str, y: &Tensor, want: &[(f64, f64)]) {
    let got = values(y);
    for (i, (got, (want, size))) in got.iter().zip(want).enumerate() {
        let off = (f64::from(*got) - want).abs();
        assert!(off <= TOLERANCE * size, "{what}: output {i} is {got}, expected {want}, off by {:e}", off / size);
    }
    assert!(got[want.len()..].iter().all(|x| x.is_nan()), "{what}: wrote past the rows");
}

/// A buffer for outputs after which a row's worth more stays as it is.
fn unset(rows: usize, outputs: usize) -> Tensor {
    tensor(vec![f32::NAN; (rows + 1) * outputs])
}

struct Case {
    format: DeviceFormat,
    rows: usize,
    outputs: usize,
    columns: usize,
}

impl Case {
    /// All outputs with all rows in every format; the columns take turns.
    fn all() -> impl Iterator<Item = Self> {
        DeviceFormat::ALL.into_iter().flat_map(|format| {
            let pairs = OUTPUTS.iter().enumerate().flat_map(|(i, outputs)| ROWS.iter().map(move |r| (i, *outputs, *r)));
            pairs.enumerate().map(move |(n, (i, outputs, rows))| {
                let columns = columns(format);
                Self { format, rows, outputs, columns: columns[(n + i) % columns.len()] }
            })
        })
    }

    fn name(&self) -> String {
        format!("{} {} rows, {} of {}", self.format.name(), self.rows, self.outputs, self.columns)
    }

    fn weight(&self, salt: u64) -> (DeviceWeight, Vec<f32>) {
        random_weight(self.format, salt, (self.outputs, self.columns))
    }
}

#[test]
fn products_of_normed_rows_are_those_of_the_formats_weights() {
    if !available() {
        return;
    }
    let mut ctx = ctx();
    for (n, case) in Case::all().enumerate() {
        let Case { rows, outputs, columns, .. } = case;
        let (weight, plain) = case.weight(1);
        // Rows of size 1e-3 are where eps begins to count.
        let size = [1.0, 100.0, 1e-3][n % 3];
        let (x, norm) = (normal(2, rows * columns).iter().map(|x| x * size).collect::<Vec<_>>(), normal(3, columns));
        let want = product(&rms_norm::reference(&x, &norm, EPS), &plain, columns);
        let (x, norm, y) = (tensor(x), tensor(norm), unset(rows, outputs));
        let normed = Normed { x: &x, norm: &norm, eps: EPS, select: None };
        weight::norm_product(&mut ctx, normed, &weight, rows, &y).unwrap();
        assert_outputs(&case.name(), &y, &want);
    }
}

#[test]
fn residual_products_are_added() {
    if !available() {
        return;
    }
    let mut ctx = ctx();
    for case in Case::all() {
        let Case { rows, outputs, columns, .. } = case;
        let (weight, plain) = case.weight(4);
        let (x, before) = (normal(5, rows * columns), normal(6, rows * outputs));
        let wide: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        let terms = product(&wide, &plain, columns);
        let add = |((sum, size), y): (&(f64, f64), &f32)| (sum + f64::from(*y), size + f64::from(y.abs()));
        let want: Vec<(f64, f64)> = terms.iter().zip(&before).map(add).collect();
        let y = tensor([before, vec![f32::NAN; outputs]].concat());
        weight::residual_product(&mut ctx, &tensor(x), &weight, rows, &y).unwrap();
        assert_outputs(&case.name(), &y, &want);
    }
}

#[test]
fn gates_go_through_silu_and_multiply_what_is_up() {
    if !available() {
        return;
    }
    let mut ctx = ctx();
    for case in Case::all() {
        let Case { rows, outputs, columns, .. } = case;
        let ((gate, gates), (up, ups)) = (case.weight(7), case.weight(8));
        let (x, norm) = (normal(9, rows * columns), normal(10, columns));
        let normed = rms_norm::reference(&x, &norm, EPS);
        let both = product(&normed, &gates, columns).into_iter().zip(product(&normed, &ups, columns));
        let want = both.map(|((g, gate_size), (u, up_size))| {
            let silu = g / (1.0 + (-g).exp());
            // The slope of silu is 1.1 at most; e^-g has an error of its own, of g steps in bits.
            (silu * u, 1.1 * gate_size * u.abs() + silu.abs() * up_size)
        });
        let want: Vec<(f64, f64)> = want.collect();
        let (x, norm, y) = (tensor(x), tensor(norm), unset(rows, outputs));
        let normed = Normed { x: &x, norm: &norm, eps: EPS, select: None };
        weight::gate_up_product(&mut ctx, normed, (&gate, &up), rows, &y).unwrap();
        assert_outputs(&case.name(), &y, &want);
    }
}

/// The three products of rows `picked` of x, as bits: norm, residual, gate and up.
fn products(ctx: &mut Ctx, weights: [&DeviceWeight; 2], x: &[f32], picked: &[usize], select: bool) -> [Vec<u32>; 3] {
    let [weight, up] = weights;
    let (columns, outputs, rows) = (weight.columns, weight.rows, picked.len());
    let copied: Vec<f32> = picked.iter().flat_map(|i| &x[i * columns..][..columns]).copied().collect();
    let ids = storage::tensor(picked.iter().map(|i| *i as u32).collect(), rows);
    let (all, copied, norm) = (tensor(x.to_vec()), tensor(copied), tensor(normal(20, columns)));
    let normed =
        Normed { x: if select { &all } else { &copied }, norm: &norm, eps: EPS, select: select.then_some(&ids) };
    let ys = [(); 3].map(|()| tensor(vec![0.5; rows * outputs]));
    weight::norm_product(ctx, normed, weight, rows, &ys[0]).unwrap();
    weight::residual_product(ctx, &copied, weight, rows, &ys[1]).unwrap();
    weight::gate_up_product(ctx, normed, (weight, up), rows, &ys[2]).unwrap();
    ys.map(|y| bits(&values(&y)))
}

#[test]
fn a_row_has_the_same_bits_alone_and_beside_others() {
    if !available() {
        return;
    }
    let (mut ctx, outputs) = (ctx(), 7);
    for format in DeviceFormat::ALL {
        let (last, first) = (*columns(format).last().unwrap(), columns(format)[1]);
        for columns in [first, last] {
            let (weight, _) = random_weight(format, 21, (outputs, columns));
            let (up, _) = random_weight(format, 22, (outputs, columns));
            let (weights, x) = ([&weight, &up], normal(23, 64 * columns));
            let all = products(&mut ctx, weights, &x, &(0..64).collect::<Vec<_>>(), false);
            let places: [&[usize]; 6] =
                [&[0], &[63], &[5, 4], &[9, 0, 17, 3], &[33, 2, 2, 50, 1], &[7, 6, 5, 4, 3, 2, 1, 0, 60]];
            for (picked, select) in places.iter().flat_map(|picked| [(picked, false), (picked, true)]) {
                let some = products(&mut ctx, weights, &x, picked, select);
                for (kernel, (some, all)) in some.iter().zip(&all).enumerate() {
                    let want: Vec<u32> = picked.iter().flat_map(|i| &all[i * outputs..][..outputs]).copied().collect();
                    assert_eq!(*some, want, "{} of {columns}, product {kernel}: {picked:?} {select}", format.name());
                }
            }
        }
    }
}

#[test]
fn unpacked_weights_are_candles() {
    if !available() {
        return;
    }
    let mut ctx = ctx();
    for format in DeviceFormat::ALL {
        for columns in columns(format).iter().copied() {
            let (weight, plain) = random_weight(format, 30, (9, columns));
            let y = unset(9, columns);
            weight::dequantise(&mut ctx, &weight, &y).unwrap();
            let what = format!("{} of {columns}", format.name());
            assert_eq!(bits(&values(&y)[..9 * columns]), bits(&plain), "{what}");
            let (ids, y) = ([8u32, 0, 3, 3], unset(3, columns));
            weight::embed(&mut ctx, &weight, &storage::tensor(ids.to_vec(), 4), 3, &y).unwrap();
            let want: Vec<f32> =
                ids[..3].iter().flat_map(|i| &plain[*i as usize * columns..][..columns]).copied().collect();
            let got = values(&y);
            assert_eq!(bits(&got[..3 * columns]), bits(&want), "{what}");
            assert!(got[3 * columns..].iter().all(|x| x.is_nan()), "{what}: wrote past the rows");
        }
    }
}

#[test]
fn packed_weights_are_what_the_engine_has_on_the_cpu() {
    if !available() {
        return;
    }
    let (mut ctx, columns) = (ctx(), 96);
    let (a, b) = (normal(40, 3 * columns), normal(41, columns));
    for kind in WeightType::all() {
        let weight = DeviceWeight::pack(kind, &[&a, &b], columns).unwrap();
        let y = tensor(vec![f32::NAN; 4 * columns]);
        weight::dequantise(&mut ctx, &weight, &y).unwrap();
        let plain = a.iter().chain(&b).copied();
        let blocks = |format: Format| {
            let all: Vec<f32> = plain.clone().collect();
            all.as_chunks::<BLOCK>().0.iter().flat_map(|w| format.quantize(w).weights(format)).collect()
        };
        let want: Vec<f32> = match kind {
            WeightType::F32 => plain.collect(),
            WeightType::Bf16 => plain.map(|x| half::bf16::from_f32(x).to_f32()).collect(),
            WeightType::Blocks(format) => blocks(format),
        };
        assert_eq!(values(&y), want, "{}", kind.name());
    }
}

#[test]
fn buffers_that_are_too_small_are_refused() {
    if !available() {
        return;
    }
    let mut ctx = ctx();
    let (weight, _) = random_weight(DeviceFormat::Q8_0, 50, (5, 64));
    let (other, _) = random_weight(DeviceFormat::Q4_0, 50, (5, 64));
    let numbers = |len: usize| tensor(vec![1.0; len]);
    let (x, norm, y) = (numbers(128), numbers(64), numbers(10));
    let normed = Normed { x: &x, norm: &norm, eps: EPS, select: None };
    assert!(weight::norm_product(&mut ctx, normed, &weight, 3, &numbers(15)).is_err(), "rows of x");
    assert!(weight::norm_product(&mut ctx, normed, &weight, 2, &numbers(9)).is_err(), "outputs");
    assert!(weight::norm_product(&mut ctx, Normed { norm: &x, ..normed }, &weight, 2, &y).is_err(), "gain");
    assert!(weight::residual_product(&mut ctx, &x, &weight, 3, &numbers(15)).is_err(), "rows of x");
    assert!(weight::gate_up_product(&mut ctx, normed, (&weight, &other), 2, &y).is_err(), "formats");
    assert!(weight::dequantise(&mut ctx, &weight, &x).is_err(), "room for the weight");
    weight::norm_product(&mut ctx, normed, &weight, 0, &y).unwrap();
    weight::norm_product(&mut ctx, normed, &weight, 2, &y).unwrap();
}
