//! A model's sizes and constants under Hugging Face's key names, with their checks.

use serde::{Deserialize, Serialize};

use super::{Architecture, Biases, Mlp, Norm, Positions, RopeScaling};

/// A model: architecture, sizes and constants. Serialized with the keys of Hugging Face's `config.json`. Keys
/// that were added after Llama are omitted if they have Llama's value, so that runs of earlier versions can
/// be resumed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// Model family, which determines names and the form of blocks.
    #[serde(
        rename = "model_type",
        default,
        skip_serializing_if = "Architecture::is_llama"
    )]
    pub architecture: Architecture,
    /// Number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Transformer blocks.
    #[serde(rename = "num_hidden_layers")]
    pub layers: usize,
    /// Number of query heads.
    #[serde(rename = "num_attention_heads")]
    pub heads: usize,
    /// Number of key and value heads; a divisor of `heads`.
    #[serde(rename = "num_key_value_heads")]
    pub kv_heads: usize,
    /// Width of a head; `hidden_size / heads` when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
    /// Base of the rotary embedding's wavelengths.
    #[serde(default = "default_rope_theta")]
    pub rope_theta: f64,
    /// Scaling of the rotary embedding for longer sequences.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope_scaling: Option<RopeScaling>,
    /// Epsilon added to the mean square or the variance in each norm.
    #[serde(rename = "rms_norm_eps", default = "default_norm_eps")]
    pub norm_eps: f64,
    /// Whether the output projection shares the embedding's matrix.
    #[serde(rename = "tie_word_embeddings", default)]
    pub tied: bool,
    /// Standard deviation of random initial weights.
    #[serde(default = "default_initializer_range")]
    pub initializer_range: f64,
    /// Longest sequence that the model supports; a run may use shorter ones. Learned positions have this
    /// number of rows.
    #[serde(default = "default_max_position_embeddings")]
    pub max_position_embeddings: usize,
    /// Which projections have a bias.
    #[serde(default, skip_serializing_if = "Biases::is_none")]
    pub biases: Biases,
    /// Sliding window, if blocks do not see all previous tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sliding_window: Option<Window>,
    /// Token whose row of the embedding is not trained, as in PyTorch's `Embedding(padding_idx)`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pad_token_id: Option<usize>,
}

/// Sliding window: each token sees itself and the `tokens - 1` before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// Number of tokens seen, including the own one.
    pub tokens: usize,
    /// First layer with the window; earlier layers see everything.
    pub first_layer: usize,
}

fn default_rope_theta() -> f64 {
    10000.0
}
fn default_norm_eps() -> f64 {
    1e-6
}
fn default_initializer_range() -> f64 {
    0.02
}
fn default_max_position_embeddings() -> usize {
    2048
}

/// Llama's constants without sizes; not a valid model until those are set.
impl Default for ModelConfig {
    fn default() -> Self {
        ModelConfig {
            architecture: Architecture::Llama,
            vocab_size: 0,
            hidden_size: 0,
            intermediate_size: 0,
            layers: 0,
            heads: 0,
            kv_heads: 0,
            head_dim: None,
            rope_theta: default_rope_theta(),
            rope_scaling: None,
            norm_eps: default_norm_eps(),
            tied: false,
            initializer_range: default_initializer_range(),
            max_position_embeddings: default_max_position_embeddings(),
            biases: Biases::default(),
            sliding_window: None,
            pad_token_id: None,
        }
    }
}

