//! `gpt finetune`: a model that writes like a few pages of text: adapters beside its frozen weights, or all of them.

use std::path::{Path, PathBuf};

use super::plan::{self, Resolved};
use super::report::{Event, Interrupt, Preparing, Report};
use super::run_folder::RunFolder;
use super::sample;
use super::train::{self, Goal, TrainConfig, TrainSummary};
use super::vocabulary::tokenizer_of;
use crate::checkpoint::adapter::{self, Base};
use crate::checkpoint::{self, model_folder::ModelFolder, steps};
use crate::data;
use crate::error::{Error, Result};
use crate::eval;
use crate::model::config::GptConfig;
use crate::model::gpt::{Adaptation, Gpt};
pub use crate::nn::lora::{LoraSettings, Target};
pub use crate::ops::blocks::Format;
use crate::ops::ctx::Ctx;
use crate::preset::Preset;

/// What `gpt finetune` was asked to do.
#[derive(Clone, Debug)]
pub struct FinetuneConfig {
    /// The base; the newest run if not given.
    pub checkpoint: Option<PathBuf>,
    /// None trains all weights.
    pub lora: Option<LoraGiven>,
    /// The run; `--dropout` is that of the adapters, if there are any.
    pub train: TrainConfig,
}

/// The settings of adapters that were given; the others follow from the text, or are those of the run that goes on.
#[derive(Clone, Debug, Default)]
pub struct LoraGiven {
    pub rank: Option<usize>,
    pub alpha: Option<f32>,
    pub targets: Option<Vec<Target>>,
    pub rslora: bool,
    /// Blocks for the base.
    pub base: Option<Format>,
}

/// The keys of `--json`: those of `train`, and what was trained beside what.
#[derive(Clone, Debug, serde::Serialize)]
pub struct FinetuneSummary {
    #[serde(flatten)]
    pub train: TrainSummary,
    pub base: PathBuf,
    /// Of the base, before and after.
    pub base_sha256: String,
    pub trained_parameters: usize,
    /// The held-out loss of the base, before.
    pub base_val_loss: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lora: Option<LoraSummary>,
}

#[derive(Clone, Debug, serde::Serialize)]
pub struct LoraSummary {
    pub rank: usize,
    pub alpha: f32,
    pub rslora: bool,
    pub targets: Vec<&'static str>,
    /// Blocks in which the base was kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantized: Option<&'static str>,
    /// Memory of the base's weights.
    pub base_bytes: usize,
}

/// The projections of a list like `q,v,head`; `all` is every one.
pub fn targets(list: &str) -> Result<Vec<Target>> {
    let known = || Target::ALL.map(Target::name).join(",");
    let one = |name: &str| {
        Target::ALL.into_iter().find(|t| t.name() == name || t.module() == name).ok_or_else(|| {
            Error::usage(format!("a target `{name}`")).with_hint(format!("--targets takes some of {}, or all", known()))
        })
    };
    if list == "all" {
        return Ok(Target::ALL.to_vec());
    }
    let mut targets = list.split(',').map(|name| one(name.trim())).collect::<Result<Vec<_>>>()?;
    targets.sort_unstable();
    targets.dedup();
    Ok(targets)
}

/// Trains, and ends with the weights that did best on what was held out.
pub fn run(config: &FinetuneConfig, report: &mut dyn Report, interrupt: &Interrupt) -> Result<FinetuneSummary> {
    let place = checkpoint::resolve(config.checkpoint.as_deref())?;
    if config.checkpoint.is_none() {
        report.event(Event::Note(format!("the base is {}", place.display())));
    }
    let folder = open_base(&place)?;
    let base = Base { sha256: folder.hash()?, path: place.clone() };
    let mut train = config.train.clone();
    train.out = Some(out(&train, &place));
    let mut lora = config.lora.clone();
    if train::goes_on(&train)? {
        lora = lora.map(|given| given.or_of(&train)).transpose()?;
    } else {
        choose(&mut train, &mut lora, &folder, (report, interrupt))?;
    }
    train.init_from = Some(place.clone());
    let lora = lora.map(|given| Ok::<_, Error>((given.settings(&folder.config)?, given.base))).transpose()?;
    if let Some((settings, _)) = &lora {
        let names: Vec<&str> = settings.targets.iter().map(|target| target.name()).collect();
        let what = format!("adapters of rank {} for {}, alpha {}", settings.rank, names.join(","), settings.alpha);
        report.event(Event::Note(what));
    }
    let mut facts = Facts::default();
    let mut goal = |resolved: &Resolved| goal(&folder, &base, lora.clone(), resolved, &mut facts);
    let summary = train::run_for(&train, &mut goal, report, interrupt)?;
    if checkpoint::hash(&place)? != base.sha256 {
        return Err(Error::failed(format!("{} has changed during the run", place.display()))
            .with_hint("something else wrote to it: what was learned belongs to weights that are gone"));
    }
    let mut summary = FinetuneSummary {
        train: summary,
        base: place,
        base_sha256: base.sha256,
        trained_parameters: facts.trained,
        base_val_loss: facts.base_val_loss,
        lora: facts.lora,
    };
    if summary.lora.is_some() && summary.train.ended != "interrupted" {
        summary.train.sample = Some(sampled(&summary.train.out, &train)?);
    }
    Ok(summary)
}

