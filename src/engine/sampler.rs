//! From logits to a token: the filter chain of one row, and the noise that decides.
//!
//! Called by `Engine::advance`, once for each new token. The chain, in this order: logit bias, minimum length (no stop id
//! before it), repetition penalty, presence and frequency penalties, temperature, top-k, top-p, min-p; each works on
//! what the one before left. Then the token is the argmax of filtered logits / T + Gumbel noise, where the
//! noise is a function of (row seed, position, token id) and nothing else, so a token does not depend on how many
//! others survived or on who asks; ties take the lowest id. Temperature 0 is the argmax without noise and never sorts.
//! Padding ids of the vocabulary are tokens like all others. Gumbel-max: Maddison, Tarlow, Minka, "A* Sampling" (2014).

use crate::error::{Error, Result};
use crate::ops::decode::noise::{self, BLOCK};
use crate::ops::simd::{self, Family, simd_fn};
use crate::random::{Purpose, Stream};

/// How a row's tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Logits are divided by it; 0 takes the likeliest token.
    pub temperature: f32,
    /// Keeps the k likeliest tokens (ties: the lower id); 0 keeps all.
    pub top_k: usize,
    /// Keeps the fewest likeliest tokens whose probabilities reach it; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens at least this fraction as likely as the likeliest; 0 keeps all.
    pub min_p: f32,
    /// Positive logits of tokens in the history are divided by it, negative ones multiplied (CTRL, arXiv 1909.05858).
    pub repetition_penalty: f32,
    /// How many of the last tokens count as history for the penalties, the prompt included; `None` is all.
    pub repetition_window: Option<usize>,
    /// Subtracted from the logits of new tokens in the history.
    pub presence_penalty: f32,
    /// Subtracted from the logits of new tokens in the history, once for each time that they came up.
    pub frequency_penalty: f32,
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            repetition_window: Some(64),
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: 0,
        }
    }
}

impl Sampling {
    /// Temperature 0: always the likeliest token.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }

    /// Refuses values without a meaning; comparisons are written so that NaN is refused too.
    pub fn validate(&self) -> Result<()> {
        let refuse = |name: &str, value: f32, range: &str| {
            Err(Error::usage(format!("{name} {value} is out of range")).with_hint(format!("use {range}")))
        };
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return refuse("temperature", self.temperature, "0 (always the likeliest token) or more, for example 0.8");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return refuse("top-p", self.top_p, "more than 0 and at most 1 (off)");
        }
        if !(self.min_p >= 0.0 && self.min_p <= 1.0) {
            return refuse("min-p", self.min_p, "0 (off) to 1");
        }
        if !(self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite()) {
            return refuse("repetition penalty", self.repetition_penalty, "more than 0; 1 is off, 1.1 is usual");
        }
        for (name, value) in
            [("presence penalty", self.presence_penalty), ("frequency penalty", self.frequency_penalty)]
        {
            if !value.is_finite() {
                return refuse(name, value, "a number; 0 is off, 0.5 is usual");
            }
        }
        Ok(())
    }
}

/// Scratch of the chain, reused from token to token.
pub struct Sampler {
    family: Family,
    seen: Vec<bool>,
    /// Logit / T, less the largest, of the tokens that are left.
    left: Vec<(f32, u32)>,
}

impl Sampler {
    pub fn new(family: Family) -> Self {
        Self { family, seen: Vec::new(), left: Vec::new() }
    }

    /// The token at position `history.len()`, of which `prompt` were given, from its logits (V), which are overwritten.
    /// Settings must be valid.
    pub fn sample(&mut self, settings: &Sampling, history: &[u32], prompt: usize, logits: &mut [f32]) -> Result<u32> {
        let window = history.len().saturating_sub(settings.repetition_window.unwrap_or(history.len()));
        if settings.repetition_penalty != 1.0 {
            self.penalise(settings.repetition_penalty, &history[window..], logits);
        }
        if settings.presence_penalty != 0.0 || settings.frequency_penalty != 0.0 {
            self.discourage(settings, &history[window.max(prompt.min(history.len()))..], logits);
        }
        let (best, token) = argmax(self.family, logits);
        if !best.is_finite() {
            return Err(Error::failed("the model's output is not a number")
                .with_hint("its weights are damaged, or its training diverged: use an earlier checkpoint"));
        }
        if settings.temperature == 0.0 {
            return Ok(token);
        }
        logits.iter_mut().for_each(|x| *x = (*x - best) / settings.temperature);
        let noise = Noise {
            family: self.family,
            stream: Stream::new(settings.seed, Purpose::Sampling),
            position: history.len() as u64,
        };
        if settings.top_k == 0 && settings.top_p == 1.0 && settings.min_p == 0.0 {
            return Ok(noise.argmax(logits));
        }
        self.filter(settings, logits);
        Ok(noise.argmax_of(&self.left))
    }

