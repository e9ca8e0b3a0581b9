//! Targets of a measurement: they move blocks, many at a time.
//!
//! ```text
//!   load ── start(Flight) ──▶ Target ──▶ engine on a file, or a session of the daemon
//!        ◀── the same Flight ── wait ──
//! ```
//!
//! [`device::DeviceTarget`] is an engine alone, [`daemon::DaemonTarget`] a session with shared rings and checksums, to
//! which [`gpu::GpuMemory`] adds a GPU. Both keep one buffer per operation in flight, so their overheads can be
//! compared.

use std::time::{Duration, Instant};

use anyhow::Result;

pub(crate) mod daemon;
pub(crate) mod device;
pub(crate) mod gpu;

/// Direction of an operation.
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

/// One operation in flight. It is returned unchanged.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flight {
    pub(crate) way: Way,
    /// Index of the target's file; through a daemon, which places tiles itself, the job's number.
    pub(crate) device: u32,
    /// Position in blocks of the job's size, from the start of the file or the first tile.
    pub(crate) block: u64,
    /// Index of the load's stream.
    pub(crate) stream: usize,
    /// Start time.
    pub(crate) since: Instant,
}

/// Moves blocks.
pub(crate) trait Target {
    /// Starts an operation. There are never more than the target's depth, and never two on one block unless both read.
    ///
    /// # Errors
    /// The target refuses the operation.
    fn start(&mut self, flight: Flight) -> Result<()>;

    /// Appends ended operations; waits at most `limit` for the first.
    ///
    /// # Errors
    /// An operation failed, so later figures would mean nothing.
    fn wait(&mut self, limit: Duration, ended: &mut Vec<Flight>) -> Result<()>;

    /// Makes written data durable.
    ///
    /// # Errors
    /// The flush failed.
    fn flush(&mut self) -> Result<()>;
}
