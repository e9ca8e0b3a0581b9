//! Stochastic rounding of moments and masters to bf16.
//!
//! A bf16 has 8 significant bits. With beta2 = 0.999 a step changes the variance by less than half of its last bit, so rounding
//! to the nearest would never change it; nor would a step of 1e-6 change a weight of 1. Here a number is rounded away from zero
//! with the probability that its discarded bits give, so that its mean is the fp32 number.
//!
//! The random bits come from a counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011):
//! a hash of seed, unit, step and element of the unit. They depend neither on threads, instruction set, tiles nor ranks, where
//! units are the same on all ranks, and a resumed run repeats them. Units of a part of a tensor, as of DTensors, differ with the
//! number of ranks. The key of a step is made with the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable
//! pseudorandom number generators", OOPSLA 2014), the bits of an element with the 32-bit hash `lowbias32` (Wellons,
//! "Prospecting for hash functions", 2018). Elements of a unit 2^32 apart share them.

use crate::number;

/// Identifies the elements of a tile for the random bits of their rounding; without effect on numbers in fp32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rounding {
    /// Seed of the run.
    pub seed: u64,
    /// Index of the unit.
    pub unit: u64,
    /// The tile's first element, counted from the unit's first.
    pub first_elem: u64,
}

/// The random bits of a tile in one step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RandomBits {
    /// Key of the moments' bits.
    pub(crate) key: u32,
    /// Key of the masters' bits, which are independent of the moments'.
    pub(crate) master_key: u32,
    pub(crate) first_elem: u32,
}

impl Rounding {
    /// For the element at the start of a unit, or a caller whose moments and masters are fp32.
    pub const ZERO: Self = Self {
        seed: 0,
        unit: 0,
        first_elem: 0,
    };

    pub(crate) fn of_step(&self, step: u64) -> RandomBits {
        let key = mix(mix(mix(self.seed) ^ self.unit) ^ step);
        RandomBits {
            key: (key >> 32) as u32,
            master_key: key as u32,
            first_elem: self.first_elem as u32,
        }
    }
}

/// The finalizer of SplitMix64, after its increment.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

impl RandomBits {
    /// The same elements with the bits of their masters.
    pub(super) fn of_master(self) -> Self {
        Self {
            key: self.master_key,
            ..self
        }
    }

    /// The bits of an element of the tile: the lower half is for the momentum or the master, the upper half for the variance.
    /// `gpu/source/adamw.cu` has this hash too.
    #[inline(always)]
    fn at(self, elem: u32) -> u32 {
        let x = self.first_elem.wrapping_add(elem) ^ self.key;
        let x = (x ^ (x >> 16)).wrapping_mul(0x7FEB_352D);
        let x = (x ^ (x >> 15)).wrapping_mul(0x846C_A68B);
        x ^ (x >> 16)
    }
}

/// Converts one plane to fp32.
#[inline(always)]
pub(super) fn widen(stored: &[u16], out: &mut [f32]) {
    for (out, stored) in out.iter_mut().zip(stored) {
        *out = number::from_bf16(*stored);
    }
}

/// Rounds the moments of the elements from `first` of the tile on. `from` and `to` are momentum and variance; Lion's variance is
/// empty. Masters are rounded in the momentum's place.
#[inline(always)]
pub(super) fn narrow(bits: RandomBits, first: usize, from: [&[f32]; 2], to: [&mut [u16]; 2]) {
    let [momentum_from, variance_from] = from;
    let [momentum_to, variance_to] = to;
    let momentum = momentum_from.iter().zip(momentum_to).enumerate();
    let random = |elem: usize| bits.at((first as u32).wrapping_add(elem as u32));
    if variance_to.is_empty() {
        for (elem, (m, m_to)) in momentum {
            *m_to = number::to_bf16_by_chance(*m, random(elem) as u16);
        }
        return;
    }
    // Both in one loop, because the hash takes as long as the rest.
    for ((elem, (m, m_to)), (v, v_to)) in momentum.zip(variance_from.iter().zip(variance_to)) {
        let random = random(elem);
        *m_to = number::to_bf16_by_chance(*m, random as u16);
        *v_to = number::to_bf16_by_chance(*v, (random >> 16) as u16);
    }
}
