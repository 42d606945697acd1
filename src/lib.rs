//! gpt
pub mod engine;
pub mod error;
pub mod model;
pub mod nn;
pub mod ops;
pub mod random;
pub mod tape;
