//! Collective operations between processes, and detection of dead ranks.
//!
//! ```text
//!   environment ──▶ World (who am I)  ──┐
//!                   Rendezvous (where) ─┴─▶ Comm::connect ──▶ Comm ── all_gather, reduce_scatter, ... ──▶ Pending ──▶ buffer
//!                                                              │                                          │
//!                                            Heartbeat of every rank, each half second ───────────────────┘ who is gone?
//! ```
//!
//! [`TensorExchange`] connects neighbouring ranks in groups of their own, which exchange parts of tensors.
//!
//! Bytes between CPUs go through libtorch's Gloo, bytes between GPUs through NCCL or RCCL, opened at run time.
//!
//! Guarantees:
//! - No call waits forever. When a rank dies, is stopped or gives up, every other rank's call returns an error that names
//!   it, within seconds; when ranks do not answer for another reason, the error names those that are behind.
//! - Sums are added in rank order, so their bits depend on the values alone, never on timing.
//! - Memory that an operation may still touch is never freed: a [`Pending`] owns its buffer and returns or leaks it.

mod comm;
mod connect;
mod exchange;
mod gloo;
mod launchers;
mod link;
mod nccl;
mod pending;
mod sum;
mod tcp_heartbeat_store;

pub use comm::Comm;
pub use exchange::{ExchangeError, TensorExchange};
pub use launchers::LauncherStore;
pub use nccl::{GpuComm, nccl_version};
pub use pending::Pending;
