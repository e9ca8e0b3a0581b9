//! Rotary position embedding: rotates query and key by angles that depend on their position.

use std::f64::consts::TAU;

use tch::{Device, Kind, Tensor};

use super::ComputeError;
use super::linear::at_least_fp32;
use training_run::model::{ModelConfig, RopeScaling};

/// Cosines and sines of each position's angles, [seq_len, head_dim], in the model's kind; or of each token's,
/// [micro_batch, seq_len, head_dim].
pub(super) struct Rotary {
    pub(super) cos: Tensor,
    pub(super) sin: Tensor,
}

impl Rotary {
    /// Computes the angles `position * frequency` of all pairs in fp32 (fp64 for an fp64 model), repeated for
    /// both halves: pair i is the elements i and i + head_dim / 2. Its frequency is `theta^(-2i / head_dim)`,
    /// or less if the model scales it.
    pub(super) fn new(
        config: &ModelConfig,
        seq_len: usize,
        kind: Kind,
    ) -> Result<Self, ComputeError> {
        let wide = at_least_fp32(kind);
        let head_dim = config.head_dim() as i64;
        let options = (wide, Device::Cpu);
        let exponents =
            Tensor::f_arange_start_step(0, head_dim, 2, options)?.f_div_scalar(head_dim as f64)?;
        let mut frequencies = Tensor::f_full([1], config.rope_theta, options)?
            .f_pow(&exponents)?
            .f_reciprocal()?;
        if let Some(scaling) = &config.rope_scaling {
            let plain = Vec::<f64>::try_from(frequencies.f_to_kind(Kind::Double)?)?;
            let scaled: Vec<f64> = plain.into_iter().map(|f| stretched(f, scaling)).collect();
            frequencies = Tensor::f_from_slice(&scaled)?.f_to_kind(wide)?;
        }
        let angles = Tensor::f_arange(seq_len as i64, options)?.f_outer(&frequencies)?;
        let angles = Tensor::f_cat(&[&angles, &angles], -1)?;
        Ok(Rotary {
            cos: angles.f_cos()?.f_to_kind(kind)?,
            sin: angles.f_sin()?.f_to_kind(kind)?,
        })
    }

    /// Copies the tables to `device`. They are computed once, on the CPU, so that every device uses the same
    /// angles.
    pub(super) fn on(&self, device: Device) -> Result<Self, ComputeError> {
        Ok(Rotary {
            cos: self.cos.f_to_device(device)?,
            sin: self.sin.f_to_device(device)?,
        })
    }

    /// Returns the same tables.
    pub(super) fn shallow_clone(&self) -> Self {
        Rotary {
            cos: self.cos.shallow_clone(),
            sin: self.sin.shallow_clone(),
        }
    }

    /// Looks up the angles of tokens at `positions` [micro_batch, seq_len].
    pub(super) fn at(&self, positions: &Tensor) -> Result<Self, ComputeError> {
        let rows = |table: &Tensor| Tensor::f_embedding(table, positions, -1, false, false);
        Ok(Rotary {
            cos: rows(&self.cos)?,
            sin: rows(&self.sin)?,
        })
    }

    /// Rotates each pair of `x` [micro_batch, heads, seq_len, head_dim].
    pub(super) fn turn(&self, x: &Tensor) -> Result<Tensor, ComputeError> {
        let seq_len = x.size()[2];
        // The same for every head.
        let rows = |table: &Tensor| table.f_narrow(-2, 0, seq_len)?.f_unsqueeze(-3);
        let (cos, sin) = (rows(&self.cos)?, rows(&self.sin)?);
        let halves = x.f_chunk(2, -1)?;
        let rotated = Tensor::f_cat(&[halves[1].f_neg()?, halves[0].shallow_clone()], -1)?;
        Ok(x.f_mul(&cos)?.f_add(&rotated.f_mul(&sin)?)?)
    }
}

/// Scales a pair's frequency for a model that accepts longer sequences than it was first trained with.
fn stretched(frequency: f64, scaling: &RopeScaling) -> f64 {
    match *scaling {
        RopeScaling::Linear { factor } => frequency / factor,
        RopeScaling::Llama3 {
            factor,
            low_freq_factor: low,
            high_freq_factor: high,
            original_max_position_embeddings: original,
        } => {
            // Rotations of the pair over the original sequence length. Many: not scaled; few: scaled by the
            // whole factor; in between, interpolated.
            let rotations = original * frequency / TAU;
            let alone = ((rotations - low) / (high - low)).clamp(0.0, 1.0);
            alone * frequency + (1.0 - alone) * frequency / factor
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_are_scaled_by_the_rotations_of_a_pair() {
        assert_eq!(stretched(0.5, &RopeScaling::Linear { factor: 4.0 }), 0.125);
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 100.0,
        };
        let frequency_of = |rotations: f64| {
            let frequency = rotations * TAU / 100.0;
            stretched(frequency, &scaling) / frequency
        };
        assert_eq!((frequency_of(5.0), frequency_of(0.5)), (1.0, 0.125));
        assert!((frequency_of(2.5) - (0.5 + 0.5 / 8.0)).abs() < 1e-12);
    }
}
