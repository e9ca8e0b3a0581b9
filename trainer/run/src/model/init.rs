//! Random initial weights from a counter: each element depends only on (seed, unit, offset), so any tile can
//! be filled separately, on any rank and with any number of threads, with the same bits.
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
//! GPT-2's matrices that write to the residual stream use `initializer_range / sqrt(2 * layers)`. Norm
//! weights are 1, biases and padding are 0. `ln` and `cos` of another math library may differ in the last bit
//! of an f64, which changes the f32 about once in 10^8 elements.

use std::f64::consts::TAU;
use std::ops::Range;

use rayon::prelude::*;

use super::{InitialValue, UnitLayout};

/// Elements filled by one task: some tens of microseconds of work.
const CHUNK_ELEMS: usize = 1 << 14;

/// splitmix64: returns the output for the state after `z`.
pub fn splitmix64(z: u64) -> u64 {
    let z = z.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Fills `out` with the initial weights of elements `range_elems` of unit number `unit_index`, whose layout
/// is `layout`. `out` must be as long as the range.
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
    assert_eq!(
        out.len(),
        range_elems.len(),
        "the output has one place for each element"
    );
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
            out[offset - start] = match param.start {
                InitialValue::Normal { scale } => {
                    normal(key, offset as u64, initializer_range * scale)
                }
                InitialValue::Ones => 1.0,
                InitialValue::Zeros => 0.0,
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{ModelConfig, unit_layouts};

    fn layouts() -> Vec<UnitLayout> {
        unit_layouts(&ModelConfig {
            vocab_size: 1000,
            hidden_size: 96,
            intermediate_size: 200,
            layers: 2,
            heads: 4,
            kv_heads: 2,
            head_dim: None,
            rope_theta: 10000.0,
            norm_eps: 1e-6,
            tied: false,
            initializer_range: 0.02,
            max_position_embeddings: 128,
            ..ModelConfig::default()
        })
    }

    #[test]
    fn weights_follow_the_documented_formula() {
        assert_eq!(splitmix64(0), 0xE220_A839_7B1D_CDAF);
        // Computed with the formula in Python: (seed, unit, offset) and the bits of the f32.
        for (seed, unit, offset, bits) in [
            (0, 0, 0, 0xBB07_3D13),
            (42, 0, 5, 0x3BB8_B5E8),
            (42, 0, 16383, 0xBCE9_611D),
            (42, 3, 96, 0x3BF7_C79F),
            (u64::MAX, 3, 1000, 0x3C97_AE87u32),
        ] {
            let mut out = [0f32];
            let layouts = layouts();
            // The head's first parameter is a norm; the projection starts at 128.
            let layout = if unit == 3 {
                &layouts[0]
            } else {
                &layouts[unit]
            };
            fill(layout, unit, seed, 0.02, offset..offset + 1, &mut out);
            assert_eq!(
                out[0].to_bits(),
                bits,
                "seed {seed}, unit {unit}, offset {offset}: {:#x}",
                out[0].to_bits()
            );
        }
    }

    #[test]
    fn any_range_filled_alone_has_the_same_bits() {
        for (unit, layout) in layouts().iter().enumerate() {
            let mut whole = vec![f32::NAN; layout.elems];
            fill(layout, unit, 9, 0.02, 0..layout.elems, &mut whole);
            let mut start = 0;
            for length in [1, 63, 64, 65, 4097, 30000].into_iter().cycle() {
                let end = (start + length).min(layout.elems);
                let mut part = vec![f32::NAN; end - start];
                fill(layout, unit, 9, 0.02, start..end, &mut part);
                assert!(
                    part.iter()
                        .zip(&whole[start..end])
                        .all(|(a, b)| a.to_bits() == b.to_bits()),
                    "{start}..{end}"
                );
                start = end;
                if start == layout.elems {
                    break;
                }
            }
        }
    }

    #[test]
    fn matrices_are_normal_norms_are_one_padding_is_zero() {
        for (unit, layout) in layouts().iter().enumerate() {
            let mut values = vec![f32::NAN; layout.elems];
            fill(layout, unit, 1, 0.02, 0..layout.elems, &mut values);
            let mut covered = vec![false; layout.elems];
            for param in &layout.params {
                covered[param.range_elems()].fill(true);
                let own = &values[param.range_elems()];
                if !param.decay {
                    assert!(own.iter().all(|&w| w == 1.0), "{}", param.name);
                    continue;
                }
                let count = own.len() as f64;
                let mean = own.iter().map(|&w| f64::from(w)).sum::<f64>() / count;
                let variance = own.iter().map(|&w| f64::from(w).powi(2)).sum::<f64>() / count;
                // Five standard errors.
                assert!(
                    mean.abs() < 5.0 * 0.02 / count.sqrt(),
                    "{}: mean {mean}",
                    param.name
                );
                assert!(
                    (variance.sqrt() / 0.02 - 1.0).abs() < 5.0 / (2.0 * count).sqrt(),
                    "{}",
                    param.name
                );
            }
            assert!(
                values
                    .iter()
                    .zip(&covered)
                    .all(|(&w, &covered)| covered || w.to_bits() == 0)
            );
        }
        // Another seed or unit gives other weights.
        let mut a = vec![0f32; 64];
        let mut b = vec![0f32; 64];
        fill(&layouts()[0], 0, 1, 0.02, 0..64, &mut a);
        fill(&layouts()[0], 0, 2, 0.02, 0..64, &mut b);
        assert!(a.iter().zip(&b).all(|(x, y)| x != y));
        fill(&layouts()[0], 1, 1, 0.02, 0..64, &mut b);
        assert!(a.iter().zip(&b).all(|(x, y)| x != y));
    }
}
