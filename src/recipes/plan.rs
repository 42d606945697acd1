//! What a training run will do, worked out before it starts: settings, data, shapes, horizon, memory.
//! Called by the train recipe and, without any work following, by `--dry-run`.

use std::path::{Path, PathBuf};

use super::report::{Event, Interrupt, Preparing, Report};
use super::run_folder::PRESET;
use super::train::TrainConfig;
use super::vocabulary::tokenizer_of;
use crate::checkpoint::RUNS;
use crate::checkpoint::config_json;
use crate::checkpoint::model_folder::ModelFolder;
use crate::checkpoint::steps::StepFolder;
use crate::data::{self, Corpus, encoding::Invalid, place::Place};
use crate::device;
use crate::error::{Error, Result};
use crate::model::config::GptConfig;
use crate::ops::{gemm::Precision, gpu, simd::Family};
use crate::preset::Preset;
use crate::tokenizer::Tokenizer;
use crate::trainer::fit::Plan;
use crate::trainer::optimizer::{Kind, Settings};
use crate::trainer::schedule::{Schedule, Shape};

/// A run whose every setting is known.
pub struct Resolved {
    pub preset: Preset,
    pub config: GptConfig,
    pub tokenizer: Tokenizer,
    pub corpus: Corpus,
    pub context: usize,
    pub pack: data::Pack,
    pub plan: Plan,
    pub optimizer: Settings,
    pub windows_per_epoch: u64,
    pub family: Family,
}

impl Resolved {
    pub fn windows_per_step(&self) -> u64 {
        (self.plan.batch * self.plan.accumulate) as u64
    }

    pub fn tokens_per_step(&self) -> u64 {
        self.windows_per_step() * self.context as u64
    }

    /// Passes over the training data.
    pub fn epochs(&self) -> f64 {
        (self.plan.schedule.steps * self.windows_per_step()) as f64 / self.windows_per_epoch as f64
    }
}

/// The run's folder: what was asked for; to resume, the last one written; else a new name below checkpoints/.
pub fn place(config: &TrainConfig) -> Result<PathBuf> {
    if let Some(out) = &config.out {
        return Ok(out.clone());
    }
    let source = config.given.iter().rev().find(|(key, _)| key == "data.source").map(|(_, value)| value.as_str());
    let preset = config.preset.as_deref().unwrap_or("tiny");
    let sources = data::source::parse(source.unwrap_or("stories"))?;
    let names: Vec<String> = sources.iter().map(|s| data::short(&s.name)).collect();
    let (data, preset) = (names.join("+"), data::short(preset));
    let name = if data == preset { data } else { format!("{preset}-{data}") };
    Ok(numbered(&name, config.resume))
}

/// Adds defaults for the keys that were not given.
pub(super) fn with_defaults(given: &mut Vec<(String, String)>, mut defaults: Vec<(String, String)>) {
    defaults.retain(|(key, _)| given.iter().all(|(other, _)| other != key));
    defaults.append(given);
    *given = defaults;
}

/// A folder below checkpoints/ of that name: the last one to resume, else the first that is free.
pub(super) fn numbered(name: &str, resume: bool) -> PathBuf {
    let numbered = |n: usize| Path::new(RUNS).join(if n == 1 { name.to_owned() } else { format!("{name}-{n}") });
    let free = (1..).find(|n| !numbered(*n).exists()).expect("some number is free");
    numbered(if resume { free.saturating_sub(1).max(1) } else { free })
}

