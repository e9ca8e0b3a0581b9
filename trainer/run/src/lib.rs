//! What a run is: its settings, model files and data, the plan, opening it, its weights and checkpoints. No tensors: libtorch is not needed.
//!
//! ```text
//!   RUN.toml ─▶ config ─▶ plan ─▶ open (directories checked, private daemon) ─▶ swapper
//!                                   │
//!   text files ─▶ data ─▶ windows of tokens ─▶ `trainer-torch` trains
//! ```
//!
//! `trainer` has a command for everything here; `trainer-torch` adds the computation of models.

#![forbid(unsafe_code)]
// These macros panic when the reader of the output is gone; `outln!` does not.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod accelerator;
pub mod computation;
pub mod config;
pub mod data;
pub mod dry_run;
pub mod evaluations;
pub mod export;
pub mod model;
pub mod open;
pub mod plan;
mod reader;
pub mod relocate;
pub mod remove;
pub mod run_fingerprint;
mod run_record;
mod run_state_reader;
pub mod runs;
pub mod weights;

pub use accelerator::{AcceleratorError, AskTorch, TorchSupport, without_torch};
