//! The first weights of a fresh model, by a counter: each element is a function of (seed, unit, offset) alone, so any
//! tile can be filled by itself, on any rank, by any number of threads, with the same bits.
//!
//! With wrapping 64-bit arithmetic and
//!
//! ```text
//! mix(z):  z += 0x9E3779B97F4A7C15
//!          z  = (z ^ z >> 30) * 0xBF58476D1CE4E5B9
//!          z  = (z ^ z >> 27) * 0x94D049BB133111EB
//!          z ^ z >> 31                                  (splitmix64)
//! ```
//!
//! the element at `offset` (counted from the start of the unit's flat buffer) of unit number `unit` is
//!
//! ```text
//! key   = mix(mix(seed) + unit)
//! a, b  = mix(key + 2 * offset), mix(key + 2 * offset + 1)
//! u1,u2 = ((a >> 11) + 1) / 2^53, (b >> 11) / 2^53       u1 in (0, 1], u2 in [0, 1)
//! w     = f32(initializer_range * sqrt(-2 ln u1) * cos(2 pi u2))     all in f64, rounded once
//! ```
//!
//! Norm weights are 1, padding is 0. `ln` and `cos` of another mathematics library may differ in the last bit of an
//! f64, which changes the f32 about once in 10^8 elements.

use std::f64::consts::TAU;
use std::ops::Range;

use rayon::prelude::*;

use super::UnitLayout;

/// Elements one task fills: some tens of microseconds of work.
const CHUNK_ELEMS: usize = 1 << 14;

/// splitmix64: the next state's output for state `z`.
pub fn splitmix64(z: u64) -> u64 {
    let z = z.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Fills `out` with the fresh weights of elements `range_elems` of unit number `unit_index` (`layout` is its layout).
/// `out` is as long as the range, which lies inside the unit.
pub fn fill(
    layout: &UnitLayout,
    unit_index: usize,
    seed: u64,
    initializer_range: f64,
    range_elems: Range<usize>,
    out: &mut [f32],
) {
    assert!(
        range_elems.end <= layout.elems,
        "the range lies inside the unit"
    );
    assert_eq!(out.len(), range_elems.len(), "one place for each element");
    let key = splitmix64(splitmix64(seed).wrapping_add(unit_index as u64));
    out.par_chunks_mut(CHUNK_ELEMS)
        .enumerate()
        .for_each(|(chunk, out)| {
            let start = range_elems.start + chunk * CHUNK_ELEMS;
            fill_chunk(layout, key, initializer_range, start, out);
        });
}

fn fill_chunk(
    layout: &UnitLayout,
    key: u64,
    initializer_range: f64,
    start: usize,
    out: &mut [f32],
) {
    out.fill(0.0);
    let end = start + out.len();
    for param in &layout.params {
        let range = param.range_elems();
        let (from, to) = (range.start.max(start), range.end.min(end));
        for offset in from..to {
            out[offset - start] = if param.decay {
                normal(key, offset as u64, initializer_range)
            } else {
                1.0
            };
        }
    }
}

fn normal(key: u64, offset: u64, initializer_range: f64) -> f32 {
    const UNIT: f64 = 1.0 / (1u64 << 53) as f64;
    let counter = key.wrapping_add(offset.wrapping_mul(2));
    let u1 = ((splitmix64(counter) >> 11) + 1) as f64 * UNIT;
    let u2 = (splitmix64(counter.wrapping_add(1)) >> 11) as f64 * UNIT;
    (initializer_range * (-2.0 * u1.ln()).sqrt() * (TAU * u2).cos()) as f32
}
