//! `gpt sample`: a prompt continued by a model, streamed as text.
//!
//! The engine knows ids only; here they become text: UTF-8 is never split, stop texts are found across token borders, and
//! nothing that may turn out to be the start of a stop text is shown before that is known.

use std::path::PathBuf;
use std::time::Instant;

use super::report::{Event, Interrupt, Report};
use super::run_folder;
use crate::checkpoint::{self, model_folder::ModelFolder};
use crate::engine::{Engine, Row, RowSettings};
pub use crate::engine::{Sampling, WeightType};
use crate::error::{Error, Result};
use crate::model::gpt::Gpt;
pub use crate::nn::cache::{CacheSettings, DEFAULT_SINKS};
use crate::ops::{ctx::Ctx, simd::Family};
use crate::tokenizer::{Tokenizer, stream::Utf8};

/// What `gpt sample` was asked to do.
#[derive(Clone, Debug)]
pub struct SampleConfig {
    pub checkpoint: Option<PathBuf>,
    pub prompt: String,
    pub max_tokens: usize,
    pub sampling: Sampling,
    pub cache: CacheSettings,
    pub stop: Vec<String>,
    /// What weights are kept in; the checkpoint's own type if not given.
    pub kind: Option<WeightType>,
    pub family: Family,
}

/// One continued prompt.
#[derive(Clone, Debug, serde::Serialize)]
pub struct SampledRow {
    pub prompt: String,
    /// What was generated, a stop text not included.
    pub text: String,
    pub ids: Vec<u32>,
    /// stop | length | interrupted
    pub finish_reason: &'static str,
}

/// The keys of `--json`.
#[derive(Clone, Debug, serde::Serialize)]
pub struct SampleSummary {
    pub checkpoint: PathBuf,
    pub rows: Vec<SampledRow>,
    pub prompt_tokens: usize,
    pub new_tokens: usize,
    pub prefill_seconds: f64,
    pub decode_seconds: f64,
    /// Of decoding alone, prompt left out.
    pub tokens_per_second: f64,
    pub time_to_first_token: f64,
    pub cache_bytes: usize,
}

/// Opens the checkpoint and generates; text goes out as events.
pub fn run(config: &SampleConfig, report: &mut dyn Report, interrupt: &Interrupt) -> Result<SampleSummary> {
    config.sampling.validate()?;
    if config.stop.iter().any(String::is_empty) {
        return Err(Error::usage("an empty stop text would stop before anything").with_hint("leave --stop out"));
    }
    let place = checkpoint::resolve(config.checkpoint.as_deref())?;
    if config.checkpoint.is_none() {
        report.event(Event::Note(format!("using {}", place.display())));
    }
    let folder = ModelFolder::open(&place)?;
    let tokenizer = Tokenizer::open(&place)?;
    if tokenizer.len() > folder.config.vocab_size {
        let found = format!("{} of {} tokens", folder.config.vocab_size, tokenizer.len());
        return Err(Error::file(place.join("config.json"), "a vocabulary for the whole tokenizer", found));
    }
    let mut prompt = tokenizer.encode(&config.prompt)?;
    if prompt.is_empty() {
        prompt.push(start_token(&folder).unwrap_or(tokenizer.end_of_text()));
    }
    let kind = config.kind.unwrap_or_else(|| stored_type(&folder));
    let weights = |name: &str, shape: &[usize]| folder.weights.get(name, shape);
    let mut engine = Engine::new(Ctx::cpu(config.family), &folder.config, kind, weights)?;
    drop(folder);
    let stop = vec![tokenizer.end_of_text()];
    let settings = RowSettings { sampling: config.sampling, cache: config.cache, stop, ..RowSettings::default() };
    let mut row = engine.row(&prompt, settings)?;
    let mut text = Output::new(&tokenizer, &config.stop);
    let times = generate(&mut engine, &mut row, config.max_tokens, &mut text, report, interrupt)?;
    let new_tokens = row.new_ids().len();
    let decoded = new_tokens.saturating_sub(1) as f64;
    Ok(SampleSummary {
        checkpoint: place,
        rows: vec![SampledRow {
            prompt: config.prompt.clone(),
            text: text.shown,
            ids: row.new_ids().to_vec(),
            finish_reason: times.finish_reason,
        }],
        prompt_tokens: prompt.len(),
        new_tokens,
        prefill_seconds: times.prefill,
        decode_seconds: times.decode,
        tokens_per_second: if times.decode > 0.0 { decoded / times.decode } else { 0.0 },
        time_to_first_token: times.first,
        cache_bytes: row.cache_bytes(),
    })
}

/// The engine's type for what the checkpoint is stored in.
fn stored_type(folder: &ModelFolder) -> WeightType {
    let stored = folder.weights.list().find(|(name, ..)| *name == "model.embed_tokens.weight");
    if stored.is_some_and(|(_, dtype, _)| dtype == "bf16") { WeightType::Bf16 } else { WeightType::F32 }
}

/// What an empty prompt starts from, as the model's generation_config.json says.
fn start_token(folder: &ModelFolder) -> Option<u32> {
    let text = std::fs::read_to_string(folder.path.join("generation_config.json")).ok()?;
    let json: serde_json::Value = serde_json::from_str(&text).ok()?;
    let id = json["bos_token_id"].as_u64()? as usize;
    (id < folder.config.vocab_size).then_some(id as u32)
}

struct Times {
    prefill: f64,
    /// From the first new token to the last.
    decode: f64,
    /// From the start to the first new token.
    first: f64,
    finish_reason: &'static str,
}

