//! The integration tests, in one binary: each file is an area.
mod bad_input;
mod cache_types;
mod command;
mod commands;
mod engine;
mod layering;
mod model;
mod oracle;
mod plain;
mod readme;
mod reference;
mod resume;
mod rule;
mod sampling;
mod speed;
