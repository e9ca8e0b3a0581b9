//! The supported architectures, each described by options of one common block. A block's computation depends
//! on these options and on sizes, never on the architecture's name.
//!
//! ```text
//! model_type   norm    positions   MLP            biases               besides
//! gpt2         layer   learned     gelu           all                  scaled initial weights, tied
//! llama        rms     rotary      gated silu     as configured
//! mistral      rms     rotary      gated silu     none                 sliding window
//! qwen2        rms     rotary      gated silu     query, key, value    sliding window in later layers
//! qwen3        rms     rotary      gated silu     as configured        norms of query and key heads, independent head_dim
//! ```
//!
//! A new decoder needs a row here, its keys in `hf/keys.rs`, its names in `names.rs` and a fixture
//! (`tests/fixtures/hf/make.py`). Encoder models (BERT, RoBERTa, T5) would also need bidirectional attention
//! (`compute/attention.rs`), another head and another loss (beside `compute/head.rs`). They are refused by
//! name until then (`ENCODERS`).

use serde::{Deserialize, Serialize};

/// Model family, identified by Hugging Face's `model_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Architecture {
    /// `gpt2`
    Gpt2,
    /// `llama`: Llama 1, 2, 3, and models of the same form.
    #[default]
    Llama,
    /// `mistral`
    Mistral,
    /// `qwen2`
    Qwen2,
    /// `qwen3`
    Qwen3,
}

/// Normalization of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Norm {
    /// `weight * x / rms(x)`
    Rms,
    /// `weight * (x - mean(x)) / std(x) + bias`
    Layer,
}

/// How a block knows the position of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Positions {
    /// A learned row for each position is added to the token's embedding.
    Learned,
    /// Query and key are rotated by angles that depend on the position.
    Rotary,
}

/// Form of the MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mlp {
    /// `down(silu(gate(x)) * up(x))`
    GatedSilu,
    /// `down(gelu(up(x)))` with the tanh approximation of gelu (`gelu_new`).
    Gelu,
}

/// Projections with a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Biases {
    /// Query, key and value projections.
    pub qkv: bool,
    /// Attention output projection.
    pub out: bool,
    /// Projections of the MLP.
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

/// Form of an architecture's blocks, independent of sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Form {
    /// Kind of all norms.
    pub norm: Norm,
    /// Kind of positions.
    pub positions: Positions,
    /// Form of the MLP.
    pub mlp: Mlp,
    /// Whether each query and key head is normalized before rotation.
    pub qk_norm: bool,
    /// Biases if the configuration does not specify them.
    pub biases: Biases,
    /// Whether initial weights of matrices that write to the residual stream are divided by the root of their
    /// number.
    pub scaled_residual: bool,
}

impl Architecture {
    /// All architectures.
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

    /// Class that Hugging Face's library trains it with.
    pub fn class(self) -> &'static str {
        match self {
            Self::Gpt2 => "GPT2LMHeadModel",
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
        }
    }

    /// Returns the architecture with this `model_type`.
    pub fn named(model_type: &str) -> Option<Self> {
        let mut all = Self::ALL.iter().copied();
        all.find(|architecture| architecture.model_type() == model_type)
    }

    /// Returns the form of its blocks.
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

/// `model_type`s of encoder models, which are not supported yet.
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
