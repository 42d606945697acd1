//! The border to candle: tensors to slices and back. No other file touches a candle storage.
//!
//! Reading borrows the storage. Writing takes the vector out of the tensor and puts it back when the guard is dropped, so
//! no aliasing is possible: whoever reads the tensor meanwhile, or reads a tensor whose memory went back to the free
//! list, finds an empty vector and gets an error instead of foreign numbers.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};

use candle_core::{CpuStorage, DType, InplaceOp1, Layout, Shape, Storage, Tensor, op::BackpropOp};

use parking_lot::RwLockReadGuard;

use crate::error::{Error, Result};

/// The element types that the CPU code works on.
pub trait Element: Copy + Default + Send + Sync + 'static {
    const DTYPE: DType;
    fn slice(storage: &CpuStorage) -> Option<&[Self]>;
    fn vec(storage: &mut CpuStorage) -> Option<&mut Vec<Self>>;
    fn wrap(vec: Vec<Self>) -> CpuStorage;
}

macro_rules! element {
    ($ty:ty, $variant:ident) => {
        impl Element for $ty {
            const DTYPE: DType = DType::$variant;
            fn slice(storage: &CpuStorage) -> Option<&[Self]> {
                if let CpuStorage::$variant(v) = storage { Some(v) } else { None }
            }
            fn vec(storage: &mut CpuStorage) -> Option<&mut Vec<Self>> {
                if let CpuStorage::$variant(v) = storage { Some(v) } else { None }
            }
            fn wrap(vec: Vec<Self>) -> CpuStorage {
                CpuStorage::$variant(vec)
            }
        }
    };
}
element!(f32, F32);
element!(u32, U32);
element!(half::f16, F16);
element!(half::bf16, BF16);

/// Where the elements of a tensor lie, and how many bytes they are.
pub trait Address {
    fn address(&mut self) -> (*mut u8, usize);
}

impl<T: Element> Address for Read<'_, T> {
    fn address(&mut self) -> (*mut u8, usize) {
        (self.as_ptr().cast_mut().cast(), std::mem::size_of_val::<[T]>(self))
    }
}

impl<T: Element> Address for Write<'_, T> {
    fn address(&mut self) -> (*mut u8, usize) {
        (self.as_mut_ptr().cast(), std::mem::size_of_val::<[T]>(self))
    }
}

/// `read` or, with `writing`, `write` whatever the type.
pub fn open<'a>(op: &'static str, tensor: &'a Tensor, writing: bool) -> Result<Box<dyn Address + 'a>> {
    fn one<'a, T: Element>(op: &'static str, tensor: &'a Tensor, writing: bool) -> Result<Box<dyn Address + 'a>> {
        Ok(if writing { Box::new(write::<T>(op, tensor)?) } else { Box::new(read::<T>(op, tensor)?) })
    }
    match tensor.dtype() {
        DType::F32 => one::<f32>(op, tensor, writing),
        DType::U32 => one::<u32>(op, tensor, writing),
        DType::F16 => one::<half::f16>(op, tensor, writing),
        DType::BF16 => one::<half::bf16>(op, tensor, writing),
        other => Err(Error::op(op, "f32, f16, bf16 or u32", format!("{other:?}"))),
    }
}

/// A contiguous tensor borrowed as a slice.
pub struct Read<'a, T> {
    storage: RwLockReadGuard<'a, Storage>,
    start: usize,
    end: usize,
    element: std::marker::PhantomData<T>,
}

impl<T: Element> Deref for Read<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        let all = match &*self.storage {
            Storage::Cpu(cpu) => T::slice(cpu).expect("`read` checked the type"),
            #[cfg(target_os = "macos")]
            // SAFETY: `read` checked the type and waited for the GPU, and the lock keeps the storage.
            Storage::Metal(metal) => unsafe { shared::slice(metal) },
            #[allow(unreachable_patterns)] // There are others with other features of candle.
            _ => unreachable!("`read` checked the device"),
        };
        &all[self.start..self.end]
    }
}

thread_local! {
    static READS: Cell<u64> = const { Cell::new(0) };
}

/// How often this thread has looked into tensors from the host; with a GPU each time may wait for all of its work.
pub fn reads() -> u64 {
    READS.get()
}

/// Borrows a contiguous tensor of element type `T`, once the GPU has done all that was handed to it. `op` names the caller in
/// the error.
pub fn read<'a, T: Element>(op: &'static str, tensor: &'a Tensor) -> Result<Read<'a, T>> {
    READS.set(READS.get() + 1);
    #[cfg(target_os = "macos")]
    shared::wait()?;
    read_done(op, tensor)
}

