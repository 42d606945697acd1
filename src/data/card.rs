//! Cards of named data sets: where their files are, how they are checked, and how text comes out of them.
//!
//! One TOML a set in datasets/ (its README says the format); a user's own card works by its path. Called by `data` and
//! `download`.

use std::path::Path;

use serde::Deserialize;

use super::Cleaning;
use crate::error::{Error, Result, nearest};

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Card {
    pub name: String,
    pub title: String,
    pub licence: String,
    /// Where to read about it.
    #[serde(default)]
    pub homepage: Option<String>,
    /// More that one should know.
    #[serde(default)]
    pub notes: Option<String>,
    /// Bytes of training and held-out text, about, for a set whose size is known.
    #[serde(default)]
    pub text_bytes: Option<u64>,
    #[serde(default)]
    pub cleaning: Cleaning,
    /// Text between documents; none if a file is one.
    #[serde(default)]
    pub separator: String,
    /// The field or column of jsonl, csv and parquet.
    #[serde(default = "text_field")]
    pub field: String,
    /// The files to fetch. A set without any is built in.
    #[serde(default)]
    pub file: Vec<Remote>,
    /// Which members are which split; none if the text is to be cut.
    #[serde(default)]
    pub splits: Option<Splits>,
}

/// A file to fetch.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Remote {
    /// Its name in the cache, whose ending says its format.
    pub name: String,
    #[serde(default)]
    pub title: Option<String>,
    /// The same file at several places, tried in this order.
    pub mirrors: Vec<String>,
    #[serde(default)]
    pub bytes: Option<u64>,
    /// Of the file as served. Where none is known for certain, the first download's is written down and held to.
    #[serde(default)]
    pub sha256: Option<String>,
    /// The one member of the archive that is the text.
    #[serde(default)]
    pub member: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Splits {
    pub train: Part,
    pub validation: Part,
    /// Kept out of training and validation.
    #[serde(default)]
    pub test: Option<Part>,
}

/// A file of the set, and the member if it is an archive.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    pub file: String,
    #[serde(default)]
    pub member: Option<String>,
}

fn text_field() -> String {
    "text".into()
}

/// The cards that are built in.
const BUILT_IN: [&str; 7] = [
    include_str!("../../datasets/stories.toml"),
    include_str!("../../datasets/shakespeare.toml"),
    include_str!("../../datasets/tinystories.toml"),
    include_str!("../../datasets/wikitext-2.toml"),
    include_str!("../../datasets/wikitext-103.toml"),
    include_str!("../../datasets/gutenberg.toml"),
    include_str!("../../datasets/enwik8.toml"),
];

/// All built-in cards, in the order in which they are listed.
pub fn all() -> Vec<Card> {
    let parse = |text: &&str| Card::parse(text, Path::new("datasets")).expect("a test parses every built-in card");
    BUILT_IN.iter().map(parse).collect()
}

/// The set of that name, or the one that a card says: a path that ends in .toml. None if it is neither.
pub fn find(name: &str) -> Result<Option<Card>> {
    let path = Path::new(name);
    if path.extension().is_some_and(|e| e == "toml") && path.is_file() {
        let size = std::fs::metadata(path).map_err(|e| Error::io("read", path, e))?.len();
        if size > 1 << 20 {
            return Err(Error::file(path, "a card", format!("{size} bytes")));
        }
        let text = std::fs::read_to_string(path).map_err(|e| Error::io("read", path, e))?;
        return Card::parse(&text, path).map(Some);
    }
    Ok(all().into_iter().find(|card| card.name == name))
}

/// Why nothing is called `name`, with what is.
pub fn unknown(name: &str) -> Error {
    let cards = all();
    let names: Vec<&str> = cards.iter().map(|card| card.name.as_str()).collect();
    let hint = nearest(name, names.iter().copied());
    let hint = hint.unwrap_or_else(|| format!("give a file, a folder, or one of: {}", names.join(", ")));
    Error::usage(format!("no data set, file or folder `{name}`")).with_hint(hint)
}