fn generate(
    engine: &mut Engine,
    row: &mut Row,
    max_tokens: usize,
    text: &mut Output,
    report: &mut dyn Report,
    interrupt: &Interrupt,
) -> Result<Times> {
    let start = Instant::now();
    engine.prefill(row)?;
    let prefill = start.elapsed().as_secs_f64();
    let mut times = Times { prefill, decode: 0.0, first: 0.0, finish_reason: "length" };
    while row.new_ids().len() < max_tokens {
        if interrupt.requested() {
            times.finish_reason = "interrupted";
            break;
        }
        let id = engine.step(&mut [&mut *row])?[0];
        let elapsed = start.elapsed().as_secs_f64();
        if row.new_ids().len() == 1 {
            times.first = elapsed;
        }
        times.decode = elapsed - times.first;
        let (ready, stopped) = text.push(id);
        if !ready.is_empty() {
            report.event(Event::Text(ready));
        }
        if stopped || row.is_finished() {
            times.finish_reason = "stop";
            break;
        }
    }
    let rest = text.finish();
    if !rest.is_empty() {
        report.event(Event::Text(rest));
    }
    Ok(times)
}

/// Ids to shown text: whole characters, and nothing of a stop text.
struct Output<'a> {
    tokenizer: &'a Tokenizer,
    stop: &'a [String],
    utf8: Utf8,
    /// Made but not shown: it may be the start of a stop text.
    held: String,
    shown: String,
    stopped: bool,
}

impl<'a> Output<'a> {
    fn new(tokenizer: &'a Tokenizer, stop: &'a [String]) -> Self {
        Self { tokenizer, stop, utf8: Utf8::default(), held: String::new(), shown: String::new(), stopped: false }
    }

    /// The text that one more id makes showable, and whether a stop text has come up.
    fn push(&mut self, id: u32) -> (String, bool) {
        self.held += &self.utf8.push(self.tokenizer.bytes_of(id));
        self.release()
    }

    fn release(&mut self) -> (String, bool) {
        if let Some(at) = self.stop.iter().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.held.truncate(at);
            self.stopped = true;
        }
        let keep =
            if self.stopped { 0 } else { self.stop.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0) };
        let rest = self.held.split_off(self.held.len() - keep);
        let ready = std::mem::replace(&mut self.held, rest);
        self.shown += &ready;
        (ready, self.stopped)
    }

    /// What is left when no more ids come.
    fn finish(&mut self) -> String {
        if self.stopped {
            return String::new();
        }
        self.held += &self.utf8.finish();
        let (mut ready, stopped) = self.release();
        if !stopped {
            let rest = std::mem::take(&mut self.held);
            self.shown += &rest;
            ready += &rest;
        }
        ready
    }
}

/// The longest end of `text` that is a proper start of `stop`, in bytes.
fn overlap(text: &str, stop: &str) -> usize {
    let starts = stop.char_indices().map(|(at, _)| at).skip(1).filter(|at| *at <= text.len());
    starts.filter(|at| text.ends_with(&stop[..*at])).max().unwrap_or(0)
}

/// An engine over a copy of a model's weights.
pub fn engine(model: &Gpt, kind: WeightType, family: Family) -> Result<Engine> {
    let tensors = run_folder::tensors(model)?;
    Engine::new(Ctx::cpu(family), &model.config, kind, |name, _| {
        let found = tensors.iter().find(|t| t.name == name).map(|t| t.data.clone());
        found.ok_or_else(|| Error::op("engine", "every weight of the model", format!("no {name}")))
    })
}

/// One short text from a model in training.
pub fn from_model(model: &Gpt, family: Family, tokenizer: &Tokenizer, start: u32) -> Result<String> {
    let mut engine = engine(model, WeightType::F32, family)?;
    let sampling = Sampling { temperature: 0.8, ..Sampling::default() };
    let settings = RowSettings { sampling, stop: vec![tokenizer.end_of_text()], ..RowSettings::default() };
    let mut row = engine.row(&[start], settings)?;
    let mut text = Output::new(tokenizer, &[]);
    while row.new_ids().len() < 450 && !row.is_finished() {
        let id = engine.step(&mut [&mut row])?[0];
        text.push(id);
    }
    text.finish();
    Ok(text.shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(bytes: &[u8], stop: &[&str]) -> (Vec<String>, String, bool) {
        let (tokenizer, stop): (_, Vec<String>) = (Tokenizer::bytes(), stop.iter().map(|s| s.to_string()).collect());
        let mut output = Output::new(&tokenizer, &stop);
        let mut parts = Vec::new();
        for byte in bytes {
            let (ready, stopped) = output.push(u32::from(*byte));
            parts.push(ready);
            if stopped {
                break;
            }
        }
        parts.push(output.finish());
        (parts, output.shown, output.stopped)
    }

    #[test]
    fn stop_texts_are_found_across_tokens_and_never_shown() {
        for (text, stop, expected, stopped) in [
            ("one END two", &["END"][..], "one ", true),
            ("one EN two", &["END"], "one EN two", false),
            ("one EN", &["END"], "one EN", false),
            ("aab", &["ab"], "a", true),
            ("a😀b", &["😀"], "a", true),
            ("xyz", &["yz", "y"], "x", true),
            ("plain", &[], "plain", false),
        ] {
            let (parts, whole, was) = shown(text.as_bytes(), stop);
            assert_eq!((whole.as_str(), was), (expected, stopped), "{text}");
            assert_eq!(parts.concat(), expected);
        }
    }

    #[test]
    fn characters_are_shown_whole_and_a_cut_one_is_marked() {
        let (parts, ..) = shown("é😀".as_bytes(), &[]);
        assert_eq!(parts, ["", "é", "", "", "", "😀", ""]);
        assert_eq!(shown(&"😀".as_bytes()[..3], &[]).1, "\u{FFFD}");
    }
}
