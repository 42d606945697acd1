//! The product of a few rows with a weight in blocks of 32 (see `ops::blocks`): integer products with rows quantised to 8
//! bits, block after block.
//!
//! Called through `weight`. Within a block the sums are exact integers; across blocks each output is one chain of `fma` in
//! order, so a row's result has the same bits alone and beside others. Every 32 numbers of a row share a scale, the largest
//! over 127. Panels are 64 columns wide; each block of a panel holds, for all its columns, the stored numbers by fours
//! `[4 or 8][64][4]` (4-bit ones two to a byte: fours p and p + 4), the fifth bits `[64]` as words, the scales `[64]` as
//! f16 and, in formats that have them, the minima.

use std::ops::Range;

use super::aligned::{Aligned, Arena};
use super::cells::Cells;
use super::weight::PANEL;
use crate::ops::blocks::{BLOCK, Block, Format};
use crate::ops::gemm::Store;
use crate::ops::simd::{Family, simd_fn};

/// Fours of a block.
const FOURS: usize = BLOCK / 4;
/// Rows of the highest tile.
const MAX_ROWS: usize = 4;

/// A weight (n, k) packed for `multiply`; made once when a model is loaded.
pub struct Blocks {
    data: Aligned<u8>,
    format: Format,
    n: usize,
    k: usize,
}

/// Where the parts of a panel's block lie, in bytes from its start.
#[derive(Clone, Copy)]
struct Parts {
    high: usize,
    scales: usize,
    mins: usize,
    end: usize,
}

impl Parts {
    #[inline(always)]
    const fn of(bits: usize, min: bool) -> Self {
        let high = PANEL * BLOCK * (if bits == 8 { 8 } else { 4 }) / 8;
        let scales = high + if bits == 5 { PANEL * 4 } else { 0 };
        let mins = scales + PANEL * 2;
        Self { high, scales, mins, end: mins + if min { PANEL * 2 } else { 0 } }
    }
}

impl Blocks {
    /// Quantises and packs row-major matrices of `k` columns, whole blocks, one below the other.
    pub fn pack(arena: &mut Arena, format: Format, parts: &[&[f32]], k: usize) -> Self {
        assert!(k.is_multiple_of(BLOCK) && parts.iter().all(|part| part.len() % k == 0), "whole blocks of rows of {k}");
        let n: usize = parts.iter().map(|part| part.len() / k).sum();
        let size = Parts::of(format.bits() as usize, format.has_min()).end;
        let mut blocks = Self { data: arena.zeros(n.div_ceil(PANEL) * (k / BLOCK) * size), format, n, k };
        for (i, row) in parts.iter().flat_map(|part| part.chunks_exact(k)).enumerate() {
            for (b, weights) in row.as_chunks::<BLOCK>().0.iter().enumerate() {
                blocks.store(i, b, &format.quantize(weights));
            }
        }
        blocks
    }

    /// Bytes of block `b` of the panel that holds row `i`, and the row's place in it.
    fn place(&self, i: usize, b: usize) -> (Parts, std::ops::Range<usize>, usize) {
        let parts = Parts::of(self.format.bits() as usize, self.format.has_min());
        let at = (i / PANEL * (self.k / BLOCK) + b) * parts.end;
        (parts, at..at + parts.end, i % PANEL)
    }

    fn store(&mut self, i: usize, b: usize, block: &Block) {
        let (parts, range, column) = self.place(i, b);
        let bits = self.format.bits();
        let to = &mut self.data[range];
        for (at, q) in block.q.into_iter().enumerate() {
            let (four, byte) = (at / 4, column * 4 + at % 4);
            match bits {
                8 => to[four * PANEL * 4 + byte] = q,
                _ => to[four % 4 * PANEL * 4 + byte] |= (q & 15) << (four / 4 * 4),
            }
            if bits == 5 {
                to[parts.high + column * 4 + at / 8] |= (q >> 4) << (at % 8);
            }
        }
        to[parts.scales + column * 2..][..2].copy_from_slice(&block.scale.to_le_bytes());
        if self.format.has_min() {
            to[parts.mins + column * 2..][..2].copy_from_slice(&block.min.to_le_bytes());
        }
    }

