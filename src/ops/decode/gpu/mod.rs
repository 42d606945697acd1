//! The decode list on a GPU: seven dispatches a layer, all of a token's in one command buffer. Called by `engine` with a
//! context that has a GPU.
//!
//! A layer is `norm_product` (queries, keys, values), `append` (query/key norm, rotary, pages), `attend`, `attend_join`,
//! `residual_product`, `gate_up_product` and `residual_product`; the head is a `norm_product`, and `sample` leaves the next
//! ids and positions on the device. What a step needs from the host (ids, positions, settings of rows, tables of pages) is
//! sent only where it differs from what the device has by itself, so a steady token sends nothing and brings back its id.
//! What must stay true: a lane's result depends on nothing but its row and position, and the dispatches of a step do not
//! depend on results.

pub mod pool;
mod state;
pub mod weight;

use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Tensor};

use super::page::{CacheType, PAGE, Quantization};
use super::{Lane, Sizes, Tables};
use crate::error::{Error, Result};
use crate::ops::ctx::{Ctx, Value};
use crate::ops::gpu::{self, Arg, Dispatch, kernels};
use crate::ops::storage;
use crate::random::Purpose;
use pool::Pools;
use state::State;
use weight::{DeviceWeight, Normed, gate_up_product, norm_product, residual_product};

/// Positions of a stretch, as kernels/metal/attend.metal has it.
const STRETCH: usize = 256;

/// The weights of a layer; see `decode::Layer`.
pub struct DeviceLayer {
    pub input_layernorm: Tensor,
    pub qkv_proj: DeviceWeight,
    pub qk_norm: Option<[Tensor; 2]>,
    pub o_proj: DeviceWeight,
    pub post_attention_layernorm: Tensor,
    pub gate_proj: DeviceWeight,
    pub up_proj: DeviceWeight,
    pub down_proj: DeviceWeight,
    /// The keys that a token sees in a layer whose window the model's config gives.
    pub own_window: Option<usize>,
}

impl DeviceLayer {
    pub fn matrices(&self) -> [&DeviceWeight; 5] {
        [&self.qkv_proj, &self.o_proj, &self.gate_proj, &self.up_proj, &self.down_proj]
    }

    fn norms(&self) -> impl Iterator<Item = &Tensor> {
        [&self.input_layernorm, &self.post_attention_layernorm].into_iter().chain(self.qk_norm.iter().flatten())
    }
}

/// The token table and the output head.
pub struct DeviceHead {
    /// (V, C), if it is not the head's matrix too.
    pub embed_tokens: Option<DeviceWeight>,
    pub norm: Tensor,
    pub lm_head: DeviceWeight,
}

/// How a row's next token is chosen on the device: by temperature and top-k alone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choosing {
    pub seed: u64,
    pub temperature: f32,
    /// 0 keeps all.
    pub top_k: usize,
}

/// What a pass computes.
pub struct Step<'a> {
    pub lanes: &'a [Lane],
    /// The lanes' ids; `None` if they are those that the last pass has chosen on the device.
    pub ids: Option<&'a [u32]>,
    /// The lanes whose logits are asked for.
    pub outputs: &'a [usize],
    /// How each of the outputs is chosen, if that is to happen on the device.
    pub choosing: Option<&'a [Choosing]>,
}

/// The ids that a pass has chosen, on the device.
pub struct Chosen {
    ids: Value,
    commit: u64,
}

impl Chosen {
    /// Waits for the pass, and brings the ids to the host: four bytes each.
    pub fn read(&self, ctx: &mut Ctx) -> Result<Vec<u32>> {
        ctx.wait_for(self.commit)?;
        let ids = storage::read_done::<u32>("sample", &self.ids)?.to_vec();
        ctx.transfer(0, 4 * ids.len());
        if ids.contains(&u32::MAX) {
            return Err(Error::failed("the model's output is not a number")
                .with_hint("its weights are damaged, or its training diverged: use an earlier checkpoint"));
        }
        Ok(ids)
    }
}

/// The kind of all caches of a decoder.
struct CacheKind {
    kind: CacheType,
    quantization: Option<Quantization>,
    pools: Pools,
}

pub struct Decoder {
    sizes: Sizes,
    layers: Vec<DeviceLayer>,
    head: DeviceHead,
    /// Set by the first row, and by a later one while there are no pages.
    cache: Mutex<Option<CacheKind>>,
    state: State,
    /// (outputs, V) of the last pass.
    logits: Option<Value>,
    /// A tensor for arguments that a form does not use.
    unused: [Tensor; 2],
}

