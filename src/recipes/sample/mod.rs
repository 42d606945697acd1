//! `gpt sample`: prompts continued by a model, shown as text while they grow.
//!
//! The engine knows ids only; here they become text, and a text is stopped by what it says. Rows are shown one after the
//! other, the first that is not at its end live, so that many of them stay readable.

pub mod memory;
mod models;
mod prefix;
pub mod prompts;
pub mod settings;
mod text;

use std::path::PathBuf;
use std::time::Instant;

use super::report::{Event, Interrupt, Report};
use crate::device;
use crate::engine::batch::{Batch, Finish, Job};
use crate::engine::draft::Draft;
use crate::engine::{Engine, Logprobs, Row, RowSettings};
pub use crate::engine::{PREFILL_CHUNK, Sampling, WeightType};
use crate::error::{Error, Result};
use crate::model::gpt::Gpt;
pub use crate::nn::cache::{CacheSettings, CacheType, DEFAULT_SINKS, Quantization};
use crate::ops::{ctx::Ctx, simd::Family};
use crate::tokenizer::Tokenizer;
use memory::{Budget, Load, Memory};
pub use models::{DraftChoice, Models, open_engine, open_folder};
use prompts::Prompt;
use settings::{Generation, Given};
pub use text::Marks;
use text::Output;

/// What `gpt sample` was asked to do.
#[derive(Clone, Debug)]
pub struct SampleConfig {
    pub checkpoint: Option<PathBuf>,
    /// Adapters that are added to it, each times its scale.
    pub adapters: Vec<(PathBuf, f32)>,
    /// Row i is sampled with the seed of the flags plus i, unless its prompt names one.
    pub prompts: Vec<Prompt>,
    /// Rows worked on at a time.
    pub width: usize,
    pub max_tokens: usize,
    pub min_tokens: usize,
    pub sampling: Given,
    pub cache: CacheSettings,
    pub marks: Marks,
    /// Ids that end a row, beside those that the model names.
    pub stop_tokens: Vec<u32>,
    pub logit_bias: Vec<(u32, f32)>,
    /// So many of the likeliest ids are told for each new one.
    pub logprobs: Option<usize>,
    /// What weights are kept in; the checkpoint's own type if not given.
    pub kind: Option<WeightType>,
    pub draft: DraftChoice,
    /// Proposals at a time; chosen by what is measured if not given.
    pub draft_tokens: Option<usize>,
    /// Decode again without batch and draft, and compare.
    pub verify: bool,
    pub prefill_chunk: usize,
    pub save_cache: Option<PathBuf>,
    pub load_cache: Option<PathBuf>,
    pub budget: Option<Budget>,
    pub lock_memory: bool,
    pub family: Family,
}

impl SampleConfig {
    /// No prompt, and of everything else the default; no draft.
    pub fn new(family: Family) -> Self {
        Self {
            checkpoint: None,
            adapters: Vec::new(),
            prompts: Vec::new(),
            width: 1,
            max_tokens: 400,
            min_tokens: 0,
            sampling: Given::default(),
            cache: CacheSettings::default(),
            marks: Marks::default(),
            stop_tokens: Vec::new(),
            logit_bias: Vec::new(),
            logprobs: None,
            kind: None,
            draft: DraftChoice::None,
            draft_tokens: None,
            verify: false,
            prefill_chunk: PREFILL_CHUNK,
            save_cache: None,
            load_cache: None,
            budget: None,
            lock_memory: false,
            family,
        }
    }
}

/// One continued prompt.
#[derive(Clone, Debug, serde::Serialize)]
pub struct SampledRow {
    pub prompt: String,
    /// What was generated; a stop text and hidden spans are not in it.
    pub text: String,
    pub ids: Vec<u32>,
    /// stop | length | interrupted
    pub finish_reason: &'static str,
    /// Of each of `ids`, with --logprobs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub logprobs: Vec<TokenLogprobs>,
}

/// What the model thought of a token before any setting of sampling, in natural logarithms.
#[derive(Clone, Debug, serde::Serialize)]
pub struct TokenLogprobs {
    pub id: u32,
    pub text: String,
    pub logprob: f32,
    /// The likeliest tokens, best first.
    pub top: Vec<TopToken>,
}

