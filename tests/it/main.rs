//! The integration tests, in one binary: each file is an area.
mod engine;
mod plain;
