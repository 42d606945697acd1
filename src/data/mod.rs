//! From a name or a path to token ids in two splits. Called by the recipes.
//!
//! ```text
//! source -> card, download -> archive -> encoding, format -> store (text) -> encode, token_file -> tokens -> windows
//! ```

pub mod archive;
pub mod card;
pub mod download;
pub mod encode;
pub mod encoding;
pub mod format;
mod markup;
pub mod numbers;
mod parquet;
pub mod place;
pub mod progress;
pub mod source;
pub mod store;
pub mod stories;
pub mod text;
pub mod token_file;
pub mod tokens;
pub mod windows;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::files::atomic;
use crate::tokenizer::Tokenizer;
use card::Card;
use download::Patience;
use encoding::Invalid;
use format::Note;
use place::Place;
use progress::Progress;
use store::{Notes, Text};
use text::{Input, Inputs, Splits};
use tokens::Tokens;
use windows::{Window, Windows};

/// Where the text comes from and how it is cut.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Sources as `--data` takes them: names of sets, cards, files and folders, with weights.
    pub source: String,
    /// stories: bytes of training text.
    pub bytes: u64,
    pub reading: Reading,
    /// Never ask a server.
    pub offline: bool,
    /// Hold out the test split of named sets instead of the one for validation.
    pub test: bool,
    pub place: Place,
}

/// How files become documents.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Reading {
    /// The share held out, from the end, of what has no splits of its own.
    pub validation: f64,
    /// Take what is not text, too.
    pub any_bytes: bool,
    /// What is done about bytes that are not UTF-8, unless any are taken.
    pub invalid: Invalid,
    pub line_endings: LineEndings,
    /// The field or column of jsonl, csv and parquet that is the text.
    pub field: String,
    /// Text between documents of a plain file; empty for none.
    pub separator: String,
    /// Leave out documents that came before.
    pub deduplicate: bool,
    pub cleaning: Cleaning,
}

impl Reading {
    pub fn invalid(&self) -> Invalid {
        if self.any_bytes { Invalid::Keep } else { self.invalid }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub enum LineEndings {
    #[default]
    Keep,
    /// CR LF becomes LF.
    Lf,
}

impl LineEndings {
    pub fn named(name: &str) -> Result<Self> {
        match name {
            "keep" => Ok(Self::Keep),
            "lf" => Ok(Self::Lf),
            _ => Err(Error::usage(format!("line endings `{name}`")).with_hint("--line-endings takes keep or lf")),
        }
    }
}

/// What a card says is taken away from its texts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Cleaning {
    #[default]
    None,
    /// Header and licence of Project Gutenberg.
    Gutenberg,
}

/// How documents share windows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pack {
    /// A window holds several, and each sees those before it.
    #[default]
    Across,
    /// A window holds several, and none sees another.
    Within,
    /// A window holds one.
    Off,
}

impl Pack {
    pub fn named(name: &str) -> Result<Self> {
        match name {
            "across" => Ok(Self::Across),
            "within" => Ok(Self::Within),
            "off" => Ok(Self::Off),
            _ => Err(Error::usage(format!("packing `{name}`")).with_hint("--pack takes across, within or off")),
        }
    }
}

/// A data set, or a mixture of them, ready to train on.
#[derive(Clone, Debug)]
pub struct Corpus {
    pub name: String,
    pub sources: Vec<Source>,
    /// Bits a byte that the source cannot be compressed below, where it is known.
    pub entropy_bpb: Option<f64>,
    /// Exact -log2 p of the held-out text under its source, over its bytes.
    pub source_bpb: Option<f64>,
}

/// One source of a mixture.
#[derive(Clone, Debug)]
pub struct Source {
    pub name: String,
    pub weight: Option<f64>,
    pub train: Tokens,
    pub validation: Tokens,
    /// `Text::content` of the training and of the held-out text.
    pub content: [[u8; 32]; 2],
}

impl Corpus {
    /// A hash of all texts as they were read, in hex: what tells a run that is resumed, or a cache of what a model said of
    /// them, that they are still the same. It knows nothing of file names, tokenizers, weights and windows.
    pub fn content_hash(&self) -> String {
        let texts: Vec<&[u8]> = self.sources.iter().flat_map(|s| s.content.iter().map(<[u8; 32]>::as_slice)).collect();
        atomic::hex(&Sha256::digest(texts.concat()))
    }

    /// Training windows of all sources, mixed by their weights.
    pub fn windows(&self, context: usize, seed: u64, pack: Pack) -> Windows {
        let sources: Vec<_> = self.sources.iter().map(|s| (&s.train, s.weight)).collect();
        Windows::new(&sources, context, seed, pack)
    }

