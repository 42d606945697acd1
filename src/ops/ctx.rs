//! The launch context: where ops run, the free list their outputs come from, and the counters.
//!
//! Every op takes `&mut Ctx`. Training opens one for a run, the engine one for a model: of the CPU (the
//! one rayon pool is installed by the caller), or with a GPU that ops are handed to. The counters say how many ops and bytes a step costs on any machine.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::{Arc, Mutex, OnceLock};

use candle_core::{DType, Shape, Tensor};
use half::{bf16, f16};

use super::gemm::Precision;
use super::gpu::{self, Arg, Dispatch, Gpu, Kernel, Product, Value as Number};
use super::simd::Family;
use super::storage::{self, Element};
use super::team::Team;
use crate::error::{Error, Result};

/// What was launched since the last `take_counts`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Ops started.
    pub launches: u64,
    /// Bytes of weights that the ops read.
    pub weight_bytes: u64,
    /// Kernels handed to a GPU.
    pub dispatches: u64,
    /// Matrix products handed to a GPU.
    pub products: u64,
    /// Buffers and structs of numbers bound to kernels.
    pub bindings: u64,
    /// Command buffers sent off, each with one encoder.
    pub command_buffers: u64,
    /// Bytes that went from the CPU to the GPU, and back.
    pub uploaded: u64,
    pub downloaded: u64,
}

