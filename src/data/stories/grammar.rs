//! The grammar of the stories as data, and the reader of its notation (explained at the top of `grammar.txt`).
//!
//! Called by the parent module once, and by tests with small grammars. What must stay true of every grammar that
//! [`read`] returns: no rule contains itself; every recalled variable has been chosen before on every path; a variable
//! is chosen once in a story, always from the same word list; two variables of one list never hold the same entry; the
//! lists that variables are chosen from have plain words with equal weights. [`super::walk`] relies on each of these
//! for its exact probabilities, `check.rs` for its proof that every text has one derivation.

use std::collections::HashMap;

/// The most variables a grammar may have; a story's memory is an array of this size.
pub const VARIABLES: usize = 16;

/// What an alternative is made of.
#[derive(Clone, Debug, PartialEq)]
pub enum Symbol {
    /// These bytes.
    Text(String),
    /// One alternative of a rule, kept in a variable if the story comes back to it.
    Choose { rule: usize, variable: Option<usize> },
    /// What a variable holds, in one of its forms (see [`Alternative::forms`]).
    Recall { variable: usize, form: usize },
    /// The end of the story: no bytes of its text, but a symbol of its own to a parser and to a model.
    End,
}

/// One way to expand a rule.
#[derive(Clone, Debug)]
pub struct Alternative {
    pub probability: f64,
    /// -log2 of the probability.
    pub bits: f64,
    pub symbols: Vec<Symbol>,
    /// Of a word: itself, then the forms its list declares, then all of these again with a capital letter.
    pub forms: Vec<String>,
}

/// A named choice point.
#[derive(Clone, Debug)]
pub struct Rule {
    pub name: String,
    pub alternatives: Vec<Alternative>,
    /// The variables chosen from this rule.
    pub variables: Vec<usize>,
    form_names: Vec<String>,
}

/// A whole grammar. Rule 0 is the root.
#[derive(Clone, Debug)]
pub struct Grammar {
    pub rules: Vec<Rule>,
    /// The list that each variable is chosen from.
    pub lists: Vec<usize>,
}

impl Grammar {
    /// The words a variable may hold.
    pub fn list(&self, variable: usize) -> &Rule {
        &self.rules[self.lists[variable]]
    }
}

/// What is remembered: each variable's name and the rule it is chosen from.
type Variables = Vec<(String, usize)>;

/// Reads a grammar, or says what is wrong with it.
pub fn read(text: &str) -> Result<Grammar, String> {
    let mut reader = Reader { indices: HashMap::new(), rules: Vec::new(), variables: Vec::new() };
    reader.read_headers(text)?;
    reader.read_variables(text)?;
    reader.read_alternatives(text)?;
    let lists = reader.variables.iter().map(|(_, rule)| *rule).collect();
    let grammar = Grammar { rules: reader.rules, lists };
    Shape { grammar: &grammar, variables: &reader.variables, open: vec![false; grammar.rules.len()] }.check()?;
    Ok(grammar)
}

struct Reader {
    indices: HashMap<String, usize>,
    rules: Vec<Rule>,
    variables: Variables,
}

/// The lines that are not comments, without trailing blanks; true with those that open a rule.
fn lines(text: &str) -> impl Iterator<Item = (bool, &str)> {
    let kept = text.lines().map(str::trim_end).filter(|line| !line.is_empty() && !line.starts_with('#'));
    kept.map(|line| (!line.starts_with(' '), line.trim_start()))
}

impl Reader {
    /// `name:` or, for words with forms, `name / form, form:`.
    fn read_headers(&mut self, text: &str) -> Result<(), String> {
        for (_, line) in lines(text).filter(|(header, _)| *header) {
            let line = line.strip_suffix(':').ok_or_else(|| format!("`{line}`: a rule's name ends with a colon"))?;
            let (name, forms) = line.split_once(" / ").unwrap_or((line, ""));
            let form_names = forms.split(", ").filter(|form| !form.is_empty()).map(String::from).collect();
            if self.indices.insert(name.to_string(), self.rules.len()).is_some() {
                return Err(format!("`{name}` is defined twice"));
            }
            let name = name.to_string();
            self.rules.push(Rule { name, alternatives: Vec::new(), variables: Vec::new(), form_names });
        }
        if self.rules.is_empty() { Err("no rules".to_string()) } else { Ok(()) }
    }

    fn rule(&self, name: &str) -> Result<usize, String> {
        self.indices.get(name).copied().ok_or_else(|| format!("no rule `{name}`"))
    }

