//! What tests draw: the same from the same seed, on every machine.

/// A linear congruential series (Knuth's MMIX): two lines, and good enough to choose instants, victims and words by.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn of(seed: u64) -> Self {
        Self(seed)
    }

    /// A seed to say, so that what was drawn can be drawn again: `TRAINER_SEED`, or another for each start of the tests.
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
        // The low bits repeat soon.
        (self.0 >> 33) % bound
    }
}
