//! The documents in a stream of bytes, by the format that its name says. Called by `text`.
//!
//! Lines and records are read one at a time, each of bounded length, so that a file of any size takes little memory.

use std::cell::Cell;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::rc::Rc;

use rayon::prelude::*;

use super::encoding::{NotText, Refused, Text};
use super::{Cleaning, Reading, markup, parquet};
use crate::error::{Error, Result};

/// Longest line of jsonl, record of csv, page of HTML or cleaned book: more is a damaged file.
pub const MOST_RECORD: u64 = 1 << 26;

/// Where documents go.
pub trait Documents {
    /// More of the document that is being read.
    fn text(&mut self, piece: &[u8]) -> Result<()>;
    /// The document is whole; one without text is none.
    fn end(&mut self) -> Result<()>;
    /// Something was left out or replaced.
    fn note(&mut self, what: Note, count: u64);
}

/// What is counted over all files and told once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub enum Note {
    /// Bytes that are not UTF-8 and were replaced.
    Replaced,
    /// Records without the field.
    Lacking,
    /// Documents that came before.
    Duplicates,
    /// Files that are not text.
    Skipped,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    Plain,
    JsonLines,
    Csv { delimiter: u8 },
    Parquet,
    Html,
    Epub,
}

impl Format {
    /// By the ending of a name; what is not known is text.
    pub fn of(name: &str) -> Self {
        let lower = name.to_lowercase();
        match lower.rsplit_once('.').map_or("", |(_, ending)| ending) {
            "jsonl" | "ndjson" => Self::JsonLines,
            "csv" => Self::Csv { delimiter: b',' },
            "tsv" => Self::Csv { delimiter: b'\t' },
            "parquet" => Self::Parquet,
            "html" | "htm" | "xhtml" => Self::Html,
            "epub" => Self::Epub,
            _ => Self::Plain,
        }
    }
}

/// Reads what `reader` gives as `name` says. `path` is the file in which it lies, for errors. `Some` says why there is
/// no text in it at all; then part of a document may have gone to `to`.
pub fn read(
    path: &Path,
    name: &str,
    reader: &mut dyn Read,
    reading: &Reading,
    to: &mut dyn Documents,
) -> Result<Option<Error>> {
    let source = Source { path, name, is_text: Cell::new(true) };
    match documents(&source, reader, reading, to) {
        Err(e) if !source.is_text.get() => Ok(Some(e)),
        other => other.map(|()| None),
    }
}

fn documents(source: &Source, reader: &mut dyn Read, reading: &Reading, to: &mut dyn Documents) -> Result<()> {
    let mut text = Text::new(reader, reading.invalid(), reading.line_endings);
    match Format::of(source.name) {
        Format::Plain => plain(source, &mut text, reading, to)?,
        Format::JsonLines => json_lines(source, &mut text, &reading.field, to)?,
        Format::Csv { delimiter } => csv(source, &mut text, &reading.field, delimiter, to)?,
        Format::Html => {
            let page = source.whole(&mut text)?;
            to.text(markup::html(&page).map_err(|e| source.expected("a page of HTML", e))?.as_bytes())?;
            to.end()?;
        }
        Format::Epub => {
            let mut book = Vec::new();
            text.into_inner().take(MOST_RECORD + 1).read_to_end(&mut book).map_err(|e| source.failed(e))?;
            let text = markup::epub(book).map_err(|e| source.expected("an epub", e))?;
            to.text(text.as_bytes())?;
            return to.end();
        }
        Format::Parquet => return parquet::read(source.path, &reading.field, to),
    }
    if text.invalid_bytes > 0 {
        to.note(Note::Replaced, text.invalid_bytes);
    }
    Ok(())
}

/// What is read, for messages.
struct Source<'a> {
    path: &'a Path,
    name: &'a str,
    is_text: Cell<bool>,
}

