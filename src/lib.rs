//! gpt
pub mod data;
pub mod engine;
pub mod error;
pub mod model;
pub mod nn;
pub mod ops;
pub mod preset;
pub mod random;
pub mod tape;
pub mod tokenizer;