/// Settings, data, model and horizon, with everything refused that cannot work.
pub fn resolve(
    config: &TrainConfig,
    place: &Path,
    step: Option<&StepFolder>,
    report: &mut dyn Report,
    interrupt: &Interrupt,
) -> Result<Resolved> {
    let mut preset = preset(config, step, report)?;
    let (tokenizer, gpt_config) = match (&config.init_from, step) {
        (Some(path), None) => initial_shape(path, &mut preset, &config.given)?,
        _ => {
            let tokenizer = tokenizer(&preset)?;
            let gpt_config = preset.gpt_config(tokenizer.vocab_size())?;
            (tokenizer, gpt_config)
        }
    };
    preset.validate()?;
    preset.train.dtype = precision(&preset, config.family)?.name().into();
    // What could not be written at the end is refused at the start.
    config_json::write(&gpt_config, tokenizer.end_of_text())?;
    let pack = data::Pack::named(&preset.data.pack)?;
    let request = request(&preset, config.offline)?;
    let corpus = data::open(&request, &tokenizer, &mut Preparing::new(report, interrupt))?;
    // A model that is trained on may see less than it can.
    let context = preset.model.max_position_embeddings;
    for source in &corpus.sources {
        data::require_window(&source.name, &source.train, context)?;
    }
    if preset.data.validation > 0.0 && corpus.validation_tokens() < 2 {
        let what = format!("the held-out split of {} has nothing in it", preset.data.source);
        // A few tokens more than the two that are needed, as a share rounded up to thousandths.
        let share = (4e3 / corpus.train_tokens().max(8) as f64).ceil() / 1e3;
        let hint = match corpus.has_documents() {
            false => format!("--validation {share} holds some tokens out, --validation 0 none"),
            true => {
                "give more documents or a larger share with --validation, or --validation 0 to hold nothing out".into()
            }
        };
        return Err(Error::failed(what).with_hint(hint));
    }
    let windows_per_epoch = corpus.windows(context, 0, pack).per_epoch();
    let plan = Plan {
        schedule: schedule(&preset, context, windows_per_epoch)?,
        batch: preset.train.batch,
        accumulate: preset.train.accumulate,
        eval_every: preset.train.eval_every,
        save_every: preset.train.save_every,
        patience: preset.train.patience,
    };
    let optimizer = optimizer(&preset)?;
    let resolved = Resolved {
        preset,
        config: gpt_config,
        tokenizer,
        corpus,
        context,
        pack,
        plan,
        optimizer,
        windows_per_epoch,
        family: config.family,
    };
    if resolved.plan.schedule.steps < step.map_or(0, |s| s.step) {
        let what = format!("the run in {} is at step {} already", place.display(), step.map_or(0, |s| s.step));
        return Err(Error::usage(what).with_hint("give a larger --steps to train on"));
    }
    Ok(resolved)
}

/// The preset with the flags applied; a resumed run's own comes first, and what changes is told.
fn preset(config: &TrainConfig, step: Option<&StepFolder>, report: &mut dyn Report) -> Result<Preset> {
    let Some(step) = step else {
        let mut preset = Preset::load(config.preset.as_deref().unwrap_or("tiny"))?;
        apply(&mut preset, &config.given, report)?;
        return Ok(preset);
    };
    let text = step.read(PRESET)?;
    let saved = Preset::parse(&String::from_utf8_lossy(&text), &step.path.join(PRESET))?;
    let mut preset = saved.clone();
    if let Some(name) = &config.preset {
        let asked = Preset::load(name)?;
        if asked.name != saved.name {
            let what = format!("the run was made with preset {}, not {}", saved.name, asked.name);
            return Err(Error::usage(what).with_hint("leave --preset out to go on, or start another run with --out"));
        }
    }
    apply(&mut preset, &config.given, report)?;
    for (key, _) in &config.given {
        let (before, after) = (saved.get(key), preset.get(key));
        let (Some(before), Some(after)) = (before, after) else { continue };
        if before == after {
            continue;
        }
        if key.starts_with("model.") && key != "model.dropout" || key.starts_with("tokenizer.") {
            let what = format!("{key} was {before} when the run began; {after} would be another model");
            return Err(Error::usage(what).with_hint("leave it out to go on, or start another run with --out"));
        }
        report.event(Event::Warning(format!("{key} changes from {before} to {after} at step {}", step.step)));
    }
    Ok(preset)
}

