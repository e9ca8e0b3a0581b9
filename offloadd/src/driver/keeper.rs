//! Threads that make and free sessions' memory, so that the owner thread never waits for it.
//!
//! Each user with work has a thread of their own: 200 GiB take minutes, and users must not wait for each other. An arena that would
//! exceed `arena_bytes_max` waits until the kernel has freed ended arenas, so the limit holds for the machine's memory and not only
//! for the counters.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use offload_api::fault::{Fault, FaultKind};
use offload_api::geometry::Geometry;
use offload_api::ids::Epoch;
use offload_api::ring::{DaemonRings, RingMap};
use offload_support::memory;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::OFlags;

use super::inbox::{DriverHandle, Message};
use super::session_memory::SessionMemory;
use crate::arena::{Arena, ArenaId, LockPolicy, memory_file};
use crate::io::SessionId;

/// Request to make a session's memory.
#[derive(Debug)]
struct Make {
    session: SessionId,
    geometry: Geometry,
    ring_entries: u32,
}

/// Memory of an ended session; it counts until the kernel has freed it.
#[derive(Debug)]
pub(super) struct Ending(Box<SessionMemory>);

impl Ending {
    pub(super) fn arena(&self) -> ArenaId {
        self.0.arena.id()
    }
}

/// Work of one user's thread.
#[derive(Debug, Default)]
struct UserWork {
    make: VecDeque<Make>,
    free: VecDeque<Ending>,
}

#[derive(Debug, Default)]
struct Books {
    /// Arenas that are being made, exist, or are ending.
    held_bytes: u64,
    /// Arenas that are ending.
    ending_bytes: u64,
    bytes_max: u64,
    /// Users with a running thread.
    users: HashMap<u32, UserWork>,
    /// Whether to make no more memory.
    ended: bool,
}

impl Books {
    /// Takes the next work of a user's thread; `None` if it must wait for memory.
    fn next(&mut self, uid: u32) -> Option<NextWork> {
        let jobs = self.users.get_mut(&uid).expect("its thread runs");
        if let Some(ending) = jobs.free.pop_front() {
            return Some(NextWork::Free(ending));
        }
        if self.ended {
            jobs.make.clear();
        }
        let Some(make) = jobs.make.front() else {
            self.users.remove(&uid);
            return Some(NextWork::Nothing);
        };
        let bytes = make.geometry.arena_bytes();
        let too_much = self.held_bytes.saturating_add(bytes) > self.bytes_max
            || memory::available_bytes().is_some_and(|available| available < bytes);
        // The core has checked the limit, so only ending arenas are worth waiting for.
        if too_much && self.ending_bytes > 0 {
            return None;
        }
        self.held_bytes += bytes;
        jobs.make.pop_front().map(NextWork::Make)
    }
}

#[derive(Debug)]
enum NextWork {
    Free(Ending),
    Make(Make),
    Nothing,
}

#[derive(Debug)]
struct KeeperState {
    owner: DriverHandle,
    epoch: Epoch,
    policy: LockPolicy,
    books: Mutex<Books>,
    changed: Condvar,
}

/// The owner thread's handle.
#[derive(Debug)]
pub(super) struct Keeper {
    shared: Arc<KeeperState>,
    /// Whether drop waits until all memory is freed.
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
        let shared = Arc::new(KeeperState {
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

    /// Changes the limit of all arenas together.
    pub(super) fn limit(&self, bytes_max: u64) {
        self.shared.books().bytes_max = bytes_max;
        self.shared.changed.notify_all();
    }

    /// Counts memory that a previous daemon made.
    pub(super) fn adopted(&self, made: &SessionMemory) {
        self.shared.books().held_bytes += made.arena.bytes() as u64;
    }

    /// Makes memory; the result arrives as [`Message::Made`].
    ///
    /// # Errors
    /// If no thread can be started.
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
            let what = format!("starting a thread to make a session's memory: {error}");
            Fault::new(FaultKind::NoMemory, what)
        })
    }

    /// Marks memory as ending, so that new arenas wait for it. Call [`Self::free`] next.
    pub(super) fn ends(&self, made: Box<SessionMemory>) -> Ending {
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
            // No thread can be started: free it here, which is slow but correct.
            self.shared.free(ending);
        }
    }

    /// Makes drop not wait for the threads; what they are making ends with the process.
    pub(super) fn leave(&mut self) {
        self.waits = false;
    }

    fn give(&self, uid: u32, add: impl FnOnce(&mut UserWork)) -> std::io::Result<()> {
        let mut books = self.shared.books();
        if !books.users.contains_key(&uid) {
            let shared = self.shared.clone();
            // The thread sees the work added below, because the lock is held until then.
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

impl KeeperState {
    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Runs until no work is left for this user.
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
                NextWork::Nothing => {
                    self.changed.notify_all();
                    return;
                }
                NextWork::Free(ending) => self.free(ending),
                NextWork::Make(Make {
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
) -> Result<SessionMemory, Fault> {
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
    Ok(SessionMemory {
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

    fn next_made(inbox: &Inbox) -> (u64, Box<SessionMemory>) {
        let limit = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(Message::Made { session, made }) = inbox.next_message() {
                return (session.0, made.unwrap());
            }
            assert!(Instant::now() < limit, "nothing is made");
            std::thread::yield_now();
        }
    }

    /// User 1 has almost all memory, ends its session and opens another before the memory is freed.
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
        assert_eq!(session, 3, "a small arena of another user does not wait");
        assert!(inbox.next_message().is_none(), "the limit is still reached");
        keeper.free(1, ending);
        let (session, second) = next_made(&inbox);
        assert_eq!(session, 2);
        assert_eq!(keeper.shared.books().held_bytes, bytes_max);
        let ending = keeper.ends(second);
        keeper.free(1, ending);
        drop(keeper);
    }
}
