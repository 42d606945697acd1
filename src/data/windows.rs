//! Which tokens a training window holds: a pure function of the cursor, so that resuming needs one number.
//!
//! Called by the trainer's loop and, for held-out text, by eval. The cursor counts windows consumed; epoch and index follow
//! from it, a keyed permutation orders each epoch, and batch size or accumulation do not matter.

use std::ops::Range;

use super::tokens::Tokens;
use crate::random::{Permutation, Purpose, Stream};

/// A target that no loss counts (the same number as `ops::cross_entropy::IGNORE`; `eval` does not compile if they differ).
pub const IGNORE: u32 = u32::MAX;

/// Tokens and what follows each of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Window {
    pub inputs: Vec<u32>,
    pub targets: Vec<u32>,
    /// Bytes of raw text that the targets stand for; set for held-out windows.
    pub bytes: usize,
}

/// The order of training windows of `context` tokens over a split.
#[derive(Clone, Debug)]
pub struct Windows {
    tokens: Tokens,
    context: usize,
    seed: u64,
    /// Where the windows of documents start; empty for plain text, whose windows start at a new phase each epoch.
    starts: Vec<usize>,
    per_epoch: u64,
}

impl Windows {
    /// Needs at least one whole window of `context` + 1 tokens; `data::open` has checked that.
    pub fn new(tokens: &Tokens, context: usize, seed: u64) -> Self {
        let starts = if tokens.has_documents() { document_starts(tokens, context) } else { Vec::new() };
        let per_epoch = if starts.is_empty() {
            // One window less than fit, so that the phase has room for more than a context: an epoch leaves up to two
            // contexts less one at its ends out, and other epochs take them.
            ((tokens.len().saturating_sub(1)) / context).saturating_sub(1).max(1)
        } else {
            starts.len()
        };
        Self { tokens: tokens.clone(), context, seed, starts, per_epoch: per_epoch as u64 }
    }

    /// Windows that one pass over the data has, the same in every epoch.
    pub fn per_epoch(&self) -> u64 {
        self.per_epoch
    }

    /// Window number `cursor` of the run.
    pub fn window(&self, cursor: u64) -> Window {
        let (epoch, index) = (cursor / self.per_epoch, cursor % self.per_epoch);
        let index = Permutation::new(self.seed, epoch, self.per_epoch).at(index) as usize;
        if let Some(start) = self.starts.get(index) {
            return self.cut(*start);
        }
        let room = (self.tokens.len() - 1).saturating_sub(self.per_epoch as usize * self.context);
        // Every phase with room for all windows: a smaller range would never reach the end of the text.
        let phases = room as u64 + 1;
        let phase = u64::from(Stream::new(self.seed, Purpose::Phase).word(epoch, 0)) % phases;
        self.cut(index * self.context + phase as usize)
    }

    fn cut(&self, start: usize) -> Window {
        let end = (start + self.context + 1).min(self.tokens.len());
        let ids = self.tokens.slice(start..end);
        let mut window = Window { inputs: ids[..ids.len() - 1].to_vec(), targets: ids[1..].to_vec(), bytes: 0 };
        window.inputs.resize(self.context, 0);
        window.targets.resize(self.context, IGNORE);
        window
    }
}

/// Greedy: the next window starts at the first document that the last one did not hold whole, so nothing is lost; a
/// document longer than a window goes on where it was cut.
fn document_starts(tokens: &Tokens, context: usize) -> Vec<usize> {
    let mut starts = Vec::new();
    let mut documents = tokens.documents().peekable();
    let mut at = 0;
    while at + 1 < tokens.len() {
        starts.push(at);
        let end = at + context + 1;
        let mut next = None;
        while let Some(document) = documents.peek() {
            if document.end > end {
                next = (document.start > at).then_some(document.start);
                break;
            }
            documents.next();
        }
        at = match (next, documents.peek()) {
            (Some(start), _) => start,
            (None, Some(_)) => end - 1,
            (None, None) => break,
        };
    }
    starts
}

/// Held-out windows that predict every token once. Plain text: windows of `context`, the first token of the text having no
/// context and not being predicted. Documents: each alone, from the end-of-text token before it.
/// With a `stride` below the context, windows overlap and only the last `stride` targets of each count.
pub fn held_out(tokens: &Tokens, context: usize, stride: usize) -> impl Iterator<Item = Window> + '_ {
    let spans: Vec<Range<usize>> = match tokens.has_documents() {
        true => tokens.documents().collect(),
        false => std::iter::once(0..tokens.len()).filter(|s| s.len() > 1).collect(),
    };
    spans
        .into_iter()
        .flat_map(move |span| sliding(span, context, stride).map(|(window, from)| scored(tokens, window, from)))
}

/// (tokens of a window with the last target, first target that counts) over `span`, all targets of it once.
fn sliding(span: Range<usize>, context: usize, stride: usize) -> impl Iterator<Item = (Range<usize>, usize)> {
    let mut done = span.start + 1;
    std::iter::from_fn(move || {
        if done >= span.end {
            return None;
        }
        let from = done;
        // The first window is all new; later ones keep context - stride tokens of the past.
        let new = if from == span.start + 1 { context } else { stride };
        done = (from + new).min(span.end);
        let start = done.saturating_sub(context + 1).max(span.start);
        Some((start.min(from - 1)..done, from))
    })
}

