//! A weight of the engine in the type that it is kept in, and its product with a few rows.
//!
//! Called by the ops of the decode list; `skinny` and `quantized` hold the kernels. Whatever the type, a row's result has the
//! same bits alone and beside others, on any number of threads.

use std::ops::Range;

use super::aligned::Arena;
use super::cells::Cells;
use super::quantized::{self, Blocks};
use super::skinny::{self, Panels};
use crate::error::{Error, Result, nearest};
use crate::ops::blocks::{BLOCK, Format};
use crate::ops::ctx::Ctx;
use crate::ops::gemm::{Bf16x2, Store};
use crate::ops::simd::Family;
use crate::ops::team::Member;

/// Columns of a panel, in every type.
pub(super) const PANEL: usize = 64;

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

    /// Elements of a row in the form that is multiplied: pairs in bf16, else numbers.
    pub fn row_len(&self) -> usize {
        match self {
            Weight::F32(panels) => panels.row_len(),
            Weight::Bf16(panels) => panels.row_len(),
            Weight::Blocks(blocks) => blocks.row_len(),
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

    /// Keeps it in main memory.
    pub fn lock(&self) -> std::io::Result<()> {
        match self {
            Weight::F32(panels) => panels.lock(),
            Weight::Bf16(panels) => panels.lock(),
            Weight::Blocks(blocks) => blocks.lock(),
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

/// Rows in the form that a weight multiplies.
#[derive(Clone, Copy)]
pub enum Rows<'a> {
    F32(&'a [f32]),
    Bf16(&'a [u32]),
    Blocks(quantized::Rows<'a>),
}

/// Room for rows in another form than f32; it grows to what is needed once.
#[derive(Default)]
pub struct RowBuffer {
    words: Vec<u32>,
    scales: Vec<f32>,
    sums: Vec<f32>,
}

impl RowBuffer {
    /// Makes room for `rows` rows of up to `width` numbers.
    pub fn reserve(&mut self, rows: usize, width: usize) {
        self.words.resize(rows * width.div_ceil(2), 0);
        self.scales.resize(rows * width.div_ceil(BLOCK), 0.0);
        self.sums.resize(rows * width.div_ceil(BLOCK), 0.0);
    }

    /// Memory of it.
    pub fn bytes(&self) -> usize {
        4 * (self.words.capacity() + self.scales.capacity() + self.sums.capacity())
    }

    pub fn cells(&mut self) -> RowCells<'_> {
        RowCells {
            words: Cells::new(&mut self.words),
            scales: Cells::new(&mut self.scales),
            sums: Cells::new(&mut self.sums),
        }
    }
}

/// A `RowBuffer` that the members of a team fill together.
#[derive(Clone, Copy)]
pub struct RowCells<'a> {
    words: Cells<'a, u32>,
    scales: Cells<'a, f32>,
    sums: Cells<'a, f32>,
}

impl<'a> RowCells<'a> {
    /// Converts row `i` to the form that `weight` multiplies, if that is not f32.
    ///
    /// # Safety
    /// Nobody else reads or writes row `i` meanwhile.
    pub unsafe fn convert(self, family: Family, weight: &Weight, i: usize, x: &[f32]) {
        let k = weight.row_len();
        // SAFETY: the caller's promise; rows do not overlap.
        unsafe {
            match weight {
                Weight::F32(_) => {}
                Weight::Bf16(_) => skinny::round_row(family, x, self.words.part(i * k, k)),
                Weight::Blocks(_) => quantized::quantize_row(
                    family,
                    x,
                    self.words.part(i * k / 4, k / 4),
                    self.scales.part(i * k / BLOCK, k / BLOCK),
                    self.sums.part(i * k / BLOCK, k / BLOCK),
                ),
            }
        }
    }

    /// `count` rows from row `first` on for `weight`, converted before but for f32 ones, which lie in `x` from its start on.
    ///
    /// # Safety
    /// Nobody writes these rows meanwhile.
    pub unsafe fn rows(self, weight: &Weight, first: usize, count: usize, x: &'a [f32]) -> Rows<'a> {
        let k = weight.row_len();
        // SAFETY: the caller's promise.
        unsafe {
            match weight {
                Weight::F32(_) => Rows::F32(&x[..count * k]),
                Weight::Bf16(_) => Rows::Bf16(self.words.read(first * k, count * k)),
                Weight::Blocks(_) => {
                    let (at, blocks) = (first * k / BLOCK, k / BLOCK);
                    Rows::Blocks(quantized::Rows {
                        fours: self.words.read(first * k / 4, count * k / 4),
                        scales: self.scales.read(at, count * blocks),
                        sums: self.sums.read(at, count * blocks),
                        blocks,
                    })
                }
            }
        }
    }
}

impl Weight {
    /// The panels of 64 columns that are this member's.
    pub fn share(&self, member: &Member) -> Range<usize> {
        member.share(self.outputs().div_ceil(PANEL))
    }

    /// The columns of a product that those panels hold.
    pub fn columns(&self, panels: &Range<usize>) -> Range<usize> {
        panels.start * PANEL..(panels.end * PANEL).min(self.outputs())
    }

    /// The columns that `panels` hold of y (m, n) = x (m, k) W^T, or y + x W^T.
    ///
    /// # Safety
    /// Nobody else reads or writes these columns meanwhile.
    pub unsafe fn multiply(&self, family: Family, rows: Rows, panels: Range<usize>, y: Cells<f32>, store: Store) {
        // SAFETY: the caller's promise.
        unsafe {
            match (self, rows) {
                (Weight::F32(weight), Rows::F32(x)) => skinny::multiply(family, x, weight, panels, y, store),
                (Weight::Bf16(weight), Rows::Bf16(x)) => skinny::multiply(family, x, weight, panels, y, store),
                (Weight::Blocks(weight), Rows::Blocks(x)) => quantized::multiply(family, x, weight, panels, y, store),
                _ => unreachable!("rows are converted for the weight that they meet"),
            }
        }
    }
}

/// What one thread needs for reading `bytes` and doing `work` multiply-adds, in nanoseconds, roughly.
pub fn nanoseconds(bytes: usize, work: usize) -> f64 {
    (bytes as f64 / 60.0).max(work as f64 / 100.0)
}

/// y (m, n) = x (m, k) W^T, or y + x W^T: one product alone, on all threads if that is worth it.
pub fn multiply(ctx: &Ctx, x: &[f32], weight: &Weight, y: &mut [f32], store: Store) {
    let (n, k, family) = (weight.outputs(), x.len() * weight.outputs() / y.len().max(1), ctx.family());
    let m = y.len() / n;
    assert_eq!((x.len(), y.len()), (m * k, m * n), "rows of {k} to rows of {n}");
    let mut buffer = RowBuffer::default();
    buffer.reserve(m, k);
    let (cells, y) = (buffer.cells(), Cells::new(y));
    for (i, x) in x.chunks_exact(k).enumerate() {
        // SAFETY: nobody else is here yet.
        unsafe { cells.convert(family, weight, i, x) };
    }
    ctx.team().run(nanoseconds(weight.bytes(), m * n * k), 1, |member| {
        // SAFETY: the rows are only read from here on, and the members' shares do not overlap.
        unsafe { weight.multiply(family, cells.rows(weight, 0, m, x), weight.share(member), y, store) }
    });
}
