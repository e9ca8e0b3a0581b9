//! Explicit forward and backward of block and head, with autograd only for attention: how a GPU computes.
//!
//! ```text
//!   product.rs, projection.rs    matrix products; one for weights that are adjacent
//!   ops.rs        elementwise operations: in torch operators (the definition), or in fused kernels
//!   attention.rs  rotary positions and attention, forward and backward
//!   block.rs      a block: forward; recomputation and backward
//!   head.rs       final norm, logits in slices, loss and gradients
//! ```
//!
//! Autograd, which the CPU uses, stores the result of each small operation, and a GPU's elementwise
//! operations are limited by memory bandwidth. Results are rounded at the same places as in `../block.rs`, so
//! both agree within the precision of the kind. With torch operators this code also runs on the CPU, where
//! tests compare it with finite differences and with autograd.

mod attention;
mod block;
mod head;
mod ops;
mod product;
mod projection;

use crate::model::{Dropout, Form, Mlp, ModelConfig, Norm, Positions};

pub(super) use attention::normed_elem_bytes;
pub(super) use block::{Block, BlockWeights, Kept};
pub(super) use head::{HeadWeights, LOGITS_ELEMS_MAX, head_backward, head_loss};
pub(super) use ops::Ops;

/// Returns whether blocks of this form have an explicit backward: those of Llama, with any biases and with
/// norms of query and key heads. Other forms use autograd on a GPU too, which is correct but slower and keeps
/// nothing of a block: GPT-2, dropout.
pub(super) fn block_is_written_out(config: &ModelConfig, dropout: &Dropout) -> bool {
    let Form {
        norm,
        positions,
        mlp,
        ..
    } = config.architecture.form();
    (norm, positions, mlp) == (Norm::Rms, Positions::Rotary, Mlp::GatedSilu) && dropout.is_none()
}

/// Returns whether a head of this form has an explicit backward.
pub(super) fn head_is_written_out(config: &ModelConfig) -> bool {
    config.architecture.form().norm == Norm::Rms
}
