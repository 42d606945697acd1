//! The product of a few rows with a packed weight: the one matrix product of decoding, for 1 row or for 64.
//!
//! Called by every op of the decode list. Batch invariance is kept here: each output is one chain of `fma` over k in
//! index order, whatever the number of rows, the tile it falls into or the number of threads, so a row's result has the
//! same bits alone and beside others. Latency is hidden by several columns and rows in a tile, never by splitting k.
//! Weights lie in panels `[n / 64][k][64]` (the last one narrower), so one row streams them once, front to back; with
//! more rows a panel stays in the second-level cache while the row tiles pass over it, so memory is read once too.

use rayon::prelude::*;

use super::aligned::{Aligned, Arena, prefetch};
use crate::ops::ctx::Ctx;
use crate::ops::gemm::Store;
use crate::ops::simd::{Family, simd_fn};

/// Columns of a panel.
const PANEL: usize = 64;
/// The last panel is as wide as the columns left, rounded up to this; every tile width divides one of the two.
const LANES: usize = 16;
/// Below this many multiply-adds a hand-off to other threads costs more than it gains.
const SERIAL: usize = 64 * 1024;

/// A weight (n, k) packed for `multiply`; made once when a model is loaded.
pub struct Panels {
    data: Aligned,
    n: usize,
    k: usize,
}

impl Panels {
    /// Packs row-major matrices of `k` columns, one below the other.
    pub fn pack(arena: &mut Arena, parts: &[&[f32]], k: usize) -> Self {
        let n: usize = parts.iter().map(|part| part.len() / k).sum();
        assert!(parts.iter().all(|part| part.len() % k == 0), "each part has rows of {k}");
        let mut panels = Self { data: arena.zeros(n.div_ceil(LANES) * LANES * k), n, k };
        for (i, row) in parts.iter().flat_map(|part| part.chunks_exact(k)).enumerate() {
            let (start, width) = panels.place(i);
            for (to, from) in panels.data[start..].iter_mut().step_by(width).zip(row) {
                *to = *from;
            }
        }
        panels
    }

    /// Rows of the weight: the columns of a product.
    pub fn outputs(&self) -> usize {
        self.n
    }

    /// Columns of the weight: the length of a row that it multiplies.
    pub fn inputs(&self) -> usize {
        self.k
    }

    /// Memory of the packed weight, its padding included.
    pub fn bytes(&self) -> usize {
        self.data.len() * 4
    }

    /// Copies row `i` of the weight: a token's vector, when the table is the head too.
    pub fn unpack_row(&self, i: usize, row: &mut [f32]) {
        assert!(i < self.n && row.len() == self.k, "row {i} of {} x {}", self.n, self.k);
        let (start, width) = self.place(i);
        for (to, from) in row.iter_mut().zip(self.data[start..].iter().step_by(width)) {
            *to = *from;
        }
    }

    /// Where row `i` starts and how far apart its elements lie.
    fn place(&self, i: usize) -> (usize, usize) {
        let panel = i / PANEL;
        (panel * PANEL * self.k + i % PANEL, self.width(panel))
    }

    fn count(&self) -> usize {
        self.n.div_ceil(PANEL)
    }

    fn width(&self, panel: usize) -> usize {
        PANEL.min((self.n - panel * PANEL).div_ceil(LANES) * LANES)
    }
}

/// y (m, n) = x (m, k) W^T, or y + x W^T.
pub fn multiply(ctx: &Ctx, x: &[f32], weight: &Panels, y: &mut [f32], store: Store) {
    let (n, k) = (weight.n, weight.k);
    let m = y.len() / n;
    assert_eq!((x.len(), y.len()), (m * k, m * n), "rows of {k} to rows of {n}");
    if m == 0 {
        return;
    }
    let job = Job { x, weight, family: ctx.family(), m, y: Output(y.as_mut_ptr()), add: store == Store::Add };
    let threads = if m * n * k < SERIAL { 1 } else { rayon::current_num_threads() };
    if threads == 1 {
        return job.panels(0, weight.count());
    }
    // Two tasks a thread, so that one whose core is busy elsewhere can be helped; more would only cost hand-offs.
    let tasks = (2 * threads).min(weight.count());
    let bound = |task: usize| task * weight.count() / tasks;
    (0..tasks).into_par_iter().with_max_len(1).for_each(|task| job.panels(bound(task), bound(task + 1)));
}

