//! Layers: parameters, and the ops that they record on the tape. Called by the model alone.
pub mod attention;
pub mod cache;
pub mod dropout;
pub mod embedding;
pub mod linear;
pub mod mlp;
pub mod norm;
pub mod parameter;
