//! The memory of a GPU's pages: one tensor a kind of page, pages by number. Owned by the decoder, shared by the tables.
//!
//! A page holds the pieces of `page.rs`, one after the other, so that it can be saved and read again by either. Pages come
//! and go with their handles; the tensor grows by half and never shrinks.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::Tensor;

use crate::error::Result;
use crate::ops::decode::page::{CacheType, Page, Quantization};
use crate::ops::heads::Heads;
use crate::ops::storage;

/// The pools of a cache: plain pages, and quantised ones if there are any.
#[derive(Clone)]
pub struct Pools {
    plain: Arc<Pool>,
    quantized: Option<Arc<Pool>>,
}

impl Pools {
    pub fn new(kind: CacheType, quantization: Option<Quantization>, heads: Heads) -> Self {
        let pool = |quantization| Arc::new(Pool::new(Page::new(kind, quantization, heads).bytes().div_ceil(4)));
        Self { plain: pool(None), quantized: quantization.map(|q| pool(Some(q))) }
    }

    /// Whether any page is in use.
    pub fn has_pages(&self) -> bool {
        let in_use = |pool: &Arc<Pool>| {
            let memory = pool.lock();
            memory.taken > memory.free.len()
        };
        in_use(&self.plain) || self.quantized.as_ref().is_some_and(in_use)
    }

    pub(in crate::ops::decode) fn of(&self, quantized: bool) -> &Arc<Pool> {
        match &self.quantized {
            Some(pool) if quantized => pool,
            _ => &self.plain,
        }
    }
}

/// Pages of one size.
pub struct Pool {
    /// 32-bit words of a page.
    words: usize,
    memory: Mutex<Memory>,
}

struct Memory {
    tensor: Tensor,
    /// Pages that it has room for, and those that were ever taken.
    capacity: usize,
    taken: usize,
    free: Vec<u32>,
    /// Handles that were ever given out.
    handles: u64,
}

fn tensor(words: usize) -> Tensor {
    storage::tensor(vec![0u32; words], words)
}

impl Pool {
    fn new(words: usize) -> Self {
        let memory = Memory { tensor: tensor(1), capacity: 0, taken: 0, free: Vec::new(), handles: 0 };
        Self { words, memory: Mutex::new(memory) }
    }

    fn lock(&self) -> MutexGuard<'_, Memory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn page_bytes(&self) -> usize {
        4 * self.words
    }

    /// The memory of all pages; another one once pages have been added.
    pub fn tensor(&self) -> Tensor {
        self.lock().tensor.clone()
    }

    /// A page with anything in it.
    pub(in crate::ops::decode) fn page(self: &Arc<Self>) -> DevicePage {
        let mut memory = self.lock();
        let id = match memory.free.pop() {
            Some(id) => id,
            None => {
                if memory.taken == memory.capacity {
                    self.grow(&mut memory);
                }
                memory.taken += 1;
                (memory.taken - 1) as u32
            }
        };
        memory.handles += 1;
        DevicePage { id, handle: memory.handles, pool: Arc::clone(self) }
    }

    fn grow(&self, memory: &mut Memory) {
        let capacity = (memory.capacity + memory.capacity / 2).max(8);
        let larger = tensor(capacity * self.words);
        {
            let mut to = storage::write::<u32>("pool", &larger).expect("a new tensor of this type");
            let from = storage::read::<u32>("pool", &memory.tensor).expect("the tensor that `tensor` made");
            let used = memory.taken * self.words;
            to[..used].copy_from_slice(&from[..used]);
        }
        (memory.tensor, memory.capacity) = (larger, capacity);
    }

    /// Lets `f` see the words of a page for reading or writing.
    fn with<R>(&self, memory: &Memory, id: u32, f: impl FnOnce(&mut [u32]) -> R) -> Result<R> {
        let mut all = storage::write::<u32>("pool", &memory.tensor)?;
        Ok(f(&mut all[id as usize * self.words..][..self.words]))
    }
}

/// A page of a pool; its number is free again when the handle goes.
pub struct DevicePage {
    id: u32,
    /// Unlike the number never given out again.
    handle: u64,
    pool: Arc<Pool>,
}

impl DevicePage {
    pub fn id(&self) -> u32 {
        self.id
    }

    pub fn handle(&self) -> u64 {
        self.handle
    }

    pub fn bytes(&self) -> usize {
        self.pool.page_bytes()
    }

    pub fn save(&self, bytes: &mut Vec<u8>) -> Result<()> {
        let memory = self.pool.lock();
        self.pool.with(&memory, self.id, |words| bytes.extend(words.iter().flat_map(|word| word.to_le_bytes())))
    }

    pub fn load(&mut self, bytes: &mut &[u8]) -> Option<()> {
        let from = bytes.split_off(..self.bytes())?.as_chunks::<4>().0;
        let memory = self.pool.lock();
        let copy = |words: &mut [u32]| words.iter_mut().zip(from).for_each(|(to, x)| *to = u32::from_le_bytes(*x));
        self.pool.with(&memory, self.id, copy).ok()
    }
}

impl Clone for DevicePage {
    /// Another page with the same content.
    fn clone(&self) -> Self {
        let page = self.pool.page();
        let memory = self.pool.lock();
        let mut words = vec![0; self.pool.words];
        self.pool
            .with(&memory, self.id, |from| words.copy_from_slice(from))
            .and_then(|()| self.pool.with(&memory, page.id, |to| to.copy_from_slice(&words)))
            .expect("the tensor of a pool is nobody else's while no kernel runs");
        page
    }
}

impl Drop for DevicePage {
    fn drop(&mut self) {
        self.pool.lock().free.push(self.id);
    }
}
