//! Checksums of tiles, computed by threads beside the session's own: one core sums 6 to 23 GB/s, several drives move more in
//! both directions together. A slot is with such a thread or with its flight, never with both.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use offload_api::checksum::checksum;
use offload_api::ids::TicketId;

use crate::Slot;
use crate::signal::Waker;

/// Four drives of 6.2 and 3.2 GB/s move 37.6 both ways, and a core of a 16-core Xeon summed 12 to 20 of tiles that were in its
/// caches and 6 to 8 out of memory while others did (2026-11-22). More than are needed sleep.
const THREADS_MAX: usize = 8;

/// A tile's bytes, on their way to or from a checksum.
#[derive(Debug)]
struct Job {
    ticket: TicketId,
    slot: Slot,
    bytes: u32,
}

/// A checksum, and the slot back.
#[derive(Debug)]
pub(crate) struct Summed {
    pub(crate) ticket: TicketId,
    pub(crate) slot: Slot,
    pub(crate) checksum: u32,
}

/// The threads. Dropping it ends them after what they have been given, which is at most iodepth tiles.
#[derive(Debug)]
pub(crate) struct ChecksumPool {
    /// `None` while it is dropped.
    jobs: Option<Sender<Job>>,
    results: Receiver<Summed>,
    threads: Vec<JoinHandle<()>>,
}

impl ChecksumPool {
    /// Threads that ring `waker` after each result.
    pub(crate) fn start(waker: &Waker) -> Self {
        let count = std::thread::available_parallelism().map_or(1, |cores| cores.get() / 2);
        let (jobs, from_session) = channel::<Job>();
        let (to_session, results) = channel();
        let from_session = Arc::new(Mutex::new(from_session));
        let threads = (0..count.clamp(1, THREADS_MAX)).map(|_| {
            let (jobs, results, waker) = (from_session.clone(), to_session.clone(), waker.clone());
            std::thread::spawn(move || {
                loop {
                    // The lock is held while waiting: one waits for the queue, the others for it.
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
                    let summed = Summed {
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

    /// Has the first `bytes` of `slot` summed. There are never more at a time than operations in flight.
    pub(crate) fn begin(&self, ticket: TicketId, slot: Slot, bytes: u32) {
        let jobs = self.jobs.as_ref().expect("taken in drop only");
        jobs.send(Job {
            ticket,
            slot,
            bytes,
        })
        .expect("a checksum does not panic");
    }

    /// One that is ready.
    pub(crate) fn take(&self) -> Option<Summed> {
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
