//! The matrix product of training: packed panels, register tiles, one chain of additions for each output.
//!
//! Called by linear, cross_entropy, attention and muon. Each element of C is summed over k by one task, in blocks of
//! `K_BLOCK` in index order, so the result does not depend on the number of threads. Layout and tile sizes follow
//! Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008): B is packed into panels
//! `[n / width][k][width]`; A is read where it lies or copied tile by tile. Operands and C are f32 in memory; the
//! factors of the products are f32 or, with `Precision::Bf16`, rounded to bf16 while they are packed. On macOS products of
//! whole f32 matrices go to Accelerate.

#[cfg(target_os = "macos")]
mod accelerate;
mod factor;
mod pack;
mod tile;

use std::ops::Range;

use rayon::prelude::*;

pub use factor::{Bf16x2, Factor};
pub use pack::pack_panel;
pub use tile::{Tile, multiply_panel};

use super::ctx::Ctx;
use super::simd::Family;
use pack::with_row_tiles;
use tile::{RowTiles, multiply_tiles};

/// The type of the factors that a product multiplies; sums are f32 with both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    #[default]
    F32,
    /// Operands rounded to bf16, to nearest and ties to even.
    Bf16,
}

impl Precision {
    pub fn name(self) -> &'static str {
        match self {
            Precision::F32 => "f32",
            Precision::Bf16 => "bf16",
        }
    }

    /// bf16 where the CPU multiplies it faster than f32.
    pub fn fastest(family: Family) -> Self {
        if family == Family::Avx512Bf16 { Precision::Bf16 } else { Precision::F32 }
    }
}

/// Whether an op overwrites its output or adds to it: a gradient's first write and its later ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    Set,
    Add,
}

impl Store {
    /// Overwrites or adds one element; a loop over it is split in two, since the choice is the same all along.
    #[inline(always)]
    pub(super) fn put(self, to: &mut f32, x: f32) {
        *to = if self == Store::Add { *to + x } else { x };
    }
}

/// A borrowed matrix; element (i, j) is `data[i * row_stride + j * col_stride]`.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    pub data: &'a [f32],
    pub rows: usize,
    pub cols: usize,
    pub row_stride: usize,
    pub col_stride: usize,
}

impl<'a> Matrix<'a> {
    /// A row-major matrix that fills `data`.
    pub fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        assert_eq!(data.len(), rows * cols, "{rows} x {cols}");
        Self { data, rows, cols, row_stride: cols, col_stride: 1 }
    }

    /// The transposed view.
    pub fn t(self) -> Self {
        Self { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    /// Rows `start..end`.
    pub fn rows(self, start: usize, end: usize) -> Self {
        Self { data: &self.data[(start * self.row_stride).min(self.data.len())..], rows: end - start, ..self }
    }

    /// Columns `start..end`.
    fn columns(self, start: usize, end: usize) -> Self {
        Self { data: &self.data[(start * self.col_stride).min(self.data.len())..], cols: end - start, ..self }
    }

    /// Panics unless every element lies inside `data`; the tiles rely on it.
    fn check(&self) {
        if self.rows > 0 && self.cols > 0 {
            let last = (self.rows - 1) * self.row_stride + (self.cols - 1) * self.col_stride;
            assert!(last < self.data.len(), "matrix of {} x {} exceeds its data", self.rows, self.cols);
        }
    }
}

/// k is summed in blocks of this many factors so that a panel block stays in the second-level cache.
const K_BLOCK: usize = 1024;

/// The right operand in panels, `[n / width][k][width]`, in the precision of the context that packed it.
#[derive(Debug)]
pub enum Packed {
    F32(Vec<f32>),
    Bf16(Vec<Bf16x2>),
    /// Read where it lies, by Accelerate.
    #[cfg(target_os = "macos")]
    InPlace,
}

impl Packed {
    /// Gives the memory back to the context.
    pub fn recycle(self, ctx: &mut Ctx) {
        match self {
            Packed::F32(panels) => ctx.recycle(panels),
            Packed::Bf16(panels) => ctx.recycle(panels),
            #[cfg(target_os = "macos")]
            Packed::InPlace => {}
        }
    }
}

/// A right operand that outlives a product: its panels in bf16, with the version that they were made from. In f32 they would
/// be as large as the operand itself, and packing costs a hundredth of the product: they are not kept.
#[derive(Debug, Default)]
pub struct Kept(Option<(u64, Family, Packed)>);

impl Kept {
    /// `gemm` with B (k, n), which is the same as before if its version is.
    pub fn gemm(&mut self, ctx: &mut Ctx, a: Matrix, (b, version): (Matrix, u64), c: &mut [f32], store: Store) {
        if ctx.precision() == Precision::F32 {
            return gemm(ctx, a, b, c, store);
        }
        let fresh = |kept: &(u64, Family, Packed)| (kept.0, kept.1) == (version, ctx.family());
        if !self.0.as_ref().is_some_and(fresh) {
            if let Some((_, _, stale)) = self.0.take() {
                stale.recycle(ctx);
            }
            self.0 = Some((version, ctx.family(), pack(ctx, b)));
        }
        let (_, _, packed) = self.0.as_ref().expect("just made");
        multiply_packed(ctx, a, (b, packed), c, store);
    }
}

/// C (m, n) = A (m, k) B (k, n), or C + A B. C is row-major.
pub fn gemm(ctx: &mut Ctx, a: Matrix, b: Matrix, c: &mut [f32], store: Store) {
    let packed = pack(ctx, b);
    multiply_packed(ctx, a, (b, &packed), c, store);
    packed.recycle(ctx);
}

/// A second, narrow product with the left operand of another: `matrix` (k, n) and where it goes, (m, n).
pub struct Side<'a> {
    pub matrix: Matrix<'a>,
    pub to: &'a mut [f32],
}

