//! Rotary position embedding: rotates query and key by angles that depend on their position.

use tch::{Device, Kind, Tensor};

use super::ComputeError;
use super::linear::at_least_fp32;
use training_run::model::ModelConfig;

/// Cosines and sines of each position's angles, [seq_len, head_dim], in the model's kind; or of each token's,
/// [micro_batch, seq_len, head_dim].
pub(super) struct Rotary {
    pub(super) cos: Tensor,
    pub(super) sin: Tensor,
}

impl Rotary {
    /// Computes the angles `position * frequency` of all pairs in fp32 (fp64 for an fp64 model), repeated for
    /// both halves: pair i is the elements i and i + head_dim / 2. Its frequency is `theta^(-2i / head_dim)`,
    /// or less if the model scales it. The model's factor multiplies both tables, so a rotation and its transpose,
    /// which backward needs, have it too.
    pub(super) fn new(
        config: &ModelConfig,
        seq_len: usize,
        kind: Kind,
    ) -> Result<Self, ComputeError> {
        let wide = at_least_fp32(kind);
        let frequencies = frequencies(config, wide)?;
        let angles =
            Tensor::f_arange(seq_len as i64, (wide, Device::Cpu))?.f_outer(&frequencies)?;
        let angles = Tensor::f_cat(&[&angles, &angles], -1)?;
        let factor = config
            .rope_scaling
            .map_or(1.0, |scaling| scaling.attention_factor());
        Ok(Rotary {
            cos: angles.f_cos()?.f_mul_scalar(factor)?.f_to_kind(kind)?,
            sin: angles.f_sin()?.f_mul_scalar(factor)?.f_to_kind(kind)?,
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

/// Frequencies of the pairs, [head_dim / 2], scaled if the model scales them.
fn frequencies(config: &ModelConfig, wide: Kind) -> Result<Tensor, ComputeError> {
    let head_dim = config.head_dim() as i64;
    let options = (wide, Device::Cpu);
    let exponents =
        Tensor::f_arange_start_step(0, head_dim, 2, options)?.f_div_scalar(head_dim as f64)?;
    let plain = Tensor::f_full([1], config.rope_theta, options)?
        .f_pow(&exponents)?
        .f_reciprocal()?;
    let Some(scaling) = &config.rope_scaling else {
        return Ok(plain);
    };
    let plain = Vec::<f64>::try_from(plain.f_to_kind(Kind::Double)?)?;
    let scaled = scaling.frequencies(&plain, config.rope_theta);
    Ok(Tensor::f_from_slice(&scaled)?.f_to_kind(wide)?)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use training_run::model::HfModel;

    use super::*;

    /// Errors that this test finds: another formula of a scaling than that of transformers, a key that is read under another
    /// name or with another default, a table without the factor on cosines and sines.
    #[test]
    fn tables_of_published_models_are_those_of_transformers() {
        let fixture = include_str!("../../../tests/fixtures/hf/rope.json");
        let fixture: Value = serde_json::from_str(fixture).unwrap();
        for (name, expected) in fixture["models"].as_object().unwrap() {
            let model = HfModel::from_json(&expected["config"].to_string()).unwrap();
            assert_eq!(model.notes, [""; 0], "{name}");
            let near = |what: &str, found: f64, expected: f64| {
                let off = (found - expected).abs();
                assert!(
                    off <= 4.0 * f64::from(f32::EPSILON) * expected.abs(),
                    "{name}: {what} is {found}, that of transformers {expected}"
                );
            };
            let numbers = |key: &str| -> Vec<f64> {
                serde_json::from_value(expected[key].clone()).expect("numbers")
            };
            let found = frequencies(&model.config, Kind::Float).unwrap();
            let found = Vec::<f64>::try_from(found.to_kind(Kind::Double)).unwrap();
            let frequencies = numbers("inv_freq");
            assert_eq!(found.len(), frequencies.len(), "{name}");
            for (pair, (found, expected)) in found.iter().zip(&frequencies).enumerate() {
                near(&format!("frequency {pair}"), *found, *expected);
            }
            let tables = Rotary::new(&model.config, 2, Kind::Float).unwrap();
            let half = frequencies.len() as i64;
            for (table, key) in [(&tables.cos, "cos"), (&tables.sin, "sin")] {
                for start in [0, half] {
                    let found = table.get(1).narrow(0, start, half).to_kind(Kind::Double);
                    let found = Vec::<f64>::try_from(found).unwrap();
                    for (pair, (found, expected)) in found.iter().zip(numbers(key)).enumerate() {
                        near(&format!("{key} {pair}"), *found, expected);
                    }
                }
            }
        }
    }
}
