//! A weight of the engine in the type that it is kept in, and its product with a few rows.
//!
//! Called by the ops of the decode list; `skinny` and `quantized` hold the kernels. Whatever the type, a row's result has the
//! same bits alone and beside others, on any number of threads.

use std::marker::PhantomData;
use std::ops::Range;

use super::aligned::Arena;
use super::quantized::{self, Blocks};
use super::skinny::{self, Panels};
use crate::error::{Error, Result, nearest};
use crate::ops::blocks::{BLOCK, Format};
use crate::ops::ctx::Ctx;
use crate::ops::gemm::{Bf16x2, Store};

/// What the engine keeps weights in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WeightType {
    #[default]
    F32,
    /// Products of weights and rows both rounded to bf16.
    Bf16,
    /// Blocks of 32; the rows are quantised to 8 bits.
    Blocks(Format),
}

impl WeightType {
    /// Every type, the widest first.
    pub fn all() -> impl Iterator<Item = Self> {
        [WeightType::F32, WeightType::Bf16].into_iter().chain(Format::ALL.map(WeightType::Blocks))
    }

    pub fn name(self) -> &'static str {
        match self {
            WeightType::F32 => "f32",
            WeightType::Bf16 => "bf16",
            WeightType::Blocks(format) => format.name(),
        }
    }

    /// The type of that name.
    pub fn named(name: &str) -> Result<Self> {
        Self::all().find(|t| t.name() == name).ok_or_else(|| {
            let hint = nearest(name, Self::all().map(Self::name));
            let all = || format!("one of: {}", Vec::from_iter(Self::all().map(Self::name)).join(", "));
            Error::usage(format!("unknown weight type `{name}`")).with_hint(hint.unwrap_or_else(all))
        })
    }
}

/// A weight (n, k), packed.
pub enum Weight {
    F32(Panels<f32>),
    Bf16(Panels<Bf16x2>),
    Blocks(Blocks),
}

impl Weight {
    /// Packs row-major matrices of `k` columns, one below the other. Blocks need k to be a multiple of 32.
    pub fn pack(arena: &mut Arena, kind: WeightType, parts: &[&[f32]], k: usize) -> Result<Self> {
        Ok(match kind {
            WeightType::F32 => Weight::F32(Panels::pack(arena, parts, k)),
            WeightType::Bf16 => Weight::Bf16(Panels::pack(arena, parts, k)),
            WeightType::Blocks(format) if k.is_multiple_of(BLOCK) => {
                Weight::Blocks(Blocks::pack(arena, format, parts, k))
            }
            WeightType::Blocks(format) => {
                let what =
                    format!("{} needs rows of whole blocks of {BLOCK}, and a weight has rows of {k}", format.name());
                return Err(Error::failed(what).with_hint("use bf16 or f32 for this model"));
            }
        })
    }

    /// Rows of the weight: the columns of a product.
    pub fn outputs(&self) -> usize {
        match self {
            Weight::F32(panels) => panels.outputs(),
            Weight::Bf16(panels) => panels.outputs(),
            Weight::Blocks(blocks) => blocks.outputs(),
        }
    }

    /// Memory of the packed weight, its padding included.
    pub fn bytes(&self) -> usize {
        match self {
            Weight::F32(panels) => panels.bytes(),
            Weight::Bf16(panels) => panels.bytes(),
            Weight::Blocks(blocks) => blocks.bytes(),
        }
    }

    /// Copies row `i` of the weight: a token's vector, when the table is the head too.
    pub fn unpack_row(&self, i: usize, row: &mut [f32]) {
        match self {
            Weight::F32(panels) => panels.unpack_row(i, row),
            Weight::Bf16(panels) => panels.unpack_row(i, row),
            Weight::Blocks(blocks) => blocks.unpack_row(i, row),
        }
    }
}

/// y (m, n) = x (m, k) W^T, or y + x W^T.
pub fn multiply(ctx: &Ctx, x: &[f32], weight: &Weight, y: &mut [f32], store: Store) {
    match weight {
        Weight::F32(panels) => skinny::multiply(ctx, x, panels, y, store),
        Weight::Bf16(panels) => skinny::multiply(ctx, x, panels, y, store),
        Weight::Blocks(blocks) => quantized::multiply(ctx, x, blocks, y, store),
    }
}

/// Runs `f` on ranges that together are `panels`, on all threads if that is worth it for a product that reads `bytes` and
/// does `work` multiply-adds.
pub(super) fn spread(ctx: &Ctx, bytes: usize, work: usize, panels: usize, f: impl Fn(Range<usize>) + Sync) {
    // What a core reads from its caches and computes in a nanosecond, roughly.
    let nanoseconds = (bytes as f64 / 60.0).max(work as f64 / 100.0);
    let team = ctx.team();
    if !team.is_worth(nanoseconds) {
        return f(0..panels);
    }
    let tasks = team.threads().min(panels);
    let bound = |task: usize| task * panels / tasks;
    team.run(tasks, |task| f(bound(task)..bound(task + 1)));
}

/// The output, written by several tasks at once.
#[derive(Clone, Copy)]
pub(super) struct Output<'a> {
    start: *mut f32,
    len: usize,
    borrowed: PhantomData<&'a mut [f32]>,
}

// SAFETY: elements are reached through `slice` alone, whose callers promise that no two tasks write the same one.
unsafe impl Sync for Output<'_> {}

impl<'a> Output<'a> {
    pub fn new(y: &'a mut [f32]) -> Self {
        Self { start: y.as_mut_ptr(), len: y.len(), borrowed: PhantomData }
    }

    /// `len` elements from `at` on.
    ///
    /// # Safety
    /// While the slice lives nobody else reads or writes these elements.
    pub unsafe fn slice(self, at: usize, len: usize) -> &'a mut [f32] {
        assert!(at + len <= self.len, "elements past the end of the output");
        // SAFETY: the range was checked, the memory is borrowed exclusively for 'a, and the caller excludes other users.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), len) }
    }

    /// Stores sums from element `at` on, or adds them.
    ///
    /// # Safety
    /// Nobody else reads or writes these elements meanwhile.
    pub unsafe fn put(self, at: usize, sums: &[f32], add: bool) {
        // SAFETY: the caller's promise.
        let y = unsafe { self.slice(at, sums.len()) };
        if add {
            y.iter_mut().zip(sums).for_each(|(y, sum)| *y += sum);
        } else {
            y.copy_from_slice(sums);
        }
    }
}
