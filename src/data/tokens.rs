//! One split of a corpus as token ids, cheap to clone and to slice.
//!
//! Byte data stays the text itself with document ends beside it; ids are made per window. Between documents stands the
//! end-of-text token, and one stands before the first, so that every document begins after one.

use std::ops::Range;
use std::sync::Arc;

use super::numbers::Numbers;
use super::token_file::{Ids, Loaded};

#[derive(Clone, Debug)]
pub struct Tokens {
    store: Arc<Store>,
    end_of_text: u32,
}

#[derive(Debug)]
enum Store {
    /// Text, and the ends of its documents counted from `base` on; none for plain text.
    Bytes { text: Numbers<u8>, ends: Numbers<u64>, base: u64 },
    /// Ids with end-of-text tokens in place, where documents start, and the bytes that each id stands for.
    Ids { loaded: Loaded, byte_lengths: Vec<u32> },
}

impl Tokens {
    /// Bytes as ids; `ends` are the document ends in `text`, counted from `base`, increasing, or none for plain text.
    pub fn bytes(text: impl Into<Numbers<u8>>, ends: impl Into<Numbers<u64>>, base: u64, end_of_text: u32) -> Self {
        Self { store: Arc::new(Store::Bytes { text: text.into(), ends: ends.into(), base }), end_of_text }
    }

    /// Ids with an end-of-text token where each document starts and one after the last; `byte_lengths[id]` is how many bytes
    /// a token stands for.
    pub fn ids(loaded: Loaded, byte_lengths: Vec<u32>, end_of_text: u32) -> Self {
        Self { store: Arc::new(Store::Ids { loaded, byte_lengths }), end_of_text }
    }

    /// The ids of one plain text.
    pub fn plain(ids: Vec<u32>, byte_lengths: Vec<u32>, end_of_text: u32) -> Self {
        let length = |id: &u32| u64::from(byte_lengths.get(*id as usize).copied().unwrap_or(0));
        let text_bytes = ids.iter().map(length).sum();
        let loaded = Loaded { ids: Ids::Long(ids.into()), starts: Vec::new().into(), text_bytes };
        Self::ids(loaded, byte_lengths, end_of_text)
    }

    pub fn end_of_text(&self) -> u32 {
        self.end_of_text
    }

