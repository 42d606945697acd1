//! The three walks over a grammar: write a story, read one back, and measure the whole source.
//!
//! Called by the parent module. What must stay true: all three give an alternative the same probability. A fresh choice
//! has the probability of its alternative; a choice that is remembered is uniform over the entries of its list that no
//! other variable of the list holds. No probability depends on what a variable holds, so each variable is, by symmetry,
//! uniform over its list given everything else about the plot: this is why [`measure`] needs no sum over the variables.

use super::grammar::{Grammar, Rule, Symbol, VARIABLES};

/// What each variable holds: an alternative of its list.
#[derive(Clone, Copy, PartialEq)]
struct Memory([Option<u16>; VARIABLES]);

impl Memory {
    const EMPTY: Self = Self([None; VARIABLES]);

    /// The entries of a list that are taken, in increasing order and padded with `u16::MAX`, and how many they are.
    fn taken(&self, rule: &Rule) -> ([u16; VARIABLES], usize) {
        let mut taken = [u16::MAX; VARIABLES];
        let mut count = 0;
        for held in rule.variables.iter().filter_map(|&variable| self.0[variable]) {
            taken[count] = held;
            count += 1;
        }
        taken[..count].sort_unstable();
        (taken, count)
    }

    fn recall<'a>(&self, grammar: &'a Grammar, variable: usize, form: usize) -> &'a str {
        let held = self.0[variable].expect("the reader refuses a recall before the choice");
        &grammar.list(variable).alternatives[usize::from(held)].forms[form]
    }
}

/// Writes one story with random numbers from `draw`, each uniform in (0, 1). Gives its text and -log2 of the
/// probability.
pub fn write(grammar: &Grammar, draw: impl FnMut() -> f64) -> (String, f64) {
    let mut writer = Writer { grammar, draw, text: String::with_capacity(512), bits: 0.0, memory: Memory::EMPTY };
    writer.choose(0, None);
    (writer.text, writer.bits)
}

struct Writer<'a, D> {
    grammar: &'a Grammar,
    draw: D,
    text: String,
    bits: f64,
    memory: Memory,
}

impl<D: FnMut() -> f64> Writer<'_, D> {
    fn choose(&mut self, rule: usize, variable: Option<usize>) {
        let grammar = self.grammar;
        let rule = &grammar.rules[rule];
        let u = (self.draw)();
        let index = if let Some(variable) = variable {
            let (taken, count) = self.memory.taken(rule);
            let free = rule.alternatives.len() - count;
            self.bits += (free as f64).log2();
            let mut index = ((u * free as f64) as u16).min(free as u16 - 1);
            for &held in &taken[..count] {
                index += u16::from(held <= index);
            }
            self.memory.0[variable] = Some(index);
            usize::from(index)
        } else {
            let mut left = u;
            let at = rule.alternatives.iter().position(|alternative| {
                left -= alternative.probability;
                left < 0.0
            });
            // Rounding may leave the probabilities a hair below 1: the last alternative takes the hair.
            let index = at.unwrap_or(rule.alternatives.len() - 1);
            self.bits += rule.alternatives[index].bits;
            index
        };
        for symbol in &rule.alternatives[index].symbols {
            match symbol {
                Symbol::Text(text) => self.text.push_str(text),
                Symbol::Choose { rule, variable } => self.choose(*rule, *variable),
                Symbol::Recall { variable, form } => {
                    self.text.push_str(self.memory.recall(grammar, *variable, *form));
                }
                Symbol::End => {}
            }
        }
    }
}

/// -log2 of the probability of a text with its end; nothing if the grammar cannot write it.
///
/// At each choice at most one alternative matches what is left of the text, because the alternatives are prefix-free
/// (the tests prove it of the built-in grammar, with `check.rs`). So the first that matches is the only one, and a
/// choice once made is never taken back.
pub fn parse(grammar: &Grammar, text: &str) -> Option<f64> {
    let mut parser = Parser { grammar, bits: 0.0, memory: Memory::EMPTY };
    let rest = parser.choose(0, None, text)?;
    rest.is_empty().then_some(parser.bits)
}

struct Parser<'a> {
    grammar: &'a Grammar,
    bits: f64,
    memory: Memory,
}

