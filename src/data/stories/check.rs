//! The proof that a grammar writes every text in one way only: at each choice the alternatives are prefix-free.
//!
//! Called by the tests, on the built-in grammar and on bad ones. What must stay true: whatever is found free of clashes
//! is free of them for every derivation and every content of the variables. The search may look at combinations that
//! cannot arise (it knows nothing of what was chosen before the choice it looks at), never leave one out.
//!
//! Two alternatives clash if some text of the one is a prefix of some text of the other, or equal to it, the end of the
//! story being a symbol of its own. The search expands both side by side, symbol by symbol, as long as their texts
//! agree, and clashes when one runs out. Where the same choice stands next on both sides it is passed over as a whole:
//! it is itself prefix-free (by induction, as no rule contains itself), so texts that agree so far agree in it as well.
//! A variable from before the choice holds the same on both sides; its content is fixed when it meets anything but
//! itself.

use super::grammar::{Grammar, Symbol, VARIABLES};

/// Every clash: the rule, the numbers of two alternatives, and the text that both can begin with.
pub fn clashes(grammar: &Grammar) -> Vec<String> {
    let mut found = Vec::new();
    for rule in &grammar.rules {
        for (i, first) in rule.alternatives.iter().enumerate() {
            for (j, second) in rule.alternatives.iter().enumerate().skip(i + 1) {
                let sides = [Side::new(&first.symbols), Side::new(&second.symbols)];
                let pair = Pair { grammar, sides, shared: [None; VARIABLES], text: String::new() };
                if let Some(text) = pair.clash() {
                    found.push(format!("`{}`: alternatives {} and {} both begin `{text}`", rule.name, i + 1, j + 1));
                }
            }
        }
    }
    found
}

/// What remains of one alternative, the next piece last, and the variables it chose itself.
#[derive(Clone)]
struct Side<'a> {
    rest: Vec<Piece<'a>>,
    own: [Option<usize>; VARIABLES],
}

#[derive(Clone, Copy, PartialEq)]
enum Piece<'a> {
    Text(&'a str),
    Symbol(&'a Symbol),
}

impl<'a> Side<'a> {
    fn new(symbols: &'a [Symbol]) -> Self {
        let mut side = Self { rest: Vec::new(), own: [None; VARIABLES] };
        side.push(symbols);
        side
    }

    fn push(&mut self, symbols: &'a [Symbol]) {
        self.rest.extend(symbols.iter().rev().map(|symbol| match symbol {
            Symbol::Text(text) => Piece::Text(text),
            other => Piece::Symbol(other),
        }));
    }
}

/// Two alternatives whose texts agree so far.
#[derive(Clone)]
struct Pair<'a> {
    grammar: &'a Grammar,
    sides: [Side<'a>; 2],
    /// The variables chosen before the choice at hand or passed over on both sides; nothing while any content will do.
    shared: [Option<usize>; VARIABLES],
    text: String,
}

impl<'a> Pair<'a> {
    /// A text that both sides can begin with when one of them has run out, if there is one.
    fn clash(mut self) -> Option<String> {
        loop {
            let [Some(first), Some(second)] = self.sides.each_ref().map(|side| side.rest.last().copied()) else {
                return Some(self.text);
            };
            match (first, second) {
                (Piece::Text(first), Piece::Text(second)) => {
                    let length = first.len().min(second.len());
                    if first.as_bytes()[..length] != second.as_bytes()[..length] {
                        return None;
                    }
                    self.text.push_str(&first[..length]);
                    for (side, whole) in self.sides.iter_mut().zip([first, second]) {
                        side.rest.pop();
                        if whole.len() > length {
                            side.rest.push(Piece::Text(&whole[length..]));
                        }
                    }
                }
                (Piece::Symbol(first), Piece::Symbol(second)) if first == second && self.same(first) => {
                    self.text.push_str("...");
                    for side in &mut self.sides {
                        side.rest.pop();
                    }
                }
                (Piece::Symbol(Symbol::End), Piece::Text(_)) | (Piece::Text(_), Piece::Symbol(Symbol::End)) => {
                    return None;
                }
                (Piece::Symbol(symbol), _) if *symbol != Symbol::End => return self.expand(0, symbol),
                (_, Piece::Symbol(symbol)) => return self.expand(1, symbol),
                (Piece::Symbol(_), Piece::Text(_)) => return None,
            }
        }
    }

    /// Whether a symbol that stands next on both sides writes the same on both, if the texts are to agree.
    fn same(&self, symbol: &Symbol) -> bool {
        let [first, second] = &self.sides;
        match *symbol {
            Symbol::Recall { variable, .. } => first.own[variable] == second.own[variable],
            // A rule may recall variables: only where each holds the same on both sides is it the same choice.
            Symbol::Choose { .. } => first.own == second.own,
            Symbol::Text(_) | Symbol::End => true,
        }
    }

    /// Tries everything that the next symbol of one side may write.
    fn expand(mut self, at: usize, symbol: &'a Symbol) -> Option<String> {
        self.sides[at].rest.pop();
        match *symbol {
            Symbol::Choose { rule, variable } => {
                let alternatives = &self.grammar.rules[rule].alternatives;
                alternatives.iter().enumerate().find_map(|(index, alternative)| {
                    let mut pair = self.clone();
                    if let Some(variable) = variable {
                        pair.sides[at].own[variable] = Some(index);
                    }
                    pair.sides[at].push(&alternative.symbols);
                    pair.clash()
                })
            }
            Symbol::Recall { variable, form } => {
                let list = self.grammar.list(variable);
                let known = self.sides[at].own[variable].or(self.shared[variable]);
                let candidates = known.map_or(0..list.alternatives.len(), |index| index..index + 1);
                candidates.filter(|&index| known.is_some() || self.free(variable, index)).find_map(|index| {
                    let mut pair = self.clone();
                    if known.is_none() {
                        pair.shared[variable] = Some(index);
                    }
                    pair.sides[at].rest.push(Piece::Text(&list.alternatives[index].forms[form]));
                    pair.clash()
                })
            }
            Symbol::Text(_) | Symbol::End => None,
        }
    }

    /// Whether no other variable from before the choice is known to hold this entry of its list.
    fn free(&self, variable: usize, index: usize) -> bool {
        self.grammar.list(variable).variables.iter().all(|&other| self.shared[other] != Some(index))
    }
}