#[derive(Clone, Debug, serde::Serialize)]
pub struct TopToken {
    pub id: u32,
    pub text: String,
    pub logprob: f32,
}

/// The keys of `--json`.
#[derive(Clone, Debug, serde::Serialize)]
pub struct SampleSummary {
    pub checkpoint: PathBuf,
    pub rows: Vec<SampledRow>,
    /// Of all prompts; with a shared start more than were computed.
    pub prompt_tokens: usize,
    pub new_tokens: usize,
    pub prefill_seconds: f64,
    pub decode_seconds: f64,
    /// Of decoding alone, prompts left out, over all rows.
    pub tokens_per_second: f64,
    pub time_to_first_token: f64,
    /// The most that keys and values took, the draft's included.
    pub cache_bytes: usize,
    /// The flags of the cache that were worked with, if there are any.
    pub cache_flags: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
    #[serde(flatten)]
    pub speculation: Option<Speculation>,
    /// Whether decoding without batch and draft gave the same ids.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verified: Option<bool>,
}

/// What a draft has brought.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Speculation {
    pub draft: String,
    pub acceptance_rate: f64,
    pub draft_tokens: usize,
    pub accepted_tokens: usize,
    /// Tokens that the model was run for, counted for each row.
    pub target_steps: usize,
    pub tokens_per_target_step: f64,
    /// How much faster than without a draft, if that was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speedup: Option<f64>,
}

/// Opens the checkpoint and generates; text goes out as events.
pub fn run(config: &SampleConfig, report: &mut dyn Report, interrupt: &Interrupt) -> Result<SampleSummary> {
    Session::open(config, report)?.run(config, report, interrupt)
}

/// A model and its draft, ready for one sample after the other.
pub struct Session {
    models: Models,
    draft: Option<Draft>,
}

impl Session {
    /// Opens what the config names and prepares it.
    pub fn open(config: &SampleConfig, report: &mut dyn Report) -> Result<Self> {
        check(config)?;
        let mut models = Models::open(
            (config.checkpoint.as_deref(), &config.adapters),
            config.kind,
            &config.draft,
            config.family,
            report,
        )?;
        models.engine.set_prefill_chunk(config.prefill_chunk)?;
        if config.draft_tokens.is_some() && models.draft.is_none() {
            report.event(Event::Warning("there is no draft, so --draft-tokens does nothing".into()));
        }
        if config.lock_memory {
            models.engines().iter().try_for_each(|engine| engine.lock_memory())?;
        }
        Ok(Self { models, draft: None })
    }

    /// Samples the prompts of a config that differs from the one it was opened with in nothing that was opened.
    pub fn run(
        &mut self,
        config: &SampleConfig,
        report: &mut dyn Report,
        interrupt: &Interrupt,
    ) -> Result<SampleSummary> {
        check(config)?;
        let Self { models, draft } = self;
        let mut jobs = jobs(config, models)?;
        let prompt_tokens = jobs.iter().map(|job| job.prompt.len()).sum();
        let memory = fit_memory(config, (models, draft), &mut jobs, report)?;
        let cache = jobs.first().map_or(config.cache, |job| job.settings.cache);
        let origin = match (&config.save_cache, &config.load_cache) {
            (None, None) => None,
            _ => Some(models.origin(cache, config.family)?),
        };
        let prefix = match (&config.load_cache, &origin, jobs.first()) {
            (Some(path), Some(origin), Some(job)) => {
                Some(prefix::load(path, origin, &models.engine, job.settings.clone())?)
            }
            _ => None,
        };
        let again = if config.verify { jobs.clone() } else { Vec::new() };
        if let Some(source) = models.draft.take() {
            *draft = Some(Draft::new(source, config.draft_tokens)?);
        }
        let name = models.draft_name();
        let mut run = Run::new(config, &models.tokenizer, jobs.len());
        let mut batch = Batch::new(&mut models.engine, jobs, config.width, draft.take())?;
        if let Some(prefix) = prefix {
            batch = batch.with_prefix(prefix);
        }
        let ran =
            run.all(&mut batch, report, interrupt).and_then(|()| match (&config.save_cache, &origin, batch.prefix()) {
                (Some(path), Some(origin), Some(row)) => prefix::save(path, origin, row),
                _ => Ok(()),
            });
        let mut summary = run.summary(models.place.clone(), prompt_tokens);
        summary.speculation = batch.draft().map(|draft| speculation(name, draft, run.new_tokens(), run.times));
        (summary.cache_bytes, summary.cache_flags) = (batch.peak_cache_bytes(), memory::flags(cache));
        summary.memory = memory;
        // The next run has it again, also after this one failed.
        *draft = batch.into_draft();
        ran?;
        if config.verify {
            verify(&mut models.engine, again, &mut summary)?;
        }
        Ok(summary)
    }
}