fn scored(tokens: &Tokens, window: Range<usize>, from: usize) -> Window {
    let ids = tokens.slice(window.clone());
    let mut targets = ids[1..].to_vec();
    targets[..from - window.start - 1].fill(IGNORE);
    Window { inputs: ids[..ids.len() - 1].to_vec(), targets, bytes: tokens.bytes_of(from..window.end) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(n: usize) -> Tokens {
        Tokens::bytes((0..n).map(|i| (i % 251) as u8).collect(), Vec::new(), 256)
    }

    fn documents(lengths: &[usize]) -> Tokens {
        let text: Vec<u8> = lengths.iter().enumerate().flat_map(|(d, n)| vec![d as u8; *n]).collect();
        let ends = lengths
            .iter()
            .scan(0, |at, n| {
                *at += n;
                Some(*at)
            })
            .collect();
        Tokens::bytes(text, ends, 256)
    }

    /// A text in which every token tells its place.
    fn numbered(n: usize) -> Tokens {
        Tokens::ids(vec![(0..n as u32).collect()], false, 0, Vec::new())
    }

    #[test]
    fn an_epoch_of_plain_text_is_disjoint_and_epochs_differ() {
        for (n, context) in [(9, 8), (10, 8), (16, 8), (17, 8), (18, 8), (100, 8), (101, 7), (1000, 13), (50, 1)] {
            let windows = Windows::new(&numbered(n), context, 5);
            let epoch = |e: u64| -> Vec<Window> {
                (e * windows.per_epoch()..(e + 1) * windows.per_epoch()).map(|c| windows.window(c)).collect()
            };
            for e in 0..20 {
                let mut targets = Vec::new();
                for w in epoch(e) {
                    assert_eq!((w.inputs.len(), w.targets.len()), (context, context));
                    assert!(w.inputs.iter().zip(&w.targets).all(|(i, t)| i + 1 == *t), "what follows is the target");
                    targets.extend(w.targets);
                }
                let count = targets.len();
                targets.sort_unstable();
                targets.dedup();
                assert_eq!(targets.len(), count, "n {n}: a target twice in an epoch");
                assert!(n - 1 - count < 2 * context, "n {n}: an epoch leaves {} out", n - 1 - count);
            }
            assert_eq!(epoch(3), epoch(3));
            if windows.per_epoch() > 8 {
                assert_ne!(epoch(0), epoch(1), "epochs must differ");
            }
        }
    }

    #[test]
    fn every_token_of_a_plain_text_is_trained_on_in_some_epoch() {
        for (n, context) in [(9, 8), (15, 8), (16, 8), (23, 8), (24, 8), (25, 8), (103, 8)] {
            let windows = Windows::new(&numbered(n), context, 5);
            let mut seen = vec![false; n];
            for cursor in 0..windows.per_epoch() * 400 {
                windows.window(cursor).targets.iter().for_each(|t| seen[*t as usize] = true);
            }
            let never: Vec<usize> = (1..n).filter(|i| !seen[*i]).collect();
            assert!(never.is_empty(), "n {n}: never a target: {never:?}");
        }
    }

    #[test]
    fn windows_of_documents_start_at_one_and_lose_nothing() {
        for lengths in [vec![3, 4, 5], vec![20], vec![1, 0, 30, 2, 2, 2, 9], vec![8, 8, 8]] {
            let tokens = documents(&lengths);
            let windows = Windows::new(&tokens, 10, 1);
            let mut seen = vec![false; tokens.len()];
            for start in &windows.starts {
                (start + 1..(start + 11).min(tokens.len())).for_each(|i| seen[i] = true);
                let whole = tokens.documents().any(|d| d.start == *start);
                let inside = tokens.documents().any(|d| d.start < *start && d.len() > 11);
                assert!(whole || inside, "{lengths:?}: window at {start} starts inside a short document");
            }
            assert!(seen[1..].iter().all(|s| *s), "{lengths:?}: a token is never a target");
        }
    }

    #[test]
    fn held_out_windows_predict_every_token_once() {
        for tokens in [plain(2), plain(8), plain(9), plain(10), plain(57), documents(&[3, 12, 1, 30])] {
            for stride in [1, 3, 8] {
                let mut count = vec![0; tokens.len()];
                let mut bytes = 0;
                for window in held_out(&tokens, 8, stride) {
                    assert!(window.inputs.len() <= 8 && window.inputs.len() == window.targets.len());
                    bytes += window.bytes;
                    count[0] += window.targets.iter().filter(|t| **t != IGNORE).count();
                }
                let expected = if tokens.has_documents() {
                    tokens.documents().map(|d| d.len() - 1).sum()
                } else {
                    tokens.len() - 1
                };
                assert_eq!(count[0], expected);
                let text = if tokens.has_documents() { 46 } else { tokens.len() - 1 };
                assert_eq!(bytes, text);
            }
        }
        assert_eq!(held_out(&plain(0), 8, 8).count() + held_out(&plain(1), 8, 8).count(), 0);
    }
}
