//! What a recipe tells while it works. Recipes never print: `cli` shows these events, a test collects them.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::sample::SampledRow;

#[derive(Clone, Debug)]
pub enum Event {
    /// A line worth reading once.
    Note(String),
    /// Something that may not be what was meant.
    Warning(String),
    /// A training step is done.
    Step(Progress),
    /// A state was saved there.
    Saved(PathBuf),
    /// The text of row `number` of `of` comes next.
    Row { number: usize, of: usize, prompt: String },
    /// Text that was generated, as it comes.
    Text(String),
    /// The row is whole.
    RowEnd(Box<SampledRow>),
}

/// Where a training run stands.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    pub step: u64,
    pub steps: u64,
    pub loss: f32,
    /// Of this step's validation, if there was one.
    pub val_loss: Option<f64>,
    pub learning_rate: f64,
    pub skipped: bool,
    pub tokens_per_second: f64,
    pub seconds_left: f64,
}

pub trait Report {
    fn event(&mut self, event: Event);
}

/// Set when the user wants to stop; looked at between steps.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Asks to stop; true if that was asked before.
    pub fn request(&self) -> bool {
        self.0.swap(true, Relaxed)
    }

    /// Forgets what was asked.
    pub fn clear(&self) {
        self.0.store(false, Relaxed);
    }

    pub fn requested(&self) -> bool {
        self.0.load(Relaxed)
    }
}
