//! `gpt merge`: a base and its adapters as one model.

use std::path::{Path, PathBuf};

use super::report::{Event, Report};
use super::sample;
pub use crate::checkpoint::weights::StoredType;
use crate::checkpoint::{self, model_folder};
use crate::error::{Error, Result};

/// What `gpt merge` was asked to do.
#[derive(Clone, Debug)]
pub struct MergeConfig {
    /// The base, or an adapter that knows its base; the newest run if not given.
    pub checkpoint: Option<PathBuf>,
    /// Each with its scale.
    pub adapters: Vec<(PathBuf, f32)>,
    pub out: PathBuf,
    /// What weights are stored in; as the base has them if not given.
    pub stored: Option<StoredType>,
}

/// The keys of `--json`.
#[derive(Clone, Debug, serde::Serialize)]
pub struct MergeSummary {
    pub out: PathBuf,
    pub base: PathBuf,
    pub adapters: Vec<Merged>,
    pub dtype: &'static str,
    pub parameters: usize,
    pub sha256: String,
}

#[derive(Clone, Debug, serde::Serialize)]
pub struct Merged {
    pub path: PathBuf,
    pub scale: f32,
    pub rank: usize,
    pub alpha: f32,
}

/// An adapter as `DIR` or `DIR:SCALE`, DIR also being the name of one in checkpoints/.
pub fn adapter(text: &str) -> Result<(PathBuf, f32)> {
    let whole = checkpoint::resolve(Some(Path::new(text)))?;
    if whole.exists() {
        return Ok((whole, 1.0));
    }
    match text.rsplit_once(':') {
        None => Ok((whole, 1.0)),
        Some((path, scale)) => match scale.parse::<f32>().ok().filter(|scale| scale.is_finite()) {
            Some(scale) => Ok((checkpoint::resolve(Some(Path::new(path)))?, scale)),
            None => Err(Error::usage(format!("`{scale}` is no scale of an adapter"))
                .with_hint("--adapter takes DIR or DIR:SCALE, for example mine:0.5")),
        },
    }
}

pub fn run(config: &MergeConfig, report: &mut dyn Report) -> Result<MergeSummary> {
    let place = checkpoint::resolve(config.checkpoint.as_deref())?;
    if config.checkpoint.is_none() {
        report.event(Event::Note(format!("using {}", place.display())));
    }
    let folder = sample::open_folder(&place, &config.adapters)?;
    if folder.adapters.is_empty() {
        return Err(Error::usage(format!("nothing to merge into {}", place.display()))
            .with_hint("name an adapter with --adapter"));
    }
    if std::fs::read_dir(&config.out).is_ok_and(|mut entries| entries.next().is_some()) {
        return Err(Error::usage(format!("{} exists and is not empty", config.out.display()))
            .with_hint("choose another folder with --out"));
    }
    model_folder::write_merged(&folder, &config.out, config.stored)?;
    let stored = config.stored.or(folder.weights.stored("model.embed_tokens.weight"));
    let merged = |(adapter, scale): &(checkpoint::adapter::Adapter, f32)| Merged {
        path: adapter.path.clone(),
        scale: *scale,
        rank: adapter.settings.rank,
        alpha: adapter.settings.alpha,
    };
    Ok(MergeSummary {
        sha256: checkpoint::hash(&config.out)?,
        out: config.out.clone(),
        base: folder.base.clone(),
        adapters: folder.adapters.iter().map(merged).collect(),
        dtype: stored.unwrap_or(StoredType::F32).name(),
        parameters: folder.config.parameters(),
    })
}