    fn penalise(&mut self, penalty: f32, history: &[u32], logits: &mut [f32]) {
        self.seen.resize(logits.len(), false);
        for &id in history {
            let id = id as usize;
            if id < logits.len() && !std::mem::replace(&mut self.seen[id], true) {
                logits[id] = if logits[id] > 0.0 { logits[id] / penalty } else { logits[id] * penalty };
            }
        }
        history.iter().filter(|id| (**id as usize) < logits.len()).for_each(|id| self.seen[*id as usize] = false);
    }

    /// The presence and the frequency penalty for the new tokens of the history.
    fn discourage(&mut self, settings: &Sampling, new: &[u32], logits: &mut [f32]) {
        self.seen.resize(logits.len(), false);
        for &id in new {
            let id = id as usize;
            if id < logits.len() {
                let first = !std::mem::replace(&mut self.seen[id], true);
                logits[id] -= settings.frequency_penalty + if first { settings.presence_penalty } else { 0.0 };
            }
        }
        new.iter().filter(|id| (**id as usize) < logits.len()).for_each(|id| self.seen[*id as usize] = false);
    }

    /// Leaves in `left` what top-k, top-p and min-p keep of `scaled` (the largest is 0).
    fn filter(&mut self, settings: &Sampling, scaled: &[f32]) {
        let left = &mut self.left;
        left.clear();
        left.extend(scaled.iter().zip(0..).map(|(x, id)| (*x, id)));
        // Likeliest first, lower ids first among equals: a total order, so that every selection is unique.
        let order = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        if settings.top_k > 0 && settings.top_k < left.len() {
            left.select_nth_unstable_by(settings.top_k - 1, order);
            left.truncate(settings.top_k);
        }
        if settings.top_p < 1.0 {
            // Summed in the order of ids: what a selection leaves is not ordered.
            left.sort_unstable_by_key(|(_, id)| *id);
            let total: f64 = left.iter().map(|(x, _)| probability(*x)).sum();
            // Tokens below this are together lighter than what top-p cuts off: none of them is kept, or need be sorted.
            let least = (1.0 - f64::from(settings.top_p)) * total / (2 * left.len()) as f64;
            left.retain(|(x, _)| *x == 0.0 || probability(*x) >= least);
            left.sort_unstable_by(order);
            let (mut sum, target) = (0.0, f64::from(settings.top_p) * total);
            let enough = left.iter().position(|(x, _)| {
                sum += probability(*x);
                sum >= target
            });
            left.truncate(enough.map_or(left.len(), |last| last + 1));
        }
        if settings.min_p > 0.0 {
            left.retain(|(x, _)| probability(*x) >= f64::from(settings.min_p));
        }
    }
}

/// The log-probabilities of the `count` likeliest ids of logits (V), best first, and the logarithm of the sum that turns a
/// logit into one.
pub fn likeliest(logits: &[f32], count: usize) -> (Vec<(u32, f32)>, f32) {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - most).exp()).sum();
    let total = most + sum.ln() as f32;
    let mut all: Vec<(u32, f32)> = logits.iter().zip(0..).map(|(x, id)| (id, x - total)).collect();
    let order = |a: &(u32, f32), b: &(u32, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if count > 0 && count < all.len() {
        all.select_nth_unstable_by(count - 1, order);
    }
    all.truncate(count);
    all.sort_unstable_by(order);
    (all, total)
}

/// e^x, the same bits on every machine.
fn probability(x: f32) -> f64 {
    f64::from(simd::exp::<simd::Plain>(x))
}

/// The largest logit and its lowest id; NaN if any of them is NaN.
fn argmax(family: Family, logits: &[f32]) -> (f32, u32) {
    let (best, nan) = largest(family, logits);
    if nan {
        return (f32::NAN, 0);
    }
    (best, logits.iter().position(|x| *x == best).unwrap_or(0) as u32)
}

simd_fn! {
#[allow(clippy::extra_unused_type_parameters)] // Nothing is multiplied here.
fn largest<S>(x: &[f32]) -> (f32, bool) {
    let mut nan = false;
    for x in x {
        nan |= x.is_nan();
    }
    (simd::max(x), nan)
}
}

/// The noise of one row at one position.
struct Noise {
    family: Family,
    stream: Stream,
    position: u64,
}

