//! The decoder: its config and the one forward that training differentiates.
pub mod config;
