//! What a model is made of: its configuration, its units with their parameters, their names in checkpoints, its first
//! weights. Knows nothing of torch, ranks, tiles or drives.
//!
//! ```text
//! unit 0        embedding      the tokens' table, and learned positions
//! unit 1..=L    block.0 ..     norm, q, k, v, out, norm, gate, up, down; biases and norms of heads where a model has them
//! unit L+1      head           the last norm, and the projection unless tied to the embedding
//!
//!   architecture.rs   the architectures: what blocks are made of, and where encoders (BERT, RoBERTa, T5) would come in
//!   hf/               config.json
//!   config.rs         sizes and constants, checked
//!   member.rs, layout.rs, names.rs   parameters: what each is, where it lies here, where in a checkpoint
//!   init.rs           first weights
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

pub use architecture::{Architecture, Biases, Form, Mlp, Norm, Positions};
pub use config::{ConfigError, ModelConfig, RopeScaling, Window};
pub use dropout::Dropout;
pub use dtype::Dtype;
pub use hf::{HfModel, config_json, parse};
pub use layout::{ALIGN_ELEMS, ParamLayout, Start, UnitLayout, unit_layouts};
pub use param_role::ParamRole;

/// Tokens of a model that is trained on bytes.
pub const BYTE_VOCAB_SIZE: u64 = 256;
