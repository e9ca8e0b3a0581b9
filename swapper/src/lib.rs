//! Decides which tile is where and when it moves: prefetch, update, evict, commit.
//!
//! ```text
//!   trainer thread        owner thread                              update workers
//!   ──────────────        ────────────                              ──────────────
//!   Swapper (front) ────▶ driver ── events ──▶ core                 Optimizer
//!     gather, scatter,      ▲   ◀── actions ───  pure: decides        one tile at a time, so that
//!     finish_step           │                                         I/O goes on meanwhile
//!          ◀── slots ───────┼─────── slots ──────────────────────────▶
//!                           ▼
//!                     client session ══▶ offloadd ══▶ devices          or host memory alone
//! ```
//!
//! - [`Swapper`] is what a trainer holds: blocking calls, typed errors.
//! - [`schedule`] has a step's program as data, updates immediate or deferred; [`mod@bound`] computes the bytes and the
//!   shortest time of a step.
//! - [`core`] is a pure state machine, run under thousands of seeded interleavings in `tests/simulation/`.
//! - Units are numbers with element counts: nothing here knows models, optimizers or accelerators.
//!
//! Bytes are lent by passing the slot itself over a channel and back, so a slot has one owner at any time: the driver,
//! the trainer, the worker or the kernel.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod backing;
pub mod bound;
pub mod core;
mod driver;
mod error;
mod inbox;
mod layout;
mod lease;
mod nodes;
mod op;
mod open;
mod optimizer;
mod owner;
pub mod schedule;
mod scratch;
mod settings;
mod span;
mod stall;
mod swapper;
mod worker;

pub use bound::{Bound, StepBytes, StepRates, Term, Wall, bound, bound_s, staging_needed_bytes};
pub use error::SwapperError;
pub use layout::{
    ByKind, Kind, Layout, OtherState, TILE_ELEMS_MAX, TILE_ELEMS_STEP, TableEntry, TileBytes,
    TileRange, UnitShape, choose_tile_elems, resident, shard_elems, shard_of,
};
pub use nodes::{Exchange, Nodes};
pub use offload_client::nodes::TO_CHECKPOINT;
pub use offload_client::{
    ArenaMemory, ClientError, Daemon, Durability, ENGINES, FaultKind, IODEPTH_DEFAULT, IODEPTH_MAX,
    IODEPTH_MIN, JobSummary, Slot, TileError, private,
};
pub use op::Op;
pub use open::job_layout;
pub use optimizer::{Optimizer, TileUpdate, UninitTile};
pub use schedule::{Schedule, StepProgram};
pub use scratch::{SCRATCH_SLOTS_MIN, Scratch, ScratchSettings};
pub use settings::{
    Backing, DeviceRates, MemoryPlan, OpenReport, STAGING_MIN, Staging, StepIo, StoreSettings,
    SwapperSettings,
};
pub use span::{SPANS_MAX, Span, SpanKind, Spans};
pub use swapper::{Canceller, Part, PartMut, Revision, Swapper, TileVisitor};
