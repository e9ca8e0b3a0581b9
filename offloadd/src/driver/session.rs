//! One process as the driver sees it: its memory, rings, doorbells and life line.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use offload_api::handoff::Offered;
use offload_api::ids::SessionToken;
use offload_api::ring::RingError;
use offload_api::ring::entry::{Cqe, Sqe};

use super::keeper::Made;
use crate::core::Peer;
use crate::metrics::ledger::JobPlace;

/// A session from `MakeArena` to `DropArena`.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) token: SessionToken,
    pub(super) peer: Peer,
    /// Where it is counted.
    pub(super) job: JobPlace,
    pub(super) state: State,
    /// Completions were put since the doorbell was last rung.
    pub(super) unrung: bool,
}

/// How far a session has come.
#[derive(Debug)]
pub(super) enum State {
    /// The keeper makes its memory.
    Making,
    /// The core dropped it meanwhile.
    Dropped,
    /// Its process has not come for the descriptors yet.
    Offered { made: Box<Made>, deadline: Instant },
    /// Both sides have them.
    Attached {
        made: Box<Made>,
        life_line: OwnedFd,
        /// Of the process, where the kernel gives one: it also ends when a child still holds the life line.
        process: Option<OwnedFd>,
    },
    /// Its process is gone or thrown out; its I/O has not ended.
    Gone { made: Box<Made> },
}

impl Session {
    /// What both sides share, once it exists.
    pub(super) fn made(&mut self) -> Option<&mut Made> {
        match &mut self.state {
            State::Making | State::Dropped => None,
            State::Offered { made, .. } | State::Attached { made, .. } | State::Gone { made } => {
                Some(made)
            }
        }
    }

    /// Up to `entries_max` submissions, copied out. An error: the process broke the protocol.
    pub(super) fn take(
        &mut self,
        entries_max: usize,
        entries: &mut Vec<Sqe>,
    ) -> Result<(), RingError> {
        // Before it attached nobody can have written; after it is gone nobody wants to know.
        let State::Attached { made, .. } = &mut self.state else {
            return Ok(());
        };
        while entries.len() < entries_max {
            let Some(entry) = made.rings.take()? else {
                break;
            };
            entries.push(entry);
        }
        Ok(())
    }

    /// Puts a completion in. An error: the process does not reap what it asked for.
    pub(super) fn put(&mut self, entry: &Cqe) -> Result<(), RingError> {
        let State::Attached { made, .. } = &mut self.state else {
            return Ok(());
        };
        made.rings.put(entry)?;
        self.unrung = true;
        Ok(())
    }

    /// Wakes the process, once for all completions put since the last time.
    pub(super) fn ring(&mut self) {
        if !std::mem::take(&mut self.unrung) {
            return;
        }
        let State::Attached { made, .. } = &mut self.state else {
            return;
        };
        // A byte that waits wakes it as well as two. Neither call blocks: the write end is ours alone.
        let waiting = rustix::io::ioctl_fionread(&made.completion_reader);
        if !matches!(waiting, Ok(1..)) {
            let _ = rustix::io::write(&made.completion_doorbell, &[1]);
        }
    }

    /// What the process gets.
    pub(super) fn offered(made: &Made) -> Offered<'_> {
        Offered {
            arena: made.arena.as_fd(),
            ring: made.ring_fd.as_fd(),
            submission_doorbell: made.submission_doorbell.as_fd(),
            completion_doorbell: made.completion_reader.as_fd(),
        }
    }
}
