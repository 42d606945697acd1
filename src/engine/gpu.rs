//! Where the engine's passes run: on the CPU, or on a GPU, which also chooses tokens where temperature and top-k are all.
//!
//! Used by `Engine` only. On a GPU the pass after the last one is handed over before anybody has read that one's ids (it takes
//! them from the device), so the GPU does not wait for the host between two tokens; whoever wants another pass discards it.

use super::model::{self, Batch, Model};
use super::row::Row;
use super::{Pass, WeightType};
use crate::error::{Error, Result};
use crate::model::config::GptConfig;
use crate::nn::cache::{Cache, CacheType, Quantization};
use crate::ops::ctx::Ctx;
use crate::ops::decode::gpu::{Choosing, Chosen, Step};
use crate::ops::decode::{Lane, Workspace, gpu};

pub enum Decoder {
    Cpu(Box<(Model, Workspace)>),
    Gpu(Box<Gpu>),
}

pub struct Gpu {
    decoder: gpu::Decoder,
    /// The last logits, once somebody has asked for them.
    logits: Vec<f32>,
    /// What the last pass has chosen, and the ids once they are read.
    chosen: Option<Chosen>,
    ids: Vec<u32>,
    ahead: Option<(View, Chosen)>,
}

/// What a pass of one lane a row depends on, beside the ids.
#[derive(PartialEq)]
struct View {
    /// Row and position of each lane.
    lanes: Vec<(usize, usize)>,
    /// The pages of all rows. No two texts share the page that is written to.
    pages: Vec<u64>,
    choosing: Vec<Choosing>,
}

/// How a row's next token is chosen, if nothing but temperature and top-k has a say in it.
pub fn choosing(row: &Row) -> Option<Choosing> {
    let settings = row.settings();
    let sampling = &settings.sampling;
    let plain = sampling.top_p == 1.0
        && sampling.min_p == 0.0
        && sampling.repetition_penalty == 1.0
        && sampling.presence_penalty == 0.0
        && sampling.frequency_penalty == 0.0
        && settings.logit_bias.is_empty()
        && settings.logprobs.is_none()
        && row.new_ids().len() >= settings.min_tokens;
    let (seed, temperature, top_k) = (sampling.seed, sampling.temperature, sampling.top_k);
    plain.then_some(Choosing { seed, temperature, top_k })
}

impl Decoder {
    pub fn load(
        ctx: &Ctx,
        config: &GptConfig,
        kind: WeightType,
        weights: impl FnMut(&str, &[usize]) -> Result<Vec<f32>>,
    ) -> Result<Self> {
        Ok(match ctx.has_gpu() {
            true => {
                let decoder = model::upload(config, kind, weights)?;
                decoder.prepare(ctx)?;
                Decoder::Gpu(Box::new(Gpu { decoder, logits: Vec::new(), chosen: None, ids: Vec::new(), ahead: None }))
            }
            false => {
                let model = Model::load(config, kind, weights)?;
                Decoder::Cpu(Box::new((model, Workspace::new(model::sizes(config)))))
            }
        })
    }

    pub fn is_gpu(&self) -> bool {
        matches!(self, Decoder::Gpu(_))
    }

    /// Bytes of weights that one pass reads.
    pub fn bytes(&self) -> usize {
        match self {
            Decoder::Cpu(cpu) => cpu.0.bytes(),
            Decoder::Gpu(gpu) => gpu.decoder.bytes(),
        }
    }

    pub fn workspace_bytes(&self) -> usize {
        match self {
            Decoder::Cpu(cpu) => cpu.1.bytes(),
            Decoder::Gpu(gpu) => 4 * gpu.logits.capacity(),
        }
    }

    /// Keeps the weights in main memory.
    pub fn lock(&self, ctx: &Ctx) -> Result<()> {
        match self {
            Decoder::Cpu(cpu) => cpu.0.lock().map_err(|e| {
                Error::failed(format!("locking {} bytes of weights in memory: {e}", self.bytes()))
                    .with_hint("raise the limit (`ulimit -l unlimited`), or leave --lock-memory out")
            }),
            Decoder::Gpu(gpu) => ctx.keep_resident(&gpu.decoder.weights()),
        }
    }

