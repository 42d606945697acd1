//! The prompts of a `gpt sample`: one of them so many times, or those of a file.

use std::path::Path;

use serde::Deserialize;

use crate::error::{Error, Result};

/// A prompt, and what it wants otherwise than the flags say.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prompt {
    #[serde(rename = "prompt")]
    pub text: String,
    pub seed: Option<u64>,
    pub max_tokens: Option<usize>,
}

impl Prompt {
    pub fn of(text: &str) -> Self {
        Self { text: text.to_owned(), ..Self::default() }
    }
}

/// The prompts of a file's text: a JSON object on each line (`{"prompt": "...", "seed": 1, "max_tokens": 50}`, the latter two
/// if they differ) if the first line is one, else a text on each line. Empty lines are skipped.
pub fn parse(path: &Path, text: &str) -> Result<Vec<Prompt>> {
    let lines = || text.lines().zip(1..).filter(|(line, _)| !line.trim().is_empty());
    let json = lines().next().is_some_and(|(line, _)| line.trim_start().starts_with('{'));
    let prompts: Vec<Prompt> = lines()
        .map(|(line, number): (&str, usize)| match json {
            false => Ok(Prompt::of(line)),
            true => serde_json::from_str(line)
                .map_err(|e| Error::file(path, r#"lines like {"prompt": "..."}"#, format!("line {number}: {e}"))),
        })
        .collect::<Result<_>>()?;
    if prompts.is_empty() {
        return Err(Error::file(path, "a prompt on each line", "none"));
    }
    Ok(prompts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_texts_or_objects() {
        let parse = |text| parse(Path::new("p"), text);
        assert_eq!(parse("one\n\n two \r\n").unwrap(), [Prompt::of("one"), Prompt::of(" two ")]);
        let json = "{\"prompt\": \"a\\nb\"}\n{\"prompt\": \"c\", \"seed\": 7, \"max_tokens\": 3}\n";
        let named = Prompt { seed: Some(7), max_tokens: Some(3), ..Prompt::of("c") };
        assert_eq!(parse(json).unwrap(), [Prompt::of("a\nb"), named]);
        assert!(parse("\n \n").is_err());
        for bad in ["{\"prompt\": 1}", "{\"prompt\": \"a\"}\nplain", "{\"text\": \"a\"}", "{"] {
            assert!(parse(bad).unwrap_err().to_string().contains("line "), "{bad}");
        }
    }
}
