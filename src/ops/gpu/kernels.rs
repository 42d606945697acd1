//! Every kernel and its arguments: the one table that Rust and the sources in kernels/ are held to.
//!
//! Ops name an entry in `Ctx::dispatch`; tests/msl compares each with the parsed signature of the function of that name, and
//! finds functions without an entry. Buffers come first, at their index; then one struct with the numbers, in order.

use candle_core::DType;

pub use super::Kernel;
use super::{Access, Element, Number, Slot};

const EVERY: &[DType] = &[DType::F32, DType::F16, DType::BF16];
const NONE: &[DType] = &[];
const ONE: &[&str] = &[];

macro_rules! kernels {
    ($($(#[$doc:meta])* $id:ident = $file:literal $name:literal $types:ident $forms:ident $threads:literal
        ($($slot:ident: $access:ident $element:ident),*) [$($number:ident: $kind:ident),*];)*) => {
        $($(#[$doc])*
        pub static $id: Kernel = Kernel {
            file: $file,
            name: $name,
            types: $types,
            forms: $forms,
            threads: $threads,
            slots: &[$(Slot { name: stringify!($slot), access: Access::$access, element: Element::$element }),*],
            numbers: &[$((stringify!($number), Number::$kind)),*],
        };)*

        /// All of them.
        pub static ALL: &[&Kernel] = &[$(&$id),*];
    };
}

kernels! {
    /// x += y.
    ADD = "add" "add" EVERY ONE 256 (x: Update T, y: Read T) [count: U32];
    /// y = x.
    COPY = "add" "copy" EVERY ONE 256 (x: Read T, y: Write T) [count: U32];
    /// x = value.
    FILL = "add" "fill" EVERY ONE 256 (x: Write T) [count: U32, value: F32];

    /// Rows of a table.
    EMBED = "embedding" "embed" EVERY ONE 256 (table: Read T, ids: Read U32, y: Write T) [columns: U32];
    /// The rows of dy that belong to one id are added to its row of dtable, in the order of `order`.
    EMBED_BACKWARD = "embedding" "embed_backward" EVERY ONE 256
        (order: Read U32, starts: Read U32, rows: Read U32, dy: Read T, dtable: Update F32) [columns: U32];

    RMS_NORM = "rms_norm" "rms_norm" EVERY ONE 256
        (x: Read T, weight: Read T, y: Write T, rstd: Write F32) [rows: U32, columns: U32, eps: F32];
    /// x += residual, and y is its norm.
    RMS_NORM_ADD = "rms_norm" "rms_norm_add" EVERY ONE 256
        (x: Update T, residual: Read T, weight: Read T, y: Write T, rstd: Write F32) [rows: U32, columns: U32, eps: F32];
    RMS_NORM_BACKWARD = "rms_norm" "rms_norm_backward" EVERY ONE 256
        (x: Read T, weight: Read T, rstd: Read F32, dy: Read T, dx: Update T, partial: Write F32)
        [rows: U32, columns: U32, add: U32];
    /// to (+)= the sum over blocks of what starts at `offset` in each.
    ADD_BLOCKS = "rms_norm" "add_blocks" NONE ONE 256
        (partial: Read F32, to: Update F32) [blocks: U32, stride: U32, offset: U32, columns: U32, add: U32];
}