/// Refuses what cannot be meant, before anything is loaded.
fn check(config: &SampleConfig) -> Result<()> {
    let texts = config.marks.hide.iter().flat_map(|(open, close)| [open, close]).chain(&config.marks.stop);
    if texts.into_iter().any(String::is_empty) {
        return Err(Error::usage("an empty text cannot be looked for").with_hint("leave that --stop or --hide out"));
    }
    Generation::default().sampling(&config.sampling).validate()?;
    config.cache.validate()
}

/// The rows to sample.
fn jobs(config: &SampleConfig, models: &Models) -> Result<Vec<Job>> {
    let Models { tokenizer, generation, .. } = models;
    let vocab = models.engine.config().vocab_size;
    let mut stop = vec![tokenizer.end_of_text()];
    stop.extend(generation.ends(vocab).iter().chain(&config.stop_tokens));
    stop.sort_unstable();
    stop.dedup();
    let sampling = generation.sampling(&config.sampling);
    let one = |(row, prompt): (usize, &Prompt)| {
        let mut ids = tokenizer.encode(&prompt.text)?;
        if ids.is_empty() {
            ids.push(generation.start(vocab).unwrap_or(tokenizer.end_of_text()));
        }
        let seed = prompt.seed.unwrap_or(sampling.seed.wrapping_add(row as u64));
        let settings = RowSettings {
            sampling: Sampling { seed, ..sampling },
            cache: config.cache,
            logit_bias: config.logit_bias.clone(),
            stop: stop.clone(),
            min_tokens: config.min_tokens,
            logprobs: config.logprobs,
        };
        // Everything that can be refused is refused before the first token.
        models.engine.row(&ids, settings.clone())?;
        Ok(Job { prompt: ids, settings, max_tokens: prompt.max_tokens.unwrap_or(config.max_tokens) })
    };
    config.prompts.iter().enumerate().map(one).collect()
}

/// Says, before work starts, if memory will not do; with a budget of `auto` it changes the cache of the jobs.
fn fit_memory(
    config: &SampleConfig,
    (models, draft): (&mut Models, &mut Option<Draft>),
    jobs: &mut [Job],
    report: &mut dyn Report,
) -> Result<Option<Memory>> {
    let Some(budget) = config.budget else { return Ok(None) };
    let load = Load {
        rows: config.width.min(jobs.len()),
        positions: jobs.iter().map(|job| job.prompt.len() + job.max_tokens).max().unwrap_or(1),
    };
    let (_, available) = device::memory();
    // Before the first run the draft is with the models, later with the session.
    let mut engines = models.engines();
    engines.extend(draft.as_mut().and_then(Draft::engine));
    let (cache, memory) = memory::fit(&mut engines, config.cache, load, (budget, available))?;
    if cache != config.cache {
        report.event(Event::Note(format!("to fit into memory: {}", memory::flags(cache))));
        jobs.iter_mut().for_each(|job| job.settings.cache = cache);
    }
    Ok(Some(memory))
}

#[derive(Clone, Copy, Debug, Default)]
struct Times {
    prefill: f64,
    /// From the end of the first prefill to the last token.
    decode: f64,
    /// From the start to the first new token.
    first: f64,
}

/// The rows on their way to text.
struct Run<'a> {
    config: &'a SampleConfig,
    tokenizer: &'a Tokenizer,
    rows: Vec<Growing<'a>>,
    /// The row that is shown live: those before it are at their end.
    current: usize,
    times: Times,
}

