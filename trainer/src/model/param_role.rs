//! The parameters that units are made of, by what they do. Which of them a model has follows from its configuration
//! (`layout.rs`), what a checkpoint calls them from its architecture (`names.rs`).

use serde::{Deserialize, Serialize};

/// What a parameter is in its unit. Matrices are [outputs, inputs].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ParamRole {
    /// The embedding's table, [vocab_size, hidden_size].
    Embedding,
    /// Learned positions, [max_position_embeddings, hidden_size].
    Positions,
    /// Weight of the norm before attention.
    InputNorm,
    /// Its bias.
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
    /// Attention's output projection.
    Out,
    /// Its bias.
    OutBias,
    /// Weight of the norm before the feed-forward part.
    PostNorm,
    /// Its bias.
    PostNormBias,
    /// The gate's projection.
    Gate,
    /// Its bias.
    GateBias,
    /// The projection to the width of the feed-forward part.
    Up,
    /// Its bias.
    UpBias,
    /// The projection back.
    Down,
    /// Its bias.
    DownBias,
    /// Weight of the last norm.
    FinalNorm,
    /// Its bias.
    FinalNormBias,
    /// The output projection of a model that is not tied, [vocab_size, hidden_size].
    Projection,
}