    /// Every `[variable=list]`, before the alternatives are read: a recall may stand in an earlier line.
    fn read_variables(&mut self, text: &str) -> Result<(), String> {
        for (_, line) in lines(text) {
            for piece in line.split('[').skip(1) {
                let inside = piece.split(']').next().unwrap_or(piece);
                let Some((name, list)) = inside.split_once('=') else { continue };
                let rule = self.rule(list)?;
                match self.variables.iter().find(|(known, _)| known == name) {
                    Some((_, known)) if *known != rule => return Err(format!("`{name}` is chosen from two lists")),
                    Some(_) => {}
                    None => {
                        self.rules[rule].variables.push(self.variables.len());
                        self.variables.push((name.to_string(), rule));
                    }
                }
            }
        }
        if self.variables.len() > VARIABLES { Err("too many variables".to_string()) } else { Ok(()) }
    }

    fn read_alternatives(&mut self, text: &str) -> Result<(), String> {
        let mut weights: Vec<Vec<f64>> = vec![Vec::new(); self.rules.len()];
        let mut headers = 0;
        for (header, line) in lines(text) {
            if header {
                headers += 1;
                continue;
            }
            let rule = usize::checked_sub(headers, 1).ok_or("the first line must name a rule")?;
            let (words, forms) = line.split_once(" / ").unwrap_or((line, ""));
            let forms: Vec<&str> = forms.split(", ").map(str::trim).filter(|form| !form.is_empty()).collect();
            if forms.len() != self.rules[rule].form_names.len() {
                return Err(format!("`{line}`: the forms do not match those of its list"));
            }
            for words in words.split('|').map(str::trim) {
                let (weight, words) = weighted(words)?;
                weights[rule].push(weight);
                let symbols = self.symbols(words).map_err(|error| format!("`{words}`: {error}"))?;
                let forms = all_forms(words, &forms);
                self.rules[rule].alternatives.push(Alternative { probability: 0.0, bits: 0.0, symbols, forms });
            }
        }
        for (rule, weights) in self.rules.iter_mut().zip(weights) {
            let total: f64 = weights.iter().sum();
            for (alternative, weight) in rule.alternatives.iter_mut().zip(weights) {
                alternative.probability = weight / total;
                alternative.bits = (total / weight).log2();
            }
        }
        Ok(())
    }

    /// The symbols of one alternative.
    fn symbols(&self, mut text: &str) -> Result<Vec<Symbol>, String> {
        let mut symbols = Vec::new();
        while let Some(first) = text.chars().next() {
            let close = match first {
                '$' => {
                    symbols.push(Symbol::End);
                    text = &text[1..];
                    continue;
                }
                '{' => '}',
                '[' => ']',
                _ => {
                    let length = text.find(['{', '[', '$']).unwrap_or(text.len());
                    symbols.push(Symbol::Text(text[..length].to_string()));
                    text = &text[length..];
                    continue;
                }
            };
            let (inside, rest) = text[1..].split_once(close).ok_or("a bracket is not closed")?;
            text = rest;
            symbols.push(match inside.split_once('=') {
                _ if first == '{' => Symbol::Choose { rule: self.rule(inside)?, variable: None },
                Some((name, list)) => Symbol::Choose { rule: self.rule(list)?, variable: Some(self.variable(name)?) },
                None => self.recall(inside)?,
            });
        }
        if symbols.is_empty() { Err("an alternative is empty".to_string()) } else { Ok(symbols) }
    }

    fn variable(&self, name: &str) -> Result<usize, String> {
        self.variables.iter().position(|(known, _)| known == name).ok_or_else(|| format!("no variable `{name}`"))
    }

    /// `variable` or `variable.form`; a capital first letter of the last word asks for one in the text.
    fn recall(&self, inside: &str) -> Result<Symbol, String> {
        let (name, form_name) = inside.split_once('.').unwrap_or((inside, ""));
        let variable = self.variable(&name.to_ascii_lowercase())?;
        let asked = if form_name.is_empty() { name } else { form_name };
        let form_names = &self.rules[self.variables[variable].1].form_names;
        let form = match form_name {
            "" => 0,
            _ => {
                let lower = form_name.to_ascii_lowercase();
                let at = form_names.iter().position(|known| *known == lower);
                1 + at.ok_or_else(|| format!("`{name}` has no form `{lower}`"))?
            }
        };
        let capital = asked.starts_with(|c: char| c.is_ascii_uppercase());
        Ok(Symbol::Recall { variable, form: form + if capital { 1 + form_names.len() } else { 0 } })
    }
}

