//! Forward and backward of block and head written out, without autograd but around attention: how a GPU computes.
//!
//! ```text
//!   product.rs    matrix products, one for weights that lie side by side
//!   ops.rs        what is done element by element: in torch's operators (the definition), or in fused kernels
//!   attention.rs  positions turned in, attention, and back
//!   block.rs      a block from its input: forward; again, and back
//!   head.rs       final norm, logits in slices, loss and gradients
//! ```
//!
//! Why not autograd as on the CPU: it keeps and moves each small step's result, and what a GPU does besides products is
//! bound by memory. Rounding is where `../block.rs` rounds, so both agree within the noise of the kind. In torch's
//! operators this runs on the CPU too, where the tests hold it against differences and against autograd.

mod attention;
mod block;
mod head;
mod ops;
mod product;

use crate::model::{Architecture, Biases, Dropout, Form, ModelConfig, Norm};

pub(super) use block::{Block, BlockWeights, Kept};
pub(super) use head::{HeadWeights, LOGITS_ELEMS_MAX, head_backward, head_loss};
pub(super) use ops::Ops;

/// Whether blocks of this form are written out here. The others go through autograd on a GPU too: correct, and slower.
pub(super) fn block_is_written_out(config: &ModelConfig, dropout: &Dropout) -> bool {
    let plain = Form {
        biases: config.architecture.form().biases,
        ..Architecture::Llama.form()
    };
    config.architecture.form() == plain
        && config.biases == Biases::default()
        && config.sliding_window.is_none()
        && dropout.is_none()
}

/// Whether a head of this form is.
pub(super) fn head_is_written_out(config: &ModelConfig) -> bool {
    config.architecture.form().norm == Norm::Rms
}
