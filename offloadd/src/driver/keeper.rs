//! Threads that make and free sessions' memory, so that the owner thread never waits for it.
//!
//! One thread for each user with something to do: 200 GiB take minutes, and nobody waits for another user's. Memory that a user
//! gave back is really free before another arena takes its room, so the bound of the settings holds for the machine and not only
//! in our books: an arena that would go beyond it waits for what ends, and only for that.

use std::collections::{HashMap, VecDeque};
use std::io::PipeReader;
use std::io::PipeWriter;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use offload_api::fault::{Fault, FaultKind};
use offload_api::geometry::Geometry;
use offload_api::ids::Epoch;
use offload_api::ring::{DaemonRings, Reached, RingMap};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::OFlags;

use super::inbox::{DriverHandle, Message};
use crate::arena::{Arena, ArenaId, LockPolicy, memory_file};
use crate::handover::Descriptors;
use crate::io::SessionId;
use crate::memory;

/// What a session shares with its process.
#[derive(Debug)]
pub(super) struct Made {
    pub(super) arena: Arc<Arena>,
    pub(super) rings: DaemonRings,
    pub(super) ring_fd: OwnedFd,
    /// Rung by the process. We only watch for edges and never read it: a process may make any read of a shared eventfd
    /// block.
    pub(super) submission_doorbell: OwnedFd,
    /// Rung by us. A pipe and not an eventfd: whether a write blocks is a property of our end alone, so that no process
    /// can make it.
    pub(super) completion_doorbell: PipeWriter,
    /// The process's end of it.
    pub(super) completion_reader: PipeReader,
}

impl Made {
    /// What a daemon before this one made, and its process still has.
    pub(super) fn adopt(
        descriptors: Descriptors,
        geometry: &Geometry,
        ring_entries: u32,
        reached: Reached,
        epoch: Epoch,
        policy: LockPolicy,
    ) -> Result<(Self, OwnedFd, Option<OwnedFd>), Fault> {
        let broken = |what: String| Fault::new(FaultKind::Protocol, what);
        let arena = Arc::new(Arena::adopt(descriptors.arena, geometry, policy)?);
        let map = RingMap::adopt(&descriptors.ring, ring_entries, epoch)
            .map_err(|error| broken(error.to_string()))?;
        let completion_doorbell = PipeWriter::from(descriptors.completion_doorbell);
        rustix::fs::fcntl_setfl(&completion_doorbell, OFlags::NONBLOCK)
            .map_err(|errno| broken(format!("its doorbell: {errno}")))?;
        let made = Self {
            arena,
            rings: DaemonRings::resume(map, reached),
            ring_fd: descriptors.ring,
            submission_doorbell: descriptors.submission_doorbell,
            completion_doorbell,
            completion_reader: PipeReader::from(descriptors.completion_reader),
        };
        Ok((made, descriptors.life_line, descriptors.process))
    }
}

/// A session's memory that is to be made.
#[derive(Debug)]
struct Make {
    session: SessionId,
    geometry: Geometry,
    ring_entries: u32,
}

/// Memory that its session does not need any more, and that counts until it is really free.
#[derive(Debug)]
pub(super) struct Ending(Box<Made>);

impl Ending {
    pub(super) fn arena(&self) -> ArenaId {
        self.0.arena.id()
    }
}

/// What one user's thread has to do.
#[derive(Debug, Default)]
struct Jobs {
    make: VecDeque<Make>,
    free: VecDeque<Ending>,
}

/// What is held, and who waits.
#[derive(Debug, Default)]
struct Books {
    /// Of arenas that are being made, are there, or end.
    held_bytes: u64,
    /// Of those that end.
    ending_bytes: u64,
    bytes_max: u64,
    /// A thread runs for each.
    users: HashMap<u32, Jobs>,
    /// Nothing more is made.
    ended: bool,
}

