//! The decode list: the forward of the engine, six fused ops a layer and head, over buffers that are made once.
//!
//! `embed`, then for each layer `project` (norm + qkv), `attend` (query/key norm + rotary + append + attention), `out`
//! (+ residual), `gate_up` (norm + gate/up + swiglu) and `down` (+ residual), then `head` (norm + logits). Called by `engine`
//! only; the tape's forward computes the same function with other kernels. A pass works on lanes: one token of one row
//! each, any mixture of rows and lengths. All threads walk the whole list together (`ops::team`), each doing its share of
//! an op, with a sync after it. What must stay true: a lane's result depends on nothing but its row and position.

pub mod aligned;
pub mod attend;
pub mod cells;
pub mod gpu;
pub mod head;
pub mod layer;
pub mod noise;
pub mod page;
pub mod pages;
pub mod quantized;
pub mod skinny;
pub mod weight;

use crate::ops::heads::Heads;
use crate::ops::simd::Family;
use crate::ops::simd::{self, simd_fn};
use crate::ops::team::Member;
use cells::Cells;
use pages::Table;
use weight::{RowBuffer, RowCells, Rows, Weight};

/// One token of a step.
#[derive(Clone, Copy, Debug)]
pub struct Lane {
    /// Which row of the step it belongs to.
    pub row: usize,
    pub position: usize,
    /// Where the query is rotated to for the row's sinks (`Table::sink_position`).
    pub sink_position: usize,
}

/// The page tables of a step, by layer and row.
pub trait Tables: Sync {
    fn table(&self, layer: usize, row: usize) -> &Table;
}

/// The sizes that a decode list needs: Hugging Face's names, see `GptConfig`.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub heads: Heads,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub rms_norm_eps: f32,
    pub rope_theta: f64,
}

/// The packed weights of one layer.
pub struct Layer {
    /// (C)
    pub input_layernorm: Vec<f32>,
    /// ((H + 2 K) D, C): query, key and value heads.
    pub qkv_proj: Weight,
    /// (D) each, query and key, in models that normalise them.
    pub qk_norm: Option<[Vec<f32>; 2]>,
    /// (C, H D)
    pub o_proj: Weight,
    /// (C)
    pub post_attention_layernorm: Vec<f32>,
    /// (F, C) each.
    pub gate_proj: Weight,
    pub up_proj: Weight,
    /// (C, F)
    pub down_proj: Weight,
}

impl Layer {
    /// Bytes of weights that each of its ops reads, in their order.
    pub fn bytes(&self) -> [usize; 5] {
        let norms: usize = self.input_layernorm.len() + self.qk_norm.iter().flatten().map(Vec::len).sum::<usize>();
        [
            self.qkv_proj.bytes() + 4 * norms,
            0,
            self.o_proj.bytes(),
            self.gate_proj.bytes() + self.up_proj.bytes() + 4 * self.post_attention_layernorm.len(),
            self.down_proj.bytes(),
        ]
    }

    pub fn matrices(&self) -> [&Weight; 5] {
        [&self.qkv_proj, &self.o_proj, &self.gate_proj, &self.up_proj, &self.down_proj]
    }

    /// Elements of its matrices.
    pub fn parameters(&self) -> usize {
        self.matrices().iter().map(|w| w.outputs() * w.row_len()).sum()
    }
}

/// The buffers of a pass. They grow to the most lanes seen, then a pass allocates nothing.
pub struct Workspace {
    sizes: Sizes,
    lanes: Vec<Lane>,
    /// The lanes whose logits are asked for.
    outputs: Vec<usize>,
    /// Frequencies of the D / 2 pairs, radians a position.
    frequencies: Vec<f64>,
    /// The residual stream, (lanes, C).
    x: Vec<f32>,
    /// (rows, C), for the rows that `Pass::region` tells.
    normed: Vec<f32>,
    /// Rows of a product, in the form of its weight.
    rows: RowBuffer,
    /// (lanes, (H + 2 K) D)
    qkv: Vec<f32>,
    /// (lanes, 2, H D): rotated for the window's keys, and for the sinks.
    query: Vec<f32>,
    /// (lanes, 2, 2, D / 2): cosines and sines at the position and at the sink position.
    angles: Vec<f32>,
    /// (lanes, H D)
    attention: Vec<f32>,
    /// (lanes, F)
    gate: Vec<f32>,
    /// (lanes, F)
    up: Vec<f32>,
    /// (outputs, V)
    logits: Vec<f32>,
}