/// A leading `(2)` gives an alternative the weight 2; without it the weight is 1.
fn weighted(words: &str) -> Result<(f64, &str), String> {
    let Some((weight, rest)) = words.strip_prefix('(').and_then(|inside| inside.split_once(')')) else {
        return Ok((1.0, words));
    };
    match weight.parse::<f64>() {
        Ok(weight) if weight > 0.0 && weight.is_finite() => Ok((weight, rest.trim_start())),
        _ => Err(format!("`{words}`: the weight is not a positive number")),
    }
}

fn all_forms(words: &str, forms: &[&str]) -> Vec<String> {
    let plain = std::iter::once(words).chain(forms.iter().copied());
    let capital = plain.clone().map(|word| {
        let (first, rest) = word.split_at(word.len().min(1));
        first.to_ascii_uppercase() + rest
    });
    plain.map(String::from).chain(capital).collect()
}

/// The check of what a grammar must be for its probabilities to be exact (see the top of this file).
struct Shape<'a> {
    grammar: &'a Grammar,
    variables: &'a Variables,
    /// The rules being expanded.
    open: Vec<bool>,
}

/// The variables chosen so far, as bit sets: on every path that leads here, and on at least one.
#[derive(Clone, Copy)]
struct Chosen {
    surely: u32,
    maybe: u32,
}

impl Shape<'_> {
    fn check(&mut self) -> Result<(), String> {
        for rule in &self.grammar.rules {
            if rule.alternatives.is_empty() {
                return Err(format!("`{}` has no alternatives", rule.name));
            }
            let words = rule.alternatives.iter().all(|a| matches!(&a.symbols[..], [Symbol::Text(_)]));
            let equal = rule.alternatives.iter().all(|a| a.probability == rule.alternatives[0].probability);
            if !(rule.variables.is_empty() || words && equal) {
                return Err(format!("`{}` is remembered, so it must be words of equal weight", rule.name));
            }
        }
        self.expand(0, &mut Chosen { surely: 0, maybe: 0 })
    }

    fn expand(&mut self, rule: usize, chosen: &mut Chosen) -> Result<(), String> {
        let grammar = self.grammar;
        let name = &grammar.rules[rule].name;
        if std::mem::replace(&mut self.open[rule], true) {
            return Err(format!("`{name}` contains itself"));
        }
        let before = *chosen;
        *chosen = Chosen { surely: u32::MAX, maybe: before.maybe };
        for alternative in &grammar.rules[rule].alternatives {
            let ends = alternative.symbols.iter().filter(|symbol| **symbol == Symbol::End).count();
            let last = alternative.symbols.last() == Some(&Symbol::End);
            if ends != usize::from(rule == 0) || (rule == 0 && !last) {
                return Err(format!("`{name}`: `$` ends each alternative of the root and stands nowhere else"));
            }
            let mut after = before;
            self.follow(&alternative.symbols, &mut after).map_err(|error| format!("`{name}`: {error}"))?;
            chosen.surely &= after.surely;
            chosen.maybe |= after.maybe;
        }
        self.open[rule] = false;
        Ok(())
    }

    fn follow(&mut self, symbols: &[Symbol], chosen: &mut Chosen) -> Result<(), String> {
        for symbol in symbols {
            match *symbol {
                Symbol::Text(_) | Symbol::End => {}
                Symbol::Recall { variable, .. } if chosen.surely >> variable & 1 == 1 => {}
                Symbol::Recall { variable, .. } => {
                    return Err(format!("`{}` may be recalled before it is chosen", self.variables[variable].0));
                }
                Symbol::Choose { rule, variable: None } => self.expand(rule, chosen)?,
                Symbol::Choose { rule, variable: Some(variable) } => {
                    let siblings: u32 = self.grammar.rules[rule].variables.iter().map(|v| 1 << v).sum();
                    let name = &self.variables[variable].0;
                    if chosen.maybe >> variable & 1 == 1 {
                        return Err(format!("`{name}` may be chosen twice"));
                    }
                    if (chosen.maybe ^ chosen.surely) & siblings != 0 {
                        return Err(format!("`{name}`: how many entries of its list are taken depends on the path"));
                    }
                    if chosen.surely & siblings != 0
                        && (chosen.surely & siblings).count_ones() as usize
                            >= self.grammar.rules[rule].alternatives.len()
                    {
                        return Err(format!("`{name}`: its list is used up"));
                    }
                    chosen.surely |= 1 << variable;
                    chosen.maybe |= 1 << variable;
                }
            }
        }
        Ok(())
    }
}
