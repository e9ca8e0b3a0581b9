//! ZeRO-3 training of a Llama-shaped model whose parameters and optimizer state live where the run file says.
//!
//! ```text
//!   RUN.toml ─▶ config ─▶ plan ─▶ store (directories checked, private daemon) ─▶ swapper
//!                                                                              │ weights            ▲ gradients
//!   text files ─▶ data ─▶ windows of tokens ─▶ train/step.rs: forward, backward, unit by unit (compute) ─▶ metrics.jsonl
//! ```
//!
//! Several processes may do this together (`ranks`, started by `launch`): each owns a part of the tiles, gathers the rest.
//! `model` and `compute` know nothing of tiles or drives; everything that moves state is the swapper's.

#![forbid(unsafe_code)]
// They panic when nobody reads: `outln!` does not.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod accelerator;
pub mod compute;
pub mod config;
pub mod data;
pub mod export;
pub mod launch;
pub mod model;
pub mod open;
pub mod plan;
mod ranks;
mod reader;
pub mod remove;
pub mod run_fingerprint;
mod run_record;
mod run_state_reader;
pub mod runs;
pub mod train;
pub mod weights;
