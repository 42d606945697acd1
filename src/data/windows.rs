//! Which tokens a training window holds: a pure function of the cursor, so that resuming needs one number.
//!
//! Called by the trainer's loop and, for held-out text, by eval. The cursor counts windows consumed; source, epoch and index
//! follow from it, a keyed permutation orders each epoch, and batch size or accumulation do not matter.

use std::ops::Range;

use super::Pack;
use super::tokens::Tokens;
use crate::random::{Permutation, Purpose, Stream};

/// A target that no loss counts (the same number as `ops::cross_entropy::IGNORE`; `eval` does not compile if they differ).
pub const IGNORE: u32 = u32::MAX;

/// Tokens and what follows each of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Window {
    pub inputs: Vec<u32>,
    pub targets: Vec<u32>,
    /// For each token, where in the window the document that it sees begins; none if it sees all before it.
    pub starts: Option<Vec<u32>>,
    /// Bytes of raw text that the targets stand for; set for held-out windows.
    pub bytes: usize,
}

/// The order of training windows over one source or a mixture of them.
#[derive(Clone, Debug)]
pub struct Windows {
    sources: Vec<Order>,
    /// For each source its share of the windows that the sources before it leave, in 2^32ths.
    shares: Vec<u64>,
    per_epoch: u64,
}

impl Windows {
    /// Windows of `context` tokens from sources with weights; where a source has none, each of its windows counts the same
    /// as every other. Each source needs at least one whole window of `context` + 1 tokens; `data::require_window` says so.
    pub fn new(sources: &[(&Tokens, Option<f64>)], context: usize, seed: u64, pack: Pack) -> Self {
        let orders: Vec<Order> = sources.iter().map(|(tokens, _)| Order::new(tokens, context, seed, pack)).collect();
        let windows = |order: &Order| order.per_epoch as f64;
        let weights: Vec<f64> =
            sources.iter().zip(&orders).map(|((_, w), order)| w.unwrap_or(windows(order))).collect();
        let shares = (0..weights.len()).map(|i| {
            let rest: f64 = weights[i..].iter().sum();
            (weights[i] / rest * (1u64 << 32) as f64).round() as u64
        });
        let shares: Vec<u64> = shares.collect();
        let total: f64 = weights.iter().sum();
        // Until each source was seen whole.
        let passes = orders.iter().zip(&weights).map(|(order, weight)| windows(order) * total / weight);
        let per_epoch = passes.fold(1.0, f64::max).round() as u64;
        Self { sources: orders, shares, per_epoch }
    }

    /// Windows that one pass over the data has, the same in every epoch; of a mixture, until each source was seen whole.
    pub fn per_epoch(&self) -> u64 {
        self.per_epoch
    }

    /// Window number `cursor` of the run.
    pub fn window(&self, cursor: u64) -> Window {
        let (source, index) = self.source(cursor);
        source.cut(source.start(index))
    }

    /// Asks the system to have the tokens of these windows ready soon.
    pub fn prefetch(&self, cursors: Range<u64>) {
        for (source, index) in cursors.map(|cursor| self.source(cursor)) {
            let start = source.start(index);
            source.tokens.prefetch(start..(start + source.context + 1).min(source.tokens.len()));
        }
    }

    /// Whose window it is, and which of its windows. Error diffusion: after n windows each source has had its share of n to
    /// within one, and how many that are follows from n alone.
    fn source(&self, cursor: u64) -> (&Order, u64) {
        let mut index = cursor;
        for (source, share) in self.sources.iter().zip(&self.shares) {
            let taken = |n: u64| ((u128::from(n) * u128::from(*share) + (1 << 31)) >> 32) as u64;
            let before = taken(index);
            if taken(index + 1) > before {
                return (source, before);
            }
            index -= before;
        }
        // The last share is the whole: only a rounded one ends here.
        (self.sources.last().expect("there is a source"), index)
    }
}

