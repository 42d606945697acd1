//! One text that is being continued: its ids, its settings, and the cache of what was computed.
//!
//! Made by `Engine::row`, moved on by `Engine::step`. The ids may be ahead of the cache: those beyond it are pending and
//! are computed by the next prefill or step. At least one id is always pending: the one that the next token follows.

use super::sampler::Sampling;
use crate::error::{Error, Result};
use crate::nn::cache::{Cache, CacheSettings};

/// Everything beside weights and prompt that a row's text depends on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowSettings {
    pub sampling: Sampling,
    pub cache: CacheSettings,
    /// Ids that end the row; the one that did is its last.
    pub stop: Vec<u32>,
}

/// A text being continued. A clone shares the cache's pages until one of the two writes to them.
#[derive(Clone)]
pub struct Row {
    ids: Vec<u32>,
    prompt: usize,
    settings: RowSettings,
    pub(super) cache: Cache,
}

impl Row {
    /// The parts are checked by `Engine::row`.
    pub(super) fn new(prompt: Vec<u32>, settings: RowSettings, cache: Cache) -> Self {
        Self { prompt: prompt.len(), ids: prompt, settings, cache }
    }

    /// The prompt and what was made so far.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// What was made so far.
    pub fn new_ids(&self) -> &[u32] {
        &self.ids[self.prompt..]
    }

    pub fn settings(&self) -> &RowSettings {
        &self.settings
    }

    /// Whether the last id that was made is a stop id.
    pub fn is_finished(&self) -> bool {
        self.new_ids().last().is_some_and(|id| self.settings.stop.contains(id))
    }

    /// Ids that are not in the cache yet, at least one.
    pub fn pending(&self) -> usize {
        self.ids.len() - self.cache.len()
    }

    /// Memory of the keys and values, pages shared with other rows included.
    pub fn cache_bytes(&self) -> usize {
        self.cache.bytes()
    }

    /// Cuts the text back to its first `len` ids, as if the others had never been. Fails, changing nothing, for 0, for more
    /// than there are, and where the window has left behind what the next token needs.
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        if len == 0 || len > self.ids.len() {
            return Err(Error::op("truncate", format!("1 to {} ids", self.ids.len()), len.to_string()));
        }
        self.cache.truncate(self.cache.len().min(len - 1))?;
        self.ids.truncate(len);
        self.prompt = self.prompt.min(len);
        Ok(())
    }

    /// The same text going on with other settings of sampling; what is computed is shared, not copied.
    pub fn fork(&self, sampling: Sampling) -> Result<Row> {
        sampling.validate()?;
        let mut row = self.clone();
        row.settings.sampling = sampling;
        Ok(row)
    }

    pub(super) fn push(&mut self, id: u32) {
        self.ids.push(id);
    }
}