pub struct Ctx {
    gpu: Option<Arc<dyn Gpu>>,
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
        let (free, team) = (Arc::default(), Arc::default());
        Self { gpu: None, family, precision, free, team, counts }
    }

    /// A context whose ops are handed to `gpu`; `family` is for what stays on the CPU.
    pub fn gpu(gpu: Arc<dyn Gpu>, family: Family) -> Self {
        Self { gpu: Some(gpu), ..Self::cpu(family) }
    }

    /// A context for the device that this process has started, or else the CPU.
    pub fn open(family: Family) -> Self {
        gpu::home().map_or_else(|| Self::cpu(family), |gpu| Self::gpu(gpu, family))
    }

    /// What results depend on in their last bits: the GPU's name, or the family of the CPU's kernels.
    pub fn kernels_name(&self) -> &'static str {
        self.gpu.as_ref().map_or(self.family.name(), |gpu| gpu.name())
    }

    /// `cpu`, or the GPU's name.
    pub fn device_name(&self) -> &'static str {
        self.gpu.as_ref().map_or("cpu", |gpu| gpu.name())
    }

    /// What it is, for people.
    pub fn description(&self) -> String {
        self.gpu.as_ref().map_or_else(|| "cpu".into(), |gpu| gpu.description())
    }

    /// Compiles kernels before they are needed.
    pub fn prepare(&self, functions: &[(&'static Kernel, String)]) -> Result<()> {
        self.gpu.as_ref().map_or(Ok(()), |gpu| gpu.prepare(functions))
    }

    /// Whether ops are handed to a GPU.
    pub fn has_gpu(&self) -> bool {
        self.gpu.is_some()
    }

    /// Another context over the same device and free list, for work that runs beside this one's; its counters are its own.
    pub fn fork(&self) -> Self {
        let (free, team) = (Arc::clone(&self.free), Arc::clone(&self.team));
        let (family, precision) = (self.family, self.precision);
        let gpu = self.gpu.clone();
        Self { gpu, family, precision, free, team, counts: Counts::default() }
    }

    fn device_of(&self, op: &'static str) -> Result<&dyn Gpu> {
        self.gpu.as_deref().ok_or_else(|| Error::op(op, "a context with a GPU", "one of the CPU"))
    }

    /// Hands a dispatch of `groups` threadgroups to the GPU, with T being `dtype`.
    pub fn dispatch(
        &mut self,
        kernel: &'static Kernel,
        dtype: DType,
        args: &[Arg],
        numbers: &[Number],
        groups: impl Into<Groups>,
    ) -> Result<()> {
        let Groups(groups) = groups.into();
        self.hand_over(&Dispatch { kernel, dtype, form: "", args, numbers, groups })
    }

    /// Hands a dispatch to the GPU, or drops it if it has no threadgroups.
    pub fn hand_over(&mut self, dispatch: &Dispatch) -> Result<()> {
        let Dispatch { kernel, args, numbers, groups, .. } = *dispatch;
        if groups.contains(&0) {
            return Ok(());
        }
        dispatch.check()?;
        self.device_of(kernel.name)?.dispatch(dispatch)?;
        self.counts.dispatches += 1;
        self.counts.bindings += args.len() as u64 + u64::from(!numbers.is_empty());
        Ok(())
    }

    /// Hands a matrix product of training to the GPU.
    pub fn multiply(&mut self, product: &Product) -> Result<()> {
        self.device_of("multiply")?.multiply(product)?;
        self.counts.products += 1;
        Ok(())
    }

    /// Sends off what was handed to the GPU, if there is one. Gives a number to wait for.
    pub fn commit(&mut self) -> Result<u64> {
        let Some(gpu) = &self.gpu else { return Ok(0) };
        self.counts.command_buffers += 1;
        gpu.commit()
    }

    /// Waits for what was sent off up to that number.
    pub fn wait_for(&self, commit: u64) -> Result<()> {
        self.gpu.as_ref().map_or(Ok(()), |gpu| gpu.wait_for(commit))
    }

    /// Waits for all that was handed to the GPU, if there is one.
    pub fn wait(&self) -> Result<()> {
        self.gpu.as_ref().map_or(Ok(()), |gpu| gpu.wait())
    }

    /// Keeps the memory of these tensors where the GPU finds it, to the end of the process.
    pub fn keep_resident(&self, tensors: &[&Tensor]) -> Result<()> {
        self.gpu.as_ref().map_or(Ok(()), |gpu| gpu.keep_resident(tensors))
    }

    /// Notes bytes that went to the GPU or came back.
    pub fn transfer(&mut self, uploaded: usize, downloaded: usize) {
        self.counts.uploaded += uploaded as u64;
        self.counts.downloaded += downloaded as u64;
    }

    /// An output of that type and shape for a kernel to write, its contents unspecified.
    pub fn output(&self, dtype: DType, shape: impl Into<Shape>) -> Result<Value> {
        let shape = shape.into();
        let len = shape.elem_count();
        #[cfg(target_os = "macos")]
        if let Some(metal) = super::gpu::metal::home() {
            let found = self.free.lock().expect("free list lock").shared.take(dtype, len);
            let storage = found.map_or_else(|| metal.storage(dtype, len), Ok)?;
            return Ok(self.own(storage::shared::wrap(storage, shape), true));
        }
        Ok(match dtype {
            DType::F32 => self.value(self.vec::<f32>(len), shape),
            DType::U32 => self.value(self.vec::<u32>(len), shape),
            DType::F16 => self.value(self.vec::<f16>(len), shape),
            DType::BF16 => self.value(self.vec::<bf16>(len), shape),
            other => return Err(Error::op("output", "f32, f16, bf16 or u32", format!("{other:?}"))),
        })
    }

    /// Numbers as a tensor that a kernel can read.
    pub fn upload<T: Pooled>(&mut self, numbers: &[T], shape: impl Into<Shape>) -> Value {
        let mut vec = self.vec::<T>(numbers.len());
        vec.copy_from_slice(numbers);
        self.transfer(std::mem::size_of_val(numbers), 0);
        self.value(vec, shape)
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
        // What the CPU writes for a GPU is new each time: recycled memory may still be read.
        let recycled = tensor.device().is_cpu();
        self.own(tensor, recycled)
    }

    fn own(&self, tensor: Tensor, recycled: bool) -> Value {
        let free = recycled.then(|| Arc::clone(&self.free));
        Value { owner: Arc::new(Owner { tensor: tensor.clone(), free }), tensor }
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
        #[cfg(target_os = "macos")]
        let shared = free.shared.bytes();
        #[cfg(not(target_os = "macos"))]
        let shared = 0;
        shared + (free.f32.elements + free.u32.elements) * 4 + (free.f16.elements + free.bf16.elements) * 2
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
    /// Where the memory goes, if it is recycled.
    free: Option<Arc<Mutex<FreeList>>>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        let Some(Ok(mut free)) = self.free.as_ref().map(|free| free.lock()) else { return };
        #[cfg(target_os = "macos")]
        if self.tensor.device().is_metal() {
            let storage = storage::shared::take(&self.tensor);
            storage.into_iter().for_each(|storage| free.shared.put(self.tensor.dtype(), storage));
            return;
        }
        match self.tensor.dtype() {
            DType::F32 => storage::take(&self.tensor).into_iter().for_each(|v| free.f32.put(v)),
            DType::U32 => storage::take(&self.tensor).into_iter().for_each(|v| free.u32.put(v)),
            DType::F16 => storage::take(&self.tensor).into_iter().for_each(|v| free.f16.put(v)),
            DType::BF16 => storage::take(&self.tensor).into_iter().for_each(|v| free.bf16.put(v)),
            _ => {}
        }
    }
}

#[derive(Debug, Default)]
pub struct FreeList {
    f32: Shelf<f32>,
    u32: Shelf<u32>,
    f16: Shelf<f16>,
    bf16: Shelf<bf16>,
    #[cfg(target_os = "macos")]
    shared: SharedShelf,
}

/// Memory that a GPU shares, by type and length. The GPU may still work with it: only what is handed to it afterwards may write.
#[cfg(target_os = "macos")]
#[derive(Debug, Default)]
struct SharedShelf(BTreeMap<(&'static str, usize), Vec<candle_core::MetalStorage>>);

#[cfg(target_os = "macos")]
impl SharedShelf {
    fn take(&mut self, dtype: DType, len: usize) -> Option<candle_core::MetalStorage> {
        self.0.get_mut(&(dtype.as_str(), len * dtype.size_in_bytes()))?.pop()
    }

    fn put(&mut self, dtype: DType, storage: candle_core::MetalStorage) {
        let bytes = super::gpu::metal::memory(&storage).1;
        if bytes < dtype.size_in_bytes() {
            return; // The memory of tensors without elements, which is shared.
        }
        self.0.entry((dtype.as_str(), bytes)).or_default().push(storage);
    }

    fn bytes(&self) -> usize {
        self.0.iter().map(|((_, bytes), all)| bytes * all.len()).sum()
    }
}

/// Element types that have a shelf in the free list.
pub trait Pooled: Element {
    const POISON: Self;
    fn shelf(free: &mut FreeList) -> &mut Shelf<Self>;
}

macro_rules! pooled {
    ($($ty:ident $poison:expr),*) => {$(
        impl Pooled for $ty {
            const POISON: $ty = $poison;
            fn shelf(free: &mut FreeList) -> &mut Shelf<$ty> {
                &mut free.$ty
            }
        }
    )*};
}
pooled!(f32 f32::NAN, u32 u32::MAX, f16 f16::NAN, bf16 bf16::NAN);

/// How many threadgroups a dispatch has in each direction.
pub struct Groups([usize; 3]);

impl From<usize> for Groups {
    fn from(x: usize) -> Self {
        Self([x, 1, 1])
    }
}

impl From<(usize, usize)> for Groups {
    fn from((x, y): (usize, usize)) -> Self {
        Self([x, y, 1])
    }
}

impl From<(usize, usize, usize)> for Groups {
    fn from((x, y, z): (usize, usize, usize)) -> Self {
        Self([x, y, z])
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
