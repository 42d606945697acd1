//! Which vector instructions the CPU code uses, chosen at run time.
//!
//! `simd_fn!` compiles one plain Rust body for every family: under AVX-512, under AVX2 with FMA, and for the baseline
//! (which is NEON on aarch64), so an op has one source and no intrinsics. Called by every op that has a CPU loop.
//! A family fixes every rounding: two runs on one family agree bit for bit, two families need not.

use crate::error::{Error, Result};

/// A set of CPU kernels. The names are those of `--cpu-kernels`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// AVX-512 with dot products of bf16 and of bytes; f32 as with `Avx512`, bit for bit.
    Avx512Bf16,
    Avx512,
    Avx2,
    Neon,
    Portable,
}

impl Family {
    pub const ALL: [Family; 5] = [Family::Avx512Bf16, Family::Avx512, Family::Avx2, Family::Neon, Family::Portable];

    pub fn name(self) -> &'static str {
        match self {
            Family::Avx512Bf16 => "avx512bf16",
            Family::Avx512 => "avx512",
            Family::Avx2 => "avx2",
            Family::Neon => "neon",
            Family::Portable => "portable",
        }
    }

    /// Whether this machine can run the family.
    pub fn available(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Family::Avx512Bf16 => {
                Family::Avx512.available()
                    && is_x86_feature_detected!("avx512bf16")
                    && is_x86_feature_detected!("avx512vnni")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Family::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
            }
            #[cfg(target_arch = "x86_64")]
            Family::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(not(target_arch = "x86_64"))]
            Family::Avx512Bf16 | Family::Avx512 | Family::Avx2 => false,
            Family::Neon => cfg!(target_arch = "aarch64"),
            Family::Portable => true,
        }
    }

    /// The fastest family of this machine.
    pub fn detect() -> Self {
        *Self::ALL.iter().find(|f| f.available()).expect("portable is always available")
    }

    /// The family of that name, if this machine can run it.
    pub fn named(name: &str) -> Result<Self> {
        let family = Self::ALL.into_iter().find(|f| f.name() == name).ok_or_else(|| {
            let names: Vec<_> = Self::ALL.iter().map(|f| f.name()).collect();
            Error::usage(format!("unknown CPU kernels `{name}`")).with_hint(format!("one of: {}", names.join(", ")))
        })?;
        if !family.available() {
            return Err(Error::usage(format!("this CPU cannot run the `{name}` kernels"))
                .with_hint(format!("leave the flag out to get `{}`", Self::detect().name())));
        }
        Ok(family)
    }
}

/// How a body multiplies and adds: fused where the family has the instruction. Without it `f32::mul_add` would call a
/// library function for every element.
pub trait Simd: Copy {
    fn fma(a: f32, b: f32, c: f32) -> f32;
}

#[derive(Clone, Copy)]
pub struct Fused;
#[derive(Clone, Copy)]
pub struct Plain;

