//! The decoder: its config and the forward that training differentiates.
pub mod config;
pub mod gpt;
