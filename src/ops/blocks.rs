//! The block formats of quantised weights: 32 weights share a scale, as in GGUF files (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1).
//!
//! A weight is `scale * (q - zero)`, or `scale * q + min` where the format has a minimum. Called by `decode::quantized`,
//! which keeps blocks in panels, and, as whole rows, by frozen weights of training. The rounding is that of ggml's reference quantisers, so that a weight quantised here has the
//! value that llama.cpp would give it.

use std::sync::OnceLock;

use candle_core::DType;
use half::f16;
use rayon::prelude::*;

use super::ctx::{Ctx, Value};
use super::decode::gpu::weight::{self, DeviceWeight};
use super::simd::{Family, simd_fn};
use crate::error::{Error, Result};

/// Weights of a block.
pub const BLOCK: usize = 32;

/// A block format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
}

impl Format {
    pub const ALL: [Format; 5] = [Format::Q8_0, Format::Q4_0, Format::Q4_1, Format::Q5_0, Format::Q5_1];

    /// The plain format of that many bits.
    pub fn of_bits(bits: u32) -> Result<Self> {
        match bits {
            8 => Ok(Format::Q8_0),
            4 => Ok(Format::Q4_0),
            _ => Err(Error::usage(format!("a base of {bits} bits")).with_hint("--quantized takes 8 or 4")),
        }
    }

    /// The format of that name, if there is one.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name)
    }

    pub fn name(self) -> &'static str {
        match self {
            Format::Q8_0 => "q8_0",
            Format::Q4_0 => "q4_0",
            Format::Q4_1 => "q4_1",
            Format::Q5_0 => "q5_0",
            Format::Q5_1 => "q5_1",
        }
    }

    /// Bits of a stored weight.
    pub fn bits(self) -> u32 {
        match self {
            Format::Q8_0 => 8,
            Format::Q4_0 | Format::Q4_1 => 4,
            Format::Q5_0 | Format::Q5_1 => 5,
        }
    }

    /// Whether a block has a minimum of its own; otherwise zero is `zero`.
    pub fn has_min(self) -> bool {
        matches!(self, Format::Q4_1 | Format::Q5_1)
    }

    /// The stored number that stands for zero; 0 where the block has a minimum.
    pub fn zero(self) -> u8 {
        if self.has_min() { 0 } else { 1 << (self.bits() - 1) }
    }

    /// Quantises 32 weights.
    pub fn quantize(self, weights: &[f32; BLOCK]) -> Block {
        if self.has_min() {
            return self.between(weights);
        }
        let zero = f32::from(self.zero());
        let largest = weights.iter().copied().fold(0f32, |most, w| if w.abs() > most.abs() { w } else { most });
        // Q8_0 is symmetric; the others give the weight that is farthest out the lowest number, which has no opposite.
        let scale = if self == Format::Q8_0 { largest.abs() / 127.0 } else { largest / -zero };
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        let most = (2.0 * zero - 1.0) as u8;
        let q = weights.map(|w| {
            let shifted =
                if self == Format::Q8_0 { (w * inverse).round() + zero } else { (w * inverse + zero + 0.5).floor() };
            (shifted as u8).min(most)
        });
        Block { scale: f16::from_f32(scale), min: f16::ZERO, q }
    }

    fn between(self, weights: &[f32; BLOCK]) -> Block {
        let (low, high) = weights.iter().fold((f32::MAX, f32::MIN), |(low, high), &w| (low.min(w), high.max(w)));
        let most = ((1u32 << self.bits()) - 1) as f32;
        let scale = (high - low) / most;
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        let q = weights.map(|w| (((w - low) * inverse + 0.5) as u8).min(most as u8));
        Block { scale: f16::from_f32(scale), min: f16::from_f32(low), q }
    }
}

/// 32 quantised weights, one stored number a byte.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Block {
    pub scale: f16,
    /// 0 in formats without one.
    pub min: f16,
    pub q: [u8; BLOCK],
}

