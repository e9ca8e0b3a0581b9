//! Arithmetic on bytes in memory. Nothing here knows files, the steps of a run, or torch (see `kernels/torch`).
//!
//! ```text
//!   grad tile ──▶ reduce::sum_squares ──▶ (norm, clip) ──┐
//!                                                        ▼
//!   param tile, state tile ─────────────────▶ adamw::step_range ─▶ the same tiles, one step later
//! ```
//!
//! `gpu` has the same arithmetic on a GPU, with device memory, streams and copies.
//!
//! A result depends on its arguments alone: the instruction set, the number of threads and the cut into ranges change
//! no bit. `adamw/scalar.rs` and `reduce/scalar.rs` define the bits.
//!
//! `unsafe` is denied except in `cast.rs`, `adamw/avx2.rs`, `adamw/avx512.rs`, `reduce/avx2.rs`, one call in `muon.rs`, and `gpu`.
#![deny(unsafe_code)]
#![warn(missing_docs)]

pub mod adamw;
pub mod attention;
pub mod cast;
pub mod fp8;
#[allow(unsafe_code)]
pub mod gpu;
mod grad_type;
mod instruction_set;
pub mod muon;
pub mod number;
pub mod reduce;

pub use instruction_set::InstructionSet;