impl Source<'_> {
    /// The file, and the member if it is in an archive.
    fn place(&self) -> std::path::PathBuf {
        let own = self.path.file_name().unwrap_or_default().to_string_lossy();
        if own.starts_with(self.name) { self.path.to_owned() } else { self.path.join(self.name) }
    }

    fn expected(&self, expected: impl Into<String>, found: impl Into<String>) -> Error {
        Error::file(self.place(), expected, found)
    }

    /// What the reader met: bytes that are no text, or a failure below it.
    fn failed(&self, e: std::io::Error) -> Error {
        let kind = |e: &std::io::Error| e.get_ref().map(|inner| (inner.is::<NotText>(), inner.is::<Refused>()));
        match kind(&e) {
            Some((true, _)) => {
                self.is_text.set(false);
                self.expected("text", e.to_string()).with_hint("--allow-binary trains on any bytes")
            }
            Some((_, true)) => self
                .expected("UTF-8", e.to_string())
                .with_hint("convert it to UTF-8, or --invalid-utf8 replace puts U+FFFD there"),
            _ => super::archive::damaged(&self.place(), e),
        }
    }

    /// All of it, which must not be longer than a record.
    fn whole(&self, text: &mut Text<&mut dyn Read>) -> Result<String> {
        let mut all = Vec::new();
        loop {
            let block = text.block().map_err(|e| self.failed(e))?;
            if block.is_empty() {
                return Ok(String::from_utf8_lossy(&all).into_owned());
            }
            all.extend_from_slice(block);
            if all.len() as u64 > MOST_RECORD {
                return Err(self.expected(format!("at most {MOST_RECORD} bytes"), "more"));
            }
        }
    }
}

fn plain(source: &Source, text: &mut Text<&mut dyn Read>, reading: &Reading, to: &mut dyn Documents) -> Result<()> {
    if reading.cleaning == Cleaning::Gutenberg {
        to.text(gutenberg(&source.whole(text)?).as_bytes())?;
        return to.end();
    }
    if !reading.separator.is_empty() {
        return separated(source, text, reading.separator.as_bytes(), to);
    }
    loop {
        let block = text.block().map_err(|e| source.failed(e))?;
        if block.is_empty() {
            return to.end();
        }
        to.text(block)?;
    }
}

/// Documents between separators, without the white space at their ends.
fn separated(source: &Source, text: &mut Text<&mut dyn Read>, separator: &[u8], to: &mut dyn Documents) -> Result<()> {
    let finder = memchr::memmem::Finder::new(separator);
    let mut document = Trimmed { to, begun: false, space: Vec::new() };
    let mut held: Vec<u8> = Vec::new();
    loop {
        let block = text.block().map_err(|e| source.failed(e))?;
        let last = block.is_empty();
        held.extend_from_slice(block);
        let mut at = 0;
        while let Some(found) = finder.find(&held[at..]) {
            document.text(&held[at..at + found])?;
            document.end()?;
            at += found + separator.len();
        }
        // A separator may begin in the last bytes.
        let safe = if last { held.len() } else { at.max((held.len() + 1).saturating_sub(separator.len())) };
        document.text(&held[at..safe])?;
        held.drain(..safe);
        if last {
            return document.end();
        }
    }
}

/// Passes a document on without the white space before and after it.
struct Trimmed<'a> {
    to: &'a mut dyn Documents,
    begun: bool,
    /// White space that is only text if more follows.
    space: Vec<u8>,
}

impl Trimmed<'_> {
    fn text(&mut self, piece: &[u8]) -> Result<()> {
        let piece = if self.begun { piece } else { piece.trim_ascii_start() };
        let text = piece.trim_ascii_end();
        if !text.is_empty() {
            self.begun = true;
            self.to.text(&self.space)?;
            self.space.clear();
            self.to.text(text)?;
        }
        self.space.extend_from_slice(&piece[text.len()..]);
        Ok(())
    }

    fn end(&mut self) -> Result<()> {
        self.space.clear();
        self.begun = false;
        self.to.end()
    }
}

/// A book of Project Gutenberg without its header and licence, which stand outside of two lines of asterisks. A text
/// without these lines stays whole.
fn gutenberg(text: &str) -> &str {
    let mark = |text: &str, which: &str| {
        ["*** ", "***"].iter().find_map(|stars| {
            let line = [which, " OF THE PROJECT GUTENBERG EBOOK"].concat();
            let this = [which, " OF THIS PROJECT GUTENBERG EBOOK"].concat();
            [line, this].iter().find_map(|line| text.find(&[stars, line.as_str()].concat()))
        })
    };
    let after_line = |at: usize| text[at..].find('\n').map_or(text.len(), |n| at + n + 1);
    let start = mark(text, "START").map_or(0, after_line);
    let end = mark(&text[start..], "END").map_or(text.len(), |n| start + n);
    text[start..end].trim_matches(|c: char| c.is_whitespace() || c == '\u{FEFF}')
}

/// Lines that are parsed at a time, by all threads.
const BATCH: usize = 1 << 22;

