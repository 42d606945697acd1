//! From a name or a path to token ids in two splits. Called by the recipes.

pub mod stories;
pub mod text;
pub mod tokens;
pub mod windows;

use std::path::Path;

use rayon::prelude::*;

use crate::error::{Error, Result};
use crate::tokenizer::Tokenizer;
use tokens::Tokens;

/// Where the text comes from and how it is cut.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// `stories`, a file, or a folder.
    pub source: String,
    /// The share held out; for stories their number is fixed.
    pub validation: f64,
    /// stories: bytes of training text.
    pub bytes: u64,
    /// Take files that are not text.
    pub any_bytes: bool,
}

/// A data set ready to train on.
#[derive(Clone, Debug)]
pub struct Corpus {
    pub name: String,
    pub train: Tokens,
    pub validation: Tokens,
    /// Bits a byte that the source cannot be compressed below, where it is known.
    pub entropy_bpb: Option<f64>,
    /// Exact -log2 p of the held-out text under its source, over its bytes.
    pub source_bpb: Option<f64>,
    /// Things worth telling: skipped files.
    pub notes: Vec<String>,
}

/// The named data sets, built in.
pub const NAMED: [&str; 1] = ["stories"];

/// Training and held-out stories come from seeds of their own.
const STORIES_TRAIN: u64 = 1;
const STORIES_HELD_OUT: u64 = 2;

/// Held-out stories: their mean -log2 p is known to about half a percent.
pub const HELD_OUT_STORIES: u64 = 500;

/// Reads, cuts and tokenizes.
pub fn open(request: &Request, tokenizer: &Tokenizer) -> Result<Corpus> {
    if !(0.0..1.0).contains(&request.validation) {
        return Err(Error::usage(format!("a held-out share of {}", request.validation))
            .with_hint("--validation takes a number from 0 up to, not including, 1"));
    }
    if request.source == "stories" {
        return stories_corpus(request.bytes, tokenizer);
    }
    let path = Path::new(&request.source);
    if !path.exists() && !request.source.contains(['/', '.']) {
        let known = crate::error::nearest(&request.source, NAMED);
        let hint = known.unwrap_or_else(|| format!("give a file, a folder, or one of: {}", NAMED.join(", ")));
        return Err(Error::usage(format!("no data set, file or folder `{}`", request.source)).with_hint(hint));
    }
    let reading =
        text::Reading { validation: request.validation, any_bytes: request.any_bytes, utf8: !tokenizer.is_bytes() };
    let splits = text::read(path, reading)?;
    let text = [&splits.train, &splits.validation].into_iter().flatten().map(Vec::len).sum::<usize>() as u64;
    let documents = (splits.train.len() + splits.validation.len()) as u64;
    let tokens = |documents: Vec<Vec<u8>>| tokenize(documents, splits.documents, tokenizer);
    let (train, validation) = (tokens(splits.train)?, tokens(splits.validation)?);
    let mut notes = Vec::new();
    if splits.skipped > 0 {
        notes.push(format!("{} files of {} are not text and were left out", splits.skipped, path.display()));
    }
    let told = train.text_bytes() + validation.text_bytes();
    // Sentencepiece puts a space before each text; more than that is text that the tokenizer changes.
    if told.abs_diff(text) > documents {
        notes.push(format!("the tokens stand for {told} bytes of the {text} in the text; bits per byte count those"));
    }
    Ok(Corpus {
        name: path.file_stem().map_or_else(|| request.source.clone(), |s| s.to_string_lossy().into_owned()),
        train,
        validation,
        entropy_bpb: None,
        source_bpb: None,
        notes,
    })
}

fn stories_corpus(bytes: u64, tokenizer: &Tokenizer) -> Result<Corpus> {
    let mut documents = Vec::new();
    let (mut total, mut index) = (0, 0);
    while total < bytes {
        let story = stories::story(STORIES_TRAIN, index);
        total += story.text.len() as u64;
        index += 1;
        documents.push(story.text.into_bytes());
    }
    let held_out: Vec<_> = (0..HELD_OUT_STORIES).map(|i| stories::story(STORIES_HELD_OUT, i)).collect();
    let bits: f64 = held_out.iter().map(|s| s.bits).sum();
    let length: usize = held_out.iter().map(|s| s.text.len()).sum();
    let held_out = held_out.into_iter().map(|s| s.text.into_bytes()).collect();
    let tokens = |documents| tokenize(documents, true, tokenizer);
    Ok(Corpus {
        name: "stories".into(),
        train: tokens(documents)?,
        validation: tokens(held_out)?,
        entropy_bpb: Some(stories::source().entropy_bpb()),
        source_bpb: Some(bits / length as f64),
        notes: Vec::new(),
    })
}

