//! Hands sessions over from one incarnation of the daemon to the next. The state that must outlive a daemon is given to the
//! program that starts daemons (systemd or `offloadd supervise`), and the next daemon takes it back.
//!
//! ```text
//!   old daemon:  no new work ─▶ I/O in flight ends, its completions are in the rings ─▶ descriptors, then the state ─▶ exit
//!   systemd, or offloadd supervise:  keeps them; starts the next daemon with them        (`FDSTORE=1`, then `LISTEN_FDS`)
//!   new daemon:  recovers the store ─▶ does the state fit: this store, its last incarnation, its newest generations?
//!                                   ─▶ the rings continue
//! ```
//!
//! A process notices nothing: its memory, its rings and its life line persist, and operations that it submits meanwhile wait in
//! the ring. Only calls are lost, and the process repeats those. If no daemon adopts a session, its life line hangs up, as if
//! the daemon had died.
//!
//! The state is used once: the daemon that adopts it empties an eventfd that was handed over with it, after the last step that
//! can fail. Therefore a state that is kept by mistake cannot undo what that daemon wrote. Nor can it undo what another daemon
//! wrote: each incarnation writes the store's catalog before it serves, and the state names the last sequence it knows. The
//! names of descriptors contain the number of the hand-over, so that leftovers of another hand-over are not mixed in.
//!
//! The state has tiles written since the last commit, and scratch tiles, because a restart cannot wait until there are none:
//!
//! - A service manager that asks a daemon to end cannot be refused: it kills the daemon when the time for a stop has passed.
//! - A job commits when its process asks. A run with half of its state in host memory does so every 20 steps of many seconds, one
//!   with `commit_every = 0` at its end. A job that were held at its commit would wait for all others.
//! - Scratch tiles belong to no generation. Gradients of the next step are written there while a commit is in progress, and no
//!   record has their extents and checksums.
//!
//! Size: seven descriptors a session, and 40 bytes for each tile written since the last commit, some megabytes in all. The
//! names of all descriptors go into one environment variable of at most 128 KiB; this and the unit's limit bound the sessions.

pub mod inherited;
pub mod message;
mod sealed;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::rand::{GetRandomFlags, getrandom};

pub use inherited::InheritedDescriptors;
pub use sealed::{HandoverRefusal, open, seal};

use message::HandoverState;

/// Start of the names of all descriptors.
const PREFIX: &str = "offloadd-";

/// End of the name of the state.
const STATE: &str = "state";

/// Name of the eventfd that can be emptied once.
const CLAIM: &str = "claim";

/// Descriptors kept for one daemon, as in the unit's `FileDescriptorStoreMax`.
pub const DESCRIPTORS_MAX: usize = 4096;

/// Descriptors of one session.
const DESCRIPTORS_A_SESSION: usize = 7;

/// Sessions that can be handed over, with room for the state and its claim.
pub const SESSIONS_MAX: usize = (DESCRIPTORS_MAX - 2) / DESCRIPTORS_A_SESSION;

/// Descriptors of both sides of a session.
#[derive(Debug)]
pub struct Descriptors {
    /// The arena's memory file.
    pub arena: OwnedFd,
    /// The memory file of the rings.
    pub ring: OwnedFd,
    /// Eventfd that the process signals.
    pub submission_doorbell: OwnedFd,
    /// Writing end of the pipe that the daemon signals.
    pub completion_doorbell: OwnedFd,
    /// Reading end of that pipe.
    pub completion_reader: OwnedFd,
    /// Hangs up at each end when the other is gone.
    pub life_line: OwnedFd,
    /// A pidfd, if the kernel gave one.
    pub process: Option<OwnedFd>,
}

/// Everything that is handed over.
#[derive(Debug)]
pub struct HandedOver {
    /// State that the store does not contain.
    pub state: HandoverState,
    /// Descriptors of each session of `state`, in its order.
    pub descriptors: Vec<Descriptors>,
}

impl Descriptors {
    fn named(&self, handover: u32, number: u64) -> Vec<(String, BorrowedFd<'_>)> {
        let name = |what: &str| name_of(handover, &session_part(number, what));
        let mut all = vec![
            (name("arena"), self.arena.as_fd()),
            (name("ring"), self.ring.as_fd()),
            (name("bell"), self.submission_doorbell.as_fd()),
            (name("done"), self.completion_doorbell.as_fd()),
            (name("read"), self.completion_reader.as_fd()),
            (name("line"), self.life_line.as_fd()),
        ];
        if let Some(process) = &self.process {
            all.push((name("pid"), process.as_fd()));
        }
        all
    }

