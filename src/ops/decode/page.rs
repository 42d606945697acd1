//! Keys and values of 64 positions, all key/value heads, in the type that the cache keeps: f32, bf16, or 8 or 4 bits.
//!
//! Made and owned by the tables in `pages`, written by `attend` head by head and read by it in place. Quantised numbers
//! come in groups within one head of one token, each with a scale and a minimum, so that a token which is taken back and
//! written again has the same bits; `attend` expands one head of one page at a time.

use super::aligned::{Aligned, prefetch};
use super::gpu::pool::DevicePage;
use super::quantized::widen;
use super::skinny::Lane;
use crate::error::Result;
use crate::ops::gemm::Bf16x2;
use crate::ops::heads::{Heads, MAX_DIM};
use crate::ops::simd::{Family, simd_fn};

/// Positions of a page. Blocks start at multiples of it, so the order of all sums over keys depends only on (t, W, S).
pub const PAGE: usize = 64;

/// What keys and values are kept in, unless they are quantised. The text depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheType {
    #[default]
    F32,
    Bf16,
}

/// How many bits a number of the cache has, from which position on. The text depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantization {
    /// 8 or 4.
    pub bits: usize,
    /// Numbers that share a scale, within a head.
    pub group: usize,
    /// Positions before this one, rounded up to whole pages, are not quantised.
    pub start: usize,
}

impl Default for Quantization {
    /// 8 bits in groups of 64, from the start.
    fn default() -> Self {
        Self { bits: 8, group: 64, start: 0 }
    }
}

impl Quantization {
    /// Groups of a head.
    fn groups(self, dim: usize) -> usize {
        dim.div_ceil(self.group.min(dim))
    }
}

#[derive(Clone)]
pub(super) enum Page {
    F32(Halves<f32>),
    Bf16(Halves<Bf16x2>),
    Quantized(Quantized),
    /// Any of these in the memory of a GPU.
    Device(DevicePage),
}

impl Page {
    pub(super) fn new(kind: CacheType, quantization: Option<Quantization>, heads: Heads) -> Self {
        match (quantization, kind) {
            (Some(quantization), _) => Page::Quantized(Quantized::new(quantization, heads)),
            (None, CacheType::F32) => Page::F32(Halves::new(heads)),
            (None, CacheType::Bf16) => Page::Bf16(Halves::new(heads)),
        }
    }

    /// Stores key and value (D each) of one head at a slot.
    ///
    /// # Safety
    /// Nobody else reads or writes this head's part meanwhile.
    pub(super) unsafe fn write(&self, head: usize, slot: usize, key: &[f32], value: &[f32]) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Page::F32(halves) => halves.write(head, slot, key, value),
                Page::Bf16(halves) => halves.write(head, slot, key, value),
                Page::Quantized(page) => page.write(head, slot, key, value),
                Page::Device(_) => unreachable!("the CPU's ops work on the CPU's pages"),
            }
        }
    }

    /// Appends all of it to `bytes`.
    pub(super) fn save(&self, bytes: &mut Vec<u8>) -> Result<()> {
        if let Page::Device(page) = self {
            return page.save(bytes);
        }
        self.clone().pieces().iter().for_each(|piece| bytes.extend_from_slice(piece));
        Ok(())
    }

    /// Takes what `save` has appended for a page of its kind from the start of `bytes`; `None` if that is too short.
    pub(super) fn load(&mut self, bytes: &mut &[u8]) -> Option<()> {
        if let Page::Device(page) = self {
            return page.load(bytes);
        }
        for piece in self.pieces() {
            piece.copy_from_slice(bytes.split_off(..piece.len())?);
        }
        Some(())
    }

    /// All of it, piece by piece; a page of a GPU holds the same pieces, one after the other.
    fn pieces(&mut self) -> Vec<&mut [u8]> {
        match self {
            Page::F32(halves) => vec![halves.keys.bytes_mut(), halves.values.bytes_mut()],
            Page::Bf16(halves) => vec![halves.keys.bytes_mut(), halves.values.bytes_mut()],
            Page::Quantized(page) => vec![
                page.keys.bytes_mut(),
                page.values.bytes_mut(),
                page.key_scales.bytes_mut(),
                page.value_scales.bytes_mut(),
            ],
            Page::Device(_) => Vec::new(),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        match self {
            Page::F32(halves) => 4 * (halves.keys.len() + halves.values.len()),
            Page::Bf16(halves) => 4 * (halves.keys.len() + halves.values.len()),
            Page::Quantized(page) => {
                page.keys.len() + page.values.len() + 4 * (page.key_scales.len() + page.value_scales.len())
            }
            Page::Device(page) => page.bytes(),
        }
    }
}