impl Books {
    /// What a user's thread does next; `None`: it waits for memory.
    fn next(&mut self, uid: u32) -> Option<Next> {
        let jobs = self.users.get_mut(&uid).expect("its thread runs");
        if let Some(ending) = jobs.free.pop_front() {
            return Some(Next::Free(ending));
        }
        if self.ended {
            jobs.make.clear();
        }
        let Some(make) = jobs.make.front() else {
            self.users.remove(&uid);
            return Some(Next::Nothing);
        };
        let bytes = make.geometry.arena_bytes();
        let too_much = self.held_bytes.saturating_add(bytes) > self.bytes_max
            || memory::available_bytes().is_some_and(|available| available < bytes);
        // The core has found room: it is what ends. Nothing else is worth waiting for.
        if too_much && self.ending_bytes > 0 {
            return None;
        }
        self.held_bytes += bytes;
        jobs.make.pop_front().map(Next::Make)
    }
}

#[derive(Debug)]
enum Next {
    Free(Ending),
    Make(Make),
    Nothing,
}

#[derive(Debug)]
struct Shared {
    owner: DriverHandle,
    epoch: Epoch,
    policy: LockPolicy,
    books: Mutex<Books>,
    changed: Condvar,
}

/// The owner thread's end.
#[derive(Debug)]
pub(super) struct Keeper {
    shared: Arc<Shared>,
    /// Its end waits for memory to be free.
    waits: bool,
}

impl Keeper {
    pub(super) fn new(
        owner: DriverHandle,
        epoch: Epoch,
        policy: LockPolicy,
        bytes_max: u64,
    ) -> Self {
        let books = Books {
            bytes_max,
            ..Books::default()
        };
        let shared = Arc::new(Shared {
            owner,
            epoch,
            policy,
            books: Mutex::new(books),
            changed: Condvar::new(),
        });
        Self {
            shared,
            waits: true,
        }
    }

    /// All arenas together are to have at most this much from now on.
    pub(super) fn limit(&self, bytes_max: u64) {
        self.shared.books().bytes_max = bytes_max;
        self.shared.changed.notify_all();
    }

    /// Memory that a daemon before this one made.
    pub(super) fn adopted(&self, made: &Made) {
        self.shared.books().held_bytes += made.arena.bytes() as u64;
    }

    /// Answers with [`Message::Made`].
    ///
    /// # Errors
    /// No thread is to be had.
    pub(super) fn make(
        &self,
        uid: u32,
        session: SessionId,
        geometry: Geometry,
        ring_entries: u32,
    ) -> Result<(), Fault> {
        let make = Make {
            session,
            geometry,
            ring_entries,
        };
        let given = self.give(uid, |jobs| jobs.make.push_back(make));
        given.map_err(|error| {
            let what = format!("starting a thread that makes a session's memory: {error}");
            Fault::new(FaultKind::NoMemory, what)
        })
    }

    /// Its session is over. What is made next waits for it, and [`Self::free`] is to follow.
    pub(super) fn ends(&self, made: Box<Made>) -> Ending {
        self.shared.books().ending_bytes += made.arena.bytes() as u64;
        Ending(made)
    }

    /// Unmaps and closes.
    pub(super) fn free(&self, uid: u32, ending: Ending) {
        let mut ending = Some(ending);
        let given = self.give(uid, |jobs| jobs.free.extend(ending.take()));
        if given.is_err()
            && let Some(ending) = ending
        {
            // No thread is to be had: here, which is slow and not wrong.
            self.shared.free(ending);
        }
    }

    /// Lets the threads end by themselves: what they are making ends with the process, and nobody waits for it.
    pub(super) fn leave(&mut self) {
        self.waits = false;
    }

    fn give(&self, uid: u32, add: impl FnOnce(&mut Jobs)) -> std::io::Result<()> {
        let mut books = self.shared.books();
        if !books.users.contains_key(&uid) {
            let shared = self.shared.clone();
            // It finds what is added below: the books are ours until then.
            std::thread::Builder::new()
                .name("keeper".into())
                .spawn(move || shared.work(uid))?;
        }
        add(books.users.entry(uid).or_default());
        drop(books);
        self.shared.changed.notify_all();
        Ok(())
    }
}

