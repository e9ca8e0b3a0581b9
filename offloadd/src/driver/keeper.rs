//! The thread that makes and frees sessions' memory, so that the owner thread never waits for it.
//!
//! One thread, first come first served: memory that was given back is really free before the next arena is made, so the
//! bound of the settings holds for the machine and not only in our books.

use std::io::PipeReader;
use std::io::PipeWriter;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

use offload_api::fault::{Fault, FaultKind};
use offload_api::geometry::Geometry;
use offload_api::ids::Epoch;
use offload_api::ring::{DaemonRings, Reached, RingMap};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::OFlags;

use super::inbox::{DriverHandle, Message};
use crate::arena::{Arena, LockPolicy, memory_file};
use crate::core::SessionId;
use crate::handover::Descriptors;

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

#[derive(Debug)]
enum Job {
    Make {
        session: SessionId,
        geometry: Geometry,
        ring_entries: u32,
    },
    Free(Box<Made>),
}

/// The owner thread's end.
#[derive(Debug)]
pub(super) struct Keeper {
    jobs: Option<SyncSender<Job>>,
    thread: Option<JoinHandle<()>>,
}

impl Keeper {
    /// Starts the thread. At most `sessions_max` sessions are made or freed at a time.
    pub(super) fn start(
        owner: DriverHandle,
        epoch: Epoch,
        policy: LockPolicy,
        sessions_max: u32,
    ) -> std::io::Result<Self> {
        // Each session is made once and freed once.
        let (jobs, waiting) = sync_channel(2 * sessions_max as usize + 2);
        let thread = std::thread::Builder::new()
            .name("keeper".into())
            .spawn(move || {
                while let Ok(job) = waiting.recv() {
                    match job {
                        Job::Make {
                            session,
                            geometry,
                            ring_entries,
                        } => {
                            let made = make(&geometry, ring_entries, epoch, policy).map(Box::new);
                            owner.send(Message::Made { session, made });
                        }
                        Job::Free(made) => drop(made),
                    }
                }
            })?;
        Ok(Self {
            jobs: Some(jobs),
            thread: Some(thread),
        })
    }

    /// Answers with [`Message::Made`].
    pub(super) fn make(&self, session: SessionId, geometry: Geometry, ring_entries: u32) {
        self.send(Job::Make {
            session,
            geometry,
            ring_entries,
        });
    }

    /// Unmaps and closes.
    pub(super) fn free(&self, made: Box<Made>) {
        self.send(Job::Free(made));
    }

    /// Lets the thread end by itself: what it is making ends with the process, and nobody waits for it.
    pub(super) fn leave(&mut self) {
        self.jobs = None;
        self.thread = None;
    }

    fn send(&self, job: Job) {
        let jobs = self.jobs.as_ref().expect("until dropped");
        // Waiting here happens only when the core has more sessions than its limit; then slow is better than wrong.
        jobs.send(job).expect("the keeper ends after the driver");
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has told so itself.
            let _ = thread.join();
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
