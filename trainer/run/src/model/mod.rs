//! Description of a model: its configuration, its units with their parameters, their names in checkpoints,
//! its initial weights. Knows nothing of torch, ranks, tiles or drives.
//!
//! ```text
//! unit 0        embedding      the tokens' table, and learned positions
//! unit 1..=L    block.0 ..     norm, q, k, v, out, norm, gate, up, down; biases and norms of heads where a model has them
//! unit L+1      head           the last norm, and the projection unless tied to the embedding
//!
//!   architecture.rs   the architectures: form of blocks; what encoders (BERT, RoBERTa, T5) would need
//!   hf/               config.json
//!   config.rs         sizes and constants, checked
//!   rope.rs           scaling of the rotary embedding
//!   param_role.rs, layout.rs, names.rs   parameters: role, position in a buffer, place in a checkpoint
//!   init.rs           initial weights
//! ```

mod architecture;
mod config;
mod dropout;
mod dtype;
mod hf;
pub mod init;
mod layout;
pub mod names;
mod param_role;
mod rope;

pub use architecture::{Architecture, Biases, Form, Mlp, Norm, Positions};
pub use config::{ConfigError, ModelConfig, Window};
pub use dropout::Dropout;
pub use dtype::Dtype;
pub use hf::{HfModel, config_json, parse};
pub use layout::{ALIGN_ELEMS, InitialValue, ParamLayout, UnitLayout, adjacent, unit_layouts};
pub use param_role::ParamRole;
pub use rope::{RopeScaling, Yarn};

/// Vocabulary size of a model that is trained on bytes.
pub const BYTE_VOCAB_SIZE: u64 = 256;