impl Decoder {
    pub fn new(sizes: Sizes, layers: Vec<DeviceLayer>, head: DeviceHead) -> Self {
        let unused = [0; 2].map(|_| storage::tensor(vec![0f32], 1));
        Self { state: State::new(sizes), sizes, layers, head, cache: Mutex::default(), logits: None, unused }
    }

    /// Compiles the kernels of every pass but for those of the cache, whose kind is not known before the first row.
    pub fn prepare(&self, ctx: &Ctx) -> Result<()> {
        let table = self.head.embed_tokens.as_ref().unwrap_or(&self.head.lm_head);
        let matrices = self.layers.iter().flat_map(DeviceLayer::matrices).chain([&self.head.lm_head]);
        let mut functions = vec![
            (&kernels::EMBED_BLOCKS, kernels::EMBED_BLOCKS.function(DType::F32, table.format.name())),
            (&kernels::ATTEND_JOIN, kernels::ATTEND_JOIN.function(DType::F32, "")),
            (&kernels::SAMPLE, kernels::SAMPLE.function(DType::F32, "")),
        ];
        for form in matrices.flat_map(|weight| weight.format.products()) {
            let products = [&kernels::NORM_PRODUCT, &kernels::RESIDUAL_PRODUCT, &kernels::GATE_UP_PRODUCT];
            functions.extend(products.map(|kernel| (kernel, kernel.function(DType::F32, form))));
        }
        functions.sort_unstable_by(|a, b| a.1.cmp(&b.1));
        functions.dedup_by(|a, b| a.1 == b.1);
        ctx.prepare(&functions)
    }

    /// Bytes of weights that one pass reads.
    pub fn bytes(&self) -> usize {
        let norms = self.layers.iter().flat_map(DeviceLayer::norms).chain([&self.head.norm]);
        let matrices = self.layers.iter().flat_map(DeviceLayer::matrices).chain([&self.head.lm_head]);
        norms.map(|norm| 4 * norm.elem_count()).sum::<usize>() + matrices.map(DeviceWeight::bytes).sum::<usize>()
    }

    /// All tensors of weights.
    pub fn weights(&self) -> Vec<&Tensor> {
        let matrices = self.layers.iter().flat_map(DeviceLayer::matrices);
        let ends = [&self.head.lm_head].into_iter().chain(&self.head.embed_tokens);
        let norms = self.layers.iter().flat_map(DeviceLayer::norms).chain([&self.head.norm]);
        matrices.chain(ends).map(|weight| &weight.words).chain(norms).collect()
    }

    /// Where the pages of a cache of that kind lie. All rows of a decoder have caches of one kind.
    pub fn pools(&self, kind: CacheType, quantization: Option<Quantization>) -> Result<Pools> {
        let heads = self.sizes.heads;
        let mut cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = cache.as_ref().filter(|own| (own.kind, own.quantization) == (kind, quantization)) {
            return Ok(own.pools.clone());
        }
        if cache.as_ref().is_some_and(|own| own.pools.has_pages()) {
            return Err(Error::failed("rows with caches of different kinds cannot share a GPU's pages")
                .with_hint("give all rows one type and one number of bits"));
        }
        let pools = Pools::new(kind, quantization, heads);
        *cache = Some(CacheKind { kind, quantization, pools: pools.clone() });
        Ok(pools)
    }