/// `read` of a tensor that the GPU is known to be done with, while it may work on others.
pub fn read_done<'a, T: Element>(op: &'static str, tensor: &'a Tensor) -> Result<Read<'a, T>> {
    let (storage, layout) = tensor.storage_and_layout();
    let Some((start, end)) = layout.contiguous_offsets() else {
        return Err(Error::op(op, "a contiguous tensor", format!("strides {:?}", layout.stride())));
    };
    let length = match &*storage {
        Storage::Cpu(cpu) => T::slice(cpu).map(<[T]>::len),
        #[cfg(target_os = "macos")]
        Storage::Metal(metal) => shared::length::<T>(metal),
        _ => return Err(Error::op(op, "a CPU tensor", format!("{:?}", tensor.device().location()))),
    };
    match length {
        None => Err(Error::op(op, format!("{:?}", T::DTYPE), format!("{:?}", tensor.dtype()))),
        Some(n) if n < end => Err(Error::op(op, "a live tensor", "one whose memory is in use elsewhere or was freed")),
        Some(_) => Ok(Read { storage, start, end, element: std::marker::PhantomData }),
    }
}

/// The memory of a whole tensor.
enum Memory<T> {
    Vec(Vec<T>),
    #[cfg(target_os = "macos")]
    Shared(candle_core::MetalStorage),
}

impl<T: Element> Memory<T> {
    /// What a tensor is left with whose memory is taken out.
    fn none(tensor: &Tensor) -> Result<Self> {
        #[cfg(target_os = "macos")]
        if tensor.device().is_metal() {
            return Ok(Memory::Shared(shared::storage(T::DTYPE, 0)?));
        }
        let _ = tensor;
        Ok(Memory::Vec(Vec::new()))
    }

    fn as_slice(&self) -> &[T] {
        match self {
            Memory::Vec(vec) => vec,
            // SAFETY: it was taken out of a tensor of this type after the GPU was done, and nobody else has it.
            #[cfg(target_os = "macos")]
            Memory::Shared(storage) => unsafe { shared::slice(storage) },
        }
    }

    fn as_mut_slice(&mut self) -> &mut [T] {
        match self {
            Memory::Vec(vec) => vec,
            // SAFETY: as in `as_slice`, and the borrow is exclusive.
            #[cfg(target_os = "macos")]
            Memory::Shared(storage) => unsafe { shared::slice_mut(storage) },
        }
    }
}

/// A whole tensor borrowed for writing.
pub struct Write<'a, T: Element> {
    tensor: &'a Tensor,
    memory: Memory<T>,
}

impl<T: Element> Deref for Write<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        self.memory.as_slice()
    }
}

impl<T: Element> DerefMut for Write<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        self.memory.as_mut_slice()
    }
}

impl<T: Element> Drop for Write<'_, T> {
    fn drop(&mut self) {
        let memory = std::mem::replace(&mut self.memory, Memory::Vec(Vec::new()));
        exchange(self.tensor, memory).expect("the type was checked when the memory was taken");
    }
}

/// Borrows a tensor that owns its whole storage (no view) for writing in place.
pub fn write<'a, T: Element>(op: &'static str, tensor: &'a Tensor) -> Result<Write<'a, T>> {
    drop(read::<T>(op, tensor)?);
    let memory = exchange(tensor, Memory::<T>::none(tensor)?)?;
    let len = memory.as_slice().len();
    if len != tensor.elem_count() {
        let found = format!("a view of {} in {len} elements", tensor.elem_count());
        exchange(tensor, memory)?;
        return Err(Error::op(op, "a tensor that owns its storage", found));
    }
    Ok(Write { tensor, memory })
}

/// Makes a tensor of `vec`, whose length must be that of `shape`: of the CPU, or, once this process has started a GPU with
/// which it shares memory, of that.
pub fn tensor<T: Element>(vec: Vec<T>, shape: impl Into<Shape>) -> Tensor {
    let shape = shape.into();
    assert_eq!(vec.len(), shape.elem_count(), "length against shape {shape:?}");
    #[cfg(target_os = "macos")]
    if let Some(tensor) = shared::tensor(&vec, &shape) {
        return tensor;
    }
    Tensor::from_storage(Storage::Cpu(T::wrap(vec)), shape, BackpropOp::none(), false)
}

/// Takes the vector of a tensor whose last user is gone; the tensor is left without elements.
pub(super) fn take<T: Element>(tensor: &Tensor) -> Option<Vec<T>> {
    match exchange(tensor, Memory::none(tensor).ok()?).ok()? {
        Memory::Vec(vec) => Some(vec),
        #[cfg(target_os = "macos")]
        Memory::Shared(_) => None,
    }
}

fn exchange<T: Element>(tensor: &Tensor, memory: Memory<T>) -> Result<Memory<T>> {
    let op = Exchange(std::sync::Mutex::new(memory));
    tensor.inplace_op1(&op)?;
    Ok(op.0.into_inner().expect("no thread panics while it holds this lock"))
}

/// candle gives write access to a storage only through an in-place op: this one swaps the memory.
struct Exchange<T>(std::sync::Mutex<Memory<T>>);

