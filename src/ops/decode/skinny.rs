//! The product of a few rows with a packed weight of f32 or bf16: the matrix product of decoding, for 1 row or for 64.
//!
//! Called through `weight` by every op of the decode list. Batch invariance is kept here: each output is one chain over k in
//! index order, whatever the number of rows, the tile it falls into or the number of threads, so a row's result has the
//! same bits alone and beside others. Latency is hidden by several columns and rows in a tile, never by splitting k.
//! Weights lie in panels `[n / 64][k][64]` (the last one narrower), so one row streams them once, front to back; with
//! more rows a panel stays in the second-level cache while the row tiles pass over it, so memory is read once too.
//! With bf16 weights the rows are rounded to bf16 as well.

use std::ops::Range;

use super::aligned::{Aligned, Arena, Plain, prefetch};
use super::cells::Cells;
use super::weight::PANEL;
use crate::ops::gemm::{Bf16x2, Factor, Store};
use crate::ops::simd::{Family, simd_fn};

/// The last panel is as wide as the columns left, rounded up to this; every tile width divides one of the two.
const LANES: usize = 16;

/// A factor that the tiles of decoding multiply.
pub trait Lane: Factor + Plain {
    /// The steps of k that an element holds, back as f32.
    fn values(self) -> [f32; 2];

    /// The element with another number at that step.
    fn with(self, step: usize, x: f32) -> Self;

    /// MR rows `k` elements long times NR columns of a panel. Meanwhile as much from `ahead` on is asked for.
    fn rows_tile<const MR: usize, const NR: usize>(
        family: Family,
        x: &[Self],
        k: usize,
        panel: &[Self],
        stride: usize,
        ahead: *const Self,
    ) -> [[f32; NR]; MR];
}

impl Lane for f32 {
    fn values(self) -> [f32; 2] {
        [self, 0.0]
    }

    fn with(self, _: usize, x: f32) -> f32 {
        x
    }

    fn rows_tile<const MR: usize, const NR: usize>(
        family: Family,
        x: &[f32],
        k: usize,
        panel: &[f32],
        stride: usize,
        ahead: *const f32,
    ) -> [[f32; NR]; MR] {
        tile::<f32, MR, NR>(family, x, k, panel, stride, ahead)
    }
}

impl Lane for Bf16x2 {
    fn values(self) -> [f32; 2] {
        [f32::from_bits(self << 16), f32::from_bits(self & 0xffff_0000)]
    }

    #[inline(always)]
    fn with(self, step: usize, x: f32) -> u32 {
        let both = Bf16x2::new(x, x);
        let half = 0xffff << (16 * step);
        (self & !half) | (both & half)
    }

    fn rows_tile<const MR: usize, const NR: usize>(
        family: Family,
        x: &[u32],
        k: usize,
        panel: &[u32],
        stride: usize,
        ahead: *const u32,
    ) -> [[f32; NR]; MR] {
        match family {
            #[cfg(target_arch = "x86_64")]
            Family::Avx512Bf16 if NR.is_multiple_of(16) => dot_tile::<MR, NR>(x, k, panel, stride, ahead),
            _ => tile::<u32, MR, NR>(family, x, k, panel, stride, ahead),
        }
    }
}

simd_fn! {
/// A row by pairs.
pub fn round_row<S>(x: &[f32], row: &mut [u32]) {
    for (x, pair) in x.chunks(2).zip(row) {
        *pair = Bf16x2::new(x[0], x.get(1).copied().unwrap_or(0.0));
    }
}
}

/// A weight (n, k) packed for `multiply`; made once when a model is loaded.
pub struct Panels<E> {
    data: Aligned<E>,
    n: usize,
    /// Elements of a row.
    k: usize,
    /// Columns of the weight.
    inputs: usize,
}

impl<E: Lane> Panels<E> {
    /// Packs row-major matrices of `inputs` columns, one below the other.
    pub fn pack(arena: &mut Arena, parts: &[&[f32]], inputs: usize) -> Self {
        let n: usize = parts.iter().map(|part| part.len() / inputs).sum();
        assert!(parts.iter().all(|part| part.len() % inputs == 0), "each part has rows of {inputs}");
        let k = inputs.div_ceil(E::STEPS);
        let mut panels = Self { data: arena.zeros(n.div_ceil(LANES) * LANES * k), n, k, inputs };
        for (i, row) in parts.iter().flat_map(|part| part.chunks_exact(inputs)).enumerate() {
            let (start, width) = panels.place(i);
            for (to, from) in panels.data[start..].iter_mut().step_by(width).zip(row.chunks(E::STEPS)) {
                *to = E::new(from[0], from.get(1).copied().unwrap_or(0.0));
            }
        }
        panels
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
        self.data.len() * 4
    }