    /// Windows over the held-out text of all sources, one source after the other.
    pub fn held_out(&self, context: usize, stride: usize) -> impl Iterator<Item = Window> + '_ {
        self.sources.iter().flat_map(move |s| windows::held_out(&s.validation, context, stride))
    }

    /// Windows over the training text of all sources, in its order.
    pub fn in_order(&self, context: usize, stride: usize) -> impl Iterator<Item = Window> + '_ {
        self.sources.iter().flat_map(move |s| windows::held_out(&s.train, context, stride))
    }

    pub fn train_tokens(&self) -> usize {
        self.sources.iter().map(|s| s.train.len()).sum()
    }

    pub fn validation_tokens(&self) -> usize {
        self.sources.iter().map(|s| s.validation.len()).sum()
    }

    /// Whether any source has documents.
    pub fn has_documents(&self) -> bool {
        self.sources.iter().any(|s| s.train.has_documents())
    }
}

/// Training and held-out stories come from seeds of their own.
const STORIES_TRAIN: u64 = 1;
const STORIES_HELD_OUT: u64 = 2;

/// Held-out stories: their mean -log2 p is known to about half a percent.
pub const HELD_OUT_STORIES: u64 = 500;

/// Fetches what is missing, reads, cuts and tokenizes.
pub fn open(request: &Request, tokenizer: &Tokenizer, progress: &mut dyn Progress) -> Result<Corpus> {
    let validation = request.reading.validation;
    if !(0.0..1.0).contains(&validation) {
        return Err(Error::usage(format!("a held-out share of {validation}"))
            .with_hint("--validation takes a number from 0 up to, not including, 1"));
    }
    let sources = source::parse(&request.source)?;
    let mut opened = Vec::new();
    for source::Weighted { name, weight } in sources {
        opened.push(one_source(&name, weight, request, tokenizer, progress)?);
    }
    // Of a mixture nobody knows the entropy.
    let stories = matches!(&opened[..], [one] if one.name == "stories" && request.source == "stories");
    let names: Vec<&str> = opened.iter().map(|s| s.name.as_str()).collect();
    Ok(Corpus {
        name: names.join("+"),
        sources: opened,
        entropy_bpb: stories.then(|| stories::source().entropy_bpb()),
        source_bpb: stories.then(|| held_out_stories().1),
    })
}

/// A set's name, or the last part of a path.
pub fn short(name: &str) -> String {
    let path = Path::new(name);
    path.file_stem().map_or_else(|| name.to_owned(), |stem| stem.to_string_lossy().into_owned())
}

fn one_source(
    name: &str,
    weight: Option<f64>,
    request: &Request,
    tokenizer: &Tokenizer,
    progress: &mut dyn Progress,
) -> Result<Source> {
    let Splits { train: text, validation: held_out, documents, notes } = splits(name, request, progress)?;
    tell(name, &notes, progress);
    let content = [text.content(progress)?, held_out.content(progress)?];
    let mut tokens = |text, content| encode::tokens(text, content, documents, tokenizer, &request.place, progress);
    let (train, validation) = (tokens(&text, &content[0])?, tokens(&held_out, &content[1])?);
    let bytes = (text.bytes.len() + held_out.bytes.len()) as u64;
    let told = train.text_bytes() + validation.text_bytes();
    // Sentencepiece puts a space before each text; more than that is text that the tokenizer changes.
    if told.abs_diff(bytes) > (text.ends.len() + held_out.ends.len()) as u64 {
        progress.note(format!(
            "{name}: the tokens stand for {told} bytes of the {bytes} in the text; bits per byte count those"
        ));
    }
    Ok(Source { name: short(name), weight, train, validation, content })
}

/// The text of a set, file or folder, in two splits.
pub fn splits(name: &str, request: &Request, progress: &mut dyn Progress) -> Result<Splits> {
    if name == "stories" {
        return Ok(stories_splits(request.bytes));
    }
    match card::find(name)? {
        Some(card) => {
            let reading = Reading {
                cleaning: card.cleaning,
                separator: card.separator.clone(),
                field: card.field.clone(),
                ..request.reading.clone()
            };
            let source = fetched(&card, request, progress)?;
            text::read(&source, &reading, &request.place, progress)
        }
        None if !Path::new(name).exists() && !name.contains(['/', '.']) => Err(card::unknown(name)),
        None if request.test => {
            Err(Error::usage(format!("{name} has no test split")).with_hint("only some named sets have one"))
        }
        None => text::read(&text::source(Path::new(name))?, &request.reading, &request.place, progress),
    }
}

