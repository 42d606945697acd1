//! The f32 matrix product of training: packed panels, register tiles, one chain of additions for each output.
//!
//! Called by linear, cross_entropy, attention and muon. Each element of C is summed over k by one task, in blocks of
//! `K_BLOCK` in index order, so the result does not depend on the number of threads. Layout and tile sizes follow
//! Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008): B is packed into panels
//! `[n / width][k][width]`; A is read where it lies when its rows are contiguous.

use rayon::prelude::*;

use super::ctx::Ctx;
use super::simd::{Family, simd_fn};

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

    /// Panics unless every element lies inside `data`; the tiles rely on it.
    fn check(&self) {
        if self.rows > 0 && self.cols > 0 {
            let last = (self.rows - 1) * self.row_stride + (self.cols - 1) * self.col_stride;
            assert!(last < self.data.len(), "matrix of {} x {} exceeds its data", self.rows, self.cols);
        }
    }
}

/// k is summed in blocks of this length so that a panel block stays in the second-level cache.
const K_BLOCK: usize = 1024;

/// C (m, n) = A (m, k) B (k, n), or C + A B. C is row-major.
pub fn gemm(ctx: &mut Ctx, a: Matrix, b: Matrix, c: &mut [f32], store: Store) {
    assert_eq!((a.cols, a.rows * b.cols), (b.rows, c.len()), "gemm shapes");
    let width = panel_width(ctx.family(), b.cols);
    let mut packed = ctx.vec(packed_len(b, width));
    pack(b, width, &mut packed);
    multiply_packed(ctx, a, &packed, b.cols, c, store);
    ctx.recycle(packed);
}

/// `gemm` with B packed before by `pack` for the width `panel_width(family, n)`.
pub fn multiply_packed(ctx: &mut Ctx, a: Matrix, packed: &[f32], n: usize, c: &mut [f32], store: Store) {
    let (family, m, k) = (ctx.family(), a.rows, a.cols);
    a.check();
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        if store == Store::Set {
            c.fill(0.0);
        }
        return;
    }
    let width = panel_width(family, n);
    let rows = block_rows(family, m, width);
    c.par_chunks_mut(rows * n).enumerate().for_each(|(block, c)| {
        let a = a.rows(block * rows, (block * rows + rows).min(m));
        with_row_tiles(a, tile_rows(family, width), |a| {
            for (panel, packed) in packed.chunks_exact(k * width).enumerate() {
                let (column, cols) = (panel * width, width.min(n - panel * width));
                for start in (0..k).step_by(K_BLOCK) {
                    let end = (start + K_BLOCK).min(k);
                    let store = if start == 0 { store } else { Store::Add };
                    let out = Tile { c: &mut c[column..], stride: n, cols, store };
                    multiply_tiles(family, width, a.columns(start, end), &packed[start * width..end * width], out);
                }
            }
        });
    });
}

/// Rows of C a task: enough tasks to balance the threads, whole tiles each, few enough that a panel is reused.
fn block_rows(family: Family, m: usize, width: usize) -> usize {
    let tile = tile_rows(family, width);
    let tasks = (4 * rayon::current_num_threads()).max(m.div_ceil(192));
    m.div_ceil(tasks).div_ceil(tile) * tile
}

/// A as the register tiles read it: element (i, p) is
/// `data[i / tile * tile_stride + i % tile * row_stride + p * col_stride]`.
#[derive(Clone, Copy)]
struct RowTiles<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    tile_stride: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> RowTiles<'a> {
    fn of(a: Matrix<'a>, tile: usize) -> Self {
        let Matrix { data, rows, cols, row_stride, col_stride } = a;
        Self { data, rows, cols, tile_stride: tile * row_stride, row_stride, col_stride }
    }

    fn columns(self, start: usize, end: usize) -> Self {
        Self { data: &self.data[start * self.col_stride..], cols: end - start, ..self }
    }
}