impl Simd for Fused {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

impl Simd for Plain {
    #[inline(always)]
    fn fma(a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }
}

/// `simd_fn! { pub fn name<S>(args) -> R { body } }` makes `pub fn name(family, args) -> R` that runs the body compiled
/// for that family. Inside, `S: Simd` gives `S::fma`; helpers called from the body must be `#[inline(always)]`, or
/// they are compiled for the baseline, and so are closures given to iterator methods (`for_each`, `map`): write loops.
/// Types, as `type E: Bound`, and const parameters may follow `S`.
macro_rules! simd_fn {
    ($(#[$meta:meta])* $vis:vis fn $name:ident<$s:ident $(, type $t:ident: $bound:ident)* $(, const $g:ident: usize)*>
     ($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name<$($t: $bound,)* $(const $g: usize),*>(family: $crate::ops::simd::Family, $($arg: $ty),*) $(-> $ret)? {
            // Loops over indices with constant bounds are what becomes vector code; not every body multiplies.
            #[allow(clippy::too_many_arguments, clippy::needless_range_loop, clippy::extra_unused_type_parameters)]
            #[inline(always)]
            fn body<$s: $crate::ops::simd::Simd $(, $t: $bound)* $(, const $g: usize)*>($($arg: $ty),*) $(-> $ret)? $body

            #[cfg(target_arch = "x86_64")]
            #[allow(clippy::too_many_arguments)]
            #[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")]
            fn avx512<$($t: $bound,)* $(const $g: usize),*>($($arg: $ty),*) $(-> $ret)? {
                body::<$crate::ops::simd::Fused $(, $t)* $(, $g)*>($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[allow(clippy::too_many_arguments)]
            #[target_feature(enable = "avx2,fma")]
            fn avx2<$($t: $bound,)* $(const $g: usize),*>($($arg: $ty),*) $(-> $ret)? {
                body::<$crate::ops::simd::Fused $(, $t)* $(, $g)*>($($arg),*)
            }

            match family {
                // SAFETY: the family comes from a `Ctx`, whose constructor asserts `available`: this CPU has every
                // feature enabled here.
                #[cfg(target_arch = "x86_64")]
                $crate::ops::simd::Family::Avx512Bf16 | $crate::ops::simd::Family::Avx512 => unsafe { avx512::<$($t,)* $($g),*>($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::ops::simd::Family::Avx2 => unsafe { avx2::<$($t,)* $($g),*>($($arg),*) },
                $crate::ops::simd::Family::Neon => body::<$crate::ops::simd::Fused $(, $t)* $(, $g)*>($($arg),*),
                _ => body::<$crate::ops::simd::Plain $(, $t)* $(, $g)*>($($arg),*),
            }
        }
    };
}
pub(crate) use simd_fn;

/// e^x to 1 ulp or two, without branches, so that a loop over it becomes vector code. Below -87.3 it gives 0 exactly
/// (masked scores vanish), above 88.7 infinity. Cephes' expf polynomial with the two-constant reduction by ln 2.
#[inline(always)]
pub fn exp<S: Simd>(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    // 1.5 * 2^23: adding and subtracting it rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    let clamped = x.clamp(-87.3, 88.8);
    let shifted = S::fma(clamped, LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = S::fma(n, -0.693_359_4, clamped);
    let r = S::fma(n, 2.121_944_4e-4, r);
    let p = S::fma(r, 1.987_569_1e-4, 1.398_2e-3);
    let p = S::fma(p, r, 8.333_452e-3);
    let p = S::fma(p, r, 4.166_579_6e-2);
    let p = S::fma(p, r, 1.666_666_5e-1);
    let p = S::fma(p, r, 0.5);
    let p = S::fma(p * r, r, r) + 1.0;
    // 2^n as two factors, so that neither exponent field overflows at either end.
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = n >> 1;
    let rest = n.wrapping_sub(half);
    let scale = |k: i32| f32::from_bits((k.wrapping_add(127) as u32) << 23);
    let y = p * scale(half) * scale(rest);
    if x < -87.3 { 0.0 } else { y }
}

/// 1 / (1 + e^-x).
#[inline(always)]
pub fn sigmoid<S: Simd>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<S>(-x))
}

/// The number of partial sums a dot product or a sum keeps: fixed, so that every family adds in the same order.
pub const LANES: usize = 16;

/// Σ a·b in sixteen chains, added pairwise at the end.
#[inline(always)]
pub fn dot<S: Simd>(a: &[f32], b: &[f32]) -> f32 {
    let mut acc = [0f32; LANES];
    let (a_main, a_tail) = a.as_chunks::<LANES>();
    let (b_main, b_tail) = b.as_chunks::<LANES>();
    for (x, y) in a_main.iter().zip(b_main) {
        for i in 0..LANES {
            acc[i] = S::fma(x[i], y[i], acc[i]);
        }
    }
    for (i, (x, y)) in a_tail.iter().zip(b_tail).enumerate() {
        acc[i] = S::fma(*x, *y, acc[i]);
    }
    fold(acc)
}

/// Σ a in sixteen chains.
#[inline(always)]
pub fn sum(a: &[f32]) -> f32 {
    let mut acc = [0f32; LANES];
    let (main, tail) = a.as_chunks::<LANES>();
    for x in main {
        for i in 0..LANES {
            acc[i] += x[i];
        }
    }
    for (i, x) in tail.iter().enumerate() {
        acc[i] += x;
    }
    fold(acc)
}

/// The largest element, or -infinity of none. A NaN may be passed over.
#[inline(always)]
pub fn max(a: &[f32]) -> f32 {
    let mut acc = [f32::NEG_INFINITY; LANES];
    let (main, tail) = a.as_chunks::<LANES>();
    for x in main {
        for i in 0..LANES {
            acc[i] = if x[i] > acc[i] { x[i] } else { acc[i] };
        }
    }
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut most = [0f32; 8];
    for i in 0..8 {
        most[i] = larger(acc[i], acc[i + 8]);
    }
    for i in 0..4 {
        most[i] = larger(most[i], most[i + 4]);
    }
    let most = larger(larger(most[0], most[2]), larger(most[1], most[3]));
    tail.iter().fold(most, |most, x| larger(most, *x))
}

/// The sum of the chains, pairwise.
#[inline(always)]
pub fn fold(acc: [f32; LANES]) -> f32 {
    let mut a = [0f32; 8];
    for i in 0..8 {
        a[i] = acc[i] + acc[i + 8];
    }
    for i in 0..4 {
        a[i] += a[i + 4];
    }
    (a[0] + a[2]) + (a[1] + a[3])
}

#[cfg(test)]
mod tests {
    use super::*;

    simd_fn! { fn exp_all<S>(x: &mut [f32]) { for v in x { *v = exp::<S>(*v); } } }
    simd_fn! { fn dot_all<S>(a: &[f32], b: &[f32]) -> f32 { dot::<S>(a, b) } }

    #[test]
    fn exp_is_close_everywhere_and_zero_far_below() {
        for family in Family::ALL.into_iter().filter(|f| f.available()) {
            let x: Vec<f32> = (-8700..8870).map(|i| i as f32 * 0.01).collect();
            let mut y = x.clone();
            exp_all(family, &mut y);
            for (x, y) in x.iter().zip(&y) {
                let exact = f64::from(*x).exp();
                assert!((f64::from(*y) / exact - 1.0).abs() < 3e-7, "{}: e^{x} = {y}, exact {exact}", family.name());
            }
            let mut ends = [-88.0, -1e30, f32::NEG_INFINITY, 0.0, 100.0, f32::INFINITY];
            exp_all(family, &mut ends);
            assert_eq!(ends[..4], [0.0, 0.0, 0.0, 1.0]);
            assert!(ends[4] > 1e38 && ends[5] > 1e38);
            let mut nan = [f32::NAN];
            exp_all(family, &mut nan);
            assert!(nan[0].is_nan(), "a NaN must stay visible");
        }
    }

    #[test]
    fn dot_takes_every_length() {
        for family in Family::ALL.into_iter().filter(|f| f.available()) {
            for n in 0..70 {
                let a: Vec<f32> = (0..n).map(|i| i as f32).collect();
                let exact: f32 = a.iter().map(|x| x * x).sum();
                assert_eq!(dot_all(family, &a, &a), exact, "length {n}");
            }
        }
    }
}
