//! ZeRO-3 training with libtorch: the computation of models, the loop, and the ranks that train together.
//!
//! ```text
//!   training-run: settings, plan, data, open ─▶ swapper
//!                                                 │ weights            ▲ gradients
//!   windows of tokens ─▶ train/step.rs: forward, backward, unit by unit (compute) ─▶ metrics.jsonl
//! ```
//!
//! Several processes can train one run together (`ranks`, started by `launch`): each owns a part of the tiles
//! and gathers the rest. `compute` knows nothing of tiles or drives; the swapper moves all state.

#![forbid(unsafe_code)]
// These macros panic when the reader of the output is gone; `outln!` does not.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

pub mod compute;
pub mod launch;
mod ranks;
pub mod torch_support;
pub mod train;
