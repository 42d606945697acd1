//! The launch context: where ops run, the free list their outputs come from, and the counters.
//!
//! Every op takes `&mut Ctx`. Training opens one for a run, the engine one for a model; on this page it is the CPU's
//! (the one rayon pool is installed by the caller). The counters say how many ops and bytes a step costs on any machine.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex, OnceLock};

use candle_core::{DType, Device, Shape, Tensor};

use super::gemm::Precision;
use super::simd::Family;
use super::storage::{self, Element};
use super::team::Team;
use crate::error::Result;

/// What was launched since the last `take_counts`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Ops started; on a GPU this is the number of dispatches.
    pub launches: u64,
    /// Bytes of weights that the ops read.
    pub weight_bytes: u64,
}

pub struct Ctx {
    device: Device,
    family: Family,
    precision: Precision,
    free: Arc<Mutex<FreeList>>,
    team: Arc<OnceLock<Team>>,
    counts: Counts,
}

impl Ctx {
    /// A context for the CPU with that family of kernels, which must be available.
    pub fn cpu(family: Family) -> Self {
        assert!(family.available(), "{} kernels cannot run on this CPU", family.name());
        let (precision, counts) = (Precision::F32, Counts::default());
        Self { device: Device::Cpu, family, precision, free: Arc::default(), team: Arc::default(), counts }
    }

    /// Another context over the same device and free list, for work that runs beside this one's; its counters are its own.
    pub fn fork(&self) -> Self {
        let (free, team) = (Arc::clone(&self.free), Arc::clone(&self.team));
        let (family, precision) = (self.family, self.precision);
        Self { device: self.device.clone(), family, precision, free, team, counts: Counts::default() }
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    pub fn family(&self) -> Family {
        self.family
    }

    /// The threads of short ops, as many as the rayon pool has at the first call.
    pub fn team(&self) -> &Team {
        self.team.get_or_init(|| Team::new(rayon::current_num_threads()))
    }

    /// What matrix products multiply in.
    pub fn precision(&self) -> Precision {
        self.precision
    }

    pub fn set_precision(&mut self, precision: Precision) {
        self.precision = precision;
    }

    /// Notes one launch of an op that reads `weight_bytes` of weights.
    pub fn launch(&mut self, weight_bytes: usize) {
        self.counts.launches += 1;
        self.counts.weight_bytes += weight_bytes as u64;
    }

    pub fn take_counts(&mut self) -> Counts {
        std::mem::take(&mut self.counts)
    }

    /// A vector of `len` elements from the free list, its contents unspecified: the op must write each of them.
    pub fn vec<T: Pooled>(&self, len: usize) -> Vec<T> {
        let recycled = T::shelf(&mut self.free.lock().expect("free list lock")).take(len);
        recycled.unwrap_or_else(|| {
            // In tests fresh memory is poisoned as recycled memory is, so that an element left unwritten shows.
            vec![if cfg!(debug_assertions) || cfg!(test) { T::POISON } else { T::default() }; len]
        })
    }

    /// A zeroed vector from the free list.
    pub fn zeros<T: Pooled>(&self, len: usize) -> Vec<T> {
        let mut vec = self.vec(len);
        vec.fill(T::default());
        vec
    }

    /// Wraps an op's output; its memory goes back to this context's free list with the last handle.
    pub fn value<T: Pooled>(&self, vec: Vec<T>, shape: impl Into<Shape>) -> Value {
        let tensor = storage::tensor(vec, shape);
        Value { owner: Arc::new(Owner { tensor: tensor.clone(), free: Arc::clone(&self.free) }), tensor }
    }

    /// Gives a scratch vector back.
    pub fn recycle<T: Pooled>(&self, vec: Vec<T>) {
        T::shelf(&mut self.free.lock().expect("free list lock")).put(vec);
    }

    /// Gives the memory of the free list back to the system.
    pub fn trim(&self) {
        *self.free.lock().expect("free list lock") = FreeList::default();
    }

    /// Bytes that lie in the free list now.
    pub fn free_bytes(&self) -> usize {
        let free = self.free.lock().expect("free list lock");
        (free.f32.elements + free.u32.elements) * 4
    }
}

/// A tensor whose memory returns to the free list when the last handle or view is gone. Derefs to candle's tensor; a
/// plain clone of that tensor does not keep the memory: it would be refused as "freed" when read.
#[derive(Clone, Debug)]
pub struct Value {
    tensor: Tensor,
    owner: Arc<Owner>,
}

impl Value {
    /// The same memory under another shape of as many elements.
    pub fn reshape(&self, shape: impl Into<Shape>) -> Result<Value> {
        Ok(Value { tensor: self.tensor.reshape(shape.into())?, owner: Arc::clone(&self.owner) })
    }

