//! Speculation: tokens that a cheaper source proposes and the model confirms in one pass.
//!
//! Used by `Batch`. A draft model samples with the row's own settings and noise, so it proposes what the target would pick
//! wherever the two agree, and the confirmed text is the same with and without it, at every temperature. How many tokens
//! are proposed changes the speed only; it is chosen from the measured times and the rate of acceptance (Leviathan,
//! Kalman, Matias, "Fast inference from transformers via speculative decoding", 2023, for the trade-off).

use std::collections::HashMap;
use std::time::Instant;

use super::{Engine, MAX_PROPOSED, Row, RowSettings};
use crate::error::{Error, Result};

/// Where proposed tokens come from.
pub enum Source {
    /// A smaller model with the same tokenizer.
    Model(Box<Engine>),
    /// What followed the last tokens when they came up before.
    Ngram,
}

/// What speculation has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counts {
    pub proposed: usize,
    pub accepted: usize,
    /// Passes of the target, counted for each row.
    pub target_steps: usize,
}

/// A source with its rows and its experience.
pub struct Draft {
    source: Source,
    /// Proposals at a time; `None` chooses.
    tokens: Option<usize>,
    /// The draft model's row of each of the target's, by its number.
    rows: HashMap<usize, Row>,
    counts: Counts,
    /// The rate of acceptance lately.
    acceptance: f64,
    /// Seconds of one draft step and, by proposals a row, of a pass of the target, lately.
    draft_seconds: f64,
    target_seconds: [f64; MAX_PROPOSED + 1],
    /// Seconds a token without proposals, over all rows.
    plain_seconds: f64,
    rounds: usize,
}

/// The first rounds: without proposals, the first of them unmeasured since everything is cold, then with so many.
const PLAIN_ROUNDS: usize = 4;
const FIRST_ROUNDS: usize = 6;
const FIRST: usize = 4;
/// The most that is chosen.
const MOST: usize = 16;
/// Every so many rounds another number than the best is tried, since times and texts change.
const TRIAL: usize = 32;

impl Draft {
    /// The draft model, if it is one.
    pub fn engine(&mut self) -> Option<&mut Engine> {
        match &mut self.source {
            Source::Model(engine) => Some(engine),
            Source::Ngram => None,
        }
    }

    /// `tokens` proposals at a time, or as many as pay off.
    pub fn new(source: Source, tokens: Option<usize>) -> Result<Self> {
        if let Some(tokens) = tokens.filter(|tokens| !(1..=MAX_PROPOSED).contains(tokens)) {
            let what = format!("{tokens} draft tokens at a time are not possible");
            return Err(Error::usage(what).with_hint(format!("use 1 to {MAX_PROPOSED}")));
        }
        Ok(Self {
            source,
            tokens,
            rows: HashMap::new(),
            counts: Counts::default(),
            acceptance: 0.7,
            draft_seconds: 0.0,
            target_seconds: [0.0; MAX_PROPOSED + 1],
            plain_seconds: 0.0,
            rounds: 0,
        })
    }

    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Tokens of a row a second without proposals, if that was measured.
    pub fn plain_rate(&self) -> Option<f64> {
        Some(self.plain_seconds).filter(|seconds| *seconds > 0.0).map(|seconds| 1.0 / seconds)
    }

    /// Memory of the draft's keys and values.
    pub fn cache_bytes(&self) -> usize {
        self.rows.values().map(Row::cache_bytes).sum()
    }

