//! Operands in the order in which the tiles read them. bf16 is rounded here, in the same pass.

use super::factor::Factor;
use super::tile::RowTiles;
use super::{Family, Matrix};
use crate::ops::simd::simd_fn;

/// Runs `f` on A as the tiles read it: where it lies if that is possible, or a copy. The columns of a transposed operand
/// are brought together tile by tile, so that a tile does not touch a new page at every step.
pub fn with_row_tiles<E: Factor>(family: Family, a: Matrix, tile: usize, f: impl FnOnce(RowTiles<E>)) {
    a.check();
    let (rows, cols) = (a.rows, a.cols.div_ceil(E::STEPS));
    if let Some(data) = E::in_place(a) {
        let row_stride = a.row_stride;
        return f(RowTiles { data, rows, cols, tile_stride: tile * row_stride, row_stride, col_stride: 1 });
    }
    E::with_scratch(rows.next_multiple_of(tile) * cols, |copy| {
        if a.col_stride == 1 {
            copy_rows(family, a, copy);
            return f(RowTiles { data: copy, rows, cols, tile_stride: tile * cols, row_stride: cols, col_stride: 1 });
        }
        match tile {
            4 => copy_tiles::<E, 4>(family, a, copy),
            6 => copy_tiles::<E, 6>(family, a, copy),
            12 => copy_tiles::<E, 12>(family, a, copy),
            _ => unreachable!("tile heights come from `tile_rows`"),
        }
        f(RowTiles { data: copy, rows, cols, tile_stride: tile * cols, row_stride: 1, col_stride: tile });
    });
}

simd_fn! {
/// The rows of A, which are contiguous, as (rows, k).
fn copy_rows<S, type E: Factor>(a: Matrix, to: &mut [E]) {
    for (i, to) in to.chunks_exact_mut(a.cols.div_ceil(E::STEPS)).take(a.rows).enumerate() {
        run(&a.data[i * a.row_stride..][..a.cols], to);
    }
}
}

/// Elements of contiguous steps; a step past the last is zero.
#[inline(always)]
fn run<E: Factor>(from: &[f32], to: &mut [E]) {
    if E::STEPS == 1 {
        for (to, x) in to.iter_mut().zip(from) {
            *to = E::new(*x, 0.0);
        }
    } else {
        let (pairs, rest) = from.as_chunks::<2>();
        for (to, [first, second]) in to.iter_mut().zip(pairs) {
            *to = E::new(*first, *second);
        }
        if let (Some(to), [last]) = (to.last_mut(), rest) {
            *to = E::new(*last, 0.0);
        }
    }
}

simd_fn! {
/// A as [rows / TILE][k][TILE]. The tile height is a constant, so that a copy is a move or two and not a call.
fn copy_tiles<S, type E: Factor, const TILE: usize>(a: Matrix, to: &mut [E]) {
    let steps = a.cols.div_ceil(E::STEPS);
    for p in 0..steps {
        let (first, second) = neighbours::<E>(&a.data[p * E::STEPS * a.col_stride..], a.col_stride, p * E::STEPS + 1 < a.cols);
        if a.row_stride == 1 {
            let whole = a.rows / TILE;
            for t in 0..whole {
                let first: &[f32; TILE] = first[t * TILE..].first_chunk().expect("a tile of A");
                let second: Option<&[f32; TILE]> = second.map(|s| s[t * TILE..].first_chunk().expect("a tile of A"));
                let to: &mut [E; TILE] = to[(t * steps + p) * TILE..].first_chunk_mut().expect("a tile of the copy");
                join(first, second, to);
            }
            for i in whole * TILE..a.rows {
                to[(whole * steps + p) * TILE + i % TILE] = E::new(first[i], second.map_or(0.0, |s| s[i]));
            }
        } else {
            for i in 0..a.rows {
                let at = i * a.row_stride;
                to[(i / TILE * steps + p) * TILE + i % TILE] = E::new(first[at], second.map_or(0.0, |s| s[at]));
            }
        }
    }
}
}

/// What starts at a step of k, and at the one after it if it is there and an element holds it too.
#[inline(always)]
fn neighbours<E: Factor>(data: &[f32], stride: usize, more: bool) -> (&[f32], Option<&[f32]>) {
    (data, (E::STEPS == 2 && more).then(|| &data[stride..]))
}

