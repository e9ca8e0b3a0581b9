//! Scaling of the rotary embedding for sequences that are longer than those a model was first trained with: frequencies of
//! pairs, and the factor on cosines and sines.
//!
//! The numbers are those of `ROPE_INIT_FUNCTIONS` in transformers, whose names of methods and keys are used too. A test of
//! `trainer-torch` compares them (`tests/fixtures/hf/rope.py`).

use std::f64::consts::TAU;

use serde::{Deserialize, Serialize};

/// Scaling of the rotary embedding's wavelengths.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
pub enum RopeScaling {
    /// All by the same factor.
    Linear {
        /// Factor on the wavelengths.
        factor: f64,
    },
    /// None in sequences of at most `max_position_embeddings` tokens, and a run has no longer ones. Programs that generate
    /// longer texts scale by their length.
    Dynamic {
        /// Factor that applies to longer sequences.
        factor: f64,
    },
    /// Llama 3.1's scaling: long wavelengths by the factor, short ones not at all, those in between
    /// interpolated.
    Llama3 {
        /// Largest factor on a wavelength.
        factor: f64,
        /// Wavelengths above `original_max_position_embeddings` divided by this are scaled by the whole
        /// factor.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_position_embeddings` divided by this are not scaled.
        high_freq_factor: f64,
        /// Length of sequences that the model was first trained with.
        original_max_position_embeddings: f64,
    },
    /// YaRN: like Llama 3.1's, but interpolated by the number of the pair; cosines and sines are scaled too.
    Yarn(Yarn),
}

/// Constants of YaRN (Peng et al., 2023).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Yarn {
    /// Largest factor on a wavelength.
    pub factor: f64,
    /// Length of sequences that the model was first trained with.
    pub original_max_position_embeddings: f64,
    /// Factor on cosines and sines; without it, it follows from `factor`, `mscale` and `mscale_all_dim`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention_factor: Option<f64>,
    /// Pairs that rotate more often than this over the original length are not scaled.
    pub beta_fast: f64,
    /// Pairs that rotate less often than this over the original length are scaled by the whole factor.
    pub beta_slow: f64,
    /// Weight of the logarithm of `factor` in the numerator of the factor on cosines and sines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mscale: Option<f64>,
    /// Same in the denominator. Both or none of the two apply.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mscale_all_dim: Option<f64>,
    /// Whether the limits between scaled and other pairs are rounded to whole pairs.
    pub truncate: bool,
}

impl RopeScaling {
    /// Returns the frequencies of pairs from the `plain` ones, `theta^(-2i / head_dim)` of pair number i.
    pub fn frequencies(&self, plain: &[f64], theta: f64) -> Vec<f64> {
        let scaled = |pair: usize| {
            let (frequency, share) = (plain[pair], self.scaled_share(pair, plain, theta));
            frequency / self.factor() * share + frequency * (1.0 - share)
        };
        (0..plain.len()).map(scaled).collect()
    }

    /// How much of a pair's frequency is divided by the factor, from 0 to 1.
    fn scaled_share(&self, pair: usize, plain: &[f64], theta: f64) -> f64 {
        match *self {
            RopeScaling::Linear { .. } => 1.0,
            RopeScaling::Dynamic { .. } => 0.0,
            RopeScaling::Llama3 {
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
                ..
            } => {
                let rotations = original * plain[pair] / TAU;
                1.0 - ((rotations - low) / (high - low)).clamp(0.0, 1.0)
            }
            RopeScaling::Yarn(yarn) => {
                let (first, last) = yarn.limits(plain.len(), theta);
                ((pair as f64 - first) / (last - first)).clamp(0.0, 1.0)
            }
        }
    }

    fn factor(&self) -> f64 {
        match *self {
            RopeScaling::Linear { factor }
            | RopeScaling::Dynamic { factor }
            | RopeScaling::Llama3 { factor, .. } => factor,
            RopeScaling::Yarn(yarn) => yarn.factor,
        }
    }

    /// Factor on cosines and sines, so its square is on the scores of attention.
    pub fn attention_factor(&self) -> f64 {
        match self {
            RopeScaling::Yarn(yarn) => yarn.attention_factor(),
            _ => 1.0,
        }
    }