/// An element of the cache: a number, or two bf16 that a dot product takes together.
pub(super) trait Stored: Lane + 'static {
    /// The halves of a page of this type.
    fn of(page: &Page) -> Option<&Halves<Self>>;
}

impl Stored for f32 {
    fn of(page: &Page) -> Option<&Halves<f32>> {
        if let Page::F32(halves) = page { Some(halves) } else { None }
    }
}

impl Stored for Bf16x2 {
    fn of(page: &Page) -> Option<&Halves<Bf16x2>> {
        if let Page::Bf16(halves) = page { Some(halves) } else { None }
    }
}

/// Keys lie `[K][D][64]`, so that 64 scores are one vector loop over D; values lie `[K][64][D]`. In bf16 an element holds two
/// neighbours of the dimension that a product sums over: of D in the keys, of the slots in the values. Slots that no position
/// was written to are zero or stale, never read as visible.
#[derive(Clone)]
pub(super) struct Halves<E: Stored> {
    keys: Aligned<E>,
    values: Aligned<E>,
}

/// Elements of one head's keys and of its values.
pub(super) const fn head_len<E: Stored>(dim: usize) -> (usize, usize) {
    (dim.div_ceil(E::STEPS) * PAGE, dim * (PAGE / E::STEPS))
}

impl<E: Stored> Halves<E> {
    fn new(heads: Heads) -> Self {
        let (keys, values) = head_len::<E>(heads.dim);
        Self { keys: Aligned::zeros(heads.key_value * keys), values: Aligned::zeros(heads.key_value * values) }
    }

    /// # Safety
    /// Nobody else reads or writes this head's part meanwhile.
    unsafe fn write(&self, head: usize, slot: usize, key: &[f32], value: &[f32]) {
        let dim = key.len();
        let (keys, values) = head_len::<E>(dim);
        // SAFETY: the parts of one head, which the caller has for himself.
        let (keys, values) = unsafe {
            let keys = self.keys.cells().part(head * keys, keys);
            (keys, self.values.cells().part(head * values + slot / E::STEPS * dim, dim))
        };
        // Each element of a key lies in a line of its own: ask for all of them before the first store waits for one.
        for line in keys.chunks(PAGE) {
            prefetch::<E, 1>(line.as_ptr().wrapping_add(slot));
        }
        for (to, key) in keys[slot..].iter_mut().step_by(PAGE).zip(key.chunks(E::STEPS)) {
            *to = E::new(key[0], key.get(1).copied().unwrap_or(0.0));
        }
        for (to, value) in values.iter_mut().zip(value) {
            *to = to.with(slot % E::STEPS, *value);
        }
    }

    /// Keys (D, 64) and values (64, D) of one head.
    ///
    /// # Safety
    /// Nobody writes this head's part while they live.
    #[inline(always)]
    pub(super) unsafe fn head(&self, head: usize, dim: usize) -> (&[E], &[E]) {
        let (keys, values) = head_len::<E>(dim);
        // SAFETY: the caller's promise.
        unsafe { (self.keys.cells().read(head * keys, keys), self.values.cells().read(head * values, values)) }
    }