fn open_base(place: &Path) -> Result<ModelFolder> {
    if adapter::is_adapter(place) {
        let place = place.display();
        return Err(Error::usage(format!("{place} is an adapter"))
            .with_hint(format!("make a model of it first: gpt merge {place} --out {place}-merged")));
    }
    ModelFolder::open(place)
}

/// The run's folder: what was asked for, else one named after the base and the text.
fn out(train: &TrainConfig, base: &Path) -> PathBuf {
    if let Some(out) = &train.out {
        return out.clone();
    }
    let real = base.canonicalize().unwrap_or_else(|_| base.to_owned());
    let source = train.given.iter().rev().find(|(key, _)| key == "data.source").map(|(_, value)| data::short(value));
    let name = real.file_name().unwrap_or_default().to_string_lossy().into_owned();
    plan::numbered(&source.map_or(name.clone(), |source| format!("{name}-{source}")), train.resume)
}

impl LoraGiven {
    /// What is not given, from the run that goes on.
    fn or_of(mut self, train: &TrainConfig) -> Result<Self> {
        let Some(out) = &train.out else { return Ok(self) };
        let Some(step) = steps::newest(out)?.0 else { return Ok(self) };
        let before = RunFolder::state(&step)?.goal;
        self.rank = self.rank.or(before["rank"].as_u64().map(|rank| rank as usize));
        self.alpha = self.alpha.or(before["alpha"].as_f64().map(|alpha| alpha as f32));
        self.rslora |= before["rslora"].as_bool().unwrap_or(false);
        if let (None, Some(names)) = (&self.targets, before["targets"].as_array()) {
            let names: Vec<&str> = names.iter().filter_map(|name| name.as_str()).collect();
            self.targets = Some(targets(&names.join(","))?);
        }
        if let (None, Some(name)) = (self.base, before["quantized"].as_str()) {
            self.base = Format::named(name);
        }
        Ok(self)
    }

    /// A small vocabulary's head is adapted, too: letters that the base never saw have no other way out of it.
    fn targets(&self, config: &GptConfig) -> Vec<Target> {
        let usual = || match config.vocab_size <= SMALL_VOCABULARY {
            true => Target::ALL.to_vec(),
            false => LoraSettings::of_rank(1).targets,
        };
        self.targets.clone().unwrap_or_else(usual)
    }

    fn settings(&self, config: &GptConfig) -> Result<LoraSettings> {
        let usual = LoraSettings::of_rank(self.rank.unwrap_or(RANKS[RANKS.len() - 1]));
        let settings = LoraSettings {
            alpha: self.alpha.unwrap_or(usual.alpha),
            targets: self.targets(config),
            rslora: self.rslora,
            ..usual
        };
        settings.validate()?;
        Ok(settings)
    }
}

const SMALL_VOCABULARY: usize = 1024;

