//! The one training loop: what happens at which step, and nothing else.
//!
//! Called by the recipes, which say through `Hooks` how to validate, save and report. The order inside a step is fixed
//! (update, validate, save, look for an interrupt), so that a resumed run repeats it exactly.

use super::objective::Objective;
use super::schedule::Schedule;
use super::step::{StepRecord, Trainer};
use crate::data::windows::Windows;
use crate::error::{Error, Result};
use crate::model::gpt::Batch;

/// When things happen.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub schedule: Schedule,
    /// Windows of a micro-batch, and micro-batches of a step.
    pub batch: usize,
    pub accumulate: usize,
    pub eval_every: u64,
    pub save_every: u64,
    /// Validations without a better one after which the run stops; 0 never stops early.
    pub patience: usize,
}

/// The best validation so far, and how long ago it was.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Best {
    pub val_loss: Option<f64>,
    pub step: u64,
    /// Validations since.
    pub stale: usize,
}

/// What the loop leaves to its caller.
pub trait Hooks {
    /// The held-out loss of the model now, in nats a token; `None` if nothing is held out.
    fn validate(&mut self, trainer: &mut Trainer) -> Result<Option<f64>>;
    /// The validation at this step is the best so far.
    fn improved(&mut self, trainer: &mut Trainer) -> Result<()>;
    /// Writes everything that resuming needs.
    fn save(&mut self, trainer: &mut Trainer, best: Best) -> Result<()>;
    /// A step is done; it took `seconds`, and ended with a validation if there is a `val_loss`.
    fn observe(&mut self, record: &StepRecord, seconds: f64, val_loss: Option<f64>) -> Result<()>;
    /// Whether the user wants to stop.
    fn interrupted(&self) -> bool;
}

/// Why the loop ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    Finished,
    EarlyStop,
    Interrupted,
}

/// Skipped steps in a row after which a run is given up.
const MOST_SKIPS: u32 = 25;

/// Trains from the trainer's step to the end of the plan. State is saved at the end and when interrupted.
pub fn fit(
    trainer: &mut Trainer,
    objective: &mut dyn Objective,
    plan: &Plan,
    windows: &Windows,
    mut best: Best,
    hooks: &mut dyn Hooks,
) -> Result<(Ended, Best)> {
    let mut skips = 0;
    let mut ended = Ended::Finished;
    while trainer.step < plan.schedule.steps {
        let start = std::time::Instant::now();
        let batches = next_batches(plan, windows, trainer.cursor);
        let step = (plan.batch * plan.accumulate) as u64;
        trainer.cursor += step;
        windows.prefetch(trainer.cursor..trainer.cursor + step);
        let record = trainer.train_step(objective, &batches, plan.schedule.learning_rate(trainer.step))?;
        let seconds = start.elapsed().as_secs_f64();
        skips = if record.skipped { skips + 1 } else { 0 };
        if skips == MOST_SKIPS {
            return Err(diverged(&record));
        }
        let last = trainer.step == plan.schedule.steps;
        let mut val_loss = None;
        if last || trainer.step.is_multiple_of(plan.eval_every) {
            val_loss = hooks.validate(trainer)?;
        }
        hooks.observe(&record, seconds, val_loss)?;
        if let Some(loss) = val_loss {
            if best.val_loss.is_none_or(|b| loss < b) {
                best = Best { val_loss: Some(loss), step: trainer.step, stale: 0 };
                hooks.improved(trainer)?;
            } else {
                best.stale += 1;
            }
        }
        let early = plan.patience > 0 && best.stale >= plan.patience;
        let interrupted = hooks.interrupted();
        if last || early || interrupted || trainer.step.is_multiple_of(plan.save_every) {
            hooks.save(trainer, best)?;
        }
        if !last && (early || interrupted) {
            ended = if early { Ended::EarlyStop } else { Ended::Interrupted };
            break;
        }
    }
    Ok((ended, best))
}

/// The micro-batches of the step that begins at `cursor`.
fn next_batches(plan: &Plan, windows: &Windows, cursor: u64) -> Vec<Batch> {
    let micro = |m: usize| {
        let window = cursor + (m * plan.batch) as u64;
        let mut batch = Batch { window, ..Batch::default() };
        let mut starts = Vec::new();
        for row in 0..plan.batch {
            let window = windows.window(window + row as u64);
            batch.layout.seq = window.inputs.len();
            batch.inputs.extend(window.inputs);
            batch.targets.extend(window.targets);
            starts.extend(window.starts.into_iter().flatten());
        }
        batch.layout.starts = (!starts.is_empty()).then(|| starts.into());
        batch
    };
    (0..plan.accumulate).map(micro).collect()
}

fn diverged(record: &StepRecord) -> Error {
    let what = format!(
        "training does not recover: {MOST_SKIPS} steps in a row had a non-finite or spiking loss (step {}, loss {})",
        record.step, record.loss
    );
    Error::failed(what).with_hint("the last saved state is intact; go on from it with a lower --lr and --resume")
}
