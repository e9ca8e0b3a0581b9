//! The engine for machines that forbid io_uring and kernel AIO: a few threads a device, each with one pread, pwrite or
//! fdatasync at a time.
//!
//! ```text
//!   submit ─▶ the device's queue ─▶ one of its threads: pread, pwrite, fdatasync ─▶ list, eventfd ─reap─▶ IoDone
//! ```
//!
//! Each device has its own queue and threads, so that a device that is slow or hangs blocks no other. An operation costs about
//! one thread switch, which is little beside megabytes. The depth is limited to the number of threads.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use offload_api::ids::DeviceIndex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::{END_WAIT, EngineError, Io, IoDone};
use crate::io::IoOp;

/// Operations in flight on one device. Drives reach their rate with megabytes at a depth of two or three; one more is for
/// flushes.
const THREADS_A_DEVICE: usize = 4;

/// How often an interrupted call is repeated.
const INTERRUPTED_MAX: u32 = 100;

/// The engine.
#[derive(Debug)]
pub struct Psync {
    shared: Arc<PsyncState>,
    /// `None` after its removal.
    devices: Vec<Option<DeviceThreads>>,
    inflight_count: usize,
    inflight_max: usize,
    /// How long dropping the engine waits for devices.
    end_wait: Duration,
}

/// A device with its threads, which end when it is dropped, after their current operation.
#[derive(Debug)]
struct DeviceThreads {
    file: Arc<File>,
    queue: Arc<ThreadQueue>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct PsyncState {
    done: Mutex<Vec<IoDone>>,
    wake: OwnedFd,
    perform: Perform,
}

/// Performs an operation. Returns the outcome and the number of repetitions.
type Perform = fn(&mut Io, &File) -> (Result<u32, i32>, u32);

#[derive(Debug, Default)]
struct ThreadQueue {
    jobs: Mutex<WaitingIo>,
    work: Condvar,
}

#[derive(Debug, Default)]
struct WaitingIo {
    waiting: VecDeque<FileIo>,
    ending: bool,
}

#[derive(Debug)]
struct FileIo {
    io: Io,
    file: Arc<File>,
}

impl Psync {
    /// Starts the threads.
    pub(super) fn open(devices: &[Arc<File>], inflight_max: usize) -> Result<Self, EngineError> {
        Self::with(devices, inflight_max, perform)
    }

    fn with(
        devices: &[Arc<File>],
        inflight_max: usize,
        perform: Perform,
    ) -> Result<Self, EngineError> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| failed("eventfd")(e.into()))?;
        let shared = Arc::new(PsyncState {
            done: Mutex::default(),
            wake,
            perform,
        });
        let mut engine = Self {
            shared,
            devices: Vec::new(),
            inflight_count: 0,
            inflight_max,
            end_wait: END_WAIT,
        };
        for device in devices {
            engine.add(device.clone())?;
        }
        Ok(engine)
    }

    /// Adds a device, behind the others, and starts its threads.
    pub(super) fn add(&mut self, file: Arc<File>) -> Result<(), EngineError> {
        let mut device = DeviceThreads {
            file,
            queue: Arc::default(),
            threads: Vec::new(),
        };
        for _ in 0..THREADS_A_DEVICE {
            let (shared, queue) = (self.shared.clone(), device.queue.clone());
            let thread = std::thread::Builder::new()
                .name("psync".into())
                .spawn(move || shared.run(&queue))
                .map_err(failed("starting a thread"))?;
            device.threads.push(thread);
        }
        // Only now, so that a device whose threads failed to start takes no index.
        self.devices.push(Some(device));
        Ok(())
    }

    /// Closes a device. Nothing may be in flight on it, now or later.
    pub(super) fn remove(&mut self, device: DeviceIndex) {
        self.devices[device.0 as usize] = None;
    }

    pub(super) fn submit(&mut self, io: Io) {
        assert!(
            self.inflight_count < self.inflight_max,
            "more in flight than the engine was opened for"
        );
        let device = self.devices[io.device.0 as usize].as_ref();
        let device = device.expect("nothing is asked of a device that was removed");
        self.inflight_count += 1;
        let file = device.file.clone();
        locked(&device.queue.jobs)
            .waiting
            .push_back(FileIo { io, file });
        device.queue.work.notify_one();
    }

    pub(super) fn reap(&mut self, done: &mut Vec<IoDone>) {
        // First the signal, then the list: an operation that ends between the two signals again.
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
    /// Waits for the operations in flight. A thread that does not return keeps the memory that its device may still write to.
    fn drop(&mut self) {
        for device in self.devices.iter().flatten() {
            self.inflight_count -= device.queue.end();
        }
        let limit = Instant::now() + self.end_wait;
        let mut done = Vec::new();
        while self.inflight_count > 0 && Instant::now() < limit {
            let wait = Timespec {
                tv_sec: 0,
                tv_nsec: 10_000_000,
            };
            let _ = poll(
                &mut [PollFd::new(&self.shared.wake, PollFlags::IN)],
                Some(&wait),
            );
            self.reap(&mut done);
        }
        if self.inflight_count > 0 {
            return;
        }
        for device in self.devices.iter_mut().flatten() {
            for thread in device.threads.drain(..) {
                // A thread that panicked has printed its message.
                let _ = thread.join();
            }
        }
    }
}

impl Drop for DeviceThreads {
    fn drop(&mut self) {
        self.queue.end();
    }
}

