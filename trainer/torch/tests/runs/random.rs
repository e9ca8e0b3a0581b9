//! Random numbers for tests: the same from the same seed on every machine.

/// A linear congruential generator (Knuth's MMIX), good enough to choose moments, victims and words.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn from_seed(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns `TRAINER_SEED`, or a new seed for each start of the tests, and prints it so that the run can
    /// be repeated.
    pub(crate) fn seed(draws: &str) -> u64 {
        let seed = std::env::var("TRAINER_SEED").map_or_else(
            |_| u64::from(std::process::id()),
            |seed| seed.parse().expect("TRAINER_SEED is a number"),
        );
        println!("TRAINER_SEED={seed} draws the same {draws}");
        seed
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = (self.0)
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        // The low bits have short periods.
        (self.0 >> 33) % bound
    }
}