/// Runs `f` on A as it lies or, when its columns are strided (a transposed operand), on a copy in which the rows of a
/// tile lie beside each other for every k, so that a tile does not touch a new page at every step.
fn with_row_tiles(a: Matrix, tile: usize, f: impl FnOnce(RowTiles)) {
    if a.col_stride == 1 {
        return f(RowTiles::of(a, tile));
    }
    thread_local!(static COPY: std::cell::RefCell<Vec<f32>> = const { std::cell::RefCell::new(Vec::new()) });
    COPY.with_borrow_mut(|copy| {
        let (rows, cols) = (a.rows, a.cols);
        copy.resize(rows.div_ceil(tile) * tile * cols, 0.0);
        match tile {
            4 => copy_tiles::<4>(a, copy),
            6 => copy_tiles::<6>(a, copy),
            12 => copy_tiles::<12>(a, copy),
            _ => unreachable!("tile heights come from `tile_rows`"),
        }
        f(RowTiles { data: copy, rows, cols, tile_stride: tile * cols, row_stride: 1, col_stride: tile });
    });
}

/// A as [rows / TILE][k][TILE]. The tile height is a constant, so that a copy is a move or two and not a call.
fn copy_tiles<const TILE: usize>(a: Matrix, to: &mut [f32]) {
    for p in 0..a.cols {
        let from = &a.data[p * a.col_stride..];
        if a.row_stride == 1 {
            let (whole, rest) = from[..a.rows].as_chunks::<TILE>();
            for (t, from) in whole.iter().enumerate() {
                *to[(t * a.cols + p) * TILE..].first_chunk_mut().expect("a tile of the copy") = *from;
            }
            if !rest.is_empty() {
                to[(whole.len() * a.cols + p) * TILE..][..rest.len()].copy_from_slice(rest);
            }
        } else {
            for i in 0..a.rows {
                to[(i / TILE * a.cols + p) * TILE + i % TILE] = from[i * a.row_stride];
            }
        }
    }
}

/// Where a panel's product goes: rows of `stride` elements, of which the first `cols` columns are written.
pub struct Tile<'a> {
    pub c: &'a mut [f32],
    pub stride: usize,
    pub cols: usize,
    pub store: Store,
}

/// The panel width for an n-wide B: as wide as the registers allow, narrower where n is small.
pub fn panel_width(family: Family, n: usize) -> usize {
    match family {
        Family::Avx512 if n > 32 => 64,
        Family::Avx512 if n > 16 => 32,
        Family::Avx512 | Family::Avx2 | Family::Neon => 16,
        Family::Portable => 8,
    }
}

/// Rows of a register tile: with `width` columns it fills the registers, less those for B and the broadcast.
fn tile_rows(family: Family, width: usize) -> usize {
    match (family, width) {
        (Family::Avx512, 64) => 6,
        (Family::Avx512, _) => 12,
        (Family::Portable, _) => 4,
        _ => 6,
    }
}

/// Elements of B when packed into panels.
pub fn packed_len(b: Matrix, width: usize) -> usize {
    b.cols.div_ceil(width) * width * b.rows
}

/// Packs B into panels of `width` columns, in parallel; columns past the last are zero.
pub fn pack(b: Matrix, width: usize, packed: &mut [f32]) {
    b.check();
    if b.rows == 0 {
        return;
    }
    packed
        .par_chunks_exact_mut(b.rows * width)
        .enumerate()
        .for_each(|(panel, packed)| pack_panel(b, panel, width, packed));
}

/// One panel of `pack`: columns from `panel * width` on.
pub fn pack_panel(b: Matrix, panel: usize, width: usize, packed: &mut [f32]) {
    let first = panel * width;
    let cols = width.min(b.cols - first);
    if cols < width {
        packed.fill(0.0);
    }
    let part = &b.data[(first * b.col_stride).min(b.data.len())..];
    match (width, cols == width) {
        (64, true) => pack_whole::<64>(b, part, packed),
        (32, true) => pack_whole::<32>(b, part, packed),
        (16, true) => pack_whole::<16>(b, part, packed),
        (8, true) => pack_whole::<8>(b, part, packed),
        _ => {
            for (p, row) in packed.chunks_exact_mut(width).enumerate() {
                for (j, to) in row[..cols].iter_mut().enumerate() {
                    *to = part[p * b.row_stride + j * b.col_stride];
                }
            }
        }
    }
}