    fn found(number: u64, given: &mut HashMap<String, OwnedFd>) -> Option<Self> {
        let mut take = |what: &str| given.remove(&session_part(number, what));
        // All are taken out, so that those of an incomplete session are closed.
        let (arena, ring) = (take("arena"), take("ring"));
        let (submitted, completed) = (take("bell"), take("done"));
        let (end, line, process) = (take("read"), take("line"), take("pid"));
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
    /// Prepares a hand-over of `state` and the descriptors of its sessions, in its order. Leaves out whole jobs when there are
    /// more sessions than can be kept.
    ///
    /// # Errors
    /// There are no random bytes for its number.
    pub fn new(mut state: HandoverState, descriptors: Vec<Descriptors>) -> io::Result<Self> {
        let mut random = [0; 4];
        getrandom(&mut random, GetRandomFlags::empty())?;
        state.handover = u32::from_le_bytes(random);
        let stay = jobs_that_fit(&state, SESSIONS_MAX);
        let all = std::mem::take(&mut state.sessions).into_iter();
        let before = all.len();
        let (mut sessions, descriptors): (Vec<_>, Vec<_>) = (all.zip(descriptors))
            .filter(|(session, _)| stay[&session.job])
            .unzip();
        for (number, session) in sessions.iter_mut().enumerate() {
            session.number = number as u64;
        }
        let left_out = before - sessions.len();
        if left_out > 0 {
            tracing::warn!(
                "{left_out} of {before} sessions end: {SESSIONS_MAX} can be kept for the next daemon"
            );
        }
        state.sessions = sessions;
        Ok(Self { state, descriptors })
    }

    /// Gives everything to `keep`, by name. The state comes last, so that an incomplete hand-over has none.
    ///
    /// # Errors
    /// Fails if a descriptor cannot be kept or the state's memory file cannot be created.
    pub fn give(
        &self,
        mut keep: impl FnMut(&str, BorrowedFd<'_>) -> io::Result<()>,
    ) -> io::Result<()> {
        let handover = self.state.handover;
        for (session, descriptors) in self.state.sessions.iter().zip(&self.descriptors) {
            for (name, fd) in descriptors.named(handover, session.number) {
                keep(&name, fd)?;
            }
        }
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let claim = eventfd(1, flags)?;
        keep(&name_of(handover, CLAIM), claim.as_fd())?;
        keep(&name_of(handover, STATE), seal(&self.state)?.as_fd())
    }
}

/// Whether the sessions of each job, by index, are among `sessions_max`.
fn jobs_that_fit(state: &HandoverState, sessions_max: usize) -> BTreeMap<u32, bool> {
    let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
    for session in &state.sessions {
        *counts.entry(session.job).or_default() += 1;
    }
    let mut room = sessions_max;
    let judged = counts.into_iter().map(|(job, count)| {
        let fits = count <= room;
        room -= if fits { count } else { 0 };
        (job, fits)
    });
    judged.collect()
}

/// The right to adopt a state.
#[derive(Debug)]
pub struct Claim(OwnedFd);

impl Claim {
    /// Whether nobody has used it.
    fn is_unspent(&self) -> bool {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        matches!(poll(&mut fds, Some(&Timespec::default())), Ok(1))
    }

    /// Uses it. Returns false when somebody else was first.
    pub fn spend(self) -> bool {
        matches!(rustix::io::read(&self.0, &mut [0_u8; 8]), Ok(8))
    }
}

/// A hand-over found by a daemon at its start.
#[derive(Debug)]
pub struct FoundHandover {
    /// State of the previous daemon.
    pub state: HandoverState,
    /// To be spent before the state is used.
    pub claim: Claim,
    /// Descriptors of this hand-over, by the ends of their names.
    given: HashMap<String, OwnedFd>,
}

/// Whether descriptors of a session are among `given`.
pub fn has_sessions(given: &InheritedDescriptors) -> bool {
    let parts = given.iter().filter_map(|(name, _)| parts_of(name));
    parts
        .into_iter()
        .any(|(_, what)| what != STATE && what != CLAIM)
}

impl FoundHandover {
    /// Finds the hand-over in `given`; `Ok(None)` if there is none.
    ///
    /// # Errors
    /// [`HandoverRefusal`]: it cannot be used.
    pub fn among(given: Vec<(String, OwnedFd)>) -> Result<Option<Self>, HandoverRefusal> {
        if given.is_empty() {
            return Ok(None);
        }
        let count = given.len();
        let mut handovers: BTreeMap<u32, HashMap<String, OwnedFd>> = BTreeMap::new();
        for (name, fd) in given {
            let Some((handover, what)) = parts_of(&name) else {
                continue;
            };
            let named = handovers.entry(handover).or_default();
            if named.insert(what.to_owned(), fd).is_some() {
                return Err(HandoverRefusal(format!(
                    "two descriptors have the name {name}"
                )));
            }
        }
        let mut spent = false;
        let mut whole = Vec::new();
        for (handover, mut given) in handovers {
            let (Some(state), Some(claim)) = (given.remove(STATE), given.remove(CLAIM)) else {
                continue;
            };
            let claim = Claim(claim);
            if claim.is_unspent() {
                whole.push((handover, state, claim, given));
            } else {
                spent = true;
            }
        }
        let words = match (whole.pop(), whole.is_empty()) {
            (Some((handover, state, claim, given)), true) => {
                let state = open(&state)?;
                if state.handover == handover {
                    return Ok(Some(Self {
                        state,
                        claim,
                        given,
                    }));
                }
                format!(
                    "its state belongs to hand-over {:08x}, its name says {handover:08x}",
                    state.handover
                )
            }
            (Some(_), false) => {
                "two daemons have handed over and no daemon adopted either state, so it is unknown which was the last".into()
            }
            (None, _) if spent => {
                "it was used before: another daemon has adopted it".into()
            }
            (None, _) => format!(
                "{count} descriptors were kept without the state that goes with them: a daemon ended while it handed over"
            ),
        };
        Err(HandoverRefusal(words))
    }

    /// Takes the descriptors of a session of the state, if they are complete.
    pub fn descriptors(&mut self, number: u64) -> Option<Descriptors> {
        Descriptors::found(number, &mut self.given)
    }
}

/// systemd allows no colon and at most 255 bytes.
fn name_of(handover: u32, what: &str) -> String {
    format!("{PREFIX}{handover:08x}-{what}")
}

/// Name of a descriptor of one session.
fn session_part(number: u64, what: &str) -> String {
    format!("{number}-{what}")
}

/// Splits a name into the number of the hand-over and the rest.
fn parts_of(name: &str) -> Option<(u32, &str)> {
    let (handover, what) = name.strip_prefix(PREFIX)?.split_once('-')?;
    Some((u32::from_str_radix(handover, 16).ok()?, what))
}

/// Whether the name is one of offloadd's.
pub fn is_ours(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// Whether the name is that of the state, which comes last.
pub fn is_state(name: &str) -> bool {
    parts_of(name).is_some_and(|(_, what)| what == STATE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handover::message::HandoverSession;

    #[test]
    fn names_of_as_many_descriptors_as_can_be_kept_fit_into_one_variable() {
        let mut bytes = "LISTEN_FDNAMES=".len() + 1;
        for what in [STATE, CLAIM] {
            bytes += name_of(u32::MAX, what).len() + 1;
        }
        for number in 0..SESSIONS_MAX as u64 {
            for what in ["arena", "ring", "bell", "done", "read", "line", "pid"] {
                let name = name_of(u32::MAX, &session_part(number, what));
                assert!(is_ours(&name) && !is_state(&name));
                assert!(parts_of(&name).is_some(), "{name}");
                bytes += name.len() + 1;
            }
        }
        assert!(bytes <= 128 << 10, "{bytes}");
    }

    #[test]
    fn where_not_all_sessions_fit_whole_jobs_go_on() {
        let session = |job| HandoverSession {
            job,
            ..HandoverSession::default()
        };
        let state = HandoverState {
            sessions: [0, 0, 1, 1, 1, 2, 1].map(session).to_vec(),
            ..HandoverState::default()
        };
        let fit = |sessions_max| {
            let judged = jobs_that_fit(&state, sessions_max);
            judged.into_values().collect::<Vec<_>>()
        };
        assert_eq!(fit(7), [true, true, true]);
        assert_eq!(fit(6), [true, true, false]);
        assert_eq!(fit(5), [true, false, true]);
        assert_eq!(fit(1), [false, false, true]);
        assert_eq!(fit(0), [false, false, false]);
    }
}
