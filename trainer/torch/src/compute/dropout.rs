//! Dropout from a counter: whether an element is dropped depends only on (seed, sample, unit, site, element).
//! Recomputing a block therefore drops the same elements, and so does a resumed run, a run with other
//! micro-batches or ranks, and one whose state is kept elsewhere.
//!
//! With `mix` of `model/init.rs` and samples numbered over the whole run,
//!
//! ```text
//! key   = mix(mix(mix(mix(seed ^ SALT) + sample) + unit) + site)
//! word  = mix(key + element / 2); an even element takes its lower 32 bits, an odd one the upper 32
//! ```
//!
//! An element (numbered within its sample) is kept if its 32 bits, as a signed number, are at least `rate *
//! 2^32 - 2^31`. All of this uses torch operators, which wrap 64-bit integers on every device, so nothing is
//! copied from the host.

use tch::{Device, Kind, Tensor};

use super::ComputeError;
use training_run::model::Dropout;
use training_run::model::init::splitmix64;

/// Separates dropout from the initial weights, which use the same seed.
const SALT: u64 = 0x5EED_0D20_9A17_C0DE;

/// Place of dropout in a block or in the embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DropoutSite {
    /// Sum of the embeddings.
    Embedding,
    /// Attention weights.
    Attention,
    /// Attention output before it is added to the residual stream.
    AttnOut,
    /// MLP output before it is added to the residual stream.
    MlpOut,
}

/// Dropout masks of one unit for one micro-batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Masks {
    rates: Dropout,
    seed: u64,
    unit: u64,
    /// Number of the micro-batch's first sample.
    first_sample: u64,
}

impl Masks {
    /// No dropout.
    pub(super) const NONE: Self = Masks {
        rates: Dropout::NONE,
        seed: 0,
        unit: 0,
        first_sample: 0,
    };

    pub(super) fn new(rates: Dropout, seed: u64, unit: usize, first_sample: u64) -> Self {
        Masks {
            rates,
            seed,
            unit: unit as u64,
            first_sample,
        }
    }

    fn rate(&self, site: DropoutSite) -> f64 {
        match site {
            DropoutSite::Embedding => self.rates.embedding,
            DropoutSite::Attention => self.rates.attention,
            DropoutSite::AttnOut | DropoutSite::MlpOut => self.rates.residual,
        }
    }

    /// Returns whether this site has dropout.
    pub(super) fn leave_out(&self, site: DropoutSite) -> bool {
        self.rate(site) > 0.0
    }

    /// Applies dropout to `x`, whose first dimension is the samples: sets some elements to zero and scales
    /// the others. The operation is linear and its own transpose, so it also applies to gradients.
    pub(super) fn apply(&self, site: DropoutSite, x: &Tensor) -> Result<Tensor, ComputeError> {
        if !self.leave_out(site) {
            return Ok(x.shallow_clone());
        }
        let samples = x.size()[0];
        let elems = x.numel() as i64 / samples;
        let stays = self.stays(site, samples, elems, x.device())?.f_view_as(x)?;
        Ok(x.f_mul(&stays)?
            .f_mul_scalar(1.0 / (1.0 - self.rate(site)))?)
    }

    /// Returns which of the `elems` elements of each of `samples` samples are kept.
    fn stays(
        &self,
        site: DropoutSite,
        samples: i64,
        elems: i64,
        device: Device,
    ) -> Result<Tensor, ComputeError> {
        let keys: Vec<i64> = (0..samples as u64)
            .map(|row| self.key(site, self.first_sample.wrapping_add(row)) as i64)
            .collect();
        let keys = Tensor::f_from_slice(&keys)?
            .f_to_device(device)?
            .f_unsqueeze(1)?;
        let words = (elems + 1) / 2;
        let counters = Tensor::f_arange(words, (Kind::Int64, device))?.f_unsqueeze(0)?;
        let bits = mixed(counters.f_add(&keys)?)?.f_view_dtype(Kind::Int)?;
        // 0 < rate < 1, so this fits an i32.
        let least = (self.rate(site) * 2f64.powi(32) - 2f64.powi(31)).round() as i64;
        Ok(bits
            .f_narrow(1, 0, elems)?
            .f_ge(least.min(i64::from(i32::MAX)))?
            .f_contiguous()?)
    }

    fn key(&self, site: DropoutSite, sample: u64) -> u64 {
        let parts = [sample, self.unit, site as u64];
        let seed = splitmix64(self.seed ^ SALT);
        let mix = |key: u64, part: u64| splitmix64(key.wrapping_add(part));
        parts.into_iter().fold(seed, mix)
    }
}

