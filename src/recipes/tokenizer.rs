//! `gpt tokenizer`: new ones from text, and what one does to a text.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::data::DataConfig;
use super::report::{Interrupt, Preparing, Report};
use crate::checkpoint;
use crate::data::encode::walk;
use crate::data::progress::Progress;
use crate::data::store::Text;
use crate::data::{self, source};
use crate::error::{Error, Result};
use crate::files::atomic;
use crate::tokenizer::Tokenizer;
use crate::tokenizer::train::{self, MOST_BYTES, Words};

/// What a tokenizer's tokens are made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Pairs of bytes that come often.
    BytePairs,
    /// Every character of the text, and bytes for others.
    Characters,
}

impl Kind {
    pub fn named(name: &str) -> Result<Self> {
        match name {
            "bpe" => Ok(Self::BytePairs),
            "characters" => Ok(Self::Characters),
            _ => Err(Error::usage(format!("a tokenizer of kind `{name}`")).with_hint("--kind takes bpe or characters")),
        }
    }
}

/// What `gpt tokenizer train` was asked to do.
#[derive(Clone, Debug)]
pub struct TrainConfig {
    pub data: DataConfig,
    pub kind: Kind,
    /// Ids at most; those of characters follow from the text.
    pub vocab: usize,
    pub out: PathBuf,
}

/// The keys of `gpt tokenizer train --json`.
#[derive(Clone, Debug, serde::Serialize)]
pub struct TrainSummary {
    pub out: PathBuf,
    pub vocab_size: usize,
    /// Text that was counted.
    pub bytes: u64,
    /// Over the held-out text, or the text itself if nothing is held out.
    pub bytes_per_token: f64,
    pub seconds: f64,
}

/// Makes a tokenizer from the training text of a source, and writes its folder.
pub fn train(config: &TrainConfig, report: &mut dyn Report) -> Result<TrainSummary> {
    let start = Instant::now();
    if config.kind == Kind::BytePairs {
        train::check_vocab(config.vocab)?;
    }
    let file = config.out.join("tokenizer.json");
    if file.exists() {
        return Err(Error::usage(format!("{} exists", file.display())).with_hint("choose another folder with --out"));
    }
    let (request, _) = config.data.resolve()?;
    let interrupt = Interrupt::default();
    let mut progress = Preparing::new(report, &interrupt);
    let texts = texts(&request, &mut progress)?;
    let mut bytes = 0;
    let tokenizer = match config.kind {
        Kind::BytePairs => {
            let mut words = Words::default();
            each(&texts, &mut bytes, &mut progress, &mut |pieces| words.add(pieces))?;
            train::byte_pairs(&words, config.vocab)?
        }
        Kind::Characters => {
            let mut known = BTreeSet::new();
            each(&texts, &mut bytes, &mut progress, &mut |pieces| {
                pieces.iter().for_each(|piece| known.extend(String::from_utf8_lossy(piece).chars()));
            })?;
            train::characters(&known)?
        }
    };
    if tokenizer.len() < config.vocab && config.kind == Kind::BytePairs {
        progress.note(format!("the text has pairs for {} ids only", tokenizer.len()));
    }
    atomic::create_folder(&config.out)?;
    atomic::write(&file, tokenizer.to_json().as_bytes())?;
    // A model's context belongs to the model: this is as good as none.
    let beside = tokenizer.config_json(1 << 20);
    atomic::write(&config.out.join("tokenizer_config.json"), beside.as_bytes())?;
    let bytes_per_token = compression(&texts, &tokenizer)?;
    let seconds = start.elapsed().as_secs_f64();
    Ok(TrainSummary { out: config.out.clone(), vocab_size: tokenizer.len(), bytes, bytes_per_token, seconds })
}

/// Training and held-out text of every source.
fn texts(request: &data::Request, progress: &mut dyn Progress) -> Result<Vec<(Text, Text)>> {
    let mut texts = Vec::new();
    for source in source::parse(&request.source)? {
        let splits = data::splits(&source.name, request, progress)?;
        texts.push((splits.train, splits.validation));
    }
    Ok(texts)
}

