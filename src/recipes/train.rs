//! `gpt train`: from a preset and some text to a model folder.
//!
//! Resolves the preset, opens the data, builds or restores the trainer, runs the loop, and ends with a report. The commit
//! point of a run is its newest complete `steps/NNNNNN/`; everything else in the folder can be made again from it.

use std::path::{Path, PathBuf};
use std::time::Instant;

use super::plan::{self, Resolved};
use super::report::{Event, Interrupt, Report, StepProgress};
use super::run_folder::{RunFolder, State};
use super::sample;
use crate::checkpoint::adapter::Base;
use crate::checkpoint::model_folder::{Companions, ModelFolder};
use crate::checkpoint::steps::{self, StepFolder};
use crate::data::windows::Window;
use crate::device;
use crate::error::{Error, Result};
use crate::eval::{self, Evaluation};
use crate::files::atomic;
use crate::model::config::GptConfig;
use crate::model::gpt::Gpt;
use crate::ops::{ctx::Ctx, simd::Family};
use crate::trainer::fit::{self, Best, Ended, Hooks};
use crate::trainer::objective::{NextToken, Objective};
use crate::trainer::step::{StepRecord, Trainer};

use sha2::{Digest, Sha256};

/// What `gpt train` was asked to do.
#[derive(Clone, Debug)]
pub struct TrainConfig {
    /// A built-in preset or a file; `None` is tiny, or the run's own when it is resumed.
    pub preset: Option<String>,
    /// Keys set by flags, in order.
    pub given: Vec<(String, String)>,
    pub out: Option<PathBuf>,
    pub resume: bool,
    pub init_from: Option<PathBuf>,
    /// Never ask a server for data.
    pub offline: bool,
    pub family: Family,
}

/// What a run reports; the keys of `--json`.
#[derive(Clone, Debug, serde::Serialize)]
pub struct TrainSummary {
    pub out: PathBuf,
    pub preset: String,
    pub parameters: usize,
    pub steps: u64,
    pub tokens: u64,
    pub train_loss: Option<f32>,
    pub val_loss: Option<f64>,
    pub val_bpb: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entropy_bpb: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_bpb: Option<f64>,
    pub tokens_per_second: f64,
    pub seconds: f64,
    pub peak_memory_bytes: u64,
    pub best_val_loss: Option<f64>,
    /// finished | early_stop | interrupted
    pub ended: &'static str,
    /// The loss curve as characters, and a sampled text.
    #[serde(skip)]
    pub curve: String,
    #[serde(skip)]
    pub sample: Option<String>,
}

/// What a run trains, and for what.
pub struct Goal {
    /// Kept in the state, so that resuming is to the same; null for training on the data alone.
    pub settings: serde_json::Value,
    pub objective: Box<dyn Objective>,
    /// The model to start from; random weights if not given. A run that goes on puts its own trained weights into it.
    pub model: Option<Gpt>,
    /// What the adapters are trained beside, if the model has any.
    pub base: Option<Base>,
    /// Whether the run ends with the weights of its best validation instead of the last ones.
    pub ends_with_best: bool,
}

impl Goal {
    /// Cross-entropy with the data.
    pub fn next_token(settings: serde_json::Value, model: Option<Gpt>) -> Self {
        Self { settings, objective: Box::new(NextToken), model, base: None, ends_with_best: false }
    }
}

/// Trains to the end of the plan, or until interrupted; the state is saved either way.
pub fn run(config: &TrainConfig, report: &mut dyn Report, interrupt: &Interrupt) -> Result<TrainSummary> {
    let goal = |_: &Resolved| {
        let model = config.init_from.as_ref().map(|path| ModelFolder::open(path)?.model()).transpose()?;
        Ok(Goal::next_token(serde_json::Value::Null, model))
    };
    run_for(config, &mut { goal }, report, interrupt)
}

/// The same for any objective, which `goal` makes for the run that was worked out.
pub fn run_for(
    config: &TrainConfig,
    goal: &mut dyn FnMut(&Resolved) -> Result<Goal>,
    report: &mut dyn Report,
    interrupt: &Interrupt,
) -> Result<TrainSummary> {
    let place = plan::place(config)?;
    let found = find_step(config, &place, report)?;
    let resolved = plan::resolve(config, &place, found.as_ref(), report, interrupt)?;
    refuse_existing(config, &place)?;
    let Goal { settings, mut objective, model, base, ends_with_best } = goal(&resolved)?;
    let mut folder = RunFolder::open(&place, base)?;
    let (mut trainer, best) = trainer(config, (&resolved, &settings, model), found.as_ref(), &mut folder, report)?;
    let frozen = frozen_hash(&trainer.model)?;
    let windows = resolved.corpus.windows(resolved.context, resolved.preset.train.seed, resolved.pack);
    let clock = Clock { start: Instant::now(), first_step: trainer.step, seconds: 0.0 };
    let mut run = Run {
        resolved: &resolved,
        folder,
        report,
        interrupt,
        companions: companions(&resolved, &trainer.model.config),
        goal: settings,
        ends_with_best,
        clock,
        last: None,
    };
    let (ended, best) = fit::fit(&mut trainer, &mut *objective, &resolved.plan, &windows, best, &mut run)?;
    if frozen_hash(&trainer.model)? != frozen {
        return Err(Error::failed("the frozen weights have changed in training")
            .with_hint("this is a defect: please report it"));
    }
    run.finish(&mut trainer, ended, best)
}

