//! A text to the tokens of a split: bytes stay the text, other ids are made once and kept in the cache. Called by `data`.
//!
//! The text is read from its beginning in pieces, which all threads encode; a piece ends at a document or where the
//! tokenizer cuts a text anyway, so that the ids are those of the whole. Memory does not grow with the text.

use std::io::Read;
use std::path::Path;

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::place::{Claim, Place};
use super::progress::Progress;
use super::store::Text;
use super::token_file::{self, Ids, Loaded, Writer, width};
use super::tokens::Tokens;
use crate::error::{Error, Result};
use crate::files::atomic;
use crate::tokenizer::Tokenizer;

/// A text below this is encoded anew each time, in memory.
const SMALL: usize = 1 << 20;

/// Bytes read at a time, and of a piece, about.
const BATCH: usize = 1 << 23;
const PIECE: usize = 1 << 17;

/// Bytes between two places from which an interrupted run goes on.
const MARK_EVERY: u64 = 1 << 24;

/// The tokens of a text, whose `Text::content` is known; with `separate`, an end-of-text token stands before each document
/// and after the last.
pub fn tokens(
    text: &Text,
    content: &[u8; 32],
    separate: bool,
    tokenizer: &Tokenizer,
    place: &Place,
    progress: &mut dyn Progress,
) -> Result<Tokens> {
    if tokenizer.is_bytes() {
        let ends = if separate { text.ends.clone() } else { Vec::new().into() };
        return Ok(Tokens::bytes(text.bytes.clone(), ends, text.base, tokenizer.end_of_text()));
    }
    if text.bytes.len() < SMALL {
        let mut made = Memory::default();
        encode(text, separate, tokenizer, &mut made, progress)?;
        let (ids, starts) = (Ids::Long(made.ids.into()), made.starts.into());
        let loaded = Loaded { ids, starts, text_bytes: made.text_bytes };
        return Ok(Tokens::ids(loaded, tokenizer.byte_lengths(), tokenizer.end_of_text()));
    }
    let hash = Sha256::digest(tokenizer.to_json().as_bytes()).into();
    let path = place.folder("tokens")?.join(format!("{}.tok", key(content, separate, &hash)));
    if let Ok(tokens) = open(&path, &hash, tokenizer) {
        return Ok(tokens);
    }
    let _claim = Claim::take(&path, progress)?;
    // The one that was waited for may have made it.
    if let Ok(tokens) = open(&path, &hash, tokenizer) {
        return Ok(tokens);
    }
    let mut writer = Writer::open(&path, width(tokenizer.len()))?;
    encode(text, separate, tokenizer, &mut writer, progress)?;
    writer.finish(hash)?;
    open(&path, &hash, tokenizer)
}

fn open(path: &Path, hash: &[u8; 32], tokenizer: &Tokenizer) -> Result<Tokens> {
    let loaded = token_file::open(path, hash)?;
    Ok(Tokens::ids(loaded, tokenizer.byte_lengths(), tokenizer.end_of_text()))
}

/// The name of the ids of a text in the cache.
fn key(content: &[u8; 32], separate: bool, tokenizer: &[u8; 32]) -> String {
    // The number changes whenever the same text and tokenizer give other ids than before.
    let parts = [&b"ids 2\0"[..], tokenizer, content, &[u8::from(separate)]];
    atomic::hex(&Sha256::digest(parts.concat()))
}

/// Where ids go.
trait Sink {
    /// Bytes of the text that are done already.
    fn done(&self) -> u64;
    fn document(&mut self, end_of_text: u32) -> Result<()>;
    fn ids(&mut self, ids: &[u32]) -> Result<()>;
    /// All ids of the first `text` bytes are in.
    fn mark(&mut self, text: u64) -> Result<()>;
    fn text_bytes(&mut self, more: u64);
}

#[derive(Default)]
struct Memory {
    ids: Vec<u32>,
    starts: Vec<u64>,
    text_bytes: u64,
}

impl Sink for Memory {
    fn done(&self) -> u64 {
        0
    }

    fn document(&mut self, end_of_text: u32) -> Result<()> {
        self.starts.push(self.ids.len() as u64);
        self.ids(&[end_of_text])
    }

    fn ids(&mut self, ids: &[u32]) -> Result<()> {
        self.ids.extend_from_slice(ids);
        Ok(())
    }

    fn mark(&mut self, _: u64) -> Result<()> {
        Ok(())
    }

    fn text_bytes(&mut self, more: u64) {
        self.text_bytes += more;
    }
}

impl Sink for Writer {
    fn done(&self) -> u64 {
        self.mark.text
    }

