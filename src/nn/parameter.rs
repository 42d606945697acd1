//! A trainable weight: its f32 master, its gradient slot, and the names of its row ranges.
//!
//! q/k/v and gate/up are one buffer each with named row ranges ("parts"): the products run on the whole buffer, while
//! checkpoints and Muon act on the parts, under Hugging Face's names. The slot persists over steps; the first write
//! of a step overwrites it, later ones add, so nothing is zeroed between.

use std::cell::Cell;

use candle_core::Tensor;

use crate::error::Result;
use crate::ops::ctx::{Ctx, Value};
use crate::ops::gemm::Store;

/// A row range of a parameter under its Hugging Face name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub name: String,
    pub rows: std::ops::Range<usize>,
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
pub struct Parameter {
    pub role: Role,
    /// At least one; together they cover the rows in order.
    pub parts: Vec<Part>,
    master: Value,
    gradient: Value,
    written: Cell<bool>,
    version: Cell<u64>,
}

impl Parameter {
    /// A parameter of `shape` (rows, columns) or (length) with that initial content.
    pub fn new(ctx: &mut Ctx, role: Role, parts: Vec<Part>, shape: &[usize], init: Vec<f32>) -> Self {
        let gradient = ctx.zeros::<f32>(init.len());
        Self {
            role,
            parts,
            gradient: ctx.value(gradient, shape),
            master: ctx.value(init, shape),
            written: Cell::new(false),
            version: Cell::new(0),
        }
    }

    /// The name of the whole: its part's, or its parts' joined.
    pub fn name(&self) -> String {
        self.parts.iter().map(|p| p.name.as_str()).collect::<Vec<_>>().join("+")
    }

    /// The f32 master weight.
    pub fn master(&self) -> &Value {
        &self.master
    }

    /// The gradient slot; its content counts only if `has_gradient`.
    pub fn gradient(&self) -> &Value {
        &self.gradient
    }

    pub fn has_gradient(&self) -> bool {
        self.written.get()
    }

    /// Forgets the gradient without touching its memory: the next write overwrites it.
    pub fn clear_gradient(&self) {
        self.written.set(false);
    }

    /// Lets `fill` write the gradient: `Set` the first time since `clear_gradient`, `Add` afterwards.
    pub fn write_gradient(&self, fill: impl FnOnce(&Tensor, Store) -> Result<()>) -> Result<()> {
        let store = if self.written.replace(true) { Store::Add } else { Store::Set };
        fill(&self.gradient, store)
    }

    /// Counts changes of the master; packed forms remember the version that they were made from.
    pub fn version(&self) -> u64 {
        self.version.get()
    }

    /// To be called after the master was changed.
    pub fn touch(&self) {
        self.version.set(self.version.get() + 1);
    }
}
