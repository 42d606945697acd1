//! Random numbers without state: Philox4x32-10 of (seed, purpose, position, index).
//!
//! Called by data order, initialisation, dropout, the stories grammar and sampling. Nothing draws from a stateful
//! generator, so a value depends only on its address and is the same on every back end, at every thread count, and after
//! a resume. Algorithm: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).

/// What a number is drawn for. Two purposes never share a stream, whatever the positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Purpose {
    Init = 1,
    Shuffle = 2,
    Phase = 3,
    Dropout = 4,
    Sampling = 5,
    Stories = 6,
    Test = 7,
    /// Initial values of adapters.
    Adapter = 8,
    AdapterDropout = 9,
}

/// Ten rounds of Philox4x32 on `counter` under `key`. Integer arithmetic only.
#[inline(always)]
pub fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let a = u64::from(counter[0]) * 0xD251_1F53;
        let b = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [(b >> 32) as u32 ^ counter[1] ^ key[0], b as u32, (a >> 32) as u32 ^ counter[3] ^ key[1], a as u32];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

/// The stream of one seed and purpose; a copy of two words, no state.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    key: [u32; 2],
    purpose: u32,
}

impl Stream {
    pub fn new(seed: u64, purpose: Purpose) -> Self {
        Self { key: [seed as u32, (seed >> 32) as u32], purpose: purpose as u32 }
    }

    /// The key, and what stands after the block in the counter, at a position: for devices that draw by themselves.
    #[inline(always)]
    pub fn address(&self, position: u64) -> ([u32; 2], [u32; 2]) {
        (self.key, [position as u32, (position >> 32) as u32 & 0xFF | self.purpose << 8])
    }

    /// Four words at (`position`, `block`). `position` keeps its low 40 bits: the purpose holds the other 24.
    #[inline(always)]
    pub fn block(&self, position: u64, block: u32) -> [u32; 4] {
        let (key, [low, high]) = self.address(position);
        philox4x32([block, low, high, 0], key)
    }

    /// One word at (`position`, `index`).
    #[inline(always)]
    pub fn word(&self, position: u64, index: u32) -> u32 {
        self.block(position, index / 4)[index as usize % 4]
    }

    /// Uniform in the open interval (0, 1): the midpoints of 2^24 equal cells, so neither end is ever returned.
    #[inline(always)]
    pub fn uniform(&self, position: u64, index: u32) -> f32 {
        unit(self.word(position, index))
    }

    /// Uniform in (0, 1) with 53 bits, for choices whose probability must be exact to f64.
    pub fn uniform_f64(&self, position: u64, index: u32) -> f64 {
        let w = self.block(position, index);
        let bits = (u64::from(w[0]) << 21) ^ (u64::from(w[1]) >> 11);
        ((bits & ((1 << 53) - 1)) as f64 + 0.5) * 2f64.powi(-53)
    }

    /// Standard normal at (`position`, `index`), by Box and Muller from its own block.
    pub fn normal(&self, position: u64, index: u32) -> f32 {
        let w = self.block(position, index);
        let radius = (-2.0 * f64::from(unit(w[0])).ln()).sqrt();
        (radius * (std::f64::consts::TAU * f64::from(unit(w[1]))).cos()) as f32
    }
}

/// A word as a number in (0, 1): its upper 23 bits and a half cell, all exact in f32.
#[inline(always)]
pub fn unit(word: u32) -> f32 {
    ((word >> 9) as f32 + 0.5) * (1.0 / 8_388_608.0)
}

/// A keyed permutation of 0..`len` computed on demand: a four-round Feistel network over the next power of four, walked
/// until it lands inside (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). No memory, any length.
#[derive(Clone, Copy, Debug)]
pub struct Permutation {
    len: u64,
    half_bits: u32,
    stream: Stream,
    epoch: u64,
}

impl Permutation {
    pub fn new(seed: u64, epoch: u64, len: u64) -> Self {
        let bits = 64 - len.saturating_sub(1).leading_zeros();
        Self { len, half_bits: bits.div_ceil(2).max(1), stream: Stream::new(seed, Purpose::Shuffle), epoch }
    }

    /// Where `index` < `len` goes; a bijection of 0..`len`.
    pub fn at(&self, index: u64) -> u64 {
        debug_assert!(index < self.len);
        let mask = (1u64 << self.half_bits) - 1;
        let mut x = index;
        loop {
            let (mut left, mut right) = (x >> self.half_bits, x & mask);
            for round in 0..4u32 {
                let word = self.stream.block(self.epoch, (right as u32).wrapping_mul(4).wrapping_add(round));
                let mix = u64::from(word[0]) ^ (u64::from(word[1]) << 32);
                (left, right) = (right, left ^ (mix & mask));
            }
            x = (left << self.half_bits) | right;
            if x < self.len {
                return x;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers_of_random123() {
        // kat_vectors of the Random123 distribution, philox4x32 10.
        assert_eq!(philox4x32([0; 4], [0; 2]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(philox4x32([u32::MAX; 4], [u32::MAX; 2]), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
        assert_eq!(
            philox4x32([0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344], [0xa4093822, 0x299f31d0]),
            [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]
        );
    }

    #[test]
    fn permutation_is_a_bijection_at_every_small_length() {
        for len in (1..70).chain([255, 256, 257, 1000]) {
            let permutation = Permutation::new(3, 5, len);
            let mut seen: Vec<u64> = (0..len).map(|i| permutation.at(i)).collect();
            seen.sort_unstable();
            assert_eq!(seen, (0..len).collect::<Vec<_>>(), "length {len}");
        }
        let (a, b) = (Permutation::new(3, 5, 1000), Permutation::new(3, 6, 1000));
        assert!((0..1000).any(|i| a.at(i) != b.at(i)), "epochs must differ");
    }

    #[test]
    fn uniform_never_reaches_its_ends_and_is_centred() {
        assert!(unit(0) > 0.0 && unit(u32::MAX) < 1.0);
        let stream = Stream::new(0, Purpose::Test);
        let n = 20_000;
        let mean = (0..n).map(|i| f64::from(stream.uniform(7, i))).sum::<f64>() / f64::from(n);
        assert!((mean - 0.5).abs() < 4.0 * (1.0f64 / 12.0 / f64::from(n)).sqrt(), "mean {mean}");
        let square = (0..n).map(|i| f64::from(stream.normal(7, i)).powi(2)).sum::<f64>() / f64::from(n);
        assert!((square - 1.0).abs() < 4.0 * (2.0 / f64::from(n)).sqrt(), "variance {square}");
    }
}
