//! The border to candle: tensors to slices and back. No other file touches a candle storage.
//!
//! Reading borrows the storage. Writing takes the vector out of the tensor and puts it back when the guard is dropped, so
//! no aliasing is possible: whoever reads the tensor meanwhile, or reads a tensor whose memory went back to the free
//! list, finds an empty vector and gets an error instead of foreign numbers.

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
        let Storage::Cpu(cpu) = &*self.storage else { unreachable!("`read` checked the device") };
        &T::slice(cpu).expect("`read` checked the type")[self.start..self.end]
    }
}

/// Borrows a contiguous CPU tensor of element type `T`. `op` names the caller in the error.
pub fn read<'a, T: Element>(op: &'static str, tensor: &'a Tensor) -> Result<Read<'a, T>> {
    let (storage, layout) = tensor.storage_and_layout();
    let Some((start, end)) = layout.contiguous_offsets() else {
        return Err(Error::op(op, "a contiguous tensor", format!("strides {:?}", layout.stride())));
    };
    let length = match &*storage {
        Storage::Cpu(cpu) => T::slice(cpu).map(<[T]>::len),
        _ => return Err(Error::op(op, "a CPU tensor", format!("{:?}", tensor.device().location()))),
    };
    match length {
        None => Err(Error::op(op, format!("{:?}", T::DTYPE), format!("{:?}", tensor.dtype()))),
        Some(n) if n < end => Err(Error::op(op, "a live tensor", "one whose memory is in use elsewhere or was freed")),
        Some(_) => Ok(Read { storage, start, end, element: std::marker::PhantomData }),
    }
}

/// A whole tensor borrowed for writing.
pub struct Write<'a, T: Element> {
    tensor: &'a Tensor,
    vec: Vec<T>,
}

impl<T: Element> Deref for Write<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.vec
    }
}

impl<T: Element> DerefMut for Write<'_, T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.vec
    }
}

impl<T: Element> Drop for Write<'_, T> {
    fn drop(&mut self) {
        let vec = std::mem::take(&mut self.vec);
        exchange(self.tensor, vec).expect("the type was checked when the vector was taken");
    }
}

/// Borrows a tensor that owns its whole storage (no view) for writing in place.
pub fn write<'a, T: Element>(op: &'static str, tensor: &'a Tensor) -> Result<Write<'a, T>> {
    drop(read::<T>(op, tensor)?);
    let vec = exchange(tensor, Vec::new())?;
    if vec.len() != tensor.elem_count() {
        let found = format!("a view of {} in {} elements", tensor.elem_count(), vec.len());
        exchange(tensor, vec)?;
        return Err(Error::op(op, "a tensor that owns its storage", found));
    }
    Ok(Write { tensor, vec })
}

/// Makes a CPU tensor of `vec`, whose length must be that of `shape`.
pub fn tensor<T: Element>(vec: Vec<T>, shape: impl Into<Shape>) -> Tensor {
    let shape = shape.into();
    assert_eq!(vec.len(), shape.elem_count(), "length against shape {shape:?}");
    Tensor::from_storage(Storage::Cpu(T::wrap(vec)), shape, BackpropOp::none(), false)
}

/// Takes the vector of a tensor whose last user is gone; the tensor is left without elements.
pub(super) fn take<T: Element>(tensor: &Tensor) -> Option<Vec<T>> {
    exchange(tensor, Vec::new()).ok()
}

fn exchange<T: Element>(tensor: &Tensor, vec: Vec<T>) -> Result<Vec<T>> {
    let op = Exchange(std::sync::Mutex::new(vec));
    tensor.inplace_op1(&op)?;
    Ok(op.0.into_inner().expect("no thread panics while it holds this lock"))
}

/// candle gives write access to a storage only through an in-place op: this one swaps the vector.
struct Exchange<T>(std::sync::Mutex<Vec<T>>);

impl<T: Element> InplaceOp1 for Exchange<T> {
    fn name(&self) -> &'static str {
        "exchange"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        let found = storage_dtype(storage);
        let Some(vec) = T::vec(storage) else { candle_core::bail!("expected {:?}, found {found:?}", T::DTYPE) };
        std::mem::swap(vec, &mut self.0.lock().expect("no thread panics while it holds this lock"));
        Ok(())
    }
}

fn storage_dtype(storage: &CpuStorage) -> DType {
    use candle_core::backend::BackendStorage;
    storage.dtype()
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