impl Block {
    /// The weights that the block stands for.
    pub fn weights(&self, format: Format) -> [f32; BLOCK] {
        let (scale, min, zero) = (self.scale.to_f32(), self.min.to_f32(), i32::from(format.zero()));
        self.q.map(|q| scale * (i32::from(q) - zero) as f32 + min)
    }
}

/// A matrix in Q8_0 or Q4_0, row after row, in the bytes that a GGUF file has for it: a scale, then the numbers (of four bits
/// the first half of a block in the low halves of its bytes).
#[derive(Debug)]
pub struct BlockMatrix {
    format: Format,
    columns: usize,
    data: Vec<u8>,
    /// The same bytes where a GPU reads them, once one has asked.
    device: OnceLock<DeviceWeight>,
}

impl BlockMatrix {
    /// Quantises rows of `columns` numbers. Other formats, and rows that are not whole blocks, are refused.
    pub fn quantize(format: Format, weights: &[f32], columns: usize) -> Result<Self> {
        if !matches!(format, Format::Q8_0 | Format::Q4_0) {
            return Err(Error::op("blocks", "q8_0 or q4_0", format.name()));
        }
        if columns == 0 || !columns.is_multiple_of(BLOCK) {
            let what =
                format!("{} needs rows of whole blocks of {BLOCK}; a weight has rows of {columns}", format.name());
            return Err(Error::failed(what).with_hint("keep this model's weights as they are"));
        }
        let size = Self::block_bytes(format);
        let mut data = vec![0; weights.len() / BLOCK * size];
        let blocks = weights.as_chunks::<BLOCK>().0.par_iter().with_min_len(64);
        blocks.zip(data.par_chunks_exact_mut(size)).for_each(|(weights, to)| {
            let Block { scale, q, .. } = format.quantize(weights);
            let (head, body) = to.split_at_mut(2);
            head.copy_from_slice(&scale.to_le_bytes());
            match format {
                Format::Q8_0 => body.iter_mut().zip(q).for_each(|(to, q)| *to = q.wrapping_sub(128)),
                _ => (0..BLOCK / 2).for_each(|i| body[i] = q[i] | q[i + BLOCK / 2] << 4),
            }
        });
        Ok(Self { format, columns, data, device: OnceLock::new() })
    }

    fn block_bytes(format: Format) -> usize {
        2 + BLOCK * format.bits() as usize / 8
    }

    fn row_bytes(&self) -> usize {
        self.columns / BLOCK * Self::block_bytes(self.format)
    }

    pub fn rows(&self) -> usize {
        self.data.len() / self.row_bytes()
    }

    pub fn columns(&self) -> usize {
        self.columns
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.data
    }

    /// The bytes where a GPU reads them.
    pub fn device(&self) -> Result<&DeviceWeight> {
        if let Some(weight) = self.device.get() {
            return Ok(weight);
        }
        let weight = DeviceWeight::from_bytes(self.format.into(), self.rows(), self.columns, &self.data)?;
        Ok(self.device.get_or_init(|| weight))
    }

    /// All numbers (rows, columns).
    pub fn numbers(&self, ctx: &mut Ctx) -> Result<Value> {
        if !ctx.has_gpu() {
            let mut numbers = ctx.vec(self.rows() * self.columns);
            self.unpack(ctx.family(), &mut numbers);
            return Ok(ctx.value(numbers, (self.rows(), self.columns)));
        }
        let y = ctx.output(DType::F32, (self.rows(), self.columns))?;
        weight::dequantise(ctx, self.device()?, &y)?;
        Ok(y)
    }

    /// The numbers of row `i`.
    pub fn unpack_row(&self, family: Family, i: usize, to: &mut [f32]) {
        self.unpack_part(family, i, 0, to);
    }

    /// Numbers of row `i` from column `first` on, both whole blocks.
    pub fn unpack_part(&self, family: Family, i: usize, first: usize, to: &mut [f32]) {
        assert!(first.is_multiple_of(BLOCK) && to.len().is_multiple_of(BLOCK), "{first}, {} of a row", to.len());
        let size = Self::block_bytes(self.format);
        let start = i * self.row_bytes() + first / BLOCK * size;
        unpack(family, self.format, &self.data[start..start + to.len() / BLOCK * size], to);
    }

