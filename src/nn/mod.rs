//! Layers: parameters, the ops that they record on the tape, and the key/value cache.
pub mod attention;
pub mod cache;
pub mod dropout;
pub mod embedding;
pub mod linear;
pub mod lora;
pub mod mlp;
pub mod norm;
pub mod parameter;