/// Settings that follow from the text, where flags say nothing else; they are told.
fn choose(
    train: &mut TrainConfig,
    lora: &mut Option<LoraGiven>,
    folder: &ModelFolder,
    (report, interrupt): (&mut dyn Report, &Interrupt),
) -> Result<()> {
    let Some((_, source)) = train.given.iter().rev().find(|(key, _)| key == "data.source").cloned() else {
        return Err(Error::usage("no text to learn from").with_hint("name it with --data, for example --data mine.txt"));
    };
    if let Some(given) = lora {
        given.settings(&folder.config)?;
    }
    let mut preset = Preset::load(train.preset.as_deref().unwrap_or("tiny"))?;
    preset.apply(&train.given)?;
    preset.validate()?;
    let tokenizer = tokenizer_of(folder)?;
    let request = plan::request(&preset, train.offline)?;
    let corpus = data::open(&request, &tokenizer, &mut Preparing::new(report, interrupt))?;
    let tokens = corpus.train_tokens();
    let chosen = Chosen::of(tokens, &folder.config, lora.as_ref().map(|given| given.targets(&folder.config)));
    if let Some(given) = lora {
        given.rank.get_or_insert(chosen.rank);
    }
    if train.given.iter().all(|(key, _)| !["train.steps", "train.epochs", "train.tokens"].contains(&key.as_str())) {
        let passes = (chosen.steps * chosen.batch * chosen.window) as f64 / tokens.max(1) as f64;
        report.event(Event::Note(format!(
            "for the {tokens} tokens of {source}: up to {} steps of {} windows of {} tokens ({passes:.0} passes), ended when \
             the held-out part stops getting better",
            chosen.steps, chosen.batch, chosen.window
        )));
    }
    plan::with_defaults(&mut train.given, chosen.defaults());
    Ok(())
}

/// What suits a text of some size. The figures are from trials with half a dozen texts of 50 kB: docs/performance.md.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Chosen {
    rank: usize,
    window: usize,
    batch: usize,
    steps: usize,
    learning_rate: f64,
}

/// Numbers of adapters for each token of the text, and the ranks between which that is kept.
const NUMBERS_A_TOKEN: usize = 16;
const RANKS: [usize; 4] = [64, 32, 16, 8];

/// Passes over the text, and steps of short texts.
const PASSES: usize = 6;
const FEWEST_STEPS: usize = 60;

impl Chosen {
    /// For adapters of those projections, or for all weights.
    fn of(tokens: usize, config: &GptConfig, targets: Option<Vec<Target>>) -> Self {
        let adapted = targets.is_some();
        let of_rank =
            |rank| LoraSettings { targets: targets.clone().unwrap_or_default(), ..LoraSettings::of_rank(rank) };
        let numbers = |rank| -> usize {
            let shapes = Gpt::adapter_shapes(config, &of_rank(rank));
            shapes.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum()
        };
        let fits = |rank: &usize| 2 * rank <= config.hidden_size && numbers(*rank) <= NUMBERS_A_TOKEN * tokens;
        // A text shorter than the context is cut into a few windows all the same.
        let window = config.max_position_embeddings.min(256).min((tokens / 4).max(8));
        let batch = (2048 / window).max(1);
        Self {
            rank: RANKS.into_iter().find(fits).unwrap_or(RANKS[RANKS.len() - 1]),
            window,
            batch,
            steps: (PASSES * tokens / (batch * window)).max(FEWEST_STEPS),
            // Whole weights want smaller steps in wider models; for adapters the same did best at widths of 128 and 512.
            learning_rate: if adapted { 4e-3 } else { 2e-3 * 128.0 / config.hidden_size as f64 },
        }
    }

    /// Presets' keys for it.
    fn defaults(self) -> Vec<(String, String)> {
        let eval_every = (self.steps / 12).max(5);
        let pairs = [
            ("model.max_position_embeddings", self.window.to_string()),
            ("optimizer.kind", "adamw".into()),
            ("optimizer.learning_rate", format!("{:.1e}", self.learning_rate)),
            ("optimizer.weight_decay", "0".into()),
            ("schedule.kind", "cosine".into()),
            ("schedule.warmup", (self.steps / 20).to_string()),
            ("schedule.final_fraction", "0.1".into()),
            ("train.batch", self.batch.to_string()),
            ("train.accumulate", "1".into()),
            ("train.steps", self.steps.to_string()),
            ("train.eval_every", eval_every.to_string()),
            ("train.save_every", (4 * eval_every).to_string()),
            ("train.patience", "4".into()),
        ];
        pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
    }
}

/// What the goal finds out for the summary.
#[derive(Default)]
struct Facts {
    trained: usize,
    base_val_loss: Option<f64>,
    lora: Option<LoraSummary>,
}

