//! Explicit forward and backward of block and head, with autograd only for attention: how a GPU computes.
//!
//! ```text
//!   product.rs    matrix products in the kind of the numbers
//!   products.rs   those of a block: in that kind or in 8 bits
//!   projection.rs one product for weights that are adjacent
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
mod products;
mod projection;

pub(super) use block::{Block, BlockWeights, KeptActivations};
pub(super) use head::{HeadWeights, head_backward, head_loss};
pub(super) use ops::Ops;
pub(super) use products::Products;
