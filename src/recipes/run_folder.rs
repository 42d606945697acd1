//! A training run on disk: how its state is written and read back. checkpoints/README.md describes the files.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::checkpoint::adapter::{self, Base};
use crate::checkpoint::lock::RunLock;
use crate::checkpoint::model_folder::{self, Companions};
use crate::checkpoint::steps::{self, StepFolder};
use crate::checkpoint::weights::{Tensors, Weights};
use crate::error::{Error, Result};
use crate::files::atomic::{self, Fill};
use crate::nn::parameter::NamedTensor;
use crate::ops::storage;
use crate::trainer::curve::{self, Point};
use crate::trainer::fit::Best;
use crate::trainer::step::{StepRecord, Trainer};

const WEIGHTS: &str = "weights.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const STATE: &str = "state.json";
const METRICS: &str = "metrics.jsonl";
pub const PRESET: &str = "preset.toml";

/// The numbers of a saved state that are no tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    pub step: u64,
    /// Windows consumed.
    pub cursor: u64,
    pub best: Best,
    /// CPU kernels that computed it; others round differently.
    pub kernels: String,
    /// Tokens of the training split and the tokenizer's hash: what the cursor counts in.
    pub train_tokens: u64,
    pub tokenizer: String,
    /// The settings of an objective that is not the data alone.
    #[serde(default, skip_serializing_if = "serde_json::Value::is_null")]
    pub goal: serde_json::Value,
}

pub struct RunFolder {
    pub path: PathBuf,
    /// metrics.jsonl so far.
    metrics: Vec<u8>,
    /// What the run's adapters are trained beside, if it trains any.
    base: Option<Base>,
    _lock: RunLock,
}

impl RunFolder {
    /// Makes the folder if there is none, and keeps other writers out.
    pub fn open(path: &Path, base: Option<Base>) -> Result<Self> {
        std::fs::create_dir_all(path).map_err(|e| Error::io("create", path, e))?;
        Ok(Self { path: path.to_owned(), metrics: Vec::new(), base, _lock: RunLock::take(path)? })
    }

    /// Appends a line to metrics.jsonl. It holds nothing that differs between two runs of one seed.
    pub fn log(&mut self, record: &StepRecord, val_loss: Option<f64>) -> Result<()> {
        #[derive(Serialize)]
        struct Line {
            step: u64,
            loss: f32,
            learning_rate: f64,
            gradient_norm: f32,
            #[serde(skip_serializing_if = "std::ops::Not::not")]
            skipped: bool,
            #[serde(skip_serializing_if = "Option::is_none")]
            val_loss: Option<f64>,
        }
        let StepRecord { step, loss, learning_rate, gradient_norm, skipped } = *record;
        let line = Line { step, loss, learning_rate, gradient_norm, skipped, val_loss };
        let mut text = serde_json::to_string(&line).expect("plain numbers");
        text.push('\n');
        self.metrics.extend_from_slice(text.as_bytes());
        let path = self.path.join(METRICS);
        let open = std::fs::OpenOptions::new().create(true).append(true).open(&path);
        open.and_then(|mut f| std::io::Write::write_all(&mut f, text.as_bytes()))
            .map_err(|e| Error::io("write", &path, e))
    }

    /// Commits the trainer's state as a step, then brings the run's model, curve and metrics up to it.
    pub fn save(
        &mut self,
        trainer: &mut Trainer,
        state: &State,
        preset: &str,
        keep: usize,
        companions: &Companions,
    ) -> Result<PathBuf> {
        let (weights, mut optimizer) = trainer.state()?;
        let scalars = storage::read::<f32>("save", trainer.scalars.tensor())?.to_vec();
        optimizer.push(NamedTensor { name: "scalars".into(), shape: vec![scalars.len()], data: scalars });
        let json = serde_json::to_string_pretty(state).expect("plain numbers and texts") + "\n";
        let files: [(&str, &dyn Fill); 5] = [
            (WEIGHTS, &Tensors(&weights)),
            (OPTIMIZER, &Tensors(&optimizer)),
            (STATE, &json.as_bytes()),
            (METRICS, &self.metrics),
            (PRESET, &preset.as_bytes()),
        ];
        let place = steps::write(&self.path, state.step, &files)?;
        // The copies of the moments are large; the model is copied next.
        drop((weights, optimizer));
        self.write_model(trainer, "", companions)?;
        atomic::write(&self.path.join(PRESET), preset.as_bytes())?;
        atomic::write(&self.path.join("loss.svg"), self.svg()?.as_bytes())?;
        steps::prune(&self.path, keep)?;
        Ok(place)
    }

    /// Writes the model as it is validated (averaged weights if EMA is on), or its adapters, to the run's folder, or one below
    /// it.
    pub fn write_model(&self, trainer: &mut Trainer, below: &str, companions: &Companions) -> Result<()> {
        trainer.swap_average()?;
        let tensors = trainer.model.tensors();
        trainer.swap_average()?;
        let place = self.path.join(below);
        match (trainer.model.adaptation(), &self.base) {
            (Some(adaptation), Some(base)) => adapter::write(&place, base, adaptation, &tensors?, companions),
            _ => model_folder::write(&place, &trainer.model.config, &tensors?, companions),
        }
    }

    /// Puts the weights of the best validation into the trainer.
    pub fn restore_best(&self, trainer: &mut Trainer) -> Result<()> {
        let place = self.path.join("best");
        let name = if trainer.model.adaptation().is_some() { adapter::MODEL } else { model_folder::MODEL };
        let weights = Weights::open(&place.join(name))?;
        trainer.take(&mut |name, shape| weights.get(name, shape))
    }

    /// Puts the state of a saved step into the trainer and goes back to its metrics.
    pub fn restore(&mut self, step: &StepFolder, trainer: &mut Trainer, state: &State) -> Result<()> {
        let (weights, optimizer) = (step.tensors(WEIGHTS)?, step.tensors(OPTIMIZER)?);
        trainer.restore(&mut |name, shape| weights.get(name, shape), &mut |name, shape| optimizer.get(name, shape))?;
        let count = trainer.scalars.tensor().elem_count();
        let scalars = optimizer.get("scalars", &[count])?;
        storage::write::<f32>("restore", trainer.scalars.tensor())?.copy_from_slice(&scalars);
        (trainer.step, trainer.cursor) = (state.step, state.cursor);
        self.metrics = step.read(METRICS)?;
        atomic::write(&self.path.join(METRICS), &self.metrics)
    }

    /// The state.json of a step.
    pub fn state(step: &StepFolder) -> Result<State> {
        let place = step.path.join(STATE);
        serde_json::from_slice(&step.read(STATE)?).map_err(|e| Error::file(place, "a saved state", e.to_string()))
    }

    /// The training and validation curves so far.
    fn points(&self) -> (Vec<Point>, Vec<Point>) {
        let lines = self.metrics.split(|b| *b == b'\n').filter_map(|l| serde_json::from_slice(l).ok());
        let (mut train, mut validation) = (Vec::new(), Vec::new());
        for line in lines {
            let line: serde_json::Value = line;
            let step = line["step"].as_f64().unwrap_or(0.0);
            train.extend(line["loss"].as_f64().map(|loss| (step, loss)));
            validation.extend(line["val_loss"].as_f64().map(|loss| (step, loss)));
        }
        (train, validation)
    }

    pub fn svg(&self) -> Result<String> {
        let (train, validation) = self.points();
        curve::svg(&train, &validation)
    }

    /// The curve as lines of characters.
    pub fn characters(&self) -> String {
        let (train, validation) = self.points();
        curve::characters(&train, &validation, 60, 8)
    }
}