fn goal(
    folder: &ModelFolder,
    base: &Base,
    lora: Option<(LoraSettings, Option<Format>)>,
    resolved: &Resolved,
    facts: &mut Facts,
) -> Result<Goal> {
    let Some((settings, blocks)) = lora else {
        let model = folder.model()?;
        facts.trained = model.config.parameters();
        facts.base_val_loss = base_loss(&model, resolved)?;
        let settings = serde_json::json!({ "kind": "finetune", "base": base.sha256 });
        return Ok(Goal { ends_with_best: true, ..Goal::next_token(settings, Some(model)) });
    };
    let lora = LoraSettings { dropout: resolved.preset.model.dropout, ..settings };
    let names: Vec<&str> = lora.targets.iter().map(|target| target.name()).collect();
    let quantized = blocks.map(Format::name);
    let settings = serde_json::json!({
        "kind": "lora",
        "base": base.sha256,
        "rank": lora.rank,
        "alpha": lora.alpha,
        "rslora": lora.rslora,
        "targets": names,
        "quantized": quantized,
    });
    let adaptation = Adaptation { base: blocks, lora, seed: resolved.preset.train.seed };
    let model = Gpt::adapted(&folder.config, &adaptation, &mut |name, shape| folder.get(name, shape))?;
    // A new adapter changes nothing yet.
    facts.base_val_loss = base_loss(&model, resolved)?;
    let (trained, frozen): (Vec<_>, Vec<_>) = model.parameters().iter().partition(|p| p.is_trainable());
    facts.trained = trained.iter().map(|p| p.elements()).sum();
    facts.lora = Some(LoraSummary {
        rank: adaptation.lora.rank,
        alpha: adaptation.lora.alpha,
        rslora: adaptation.lora.rslora,
        targets: adaptation.lora.targets.iter().map(|target| target.name()).collect(),
        quantized,
        base_bytes: frozen.iter().map(|p| p.bytes()).sum(),
    });
    Ok(Goal { base: Some(base.clone()), ends_with_best: true, ..Goal::next_token(settings, Some(model)) })
}

fn base_loss(model: &Gpt, resolved: &Resolved) -> Result<Option<f64>> {
    let windows = train::held_out(resolved, resolved.preset.train.eval_tokens);
    let found = eval::evaluate(&mut Ctx::open(resolved.family), model, windows)?;
    Ok((found.tokens > 0).then(|| found.loss()))
}

/// A short text from the base with its new adapter.
fn sampled(place: &Path, train: &TrainConfig) -> Result<String> {
    let folder = ModelFolder::open(place)?;
    let tokenizer = tokenizer_of(&folder)?;
    let (mut engine, _) = sample::open_engine(&Ctx::open(train.family), &folder, None)?;
    let start = sample::settings::Generation::open(place)?.start(folder.config.vocab_size);
    sample::from_engine(&mut engine, &tokenizer, start.unwrap_or(tokenizer.end_of_text()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(hidden_size: usize) -> GptConfig {
        let mut preset = Preset::load("tiny").unwrap();
        preset.model.hidden_size = hidden_size;
        preset.model.intermediate_size = 3 * hidden_size;
        preset.model.head_dim = hidden_size / 4;
        preset.gpt_config(257).unwrap()
    }

    #[test]
    fn more_text_and_smaller_models_get_a_higher_rank_and_short_texts_short_windows() {
        let rank = |tokens, hidden| Chosen::of(tokens, &config(hidden), Some(Target::ALL.to_vec())).rank;
        assert_eq!([500, 5_000, 45_000, 5_000_000].map(|tokens| rank(tokens, 128)), [8, 8, 64, 64]);
        assert_eq!([32, 128, 384].map(|hidden| rank(45_000, hidden)), [16, 64, 16]);
        let chosen = |tokens| Chosen::of(tokens, &config(128), None);
        assert_eq!([100, 1_000, 100_000].map(|tokens| chosen(tokens).window), [25, 250, 256]);
        assert_eq!((chosen(100).steps, chosen(2_048_000).steps), (FEWEST_STEPS, 6_000));
    }

    #[test]
    fn targets_are_named_as_flags_or_as_modules_and_each_once() {
        assert_eq!(targets("v,q,v").unwrap(), [Target::Q, Target::V]);
        assert_eq!(targets("q_proj, head").unwrap(), [Target::Q, Target::Head]);
        assert_eq!(targets("all").unwrap(), Target::ALL);
        for wrong in ["", "x", "q,,v"] {
            let error = targets(wrong).unwrap_err();
            assert!(error.exit_code() == 2 && error.hint().unwrap().contains("gate"), "{wrong:?}");
        }
    }
}