struct Growing<'a> {
    output: Output<'a>,
    /// Made while an earlier row was shown.
    unseen: String,
    ids: Vec<u32>,
    logprobs: Vec<Logprobs>,
    finish_reason: Option<&'static str>,
}

impl<'a> Run<'a> {
    fn new(config: &'a SampleConfig, tokenizer: &'a Tokenizer, count: usize) -> Self {
        let row = || Growing {
            output: Output::new(tokenizer, &config.marks),
            unseen: String::new(),
            ids: Vec::new(),
            logprobs: Vec::new(),
            finish_reason: None,
        };
        let rows = (0..count).map(|_| row()).collect();
        Self { config, tokenizer, rows, current: 0, times: Times::default() }
    }

    fn new_tokens(&self) -> usize {
        self.rows.iter().map(|row| row.ids.len()).sum()
    }

    /// Runs the batch to its end, or until somebody wants it to stop.
    fn all(&mut self, batch: &mut Batch, report: &mut dyn Report, interrupt: &Interrupt) -> Result<()> {
        let start = Instant::now();
        batch.fill()?;
        self.times.prefill = start.elapsed().as_secs_f64();
        self.begin(report);
        while !interrupt.requested() {
            let Some(step) = batch.next() else { break };
            let step = step?;
            let elapsed = start.elapsed().as_secs_f64();
            if self.times.first == 0.0 && !step.ids.is_empty() {
                self.times.first = elapsed;
            }
            self.times.decode = elapsed - self.times.prefill;
            let ended = self.take(step.job, &step.ids, batch.row(step.job), step.finish);
            if ended && step.finish.is_none() {
                batch.stop(step.job);
            }
            self.show(report);
        }
        for row in self.rows.iter_mut().filter(|row| row.finish_reason.is_none()) {
            row.finish_reason = Some("interrupted");
            row.unseen += &row.output.finish();
        }
        self.show(report);
        Ok(())
    }

    /// Gives a row its new ids; whether it is at its end. A stop text may make the last ones superfluous.
    fn take(&mut self, number: usize, ids: &[u32], made: Option<&Row>, finish: Option<Finish>) -> bool {
        let row = &mut self.rows[number];
        let logprobs = made.map_or(&[][..], |made| &made.logprobs()[made.logprobs().len().min(row.ids.len())..]);
        for (i, id) in ids.iter().enumerate() {
            row.ids.push(*id);
            row.logprobs.extend(logprobs.get(i).cloned());
            let (ready, stopped) = row.output.push(*id);
            row.unseen += &ready;
            if stopped {
                row.finish_reason = Some("stop");
                return true;
            }
        }
        row.finish_reason = finish.map(|finish| if finish == Finish::Stop { "stop" } else { "length" });
        if finish.is_some() {
            row.unseen += &row.output.finish();
        }
        finish.is_some()
    }

    fn begin(&self, report: &mut dyn Report) {
        if let Some(prompt) = self.config.prompts.get(self.current) {
            let (number, of) = (self.current, self.rows.len());
            report.event(Event::Row { number, of, prompt: prompt.text.clone() });
        }
    }

    /// Shows what is new of the current row and, if it is at its end, goes on to the next.
    fn show(&mut self, report: &mut dyn Report) {
        while let Some(row) = self.rows.get_mut(self.current) {
            let unseen = std::mem::take(&mut row.unseen);
            if !unseen.is_empty() {
                report.event(Event::Text(unseen));
            }
            if row.finish_reason.is_none() {
                return;
            }
            report.event(Event::RowEnd(Box::new(self.sampled(self.current))));
            self.current += 1;
            self.begin(report);
        }
    }

    fn sampled(&self, number: usize) -> SampledRow {
        let row = &self.rows[number];
        let text = |id: u32| String::from_utf8_lossy(self.tokenizer.bytes_of(id)).into_owned();
        let logprobs = row.ids.iter().zip(&row.logprobs).map(|(id, logprobs)| TokenLogprobs {
            id: *id,
            text: text(*id),
            logprob: logprobs.chosen,
            top: logprobs
                .top
                .iter()
                .map(|(id, logprob)| TopToken { id: *id, text: text(*id), logprob: *logprob })
                .collect(),
        });
        SampledRow {
            prompt: self.config.prompts[number].text.clone(),
            text: row.output.shown().to_owned(),
            ids: row.ids.clone(),
            finish_reason: row.finish_reason.unwrap_or("interrupted"),
            logprobs: logprobs.collect(),
        }
    }

