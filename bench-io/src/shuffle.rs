//! A pseudo-random permutation of blocks, the same in every run. Each position is computed on demand, so a terabyte in
//! blocks of 4 KiB needs no memory and no preparation.
//!
//! A Feistel network permutes all numbers with a given number of bits. Results beyond the last block are permuted again
//! until they are within: fewer than four times on average, about 10 ns each.

/// One key per round; four rounds suffice to separate neighbours.
const KEYS: [u64; 4] = [
    0x9E37_79B9_7F4A_7C15,
    0xBF58_476D_1CE4_E5B9,
    0x94D0_49BB_1331_11EB,
    0xD6E8_FEB8_6659_FD93,
];

/// The block at `place` of `count`.
pub(crate) fn block(place: u64, count: u64) -> u64 {
    assert!(place < count, "place {place} of {count}");
    let bits = u64::BITS - (count - 1).leading_zeros();
    let half = bits.div_ceil(2).max(1);
    let mask = (1 << half) - 1;
    let mut at = place;
    loop {
        let (mut left, mut right) = (at >> half, at & mask);
        for key in KEYS {
            (left, right) = (right, left ^ (mixed(right, key) & mask));
        }
        at = left << half | right;
        if at < count {
            return at;
        }
    }
}

/// A round function: each bit of the result depends on all of `value`.
fn mixed(value: u64, key: u64) -> u64 {
    let mixed = (value ^ key).wrapping_mul(KEYS[0]);
    let mixed = (mixed ^ (mixed >> 32)).wrapping_mul(KEYS[1]);
    mixed ^ (mixed >> 29)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_comes_once() {
        let counts = (1..300).chain([4096, 4097, 65_535, 65_537, 300_000]);
        for count in counts {
            let mut seen = vec![false; count as usize];
            for place in 0..count {
                let block = block(place, count) as usize;
                assert!(!std::mem::replace(&mut seen[block], true), "{count}");
            }
        }
        for count in [(1 << 40) + 1, u64::MAX] {
            let first: Vec<u64> = (0..1000).map(|place| block(place, count)).collect();
            assert!(first.iter().all(|block| *block < count), "{count}");
        }
    }

    #[test]
    fn what_follows_cannot_be_guessed() {
        for count in [1 << 16, 100_000_u64, (1 << 30) + 7] {
            let blocks: Vec<u64> = (0..50_000).map(|place| block(place, count)).collect();
            // Not near each other, not in one direction, and spread over drives in any of the usual ways.
            let near = |pair: &&[u64]| pair[0].abs_diff(pair[1]) < count / 100;
            let near = blocks.windows(2).filter(near).count() as f64 / 50_000.0;
            assert!((near - 0.02).abs() < 0.005, "{count}: {near}");
            let up = blocks.windows(2).filter(|pair| pair[0] < pair[1]).count();
            assert!((24_000..26_000).contains(&up), "{count}: {up}");
            for stripes in [2, 3, 4, 8] {
                let same = |pair: &&[u64]| pair[0] % stripes == pair[1] % stripes;
                let same = blocks.windows(2).filter(same).count() as f64 / 50_000.0;
                let chance = 1.0 / stripes as f64;
                assert!(
                    (same / chance - 1.0).abs() < 0.05,
                    "{count}, {stripes}: {same}"
                );
            }
        }
    }
}
