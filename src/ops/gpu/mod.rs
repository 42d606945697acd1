//! Work for a GPU: the dispatches that ops hand over, whoever carries them out.
//!
//! An op describes a dispatch by a kernel of the table in `kernels`, its tensors and its numbers; `Ctx::dispatch` holds it to
//! the table and passes it to a `Gpu`: Metal on a Mac, an emulator of its language in the tests, or one that only counts. What
//! must stay true: dispatches run as if one after the other, in the order in which they were handed over.

pub mod counting;
pub mod kernels;
#[cfg(target_os = "macos")]
pub mod metal;
pub mod sources;

use std::sync::Arc;

use candle_core::{DType, Tensor};

use super::gemm::Store;
use crate::error::{Error, Result};

/// Why this process cannot have a GPU; `None` if it can.
pub fn missing() -> Option<String> {
    #[cfg(target_os = "macos")]
    return metal::missing();
    #[cfg(not(target_os = "macos"))]
    Some("this build is not for a Mac".into())
}

/// Starts the GPU of this process: from then on tensors lie in its memory, and `Ctx::open` hands ops to it.
pub fn start() -> Result<()> {
    #[cfg(target_os = "macos")]
    return metal::start().map(drop);
    #[cfg(not(target_os = "macos"))]
    Err(Error::failed("this build has no GPU"))
}

/// The GPU that was started.
pub fn home() -> Option<Arc<dyn Gpu>> {
    #[cfg(target_os = "macos")]
    return metal::home().map(|metal| Arc::clone(metal) as Arc<dyn Gpu>);
    #[cfg(not(target_os = "macos"))]
    None
}

/// What a kernel does with a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Read,
    /// Writes some elements or all; what is not written stays.
    Write,
    /// Reads and writes.
    Update,
}

/// The elements of a buffer as the kernel declares them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// The type that the kernel is compiled for.
    T,
    F32,
    U32,
    /// Any bytes, in a tensor of 32-bit words: blocks, pages.
    Bytes,
}

/// A buffer argument.
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    pub name: &'static str,
    pub access: Access,
    pub element: Element,
}

/// The type of a number argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Number {
    U32,
    F32,
}

/// A kernel: its arguments in the order of their indices. The numbers are one struct, bound after the buffers.
#[derive(Debug)]
pub struct Kernel {
    /// The name of its source in kernels/metal/.
    pub file: &'static str,
    pub name: &'static str,
    /// What T can be; empty if the kernel has no T.
    pub types: &'static [DType],
    /// The other things that it is compiled for, as ends of its name; empty if there are none.
    pub forms: &'static [&'static str],
    /// Threads of a threadgroup.
    pub threads: usize,
    pub slots: &'static [Slot],
    pub numbers: &'static [(&'static str, Number)],
}

/// The type's name in a kernel's.
pub fn type_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "f32",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        _ => "other",
    }
}

impl Kernel {
    /// The function's name for a type and a form.
    pub fn function(&self, dtype: DType, form: &str) -> String {
        let mut name = self.name.to_string();
        let ty = (!self.types.is_empty()).then(|| type_name(dtype));
        for part in ty.into_iter().chain((!self.forms.is_empty()).then_some(form)) {
            name.push('_');
            name.push_str(part);
        }
        name
    }

    /// The names of all its functions.
    pub fn functions(&self) -> Vec<String> {
        let types = if self.types.is_empty() { &[DType::F32][..] } else { self.types };
        let forms = if self.forms.is_empty() { &[""][..] } else { self.forms };
        types.iter().flat_map(|ty| forms.iter().map(|form| self.function(*ty, form))).collect()
    }
}

/// A tensor as a kernel's argument.
#[derive(Clone, Copy)]
pub struct Arg<'a> {
    pub tensor: &'a Tensor,
    pub access: Access,
    /// Elements before the first that the kernel sees.
    pub offset: usize,
}

impl<'a> Arg<'a> {
    pub fn read(tensor: &'a Tensor) -> Self {
        Self { tensor, access: Access::Read, offset: 0 }
    }

    pub fn write(tensor: &'a Tensor) -> Self {
        Self { tensor, access: Access::Write, offset: 0 }
    }

    pub fn update(tensor: &'a Tensor) -> Self {
        Self { tensor, access: Access::Update, offset: 0 }
    }

    pub fn at(self, offset: usize) -> Self {
        Self { offset, ..self }
    }

