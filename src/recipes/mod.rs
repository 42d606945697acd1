//! One file a command: what it was asked to do, and `run`. Recipes join the parts below and never print.
pub mod bench;
pub mod doctor;
pub mod eval;
pub mod info;
pub mod plan;
pub mod report;
pub mod run_folder;
pub mod sample;
pub mod train;
