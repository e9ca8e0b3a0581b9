//! How much is left out at random in training. Not part of what a model computes: a run may go on with another share.

use serde::{Deserialize, Serialize};

use super::ConfigError;

/// Shares that are left out, 0 to less than 1; what stays is scaled up, so that sums stay the same on average.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Dropout {
    /// Of the embedding's sum (`embd_pdrop`).
    pub embedding: f64,
    /// Of what attention and the feed-forward part add to the residual stream (`resid_pdrop`).
    pub residual: f64,
    /// Of attention's weights (`attn_pdrop`, `attention_dropout`).
    pub attention: f64,
}

impl Dropout {
    /// Nothing is left out.
    pub const NONE: Self = Self {
        embedding: 0.0,
        residual: 0.0,
        attention: 0.0,
    };

    /// Whether nothing is left out.
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