    fn load(&self, i: usize, b: usize) -> Block {
        let (parts, range, column) = self.place(i, b);
        let from = &self.data[range];
        let q = std::array::from_fn(|at| {
            let (four, byte) = (at / 4, column * 4 + at % 4);
            let high = || (from[parts.high + column * 4 + at / 8] >> (at % 8) & 1) << 4;
            match self.format.bits() {
                8 => from[four * PANEL * 4 + byte],
                4 => from[four % 4 * PANEL * 4 + byte] >> (four / 4 * 4) & 15,
                _ => (from[four % 4 * PANEL * 4 + byte] >> (four / 4 * 4) & 15) | high(),
            }
        });
        let half = |at: usize| half::f16::from_le_bytes([from[at + column * 2], from[at + column * 2 + 1]]);
        let min = if self.format.has_min() { half(parts.mins) } else { half::f16::ZERO };
        Block { scale: half(parts.scales), min, q }
    }

    /// Numbers of a row.
    pub fn row_len(&self) -> usize {
        self.k
    }

    /// Rows of the weight: the columns of a product.
    pub fn outputs(&self) -> usize {
        self.n
    }

    /// Keeps it in main memory.
    pub fn lock(&self) -> std::io::Result<()> {
        self.data.lock()
    }

    /// Memory of the packed weight, its padding included.
    pub fn bytes(&self) -> usize {
        self.data.len()
    }

    /// Row `i` of the weight as the blocks have it.
    pub fn unpack_row(&self, i: usize, row: &mut [f32]) {
        assert!(i < self.n && row.len() == self.k, "row {i} of {} x {}", self.n, self.k);
        for (b, to) in row.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
            *to = self.load(i, b).weights(self.format);
        }
    }
}

/// The columns that `panels` hold of y (m, n) = x (m, k) W^T, or y + x W^T.
///
/// # Safety
/// Nobody else reads or writes these columns meanwhile.
pub unsafe fn multiply(family: Family, rows: Rows, weight: &Blocks, panels: Range<usize>, y: Cells<f32>, store: Store) {
    let m = rows.scales.len() / rows.blocks;
    let job = Job { rows, weight, family, m, y, add: store == Store::Add };
    panels.for_each(|panel| job.panel(panel));
}

/// Quantised rows: of each block 32 signed bytes by fours, their scale, and the sum of the bytes.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    pub fours: &'a [u32],
    pub scales: &'a [f32],
    pub sums: &'a [f32],
    /// Blocks of a row.
    pub blocks: usize,
}

impl<'a> Rows<'a> {
    fn from(self, row: usize) -> Self {
        let at = row * self.blocks;
        Self { fours: &self.fours[at * FOURS..], scales: &self.scales[at..], sums: &self.sums[at..], ..self }
    }
}

simd_fn! {
/// A row of whole blocks as 8 bits see it.
pub fn quantize_row<S>(x: &[f32], fours: &mut [u32], scales: &mut [f32], sums: &mut [f32]) {
    // 1.5 * 2^23: adding it rounds to the nearest integer, which then stands in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let (x, fours) = (x.as_chunks::<BLOCK>().0, fours.as_chunks_mut::<FOURS>().0);
    for ((x, fours), (scale, sum)) in x.iter().zip(fours).zip(scales.iter_mut().zip(sums)) {
        let mut most = 0f32;
        for i in 0..BLOCK {
            most = if x[i].abs() > most { x[i].abs() } else { most };
        }
        let inverse = if most > 0.0 { 127.0 / most } else { 0.0 };
        *scale = most / 127.0;
        let mut total = 0;
        for four in 0..FOURS {
            let mut word = 0;
            for byte in 0..4 {
                let q = (x[four * 4 + byte] * inverse + ROUND).to_bits() as u8;
                total += i32::from(q as i8);
                word |= u32::from(q) << (8 * byte);
            }
            fours[four] = word;
        }
        *sum = total as f32;
    }
}
}

struct Job<'a> {
    rows: Rows<'a>,
    weight: &'a Blocks,
    family: Family,
    m: usize,
    y: Cells<'a, f32>,
    add: bool,
}