/// A matrix (rows, columns) whose numbers are made while it is packed, so that there is never a whole copy of them.
pub trait Made: Sync {
    fn dims(&self) -> (usize, usize);

    /// Writes a block, row after row; its first column is a multiple of `MADE`.
    fn fill(&self, rows: Range<usize>, columns: Range<usize>, to: &mut [f32]);
}

/// Columns of a matrix that are made at a time, or whole rows.
const MADE: usize = 64;

/// `gemm` with a made matrix, transposed or as it is, and the side's product, for which A is read and rounded no second time.
pub fn gemm_made(
    ctx: &mut Ctx,
    a: Matrix,
    (made, transposed): (&dyn Made, bool),
    (c, store): (&mut [f32], Store),
    side: Side,
) {
    let Side { matrix, to } = side;
    let (k, n) = if transposed { (made.dims().1, made.dims().0) } else { made.dims() };
    assert_eq!((a.cols, a.rows * n), (k, c.len()), "gemm shapes");
    assert_eq!((a.cols, a.rows * matrix.cols), (matrix.rows, to.len()), "gemm shapes");
    let family = ctx.family();
    match ctx.precision() {
        Precision::F32 => {
            let (packed, beside) = (made_panels::<f32>(ctx, made, transposed), panels(ctx, matrix));
            multiply_both(family, a, [(&packed, n, c, store), (&beside, matrix.cols, to, Store::Set)]);
            ctx.recycle(packed);
            ctx.recycle(beside);
        }
        Precision::Bf16 => {
            let (packed, beside) = (made_panels::<Bf16x2>(ctx, made, transposed), panels(ctx, matrix));
            multiply_both(family, a, [(&packed, n, c, store), (&beside, matrix.cols, to, Store::Set)]);
            ctx.recycle(packed);
            ctx.recycle(beside);
        }
    }
}

/// A made matrix, transposed or as it is, in panels; each task makes what its panels hold, a block at a time.
fn made_panels<E: Factor>(ctx: &Ctx, made: &dyn Made, transposed: bool) -> Vec<E> {
    let (rows, columns) = made.dims();
    let (k, n) = if transposed { (columns, rows) } else { (rows, columns) };
    let (family, width) = (ctx.family(), panel_width(ctx.family(), n));
    let panel = k.div_ceil(E::STEPS) * width;
    let mut packed = ctx.vec::<E>(n.div_ceil(width) * panel);
    if panel == 0 {
        return packed;
    }
    packed.par_chunks_mut(MADE / width * panel).enumerate().for_each(|(task, packed)| {
        let own = task * MADE..(task * MADE + MADE).min(n);
        let mut put = |matrix: Matrix, first: usize| {
            let steps = matrix.rows.div_ceil(E::STEPS) * width;
            for (i, packed) in packed.chunks_exact_mut(panel).enumerate() {
                pack_panel(family, matrix, i, width, &mut packed[first / E::STEPS * width..][..steps]);
            }
        };
        if transposed {
            return f32::with_scratch(own.len() * k, |block| {
                made.fill(own.clone(), 0..k, block);
                put(Matrix::new(block, own.len(), k).t(), 0);
            });
        }
        let mut block = [0f32; MADE * MADE];
        for first in (0..k).step_by(MADE) {
            let of_k = first..(first + MADE).min(k);
            let block = &mut block[..own.len() * of_k.len()];
            made.fill(of_k.clone(), own.clone(), block);
            put(Matrix::new(block, of_k.len(), own.len()), first);
        }
    });
    packed
}

