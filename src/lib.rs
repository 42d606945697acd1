//! gpt
pub mod data;
pub mod error;
pub mod ops;
pub mod random;
pub mod tape;
pub mod tokenizer;
