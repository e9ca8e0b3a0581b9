//! Dropout rates in training. They are not part of a model's computation, so a resumed run may change them.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::ConfigError;

/// Dropout probabilities from 0 to less than 1; kept elements are scaled up, so that sums stay the same on
/// average.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Dropout {
    /// Probability for the sum of embeddings (`embd_pdrop`).
    pub embedding: f64,
    /// Probability for the outputs of attention and MLP (`resid_pdrop`).
    pub residual: f64,
    /// Probability for attention weights (`attn_pdrop`, `attention_dropout`).
    pub attention: f64,
}

/// The probabilities that are not 0, by their keys.
impl fmt::Display for Dropout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys = ["embd_pdrop", "resid_pdrop", "attention_dropout"];
        let values = [self.embedding, self.residual, self.attention];
        let set = keys
            .into_iter()
            .zip(values)
            .filter(|(_, value)| *value > 0.0);
        let set: Vec<String> = set.map(|(key, value)| format!("{key} {value}")).collect();
        match set.is_empty() {
            true => f.write_str("none"),
            false => f.write_str(&set.join(", ")),
        }
    }
}

impl Dropout {
    /// No dropout.
    pub const NONE: Self = Self {
        embedding: 0.0,
        residual: 0.0,
        attention: 0.0,
    };

    /// Returns whether there is no dropout.
    pub fn is_none(&self) -> bool {
        *self == Self::NONE
    }

    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        for (key, share) in [
            ("embd_pdrop", self.embedding),
            ("resid_pdrop", self.residual),
            ("attention_dropout (attn_pdrop)", self.attention),
        ] {
            if !(0.0..1.0).contains(&share) {
                return Err(ConfigError::Unsupported {
                    key: key.into(),
                    value: share.to_string(),
                    supported: "it must be at least 0 and less than 1".into(),
                });
            }
        }
        Ok(())
    }
}