/// `gemm` into the `b.cols` columns from `first` on of a C with rows of `stride` elements; the others are left alone. In f32,
/// for thin products: rounding their operands would take longer than multiplying them.
pub fn gemm_columns(ctx: &Ctx, a: Matrix, b: Matrix, (c, stride, first): (&mut [f32], usize, usize), store: Store) {
    assert_eq!((a.cols, a.rows * stride), (b.rows, c.len()), "gemm shapes");
    assert!(first + b.cols <= stride, "{} columns from {first} on in rows of {stride}", b.cols);
    let c = &mut c[first.min(a.rows * stride)..];
    let packed = panels::<f32>(ctx, b);
    multiply(ctx.family(), a, &packed, b.cols, (c, stride), store);
    ctx.recycle(packed);
}

/// Packs B (k, n) for `multiply_packed`, in parallel.
pub fn pack(ctx: &Ctx, b: Matrix) -> Packed {
    match ctx.precision() {
        #[cfg(target_os = "macos")]
        Precision::F32 if ctx.family() == Family::Neon && accelerate::reads(b) => Packed::InPlace,
        Precision::F32 => Packed::F32(panels(ctx, b)),
        Precision::Bf16 => Packed::Bf16(panels(ctx, b)),
    }
}

/// B (k, n) in panels, `[n / width][k][width]` for the width that `panel_width` gives.
pub fn panels<E: Factor>(ctx: &Ctx, b: Matrix) -> Vec<E> {
    let (family, width) = (ctx.family(), panel_width(ctx.family(), b.cols));
    let panel = b.rows.div_ceil(E::STEPS) * width;
    let mut packed = ctx.vec(b.cols.div_ceil(width) * panel);
    if panel > 0 {
        let panels = packed.par_chunks_exact_mut(panel).enumerate();
        panels.for_each(|(panel, packed)| pack_panel(family, b, panel, width, packed));
    }
    packed
}

/// `gemm` with B (k, n) packed before.
pub fn multiply_packed(ctx: &Ctx, a: Matrix, (b, packed): (Matrix, &Packed), c: &mut [f32], store: Store) {
    assert_eq!((a.cols, a.rows * b.cols), (b.rows, c.len()), "gemm shapes");
    match packed {
        Packed::F32(packed) => multiply(ctx.family(), a, packed, b.cols, (c, b.cols), store),
        Packed::Bf16(packed) => multiply(ctx.family(), a, packed, b.cols, (c, b.cols), store),
        #[cfg(target_os = "macos")]
        Packed::InPlace => {
            if !accelerate::gemm(a, b, c, store) {
                multiply(ctx.family(), a, &panels::<f32>(ctx, b), b.cols, (c, b.cols), store);
            }
        }
    }
}

/// Into C, whose rows lie `stride` apart and end with the slice.
fn multiply<E: Factor>(
    family: Family,
    a: Matrix,
    packed: &[E],
    n: usize,
    (c, stride): (&mut [f32], usize),
    store: Store,
) {
    let (m, k) = (a.rows, a.cols);
    a.check();
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        if store == Store::Set {
            c.chunks_mut(stride).for_each(|row| row[..n].fill(0.0));
        }
        return;
    }
    let width = panel_width(family, n);
    let rows = block_rows(family, m, width);
    c.par_chunks_mut(rows * stride).enumerate().for_each(|(block, c)| {
        let a = a.rows(block * rows, (block * rows + rows).min(m));
        for_k_blocks(family, a, width, |steps, a| {
            block_of_panels(family, a, (packed, k.div_ceil(E::STEPS), steps), n, (c, stride), store);
        });
    });
}