/// The field of each line's object, or the line's string. `a.b` is the field b of the object a.
fn json_lines(source: &Source, text: &mut Text<&mut dyn Read>, field: &str, to: &mut dyn Documents) -> Result<()> {
    let mut lines = BufReader::with_capacity(1 << 18, text);
    let place = source.place();
    let (mut batch, mut ends, mut number, mut any) = (Vec::new(), Vec::new(), 0u64, false);
    loop {
        let start = batch.len();
        let read = (&mut lines).take(MOST_RECORD + 1).read_until(b'\n', &mut batch).map_err(|e| source.failed(e))?;
        if read as u64 > MOST_RECORD {
            return Err(source.expected("jsonl", format!("a line {} of more than {MOST_RECORD} bytes", number + 1)));
        }
        number += 1;
        if read > 0 {
            ends.push((start..batch.len(), number));
            if batch.len() < BATCH {
                continue;
            }
        }
        let parse = |(line, number): &(std::ops::Range<usize>, u64)| {
            let line = batch[line.clone()].trim_ascii();
            if line.is_empty() {
                return Ok(None);
            }
            let value: serde_json::Value = serde_json::from_slice(line)
                .map_err(|e| Error::file(&place, "a JSON document on each line", format!("line {number}: {e}")))?;
            Ok(Some(value))
        };
        let values: Vec<Result<Option<serde_json::Value>>> = ends.par_iter().map(parse).collect();
        for value in values {
            let Some(value) = value? else { continue };
            match field_of(&value, field) {
                Some(document) => {
                    to.text(document.as_bytes())?;
                    to.end()?;
                }
                // The first says what the file is; later ones may lack it.
                None if !any => return Err(no_field(source, field, keys_of(&value))),
                None => to.note(Note::Lacking, 1),
            }
            any = true;
        }
        batch.clear();
        ends.clear();
        if read == 0 {
            return Ok(());
        }
    }
}

fn field_of<'a>(value: &'a serde_json::Value, field: &str) -> Option<&'a str> {
    if let Some(text) = value.as_str() {
        return Some(text);
    }
    // A key may have a point in it; only else it is a path.
    if let Some(text) = value.get(field).and_then(|v| v.as_str()) {
        return Some(text);
    }
    field.split('.').try_fold(value, |value, name| value.get(name))?.as_str()
}

fn keys_of(value: &serde_json::Value) -> Vec<String> {
    value.as_object().map_or(Vec::new(), |object| object.keys().cloned().collect())
}

/// Says which fields there are instead. Among others such a file is passed over, like one that is no text.
fn no_field(source: &Source, field: &str, known: Vec<String>) -> Error {
    source.is_text.set(false);
    let list = known.iter().take(12).map(|k| format!("`{k}`")).collect::<Vec<_>>().join(", ");
    let found = if list.is_empty() { "no fields".to_owned() } else { format!("only {list}") };
    source.expected(format!("a text in the field `{field}`"), found).with_hint("name the field with --field")
}

/// The column of each record of csv (RFC 4180) or tsv.
fn csv(
    source: &Source,
    text: &mut Text<&mut dyn Read>,
    field: &str,
    delimiter: u8,
    to: &mut dyn Documents,
) -> Result<()> {
    let left = Rc::new(Cell::new(MOST_RECORD));
    let limited = Limited { reader: text, left: Rc::clone(&left) };
    let mut records = ::csv::ReaderBuilder::new().delimiter(delimiter).flexible(true).from_reader(limited);
    let said = |e: ::csv::Error| match e.into_kind() {
        ::csv::ErrorKind::Io(e) => source.failed(e),
        kind => source.expected("csv", format!("{kind:?}")),
    };
    let header = records.byte_headers().map_err(said)?.clone();
    let column = header.iter().position(|name| name == field.as_bytes());
    let Some(column) = column else {
        let known = header.iter().map(|name| String::from_utf8_lossy(name).into_owned()).collect();
        return Err(no_field(source, field, known));
    };
    let mut record = ::csv::ByteRecord::new();
    while records.read_byte_record(&mut record).map_err(said)? {
        left.set(MOST_RECORD);
        match record.get(column) {
            Some(document) => {
                to.text(document)?;
                to.end()?;
            }
            None => to.note(Note::Lacking, 1),
        }
    }
    Ok(())
}

/// Fails when a record takes more than is left: a quotation mark that is never closed would hold all of a file.
struct Limited<R> {
    reader: R,
    left: Rc<Cell<u64>>,
}

impl<R: Read> Read for Limited<R> {
    fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
        let n = self.reader.read(to)?;
        let left = self.left.get().checked_sub(n as u64);
        self.left.set(left.ok_or_else(|| std::io::Error::other("a record that does not end"))?);
        Ok(n)
    }
}
