//! `gpt data`: named sets and what is in a source, as training would see it.

use std::path::PathBuf;

use super::plan;
use super::report::{Interrupt, Preparing, Report};
use crate::data::card::{self, Card};
use crate::data::download::{self, Patience};
use crate::data::place::Place;
use crate::data::tokens::Tokens;
use crate::data::{self, stories};
use crate::error::Result;
use crate::preset::Preset;
use crate::tokenizer::Tokenizer;

/// The variable that names the cache.
pub const CACHE: &str = crate::data::place::VARIABLE;

/// What a `gpt data` command was asked to look at.
#[derive(Clone, Debug)]
pub struct DataConfig {
    pub source: String,
    /// Preset keys of the data and the tokenizer set by flags.
    pub given: Vec<(String, String)>,
    pub offline: bool,
}

impl DataConfig {
    /// The request of a run with these settings, and its tokenizer.
    pub(super) fn resolve(&self) -> Result<(data::Request, Tokenizer)> {
        let mut preset = Preset::load("tiny")?;
        preset.apply(&self.given)?;
        let request = data::Request { source: self.source.clone(), ..plan::request(&preset, self.offline)? };
        Ok((request, plan::tokenizer(&preset)?))
    }
}

/// A row of `gpt data list`.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Listed {
    pub name: String,
    pub title: String,
    pub licence: String,
    /// About.
    pub text_bytes: Option<u64>,
    /// Whether all its files are in the cache.
    pub fetched: bool,
}

/// The keys of `gpt data list --json`.
#[derive(Clone, Debug, serde::Serialize)]
pub struct List {
    pub cache: PathBuf,
    pub sets: Vec<Listed>,
}

/// All named sets.
pub fn list() -> List {
    let place = Place::of_user();
    let row = |card: Card| Listed {
        fetched: is_fetched(&card, &place),
        name: card.name,
        title: card.title,
        licence: card.licence,
        text_bytes: card.text_bytes,
    };
    List { sets: card::all().into_iter().map(row).collect(), cache: place.path().to_owned() }
}

fn is_fetched(card: &Card, place: &Place) -> bool {
    card.file.iter().all(|file| download::is_fetched(card, file, place))
}

/// The keys of `gpt data info --json`, and of `gpt data prepare --json`.
#[derive(Clone, Debug, serde::Serialize)]
pub struct DataInfo {
    pub name: String,
    /// Of raw text; of a set that is not fetched, about.
    pub bytes: Option<u64>,
    pub tokens: Option<usize>,
    pub splits: Vec<Split>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entropy_bpb: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_bpb: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub card: Option<CardInfo>,
    /// stories: expected bits and bytes of a story, and the bytes of the longest with its end token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub story: Option<[f64; 3]>,
    /// The beginning of the training text.
    pub beginning: String,
}

#[derive(Clone, Debug, serde::Serialize)]
pub struct CardInfo {
    pub title: String,
    pub licence: String,
    pub homepage: Option<String>,
    pub notes: Option<String>,
    pub files: Vec<String>,
    pub fetched: bool,
    /// What fetches it.
    pub command: String,
}

#[derive(Clone, Debug, serde::Serialize)]
pub struct Split {
    pub source: String,
    pub name: &'static str,
    pub bytes: u64,
    pub tokens: usize,
    pub documents: usize,
}

/// Tells what is in a source. A named set that is not in the cache is not fetched for that.
pub fn info(config: &DataConfig, report: &mut dyn Report) -> Result<DataInfo> {
    let card = card::find(&config.source)?;
    let absent = card.as_ref().filter(|card| !is_fetched(card, &Place::of_user()));
    if let Some(card) = absent {
        return Ok(DataInfo {
            name: card.name.clone(),
            bytes: card.text_bytes,
            tokens: None,
            splits: Vec::new(),
            entropy_bpb: None,
            source_bpb: None,
            card: Some(card_info(card, &config.source)),
            story: None,
            beginning: String::new(),
        });
    }
    let prepared = prepare(config, report)?;
    Ok(DataInfo { card: card.as_ref().map(|card| card_info(card, &config.source)), ..prepared })
}

