//! Register tiles: MR rows of A times one panel of B.

use super::factor::Factor;
use super::{Family, Matrix, Store, tile_rows};
use crate::ops::simd::simd_fn;

/// A as the register tiles read it: element (i, p) is
/// `data[i / tile * tile_stride + i % tile * row_stride + p * col_stride]`.
#[derive(Clone, Copy)]
pub struct RowTiles<'a, E> {
    pub data: &'a [E],
    pub rows: usize,
    pub cols: usize,
    pub tile_stride: usize,
    pub row_stride: usize,
    pub col_stride: usize,
}

/// Where a panel's product goes: rows of `stride` elements, of which the first `cols` columns are written.
pub struct Tile<'a> {
    pub c: &'a mut [f32],
    pub stride: usize,
    pub cols: usize,
    pub store: Store,
}

/// C (rows, cols) = A (rows, k) times one panel `[k][width]`; `width` is what `panel_width` gave.
pub fn multiply_panel(family: Family, width: usize, a: Matrix, panel: &[f32], out: Tile) {
    a.check();
    let Matrix { data, rows, cols, row_stride, col_stride } = a;
    let tile_stride = tile_rows(family, width) * row_stride;
    multiply_tiles(family, width, RowTiles { data, rows, cols, tile_stride, row_stride, col_stride }, panel, out);
}

pub fn multiply_tiles<E: Factor>(family: Family, width: usize, a: RowTiles<E>, panel: &[E], out: Tile) {
    match width {
        64 => rows_of_tiles::<E, 6, 64>(family, a, panel, out),
        32 => rows_of_tiles::<E, 12, 32>(family, a, panel, out),
        16 if matches!(family, Family::Avx512 | Family::Avx512Bf16) => {
            rows_of_tiles::<E, 12, 16>(family, a, panel, out)
        }
        16 => rows_of_tiles::<E, 6, 16>(family, a, panel, out),
        8 => rows_of_tiles::<E, 4, 8>(family, a, panel, out),
        _ => unreachable!("panel width {width} comes from `panel_width`"),
    }
}

fn rows_of_tiles<E: Factor, const MR: usize, const NR: usize>(family: Family, a: RowTiles<E>, panel: &[E], out: Tile) {
    let Tile { c, stride, cols, store } = out;
    let mut i = 0;
    while i < a.rows {
        let part = RowTiles { data: &a.data[i / MR * a.tile_stride + i % MR * a.row_stride..], ..a };
        let out = Tile { c: &mut c[i * stride..], stride, cols, store };
        i += match a.rows - i {
            left if left >= MR => tile::<E, MR, NR>(family, part, panel, out),
            4.. => tile::<E, 4, NR>(family, part, panel, out),
            2.. => tile::<E, 2, NR>(family, part, panel, out),
            _ => tile::<E, 1, NR>(family, part, panel, out),
        };
    }
}

/// The first MR rows of `a` times a panel; returns MR. The last panel's columns past C go through a whole tile.
fn tile<E: Factor, const MR: usize, const NR: usize>(family: Family, a: RowTiles<E>, panel: &[E], out: Tile) -> usize {
    let Tile { c, stride, cols, store } = out;
    if cols >= NR {
        E::tile::<MR, NR>(family, a, panel, c, stride, store == Store::Add);
    } else {
        let mut whole = [[0f32; NR]; MR];
        E::tile::<MR, NR>(family, a, panel, whole.as_flattened_mut(), NR, false);
        for (row, c) in whole.iter().zip(c.chunks_mut(stride)) {
            for (c, x) in c[..cols].iter_mut().zip(row) {
                *c = if store == Store::Add { *c + x } else { *x };
            }
        }
    }
    MR
}

/// Panics unless MR x NR tiles of these operands lie inside the slices; the tiles below rely on it.
#[inline(always)]
fn check<E, const MR: usize, const NR: usize>(a: &RowTiles<E>, panel: &[E], c: &[f32], stride: usize) {
    let RowTiles { data, cols: k, row_stride, col_stride, .. } = *a;
    assert!(k > 0 && (MR - 1) * row_stride + (k - 1) * col_stride < data.len(), "A is smaller than the tile");
    assert!(panel.len() >= k * NR && c.len() >= (MR - 1) * stride + NR, "B or C is smaller than the tile");
}

