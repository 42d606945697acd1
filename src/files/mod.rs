//! Files that are whole or not there. A leaf, used by checkpoint and data.

pub mod atomic;
