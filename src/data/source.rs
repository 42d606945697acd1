//! What `--data` names: sources with weights. Called by `data::open`.

use std::path::Path;

use crate::error::{Error, Result};

/// One source of a mixture.
#[derive(Clone, Debug, PartialEq)]
pub struct Weighted {
    /// A named set, a card, a file or a folder.
    pub name: String,
    /// Its share of the training windows, if it was said; the sum over sources is any number.
    pub weight: Option<f64>,
}

/// Takes `wikitext-2:0.7,./my-notes:0.3` apart. What exists as a whole is one path, whatever is in its name.
pub fn parse(text: &str) -> Result<Vec<Weighted>> {
    if Path::new(text).exists() {
        return Ok(vec![Weighted { name: text.to_owned(), weight: None }]);
    }
    let sources: Vec<Weighted> = text.split(',').map(one).collect::<Result<_>>()?;
    let weighted = sources.iter().filter(|s| s.weight.is_some()).count();
    if weighted != 0 && weighted != sources.len() {
        return Err(Error::usage(format!("`{text}`: some sources have a weight and some have none"))
            .with_hint("give every source one, as in a.txt:0.7,b.txt:0.3, or none: then windows are taken evenly"));
    }
    for (i, source) in sources.iter().enumerate() {
        if sources[..i].iter().any(|s| s.name == source.name) {
            return Err(Error::usage(format!("`{text}`: {} comes twice", source.name))
                .with_hint("name it once, with a larger weight"));
        }
    }
    Ok(sources)
}

fn one(text: &str) -> Result<Weighted> {
    let text = text.trim();
    let wrong =
        |what: &str| Err(Error::usage(format!("`{text}`: {what}")).with_hint("as in wikitext-2:0.7,./my-notes:0.3"));
    if text.is_empty() {
        return wrong("a source without a name");
    }
    // A path may have a colon in it: only a number behind the last one is a weight.
    let split = text.rsplit_once(':').filter(|_| !Path::new(text).exists());
    match split.and_then(|(name, weight)| Some((name, weight.parse::<f64>().ok()?))) {
        Some((_, weight)) if !(weight > 0.0 && weight.is_finite()) => wrong("a weight is a number above 0"),
        Some(("", _)) => wrong("a source without a name"),
        Some((name, weight)) => Ok(Weighted { name: name.to_owned(), weight: Some(weight) }),
        None => Ok(Weighted { name: text.to_owned(), weight: None }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_numbers_behind_the_last_colon() {
        let names = |text: &str| -> Vec<(String, Option<f64>)> {
            parse(text).unwrap().into_iter().map(|s| (s.name, s.weight)).collect()
        };
        assert_eq!(names("wikitext-2"), [("wikitext-2".into(), None)]);
        assert_eq!(names("a:0.7, ./b:3"), [("a".into(), Some(0.7)), ("./b".into(), Some(3.0))]);
        assert_eq!(names("C:/x.txt"), [("C:/x.txt".into(), None)]);
        for text in ["a:0,b:1", "a:-1", "a:inf", "a:nan", "a:0.5,b", "a,a", "a,,b", "", ":1"] {
            let error = parse(text).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{text}: {error}");
            assert!(error.hint().is_some(), "{text}");
        }
    }

    #[test]
    fn a_path_that_exists_is_taken_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a,b:0.5");
        std::fs::write(&path, "x").unwrap();
        let text = path.to_str().unwrap();
        assert_eq!(parse(text).unwrap(), [Weighted { name: text.into(), weight: None }]);
    }
}
