//! Bytes of a file to UTF-8 text while they are read: byte order marks, UTF-16, bytes that are no text, line ends.
//! Called by `format`.

use std::io::Read;

use super::LineEndings;
use crate::error::{Error, Result};

/// What is done about bytes that are not UTF-8.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub enum Invalid {
    /// U+FFFD stands for each sequence of them; they are counted.
    #[default]
    Replace,
    /// The first one is an error.
    Refuse,
    /// Everything passes as it is, and may be no text at all.
    Keep,
}

impl Invalid {
    pub fn named(name: &str) -> Result<Self> {
        match name {
            "replace" => Ok(Self::Replace),
            "refuse" => Ok(Self::Refuse),
            _ => Err(Error::usage(format!("`{name}` for bytes that are not UTF-8"))
                .with_hint("--invalid-utf8 takes replace or refuse; --allow-binary keeps any bytes")),
        }
    }
}

/// Why a file is no text: not a failure to read it.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct NotText(String);

/// A byte that is not UTF-8 where none may be.
#[derive(Debug, thiserror::Error)]
#[error("a byte at offset {0} that is not UTF-8")]
pub struct Refused(u64);

fn not_text(what: String) -> std::io::Error {
    std::io::Error::other(NotText(what))
}

/// Bytes read at a time.
const BLOCK: usize = 1 << 18;

/// A reader of UTF-8 (of anything with `Invalid::Keep`).
pub struct Text<R> {
    inner: R,
    invalid: Invalid,
    line_endings: LineEndings,
    /// What was read, from `kept` bytes of an unfinished character on.
    raw: Vec<u8>,
    kept: usize,
    utf16: Option<encoding_rs::Decoder>,
    begun: bool,
    ended: bool,
    /// Text that is ready, and how much of it was handed out.
    ready: Vec<u8>,
    at: usize,
    /// Bytes of the file before `raw`.
    position: u64,
    /// A carriage return at the end of the last block.
    held_return: bool,
    /// Bytes that were not UTF-8.
    pub invalid_bytes: u64,
}

impl<R: Read> Text<R> {
    pub fn new(inner: R, invalid: Invalid, line_endings: LineEndings) -> Self {
        Self {
            inner,
            invalid,
            line_endings,
            raw: vec![0; BLOCK],
            kept: 0,
            utf16: None,
            begun: false,
            ended: false,
            ready: Vec::with_capacity(BLOCK),
            at: 0,
            position: 0,
            held_return: false,
            invalid_bytes: 0,
        }
    }

    /// The reader below, for what is no text after all. Nothing may have been read yet.
    pub fn into_inner(self) -> R {
        self.inner
    }

    /// The next text, in place: empty at the end.
    pub fn block(&mut self) -> std::io::Result<&[u8]> {
        if self.at < self.ready.len() {
            let at = std::mem::replace(&mut self.at, self.ready.len());
            return Ok(&self.ready[at..]);
        }
        self.ready.clear();
        while self.ready.is_empty() && !self.ended {
            self.next()?;
        }
        self.at = self.ready.len();
        Ok(&self.ready)
    }