    /// The numbers of all rows.
    pub fn unpack(&self, family: Family, to: &mut [f32]) {
        let rows = to.par_chunks_exact_mut(self.columns).with_min_len((1 << 12) / self.columns + 1).enumerate();
        rows.for_each(|(i, to)| self.unpack_row(family, i, to));
    }
}

simd_fn! {
fn unpack<S>(format: Format, row: &[u8], to: &mut [f32]) {
    let blocks = to.as_chunks_mut::<BLOCK>().0;
    for (bytes, to) in row.chunks_exact(BlockMatrix::block_bytes(format)).zip(blocks) {
        let scale = f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
        let body = &bytes[2..];
        if format == Format::Q8_0 {
            for i in 0..BLOCK {
                to[i] = scale * f32::from(body[i] as i8);
            }
        } else {
            for i in 0..BLOCK / 2 {
                to[i] = scale * (i32::from(body[i] & 15) - 8) as f32;
                to[i + BLOCK / 2] = scale * (i32::from(body[i] >> 4) - 8) as f32;
            }
        }
    }
}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::{Purpose, Stream};

    #[test]
    fn a_weight_is_off_by_half_a_step_at_most() {
        let stream = Stream::new(1, Purpose::Test);
        for format in Format::ALL {
            for case in 0..200 {
                let size = [1e-3, 1.0, 100.0][case % 3];
                let weights: [f32; BLOCK] = std::array::from_fn(|i| size * stream.normal(case as u64, i as u32));
                let block = format.quantize(&weights);
                let step = block.scale.to_f32().abs();
                let far = weights.iter().fold(0f32, |far, w| far.max(w.abs()));
                for (w, back) in weights.iter().zip(block.weights(format)) {
                    // One end of a format without minimum has no number: it is a whole step off. The scale itself is
                    // rounded to 11 bits, and so is a minimum.
                    let end = if format.has_min() || format == Format::Q8_0 { 0.5 } else { 1.0 };
                    assert!(
                        (w - back).abs() <= step * (end + 0.01) + far * 2e-3,
                        "{}: {w} became {back}",
                        format.name()
                    );
                }
            }
        }
    }

    #[test]
    fn a_matrix_stands_for_what_its_blocks_do_in_the_bytes_of_its_format() {
        let stream = Stream::new(2, Purpose::Test);
        let (rows, columns) = (7, 96);
        let weights: Vec<f32> = (0..rows * columns).map(|i| stream.normal(0, i as u32)).collect();
        for (format, bytes) in [(Format::Q8_0, 34), (Format::Q4_0, 18)] {
            let want: Vec<f32> =
                weights.as_chunks().0.iter().flat_map(|w| format.quantize(w).weights(format)).collect();
            let matrix = BlockMatrix::quantize(format, &weights, columns).unwrap();
            assert_eq!((matrix.rows(), matrix.as_bytes().len()), (rows, rows * columns / BLOCK * bytes));
            for family in Family::ALL.into_iter().filter(|f| f.available()) {
                let mut all = vec![f32::NAN; rows * columns];
                matrix.unpack(family, &mut all);
                assert_eq!(all, want, "{} {}", family.name(), format.name());
                matrix.unpack_row(family, 3, &mut all[..columns]);
                assert_eq!(all[..columns], want[3 * columns..4 * columns]);
            }
            assert!(BlockMatrix::quantize(format, &weights, 21).unwrap_err().to_string().contains("whole blocks"));
        }
        assert!(BlockMatrix::quantize(Format::Q5_1, &weights, columns).is_err());
    }

    #[test]
    fn zeros_and_constants_come_back() {
        for format in Format::ALL {
            assert_eq!(format.quantize(&[0.0; BLOCK]).weights(format), [0.0; BLOCK]);
            for constant in [0.5f32, -2.0] {
                let back = format.quantize(&[constant; BLOCK]).weights(format);
                assert!(back.iter().all(|w| (w / constant - 1.0).abs() < 0.01), "{}: {back:?}", format.name());
            }
        }
    }
}
