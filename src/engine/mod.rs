//! Sampling and scoring: ids in, ids out, over packed weights and paged caches. No tokenizer, no printing.
//!
//! Used by the recipes and by eval. What must stay true: the ids depend on weights, prompt, settings and kernel family,
//! never on what else is in a step, how the prompt was cut into chunks, or the number of threads.

mod model;
pub mod row;
pub mod sampler;

pub use row::{Row, RowSettings};
pub use sampler::Sampling;

pub use crate::ops::decode::weight::WeightType;

use crate::error::{Error, Result};
use crate::model::config::GptConfig;
use crate::nn::cache::{Cache, CacheSettings};
use crate::ops::ctx::{Counts, Ctx};
use crate::ops::decode::page::CacheType;
use crate::ops::decode::{Lane, Workspace};
use model::Model;
use sampler::Sampler;

/// Tokens of a prompt that are computed at a time; with more rows than this in a step, as many as there are rows.
pub const PREFILL_CHUNK: usize = 64;

/// A model ready to sample.
pub struct Engine {
    ctx: Ctx,
    config: GptConfig,
    kind: WeightType,
    model: Model,
    workspace: Workspace,
    sampler: Sampler,
    chunk: usize,
    pass: Pass,
}

/// The lanes of a pass: scratch that is reused.
#[derive(Default)]
struct Pass {
    takes: Vec<usize>,
    lanes: Vec<Lane>,
    ids: Vec<u32>,
    outputs: Vec<usize>,
}

/// The lanes of a pass whose logits are wanted.
enum Outputs {
    None,
    LastOfEachRow,
    All,
}

impl Engine {
    /// Packs, as `kind`, the weights that `weights` gives by Hugging Face name and shape, `lm_head.weight` only if it is not
    /// tied.
    pub fn new(
        ctx: Ctx,
        config: &GptConfig,
        kind: WeightType,
        weights: impl FnMut(&str, &[usize]) -> Result<Vec<f32>>,
    ) -> Result<Self> {
        let model = Model::load(config, kind, weights)?;
        Ok(Self {
            workspace: Workspace::new(model::sizes(config)),
            sampler: Sampler::new(ctx.family()),
            chunk: PREFILL_CHUNK,
            pass: Pass::default(),
            config: config.clone(),
            kind,
            model,
            ctx,
        })
    }

    pub fn config(&self) -> &GptConfig {
        &self.config
    }

    /// Bytes of the packed weights that one step reads.
    pub fn weight_bytes(&self) -> usize {
        self.model.bytes()
    }

    /// Ops launched and weight bytes read since the last call.
    pub fn take_counts(&mut self) -> Counts {
        self.ctx.take_counts()
    }

    /// Computes prompts in chunks of 1 to `PREFILL_CHUNK` tokens; the results do not depend on it.
    pub fn set_prefill_chunk(&mut self, chunk: usize) -> Result<()> {
        if !(1..=PREFILL_CHUNK).contains(&chunk) {
            let what = format!("a prefill chunk of {chunk} tokens is not possible");
            return Err(Error::usage(what).with_hint(format!("use 1 to {PREFILL_CHUNK}")));
        }
        self.chunk = chunk;
        Ok(())
    }

    /// A row that will continue `prompt`, which must not be empty (start with the end-of-text id instead).
    pub fn row(&self, prompt: &[u32], settings: RowSettings) -> Result<Row> {
        if prompt.is_empty() {
            return Err(Error::usage("the prompt is empty").with_hint("start from the end-of-text token instead"));
        }
        self.check_ids(prompt)?;
        settings.sampling.validate()?;
        settings.cache.validate()?;
        let context = self.config.max_position_embeddings;
        let layers = self.config.windows.iter().map(|own| settings.cache.layer(*own, context));
        let kind = settings.cache.kind.unwrap_or(match self.kind {
            WeightType::F32 => CacheType::F32,
            _ => CacheType::Bf16,
        });
        let kind = (kind, settings.cache.quantization);
        let cache = Cache::new(model::sizes(&self.config).heads, kind, layers, PREFILL_CHUNK);
        Ok(Row::new(prompt.to_vec(), settings, cache))
    }

