//! How the columns of a fused query/key/value row divide into heads. Called by rotary, attention and nn.
//!
//! A row holds H query heads, then K key heads, then K value heads, of D columns each. H is a multiple of K: query heads
//! `g * H/K .. (g + 1) * H/K` share key/value head g (Ainslie et al., "GQA", 2023).

use crate::error::{Error, Result};

/// The widest head that decoding has room for on its stack: that of Gemma.
pub const MAX_DIM: usize = 256;

/// The number of heads and their width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// H, the number of query heads.
    pub attention: usize,
    /// K, the number of key/value heads.
    pub key_value: usize,
    /// D, the width of a head.
    pub dim: usize,
}

impl Heads {
    /// Columns of a fused row: (H + 2 K) D.
    pub fn qkv_size(self) -> usize {
        (self.attention + 2 * self.key_value) * self.dim
    }

    /// Columns of the attention output: H D.
    pub fn attention_size(self) -> usize {
        self.attention * self.dim
    }

    /// Query heads that share one key/value head: H / K.
    pub fn group(self) -> usize {
        self.attention / self.key_value
    }

    /// Fails, in the name of `op`, unless there are heads and K divides H.
    pub(super) fn check(self, op: &'static str) -> Result<()> {
        let Self { attention, key_value, dim } = self;
        if attention == 0 || key_value == 0 || dim == 0 || attention % key_value != 0 {
            let expected = "positive sizes and H a multiple of K";
            return Err(Error::op(op, expected, format!("H {attention}, K {key_value}, D {dim}")));
        }
        Ok(())
    }
}
