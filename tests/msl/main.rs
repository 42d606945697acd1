//! The Metal kernels without a Mac: their signatures against the table that Rust dispatches by, the products and the passes of
//! decoding in an emulator of their language. tests/ops holds training's kernels against the ops' references.
mod decode;
#[allow(dead_code)]
mod emulator;
mod mutants;
mod products;
mod record;
mod sanitizers;
mod scenes;
mod selftest;
mod signatures;
mod strict;
mod training;
mod translate;
mod types;