/// Sets the keys given by flags, and tells what followed from them.
fn apply(preset: &mut Preset, given: &[(String, String)], report: &mut dyn Report) -> Result<()> {
    preset.apply(given)?.into_iter().for_each(|note| report.event(Event::Note(note)));
    Ok(())
}

/// The data that a preset asks for.
pub(super) fn request(preset: &Preset, offline: bool) -> Result<data::Request> {
    let d = &preset.data;
    let reading = data::Reading {
        validation: d.validation,
        any_bytes: d.allow_binary,
        invalid: Invalid::named(&d.invalid_utf8)?,
        line_endings: data::LineEndings::named(&d.line_endings)?,
        field: d.field.clone(),
        separator: d.separator.clone(),
        deduplicate: d.deduplicate,
        cleaning: data::Cleaning::None,
    };
    let (source, place) = (d.source.clone(), Place::of_user());
    Ok(data::Request { source, bytes: d.bytes, reading, offline, test: false, place })
}

pub(super) fn tokenizer(preset: &Preset) -> Result<Tokenizer> {
    match preset.tokenizer.file.as_str() {
        "bytes" => Ok(Tokenizer::bytes()),
        path => Tokenizer::open(Path::new(path)),
    }
}

/// The tokenizer and shape of the checkpoint to start from, written into the preset so that resuming finds them.
fn initial_shape(path: &Path, preset: &mut Preset, given: &[(String, String)]) -> Result<(Tokenizer, GptConfig)> {
    let folder = ModelFolder::open(path)?;
    let tokenizer = tokenizer_of(&folder)?;
    if !tokenizer.is_bytes() {
        preset.tokenizer.file = path.join("tokenizer.json").display().to_string();
    }
    let asked = preset.model.max_position_embeddings;
    preset.adopt(&folder.config);
    if preset.gpt_config(folder.config.vocab_size)? != folder.config {
        let what = format!("a preset cannot describe the windows of {}", path.display());
        return Err(
            Error::failed(what).with_hint("start from a model with one window, or full attention at a fixed spacing")
        );
    }
    if given.iter().any(|(key, _)| key == "model.max_position_embeddings") {
        let most = folder.config.max_position_embeddings;
        if asked > most {
            let what = format!("windows of {asked} tokens; {} has a context of {most}", path.display());
            return Err(Error::usage(what).with_hint("give a smaller --context"));
        }
        preset.model.max_position_embeddings = asked;
    }
    Ok((tokenizer, folder.config))
}

fn schedule(preset: &Preset, context: usize, windows_per_epoch: u64) -> Result<Schedule> {
    let (t, s) = (&preset.train, &preset.schedule);
    let windows_per_step = (t.batch * t.accumulate) as f64;
    let of_epochs = |epochs: f64| (epochs * windows_per_epoch as f64 / windows_per_step).ceil().max(1.0) as u64;
    let mut steps = match (t.steps, t.tokens) {
        (0, 0) => of_epochs(t.epochs),
        (0, tokens) => (tokens as f64 / (windows_per_step * context as f64)).ceil() as u64,
        (steps, _) => steps,
    };
    if t.max_epochs > 0.0 {
        steps = steps.min(of_epochs(t.max_epochs));
    }
    Ok(Schedule {
        shape: Shape::named(&s.kind)?,
        peak: preset.optimizer.learning_rate,
        // A short run warms up over a tenth of it at most.
        warmup: s.warmup.min(steps / 10),
        steps,
        final_fraction: s.final_fraction,
        decay_fraction: s.decay_fraction,
    })
}

/// What the preset's dtype means on this machine.
pub(super) fn precision(preset: &Preset, family: Family) -> Result<Precision> {
    Ok(match (preset.train.dtype.as_str(), gpu::home()) {
        ("bf16", Some(gpu)) => {
            let what = format!("--dtype bf16 on {}, where training multiplies f32", gpu.name());
            return Err(Error::usage(what).with_hint("use --dtype f32, or --device cpu"));
        }
        ("bf16", None) => Precision::Bf16,
        ("f32", _) | (_, Some(_)) => Precision::F32,
        _ => Precision::fastest(family),
    })
}