    /// Number of tokens, end-of-text tokens included.
    pub fn len(&self) -> usize {
        match &*self.store {
            Store::Bytes { text, ends, .. } => text.len() + if ends.is_empty() { 0 } else { ends.len() + 1 },
            Store::Ids { loaded, .. } => loaded.ids.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn document_count(&self) -> usize {
        match &*self.store {
            Store::Bytes { ends, .. } => ends.len(),
            Store::Ids { loaded, .. } => loaded.starts.len(),
        }
    }

    /// Whether windows start at documents.
    pub fn has_documents(&self) -> bool {
        self.document_count() > 0
    }

    /// The token at which document `d` starts, its end-of-text; for one more than there are, the last token of all.
    fn document_start(&self, d: usize) -> usize {
        match &*self.store {
            Store::Bytes { .. } if d == 0 => 0,
            Store::Bytes { ends, base, .. } => (ends[d - 1] - base) as usize + d,
            Store::Ids { loaded, .. } => loaded.starts.get(d).map_or(self.len() - 1, |start| *start as usize),
        }
    }

    /// The last document that starts at a token or before it; the number of documents for the last end-of-text.
    fn document_of(&self, token: usize) -> usize {
        let (mut low, mut high) = (0, self.document_count());
        while low < high {
            let middle = (low + high).div_ceil(2);
            if self.document_start(middle) <= token { low = middle } else { high = middle - 1 }
        }
        low
    }

    /// The token ranges of the documents: each with the end-of-text token before and after it, so neighbours share one.
    pub fn documents(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        (0..self.document_count()).map(|d| self.document_start(d)..self.document_start(d + 1) + 1)
    }

    /// The ids of a range.
    pub fn slice(&self, range: Range<usize>) -> Vec<u32> {
        let Store::Bytes { text, ends, .. } = &*self.store else {
            let Store::Ids { loaded, .. } = &*self.store else { unreachable!("there are two kinds") };
            return loaded.ids.slice(range);
        };
        if ends.is_empty() {
            return text[range].iter().map(|b| u32::from(*b)).collect();
        }
        let mut ids = Vec::with_capacity(range.len());
        // Document d stands at tokens `start(d) + 1` to `start(d + 1)`; its byte at token t is t - d - 1.
        let mut d = self.document_of(range.start);
        let mut at = range.start;
        while at < range.end {
            if at == self.document_start(d) {
                ids.push(self.end_of_text);
                at += 1;
                continue;
            }
            let stop = range.end.min(self.document_start(d + 1));
            ids.extend(text[at - d - 1..stop - d - 1].iter().map(|b| u32::from(*b)));
            at = stop;
            d += 1;
        }
        ids
    }

    /// Asks the system to have a range ready soon.
    pub fn prefetch(&self, range: Range<usize>) {
        match &*self.store {
            // Each document's end-of-text shifts the tokens behind the bytes.
            Store::Bytes { text, .. } if self.has_documents() => {
                let start = range.start.saturating_sub(self.document_of(range.start) + 1);
                text.prefetch(start..(start + range.len()).min(text.len()));
            }
            Store::Bytes { text, .. } => text.prefetch(range),
            Store::Ids { loaded, .. } => loaded.ids.prefetch(range),
        }
    }

    /// Bytes of text that the tokens of a range stand for; end-of-text stands for none.
    pub fn bytes_of(&self, range: Range<usize>) -> usize {
        match &*self.store {
            Store::Ids { byte_lengths, .. } => {
                let length = |id: &u32| byte_lengths.get(*id as usize).copied().unwrap_or(0) as usize;
                self.slice(range).iter().map(length).sum()
            }
            Store::Bytes { ends, .. } if ends.is_empty() => range.len(),
            Store::Bytes { .. } => self.slice(range).iter().filter(|id| **id != self.end_of_text).count(),
        }
    }

    /// Bytes of the text, end-of-text tokens not counted.
    pub fn text_bytes(&self) -> u64 {
        match &*self.store {
            Store::Bytes { text, .. } => text.len() as u64,
            Store::Ids { loaded, .. } => loaded.text_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_framed_by_end_of_text_in_every_store() {
        let eot = 256;
        let texts: [&[u8]; 4] = [b"ab", b"", b"cde", b"f"];
        let (mut text, mut ends, mut ids, mut starts) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for t in texts {
            text.extend_from_slice(t);
            // Ends count from before this text, as those of a part do.
            ends.push(10 + text.len() as u64);
            starts.push(ids.len() as u64);
            ids.push(eot);
            ids.extend(t.iter().map(|b| u32::from(*b)));
        }
        ids.push(eot);
        let short: Vec<u16> = ids.iter().map(|id| *id as u16).collect();
        let loaded = |ids| Loaded { ids, starts: starts.clone().into(), text_bytes: 6 };
        let bytes = Tokens::bytes(text, ends, 10, eot);
        let long = Tokens::ids(loaded(Ids::Long(ids.into())), vec![1; 256], eot);
        let short = Tokens::ids(loaded(Ids::Short(short.into())), vec![1; 256], eot);
        let all = [256, 97, 98, 256, 256, 99, 100, 101, 256, 102, 256];
        for tokens in [&bytes, &long, &short] {
            assert_eq!(tokens.len(), all.len());
            assert_eq!(tokens.documents().collect::<Vec<_>>(), [0..4, 3..5, 4..9, 8..11]);
            for start in 0..=all.len() {
                for end in start..=all.len() {
                    assert_eq!(tokens.slice(start..end), all[start..end], "{start}..{end}");
                    let text = all[start..end].iter().filter(|id| **id != eot).count();
                    assert_eq!(tokens.bytes_of(start..end), text);
                }
            }
        }
    }
}
