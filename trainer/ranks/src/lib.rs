//! The processes of a run: which one this is, where they meet, and which of them is gone.
//!
//! ```text
//!   environment ──▶ starter.rs (torchrun, Open MPI; slurm.rs) ▶ World       who am I
//!               └─▶ rendezvous.rs, job_token.rs ──────────────▶ Rendezvous  where we meet, and who may come
//!                                            heartbeat/ ──────▶ Heartbeat   who is gone
//! ```
//!
//! Bytes between ranks are the task of `kernels-torch`, which connects ranks with what this crate says.

#![forbid(unsafe_code)]

mod error;
mod heartbeat;
mod job_token;
mod rendezvous;
mod slurm;
mod starter;
mod timeouts;
mod world;

pub use error::CollectiveError;
pub use heartbeat::{
    BEAT_BYTES, Beat, DirHeartbeatStore, Heartbeat, HeartbeatStore, LastHeartbeat,
};
pub use job_token::{JobToken, TOKEN_VARIABLE};
pub use rendezvous::{DIR_VARIABLE, Rendezvous, key_prefix, listen};
pub use timeouts::Timeouts;
pub use world::World;