/// A panel of W whole columns. With W constant a row is copied by a few moves, not a call, and a block of a
/// transposed operand is turned in registers.
fn pack_whole<const W: usize>(b: Matrix, part: &[f32], packed: &mut [f32]) {
    let rows = packed.as_chunks_mut::<W>().0;
    if b.col_stride == 1 {
        for (p, row) in rows.iter_mut().enumerate() {
            *row = *part[p * b.row_stride..].first_chunk().expect("a row of B is as wide as the panel");
        }
        return;
    }
    // Blocks of 16 steps of k, so that both sides stay in the first-level cache; within them squares of four by four, which
    // are turned in registers.
    const BLOCK: usize = 16;
    for (block, rows) in rows.chunks_mut(BLOCK).enumerate() {
        let part = &part[block * BLOCK * b.row_stride..];
        if b.row_stride == 1 && rows.len() == BLOCK {
            for j in (0..W).step_by(4) {
                let columns = [0, 1, 2, 3].map(|q| {
                    let column: &[f32; BLOCK] =
                        part[(j + q) * b.col_stride..].first_chunk().expect("inside the column");
                    column
                });
                for p in 0..BLOCK {
                    let square = [columns[0][p], columns[1][p], columns[2][p], columns[3][p]];
                    *rows[p][j..].first_chunk_mut().expect("panel widths are multiples of four") = square;
                }
            }
        } else {
            for (p, row) in rows.iter_mut().enumerate() {
                for (j, to) in row.iter_mut().enumerate() {
                    *to = part[p * b.row_stride + j * b.col_stride];
                }
            }
        }
    }
}

/// C (rows, cols) = A (rows, k) times one panel `[k][width]`; `width` is what `panel_width` gave.
pub fn multiply_panel(family: Family, width: usize, a: Matrix, panel: &[f32], out: Tile) {
    a.check();
    multiply_tiles(family, width, RowTiles::of(a, tile_rows(family, width)), panel, out);
}

fn multiply_tiles(family: Family, width: usize, a: RowTiles, panel: &[f32], out: Tile) {
    match width {
        64 => rows_of_tiles::<6, 64>(family, a, panel, out),
        32 => rows_of_tiles::<12, 32>(family, a, panel, out),
        16 if family == Family::Avx512 => rows_of_tiles::<12, 16>(family, a, panel, out),
        16 => rows_of_tiles::<6, 16>(family, a, panel, out),
        8 => rows_of_tiles::<4, 8>(family, a, panel, out),
        _ => unreachable!("panel width {width} comes from `panel_width`"),
    }
}

fn rows_of_tiles<const MR: usize, const NR: usize>(family: Family, a: RowTiles, panel: &[f32], out: Tile) {
    let Tile { c, stride, cols, store } = out;
    let mut i = 0;
    while i < a.rows {
        let part = RowTiles { data: &a.data[i / MR * a.tile_stride + i % MR * a.row_stride..], ..a };
        let out = Tile { c: &mut c[i * stride..], stride, cols, store };
        i += match a.rows - i {
            left if left >= MR => tile::<MR, NR>(family, part, panel, out),
            4.. => tile::<4, NR>(family, part, panel, out),
            2.. => tile::<2, NR>(family, part, panel, out),
            _ => tile::<1, NR>(family, part, panel, out),
        };
    }
}

/// The first MR rows of `a` times a panel; returns MR. The last panel's columns past C go through a whole tile.
fn tile<const MR: usize, const NR: usize>(family: Family, a: RowTiles, panel: &[f32], out: Tile) -> usize {
    let Tile { c, stride, cols, store } = out;
    if cols >= NR {
        full_tile::<MR, NR>(family, a, panel, c, stride, store == Store::Add);
    } else {
        let mut whole = [[0f32; NR]; MR];
        full_tile::<MR, NR>(family, a, panel, whole.as_flattened_mut(), NR, false);
        for (row, c) in whole.iter().zip(c.chunks_mut(stride)) {
            for (c, x) in c[..cols].iter_mut().zip(row) {
                *c = if store == Store::Add { *c + x } else { *x };
            }
        }
    }
    MR
}

