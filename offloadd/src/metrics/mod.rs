//! What a person can see of the daemon: counts and latencies of devices and jobs, and what each job waits for.
//!
//! ```text
//!   driver ──started, ended──▶ Ledger ─┐
//!   core ───── who is there ───────────┴─▶ Snapshot ──▶ gRPC call, Prometheus text, `offloadd top`
//! ```
//!
//! The owner thread counts, so that there is no lock; a look copies. All of it begins at 0 when the daemon starts, but for
//! wear, which is kept in the store.
//!
//! Memory: 5 KiB a device, 7 KiB a job, at most [`ledger::JOBS_MAX`] of them. Nothing is allocated for an operation.

use std::time::Duration;

use crate::core::{DeviceState, JobState};

pub mod endurance;
pub mod latencies;
pub mod ledger;
mod message;
pub mod slowness;
pub mod text;

pub use endurance::{Endurance, Ratings, WearCount};
pub use latencies::Latencies;
pub use ledger::Ledger;
pub use message::Misunderstood;

/// Operations of one kind that have ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// That moved bytes; 0 of flushes.
    pub bytes: u64,
    /// Errors and short transfers.
    pub failed_count: u64,
    /// Times the kernel put one back and it was tried again.
    pub retried_count: u64,
    /// Of all, failed ones too: from when its first piece goes to the device until its last one has ended.
    pub latencies: Latencies,
}

impl Traffic {
    /// How many have ended, well or not.
    pub fn count(&self) -> u64 {
        self.latencies.count()
    }
}

/// Everything that has ended on a device, or of a job's tiles.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Device to memory.
    pub read: Traffic,
    /// Memory to device.
    pub written: Traffic,
    /// Of a device: nothing of a job's flushes is its alone.
    pub flushed: Traffic,
}

/// The daemon at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    /// Since the owner thread started: the clock that rates are computed with.
    pub uptime: Duration,
    /// Host memory of all sessions.
    pub arena_used_bytes: u64,
    /// At most.
    pub arena_bytes_max: u64,
    /// Sessions that are open or end.
    pub session_count: u64,
    /// While tiles move under a ceiling: what may be copied.
    pub rebalance_bytes_per_s_max: Option<u64>,
    /// Why nothing is written in this life of the daemon, if nothing is.
    pub read_only: Option<String>,
    /// In the store's order.
    pub devices: Vec<DeviceView>,
    /// Those that may be seen, by owner and name.
    pub jobs: Vec<JobView>,
}

/// A device at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceView {
    /// What the core knows.
    pub state: DeviceState,
    /// All that has ended.
    pub counts: Counts,
    /// Operations it has, and those that wait in the daemon until it has room.
    pub queue_depth: u64,
    /// Most there ever were.
    pub queue_depth_max: u64,
    /// How long it had something to read or write.
    pub busy: Duration,
    /// It is much slower than it was measured.
    pub slow: bool,
    /// Why an administrator must look at it now: it hangs, or its file was deleted.
    pub trouble: Option<String>,
    /// Ever written to it since it was formatted.
    pub worn_bytes: u64,
    /// What it is rated for, if the settings say.
    pub rated_bytes: Option<u64>,
    /// It is of the store and the settings do not list it: it came since they were read, or they lack it.
    pub unlisted: bool,
    /// Tiles read from it that were not what was written, as processes found.
    pub damaged_count: u64,
}

/// A job at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct JobView {
    /// What the core knows.
    pub state: JobState,
    /// All that has ended.
    pub counts: Counts,
    /// From the last rank's call until a generation was durable.
    pub commits: Latencies,
    /// Calls that were answered with a fault.
    pub commit_failed_count: u64,
    /// Ever written by it since it was defined, to devices that left too.
    pub worn_bytes: u64,
    /// The same by device, of those that are of the store and to which it wrote.
    pub worn: Vec<DeviceWear>,
    /// Tiles that were not what was written, as its processes found.
    pub damaged_count: u64,
}

/// Bytes that somebody moves to and from a device beside the queue: who measures it, who looks for damage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MovedBeside {
    /// Device to memory.
    pub read_bytes: u64,
    /// Memory to device.
    pub written_bytes: u64,
}

/// What a job has ever written to one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceWear {
    /// The device's, in the store.
    pub number: u32,
    /// In all lives of the daemon.
    pub bytes: u64,
}
