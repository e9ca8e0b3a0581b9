//! From one life of the daemon to the next: what must outlive it is given to whoever starts daemons (systemd, or `offloadd
//! supervise`), and taken back from it.
//!
//! ```text
//!   old one:  no new work ─▶ I/O in flight ends, its completions stand in the rings ─▶ descriptors, then the state ─▶ exit
//!   keeper:   keeps them; starts the next one with them        (`FDSTORE=1`, then `LISTEN_FDS`)
//!   new one:  recovers the store ─▶ is the state of this store, of its last life and newest generations? ─▶ the rings go on
//! ```
//!
//! A process notices nothing: its memory, its rings and the socket that is its life line live on, and what it submits
//! meanwhile waits in the ring. Only its calls are lost, and those it repeats. If no daemon takes a session up, its life line
//! hangs up, as if the daemon had died.
//!
//! The state counts once: whoever takes it up empties an eventfd that lies beside it, when nothing can fail any more. So a
//! state that was kept by mistake cannot come back over what that daemon wrote. Nor over what one wrote that never had it:
//! each life writes the store's catalog anew before it serves, and the state says which one was its last. Each hand-over has
//! a number in its names, so that what is left of one before does not mix with it.
//!
//! Bytes: seven descriptors a session, 40 bytes a tile written since the last commit: some megabytes, once. The names of all
//! descriptors go into one variable of the environment, 128 KiB at most: that, and what the unit allows, bounds the sessions.

pub mod inherited;
pub mod message;
mod sealed;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::rand::{GetRandomFlags, getrandom};

pub use inherited::Inherited;
pub use sealed::{Refused, open, seal};

use message::State;

/// Of all our descriptors.
const PREFIX: &str = "offloadd-";

/// The end of its name where it is kept.
const STATE: &str = "state";

/// Of the eventfd that can be emptied once.
const CLAIM: &str = "claim";

/// Kept for one daemon, as the unit's `FileDescriptorStoreMax` says.
pub const DESCRIPTORS_MAX: usize = 4096;

/// Of one session.
const DESCRIPTORS_A_SESSION: usize = 7;

/// So many sessions go to the next daemon: the state and its claim have room beside them.
pub const SESSIONS_MAX: usize = (DESCRIPTORS_MAX - 2) / DESCRIPTORS_A_SESSION;

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
        // All of them are taken out, so that those of half a session are closed.
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
    /// Of `state` and the descriptors of its sessions, in its order. Whole jobs are left out where there are more sessions than
    /// can be kept.
    ///
    /// # Errors
    /// No random bytes for its number.
    pub fn new(mut state: State, descriptors: Vec<Descriptors>) -> io::Result<Self> {
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

    /// Gives everything to `keep`, by name; the state last, so that what is not whole is nothing.
    ///
    /// # Errors
    /// That of the first that could not be kept, or of making the state's memory file.
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

/// By place in the state, whether the sessions of this job are among `sessions_max`.
fn jobs_that_fit(state: &State, sessions_max: usize) -> BTreeMap<u32, bool> {
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

/// The right to take a state up.
#[derive(Debug)]
pub struct Claim(OwnedFd);

impl Claim {
    /// Whether nobody has used it.
    fn is_unspent(&self) -> bool {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        matches!(poll(&mut fds, Some(&Timespec::default())), Ok(1))
    }

    /// Uses it. False: somebody else was first.
    pub fn spend(self) -> bool {
        matches!(rustix::io::read(&self.0, &mut [0_u8; 8]), Ok(8))
    }
}

/// What a daemon finds at its start.
#[derive(Debug)]
pub struct Found {
    /// Of the one before.
    pub state: State,
    /// To be spent before anything of the state is used.
    pub claim: Claim,
    /// Of this hand-over, by what their names end with.
    given: HashMap<String, OwnedFd>,
}

/// Whether descriptors of a session are among `given`.
pub fn has_sessions(given: &Inherited) -> bool {
    let parts = given.iter().filter_map(|(name, _)| parts_of(name));
    parts
        .into_iter()
        .any(|(_, what)| what != STATE && what != CLAIM)
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
        let mut handovers: BTreeMap<u32, HashMap<String, OwnedFd>> = BTreeMap::new();
        for (name, fd) in given {
            let Some((handover, what)) = parts_of(&name) else {
                continue;
            };
            let named = handovers.entry(handover).or_default();
            if named.insert(what.to_owned(), fd).is_some() {
                return Err(Refused(format!("two descriptors are called {name}")));
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
                "two daemons have handed over, and neither was followed: which was the last one is not known".into()
            }
            (None, _) if spent => {
                "it was taken up before: another daemon has gone on from there".into()
            }
            (None, _) => format!(
                "{count} descriptors were kept without the state that goes with them: a daemon ended while it handed over"
            ),
        };
        Err(Refused(words))
    }

    /// The descriptors of one of the state's sessions, if they are all there.
    pub fn descriptors(&mut self, number: u64) -> Option<Descriptors> {
        Descriptors::found(number, &mut self.given)
    }
}

/// systemd takes no colon, and 255 bytes.
fn name_of(handover: u32, what: &str) -> String {
    format!("{PREFIX}{handover:08x}-{what}")
}

/// Of one session.
fn session_part(number: u64, what: &str) -> String {
    format!("{number}-{what}")
}

/// Which hand-over a descriptor belongs to, and what it is there.
fn parts_of(name: &str) -> Option<(u32, &str)> {
    let (handover, what) = name.strip_prefix(PREFIX)?.split_once('-')?;
    Some((u32::from_str_radix(handover, 16).ok()?, what))
}

/// Whether these are descriptors of ours.
pub fn is_ours(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// Whether this is the state, which comes last: somebody waits for the next daemon.
pub fn is_state(name: &str) -> bool {
    parts_of(name).is_some_and(|(_, what)| what == STATE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handover::message::Session;

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
        let session = |job| Session {
            job,
            ..Session::default()
        };
        let state = State {
            sessions: [0, 0, 1, 1, 1, 2, 1].map(session).to_vec(),
            ..State::default()
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