    fn document(&mut self, end_of_text: u32) -> Result<()> {
        Writer::document(self, end_of_text)
    }

    fn ids(&mut self, ids: &[u32]) -> Result<()> {
        Writer::ids(self, ids)
    }

    fn mark(&mut self, text: u64) -> Result<()> {
        let before = std::mem::replace(&mut self.mark.text, text);
        if before / MARK_EVERY != text / MARK_EVERY { self.save_mark() } else { Ok(()) }
    }

    fn text_bytes(&mut self, more: u64) {
        self.mark.text_bytes += more;
    }
}

fn encode(
    text: &Text,
    separate: bool,
    tokenizer: &Tokenizer,
    to: &mut dyn Sink,
    progress: &mut dyn Progress,
) -> Result<()> {
    let lengths = tokenizer.byte_lengths();
    progress.begin("tokenizing", Some(text.bytes.len() as u64));
    let cut = |text: &[u8], from| tokenizer.cut(text, from);
    let result = walk(text, to.done(), &cut, &mut |pieces, end| {
        let encoded: Vec<Result<Vec<u32>>> = pieces.par_iter().map(|p| tokenizer.encode_bytes(p.bytes)).collect();
        for (piece, ids) in pieces.iter().zip(encoded) {
            let ids = ids?;
            if piece.begins && separate {
                to.document(tokenizer.end_of_text())?;
            }
            to.ids(&ids)?;
            to.text_bytes(ids.iter().map(|id| u64::from(lengths[*id as usize])).sum());
        }
        to.mark(end)?;
        progress.at(end).map(|()| true)
    });
    progress.end();
    result?;
    if separate { to.ids(&[tokenizer.end_of_text()]) } else { Ok(()) }
}

/// A part of a text.
pub struct Piece<'a> {
    pub bytes: &'a [u8],
    /// Whether a document begins with it.
    pub begins: bool,
}

/// Reads a text from byte `from` on and hands out its pieces, some megabytes at a time, with the byte at which they end. A
/// piece ends with its document or where `cut` says. Stops early if `visit` says false.
pub fn walk(
    text: &Text,
    from: u64,
    cut: &dyn Fn(&[u8], usize) -> Option<usize>,
    visit: &mut dyn FnMut(&[Piece], u64) -> Result<bool>,
) -> Result<()> {
    let unreadable = |e| Error::failed(format!("reading the text: {e}"));
    let (mut start, total) = (from as usize, text.bytes.len());
    let rest = text.bytes.part(start..total);
    let mut reader = rest.reader()?;
    let mut held: Vec<u8> = Vec::new();
    // How much is read before the next attempt to cut: more where there is no place for one.
    let mut wanted = BATCH;
    while start < total {
        let more = wanted.saturating_sub(held.len()) as u64;
        reader.by_ref().take(more).read_to_end(&mut held).map_err(unreadable)?;
        let ranges = split(text, cut, start, &held);
        let Some(done) = ranges.last().map(|(range, _)| range.end) else {
            if held.len() < wanted {
                return Err(Error::failed("the text became shorter while it was read"));
            }
            wanted *= 2;
            continue;
        };
        wanted = BATCH;
        let pieces: Vec<Piece> =
            ranges.into_iter().map(|(range, begins)| Piece { bytes: &held[range], begins }).collect();
        start += done;
        if !visit(&pieces, start as u64)? {
            return Ok(());
        }
        held.drain(..done);
    }
    Ok(())
}