impl Workspace {
    pub fn new(sizes: Sizes) -> Self {
        let frequencies = frequencies(sizes);
        let [x, normed, qkv, query, angles] = [const { Vec::new() }; 5];
        let [attention, gate, up, logits] = [const { Vec::new() }; 4];
        let (lanes, outputs, rows) = (Vec::new(), Vec::new(), RowBuffer::default());
        Self { sizes, lanes, outputs, frequencies, x, normed, rows, qkv, query, angles, attention, gate, up, logits }
    }

    /// Makes room for the lanes of a pass on so many threads, and computes their angles, in f64 at any position.
    pub fn begin(&mut self, lanes: &[Lane], outputs: &[usize], vocab_size: usize, threads: usize) {
        let Sizes { heads, hidden_size, intermediate_size, .. } = self.sizes;
        self.lanes.clear();
        self.lanes.extend_from_slice(lanes);
        self.outputs.clear();
        self.outputs.extend_from_slice(outputs);
        let n = lanes.len();
        let rows = n.max(FEW * threads);
        self.x.resize(n * hidden_size, 0.0);
        self.normed.resize(rows * hidden_size, 0.0);
        self.rows.reserve(rows, hidden_size.max(intermediate_size).max(heads.attention_size()));
        self.qkv.resize(n * heads.qkv_size(), 0.0);
        self.query.resize(n * 2 * heads.attention_size(), 0.0);
        self.angles.resize(n * 2 * heads.dim, 0.0);
        self.attention.resize(n * heads.attention_size(), 0.0);
        self.gate.resize(n * intermediate_size, 0.0);
        self.up.resize(n * intermediate_size, 0.0);
        self.logits.resize(outputs.len() * vocab_size, 0.0);
        for (lane, angles) in lanes.iter().zip(self.angles.chunks_exact_mut(2 * heads.dim)) {
            let (window, sinks) = angles.split_at_mut(heads.dim);
            rotations(&self.frequencies, lane.position, window);
            if lane.sink_position == lane.position {
                sinks.copy_from_slice(window);
            } else {
                rotations(&self.frequencies, lane.sink_position, sinks);
            }
        }
    }

    /// The pass that was begun, for the members of a team to walk through.
    pub fn pass<'a, T: Tables>(&'a mut self, family: Family, tables: &'a T) -> Pass<'a, T> {
        Pass {
            family,
            sizes: self.sizes,
            lanes: &self.lanes,
            outputs: &self.outputs,
            tables,
            x: Cells::new(&mut self.x),
            normed: Cells::new(&mut self.normed),
            rows: self.rows.cells(),
            qkv: Cells::new(&mut self.qkv),
            query: Cells::new(&mut self.query),
            angles: &self.angles,
            attention: Cells::new(&mut self.attention),
            gate: Cells::new(&mut self.gate),
            up: Cells::new(&mut self.up),
            logits: Cells::new(&mut self.logits),
        }
    }

    /// Memory of all buffers.
    pub fn bytes(&self) -> usize {
        let f32s = [
            &self.x,
            &self.normed,
            &self.qkv,
            &self.query,
            &self.angles,
            &self.attention,
            &self.gate,
            &self.up,
            &self.logits,
        ];
        4 * f32s.iter().map(|buffer| buffer.capacity()).sum::<usize>() + self.rows.bytes()
    }

    /// Bytes of a lane's token vector.
    pub fn token_bytes(&self) -> usize {
        4 * self.sizes.hidden_size
    }

    /// (outputs, V), once the pass has been through `head`.
    pub fn logits(&mut self) -> &mut [f32] {
        &mut self.logits
    }
}

/// A pass as each member sees it. The ops are methods that every member calls, in the same order; at the start of each
/// the buffers that it reads are written, and all members are there.
pub struct Pass<'a, T> {
    family: Family,
    sizes: Sizes,
    lanes: &'a [Lane],
    outputs: &'a [usize],
    tables: &'a T,
    x: Cells<'a, f32>,
    normed: Cells<'a, f32>,
    rows: RowCells<'a>,
    qkv: Cells<'a, f32>,
    query: Cells<'a, f32>,
    angles: &'a [f32],
    attention: Cells<'a, f32>,
    gate: Cells<'a, f32>,
    up: Cells<'a, f32>,
    logits: Cells<'a, f32>,
}

/// Up to so many rows each member prepares for itself: waiting for another one would take longer.
const FEW: usize = 2;

/// Where the rows of a product are prepared.
struct Region {
    /// Its first row in the buffers.
    first: usize,
    /// The rows that this member prepares, counted from there.
    mine: std::ops::Range<usize>,
    /// Whether other members prepare the others.
    shared: bool,
}