    /// Elements that the kernel sees.
    pub fn len(&self) -> usize {
        self.tensor.elem_count().saturating_sub(self.offset)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A number as a kernel's argument.
#[derive(Clone, Copy, Debug)]
pub enum Value {
    U32(u32),
    F32(f32),
    /// A size that 32 bits cannot hold: refused.
    TooLarge(usize),
}

impl Value {
    pub fn bits(self) -> u32 {
        match self {
            Value::U32(x) => x,
            Value::F32(x) => x.to_bits(),
            Value::TooLarge(_) => u32::MAX,
        }
    }

    fn is(self, kind: Number) -> bool {
        matches!((self, kind), (Value::U32(_), Number::U32) | (Value::F32(_), Number::F32))
    }
}

impl From<usize> for Value {
    /// A size or an index.
    fn from(x: usize) -> Self {
        u32::try_from(x).map_or(Value::TooLarge(x), Value::U32)
    }
}

impl From<u32> for Value {
    fn from(x: u32) -> Self {
        Value::U32(x)
    }
}

impl From<f32> for Value {
    fn from(x: f32) -> Self {
        Value::F32(x)
    }
}

impl From<Store> for Value {
    /// 1 where the result is added to what is there.
    fn from(store: Store) -> Self {
        Value::U32(u32::from(store == Store::Add))
    }
}

/// One launch of a kernel.
pub struct Dispatch<'a> {
    pub kernel: &'static Kernel,
    /// What T is.
    pub dtype: DType,
    /// One of the kernel's forms; empty if it has none.
    pub form: &'a str,
    pub args: &'a [Arg<'a>],
    pub numbers: &'a [Value],
    /// Threadgroups.
    pub groups: [usize; 3],
}

impl Dispatch<'_> {
    /// Holds it to the kernel's description in the table.
    pub fn check(&self) -> Result<()> {
        let Kernel { name, slots, numbers, types, forms, .. } = *self.kernel;
        let wrong = |expected: String, found: String| Err(Error::op(name, expected, found));
        if !types.is_empty() && !types.contains(&self.dtype) {
            return wrong(format!("one of {types:?}"), format!("{:?}", self.dtype));
        }
        if forms.is_empty() != self.form.is_empty() || !forms.is_empty() && !forms.contains(&self.form) {
            return wrong(format!("one of {forms:?}"), format!("`{}`", self.form));
        }
        if self.args.len() != slots.len() || self.numbers.len() != numbers.len() {
            let found = format!("{} and {}", self.args.len(), self.numbers.len());
            return wrong(format!("{} tensors and {} numbers", slots.len(), numbers.len()), found);
        }
        for (arg, slot) in self.args.iter().zip(slots) {
            let (dtype, found) = (arg.tensor.dtype(), format!("{:?} {:?}", arg.access, arg.tensor.dtype()));
            let fits = match slot.element {
                Element::T => dtype == self.dtype,
                Element::F32 => dtype == DType::F32,
                Element::U32 => dtype == DType::U32,
                Element::Bytes => matches!(dtype, DType::U32 | DType::F32),
            };
            if !fits || arg.access != slot.access {
                return wrong(format!("`{}`: {:?} {:?}", slot.name, slot.access, slot.element), found);
            }
        }
        for (value, (number, kind)) in self.numbers.iter().zip(numbers) {
            if !value.is(*kind) {
                return wrong(format!("`{number}`: {kind:?}"), format!("{value:?}"));
            }
        }
        Ok(())
    }
}

/// A matrix of a product: row-major (rows, columns) within a tensor, or its transpose.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    pub arg: Arg<'a>,
    pub rows: usize,
    pub columns: usize,
    /// Whether memory holds (columns, rows).
    pub transposed: bool,
}

impl<'a> Matrix<'a> {
    pub fn new(tensor: &'a Tensor, rows: usize, columns: usize) -> Self {
        Self { arg: Arg::read(tensor), rows, columns, transposed: false }
    }

    /// Its rows from `row` on.
    pub fn from_row(self, row: usize) -> Self {
        let offset = self.arg.offset + row * self.columns;
        Self { arg: self.arg.at(offset), rows: self.rows - row, ..self }
    }

    /// The first rows of it.
    pub fn first_rows(self, rows: usize) -> Self {
        Self { rows, ..self }
    }

    pub fn t(self) -> Self {
        Self { rows: self.columns, columns: self.rows, transposed: !self.transposed, ..self }
    }
}

/// c (m, n) = a (m, k) b (k, n), all f32 and of whole rows.
pub struct Product<'a> {
    pub a: Matrix<'a>,
    pub b: Matrix<'a>,
    /// (m, n), written.
    pub c: Arg<'a>,
}

/// Who carries dispatches out.
pub trait Gpu: Send + Sync {
    /// `metal`, or what stands in for it.
    fn name(&self) -> &'static str;

    /// What it is, for people: the name of the chip.
    fn description(&self) -> String {
        self.name().into()
    }

    /// Hands a dispatch over. It need not have happened when this returns.
    fn dispatch(&self, dispatch: &Dispatch) -> Result<()>;

    /// Compiles these functions before they are needed.
    fn prepare(&self, functions: &[(&'static Kernel, String)]) -> Result<()> {
        let _ = functions;
        Ok(())
    }

    /// A matrix product of training.
    fn multiply(&self, product: &Product) -> Result<()>;

    /// Sends off what was handed over, where that does not happen at once. Gives a number to wait for, which never falls.
    fn commit(&self) -> Result<u64> {
        Ok(0)
    }

    /// Waits for everything that was sent off up to that number.
    fn wait_for(&self, commit: u64) -> Result<()> {
        let _ = commit;
        Ok(())
    }

    /// Waits for everything that was handed over.
    fn wait(&self) -> Result<()> {
        let last = self.commit()?;
        self.wait_for(last)
    }

    /// Keeps the memory of these tensors where the GPU finds it, to the end of the process.
    fn keep_resident(&self, tensors: &[&Tensor]) -> Result<()> {
        let _ = tensors;
        Ok(())
    }
}