/// Cuts what is at hand, which begins at byte `start` of the text, at documents and, in long ones, where `cut` says. What no
/// end is known of yet is left for the next time.
fn split(
    text: &Text,
    cut: &dyn Fn(&[u8], usize) -> Option<usize>,
    start: usize,
    held: &[u8],
) -> Vec<(std::ops::Range<usize>, bool)> {
    const MOST: usize = 2 * PIECE;
    let (ends, end) = (&text.ends, start + held.len());
    let mut pieces = Vec::new();
    let mut d = ends.partition_point(|e| (*e - text.base) as usize <= start);
    let mut at = start;
    let mut begins = d < ends.len() && text.document(d).start == start;
    while at < end && d < ends.len() {
        let document_end = (ends[d] - text.base) as usize;
        let (here, whole) = (document_end.min(end), document_end <= end);
        while at < here {
            let rest = here - at;
            let len = match (whole, rest) {
                (true, ..=MOST) => rest,
                (false, ..=PIECE) => return pieces,
                _ => match cut(&held[at - start..here - start], PIECE) {
                    Some(len) => len,
                    None if whole => rest,
                    None => return pieces,
                },
            };
            pieces.push((at - start..at - start + len, begins));
            begins = false;
            at += len;
        }
        begins = true;
        d += 1;
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::progress::Told;
    use crate::tokenizer::train::{Words, byte_pairs};

    fn tokenizer() -> Tokenizer {
        let mut words = Words::default();
        words.add(&[b"the cat sat on the mat, and the other one did not; so it's one two three, four five o'clock"]);
        byte_pairs(&words, 300).unwrap()
    }

    fn tokens(text: &Text, separate: bool, tokenizer: &Tokenizer, to: &Place, by: &mut dyn Progress) -> Result<Tokens> {
        super::tokens(text, &text.content(&mut Told::default())?, separate, tokenizer, to, by)
    }

    fn ids(tokens: &Tokens) -> Vec<u32> {
        tokens.slice(0..tokens.len())
    }

    #[test]
    fn a_long_text_gives_the_ids_of_the_whole_in_pieces_from_the_disk_and_from_memory() {
        let tokenizer = tokenizer();
        let line = "the cat sat on the mat, and\n the other  one did\nnot; it's 42 o'clock 漢字 émoji 😀\n\nso";
        let text = line.repeat(40_000);
        assert!(text.len() > 3 * SMALL);
        let whole = tokenizer.encode(&text).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let place = Place::new(dir.path());
        let plain = Text::new(text.clone().into_bytes(), vec![text.len() as u64]);
        let made = tokens(&plain, false, &tokenizer, &place, &mut Told::default()).unwrap();
        assert_eq!(ids(&made), whole);
        assert_eq!(made.text_bytes() as usize, text.len());
        // Three documents, one of them long.
        let ends = vec![10, text.len() as u64 - 2, text.len() as u64];
        let documents = Text::new(text.clone().into_bytes(), ends);
        let made = tokens(&documents, true, &tokenizer, &place, &mut Told::default()).unwrap();
        let eot = tokenizer.end_of_text();
        let parts = [&text[..10], &text[10..text.len() - 2], &text[text.len() - 2..]];
        let mut expected = Vec::new();
        for part in parts {
            expected.push(eot);
            expected.extend(tokenizer.encode(part).unwrap());
        }
        expected.push(eot);
        assert_eq!(ids(&made), expected);
        assert_eq!(made.documents().count(), 3);
        let files = || std::fs::read_dir(dir.path().join("tokens")).unwrap().flatten().collect::<Vec<_>>();
        let before: Vec<_> = files().iter().map(|f| f.metadata().unwrap().modified().unwrap()).collect();
        assert_eq!(ids(&tokens(&documents, true, &tokenizer, &place, &mut Told::default()).unwrap()), expected);
        let after: Vec<_> = files().iter().map(|f| f.metadata().unwrap().modified().unwrap()).collect();
        assert_eq!(before, after, "the second time it is only opened");
    }

    /// Stops after some calls, as Ctrl-C does.
    struct Stops(usize);

    impl Progress for Stops {
        fn begin(&mut self, _: &str, _: Option<u64>) {}
        fn at(&mut self, done: u64) -> Result<()> {
            self.0 = if done > 0 { self.0.saturating_sub(1) } else { self.0 };
            if self.0 == 0 { Err(Error::failed("stopped")) } else { Ok(()) }
        }
        fn end(&mut self) {}
        fn note(&mut self, _: String) {}
    }

    #[test]
    fn an_interrupted_text_is_taken_up_again() {
        let tokenizer = tokenizer();
        let text = "one two three\nfour five\n".repeat(1_200_000);
        let plain = Text::new(text.clone().into_bytes(), vec![text.len() as u64]);
        let dir = tempfile::tempdir().unwrap();
        let place = Place::new(dir.path());
        assert!(tokens(&plain, false, &tokenizer, &place, &mut Stops(3)).is_err());
        let marks = std::fs::read_dir(dir.path().join("tokens")).unwrap().flatten();
        let mark = marks.map(|f| f.path()).find(|p| p.to_string_lossy().ends_with("part.mark")).expect("a mark");
        assert!(std::fs::read_to_string(mark).unwrap().contains("\"text\""));
        let made = tokens(&plain, false, &tokenizer, &place, &mut Told::default()).unwrap();
        let other = Place::new(dir.path().join("other"));
        let anew = tokens(&plain, false, &tokenizer, &other, &mut Told::default()).unwrap();
        assert_eq!(made.len(), anew.len());
        assert_eq!(ids(&made), ids(&anew));
    }
}
