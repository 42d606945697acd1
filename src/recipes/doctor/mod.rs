//! `gpt doctor`: what sampling from a checkpoint needs of this machine, and whether it is there.

pub mod metal;

use std::path::PathBuf;

use super::report::Report;
use super::sample::memory::{self, Budget, Load, Memory};
use super::sample::{CacheSettings, DraftChoice, Models, WeightType};
use crate::device::{self, Choice};
use crate::error::Result;
use crate::ops::simd::Family;

#[derive(Clone, Debug)]
pub struct DoctorConfig {
    pub checkpoint: Option<PathBuf>,
    pub device: Choice,
    pub rows: usize,
    /// Positions of a row; the model's context if not given.
    pub positions: Option<usize>,
    pub cache: CacheSettings,
    pub kind: Option<WeightType>,
    /// What is available if not given.
    pub budget: Option<Budget>,
    pub lock_memory: bool,
    pub family: Family,
}

/// The keys of `--json`.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Diagnosis {
    pub checkpoint: PathBuf,
    pub device: &'static str,
    /// Why that device.
    pub reason: String,
    pub kernels: &'static str,
    pub threads: usize,
    /// Of the machine, and what can be taken of it now.
    pub memory_bytes: u64,
    pub available_bytes: u64,
    pub budget_bytes: u64,
    #[serde(flatten)]
    pub need: Memory,
    pub weight_type: &'static str,
    pub rows: usize,
    pub positions: usize,
    pub fits: bool,
    /// Flags of `gpt sample` that would fit, if these settings do not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
    /// Whether the weights can be kept in main memory, if that was asked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub locked: Option<bool>,
}

/// Loads the checkpoint and its draft, and measures.
pub fn run(config: &DoctorConfig, report: &mut dyn Report) -> Result<Diagnosis> {
    let (memory_bytes, available_bytes) = device::memory();
    let choice = DraftChoice::Beside;
    let mut models = Models::open((config.checkpoint.as_deref(), &[]), config.kind, &choice, config.family, report)?;
    let positions = config.positions.unwrap_or(models.engine.config().max_position_embeddings);
    let load = Load { rows: config.rows.max(1), positions: positions.max(1) };
    let need = memory::measure(&mut models.engines(), config.cache, load)?;
    let budget = config.budget.unwrap_or(Budget::Bytes(available_bytes));
    let budget_bytes = budget.bytes(available_bytes);
    let fits = need.total() <= budget_bytes;
    let advice = match fits {
        true => None,
        false => {
            let mildest = memory::mildest(&mut models.engines(), config.cache, load, budget_bytes)?;
            Some(mildest.map_or_else(|| memory::TOO_SMALL.to_owned(), |(cache, _)| memory::flags(cache)))
        }
    };
    let locked = config.lock_memory.then(|| models.engines().iter().all(|engine| engine.lock_memory().is_ok()));
    Ok(Diagnosis {
        checkpoint: models.place.clone(),
        device: config.device.kind.name(),
        reason: config.device.reason.clone(),
        kernels: config.family.name(),
        threads: rayon::current_num_threads(),
        memory_bytes,
        available_bytes,
        budget_bytes,
        need,
        weight_type: models.kind.name(),
        rows: load.rows,
        positions: load.positions,
        fits,
        advice,
        locked,
    })
}
