//! `gpt train`: from a preset and some text to a model folder.
//!
//! Resolves the preset, opens the data, builds or restores the trainer, runs the loop and ends with a report. The commit
//! point of a run is its newest complete `steps/NNNNNN/`; everything else in the folder can be made again from it.

use std::path::{Path, PathBuf};
use std::time::Instant;

use super::horizon;
use super::report::{Event, Interrupt, Report};
use super::run_folder::RunFolder;
use crate::checkpoint::model_folder::ModelFolder;
use crate::data::{self, Corpus, windows::Windows};
use crate::device;
use crate::error::{Error, Result};
use crate::eval::{self, Evaluation};
use crate::model::gpt::Gpt;
use crate::ops::{ctx::Ctx, simd::Family};
use crate::preset::Preset;
use crate::tokenizer::Tokenizer;
use crate::trainer::fit::{self, Best, Ended, Hooks, Plan};
use crate::trainer::step::{StepRecord, Trainer};
use crate::trainer::{curve, optimizer, schedule};

/// What `gpt train` was asked to do.
#[derive(Clone, Debug)]
pub struct TrainConfig {
    pub preset: Preset,
    /// Keys given by flags, in the order given: what a resumed run may be told anew.
    pub given: Vec<(String, String)>,
    pub out: Option<PathBuf>,
    pub resume: bool,
    pub init_from: Option<PathBuf>,
    pub dry_run: bool,
    pub family: Family,
}

/// What a finished run reports; the keys of `--json`.
#[derive(Clone, Debug, serde::Serialize)]
pub struct TrainSummary {
    pub out: PathBuf,
    pub preset: String,
    pub parameters: usize,
    pub steps: u64,
    pub tokens: u64,
    pub train_loss: Option<f32>,
    pub val_loss: Option<f64>,
    pub val_bpb: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entropy_bpb: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source_bpb: Option<f64>,
    pub tokens_per_second: f64,
    pub seconds: f64,
    pub peak_memory_bytes: u64,
    #[serde(skip)]
    pub interrupted: bool,
    /// The loss curve as characters.
    #[serde(skip)]
    pub curve: String,
}