    /// Whether no other handle or view can see a write.
    pub fn is_unique(&self) -> bool {
        Arc::strong_count(&self.owner) == 1
    }
}

impl Deref for Value {
    type Target = Tensor;
    fn deref(&self) -> &Tensor {
        &self.tensor
    }
}

#[derive(Debug)]
struct Owner {
    tensor: Tensor,
    free: Arc<Mutex<FreeList>>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        let Ok(mut free) = self.free.lock() else { return };
        match self.tensor.dtype() {
            DType::F32 => storage::take(&self.tensor).into_iter().for_each(|v| free.f32.put(v)),
            DType::U32 => storage::take(&self.tensor).into_iter().for_each(|v| free.u32.put(v)),
            _ => {}
        }
    }
}

#[derive(Debug, Default)]
pub struct FreeList {
    f32: Shelf<f32>,
    u32: Shelf<u32>,
}

/// Element types that have a shelf in the free list.
pub trait Pooled: Element {
    const POISON: Self;
    fn shelf(free: &mut FreeList) -> &mut Shelf<Self>;
}

impl Pooled for f32 {
    const POISON: f32 = f32::NAN;
    fn shelf(free: &mut FreeList) -> &mut Shelf<f32> {
        &mut free.f32
    }
}

impl Pooled for u32 {
    const POISON: u32 = u32::MAX;
    fn shelf(free: &mut FreeList) -> &mut Shelf<u32> {
        &mut free.u32
    }
}

/// Free vectors by exact length: the sizes of a step repeat from step to step, so nothing needs to be split or rounded.
#[derive(Debug)]
pub struct Shelf<T> {
    by_len: BTreeMap<usize, Vec<Vec<T>>>,
    elements: usize,
}

impl<T> Default for Shelf<T> {
    fn default() -> Self {
        Self { by_len: BTreeMap::new(), elements: 0 }
    }
}

impl<T: Pooled> Shelf<T> {
    fn take(&mut self, len: usize) -> Option<Vec<T>> {
        let vec = self.by_len.get_mut(&len)?.pop()?;
        self.elements -= len;
        Some(vec)
    }

    fn put(&mut self, mut vec: Vec<T>) {
        if cfg!(debug_assertions) || cfg!(test) {
            vec.fill(T::POISON);
        }
        self.elements += vec.len();
        self.by_len.entry(vec.len()).or_default().push(vec);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_back_with_the_last_handle_and_stale_readers_are_refused() {
        let ctx = Ctx::cpu(Family::Portable);
        let value = {
            let v = ctx.vec::<f32>(8);
            ctx.value(v, (2, 4))
        };
        let stale = (*value).clone();
        let view = value.reshape(8).unwrap();
        drop(value);
        assert_eq!(ctx.free_bytes(), 0, "the view still holds the memory");
        drop(view);
        assert_eq!(ctx.free_bytes(), 32);
        assert!(storage::read::<f32>("test", &stale).is_err());
        let again = ctx.vec::<f32>(8);
        assert_eq!((again.len(), ctx.free_bytes()), (8, 0));
    }
}