    /// Computes all pending ids of a row but the last, which the next `step` needs.
    pub fn prefill(&mut self, row: &mut Row) -> Result<()> {
        let rows = &mut [row];
        while rows[0].pending() > 1 {
            self.take(rows, self.chunk);
            self.forward(rows, Outputs::None);
        }
        Ok(())
    }

    /// Computes what is pending in each row and gives each one token more: its last id afterwards, returned in order.
    pub fn step(&mut self, rows: &mut [&mut Row]) -> Result<Vec<u32>> {
        if let Some(row) = rows.iter().position(|row| row.is_finished()) {
            return Err(Error::op("step", "rows that go on", format!("row {row}, which has met a stop id")));
        }
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        // Prompts first, down to what fits into the pass that samples.
        let room = self.chunk.max(rows.len());
        while rows.iter().map(|row| row.pending()).sum::<usize>() > room {
            self.take(rows, room);
            self.forward(rows, Outputs::None);
        }
        self.pass.takes.clear();
        self.pass.takes.extend(rows.iter().map(|row| row.pending()));
        self.forward(rows, Outputs::LastOfEachRow);
        let sampled = self.sample(rows);
        match &sampled {
            Ok(ids) => rows.iter_mut().zip(ids).for_each(|(row, id)| row.push(*id)),
            // As before the step: the last id of each row is pending again.
            Err(_) => rows.iter_mut().try_for_each(|row| row.cache.truncate(row.cache.len() - 1))?,
        }
        sampled
    }

    /// A token for each row from the logits of the pass that was run.
    fn sample(&mut self, rows: &[&mut Row]) -> Result<Vec<u32>> {
        let logits = self.workspace.logits().chunks_exact_mut(self.config.vocab_size);
        let sample = |(row, logits): (&&mut Row, _)| self.sampler.sample(&row.settings().sampling, row.ids(), logits);
        rows.iter().zip(logits).map(sample).collect()
    }

    /// Logits of every position of `ids`, handed to `each` chunk by chunk as (first position, (positions, V)).
    pub fn logits(
        &mut self,
        ids: &[u32],
        cache: CacheSettings,
        mut each: impl FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        if ids.is_empty() {
            return Ok(());
        }
        let row = &mut self.row(ids, RowSettings { cache, ..RowSettings::default() })?;
        let rows = &mut [row];
        for start in (0..ids.len()).step_by(self.chunk) {
            let count = self.chunk.min(ids.len() - start);
            self.pass.takes.clear();
            self.pass.takes.push(count);
            self.forward(rows, Outputs::All);
            each(start, self.workspace.logits())?;
        }
        Ok(())
    }

    /// Plans a pass over pending ids, but for the last of each row: at most `room`, the first rows first.
    fn take(&mut self, rows: &[&mut Row], room: usize) {
        let mut left = room;
        self.pass.takes.clear();
        self.pass.takes.extend(rows.iter().map(|row| {
            let take = (row.pending() - 1).min(left).min(PREFILL_CHUNK);
            left -= take;
            take
        }));
    }

    /// Runs the planned number of pending ids of each row through the model, to logits in the workspace.
    fn forward(&mut self, rows: &mut [&mut Row], wanted: Outputs) {
        let Pass { takes, lanes, ids, outputs } = &mut self.pass;
        lanes.clear();
        ids.clear();
        outputs.clear();
        for (index, (row, take)) in rows.iter().zip(takes.iter()).enumerate() {
            let start = row.cache.len();
            ids.extend_from_slice(&row.ids()[start..start + take]);
            lanes.extend((start..start + take).map(|position| Lane {
                row: index,
                position,
                sink_position: row.cache.sink_position(position),
            }));
            match wanted {
                Outputs::None => {}
                Outputs::LastOfEachRow => outputs.push(lanes.len() - 1),
                Outputs::All => outputs.extend(lanes.len() - take..lanes.len()),
            }
        }
        self.model.run(&mut self.ctx, &mut self.workspace, rows, (lanes, ids), outputs);
        rows.iter_mut().zip(takes).for_each(|(row, take)| row.cache.advance(*take));
    }

    fn check_ids(&self, ids: &[u32]) -> Result<()> {
        let size = self.config.vocab_size;
        match ids.iter().find(|id| **id as usize >= size) {
            None => Ok(()),
            Some(id) => Err(Error::usage(format!("token {id} is outside of the model's vocabulary of {size}"))
                .with_hint("use the tokenizer that the model was trained with")),
        }
    }
}
