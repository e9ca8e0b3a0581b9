//! What a Llama-shaped model is made of: its sizes, its units with their parameters, its first weights.
//! Knows nothing of torch, ranks, tiles or drives.
//!
//! ```text
//! unit 0        embedding      model.embed_tokens.weight
//! unit 1..=L    block.0 ..     norm, q, k, v, o, norm, gate, up, down
//! unit L+1      head           model.norm.weight, and lm_head.weight unless tied to the embedding
//! ```

mod config;
pub mod init;
mod layout;

pub use config::{ConfigError, ModelConfig};
pub use layout::{ALIGN_ELEMS, ParamLayout, UnitLayout, unit_layouts};
