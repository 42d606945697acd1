//! The integration tests, in one binary: each file is an area.
mod model;
mod oracle;
mod reference;
