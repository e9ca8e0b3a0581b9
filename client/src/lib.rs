//! The client side of `offloadd`: a session with its slots, moving tiles between slots and devices, and commits.
//!
//! ```text
//!   PrivateDaemon::start ──▶ child `offloadd serve --private`         only when no socket was configured
//!
//!   Session::open ── gRPC ──▶ version, epoch, token ── descriptors ──▶ arena mapped, rings mapped
//!
//!   take_slot ─▶ Slot ── swap_in / swap_out ─▶ Ticket      the slot is the kernel's
//!                 ▲                              │
//!                 └───── EndedOperation ◀─ poll ◀┘         and comes back, checked, or with a TileError
//!
//!   begin_commit ─▶ poll_commit                            a generation and its blob are durable
//! ```
//!
//! Promises: bytes that do not match their checksum are never handed out. A slot has one owner: it is not lent twice, and its
//! memory is not freed while the kernel may write to it. A call waits until its deadline, plus up to three minutes if a daemon
//! restarts. Every wait ends with [`ClientError::DaemonGone`] when the daemon dies; a session that the next daemon adopts
//! continues. Callers see no gRPC, no descriptors and no shared memory except their own slots.
//!
//! One thread drives a session; [`Waker`] wakes it from other threads. `unsafe` stands in `mapping.rs` alone.
//!
//! ```no_run
//! # use offload_client::*;
//! # use std::time::Duration;
//! # fn train(
//! #     settings: SessionSettings,
//! #     definition: JobDefinition,
//! # ) -> Result<(), Box<dyn std::error::Error>> {
//! let mut session = Session::open(settings)?;
//! let newest = match &session.info().job {
//!     Some(job) => job.generations.last().map_or(Generation(0), |g| g.generation),
//!     None => Generation(0),
//! };
//! session.define_tiles(definition)?;
//! session.resume(newest)?;
//!
//! let mut slot = session.take_slot(0).ok_or("all slots are in use")?;
//! slot.as_mut_slice().fill(7);
//! session.swap_out(TileIndex(0), slot).map_err(|(_slot, error)| error)?;
//!
//! let mut done = Vec::new();
//! while done.is_empty() {
//!     session.wait(Duration::from_secs(1))?;
//!     session.poll(&mut done)?;
//! }
//! for ended in done {
//!     ended.result?;
//! }
//! session.commit(b"what this rank must remember".to_vec())?;
//! # Ok(())
//! # }
//! ```

#![deny(unsafe_code)]
#![warn(missing_docs)]

mod checksum_pool;
mod control;
mod convert;
mod daemon;
mod error;
mod in_flight;
#[allow(unsafe_code)]
mod mapping;
mod memory;
pub mod nodes;
pub mod private;
mod session;
mod signal;
mod slot;
mod types;
mod wait_timer;

pub use daemon::{Daemon, DaemonInfo, JobSummary};
pub use error::{ClientError, TileError};
pub use in_flight::{EndedOperation, Ticket, TransferStats};
pub use mapping::ArenaMemory;
pub use memory::{MemoryArena, arena_bytes};
pub use session::{CommittedGeneration, RESTART_WAIT, Session};
pub use signal::Waker;
pub use slot::Slot;
pub use types::{
    DeviceInfo, GenerationRecord, JobDefinition, JobRecord, RankBlob, SessionInfo, SessionSettings,
};
pub use wait_timer::WaitTimer;

pub use offload_api::checksum::checksum;
pub use offload_api::fault::{Fault, FaultKind};
pub use offload_api::geometry::SlotClass;
pub use offload_api::ids::{DeviceNumber, Epoch, Generation, Rank, SlotIndex, TileIndex};
pub use offload_api::ring::entry::Verb;
pub use offload_api::tile::{Durability, Tile, TileKind};
pub use offload_api::{
    BLOB_BYTES_MAX, BLOCK_BYTES, ENGINES, IODEPTH_DEFAULT, IODEPTH_MAX, IODEPTH_MIN,
    LAYOUT_BYTES_MAX, TILE_BYTES_MAX, TILES_MAX,
};
