//! Dropout whose mask is never stored: element i of a use lives iff word i of a Philox stream at that use's position is
//! at or above the threshold, so the backward finds the same mask from the address. Called by nn. Srivastava et al.,
//! "Dropout" (2014). The integer code is that of `random`, so every back end drops the same elements.

use candle_core::Tensor;
use rayon::prelude::*;

use super::add::CHUNK;
use super::ctx::{Ctx, Value};
use super::gemm::Store;
use super::gpu::{Arg, kernels};
use super::simd::{Family, simd_fn};
use super::storage;
use crate::error::{Error, Result};
use crate::random::Stream;

const OP: &str = "dropout";

/// Which elements are dropped.
#[derive(Clone, Copy, Debug)]
pub struct Mask {
    /// The share of elements that become zero, in 0..1 (1 excluded).
    pub probability: f32,
    pub stream: Stream,
    /// Tells the uses of a stream apart: step, micro-batch and place in the model.
    pub position: u64,
}

/// x with the dropped elements zero and the others times 1 / (1 - probability).
pub fn forward(ctx: &mut Ctx, x: &Tensor, mask: Mask) -> Result<Value> {
    let (family, shape) = (ctx.family(), x.shape());
    mask.check(x.elem_count())?;
    ctx.launch(0);
    if ctx.has_gpu() {
        let y = ctx.output(x.dtype(), shape)?;
        mask.dispatch(ctx, x, (&y, Store::Set))?;
        return Ok(y);
    }
    let x = storage::read::<f32>(OP, x)?;
    let mut y = ctx.vec::<f32>(x.len());
    mask.apply(family, &x, &mut y, Store::Set);
    Ok(ctx.value(y, shape))
}

/// From dy: writes the gradient of x, the dropped elements' being zero, to `dx`.
pub fn backward(ctx: &mut Ctx, dy: &Tensor, mask: Mask, (dx, store): (&Tensor, Store)) -> Result<()> {
    mask.check(dy.elem_count())?;
    if dy.elem_count() != dx.elem_count() {
        return Err(Error::op(OP, format!("{} elements", dy.elem_count()), dx.elem_count().to_string()));
    }
    ctx.launch(0);
    if ctx.has_gpu() {
        return mask.dispatch(ctx, dy, (dx, store));
    }
    let (dy, mut dx) = (storage::read::<f32>(OP, dy)?, storage::write::<f32>(OP, dx)?);
    mask.apply(ctx.family(), &dy, &mut dx, store);
    Ok(())
}

impl Mask {
    fn check(&self, len: usize) -> Result<()> {
        if !(0.0..1.0).contains(&self.probability) {
            return Err(Error::op(OP, "a probability in 0..1", self.probability.to_string()));
        }
        // A stream has 2^32 blocks of four words at each position.
        if len as u64 > 1 << 34 {
            return Err(Error::op(OP, "at most 2^34 elements", len.to_string()));
        }
        Ok(())
    }

    /// A word below this drops its element.
    fn threshold(&self) -> u32 {
        (f64::from(self.probability) * 4_294_967_296.0) as u32
    }

    /// What the elements that stay are multiplied by.
    fn scale(&self) -> f32 {
        (1.0 / (1.0 - f64::from(self.probability))) as f32
    }

    fn dispatch(&self, ctx: &mut Ctx, x: &Tensor, (y, store): (&Tensor, Store)) -> Result<()> {
        let (count, ([key0, key1], [position, high])) = (x.elem_count(), self.stream.address(self.position));
        let numbers = [
            count.into(),
            key0.into(),
            key1.into(),
            position.into(),
            high.into(),
            self.threshold().into(),
            self.scale().into(),
            store.into(),
        ];
        ctx.dispatch(&kernels::DROPOUT, x.dtype(), &[Arg::read(x), Arg::update(y)], &numbers, count.div_ceil(4 * 256))
    }

    fn apply(&self, family: Family, x: &[f32], y: &mut [f32], store: Store) {
        let blocks = (CHUNK / 4) as u32;
        y.par_chunks_mut(CHUNK).zip(x.par_chunks(CHUNK)).enumerate().for_each(|(chunk, (y, x))| {
            chunk_of(family, *self, chunk as u32 * blocks, x, y, store);
        });
    }
}

simd_fn! {
/// The elements from four times `block` on.
fn chunk_of<S>(mask: Mask, block: u32, x: &[f32], y: &mut [f32], store: Store) {
    // So many counters at once that their rounds run side by side in vector registers.
    const COUNTERS: usize = 32;
    let (threshold, scale) = (mask.threshold(), mask.scale());
    let mut words = [[0u32; COUNTERS]; 4];
    let mut factors = [0f32; 4 * COUNTERS];
    for (i, (x, y)) in x.chunks(4 * COUNTERS).zip(y.chunks_mut(4 * COUNTERS)).enumerate() {
        let first = block + (i * COUNTERS) as u32;
        for j in 0..COUNTERS {
            let block = mask.stream.block(mask.position, first + j as u32);
            for (words, word) in words.iter_mut().zip(block) {
                words[j] = word;
            }
        }
        for j in 0..COUNTERS {
            for k in 0..4 {
                factors[4 * j + k] = if words[k][j] < threshold { 0.0 } else { scale };
            }
        }
        for ((y, x), factor) in y.iter_mut().zip(x).zip(&factors) {
            // A dropped element is zero even where x is not finite.
            store.put(y, if *factor == 0.0 { 0.0 } else { x * factor });
        }
    }
}
}

/// `forward` in plain f64, one word at a time.
pub fn reference(x: &[f32], mask: Mask) -> Vec<f64> {
    let keep = 1.0 - f64::from(mask.probability);
    let dropped = |i: usize| mask.stream.word(mask.position, i as u32) < mask.threshold();
    x.iter().enumerate().map(|(i, &x)| if dropped(i) { 0.0 } else { f64::from(x) / keep }).collect()
}
