//! `gpt eval`: the loss of a checkpoint on a text, every token once. `gpt score`: the log-probability of each token.

use std::path::{Path, PathBuf};

use super::plan;
use super::report::{Event, Interrupt, Preparing, Report};
use super::run_folder::PRESET;
use super::sample::{CacheSettings, WeightType};
use super::vocabulary::tokenizer_of;
use crate::checkpoint::{self, model_folder::ModelFolder};
use crate::data::{self, progress::Told, tokens::Tokens, windows};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::eval;
use crate::model::gpt::{Batch, Gpt};
use crate::ops::{ctx::Ctx, simd::Family, storage};
use crate::preset::Preset;
use crate::tokenizer::Tokenizer;

/// What `gpt eval` was asked to do.
#[derive(Clone, Debug)]
pub struct EvalConfig {
    pub checkpoint: Option<PathBuf>,
    /// Adapters that are added to it, each times its scale.
    pub adapters: Vec<(PathBuf, f32)>,
    /// Text to evaluate on; `None` takes the data that the checkpoint's run was trained with.
    pub data: Option<String>,
    /// The split: the held-out part, or the whole text.
    pub whole: bool,
    /// The test split of a named set.
    pub test: bool,
    pub validation: Option<f64>,
    pub context: Option<usize>,
    /// New tokens of each window; below the context, windows overlap.
    pub stride: Option<usize>,
    /// The loss of the engine that samples, with weights (the checkpoint's own type if not given) and a cache like these,
    /// instead of that of the model that was trained.
    pub engine: Option<(Option<WeightType>, CacheSettings)>,
    /// Never ask a server for data.
    pub offline: bool,
    pub family: Family,
}

/// The keys of `--json`.
#[derive(Clone, Debug, serde::Serialize)]
pub struct EvalSummary {
    pub checkpoint: PathBuf,
    pub data: String,
    pub loss: f64,
    pub perplexity: f64,
    pub bits_per_byte: f64,
    pub tokens: u64,
    pub bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entropy_bpb: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_bpb: Option<f64>,
}

/// A checkpoint opened for its losses.
struct Opened {
    place: PathBuf,
    folder: ModelFolder,
    model: Gpt,
    tokenizer: Tokenizer,
}

fn open(checkpoint: Option<&Path>, adapters: &[(PathBuf, f32)], report: &mut dyn Report) -> Result<Opened> {
    let place = checkpoint::resolve(checkpoint)?;
    if checkpoint.is_none() {
        report.event(Event::Note(format!("using {}", place.display())));
    }
    let folder = super::sample::open_folder(&place, adapters)?;
    let tokenizer = tokenizer_of(&folder)?;
    Ok(Opened { model: folder.model()?, folder, tokenizer, place })
}

pub fn run(config: &EvalConfig, report: &mut dyn Report) -> Result<EvalSummary> {
    let Opened { place, folder, model, tokenizer } = open(config.checkpoint.as_deref(), &config.adapters, report)?;
    let context = config.context.unwrap_or(model.config.max_position_embeddings);
    if context == 0 || context > model.config.max_position_embeddings {
        let what = format!("a context of {context} tokens; the model has {}", model.config.max_position_embeddings);
        return Err(Error::usage(what).with_hint("use --context from 1 up to the model's"));
    }
    let stride = config.stride.unwrap_or(context);
    if stride == 0 || stride > context {
        return Err(Error::usage(format!("a stride of {stride} tokens in windows of {context}"))
            .with_hint("use --stride from 1 up to the context"));
    }
    let mut request = request(config, &place)?;
    if config.whole {
        request.reading.validation = 0.0;
    }
    let corpus = data::open(&request, &tokenizer, &mut Preparing::new(report, &Interrupt::default()))?;
    let tokens = if config.whole { corpus.train_tokens() } else { corpus.validation_tokens() };
    if tokens < 2 {
        return Err(Error::failed(format!("nothing to evaluate on in {}: {tokens} tokens", request.source))
            .with_hint("give more text, or --whole to take all of it"));
    }
    let windows: Box<dyn Iterator<Item = windows::Window>> = match config.whole {
        true => Box::new(corpus.in_order(context, stride)),
        false => Box::new(corpus.held_out(context, stride)),
    };
    let evaluation = match config.engine {
        None => eval::evaluate(&mut Ctx::open(config.family), &model, windows)?,
        Some((kind, cache)) => {
            let (mut engine, _) = super::sample::open_engine(&Ctx::open(config.family), &folder, kind)?;
            evaluate_engine(&mut engine, cache, windows)?
        }
    };
    Ok(EvalSummary {
        checkpoint: place,
        data: request.source,
        loss: evaluation.loss(),
        perplexity: evaluation.perplexity(),
        bits_per_byte: evaluation.bits_per_byte(),
        tokens: evaluation.tokens,
        bytes: evaluation.bytes,
        entropy_bpb: corpus.entropy_bpb,
        source_bpb: corpus.source_bpb.filter(|_| !config.whole),
    })
}

