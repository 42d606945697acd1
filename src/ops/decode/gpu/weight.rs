//! Weights as a GPU reads them, and the products of the decode list: rows of plain numbers or of GGUF's blocks, byte for byte.
//!
//! Called by the engine on a GPU, and by whoever needs such a weight as f32. The kernels are kernels/metal/skinny.metal and
//! blocks.metal; they multiply f32 rows, whatever the weight, in f32. What must stay true: a row's result has the same bits
//! alone and beside others. Buffers may be larger than the rows of a call, so that they are made once.

use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{DType, Device, Tensor};
use half::bf16;
use rayon::prelude::*;

use crate::error::{Error, Result};
use crate::ops::blocks::{BLOCK, Block, Format};
use crate::ops::ctx::Ctx;
use crate::ops::decode::weight::WeightType;
use crate::ops::gpu::kernels::{self, Kernel};
use crate::ops::gpu::{Arg, Dispatch, Value};
use crate::ops::storage;

const OP: &str = "weight";

/// Outputs of a threadgroup of a product: those of its four simdgroups.
const OUTPUTS: usize = 16;

/// How the bytes of a weight are to be read. The order is that of `kernels::FORMATS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceFormat {
    F32,
    F16,
    Bf16,
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q4K,
    Q6K,
}

impl DeviceFormat {
    pub const ALL: [DeviceFormat; 10] = [
        DeviceFormat::F32,
        DeviceFormat::F16,
        DeviceFormat::Bf16,
        DeviceFormat::Q8_0,
        DeviceFormat::Q4_0,
        DeviceFormat::Q4_1,
        DeviceFormat::Q5_0,
        DeviceFormat::Q5_1,
        DeviceFormat::Q4K,
        DeviceFormat::Q6K,
    ];

    pub fn name(self) -> &'static str {
        kernels::FORMATS[self as usize]
    }

    /// candle's name for it, whose reading of the bytes is the reference of the kernels.
    pub fn of_candle(self) -> GgmlDType {
        match self {
            DeviceFormat::F32 => GgmlDType::F32,
            DeviceFormat::F16 => GgmlDType::F16,
            DeviceFormat::Bf16 => GgmlDType::BF16,
            DeviceFormat::Q8_0 => GgmlDType::Q8_0,
            DeviceFormat::Q4_0 => GgmlDType::Q4_0,
            DeviceFormat::Q4_1 => GgmlDType::Q4_1,
            DeviceFormat::Q5_0 => GgmlDType::Q5_0,
            DeviceFormat::Q5_1 => GgmlDType::Q5_1,
            DeviceFormat::Q4K => GgmlDType::Q4K,
            DeviceFormat::Q6K => GgmlDType::Q6K,
        }
    }

    /// Weights of a block, and its bytes: ggml's `block_*`.
    fn block(self) -> (usize, usize) {
        match self {
            DeviceFormat::F32 => (1, 4),
            DeviceFormat::F16 | DeviceFormat::Bf16 => (1, 2),
            DeviceFormat::Q8_0 => (32, 34),
            DeviceFormat::Q4_0 => (32, 18),
            DeviceFormat::Q4_1 => (32, 20),
            DeviceFormat::Q5_0 => (32, 22),
            DeviceFormat::Q5_1 => (32, 24),
            DeviceFormat::Q4K => (256, 144),
            DeviceFormat::Q6K => (256, 210),
        }
    }

    /// Weights of a block, of which rows are whole multiples; 1 for plain numbers.
    pub fn block_len(self) -> usize {
        self.block().0
    }

    /// Bytes of a row of so many columns, whole blocks.
    pub fn row_bytes(self, columns: usize) -> usize {
        let (len, bytes) = self.block();
        columns / len * bytes
    }

    /// The forms of a product's kernel, for all numbers of rows.
    pub fn products(self) -> &'static [&'static str] {
        &kernels::PRODUCTS[self as usize * kernels::ROWS.len()..][..kernels::ROWS.len()]
    }

    /// The form of a product's kernel for so many rows.
    fn product(self, rows: usize) -> (&'static str, usize) {
        let i = kernels::ROWS.iter().position(|most| rows <= *most).unwrap_or(kernels::ROWS.len() - 1);
        (kernels::PRODUCTS[self as usize * kernels::ROWS.len() + i], kernels::ROWS[i])
    }
}