impl<'a, T: Tables> Pass<'a, T> {
    fn region(&self, member: &Member, rows: usize) -> Region {
        match rows <= FEW {
            true => Region { first: member.index() * FEW, mine: 0..rows, shared: false },
            false => Region { first: 0, mine: member.share(rows), shared: true },
        }
    }

    /// The normed residual stream of `count` lanes, number i of which is `lane(i)`, as rows for `weight`.
    fn normed_rows(
        &self,
        member: &Member,
        weight: &Weight,
        norm: &[f32],
        count: usize,
        lane: impl Fn(usize) -> usize,
    ) -> Rows<'a> {
        let (width, region) = (self.sizes.hidden_size, self.region(member, count));
        for i in region.mine.clone() {
            // SAFETY: nobody writes the residual stream now, and row i of the region is this member's.
            unsafe {
                let y = self.normed.part((region.first + i) * width, width);
                y.copy_from_slice(self.x.read(lane(i) * width, width));
                rms_norm(self.family, y, norm, self.sizes.rms_norm_eps);
                self.rows.convert(self.family, weight, region.first + i, y);
            }
        }
        if region.shared {
            member.sync();
        }
        // SAFETY: the rows stay as they are until the op's end.
        unsafe { self.rows.rows(weight, region.first, count, self.normed.read(region.first * width, count * width)) }
    }

    /// The lanes of a buffer (lanes, width) as rows for `weight`.
    fn rows_of(&self, member: &Member, weight: &Weight, buffer: Cells<'a, f32>, width: usize) -> Rows<'a> {
        let n = self.lanes.len();
        // SAFETY: the op only reads it.
        let x = unsafe { buffer.read(0, n * width) };
        if let Weight::F32(_) = weight {
            return Rows::F32(x);
        }
        let region = self.region(member, n);
        for i in region.mine.clone() {
            // SAFETY: row i of the region is this member's.
            unsafe { self.rows.convert(self.family, weight, region.first + i, &x[i * width..][..width]) };
        }
        if region.shared {
            member.sync();
        }
        // SAFETY: the rows stay as they are until the op's end.
        unsafe { self.rows.rows(weight, region.first, n, x) }
    }
}

/// Of the D / 2 pairs of a head, radians a position.
fn frequencies(sizes: Sizes) -> Vec<f64> {
    let dim = sizes.heads.dim;
    (0..dim / 2).map(|i| sizes.rope_theta.powf(-2.0 * i as f64 / dim as f64)).collect()
}

/// Cosines, then sines, of a position's angles.
fn rotations(frequencies: &[f64], position: usize, angles: &mut [f32]) {
    let (cos, sin) = angles.split_at_mut(frequencies.len());
    for ((frequency, cos), sin) in frequencies.iter().zip(cos).zip(sin) {
        let (s, c) = (position as f64 * frequency).sin_cos();
        (*cos, *sin) = (c as f32, s as f32);
    }
}

simd_fn! {
/// x = x / rms(x) * weight.
fn rms_norm<S>(x: &mut [f32], weight: &[f32], eps: f32) {
    let rstd = 1.0 / (simd::dot::<S>(x, x) / x.len() as f32 + eps).sqrt();
    x.iter_mut().zip(weight).for_each(|(x, weight)| *x = *x * rstd * weight);
}
}

simd_fn! {
/// Turns the pairs (i, i + D / 2) of a head by `angles`: D / 2 cosines, then as many sines.
fn rotate<S>(head: &mut [f32], angles: &[f32]) {
    let half = head.len() / 2;
    let (a, b) = head.split_at_mut(half);
    let (cos, sin) = angles.split_at(half);
    for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
        let (x, y) = (*a, *b);
        *a = S::fma(x, *cos, -(y * sin));
        *b = S::fma(y, *cos, x * sin);
    }
}
}

/// What the tests of the products share.
#[cfg(test)]
mod testing {
    use crate::ops::ctx::Ctx;
    use crate::ops::simd::Family;
    use crate::random::{Purpose, Stream};

    pub fn numbers(salt: u64, len: usize) -> Vec<f32> {
        let stream = Stream::new(3, Purpose::Test);
        (0..len).map(|i| stream.normal(salt, i as u32)).collect()
    }

    /// A context for every family of this machine.
    pub fn contexts() -> impl Iterator<Item = Ctx> {
        Family::ALL.into_iter().filter(|f| f.available()).map(Ctx::cpu)
    }
}
