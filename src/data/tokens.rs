//! One split of a corpus as token ids, cheap to clone and to slice.
//!
//! Byte data stays the text itself with document ends beside it; ids are made per window. Between documents stands the
//! end-of-text token, and one stands before the first, so that every document begins after one.

use std::ops::Range;
use std::sync::Arc;

#[derive(Clone, Debug)]
pub struct Tokens {
    store: Arc<Store>,
}

#[derive(Debug)]
enum Store {
    /// Text, the ends of its documents in it (none for plain text), and the end-of-text id.
    Bytes { text: Vec<u8>, ends: Vec<usize>, end_of_text: u32 },
    /// Ids with end-of-text tokens in place, the bytes each id stands for, and where documents start.
    Ids { ids: Vec<u32>, byte_lengths: Vec<u32>, starts: Vec<usize> },
}

impl Tokens {
    /// Bytes as ids; `ends` are the document ends in `text`, increasing, or none for plain text.
    pub fn bytes(text: Vec<u8>, ends: Vec<usize>, end_of_text: u32) -> Self {
        Self { store: Arc::new(Store::Bytes { text, ends, end_of_text }) }
    }

    /// Ids of each document, or of one plain text; `byte_lengths[id]` is how many bytes a token stands for.
    pub fn ids(documents: Vec<Vec<u32>>, separate: bool, end_of_text: u32, byte_lengths: Vec<u32>) -> Self {
        let (mut ids, mut starts) = (Vec::new(), Vec::new());
        for document in documents {
            if separate {
                starts.push(ids.len());
                ids.push(end_of_text);
            }
            ids.extend(document);
        }
        if separate {
            ids.push(end_of_text);
        }
        Self { store: Arc::new(Store::Ids { ids, byte_lengths, starts }) }
    }

    /// Number of tokens, end-of-text tokens included.
    pub fn len(&self) -> usize {
        match &*self.store {
            Store::Bytes { text, ends, .. } => text.len() + if ends.is_empty() { 0 } else { ends.len() + 1 },
            Store::Ids { ids, .. } => ids.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether windows start at documents.
    pub fn has_documents(&self) -> bool {
        match &*self.store {
            Store::Bytes { ends, .. } => !ends.is_empty(),
            Store::Ids { starts, .. } => !starts.is_empty(),
        }
    }

    /// The token ranges of the documents: each with the end-of-text token before and after it, so neighbours share one.
    pub fn documents(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let count = match &*self.store {
            Store::Bytes { ends, .. } => ends.len(),
            Store::Ids { starts, .. } => starts.len(),
        };
        (0..count).map(move |d| match &*self.store {
            Store::Bytes { ends, .. } => (if d == 0 { 0 } else { ends[d - 1] + d })..ends[d] + d + 2,
            Store::Ids { ids, starts, .. } => starts[d]..starts.get(d + 1).map_or(ids.len(), |next| next + 1),
        })
    }

    /// The ids of a range.
    pub fn slice(&self, range: Range<usize>) -> Vec<u32> {
        match &*self.store {
            Store::Ids { ids, .. } => ids[range].to_vec(),
            Store::Bytes { text, ends, .. } if ends.is_empty() => text[range].iter().map(|b| u32::from(*b)).collect(),
            Store::Bytes { text, ends, end_of_text } => {
                let mut ids = Vec::with_capacity(range.len());
                // Document d holds tokens from its end-of-text at `starts(d)` on; find the first that reaches into the range.
                let mut document = partition(ends.len(), |d| ends[d] + d < range.start);
                let mut at = range.start;
                while at < range.end {
                    let start = if document == 0 { 0 } else { ends[document - 1] + document };
                    if at == start {
                        ids.push(*end_of_text);
                        at += 1;
                        continue;
                    }
                    // Token t of document d is byte t - d - 1.
                    let stop = range.end.min(ends[document] + document + 1);
                    ids.extend(text[at - document - 1..stop - document - 1].iter().map(|b| u32::from(*b)));
                    at = stop;
                    document += 1;
                    if document == ends.len() && at < range.end {
                        ids.push(*end_of_text);
                        at += 1;
                    }
                }
                ids
            }
        }
    }

    /// Bytes of text that the tokens of a range stand for; end-of-text stands for none.
    pub fn bytes_of(&self, range: Range<usize>) -> usize {
        match &*self.store {
            Store::Ids { ids, byte_lengths, .. } => {
                ids[range].iter().map(|id| byte_lengths.get(*id as usize).copied().unwrap_or(0) as usize).sum()
            }
            Store::Bytes { ends, .. } if ends.is_empty() => range.len(),
            Store::Bytes { end_of_text, .. } => self.slice(range).iter().filter(|id| *id != end_of_text).count(),
        }
    }

    /// Bytes of the text, end-of-text tokens not counted.
    pub fn text_bytes(&self) -> u64 {
        match &*self.store {
            Store::Bytes { text, .. } => text.len() as u64,
            Store::Ids { .. } => self.bytes_of(0..self.len()) as u64,
        }
    }
}

/// The first index in 0..n for which `before` is false.
fn partition(n: usize, before: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, n);
    while low < high {
        let middle = (low + high) / 2;
        if before(middle) { low = middle + 1 } else { high = middle }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_are_framed_by_end_of_text_in_both_stores() {
        let eot = 256;
        let texts: [&[u8]; 4] = [b"ab", b"", b"cde", b"f"];
        let mut text = Vec::new();
        let mut ends = Vec::new();
        for t in texts {
            text.extend_from_slice(t);
            ends.push(text.len());
        }
        let ids = texts.iter().map(|t| t.iter().map(|b| u32::from(*b)).collect()).collect();
        let bytes = Tokens::bytes(text, ends, eot);
        let ids = Tokens::ids(ids, true, eot, vec![1; 256]);
        let all = [256, 97, 98, 256, 256, 99, 100, 101, 256, 102, 256];
        for tokens in [&bytes, &ids] {
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
