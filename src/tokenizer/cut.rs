//! Where a long text can be cut without changing its ids. Called through `Tokenizer::cut`.
//!
//! Pre-tokenizers look at few characters around a border, and most of them always split between a line break and a letter,
//! or between a letter and a space. Whether one does is not asked of its name, but tried out on texts of every kind.

use memchr::memchr_iter;
use tokenizers::{Normalizer, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, Tokenizer};

/// The kinds of places at which this tokenizer splits a text anyway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cuts {
    /// Behind a line break between a character that is no white space and a letter or digit.
    lines: bool,
    /// Before a space between letters or digits.
    spaces: bool,
}

/// What stands before and behind a border in the trials.
const BEFORE: [&str; 9] = ["", "a", "word and ", "x\n\n ", "don't ", "12 ", "漢 ", "\t", ")). "];
const LEFT: [&str; 14] = ["a", "Z", "é", "漢", "ß", "7", ".", "!", "\"", ")", "-", "'", "😀", "e\u{301}"];
const RIGHT: [&str; 9] = ["a", "Z", "é", "漢", "ß", "7", "word", "42 x", "s it"];

impl Cuts {
    pub fn find(tokenizer: &Tokenizer) -> Self {
        let added = tokenizer.get_added_tokens_decoder();
        // A token of the text that itself goes over such a border, or takes the white space beside it.
        let crossed = |space: &[char]| added.values().any(|t| t.content.contains(space) || t.lstrip || t.rstrip);
        let holds = |left: &str, between: &str, right: &str, cut: usize| {
            BEFORE.iter().all(|before| {
                let text = format!("{before}{left}{between}{right} then\n on");
                let at = before.len() + left.len() + cut;
                let parts = pieces(tokenizer, &text[..at]).zip(pieces(tokenizer, &text[at..]));
                parts.map(|(left, right)| [left, right].concat()) == pieces(tokenizer, &text)
            })
        };
        let lines = || LEFT.iter().all(|left| RIGHT.iter().all(|right| holds(left, "\n", right, 1)));
        let letters = || LEFT.iter().filter(|left| left.chars().next_back().is_some_and(char::is_alphanumeric));
        let spaces = || letters().all(|left| RIGHT.iter().all(|right| holds(left, " ", right, 0)));
        Self { lines: !crossed(&['\n']) && lines(), spaces: !crossed(&[' ', '\u{2581}']) && spaces() }
    }

    /// Those of GPT-2's pattern.
    pub fn of_words() -> Self {
        Self { lines: true, spaces: true }
    }

    /// The first such place from byte `from` on.
    pub fn next(self, text: &[u8], from: usize) -> Option<usize> {
        let from = from.max(1);
        let line = memchr_iter(b'\n', text.get(from - 1..)?).map(|at| from + at).find(|cut| {
            let left = before(text, cut - 1).is_some_and(|c| !c.is_whitespace());
            left && after(text, *cut).is_some_and(char::is_alphanumeric)
        });
        if self.lines && line.is_some() {
            return line;
        }
        let space = memchr_iter(b' ', text.get(from..)?).map(|at| from + at).find(|cut| {
            let left = before(text, *cut).is_some_and(char::is_alphanumeric);
            left && after(text, cut + 1).is_some_and(char::is_alphanumeric)
        });
        space.filter(|_| self.spaces)
    }
}

/// What the model gets to see of a text.
pub fn pieces(tokenizer: &Tokenizer, text: &str) -> Option<Vec<String>> {
    let mut text = PreTokenizedString::from(text);
    if let Some(normalizer) = tokenizer.get_normalizer() {
        text.normalize(|piece| normalizer.normalize(piece)).ok()?;
    }
    if let Some(pre_tokenizer) = tokenizer.get_pre_tokenizer() {
        pre_tokenizer.pre_tokenize(&mut text).ok()?;
    }
    let splits = text.get_splits(OffsetReferential::Original, OffsetType::None);
    Some(splits.into_iter().map(|(piece, ..)| piece.to_owned()).collect())
}

/// The character that ends at a byte, if one does.
fn before(text: &[u8], at: usize) -> Option<char> {
    let tail = text.get(at.saturating_sub(4)..at)?;
    let start = tail.iter().rposition(|byte| byte & 0xC0 != 0x80)?;
    std::str::from_utf8(&tail[start..]).ok()?.chars().next_back()
}

/// The character that begins at a byte, if one does.
fn after(text: &[u8], at: usize) -> Option<char> {
    let head = text.get(at..text.len().min(at + 4))?;
    head.utf8_chunks().next()?.valid().chars().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_are_found_on_both_sides_of_a_border() {
        let text = "aé漢😀b".as_bytes();
        assert_eq!(
            [before(text, 1), before(text, 3), before(text, 6), before(text, 10)].map(Option::unwrap),
            ['a', 'é', '漢', '😀']
        );
        assert_eq!(
            [after(text, 0), after(text, 1), after(text, 3), after(text, 6)].map(Option::unwrap),
            ['a', 'é', '漢', '😀']
        );
        assert_eq!((before(text, 2), before(text, 0), after(text, 2), after(text, 11)), (None, None, None, None));
        assert_eq!(after(b"\xF0\x9F", 0), None);
    }

    #[test]
    fn a_cut_stands_between_what_is_split_anyway() {
        let both = Cuts { lines: true, spaces: true };
        let text = "one two.\n  x\n\nyes\nno".as_bytes();
        assert_eq!(both.next(text, 0), Some(18), "a line break is better than a space");
        assert_eq!(Cuts { lines: false, spaces: true }.next(text, 0), Some(3));
        assert_eq!(Cuts { lines: false, spaces: true }.next(text, 4), None);
        assert_eq!(Cuts { lines: false, spaces: false }.next(text, 0), None);
        assert_eq!(both.next(text, 100), None);
    }
}
