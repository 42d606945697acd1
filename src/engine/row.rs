//! One text that is being continued: its ids, its settings, and the cache of what was computed.
//!
//! Made by `Engine::row`, moved on by `Engine::step`. The ids may be ahead of the cache: those beyond it are pending and
//! are computed by the next prefill or step. At least one id is always pending: the one that the next token follows.

use super::MAX_PROPOSED;
use super::sampler::Sampling;
use crate::error::{Error, Result};
use crate::nn::cache::{Cache, CacheSettings};

/// Everything beside weights and prompt that a row's text depends on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowSettings {
    pub sampling: Sampling,
    pub cache: CacheSettings,
    /// Added to the logits of these ids.
    pub logit_bias: Vec<(u32, f32)>,
    /// Ids that end the row; the one that did is its last.
    pub stop: Vec<u32>,
    /// New ids before which no stop id is taken.
    pub min_tokens: usize,
    /// For each new id, the log-probabilities of so many of the likeliest ids are kept, and its own.
    pub logprobs: Option<usize>,
}

/// What the model thought of a new id, before any setting of sampling: the natural logarithms of probabilities.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Logprobs {
    pub chosen: f32,
    /// The likeliest ids, best first.
    pub top: Vec<(u32, f32)>,
}

/// A text being continued. A clone shares the cache's pages until one of the two writes to them.
#[derive(Clone)]
pub struct Row {
    ids: Vec<u32>,
    prompt: usize,
    settings: RowSettings,
    /// Of each new id, if they are kept.
    logprobs: Vec<Logprobs>,
    pub(super) cache: Cache,
}

impl Row {
    /// The parts are checked by `Engine::row`.
    pub(super) fn new(prompt: Vec<u32>, settings: RowSettings, cache: Cache) -> Self {
        Self { prompt: prompt.len(), ids: prompt, settings, logprobs: Vec::new(), cache }
    }

    /// The prompt and what was made so far.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// What was made so far.
    pub fn new_ids(&self) -> &[u32] {
        &self.ids[self.prompt..]
    }

    /// Ids of the prompt.
    pub fn prompt_len(&self) -> usize {
        self.prompt
    }

    /// Of each new id, if the settings ask for them.
    pub fn logprobs(&self) -> &[Logprobs] {
        &self.logprobs
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

    /// The most memory that its keys and values take at `len` positions.
    pub fn cache_bytes_at(&self, len: usize) -> usize {
        self.cache.bytes_at(len)
    }

    /// Appends what is computed to `bytes`.
    pub fn write_cache(&self, bytes: &mut Vec<u8>) -> Result<()> {
        self.cache.write_to(bytes)
    }

    /// Takes what `write_cache` has appended for a row of the same ids and settings; `None`, and the row is of no use, if that
    /// is not what `bytes` are.
    pub fn read_cache(&mut self, bytes: &[u8]) -> Option<()> {
        self.cache.read_from(bytes)?;
        (self.cache.len() < self.ids.len()).then_some(())
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
        self.logprobs.truncate(len - self.prompt);
        Ok(())
    }

    /// The same text going on with other settings of sampling; what is computed is shared, not copied.
    pub fn fork(&self, sampling: Sampling) -> Result<Row> {
        sampling.validate()?;
        let mut row = self.clone();
        row.settings.sampling = sampling;
        Ok(row)
    }

    /// Ids at the start whose keys and values `other` has computed, under the same settings of the cache, and this row needs.
    pub(super) fn common(&self, other: &Row) -> usize {
        if self.settings.cache != other.settings.cache {
            return 0;
        }
        let same = self.ids.iter().zip(&other.ids).take_while(|(a, b)| a == b).count();
        same.min(other.cache.len()).min(self.ids.len() - 1)
    }

    /// Takes what `other` has computed of the common start, if that is more than nothing and still there.
    pub(super) fn share(&mut self, other: &Row) {
        let common = self.common(other);
        let mut cache = other.cache.clone();
        if common > self.cache.len() && cache.truncate(common).is_ok() {
            self.cache = cache;
        }
    }

    /// Becomes a row over `ids`, which this row has but for the last few that it was given as proposals, keeping what is
    /// computed of them; fails, changing nothing, where that was dropped.
    pub(super) fn follow(&mut self, ids: &[u32]) -> Result<()> {
        let known = self.ids.len().min(ids.len()).saturating_sub(MAX_PROPOSED + 1);
        let pairs = self.ids[known..].iter().zip(&ids[known..]);
        let same = known + pairs.take_while(|(a, b)| a == b).count();
        debug_assert!(self.ids[..same] == ids[..same], "another text than before");
        let computed = self.cache.len().min(same).min(ids.len() - 1);
        self.cache.truncate(computed)?;
        self.ids.truncate(same);
        self.ids.extend_from_slice(&ids[same..]);
        Ok(())
    }

    /// Adds ids that are only proposed, to be confirmed or taken back.
    pub(super) fn propose(&mut self, ids: &[u32]) {
        self.ids.extend_from_slice(ids);
    }

    /// Back to the first `len` ids; what is computed stays, for ids that are added again.
    pub(super) fn unpropose(&mut self, len: usize) {
        self.ids.truncate(len);
    }

    pub(super) fn push(&mut self, id: u32, logprobs: Option<Logprobs>) {
        self.ids.push(id);
        self.logprobs.extend(logprobs);
    }
}