    /// Hands over a pass. The pages of its lanes' positions must be reserved. Gives the ids that it chooses, if it is to.
    pub fn run(&mut self, ctx: &mut Ctx, tables: &impl Tables, step: &Step) -> Result<Option<Chosen>> {
        let Sizes { heads, hidden_size, .. } = self.sizes;
        let n = step.lanes.len();
        let full = self.layers.iter().position(|layer| layer.own_window.is_none());
        let quantization = self.quantization();
        self.state.begin(ctx, tables, (self.layers.len(), full, quantization), step)?;
        let x = ctx.output(DType::F32, n * hidden_size)?;
        let table = self.head.embed_tokens.as_ref().unwrap_or(&self.head.lm_head);
        weight::embed(ctx, table, self.state.ids()?, n, &x)?;
        let [qkv, query, attention, gate] =
            [heads.qkv_size(), 2 * heads.attention_size(), heads.attention_size(), self.sizes.intermediate_size]
                .map(|width| ctx.output(DType::F32, n * width));
        let (qkv, query, attention, gate) = (qkv?, query?, attention?, gate?);
        for (index, layer) in self.layers.iter().enumerate() {
            norm_product(ctx, self.normed(&x, &layer.input_layernorm), &layer.qkv_proj, n, &qkv)?;
            self.append(ctx, (index, layer), n, (&qkv, &query))?;
            self.attend(ctx, (index, layer), step.lanes, tables, (&query, &attention))?;
            residual_product(ctx, &attention, &layer.o_proj, n, &x)?;
            let normed = self.normed(&x, &layer.post_attention_layernorm);
            gate_up_product(ctx, normed, (&layer.gate_proj, &layer.up_proj), n, &gate)?;
            residual_product(ctx, &gate, &layer.down_proj, n, &x)?;
        }
        let ids = self.finish(ctx, &x, step)?;
        let commit = ctx.commit()?;
        Ok(ids.map(|ids| Chosen { ids, commit }))
    }

    fn quantization(&self) -> Option<Quantization> {
        let cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        cache.as_ref().and_then(|cache| cache.quantization)
    }

    fn normed<'a>(&self, x: &'a Tensor, norm: &'a Tensor) -> Normed<'a> {
        Normed { x, norm, eps: self.sizes.rms_norm_eps, select: None }
    }

    /// The logits that are asked for, and the choice of the next ids.
    fn finish(&mut self, ctx: &mut Ctx, x: &Tensor, step: &Step) -> Result<Option<Value>> {
        self.logits = None;
        if step.outputs.is_empty() {
            return Ok(None);
        }
        let (outputs, vocab) = (step.outputs.len(), self.head.lm_head.rows);
        let logits = ctx.output(DType::F32, outputs * vocab)?;
        let normed = Normed { select: Some(self.state.outputs()?), ..self.normed(x, &self.head.norm) };
        norm_product(ctx, normed, &self.head.lm_head, outputs, &logits)?;
        let mut chosen = None;
        if step.choosing.is_some() {
            let [ids, reported] = [ctx.output(DType::U32, outputs)?, ctx.output(DType::U32, outputs)?];
            let lanes = ctx.output(DType::U32, 2 * outputs)?;
            let args = [
                Arg::read(&logits),
                Arg::read(self.state.choosing()?),
                Arg::read(self.state.lanes()?),
                Arg::write(&ids),
                Arg::write(&lanes),
                Arg::write(&reported),
            ];
            let numbers = [vocab.into(), (Purpose::Sampling as u32).into()];
            ctx.dispatch(&kernels::SAMPLE, DType::F32, &args, &numbers, outputs)?;
            self.state.chosen(step, (ids, lanes));
            chosen = Some(reported);
        }
        self.logits = Some(logits);
        Ok(chosen)
    }

    /// The form of the cache's kernels, and the memory and the bytes of plain and of quantised pages.
    fn pages(&self) -> Result<(&'static str, [(Tensor, usize); 2])> {
        let none = || Error::op("decode", "a cache", "none");
        let cache = self.cache.lock().unwrap_or_else(PoisonError::into_inner);
        let CacheKind { kind, quantization, pools } = cache.as_ref().ok_or_else(none)?;
        let form = match (kind, quantization.map(|q| q.bits)) {
            (CacheType::F32, None) => "f32",
            (CacheType::Bf16, None) => "bf16",
            (CacheType::F32, Some(8)) => "f32_q8",
            (CacheType::Bf16, Some(8)) => "bf16_q8",
            (CacheType::F32, Some(_)) => "f32_q4",
            (CacheType::Bf16, Some(_)) => "bf16_q4",
        };
        let plain = pools.of(false);
        let quantized = match quantization {
            Some(_) => (pools.of(true).tensor(), pools.of(true).page_bytes()),
            None => (self.unused[1].clone(), 0),
        };
        Ok((form, [(plain.tensor(), plain.page_bytes()), quantized]))
    }

    /// Numbers that share a scale, and what `append` and `attend` have in common after it.
    fn cache_numbers(&self, (index, layer): (usize, &DeviceLayer), bytes: [usize; 2]) -> [gpu::Value; 6] {
        let group = self.quantization().map_or(1, |q| q.group);
        let (start, length) = self.state.table(index);
        [
            group.min(self.sizes.heads.dim).into(),
            start.into(),
            length.into(),
            layer.own_window.map_or(0, |window| window.min(state::MOST)).into(),
            bytes[0].into(),
            bytes[1].into(),
        ]
    }

