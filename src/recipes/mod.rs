//! One file a command: what it was asked to do, and `run`. Recipes join the parts below and never print.
pub mod bench;
pub mod data;
pub mod distill;
pub mod doctor;
pub mod eval;
pub mod finetune;
pub mod inspect;
pub mod merge;
pub mod plan;
pub mod report;
pub mod run_folder;
pub mod sample;
pub mod tokenizer;
pub mod train;
pub mod vocabulary;
