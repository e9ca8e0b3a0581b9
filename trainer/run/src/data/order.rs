//! The order of windows in an epoch: a keyed permutation that needs no table and can start anywhere.
//!
//! P(seed, epoch) of 0..W is a Feistel network of four rounds over `bits` bits, applied repeatedly until the
//! value is below W. Following the cycles of a permutation of a larger range gives a permutation of the
//! smaller one, in fewer than four steps on average.
//!
//! ```text
//!   bits = max(2, bits of W-1) rounded up to even, half = bits/2, mask = 2^half - 1
//!   (left, right) = (x >> half, x & mask)
//!   four rounds r = 0..3:  (left, right) = (right, left ^ F(r, right))
//!   F(r, x) = splitmix64(seed*0x9E3779B97F4A7C15 + epoch*0xD1B54A32D192ED03 + r*0x8CB92BA72F3D8DD7 + x) & mask     wrapping
//! ```

use crate::model::init::splitmix64;

/// Position of `index` of 0..`count` in the order of this seed and epoch.
pub fn permuted(seed: u64, epoch: u64, count: u64, index: u64) -> u64 {
    assert!(index < count, "index {index} of {count}");
    let bits = (u64::BITS - (count - 1).leading_zeros())
        .max(2)
        .next_multiple_of(2);
    let half = bits / 2;
    let mask = (1u64 << half) - 1;
    let key = seed
        .wrapping_mul(0x9E37_79B9_7F4A_7C15)
        .wrapping_add(epoch.wrapping_mul(0xD1B5_4A32_D192_ED03));
    let mut value = index;
    loop {
        let (mut left, mut right) = (value >> half, value & mask);
        for round in 0..4u64 {
            let salt = round.wrapping_mul(0x8CB9_2BA7_2F3D_8DD7);
            let attn_out = splitmix64(key.wrapping_add(salt).wrapping_add(right)) & mask;
            (left, right) = (right, left ^ attn_out);
        }
        value = (left << half) | right;
        if value < count {
            return value;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_count_gives_a_permutation() {
        for count in (1..200).chain([255, 256, 257, 1023, 1024, 1025]) {
            let mut seen = vec![false; count as usize];
            for index in 0..count {
                seen[permuted(3, 1, count, index) as usize] = true;
            }
            assert!(seen.iter().all(|seen| *seen), "count {count}");
        }
    }

    #[test]
    fn seed_and_epoch_change_the_order() {
        let order = |seed, epoch| {
            (0..100)
                .map(|i| permuted(seed, epoch, 100, i))
                .collect::<Vec<_>>()
        };
        assert_ne!(order(1, 0), order(2, 0));
        assert_ne!(order(1, 0), order(1, 1));
        assert_eq!(order(1, 1), order(1, 1));
    }

    /// Compares with the published first outputs of splitmix64 for seed 0.
    #[test]
    fn the_mixer_is_splitmix64() {
        assert_eq!(splitmix64(0), 0xE220_A839_7B1D_CDAF);
        assert_eq!(splitmix64(0x9E37_79B9_7F4A_7C15), 0x6E78_9E6A_A1B9_65F4);
    }
}
