//! Moments in 8 bits, as Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022, and bitsandbytes store them.
//!
//! ```text
//!   a block       256 consecutive elements of a tile, the last one of a tile fewer: a code of 8 bits each, and their largest magnitude in fp32
//!   an element    value(code) * largest
//! ```
//!
//! The values of the codes lie between -1 and 1, for variances between 0 and 1, and are dense near 0: each of seven powers of ten has twice
//! as many as the one below it ([`value`]). A number gets the code of the nearest value, the lower one of two;
//! but a variance above 0 does not get 0, as it does in bitsandbytes: where a gradient is 0 in the next step, as those of rows of an embedding are
//! whose tokens a batch does not have, a weight would move by its momentum over eps. A step stores the whole blocks
//! that it touches anew, with elements beside its range. No negative value is -1, so a step may change what it stores again;
//! [`narrow_again`] does not.
//!
//! A block with a number that is infinite or NaN becomes NaN, as do its weights in the next step. In bitsandbytes variances of infinity, as a gradient
//! of 1e25 makes them, keep the other weights of their block from moving, and nobody sees it.
//!
//! Tiles start at multiples of 4096 elements of their unit, so that blocks are the same for every cut of a unit into tiles and ranks.

use std::array;
use std::sync::LazyLock;

use crate::number;

/// Elements that share a largest magnitude.
pub const BLOCK_ELEMS: usize = 256;

/// Powers of ten that have codes.
const DECADES: [f32; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];

/// Least divisor of a block, as bitsandbytes has it: the inverse of a smaller one would be infinite.
const LARGEST_MIN: f32 = 1e-38;

/// Whether numbers have a sign: momentums have, variances have none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CodeSign {
    Signed,
    Unsigned,
}

/// The value of a code: 0, 1, or the middle of one of the parts of equal width into which 0.1 to 1 is divided, times a power of ten.
/// `gpu/source/adamw.cu` has the same operations.
pub(super) fn value(sign: CodeSign, code: u8) -> f32 {
    // The number among the values of one sign, from 1 on, counted so that each power of ten begins at a power of two.
    let (number, parts_of_first) = match sign {
        CodeSign::Signed if code == 127 => return 0.0,
        CodeSign::Signed => (u32::from(code.abs_diff(127)), 1u32),
        CodeSign::Unsigned if code == 0 => return 0.0,
        CodeSign::Unsigned => (u32::from(code) + 1, 2),
    };
    if code == 255 {
        return 1.0;
    }
    let parts = 1u32 << number.ilog2();
    let decade = (parts / parts_of_first).ilog2() as usize;
    let part = number - parts;
    let magnitude = DECADES[decade] * (0.5 * (border(part, parts) + border(part + 1, parts)));
    match sign {
        CodeSign::Signed if code < 127 => -magnitude,
        _ => magnitude,
    }
}

/// The start of a part of 0.1 to 1, with the roundings of `torch.linspace`, which counts from the nearer end.
fn border(part: u32, parts: u32) -> f32 {
    let step = (1.0 - 0.1f32) / parts as f32;
    if part < parts.div_ceil(2) {
        step.mul_add(part as f32, 0.1)
    } else {
        (-step).mul_add((parts - part) as f32, 1.0)
    }
}

/// Values, and what finds the nearest one.
struct Map {
    values: [f32; 256],
    /// The middle between each value and the next one; infinite for the last.
    middles: [f32; 256],
    /// Code of the least number of each bucket, see [`bucket`].
    starts: Vec<u8>,
}

static SIGNED: LazyLock<Map> = LazyLock::new(|| Map::new(CodeSign::Signed));
static UNSIGNED: LazyLock<Map> = LazyLock::new(|| Map::new(CodeSign::Unsigned));