    /// Gives every row one token or more, as `Engine::advance` does. Rows come with their number, which stays theirs, and the
    /// tokens that they still may get, at least one.
    pub fn advance(&mut self, target: &mut Engine, rows: &mut [(usize, usize, &mut Row)]) -> Result<()> {
        let wanted = self.tokens.unwrap_or_else(|| self.choose());
        let start = Instant::now();
        let proposed = self.propose(wanted, rows)?;
        let longest = proposed.iter().map(Vec::len).max().unwrap_or(0);
        if longest > 0 {
            smooth(&mut self.draft_seconds, start.elapsed().as_secs_f64() / longest as f64);
        }
        let start = Instant::now();
        let pending: usize = rows.iter().map(|(.., row)| row.pending()).sum();
        let mut refs: Vec<&mut Row> = rows.iter_mut().map(|(.., row)| &mut **row).collect();
        let taken = target.advance(&mut refs, &proposed)?;
        if pending == rows.len() && self.rounds > 0 {
            let seconds = start.elapsed().as_secs_f64();
            smooth(&mut self.target_seconds[longest], seconds);
            if longest == 0 {
                smooth(&mut self.plain_seconds, seconds / rows.len() as f64);
            }
        }
        self.counts.target_steps += rows.len();
        for (taken, proposed) in taken.iter().zip(&proposed).filter(|(_, proposed)| !proposed.is_empty()) {
            self.counts.accepted += taken;
            self.counts.proposed += proposed.len();
            // The ones after a refused one were not judged.
            let judged = (taken + 1).min(proposed.len());
            let weight = (0.04 * judged as f64).min(0.5);
            self.acceptance += weight * (*taken as f64 / judged as f64 - self.acceptance);
        }
        self.rounds += 1;
        Ok(())
    }

    /// A row that will not come again.
    pub fn forget(&mut self, number: usize) {
        self.rows.remove(&number);
    }

    /// No row will come again; the numbers are free.
    pub fn forget_all(&mut self) {
        self.rows.clear();
        self.counts = Counts::default();
    }

    /// Up to `wanted` tokens for each row.
    fn propose(&mut self, wanted: usize, rows: &[(usize, usize, &mut Row)]) -> Result<Vec<Vec<u32>>> {
        let room = |left: usize| wanted.min(left - 1);
        let Source::Model(engine) = &mut self.source else {
            return Ok(rows.iter().map(|(_, left, row)| repeated(row.ids(), room(*left))).collect());
        };
        let mut proposed = vec![Vec::new(); rows.len()];
        for (number, _, row) in rows.iter().filter(|(_, left, _)| room(*left) > 0) {
            follow(engine, &mut self.rows, *number, row)?;
        }
        for round in 0..wanted {
            let on = |i: usize, proposed: &[Vec<u32>]| {
                room(rows[i].1) > round && proposed[i].len() == round && !ended(&proposed[i], rows[i].2.settings())
            };
            let going: Vec<usize> = (0..rows.len()).filter(|i| on(*i, &proposed)).collect();
            if going.is_empty() {
                break;
            }
            let mut numbered: Vec<(usize, Row)> = Vec::with_capacity(going.len());
            for i in &going {
                numbered.push((*i, self.rows.remove(&rows[*i].0).expect("followed above")));
            }
            let stepped = engine.step(&mut numbered.iter_mut().map(|(_, row)| row).collect::<Vec<_>>());
            for (i, row) in numbered {
                self.rows.insert(rows[i].0, row);
            }
            going.iter().zip(stepped?).for_each(|(i, id)| proposed[*i].push(id));
        }
        Ok(proposed)
    }

    /// How many proposals make the most tokens a second, by what was measured.
    fn choose(&self) -> usize {
        if self.rounds < PLAIN_ROUNDS + FIRST_ROUNDS {
            return if self.rounds < PLAIN_ROUNDS { 0 } else { FIRST };
        }
        let rate = |tokens: usize| {
            let expected: f64 = (0..=tokens as i32).map(|i| self.acceptance.powi(i)).sum();
            expected / (self.target_seconds_for(tokens) + tokens as f64 * self.draft_seconds)
        };
        let best = (0..=MOST).max_by(|a, b| rate(*a).total_cmp(&rate(*b))).unwrap_or(FIRST);
        match (self.rounds % TRIAL, self.rounds / TRIAL % 3) {
            (0, 0) => 0,
            (0, 1) => (best + 2).min(MOST),
            (0, _) => best.saturating_sub(2),
            _ => best,
        }
    }