/// The output, written by several threads at once.
#[derive(Clone, Copy)]
struct Output(*mut f32);
// SAFETY: tasks write disjoint columns (each panel belongs to one task), and `multiply` holds the exclusive borrow of
// the memory until all of them are done.
unsafe impl Send for Output {}
// SAFETY: as above.
unsafe impl Sync for Output {}

struct Job<'a> {
    x: &'a [f32],
    weight: &'a Panels,
    family: Family,
    m: usize,
    y: Output,
    add: bool,
}

impl Job<'_> {
    fn panels(&self, start: usize, end: usize) {
        for panel in start..end {
            let (k, width) = (self.weight.k, self.weight.width(panel));
            let data = &self.weight.data[panel * PANEL * k..][..width * k];
            let tiles = self.m.div_ceil(max_rows(self.family));
            for tile in 0..tiles {
                // Tiles of nearly equal height: one row left over would run at a fraction of the speed.
                let (from, to) = (tile * self.m / tiles, (tile + 1) * self.m / tiles);
                self.rows(panel, data, from, to - from);
            }
        }
    }

    /// `rows` rows from row `first` on, times one panel.
    fn rows(&self, panel: usize, data: &[f32], first: usize, rows: usize) {
        let (n, k, width) = (self.weight.n, self.weight.k, self.weight.width(panel));
        let x = &self.x[first * k..][..rows * k];
        let wide = tile_width(self.family, rows);
        let tile_width = if width.is_multiple_of(wide) { wide } else { LANES };
        for offset in (0..width).step_by(tile_width) {
            let column = panel * PANEL + offset;
            let tile = Tile { x, k, panel: &data[offset..], stride: width };
            let cols = tile_width.min(n.saturating_sub(column));
            // SAFETY: row `first + rows - 1` < m and columns `column..column + cols` <= n lie inside y, and this
            // task alone writes them.
            unsafe {
                tile.run(
                    self.family,
                    rows,
                    tile_width,
                    Target { y: self.y.0.add(first * n + column), n, cols },
                    self.add,
                )
            };
        }
    }
}

/// Rows of the highest tile.
fn max_rows(family: Family) -> usize {
    if family == Family::Portable { 4 } else { 6 }
}

/// Columns of a tile of that many rows: enough chains to hide the latency of fma, few enough for the registers.
fn tile_width(family: Family, rows: usize) -> usize {
    match (family, rows) {
        (Family::Avx512Bf16 | Family::Avx512, _) => 64,
        (Family::Portable, 1) => 32,
        (Family::Portable, 2) => 16,
        (Family::Portable, _) => 8,
        (_, 1) => 64,
        (_, 2) => 32,
        _ => 16,
    }
}

#[derive(Clone, Copy)]
struct Tile<'a> {
    x: &'a [f32],
    k: usize,
    panel: &'a [f32],
    stride: usize,
}

#[derive(Clone, Copy)]
struct Target {
    y: *mut f32,
    n: usize,
    cols: usize,
}

impl Tile<'_> {
    /// # Safety
    /// `target` must point at `rows` rows of `cols` elements, `n` apart, that nobody else uses.
    unsafe fn run(self, family: Family, rows: usize, width: usize, target: Target, add: bool) {
        macro_rules! tiles {
            ($($m:literal x $n:literal),*) => {
                match (rows, width) {
                    $(($m, $n) => {
                        let sums = tile::<$m, $n>(family, self.x, self.k, self.panel, self.stride);
                        for (i, sums) in sums.iter().enumerate() {
                            // SAFETY: the caller's promise.
                            let y = unsafe { std::slice::from_raw_parts_mut(target.y.add(i * target.n), target.cols) };
                            if add {
                                y.iter_mut().zip(sums).for_each(|(y, sum)| *y += sum);
                            } else {
                                y.copy_from_slice(&sums[..target.cols]);
                            }
                        }
                    })*
                    _ => unreachable!("tile of {rows} x {width}"),
                }
            };
        }
        tiles!(1 x 64, 2 x 64, 3 x 64, 4 x 64, 5 x 64, 6 x 64, 1 x 32, 2 x 32, 1 x 16, 2 x 16, 3 x 16, 4 x 16, 5 x 16,
               6 x 16, 3 x 8, 4 x 8);
    }
}