impl Map {
    fn of_sign(sign: CodeSign) -> &'static Self {
        match sign {
            CodeSign::Signed => &SIGNED,
            CodeSign::Unsigned => &UNSIGNED,
        }
    }

    fn new(sign: CodeSign) -> Self {
        let values: [f32; 256] = array::from_fn(|code| value(sign, code as u8));
        let middles = array::from_fn(|code| match values.get(code + 1) {
            Some(next) => (values[code] + next) * 0.5,
            None => f32::INFINITY,
        });
        let mut map = Self {
            values,
            middles,
            starts: Vec::new(),
        };
        map.starts = (0..2 * BUCKETS).map(|b| map.nearest(least_of(b))).collect();
        map
    }

    /// The definition: the code of the value that is nearest to `x`. A NaN gets the first one.
    fn nearest(&self, x: f32) -> u8 {
        self.middles.partition_point(|middle| x > *middle) as u8
    }

    /// Same as [`Map::nearest`], without a search: no bucket has more than one middle.
    #[inline(always)]
    fn nearest_in_bucket(&self, x: f32) -> u8 {
        let x = x.max(-1.0);
        let start = self.starts[bucket(x)];
        start + u8::from(x > self.middles[usize::from(start)])
    }
}

/// The numbers from 2^-23 to 1 with equal first 8 bits of their fraction are a bucket; smaller ones belong to the first, 1 and larger ones are the
/// last. As many follow for negative numbers.
const BUCKETS: usize = (23 << 8) + 1;
const BUCKET_SHIFT: u32 = 15;
const FIRST_BUCKET: u32 = (127 - 23) << 8;

#[inline(always)]
fn bucket(x: f32) -> usize {
    let bits = x.to_bits();
    let magnitude = (bits & 0x7FFF_FFFF) >> BUCKET_SHIFT;
    let within = magnitude.clamp(FIRST_BUCKET, FIRST_BUCKET + BUCKETS as u32 - 1) - FIRST_BUCKET;
    within as usize + (bits >> 31) as usize * BUCKETS
}

/// The least number of a bucket.
fn least_of(bucket: usize) -> f32 {
    let within = (bucket % BUCKETS) as u32;
    let first_bits = (within + FIRST_BUCKET) << BUCKET_SHIFT;
    let last_bits = first_bits | ((1 << BUCKET_SHIFT) - 1);
    match (bucket < BUCKETS, within) {
        (true, 0) => 0.0,
        (true, _) => f32::from_bits(first_bits),
        (false, _) if within as usize == BUCKETS - 1 => -1.0,
        (false, _) => -f32::from_bits(last_bits),
    }
}

/// Reads whole blocks.
#[inline(always)]
pub(super) fn widen(sign: CodeSign, codes: &[u8], largest: &[f32], out: &mut [f32]) {
    let map = Map::of_sign(sign);
    let blocks = codes.chunks(BLOCK_ELEMS).zip(out.chunks_mut(BLOCK_ELEMS));
    for ((codes, out), largest) in blocks.zip(largest) {
        for (code, out) in codes.iter().zip(out) {
            *out = map.values[usize::from(*code)] * largest;
        }
    }
}

/// Stores whole blocks by the definition.
pub(super) fn narrow(sign: CodeSign, from: &[f32], codes: &mut [u8], largest: &mut [f32]) {
    let map = Map::of_sign(sign);
    narrow_by(sign, |x| map.nearest(x), from, codes, largest);
}

/// Stores whole blocks with the same bits, faster.
#[inline(always)]
pub(super) fn narrow_fast(sign: CodeSign, from: &[f32], codes: &mut [u8], largest: &mut [f32]) {
    let map = Map::of_sign(sign);
    narrow_by(sign, |x| map.nearest_in_bucket(x), from, codes, largest);
}

#[inline(always)]
fn narrow_by(
    sign: CodeSign,
    nearest: impl Fn(f32) -> u8,
    from: &[f32],
    codes: &mut [u8],
    largest: &mut [f32],
) {
    let blocks = from.chunks(BLOCK_ELEMS).zip(codes.chunks_mut(BLOCK_ELEMS));
    for ((from, codes), largest) in blocks.zip(largest) {
        // As integers, magnitudes have the same order, with infinity and NaN above all numbers.
        let bits = from.iter().map(|x| x.to_bits() & 0x7FFF_FFFF);
        *largest = f32::from_bits(bits.max().unwrap_or(0));
        if !largest.is_finite() {
            *largest = number::canonical(f32::NAN);
        }
        let inverse = 1.0 / largest.max(LARGEST_MIN);
        for (x, code) in from.iter().zip(codes) {
            let least = u8::from(sign == CodeSign::Unsigned && *x > 0.0);
            *code = nearest(x * inverse).max(least);
        }
    }
}