impl Job<'_> {
    fn panel(&self, panel: usize) {
        let parts = Parts::of(self.weight.format.bits() as usize, self.weight.format.has_min());
        let size = self.rows.blocks * parts.end;
        let data = &self.weight.data[panel * size..][..size];
        let tiles = self.m.div_ceil(MAX_ROWS);
        for tile in 0..tiles {
            let (from, to) = (tile * self.m / tiles, (tile + 1) * self.m / tiles);
            self.rows(panel, data, from, to - from);
        }
    }

    /// `rows` rows from row `first` on, times one panel.
    fn rows(&self, panel: usize, data: &[u8], first: usize, rows: usize) {
        let n = self.weight.n;
        let width = tile_width(self.family);
        for offset in (0..PANEL).step_by(width) {
            let column = panel * PANEL + offset;
            if column >= n {
                break;
            }
            let cols = width.min(n - column);
            macro_rules! tiles {
                ($($m:literal x $n:literal),*) => {
                    match (rows, width) {
                        $(($m, $n) => {
                            let sums = self.tile::<$m, $n>(first, data, offset);
                            for (i, sums) in sums.iter().enumerate() {
                                // SAFETY: the caller of `multiply` has these columns for himself.
                                unsafe { self.y.put((first + i) * n + column, &sums[..cols], self.add) };
                            }
                        })*
                        _ => unreachable!("tile of {rows} x {width}"),
                    }
                };
            }
            tiles!(1 x 64, 2 x 64, 3 x 64, 4 x 64, 1 x 16, 2 x 16, 3 x 16, 4 x 16);
        }
    }

    fn tile<const MR: usize, const NR: usize>(&self, first: usize, data: &[u8], offset: usize) -> [[f32; NR]; MR] {
        let rows = self.rows.from(first);
        let format = self.weight.format;
        let args = (self.family, rows, data, offset, f32::from(format.zero()));
        match format {
            Format::Q8_0 => tile_of::<8, 0, MR, NR>(args),
            Format::Q4_0 => tile_of::<4, 0, MR, NR>(args),
            Format::Q4_1 => tile_of::<4, 1, MR, NR>(args),
            Format::Q5_0 => tile_of::<5, 0, MR, NR>(args),
            Format::Q5_1 => tile_of::<5, 1, MR, NR>(args),
        }
    }
}

fn tile_of<const BITS: usize, const MIN: usize, const MR: usize, const NR: usize>(
    (family, rows, data, offset, zero): (Family, Rows, &[u8], usize, f32),
) -> [[f32; NR]; MR] {
    let (parts, blocks) = (Parts::of(BITS, MIN == 1), rows.blocks);
    let whole = (MR - 1) * blocks + blocks;
    assert!(data.len() >= blocks * parts.end && offset + NR <= PANEL, "the tile exceeds its panel");
    assert!(rows.scales.len() >= whole && rows.sums.len() >= whole && rows.fours.len() >= whole * FOURS);
    match family {
        // SAFETY: the family is available only where the CPU has these features, and the operands were checked.
        #[cfg(target_arch = "x86_64")]
        Family::Avx512Bf16 => unsafe { vnni::tile::<BITS, MIN, MR, NR>(rows, data, offset, zero) },
        _ => tile::<BITS, MIN, MR, NR>(family, rows, data, offset, zero),
    }
}

/// Columns of a tile.
fn tile_width(family: Family) -> usize {
    if family == Family::Avx512Bf16 { 64 } else { 16 }
}

/// The value of an f16 that is neither infinite nor NaN, which scales are not: its exponent and mantissa moved to their
/// places in an f32, and the difference of the biases made up by a factor that is exact for subnormals, too.
#[inline(always)]
pub(super) fn widen(bits: u16) -> f32 {
    let bits = u32::from(bits);
    f32::from_bits(((bits & 0x7fff) << 13) | ((bits & 0x8000) << 16)) * f32::from_bits((254 - 15) << 23)
}

