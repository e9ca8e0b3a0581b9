//! Random numbers that a seed repeats, for simulations.

/// Bytes that a drive keeps or loses together when the power fails.
pub const SECTOR_BYTES: usize = 512;

/// Pseudorandom numbers from a seed (SplitMix64).
#[derive(Clone, Debug)]
pub struct SimRandom(u64);

impl SimRandom {
    /// Generator that returns the same numbers for the same seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number of `0..count`.
    pub fn below(&mut self, count: usize) -> usize {
        (self.number() % count as u64) as usize
    }

    /// Returns true once in `count` times on average.
    pub fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }
}