    fn append(
        &self,
        ctx: &mut Ctx,
        (index, layer): (usize, &DeviceLayer),
        lanes: usize,
        (qkv, query): (&Tensor, &Tensor),
    ) -> Result<()> {
        let Sizes { heads, rms_norm_eps, .. } = self.sizes;
        let (form, [(plain, plain_bytes), (quantized, page_bytes)]) = self.pages()?;
        let gains = layer.qk_norm.as_ref().map_or([&self.unused[0]; 2], |[query, key]| [query, key]);
        let args = [
            Arg::read(qkv),
            Arg::read(self.state.angles()?),
            Arg::read(self.state.lanes()?),
            Arg::read(self.state.rows()?),
            Arg::read(self.state.tables()?),
            Arg::read(gains[0]),
            Arg::read(gains[1]),
            Arg::write(query),
            Arg::update(&plain),
            Arg::update(&quantized),
        ];
        let own = [
            heads.attention.into(),
            heads.key_value.into(),
            heads.dim.into(),
            usize::from(layer.qk_norm.is_some()).into(),
            rms_norm_eps.into(),
        ];
        let numbers = [&own[..], &self.cache_numbers((index, layer), [plain_bytes, page_bytes])].concat();
        let groups = [(heads.attention + heads.key_value).div_ceil(4), lanes, 1];
        ctx.hand_over(&Dispatch {
            kernel: &kernels::APPEND,
            dtype: DType::F32,
            form,
            args: &args,
            numbers: &numbers,
            groups,
        })
    }

    fn attend(
        &self,
        ctx: &mut Ctx,
        (index, layer): (usize, &DeviceLayer),
        lanes: &[Lane],
        tables: &impl Tables,
        (query, attention): (&Tensor, &Tensor),
    ) -> Result<()> {
        let heads = self.sizes.heads;
        let of_lane = |lane: &Lane| {
            let table = tables.table(index, lane.row);
            stretches(lane.position, table.window(), table.sinks())
        };
        let stretches = lanes.iter().map(of_lane).max().unwrap_or(0);
        let (form, [(plain, plain_bytes), (quantized, page_bytes)]) = self.pages()?;
        // One of few sizes: the free list keeps each that it has seen.
        let room = lanes.len() * heads.attention * stretches.next_power_of_two() * (heads.dim + 2);
        let partial = ctx.output(DType::F32, room)?;
        let args = [
            Arg::read(query),
            Arg::read(self.state.lanes()?),
            Arg::read(self.state.rows()?),
            Arg::read(self.state.tables()?),
            Arg::read(&plain),
            Arg::read(&quantized),
            Arg::write(&partial),
        ];
        let own = [heads.attention.into(), heads.key_value.into(), heads.dim.into()];
        let shared = self.cache_numbers((index, layer), [plain_bytes, page_bytes]);
        let numbers = [&own[..], &shared, &[stretches.into()]].concat();
        let groups = [stretches, heads.attention, lanes.len()];
        ctx.hand_over(&Dispatch {
            kernel: &kernels::ATTEND,
            dtype: DType::F32,
            form,
            args: &args,
            numbers: &numbers,
            groups,
        })?;
        let args = [Arg::read(&partial), Arg::write(attention)];
        let numbers = [heads.attention.into(), heads.dim.into(), stretches.into()];
        ctx.dispatch(&kernels::ATTEND_JOIN, DType::F32, &args, &numbers, (heads.attention, lanes.len()))
    }

    /// The logits of the last pass (outputs, V).
    pub fn logits(&self, ctx: &mut Ctx) -> Result<Vec<f32>> {
        let Some(logits) = &self.logits else { return Ok(Vec::new()) };
        let logits = storage::read::<f32>("logits", logits)?.to_vec();
        ctx.transfer(0, 4 * logits.len());
        Ok(logits)
    }
}

/// Stretches with something visible at a position: those with sinks, and those of the window.
fn stretches(position: usize, window: usize, sinks: usize) -> usize {
    let with_sinks = sinks.min(position + 1).div_ceil(STRETCH);
    let first = with_sinks.max((position + 1).saturating_sub(window) / STRETCH);
    with_sinks + (position / STRETCH + 1).saturating_sub(first)
}

const _: () = assert!(STRETCH.is_multiple_of(PAGE));
