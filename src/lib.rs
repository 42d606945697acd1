//! Train small GPTs from scratch on one's own machine, and sample from them.
//!
//! The letters of shapes: B batch, T time (tokens of a sequence), C channels (hidden_size), H heads, K key/value heads,
//! D head dim, F feed-forward width, V vocabulary; N = B T rows.
//!
//! Dependencies go one way (tests/it/layering.rs holds the table):
//! main -> cli -> recipes -> { trainer, engine, eval, checkpoint } -> model -> nn -> tape -> ops -> candle.
pub mod checkpoint;
pub mod cli;
pub mod data;
pub mod device;
pub mod engine;
pub mod error;
pub mod eval;
pub mod files;
pub mod model;
pub mod nn;
pub mod ops;
pub mod preset;
pub mod random;
pub mod recipes;
pub mod tape;
pub mod tokenizer;
pub mod trainer;