impl Noise {
    /// Argmax of scaled logits of all ids plus noise.
    fn argmax(&self, scaled: &[f32]) -> u32 {
        let (mut best, mut token) = (f32::NEG_INFINITY, 0);
        let mut noise = [0f32; BLOCK];
        for (i, scaled) in scaled.chunks(BLOCK).enumerate() {
            let first = (i * BLOCK) as u32;
            noise::fill(self.family, self.stream, self.position, first, &mut noise);
            for ((x, noise), id) in scaled.iter().zip(&noise).zip(first..) {
                if x + noise > best {
                    (best, token) = (x + noise, id);
                }
            }
        }
        token
    }

    /// The same over some of the ids, in any order.
    fn argmax_of(&self, left: &[(f32, u32)]) -> u32 {
        let (mut best, mut token) = (f32::NEG_INFINITY, 0);
        for &(x, id) in left {
            let value = x + noise::gumbel(self.stream, self.position, id);
            if value > best || (value == best && id < token) {
                (best, token) = (value, id);
            }
        }
        token
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(settings: &Sampling, history: &[u32], logits: &[f32]) -> u32 {
        settings.validate().unwrap();
        Sampler::new(Family::detect()).sample(settings, history, 0, &mut logits.to_vec()).unwrap()
    }

    fn left(settings: Sampling, logits: &[f32]) -> Vec<u32> {
        let mut sampler = Sampler::new(Family::detect());
        sampler.sample(&settings, &[], 0, &mut logits.to_vec()).unwrap();
        let mut ids: Vec<u32> = sampler.left.iter().map(|(_, id)| *id).collect();
        ids.sort_unstable();
        ids
    }

    fn log(probabilities: &[f32]) -> Vec<f32> {
        probabilities.iter().map(|p| p.ln()).collect()
    }

    #[test]
    fn greedy_takes_the_lowest_of_equals_and_refuses_nan() {
        let greedy = Sampling::greedy();
        assert_eq!(sample(&greedy, &[], &[1.0, 3.0, 3.0, -1.0]), 1);
        assert_eq!(sample(&greedy, &[], &[-5.0, f32::NEG_INFINITY]), 0);
        let mut sampler = Sampler::new(Family::detect());
        for bad in [[0.0, f32::NAN, 1.0], [f32::NEG_INFINITY; 3], [0.0, f32::INFINITY, 0.0]] {
            assert!(sampler.sample(&greedy, &[], 0, &mut bad.to_vec()).is_err());
        }
    }

    #[test]
    fn top_k_of_one_is_greedy_at_any_temperature() {
        let logits: Vec<f32> = (0..100).map(|i| ((i * 37 % 101) as f32 * 0.1).sin()).collect();
        for seed in 0..20 {
            let settings = Sampling { top_k: 1, temperature: 5.0, seed, ..Sampling::default() };
            assert_eq!(sample(&settings, &[], &logits), sample(&Sampling::greedy(), &[], &logits));
        }
    }

    #[test]
    fn filters_keep_the_right_tokens() {
        let logits = log(&[0.1, 0.4, 0.05, 0.25, 0.2]);
        let all = Sampling::default();
        assert_eq!(left(Sampling { top_k: 3, ..all }, &logits), [1, 3, 4]);
        assert_eq!(left(Sampling { top_p: 0.6, ..all }, &logits), [1, 3]);
        assert_eq!(left(Sampling { top_p: 0.66, ..all }, &logits), [1, 3, 4]);
        assert_eq!(left(Sampling { top_p: 0.01, ..all }, &logits), [1]);
        assert_eq!(left(Sampling { min_p: 0.3, ..all }, &logits), [1, 3, 4]);
        assert_eq!(left(Sampling { min_p: 1.0, ..all }, &logits), [1]);
        // Top-p works on what top-k left: 0.4 of 0.65 is more than 0.6.
        assert_eq!(left(Sampling { top_k: 2, top_p: 0.6, ..all }, &logits), [1]);
        // Temperature comes first: at 0.5 the probabilities are squared.
        assert_eq!(left(Sampling { temperature: 0.5, min_p: 0.3, ..all }, &logits), [1, 3]);
        // Of equals the lower ids stay.
        assert_eq!(left(Sampling { top_k: 2, ..all }, &[1.0; 4]), [0, 1]);
        assert_eq!(left(Sampling { top_p: 0.5, ..all }, &[1.0; 4]), [0, 1]);
    }

    #[test]
    fn the_penalty_touches_each_token_of_its_window_once() {
        let greedy = Sampling { repetition_penalty: 2.0, repetition_window: Some(3), ..Sampling::greedy() };
        let logits = [4.0, 3.0, 1.9, -1.0];
        assert_eq!(sample(&greedy, &[], &logits), 0);
        assert_eq!(sample(&greedy, &[0], &logits), 1);
        assert_eq!(sample(&greedy, &[0, 3, 3, 3], &logits), 0, "0 has left the window");
        assert_eq!(sample(&greedy, &[0, 0, 1], &logits), 0, "halved once, 2.0 is still more than 1.9");
        let all = Sampling { repetition_window: None, ..greedy };
        assert_eq!(sample(&all, &[0, 3, 3, 3], &logits), 1);
        let negative = [-1.0, -1.5];
        assert_eq!(sample(&greedy, &[0], &negative), 1, "a negative logit is made more negative");
    }

    #[test]
    fn presence_and_frequency_count_new_tokens_only() {
        let mut sampler = Sampler::new(Family::detect());
        let mut after = |settings: Sampling, history: &[u32], prompt| {
            let mut logits = [1.0f32; 4];
            sampler.sample(&settings, history, prompt, &mut logits).unwrap();
            logits
        };
        let greedy = Sampling::greedy();
        let presence = Sampling { presence_penalty: 0.5, ..greedy };
        assert_eq!(after(presence, &[0, 1, 1, 2, 9], 1), [1.0, 0.5, 0.5, 1.0]);
        let frequency = Sampling { frequency_penalty: 0.25, ..greedy };
        assert_eq!(after(frequency, &[0, 1, 1, 2], 1), [1.0, 0.5, 0.75, 1.0]);
        assert_eq!(
            after(Sampling { repetition_window: Some(2), ..frequency }, &[0, 1, 1, 2], 1),
            [1.0, 0.75, 0.75, 1.0]
        );
        assert_eq!(after(presence, &[0, 1], 5), [1.0; 4]);
    }

    #[test]
    fn log_probabilities_are_sorted_and_sum_to_one() {
        let (all, total) = likeliest(&[1.0, 3.0, 3.0, -2.0], 9);
        assert_eq!(all.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 2, 0, 3]);
        assert!((all.iter().map(|(_, x)| x.exp()).sum::<f32>() - 1.0).abs() < 1e-6);
        assert_eq!(likeliest(&[1.0, 3.0, 3.0, -2.0], 2).0, all[..2]);
        assert_eq!(likeliest(&[1.0, 3.0, 3.0, -2.0], 0), (Vec::new(), total));
    }

