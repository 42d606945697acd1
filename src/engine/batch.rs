//! Many texts at once: an iterator over the tokens that a model gives to a list of prompts.
//!
//! Used by the recipes. So many rows as wanted are worked on together; one that ends makes room for the next prompt. What
//! prompts have in common with one that is or was worked on is computed once. Nothing here changes a text: each is the one
//! that its prompt alone would get.

use std::collections::VecDeque;

use super::draft::Draft;
use super::{Engine, Row, RowSettings};
use crate::error::{Error, Result};

/// A prompt to be continued.
#[derive(Clone, Debug)]
pub struct Job {
    /// At least one id.
    pub prompt: Vec<u32>,
    pub settings: RowSettings,
    pub max_tokens: usize,
}

/// Why a row has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A stop id came up.
    Stop,
    /// It has all the tokens that it may get.
    Length,
}

/// New ids of one row; none only if it ends without any.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// The number of the job in the list.
    pub job: usize,
    pub ids: Vec<u32>,
    pub finish: Option<Finish>,
}

struct Active {
    job: usize,
    row: Row,
    max_tokens: usize,
}

impl Active {
    /// Why the row is at its end, if it is.
    fn finish(&self) -> Option<Finish> {
        if self.row.is_finished() {
            return Some(Finish::Stop);
        }
        (self.row.new_ids().len() >= self.max_tokens).then_some(Finish::Length)
    }
}

/// A list of jobs on their way.
pub struct Batch<'e> {
    engine: &'e mut Engine,
    draft: Option<Draft>,
    waiting: VecDeque<(usize, Job)>,
    active: Vec<Active>,
    /// The computed prompt that later ones may begin with.
    prefix: Option<Row>,
    ready: VecDeque<Step>,
    width: usize,
    failed: bool,
    peak_cache_bytes: usize,
    prefilled: usize,
}

impl<'e> Batch<'e> {
    /// Works on the jobs, up to `width` at a time.
    pub fn new(engine: &'e mut Engine, jobs: Vec<Job>, width: usize, draft: Option<Draft>) -> Result<Self> {
        if width == 0 {
            return Err(Error::usage("0 rows at a time make no text").with_hint("use at least 1"));
        }
        Ok(Self {
            engine,
            draft,
            waiting: jobs.into_iter().enumerate().collect(),
            active: Vec::new(),
            prefix: None,
            ready: VecDeque::new(),
            width,
            failed: false,
            peak_cache_bytes: 0,
            prefilled: 0,
        })
    }

    /// Begins with a computed row, for prompts that have it in common.
    pub fn with_prefix(mut self, prefix: Row) -> Self {
        self.prefix = Some(prefix);
        self
    }

    /// Starts jobs while there is room, their prompts computed.
    pub fn fill(&mut self) -> Result<()> {
        while self.active.len() < self.width
            && let Some((job, Job { prompt, settings, max_tokens })) = self.waiting.pop_front()
        {
            if max_tokens == 0 {
                self.ready.push_back(Step { job, ids: Vec::new(), finish: Some(Finish::Length) });
                continue;
            }
            let mut row = self.engine.row(&prompt, settings)?;
            let shared = self.prefix.iter().chain(self.active.iter().map(|active| &active.row));
            if let Some(other) = shared.max_by_key(|other| row.common(other)) {
                row.share(other);
            }
            self.prefilled += row.pending();
            self.engine.prefill(&mut row)?;
            // What a cloned row shares costs nothing until one of the two goes on.
            self.prefix = Some(row.clone());
            self.active.push(Active { job, row, max_tokens });
        }
        Ok(())
    }

    /// Ends a row early: nothing more comes of it.
    pub fn stop(&mut self, job: usize) {
        self.active.retain(|active| active.job != job);
        self.ready.retain(|step| step.job != job);
        if let Some(draft) = &mut self.draft {
            draft.forget(job);
        }
    }

    /// The row of a job that is being worked on.
    pub fn row(&self, job: usize) -> Option<&Row> {
        self.active.iter().find(|active| active.job == job).map(|active| &active.row)
    }

    /// The last prompt that was computed.
    pub fn prefix(&self) -> Option<&Row> {
        self.prefix.as_ref()
    }

    pub fn draft(&self) -> Option<&Draft> {
        self.draft.as_ref()
    }

    /// The draft, ready for another batch.
    pub fn into_draft(mut self) -> Option<Draft> {
        if let Some(draft) = &mut self.draft {
            draft.forget_all();
        }
        self.draft
    }

    /// The most bytes of keys and values so far, the draft's included; shared pages count for each row.
    pub fn peak_cache_bytes(&self) -> usize {
        self.peak_cache_bytes
    }

    /// Ids of prompts that were computed, not taken from a shared start.
    pub fn prefilled(&self) -> usize {
        self.prefilled
    }

    fn step(&mut self) -> Result<()> {
        self.fill()?;
        let before: Vec<usize> = self.active.iter().map(|active| active.row.ids().len()).collect();
        match &mut self.draft {
            None => {
                let mut rows: Vec<&mut Row> = self.active.iter_mut().map(|active| &mut active.row).collect();
                self.engine.advance(&mut rows, &[])?;
            }
            Some(draft) => {
                let rows = self.active.iter_mut().map(|active| {
                    let left = active.max_tokens - active.row.new_ids().len();
                    (active.job, left, &mut active.row)
                });
                draft.advance(self.engine, &mut rows.collect::<Vec<_>>())?;
            }
        }
        let bytes: usize = self.active.iter().map(|active| active.row.cache_bytes()).sum();
        let bytes = bytes + self.draft.as_ref().map_or(0, Draft::cache_bytes);
        self.peak_cache_bytes = self.peak_cache_bytes.max(bytes);
        for (active, len) in self.active.iter().zip(before) {
            let (job, ids, finish) = (active.job, active.row.ids()[len..].to_vec(), active.finish());
            self.ready.push_back(Step { job, ids, finish });
        }
        Ok(())
    }
}

impl Iterator for Batch<'_> {
    type Item = Result<Step>;

    /// New ids of some row: every row's turn comes once in a step. A row that has ended stays readable until the next call.
    fn next(&mut self) -> Option<Result<Step>> {
        loop {
            if let Some(step) = self.ready.pop_front() {
                return Some(Ok(step));
            }
            if let Some(draft) = &mut self.draft {
                let ended = self.active.iter().filter(|active| active.finish().is_some());
                ended.for_each(|active| draft.forget(active.job));
            }
            self.active.retain(|active| active.finish().is_none());
            if self.failed || self.active.is_empty() && self.waiting.is_empty() {
                return None;
            }
            if let Err(error) = self.step() {
                self.failed = true;
                return Some(Err(error));
            }
        }
    }
}
