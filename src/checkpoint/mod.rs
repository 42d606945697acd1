//! Runs and models on disk. A model is a Hugging Face folder; a run is one with `steps/` beside it (checkpoints/README.md).

pub mod adapter;
pub mod config_json;
pub mod foreign;
pub mod lock;
pub mod model_folder;
pub mod steps;
pub mod weights;

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::files::atomic;

/// Where runs land and are looked for.
pub const RUNS: &str = "checkpoints";

/// The checkpoint of that path (or of that name in checkpoints/), or, without one, the newest complete run.
pub fn resolve(given: Option<&Path>) -> Result<PathBuf> {
    resolve_in(Path::new(RUNS), given)
}

/// The SHA-256 of the config and the weights of a model or an adapter, as hexadecimal digits.
pub fn hash(folder: &Path) -> Result<String> {
    let entries = std::fs::read_dir(folder).map_err(|e| Error::io("read", folder, e))?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    let configs = ["config.json", adapter::CONFIG];
    let counts = |path: &Path| {
        configs.iter().any(|name| path.ends_with(name)) || path.extension().is_some_and(|e| e == "safetensors")
    };
    files.retain(|path| counts(path));
    files.sort();
    let mut sum = Sha256::new();
    files.iter().try_for_each(|path| atomic::hash_file(path, &mut sum))?;
    Ok(atomic::hex(&sum.finalize()))
}

fn resolve_in(runs: &Path, given: Option<&Path>) -> Result<PathBuf> {
    let Some(path) = given else {
        return newest_run(runs).ok_or_else(|| {
            Error::usage(format!("no checkpoint given, and none in {}/", runs.display()))
                .with_hint("train one first: gpt train")
        });
    };
    let named = runs.join(path);
    Ok(if !path.exists() && named.exists() { named } else { path.to_owned() })
}

/// What the name of a draft ends with, after its target's.
const DRAFT: &str = "-draft";

/// Where the draft of a model is looked for.
pub fn draft_of(target: &Path) -> PathBuf {
    // A path like `.` has no name of its own.
    let real = if target.file_name().is_some() { target.to_owned() } else { target.canonicalize().unwrap_or_default() };
    let name = real.file_name().unwrap_or_default().to_string_lossy();
    real.with_file_name(format!("{name}{DRAFT}"))
}

/// The folder below `runs` whose model was written last. A draft is found through its target, so it is none itself.
fn newest_run(runs: &Path) -> Option<PathBuf> {
    let weights = |folder: &Path| match adapter::is_adapter(folder) {
        true => folder.join(adapter::MODEL),
        false => folder.join(model_folder::MODEL),
    };
    let complete = |folder: &Path| {
        (folder.join("config.json").is_file() || adapter::is_adapter(folder)) && weights(folder).is_file()
    };
    let is_draft = |folder: &Path| {
        let target = folder.file_name().and_then(|n| n.to_str()?.strip_suffix(DRAFT));
        target.is_some_and(|target| complete(&runs.join(target)))
    };
    let models = std::fs::read_dir(runs).ok()?.flatten().filter_map(|entry| {
        let folder = entry.path();
        let written = weights(&folder).metadata().ok()?.modified().ok()?;
        (complete(&folder) && !is_draft(&folder)).then_some((written, folder))
    });
    models.max().map(|(_, folder)| folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_complete_run_is_taken_and_names_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let runs = dir.path();
        let error = resolve_in(runs, None).unwrap_err();
        assert!(error.to_string().contains("none in") && error.hint().is_some() && error.exit_code() == 2);
        let write = |run: &str, age: u64, files: &[&str]| {
            std::fs::create_dir_all(runs.join(run)).unwrap();
            for file in files {
                let file = std::fs::File::create(runs.join(run).join(file)).unwrap();
                let now = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(2_000_000_000);
                file.set_modified(now - std::time::Duration::from_secs(age)).unwrap();
            }
        };
        let all = ["config.json", "model.safetensors"];
        write("old", 30, &all);
        write("new", 20, &all);
        write("new-draft", 10, &all);
        write("half", 5, &["config.json"]);
        write("weights", 4, &["model.safetensors"]);
        assert_eq!(resolve_in(runs, None).unwrap(), runs.join("new"));
        assert_eq!(resolve_in(runs, Some(Path::new("old"))).unwrap(), runs.join("old"));
        assert_eq!(resolve_in(runs, Some(Path::new("none/at all"))).unwrap(), Path::new("none/at all"));
        // A draft whose target is gone is a model like others.
        std::fs::remove_dir_all(runs.join("new")).unwrap();
        assert_eq!(resolve_in(runs, None).unwrap(), runs.join("new-draft"));
    }
}
