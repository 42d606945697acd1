//! What a product multiplies: f32, or two bf16 of neighbouring steps of k in one word, as the dot-product instructions
//! take them.

use std::cell::RefCell;

use crate::ops::ctx::Pooled;
use crate::ops::simd::{Family, Simd};

use super::Matrix;
use super::tile::{self, RowTiles};

/// Two bf16 along k, the earlier one in the low half.
pub type Bf16x2 = u32;

/// A 32-bit element of panels and tiles, which holds `STEPS` steps of k.
pub trait Factor: Pooled {
    const STEPS: usize;

    /// An element of two neighbouring steps; with `STEPS` of one the second is ignored.
    fn new(first: f32, second: f32) -> Self;

    /// The elements of a matrix that the tiles can read where it lies.
    fn in_place(a: Matrix<'_>) -> Option<&[Self]>;

    /// c plus the products of the steps of a and b.
    fn dot<S: Simd>(a: Self, b: Self, c: f32) -> f32;

    /// The register tile of MR rows and NR columns (see `tile`).
    fn tile<const MR: usize, const NR: usize>(
        family: Family,
        a: RowTiles<Self>,
        panel: &[Self],
        c: &mut [f32],
        stride: usize,
        add: bool,
    );

    /// Runs `f` on `len` elements that this thread keeps for the next time; `f` must not hand work to the pool.
    fn with_scratch(len: usize, f: impl FnOnce(&mut [Self]));
}

impl Factor for f32 {
    const STEPS: usize = 1;

    #[inline(always)]
    fn new(first: f32, _: f32) -> f32 {
        first
    }

    fn in_place(a: Matrix<'_>) -> Option<&[f32]> {
        (a.col_stride == 1).then_some(a.data)
    }

    #[inline(always)]
    fn dot<S: Simd>(a: f32, b: f32, c: f32) -> f32 {
        S::fma(a, b, c)
    }

    fn tile<const MR: usize, const NR: usize>(
        family: Family,
        a: RowTiles<f32>,
        panel: &[f32],
        c: &mut [f32],
        stride: usize,
        add: bool,
    ) {
        tile::full_tile::<f32, MR, NR>(family, a, panel, c, stride, add);
    }

    fn with_scratch(len: usize, f: impl FnOnce(&mut [f32])) {
        thread_local!(static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) });
        SCRATCH.with_borrow_mut(|scratch| f(grown(scratch, len)));
    }
}

impl Factor for Bf16x2 {
    const STEPS: usize = 2;

    #[inline(always)]
    fn new(first: f32, second: f32) -> u32 {
        (round(first) >> 16) | round(second)
    }

    fn in_place(_: Matrix<'_>) -> Option<&[u32]> {
        None
    }

    #[inline(always)]
    fn dot<S: Simd>(a: u32, b: u32, c: f32) -> f32 {
        let low = S::fma(f32::from_bits(a << 16), f32::from_bits(b << 16), c);
        S::fma(f32::from_bits(a & HIGH), f32::from_bits(b & HIGH), low)
    }

    fn tile<const MR: usize, const NR: usize>(
        family: Family,
        a: RowTiles<u32>,
        panel: &[u32],
        c: &mut [f32],
        stride: usize,
        add: bool,
    ) {
        match family {
            #[cfg(target_arch = "x86_64")]
            Family::Avx512Bf16 => tile::dot_tile::<MR, NR>(a, panel, c, stride, add),
            _ => tile::full_tile::<u32, MR, NR>(family, a, panel, c, stride, add),
        }
    }

    fn with_scratch(len: usize, f: impl FnOnce(&mut [u32])) {
        thread_local!(static SCRATCH: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) });
        SCRATCH.with_borrow_mut(|scratch| f(grown(scratch, len)));
    }
}

fn grown<T: Copy + Default>(scratch: &mut Vec<T>, len: usize) -> &mut [T] {
    if scratch.len() < len {
        scratch.resize(len, T::default());
    }
    &mut scratch[..len]
}

const HIGH: u32 = 0xffff_0000;

/// x rounded to bf16, in the high half; a NaN stays one.
#[inline(always)]
fn round(x: f32) -> u32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    let quiet = bits | 0x0040_0000;
    (if x.is_nan() { quiet } else { rounded }) & HIGH
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_that_of_half_bf16() {
        let ends = [0.0, -0.0, 1.0, f32::MAX, f32::MIN_POSITIVE, 1e-40, f32::INFINITY, f32::NEG_INFINITY];
        let many = (0..200_000u32).map(|i| f32::from_bits(i.wrapping_mul(0x9e37_79b9)));
        for x in ends.into_iter().chain(many) {
            let want = half::bf16::from_f32(x);
            let got = half::bf16::from_bits((round(x) >> 16) as u16);
            assert!(got == want || got.is_nan() && want.is_nan(), "{x} became {got}, not {want}");
        }
    }
}