/// The files of a card, in the cache.
pub fn fetched(card: &Card, request: &Request, progress: &mut dyn Progress) -> Result<text::Source> {
    let mut paths: Vec<(&str, PathBuf)> = Vec::new();
    for file in &card.file {
        let path = download::fetch(card, file, &request.place, request.offline, Patience::default(), progress)?;
        paths.push((&file.name, path));
    }
    let path = |name: &str| {
        let found = paths.iter().find(|(file, _)| *file == name).map(|(_, path)| path.clone());
        found.expect("a card's splits name files of it, which `Card::parse` checked")
    };
    let one = |input: Input| Inputs { files: vec![input], lenient: false, skipped: 0 };
    let part = |part: &card::Part| one(Input { path: path(&part.file), member: part.member.clone() });
    match (&card.splits, request.test) {
        (Some(splits), false) => return Ok(text::Source::Cut(part(&splits.train), part(&splits.validation))),
        (Some(card::Splits { train, test: Some(test), .. }), true) => {
            return Ok(text::Source::Cut(part(train), part(test)));
        }
        (_, true) => {
            return Err(Error::usage(format!("{} has no test split", card.name)).with_hint("leave --test out"));
        }
        (None, false) => {}
    }
    let files = card.file.iter().map(|file| Input { path: path(&file.name), member: file.member.clone() });
    let files: Vec<Input> = files.collect();
    match &files[..] {
        [] => Err(Error::usage(format!("{} has no files", card.name)).with_hint("name the files in its card")),
        [single] => Ok(text::Source::Whole(one(single.clone()))),
        _ => Ok(text::Source::Whole(Inputs { files, lenient: false, skipped: 0 })),
    }
}

/// Says what was left out or replaced.
fn tell(name: &str, notes: &Notes, progress: &mut dyn Progress) {
    for (note, count) in notes {
        progress.note(match note {
            Note::Replaced => format!("{name}: {count} bytes that are not UTF-8 were replaced by U+FFFD"),
            Note::Lacking => format!("{name}: {count} records without the field were left out"),
            Note::Duplicates => format!("{name}: {count} documents that came before were left out"),
            Note::Skipped => format!("{name}: {count} files that are not text, or lack the field, were left out"),
        });
    }
}

/// Stories for training, as many bytes as were asked for, and those that are held out.
fn stories_splits(bytes: u64) -> Splits {
    let (mut text, mut ends) = (Vec::new(), Vec::new());
    while (text.len() as u64) < bytes {
        let story = stories::story(STORIES_TRAIN, ends.len() as u64);
        text.extend_from_slice(story.text.as_bytes());
        ends.push(text.len() as u64);
    }
    let validation = held_out_stories().0;
    Splits { train: Text::new(text, ends), validation, documents: true, notes: Notes::new() }
}

/// The held-out stories, and their exact -log2 p over their bytes.
fn held_out_stories() -> (Text, f64) {
    let (mut text, mut ends, mut bits) = (Vec::new(), Vec::new(), 0.0);
    for story in (0..HELD_OUT_STORIES).map(|i| stories::story(STORIES_HELD_OUT, i)) {
        text.extend_from_slice(story.text.as_bytes());
        ends.push(text.len() as u64);
        bits += story.bits;
    }
    let length = text.len() as f64;
    (Text::new(text, ends), bits / length)
}

