//! A GPU that does nothing: what a step would hand over is counted by `Ctx`, on any machine.
//!
//! Used by `gpt bench decode --count`. Buffers keep what they were made with, zeros, so ids read from one are valid.

use super::{Dispatch, Gpu, Product};
use crate::error::Result;

pub struct Counting;

impl Gpu for Counting {
    fn name(&self) -> &'static str {
        "counting"
    }

    fn dispatch(&self, _: &Dispatch) -> Result<()> {
        Ok(())
    }

    fn multiply(&self, _: &Product) -> Result<()> {
        Ok(())
    }
}
