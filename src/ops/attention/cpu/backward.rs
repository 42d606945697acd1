//! The backward: for each block of queries, over the blocks of keys that it sees, the probabilities again from the saved
//! logarithms, then the gradients of queries, keys and values.

use rayon::prelude::*;

use super::super::Attention;
use super::{Columns, KEYS, Meeting, Plan, QUERIES, copy_rows, store_row, with_scratch};
use crate::ops::gemm::{Matrix, Store};
use crate::ops::simd::{Family, LANES, dot, exp, simd_fn};

/// What the backward reads, as in `Saved`.
#[derive(Clone, Copy)]
pub struct Inputs<'a> {
    pub qkv: &'a [f32],
    pub out: &'a [f32],
    pub lse: &'a [f32],
    pub dout: &'a [f32],
}

/// Writes dqkv (N, (H+2K)D).
pub fn backward(family: Family, shape: Attention, inputs: Inputs, dqkv: &mut [f32], store: Store) {
    let heads = shape.heads;
    let plan = Plan::new(family, shape);
    let dqkv = Columns::new(dqkv, heads.qkv_size());
    (0..shape.batch * heads.key_value).into_par_iter().for_each(|head| {
        let (sequence, key_head) = (head / heads.key_value, head % heads.key_value);
        let task = Task { plan, inputs, sequence, key_head, store };
        with_scratch(scratch(&plan), |parts| task.run(Scratch::of(parts), dqkv));
    });
}

/// Lengths of the parts of `Scratch`.
pub fn scratch(plan: &Plan) -> [usize; 12] {
    let Attention { seq, heads, .. } = plan.shape;
    let (panels, rows) = (plan.key_panels(), seq * plan.padded);
    let (block, padded, scores) = (QUERIES * heads.dim, QUERIES * plan.padded, QUERIES * KEYS);
    [panels, panels, rows, rows, rows, block, block, padded, padded, padded, scores, scores]
}

struct Scratch<'a> {
    /// Keys and values transposed in panels, and keys as they are.
    keys_t: &'a mut [f32],
    values_t: &'a mut [f32],
    keys: &'a mut [f32],
    /// The gradients (T, padded).
    dkeys: &'a mut [f32],
    dvalues: &'a mut [f32],
    /// A block of scaled queries and of dout, as rows and as panels; the gradient of the queries.
    queries: &'a mut [f32],
    dout: &'a mut [f32],
    query_panels: &'a mut [f32],
    dout_panels: &'a mut [f32],
    dqueries: &'a mut [f32],
    /// A block of scores, then probabilities; a block of their gradients, then those of the scores.
    scores: &'a mut [f32],
    dscores: &'a mut [f32],
}

impl<'a> Scratch<'a> {
    /// The parts in the order of `scratch`.
    fn of(parts: [&'a mut [f32]; 12]) -> Self {
        let mut parts = parts.into_iter();
        let mut next = || parts.next().expect("there are as many fields as parts");
        Self {
            keys_t: next(),
            values_t: next(),
            keys: next(),
            dkeys: next(),
            dvalues: next(),
            queries: next(),
            dout: next(),
            query_panels: next(),
            dout_panels: next(),
            dqueries: next(),
            scores: next(),
            dscores: next(),
        }
    }
}

/// One sequence and key/value head.
struct Task<'a> {
    plan: Plan<'a>,
    inputs: Inputs<'a>,
    sequence: usize,
    key_head: usize,
    store: Store,
}

impl<'a> Task<'a> {
    fn run(&self, mut scratch: Scratch, dqkv: Columns) {
        let (plan, Attention { seq, heads, .. }) = (self.plan, self.plan.shape);
        let (key, value) = (heads.attention + self.key_head, heads.attention + heads.key_value + self.key_head);
        plan.pack_keys(self.qkv(key), scratch.keys_t);
        plan.pack_keys(self.qkv(value), scratch.values_t);
        plan.pack_rows(self.qkv(key), scratch.keys);
        scratch.dkeys.fill(0.0);
        scratch.dvalues.fill(0.0);
        for h in (self.key_head * heads.group()..).take(heads.group()) {
            for block in 0..plan.query_blocks() {
                self.queries(h, block, &mut scratch);
                let first = plan.queries(block).start;
                self.write(dqkv, h, first..plan.queries(block).end, scratch.dqueries, plan.shape.scale());
            }
        }
        // The queries were scaled already.
        self.write(dqkv, key, 0..seq, scratch.dkeys, 1.0);
        self.write(dqkv, value, 0..seq, scratch.dvalues, 1.0);
    }