/// Refuses a source too short for one window of `context`, and says what would fit.
pub fn require_window(name: &str, tokens: &Tokens, context: usize) -> Result<()> {
    // A window of documents may be filled up; plain text must hold one and its last target.
    let needed = if tokens.has_documents() { 2 } else { context + 1 };
    if tokens.len() >= needed {
        return Ok(());
    }
    let what = format!(
        "the training split of {name} has {} tokens; a window of context {context} needs {needed}",
        tokens.len()
    );
    Err(Error::failed(what).with_hint(match tokens.len() {
        0 | 1 => "give more text, or hold out another share with --validation".to_owned(),
        n => format!("give more text, or use --context {} or less", n - 1),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use progress::Told;

    fn request(source: &str, place: &Path) -> Request {
        Request {
            source: source.into(),
            bytes: 20_000,
            reading: Reading { validation: 0.1, field: "text".into(), ..Reading::default() },
            offline: true,
            test: false,
            place: Place::new(place),
        }
    }

    #[test]
    fn stories_come_framed_and_with_their_entropy() {
        let dir = tempfile::tempdir().unwrap();
        let corpus = open(&request("stories", dir.path()), &Tokenizer::bytes(), &mut Told::default()).unwrap();
        let [source] = &corpus.sources[..] else { panic!("one source") };
        assert!(source.train.text_bytes() >= 20_000 && source.train.has_documents());
        assert_eq!(source.validation.documents().count() as u64, HELD_OUT_STORIES);
        let (entropy, source_bpb) = (corpus.entropy_bpb.unwrap(), corpus.source_bpb.unwrap());
        assert!((source_bpb / entropy - 1.0).abs() < 0.02, "source {source_bpb}, entropy {entropy}");
        assert_ne!(source.train.slice(0..200), source.validation.slice(0..200));
    }

    #[test]
    fn unknown_names_and_short_texts_say_what_would_work() {
        let dir = tempfile::tempdir().unwrap();
        let error = open(&request("storis", dir.path()), &Tokenizer::bytes(), &mut Told::default()).unwrap_err();
        assert_eq!((error.exit_code(), error.hint().unwrap().contains("stories")), (2, true));
        let path = dir.path().join("a.txt");
        for (length, context, fits) in [(0, 8, false), (1, 8, false), (8, 8, false), (9, 8, true), (10, 8, true)] {
            std::fs::write(&path, "x".repeat(length + 1)).unwrap();
            let mut request = request(path.to_str().unwrap(), dir.path());
            request.reading.validation = 0.0;
            let corpus = open(&request, &Tokenizer::bytes(), &mut Told::default()).unwrap();
            let fits = fits || length + 1 == context + 1;
            assert_eq!(require_window("a", &corpus.sources[0].train, context).is_ok(), fits);
        }
    }

    #[test]
    fn the_content_hash_is_the_texts_own_and_sees_every_byte_and_border() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        let json = path("tokenizer.json");
        std::fs::write(&json, format!(" {}", Tokenizer::bytes().to_json())).unwrap();
        let tokenizers = [Tokenizer::bytes(), Tokenizer::open(Path::new(&json)).unwrap()];
        // Below and above the size from which ids are kept in the cache.
        for lines in [40, 60_000] {
            let text = "one two three, four\n".repeat(lines);
            let hashes = |source: &str, validation: f64| {
                let mut request = request(source, dir.path());
                request.reading.validation = validation;
                tokenizers.each_ref().map(|t| open(&request, t, &mut Told::default()).unwrap().content_hash())
            };
            let file = path("a.txt");
            let hash = |text: &str| {
                std::fs::write(&file, text).unwrap();
                let [bytes, ids] = hashes(&file, 0.1);
                assert_eq!(bytes, ids, "it does not depend on the tokenizer");
                bytes
            };
            let whole = hash(&text);
            assert_eq!(hash(&text), whole);
            std::fs::write(path("b.txt"), &text).unwrap();
            assert_eq!(hashes(&path("b.txt"), 0.1)[0], whole, "nor on the file's name");
            // Edits that change no length, in the middle of the training text and at the end of what is held out.
            for at in [0, text.len() / 2, text.len() - 2] {
                let mut edited = text.clone().into_bytes();
                edited[at] ^= 1;
                assert_ne!(hash(std::str::from_utf8(&edited).unwrap()), whole, "byte {at}");
            }
            hash(&text);
            assert_ne!(hashes(&file, 0.2)[0], whole, "another share is held out");
            let documents = |texts: &[&str]| {
                let lines: String = texts.iter().map(|t| serde_json::json!({"text": t}).to_string() + "\n").collect();
                std::fs::write(path("c.jsonl"), lines).unwrap();
                hashes(&path("c.jsonl"), 0.0)[0].clone()
            };
            assert_ne!(documents(&["ab", "c"]), documents(&["a", "bc"]));
        }
    }

    #[test]
    fn a_mixture_opens_every_source_and_names_the_one_that_fails() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        std::fs::write(path("a.txt"), "a".repeat(100)).unwrap();
        std::fs::write(path("b.jsonl"), "{\"text\": \"b\"}\n".repeat(30)).unwrap();
        let mixed = format!("{}:3,stories:1,{}:2", path("a.txt"), path("b.jsonl"));
        let corpus = open(&request(&mixed, dir.path()), &Tokenizer::bytes(), &mut Told::default()).unwrap();
        assert_eq!(corpus.name, "a+stories+b");
        let weights: Vec<_> = corpus.sources.iter().map(|s| s.weight.unwrap()).collect();
        assert_eq!(weights, [3.0, 1.0, 2.0]);
        assert!(corpus.has_documents() && corpus.entropy_bpb.is_none());
        let error =
            open(&request(&format!("{},none", path("a.txt")), dir.path()), &Tokenizer::bytes(), &mut Told::default());
        assert!(error.unwrap_err().to_string().contains("`none`"));
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
            let mut request = request(path.to_str().unwrap(), dir.path());
            request.reading.validation = 0.5;
            let mut notes = Told::default();
            let corpus = open(&request, &tokenizer, &mut notes).unwrap();
            (corpus.sources[0].train.text_bytes() + corpus.sources[0].validation.text_bytes(), notes.0.concat())
        };
        let plain = opened("émoji 😀 and 漢字, all of it");
        assert_eq!(plain, (std::fs::metadata(&path).unwrap().len(), String::new()));
        let (_, note) = opened("a<|endoftext|>b and then the other half is here");
        assert!(note.contains("bytes of the 47 in the text"), "{note}");
    }
}
