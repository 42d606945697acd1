//! `gpt distill`: a small model that says what a large one would, and how much faster the large one is with it.

mod memory;

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::eval::{self, EvalConfig};
use super::plan::{self, Resolved};
use super::report::{Event, Interrupt, Report};
use super::run_folder::PRESET;
use super::sample::prompts::Prompt;
use super::sample::{self, DraftChoice, SampleConfig, WeightType};
use super::train::{self, Goal, TrainConfig, TrainSummary};
use super::vocabulary::tokenizer_of;
use crate::checkpoint::{self, model_folder::ModelFolder};
use crate::data::place::Place;
use crate::engine::batch::{Batch, Job};
use crate::engine::{RowSettings, Sampling};
use crate::error::{Error, Result};
use crate::files::atomic;
use crate::model::gpt::Gpt;
use crate::ops::ctx::Ctx;
pub use crate::ops::distillation::{Divergence, Settings};
use crate::ops::simd::Family;
use crate::preset::Preset;
use crate::trainer::objective::{Distillation, Generate, Memory};
use memory::TeacherFile;

/// What `gpt distill` was asked to do.
#[derive(Clone, Debug)]
pub struct DistillConfig {
    /// A model folder; the newest run if not given.
    pub teacher: Option<PathBuf>,
    pub settings: Settings,
    /// The share of windows that the student continues itself.
    pub on_policy: f64,
    /// So many of the teacher's likeliest tokens are kept on the disk; none asks the teacher every time.
    pub teacher_top: Option<usize>,
    /// The student's run; what it does not say of data and tokenizer is the teacher's.
    pub train: TrainConfig,
}

/// The keys of `--json`: those of `train`, and what the student is beside its teacher.
#[derive(Clone, Debug, serde::Serialize)]
pub struct DistillSummary {
    #[serde(flatten)]
    pub train: TrainSummary,
    pub teacher: PathBuf,
    pub teacher_val_loss: Option<f64>,
    pub teacher_val_bpb: Option<f64>,
    /// Of what the student proposes, over held-out prompts at temperature 0.8 and at 0.
    pub acceptance_rate: Option<f64>,
    pub acceptance_rate_greedy: Option<f64>,
    /// Tokens a second with the student over those without it, at temperature 0.8 and at 0.
    pub speedup: Option<f64>,
    pub speedup_greedy: Option<f64>,
    /// Whether sampling from the teacher finds the student by itself.
    #[serde(skip)]
    pub is_found: bool,
}

/// The names of the divergences, as flags and states spell them.
pub fn divergence(name: &str) -> Result<Divergence> {
    match name {
        "forward" => Ok(Divergence::Forward),
        "reverse" => Ok(Divergence::Reverse),
        "jensen-shannon" => Ok(Divergence::JensenShannon),
        _ => Err(Error::usage(format!("a divergence `{name}`"))
            .with_hint("--divergence takes forward, reverse or jensen-shannon")),
    }
}

/// Trains the student, then holds it against its teacher.
pub fn run(config: &DistillConfig, report: &mut dyn Report, interrupt: &Interrupt) -> Result<DistillSummary> {
    check(config)?;
    let place = checkpoint::resolve(config.teacher.as_deref())?;
    if config.teacher.is_none() {
        report.event(Event::Note(format!("the teacher is {}", place.display())));
    }
    let train = with_defaults(&config.train, &place)?;
    let mut goal = |resolved: &Resolved| goal(config, &place, resolved);
    let summary = train::run_for(&train, &mut goal, report, interrupt)?;
    let mut summary = DistillSummary {
        is_found: summary.out == checkpoint::draft_of(&place),
        train: summary,
        teacher: place.clone(),
        teacher_val_loss: None,
        teacher_val_bpb: None,
        acceptance_rate: None,
        acceptance_rate_greedy: None,
        speedup: None,
        speedup_greedy: None,
    };
    if summary.train.ended != "interrupted" {
        compare(&train, &mut summary, report, interrupt)?;
    }
    Ok(summary)
}