    /// Where the keys of a head lie.
    #[inline(always)]
    pub(super) fn keys_at(&self, head: usize, dim: usize) -> *const E {
        self.keys.as_ptr().wrapping_add(head * head_len::<E>(dim).0)
    }
}

/// Codes in the same order as `Halves`, `[K][D][64]` and `[K][64][D]`, with the scale and the minimum of each group as two f16:
/// `[K][groups][64]` and `[K][64][groups]`. Of 4-bit codes a byte holds number i of a head and, in its high half, number
/// i + D / 2.
#[derive(Clone)]
pub(super) struct Quantized {
    quantization: Quantization,
    keys: Aligned<u8>,
    values: Aligned<u8>,
    key_scales: Aligned<u32>,
    value_scales: Aligned<u32>,
}

impl Quantized {
    fn new(quantization: Quantization, heads: Heads) -> Self {
        let codes = heads.key_value * heads.dim * PAGE * quantization.bits / 8;
        let scales = heads.key_value * quantization.groups(heads.dim) * PAGE;
        Self {
            quantization,
            keys: Aligned::zeros(codes),
            values: Aligned::zeros(codes),
            key_scales: Aligned::zeros(scales),
            value_scales: Aligned::zeros(scales),
        }
    }

    /// Bytes of a head at one position, and its groups.
    fn sizes(&self, dim: usize) -> (usize, usize) {
        (dim * self.quantization.bits / 8, self.quantization.groups(dim))
    }

    /// # Safety
    /// Nobody else reads or writes this head's part meanwhile.
    unsafe fn write(&self, head: usize, slot: usize, key: &[f32], value: &[f32]) {
        let (bytes, groups) = self.sizes(key.len());
        // SAFETY: the parts of one head, which the caller has for himself.
        let (keys, values, key_scales, value_scales) = unsafe {
            (
                self.keys.cells().part(head * bytes * PAGE, bytes * PAGE),
                self.values.cells().part((head * PAGE + slot) * bytes, bytes),
                self.key_scales.cells().part(head * groups * PAGE, groups * PAGE),
                self.value_scales.cells().part((head * PAGE + slot) * groups, groups),
            )
        };
        self.codes(key, |i, code| keys[i * PAGE + slot] = code, |group, scale| key_scales[group * PAGE + slot] = scale);
        self.codes(value, |i, code| values[i] = code, |group, scale| value_scales[group] = scale);
    }

    /// The bytes of codes and the scales of a head's numbers.
    fn codes(&self, x: &[f32], mut byte: impl FnMut(usize, u8), mut scale: impl FnMut(usize, u32)) {
        let Quantization { bits, group, .. } = self.quantization;
        let levels = ((1usize << bits) - 1) as f32;
        let mut codes = [0u8; MAX_DIM];
        for (g, (x, codes)) in x.chunks(group).zip(codes.chunks_mut(group)).enumerate() {
            let least = x.iter().copied().fold(f32::INFINITY, f32::min);
            let most = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let half = |x: f32| half::f16::from_f32(x.clamp(-65504.0, 65504.0));
            let (step, min) = (half((most - least) / levels), half(least));
            scale(g, u32::from(step.to_bits()) | u32::from(min.to_bits()) << 16);
            let (step, min) = (step.to_f32(), min.to_f32());
            let inverse = if step > 0.0 { 1.0 / step } else { 0.0 };
            for (code, x) in codes.iter_mut().zip(x) {
                *code = ((x - min) * inverse).round_ties_even().clamp(0.0, levels) as u8;
            }
        }
        let half = x.len() / 2;
        match bits {
            8 => codes[..x.len()].iter().enumerate().for_each(|(i, code)| byte(i, *code)),
            _ => (0..half).for_each(|i| byte(i, codes[i] | codes[half + i] << 4)),
        }
    }