/// The fifth bits of four numbers, bits 0 to 3, each as the fifth bit of a byte.
#[inline(always)]
fn spread_bits(bits: u32) -> u32 {
    // The copies that the factor makes do not overlap.
    (bits.wrapping_mul(0x0020_4081) & 0x0101_0101) << 4
}

simd_fn! {
/// MR rows times columns `offset..offset + NR` of a panel.
fn tile<S, const BITS: usize, const MIN: usize, const MR: usize, const NR: usize>(rows: Rows, data: &[u8], offset: usize, zero: f32) -> [[f32; NR]; MR] {
    let parts = Parts::of(BITS, MIN == 1);
    let mut acc = [[0f32; NR]; MR];
    for b in 0..rows.blocks {
        let block = &data[b * parts.end..][..parts.end];
        let mut sums = [[0i32; NR]; MR];
        for four in 0..FOURS {
            let bytes = &block[if BITS == 8 { four } else { four % 4 } * PANEL * 4 + offset * 4..][..NR * 4];
            let mut words = [0u32; NR];
            for j in 0..NR {
                words[j] = u32::from_le_bytes([bytes[j * 4], bytes[j * 4 + 1], bytes[j * 4 + 2], bytes[j * 4 + 3]]);
            }
            if BITS < 8 {
                for j in 0..NR {
                    words[j] = (words[j] >> (four / 4 * 4)) & 0x0f0f_0f0f;
                }
            }
            if BITS == 5 {
                let high = &block[parts.high + offset * 4..][..NR * 4];
                for j in 0..NR {
                    let bits = u32::from_le_bytes([high[j * 4], high[j * 4 + 1], high[j * 4 + 2], high[j * 4 + 3]]);
                    words[j] |= spread_bits((bits >> (4 * four)) & 15);
                }
            }
            for i in 0..MR {
                let x = rows.fours[(i * rows.blocks + b) * FOURS + four].to_le_bytes();
                let [x0, x1, x2, x3] = [i32::from(x[0] as i8), i32::from(x[1] as i8), i32::from(x[2] as i8), i32::from(x[3] as i8)];
                for j in 0..NR {
                    let w = words[j];
                    sums[i][j] += (w & 255) as i32 * x0 + (w >> 8 & 255) as i32 * x1 + (w >> 16 & 255) as i32 * x2 + (w >> 24) as i32 * x3;
                }
            }
        }
        let scales = &block[parts.scales + offset * 2..][..NR * 2];
        for i in 0..MR {
            let at = i * rows.blocks + b;
            let (dx, sum) = (rows.scales[at], rows.sums[at]);
            for j in 0..NR {
                let scale = widen(u16::from_le_bytes([scales[j * 2], scales[j * 2 + 1]]));
                acc[i][j] = S::fma((sums[i][j] - (zero * sum) as i32) as f32, scale * dx, acc[i][j]);
            }
            if MIN == 1 {
                let mins = &block[parts.mins + offset * 2..][..NR * 2];
                for j in 0..NR {
                    acc[i][j] = S::fma(widen(u16::from_le_bytes([mins[j * 2], mins[j * 2 + 1]])), dx * sum, acc[i][j]);
                }
            }
        }
    }
    acc
}
}

/// The same with the CPU's dot products of bytes: unsigned times signed, four to a lane, exact.
#[cfg(target_arch = "x86_64")]
mod vnni {
    use std::arch::x86_64::*;

    use super::super::aligned::prefetch;
    use super::{FOURS, PANEL, Parts, Rows};

    /// Bytes ahead of a tile's block that are asked for. One row times 4 or 5 bits is so quick that the hardware's prefetch
    /// alone does better, by a fifth.
    const AHEAD: usize = 8192;