    /// A row's cache where this decoder's passes find it.
    pub fn place(&self, cache: Cache, (kind, quantization): (CacheType, Option<Quantization>)) -> Result<Cache> {
        Ok(match self {
            Decoder::Cpu(_) => cache,
            Decoder::Gpu(gpu) => cache.in_pools(&gpu.decoder.pools(kind, quantization)?),
        })
    }

    /// Runs a planned pass. The keys and values of its lanes are appended to the rows.
    pub fn run(&mut self, ctx: &mut Ctx, rows: &mut [&mut Row], pass: &Pass, choose: bool) -> Result<()> {
        let Pass { lanes, ids, outputs, .. } = pass;
        match self {
            Decoder::Cpu(cpu) => {
                let (model, workspace) = &mut **cpu;
                model.run(ctx, workspace, rows, (lanes, ids), outputs);
                Ok(())
            }
            Decoder::Gpu(gpu) => gpu.run(ctx, rows, pass, choose),
        }
    }

    /// Hands over the pass after the last one, whose ids that one has chosen on the device: a lane for each row.
    pub fn look_ahead(&mut self, ctx: &mut Ctx, rows: &mut [&mut Row]) -> Result<()> {
        match self {
            Decoder::Cpu(_) => Ok(()),
            Decoder::Gpu(gpu) => gpu.look_ahead(ctx, rows),
        }
    }

    /// (outputs, V) of the last pass.
    pub fn logits(&mut self) -> &mut [f32] {
        match self {
            Decoder::Cpu(cpu) => cpu.1.logits(),
            Decoder::Gpu(gpu) => &mut gpu.logits,
        }
    }

    /// The ids that the last pass has chosen.
    pub fn chosen(&mut self, ctx: &mut Ctx) -> Result<Vec<u32>> {
        match self {
            Decoder::Cpu(_) => Err(Error::op("sample", "a GPU", "the CPU")),
            Decoder::Gpu(gpu) => {
                let chosen = gpu.chosen.as_ref().ok_or_else(|| Error::op("sample", "a pass that chooses", "none"))?;
                gpu.ids = chosen.read(ctx)?;
                Ok(gpu.ids.clone())
            }
        }
    }
}

impl Gpu {
    fn run(&mut self, ctx: &mut Ctx, rows: &mut [&mut Row], pass: &Pass, choose: bool) -> Result<()> {
        let Pass { lanes, ids, outputs, .. } = pass;
        lanes.iter().for_each(|lane| rows[lane.row].cache.reserve(lane.position));
        let ahead = self.ahead.take().filter(|_| choose && outputs.len() == lanes.len() && *ids == self.ids);
        if let Some((view, chosen)) = ahead
            && view == View::of(rows, lanes)
        {
            self.chosen = Some(chosen);
            return Ok(());
        }
        let choosing: Vec<Choosing> = outputs.iter().filter_map(|lane| choosing(rows[lanes[*lane].row])).collect();
        let step = Step { lanes, ids: Some(ids), outputs, choosing: choose.then_some(&choosing[..]) };
        self.chosen = self.decoder.run(ctx, &Batch(rows), &step)?;
        if !choose && !outputs.is_empty() {
            self.logits = self.decoder.logits(ctx)?;
        }
        Ok(())
    }

    fn look_ahead(&mut self, ctx: &mut Ctx, rows: &mut [&mut Row]) -> Result<()> {
        let lane = |(row, text): (usize, &&mut Row)| {
            let position = text.cache.len();
            Lane { row, position, sink_position: text.cache.sink_position(position) }
        };
        let lanes: Vec<Lane> = rows.iter().enumerate().map(lane).collect();
        lanes.iter().for_each(|lane| rows[lane.row].cache.reserve(lane.position));
        let (view, outputs) = (View::of(rows, &lanes), Vec::from_iter(0..lanes.len()));
        let step = Step { lanes: &lanes, ids: None, outputs: &outputs, choosing: Some(&view.choosing) };
        let chosen = self.decoder.run(ctx, &Batch(rows), &step)?;
        self.ahead = chosen.map(|chosen| (view, chosen));
        Ok(())
    }
}

impl View {
    fn of(rows: &[&mut Row], lanes: &[Lane]) -> Self {
        Self {
            lanes: lanes.iter().map(|lane| (lane.row, lane.position)).collect(),
            pages: rows.iter().flat_map(|row| row.cache.device_pages()).collect(),
            choosing: rows.iter().filter_map(|row| choosing(row)).collect(),
        }
    }
}
