//! The driver's part of a session: memory, rings, doorbells and life line.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use offload_api::handoff::OfferedDescriptors;
use offload_api::ids::SessionToken;
use offload_api::ring::RingError;
use offload_api::ring::entry::{Cqe, Sqe};

use super::session_memory::SessionMemory;
use crate::core::Peer;
use crate::metrics::ledger::JobPlace;

/// A session from `MakeArena` to `DropArena`.
#[derive(Debug)]
pub(super) struct DriverSession {
    pub(super) token: SessionToken,
    pub(super) peer: Peer,
    /// Index of its job in the ledger.
    pub(super) job: JobPlace,
    pub(super) state: SessionState,
    /// Whether completions were put since the doorbell was last rung.
    pub(super) unrung: bool,
    /// Fields of its log lines.
    pub(super) span: tracing::Span,
}

#[derive(Debug)]
pub(super) enum SessionState {
    /// The keeper is making its memory.
    Making,
    /// The core dropped it while its memory was being made.
    Dropped,
    /// Its process has not fetched the descriptors yet.
    Offered {
        made: Box<SessionMemory>,
        deadline: Instant,
    },
    /// Its process has the descriptors.
    Attached {
        made: Box<SessionMemory>,
        life_line: OwnedFd,
        /// Pidfd, if the kernel provides one: reports the end of the process even if a child holds the life line.
        process: Option<OwnedFd>,
    },
    /// Its process has ended or was evicted; its I/O has not ended.
    Gone { made: Box<SessionMemory> },
}

impl DriverSession {
    /// Memory and rings, once they exist.
    pub(super) fn made(&mut self) -> Option<&mut SessionMemory> {
        match &mut self.state {
            SessionState::Making | SessionState::Dropped => None,
            SessionState::Offered { made, .. }
            | SessionState::Attached { made, .. }
            | SessionState::Gone { made } => Some(made),
        }
    }

    /// Copies up to `entries_max` submissions. An error means that the process broke the protocol.
    pub(super) fn take_submissions(
        &mut self,
        entries_max: usize,
        entries: &mut Vec<Sqe>,
    ) -> Result<(), RingError> {
        // Nothing can be written before the process attaches, and nothing is taken after it has gone.
        let SessionState::Attached { made, .. } = &mut self.state else {
            return Ok(());
        };
        while entries.len() < entries_max {
            let Some(entry) = made.rings.pop()? else {
                break;
            };
            entries.push(entry);
        }
        Ok(())
    }

    /// Puts a completion into the ring. An error means that the process does not reap completions.
    pub(super) fn put(&mut self, entry: &Cqe) -> Result<(), RingError> {
        let SessionState::Attached { made, .. } = &mut self.state else {
            return Ok(());
        };
        made.rings.put(entry)?;
        self.unrung = true;
        Ok(())
    }

    /// Wakes the process if completions were put since the last call.
    pub(super) fn ring(&mut self) {
        if !std::mem::take(&mut self.unrung) {
            return;
        }
        let SessionState::Attached { made, .. } = &mut self.state else {
            return;
        };
        // One unread byte is enough. Neither call blocks: the write end is not shared with the process.
        let waiting = rustix::io::ioctl_fionread(&made.completion_reader);
        if !matches!(waiting, Ok(1..)) {
            let _ = rustix::io::write(&made.completion_doorbell, &[1]);
        }
    }

    /// Descriptors for the process.
    pub(super) fn offered(made: &SessionMemory) -> OfferedDescriptors<'_> {
        OfferedDescriptors {
            arena: made.arena.as_fd(),
            ring: made.ring_fd.as_fd(),
            submission_doorbell: made.submission_doorbell.as_fd(),
            completion_doorbell: made.completion_reader.as_fd(),
        }
    }
}
