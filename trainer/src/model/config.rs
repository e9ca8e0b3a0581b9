//! The sizes of a Llama-shaped model, with Hugging Face's key names, checked.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A model's sizes and constants. The keys in files are those of Hugging Face's `config.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// Tokens the model knows.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the feed-forward part.
    pub intermediate_size: usize,
    /// Transformer blocks.
    #[serde(rename = "num_hidden_layers")]
    pub layers: usize,
    /// Query heads.
    #[serde(rename = "num_attention_heads")]
    pub heads: usize,
    /// Key and value heads; a divisor of `heads`.
    #[serde(rename = "num_key_value_heads")]
    pub kv_heads: usize,
    /// Width of a head; `hidden_size / heads` when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
    /// Base of the rotary embedding's wavelengths.
    #[serde(default = "default_rope_theta")]
    pub rope_theta: f64,
    /// Added to the mean square in each norm.
    #[serde(default = "default_rms_norm_eps")]
    pub rms_norm_eps: f64,
    /// Whether the output projection is the embedding's matrix.
    #[serde(rename = "tie_word_embeddings", default)]
    pub tied: bool,
    /// Standard deviation of fresh weights.
    #[serde(default = "default_initializer_range")]
    pub initializer_range: f64,
    /// Longest sequence the model is meant for; a run's sequence may be shorter.
    #[serde(default = "default_max_position_embeddings")]
    pub max_position_embeddings: usize,
}

fn default_rope_theta() -> f64 {
    10000.0
}
fn default_rms_norm_eps() -> f64 {
    1e-6
}
fn default_initializer_range() -> f64 {
    0.02
}
fn default_max_position_embeddings() -> usize {
    2048
}

/// Why a model cannot be built from its configuration.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ConfigError {
    /// Not JSON, or a key has the wrong type or is missing.
    #[error("the model's config.json cannot be read: {0}")]
    Unreadable(String),
    /// A size is zero or beyond what is plausible.
    #[error("{key} = {value} must be between 1 and {max}")]
    Size {
        /// Hugging Face's key.
        key: &'static str,
        /// The value given.
        value: usize,
        /// The largest value taken.
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
    /// `hidden_size` cannot be split into heads.
    #[error(
        "hidden_size = {hidden_size} is not a multiple of num_attention_heads = {heads}: change one, or give head_dim"
    )]
    Heads {
        /// `hidden_size`.
        hidden_size: usize,
        /// `num_attention_heads`.
        heads: usize,
    },
    /// Query heads cannot share the key heads evenly.
    #[error("num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}")]
    KvHeads {
        /// `num_attention_heads`.
        heads: usize,
        /// `num_key_value_heads`.
        kv_heads: usize,
    },
    /// The rotary embedding turns pairs.
    #[error("head_dim = {0} must be even: the rotary embedding turns pairs")]
    OddHeadDim(usize),
    /// A key asks for a form of the model that is not built here.
    #[error("{key} = {value} is not supported: {supported}")]
    Unsupported {
        /// Hugging Face's key.
        key: &'static str,
        /// The value given, as JSON.
        value: String,
        /// What is.
        supported: &'static str,
    },
}

/// Sizes beyond this are mistakes, and products of a few of them still fit 64 bits.
const SIZE_MAX: usize = 1 << 22;

impl ModelConfig {
    /// Reads a model directory's `config.json`. Keys that do not change the arithmetic are left aside; those that
    /// ask for another form of model are refused.
    ///
    /// # Errors
    /// Unreadable text, an unsupported form, or what [`ModelConfig::validate`] refuses.
    pub fn from_hf_json(text: &str) -> Result<Self, ConfigError> {
        let unreadable = |e: serde_json::Error| ConfigError::Unreadable(e.to_string());
        let mut value: Value = serde_json::from_str(text).map_err(unreadable)?;
        refuse_other_forms(&value)?;
        // Older files leave the key heads out: as many as query heads.
        if let (Some(heads), None) = (
            value.get("num_attention_heads").cloned(),
            value.get("num_key_value_heads"),
        ) {
            value["num_key_value_heads"] = heads;
        }
        let mut config: ModelConfig = serde_json::from_value(value.clone()).map_err(unreadable)?;
        // Newer files keep the wavelength's base in a table of its own.
        if let Some(theta) = value
            .pointer("/rope_parameters/rope_theta")
            .and_then(Value::as_f64)
        {
            config.rope_theta = theta;
        }
        config.validate()?;
        Ok(config)
    }

    /// Checks that a model can be built.
    ///
    /// # Errors
    /// The first thing wrong, naming its key.
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
        ] {
            if value == 0 || value > SIZE_MAX {
                return Err(ConfigError::Size {
                    key,
                    value,
                    max: SIZE_MAX,
                });
            }
        }
        for (key, value) in [
            ("rope_theta", self.rope_theta),
            ("rms_norm_eps", self.rms_norm_eps),
            ("initializer_range", self.initializer_range),
        ] {
            if !(value.is_finite() && value > 0.0) {
                return Err(ConfigError::Constant { key, value });
            }
        }
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
        if !self.head_dim().is_multiple_of(2) {
            return Err(ConfigError::OddHeadDim(self.head_dim()));
        }
        Ok(())
    }

    /// Width of a head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
            .unwrap_or(self.hidden_size / self.heads.max(1))
    }

    /// Parameters of the whole model, without the layouts' padding.
    pub fn params_count(&self) -> usize {
        let (h, ff, d) = (self.hidden_size, self.intermediate_size, self.head_dim());
        let attention = h * d * (self.heads + 2 * self.kv_heads) + self.heads * d * h;
        let block = attention + 3 * h * ff + 2 * h;
        let projection = if self.tied { 0 } else { self.vocab_size * h };
        self.vocab_size * h + self.layers * block + h + projection
    }

    /// Floating-point operations of forward and backward for one token in a sequence of `seq_len`, as model FLOPs are
    /// counted: 6 for each parameter of a matrix product, and attention's half of the square. Recomputing adds none.
    pub fn flops_per_token(&self, seq_len: usize) -> f64 {
        let norms = self.hidden_size * (2 * self.layers + 1);
        let lookup = if self.tied {
            0
        } else {
            self.vocab_size * self.hidden_size
        };
        let products = (self.params_count() - norms - lookup) as f64;
        let attention = (self.layers * self.heads * self.head_dim() * seq_len) as f64;
        6.0 * products + 6.0 * attention
    }
}

