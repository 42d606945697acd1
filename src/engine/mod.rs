//! Sampling and scoring: ids in, ids out, over packed weights and paged caches. No tokenizer, no printing.
//!
//! Used by the recipes and by eval. What must stay true: the ids depend on weights, prompt, settings and kernel family,
//! never on what else is in a step, how the prompt was cut into chunks, or the number of threads.

pub mod batch;
pub mod draft;
mod gpu;
mod model;
pub mod row;
pub mod sampler;

pub use row::{Logprobs, Row, RowSettings};
pub use sampler::Sampling;

pub use crate::ops::decode::weight::WeightType;

use crate::error::{Error, Result};
use crate::model::config::GptConfig;
use crate::nn::cache::{Cache, CacheSettings};
use crate::ops::ctx::{Counts, Ctx};
use crate::ops::decode::Lane;
use crate::ops::decode::page::CacheType;
use gpu::Decoder;
use sampler::Sampler;

/// Tokens of a prompt that are computed at a time; with more rows than this in a step, as many as there are rows.
pub const PREFILL_CHUNK: usize = 64;

/// Proposed ids of a row that are computed at a time: what a cache can always take back.
pub const MAX_PROPOSED: usize = 32;

/// A model ready to sample.
pub struct Engine {
    ctx: Ctx,
    config: GptConfig,
    kind: WeightType,
    decoder: Decoder,
    sampler: Sampler,
    chunk: usize,
    pass: Pass,
}

/// The lanes of a pass: scratch that is reused.
#[derive(Default)]
struct Pass {
    takes: Vec<usize>,
    /// How many of the last lanes of each row have logits.
    wanted: Vec<usize>,
    lanes: Vec<Lane>,
    ids: Vec<u32>,
    outputs: Vec<usize>,
}

impl Pass {
    /// So many pending ids of each row, and the lanes whose logits are wanted.
    fn plan(&mut self, rows: &[&mut Row], takes: &[usize], wanted: &Outputs) {
        self.lanes.clear();
        self.ids.clear();
        self.outputs.clear();
        for (index, (row, take)) in rows.iter().zip(takes).enumerate() {
            let start = row.cache.len();
            self.ids.extend_from_slice(&row.ids()[start..start + take]);
            self.lanes.extend((start..start + take).map(|position| Lane {
                row: index,
                position,
                sink_position: row.cache.sink_position(position),
            }));
            let end = self.lanes.len();
            match wanted {
                Outputs::None => {}
                Outputs::Last => self.outputs.extend(end - self.wanted[index]..end),
                Outputs::All => self.outputs.extend(end - take..end),
            }
        }
    }
}