/// Applies [`splitmix64`] to each element in place.
fn mixed(mut z: Tensor) -> Result<Tensor, ComputeError> {
    let _ = z.f_add_scalar_(0x9E37_79B9_7F4A_7C15u64 as i64)?;
    for (shift, factor) in [
        (30, 0xBF58_476D_1CE4_E5B9u64 as i64),
        (27, 0x94D0_49BB_1331_11EBu64 as i64),
    ] {
        let shifted = shifted_right(&z, shift)?;
        let _ = z.f_bitwise_xor_tensor_(&shifted)?.f_mul_scalar_(factor)?;
    }
    let shifted = shifted_right(&z, 31)?;
    Ok(z.f_bitwise_xor_tensor_(&shifted)?)
}

/// Shifts right logically; torch's own shift repeats the sign bit.
fn shifted_right(z: &Tensor, bits: i64) -> Result<Tensor, ComputeError> {
    let mut shifted = z.f_bitwise_right_shift_tensor_scalar(bits)?;
    Ok(shifted.f_bitwise_and_((1i64 << (64 - bits)) - 1)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn masks(rate: f64, unit: usize, first_sample: u64) -> Masks {
        let rates = Dropout {
            embedding: rate,
            residual: rate,
            attention: rate,
        };
        Masks::new(rates, 42, unit, first_sample)
    }

    fn stays(masks: &Masks, site: DropoutSite, samples: i64, elems: i64) -> Vec<bool> {
        let stays = masks.stays(site, samples, elems, Device::Cpu).unwrap();
        Vec::<bool>::try_from(stays.view([-1])).unwrap()
    }

    #[test]
    fn elements_are_kept_according_to_the_documented_formula() {
        let masks = masks(0.3, 5, u64::MAX);
        let found = stays(&masks, DropoutSite::MlpOut, 2, 33);
        let least = (0.3 * 2f64.powi(32) - 2f64.powi(31)).round() as i64;
        // Sample numbers wrap around, like all of this arithmetic.
        for (row, sample) in [(0, u64::MAX), (1, 0)] {
            let mut key = splitmix64(42 ^ SALT);
            for part in [sample, 5, 3] {
                key = splitmix64(key.wrapping_add(part));
            }
            for elem in 0..33u64 {
                let word = splitmix64(key.wrapping_add(elem / 2));
                let half = (word >> (32 * (elem % 2))) as u32 as i32;
                let stays = found[row * 33 + elem as usize];
                assert_eq!(stays, i64::from(half) >= least, "sample {row}, {elem}");
            }
        }
    }

    #[test]
    fn a_sample_has_the_same_mask_in_any_micro_batch() {
        let whole = stays(&masks(0.5, 1, 10), DropoutSite::Attention, 4, 101);
        for (row, expected) in whole.chunks(101).enumerate() {
            let alone = stays(
                &masks(0.5, 1, 10 + row as u64),
                DropoutSite::Attention,
                1,
                101,
            );
            assert_eq!(alone, expected, "sample {row}");
        }
    }

    #[test]
    fn the_rate_of_dropped_elements_is_right_and_the_mean_is_preserved() {
        let elems = 1 << 16;
        for rate in [0.1, 0.5, 0.9] {
            let x = Tensor::ones([2, elems], (Kind::Float, Device::Cpu));
            let kept = masks(rate, 1, 0).apply(DropoutSite::AttnOut, &x).unwrap();
            let mean = f64::try_from(kept.mean(Kind::Double)).unwrap();
            // Five standard errors.
            let error = (rate / (1.0 - rate) / (2 * elems) as f64).sqrt();
            assert!((mean - 1.0).abs() < 5.0 * error, "{rate}: {mean}");
        }
    }

    #[test]
    fn each_site_unit_sample_and_seed_has_its_own_mask() {
        let base = masks(0.5, 1, 0);
        let mut other_seed = base;
        other_seed.seed = 43;
        let all = [
            stays(&base, DropoutSite::AttnOut, 1, 256),
            stays(&base, DropoutSite::MlpOut, 1, 256),
            stays(&masks(0.5, 2, 0), DropoutSite::AttnOut, 1, 256),
            stays(&masks(0.5, 1, 1), DropoutSite::AttnOut, 1, 256),
            stays(&other_seed, DropoutSite::AttnOut, 1, 256),
        ];
        for (i, a) in all.iter().enumerate() {
            for b in &all[..i] {
                let equal = a.iter().zip(b).filter(|(a, b)| a == b).count();
                // Eight standard deviations of a fair coin.
                assert!((64..192).contains(&equal), "{equal} of 256 are equal");
            }
        }
    }

    #[test]
    fn rate_zero_drops_nothing() {
        let x = Tensor::from_slice(&[1f32, 2.0]).view([1, 2]);
        let same = masks(0.0, 1, 0).apply(DropoutSite::Embedding, &x).unwrap();
        assert!(same.data_ptr() == x.data_ptr());
        assert!(!Masks::NONE.leave_out(DropoutSite::Attention));
    }
}
