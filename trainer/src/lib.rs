//! ZeRO-3 training of language models whose parameters and optimizer state are kept in GPU memory, host
//! memory or on NVMe drives.
//!
//! ```text
//!   RUN.toml ─▶ config ─▶ plan ─▶ store (directories checked, private daemon) ─▶ swapper
//!                                                                              │ weights            ▲ gradients
//!   text files ─▶ data ─▶ windows of tokens ─▶ train/step.rs: forward, backward, unit by unit (compute) ─▶ metrics.jsonl
//! ```
//!
//! Several processes can train one run together (`ranks`, started by `launch`): each owns a part of the tiles
//! and gathers the rest. `model` and `compute` know nothing of tiles or drives; the swapper moves all state.

#![forbid(unsafe_code)]
// These macros panic when the reader of the output is gone; `outln!` does not.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod accelerator;
pub mod compute;
pub mod config;
pub mod data;
mod evaluations;
pub mod export;
pub mod launch;
pub mod model;
pub mod open;
pub mod plan;
mod ranks;
mod reader;
pub mod relocate;
pub mod remove;
pub mod run_fingerprint;
mod run_record;
mod run_state_reader;
pub mod runs;
pub mod train;
pub mod weights;