    /// One head expanded: keys (D, 64) and values (64, D) as `Halves` has them.
    ///
    /// # Safety
    /// Nobody writes this head's part meanwhile.
    pub(super) unsafe fn expand<E: Stored>(
        &self,
        family: Family,
        head: usize,
        dim: usize,
        keys: &mut [E],
        values: &mut [E],
    ) {
        let (bytes, groups) = self.sizes(dim);
        // SAFETY: the caller's promise.
        let (from_keys, from_values, key_scales, value_scales) = unsafe {
            (
                self.keys.cells().read(head * bytes * PAGE, bytes * PAGE),
                self.values.cells().read(head * bytes * PAGE, bytes * PAGE),
                self.key_scales.cells().read(head * groups * PAGE, groups * PAGE),
                self.value_scales.cells().read(head * groups * PAGE, groups * PAGE),
            )
        };
        let (bits, group) = (self.quantization.bits, self.quantization.group.min(dim));
        expand_keys(family, from_keys, key_scales, (bits, group, dim), keys);
        expand_values(family, from_values, value_scales, (bits, group, dim), values);
    }
}

/// The scale and the minimum of a group.
#[inline(always)]
fn halves(scale: u32) -> (f32, f32) {
    (widen(scale as u16), widen((scale >> 16) as u16))
}

simd_fn! {
fn expand_keys<S, type E: Stored>(codes: &[u8], scales: &[u32], sizes: (usize, usize, usize), keys: &mut [E]) {
    let (bits, group, dim) = sizes;
    let (codes, scales) = (codes.as_chunks::<PAGE>().0, scales.as_chunks::<PAGE>().0);
    let mut rows = [[0f32; PAGE]; 2];
    for (pair, keys) in keys.as_chunks_mut::<PAGE>().0.iter_mut().enumerate() {
        for step in 0..E::STEPS {
            let i = (pair * E::STEPS + step).min(dim - 1);
            let row = &mut rows[step];
            match (bits, i < dim / 2) {
                (8, _) => for j in 0..PAGE { row[j] = f32::from(codes[i][j]); },
                (_, true) => for j in 0..PAGE { row[j] = f32::from(codes[i][j] & 15); },
                (_, false) => for j in 0..PAGE { row[j] = f32::from(codes[i - dim / 2][j] >> 4); },
            }
            let scales = &scales[i / group];
            for j in 0..PAGE {
                let (scale, min) = halves(scales[j]);
                row[j] = row[j] * scale + min;
            }
        }
        for j in 0..PAGE {
            keys[j] = E::new(rows[0][j], rows[1][j]);
        }
    }
}
}

simd_fn! {
fn expand_values<S, type E: Stored>(codes: &[u8], scales: &[u32], sizes: (usize, usize, usize), values: &mut [E]) {
    let (bits, group, dim) = sizes;
    let (bytes, groups) = (dim * bits / 8, dim.div_ceil(group));
    let mut rows = [[0f32; MAX_DIM]; 2];
    for (pair, values) in values.chunks_exact_mut(dim).enumerate() {
        for step in 0..E::STEPS {
            let slot = pair * E::STEPS + step;
            let (codes, row) = (&codes[slot * bytes..][..bytes], &mut rows[step][..dim]);
            if bits == 8 {
                for (row, code) in row.iter_mut().zip(codes) {
                    *row = f32::from(*code);
                }
            } else {
                let (low, high) = row.split_at_mut(dim / 2);
                for ((low, high), code) in low.iter_mut().zip(high).zip(codes) {
                    (*low, *high) = (f32::from(*code & 15), f32::from(*code >> 4));
                }
            }
            for (row, scale) in row.chunks_mut(group).zip(&scales[slot * groups..][..groups]) {
                let (scale, min) = halves(*scale);
                for x in row {
                    *x = *x * scale + min;
                }
            }
        }
        for (i, value) in values.iter_mut().enumerate() {
            *value = E::new(rows[0][i], rows[1][i]);
        }
    }
}
}