impl From<Format> for DeviceFormat {
    fn from(format: Format) -> Self {
        match format {
            Format::Q8_0 => DeviceFormat::Q8_0,
            Format::Q4_0 => DeviceFormat::Q4_0,
            Format::Q4_1 => DeviceFormat::Q4_1,
            Format::Q5_0 => DeviceFormat::Q5_0,
            Format::Q5_1 => DeviceFormat::Q5_1,
        }
    }
}

impl From<WeightType> for DeviceFormat {
    fn from(kind: WeightType) -> Self {
        match kind {
            WeightType::F32 => DeviceFormat::F32,
            WeightType::Bf16 => DeviceFormat::Bf16,
            WeightType::Blocks(format) => format.into(),
        }
    }
}

/// A weight (rows, columns).
#[derive(Debug)]
pub struct DeviceWeight {
    /// The rows, one after the other, and what is missing to whole words.
    pub words: Tensor,
    pub format: DeviceFormat,
    pub rows: usize,
    pub columns: usize,
    /// Bytes from a row to the next one.
    pub row_bytes: usize,
}

impl DeviceWeight {
    /// Packs row-major matrices of `k` columns, one below the other, rounded or quantised as `weight::Weight::pack` does.
    pub fn pack(kind: WeightType, parts: &[&[f32]], k: usize) -> Result<Self> {
        let format = DeviceFormat::from(kind);
        if k == 0 || parts.iter().any(|part| !part.len().is_multiple_of(k)) {
            let found = format!("{:?} numbers", parts.iter().map(|part| part.len()).collect::<Vec<_>>());
            return Err(Error::op(OP, format!("rows of {k}"), found));
        }
        if !k.is_multiple_of(format.block_len()) {
            let what = format!("{} needs rows of whole blocks of {BLOCK}, and a weight has rows of {k}", format.name());
            return Err(Error::failed(what).with_hint("use bf16 or f32 for this model"));
        }
        let (rows, row_bytes) = (parts.iter().map(|part| part.len() / k).sum(), format.row_bytes(k));
        let mut bytes = vec![0; rows * row_bytes];
        let from: Vec<&[f32]> = parts.iter().flat_map(|part| part.chunks_exact(k)).collect();
        bytes.par_chunks_exact_mut(row_bytes).zip(from).for_each(|(to, from)| match kind {
            WeightType::F32 => to.as_chunks_mut().0.iter_mut().zip(from).for_each(|(to, x)| *to = x.to_le_bytes()),
            WeightType::Bf16 => {
                let places = to.as_chunks_mut().0.iter_mut().zip(from);
                places.for_each(|(to, x)| *to = bf16::from_f32(*x).to_le_bytes());
            }
            WeightType::Blocks(format) => {
                let blocks = to.chunks_exact_mut(row_bytes / (k / BLOCK)).zip(from.as_chunks().0);
                blocks.for_each(|(to, weights)| write_block(format, &format.quantize(weights), to));
            }
        });
        Self::from_bytes(format, rows, k, &bytes)
    }

