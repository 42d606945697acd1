//! Four ops of the decode list: `project`, `out`, `gate_up` and `down`. The fifth of a layer is `attend`.
//!
//! Called by `engine::model` in that order. Each reads its weights once for all lanes and works lane by lane otherwise.

use super::weight::multiply;
use super::{Layer, Tables, Workspace, each_lane, rms_norm, rotate};
use crate::error::Result;
use crate::ops::ctx::Ctx;
use crate::ops::gemm::Store;
use crate::ops::simd::{Family, sigmoid, simd_fn};

/// Norm, query/key/value product, query/key norm, rotation; appends keys and values to the rows' pages.
pub fn project(ctx: &mut Ctx, layer: &Layer, ws: &mut Workspace, tables: &mut impl Tables) -> Result<()> {
    let norms: usize = layer.qk_norm.iter().flatten().map(Vec::len).sum();
    ctx.launch(layer.qkv_proj.bytes() + 4 * (layer.input_layernorm.len() + norms));
    normalize(ctx, &layer.input_layernorm, ws);
    multiply(ctx, &ws.normed, &layer.qkv_proj, &mut ws.qkv, Store::Set);
    turn_queries(ctx, layer, ws);
    append(ctx.family(), layer, ws, tables);
    Ok(())
}

/// x += attention W^T.
pub fn out(ctx: &mut Ctx, layer: &Layer, ws: &mut Workspace) -> Result<()> {
    ctx.launch(layer.o_proj.bytes());
    multiply(ctx, &ws.attention, &layer.o_proj, &mut ws.x, Store::Add);
    Ok(())
}

/// Norm, gate and up product, silu(gate) * up.
pub fn gate_up(ctx: &mut Ctx, layer: &Layer, ws: &mut Workspace) -> Result<()> {
    ctx.launch(layer.gate_up_proj.bytes() + 4 * layer.post_attention_layernorm.len());
    normalize(ctx, &layer.post_attention_layernorm, ws);
    multiply(ctx, &ws.normed, &layer.gate_up_proj, &mut ws.gate_up, Store::Set);
    let (family, width, gate_up) = (ctx.family(), ws.sizes.intermediate_size, &ws.gate_up);
    each_lane(ctx, &mut ws.activation, width, |lane, y| {
        let (gate, up) = gate_up[lane * 2 * width..][..2 * width].split_at(width);
        swiglu(family, gate, up, y);
    });
    Ok(())
}

/// x += activation W^T.
pub fn down(ctx: &mut Ctx, layer: &Layer, ws: &mut Workspace) -> Result<()> {
    ctx.launch(layer.down_proj.bytes());
    multiply(ctx, &ws.activation, &layer.down_proj, &mut ws.x, Store::Add);
    Ok(())
}

fn normalize(ctx: &Ctx, weight: &[f32], ws: &mut Workspace) {
    let (width, x) = (ws.sizes.hidden_size, &ws.x);
    let (family, eps) = (ctx.family(), ws.sizes.rms_norm_eps);
    each_lane(ctx, &mut ws.normed, width, |lane, y| {
        y.copy_from_slice(&x[lane * width..][..width]);
        rms_norm(family, y, weight, eps);
    });
}

/// Query heads, normalised and rotated to their position and, where that differs, for the sinks.
fn turn_queries(ctx: &Ctx, layer: &Layer, ws: &mut Workspace) {
    let (family, heads, eps) = (ctx.family(), ws.sizes.heads, ws.sizes.rms_norm_eps);
    let (dim, width, size) = (heads.dim, heads.qkv_size(), heads.attention_size());
    let (lanes, qkv, angles) = (&ws.lanes, &ws.qkv, &ws.angles);
    each_lane(ctx, &mut ws.query, 2 * size, |i, query| {
        let (window, sinks) = query.split_at_mut(size);
        let (here, there) = angles[i * 2 * dim..][..2 * dim].split_at(dim);
        window.copy_from_slice(&qkv[i * width..][..size]);
        if let Some([weight, _]) = &layer.qk_norm {
            window.chunks_exact_mut(dim).for_each(|head| rms_norm(family, head, weight, eps));
        }
        if lanes[i].position != lanes[i].sink_position {
            sinks.copy_from_slice(window);
            sinks.chunks_exact_mut(dim).for_each(|head| rotate(family, head, there));
        }
        window.chunks_exact_mut(dim).for_each(|head| rotate(family, head, here));
    });
}

/// Normalises and rotates the keys and writes them and the values to the pages, lane by lane: two may share a page.
fn append(family: Family, layer: &Layer, ws: &mut Workspace, tables: &mut impl Tables) {
    let (heads, eps) = (ws.sizes.heads, ws.sizes.rms_norm_eps);
    let (dim, width) = (heads.dim, heads.qkv_size());
    for (i, lane) in ws.lanes.iter().enumerate() {
        let row = &mut ws.qkv[i * width..][..width];
        let (keys, values) = row[heads.attention * dim..].split_at_mut(heads.key_value * dim);
        for head in keys.chunks_exact_mut(dim) {
            if let Some([_, weight]) = &layer.qk_norm {
                rms_norm(family, head, weight, eps);
            }
            rotate(family, head, &ws.angles[i * 2 * dim..][..dim]);
        }
        tables.table_mut(lane.row).write(lane.position, keys, values);
    }
}

simd_fn! {
fn swiglu<S>(gate: &[f32], up: &[f32], y: &mut [f32]) {
    for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
        *y = gate * sigmoid::<S>(*gate) * up;
    }
}
}