/// The SHA-256 of the weights that are not trained.
fn frozen_hash(model: &Gpt) -> Result<String> {
    let mut sum = Sha256::new();
    let frozen = model.parameters().iter().filter(|parameter| !parameter.is_trainable());
    frozen.into_iter().try_for_each(|parameter| parameter.visit_bytes(&mut |bytes| sum.update(bytes)))?;
    Ok(atomic::hex(&sum.finalize()))
}

/// Whether a run takes its settings from a saved state: it was asked to go on, and there is one.
pub(super) fn goes_on(config: &TrainConfig) -> Result<bool> {
    Ok(config.resume && steps::newest(&plan::place(config)?)?.0.is_some())
}

/// The state to go on from, if that was asked for and there is one.
fn find_step(config: &TrainConfig, place: &Path, report: &mut dyn Report) -> Result<Option<StepFolder>> {
    if !config.resume {
        return Ok(None);
    }
    let (step, damaged) = steps::newest(place)?;
    damaged.into_iter().for_each(|what| report.event(Event::Warning(what)));
    match &step {
        Some(step) => report.event(Event::Note(format!("going on from step {} of {}", step.step, place.display()))),
        None => report.event(Event::Note(format!("no saved state in {}: starting at step 0", place.display()))),
    }
    Ok(step)
}

fn refuse_existing(config: &TrainConfig, place: &Path) -> Result<()> {
    let used = std::fs::read_dir(place).is_ok_and(|mut entries| entries.next().is_some());
    if config.resume || !used {
        return Ok(());
    }
    Err(Error::usage(format!("{} exists and is not empty", place.display()))
        .with_hint("go on with it: --resume; or choose another folder: --out"))
}

/// A trainer with initial, given or restored weights.
fn trainer(
    config: &TrainConfig,
    (resolved, goal, model): (&Resolved, &serde_json::Value, Option<Gpt>),
    step: Option<&StepFolder>,
    folder: &mut RunFolder,
    report: &mut dyn Report,
) -> Result<(Trainer, Best)> {
    let preset = &resolved.preset;
    let mut model = match model {
        Some(model) => model,
        None => Gpt::random(&resolved.config, preset.train.seed)?,
    };
    model.recompute = preset.train.recompute;
    let mut ctx = Ctx::open(config.family);
    ctx.set_precision(plan::precision(preset, config.family)?);
    // Adapters have the dropout to themselves.
    let dropout = if model.adaptation().is_some() { 0.0 } else { preset.model.dropout };
    let mut trainer = Trainer::new(ctx, model, resolved.optimizer, dropout, preset.train.seed)?;
    let Some(step) = step else { return Ok((trainer, Best::default())) };
    let state = RunFolder::state(step)?;
    if state.goal != *goal {
        let what = format!("the run was made with {}, not {goal}", state.goal);
        return Err(Error::usage(what).with_hint("go on with the command and the flags that began it"));
    }
    folder.restore(step, &mut trainer, &state)?;
    if state.kernels != trainer.ctx.kernels_name() {
        let what = format!(
            "this run was computed with the {} kernels and goes on with {}: the last bits will differ",
            state.kernels,
            config.family.name()
        );
        report.event(Event::Warning(what));
    }
    let (tokens, tokenizer) = (resolved.corpus.train_tokens() as u64, resolved.tokenizer.hash());
    if state.tokenizer != tokenizer {
        let what = "the run was trained with another tokenizer: its ids mean something else";
        return Err(Error::failed(what).with_hint("name the tokenizer of the run, or start another run"));
    }
    if state.train_tokens != tokens {
        let what =
            format!("the training data has {tokens} tokens now, {} before: windows will differ", state.train_tokens);
        report.event(Event::Warning(what));
    }
    Ok((trainer, state.best))
}

fn companions(resolved: &Resolved, config: &GptConfig) -> Companions {
    let end_of_text = resolved.tokenizer.end_of_text();
    let line_break = resolved.tokenizer.encode("\n").ok().and_then(|ids| ids.first().copied());
    let documents = resolved.corpus.has_documents();
    Companions {
        end_of_text,
        start: line_break.filter(|_| !documents).unwrap_or(end_of_text),
        tokenizer_json: resolved.tokenizer.to_json().to_owned(),
        tokenizer_config_json: resolved.tokenizer.config_json(config.max_position_embeddings),
    }
}

/// The held-out windows of a run, up to so many tokens; 0 for all.
pub(super) fn held_out(resolved: &Resolved, most: u64) -> impl Iterator<Item = Window> {
    let most = if most == 0 { usize::MAX } else { most as usize };
    let mut taken = 0;
    resolved.corpus.held_out(resolved.context, resolved.context).take_while(move |w| {
        taken += w.inputs.len();
        taken <= most.max(w.inputs.len())
    })
}

