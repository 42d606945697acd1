//! Attention on a GPU: a threadgroup for each 32 queries, or keys, of a head (kernels/metal/attention.metal).

use candle_core::{DType, Tensor};

use super::{Attention, OP, Saved};
use crate::error::{Error, Result};
use crate::ops::ctx::{Ctx, Value};
use crate::ops::gemm::Store;
use crate::ops::gpu::{Arg, Dispatch, Kernel, Value as Number, kernels};

/// Rows of a threadgroup in the kernels.
const ROWS: usize = 32;
/// Queries of a threadgroup in `attention_delta`.
const DELTA_ROWS: usize = 4;
/// Stands for no window: longer than any sequence.
const UNLIMITED: usize = 0x7fff_ffff;

/// One call's dispatches: what they share.
struct Launch<'a> {
    shape: Attention<'a>,
    dtype: DType,
    /// The width of heads that the kernels are compiled for.
    width: &'static str,
    /// Where the documents begin; a single element if there are none.
    starts: Value,
}

impl<'a> Launch<'a> {
    fn new(ctx: &mut Ctx, shape: Attention<'a>, dtype: DType) -> Result<Self> {
        let width = match shape.heads.dim {
            ..=32 => "32",
            33..=64 => "64",
            65..=128 => "128",
            129..=256 => "256",
            dim => return Err(Error::op(OP, "heads of up to 256 columns on a GPU", dim.to_string())),
        };
        let starts = shape.starts.unwrap_or(&[0]);
        Ok(Self { shape, dtype, width, starts: ctx.upload(starts, starts.len()) })
    }

    /// Hands over a threadgroup for each `rows` tokens of each of `heads` heads.
    fn run(
        &self,
        ctx: &mut Ctx,
        kernel: &'static Kernel,
        args: &[Arg],
        (rows, heads): (usize, usize),
        store: Store,
    ) -> Result<()> {
        let Attention { batch, seq, heads: all, window, starts } = self.shape;
        let numbers: [Number; 8] = [
            seq.into(),
            all.attention.into(),
            all.key_value.into(),
            all.dim.into(),
            window.unwrap_or(UNLIMITED).min(UNLIMITED).into(),
            u32::from(starts.is_some()).into(),
            store.into(),
            self.shape.scale().into(),
        ];
        let form = if kernel.forms.is_empty() { "" } else { self.width };
        let groups = [seq.div_ceil(rows), heads, batch];
        ctx.hand_over(&Dispatch { kernel, dtype: self.dtype, form, args, numbers: &numbers, groups })
    }
}

/// The output and the logarithms of the softmax's sums; the caller checked the sizes.
pub fn forward(ctx: &mut Ctx, qkv: &Tensor, shape: Attention) -> Result<(Value, Value)> {
    let launch = Launch::new(ctx, shape, qkv.dtype())?;
    ctx.launch(0);
    let (n, heads) = (shape.batch * shape.seq, shape.heads);
    let out = ctx.output(qkv.dtype(), (n, heads.attention_size()))?;
    let lse = ctx.output(DType::F32, n * heads.attention)?;
    let args = [Arg::read(qkv), Arg::read(&launch.starts), Arg::write(&out), Arg::write(&lse)];
    launch.run(ctx, &kernels::ATTENTION_FORWARD, &args, (ROWS, heads.attention), Store::Set)?;
    Ok((out, lse))
}

/// Writes dqkv; the caller checked the sizes.
pub fn backward(
    ctx: &mut Ctx,
    Saved { qkv, out, lse }: Saved,
    dout: &Tensor,
    shape: Attention,
    (dqkv, store): (&Tensor, Store),
) -> Result<()> {
    let launch = Launch::new(ctx, shape, qkv.dtype())?;
    ctx.launch(0);
    let heads = shape.heads;
    let delta = ctx.output(DType::F32, lse.elem_count())?;
    let args = [Arg::read(out), Arg::read(dout), Arg::write(&delta)];
    launch.run(ctx, &kernels::ATTENTION_DELTA, &args, (DELTA_ROWS, heads.attention), store)?;
    let read = [qkv, &launch.starts, lse, &delta, dout].map(Arg::read);
    let args = [read[0], read[1], read[2], read[3], read[4], Arg::update(dqkv)];
    launch.run(ctx, &kernels::ATTENTION_BACKWARD_KEYS, &args, (ROWS, heads.key_value), store)?;
    launch.run(ctx, &kernels::ATTENTION_BACKWARD_QUERIES, &args, (ROWS, heads.attention), store)
}