    /// One block of queries of head `h`: its part of the gradients of keys and values, and all of its own, unscaled.
    fn queries(&self, h: usize, block: usize, scratch: &mut Scratch) {
        let (plan, Attention { seq, heads, .. }) = (self.plan, self.plan.shape);
        let (dim, padded, range) = (heads.dim, plan.padded, plan.queries(block));
        let (len, width) = (range.len(), heads.attention_size());
        let sight = plan.shape.sight(self.sequence);
        let dout = plan.head(self.inputs.dout, self.sequence, h * dim, width);
        let out = plan.head(self.inputs.out, self.sequence, h * dim, width);
        copy_rows(plan.family, self.qkv(h), range.clone(), plan.shape.scale(), scratch.queries);
        copy_rows(plan.family, dout, range.clone(), 1.0, scratch.dout);
        plan.pack_rows(Matrix::new(&scratch.queries[..len * dim], len, dim), scratch.query_panels);
        plan.pack_rows(Matrix::new(&scratch.dout[..len * dim], len, dim), scratch.dout_panels);
        let mut deltas = [0f32; QUERIES];
        delta_rows(plan.family, scratch.dout, &out.data[range.start * width..], width, dim, &mut deltas[..len]);
        let lse = &self.inputs.lse[(self.sequence * heads.attention + h) * seq + range.start..][..len];
        scratch.dqueries.fill(0.0);
        for meeting in Plan::meetings(sight, range) {
            let Meeting { rows, first_key, .. } = &meeting;
            plan.times_keys(scratch.queries, scratch.keys_t, &meeting, scratch.scores);
            plan.times_keys(scratch.dout, scratch.values_t, &meeting, scratch.dscores);
            meeting.mask(sight, scratch.scores);
            let (lse, deltas) = (&lse[rows.clone()], &deltas[rows.clone()]);
            gradient_rows(plan.family, scratch.scores, scratch.dscores, meeting.lanes(), lse, deltas);
            let (p, ds) = (meeting.block(scratch.scores), meeting.block(scratch.dscores));
            let of_block = (rows.start, len);
            plan.add_product(p.t(), scratch.dout_panels, of_block, &mut scratch.dvalues[first_key * padded..]);
            plan.add_product(ds.t(), scratch.query_panels, of_block, &mut scratch.dkeys[first_key * padded..]);
            plan.add_product(ds, scratch.keys, (*first_key, seq), &mut scratch.dqueries[rows.start * padded..]);
        }
    }

    fn qkv(&self, head: usize) -> Matrix<'a> {
        let heads = self.plan.shape.heads;
        self.plan.head(self.inputs.qkv, self.sequence, head * heads.dim, heads.qkv_size())
    }

    /// Stores `factor` times the sums as the gradient of a head's rows.
    fn write(&self, dqkv: Columns, head: usize, range: std::ops::Range<usize>, sums: &[f32], factor: f32) {
        let dim = self.plan.shape.heads.dim;
        for (t, sums) in range.zip(sums.chunks_exact(self.plan.padded)) {
            // SAFETY: this task alone has this query, key or value head of this sequence, and the slice ends here.
            let to = unsafe { dqkv.slice(self.sequence * self.plan.shape.seq + t, head * dim, dim) };
            store_row(self.plan.family, to, sums, factor, self.store);
        }
    }
}

simd_fn! {
/// Σ dout out of each query: what the softmax's normalisation takes from the gradients of its scores.
fn delta_rows<S>(dout: &[f32], out: &[f32], stride: usize, dim: usize, deltas: &mut [f32]) {
    for (i, (dout, delta)) in dout.chunks_exact(dim).zip(deltas).enumerate() {
        *delta = dot::<S>(dout, &out[i * stride..][..dim]);
    }
}
}

simd_fn! {
/// Scores become probabilities p, their gradients dp become those of the scores: p (dp - delta).
fn gradient_rows<S>(scores: &mut [f32], dscores: &mut [f32], columns: usize, lse: &[f32], deltas: &[f32]) {
    let blocks = scores.chunks_exact_mut(KEYS).zip(dscores.chunks_exact_mut(KEYS));
    for ((scores, dscores), (lse, delta)) in blocks.zip(lse.iter().zip(deltas)) {
        let ((scores, _), (dscores, _)) =
            (scores[..columns].as_chunks_mut::<LANES>(), dscores[..columns].as_chunks_mut::<LANES>());
        for (scores, dscores) in scores.iter_mut().zip(dscores) {
            for i in 0..LANES {
                scores[i] = exp::<S>(scores[i] - lse);
                dscores[i] = scores[i] * (dscores[i] - delta);
            }
        }
    }
}
}