    fn next(&mut self) -> std::io::Result<()> {
        let mut filled = self.kept;
        while filled < self.raw.len() {
            match self.inner.read(&mut self.raw[filled..]) {
                Ok(0) => break,
                Ok(n) => filled += n,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        self.ended = filled < self.raw.len();
        let raw = std::mem::take(&mut self.raw);
        let mut bytes = &raw[..filled];
        let first = !std::mem::replace(&mut self.begun, true);
        let mark = encoding_rs::Encoding::for_bom(bytes).filter(|_| first && self.invalid != Invalid::Keep);
        if let Some((encoding, length)) = mark {
            bytes = &bytes[length..];
            self.position += length as u64;
            self.utf16 = (encoding != encoding_rs::UTF_8).then(|| encoding.new_decoder_without_bom_handling());
        }
        let start = self.ready.len();
        let decoded = match self.utf16.take() {
            Some(mut decoder) => {
                self.decode_utf16(&mut decoder, bytes);
                self.utf16 = Some(decoder);
                Ok(0)
            }
            None => self.decode_utf8(bytes),
        };
        self.position += bytes.len() as u64;
        let kept = *decoded.as_ref().unwrap_or(&0);
        self.position -= kept as u64;
        self.raw = raw;
        self.raw.copy_within(filled - kept..filled, 0);
        self.kept = kept;
        decoded?;
        // A few bad bytes happen in real text; a tenth of it being invalid does not.
        let (bad, seen) = (self.invalid_bytes, self.position);
        if bad * 10 > seen && (seen > 4096 || self.ended) {
            return Err(not_text(format!("binary data ({bad} of {seen} bytes are not UTF-8)")));
        }
        if self.line_endings == LineEndings::Lf {
            self.join_line_ends(start);
        }
        Ok(())
    }

    /// How many bytes at the end are an unfinished character.
    fn decode_utf8(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.invalid == Invalid::Keep {
            self.ready.extend_from_slice(bytes);
            return Ok(0);
        }
        if let Some(at) = memchr::memchr(0, bytes) {
            return Err(not_text(format!("binary data (a NUL byte at offset {})", self.position + at as u64)));
        }
        if std::str::from_utf8(bytes).is_ok() {
            self.ready.extend_from_slice(bytes);
            return Ok(0);
        }
        let mut at = 0;
        for chunk in bytes.utf8_chunks() {
            self.ready.extend_from_slice(chunk.valid().as_bytes());
            at += chunk.valid().len();
            let invalid = chunk.invalid();
            if invalid.is_empty() {
                continue;
            }
            let unfinished = at + invalid.len() == bytes.len()
                && std::str::from_utf8(invalid).is_err_and(|e| e.error_len().is_none());
            if unfinished && !self.ended {
                return Ok(invalid.len());
            }
            let place = self.position + at as u64;
            if self.invalid == Invalid::Refuse {
                return Err(std::io::Error::other(Refused(place)));
            }
            self.invalid_bytes += invalid.len() as u64;
            self.ready.extend_from_slice("\u{FFFD}".as_bytes());
            at += invalid.len();
        }
        Ok(0)
    }

    fn decode_utf16(&mut self, decoder: &mut encoding_rs::Decoder, bytes: &[u8]) {
        let most = decoder.max_utf8_buffer_length(bytes.len()).unwrap_or(4 * bytes.len() + 16);
        let mut text = String::with_capacity(most);
        let (_, read, replaced) = decoder.decode_to_string(bytes, &mut text, self.ended);
        debug_assert_eq!(read, bytes.len());
        if replaced {
            self.invalid_bytes += text.matches('\u{FFFD}').count() as u64;
        }
        self.ready.extend_from_slice(text.as_bytes());
    }

    /// Makes CR LF one LF from byte `start` of `ready` on. A return by itself stays.
    fn join_line_ends(&mut self, start: usize) {
        if std::mem::take(&mut self.held_return) {
            self.ready.insert(start, b'\r');
        }
        if !self.ended && self.ready.last() == Some(&b'\r') {
            self.ready.pop();
            self.held_return = true;
        }
        if memchr::memchr(b'\r', &self.ready[start..]).is_none() {
            return;
        }
        let mut to = start;
        for from in start..self.ready.len() {
            if self.ready[from] == b'\r' && self.ready.get(from + 1) == Some(&b'\n') {
                continue;
            }
            self.ready[to] = self.ready[from];
            to += 1;
        }
        self.ready.truncate(to);
    }
}

impl<R: Read> Read for Text<R> {
    fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
        if self.at == self.ready.len() {
            self.block()?;
            self.at = 0;
        }
        let n = to.len().min(self.ready.len() - self.at);
        to[..n].copy_from_slice(&self.ready[self.at..self.at + n]);
        self.at += n;
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hands out a few bytes at a time.
    struct Slow<'a>(&'a [u8], usize);

    impl Read for Slow<'_> {
        fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
            let n = self.1.min(self.0.len()).min(to.len());
            to[..n].copy_from_slice(&self.0[..n]);
            self.0 = &self.0[n..];
            Ok(n)
        }
    }

    fn read(bytes: &[u8], invalid: Invalid, line_endings: LineEndings) -> std::io::Result<(Vec<u8>, u64)> {
        let mut said = None;
        // The same whatever the blocks: an unfinished character or line end may stand at any border.
        for block in [1, 2, 3, 7, BLOCK] {
            let mut text = Text::new(Slow(bytes, 5), invalid, line_endings);
            text.raw = vec![0; block.max(4)];
            let mut all = Vec::new();
            let result = text.read_to_end(&mut all).map(|_| (all, text.invalid_bytes));
            match (&said, &result) {
                (Some(Ok(before)), Ok(now)) => assert_eq!(before, now),
                (Some(before), now) => assert_eq!(before.is_ok(), now.is_ok()),
                (None, _) => {}
            }
            said = Some(result);
        }
        said.unwrap()
    }

    #[test]
    fn every_encoding_of_a_text_reads_the_same() {
        let text = "aé€😀 line\r\nnext\rlone\r\n";
        let utf16 = |unit: fn(u16) -> [u8; 2], mark: [u8; 2]| {
            mark.into_iter().chain(text.encode_utf16().flat_map(unit)).collect::<Vec<u8>>()
        };
        let marked = [b"\xEF\xBB\xBF", text.as_bytes()].concat();
        let files = [
            text.as_bytes().to_vec(),
            marked,
            utf16(u16::to_le_bytes, [0xFF, 0xFE]),
            utf16(u16::to_be_bytes, [0xFE, 0xFF]),
        ];
        for file in files {
            assert_eq!(read(&file, Invalid::Replace, LineEndings::Keep).unwrap(), (text.into(), 0));
            let joined = text.replace("\r\n", "\n");
            assert_eq!(read(&file, Invalid::Refuse, LineEndings::Lf).unwrap(), (joined.into(), 0));
        }
    }

    #[test]
    fn bytes_that_are_no_text_are_counted_refused_or_kept() {
        let bytes = [&[b'x'; 100][..], b"caf\xE9 \xF0\x9F\x98"].concat();
        let (text, invalid) = read(&bytes, Invalid::Replace, LineEndings::Keep).unwrap();
        assert!(String::from_utf8(text).unwrap().ends_with("caf\u{FFFD} \u{FFFD}"));
        assert_eq!(invalid, 4);
        let refused = read(&bytes, Invalid::Refuse, LineEndings::Keep).unwrap_err().to_string();
        assert!(refused.contains("offset 103"), "{refused}");
        assert_eq!(read(&bytes, Invalid::Keep, LineEndings::Keep).unwrap().0, bytes);
        assert!(read(b"ab\0c", Invalid::Replace, LineEndings::Keep).unwrap_err().to_string().contains("offset 2"));
        assert!(read(&[0xFF; 40], Invalid::Replace, LineEndings::Keep).unwrap_err().to_string().contains("not UTF-8"));
        assert_eq!(read(b"", Invalid::Replace, LineEndings::Lf).unwrap().0, b"");
    }
}