simd_fn! {
/// MR rows times NR columns of a panel. Constant bounds and nothing that can fail inside the loops, so that `acc` lives
/// in registers (see `gemm::full_tile`).
#[allow(clippy::needless_range_loop)] // The form that is unrolled whole.
fn tile<S, const MR: usize, const NR: usize>(x: &[f32], k: usize, panel: &[f32], stride: usize) -> [[f32; NR]; MR] {
    let mut acc = [[0f32; NR]; MR];
    if k > 0 {
        assert!(x.len() >= MR * k && panel.len() >= (k - 1) * stride + NR, "the tile exceeds its operands");
    }
    let (x, panel) = (x.as_ptr(), panel.as_ptr());
    for p in 0..k {
        // SAFETY: p < k, i < MR: the largest indices are those checked above.
        unsafe {
            let w = &*panel.add(p * stride).cast::<[f32; NR]>();
            prefetch::<NR>(panel.wrapping_add(p * stride + AHEAD));
            for i in 0..MR {
                let x = *x.add(i * k + p);
                for j in 0..NR {
                    acc[i][j] = S::fma(x, w[j], acc[i][j]);
                }
            }
        }
    }
    acc
}
}

/// How many elements ahead a tile asks for its panel: 4 KB. With one row the hardware's prefetch does as well; with four
/// or more, whose steps take longer, this gained a third on weights in the third-level cache.
const AHEAD: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::{Purpose, Stream};

    fn numbers(salt: u64, len: usize) -> Vec<f32> {
        let stream = Stream::new(3, Purpose::Test);
        (0..len).map(|i| stream.normal(salt, i as u32)).collect()
    }

    fn contexts() -> impl Iterator<Item = Ctx> {
        Family::ALL.into_iter().filter(|f| f.available()).map(Ctx::cpu)
    }

    #[test]
    fn a_row_has_the_same_bits_alone_and_beside_others() {
        for ctx in contexts() {
            for (n, k) in [(1, 1), (16, 9), (40, 24), (64, 33), (130, 70), (200, 400)] {
                let (weight, x) = (numbers(1, n * k), numbers(2, 33 * k));
                let panels = Panels::pack(&mut Arena::default(), &[&weight], k);
                let mut alone = vec![f32::NAN; 33 * n];
                for (x, y) in x.chunks(k).zip(alone.chunks_mut(n)) {
                    multiply(&ctx, x, &panels, y, Store::Set);
                }
                for m in 1..=33 {
                    let mut y = vec![f32::NAN; m * n];
                    multiply(&ctx, &x[..m * k], &panels, &mut y, Store::Set);
                    assert!(y == alone[..m * n], "{} {m} rows, {n} x {k}", ctx.family().name());
                    // Added to something, the product itself must still be the same.
                    multiply(&ctx, &x[..m * k], &panels, &mut y, Store::Add);
                    assert!(y.iter().zip(&alone).all(|(y, once)| *y == once + once), "{m} rows added");
                }
            }
        }
    }

    #[test]
    fn products_agree_with_f64_and_each_output_is_one_chain() {
        for ctx in contexts() {
            let (m, n, k) = (3, 150, 220);
            let (weight, x) = (numbers(1, n * k), numbers(2, m * k));
            let panels = Panels::pack(&mut Arena::default(), &[&weight[..70 * k], &weight[70 * k..]], k);
            let mut y = vec![0.0; m * n];
            multiply(&ctx, &x, &panels, &mut y, Store::Set);
            for (i, y) in y.iter().enumerate() {
                let pairs = || x[i / n * k..][..k].iter().zip(&weight[i % n * k..][..k]);
                let exact: f64 = pairs().map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                assert!((f64::from(*y) - exact).abs() < 1e-4, "{y} against {exact}");
                let chain = pairs().fold(0f32, |sum, (x, w)| match ctx.family() {
                    Family::Portable => x * w + sum,
                    _ => x.mul_add(*w, sum),
                });
                assert_eq!(*y, chain, "{}", ctx.family().name());
            }
        }
    }

    #[test]
    fn rows_come_back_out_of_the_panels() {
        let (n, k) = (83, 7);
        let weight = numbers(1, n * k);
        let panels = Panels::pack(&mut Arena::default(), &[&weight], k);
        let mut row = vec![0.0; k];
        for (i, want) in weight.chunks(k).enumerate() {
            panels.unpack_row(i, &mut row);
            assert_eq!(row, want, "row {i}");
        }
    }
}
