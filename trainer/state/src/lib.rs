//! State of a training program outside its computation: tiles and their updates, checkpoints, the run
//! directory and the store. This crate knows neither models nor tensors, so any program that computes
//! gradients can use it.
//!
//! ```text
//!   trainer (libtorch) ──▶ backend ──▶ swapper ──▶ daemon or host memory
//!                             │  update: steps over tiles     checkpoint_tap: copies of updated tiles
//!                             └─ one GPU's memory
//!   checkpointer  checkpoints during training              ranks    operations of all processes together
//!   scratch_copies, tile_stash  tensors that wait on devices, between memory and scratch tiles
//!   store    device files and the private daemon             run       run.json, checkpoints, the committed state
//!   metrics  metrics.jsonl   monitor  TensorBoard and CSV    trace     a timeline of some steps
//!   learning_rate, overflow  pure functions of the step and of what was committed with it
//!   plan     choices from bytes and rates            stage    what ranks divide among themselves
//! ```
//!
//! Units are numbers with element counts, as in `swapper`; names and shapes of parameters are the caller's.

#![forbid(unsafe_code)]

pub mod backend;
pub mod checkpoint_tap;
pub mod checkpointer;
pub mod fingerprint;
pub mod learning_rate;

pub mod metrics;
pub mod monitor;
pub mod overflow;
pub mod plan;
pub mod ranks;
pub mod run;
pub mod scratch_copies;
pub mod stage;
pub mod store;
pub mod tile_stash;
pub mod trace;
pub mod update;