    /// Longest sequence that the scaling is for, if the model knew `before` positions without it.
    pub(super) fn covered_len(&self, before: f64) -> f64 {
        let before = match *self {
            RopeScaling::Dynamic { .. } => return before,
            RopeScaling::Linear { .. } => before,
            RopeScaling::Llama3 {
                original_max_position_embeddings: original,
                ..
            } => original,
            RopeScaling::Yarn(yarn) => yarn.original_max_position_embeddings,
        };
        self.factor() * before
    }

    /// Returns values that must be positive and finite, with their names. `theta` is the base of the wavelengths.
    pub(super) fn constants(&self, theta: f64) -> Vec<(&'static str, f64)> {
        const FACTOR: &str = "rope_scaling.factor";
        const ORIGINAL: &str = "rope_scaling.original_max_position_embeddings";
        match *self {
            RopeScaling::Linear { .. } | RopeScaling::Dynamic { .. } => {
                vec![(FACTOR, self.factor())]
            }
            RopeScaling::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
            } => vec![
                (FACTOR, factor),
                ("rope_scaling.low_freq_factor", low),
                ("rope_scaling.high_freq_factor", high),
                (ORIGINAL, original),
                // Wavelengths between the two limits are interpolated.
                (
                    "rope_scaling.high_freq_factor - low_freq_factor",
                    high - low,
                ),
            ],
            RopeScaling::Yarn(yarn) => vec![
                (FACTOR, yarn.factor),
                (ORIGINAL, yarn.original_max_position_embeddings),
                ("rope_scaling.beta_fast", yarn.beta_fast),
                ("rope_scaling.beta_slow", yarn.beta_slow),
                // Pairs between the two limits are interpolated.
                (
                    "rope_scaling.beta_fast - beta_slow",
                    yarn.beta_fast - yarn.beta_slow,
                ),
                ("rope_scaling.attention_factor", yarn.attention_factor()),
                // The limits are logarithms to this base.
                ("rope_theta - 1", theta - 1.0),
            ],
        }
    }
}

impl Yarn {
    /// Numbers of the first pair that is scaled and of the first one that is scaled by the whole factor.
    fn limits(&self, pairs: usize, theta: f64) -> (f64, f64) {
        let head_dim = 2.0 * pairs as f64;
        // Number of the pair that rotates this often over the original length.
        let pair = |rotations: f64| {
            let wavelength = self.original_max_position_embeddings / (rotations * TAU);
            head_dim * wavelength.ln() / (2.0 * theta.ln())
        };
        let (mut first, mut last) = (pair(self.beta_fast), pair(self.beta_slow));
        if self.truncate {
            (first, last) = (first.floor(), last.ceil());
        }
        // Transformers has the width of a head here too, not the number of pairs.
        (first, last) = (first.max(0.0), last.min(head_dim - 1.0));
        if first == last {
            last += 0.001;
        }
        (first, last)
    }

    fn attention_factor(&self) -> f64 {
        let scale = |weight: f64| match self.factor {
            factor if factor <= 1.0 => 1.0,
            factor => 0.1 * weight * factor.ln() + 1.0,
        };
        match (self.attention_factor, self.mscale, self.mscale_all_dim) {
            (Some(factor), ..) => factor,
            (None, Some(over), Some(under)) => scale(over) / scale(under),
            _ => scale(1.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_are_scaled_by_the_rotations_of_a_pair() {
        let linear = RopeScaling::Linear { factor: 4.0 };
        assert_eq!(linear.frequencies(&[0.5], 1e4), [0.125]);
        let dynamic = RopeScaling::Dynamic { factor: 4.0 };
        assert_eq!(dynamic.frequencies(&[0.5], 1e4), [0.5]);
        let llama3 = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 100.0,
        };
        let share_of = |rotations: f64| {
            let frequency = rotations * TAU / 100.0;
            llama3.frequencies(&[frequency], 1e4)[0] / frequency
        };
        assert_eq!((share_of(5.0), share_of(0.5)), (1.0, 0.125));
        assert!((share_of(2.5) - (0.5 + 0.5 / 8.0)).abs() < 1e-12);
    }
}