impl Shared {
    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Until nothing is left to do for this user.
    fn work(&self, uid: u32) {
        loop {
            let mut books = self.books();
            let next = loop {
                match books.next(uid) {
                    Some(next) => break next,
                    None => books = self.changed.wait(books).unwrap_or_else(|e| e.into_inner()),
                }
            };
            drop(books);
            match next {
                Next::Nothing => {
                    self.changed.notify_all();
                    return;
                }
                Next::Free(ending) => self.free(ending),
                Next::Make(Make {
                    session,
                    geometry,
                    ring_entries,
                }) => {
                    let made = make(&geometry, ring_entries, self.epoch, self.policy);
                    if made.is_err() {
                        self.books().held_bytes -= geometry.arena_bytes();
                    }
                    let made = made.map(Box::new);
                    self.owner.send(Message::Made { session, made });
                }
            }
        }
    }

    fn free(&self, Ending(made): Ending) {
        let bytes = made.arena.bytes() as u64;
        drop(made);
        let mut books = self.books();
        books.ending_bytes -= bytes;
        books.held_bytes -= bytes;
        drop(books);
        self.changed.notify_all();
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let mut books = self.shared.books();
        books.ended = true;
        self.shared.changed.notify_all();
        while self.waits && !books.users.is_empty() {
            books = (self.shared.changed.wait(books)).unwrap_or_else(|e| e.into_inner());
        }
    }
}

fn make(
    geometry: &Geometry,
    ring_entries: u32,
    epoch: Epoch,
    policy: LockPolicy,
) -> Result<Made, Fault> {
    let arena = Arc::new(Arena::make(geometry, policy)?);
    let system = |error: std::io::Error| {
        Fault::new(
            FaultKind::NoMemory,
            format!("making a session's rings and doorbells: {error}"),
        )
    };
    let ring_fd = memory_file("offloadd-ring").map_err(|e| system(e.into()))?;
    let map = RingMap::create(&ring_fd, ring_entries, epoch).map_err(system)?;
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    let submission_doorbell = eventfd(0, flags).map_err(|e| system(e.into()))?;
    let (completion_reader, completion_doorbell) = std::io::pipe().map_err(system)?;
    rustix::fs::fcntl_setfl(&completion_doorbell, OFlags::NONBLOCK)
        .map_err(|e| system(e.into()))?;
    Ok(Made {
        arena,
        rings: DaemonRings::new(map),
        ring_fd,
        submission_doorbell,
        completion_doorbell,
        completion_reader,
    })
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use offload_api::geometry::SlotClass;

    use super::*;
    use crate::driver::inbox::Inbox;

    fn geometry(slot_count: u32) -> Geometry {
        let slot_bytes = 1 << 20;
        Geometry::new(&[SlotClass {
            slot_bytes,
            slot_count,
        }])
        .unwrap()
    }

    fn next_made(inbox: &Inbox) -> (u64, Box<Made>) {
        let limit = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(Message::Made { session, made }) = inbox.take() {
                return (session.0, made.unwrap());
            }
            assert!(Instant::now() < limit, "nothing is made");
            std::thread::yield_now();
        }
    }

    /// User 1 has all memory but a little, ends it and asks for it anew; it is not free yet.
    #[test]
    fn a_users_arena_waits_for_memory_that_ends_and_for_no_other_users_arena() {
        let (inbox, owner) = Inbox::new().unwrap();
        let (large, small) = (geometry(8), geometry(1));
        let bytes_max = large.arena_bytes() + small.arena_bytes();
        let keeper = Keeper::new(owner, Epoch(1), LockPolicy::Try, bytes_max);
        keeper.make(1, SessionId(1), large.clone(), 8).unwrap();
        let (_, first) = next_made(&inbox);
        let ending = keeper.ends(first);
        keeper.make(1, SessionId(2), large.clone(), 8).unwrap();
        keeper.make(2, SessionId(3), small, 8).unwrap();
        let (session, _small) = next_made(&inbox);
        assert_eq!(session, 3, "it waits for nobody");
        assert!(inbox.take().is_none(), "there is no room yet");
        keeper.free(1, ending);
        let (session, second) = next_made(&inbox);
        assert_eq!(session, 2);
        assert_eq!(keeper.shared.books().held_bytes, bytes_max);
        let ending = keeper.ends(second);
        keeper.free(1, ending);
        drop(keeper);
    }
}
