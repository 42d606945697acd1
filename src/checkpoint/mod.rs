//! Runs and models on disk. A model is a Hugging Face folder; a run is one with `steps/` beside it (checkpoints/README.md).

pub mod atomic;
pub mod config_json;
pub mod lock;
pub mod model_folder;
pub mod steps;
pub mod weights;

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Where runs land and are looked for.
pub const RUNS: &str = "checkpoints";

/// The checkpoint of that path, or, without one, the newest complete run. Says which.
pub fn resolve(given: Option<&Path>) -> Result<PathBuf> {
    if let Some(path) = given {
        return Ok(path.to_owned());
    }
    newest_run(Path::new(RUNS)).ok_or_else(|| {
        Error::usage(format!("no checkpoint given, and none in {RUNS}/")).with_hint("train one first: gpt train")
    })
}

/// The folder below `runs` whose model was written last.
fn newest_run(runs: &Path) -> Option<PathBuf> {
    let models = std::fs::read_dir(runs).ok()?.flatten().filter_map(|entry| {
        let folder = entry.path();
        let complete = folder.join("config.json").is_file();
        let written = folder.join("model.safetensors").metadata().ok()?.modified().ok()?;
        complete.then_some((written, folder))
    });
    models.max().map(|(_, folder)| folder)
}