/// Error in a model's configuration.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ConfigError {
    /// The text is not JSON, or not a table.
    #[error("the model's config.json cannot be read: {0}")]
    Unreadable(String),
    /// A required key is missing.
    #[error("{key} is missing: the config.json of a {architecture} model contains it")]
    Missing {
        /// Hugging Face's key.
        key: &'static str,
        /// Its `model_type`.
        architecture: &'static str,
    },
    /// The architecture of a file is unknown.
    #[error(
        "config.json has no model_type, and its architectures ({architectures}) name no supported model: set model.model_type, for example \"llama\""
    )]
    NoModelType {
        /// Value of `architectures`, as JSON.
        architectures: String,
    },
    /// A key has the wrong type.
    #[error("{key} = {value}: expected {expected}")]
    Type {
        /// Hugging Face's key.
        key: String,
        /// The value given, as JSON.
        value: String,
        /// Expected type.
        expected: &'static str,
    },
    /// A key of another architecture.
    #[error("{key} is not a key of {architecture} models: leave it out")]
    NotOfThisModel {
        /// The key as given.
        key: String,
        /// The `model_type`.
        architecture: &'static str,
    },
    /// A key of windows where there are none.
    #[error("{key} has no effect without use_sliding_window = true: set that too, or leave it out")]
    WithoutWindows {
        /// The key.
        key: &'static str,
    },
    /// A size is zero or implausibly large.
    #[error("{key} = {value} must be between 1 and {max}")]
    Size {
        /// Hugging Face's key.
        key: &'static str,
        /// The value given.
        value: usize,
        /// Largest value accepted.
        max: usize,
    },
    /// A constant is not a positive finite number.
    #[error("{key} = {value} must be a positive finite number")]
    Constant {
        /// Hugging Face's key.
        key: &'static str,
        /// The value given.
        value: f64,
    },
    /// `hidden_size` is not divisible by the number of heads.
    #[error(
        "hidden_size = {hidden_size} is not a multiple of num_attention_heads = {heads}: change one of them, or set head_dim"
    )]
    Heads {
        /// `hidden_size`.
        hidden_size: usize,
        /// `num_attention_heads`.
        heads: usize,
    },
    /// Query heads cannot be divided evenly among key heads.
    #[error(
        "num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}: change one of them"
    )]
    KvHeads {
        /// `num_attention_heads`.
        heads: usize,
        /// `num_key_value_heads`.
        kv_heads: usize,
    },
    /// The rotary embedding needs an even head width.
    #[error("head_dim = {0} must be even: the rotary embedding rotates pairs")]
    OddHeadDim(usize),
    /// A key asks for an unsupported form of the model.
    #[error("{key} = {value} is not supported: {supported}")]
    Unsupported {
        /// Hugging Face's key.
        key: String,
        /// The value given, as JSON.
        value: String,
        /// The supported values.
        supported: String,
    },
}

/// Largest plausible size; products of a few such sizes fit 64 bits.
const SIZE_MAX: usize = 1 << 22;