fn refuse_other_forms(value: &Value) -> Result<(), ConfigError> {
    let refuse = |key, value: &Value, supported| {
        Err(ConfigError::Unsupported {
            key,
            value: value.to_string(),
            supported,
        })
    };
    if let Some(kind) = value.get("model_type")
        && kind != "llama"
    {
        return refuse("model_type", kind, "only \"llama\" is");
    }
    if let Some(act) = value.get("hidden_act")
        && act != "silu"
    {
        return refuse("hidden_act", act, "only \"silu\" is");
    }
    for key in ["attention_bias", "mlp_bias"] {
        if let Some(bias) = value.get(key)
            && bias != false
        {
            return refuse(key, bias, "projections have no bias here");
        }
    }
    for key in ["rope_scaling", "rope_parameters"] {
        let Some(rope) = value.get(key).filter(|rope| !rope.is_null()) else {
            continue;
        };
        let kind = rope.get("rope_type").or_else(|| rope.get("type"));
        if kind.is_some_and(|kind| kind != "default") || (key == "rope_scaling" && kind.is_none()) {
            return refuse(
                key,
                rope,
                "only the plain rotary embedding (rope_type \"default\") is",
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hf(extra: &str) -> String {
        format!(
            r#"{{"architectures":["LlamaForCausalLM"],"model_type":"llama","torch_dtype":"bfloat16","vocab_size":256,
            "hidden_size":64,"intermediate_size":176,"num_hidden_layers":2,"num_attention_heads":4,
            "num_key_value_heads":2{extra}}}"#
        )
    }

    #[test]
    fn hugging_face_keys_are_read_and_the_rest_has_llamas_defaults() {
        let config =
            ModelConfig::from_hf_json(&hf(r#","rope_theta":500000.0,"rope_scaling":null"#))
                .unwrap();
        assert_eq!(
            (
                config.layers,
                config.heads,
                config.kv_heads,
                config.head_dim()
            ),
            (2, 4, 2, 16)
        );
        assert_eq!(
            (config.rope_theta, config.rms_norm_eps, config.tied),
            (500000.0, 1e-6, false)
        );
        let again: ModelConfig =
            serde_json::from_str(&serde_json::to_string(&config).unwrap()).unwrap();
        assert_eq!(again, config);
        let newer = hf(r#","rope_parameters":{"rope_type":"default","rope_theta":250000.0}"#);
        assert_eq!(
            ModelConfig::from_hf_json(&newer).unwrap().rope_theta,
            250000.0
        );
    }

    #[test]
    fn another_form_of_model_is_refused_by_name() {
        for (extra, key) in [
            (r#","hidden_act":"gelu""#, "hidden_act"),
            (r#","attention_bias":true"#, "attention_bias"),
            (r#","mlp_bias":true"#, "mlp_bias"),
            (
                r#","rope_scaling":{"rope_type":"llama3","factor":8.0}"#,
                "rope_scaling",
            ),
            (
                r#","rope_parameters":{"rope_type":"yarn"}"#,
                "rope_parameters",
            ),
        ] {
            match ModelConfig::from_hf_json(&hf(extra)) {
                Err(ConfigError::Unsupported { key: named, .. }) => assert_eq!(named, key),
                other => panic!("{extra}: {other:?}"),
            }
        }
        assert!(matches!(
            ModelConfig::from_hf_json(r#"{"model_type":"mamba"}"#),
            Err(ConfigError::Unsupported {
                key: "model_type",
                ..
            })
        ));
        assert!(matches!(
            ModelConfig::from_hf_json("{"),
            Err(ConfigError::Unreadable(_))
        ));
        assert!(matches!(
            ModelConfig::from_hf_json("{}"),
            Err(ConfigError::Unreadable(_))
        ));
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        let good = ModelConfig::from_hf_json(&hf("")).unwrap();
        let with = |change: fn(&mut ModelConfig)| {
            let mut config = good.clone();
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
        assert!(matches!(
            with(|c| c.layers = 0),
            Err(ConfigError::Size {
                key: "num_hidden_layers",
                ..
            })
        ));
        assert!(matches!(
            with(|c| c.heads = 0),
            Err(ConfigError::Size {
                key: "num_attention_heads",
                ..
            })
        ));
        assert!(matches!(
            with(|c| c.vocab_size = usize::MAX),
            Err(ConfigError::Size {
                key: "vocab_size",
                ..
            })
        ));
        assert!(matches!(
            with(|c| c.rope_theta = f64::NAN),
            Err(ConfigError::Constant {
                key: "rope_theta",
                ..
            })
        ));
        assert!(matches!(
            with(|c| c.rms_norm_eps = 0.0),
            Err(ConfigError::Constant {
                key: "rms_norm_eps",
                ..
            })
        ));
    }
}