    /// # Safety
    /// The CPU has the features, and `tile_of` has checked the operands.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
    #[allow(clippy::needless_range_loop)] // The form that is unrolled whole.
    pub unsafe fn tile<const BITS: usize, const MIN: usize, const MR: usize, const NR: usize>(
        rows: Rows,
        data: &[u8],
        offset: usize,
        zero: f32,
    ) -> [[f32; NR]; MR] {
        let parts = Parts::of(BITS, MIN == 1);
        let mut out = [[0f32; NR]; MR];
        // NR / 16 vectors of at most four.
        let mut acc = [[_mm512_setzero_ps(); 4]; MR];
        let nibble = _mm512_set1_epi8(15);
        // SAFETY: every block, row and column read lies inside what `tile_of` checked.
        unsafe {
            for b in 0..rows.blocks {
                let block = data.as_ptr().add(b * parts.end);
                let mut sums = [[_mm512_setzero_si512(); 4]; MR];
                for i in 0..MR {
                    let start = -(zero * *rows.sums.get_unchecked(i * rows.blocks + b)) as i32;
                    sums[i] = [_mm512_set1_epi32(start); 4];
                }
                for four in 0..FOURS {
                    let stored = block.add(if BITS == 8 { four } else { four % 4 } * PANEL * 4 + offset * 4);
                    if BITS == 8 || (MR > 1 && four < 4) {
                        prefetch::<u8, 256>(stored.wrapping_add(AHEAD));
                    }
                    for j in 0..NR / 16 {
                        let mut w = _mm512_loadu_si512(stored.add(j * 64).cast());
                        if BITS < 8 {
                            let shifted = if four < 4 { w } else { _mm512_srli_epi16::<4>(w) };
                            w = _mm512_and_si512(shifted, nibble);
                        }
                        if BITS == 5 {
                            let high = _mm512_loadu_si512(block.add(parts.high + (offset + j * 16) * 4).cast());
                            let bits = _mm512_srl_epi32(high, _mm_cvtsi32_si128(4 * four as i32));
                            let bits = _mm512_and_si512(bits, _mm512_set1_epi32(15));
                            let wide = _mm512_mullo_epi32(bits, _mm512_set1_epi32(0x0020_4081));
                            let ones = _mm512_and_si512(wide, _mm512_set1_epi32(0x0101_0101));
                            w = _mm512_or_si512(w, _mm512_slli_epi32::<4>(ones));
                        }
                        for i in 0..MR {
                            let x = *rows.fours.get_unchecked((i * rows.blocks + b) * FOURS + four);
                            sums[i][j] = _mm512_dpbusd_epi32(sums[i][j], w, _mm512_set1_epi32(x as i32));
                        }
                    }
                }
                for j in 0..NR / 16 {
                    let half =
                        |at: usize| _mm512_cvtph_ps(_mm256_loadu_si256(block.add(at + (offset + j * 16) * 2).cast()));
                    let scale = half(parts.scales);
                    for i in 0..MR {
                        let at = i * rows.blocks + b;
                        let dx = *rows.scales.get_unchecked(at);
                        let factor = _mm512_mul_ps(scale, _mm512_set1_ps(dx));
                        acc[i][j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[i][j]), factor, acc[i][j]);
                        if MIN == 1 {
                            let sum = _mm512_set1_ps(dx * *rows.sums.get_unchecked(at));
                            acc[i][j] = _mm512_fmadd_ps(half(parts.mins), sum, acc[i][j]);
                        }
                    }
                }
            }
            for i in 0..MR {
                for j in 0..NR / 16 {
                    _mm512_storeu_ps(out[i].as_mut_ptr().add(j * 16), acc[i][j]);
                }
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{contexts, numbers};
    use super::super::weight::{Weight, WeightType, multiply};
    use super::*;
    use crate::ops::ctx::Ctx;

    fn pack(format: Format, weight: &[f32], k: usize) -> Weight {
        Weight::pack(&mut Arena::default(), WeightType::Blocks(format), &[weight], k).unwrap()
    }

    #[test]
    fn rows_come_back_as_the_blocks_have_them() {
        let (n, k) = (83, 96);
        let weight = numbers(1, n * k);
        for format in Format::ALL {
            let blocks = Blocks::pack(&mut Arena::default(), format, &[&weight[..40 * k], &weight[40 * k..]], k);
            let mut row = vec![0.0; k];
            for (i, from) in weight.chunks(k).enumerate() {
                blocks.unpack_row(i, &mut row);
                let want: Vec<f32> =
                    from.as_chunks().0.iter().flat_map(|w| format.quantize(w).weights(format)).collect();
                assert_eq!(row, want, "{} row {i}", format.name());
            }
        }
    }

    /// The products of the weights that the blocks stand for, with the rows as 8 bits see them.
    #[test]
    fn products_agree_with_f64() {
        let (m, n, k) = (5, 150, 224);
        for size in [1.0, 1e-3, 1e4] {
            let (weight, x) = (numbers(1, n * k), Vec::from_iter(numbers(2, m * k).iter().map(|x| x * size)));
            for format in Format::ALL {
                let blocks = pack(format, &weight, k);
                for ctx in contexts() {
                    let mut y = vec![f32::NAN; m * n];
                    multiply(&ctx, &x, &blocks, &mut y, Store::Set);
                    let mut row = vec![0.0; k];
                    for j in 0..n {
                        blocks.unpack_row(j, &mut row);
                        for (x, y) in x.chunks(k).zip(y.chunks(n)) {
                            let mut exact = 0f64;
                            for (x, w) in x.chunks(BLOCK).zip(row.chunks(BLOCK)) {
                                let most = x.iter().fold(0f32, |most, x| most.max(x.abs()));
                                let q = |x: f32| f64::from((x * (127.0 / most)).round_ties_even());
                                let sum: f64 = x.iter().zip(w).map(|(x, w)| q(*x) * f64::from(*w)).sum();
                                exact += sum * f64::from(most) / 127.0;
                            }
                            let off = (f64::from(y[j]) - exact).abs();
                            assert!(off < 1e-4 * f64::from(size), "{} {}: {off}", format.name(), ctx.family().name());
                        }
                    }
                }
            }
        }
    }

    /// How far 8-bit rows are from f32 ones, on random numbers: the error that the type costs beside the weights' own.
    #[test]
    fn eight_bits_a_row_cost_less_than_a_hundredth() {
        let (m, n, k) = (4, 64, 512);
        let (weight, x) = (numbers(1, n * k), numbers(2, m * k));
        let ctx = Ctx::cpu(Family::detect());
        let blocks = pack(Format::Q8_0, &weight, k);
        let mut y = vec![0.0; m * n];
        multiply(&ctx, &x, &blocks, &mut y, Store::Set);
        let (mut off, mut all) = (0f64, 0f64);
        for (i, y) in y.iter().enumerate() {
            let pairs = x[i / n * k..][..k].iter().zip(&weight[i % n * k..][..k]);
            let exact: f64 = pairs.map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
            off += (f64::from(*y) - exact).powi(2);
            all += exact.powi(2);
        }
        assert!((off / all).sqrt() < 0.01, "relative error {}", (off / all).sqrt());
    }

    #[test]
    fn a_row_has_the_same_bits_alone_and_beside_others() {
        for ctx in contexts() {
            for format in Format::ALL {
                let (n, k) = (200, 160);
                let (weight, x) = (numbers(1, n * k), numbers(2, 32 * k));
                let blocks = pack(format, &weight, k);
                let mut alone = vec![f32::NAN; 32 * n];
                for (x, y) in x.chunks(k).zip(alone.chunks_mut(n)) {
                    multiply(&ctx, x, &blocks, y, Store::Set);
                }
                for m in 1..=32 {
                    let mut y = vec![f32::NAN; m * n];
                    multiply(&ctx, &x[..m * k], &blocks, &mut y, Store::Set);
                    assert!(y == alone[..m * n], "{} {} {m} rows", ctx.family().name(), format.name());
                }
            }
        }
    }

    #[test]
    fn every_family_computes_the_same_bits_but_for_fused_additions() {
        let (n, k) = (70, 320);
        let (weight, x) = (numbers(1, n * k), numbers(2, 3 * k));
        for format in Format::ALL {
            let blocks = pack(format, &weight, k);
            let results: Vec<Vec<f32>> = contexts()
                .filter(|ctx| ctx.family() != Family::Portable)
                .map(|ctx| {
                    let mut y = vec![f32::NAN; 3 * n];
                    multiply(&ctx, &x, &blocks, &mut y, Store::Set);
                    y
                })
                .collect();
            assert!(results.iter().all(|y| *y == results[0]), "{}", format.name());
        }
    }
}
