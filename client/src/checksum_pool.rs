//! Threads that compute checksums of tiles beside the session's own thread: one core manages 6 to 23 GB/s, less than several
//! drives move in both directions together. A slot belongs either to such a thread or to the in-flight table.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use offload_api::checksum::checksum;
use offload_api::ids::TicketId;

use crate::Slot;
use crate::signal::Waker;

/// Four drives of 6.2 and 3.2 GB/s move 37.6 GB/s in both directions. With all threads busy, a core of a 16-core Xeon sums 12
/// to 20 GB/s out of its caches and 6 to 8 out of memory (2026-11-22). Threads without work sleep.
const THREADS_MAX: usize = 8;

/// A tile whose checksum is to be computed.
#[derive(Debug)]
struct Job {
    ticket: TicketId,
    slot: Slot,
    bytes: u32,
}

/// The checksum of a tile, with its slot.
#[derive(Debug)]
pub(crate) struct ChecksummedTile {
    pub(crate) ticket: TicketId,
    pub(crate) slot: Slot,
    pub(crate) checksum: u32,
}

/// The threads. Dropping the pool ends them after their queued work, which is at most iodepth tiles.
#[derive(Debug)]
pub(crate) struct ChecksumPool {
    /// `None` while the pool is dropped.
    jobs: Option<Sender<Job>>,
    results: Receiver<ChecksummedTile>,
    threads: Vec<JoinHandle<()>>,
}

impl ChecksumPool {
    /// Starts threads that wake `waker` after each result.
    pub(crate) fn start(waker: &Waker) -> Self {
        let count = std::thread::available_parallelism().map_or(1, |cores| cores.get() / 2);
        let (jobs, from_session) = channel::<Job>();
        let (to_session, results) = channel();
        let from_session = Arc::new(Mutex::new(from_session));
        let threads = (0..count.clamp(1, THREADS_MAX)).map(|_| {
            let (jobs, results, waker) = (from_session.clone(), to_session.clone(), waker.clone());
            std::thread::spawn(move || {
                loop {
                    // The lock is held while waiting: one thread waits for the queue, the others for the lock.
                    let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok(Job {
                        ticket,
                        slot,
                        bytes,
                    }) = job
                    else {
                        return;
                    };
                    let checksum = checksum(&slot.as_slice()[..bytes as usize]);
                    let summed = ChecksummedTile {
                        ticket,
                        slot,
                        checksum,
                    };
                    if results.send(summed).is_err() {
                        return;
                    }
                    waker.wake();
                }
            })
        });
        Self {
            threads: threads.collect(),
            jobs: Some(jobs),
            results,
        }
    }

    /// Queues the first `bytes` of `slot` to be summed. At most iodepth slots are queued at a time.
    pub(crate) fn begin(&self, ticket: TicketId, slot: Slot, bytes: u32) {
        let jobs = self.jobs.as_ref().expect("taken in drop only");
        jobs.send(Job {
            ticket,
            slot,
            bytes,
        })
        .expect("a checksum does not panic");
    }

    /// Returns a finished checksum, if there is one.
    pub(crate) fn next_result(&self) -> Option<ChecksummedTile> {
        self.results.try_recv().ok()
    }
}

impl Drop for ChecksumPool {
    fn drop(&mut self) {
        drop(self.jobs.take());
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
