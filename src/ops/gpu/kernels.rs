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
/// Widths of heads that attention is compiled for; what lies between is padded.
const WIDTHS: &[&str] = &["32", "64", "128", "256"];

/// What a cache keeps numbers in: plain, and in 8 or 4 bits after some plain pages.
const CACHES: &[&str] = &["f32", "bf16", "f32_q8", "bf16_q8", "f32_q4", "bf16_q4"];

/// The formats of weights, in the order of `DeviceFormat`.
pub const FORMATS: &[&str] = &["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q4_k", "q6_k"];

/// How many rows of x a threadgroup of a product takes.
pub const ROWS: [usize; 3] = [1, 4, 8];

macro_rules! for_rows {
    ($($format:literal)*) => { &[$(concat!($format, "_1"), concat!($format, "_4"), concat!($format, "_8")),*] };
}

/// Each format with each of `ROWS`.
pub const PRODUCTS: &[&str] = for_rows!("f32" "f16" "bf16" "q8_0" "q4_0" "q4_1" "q5_0" "q5_1" "q4_k" "q6_k");

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

    SWIGLU = "swiglu" "swiglu" EVERY ONE 256 (gate_up: Read T, y: Write T) [count: U32, width: U32];
    SWIGLU_BACKWARD = "swiglu" "swiglu_backward" EVERY ONE 256
        (gate_up: Read T, dy: Read T, dgate_up: Update T) [count: U32, width: U32, add: U32];

    DROPOUT = "dropout" "dropout" EVERY ONE 256 (x: Read T, y: Update T)
        [count: U32, key0: U32, key1: U32, position: U32, high: U32, threshold: U32, scale: F32, add: U32];

    ROTARY = "rotary" "rotary" EVERY ONE 256
        (qkv: Read T, cosines: Read F32, sines: Read F32, query_gain: Read T, key_gain: Read T, y: Write T, rstd: Write F32)
        [heads: U32, rotated: U32, dim: U32, query_heads: U32, seq: U32, normed: U32, eps: F32];
    ROTARY_BACKWARD = "rotary" "rotary_backward" EVERY ONE 256
        (qkv: Read T, rstd: Read F32, cosines: Read F32, sines: Read F32, query_gain: Read T, key_gain: Read T,
         dout: Read T, dqkv: Update T, partial: Write F32)
        [rows: U32, heads: U32, rotated: U32, dim: U32, query_heads: U32, seq: U32, normed: U32, add: U32];

    CROSS_ENTROPY = "cross_entropy" "cross_entropy" EVERY ONE 256
        (logits: Update T, targets: Read U32, losses: Write F32) [columns: U32, gradient: U32, scale: F32];
    SUM_LOSSES = "cross_entropy" "sum_losses" NONE ONE 256
        (losses: Read F32, total: Write F32) [count: U32, scale: F32];
    DISTILLATION = "distillation" "distillation" NONE ONE 256
        (logits: Update F32, teacher: Read F32, targets: Read U32, losses: Write F32)
        [columns: U32, divergence: U32, temperature: F32, alpha: F32, scale: F32];
    /// `slopes` is scratch as large as the logits.
    DISTILLATION_TOP = "distillation" "distillation_top" NONE ONE 256
        (logits: Update F32, ids: Read U32, logprobs: Read F32, targets: Read U32, losses: Write F32, slopes: Update F32)
        [columns: U32, top: U32, divergence: U32, alpha: F32, scale: F32];

    ADAMW = "adamw" "adamw" NONE ONE 256
        (master: Update F32, gradient: Read F32, first: Update F32, second: Update F32, scalars: Read F32)
        [count: U32, beta1: F32, beta2: F32, log_beta1: F32, log_beta2: F32, epsilon: F32, weight_decay: F32];
    AVERAGE = "adamw" "average" NONE ONE 256
        (master: Read F32, ema: Update F32, scalars: Read F32) [count: U32];
    MUON_GATHER = "muon" "muon_gather" NONE ONE 256
        (gradient: Read F32, momentum: Update F32, update: Write F32, scalars: Read F32) [count: U32, momentum: F32];
    MUON_NORMALISE = "muon" "muon_normalise" NONE ONE 256 (x: Update F32, norm: Read F32) [count: U32];
    MUON_POLYNOMIAL = "muon" "muon_polynomial" NONE ONE 256
        (p: Update F32, g: Read F32) [count: U32, small: U32, a: F32, b: F32, c: F32];
    MUON_APPLY = "muon" "muon_apply" NONE ONE 256
        (master: Update F32, update: Read F32, scalars: Read F32) [count: U32, weight_decay: F32, scale: F32];

    NORM_OF_PIECES = "gradient_norm" "norm_of_pieces" NONE ONE 256 (x: Read F32, norms: Write F32) [count: U32];
    NORM_OF_NORMS = "gradient_norm" "norm_of_norms" NONE ONE 256
        (norms: Read F32, to: Write F32) [count: U32, place: U32];
    GUARD_DECIDE = "guard" "guard_decide" NONE ONE 32
        (scalars: Update F32) [max_norm: F32, spike_threshold: F32, observe: F32];
    GUARD_FINISH = "guard" "guard_finish" NONE ONE 32 (scalars: Update F32) [];

    /// Queries and keys are normalised and turned, keys and values written to their pages.
    APPEND = "page" "append" NONE CACHES 128
        (qkv: Read F32, angles: Read F32, lanes: Read U32, rows: Read U32, tables: Read U32, query_gain: Read F32,
         key_gain: Read F32, query: Write F32, plain: Update Bytes, pages: Update Bytes)
        [query_heads: U32, key_value_heads: U32, dim: U32, normed: U32, eps: F32, group: U32, table_start: U32,
         table_length: U32, own_window: U32, plain_bytes: U32, page_bytes: U32];
    ATTEND = "attend" "attend" NONE CACHES 256
        (query: Read F32, lanes: Read U32, rows: Read U32, tables: Read U32, plain: Read Bytes, pages: Read Bytes,
         partial: Write F32)
        [query_heads: U32, key_value_heads: U32, dim: U32, group: U32, table_start: U32, table_length: U32,
         own_window: U32, plain_bytes: U32, page_bytes: U32, stretches: U32];
    ATTEND_JOIN = "attend" "attend_join" NONE ONE 64
        (partial: Read F32, attention: Write F32) [query_heads: U32, dim: U32, stretches: U32];
    /// The next ids, and the lanes after them.
    SAMPLE = "noise" "sample" NONE ONE 256
        (logits: Read F32, outputs: Read U32, lanes: Read U32, ids: Write U32, next_lanes: Write U32, reported: Write U32)
        [vocab: U32, purpose: U32];

    /// y = norm(x) W^T, of the rows of x that `select` names if `selected`.
    NORM_PRODUCT = "skinny" "norm_product" NONE PRODUCTS 128
        (x: Read F32, norm: Read F32, select: Read U32, weights: Read Bytes, y: Write F32)
        [rows: U32, outputs: U32, columns: U32, row_bytes: U32, selected: U32, eps: F32];
    /// y += x W^T.
    RESIDUAL_PRODUCT = "skinny" "residual_product" NONE PRODUCTS 128
        (x: Read F32, weights: Read Bytes, y: Update F32)
        [rows: U32, outputs: U32, columns: U32, row_bytes: U32];
    /// y = silu(norm(x) gate^T) norm(x) up^T.
    GATE_UP_PRODUCT = "skinny" "gate_up_product" NONE PRODUCTS 128
        (x: Read F32, norm: Read F32, select: Read U32, gate: Read Bytes, up: Read Bytes, y: Write F32)
        [rows: U32, outputs: U32, columns: U32, row_bytes: U32, selected: U32, eps: F32];

    /// A weight as f32.
    DEQUANTISE = "blocks" "dequantise" NONE FORMATS 128
        (weights: Read Bytes, y: Write F32) [columns: U32, row_bytes: U32];
    /// Rows of a weight as f32.
    EMBED_BLOCKS = "blocks" "embed_blocks" NONE FORMATS 128
        (weights: Read Bytes, ids: Read U32, y: Write F32) [columns: U32, row_bytes: U32];

    /// B over a layer's outputs.
    LORA_SPREAD = "lora" "lora_spread" NONE ONE 256
        (b: Read F32, places: Read U32, spread: Write F32) [count: U32, ranks: U32, rank: U32];
    LORA_GATHER = "lora" "lora_gather" NONE ONE 256
        (dspread: Read F32, places: Read U32, db: Update F32)
        [count: U32, ranks: U32, rank: U32, scale: F32, add: U32];
    /// w + scale p.
    LORA_MERGE = "lora" "lora_merge" NONE ONE 256
        (w: Read F32, p: Read F32, merged: Write F32) [count: U32, scale: F32];
    LORA_SCALE = "lora" "lora_scale" NONE ONE 256 (x: Read F32, to: Update F32) [count: U32, scale: F32, add: U32];

    ATTENTION_FORWARD = "attention" "attention_forward" EVERY WIDTHS 128
        (qkv: Read T, starts: Read U32, out: Write T, lse: Write F32)
        [seq: U32, heads: U32, key_heads: U32, dim: U32, window: U32, documents: U32, add: U32, scale: F32];
    /// delta is the sum of dout out for each query and head.
    ATTENTION_DELTA = "attention" "attention_delta" EVERY ONE 128
        (out: Read T, dout: Read T, delta: Write F32)
        [seq: U32, heads: U32, key_heads: U32, dim: U32, window: U32, documents: U32, add: U32, scale: F32];
    /// The columns of keys and values in dqkv.
    ATTENTION_BACKWARD_KEYS = "attention" "attention_backward_keys" EVERY WIDTHS 128
        (qkv: Read T, starts: Read U32, lse: Read F32, delta: Read F32, dout: Read T, dqkv: Update T)
        [seq: U32, heads: U32, key_heads: U32, dim: U32, window: U32, documents: U32, add: U32, scale: F32];
    /// The columns of queries in dqkv.
    ATTENTION_BACKWARD_QUERIES = "attention" "attention_backward_queries" EVERY WIDTHS 128
        (qkv: Read T, starts: Read U32, lse: Read F32, delta: Read F32, dout: Read T, dqkv: Update T)
        [seq: U32, heads: U32, key_heads: U32, dim: U32, window: U32, documents: U32, add: U32, scale: F32];
}