simd_fn! {
/// MR rows times NR columns. The loops have constant bounds and nothing in them can fail: only then are they unrolled
/// whole and `acc` lives in registers (checked by the speed: otherwise it is five times slower).
pub fn full_tile<S, type E: Factor, const MR: usize, const NR: usize>(a: RowTiles<E>, panel: &[E], c: &mut [f32], stride: usize, add: bool) {
    check::<E, MR, NR>(&a, panel, c, stride);
    let RowTiles { data, cols: k, row_stride, col_stride, .. } = a;
    let (a, b, c) = (data.as_ptr(), panel.as_ptr(), c.as_mut_ptr());
    // SAFETY: i < MR, p < k and j < NR, so the largest index into each slice is the one checked above; `c` is borrowed
    // exclusively, and a factor has no invalid values.
    unsafe {
        let mut acc = [[0f32; NR]; MR];
        for p in 0..k {
            let b = &*b.add(p * NR).cast::<[E; NR]>();
            for i in 0..MR {
                let x = *a.add(i * row_stride + p * col_stride);
                for j in 0..NR {
                    acc[i][j] = E::dot::<S>(x, b[j], acc[i][j]);
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

/// `full_tile` of bf16 by the CPU's dot products: two multiplications and additions a lane and instruction. It adds the
/// two products before the sum and takes denormals for zero, so its last bits are a family's own.
#[cfg(target_arch = "x86_64")]
pub fn dot_tile<const MR: usize, const NR: usize>(
    a: RowTiles<u32>,
    panel: &[u32],
    c: &mut [f32],
    stride: usize,
    add: bool,
) {
    check::<u32, MR, NR>(&a, panel, c, stride);
    // SAFETY: the family that leads here is available only where the CPU has these features, and the slices were checked.
    unsafe { dot_tile_inner::<MR, NR>(a, panel, c, stride, add) }
}

/// # Safety
/// The CPU has the features, and `check` passed.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
#[allow(clippy::needless_range_loop)] // The form that is unrolled whole.
unsafe fn dot_tile_inner<const MR: usize, const NR: usize>(
    a: RowTiles<u32>,
    panel: &[u32],
    c: &mut [f32],
    stride: usize,
    add: bool,
) {
    use std::arch::x86_64::{
        __m512bh, __m512i, _mm512_add_ps, _mm512_dpbf16_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_set1_epi32,
        _mm512_setzero_ps, _mm512_setzero_si512, _mm512_storeu_ps,
    };
    // Both types are sixteen words; the conversion costs nothing.
    let pairs = |x: __m512i| unsafe { std::mem::transmute::<__m512i, __m512bh>(x) };
    let RowTiles { data, cols: k, row_stride, col_stride, .. } = a;
    let (a, b, c) = (data.as_ptr(), panel.as_ptr(), c.as_mut_ptr());
    // NR / 16 vectors of at most four.
    let mut acc = [[_mm512_setzero_ps(); 4]; MR];
    // SAFETY: i < MR, p < k and j < NR / 16, so every access ends within what `check` found inside the slices.
    unsafe {
        for p in 0..k {
            let mut row = [_mm512_setzero_si512(); 4];
            for j in 0..NR / 16 {
                row[j] = _mm512_loadu_si512(b.add(p * NR + j * 16).cast());
            }
            for i in 0..MR {
                let x = _mm512_set1_epi32(*a.add(i * row_stride + p * col_stride) as i32);
                for j in 0..NR / 16 {
                    acc[i][j] = _mm512_dpbf16_ps(acc[i][j], pairs(x), pairs(row[j]));
                }
            }
        }
        for i in 0..MR {
            for j in 0..NR / 16 {
                let to = c.add(i * stride + j * 16);
                let sum = if add { _mm512_add_ps(_mm512_loadu_ps(to), acc[i][j]) } else { acc[i][j] };
                _mm512_storeu_ps(to, sum);
            }
        }
    }
}