/// An output of `multiply_both`: packed B, its columns, C, and how it is stored.
type Output<'a, E> = (&'a [E], usize, &'a mut [f32], Store);

/// Two products of the same A, whose rows are contiguous; block by block of its rows.
fn multiply_both<E: Factor>(family: Family, a: Matrix, [first, second]: [Output<E>; 2]) {
    a.check();
    assert_eq!(a.col_stride, 1, "A's rows are contiguous");
    let (m, k) = (a.rows, a.cols);
    if m == 0 || k == 0 || first.1 == 0 || second.1 == 0 {
        multiply(family, a, first.0, first.1, (first.2, first.1.max(1)), first.3);
        return multiply(family, a, second.0, second.1, (second.2, second.1.max(1)), second.3);
    }
    let width = panel_width(family, first.1);
    let rows = block_rows(family, m, width);
    let steps_of_k = k.div_ceil(E::STEPS);
    let blocks = first.2.par_chunks_mut(rows * first.1).zip(second.2.par_chunks_mut(rows * second.1)).enumerate();
    blocks.for_each(|(block, (c, beside))| {
        let a = a.rows(block * rows, (block * rows + rows).min(m));
        for_k_blocks(family, a, width, |steps, a| {
            block_of_panels(family, a, (first.0, steps_of_k, steps.clone()), first.1, (c, first.1), first.3);
            // Tiles of another height, over rows that lie one after the other all the same.
            let tile_stride = tile_rows(family, panel_width(family, second.1)) * a.row_stride;
            let a = RowTiles { tile_stride, ..a };
            block_of_panels(family, a, (second.0, steps_of_k, steps), second.1, (beside, second.1), second.3);
        });
    });
}

/// Hands out A as tiles for panels of that width, a block of k after the other, with the steps of k that it has.
fn for_k_blocks<E: Factor>(family: Family, a: Matrix, width: usize, mut each: impl FnMut(Range<usize>, RowTiles<E>)) {
    let steps = a.cols.div_ceil(E::STEPS);
    for start in (0..steps).step_by(K_BLOCK) {
        let end = (start + K_BLOCK).min(steps);
        let part = a.columns(start * E::STEPS, (end * E::STEPS).min(a.cols));
        with_row_tiles(family, part, tile_rows(family, width), |a| each(start..end, a));
    }
}

/// Some rows of A, over some steps of k, times all panels of B: C, in rows of `stride`, is set at the first step only.
fn block_of_panels<E: Factor>(
    family: Family,
    a: RowTiles<E>,
    (packed, all_steps, steps): (&[E], usize, Range<usize>),
    n: usize,
    (c, stride): (&mut [f32], usize),
    store: Store,
) {
    let (width, store) = (panel_width(family, n), if steps.start == 0 { store } else { Store::Add });
    for (panel, packed) in packed.chunks_exact(all_steps * width).enumerate() {
        let (column, cols) = (panel * width, width.min(n - panel * width));
        let out = Tile { c: &mut c[column..], stride, cols, store };
        multiply_tiles(family, width, a, &packed[steps.start * width..steps.end * width], out);
    }
}

/// Rows of C a task: enough tasks to balance the threads, whole tiles each, few enough that a panel is reused.
fn block_rows(family: Family, m: usize, width: usize) -> usize {
    let tile = tile_rows(family, width);
    let tasks = (4 * rayon::current_num_threads()).max(m.div_ceil(192));
    m.div_ceil(tasks).div_ceil(tile) * tile
}

/// The panel width for an n-wide B: as wide as the registers allow, narrower where n is small.
pub fn panel_width(family: Family, n: usize) -> usize {
    match family {
        Family::Avx512Bf16 | Family::Avx512 if n > 32 => 64,
        Family::Avx512Bf16 | Family::Avx512 if n > 16 => 32,
        Family::Avx512Bf16 | Family::Avx512 | Family::Avx2 | Family::Neon => 16,
        Family::Portable => 8,
    }
}

