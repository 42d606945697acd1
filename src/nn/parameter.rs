//! A weight: its numbers, the names of its row ranges and, if it is trained, its gradient slot.
//!
//! q/k/v and gate/up are one buffer each with named row ranges ("parts"): the products run on the whole buffer, while
//! checkpoints and Muon act on the parts, under Hugging Face's names. The slot persists over steps; the first write
//! of a step overwrites it, later ones add, so nothing is zeroed between. A frozen weight has no slot and keeps no panels:
//! it takes no more memory than its numbers, which may be in blocks.

use std::ops::Deref;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use candle_core::Tensor;

use crate::error::Result;
use crate::ops::blocks::{BlockMatrix, Format};
use crate::ops::ctx::{Ctx, Value};
use crate::ops::linear::{Panels, Weight};
use crate::ops::{gemm::Store, storage};

/// A row range of a parameter under its Hugging Face name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub name: String,
    pub rows: std::ops::Range<usize>,
}

/// A named array on the host: how weights and optimizer state leave for a file.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedTensor {
    pub name: String,
    pub shape: Vec<usize>,
    pub data: Vec<f32>,
}

/// What kind of weight it is: decides decay and optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A matrix inside a block: decayed; Muon's business when Muon is on.
    Matrix,
    /// The token table or the output head: decayed, never Muon's.
    Table,
    /// A norm's gain: not decayed.
    Gain,
}

#[derive(Debug)]
enum Numbers {
    Dense(Tensor),
    Blocks(BlockMatrix),
}

/// A whole weight in f32: its own, or made of its blocks for the time being.
pub enum Whole<'a> {
    Own(&'a Tensor),
    Made(Value),
}

impl Deref for Whole<'_> {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        match self {
            Whole::Own(tensor) => tensor,
            Whole::Made(value) => value,
        }
    }
}

#[derive(Debug)]
pub struct Parameter {
    pub role: Role,
    /// At least one; together they cover the rows in order.
    pub parts: Vec<Part>,
    numbers: Numbers,
    trainable: bool,
    gradient: OnceLock<Tensor>,
    written: AtomicBool,
    version: AtomicU64,
    panels: Panels,
}

impl Parameter {
    /// A trained parameter of `shape` (rows, columns) or (length) with that initial content.
    pub fn new(role: Role, parts: Vec<Part>, shape: &[usize], init: Vec<f32>) -> Self {
        Self::with(role, parts, Numbers::Dense(storage::tensor(init, shape)), true)
    }

    /// A parameter that is not trained; a matrix with a format is kept in its blocks.
    pub fn frozen(
        role: Role,
        parts: Vec<Part>,
        shape: &[usize],
        init: Vec<f32>,
        format: Option<Format>,
    ) -> Result<Self> {
        let numbers = match (format, shape) {
            (Some(format), [_, columns]) => Numbers::Blocks(BlockMatrix::quantize(format, &init, *columns)?),
            _ => Numbers::Dense(storage::tensor(init, shape)),
        };
        Ok(Self::with(role, parts, numbers, false))
    }

    fn with(role: Role, parts: Vec<Part>, numbers: Numbers, trainable: bool) -> Self {
        Self {
            role,
            parts,
            numbers,
            trainable,
            gradient: OnceLock::new(),
            written: AtomicBool::new(false),
            version: AtomicU64::new(0),
            panels: Panels::default(),
        }
    }

    /// The name of the whole: its part's, or its parts' joined.
    pub fn name(&self) -> String {
        self.parts.iter().map(|p| p.name.as_str()).collect::<Vec<_>>().join("+")
    }

    pub fn is_trainable(&self) -> bool {
        self.trainable
    }

    /// The f32 master of a weight that is not in blocks, as all but frozen matrices are.
    pub fn master(&self) -> &Tensor {
        match &self.numbers {
            Numbers::Dense(tensor) => tensor,
            Numbers::Blocks(_) => unreachable!("a matrix in blocks is read as `matrix` or `whole`"),
        }
    }

    /// The weight as the matrix of a linear layer or a table.
    pub fn matrix(&self) -> Weight<'_> {
        match &self.numbers {
            Numbers::Dense(tensor) => {
                Weight::Dense { tensor, kept: self.trainable.then(|| (&self.panels, self.version())) }
            }
            Numbers::Blocks(blocks) => Weight::Blocks(blocks),
        }
    }

    /// The weight in f32.
    pub fn whole(&self, ctx: &mut Ctx) -> Result<Whole<'_>> {
        Ok(match &self.numbers {
            Numbers::Dense(tensor) => Whole::Own(tensor),
            Numbers::Blocks(blocks) => Whole::Made(blocks.numbers(ctx)?),
        })
    }

    /// The elements of the weight.
    pub fn elements(&self) -> usize {
        match &self.numbers {
            Numbers::Dense(tensor) => tensor.elem_count(),
            Numbers::Blocks(blocks) => blocks.rows() * blocks.columns(),
        }
    }

    /// Memory of the numbers alone.
    pub fn bytes(&self) -> usize {
        match &self.numbers {
            Numbers::Dense(tensor) => 4 * tensor.elem_count(),
            Numbers::Blocks(blocks) => blocks.as_bytes().len(),
        }
    }

    /// Hands the bytes of the numbers to `each`: for a checksum.
    pub fn visit_bytes(&self, each: &mut dyn FnMut(&[u8])) -> Result<()> {
        match &self.numbers {
            Numbers::Blocks(blocks) => each(blocks.as_bytes()),
            Numbers::Dense(tensor) => {
                let numbers = storage::read::<f32>("parameter", tensor)?;
                for chunk in numbers.chunks(1 << 12) {
                    each(&Vec::from_iter(chunk.iter().flat_map(|x| x.to_le_bytes())));
                }
            }
        }
        Ok(())
    }

    /// The gradient slot, made when first asked for; its content counts only if `has_gradient`.
    pub fn gradient(&self) -> &Tensor {
        self.gradient.get_or_init(|| storage::tensor(vec![0f32; self.elements()], self.master().shape()))
    }

    pub fn has_gradient(&self) -> bool {
        self.written.load(Relaxed)
    }

    /// Forgets the gradient without touching its memory: the next write overwrites it.
    pub fn clear_gradient(&self) {
        self.written.store(false, Relaxed);
    }

    /// Lets `fill` write the gradient: `Set` the first time since `clear_gradient`, `Add` afterwards.
    pub fn write_gradient(&self, fill: impl FnOnce(&Tensor, Store) -> Result<()>) -> Result<()> {
        let store = if self.written.swap(true, Relaxed) { Store::Add } else { Store::Set };
        fill(self.gradient(), store)
    }

    /// The row ranges of `tensor`, which has this parameter's shape, each under its name.
    pub fn split(&self, tensor: &Tensor) -> Result<Vec<NamedTensor>> {
        let data = storage::read::<f32>("split", tensor)?;
        let columns = tensor.dims().get(1).copied().unwrap_or(1);
        let part = |p: &Part| {
            let mut shape = tensor.dims().to_vec();
            shape[0] = p.rows.len();
            let data = data[p.rows.start * columns..p.rows.end * columns].to_vec();
            NamedTensor { name: p.name.clone(), shape, data }
        };
        Ok(self.parts.iter().map(part).collect())
    }

    /// Counts changes of the master; packed forms remember the version that they were made from.
    pub fn version(&self) -> u64 {
        self.version.load(Relaxed)
    }

    /// To be called after the master was changed.
    pub fn touch(&self) {
        self.version.fetch_add(1, Relaxed);
    }
}