fn card_info(card: &Card, source: &str) -> CardInfo {
    CardInfo {
        title: card.title.clone(),
        licence: card.licence.clone(),
        homepage: card.homepage.clone(),
        notes: card.notes.clone(),
        files: card.file.iter().map(|f| f.title.as_ref().unwrap_or(&f.name).clone()).collect(),
        fetched: is_fetched(card, &Place::of_user()),
        command: format!("gpt data fetch {source}"),
    }
}

/// Opens a source as training would: fetched, read, tokenized, and kept for the next time.
pub fn prepare(config: &DataConfig, report: &mut dyn Report) -> Result<DataInfo> {
    let (request, tokenizer) = config.resolve()?;
    let interrupt = Interrupt::default();
    let corpus = data::open(&request, &tokenizer, &mut Preparing::new(report, &interrupt))?;
    let mut splits = Vec::new();
    for source in &corpus.sources {
        for (name, tokens) in [("train", &source.train), ("validation", &source.validation)] {
            splits.push(Split {
                source: source.name.clone(),
                name,
                bytes: tokens.text_bytes(),
                tokens: tokens.len(),
                documents: tokens.documents().count().max(1),
            });
        }
    }
    let first = &corpus.sources[0].train;
    let start = first.slice(0..first.len().min(400));
    let stories = corpus.entropy_bpb.map(|_| stories::source());
    Ok(DataInfo {
        bytes: Some(splits.iter().map(|s| s.bytes).sum()),
        tokens: Some(splits.iter().map(|s| s.tokens).sum()),
        splits,
        entropy_bpb: corpus.entropy_bpb,
        source_bpb: corpus.source_bpb,
        card: None,
        story: stories.map(|s| [s.bits_per_story, s.bytes_per_story, s.longest as f64]),
        beginning: String::from_utf8_lossy(&tokenizer.decode(&start)).into_owned(),
        name: corpus.name,
    })
}

/// The keys of `gpt data fetch --json`.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Fetched {
    pub name: String,
    pub files: Vec<PathBuf>,
}

/// Fetches the files of a named set.
pub fn fetch(name: &str, offline: bool, report: &mut dyn Report) -> Result<Fetched> {
    let card = card::find(name)?.ok_or_else(|| card::unknown(name))?;
    let (place, interrupt) = (Place::of_user(), Interrupt::default());
    let mut progress = Preparing::new(report, &interrupt);
    let one = |file| download::fetch(&card, file, &place, offline, Patience::default(), &mut progress);
    let files = card.file.iter().map(one).collect::<Result<_>>()?;
    Ok(Fetched { name: card.name.clone(), files })
}

/// What `gpt data show` was asked for.
#[derive(Clone, Debug)]
pub struct ShowConfig {
    pub data: DataConfig,
    /// The held-out split instead of the training text.
    pub held_out: bool,
    /// Documents, or bytes of a source without any.
    pub first: usize,
    pub count: usize,
}

/// The keys of `gpt data show --json`.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Shown {
    pub name: String,
    pub of: usize,
    pub documents: Vec<String>,
}

/// Documents of a source as text; of a plain text its beginning.
pub fn show(config: &ShowConfig, report: &mut dyn Report) -> Result<Shown> {
    let (request, _) = config.data.resolve()?;
    let bytes = Tokenizer::bytes();
    let interrupt = Interrupt::default();
    let corpus = data::open(&request, &bytes, &mut Preparing::new(report, &interrupt))?;
    let source = &corpus.sources[0];
    let tokens: &Tokens = if config.held_out { &source.validation } else { &source.train };
    let text = |range| String::from_utf8_lossy(&bytes.decode(&tokens.slice(range))).into_owned();
    let of = tokens.documents().count();
    let documents = match of {
        0 => vec![text(0..tokens.len().min(2000))],
        _ => tokens.documents().skip(config.first).take(config.count).map(text).collect(),
    };
    Ok(Shown { name: source.name.clone(), of: of.max(1), documents })
}