    /// Copies row `i` of the weight: a token's vector, when the table is the head too.
    pub fn unpack_row(&self, i: usize, row: &mut [f32]) {
        assert!(i < self.n && row.len() == self.inputs, "row {i} of {} x {}", self.n, self.inputs);
        let (start, width) = self.place(i);
        for (to, from) in row.chunks_mut(E::STEPS).zip(self.data[start..].iter().step_by(width)) {
            to.copy_from_slice(&from.values()[..to.len()]);
        }
    }

    /// Where row `i` starts and how far apart its elements lie.
    fn place(&self, i: usize) -> (usize, usize) {
        let panel = i / PANEL;
        (panel * PANEL * self.k + i % PANEL, self.width(panel))
    }

    /// Elements of a row.
    pub fn row_len(&self) -> usize {
        self.k
    }

    fn width(&self, panel: usize) -> usize {
        PANEL.min((self.n - panel * PANEL).div_ceil(LANES) * LANES)
    }
}

/// The columns that `panels` hold of y (m, n) = x (m, k) W^T, or y + x W^T.
///
/// # Safety
/// Nobody else reads or writes these columns meanwhile.
pub unsafe fn multiply<E: Lane>(
    family: Family,
    x: &[E],
    weight: &Panels<E>,
    panels: Range<usize>,
    y: Cells<f32>,
    store: Store,
) {
    let m = x.len() / weight.k;
    let job = Job { x, weight, family, m, y, add: store == Store::Add };
    job.panels(panels);
}

struct Job<'a, E> {
    x: &'a [E],
    weight: &'a Panels<E>,
    family: Family,
    m: usize,
    y: Cells<'a, f32>,
    add: bool,
}

impl<E: Lane> Job<'_, E> {
    fn panels(&self, panels: Range<usize>) {
        for panel in panels {
            let (k, width) = (self.weight.k, self.weight.width(panel));
            let data = &self.weight.data[panel * PANEL * k..][..width * k];
            let tiles = self.m.div_ceil(max_rows(self.family));
            for tile in 0..tiles {
                // Tiles of nearly equal height: one row left over would run at a fraction of the speed.
                let (from, to) = (tile * self.m / tiles, (tile + 1) * self.m / tiles);
                self.rows(panel, data, from, to - from);
            }
        }
    }

    /// `rows` rows from row `first` on, times one panel.
    fn rows(&self, panel: usize, data: &[E], first: usize, rows: usize) {
        let (n, k, width) = (self.weight.n, self.weight.k, self.weight.width(panel));
        let x = &self.x[first * k..][..rows * k];
        let wide = tile_width(self.family, rows);
        let tile_width = if width.is_multiple_of(wide) { wide } else { LANES };
        for offset in (0..width).step_by(tile_width) {
            let column = panel * PANEL + offset;
            if column >= n {
                break;
            }
            let cols = tile_width.min(n - column);
            let ahead = data[offset..].as_ptr().wrapping_add(ahead(rows));
            macro_rules! tiles {
                ($($m:literal x $n:literal),*) => {
                    match (rows, tile_width) {
                        $(($m, $n) => {
                            let sums = <E as Lane>::rows_tile::<$m, $n>(self.family, x, k, &data[offset..], width, ahead);
                            for (i, sums) in sums.iter().enumerate() {
                                // SAFETY: the caller of `multiply` has these columns for himself.
                                unsafe { self.y.put((first + i) * n + column, &sums[..cols], self.add) };
                            }
                        })*
                        _ => unreachable!("tile of {rows} x {tile_width}"),
                    }
                };
            }
            tiles!(1 x 64, 2 x 64, 3 x 64, 4 x 64, 5 x 64, 6 x 64, 1 x 32, 2 x 32, 1 x 16, 2 x 16, 3 x 16, 4 x 16,
                   5 x 16, 6 x 16, 7 x 32, 8 x 32, 7 x 16, 8 x 16, 3 x 8, 4 x 8);
        }
    }
}

/// Rows of the highest tile.
fn max_rows(family: Family) -> usize {
    match family {
        Family::Avx512Bf16 | Family::Avx512 => 8,
        Family::Portable => 4,
        _ => 6,
    }
}