fn check(config: &DistillConfig) -> Result<()> {
    let Settings { temperature, alpha, .. } = config.settings;
    let share = |x: f64| (0.0..=1.0).contains(&x);
    if !(temperature > 0.0 && temperature.is_finite()) {
        return Err(Error::usage(format!("a temperature of {temperature}")).with_hint("--temperature is above 0"));
    }
    if !share(f64::from(alpha)) || !share(config.on_policy) {
        let what = format!("--alpha {alpha} and --on-policy {}", config.on_policy);
        return Err(Error::usage(what).with_hint("both are shares, from 0 to 1"));
    }
    if config.teacher_top.is_some() && temperature != 1.0 {
        return Err(Error::usage(format!("--teacher-top with a temperature of {temperature}"))
            .with_hint("what is kept of the teacher has no temperature: leave one of the two out"));
    }
    Ok(())
}

/// The student's settings: data, tokenizer and context of the teacher's run where flags say nothing else, beside the teacher.
fn with_defaults(train: &TrainConfig, teacher: &Path) -> Result<TrainConfig> {
    let mut train = train.clone();
    train.out.get_or_insert_with(|| checkpoint::draft_of(teacher));
    // A run that goes on has all of this in its own preset.
    if train::goes_on(&train)? {
        return Ok(train);
    }
    // Says best what is wrong with a folder that is no model.
    let model = ModelFolder::open(teacher)?;
    let mut given = Vec::new();
    let path = teacher.join(PRESET);
    if !path.is_file() && train.given.iter().all(|(key, _)| key != "data.source") {
        return Err(Error::usage(format!("{} does not say what it was trained on", teacher.display()))
            .with_hint("name a text with --data"));
    }
    if path.is_file() {
        let preset = Preset::open(&path)?;
        let keys = crate::preset::keys().into_iter().filter(|key| key.starts_with("data."));
        given.extend(keys.filter_map(|key| preset.get(&key).map(|value| (key, plain(&value)))));
    }
    given.push(("model.max_position_embeddings".into(), model.config.max_position_embeddings.to_string()));
    if !tokenizer_of(&model)?.is_bytes() {
        given.push(("tokenizer.file".into(), teacher.join("tokenizer.json").display().to_string()));
    }
    plan::with_defaults(&mut train.given, given);
    Ok(train)
}