/// `eval::evaluate` with the engine that samples, whose weights and cache may be narrower than those that were trained.
fn evaluate_engine(
    engine: &mut Engine,
    cache: CacheSettings,
    windows: impl Iterator<Item = windows::Window>,
) -> Result<eval::Evaluation> {
    let (mut total, vocab) = (eval::Evaluation::default(), engine.config().vocab_size);
    for window in windows {
        total.bytes += window.bytes as u64;
        engine.logits(&window.inputs, cache, |first, logits| {
            for (logits, target) in
                logits.chunks(vocab).zip(&window.targets[first..]).filter(|(_, t)| **t != windows::IGNORE)
            {
                let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let sum: f64 = logits.iter().map(|x| f64::from(x - most).exp()).sum();
                total.nll += sum.ln() + f64::from(most - logits[*target as usize]);
                total.tokens += 1;
            }
            Ok(())
        })?;
    }
    Ok(total)
}

/// The data of the checkpoint's own run, or the text that was named, cut as the run cut it.
fn request(config: &EvalConfig, place: &Path) -> Result<data::Request> {
    let near = [place.join(PRESET), place.join("..").join(PRESET)];
    let preset = match near.iter().find(|p| p.is_file()) {
        Some(path) => Preset::open(path)?,
        None if config.data.is_some() => Preset::load("tiny")?,
        None => {
            return Err(Error::usage(format!("{} does not say what it was trained on", place.display()))
                .with_hint("name a text with --data"));
        }
    };
    let mut request = plan::request(&preset, config.offline)?;
    if let Some(source) = &config.data {
        request.source = source.clone();
    }
    request.test = config.test;
    request.reading.validation = config.validation.unwrap_or(request.reading.validation);
    Ok(request)
}

/// Passages of the held-out text of a run, of so many bytes: the beginnings of documents, or from all over a plain text. Fewer
/// where there is not that much.
pub fn held_out_prompts(run: &Path, offline: bool, (count, bytes): (usize, usize)) -> Result<Vec<String>> {
    let request = plan::request(&Preset::open(&run.join(PRESET))?, offline)?;
    let tokenizer = Tokenizer::bytes();
    let corpus = data::open(&request, &tokenizer, &mut Told::default())?;
    let tokens = &corpus.sources[0].validation;
    let starts: Vec<usize> = match tokens.has_documents() {
        true => tokens.documents().map(|d| d.start + 1).take(count).collect(),
        false => (0..count).map(|i| i * tokens.len() / count).collect(),
    };
    let passage = |start: usize| {
        let ids = tokens.slice(start..(start + bytes).min(tokens.len()));
        let ids = ids.split(|id| *id == tokenizer.end_of_text()).next().unwrap_or_default();
        // The first and the last character may have been cut.
        String::from_utf8_lossy(&tokenizer.decode(ids)).trim_matches('\u{FFFD}').to_owned()
    };
    Ok(starts.into_iter().map(passage).filter(|text| !text.is_empty()).collect())
}

/// What `gpt score` was asked to do.
#[derive(Clone, Debug)]
pub struct ScoreConfig {
    pub checkpoint: Option<PathBuf>,
    pub adapters: Vec<(PathBuf, f32)>,
    pub text: String,
    pub family: Family,
}

/// A token and ln p of it after the ones before; none for the first, which nothing predicts.
#[derive(Clone, Debug, serde::Serialize)]
pub struct ScoredToken {
    pub id: u32,
    pub text: String,
    pub logprob: Option<f64>,
}

/// The keys of `--json`.
#[derive(Clone, Debug, serde::Serialize)]
pub struct ScoreSummary {
    pub checkpoint: PathBuf,
    pub tokens: Vec<ScoredToken>,
    /// Mean of -logprob; none for less than two tokens.
    pub loss: Option<f64>,
}

pub fn score(config: &ScoreConfig, report: &mut dyn Report) -> Result<ScoreSummary> {
    let Opened { place, model, tokenizer, .. } = open(config.checkpoint.as_deref(), &config.adapters, report)?;
    let ids = tokenizer.encode(&config.text)?;
    let context = model.config.max_position_embeddings;
    let tokens = Tokens::plain(ids.clone(), tokenizer.byte_lengths(), tokenizer.end_of_text());
    let mut ctx = Ctx::open(config.family);
    let mut logprobs = vec![None; ids.len().min(1)];
    // Past the context, windows overlap by half, so that no token is scored with less than that before it.
    for window in windows::held_out(&tokens, context, context.div_ceil(2)) {
        let seq = window.inputs.len();
        let batch = Batch::new(window.inputs, window.targets, seq);
        let nll = model.nll(&mut ctx, &batch)?;
        let nll = storage::read::<f32>("score", &nll)?;
        let scored = batch.targets.iter().zip(nll.iter()).filter(|(target, _)| **target != windows::IGNORE);
        logprobs.extend(scored.map(|(_, nll)| Some(-f64::from(*nll))));
    }
    let known: Vec<f64> = logprobs.iter().flatten().copied().collect();
    let text = |id: u32| String::from_utf8_lossy(tokenizer.bytes_of(id)).into_owned();
    let tokens =
        ids.iter().zip(&logprobs).map(|(id, logprob)| ScoredToken { id: *id, text: text(*id), logprob: *logprob });
    Ok(ScoreSummary {
        checkpoint: place,
        tokens: tokens.collect(),
        loss: (!known.is_empty()).then(|| -known.iter().sum::<f64>() / known.len() as f64),
    })
}
