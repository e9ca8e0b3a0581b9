//! From one life of the daemon to the next: what must outlive it is given to whoever starts daemons (systemd, or `offloadd
//! supervise`), and taken back from it.
//!
//! ```text
//!   old one:  no new work ─▶ I/O in flight ends, its completions stand in the rings ─▶ descriptors, then the state ─▶ exit
//!   keeper:   keeps them; starts the next one with them        (`FDSTORE=1`, then `LISTEN_FDS`)
//!   new one:  recovers the store ─▶ is the state of this store, and of its newest generations? ─▶ the same rings go on
//! ```
//!
//! A process notices nothing: its memory, its rings and the socket that is its life line live on, and what it submits
//! meanwhile waits in the ring. Only its calls are lost, and those it repeats. If no daemon takes a session up, its life line
//! hangs up, as if the daemon had died.
//!
//! The state counts once: whoever takes it up empties an eventfd that lies beside it. So a state that was kept by mistake
//! cannot come back over what was written since.
//!
//! Bytes: seven descriptors a session, 40 bytes a tile written since the last commit: some megabytes, once.

pub mod inherited;
pub mod message;
mod sealed;

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};

pub use inherited::Inherited;
pub use sealed::{Refused, open, seal};

use message::State;

/// Its name where it is kept.
pub const STATE: &str = "offloadd-state";

/// Of the eventfd that can be emptied once.
const CLAIM: &str = "offloadd-claim";

/// What both sides of a session have in their hands.
#[derive(Debug)]
pub struct Descriptors {
    /// Payload.
    pub arena: OwnedFd,
    /// The rings.
    pub ring: OwnedFd,
    /// Rung by the process.
    pub submission_doorbell: OwnedFd,
    /// Rung by the daemon: the end to write.
    pub completion_doorbell: OwnedFd,
    /// And the one to read.
    pub completion_reader: OwnedFd,
    /// Hangs up when the process is gone, and there when no daemon has it.
    pub life_line: OwnedFd,
    /// A pidfd, where the kernel gave one.
    pub process: Option<OwnedFd>,
}

/// Everything that goes to the next life.
#[derive(Debug)]
pub struct HandedOver {
    /// What the store does not say.
    pub state: State,
    /// Of each session of `state`, in its order.
    pub descriptors: Vec<Descriptors>,
}

impl Descriptors {
    fn named(&self, number: u64) -> Vec<(String, BorrowedFd<'_>)> {
        let name = |what: &str| name_of(number, what);
        let mut all = vec![
            (name("arena"), self.arena.as_fd()),
            (name("ring"), self.ring.as_fd()),
            (name("submitted"), self.submission_doorbell.as_fd()),
            (name("completed"), self.completion_doorbell.as_fd()),
            (name("completed-end"), self.completion_reader.as_fd()),
            (name("line"), self.life_line.as_fd()),
        ];
        if let Some(process) = &self.process {
            all.push((name("process"), process.as_fd()));
        }
        all
    }

    fn found(number: u64, given: &mut HashMap<String, OwnedFd>) -> Option<Self> {
        let mut take = |what: &str| given.remove(&name_of(number, what));
        // All of them are taken out, so that those of half a session are closed.
        let (arena, ring) = (take("arena"), take("ring"));
        let (submitted, completed) = (take("submitted"), take("completed"));
        let (end, line, process) = (take("completed-end"), take("line"), take("process"));
        Some(Self {
            arena: arena?,
            ring: ring?,
            submission_doorbell: submitted?,
            completion_doorbell: completed?,
            completion_reader: end?,
            life_line: line?,
            process,
        })
    }
}

impl HandedOver {
    /// Gives everything to `keep`, by name; the state last, so that what is not whole is nothing.
    ///
    /// # Errors
    /// That of the first that could not be kept, or of making the state's memory file.
    pub fn give(
        &self,
        mut keep: impl FnMut(&str, BorrowedFd<'_>) -> std::io::Result<()>,
    ) -> std::io::Result<()> {
        for (session, descriptors) in self.state.sessions.iter().zip(&self.descriptors) {
            for (name, fd) in descriptors.named(session.number) {
                keep(&name, fd)?;
            }
        }
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        keep(CLAIM, eventfd(1, flags)?.as_fd())?;
        keep(STATE, seal(&self.state)?.as_fd())
    }
}

/// What a daemon finds at its start.
#[derive(Debug)]
pub struct Found {
    /// Of the one before.
    pub state: State,
    given: HashMap<String, OwnedFd>,
}

impl Found {
    /// What `given` holds; `Ok(None)` when nothing was handed over.
    ///
    /// # Errors
    /// [`Refused`]: it is not to be used.
    pub fn among(given: Vec<(String, OwnedFd)>) -> Result<Option<Self>, Refused> {
        if given.is_empty() {
            return Ok(None);
        }
        let count = given.len();
        let mut given: HashMap<_, _> = given.into_iter().collect();
        let (state, claim) = (given.remove(STATE), given.remove(CLAIM));
        let (Some(state), Some(claim)) = (state, claim) else {
            return Err(Refused(format!(
                "{count} descriptors were kept without the state that goes with them: a daemon ended while it handed over"
            )));
        };
        let state = open(&state)?;
        // The first reader empties it.
        if !matches!(rustix::io::read(&claim, &mut [0_u8; 8]), Ok(8)) {
            return Err(Refused(
                "it was taken up before: another daemon has gone on from there".into(),
            ));
        }
        Ok(Some(Self { state, given }))
    }

    /// The descriptors of one of the state's sessions, if they are all there.
    pub fn descriptors(&mut self, number: u64) -> Option<Descriptors> {
        Descriptors::found(number, &mut self.given)
    }
}

/// systemd takes no colon, and 255 bytes.
fn name_of(number: u64, what: &str) -> String {
    format!("offloadd-{number}-{what}")
}

/// Whether these are descriptors of ours.
pub fn is_ours(name: &str) -> bool {
    name.starts_with("offloadd-")
}