/// A value of a preset as flags are typed.
fn plain(value: &toml::Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// The objective for a run that was worked out.
fn goal(config: &DistillConfig, place: &Path, resolved: &Resolved) -> Result<Goal> {
    let folder = ModelFolder::open(place)?;
    let tokenizer = tokenizer_of(&folder)?;
    if tokenizer.hash() != resolved.tokenizer.hash() || folder.config.vocab_size != resolved.config.vocab_size {
        let what = format!("the student's tokenizer is not that of {}", place.display());
        return Err(Error::usage(what).with_hint("leave --tokenizer out: the teacher's is taken"));
    }
    if resolved.context > folder.config.max_position_embeddings {
        let what = format!(
            "windows of {} tokens; the teacher's context has {}",
            resolved.context, folder.config.max_position_embeddings
        );
        return Err(Error::usage(what).with_hint("give a smaller --context"));
    }
    let hash = folder.hash()?;
    let Settings { divergence, temperature, alpha } = config.settings;
    let settings = serde_json::json!({
        "kind": "distillation",
        "teacher": hash,
        "divergence": format!("{divergence:?}"),
        "temperature": temperature,
        "alpha": alpha,
        "on_policy": config.on_policy,
        "teacher_top": config.teacher_top,
    });
    let memory: Option<Box<dyn Memory>> = match config.teacher_top {
        Some(k) => Some(Box::new(teacher_file(k, &hash, resolved)?)),
        None => None,
    };
    let (seed, family) = (resolved.preset.train.seed, config.train.family);
    let generate: Box<Generate> =
        Box::new(move |model, prompts, seq, window| continued(model, prompts, seq, (seed << 32) ^ window, family));
    let on_policy = (config.on_policy > 0.0).then_some((config.on_policy, generate));
    let objective = Distillation { teacher: folder.model()?, settings: config.settings, on_policy, memory };
    Ok(Goal { objective: Box::new(objective), ..Goal::next_token(settings, None) })
}

fn teacher_file(k: usize, teacher: &str, resolved: &Resolved) -> Result<TeacherFile> {
    if k == 0 || k >= resolved.config.vocab_size {
        return Err(Error::usage(format!("the {k} likeliest of {} tokens", resolved.config.vocab_size))
            .with_hint("--teacher-top takes less than the vocabulary has, such as 16"));
    }
    // Everything that says which tokens a window has.
    let tokens = resolved.corpus.sources.iter().map(|s| (s.name.clone(), s.train.len(), s.weight));
    let stream = (
        (teacher, k, resolved.context, resolved.preset.train.seed),
        (&resolved.preset.data, resolved.tokenizer.hash(), tokens.collect::<Vec<_>>()),
    );
    let json = serde_json::to_vec(&stream).expect("plain values");
    TeacherFile::open(&Place::of_user(), &atomic::hex(&Sha256::digest(json)), k, resolved.context)
}

/// Prompts continued by the student at temperature 1, each to `seq` tokens.
fn continued(model: &Gpt, prompts: Vec<Vec<u32>>, seq: usize, seed: u64, family: Family) -> Result<Vec<Vec<u32>>> {
    let mut engine = sample::engine(model, WeightType::F32, Ctx::open(family))?;
    let mut rows = prompts.clone();
    let jobs = prompts.into_iter().enumerate().map(|(row, prompt)| {
        let sampling = Sampling { temperature: 1.0, seed: seed.wrapping_add(row as u64), ..Sampling::default() };
        let max_tokens = seq - prompt.len();
        Job { prompt, settings: RowSettings { sampling, ..RowSettings::default() }, max_tokens }
    });
    let (jobs, width) = (jobs.collect::<Vec<_>>(), rows.len());
    for step in Batch::new(&mut engine, jobs, width, None)? {
        let step = step?;
        rows[step.job].extend(step.ids);
    }
    Ok(rows)
}

/// Prompts of held-out text and tokens made from each, for the speed of the pair.
const PROMPTS: usize = 6;
const PROMPT_BYTES: usize = 120;
const NEW_TOKENS: usize = 200;

/// The teacher's loss on the same text, and what the student is worth as its draft.
fn compare(
    train: &TrainConfig,
    summary: &mut DistillSummary,
    report: &mut dyn Report,
    interrupt: &Interrupt,
) -> Result<()> {
    let (teacher, student) = (summary.teacher.clone(), summary.train.out.clone());
    let data = Preset::open(&student.join(PRESET))?.data;
    let config = EvalConfig {
        checkpoint: Some(teacher.clone()),
        adapters: Vec::new(),
        data: Some(data.source.clone()),
        whole: false,
        test: false,
        validation: Some(data.validation),
        context: None,
        stride: None,
        engine: None,
        offline: train.offline,
        family: train.family,
    };
    if data.validation > 0.0 {
        let said = eval::run(&config, report)?;
        (summary.teacher_val_loss, summary.teacher_val_bpb) = (Some(said.loss), Some(said.bits_per_byte));
    }
    let prompts = eval::held_out_prompts(&student, train.offline, (PROMPTS, PROMPT_BYTES))?;
    if prompts.is_empty() {
        return Ok(());
    }
    for (temperature, greedy) in [(0.8, false), (0.0, true)] {
        let sampled = |draft: DraftChoice| {
            let config = sample_config(&teacher, &prompts, draft, temperature, train.family);
            sample::run(&config, &mut Silent, interrupt)
        };
        let plain = sampled(DraftChoice::None)?;
        let drafted = sampled(DraftChoice::Model(student.clone()))?;
        let Some(speculation) = &drafted.speculation else { continue };
        let speedup = drafted.tokens_per_second / plain.tokens_per_second.max(1e-9);
        let places = match greedy {
            false => (&mut summary.acceptance_rate, &mut summary.speedup),
            true => (&mut summary.acceptance_rate_greedy, &mut summary.speedup_greedy),
        };
        (*places.0, *places.1) = (Some(speculation.acceptance_rate), Some(speedup));
    }
    Ok(())
}

/// Tells nobody: the texts are only made for their speed.
struct Silent;

impl Report for Silent {
    fn event(&mut self, _: Event) {}
}

fn sample_config(
    teacher: &Path,
    prompts: &[String],
    draft: DraftChoice,
    temperature: f32,
    family: Family,
) -> SampleConfig {
    SampleConfig {
        checkpoint: Some(teacher.to_owned()),
        prompts: prompts.iter().map(|text| Prompt::of(text)).collect(),
        max_tokens: NEW_TOKENS,
        draft,
        sampling: sample::settings::Given { temperature: Some(temperature), ..Default::default() },
        ..SampleConfig::new(family)
    }
}