pub(super) fn optimizer(preset: &Preset) -> Result<Settings> {
    let o = &preset.optimizer;
    Ok(Settings {
        kind: Kind::named(&o.kind)?,
        beta1: o.beta1,
        beta2: o.beta2,
        epsilon: o.epsilon,
        weight_decay: o.weight_decay,
        momentum: o.momentum,
        clip: o.clip,
        ema: o.ema,
        spike_threshold: o.spike_threshold,
    })
}

/// What `--dry-run` tells; also the keys of its `--json`.
#[derive(Clone, Debug, serde::Serialize)]
pub struct DryRun {
    pub preset: String,
    pub out: PathBuf,
    pub parameters: usize,
    pub tokens_per_step: u64,
    pub steps: u64,
    pub epochs: f64,
    pub train_tokens: usize,
    pub val_tokens: usize,
    /// Weights, gradients and optimizer state.
    pub state_bytes: u64,
    /// Activations and their gradients at the height of a step.
    pub activation_bytes: u64,
    pub available_bytes: u64,
    pub fits: bool,
    pub flops_per_token: f64,
}

/// Works out a run without doing any of it.
pub fn dry_run(config: &TrainConfig, report: &mut dyn Report, interrupt: &Interrupt) -> Result<DryRun> {
    let place = place(config)?;
    let step = if config.resume { crate::checkpoint::steps::newest(&place)?.0 } else { None };
    let resolved = resolve(config, &place, step.as_ref(), report, interrupt)?;
    let (state_bytes, activation_bytes) = memory(&resolved);
    let (_, available_bytes) = device::memory();
    Ok(DryRun {
        preset: resolved.preset.name.clone(),
        out: place,
        parameters: resolved.config.parameters(),
        tokens_per_step: resolved.tokens_per_step(),
        steps: resolved.plan.schedule.steps,
        epochs: resolved.epochs(),
        train_tokens: resolved.corpus.train_tokens(),
        val_tokens: resolved.corpus.validation_tokens(),
        state_bytes,
        activation_bytes,
        available_bytes,
        fits: available_bytes == 0 || state_bytes + activation_bytes <= available_bytes,
        flops_per_token: resolved.config.training_flops_per_token(resolved.context),
    })
}

/// Bytes of (weights with gradients and moments, activations of a micro-batch).
fn memory(resolved: &Resolved) -> (u64, u64) {
    let c = &resolved.config;
    let tables = c.vocab_size * c.hidden_size * if c.tie_word_embeddings { 1 } else { 2 };
    let matrices = c.parameters() - tables;
    let moments = match resolved.optimizer.kind {
        Kind::Adamw => 2 * c.parameters(),
        Kind::Muon => matrices + 2 * tables,
    };
    let averages = if resolved.optimizer.ema > 0.0 { c.parameters() } else { 0 };
    let state = 4 * (2 * c.parameters() + moments + averages) as u64;
    // What a block keeps for each token: two norms' inputs and outputs, qkv before and after the rotation, the heads,
    // gate and up, their product.
    let block = 4 * c.hidden_size + 2 * c.qkv_size() + c.attention_size() + 3 * c.intermediate_size;
    let blocks = if resolved.preset.train.recompute {
        block + c.num_hidden_layers * c.hidden_size
    } else {
        c.num_hidden_layers * block
    };
    // The gradients that live at the same time: the stream's and the widest of a block.
    let gradients = 2 * c.hidden_size + 2 * (2 * c.intermediate_size).max(c.qkv_size());
    let rows = resolved.plan.batch * resolved.context;
    (state, 4 * (rows * (blocks + gradients) + (1 << 20).max(64 * c.vocab_size)) as u64)
}