fn tokenize(mut documents: Vec<Vec<u8>>, separate: bool, tokenizer: &Tokenizer) -> Result<Tokens> {
    if tokenizer.is_bytes() {
        let lengths = documents.iter().map(Vec::len);
        let ends = lengths.scan(0, |at, n| {
            *at += n;
            Some(*at)
        });
        let ends = if separate { ends.collect() } else { Vec::new() };
        // One text is taken as it is, not copied.
        let text = if documents.len() == 1 { documents.swap_remove(0) } else { documents.concat() };
        return Ok(Tokens::bytes(text, ends, tokenizer.end_of_text()));
    }
    let encode = |text: &Vec<u8>| {
        let text = std::str::from_utf8(text).map_err(|e| Error::failed(format!("text that is not UTF-8: {e}")))?;
        tokenizer.encode(text)
    };
    let ids: Result<Vec<_>> = documents.par_iter().map(encode).collect();
    Ok(Tokens::ids(ids?, separate, tokenizer.end_of_text(), tokenizer.byte_lengths()))
}

/// Refuses a split too short for one window of `context`, and says what would fit.
pub fn require_window(split: &str, tokens: &Tokens, context: usize) -> Result<()> {
    // A window of documents may be filled up; plain text must hold one and its last target.
    let needed = if tokens.has_documents() { 2 } else { context + 1 };
    if tokens.len() >= needed {
        return Ok(());
    }
    let what = format!("the {split} split has {} tokens; a window of context {context} needs {needed}", tokens.len());
    Err(Error::failed(what).with_hint(match tokens.len() {
        0 | 1 => "give more text, or hold out another share with --validation".to_owned(),
        n => format!("give more text, or use --context {} or less", n - 1),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stories_come_framed_and_with_their_entropy() {
        let request = Request { source: "stories".into(), validation: 0.1, bytes: 20_000, any_bytes: false };
        let corpus = open(&request, &Tokenizer::bytes()).unwrap();
        assert!(corpus.train.text_bytes() >= 20_000 && corpus.train.has_documents());
        assert_eq!(corpus.validation.documents().count() as u64, HELD_OUT_STORIES);
        let (entropy, source) = (corpus.entropy_bpb.unwrap(), corpus.source_bpb.unwrap());
        assert!((source / entropy - 1.0).abs() < 0.02, "source {source}, entropy {entropy}");
        assert_ne!(corpus.train.slice(0..200), corpus.validation.slice(0..200));
    }

    #[test]
    fn unknown_names_and_short_texts_say_what_would_work() {
        let request = |source: &str| Request { source: source.into(), validation: 0.1, bytes: 0, any_bytes: false };
        let error = open(&request("storis"), &Tokenizer::bytes()).unwrap_err();
        assert_eq!((error.exit_code(), error.hint().unwrap().contains("stories")), (2, true));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.txt");
        for (length, context, fits) in [(0, 8, false), (1, 8, false), (8, 8, false), (9, 8, true), (10, 8, true)] {
            std::fs::write(&path, "x".repeat(length + 1)).unwrap();
            let corpus =
                open(&Request { validation: 0.0, ..request(path.to_str().unwrap()) }, &Tokenizer::bytes()).unwrap();
            assert_eq!(require_window("training", &corpus.train, context).is_ok(), fits || length + 1 == context + 1);
        }
    }

    #[test]
    fn tokens_that_stand_for_less_than_the_text_are_told() {
        // The byte tokenizer in another spelling is a tokenizer.json; it takes the name of a special token for the token.
        let dir = tempfile::tempdir().unwrap();
        let json = dir.path().join("tokenizer.json");
        std::fs::write(&json, format!(" {}", Tokenizer::bytes().to_json())).unwrap();
        let tokenizer = Tokenizer::open(&json).unwrap();
        assert!(!tokenizer.is_bytes());
        let path = dir.path().join("a.txt");
        let opened = |text: &str| {
            std::fs::write(&path, text).unwrap();
            let source = path.to_str().unwrap().to_owned();
            open(&Request { source, validation: 0.5, bytes: 0, any_bytes: false }, &tokenizer).unwrap()
        };
        let plain = opened("émoji 😀 and 漢字, all of it");
        assert_eq!(plain.train.text_bytes() + plain.validation.text_bytes(), std::fs::metadata(&path).unwrap().len());
        assert!(plain.notes.is_empty());
        let note = opened("a<|endoftext|>b and then the other half is here").notes.concat();
        assert!(note.contains("bytes of the 47 in the text"), "{note}");
    }
}