/// Columns of a tile of that many rows: enough chains to hide the latency of fma, few enough for the registers.
fn tile_width(family: Family, rows: usize) -> usize {
    match (family, rows) {
        (Family::Avx512Bf16 | Family::Avx512, 7..) => 32,
        (Family::Avx512Bf16 | Family::Avx512, _) => 64,
        (Family::Portable, 1) => 32,
        (Family::Portable, 2) => 16,
        (Family::Portable, _) => 8,
        (_, 1) => 64,
        (_, 2) => 32,
        _ => 16,
    }
}

/// Panics unless a tile of MR x NR lies inside its operands; the tiles rely on it.
#[inline(always)]
fn check<E, const MR: usize, const NR: usize>(x: &[E], k: usize, panel: &[E], stride: usize) {
    assert!(k == 0 || x.len() >= MR * k && panel.len() >= (k - 1) * stride + NR, "the tile exceeds its operands");
}

simd_fn! {
/// MR rows times NR columns of a panel. Constant bounds and nothing that can fail inside the loops, so that `acc` lives
/// in registers (see `gemm::tile`).
#[allow(clippy::needless_range_loop)] // The form that is unrolled whole.
fn tile<S, type E: Factor, const MR: usize, const NR: usize>(x: &[E], k: usize, panel: &[E], stride: usize, ahead: *const E) -> [[f32; NR]; MR] {
    let mut acc = [[0f32; NR]; MR];
    check::<E, MR, NR>(x, k, panel, stride);
    let (x, panel) = (x.as_ptr(), panel.as_ptr());
    for p in 0..k {
        // SAFETY: p < k, i < MR: the largest indices are those checked above.
        unsafe {
            let w = &*panel.add(p * stride).cast::<[E; NR]>();
            prefetch::<E, NR>(ahead.wrapping_add(p * stride));
            for i in 0..MR {
                let x = *x.add(i * k + p);
                for j in 0..NR {
                    acc[i][j] = E::dot::<S>(x, w[j], acc[i][j]);
                }
            }
        }
    }
    acc
}
}

/// `tile` of bf16 by the CPU's dot products (see `gemm::tile::dot_tile`).
#[cfg(target_arch = "x86_64")]
fn dot_tile<const MR: usize, const NR: usize>(
    x: &[u32],
    k: usize,
    panel: &[u32],
    stride: usize,
    ahead: *const u32,
) -> [[f32; NR]; MR] {
    check::<u32, MR, NR>(x, k, panel, stride);
    // SAFETY: the family that leads here is available only where the CPU has these features, and the operands were checked.
    unsafe { dot_tile_inner::<MR, NR>(x, k, panel, stride, ahead) }
}

/// # Safety
/// The CPU has the features, and `check` passed.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
#[allow(clippy::needless_range_loop)] // The form that is unrolled whole.
unsafe fn dot_tile_inner<const MR: usize, const NR: usize>(
    x: &[u32],
    k: usize,
    panel: &[u32],
    stride: usize,
    ahead: *const u32,
) -> [[f32; NR]; MR] {
    use std::arch::x86_64::{
        __m512bh, __m512i, _mm512_dpbf16_ps, _mm512_loadu_si512, _mm512_set1_epi32, _mm512_setzero_ps, _mm512_storeu_ps,
    };
    // Both types are sixteen words; the conversion costs nothing.
    let pairs = |x: __m512i| unsafe { std::mem::transmute::<__m512i, __m512bh>(x) };
    let (x, panel) = (x.as_ptr(), panel.as_ptr());
    // NR / 16 vectors of at most four.
    let mut acc = [[_mm512_setzero_ps(); 4]; MR];
    let mut sums = [[0f32; NR]; MR];
    // SAFETY: i < MR, p < k and j < NR / 16, so every access ends within what `check` found inside the operands.
    unsafe {
        for p in 0..k {
            prefetch::<u32, NR>(ahead.wrapping_add(p * stride));
            for j in 0..NR / 16 {
                let w = pairs(_mm512_loadu_si512(panel.add(p * stride + j * 16).cast()));
                for i in 0..MR {
                    let x = pairs(_mm512_set1_epi32(*x.add(i * k + p) as i32));
                    acc[i][j] = _mm512_dpbf16_ps(acc[i][j], x, w);
                }
            }
        }
        for i in 0..MR {
            for j in 0..NR / 16 {
                _mm512_storeu_ps(sums[i].as_mut_ptr().add(j * 16), acc[i][j]);
            }
        }
    }
    sums
}

