//! Roles of parameters in units. The configuration determines which a model has (`layout.rs`), the
//! architecture how a checkpoint names them (`names.rs`).

use serde::{Deserialize, Serialize};

/// Role of a parameter in its unit. Matrices are [outputs, inputs].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ParamRole {
    /// Embedding table, [vocab_size, hidden_size].
    Embedding,
    /// Learned positions, [max_position_embeddings, hidden_size].
    Positions,
    /// Weight of the norm before attention.
    InputNorm,
    /// Bias of the norm before attention.
    InputNormBias,
    /// Query projection.
    Query,
    /// Key projection.
    Key,
    /// Value projection.
    Value,
    /// Bias of the query projection.
    QueryBias,
    /// Bias of the key projection.
    KeyBias,
    /// Bias of the value projection.
    ValueBias,
    /// Weight of the norm of each query head, `[head_dim]`.
    QueryNorm,
    /// Weight of the norm of each key head, `[head_dim]`.
    KeyNorm,
    /// Attention output projection.
    Out,
    /// Bias of the attention output projection.
    OutBias,
    /// Weight of the norm before the MLP.
    PostNorm,
    /// Bias of the norm before the MLP.
    PostNormBias,
    /// Gate projection of the MLP.
    Gate,
    /// Bias of the gate projection.
    GateBias,
    /// Up projection of the MLP.
    Up,
    /// Bias of the up projection.
    UpBias,
    /// Down projection of the MLP.
    Down,
    /// Bias of the down projection.
    DownBias,
    /// Weight of the final norm.
    FinalNorm,
    /// Bias of the final norm.
    FinalNormBias,
    /// Output projection of an untied model, [vocab_size, hidden_size].
    Projection,
}

impl ParamRole {
    /// Whether the parameter is a matrix of a block, as Muon updates them.
    pub fn is_block_matrix(self) -> bool {
        matches!(
            self,
            Self::Query | Self::Key | Self::Value | Self::Out | Self::Gate | Self::Up | Self::Down
        )
    }
}
