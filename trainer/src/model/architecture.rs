//! The architectures that are known, each as settings of one block: what a block computes follows from these and from the
//! sizes, never from the architecture's name.
//!
//! ```text
//! model_type   norm    positions   feed-forward   biases               besides
//! gpt2         layer   learned     gelu           all                  scaled first weights, tied
//! llama        rms     rotary      gated silu     as configured
//! mistral      rms     rotary      gated silu     none                 sliding window
//! qwen2        rms     rotary      gated silu     query, key, value    sliding window in later layers
//! qwen3        rms     rotary      gated silu     as configured        norms of query and key heads, head_dim by itself
//! ```
//!
//! A new decoder is a row here, its keys in `hf/keys.rs`, its names in `names.rs` and a fixture (`tests/fixtures/hf/make.py`).
//! Encoder models (BERT, RoBERTa, T5) would come in the same way, and need three things more: attention that sees both
//! directions (`compute/attention.rs`), another head and another loss (beside `compute/head.rs`). Until then `ENCODERS` has
//! them refused as what they are.

use serde::{Deserialize, Serialize};

/// A model family, by Hugging Face's `model_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Architecture {
    /// `gpt2`
    Gpt2,
    /// `llama`: Llama 1, 2, 3, and what takes its form.
    #[default]
    Llama,
    /// `mistral`
    Mistral,
    /// `qwen2`
    Qwen2,
    /// `qwen3`
    Qwen3,
}

/// How rows are normed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Norm {
    /// `weight * x / rms(x)`
    Rms,
    /// `weight * (x - mean(x)) / std(x) + bias`
    Layer,
}

/// How a block knows where a token is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Positions {
    /// A row for each position, added to the token's.
    Learned,
    /// Query and key turned by their positions' angles.
    Rotary,
}

/// The feed-forward part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mlp {
    /// `down(silu(gate(x)) * up(x))`
    GatedSilu,
    /// `down(gelu(up(x)))`, gelu in its form with tanh (`gelu_new`).
    Gelu,
}

/// Which projections have a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Biases {
    /// Query, key and value.
    pub qkv: bool,
    /// Attention's output.
    pub out: bool,
    /// Those of the feed-forward part.
    pub mlp: bool,
}

impl Biases {
    const NONE: Self = Self {
        qkv: false,
        out: false,
        mlp: false,
    };

    pub(super) fn is_none(&self) -> bool {
        *self == Self::NONE
    }
}

/// What an architecture's blocks are made of, whatever their sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Form {
    /// Of all norms.
    pub norm: Norm,
    /// Where positions come in.
    pub positions: Positions,
    /// The feed-forward part.
    pub mlp: Mlp,
    /// Whether each query and key head is normed before it is turned.
    pub qk_norm: bool,
    /// Biases where the configuration does not say.
    pub biases: Biases,
    /// Whether the matrices that write to the residual stream start smaller, by the root of how many there are.
    pub scaled_residual: bool,
}

impl Architecture {
    /// All of them.
    pub const ALL: &[Self] = &[
        Self::Gpt2,
        Self::Llama,
        Self::Mistral,
        Self::Qwen2,
        Self::Qwen3,
    ];

    /// Hugging Face's `model_type`.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Gpt2 => "gpt2",
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
        }
    }

    /// The class that Hugging Face's library trains it with.
    pub fn class(self) -> &'static str {
        match self {
            Self::Gpt2 => "GPT2LMHeadModel",
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }

    /// The architecture of a `model_type`.
    pub fn named(model_type: &str) -> Option<Self> {
        let mut all = Self::ALL.iter().copied();
        all.find(|architecture| architecture.model_type() == model_type)
    }

    /// What its blocks are made of.
    pub fn form(self) -> Form {
        let llama = Form {
            norm: Norm::Rms,
            positions: Positions::Rotary,
            mlp: Mlp::GatedSilu,
            qk_norm: false,
            biases: Biases::NONE,
            scaled_residual: false,
        };
        match self {
            Self::Llama | Self::Mistral => llama,
            Self::Qwen2 => Form {
                biases: Biases {
                    qkv: true,
                    ..Biases::NONE
                },
                ..llama
            },
            Self::Qwen3 => Form {
                qk_norm: true,
                ..llama
            },
            Self::Gpt2 => Form {
                norm: Norm::Layer,
                positions: Positions::Learned,
                mlp: Mlp::Gelu,
                qk_norm: false,
                biases: Biases {
                    qkv: true,
                    out: true,
                    mlp: true,
                },
                scaled_residual: true,
            },
        }
    }

    pub(super) fn is_llama(&self) -> bool {
        *self == Self::Llama
    }
}

/// The `model_type`s of models that read in both directions, which are not trained here yet.
pub(super) const ENCODERS: &[&str] = &[
    "albert",
    "bert",
    "deberta",
    "deberta-v2",
    "distilbert",
    "electra",
    "modernbert",
    "mt5",
    "roberta",
    "t5",
    "xlm-roberta",
];