impl<T: Element> InplaceOp1 for Exchange<T> {
    fn name(&self) -> &'static str {
        "exchange"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        let found = storage_dtype(storage);
        let Some(vec) = T::vec(storage) else { candle_core::bail!("expected {:?}, found {found:?}", T::DTYPE) };
        match &mut *self.0.lock().expect("no thread panics while it holds this lock") {
            Memory::Vec(other) => std::mem::swap(vec, other),
            #[cfg(target_os = "macos")]
            Memory::Shared(_) => candle_core::bail!("expected memory of the GPU, found a vector"),
        }
        Ok(())
    }

    #[cfg(target_os = "macos")]
    fn metal_fwd(&self, storage: &mut candle_core::MetalStorage, _: &Layout) -> candle_core::Result<()> {
        match &mut *self.0.lock().expect("no thread panics while it holds this lock") {
            Memory::Shared(other) => std::mem::swap(storage, other),
            Memory::Vec(_) => candle_core::bail!("expected a vector, found memory of the GPU"),
        }
        Ok(())
    }
}

fn storage_dtype(storage: &CpuStorage) -> DType {
    use candle_core::backend::BackendStorage;
    storage.dtype()
}

/// Tensors in memory that CPU and GPU share.
#[cfg(target_os = "macos")]
pub(super) mod shared {
    use candle_core::backend::BackendStorage;
    use candle_core::{DType, MetalStorage, Shape, Storage, Tensor, op::BackpropOp};

    use super::Element;
    use crate::error::{Error, Result};
    use crate::ops::gpu::{Gpu, metal};

    /// Memory for so many elements, from the GPU that this process has started.
    pub fn storage(dtype: DType, count: usize) -> Result<MetalStorage> {
        let none = || Error::failed("a tensor of a GPU in a process that has not started one");
        metal::home().ok_or_else(none)?.storage(dtype, count)
    }

    /// A copy of `numbers`, if this process has started a GPU.
    pub fn tensor<T: Element>(numbers: &[T], shape: &Shape) -> Option<Tensor> {
        let mut storage = metal::home()?.storage(T::DTYPE, numbers.len()).ok()?;
        // SAFETY: the memory is new.
        unsafe { slice_mut::<T>(&mut storage) }.copy_from_slice(numbers);
        Some(wrap(storage, shape.clone()))
    }

    pub fn wrap(storage: MetalStorage, shape: Shape) -> Tensor {
        Tensor::from_storage(Storage::Metal(storage), shape, BackpropOp::none(), false)
    }

    /// Waits for the GPU, if this process has started one.
    pub fn wait() -> Result<()> {
        metal::home().map_or(Ok(()), |metal| metal.wait())
    }

    /// The elements of a storage; `None` if they are not of that type.
    pub fn length<T: Element>(storage: &MetalStorage) -> Option<usize> {
        (storage.dtype() == T::DTYPE).then(|| count::<T>(storage))
    }

    fn count<T>(storage: &MetalStorage) -> usize {
        metal::memory(storage).1 / size_of::<T>()
    }

    /// Takes the memory of a tensor whose last user is gone, while the GPU may still work with it.
    pub fn take(tensor: &Tensor) -> Option<MetalStorage> {
        fn one<T: Element>(tensor: &Tensor) -> Option<MetalStorage> {
            match super::exchange::<T>(tensor, super::Memory::none(tensor).ok()?).ok()? {
                super::Memory::Shared(storage) => Some(storage),
                super::Memory::Vec(_) => None,
            }
        }
        match tensor.dtype() {
            DType::F32 => one::<f32>(tensor),
            DType::U32 => one::<u32>(tensor),
            DType::F16 => one::<half::f16>(tensor),
            DType::BF16 => one::<half::bf16>(tensor),
            _ => None,
        }
    }

    /// # Safety
    /// The elements are of type T, and neither the GPU nor anybody else writes them while the slice lives.
    pub unsafe fn slice<T>(storage: &MetalStorage) -> &[T] {
        // SAFETY: the caller's promise; the buffer is shared and large enough.
        unsafe { std::slice::from_raw_parts(metal::memory(storage).0.cast(), count::<T>(storage)) }
    }

    /// # Safety
    /// The elements are of type T, and neither the GPU nor anybody else uses them while the slice lives.
    pub unsafe fn slice_mut<T>(storage: &mut MetalStorage) -> &mut [T] {
        // SAFETY: as in `slice`.
        unsafe { std::slice::from_raw_parts_mut(metal::memory(storage).0.cast(), count::<T>(storage)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writing_excludes_readers_and_puts_the_vector_back() {
        let t = tensor(vec![1f32, 2.0, 3.0], 3);
        let view = t.narrow(0, 1, 2).unwrap();
        {
            let mut w = write::<f32>("test", &t).unwrap();
            w[1] = 7.0;
            assert!(read::<f32>("test", &view).is_err(), "a reader must not see a tensor that is being written");
        }
        assert_eq!(read::<f32>("test", &view).unwrap().to_vec(), [7.0, 3.0]);
        assert!(write::<f32>("test", &view).is_err(), "a view cannot be written");
        assert_eq!(read::<f32>("test", &t).unwrap().to_vec(), [1.0, 7.0, 3.0]);
    }

    #[test]
    fn wrong_types_and_strides_are_named() {
        let t = tensor(vec![1u32, 2, 3, 4], (2, 2));
        assert!(read::<f32>("test", &t).err().unwrap().to_string().contains("F32"));
        assert!(read::<u32>("test", &t.t().unwrap()).err().unwrap().to_string().contains("contiguous"));
    }
}