/// The order of the windows of one source.
#[derive(Clone, Debug)]
struct Order {
    tokens: Tokens,
    context: usize,
    seed: u64,
    pack: Pack,
    /// Where the windows of documents start; empty for plain text, whose windows start at a new phase each epoch.
    starts: Vec<usize>,
    per_epoch: u64,
}

impl Order {
    fn new(tokens: &Tokens, context: usize, seed: u64, pack: Pack) -> Self {
        let starts = match (tokens.has_documents(), pack) {
            (false, _) => Vec::new(),
            (true, Pack::Off) => apart(tokens, context),
            (true, Pack::Across | Pack::Within) => document_starts(tokens, context),
        };
        let per_epoch = if starts.is_empty() {
            // One window less than fit, so that the phase has room for more than a context: an epoch leaves up to two
            // contexts less one at its ends out, and other epochs take them.
            ((tokens.len().saturating_sub(1)) / context).saturating_sub(1).max(1)
        } else {
            starts.len()
        };
        Self { tokens: tokens.clone(), context, seed, pack, starts, per_epoch: per_epoch as u64 }
    }

    /// The first token of the source's window number `cursor`.
    fn start(&self, cursor: u64) -> usize {
        let (epoch, index) = (cursor / self.per_epoch, cursor % self.per_epoch);
        let index = Permutation::new(self.seed, epoch, self.per_epoch).at(index) as usize;
        if let Some(start) = self.starts.get(index) {
            return *start;
        }
        let room = (self.tokens.len() - 1).saturating_sub(self.per_epoch as usize * self.context);
        // Every phase with room for all windows: a smaller range would never reach the end of the text.
        let phases = room as u64 + 1;
        let phase = u64::from(Stream::new(self.seed, Purpose::Phase).word(epoch, 0)) % phases;
        index * self.context + phase as usize
    }

    fn cut(&self, start: usize) -> Window {
        let end = (start + self.context + 1).min(self.tokens.len());
        let mut ids = self.tokens.slice(start..end);
        if self.pack == Pack::Off && self.tokens.has_documents() {
            // The next document's end-of-text is the last target of this one.
            let next = ids[1..].iter().position(|id| *id == self.tokens.end_of_text());
            ids.truncate(next.map_or(ids.len(), |at| at + 2));
        }
        let starts = (self.pack == Pack::Within).then(|| self.document_starts(&ids));
        let mut window = Window { inputs: ids[..ids.len() - 1].to_vec(), targets: ids[1..].to_vec(), starts, bytes: 0 };
        window.inputs.resize(self.context, 0);
        window.targets.resize(self.context, IGNORE);
        window
    }

    /// For each of `context` tokens, where its document begins. What fills a window up belongs to the last one.
    fn document_starts(&self, ids: &[u32]) -> Vec<u32> {
        let documents = self.tokens.has_documents();
        let mut start = 0;
        let begins = |i: usize| documents && ids[..ids.len() - 1].get(i) == Some(&self.tokens.end_of_text());
        let starts = (0..self.context).map(|i| {
            start = if begins(i) { i as u32 } else { start };
            start
        });
        starts.collect()
    }
}

