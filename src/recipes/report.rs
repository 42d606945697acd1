//! What a recipe tells while it works. Recipes never print: `cli` shows these events, a test collects them.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::sample::SampledRow;
use crate::data::progress;
use crate::error::{Error, Result};

#[derive(Clone, Debug)]
pub enum Event {
    /// A line worth reading once.
    Note(String),
    /// Something that may not be what was meant.
    Warning(String),
    /// A training step is done.
    Step(StepProgress),
    /// Data is being prepared: what is done, to how many bytes of how many; `None` when it is over.
    Preparing(Option<Preparation>),
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
pub struct StepProgress {
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

/// Where the preparation of data stands.
#[derive(Clone, Debug)]
pub struct Preparation {
    /// `fetching wikitext-2-raw-v1.zip`, `tokenizing`.
    pub what: String,
    pub done: u64,
    pub total: Option<u64>,
}

pub trait Report {
    fn event(&mut self, event: Event);
}

/// Passes on what data tells, and Ctrl-C to it.
pub struct Preparing<'a> {
    pub report: &'a mut dyn Report,
    pub interrupt: &'a Interrupt,
    current: Option<Preparation>,
    shown: u64,
}

impl<'a> Preparing<'a> {
    pub fn new(report: &'a mut dyn Report, interrupt: &'a Interrupt) -> Self {
        Self { report, interrupt, current: None, shown: 0 }
    }
}

/// Bytes between two events: a bar need not be drawn more often.
const EVERY: u64 = 1 << 18;

impl progress::Progress for Preparing<'_> {
    fn begin(&mut self, what: &str, total: Option<u64>) {
        self.current = Some(Preparation { what: what.to_owned(), done: 0, total });
        self.shown = 0;
        self.report.event(Event::Preparing(self.current.clone()));
    }

    fn at(&mut self, done: u64) -> Result<()> {
        if self.interrupt.requested() {
            let what = "stopped while the data was prepared";
            return Err(Error::failed(what).with_hint("run it again: it goes on from there"));
        }
        let Some(current) = &mut self.current else { return Ok(()) };
        current.done = done;
        if done.abs_diff(self.shown) >= EVERY {
            self.shown = done;
            self.report.event(Event::Preparing(self.current.clone()));
        }
        Ok(())
    }

    fn end(&mut self) {
        self.current = None;
        self.report.event(Event::Preparing(None));
    }

    fn note(&mut self, text: String) {
        self.report.event(Event::Note(text));
    }
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
