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

pub(super) use block::{Block, BlockWeights, Kept};
pub(super) use head::{HeadWeights, LOGITS_ELEMS_MAX, head_backward, head_loss};
pub(super) use ops::Ops;