/// Each document by itself; one longer than a window goes on where it was cut.
fn apart(tokens: &Tokens, context: usize) -> Vec<usize> {
    tokens.documents().flat_map(|d| (d.start..d.end - 1).step_by(context)).collect()
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
    Window { inputs: ids[..ids.len() - 1].to_vec(), targets, starts: None, bytes: tokens.bytes_of(from..window.end) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(n: usize) -> Tokens {
        Tokens::bytes((0..n).map(|i| (i % 251) as u8).collect::<Vec<u8>>(), Vec::new(), 0, 256)
    }

    fn documents(lengths: &[usize]) -> Tokens {
        let text: Vec<u8> = lengths.iter().enumerate().flat_map(|(d, n)| vec![d as u8; *n]).collect();
        let ends = lengths.iter().scan(0, |at, n| {
            *at += *n as u64;
            Some(*at)
        });
        let ends: Vec<u64> = ends.collect();
        Tokens::bytes(text, ends, 0, 256)
    }

    /// A text in which every token tells its place.
    fn numbered(n: usize) -> Tokens {
        Tokens::plain((0..n as u32).collect(), Vec::new(), u32::MAX)
    }

    #[test]
    fn an_epoch_of_plain_text_is_disjoint_and_epochs_differ() {
        for (n, context) in [(9, 8), (10, 8), (16, 8), (17, 8), (18, 8), (100, 8), (101, 7), (1000, 13), (50, 1)] {
            let windows = Windows::new(&[(&numbered(n), None)], context, 5, Pack::Across);
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
            let windows = Windows::new(&[(&numbered(n), None)], context, 5, Pack::Across);
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
            let windows = Windows::new(&[(&tokens, None)], 10, 1, Pack::Across);
            let mut seen = vec![false; tokens.len()];
            for start in &windows.sources[0].starts {
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

    #[test]
    fn a_mixture_gives_every_source_its_share_at_every_moment() {
        let texts = [numbered(1000), numbered(500), numbered(300)];
        let windows = |weights: [Option<f64>; 3]| {
            let sources: Vec<_> = texts.iter().zip(weights).collect();
            Windows::new(&sources, 10, 3, Pack::Across)
        };
        let mixed = windows([Some(0.5), Some(0.3), Some(0.2)]);
        let mut taken = [0u64; 3];
        for cursor in 0..5000 {
            let (source, index) = mixed.source(cursor);
            let which = texts.iter().position(|t| t.len() == source.tokens.len()).unwrap();
            assert_eq!(index, taken[which], "each source's windows come in its own order");
            taken[which] += 1;
            for (count, share) in taken.iter().zip([0.5, 0.3, 0.2]) {
                assert!((*count as f64 - share * (cursor + 1) as f64).abs() <= 1.5, "{taken:?} after {cursor}");
            }
        }
        // 98 windows at half of all: 196; 48 at 0.3: 160; 28 at a fifth: 140.
        assert_eq!(mixed.per_epoch(), 196);
        let even = windows([None; 3]);
        assert_eq!(even.per_epoch(), 98 + 48 + 28);
        let of_first = (0..even.per_epoch()).filter(|c| even.source(*c).0.tokens.len() == 1000).count();
        assert!(of_first.abs_diff(98) <= 1, "{of_first}");
    }

    #[test]
    fn documents_stay_apart_or_are_told_apart() {
        let tokens = documents(&[3, 4, 25, 1]);
        let windows = |pack| Windows::new(&[(&tokens, None)], 10, 1, pack);
        let apart = windows(Pack::Off);
        // 4 and 5 tokens, 26 in three windows, 2.
        assert_eq!(apart.per_epoch(), 6);
        let mut targets = 0;
        for window in (0..6).map(|c| apart.window(c)) {
            let texts: std::collections::BTreeSet<_> = window.inputs.iter().zip(&window.targets).collect();
            let inside = texts.iter().filter(|(_, t)| **t != IGNORE && **t != 256).map(|(_, t)| **t);
            assert_eq!(inside.collect::<std::collections::BTreeSet<u32>>().len(), 1, "one document: {window:?}");
            targets += window.targets.iter().filter(|t| **t != IGNORE).count();
        }
        assert_eq!(targets, tokens.len() - 1, "every token is a target once");
        for cursor in 0..20 {
            let (across, within) = (windows(Pack::Across).window(cursor), windows(Pack::Within).window(cursor));
            assert_eq!((across.inputs, across.targets, None), (within.inputs.clone(), within.targets, across.starts));
            let starts = within.starts.unwrap();
            for (i, start) in starts.iter().enumerate() {
                let own = (0..=i).rev().find(|i| within.inputs[*i] == 256).unwrap_or(0);
                assert_eq!(*start as usize, own, "token {i} of {:?}", within.inputs);
            }
        }
    }
}