/// How many elements ahead a tile of so many rows asks for its panel: as far as it gets while a line comes from memory. With
/// few rows 32 KB would push the panel out of the first-level cache before it is used (a quarter slower); with eight, whose
/// steps take longer, 16 KB is a tenth slower.
fn ahead(rows: usize) -> usize {
    if rows <= 6 { 4096 } else { 8192 }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{contexts, numbers};
    use super::super::weight::{Weight, WeightType, multiply};
    use super::*;

    fn same_bits_alone_and_beside_others(kind: WeightType) {
        for ctx in contexts() {
            for (n, k) in [(1, 1), (16, 9), (40, 24), (64, 33), (130, 70), (200, 400)] {
                let (weight, x) = (numbers(1, n * k), numbers(2, 33 * k));
                let panels = Weight::pack(&mut Arena::default(), kind, &[&weight], k).unwrap();
                let mut alone = vec![f32::NAN; 33 * n];
                for (x, y) in x.chunks(k).zip(alone.chunks_mut(n)) {
                    multiply(&ctx, x, &panels, y, Store::Set);
                }
                for m in 1..=33 {
                    let mut y = vec![f32::NAN; m * n];
                    multiply(&ctx, &x[..m * k], &panels, &mut y, Store::Set);
                    assert!(y == alone[..m * n], "{} {m} rows, {n} x {k}", ctx.family().name());
                    // Added to something, the product itself must still be the same.
                    multiply(&ctx, &x[..m * k], &panels, &mut y, Store::Add);
                    assert!(y.iter().zip(&alone).all(|(y, once)| *y == once + once), "{m} rows added");
                }
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_alone_and_beside_others() {
        same_bits_alone_and_beside_others(WeightType::F32);
        same_bits_alone_and_beside_others(WeightType::Bf16);
    }

    #[test]
    fn bf16_products_agree_with_f64_of_rounded_factors() {
        for ctx in contexts() {
            for (m, n, k) in [(1, 70, 33), (3, 150, 220), (8, 64, 1)] {
                let (weight, x) = (numbers(1, n * k), numbers(2, m * k));
                let panels = Weight::pack(&mut Arena::default(), WeightType::Bf16, &[&weight], k).unwrap();
                let mut y = vec![f32::NAN; m * n];
                multiply(&ctx, &x, &panels, &mut y, Store::Set);
                let rounded = |x: f32| f64::from(half::bf16::from_f32(x).to_f32());
                for (i, y) in y.iter().enumerate() {
                    let pairs = x[i / n * k..][..k].iter().zip(&weight[i % n * k..][..k]);
                    let exact: f64 = pairs.map(|(x, w)| rounded(*x) * rounded(*w)).sum();
                    assert!((f64::from(*y) - exact).abs() < 1e-4, "{}: {y} against {exact}", ctx.family().name());
                }
            }
        }
    }

    #[test]
    fn products_agree_with_f64_and_each_output_is_one_chain() {
        for ctx in contexts() {
            let (m, n, k) = (3, 150, 220);
            let (weight, x) = (numbers(1, n * k), numbers(2, m * k));
            let parts = [&weight[..70 * k], &weight[70 * k..]];
            let panels = Weight::pack(&mut Arena::default(), WeightType::F32, &parts, k).unwrap();
            let mut y = vec![0.0; m * n];
            multiply(&ctx, &x, &panels, &mut y, Store::Set);
            for (i, y) in y.iter().enumerate() {
                let pairs = || x[i / n * k..][..k].iter().zip(&weight[i % n * k..][..k]);
                let exact: f64 = pairs().map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                assert!((f64::from(*y) - exact).abs() < 1e-4, "{y} against {exact}");
                let chain = pairs().fold(0f32, |sum, (x, w)| match ctx.family() {
                    Family::Portable => x * w + sum,
                    _ => x.mul_add(*w, sum),
                });
                assert_eq!(*y, chain, "{}", ctx.family().name());
            }
        }
    }

    fn rows_come_back<E: Lane>(rounded: impl Fn(f32) -> f32) {
        let (n, k) = (83, 7);
        let weight = numbers(1, n * k);
        let panels = Panels::<E>::pack(&mut Arena::default(), &[&weight], k);
        let mut row = vec![0.0; k];
        for (i, want) in weight.chunks(k).enumerate() {
            panels.unpack_row(i, &mut row);
            assert!(row.iter().zip(want).all(|(row, want)| *row == rounded(*want)), "row {i}");
        }
    }

    #[test]
    fn rows_come_back_out_of_the_panels() {
        rows_come_back::<f32>(|x| x);
        rows_come_back::<Bf16x2>(|x| half::bf16::from_f32(x).to_f32());
    }
}
