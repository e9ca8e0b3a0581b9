//! Metrics of the daemon: counters and latencies of devices and jobs, and what each job is blocked on.
//!
//! ```text
//!   driver ──started, ended──▶ Ledger ─┐
//!   core ───── state of devices, jobs ─┴─▶ Snapshot ──samples──▶ gRPC call, OpenMetrics text, `offloadd top --json`
//!                                                  └────────────▶ the table of `offloadd top`
//! ```
//!
//! [`samples`] lists every number once, with its names.
//!
//! The owner thread counts, so there is no lock; a snapshot copies. Counters start at 0 with the daemon.
//!
//! Memory: 5 KiB per device and 7 KiB per job, for at most [`ledger::JOBS_MAX`] jobs. An operation allocates nothing.

use std::time::Duration;

use crate::core::{DeviceState, JobState, UserState};

pub mod latencies;
pub mod ledger;
mod message;
pub mod samples;
pub mod slowness;
pub mod text;

pub use latencies::Latencies;
pub use ledger::Ledger;
pub use message::Misunderstood;

/// Completed operations of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes moved; 0 for flushes.
    pub bytes: u64,
    /// Operations with an error or a short transfer.
    pub failed_count: u64,
    /// Retries of operations that the kernel returned unfinished.
    pub retried_count: u64,
    /// Time from handing the first piece to the device until the last piece has ended, including failed operations.
    pub latencies: Latencies,
}

impl Traffic {
    /// Number of completed operations, including failed ones.
    pub fn count(&self) -> u64 {
        self.latencies.count()
    }
}

/// Completed operations on a device, or of a job's tiles.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub read: Traffic,
    pub written: Traffic,
    /// Flushes of a device; empty for a job, because a flush covers all jobs.
    pub flushed: Traffic,
}

/// Metrics of the daemon at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    /// Time since the owner thread started; rates are computed with this clock.
    pub uptime: Duration,
    /// Host memory in use by all sessions.
    pub arena_used_bytes: u64,
    /// Limit of `arena_used_bytes`.
    pub arena_bytes_max: u64,
    /// Sessions that are open or ending.
    pub session_count: u64,
    /// Rate limit of the tiles that are moving, if there is one.
    pub rebalance_bytes_per_s_max: Option<u64>,
    /// Reason why the store is read-only, if it is.
    pub read_only: Option<String>,
    /// In the store's order.
    pub devices: Vec<DeviceView>,
    /// Users of `jobs`, ordered by user ID.
    pub users: Vec<UserState>,
    /// Jobs that the viewer may see, ordered by owner and name.
    pub jobs: Vec<JobView>,
}

/// Metrics of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceView {
    /// State in the core.
    pub state: DeviceState,
    /// Completed operations.
    pub counts: Counts,
    /// Operations on the device and in the daemon's queue for it.
    pub queue_depth: u64,
    /// Maximum of `queue_depth`.
    pub queue_depth_max: u64,
    /// Time with at least one operation on the device.
    pub busy: Duration,
    /// Whether it is much slower than measured.
    pub slow: bool,
    /// A problem that needs an administrator: it hangs, or its file was deleted.
    pub trouble: Option<String>,
    /// Damaged tiles found on it.
    pub damaged_count: u64,
}

impl DeviceView {
    /// Returns a device of which nothing is counted yet.
    pub fn new(state: DeviceState, counts: Counts) -> Self {
        Self {
            state,
            counts,
            queue_depth: 0,
            queue_depth_max: 0,
            busy: Duration::ZERO,
            slow: false,
            trouble: None,
            damaged_count: 0,
        }
    }
}

/// Metrics of a job.
#[derive(Clone, Debug, PartialEq)]
pub struct JobView {
    /// State in the core.
    pub state: JobState,
    /// Completed operations.
    pub counts: Counts,
    /// Time from the last rank's commit call until the generation was durable.
    pub commits: Latencies,
    /// Commit calls that failed.
    pub commit_failed_count: u64,
    /// Damaged tiles found by its sessions.
    pub damaged_count: u64,
}

impl JobView {
    /// Returns a job of which nothing is counted yet.
    pub fn new(state: JobState, counts: Counts) -> Self {
        Self {
            state,
            counts,
            commits: Latencies::default(),
            commit_failed_count: 0,
            damaged_count: 0,
        }
    }
}

/// Bytes that a measurement or a scrub moves without the queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MovedBeside {
    pub read_bytes: u64,
    pub written_bytes: u64,
}
