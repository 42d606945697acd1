//! The Metal kernels without a Mac: their signatures against the table that Rust dispatches by. tests/ops holds their results
//! against references.
#[allow(dead_code)]
mod emulator;
mod signatures;
mod translate;