impl Parser<'_> {
    /// What is left of the text after the alternative that matches its start.
    fn choose<'t>(&mut self, rule: usize, variable: Option<usize>, text: &'t str) -> Option<&'t str> {
        let grammar = self.grammar;
        let rule = &grammar.rules[rule];
        let (bits, memory) = (self.bits, self.memory);
        let (taken, count) = if variable.is_some() { memory.taken(rule) } else { ([0; VARIABLES], 0) };
        for (index, alternative) in rule.alternatives.iter().enumerate() {
            if taken[..count].contains(&(index as u16)) {
                continue;
            }
            if let Some(rest) = self.follow(&alternative.symbols, text) {
                if let Some(variable) = variable {
                    self.memory.0[variable] = Some(index as u16);
                    self.bits += ((rule.alternatives.len() - count) as f64).log2();
                } else {
                    self.bits += alternative.bits;
                }
                return Some(rest);
            }
            (self.bits, self.memory) = (bits, memory);
        }
        None
    }

    fn follow<'t>(&mut self, symbols: &[Symbol], mut text: &'t str) -> Option<&'t str> {
        for symbol in symbols {
            text = match symbol {
                Symbol::Text(expected) => text.strip_prefix(expected.as_str())?,
                Symbol::Choose { rule, variable } => self.choose(*rule, *variable, text)?,
                Symbol::Recall { variable, form } => {
                    text.strip_prefix(self.memory.recall(self.grammar, *variable, *form))?
                }
                Symbol::End if text.is_empty() => text,
                Symbol::End => return None,
            };
        }
        Some(text)
    }
}

/// What a piece of the grammar writes: its expected bits and bytes, and a number of bytes it never exceeds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Measure {
    pub bits: f64,
    pub bytes: f64,
    pub longest: usize,
}

/// The exact expectations of a whole story, by recursion over the grammar.
///
/// Bits: a choice adds its own entropy and the expectation of what it writes. Bytes: linear, with a recalled variable
/// uniform over its list. `longest` takes each piece at its longest, recalled words as well, so it bounds every story.
pub fn measure(grammar: &Grammar) -> Measure {
    measure_rule(grammar, 0, &mut 0)
}

/// `chosen` holds the variables chosen before, and afterwards those chosen by every alternative as well.
fn measure_rule(grammar: &Grammar, rule: usize, chosen: &mut u32) -> Measure {
    let mut sum = Measure::default();
    let mut common = u32::MAX;
    for alternative in &grammar.rules[rule].alternatives {
        let mut after = *chosen;
        let part = measure_symbols(grammar, &alternative.symbols, &mut after);
        sum.bits += alternative.probability * (alternative.bits + part.bits);
        sum.bytes += alternative.probability * part.bytes;
        sum.longest = sum.longest.max(part.longest);
        common &= after;
    }
    *chosen = common;
    sum
}

fn measure_symbols(grammar: &Grammar, symbols: &[Symbol], chosen: &mut u32) -> Measure {
    let mut sum = Measure::default();
    for symbol in symbols {
        let part = match symbol {
            Symbol::Text(text) => Measure { bits: 0.0, bytes: text.len() as f64, longest: text.len() },
            Symbol::Choose { rule, variable: None } => measure_rule(grammar, *rule, chosen),
            Symbol::Choose { rule, variable: Some(variable) } => {
                let rule = &grammar.rules[*rule];
                let taken = rule.variables.iter().filter(|&&sibling| *chosen >> sibling & 1 == 1).count();
                *chosen |= 1 << variable;
                Measure { bits: ((rule.alternatives.len() - taken) as f64).log2(), ..form_lengths(rule, 0) }
            }
            Symbol::Recall { variable, form } => form_lengths(grammar.list(*variable), *form),
            Symbol::End => Measure::default(),
        };
        sum.bits += part.bits;
        sum.bytes += part.bytes;
        sum.longest += part.longest;
    }
    sum
}

/// The bytes of one form of a list's words, uniform over the list.
fn form_lengths(rule: &Rule, form: usize) -> Measure {
    let lengths = rule.alternatives.iter().map(|alternative| alternative.forms[form].len());
    let mean = lengths.clone().sum::<usize>() as f64 / rule.alternatives.len() as f64;
    Measure { bits: 0.0, bytes: mean, longest: lengths.max().unwrap_or(0) }
}
