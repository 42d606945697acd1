//! Four ops of the decode list: `project`, `out`, `gate_up` and `down`. The fifth of a layer is `attend`.
//!
//! Called by `engine::model`. Each reads its weights once for all lanes: a member multiplies all of them by its panels.

use super::{Layer, Pass, Tables};
use crate::ops::gemm::Store;
use crate::ops::simd::{sigmoid, simd_fn};
use crate::ops::team::Member;

impl<T: Tables> Pass<'_, T> {
    /// The five ops of one layer.
    pub fn layer(&self, member: &Member, layer: &Layer, index: usize) {
        self.project(member, layer);
        member.sync();
        self.attend(member, layer, index);
        member.sync();
        self.out(member, layer);
        member.sync();
        self.gate_up(member, layer);
        member.sync();
        self.down(member, layer);
        member.sync();
    }

    /// Norm, query/key/value product.
    fn project(&self, member: &Member, layer: &Layer) {
        let weight = &layer.qkv_proj;
        let rows = self.normed_rows(member, weight, &layer.input_layernorm, self.lanes.len(), |i| i);
        // SAFETY: the columns of this member's panels are its own.
        unsafe { weight.multiply(self.family, rows, weight.share(member), self.qkv, Store::Set) };
    }

    /// x += attention W^T.
    fn out(&self, member: &Member, layer: &Layer) {
        let weight = &layer.o_proj;
        let rows = self.rows_of(member, weight, self.attention, self.sizes.heads.attention_size());
        // SAFETY: as in `project`.
        unsafe { weight.multiply(self.family, rows, weight.share(member), self.x, Store::Add) };
    }

    /// Norm, gate and up product, gate = silu(gate) * up.
    fn gate_up(&self, member: &Member, layer: &Layer) {
        let (gate, up, width) = (&layer.gate_proj, &layer.up_proj, self.sizes.intermediate_size);
        let rows = self.normed_rows(member, gate, &layer.post_attention_layernorm, self.lanes.len(), |i| i);
        let panels = gate.share(member);
        let columns = gate.columns(&panels);
        // SAFETY: as in `project`; the panels of both hold the same columns.
        unsafe {
            gate.multiply(self.family, rows, panels.clone(), self.gate, Store::Set);
            up.multiply(self.family, rows, panels, self.up, Store::Set);
            for lane in 0..self.lanes.len() {
                let at = lane * width + columns.start;
                swiglu(self.family, self.gate.part(at, columns.len()), self.up.read(at, columns.len()));
            }
        }
    }

    /// x += activation W^T.
    fn down(&self, member: &Member, layer: &Layer) {
        let weight = &layer.down_proj;
        let rows = self.rows_of(member, weight, self.gate, self.sizes.intermediate_size);
        // SAFETY: as in `project`.
        unsafe { weight.multiply(self.family, rows, weight.share(member), self.x, Store::Add) };
    }
}

simd_fn! {
/// gate = silu(gate) * up.
fn swiglu<S>(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = *gate * sigmoid::<S>(*gate) * up;
    }
}
}