impl Card {
    /// Reads a card; `place` names it in errors.
    pub fn parse(text: &str, place: &Path) -> Result<Self> {
        let wrong = |what: String| {
            Error::file(place, "a card of a data set", what).with_hint("datasets/README.md says what is in one")
        };
        let card: Self = toml::from_str(text).map_err(|e| wrong(e.to_string().trim_end().to_owned()))?;
        card.check().map_err(wrong)?;
        Ok(card)
    }

    /// What types cannot say. Names become files of the cache, so they must be names.
    fn check(&self) -> Result<(), String> {
        let is_name = |name: &str| {
            !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', ':', '\0']) && name.len() < 128
        };
        if !is_name(&self.name) {
            return Err(format!("`{}` as a name", self.name));
        }
        for (i, file) in self.file.iter().enumerate() {
            if !is_name(&file.name) || self.file[..i].iter().any(|f| f.name == file.name) {
                return Err(format!("`{}` as the name of a file", file.name));
            }
            if file.mirrors.is_empty() {
                return Err(format!("no mirrors of {}", file.name));
            }
            let is_url = |m: &&String| !m.starts_with("https://") && !m.starts_with("http://");
            if let Some(mirror) = file.mirrors.iter().find(is_url) {
                return Err(format!("`{mirror}` as a mirror, which is no https:// address"));
            }
            let is_hash = |hash: &String| hash.len() == 64 && hash.bytes().all(|b| b.is_ascii_hexdigit());
            if let Some(hash) = file.sha256.as_ref().filter(|hash| !is_hash(hash)) {
                return Err(format!("`{hash}` as a sha256"));
            }
        }
        let Some(splits) = &self.splits else { return Ok(()) };
        let mut parts = vec![&splits.train, &splits.validation];
        parts.extend(&splits.test);
        match parts.iter().find(|part| !self.file.iter().any(|file| file.name == part.file)) {
            Some(part) => Err(format!("a split from `{}`, which is none of its files", part.file)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_card_in_datasets_is_built_in_under_its_name() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("datasets");
        let mut files: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .filter_map(|name| name.strip_suffix(".toml").map(str::to_owned))
            .collect();
        files.sort();
        let mut names: Vec<String> = all().into_iter().map(|card| card.name).collect();
        names.sort();
        assert_eq!(names, files);
    }

    const GOOD: &str = r#"
        name = "x"
        title = "X"
        licence = "none"
        [[file]]
        name = "x.zip"
        mirrors = ["https://a.example/x.zip"]
        [splits]
        train = { file = "x.zip", member = "train" }
        validation = { file = "x.zip", member = "valid" }
    "#;

    #[test]
    fn a_wrong_card_says_what_is_wrong() {
        Card::parse(GOOD, Path::new("x.toml")).unwrap();
        for (from, to, part) in [
            ("name = \"x\"", "name = \"../x\"", "`../x` as a name"),
            ("name = \"x.zip\"", "name = \"/etc/x\"", "`/etc/x` as the name of a file"),
            ("\"https://a.example/x.zip\"", "", "no mirrors"),
            ("https://a.example", "file:///etc", "no https:// address"),
            ("licence", "license", "license"),
            ("{ file = \"x.zip\", member = \"train\" }", "{ file = \"y.zip\" }", "none of its files"),
            ("[[file]]", "[[file]]\nsha256 = \"12\"", "as a sha256"),
            ("[[file]]", "[[file]", "expected"),
        ] {
            let error = Card::parse(&GOOD.replacen(from, to, 1), Path::new("x.toml")).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains("x.toml"), "{part}: {error}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_a_card_panic(text in "(?s).{0,200}", at in 0usize..400, with in "[\\[\\]=\"a-z\\n]{0,8}") {
            let _ = Card::parse(&text, Path::new("x"));
            let mut card = GOOD.to_owned();
            let at = at.min(card.len());
            card.insert_str(at, &with);
            let _ = Card::parse(&card, Path::new("x"));
        }
    }
}