/// Hands out the training texts in pieces, up to the most that is counted.
fn each(
    texts: &[(Text, Text)],
    bytes: &mut u64,
    progress: &mut dyn Progress,
    visit: &mut dyn FnMut(&[&[u8]]),
) -> Result<()> {
    let total: u64 = texts.iter().map(|(train, _)| train.bytes.len() as u64).sum();
    progress.begin("counting", Some(total.min(MOST_BYTES)));
    let mut before = 0;
    for (train, _) in texts {
        walk(train, 0, &train::cut_words, &mut |pieces, end| {
            let pieces: Vec<&[u8]> = pieces.iter().map(|piece| piece.bytes).collect();
            visit(&pieces);
            *bytes = before + end;
            progress.at(*bytes)?;
            Ok(*bytes < MOST_BYTES)
        })?;
        before = *bytes;
        if before >= MOST_BYTES {
            progress.end();
            progress.note(format!("the first {before} of {total} bytes are counted"));
            return Ok(());
        }
    }
    progress.end();
    Ok(())
}

/// Bytes a token over the held-out texts, or over the training texts if there are none.
fn compression(texts: &[(Text, Text)], tokenizer: &Tokenizer) -> Result<f64> {
    let held_out = texts.iter().any(|(_, held_out)| !held_out.bytes.is_empty());
    let (mut bytes, mut tokens) = (0, 0);
    for text in texts.iter().map(|(train, validation)| if held_out { validation } else { train }) {
        walk(text, 0, &|text, from| tokenizer.cut(text, from), &mut |pieces, end| {
            for piece in pieces {
                tokens += tokenizer.encode_bytes(piece.bytes)?.len();
                bytes += piece.bytes.len();
            }
            Ok(end < SAMPLE)
        })?;
    }
    Ok(bytes as f64 / tokens.max(1) as f64)
}

/// Text of a source over which the bytes a token are counted.
const SAMPLE: u64 = 1 << 24;

/// What `gpt tokenizer show` was asked for.
#[derive(Clone, Debug)]
pub struct ShowConfig {
    /// A tokenizer.json, its folder, or `bytes`; the newest run's if not given.
    pub tokenizer: Option<PathBuf>,
    /// A text to take apart.
    pub text: Option<String>,
    /// A source to compress.
    pub data: Option<DataConfig>,
}

/// The keys of `gpt tokenizer show --json`.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Shown {
    pub tokenizer: PathBuf,
    pub vocab_size: usize,
    pub end_of_text: u32,
    pub sha256: String,
    /// (id, text) of the tokens of most bytes.
    pub longest: Vec<(u32, String)>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_per_token: Option<f64>,
    /// (id, text) of the tokens of the text that was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<Vec<(u32, String)>>,
}

/// Tells what a tokenizer is, and what it does to a text.
pub fn show(config: &ShowConfig, report: &mut dyn Report) -> Result<Shown> {
    let place = match &config.tokenizer {
        Some(path) => path.clone(),
        None => checkpoint::resolve(None)?,
    };
    let tokenizer = match place == Path::new("bytes") {
        true => Tokenizer::bytes(),
        false => Tokenizer::open(&place)?,
    };
    let spelled = |id: u32| (id, String::from_utf8_lossy(tokenizer.bytes_of(id)).into_owned());
    let mut by_length: Vec<u32> = (0..tokenizer.len() as u32).collect();
    by_length.sort_by_key(|id| (std::cmp::Reverse(tokenizer.bytes_of(*id).len()), *id));
    let tokens = match &config.text {
        Some(text) => Some(tokenizer.encode(text)?.into_iter().map(spelled).collect()),
        None => None,
    };
    let bytes_per_token = match &config.data {
        Some(data) => {
            let (request, _) = data.resolve()?;
            let interrupt = Interrupt::default();
            let texts = texts(&request, &mut Preparing::new(report, &interrupt))?;
            Some(compression(&texts, &tokenizer)?)
        }
        None => None,
    };
    Ok(Shown {
        vocab_size: tokenizer.len(),
        end_of_text: tokenizer.end_of_text(),
        sha256: tokenizer.hash(),
        longest: by_length.into_iter().take(20).map(spelled).collect(),
        tokenizer: place,
        bytes_per_token,
        tokens,
    })
}
