//! The decode list: the forward of the engine, six fused ops a layer and head, over buffers that are made once.
//!
//! `embed`, then for each layer `project` (norm + qkv + query/key norm + rotary + append), `attend`, `out` (+ residual),
//! `gate_up` (norm + gate/up + swiglu) and `down` (+ residual), then `head` (norm + logits). Called by `engine` only; the
//! tape's forward computes the same function with other kernels. A step works on lanes: one token of one row each, any
//! mixture of rows and lengths. What must stay true: a lane's result depends on nothing but its row and position.

pub mod aligned;
pub mod attend;
pub mod head;
pub mod layer;
pub mod noise;
pub mod pages;
pub mod quantized;
pub mod skinny;
pub mod weight;

use crate::ops::ctx::Ctx;
use crate::ops::heads::Heads;
use crate::ops::simd::{self, simd_fn};
use pages::Table;
use weight::{Output, Weight};

/// One token of a step.
#[derive(Clone, Copy, Debug)]
pub struct Lane {
    /// Which row of the step it belongs to.
    pub row: usize,
    pub position: usize,
    /// Where the query is rotated to for the row's sinks (`Table::sink_position`).
    pub sink_position: usize,
}

/// The page tables of one layer, by row of the step.
pub trait Tables: Sync {
    fn table(&self, row: usize) -> &Table;
    fn table_mut(&mut self, row: usize) -> &mut Table;
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
    /// (2 F, C): gate, then up.
    pub gate_up_proj: Weight,
    /// (C, F)
    pub down_proj: Weight,
}

impl Layer {
    /// Bytes of all its weights: what one step reads.
    pub fn bytes(&self) -> usize {
        let norms: usize = self.qk_norm.iter().flatten().map(Vec::len).sum();
        let norms = norms + self.input_layernorm.len() + self.post_attention_layernorm.len();
        let panels = [&self.qkv_proj, &self.o_proj, &self.gate_up_proj, &self.down_proj];
        4 * norms + panels.iter().map(|p| p.bytes()).sum::<usize>()
    }
}

/// The buffers of a step. They grow to the most lanes seen, then a step allocates nothing.
pub struct Workspace {
    sizes: Sizes,
    lanes: Vec<Lane>,
    /// Frequencies of the D / 2 pairs, radians a position.
    frequencies: Vec<f64>,
    /// The residual stream, (lanes, C).
    x: Vec<f32>,
    /// (lanes, C)
    normed: Vec<f32>,
    /// (lanes, (H + 2 K) D)
    qkv: Vec<f32>,
    /// (lanes, 2, H D): rotated for the window's keys, and for the sinks.
    query: Vec<f32>,
    /// (lanes, 2, 2, D / 2): cosines and sines at the position and at the sink position.
    angles: Vec<f32>,
    /// (lanes, H D)
    attention: Vec<f32>,
    /// (lanes, 2 F)
    gate_up: Vec<f32>,
    /// (lanes, F)
    activation: Vec<f32>,
    /// (outputs, V)
    logits: Vec<f32>,
}

impl Workspace {
    pub fn new(sizes: Sizes) -> Self {
        let dim = sizes.heads.dim;
        let frequencies = (0..dim / 2).map(|i| sizes.rope_theta.powf(-2.0 * i as f64 / dim as f64)).collect();
        let [x, normed, qkv, query, angles] = [const { Vec::new() }; 5];
        let [attention, gate_up, activation, logits] = [const { Vec::new() }; 4];
        let lanes = Vec::new();
        Self { sizes, lanes, frequencies, x, normed, qkv, query, angles, attention, gate_up, activation, logits }
    }

    /// Makes room for the lanes of a step and computes their angles, in f64 at any position.
    fn begin(&mut self, lanes: &[Lane]) {
        let Sizes { heads, hidden_size, intermediate_size, .. } = self.sizes;
        self.lanes.clear();
        self.lanes.extend_from_slice(lanes);
        let n = lanes.len();
        self.x.resize(n * hidden_size, 0.0);
        self.normed.resize(n * hidden_size, 0.0);
        self.qkv.resize(n * heads.qkv_size(), 0.0);
        self.query.resize(n * 2 * heads.attention_size(), 0.0);
        self.angles.resize(n * 2 * heads.dim, 0.0);
        self.attention.resize(n * heads.attention_size(), 0.0);
        self.gate_up.resize(n * 2 * intermediate_size, 0.0);
        self.activation.resize(n * intermediate_size, 0.0);
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
}

/// Cosines, then sines, of a position's angles.
fn rotations(frequencies: &[f64], position: usize, angles: &mut [f32]) {
    let (cos, sin) = angles.split_at_mut(frequencies.len());
    for ((frequency, cos), sin) in frequencies.iter().zip(cos).zip(sin) {
        let (s, c) = (position as f64 * frequency).sin_cos();
        (*cos, *sin) = (c as f32, s as f32);
    }
}

/// Runs `f` on each lane's part of a buffer, on all threads if there is enough to do.
fn each_lane(ctx: &Ctx, data: &mut [f32], width: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    // An element costs half a nanosecond, roughly.
    each_part(ctx, data.len() as f64 / 2.0, data, width, f);
}

/// Runs `f` on each part of `width` elements, on all threads if work of so many nanoseconds is worth it.
fn each_part(ctx: &Ctx, nanoseconds: f64, data: &mut [f32], width: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    if !ctx.team().is_worth(nanoseconds) {
        return data.chunks_exact_mut(width).enumerate().for_each(|(i, part)| f(i, part));
    }
    let (count, parts) = (data.len() / width, Output::new(data));
    // SAFETY: the team runs each number once, so each part has one user.
    ctx.team().run(count, |i| f(i, unsafe { parts.slice(i * width, width) }));
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
