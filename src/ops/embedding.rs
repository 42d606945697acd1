//! Table look-up and its scatter. Called by `nn::embedding`.
//!
//! The backward gives each task a band of table rows and sums the tokens of a row in their order, so the result is the
//! same at every thread count.

use candle_core::{DType, Tensor};
use rayon::prelude::*;

use super::add;
use super::ctx::{Ctx, Value};
use super::decode::gpu::weight;
use super::gemm::Store;
use super::gpu::{Arg, kernels};
use super::linear::Weight;
use super::storage;
use crate::error::{Error, Result};

fn check(ids: &[u32], rows: usize) -> Result<()> {
    match ids.iter().position(|id| *id as usize >= rows) {
        None => Ok(()),
        Some(at) => {
            Err(Error::op("embedding", format!("ids below {rows}"), format!("id {} at position {at}", ids[at])))
        }
    }
}

/// Rows `ids` of table (V, C): (N, C).
pub fn forward(ctx: &mut Ctx, table: Weight, ids: &[u32]) -> Result<Value> {
    let (rows, columns) = table.dims()?;
    check(ids, rows)?;
    ctx.launch(4 * ids.len() * columns);
    if let (true, Weight::Blocks(blocks)) = (ctx.has_gpu(), table) {
        let (y, n) = (ctx.output(DType::F32, (ids.len(), columns))?, ids.len());
        let ids = ctx.upload(ids, n);
        weight::embed(ctx, blocks.device()?, &ids, n, &y)?;
        return Ok(y);
    }
    if let (true, Weight::Dense { tensor, .. }) = (ctx.has_gpu(), table) {
        let (ids, n) = (ctx.upload(ids, ids.len()), ids.len());
        let y = ctx.output(tensor.dtype(), (n, columns))?;
        let args = [Arg::read(tensor), Arg::read(&ids), Arg::write(&y)];
        ctx.dispatch(&kernels::EMBED, tensor.dtype(), &args, &[columns.into()], n)?;
        return Ok(y);
    }
    let mut y = ctx.vec(ids.len() * columns);
    let rows = y.chunks_exact_mut(columns).zip(ids);
    match table {
        Weight::Dense { tensor, .. } => {
            let table = storage::read::<f32>("embedding", tensor)?;
            rows.for_each(|(y, id)| y.copy_from_slice(&table[*id as usize * columns..][..columns]));
        }
        Weight::Blocks(blocks) => rows.for_each(|(y, id)| blocks.unpack_row(ctx.family(), *id as usize, y)),
        Weight::Corrected(..) => return Err(Error::op("embedding", "a table", "one with a correction")),
    }
    Ok(ctx.value(y, (ids.len(), columns)))
}

/// Adds each row of dy (N, C) to the table's gradient (V, C) at its id; `Set` clears the rest.
pub fn backward(ctx: &mut Ctx, ids: &[u32], dy: &Tensor, dtable: (&Tensor, Store)) -> Result<()> {
    let (rows, columns) = dtable.0.dims2()?;
    check(ids, rows)?;
    ctx.launch(0);
    // Tokens sorted by id, equal ids in order: then each table row belongs to one task and is summed in token order.
    let mut order: Vec<u32> = (0..ids.len() as u32).collect();
    order.sort_by_key(|n| ids[*n as usize]);
    if ctx.has_gpu() {
        return backward_gpu(ctx, ids, &order, dy, dtable);
    }
    let dy = storage::read::<f32>("embedding", dy)?;
    let mut to = storage::write::<f32>("embedding", dtable.0)?;
    if dtable.1 == Store::Set {
        to.fill(0.0);
    }
    let dy: &[f32] = &dy;
    let chunk = rows.div_ceil(4 * rayon::current_num_threads()).max(1);
    to.par_chunks_mut(chunk * columns).enumerate().for_each(|(part, to)| {
        let first = (part * chunk) as u32;
        let start = order.partition_point(|n| ids[*n as usize] < first);
        let end = order.partition_point(|n| ids[*n as usize] < first + chunk as u32);
        for n in &order[start..end] {
            let row = (ids[*n as usize] - first) as usize;
            let from = &dy[*n as usize * columns..][..columns];
            to[row * columns..][..columns].iter_mut().zip(from).for_each(|(to, from)| *to += from);
        }
    });
    Ok(())
}

/// `order` has the tokens sorted by id.
fn backward_gpu(
    ctx: &mut Ctx,
    ids: &[u32],
    order: &[u32],
    dy: &Tensor,
    (dtable, store): (&Tensor, Store),
) -> Result<()> {
    let (_, columns) = dtable.dims2()?;
    if store == Store::Set {
        add::fill(ctx, dtable, 0.0)?;
    }
    let of = |n: &u32| ids[*n as usize];
    let runs = order.chunk_by(|a, b| of(a) == of(b));
    let rows: Vec<u32> = runs.clone().map(|run| of(&run[0])).collect();
    let ends = runs.scan(0, |end, run| {
        *end += run.len() as u32;
        Some(*end)
    });
    let starts: Vec<u32> = std::iter::once(0).chain(ends).collect();
    let groups = rows.len();
    let order = ctx.upload(order, order.len());
    let (starts, rows) = (ctx.upload(&starts, starts.len()), ctx.upload(&rows, groups));
    let args = [Arg::read(&order), Arg::read(&starts), Arg::read(&rows), Arg::read(dy), Arg::update(dtable)];
    ctx.dispatch(&kernels::EMBED_BACKWARD, dy.dtype(), &args, &[columns.into()], groups)
}

/// The rows of `table` for `ids` by the plain formula.
pub fn reference(table: &[f32], ids: &[u32], channels: usize) -> Vec<f32> {
    ids.iter().flat_map(|id| table[*id as usize * channels..][..channels].iter().copied()).collect()
}

/// The gradient of a table of `rows` rows of `channels` by the plain formula.
pub fn backward_reference(ids: &[u32], dy: &[f32], rows: usize, channels: usize) -> Vec<f64> {
    let mut dtable = vec![0f64; rows * channels];
    for (id, dy) in ids.iter().zip(dy.chunks(channels)) {
        let row = &mut dtable[*id as usize * channels..][..channels];
        row.iter_mut().zip(dy).for_each(|(sum, x)| *sum += f64::from(*x));
    }
    dtable
}