simd_fn! {
/// MR rows times NR columns. The loops have constant bounds and nothing in them can fail: only then are they unrolled
/// whole and `acc` lives in registers (checked by the speed: otherwise it is five times slower).
fn full_tile<S, const MR: usize, const NR: usize>(a: RowTiles, panel: &[f32], c: &mut [f32], stride: usize, add: bool) {
    let RowTiles { data, cols: k, row_stride, col_stride, .. } = a;
    assert!(k > 0 && (MR - 1) * row_stride + (k - 1) * col_stride < data.len(), "A is smaller than the tile");
    assert!(panel.len() >= k * NR && c.len() >= (MR - 1) * stride + NR, "B or C is smaller than the tile");
    let (a, b, c) = (data.as_ptr(), panel.as_ptr(), c.as_mut_ptr());
    // SAFETY: i < MR, p < k and j < NR, so the largest index into each slice is the one checked above; `c` is borrowed
    // exclusively, and f32 has no invalid values.
    unsafe {
        let mut acc = [[0f32; NR]; MR];
        for p in 0..k {
            let b = &*b.add(p * NR).cast::<[f32; NR]>();
            for i in 0..MR {
                let x = *a.add(i * row_stride + p * col_stride);
                for j in 0..NR {
                    acc[i][j] = S::fma(x, b[j], acc[i][j]);
                }
            }
        }
        if add {
            for i in 0..MR {
                for j in 0..NR {
                    *c.add(i * stride + j) += acc[i][j];
                }
            }
        } else {
            for i in 0..MR {
                for j in 0..NR {
                    *c.add(i * stride + j) = acc[i][j];
                }
            }
        }
    }
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

    fn reference(a: Matrix, b: Matrix, c: &[f32], store: Store) -> Vec<f64> {
        let at = |m: &Matrix, i: usize, j: usize| f64::from(m.data[i * m.row_stride + j * m.col_stride]);
        let element = |i, j| (0..a.cols).map(|p| at(&a, i, p) * at(&b, p, j)).sum::<f64>();
        let old = |i: usize| if store == Store::Add { f64::from(c[i]) } else { 0.0 };
        (0..a.rows * b.cols).map(|i| old(i) + element(i / b.cols, i % b.cols)).collect()
    }

    #[test]
    fn every_shape_family_and_transposition_agrees_with_f64() {
        for family in Family::ALL.into_iter().filter(|f| f.available()) {
            let mut ctx = Ctx::cpu(family);
            let shapes = [(1, 1, 1), (5, 3, 7), (13, 70, 65), (48, 64, 64), (7, 1100, 33), (200, 31, 130), (6, 0, 4)];
            for (m, k, n) in shapes {
                for case in 0..8 {
                    let (a, b) = (numbers(1, m * k), numbers(2, k * n));
                    let a = if case & 1 == 0 { Matrix::new(&a, m, k) } else { Matrix::new(&a, k, m).t() };
                    let b = if case & 2 == 0 { Matrix::new(&b, k, n) } else { Matrix::new(&b, n, k).t() };
                    let store = if case & 4 == 0 { Store::Set } else { Store::Add };
                    let mut c = numbers(3, m * n);
                    let want = reference(a, b, &c, store);
                    gemm(&mut ctx, a, b, &mut c, store);
                    // A running sum of k products of size one grows like sqrt(k) and is rounded k times.
                    let bound = 5e-7 * k.max(16) as f64;
                    for (got, want) in c.iter().zip(&want) {
                        assert!((f64::from(*got) - want).abs() < bound, "{} {m}x{k}x{n} case {case}", family.name());
                    }
                }
            }
        }
    }

    #[test]
    fn the_number_of_threads_changes_no_bit() {
        let (m, k, n) = (300, 200, 150);
        let (a, b) = (numbers(1, m * k), numbers(2, k * n));
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut c = vec![0.0; m * n];
            let mut ctx = Ctx::cpu(Family::detect());
            pool.install(|| gemm(&mut ctx, Matrix::new(&a, m, k), Matrix::new(&b, k, n), &mut c, Store::Set));
            c
        };
        let one = run(1);
        assert!([2, 3, 7].into_iter().all(|threads| run(threads) == one));
    }
}