/// The lanes of a pass whose logits are wanted.
enum Outputs {
    None,
    /// So many of the last of each row as `Pass::wanted` says.
    Last,
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
        let decoder = Decoder::load(&ctx, config, kind, weights)?;
        Ok(Self {
            sampler: Sampler::new(ctx.family()),
            chunk: PREFILL_CHUNK,
            pass: Pass::default(),
            config: config.clone(),
            kind,
            decoder,
            ctx,
        })
    }

    pub fn config(&self) -> &GptConfig {
        &self.config
    }

    /// Bytes of the packed weights that one step reads.
    pub fn weight_bytes(&self) -> usize {
        self.decoder.bytes()
    }

    /// Bytes of the buffers of a pass.
    pub fn workspace_bytes(&self) -> usize {
        self.decoder.workspace_bytes()
    }

    /// Keeps the weights in main memory: the system never swaps them out. Fails where its limit forbids that.
    pub fn lock_memory(&self) -> Result<()> {
        self.decoder.lock(&self.ctx)
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
        self.check_ids(&settings.stop)?;
        let biased: Vec<u32> = settings.logit_bias.iter().map(|(id, _)| *id).collect();
        self.check_ids(&biased)?;
        if let Some((id, bias)) = settings.logit_bias.iter().find(|(_, bias)| bias.is_nan() || *bias == f32::INFINITY) {
            return Err(Error::usage(format!("a bias of {bias} for token {id} is not possible"))
                .with_hint("use a number, or -inf to exclude the token"));
        }
        let context = self.config.max_position_embeddings;
        let layers = self.config.windows.iter().map(|own| settings.cache.layer(*own, context));
        let kind = settings.cache.kind.unwrap_or(match self.kind {
            WeightType::F32 => CacheType::F32,
            _ => CacheType::Bf16,
        });
        let kind = (kind, settings.cache.quantization);
        let cache = Cache::new(model::sizes(&self.config).heads, kind, layers, PREFILL_CHUNK);
        let cache = self.decoder.place(cache, kind)?;
        Ok(Row::new(prompt.to_vec(), settings, cache))
    }

    /// Computes all pending ids of a row but the last, which the next `step` needs.
    pub fn prefill(&mut self, row: &mut Row) -> Result<()> {
        let rows = &mut [row];
        while rows[0].pending() > 1 {
            self.take(rows, self.chunk);
            self.forward(rows, Outputs::None, false)?;
        }
        Ok(())
    }

    /// Computes what is pending in each row and gives each one token more: its last id afterwards, returned in order.
    pub fn step(&mut self, rows: &mut [&mut Row]) -> Result<Vec<u32>> {
        let before: Vec<usize> = rows.iter().map(|row| row.ids().len()).collect();
        self.advance(rows, &[])?;
        Ok(rows.iter().zip(before).map(|(row, len)| row.ids()[len]).collect())
    }

    /// Like `step`, with ids that are proposed for each row (none for rows past the end of the list): all of them are computed
    /// in one pass, and a row goes on as long as the token that it would have chosen is the one proposed, and by one token
    /// more. Its ids are those of so many steps. Returns how many proposed ids each row has taken.
    pub fn advance(&mut self, rows: &mut [&mut Row], proposed: &[Vec<u32>]) -> Result<Vec<usize>> {
        if let Some(row) = rows.iter().position(|row| row.is_finished()) {
            return Err(Error::op("step", "rows that go on", format!("row {row}, which has met a stop id")));
        }
        proposed.iter().try_for_each(|ids| self.check_ids(ids))?;
        if let Some(ids) = proposed.iter().find(|ids| ids.len() > MAX_PROPOSED) {
            return Err(Error::op("step", format!("at most {MAX_PROPOSED} proposed ids"), ids.len().to_string()));
        }
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        // Prompts first, down to what fits into the pass that samples.
        let room = self.chunk.max(rows.len());
        while rows.iter().map(|row| row.pending()).sum::<usize>() > room {
            self.take(rows, room);
            self.forward(rows, Outputs::None, false)?;
        }
        let on_device = self.decoder.is_gpu() && rows.iter().all(|row| gpu::choosing(row).is_some());
        let known: Vec<usize> = rows.iter().map(|row| row.ids().len()).collect();
        self.pass.takes.clear();
        self.pass.wanted.clear();
        for (i, row) in rows.iter_mut().enumerate() {
            let proposed = proposed.get(i).map_or(&[][..], Vec::as_slice);
            self.pass.takes.push(row.pending() + proposed.len());
            self.pass.wanted.push(proposed.len() + 1);
            row.propose(proposed);
        }
        let computed = self.forward(rows, Outputs::Last, on_device);
        // Back to what is certain; the keys of the proposed ids stay for those that are confirmed.
        rows.iter_mut().zip(&known).for_each(|(row, known)| row.unpropose(*known));
        let taken = computed.and_then(|()| self.settle(rows, proposed, on_device));
        for (row, known) in rows.iter_mut().zip(known) {
            // After a failure no row has moved.
            let len = if taken.is_ok() { row.ids().len() } else { known };
            row.truncate(len)?;
        }
        taken
    }

    /// Gives the rows their tokens after a pass over what is proposed for them. Returns how many of these each has taken.
    fn settle(&mut self, rows: &mut [&mut Row], proposed: &[Vec<u32>], on_device: bool) -> Result<Vec<usize>> {
        // Every row's last id is computed now, or will be by what was just handed over.
        if on_device && proposed.iter().all(|ids| ids.is_empty()) {
            self.decoder.look_ahead(&mut self.ctx, rows)?;
        }
        let chosen = if on_device { Some(self.decoder.chosen(&mut self.ctx)?) } else { None };
        let mut first = 0;
        let each = rows.iter_mut().enumerate().map(|(i, row)| {
            let proposed = proposed.get(i).map_or(&[][..], Vec::as_slice);
            let taken = self.confirm(row, proposed, first, chosen.as_deref());
            first += proposed.len() + 1;
            taken
        });
        each.collect()
    }

    /// Tokens for a row from the logits that start at output `first`, as long as they are the proposed ones, and one more.
    /// Where a GPU has `chosen` the outputs' tokens, they are those.
    fn confirm(&mut self, row: &mut Row, proposed: &[u32], first: usize, chosen: Option<&[u32]>) -> Result<usize> {
        for taken in 0..=proposed.len() {
            if let Some(chosen) = chosen {
                let id = chosen[first + taken];
                row.push(id, None);
                if proposed.get(taken) != Some(&id) || row.is_finished() {
                    return Ok(taken);
                }
                continue;
            }
            let (settings, vocab) = (row.settings(), self.config.vocab_size);
            let logits = &mut self.decoder.logits()[(first + taken) * vocab..][..vocab];
            let seen = settings.logprobs.map(|count| (sampler::likeliest(logits, count), logits.to_vec()));
            for (id, bias) in &settings.logit_bias {
                logits[*id as usize] += bias;
            }
            if row.new_ids().len() < settings.min_tokens {
                settings.stop.iter().for_each(|id| logits[*id as usize] = f32::NEG_INFINITY);
            }
            let id = self.sampler.sample(&settings.sampling, row.ids(), row.prompt_len(), logits)?;
            let logprobs = seen.map(|((top, total), logits)| Logprobs { chosen: logits[id as usize] - total, top });
            row.push(id, logprobs);
            if proposed.get(taken) != Some(&id) || row.is_finished() {
                return Ok(taken);
            }
        }
        Ok(proposed.len())
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
            self.forward(rows, Outputs::All, false)?;
            each(start, self.decoder.logits())?;
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

    /// Runs the planned number of pending ids of each row through the model, to logits in the decoder, or, if a GPU is to
    /// choose, to ids there.
    fn forward(&mut self, rows: &mut [&mut Row], wanted: Outputs, choose: bool) -> Result<()> {
        let takes = std::mem::take(&mut self.pass.takes);
        self.pass.plan(rows, &takes, &wanted);
        self.decoder.run(&mut self.ctx, rows, &self.pass, choose)?;
        rows.iter_mut().zip(&takes).for_each(|(row, take)| row.cache.advance(*take));
        self.pass.takes = takes;
        Ok(())
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
