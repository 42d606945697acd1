//! f32 products through Apple's Accelerate, which has the CPU's matrix units to itself: no instruction for them is public.
//!
//! Called by `gemm` for training; decoding needs its own order of sums and never comes here. Accelerate chooses its threads
//! and blocks itself, so on a Mac the losses of two thread counts agree only to rounding.

use super::{Matrix, Store};

/// CBLAS's names for the order and the transpositions.
const ROW_MAJOR: i32 = 101;
const AS_IS: i32 = 111;
const TRANSPOSED: i32 = 112;

#[link(name = "Accelerate", kind = "framework")]
unsafe extern "C" {
    fn cblas_sgemm(
        order: i32,
        trans_a: i32,
        trans_b: i32,
        m: i32,
        n: i32,
        k: i32,
        alpha: f32,
        a: *const f32,
        lda: i32,
        b: *const f32,
        ldb: i32,
        beta: f32,
        c: *mut f32,
        ldc: i32,
    );
}

/// C (m, n) = A (m, k) B (k, n), or C + A B, if the shapes are those of a CBLAS call; whether it was done.
pub fn gemm(a: Matrix, b: Matrix, c: &mut [f32], store: Store) -> bool {
    let (m, n, k) = (a.rows, b.cols, a.cols);
    let (Some((trans_a, lda)), Some((trans_b, ldb))) = (layout(a), layout(b)) else { return false };
    let sizes = [m, n, k, lda, ldb].map(|size| i32::try_from(size).unwrap_or(0));
    if sizes.contains(&0) {
        return false;
    }
    a.check();
    b.check();
    assert_eq!(c.len(), m * n, "{m} x {n}");
    let [m, n, k, lda, ldb] = sizes;
    let beta = if store == Store::Add { 1.0 } else { 0.0 };
    let (a, b, c) = (a.data.as_ptr(), b.data.as_ptr(), c.as_mut_ptr());
    // SAFETY: `check` found every element of A and B inside its slice, C has m rows of n, and the leading dimensions are the
    // distances of those rows.
    unsafe { cblas_sgemm(ROW_MAJOR, trans_a, trans_b, m, n, k, 1.0, a, lda, b, ldb, beta, c, n) };
    true
}

/// Whether a matrix can be an operand.
pub fn reads(matrix: Matrix) -> bool {
    layout(matrix).is_some()
}

/// The transposition and the leading dimension with which CBLAS sees a matrix, if it can.
fn layout(matrix: Matrix) -> Option<(i32, usize)> {
    match (matrix.row_stride, matrix.col_stride) {
        (stride, 1) if stride >= matrix.cols => Some((AS_IS, stride)),
        (1, stride) if stride >= matrix.rows => Some((TRANSPOSED, stride)),
        _ => None,
    }
}
