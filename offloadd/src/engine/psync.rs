//! The engine for machines that forbid io_uring and kernel AIO: a fixed number of threads, each with one pread, pwrite or
//! fdatasync at a time.
//!
//! Costs about one thread switch an operation, which megabytes hide; what it lacks is depth beyond its threads.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Instant;

use offload_api::ids::DeviceIndex;
use rustix::event::{EventfdFlags, eventfd};

use super::{EngineError, Io, IoDone};
use crate::core::IoOp;

/// In flight on one device. Drives reach their rate with megabytes at a depth of two or three; one more for flushes.
const THREADS_A_DEVICE: usize = 4;

/// Of all devices together.
const THREADS_MAX: usize = 64;

/// An interrupted call is tried again so often.
const INTERRUPTED_MAX: u32 = 100;

/// The engine.
#[derive(Debug)]
pub struct Psync {
    shared: Arc<Shared>,
    /// `None`: it was removed.
    devices: Vec<Option<Arc<File>>>,
    threads: Vec<JoinHandle<()>>,
    inflight_count: usize,
    inflight_max: usize,
}

#[derive(Debug)]
struct Shared {
    jobs: Mutex<Jobs>,
    work: Condvar,
    done: Mutex<Vec<IoDone>>,
    wake: OwnedFd,
}

#[derive(Debug, Default)]
struct Jobs {
    waiting: VecDeque<Job>,
    ending: bool,
}

#[derive(Debug)]
struct Job {
    io: Io,
    file: Arc<File>,
    since: Instant,
}

impl Psync {
    /// Starts the threads.
    pub(super) fn open(devices: &[Arc<File>], inflight_max: usize) -> Result<Self, EngineError> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| failed("eventfd")(e.into()))?;
        let shared = Arc::new(Shared {
            jobs: Mutex::default(),
            work: Condvar::new(),
            done: Mutex::default(),
            wake,
        });
        let mut engine = Self {
            shared,
            devices: Vec::new(),
            threads: Vec::new(),
            inflight_count: 0,
            inflight_max,
        };
        for device in devices {
            engine.add(device.clone())?;
        }
        Ok(engine)
    }

    /// One more device, behind the others, with its threads.
    pub(super) fn add(&mut self, file: Arc<File>) -> Result<(), EngineError> {
        let devices = self.devices.len() + 1;
        while self.threads.len() < (devices * THREADS_A_DEVICE).min(THREADS_MAX) {
            let shared = self.shared.clone();
            let thread = std::thread::Builder::new()
                .name("psync".into())
                .spawn(move || shared.run())
                .map_err(failed("starting a thread"))?;
            self.threads.push(thread);
        }
        // Refused, it has no place: the next one's would be another.
        self.devices.push(Some(file));
        Ok(())
    }

    /// Nothing is in flight on this device, and nothing will be: closes it.
    pub(super) fn remove(&mut self, device: DeviceIndex) {
        self.devices[device.0 as usize] = None;
    }

    pub(super) fn submit(&mut self, io: Io) {
        assert!(
            self.inflight_count < self.inflight_max,
            "more in flight than the engine was opened for"
        );
        let file = self.devices[io.device.0 as usize].clone();
        let file = file.expect("nothing is asked of a device that was removed");
        self.inflight_count += 1;
        locked(&self.shared.jobs).waiting.push_back(Job {
            io,
            file,
            since: Instant::now(),
        });
        self.shared.work.notify_one();
    }

    pub(super) fn reap(&mut self, done: &mut Vec<IoDone>) {
        // First the signal, then the list: what comes between the two signals again.
        let _ = rustix::io::read(&self.shared.wake, &mut [0u8; 8]);
        let mut ended = locked(&self.shared.done);
        self.inflight_count -= ended.len();
        done.append(&mut ended);
    }

    pub(super) fn wake(&self) -> BorrowedFd<'_> {
        self.shared.wake.as_fd()
    }

    pub(super) fn inflight_count(&self) -> usize {
        self.inflight_count
    }
}

impl Drop for Psync {
    fn drop(&mut self) {
        locked(&self.shared.jobs).ending = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked has told so itself.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(&self) {
        while let Some(Job {
            mut io,
            file,
            since,
        }) = self.next()
        {
            let (outcome, retried_count) = perform(&mut io, &file);
            // Before it is told: who closes a device then has closed it.
            drop(file);
            let ended = IoDone {
                id: io.id,
                outcome,
                device_ns: since.elapsed().as_nanos() as u64,
                retried_count,
                memory: io.memory,
            };
            locked(&self.done).push(ended);
            // Can only fail when 2^64 - 2 signals were not read.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    /// The oldest job, or `None` when there is none and the engine ends.
    fn next(&self) -> Option<Job> {
        let mut jobs = locked(&self.jobs);
        loop {
            if let Some(job) = jobs.waiting.pop_front() {
                return Some(job);
            }
            if jobs.ending {
                return None;
            }
            jobs = self.work.wait(jobs).unwrap_or_else(|e| e.into_inner());
        }
    }
}

/// How it ended, and how often it was tried again.
fn perform(io: &mut Io, file: &File) -> (Result<u32, i32>, u32) {
    let fd = file.as_raw_fd();
    let address = io.memory.address(io.bytes).cast::<libc::c_void>();
    let (bytes, offset) = (io.bytes as usize, io.offset as libc::off_t);
    for retried_count in 0..INTERRUPTED_MAX {
        let moved = match io.op {
            // SAFETY: `address` has room for `bytes` (asserted by `Memory::address`), and `io` owns that memory until
            // the call is back.
            IoOp::Read => unsafe { libc::pread(fd, address, bytes, offset) },
            // SAFETY: as above. The process may change the bytes meanwhile; only the kernel reads them.
            IoOp::Write => unsafe { libc::pwrite(fd, address, bytes, offset) },
            // SAFETY: touches no memory.
            IoOp::Flush => unsafe { libc::fdatasync(fd) as isize },
        };
        // Never more than asked, so it fits.
        if moved >= 0 {
            return (Ok(moved as u32), retried_count);
        }
        let errno = std::io::Error::last_os_error()
            .raw_os_error()
            .expect("a failed call sets errno");
        if errno != libc::EINTR {
            return (Err(errno), retried_count);
        }
    }
    (Err(libc::EINTR), INTERRUPTED_MAX)
}

fn failed(action: &'static str) -> impl FnOnce(std::io::Error) -> EngineError {
    move |error| EngineError::Unavailable {
        engine: "psync",
        why: format!("{action}: {error}"),
    }
}

/// A thread that panicked leaves the list whole: nothing is half done under these locks.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}
