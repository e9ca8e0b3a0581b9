//! Several processes as one: gathering, summing and waiting for each other, and noticing when one of them is gone.
//!
//! ```text
//!   environment ──▶ World (who am I)  ──┐
//!                   Rendezvous (where) ─┴─▶ Comm::connect ──▶ Comm ── all_gather, reduce_scatter, ... ──▶ Pending ──▶ buffer
//!                                                              │                                          │
//!                                            Pulse: every rank's heartbeat, each half second ─────────────┘ who is gone?
//! ```
//!
//! Bytes between CPUs go through Gloo as libtorch has it, between GPUs through NCCL or RCCL, opened at run time.
//!
//! Promises:
//! - No call waits for ever. When a rank dies, is stopped or gives up, every other rank's call returns an error that names it, within
//!   seconds; when ranks do not answer for another reason, the error names those that have not come as far.
//! - Sums are taken in the order of the ranks, so their bits depend on the values alone, never on timing.
//! - Memory that an operation may still touch is never given back: a [`Pending`] owns its buffer and returns it, or leaks it.

mod comm;
mod connect;
mod error;
mod gloo;
mod heartbeat;
mod link;
mod nccl;
mod pending;
mod rendezvous;
mod sum;
mod timeouts;
mod world;

pub use comm::Comm;
pub use error::CollectiveError;
pub use nccl::GpuComm;
pub use pending::Pending;
pub use rendezvous::{DIR_VARIABLE, Rendezvous};
pub use timeouts::Timeouts;
pub use world::World;
