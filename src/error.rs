//! The one error type of the library. A leaf: every module returns it, only `cli` prints it.
//!
//! A message says what went wrong, where, what was expected and what was found; `hint` says what to do about it.
//! Exit codes follow from the variant: 2 for what the user typed, 1 for everything that failed while running.

use std::path::{Path, PathBuf};

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A flag, preset key or value that cannot be used. The user can fix it by typing something else.
    #[error("{what}")]
    Usage { what: String, hint: Option<String> },

    /// Reading or writing failed in the operating system.
    #[error("{action} {}: {source}", path.display())]
    Io { action: &'static str, path: PathBuf, source: std::io::Error },

    /// A file was read, but it is not what its name or place says.
    #[error("{}: expected {expected}, found {found}", path.display())]
    File { path: PathBuf, expected: String, found: String, hint: Option<String> },

    /// A tensor of a checkpoint that does not fit its config.
    #[error("{}: tensor `{tensor}`: expected {expected}, found {found}", path.display())]
    Tensor { path: PathBuf, tensor: String, expected: String, found: String },

    /// The run cannot go on: no data, no memory, no progress.
    #[error("{what}")]
    Failed { what: String, hint: Option<String> },

    /// An operation was called with shapes or types that it does not take. Always a defect of this program.
    #[error("{op}: expected {expected}, found {found}")]
    Op { op: &'static str, expected: String, found: String },

    #[error("tensor operation: {0}")]
    Candle(#[from] candle_core::Error),
}

impl Error {
    pub fn usage(what: impl Into<String>) -> Self {
        Self::Usage { what: what.into(), hint: None }
    }

    pub fn failed(what: impl Into<String>) -> Self {
        Self::Failed { what: what.into(), hint: None }
    }

    pub fn io(action: &'static str, path: impl AsRef<Path>, source: std::io::Error) -> Self {
        Self::Io { action, path: path.as_ref().to_owned(), source }
    }

    pub fn file(path: impl AsRef<Path>, expected: impl Into<String>, found: impl Into<String>) -> Self {
        Self::File { path: path.as_ref().to_owned(), expected: expected.into(), found: found.into(), hint: None }
    }

    pub fn op(op: &'static str, expected: impl Into<String>, found: impl Into<String>) -> Self {
        Self::Op { op, expected: expected.into(), found: found.into() }
    }

    /// The same error with advice on what to do; kept only by the variants that carry advice of their own.
    pub fn with_hint(mut self, text: impl Into<String>) -> Self {
        if let Self::Usage { hint, .. } | Self::File { hint, .. } | Self::Failed { hint, .. } = &mut self {
            *hint = Some(text.into());
        }
        self
    }

    /// What to do about it, if this error knows.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Usage { hint, .. } | Self::File { hint, .. } | Self::Failed { hint, .. } => hint.clone(),
            Self::Tensor { .. } => Some("the folder is incomplete or of another model; copy or train it again".into()),
            Self::Io { source, .. } => match source.kind() {
                std::io::ErrorKind::StorageFull => {
                    Some("free some space and run it again; a training run goes on with --resume".into())
                }
                std::io::ErrorKind::PermissionDenied => Some("check the permissions, or name another place".into()),
                std::io::ErrorKind::NotFound => Some("check the path".into()),
                _ => None,
            },
            Self::Op { .. } | Self::Candle(_) => Some("this is a defect of gpt; please report it".into()),
        }
    }

    /// 2 for what the user typed, 1 for a failed run.
    pub fn exit_code(&self) -> u8 {
        if matches!(self, Self::Usage { .. }) { 2 } else { 1 }
    }
}

/// "did you mean" for a name that is not known: the candidates close to it, best first, as text for a hint.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let lower = name.to_lowercase();
    let mut close: Vec<(f64, &str)> = known
        .into_iter()
        .map(|k| {
            let last = k.rsplit('.').next().unwrap_or(k);
            (strsim::jaro_winkler(&lower, k).max(strsim::jaro_winkler(&lower, last)), k)
        })
        .filter(|(score, _)| *score > 0.75)
        .collect();
    close.sort_by(|a, b| b.0.total_cmp(&a.0));
    let names: Vec<String> = close.iter().take(3).map(|(_, k)| format!("`{k}`")).collect();
    (!names.is_empty()).then(|| format!("did you mean {}?", names.join(" or ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_exits_with_two_and_the_rest_with_one() {
        assert_eq!(Error::usage("x").exit_code(), 2);
        assert_eq!(Error::failed("x").exit_code(), 1);
        assert_eq!(Error::io("read", "a", std::io::Error::other("x")).exit_code(), 1);
    }

    #[test]
    fn nearest_finds_typing_errors_and_last_parts() {
        let known = ["model.hidden_size", "tiny", "small"];
        assert_eq!(nearest("tinny", known).as_deref(), Some("did you mean `tiny`?"));
        assert!(nearest("hidden_sizes", known).is_some_and(|h| h.contains("model.hidden_size")));
        assert_eq!(nearest("zzz", known), None);
    }
}
