//! Ids to shown text while they arrive: whole characters, nothing of a stop text, nothing of a span that is to be hidden.
//!
//! Used by `sample`, one for each row. Marks are found across token borders: what may turn out to be the start of one is
//! held back until that is known. Stop texts count in shown text only.

use crate::tokenizer::{Tokenizer, stream::Utf8};

/// What is not shown.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Marks {
    /// A row ends before the first of these.
    pub stop: Vec<String>,
    /// Spans from the first text to the second are left out, both marks too.
    pub hide: Vec<(String, String)>,
}

pub struct Output<'a> {
    tokenizer: &'a Tokenizer,
    marks: &'a Marks,
    utf8: Utf8,
    /// Made but not shown: it may be the start of a mark.
    held: String,
    /// The hidden span that is open, by its number in `marks.hide`.
    hidden: Option<usize>,
    shown: String,
    stopped: bool,
}

impl<'a> Output<'a> {
    pub fn new(tokenizer: &'a Tokenizer, marks: &'a Marks) -> Self {
        let (utf8, held, shown) = (Utf8::default(), String::new(), String::new());
        Self { tokenizer, marks, utf8, held, hidden: None, shown, stopped: false }
    }

    /// All that was shown so far.
    pub fn shown(&self) -> &str {
        &self.shown
    }

    /// The text that one more id makes showable, and whether a stop text has come up.
    pub fn push(&mut self, id: u32) -> (String, bool) {
        self.held += &self.utf8.push(self.tokenizer.bytes_of(id));
        (self.release(false), self.stopped)
    }

    /// What is left when no more ids come. A hidden span that nobody closed stays hidden.
    pub fn finish(&mut self) -> String {
        if self.stopped {
            return String::new();
        }
        self.held += &self.utf8.finish();
        self.release(true)
    }

    /// What can be shown of what is held; all of it at the end.
    fn release(&mut self, end: bool) -> String {
        let mut ready = String::new();
        while !self.stopped {
            let marks = self.marks;
            if let Some(open) = self.hidden {
                let close = &marks.hide[open].1;
                let Some(at) = self.held.find(close.as_str()) else {
                    let keep = if end { 0 } else { overlap(&self.held, close) };
                    self.held.drain(..self.held.len() - keep);
                    break;
                };
                self.held.drain(..at + close.len());
                self.hidden = None;
                continue;
            }
            let stop = marks.stop.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
            let hide =
                marks.hide.iter().enumerate().filter_map(|(i, (open, _))| Some((self.held.find(open.as_str())?, i)));
            match (stop, hide.min()) {
                (Some(at), hide) if hide.is_none_or(|(open, _)| at <= open) => {
                    ready += &self.held[..at];
                    self.held.clear();
                    self.stopped = true;
                }
                (_, Some((at, i))) => {
                    ready += &self.held[..at];
                    self.held.drain(..at + marks.hide[i].0.len());
                    self.hidden = Some(i);
                }
                _ => {
                    let starts = marks.stop.iter().chain(marks.hide.iter().map(|(open, _)| open));
                    let keep = if end { 0 } else { starts.map(|mark| overlap(&self.held, mark)).max().unwrap_or(0) };
                    let rest = self.held.split_off(self.held.len() - keep);
                    ready += &std::mem::replace(&mut self.held, rest);
                    break;
                }
            }
        }
        self.shown += &ready;
        ready
    }
}

/// The longest end of `text` that is a proper start of `mark`, in bytes.
fn overlap(text: &str, mark: &str) -> usize {
    let starts = mark.char_indices().map(|(at, _)| at).skip(1).filter(|at| *at <= text.len());
    starts.filter(|at| text.ends_with(&mark[..*at])).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(bytes: &[u8], stop: &[&str], hide: &[(&str, &str)]) -> (Vec<String>, String, bool) {
        let tokenizer = Tokenizer::bytes();
        let marks = Marks {
            stop: stop.iter().map(|s| s.to_string()).collect(),
            hide: hide.iter().map(|(open, close)| (open.to_string(), close.to_string())).collect(),
        };
        let mut output = Output::new(&tokenizer, &marks);
        let mut parts = Vec::new();
        for byte in bytes {
            let (ready, stopped) = output.push(u32::from(*byte));
            parts.push(ready);
            if stopped {
                break;
            }
        }
        parts.push(output.finish());
        (parts, output.shown, output.stopped)
    }

    #[test]
    fn stop_texts_are_found_across_tokens_and_never_shown() {
        for (text, stop, expected, stopped) in [
            ("one END two", &["END"][..], "one ", true),
            ("one EN two", &["END"], "one EN two", false),
            ("one EN", &["END"], "one EN", false),
            ("aab", &["ab"], "a", true),
            ("a😀b", &["😀"], "a", true),
            ("xyz", &["yz", "y"], "x", true),
            ("plain", &[], "plain", false),
        ] {
            let (parts, whole, was) = shown(text.as_bytes(), stop, &[]);
            assert_eq!((whole.as_str(), was), (expected, stopped), "{text}");
            assert_eq!(parts.concat(), expected);
        }
    }

    #[test]
    fn hidden_spans_are_swallowed_whole_wherever_tokens_end() {
        let think = &[("<think>", "</think>")][..];
        for (text, stop, hide, expected) in [
            ("a<think>b</think>c", &[][..], think, "ac"),
            ("a<think>b", &[], think, "a"),
            ("a<thin b</think>", &[], think, "a<thin b</think>"),
            ("<think></think><think>x</thin</think>y", &[], think, "y"),
            ("a<think>stop</think>b stop c", &["stop"], think, "ab "),
            ("stop<think>", &["stop"], think, ""),
            ("a|b|c", &[], &[("|", "|")], "ac"),
            ("a[b]c{d}e", &[], &[("[", "]"), ("{", "}")], "ace"),
            ("<thi", &[], think, "<thi"),
        ] {
            let (parts, whole, _) = shown(text.as_bytes(), stop, hide);
            assert_eq!(whole, expected, "{text}");
            assert_eq!(parts.concat(), expected);
        }
    }

    #[test]
    fn characters_are_shown_whole_and_a_cut_one_is_marked() {
        let (parts, ..) = shown("é😀".as_bytes(), &[], &[]);
        assert_eq!(parts, ["", "é", "", "", "", "😀", ""]);
        assert_eq!(shown(&"😀".as_bytes()[..3], &[], &[]).1, "\u{FFFD}");
    }
}