/// Rows of a register tile: with `width` columns it fills the registers, less those for B and the broadcast.
fn tile_rows(family: Family, width: usize) -> usize {
    match (family, width) {
        (Family::Avx512Bf16 | Family::Avx512, 64) => 6,
        (Family::Avx512Bf16 | Family::Avx512, _) => 12,
        (Family::Portable, _) => 4,
        _ => 6,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::{Purpose, Stream};

    fn numbers(position: u64, len: usize) -> Vec<f32> {
        let stream = Stream::new(1, Purpose::Test);
        (0..len).map(|i| stream.normal(position, i as u32)).collect()
    }

    /// x as a product of that precision sees it.
    fn rounded(x: f32, precision: Precision) -> f64 {
        match precision {
            Precision::F32 => f64::from(x),
            Precision::Bf16 => f64::from(half::bf16::from_f32(x).to_f32()),
        }
    }

    fn reference(precision: Precision, a: Matrix, b: Matrix, c: &[f32], store: Store) -> Vec<f64> {
        let at = |m: &Matrix, i: usize, j: usize| rounded(m.data[i * m.row_stride + j * m.col_stride], precision);
        let element = |i, j| (0..a.cols).map(|p| at(&a, i, p) * at(&b, p, j)).sum::<f64>();
        let old = |i: usize| if store == Store::Add { f64::from(c[i]) } else { 0.0 };
        (0..a.rows * b.cols).map(|i| old(i) + element(i / b.cols, i % b.cols)).collect()
    }

    /// A context for every family of this machine in each precision.
    fn contexts() -> Vec<Ctx> {
        let mut contexts = Vec::new();
        for family in Family::ALL.into_iter().filter(|f| f.available()) {
            for precision in [Precision::F32, Precision::Bf16] {
                contexts.push(Ctx::cpu(family));
                contexts.last_mut().unwrap().set_precision(precision);
            }
        }
        contexts
    }

    #[test]
    fn every_shape_family_precision_and_transposition_agrees_with_f64() {
        for mut ctx in contexts() {
            let what = format!("{} {}", ctx.family().name(), ctx.precision().name());
            let shapes = [
                (1, 1, 1),
                (5, 3, 7),
                (13, 70, 65),
                (48, 64, 64),
                (7, 2200, 33),
                (200, 31, 130),
                (6, 0, 4),
                (67, 129, 16),
            ];
            for (m, k, n) in shapes {
                for case in 0..8 {
                    let (a, b) = (numbers(1, m * k), numbers(2, k * n));
                    let a = if case & 1 == 0 { Matrix::new(&a, m, k) } else { Matrix::new(&a, k, m).t() };
                    let b = if case & 2 == 0 { Matrix::new(&b, k, n) } else { Matrix::new(&b, n, k).t() };
                    let store = if case & 4 == 0 { Store::Set } else { Store::Add };
                    let mut c = numbers(3, m * n);
                    let want = reference(ctx.precision(), a, b, &c, store);
                    gemm(&mut ctx, a, b, &mut c, store);
                    // A running sum of k products of size one grows like sqrt(k) and is rounded k times.
                    let bound = 5e-7 * k.max(16) as f64;
                    for (got, want) in c.iter().zip(&want) {
                        assert!((f64::from(*got) - want).abs() < bound, "{what} {m}x{k}x{n} case {case}");
                    }
                }
            }
        }
    }

    /// Rows and columns of a larger matrix, as attention's heads are.
    #[test]
    fn strided_operands_are_read_where_they_lie() {
        let (m, k, n, wide) = (30, 37, 21, 100);
        let (a, b) = (numbers(1, m * wide), numbers(2, k * wide));
        let part = |data, rows, cols| Matrix { data, rows, cols, row_stride: wide, col_stride: 1 };
        for mut ctx in contexts() {
            let (a, b) = (part(&a, m, k), part(&b, k, n));
            let mut c = vec![f32::NAN; m * n];
            let want = reference(ctx.precision(), a, b, &c, Store::Set);
            gemm(&mut ctx, a, b, &mut c, Store::Set);
            assert!(c.iter().zip(&want).all(|(got, want)| (f64::from(*got) - want).abs() < 2e-5));
        }
    }

    impl Made for Matrix<'_> {
        fn dims(&self) -> (usize, usize) {
            (self.rows, self.cols)
        }

        fn fill(&self, rows: Range<usize>, columns: Range<usize>, to: &mut [f32]) {
            for (row, to) in rows.zip(to.chunks_exact_mut(columns.len())) {
                to.copy_from_slice(&self.data[row * self.cols..][columns.clone()]);
            }
        }
    }

    #[test]
    fn a_made_matrix_and_a_product_beside_are_those_of_whole_ones() {
        for mut ctx in contexts() {
            for (m, k, n, narrow) in [(1, 3, 2, 1), (50, 8, 40, 9), (7, 2200, 33, 16), (301, 70, 130, 24), (5, 0, 3, 2)]
            {
                let (a, b, s) = (numbers(1, m * k), numbers(2, k * n), numbers(4, k * narrow));
                let (a, b, s) = (Matrix::new(&a, m, k), Matrix::new(&b, k, n), Matrix::new(&s, k, narrow));
                let (mut c, mut beside) = (numbers(3, m * n), vec![f32::NAN; m * narrow]);
                let (mut want_c, mut want) = (c.clone(), vec![f32::NAN; m * narrow]);
                gemm(&mut ctx, a, b, &mut want_c, Store::Add);
                gemm(&mut ctx, a, s, &mut want, Store::Set);
                gemm_made(&mut ctx, a, (&b, false), (&mut c, Store::Add), Side { matrix: s, to: &mut beside });
                assert!(c == want_c && beside == want, "{m}x{k}x{n}+{narrow}");
                let turned: Vec<f32> = (0..n * k).map(|i| b.data[i % k * n + i / k]).collect();
                let turned = Matrix::new(&turned, n, k);
                gemm_made(&mut ctx, a, (&turned, true), (&mut c, Store::Set), Side { matrix: s, to: &mut beside });
                gemm(&mut ctx, a, b, &mut want_c, Store::Set);
                assert!(c == want_c && beside == want, "{m}x{k}x{n}+{narrow}, transposed");
            }
        }
    }

    #[test]
    fn a_product_goes_into_some_columns_and_touches_no_others() {
        for ctx in contexts() {
            for (m, k, n, stride, first) in
                [(1, 3, 2, 7, 5), (50, 8, 40, 100, 30), (13, 0, 16, 20, 4), (301, 70, 64, 64, 0)]
            {
                for store in [Store::Set, Store::Add] {
                    let (a, b) = (numbers(1, m * k), numbers(2, k * n));
                    let (a, b) = (Matrix::new(&a, m, k), Matrix::new(&b, k, n));
                    let before = numbers(3, m * stride);
                    let columns =
                        |all: &[f32]| all.chunks(stride).flat_map(|r| r[first..first + n].to_vec()).collect::<Vec<_>>();
                    let want = reference(Precision::F32, a, b, &columns(&before), store);
                    let mut c = before.clone();
                    gemm_columns(&ctx, a, b, (&mut c, stride, first), store);
                    for (got, want) in columns(&c).iter().zip(&want) {
                        assert!((f64::from(*got) - want).abs() < 5e-5, "{m}x{k}x{n}: {got}, expected {want}");
                    }
                    let outside = |i: usize| !(first..first + n).contains(&(i % stride));
                    assert!((0..c.len()).filter(|i| outside(*i)).all(|i| c[i] == before[i]));
                }
            }
        }
    }

    #[test]
    fn infinities_and_nans_stay_visible() {
        for mut ctx in contexts() {
            for bad in [f32::NAN, f32::INFINITY] {
                let (mut a, b) = (numbers(1, 9 * 9), numbers(2, 9 * 9));
                a[4 * 9 + 4] = bad;
                let mut c = vec![0.0; 9 * 9];
                gemm(&mut ctx, Matrix::new(&a, 9, 9), Matrix::new(&b, 9, 9), &mut c, Store::Set);
                let finite = |row: &[f32]| row.iter().all(|x| x.is_finite());
                assert!(c.chunks(9).enumerate().all(|(i, row)| finite(row) == (i != 4)));
            }
        }
    }

    #[test]
    fn the_number_of_threads_changes_no_bit() {
        let (m, k, n) = (300, 200, 150);
        let (a, b) = (numbers(1, m * k), numbers(2, k * n));
        for precision in [Precision::F32, Precision::Bf16] {
            let run = |threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let mut c = vec![0.0; m * n];
                let mut ctx = Ctx::cpu(Family::detect());
                ctx.set_precision(precision);
                pool.install(|| gemm(&mut ctx, Matrix::new(&a, m, k), Matrix::new(&b, k, n), &mut c, Store::Set));
                c
            };
            let one = run(1);
            assert!([2, 3, 7].into_iter().all(|threads| run(threads) == one));
        }
    }
}