impl ThreadQueue {
    /// Returns the oldest job; `None` when the engine or the device ends.
    fn next(&self) -> Option<FileIo> {
        let mut jobs = locked(&self.jobs);
        loop {
            if jobs.ending {
                return None;
            }
            if let Some(job) = jobs.waiting.pop_front() {
                return Some(job);
            }
            jobs = self.work.wait(jobs).unwrap_or_else(|e| e.into_inner());
        }
    }

    /// Stops the threads from taking jobs. Returns the number of jobs that no thread took.
    fn end(&self) -> usize {
        let mut jobs = locked(&self.jobs);
        jobs.ending = true;
        self.work.notify_all();
        std::mem::take(&mut jobs.waiting).len()
    }
}

impl PsyncState {
    fn run(&self, queue: &ThreadQueue) {
        while let Some(FileIo { mut io, file }) = queue.next() {
            // Not earlier: time in this queue is not the device's.
            let since = Instant::now();
            let (outcome, retried_count) = (self.perform)(&mut io, &file);
            // Before the end is reported, so that the device is closed when its last operation ends.
            drop(file);
            let ended = IoDone {
                id: io.id,
                outcome,
                device_ns: since.elapsed().as_nanos() as u64,
                retried_count,
                memory: io.memory,
            };
            locked(&self.done).push(ended);
            // Fails only after 2^64 - 2 unread signals.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }
}

/// Performs an operation. Returns the outcome and the number of repetitions.
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

/// A thread that panicked leaves the list intact.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;
    use crate::engine::Memory;
    use crate::io::IoId;

    const NO_HANG: Duration = Duration::from_secs(60);

    /// Operations at this offset hang until they are let go.
    const HANGS: u64 = 1 << 40;

    /// Number of calls that are released.
    static LET_GO: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

    fn hanging(io: &mut Io, file: &File) -> (Result<u32, i32>, u32) {
        if io.offset == HANGS {
            let free = |count: &mut usize| *count == 0;
            let count = locked(&LET_GO.0);
            let mut count = LET_GO.1.wait_while(count, free).unwrap();
            *count -= 1;
        }
        perform(io, file)
    }

    fn let_go(count: usize) {
        *locked(&LET_GO.0) += count;
        LET_GO.1.notify_all();
    }

    fn flush(id: u64, device: u32, offset: u64) -> Io {
        Io {
            id: IoId(id),
            device: DeviceIndex(device),
            op: IoOp::Flush,
            offset,
            bytes: 0,
            memory: Memory::None,
        }
    }

    fn finish(engine: &mut Psync, count: usize) -> Vec<IoDone> {
        let limit = Instant::now() + NO_HANG;
        let mut done = Vec::new();
        while done.len() < count {
            assert!(Instant::now() < limit, "{} of {count} ended", done.len());
            let wait = Timespec {
                tv_sec: 1,
                tv_nsec: 0,
            };
            let wake = engine.wake();
            poll(&mut [PollFd::new(&wake, PollFlags::IN)], Some(&wait)).unwrap();
            engine.reap(&mut done);
        }
        done
    }

    #[test]
    fn a_device_that_hangs_holds_neither_the_others_nor_the_end() {
        let files = [(); 2].map(|()| Arc::new(tempfile::tempfile().unwrap()));
        let mut engine = Psync::with(&files, 256, hanging).unwrap();
        let hanging_count = 3 * THREADS_A_DEVICE;
        for id in 0..hanging_count as u64 {
            engine.submit(flush(id, 0, HANGS));
        }
        for id in 100..150 {
            engine.submit(flush(id, 1, 0));
        }
        let done = finish(&mut engine, 50);
        assert!(done.iter().all(|done| done.id.0 >= 100), "{done:?}");
        assert_eq!(engine.inflight_count(), hanging_count);
        // Wait until every thread of the device is in a call, so that dropping the engine has something to wait for.
        let taken = |engine: &Psync| {
            let device = engine.devices[0].as_ref().unwrap();
            locked(&device.queue.jobs).waiting.len() == hanging_count - THREADS_A_DEVICE
        };
        let limit = Instant::now() + NO_HANG;
        while !taken(&engine) {
            assert!(Instant::now() < limit);
            std::thread::sleep(Duration::from_millis(1));
        }
        engine.end_wait = Duration::from_millis(20);
        let (told, ended): (Sender<()>, Receiver<()>) = channel();
        let ending = std::thread::spawn(move || {
            drop(engine);
            told.send(()).unwrap();
        });
        (ended.recv_timeout(NO_HANG)).expect("the end does not wait for ever");
        ending.join().unwrap();
        // The threads left come back, and end: none of their operations is lost.
        let_go(THREADS_A_DEVICE);
        let limit = Instant::now() + NO_HANG;
        while Arc::strong_count(&files[0]) > 1 {
            assert!(Instant::now() < limit, "a thread keeps the device open");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn what_waits_for_a_thread_is_not_counted_as_the_devices_time() {
        fn slow(io: &mut Io, file: &File) -> (Result<u32, i32>, u32) {
            std::thread::sleep(Duration::from_millis(5));
            perform(io, file)
        }
        let mut engine =
            Psync::with(&[Arc::new(tempfile::tempfile().unwrap())], 256, slow).unwrap();
        let begun = Instant::now();
        let count = 30 * THREADS_A_DEVICE;
        for id in 0..count as u64 {
            engine.submit(flush(id, 0, 0));
        }
        let done = finish(&mut engine, count);
        // However slow the machine is, threads have done one after the other; all that waited would be half of all times.
        let sum: u64 = done.iter().map(|done| done.device_ns).sum();
        let threads_had = begun.elapsed().as_nanos() as u64 * THREADS_A_DEVICE as u64;
        assert!(sum <= threads_had, "{sum} ns of {threads_had}");
    }
}