/// Time spent on steps alone, validation and saving left out.
struct Clock {
    start: Instant,
    first_step: u64,
    seconds: f64,
}

/// The run as the training loop sees it.
struct Run<'a> {
    resolved: &'a Resolved,
    folder: RunFolder,
    report: &'a mut dyn Report,
    interrupt: &'a Interrupt,
    companions: Companions,
    goal: serde_json::Value,
    ends_with_best: bool,
    clock: Clock,
    last: Option<StepRecord>,
}

impl Run<'_> {
    fn evaluate(&self, trainer: &mut Trainer, most: u64) -> Result<Option<Evaluation>> {
        let windows = held_out(self.resolved, most);
        let evaluation = trainer.as_exported(|ctx, model| eval::evaluate(ctx, model, windows))?;
        Ok(Some(evaluation).filter(|e| e.tokens > 0))
    }

    fn tokens_per_second(&self, step: u64) -> f64 {
        let tokens = (step - self.clock.first_step) * self.resolved.tokens_per_step();
        tokens as f64 / self.clock.seconds.max(1e-9)
    }

    fn finish(mut self, trainer: &mut Trainer, ended: Ended, best: Best) -> Result<TrainSummary> {
        let interrupted = ended == Ended::Interrupted;
        if self.ends_with_best && !interrupted && best.val_loss.is_some() {
            self.folder.restore_best(trainer)?;
            self.folder.write_model(trainer, "", &self.companions)?;
        }
        let evaluation = if interrupted { None } else { self.evaluate(trainer, 0)? };
        // A model with adapters has no room beside it for an engine; its recipe samples when it is gone.
        let silent = interrupted || trainer.model.adaptation().is_some();
        let sample = if silent { None } else { Some(self.sample(trainer)?) };
        let corpus = &self.resolved.corpus;
        Ok(TrainSummary {
            out: self.folder.path.clone(),
            preset: self.resolved.preset.name.clone(),
            parameters: trainer.model.config.parameters(),
            steps: trainer.step,
            tokens: trainer.step * self.resolved.tokens_per_step(),
            train_loss: self.last.map(|r| r.loss),
            val_loss: evaluation.map(|e| e.loss()),
            val_bpb: evaluation.map(|e| e.bits_per_byte()),
            entropy_bpb: corpus.entropy_bpb,
            source_bpb: corpus.source_bpb,
            tokens_per_second: if self.last.is_some() { self.tokens_per_second(trainer.step) } else { 0.0 },
            seconds: self.clock.start.elapsed().as_secs_f64(),
            peak_memory_bytes: device::peak_memory(),
            best_val_loss: best.val_loss,
            ended: match ended {
                Ended::Finished => "finished",
                Ended::EarlyStop => "early_stop",
                Ended::Interrupted => "interrupted",
            },
            curve: self.folder.characters(),
            sample,
        })
    }

    /// A short text from the weights as they are validated.
    fn sample(&mut self, trainer: &mut Trainer) -> Result<String> {
        let (tokenizer, start) = (&self.resolved.tokenizer, self.companions.start);
        trainer.as_exported(|ctx, model| sample::from_model(model, ctx.family(), tokenizer, start))
    }
}

impl Hooks for Run<'_> {
    fn validate(&mut self, trainer: &mut Trainer) -> Result<Option<f64>> {
        let evaluation = self.evaluate(trainer, self.resolved.preset.train.eval_tokens)?;
        Ok(evaluation.map(|e| e.loss()))
    }

    fn improved(&mut self, trainer: &mut Trainer) -> Result<()> {
        self.folder.write_model(trainer, "best", &self.companions)
    }

    fn save(&mut self, trainer: &mut Trainer, best: Best) -> Result<()> {
        let state = State {
            step: trainer.step,
            cursor: trainer.cursor,
            best,
            kernels: trainer.ctx.kernels_name().to_owned(),
            train_tokens: self.resolved.corpus.train_tokens() as u64,
            tokenizer: self.resolved.tokenizer.hash(),
            goal: self.goal.clone(),
        };
        let preset = &self.resolved.preset;
        let place = self.folder.save(trainer, &state, &preset.to_toml(), preset.train.keep, &self.companions)?;
        self.report.event(Event::Saved(place));
        Ok(())
    }

    fn observe(&mut self, record: &StepRecord, seconds: f64, val_loss: Option<f64>) -> Result<()> {
        self.clock.seconds += seconds;
        self.last = Some(*record);
        self.folder.log(record, val_loss)?;
        let steps = self.resolved.plan.schedule.steps;
        let tokens_per_second = self.tokens_per_second(record.step);
        let left = (steps - record.step) * self.resolved.tokens_per_step();
        self.report.event(Event::Step(StepProgress {
            step: record.step,
            steps,
            loss: record.loss,
            val_loss,
            learning_rate: record.learning_rate,
            skipped: record.skipped,
            tokens_per_second,
            seconds_left: left as f64 / tokens_per_second,
        }));
        Ok(())
    }

    fn interrupted(&self) -> bool {
        self.interrupt.requested()
    }
}
