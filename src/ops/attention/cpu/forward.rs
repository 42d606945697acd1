//! The forward: for each block of queries an online softmax over the blocks of keys that it sees.

use rayon::prelude::*;

use super::super::Attention;
use super::{Columns, KEYS, Plan, QUERIES, copy_rows, store_row, with_scratch};
use crate::ops::gemm::Store;
use crate::ops::simd::{Family, LANES, exp, fold, simd_fn};

/// Writes out (N, H D) and lse (B H T).
pub fn forward(family: Family, shape: Attention, qkv: &[f32], out: &mut [f32], lse: &mut [f32]) {
    let Attention { batch, seq, heads, .. } = shape;
    let plan = Plan::new(family, shape);
    let out = Columns::new(out, heads.attention_size());
    let lse = Columns::new(lse, seq);
    let tasks = batch * heads.key_value;
    // Few heads are split further by blocks of queries: a query's result does not depend on its neighbours.
    let splits = (2 * rayon::current_num_threads()).div_ceil(tasks).min(plan.query_blocks() / 4).max(1);
    let splits = if rayon::current_num_threads() == 1 { 1 } else { splits };
    (0..tasks * splits).into_par_iter().for_each(|task| {
        let (head, split) = (task / splits, task % splits);
        let task = Task { plan, qkv, sequence: head / heads.key_value, key_head: head % heads.key_value };
        with_scratch(scratch(&plan), |scratch| task.run((split, splits), scratch, out, lse));
    });
}

/// Lengths of: panels of keys and of values, a block of queries, of scores, of outputs.
pub fn scratch(plan: &Plan) -> [usize; 5] {
    let Attention { seq, heads, .. } = plan.shape;
    [plan.key_panels(), seq * plan.padded, QUERIES * heads.dim, QUERIES * KEYS, QUERIES * plan.padded]
}

/// One sequence and key/value head.
struct Task<'a> {
    plan: Plan<'a>,
    qkv: &'a [f32],
    sequence: usize,
    key_head: usize,
}

impl Task<'_> {
    /// Every `splits`th block of queries from `split` on, so that all splits get short and long ones.
    fn run(&self, (split, splits): (usize, usize), scratch: [&mut [f32]; 5], out: Columns, lse: Columns) {
        let (plan, Attention { seq, heads, .. }) = (self.plan, self.plan.shape);
        let sight = plan.shape.sight(self.sequence);
        let [keys, values, queries, scores, sums] = scratch;
        let head = |h: usize| plan.head(self.qkv, self.sequence, h * heads.dim, heads.qkv_size());
        plan.pack_keys(head(heads.attention + self.key_head), keys);
        plan.pack_rows(head(heads.attention + heads.key_value + self.key_head), values);
        for h in (self.key_head * heads.group()..).take(heads.group()) {
            for range in (split..plan.query_blocks()).step_by(splits).map(|block| plan.queries(block)) {
                copy_rows(plan.family, head(h), range.clone(), plan.shape.scale(), queries);
                let mut rows = [Softmax::START; QUERIES];
                sums.fill(0.0);
                for meeting in Plan::meetings(sight, range.clone()) {
                    plan.times_keys(queries, keys, &meeting, scores);
                    meeting.mask(sight, scores);
                    let sums = &mut sums[meeting.rows.start * plan.padded..meeting.rows.end * plan.padded];
                    let rows = &mut rows[meeting.rows.clone()];
                    softmax_rows(plan.family, scores, meeting.lanes(), rows, sums, plan.padded);
                    plan.add_product(meeting.block(scores), values, (meeting.first_key, seq), sums);
                }
                for ((t, row), sums) in range.zip(&rows).zip(sums.chunks_exact(plan.padded)) {
                    let (lse_row, out_row) = (self.sequence * heads.attention + h, self.sequence * seq + t);
                    // SAFETY: this task alone has this query of this head, and the slices end here.
                    let (lse, out) =
                        unsafe { (lse.slice(lse_row, t, 1), out.slice(out_row, h * heads.dim, heads.dim)) };
                    let sum = fold(row.sum);
                    lse[0] = row.max + sum.ln();
                    store_row(plan.family, out, sums, 1.0 / sum, Store::Set);
                }
            }
        }
    }
}

/// The softmax of one query over the keys seen so far.
#[derive(Clone, Copy)]
struct Softmax {
    max: f32,
    /// Σ e^(score - max), in lanes.
    sum: [f32; LANES],
}

impl Softmax {
    /// Not -infinity: a difference of two would be NaN in a row whose first block is hidden from it.
    const START: Self = Self { max: f32::MIN, sum: [0.0; LANES] };
}

simd_fn! {
/// Turns rows of scores into e^(score - max), their largest so far; rescales the sums made with a smaller one.
fn softmax_rows<S>(scores: &mut [f32], columns: usize, rows: &mut [Softmax], sums: &mut [f32], stride: usize) {
    for ((scores, row), sums) in scores.chunks_exact_mut(KEYS).zip(rows).zip(sums.chunks_exact_mut(stride)) {
        let (scores, _) = scores[..columns].as_chunks_mut::<LANES>();
        let max = largest(scores);
        if max > row.max {
            let factor = exp::<S>(row.max - max);
            row.max = max;
            row.sum.iter_mut().for_each(|x| *x *= factor);
            sums.iter_mut().for_each(|x| *x *= factor);
        }
        let (max, mut sum) = (row.max, row.sum);
        for scores in scores {
            for i in 0..LANES {
                scores[i] = exp::<S>(scores[i] - max);
                sum[i] += scores[i];
            }
        }
        row.sum = sum;
    }
}
}

/// The largest element; a NaN may be passed over (it then shows in the sums).
#[inline(always)]
fn largest(scores: &[[f32; LANES]]) -> f32 {
    let mut max = [f32::MIN; LANES];
    for scores in scores {
        for i in 0..LANES {
            max[i] = if scores[i] > max[i] { scores[i] } else { max[i] };
        }
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            max[i] = if max[i + width] > max[i] { max[i + width] } else { max[i] };
        }
        width /= 2;
    }
    max[0]
}
