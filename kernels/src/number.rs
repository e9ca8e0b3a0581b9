//! The 16-bit formats, and the split of an fp32 master into a bf16 parameter and a 16-bit residual.
//!
//! [`split`] and [`join`] are inverse on every number, so a master costs 16 bits beside its parameter and loses
//! nothing. All NaNs become [`CANONICAL_NAN`], because which NaN an instruction returns depends on the order of its
//! operands, which compilers choose.

use half::f16;

/// Bits of the only NaN that is stored: quiet, positive, no payload. The upper half is the bf16 NaN 0x7FC0.
pub const CANONICAL_NAN: u32 = 0x7FC0_0000;

/// Returns `x`, or the canonical NaN if `x` is any NaN.
#[inline(always)]
pub fn canonical(x: f32) -> f32 {
    let bits = x.to_bits();
    // Compares bits: a compiler may treat NaN values as interchangeable.
    let is_nan = bits & 0x7FFF_FFFF > 0x7F80_0000;
    f32::from_bits(if is_nan { CANONICAL_NAN } else { bits })
}

/// Splits a master into the bits of its bf16 parameter and the residual.
///
/// The parameter is the nearest bf16, halves away from zero. Rounding halves to even would not be invertible: at a low
/// half of 0x8000 two masters would share one pair.
#[inline(always)]
pub fn split(master: f32) -> (u16, i16) {
    let bits = canonical(master).to_bits();
    let high = (bits.wrapping_add(0x8000) >> 16) as u16;
    // bits - (high << 16) lies in -0x8000..0x8000, so its low 16 bits are all of it, and they are those of `bits`.
    (high, bits as u16 as i16)
}

/// Returns the master of a pair made by [`split`].
#[inline(always)]
pub fn join(param: u16, residual: i16) -> f32 {
    f32::from_bits((u32::from(param) << 16).wrapping_add_signed(i32::from(residual)))
}

/// Returns the value of a bf16.
#[inline(always)]
pub fn from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Returns the nearest bf16, halves to even. Used for gradients, which need no inverse.
#[inline(always)]
pub fn to_bf16(x: f32) -> u16 {
    let bits = canonical(x).to_bits();
    let last_kept = (bits >> 16) & 1;
    ((bits + 0x7FFF + last_kept) >> 16) as u16
}

/// Returns one of the two bf16 around `x`: the one further from zero with the probability of the discarded bits, if `random` is
/// evenly distributed. A bf16 stays as it is. `x` has no NaN but the canonical one.
#[inline(always)]
pub fn to_bf16_by_chance(x: f32, random: u16) -> u16 {
    (x.to_bits().wrapping_add(u32::from(random)) >> 16) as u16
}

/// Returns the value of an fp16.
#[inline(always)]
pub fn from_fp16(bits: u16) -> f32 {
    f16::from_bits(bits).to_f32()
}

/// Returns the nearest fp16, halves to even; infinity beyond 65,519 in magnitude.
#[inline(always)]
pub fn to_fp16(x: f32) -> u16 {
    f16::from_f32(canonical(x)).to_bits()
}

#[cfg(test)]
mod tests {
    //! Tests that roundings are invertible and keep NaNs, infinities and zeros. All 2^32 masters are tried. Roundings to nearest are tried for every
    //! upper half, with the lower halves at which the rounding changes.
    use super::*;
    use half::bf16;
    use rayon::prelude::*;

    /// Lower halves around the middle between two bf16, around the middle between two fp16, and some between.
    const TURNING_LOWER_HALVES: [u16; 16] = [
        0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x2FFF, 0x3000, 0x3001, 0x5555, 0x7FFF,
        0x8000, 0x8001, 0xD000, 0xFFFF,
    ];

    fn with_lower_half(upper: u16, lower: u16) -> f32 {
        f32::from_bits(u32::from(upper) << 16 | u32::from(lower))
    }

    fn assert_for_turning_points(holds: impl Fn(f32) -> bool + Sync) {
        (0..=u16::MAX).into_par_iter().for_each(|upper| {
            for lower in TURNING_LOWER_HALVES {
                let x = with_lower_half(upper, lower);
                assert!(holds(x), "bits {:#010x}", x.to_bits());
            }
        });
    }

    #[test]
    fn every_master_comes_back_and_only_a_nan_is_a_nan() {
        (0..=u16::MAX).into_par_iter().for_each(|upper| {
            // Counted instead of asserted one by one: seconds instead of minutes.
            let wrong_count: u32 = (0..=u16::MAX)
                .map(|lower| {
                    let master = with_lower_half(upper, lower);
                    let (param, residual) = split(master);
                    let comes_back = if master.is_nan() {
                        param == 0x7FC0 && residual == 0
                    } else {
                        param & 0x7FFF <= 0x7F80
                            && join(param, residual).to_bits() == master.to_bits()
                    };
                    u32::from(!comes_back)
                })
                .sum();
            assert_eq!(wrong_count, 0, "masters with upper half {upper:#06x}");
        });
        assert!(join(0x7FC0, 0).is_nan());
    }

    #[test]
    fn the_parameter_is_the_nearest_bf16() {
        assert_for_turning_points(|master| {
            let (param, _) = split(master);
            // In f64, where the difference of two neighbours is exact.
            let distance = |bits: u16| (f64::from(from_bf16(bits)) - f64::from(master)).abs();
            let has_neighbours = param & 0x7FFF != 0 && from_bf16(param + 1).is_finite();
            !has_neighbours
                || (distance(param) <= distance(param + 1)
                    && distance(param) <= distance(param - 1))
        });
    }

    #[test]
    fn gradients_round_to_the_nearest_even_bf16() {
        assert_for_turning_points(|x| to_bf16(x) == bf16::from_f32(canonical(x)).to_bits());
    }

    #[test]
    fn gradients_round_to_the_nearest_even_fp16() {
        // half uses the processor's conversion where there is one; from_f32_const never does.
        assert_for_turning_points(|x| to_fp16(x) == f16::from_f32_const(canonical(x)).to_bits());
    }
}