    /// The time of a pass with so many proposals a row: measured, or on the line through the two measured numbers around it.
    fn target_seconds_for(&self, tokens: usize) -> f64 {
        let measured = |tokens: &usize| self.target_seconds[*tokens] > 0.0;
        let seconds = |tokens: usize| self.target_seconds[tokens];
        if measured(&tokens) {
            return seconds(tokens);
        }
        let below: Vec<usize> = (0..tokens).rev().filter(measured).take(2).collect();
        let above = (tokens + 1..=MAX_PROPOSED).find(measured);
        match (below[..].first(), above.or(below.get(1).copied())) {
            (Some(&a), Some(b)) => {
                let slope = (seconds(b) - seconds(a)) / (b as f64 - a as f64);
                // More tokens never take less time.
                seconds(a) + slope.max(0.0) * (tokens as f64 - a as f64)
            }
            (Some(&a), None) => seconds(a),
            (None, Some(b)) => seconds(b),
            (None, None) => f64::MAX,
        }
    }
}

/// Brings the draft's row up to the target's.
fn follow(engine: &mut Engine, rows: &mut HashMap<usize, Row>, number: usize, target: &Row) -> Result<()> {
    if let Some(row) = rows.get_mut(&number) {
        if row.follow(target.ids()).is_ok() {
            return Ok(());
        }
        rows.remove(&number);
    }
    // The draft's own context and no record of what it thought.
    let settings = RowSettings { logprobs: None, ..target.settings().clone() };
    let mut row = engine.row(&target.ids()[..target.prompt_len()], settings)?;
    row.follow(target.ids())?;
    rows.insert(number, row);
    Ok(())
}

fn ended(ids: &[u32], settings: &RowSettings) -> bool {
    ids.last().is_some_and(|id| settings.stop.contains(id))
}

fn smooth(average: &mut f64, seconds: f64) {
    *average = if *average == 0.0 { seconds } else { *average + 0.2 * (seconds - *average) };
}

/// Tokens that `repeated` looks back, so that it takes as long in a long text as in a short one.
const LOOK_BACK: usize = 4096;

/// What followed the last three, two or one tokens when they came up last before, up to `count` tokens.
fn repeated(ids: &[u32], count: usize) -> Vec<u32> {
    let ids = &ids[ids.len().saturating_sub(LOOK_BACK)..];
    for len in (1..=3.min(ids.len().saturating_sub(1))).rev() {
        let (earlier, tail) = (&ids[..ids.len() - 1], &ids[ids.len() - len..]);
        if let Some(at) = earlier.windows(len).rposition(|window| window == tail) {
            let after = &ids[at + len..];
            return after[..count.min(after.len())].to_vec();
        }
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_proposals_follows_times_and_acceptance() {
        let mut draft = Draft::new(Source::Ngram, None).unwrap();
        draft.rounds = 101;
        (draft.target_seconds[0], draft.target_seconds[4], draft.draft_seconds) = (1.0, 1.2, 0.05);
        assert!((draft.target_seconds_for(2) - 1.1).abs() < 1e-9 && (draft.target_seconds_for(8) - 1.4).abs() < 1e-9);
        let mut choices = [0.05, 0.5, 0.8, 0.95].map(|acceptance| {
            draft.acceptance = acceptance;
            draft.choose()
        });
        assert!(choices[0] == 0 && choices.is_sorted() && choices[3] > 8, "{choices:?}");
        // A draft that takes as long as the model is of no use.
        draft.draft_seconds = 1.0;
        choices[0] = draft.choose();
        assert_eq!(choices[0], 0);
    }

    #[test]
    fn the_last_earlier_occurrence_of_the_longest_end_is_continued() {
        assert_eq!(repeated(&[1, 2, 3, 9, 1, 2, 3, 8, 7, 1, 2, 3], 2), [8, 7]);
        assert_eq!(repeated(&[5, 1, 5, 2, 5], 3), [2, 5]);
        assert_eq!(repeated(&[4, 4], 3), [4]);
        assert!(repeated(&[1, 2, 3], 4).is_empty() && repeated(&[1], 4).is_empty() && repeated(&[1, 1], 0).is_empty());
    }
}
