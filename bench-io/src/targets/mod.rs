//! What is measured: something that moves blocks, many at a time.
//!
//! ```text
//!   load ── start(Flight) ──▶ Target ──▶ engine on a file, or a session of the daemon
//!        ◀── the same Flight ── wait ──
//! ```
//!
//! Two implementations: [`device::DeviceTarget`] is an engine alone, [`daemon::DaemonTarget`] a session with its shared rings and
//! checksums, to which [`gpu::GpuMemory`] adds the way into a GPU. Both keep one buffer an operation in flight, so what they cost beside
//! the drive can be compared.

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::pattern::{Pattern, WrongBlocks};

pub(crate) mod daemon;
pub(crate) mod device;
pub(crate) mod gpu;

/// One direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Read,
    Write,
}

impl Way {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

/// One operation on its way. It comes back as it was.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flight {
    pub(crate) way: Way,
    /// Of the target's files; through a daemon, which places tiles itself, the job's number, so that a pattern names it.
    pub(crate) device: u32,
    /// In blocks of the job's size, from the file's start or the first tile.
    pub(crate) block: u64,
    /// Of the load's streams.
    pub(crate) stream: usize,
    /// When it was started.
    pub(crate) since: Instant,
}

/// Moves blocks.
pub(crate) trait Target {
    /// Starts an operation. There are never more than the depth it was opened for, and never two on one block unless both read.
    ///
    /// # Errors
    /// The target does not take it.
    fn start(&mut self, flight: Flight) -> Result<()>;

    /// Appends what has ended, waiting at most `limit` for the first.
    ///
    /// # Errors
    /// An operation failed, and nothing measured after it would mean anything.
    fn wait(&mut self, limit: Duration, ended: &mut Vec<Flight>) -> Result<()>;

    /// Makes what was written durable, as this target does.
    ///
    /// # Errors
    /// The flush failed.
    fn flush(&mut self) -> Result<()>;

    /// What is written and expected from now on, by a target that was opened to check.
    fn expect(&mut self, pattern: Pattern);

    /// What did not come back as it was written, where the target was opened to check.
    fn wrong(&mut self) -> WrongBlocks;
}
