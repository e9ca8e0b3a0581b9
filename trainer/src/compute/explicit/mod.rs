//! Forward and backward of block and head written out, without autograd but around attention: how a GPU computes.
//!
//! ```text
//!   product.rs, projection.rs    matrix products, one for weights that lie side by side
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
mod projection;

use crate::model::{Dropout, Form, Mlp, ModelConfig, Norm, Positions};

pub(super) use attention::normed_elem_bytes;
pub(super) use block::{Block, BlockWeights, Kept};
pub(super) use head::{HeadWeights, LOGITS_ELEMS_MAX, head_backward, head_loss};
pub(super) use ops::Ops;

/// Whether blocks of this form are written out here: those of Llama, with any biases, and with norms of query and key heads. The
/// others go through autograd on a GPU too, which is correct and slower, and keeps nothing of a block: GPT-2, a window shorter
/// than `seq_len`, elements left out at random.
pub(super) fn block_is_written_out(
    config: &ModelConfig,
    dropout: &Dropout,
    seq_len: usize,
) -> bool {
    let Form {
        norm,
        positions,
        mlp,
        ..
    } = config.architecture.form();
    let hides = config.sliding_window.is_some_and(|w| w.tokens < seq_len);
    (norm, positions, mlp) == (Norm::Rms, Positions::Rotary, Mlp::GatedSilu)
        && !hides
        && dropout.is_none()
}

/// Whether a head of this form is.
pub(super) fn head_is_written_out(config: &ModelConfig) -> bool {
    config.architecture.form().norm == Norm::Rms
}
