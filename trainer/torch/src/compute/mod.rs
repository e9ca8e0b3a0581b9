//! A model's computation, one unit at a time. The only module that handles tensors: its interface contains none.
//!
//! ```text
//! tokens ─▶ embed_forward ─▶ block_forward ─▶ .. ─▶ block_forward ─▶ head_loss_backward ─▶ loss
//!               the caller keeps the activations in between                │
//! embed_backward ◀─ block_backward ◀─ .. ◀─ block_backward ◀─────────────────┘ gradient of an activation
//!        └───────────────┴──────────────────────┴──────▶ GradSink, one a unit ─▶ the unit's flat gradient
//! ```
//!
//! A forward pass keeps only its output; a backward pass recomputes its unit from the unit's input. So
//! weights are needed only while their unit runs, and memory holds one unit's graph and one activation for
//! each unit. A GPU with enough memory may keep more of a block
//! ([`ActivationCheckpointing`](training_run::computation::ActivationCheckpointing)).
//!
//! ```text
//!   embedding.rs, block.rs, head.rs     the units with torch's autograd: how a processor computes
//!   norm.rs, positions.rs, attention.rs, dropout.rs, linear.rs    parts of blocks, selected by the configuration
//!   explicit/                           block and head with an explicit backward: how a GPU computes the forms that have one
//!   params.rs, values.rs, tokens.rs, grads.rs    inputs and outputs
//!   documents.rs                        several documents in a sequence
//!   sequence.rs                         a sequence on several ranks
//!   engine.rs, memory.rs                computation of a unit; the memory that it takes
//!   muon.rs                             gradients of a block to Muon's directions
//! ```
//!
//! Guarantees: the same weights and tokens give the same bits each time, wherever the caller's buffers are;
//! gradients equal those of one graph over the whole model bit for bit, in fp32 and bf16, also with dropout.

mod attention;
mod block;
mod documents;
mod dropout;
mod embedding;
mod engine;
mod explicit;
mod grads;
mod head;
mod linear;
mod muon;
mod norm;
mod params;
mod positions;
mod sequence;
#[cfg(test)]
mod tests;
mod tiled;
mod tokens;
mod values;

pub use engine::{Engine, set_up};
pub use grads::{GradSink, GradSums};
pub use tokens::Tokens;
pub use values::{Activation, AwayActivation, LossHandle, UnitWeights};

use kernels::gpu::{Gpu, GpuError};
use kernels_torch::TorchError;
use kernels_torch::collective::ExchangeError;
use training_ranks::CollectiveError;

/// Device that computes.
#[derive(Clone, Debug)]
pub enum ComputeDevice {
    /// The processor, with weights in host memory.
    Cpu,
    /// A GPU, with weights, activations and gradients in its memory. All work is enqueued on its default stream.
    Gpu(Gpu),
}

/// Error of a computation.
#[derive(Debug, thiserror::Error)]
pub enum ComputeError {
    /// The model's configuration does not describe a model.
    #[error(transparent)]
    Config(#[from] training_run::model::ConfigError),
    /// Torch failed, most likely because it is out of memory.
    #[error(transparent)]
    Torch(#[from] TorchError),
    /// The GPU failed, or has too little memory.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// An exchange with the other ranks of a sequence failed.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// The number of tokens differs from the micro-batch's.
    #[error(
        "a micro-batch of {micro_batch} sequences of {seq_len} tokens was given {count} tokens"
    )]
    TokenCount {
        /// Number of tokens given.
        count: usize,
        /// Sequences in the batch.
        micro_batch: usize,
        /// Tokens in a sequence.
        seq_len: usize,
    },
    /// A token outside the vocabulary.
    #[error(
        "token {id} at position {position} is outside the vocabulary of {vocab_size}: the data was tokenized for another model"
    )]
    TokenOutside {
        /// The token.
        id: i64,
        /// Position in the batch, counted over all sequences.
        position: usize,
        /// The model's `vocab_size`.
        vocab_size: usize,
    },
    /// A sequence longer than the engine's maximum.
    #[error("a sequence of {seq_len} tokens is longer than this run's train.seq_len = {max}")]
    SequenceTooLong {
        /// Tokens in the sequence.
        seq_len: usize,
        /// The engine's `seq_len`.
        max: usize,
    },
    /// The buffer's length differs from the unit's.
    #[error("unit {unit} has {expected} bytes, but the buffer has {found}")]
    BufferLength {
        /// The unit's name.
        unit: String,
        /// Bytes of the unit.
        expected: usize,
        /// Bytes of the buffer.
        found: usize,
    },
}

impl From<ExchangeError> for ComputeError {
    fn from(error: ExchangeError) -> Self {
        match error {
            ExchangeError::Collective(error) => Self::Collective(error),
            ExchangeError::Torch(error) => Self::Torch(error),
        }
    }
}

impl From<tch::TchError> for ComputeError {
    fn from(error: tch::TchError) -> Self {
        ComputeError::Torch(error.into())
    }
}