    /// The weight in a GGUF file's bytes.
    pub fn from_bytes(format: DeviceFormat, rows: usize, columns: usize, bytes: &[u8]) -> Result<Self> {
        let row_bytes = format.row_bytes(columns);
        let whole = columns > 0 && columns.is_multiple_of(format.block_len());
        if !whole || rows.checked_mul(row_bytes) != Some(bytes.len()) {
            let expected = format!("{rows} rows of whole blocks of {}", format.name());
            return Err(Error::op(OP, expected, format!("{} bytes for {columns} columns", bytes.len())));
        }
        let mut words = vec![0u32; bytes.len().div_ceil(4)];
        let (whole, rest) = bytes.as_chunks();
        words.iter_mut().zip(whole).for_each(|(word, bytes)| *word = u32::from_le_bytes(*bytes));
        for (i, byte) in rest.iter().enumerate() {
            words[whole.len()] |= u32::from(*byte) << (8 * i);
        }
        let len = words.len();
        Ok(Self { words: storage::tensor(words, len), format, rows, columns, row_bytes })
    }

    /// What the weights stand for, (rows, columns), by candle's own reading of the formats: the reference of the kernels.
    pub fn numbers(&self) -> Result<Vec<f32>> {
        let words = storage::read::<u32>(OP, &self.words)?;
        let bytes: Vec<u8> =
            words.iter().flat_map(|word| word.to_le_bytes()).take(self.rows * self.row_bytes).collect();
        let data = QStorage::from_data(bytes.into(), &Device::Cpu, self.format.of_candle())?;
        let tensor = QTensor::new(data, (self.rows, self.columns))?.dequantize(&Device::Cpu)?;
        Ok(storage::read::<f32>(OP, &tensor)?.to_vec())
    }

    pub fn bytes(&self) -> usize {
        self.words.elem_count() * 4
    }
}

/// A block in GGUF's bytes: scale, minimum, fifth bits, and then the numbers, of those with four bits here the first half of
/// the block in the lower halves of the bytes.
fn write_block(format: Format, block: &Block, to: &mut [u8]) {
    let (scale, mut body) = to.split_at_mut(2);
    scale.copy_from_slice(&block.scale.to_le_bytes());
    if format.has_min() {
        let (min, rest) = body.split_at_mut(2);
        min.copy_from_slice(&block.min.to_le_bytes());
        body = rest;
    }
    let q = &block.q;
    match format.bits() {
        8 => body.iter_mut().zip(q).for_each(|(to, q)| *to = q.wrapping_sub(format.zero())),
        bits => {
            if bits == 5 {
                let (high, rest) = body.split_at_mut(4);
                let fifth = q.iter().enumerate().fold(0u32, |fifth, (i, q)| fifth | u32::from(q >> 4) << i);
                high.copy_from_slice(&fifth.to_le_bytes());
                body = rest;
            }
            body.iter_mut().enumerate().for_each(|(i, to)| *to = q[i] & 15 | q[i + BLOCK / 2] << 4);
        }
    }
}

/// Rows that are normed before they are multiplied.
#[derive(Clone, Copy)]
pub struct Normed<'a> {
    /// (any, C)
    pub x: &'a Tensor,
    /// The gain (C).
    pub norm: &'a Tensor,
    pub eps: f32,
    /// Which rows of x they are (u32), if they are not its first ones. They must exist.
    pub select: Option<&'a Tensor>,
}

