//! Gumbel noise of sampling: g = -ln(-ln u), u from the counter (row seed, position, token id).
//!
//! Called by the sampler; it belongs to the ops because a device that samples must make the same bits. Therefore the
//! logarithm is a polynomial in plain f32 products and sums, in this order, never fused.

use crate::ops::simd::simd_fn;
use crate::random::{Stream, unit};

/// Ids that `fill` writes at a time; its first id must be a multiple of it.
pub const BLOCK: usize = 64;

/// Noise of the ids `first..first + 64` at a position.
pub fn fill(family: crate::ops::simd::Family, stream: Stream, position: u64, first: u32, noise: &mut [f32; BLOCK]) {
    debug_assert_eq!(first as usize % BLOCK, 0);
    fill_block(family, stream, position, first / 4, noise);
}

/// The noise of one id at a position.
pub fn gumbel(stream: Stream, position: u64, id: u32) -> f32 {
    from_word(stream.word(position, id))
}

simd_fn! {
#[allow(clippy::extra_unused_type_parameters)] // Only plain arithmetic: the bits must be those of every family.
fn fill_block<S>(stream: Stream, position: u64, block: u32, noise: &mut [f32; BLOCK]) {
    let mut words = [0u32; BLOCK];
    for i in 0..BLOCK / 4 {
        let block = stream.block(position, block + i as u32);
        for j in 0..4 {
            words[4 * i + j] = block[j];
        }
    }
    for (noise, word) in noise.iter_mut().zip(words) {
        *noise = from_word(word);
    }
}
}

#[inline(always)]
fn from_word(word: u32) -> f32 {
    -ln(-ln(unit(word)))
}

/// ln x for normal positive x, to 1 ulp or two (Cephes' logf).
#[inline(always)]
fn ln(x: f32) -> f32 {
    // x = m 2^e with m in [sqrt(1/2), sqrt(2)), so that e is 0 and nothing cancels around 1.
    let shifted = x.to_bits().wrapping_sub(std::f32::consts::FRAC_1_SQRT_2.to_bits());
    let e = (shifted as i32 >> 23) as f32;
    let m = f32::from_bits((shifted & 0x007F_FFFF).wrapping_add(std::f32::consts::FRAC_1_SQRT_2.to_bits()));
    let f = m - 1.0;
    let z = f * f;
    let p = 7.037_683_6e-2 * f - 1.151_461e-1;
    let p = p * f + 1.167_699_9e-1;
    let p = p * f - 1.242_014_1e-1;
    let p = p * f + 1.424_932_3e-1;
    let p = p * f - 1.666_805_8e-1;
    let p = p * f + 2.000_071_5e-1;
    let p = p * f - 2.499_999_4e-1;
    let p = p * f + 0.333_333_3;
    let y = p * f * z;
    let y = y - 2.121_944_4e-4 * e;
    let y = y - 0.5 * z;
    f + y + 0.693_359_4 * e
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::simd::Family;
    use crate::random::Purpose;

    #[test]
    fn ln_is_close_where_uniform_numbers_lie_and_above() {
        let mut worst = 0f64;
        for i in (0..1 << 23).step_by(97) {
            let u = unit(i << 9);
            let inner = -ln(u);
            let exact = -f64::from(u).ln();
            worst = worst.max((f64::from(inner) / exact - 1.0).abs());
            let outer = f64::from(ln(inner));
            worst = worst.max((outer - f64::from(inner).ln()).abs() / (1.0 + outer.abs()));
        }
        assert!(worst < 3e-7, "{worst}");
        assert!(ln(unit(0)).is_finite() && ln(-ln(unit(u32::MAX))).is_finite());
    }

    #[test]
    fn every_family_makes_the_same_bits_one_by_one_or_in_blocks() {
        let stream = Stream::new(9, Purpose::Sampling);
        for family in Family::ALL.into_iter().filter(|f| f.available()) {
            let mut noise = [0f32; BLOCK];
            fill(family, stream, 1 << 33, 128, &mut noise);
            for (i, noise) in noise.iter().enumerate() {
                assert_eq!(noise.to_bits(), gumbel(stream, 1 << 33, 128 + i as u32).to_bits(), "{}", family.name());
            }
        }
    }
}