    #[test]
    fn frequencies_are_those_of_the_softmax() {
        let probabilities = [0.5, 0.05, 0.2, 0.15, 0.1];
        let cases = [
            (Sampling::default(), probabilities),
            (Sampling { temperature: 0.5, ..Sampling::default() }, probabilities.map(|p| p * p)),
            (Sampling { top_k: 3, ..Sampling::default() }, [0.5, 0.0, 0.2, 0.15, 0.0]),
        ];
        for (settings, weights) in cases {
            let mut sampler = Sampler::new(Family::detect());
            let (n, mut counts) = (20_000u32, [0u32; 5]);
            let history = vec![0; n as usize];
            for t in 0..n {
                let mut logits = log(&probabilities);
                counts[sampler.sample(&settings, &history[..t as usize], 0, &mut logits).unwrap() as usize] += 1;
            }
            for (count, weight) in counts.iter().zip(weights) {
                let p = f64::from(weight / weights.iter().sum::<f32>());
                let sigma = (p * (1.0 - p) * f64::from(n)).sqrt();
                assert!((f64::from(*count) - p * f64::from(n)).abs() <= 4.0 * sigma, "{counts:?} for {weights:?}");
            }
        }
    }

    #[test]
    fn seeds_differ_and_a_filter_that_keeps_all_changes_nothing() {
        let logits = vec![0.0; 200];
        let draw = |seed, top_k| {
            let settings = Sampling { seed, top_k, ..Sampling::default() };
            (0..50).map(|t| sample(&settings, &vec![0; t], &logits)).collect::<Vec<_>>()
        };
        assert_ne!(draw(0, 0), draw(1, 0));
        assert_eq!(draw(0, 0), draw(0, 200));
    }

    #[test]
    fn values_without_meaning_are_refused() {
        let d = Sampling::default();
        let bad = [
            Sampling { temperature: -0.1, ..d },
            Sampling { temperature: f32::NAN, ..d },
            Sampling { temperature: f32::INFINITY, ..d },
            Sampling { top_p: 0.0, ..d },
            Sampling { top_p: 1.1, ..d },
            Sampling { top_p: f32::NAN, ..d },
            Sampling { min_p: -0.1, ..d },
            Sampling { min_p: 1.5, ..d },
            Sampling { repetition_penalty: 0.0, ..d },
            Sampling { repetition_penalty: f32::NAN, ..d },
        ];
        for settings in bad {
            assert_eq!(settings.validate().unwrap_err().exit_code(), 2, "{settings:?}");
        }
        d.validate().unwrap();
    }
}