impl<'a> Normed<'a> {
    /// `select` as an argument: where there is none, something that is not read.
    fn select(&self, weight: &'a DeviceWeight) -> Arg<'a> {
        Arg::read(self.select.unwrap_or(&weight.words))
    }

    fn check(&self, op: &'static str, weight: &DeviceWeight, rows: usize) -> Result<()> {
        let (x, norm, columns) = (self.x.elem_count(), self.norm.elem_count(), weight.columns);
        let enough = self.select.map_or(x >= rows * columns, |select| select.elem_count() >= rows);
        if norm != columns || !enough {
            let found = format!("x {x}, norm {norm}, select {:?}", self.select.map(|s| s.elem_count()));
            return Err(Error::op(op, format!("{rows} rows of {columns}"), found));
        }
        Ok(())
    }
}

/// The first `rows` rows of y (any, outputs) = norm(x) W^T.
pub fn norm_product(ctx: &mut Ctx, normed: Normed, weight: &DeviceWeight, rows: usize, y: &Tensor) -> Result<()> {
    normed.check(kernels::NORM_PRODUCT.name, weight, rows)?;
    ctx.launch(weight.bytes() + 4 * weight.columns);
    let Normed { x, norm, eps, select } = normed;
    let args = [Arg::read(x), Arg::read(norm), normed.select(weight), Arg::read(&weight.words), Arg::write(y)];
    let more = [u32::from(select.is_some()).into(), eps.into()];
    multiply(ctx, &kernels::NORM_PRODUCT, weight, (rows, OUTPUTS), &args, &more)
}

/// The first `rows` rows of y (any, outputs) += x W^T.
pub fn residual_product(ctx: &mut Ctx, x: &Tensor, weight: &DeviceWeight, rows: usize, y: &Tensor) -> Result<()> {
    if x.elem_count() < rows * weight.columns {
        let expected = format!("{rows} rows of {}", weight.columns);
        return Err(Error::op(kernels::RESIDUAL_PRODUCT.name, expected, format!("{:?}", x.shape())));
    }
    ctx.launch(weight.bytes());
    let args = [Arg::read(x), Arg::read(&weight.words), Arg::update(y)];
    multiply(ctx, &kernels::RESIDUAL_PRODUCT, weight, (rows, OUTPUTS), &args, &[])
}

/// The first `rows` rows of y (any, outputs) = silu(norm(x) gate^T) norm(x) up^T. Both weights must be alike.
pub fn gate_up_product(
    ctx: &mut Ctx,
    normed: Normed,
    (gate, up): (&DeviceWeight, &DeviceWeight),
    rows: usize,
    y: &Tensor,
) -> Result<()> {
    normed.check(kernels::GATE_UP_PRODUCT.name, gate, rows)?;
    if (gate.format, gate.rows, gate.columns) != (up.format, up.rows, up.columns) {
        let kind = |w: &DeviceWeight| format!("{} ({}, {})", w.format.name(), w.rows, w.columns);
        return Err(Error::op(kernels::GATE_UP_PRODUCT.name, format!("up as gate, {}", kind(gate)), kind(up)));
    }
    ctx.launch(gate.bytes() + up.bytes() + 4 * gate.columns);
    let Normed { x, norm, eps, select } = normed;
    let (gates, ups) = (Arg::read(&gate.words), Arg::read(&up.words));
    let args = [Arg::read(x), Arg::read(norm), normed.select(gate), gates, ups, Arg::write(y)];
    let more = [u32::from(select.is_some()).into(), eps.into()];
    // A pack is half gate, half up.
    multiply(ctx, &kernels::GATE_UP_PRODUCT, gate, (rows, OUTPUTS / 2), &args, &more)
}

/// Hands over a product of so many rows, whose threadgroups have so many outputs. The last argument is y.
fn multiply(
    ctx: &mut Ctx,
    kernel: &'static Kernel,
    weight: &DeviceWeight,
    (rows, outputs): (usize, usize),
    args: &[Arg],
    more: &[Value],
) -> Result<()> {
    let found = args.last().map_or(0, Arg::len);
    if found < rows * weight.rows {
        let expected = format!("y of {rows} rows of {}", weight.rows);
        return Err(Error::op(kernel.name, expected, format!("{found} elements")));
    }
    let (form, pass) = weight.format.product(rows);
    let sizes = [rows.into(), weight.rows.into(), weight.columns.into(), weight.row_bytes.into()];
    let groups = [rows.div_ceil(pass), weight.rows.div_ceil(outputs), 1];
    let numbers = [&sizes, more].concat();
    ctx.hand_over(&Dispatch { kernel, dtype: DType::F32, form, args, numbers: &numbers, groups })
}

/// Rows `ids` of the weight, `count` of them, to the first rows of y (any, columns). Ids must be rows of it.
pub fn embed(ctx: &mut Ctx, weight: &DeviceWeight, ids: &Tensor, count: usize, y: &Tensor) -> Result<()> {
    if ids.elem_count() < count {
        return Err(Error::op(kernels::EMBED_BLOCKS.name, format!("{count} ids"), format!("{:?}", ids.shape())));
    }
    ctx.launch(count * weight.row_bytes);
    let args = [Arg::read(&weight.words), Arg::read(ids), Arg::write(y)];
    unpack(ctx, &kernels::EMBED_BLOCKS, weight, count, &args)
}

/// The whole weight to y (rows, columns).
pub fn dequantise(ctx: &mut Ctx, weight: &DeviceWeight, y: &Tensor) -> Result<()> {
    ctx.launch(weight.bytes());
    unpack(ctx, &kernels::DEQUANTISE, weight, weight.rows, &[Arg::read(&weight.words), Arg::write(y)])
}

/// Hands over a kernel that writes so many rows of the weight's columns to its last argument.
fn unpack(ctx: &mut Ctx, kernel: &'static Kernel, weight: &DeviceWeight, rows: usize, args: &[Arg]) -> Result<()> {
    let found = args.last().map_or(0, Arg::len);
    if found < rows * weight.columns {
        let expected = format!("y of {rows} rows of {}", weight.columns);
        return Err(Error::op(kernel.name, expected, format!("{found} elements")));
    }
    let (form, numbers) = (weight.format.name(), [weight.columns.into(), weight.row_bytes.into()]);
    let dispatch = Dispatch { kernel, dtype: DType::F32, form, args, numbers: &numbers, groups: [rows, 1, 1] };
    ctx.hand_over(&dispatch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::blocks::BlockMatrix;
    use crate::ops::decode::testing::numbers;

    #[test]
    fn packed_bytes_are_those_of_the_rounding_elsewhere() {
        let (a, b, k) = (numbers(1, 3 * 96), numbers(2, 2 * 96), 96);
        let all = [a.as_slice(), &b].concat();
        for format in Format::ALL {
            let weight = DeviceWeight::pack(WeightType::Blocks(format), &[&a, &b], k).unwrap();
            assert_eq!((weight.rows, weight.columns, weight.format.name()), (5, k, format.name()));
            let words = storage::read::<u32>("test", &weight.words).unwrap();
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
            if let Ok(matrix) = BlockMatrix::quantize(format, &all, k) {
                assert_eq!(bytes[..5 * weight.row_bytes], *matrix.as_bytes(), "{}", format.name());
            }
        }
    }

    #[test]
    fn words_are_whole_and_sizes_are_held_to() {
        let weight = DeviceWeight::pack(WeightType::Bf16, &[&[1.0, -2.0, 3.0]], 1).unwrap();
        assert_eq!(*storage::read::<u32>("test", &weight.words).unwrap(), [0xc000_3f80, 0x4040]);
        for format in DeviceFormat::ALL {
            let plain = |name: String| name.to_lowercase().replace('_', "");
            assert_eq!(plain(format.name().into()), plain(format!("{format:?}")), "the order of the table's formats");
            for (rows, of) in [(1, 1), (2, 4), (4, 4), (5, 8), (64, 8)] {
                assert_eq!(format.product(rows), (&*format!("{}_{of}", format.name()), of));
            }
        }
        assert!(DeviceWeight::from_bytes(DeviceFormat::Q4K, 1, 128, &[0; 72]).is_err());
        assert!(DeviceWeight::from_bytes(DeviceFormat::F16, 2, 3, &[0; 11]).is_err());
        let error = DeviceWeight::pack(WeightType::Blocks(Format::Q4_1), &[&[0.0; 48]], 48).err().unwrap();
        assert!(error.to_string().contains("whole blocks"), "{error}");
    }
}