#[inline(always)]
fn join<E: Factor, const N: usize>(first: &[f32; N], second: Option<&[f32; N]>, to: &mut [E; N]) {
    let second = second.unwrap_or(&[0.0; N]);
    for j in 0..N {
        to[j] = E::new(first[j], second[j]);
    }
}

/// Packs the panel of B that begins at column `panel * width`, `[k][width]`; columns past the last are zero.
pub fn pack_panel<E: Factor>(family: Family, b: Matrix, panel: usize, width: usize, packed: &mut [E]) {
    b.check();
    let first = panel * width;
    let part =
        Matrix { data: &b.data[(first * b.col_stride).min(b.data.len())..], cols: width.min(b.cols - first), ..b };
    match (width, part.cols == width) {
        (64, true) => pack_whole::<E, 64>(family, part, packed),
        (32, true) => pack_whole::<E, 32>(family, part, packed),
        (16, true) => pack_whole::<E, 16>(family, part, packed),
        (8, true) => pack_whole::<E, 8>(family, part, packed),
        _ => pack_partial(family, part, width, packed),
    }
}

#[inline(always)]
fn element<E: Factor>(b: &Matrix, p: usize, j: usize) -> E {
    let at = p * E::STEPS * b.row_stride + j * b.col_stride;
    let more = E::STEPS == 2 && p * E::STEPS + 1 < b.rows;
    E::new(b.data[at], if more { b.data[at + b.row_stride] } else { 0.0 })
}

simd_fn! {
/// A panel with fewer columns than its width; the others are zero.
fn pack_partial<S, type E: Factor>(b: Matrix, width: usize, packed: &mut [E]) {
    packed.fill(E::default());
    if b.col_stride == 1 {
        for (p, row) in packed.chunks_exact_mut(width).enumerate() {
            let (first, second) = neighbours::<E>(&b.data[p * E::STEPS * b.row_stride..], b.row_stride, p * E::STEPS + 1 < b.rows);
            match second {
                None => row.iter_mut().zip(&first[..b.cols]).for_each(|(to, x)| *to = E::new(*x, 0.0)),
                Some(second) => {
                    let pairs = first[..b.cols].iter().zip(second);
                    row.iter_mut().zip(pairs).for_each(|(to, (x, y))| *to = E::new(*x, *y));
                }
            }
        }
        return;
    }
    for j in 0..b.cols {
        for (p, row) in packed.chunks_exact_mut(width).enumerate() {
            row[j] = element(&b, p, j);
        }
    }
}
}

simd_fn! {
/// A panel of W whole columns. With W constant a row is written by a few moves, not a call, and a block of a
/// transposed operand is turned in registers.
fn pack_whole<S, type E: Factor, const W: usize>(b: Matrix, packed: &mut [E]) {
    let rows = packed.as_chunks_mut::<W>().0;
    if b.col_stride == 1 {
        for (p, row) in rows.iter_mut().enumerate() {
            let (first, second) = neighbours::<E>(&b.data[p * E::STEPS * b.row_stride..], b.row_stride, p * E::STEPS + 1 < b.rows);
            let first: &[f32; W] = first.first_chunk().expect("a row of B is as wide as the panel");
            join(first, second.map(|s| s.first_chunk().expect("a row of B is as wide as the panel")), row);
        }
        return;
    }
    // Blocks of 16 elements, so that both sides stay in the first-level cache; within them squares of four by four, which
    // are turned in registers.
    const BLOCK: usize = 16;
    let whole = if b.row_stride == 1 { b.rows / (BLOCK * E::STEPS) } else { 0 };
    for block in 0..whole {
        let (rows, first) = (&mut rows[block * BLOCK..][..BLOCK], block * BLOCK * E::STEPS);
        for j in (0..W).step_by(4) {
            let mut columns = [[E::default(); BLOCK]; 4];
            for q in 0..4 {
                run(&b.data[first + (j + q) * b.col_stride..][..BLOCK * E::STEPS], &mut columns[q]);
            }
            for p in 0..BLOCK {
                let square = [columns[0][p], columns[1][p], columns[2][p], columns[3][p]];
                *rows[p][j..].first_chunk_mut().expect("panel widths are multiples of four") = square;
            }
        }
    }
    for p in whole * BLOCK..rows.len() {
        for j in 0..W {
            rows[p][j] = element(&b, p, j);
        }
    }
}
}
