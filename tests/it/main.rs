//! The integration tests, in one binary: each file is an area.
mod engine;
mod model;
mod oracle;
mod plain;
mod reference;
