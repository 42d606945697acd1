//! Layers: parameters and the ops they record on the tape.
pub mod cache;
pub mod parameter;
