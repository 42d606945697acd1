//! What preparing data tells while it works. Recipes pass it on; tests collect it.

use crate::error::Result;

/// Work with a length, in bytes, and notes.
pub trait Progress {
    /// Work begins: what it is, and how many bytes it has if that is known.
    fn begin(&mut self, what: &str, total: Option<u64>);
    /// So many bytes are done. An error if the user wants to stop: what is half done can be taken up again.
    fn at(&mut self, done: u64) -> Result<()>;
    /// The work is over, whether it succeeded or not.
    fn end(&mut self);
    /// A line worth reading once.
    fn note(&mut self, text: String);
}

/// Keeps the notes, and shows nothing.
#[derive(Debug, Default)]
pub struct Told(pub Vec<String>);

impl Progress for Told {
    fn begin(&mut self, _: &str, _: Option<u64>) {}

    fn at(&mut self, _: u64) -> Result<()> {
        Ok(())
    }

    fn end(&mut self) {}

    fn note(&mut self, text: String) {
        self.0.push(text);
    }
}