impl ModelConfig {
    /// Checks that the model can be built.
    ///
    /// # Errors
    /// The first invalid key.
    pub fn validate(&self) -> Result<(), ConfigError> {
        for (key, value) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.layers),
            ("num_attention_heads", self.heads),
            ("num_key_value_heads", self.kv_heads),
            ("head_dim", self.head_dim.unwrap_or(1)),
            ("max_position_embeddings", self.max_position_embeddings),
            (
                "sliding_window",
                self.sliding_window.map_or(1, |window| window.tokens),
            ),
        ] {
            if value == 0 || value > SIZE_MAX {
                return Err(ConfigError::Size {
                    key,
                    value,
                    max: SIZE_MAX,
                });
            }
        }
        self.validate_constants()?;
        if self.head_dim.is_none() && !self.hidden_size.is_multiple_of(self.heads) {
            return Err(ConfigError::Heads {
                hidden_size: self.hidden_size,
                heads: self.heads,
            });
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(ConfigError::KvHeads {
                heads: self.heads,
                kv_heads: self.kv_heads,
            });
        }
        let rotary = self.architecture.form().positions == Positions::Rotary;
        if rotary && !self.head_dim().is_multiple_of(2) {
            return Err(ConfigError::OddHeadDim(self.head_dim()));
        }
        Ok(())
    }

    /// The model with the heads of one of `ranks` that divide sequences among themselves, for attention. With fewer heads of keys and
    /// values than ranks, several ranks have the same one.
    ///
    /// Panics if `ranks` cannot divide the heads.
    pub fn with_heads_of_rank(&self, ranks: usize) -> Self {
        let divided = |heads: usize| {
            assert!(heads.is_multiple_of(ranks) || ranks.is_multiple_of(heads));
            (heads / ranks).max(1)
        };
        assert!(self.heads >= ranks);
        Self {
            heads: divided(self.heads),
            kv_heads: divided(self.kv_heads),
            head_dim: Some(self.head_dim()),
            ..self.clone()
        }
    }

    fn validate_constants(&self) -> Result<(), ConfigError> {
        let mut constants = vec![
            ("rope_theta", self.rope_theta),
            ("rms_norm_eps", self.norm_eps),
            ("initializer_range", self.initializer_range),
        ];
        let scaling = self.rope_scaling.iter();
        constants.extend(scaling.flat_map(|scaling| scaling.constants(self.rope_theta)));
        let wrong = |value: &f64| !(value.is_finite() && *value > 0.0);
        match constants.into_iter().find(|(_, value)| wrong(value)) {
            Some((key, value)) => Err(ConfigError::Constant { key, value }),
            None => Ok(()),
        }
    }

    /// Width of a head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
            .unwrap_or(self.hidden_size / self.heads.max(1))
    }

    /// Number of tokens that layer number `layer` sees, including the own one; `None` if it sees everything.
    pub fn window(&self, layer: usize) -> Option<usize> {
        let window = self.sliding_window.filter(|w| layer >= w.first_layer);
        window.map(|window| window.tokens)
    }

    /// Number of parameters of the whole model, without padding.
    pub fn params_count(&self) -> usize {
        self.products_count() + self.other_count()
    }

    /// Number of parameters in matrix products: projections of blocks and of the head (the embedding's table
    /// in a tied model).
    fn products_count(&self) -> usize {
        let (h, ff, d) = (self.hidden_size, self.intermediate_size, self.head_dim());
        let attention = h * d * (self.heads + 2 * self.kv_heads) + self.heads * d * h;
        let mlp = match self.architecture.form().mlp {
            Mlp::GatedSilu => 3 * h * ff,
            Mlp::Gelu => 2 * h * ff,
        };
        self.layers * (attention + mlp) + self.vocab_size * h
    }

    /// Number of other parameters: norms, biases, positions, the embedding of an untied model.
    fn other_count(&self) -> usize {
        let (h, ff, d) = (self.hidden_size, self.intermediate_size, self.head_dim());
        let form = self.architecture.form();
        let when = |there: bool, count: usize| if there { count } else { 0 };
        let norm = h + when(form.norm == Norm::Layer, h);
        let wide = when(form.mlp == Mlp::GatedSilu, ff) + ff;
        let block = 2 * norm
            + when(self.biases.qkv, (self.heads + 2 * self.kv_heads) * d)
            + when(self.biases.out, h)
            + when(self.biases.mlp, wide + h)
            + when(form.qk_norm, 2 * d);
        let positions = when(
            form.positions == Positions::Learned,
            self.max_position_embeddings * h,
        );
        self.layers * block + norm + positions + when(!self.tied, self.vocab_size * h)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> ModelConfig {
        ModelConfig {
            vocab_size: 256,
            hidden_size: 64,
            intermediate_size: 176,
            layers: 2,
            heads: 4,
            kv_heads: 2,
            ..ModelConfig::default()
        }
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        good().validate().unwrap();
        let with = |change: fn(&mut ModelConfig)| {
            let mut config = good();
            change(&mut config);
            config.validate()
        };
        assert_eq!(
            with(|c| c.heads = 5),
            Err(ConfigError::Heads {
                hidden_size: 64,
                heads: 5
            })
        );
        assert_eq!(
            with(|c| c.kv_heads = 3),
            Err(ConfigError::KvHeads {
                heads: 4,
                kv_heads: 3
            })
        );
        assert_eq!(
            with(|c| c.head_dim = Some(15)),
            Err(ConfigError::OddHeadDim(15))
        );
        let size = |change| match with(change) {
            Err(ConfigError::Size { key, .. }) => key,
            other => panic!("{other:?}"),
        };
        assert_eq!(size(|c| c.layers = 0), "num_hidden_layers");
        assert_eq!(size(|c| c.heads = 0), "num_attention_heads");
        assert_eq!(size(|c| c.vocab_size = usize::MAX), "vocab_size");
        assert_eq!(
            size(|c| c.sliding_window = Some(Window {
                tokens: 0,
                first_layer: 0
            })),
            "sliding_window"
        );
        let constant = |change| match with(change) {
            Err(ConfigError::Constant { key, .. }) => key,
            other => panic!("{other:?}"),
        };
        assert_eq!(constant(|c| c.rope_theta = f64::NAN), "rope_theta");
        assert_eq!(constant(|c| c.norm_eps = 0.0), "rms_norm_eps");
        let llama3 = |low, high| {
            Some(RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: 32.0,
            })
        };
        let mut crossed = good();
        crossed.rope_scaling = llama3(4.0, 1.0);
        assert!(crossed.validate().is_err());
        crossed.rope_scaling = llama3(1.0, 4.0);
        crossed.validate().unwrap();
    }

    #[test]
    fn a_llamas_serialization_has_not_changed() {
        let written = serde_json::to_value(good()).unwrap();
        let keys: Vec<&String> = written.as_object().unwrap().keys().collect();
        assert_eq!(keys.len(), 11, "{keys:?}");
        let again: ModelConfig = serde_json::from_value(written).unwrap();
        assert_eq!(again, good());
    }

    #[test]
    fn a_window_begins_at_its_first_layer() {
        let windowed = ModelConfig {
            sliding_window: Some(Window {
                tokens: 100,
                first_layer: 1,
            }),
            ..good()
        };
        assert_eq!((windowed.window(0), windowed.window(1)), (None, Some(100)));
    }
}
