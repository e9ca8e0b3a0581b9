//! Arithmetic on memory: everything here takes bytes and gives bytes, and knows nothing of files or steps of a run, nor of torch
//! (`kernels/torch` does).
//!
//! ```text
//!   grad tile ──▶ reduce::sum_squares ──▶ (norm, clip) ──┐
//!                                                        ▼
//!   param tile, state tile ─────────────────▶ adamw::step_tile ──▶ the same tiles, one step later
//! ```
//!
//! `gpu` has the same arithmetic on a GPU, with its memory, streams and copies.
//!
//! Promise: a result is a function of its arguments alone. The instruction set, the number of threads and where a range is cut
//! change no bit of it. The plain definitions in `adamw/scalar.rs` and `reduce/scalar.rs` say what the bits are.
//!
//! `unsafe` is denied but in `cast.rs`, `adamw/avx2.rs`, `adamw/avx512.rs`, `reduce/avx2.rs` and `gpu`.
#![deny(unsafe_code)]

pub mod adamw;
pub mod cast;
#[allow(unsafe_code)]
pub mod gpu;
mod instruction_set;
pub mod number;
pub mod reduce;

pub use instruction_set::InstructionSet;
