//! Reverse-mode differentiation over candle tensors.
//!
//! `nn` records each op as its inputs, its output and a backward closure; `backward` walks the records once from the loss,
//! moves the first gradient of a value and adds later ones in place, and frees values and gradients as it goes.
//! An op without a backward cannot be recorded, so no gradient can vanish in silence. Weights are not on the tape: their
//! gradients go into the slot of their `Parameter`. Why not candle's autograd: docs/ARCHITECTURE.md.

use crate::error::Result;
use crate::ops::add;
use crate::ops::ctx::{Ctx, Value};
use crate::ops::gemm::Store;

/// A value on the tape.
#[derive(Clone, Debug)]
pub struct Var {
    value: Value,
    id: Option<usize>,
}

impl Var {
    /// A value that needs no gradient.
    pub fn constant(value: Value) -> Self {
        Self { value, id: None }
    }

    pub fn value(&self) -> &Value {
        &self.value
    }

    /// Whether anything before it is trained.
    pub fn needs_gradient(&self) -> bool {
        self.id.is_some()
    }
}

type Backward = Box<dyn FnOnce(&mut Ctx, Value, &mut Gradients) -> Result<()>>;

/// The record of one forward pass.
pub struct Tape {
    nodes: Vec<Option<Backward>>,
    recording: bool,
}

impl Tape {
    /// A tape that records.
    pub fn new() -> Self {
        Self { nodes: Vec::new(), recording: true }
    }

    /// A tape that records nothing: the same forward for validation, at no memory cost.
    pub fn inference() -> Self {
        Self { nodes: Vec::new(), recording: false }
    }

    /// Whether closures passed to `record` will be kept; a forward may skip saving what only they need.
    pub fn is_recording(&self) -> bool {
        self.recording
    }

    /// Puts an op's output on the tape. `backward` gets the gradient of the output and hands each input its own
    /// through `Gradients::write` or `give`.
    pub fn record(
        &mut self,
        output: Value,
        backward: impl FnOnce(&mut Ctx, Value, &mut Gradients) -> Result<()> + 'static,
    ) -> Var {
        if !self.recording {
            return Var::constant(output);
        }
        self.nodes.push(Some(Box::new(backward)));
        Var { value: output, id: Some(self.nodes.len() - 1) }
    }

    /// Runs `block` without recording its inside, and again, recording, when its gradient is needed: its activations are
    /// freed at once and cost a second forward instead. `block` must give the same output both times.
    pub fn checkpoint(
        &mut self,
        ctx: &mut Ctx,
        input: &Var,
        block: impl Fn(&mut Ctx, &mut Tape, &Var) -> Result<Var> + 'static,
    ) -> Result<Var> {
        let output = block(ctx, &mut Tape::inference(), input)?.value;
        let saved = input.clone();
        Ok(self.record(output, move |ctx, gradient, gradients| {
            let mut inner = Tape::new();
            let leaf = inner.leaf(saved.value.clone());
            let output = block(ctx, &mut inner, &leaf)?;
            let mut found = inner.run(ctx, &output, gradient)?;
            match found.take(&leaf) {
                Some(gradient) => gradients.give(ctx, &saved, gradient),
                None => Ok(()),
            }
        }))
    }

    /// A value whose gradient is wanted but that no op made.
    pub fn leaf(&mut self, value: Value) -> Var {
        self.nodes.push(None);
        Var { value, id: Some(self.nodes.len() - 1) }
    }

    /// Walks the tape from `output`, whose gradient is `gradient`, to its beginning. What remains are the leaves' gradients.
    pub fn run(self, ctx: &mut Ctx, output: &Var, gradient: Value) -> Result<Gradients> {
        let mut gradients = Gradients { slots: vec![None; self.nodes.len()] };
        gradients.give(ctx, output, gradient)?;
        for (id, node) in self.nodes.into_iter().enumerate().rev() {
            let Some(backward) = node else { continue };
            if let Some(gradient) = gradients.slots[id].take() {
                backward(ctx, gradient, &mut gradients)?;
            }
        }
        Ok(gradients)
    }
}

impl Default for Tape {
    fn default() -> Self {
        Self::new()
    }
}

/// The gradients found so far, by value.
pub struct Gradients {
    slots: Vec<Option<Value>>,
}

impl Gradients {
    /// Hands `var` a whole gradient: kept if it is the first, else added in place.
    pub fn give(&mut self, ctx: &mut Ctx, var: &Var, gradient: Value) -> Result<()> {
        let Some(id) = var.id else { return Ok(()) };
        match self.slots[id].take() {
            None => self.slots[id] = Some(gradient),
            Some(sum) => {
                let sum = owned(ctx, sum)?;
                add::add_assign(ctx, &sum, &gradient)?;
                self.slots[id] = Some(sum);
            }
        }
        Ok(())
    }

    /// Lets `fill` write the gradient of `var` into its buffer: `Set` for a new one, `Add` for one that holds a sum.
    /// Not called at all if nobody needs that gradient.
    pub fn write(
        &mut self,
        ctx: &mut Ctx,
        var: &Var,
        fill: impl FnOnce(&mut Ctx, &Value, Store) -> Result<()>,
    ) -> Result<()> {
        let Some(id) = var.id else { return Ok(()) };
        let (slot, store) = match self.slots[id].take() {
            None => (ctx.output(var.value.dtype(), var.value.shape())?, Store::Set),
            Some(sum) => (owned(ctx, sum)?, Store::Add),
        };
        fill(ctx, &slot, store)?;
        self.slots[id] = Some(slot);
        Ok(())
    }

    /// The gradient of `var`, if any reached it.
    pub fn take(&mut self, var: &Var) -> Option<Value> {
        self.slots.get_mut(var.id?)?.take()
    }
}

/// The value itself if nobody else holds it, else a copy that may be written.
fn owned(ctx: &mut Ctx, value: Value) -> Result<Value> {
    if value.is_unique() { Ok(value) } else { add::copy(ctx, &value) }
}