    fn summary(&self, checkpoint: PathBuf, prompt_tokens: usize) -> SampleSummary {
        let Times { prefill, decode, first } = self.times;
        let new_tokens = self.new_tokens();
        SampleSummary {
            checkpoint,
            rows: (0..self.rows.len()).map(|row| self.sampled(row)).collect(),
            prompt_tokens,
            new_tokens,
            prefill_seconds: prefill,
            decode_seconds: decode,
            tokens_per_second: if decode > 0.0 { new_tokens as f64 / decode } else { 0.0 },
            time_to_first_token: first,
            cache_bytes: 0,
            cache_flags: String::new(),
            memory: None,
            speculation: None,
            verified: None,
        }
    }
}

fn speculation(draft: String, used: &Draft, new_tokens: usize, times: Times) -> Speculation {
    let counts = used.counts();
    let share = |a: usize, b: usize| if b > 0 { a as f64 / b as f64 } else { 0.0 };
    let rate = new_tokens as f64 / times.decode.max(f64::MIN_POSITIVE);
    Speculation {
        draft,
        acceptance_rate: share(counts.accepted, counts.proposed),
        draft_tokens: counts.proposed,
        accepted_tokens: counts.accepted,
        target_steps: counts.target_steps,
        tokens_per_target_step: share(new_tokens, counts.target_steps),
        speedup: used.plain_rate().map(|plain| rate / plain),
    }
}

/// Decodes every row alone, token by token, and compares.
fn verify(engine: &mut Engine, jobs: Vec<Job>, summary: &mut SampleSummary) -> Result<()> {
    let (mut tokens, mut seconds, mut same) = (0, 0.0, true);
    for (job, row) in jobs.into_iter().zip(&summary.rows) {
        let mut alone = engine.row(&job.prompt, job.settings)?;
        engine.prefill(&mut alone)?;
        let start = Instant::now();
        while alone.new_ids().len() < row.ids.len() && !alone.is_finished() {
            engine.step(&mut [&mut alone])?;
        }
        seconds += start.elapsed().as_secs_f64();
        tokens += alone.new_ids().len();
        same &= alone.new_ids() == row.ids;
    }
    if let (Some(speculation), true) = (&mut summary.speculation, tokens > 0) {
        speculation.speedup = Some(summary.tokens_per_second / (tokens as f64 / seconds));
    }
    summary.verified = Some(same);
    match same {
        true => Ok(()),
        false => Err(Error::failed("decoding without batch and draft gave other tokens")
            .with_hint("this is a defect: please report it")),
    }
}

/// An engine over a copy of a model's weights.
pub fn engine(model: &Gpt, kind: WeightType, ctx: Ctx) -> Result<Engine> {
    let tensors = model.tensors()?;
    Engine::new(ctx, &model.config, kind, |name, _| {
        let found = tensors.iter().find(|t| t.name == name).map(|t| t.data.clone());
        found.ok_or_else(|| Error::op("engine", "every weight of the model", format!("no {name}")))
    })
}

/// One short text from a model in training.
pub fn from_model(model: &Gpt, family: Family, tokenizer: &Tokenizer, start: u32) -> Result<String> {
    from_engine(&mut engine(model, WeightType::F32, Ctx::open(family))?, tokenizer, start)
}

/// One short text.
pub fn from_engine(engine: &mut Engine, tokenizer: &Tokenizer, start: u32) -> Result<String> {
    let sampling = Sampling { temperature: 0.8, ..Sampling::default() };
    let settings = RowSettings { sampling, stop: vec![tokenizer.end_of_text()], ..RowSettings::default() };
    let mut row = engine.row(&[start], settings)?;
    let marks = Marks::default();
    let mut text = Output::new(tokenizer, &marks);
    while row.new_ids().len() < 450 && !row.is_finished() {
        let id = engine.step(&mut [&mut row])?[0];
        text.push(id);
    }
    text.finish();
    Ok(text.shown().to_owned())
}