/// Stores whole blocks as [`narrow`] does, but for those whose values were read from a block: they stay as they are.
pub(super) fn narrow_again(sign: CodeSign, from: &[f32], codes: &mut [u8], largest: &mut [f32]) {
    narrow(sign, from, codes, largest);
    if sign == CodeSign::Unsigned {
        return;
    }
    let map = Map::of_sign(sign);
    let blocks = from.chunks(BLOCK_ELEMS).zip(codes.chunks_mut(BLOCK_ELEMS));
    for ((from, codes), largest) in blocks.zip(largest) {
        let reads = |codes: &[u8], largest: f32| {
            let values = codes.iter().map(|code| map.values[usize::from(*code)]);
            (values.zip(from)).all(|(value, x)| (value * largest).to_bits() == x.to_bits())
        };
        if reads(codes, *largest) {
            continue;
        }
        // What was the negative of the largest magnitude was read as the least value of that. Rounding hides its last bits.
        let before = (*largest / map.values[0]).abs().to_bits();
        for before in (before.saturating_sub(2)..=before + 2).map(f32::from_bits) {
            let inverse = 1.0 / before.max(LARGEST_MIN);
            let codes_before: Vec<u8> = from.iter().map(|x| map.nearest(x * inverse)).collect();
            if before.is_finite() && reads(&codes_before, before) {
                codes.copy_from_slice(&codes_before);
                *largest = before;
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    //! Tests that the fast search finds what the definition finds, and that the values are in order.
    use super::*;

    #[test]
    fn values_ascend_from_the_least_to_one() {
        for (sign, least) in [(CodeSign::Signed, -0.992_968_74), (CodeSign::Unsigned, 0.0)] {
            let values: Vec<f32> = (0..=255).map(|code| value(sign, code)).collect();
            assert!(values.is_sorted_by(|a, b| a < b), "{values:?}");
            assert_eq!([values[0], values[255]], [least, 1.0]);
            let zeros = values.iter().filter(|value| **value == 0.0).count();
            assert_eq!(zeros, 1);
        }
    }

    #[test]
    fn buckets_find_the_nearest_value_of_any_number() {
        for sign in [CodeSign::Signed, CodeSign::Unsigned] {
            let map = Map::of_sign(sign);
            let check = |x: f32| {
                assert_eq!(map.nearest_in_bucket(x), map.nearest(x), "{sign:?} {x:?}");
            };
            // Around each middle and each end of a bucket; and others, NaNs and infinities among them.
            let ends = (0..2 * BUCKETS).map(least_of);
            for x in map.middles.into_iter().chain(ends) {
                for bits in x.to_bits().saturating_sub(2)..=x.to_bits().saturating_add(2) {
                    check(f32::from_bits(bits));
                }
            }
            for bits in (0..=u32::MAX).step_by(9973) {
                check(f32::from_bits(bits));
            }
        }
    }

    #[test]
    fn the_nearer_of_two_values_is_taken_and_the_lower_of_equally_near_ones() {
        for sign in [CodeSign::Signed, CodeSign::Unsigned] {
            let map = Map::of_sign(sign);
            for code in 0..=254u8 {
                let [below, above] = [code, code + 1].map(|code| map.values[usize::from(code)]);
                assert_eq!(map.nearest(below), code);
                assert_eq!(map.nearest(below + 0.4 * (above - below)), code);
                assert_eq!(map.nearest(below + 0.6 * (above - below)), code + 1);
                assert_eq!(map.nearest((below + above) * 0.5), code);
            }
        }
    }
}
