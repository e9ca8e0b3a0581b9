//! The engine on kernel AIO, by raw system calls: for machines that forbid io_uring, as Docker's default profile does.
//!
//! ```text
//!   submit ─▶ backlog ─start─▶ the device's queue ─▶ its thread: io_submit ─▶ kernel ─▶ eventfd ─reap: io_getevents─▶ IoDone
//!   inflight table: owns each operation's memory from `submit` until its event was reaped
//! ```
//!
//! Each device has a thread, because io_submit blocks while the device's queue in the kernel is full, and neither the owner
//! thread nor another device may wait for that. A flush is IOCB_CMD_FDSYNC, which a worker of the kernel executes, so that
//! operations behind it do not wait as they would for fdatasync (handed over in 3 ms after 256 MiB of writes, ended 120 ms
//! later; two cores, ext4). All devices share one context; `backlog.rs` divides its room. Holds the `unsafe` of its system
//! calls.
//!
//! Unlike io_uring, kernel AIO has no registered memory: each operation pins its pages, and a read marks each page as written.
//! With small pages this costs reads a third of their throughput (fio 3.33, 1 MiB, depth 16, a loop device over RAM: 3.52 GB/s
//! by io_uring with registered buffers, 2.38 without, 2.38 by libaio). With huge pages
//! (`advise` in /sys/kernel/mm/transparent_hugepage/shmem_enabled) a daemon reads 98 % and writes 100 % of what it does on
//! `uring`; `trainer/bench/io/RESULTS.md` has the figures.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use offload_api::ids::DeviceIndex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::backlog::Backlog;
use super::inflight::Inflight;
use super::{END_WAIT, EngineError, Io, IoDone};
use crate::io::IoOp;

/// Operations in the kernel at a time; more wait in the backlog. Drives need some tens each.
const KERNEL_INFLIGHT_MAX: usize = 1024;
const KERNEL_INFLIGHT_A_DEVICE: usize = 64;

/// Smallest number of operations to ask for when the machine's limit of events is nearly used up.
const KERNEL_INFLIGHT_MIN: usize = 32;

/// Operations handed over in one system call. They start together: the first waits for the entry of the last.
const BATCH_MAX: usize = 16;

/// Events taken in one system call.
const EVENTS_MAX: usize = 64;

/// How often io_submit is repeated after EAGAIN (no memory for a request), a millisecond apart.
const SUBMIT_RETRIES_MAX: u32 = 1000;

/// How often an interrupted call is repeated.
const INTERRUPTED_MAX: u32 = 100;

/// The engine.
#[derive(Debug)]
pub struct Aio {
    shared: Arc<AioState>,
    threads: Vec<JoinHandle<()>>,
    /// `None` after its removal.
    devices: Vec<Option<Arc<File>>>,
    queues: Vec<Arc<SubmitQueue>>,
    inflight: Inflight,
    inflight_max: usize,
    backlog: Backlog,
}

/// State that the threads share.
#[derive(Debug)]
struct AioState {
    context: Context,
    /// Indexes of operations that the kernel refused, each with the errno.
    refused: Mutex<Vec<(usize, i32)>>,
    wake: OwnedFd,
}

#[derive(Debug, Default)]
struct SubmitQueue {
    jobs: Mutex<WaitingIocbs>,
    work: Condvar,
}

#[derive(Debug, Default)]
struct WaitingIocbs {
    waiting: VecDeque<Iocb>,
    ending: bool,
}

/// `struct iocb` of the kernel: one operation.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Iocb {
    data: u64,
    /// The kernel writes here.
    key: u32,
    rw_flags: i32,
    opcode: u16,
    priority: i16,
    fd: u32,
    address: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    wake_fd: u32,
}

/// `struct io_event` of the kernel: how an operation ended.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct IoEvent {
    data: u64,
    iocb: u64,
    result: i64,
    result2: i64,
}

// `key` and `rw_flags` change places on big endian machines.
const _: () = assert!(size_of::<Iocb>() == 64 && size_of::<IoEvent>() == 32);
const _: () = assert!(cfg!(target_endian = "little"));

const PREAD: u16 = 0;
const PWRITE: u16 = 1;
const FDSYNC: u16 = 3;

/// `wake_fd` is signalled when the operation ends.
const FLAG_WAKE: u32 = 1;

impl Aio {
    /// Sets the context up and starts the threads.
    pub(super) fn open(devices: &[Arc<File>], inflight_max: usize) -> Result<Self, EngineError> {
        let refused = |action: &'static str| {
            move |error: std::io::Error| EngineError::Unavailable {
                engine: "aio",
                why: format!("{action}: {error}"),
            }
        };
        let asked = KERNEL_INFLIGHT_MAX.max(devices.len() * KERNEL_INFLIGHT_A_DEVICE);
        let (context, room) = Context::new(asked)?;
        if room < asked {
            tracing::warn!(
                "kernel AIO has room for {room} operations instead of {asked}, because other programs use most of \
                 fs.aio-max-nr; drives may not reach their full speed. Raise the limit (sysctl -w fs.aio-max-nr=1048576) and \
                 restart the daemon"
            );
        }
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| refused("eventfd")(e.into()))?;
        let shared = Arc::new(AioState {
            context,
            refused: Mutex::default(),
            wake,
        });
        let mut engine = Self {
            shared,
            threads: Vec::new(),
            devices: Vec::new(),
            queues: Vec::new(),
            inflight: Inflight::default(),
            inflight_max,
            backlog: Backlog::new(room),
        };
        for device in devices {
            engine.add(device.clone())?;
        }
        Ok(engine)
    }

    /// Adds a device, behind the others, and starts its thread.
    pub(super) fn add(&mut self, file: Arc<File>) -> Result<(), EngineError> {
        let queue = Arc::new(SubmitQueue::default());
        let (shared, its_queue) = (self.shared.clone(), queue.clone());
        let thread = std::thread::Builder::new()
            .name("aio".into())
            .spawn(move || shared.run(&its_queue))
            .map_err(|error| EngineError::Unavailable {
                engine: "aio",
                why: format!("starting a thread: {error}"),
            })?;
        self.threads.push(thread);
        self.queues.push(queue);
        self.backlog.add();
        self.devices.push(Some(file));
        Ok(())
    }

    /// Closes a device. Nothing may be in flight on it, now or later.
    pub(super) fn remove(&mut self, device: DeviceIndex) {
        self.backlog.remove(device);
        self.devices[device.0 as usize] = None;
    }

    pub(super) fn submit(&mut self, io: Io) {
        assert!(
            self.inflight_count() < self.inflight_max,
            "more in flight than the engine was opened for"
        );
        assert!((io.device.0 as usize) < self.devices.len());
        self.backlog.push(io.device, self.inflight.add(io));
    }

    pub(super) fn start(&mut self) {
        while let Some(place) = self.backlog.next_operation() {
            let device = self.inflight.io(place).device.0 as usize;
            let entry = self.entry(place);
            let queue = &self.queues[device];
            locked(&queue.jobs).waiting.push_back(entry);
            queue.work.notify_one();
        }
    }

    pub(super) fn reap(&mut self, done: &mut Vec<IoDone>) -> Result<(), EngineError> {
        // First the signal, then the events: an event between the two signals again.
        let _ = rustix::io::read(&self.shared.wake, &mut [0u8; 8]);
        let refused = std::mem::take(&mut *locked(&self.shared.refused));
        for (place, errno) in refused {
            self.end(place, -i64::from(errno), done);
        }
        loop {
            let mut events = [IoEvent::default(); EVENTS_MAX];
            let count = self.shared.context.events(&mut events)?;
            for event in &events[..count] {
                self.end(event.data as usize, event.result, done);
            }
            if count < EVENTS_MAX {
                break;
            }
        }
        // Operations to repeat, and operations that waited for room.
        self.start();
        Ok(())
    }

    fn end(&mut self, place: usize, result: i64, done: &mut Vec<IoDone>) {
        let device = self.inflight.io(place).device;
        self.backlog.gave_back(device);
        if self.inflight.retry(place, result) {
            self.backlog.push(device, place);
        } else {
            done.push(self.inflight.end(place, result));
        }
    }

    pub(super) fn wake(&self) -> BorrowedFd<'_> {
        self.shared.wake.as_fd()
    }

    pub(super) fn inflight_count(&self) -> usize {
        self.inflight.count()
    }

    /// The kernel's entry for the operation at `place` of the table.
    fn entry(&mut self, place: usize) -> Iocb {
        let io = self.inflight.io(place);
        let file = self.devices[io.device.0 as usize].as_ref();
        let file = file.expect("the device was not removed");
        let common = Iocb {
            data: place as u64,
            fd: file.as_raw_fd() as u32,
            flags: FLAG_WAKE,
            wake_fd: self.shared.wake.as_raw_fd() as u32,
            ..Iocb::default()
        };
        let opcode = match io.op {
            IoOp::Read => PREAD,
            IoOp::Write => PWRITE,
            // The other fields of a flush must be zero.
            IoOp::Flush => {
                return Iocb {
                    opcode: FDSYNC,
                    ..common
                };
            }
        };
        Iocb {
            opcode,
            address: io.memory.address(io.bytes) as u64,
            bytes: u64::from(io.bytes),
            offset: io.offset as i64,
            ..common
        }
    }
}

impl Drop for Aio {
    /// Waits for the operations in flight, or leaks their memory, because the kernel may still write to it.
    fn drop(&mut self) {
        let limit = Instant::now() + END_WAIT;
        let mut done = Vec::new();
        self.backlog.clear();
        while self.backlog.kernel_count() > 0 && Instant::now() < limit {
            let wait = Timespec {
                tv_sec: 0,
                tv_nsec: 10_000_000,
            };
            let _ = poll(
                &mut [PollFd::new(&self.shared.wake, PollFlags::IN)],
                Some(&wait),
            );
            if self.reap(&mut done).is_err() {
                break;
            }
            self.backlog.clear();
        }
        for queue in &self.queues {
            locked(&queue.jobs).ending = true;
            queue.work.notify_one();
        }
        if self.backlog.kernel_count() > 0 {
            self.inflight.leak();
            // Dropping the context would wait for the device.
            std::mem::forget(self.shared.clone());
            return;
        }
        for thread in self.threads.drain(..) {
            // A thread that panicked has printed its message.
            let _ = thread.join();
        }
    }
}

impl AioState {
    /// Hands the operations of a device's `queue` to the kernel, until the engine ends.
    fn run(&self, queue: &SubmitQueue) {
        let mut batch = Vec::with_capacity(BATCH_MAX);
        loop {
            {
                let mut jobs = locked(&queue.jobs);
                while jobs.waiting.is_empty() && !jobs.ending {
                    jobs = queue.work.wait(jobs).unwrap_or_else(|e| e.into_inner());
                }
                let count = jobs.waiting.len().min(BATCH_MAX);
                batch.extend(jobs.waiting.drain(..count));
            }
            if batch.is_empty() {
                return;
            }
            self.hand_over(&mut batch);
            batch.clear();
        }
    }

    /// Gives all of `batch` to the kernel. An operation that the kernel refuses ends with its errno.
    fn hand_over(&self, batch: &mut [Iocb]) {
        let (mut taken, mut tries) = (0, 0);
        while taken < batch.len() {
            let errno = match self.context.submit(&mut batch[taken..]) {
                Ok(count @ 1..) => {
                    (taken, tries) = (taken + count, 0);
                    continue;
                }
                // The kernel takes at least one or answers an errno.
                Ok(0) => libc::EAGAIN,
                Err(errno) => errno,
            };
            if errno == libc::EAGAIN && tries < SUBMIT_RETRIES_MAX {
                tries += 1;
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            locked(&self.refused).push((batch[taken].data as usize, errno));
            // Fails only after 2^64 - 2 unread signals.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
            (taken, tries) = (taken + 1, 0);
        }
    }
}

/// The kernel's `aio_context_t`. Dropping it waits for the operations in flight.
#[derive(Debug)]
struct Context(libc::c_ulong);

impl Context {
    /// Makes a context. Returns it with the number of operations it takes at a time, at most `asked`.
    fn new(asked: usize) -> Result<(Self, usize), EngineError> {
        let mut inflight_max = asked;
        loop {
            let mut id: libc::c_ulong = 0;
            // SAFETY: the kernel writes one number to `id`, which lives through the call.
            let made = unsafe { libc::syscall(libc::SYS_io_setup, inflight_max, &raw mut id) };
            if made == 0 {
                return Ok((Self(id), inflight_max));
            }
            let error = std::io::Error::last_os_error();
            if error.raw_os_error() == Some(libc::EAGAIN) && inflight_max > KERNEL_INFLIGHT_MIN {
                inflight_max /= 2;
                continue;
            }
            return Err(EngineError::Unavailable {
                engine: "aio",
                why: why_not(&error),
            });
        }
    }

    /// Submits `entries` as far as the kernel takes them. Returns their number, or the errno for the first.
    fn submit(&self, entries: &mut [Iocb]) -> Result<usize, i32> {
        let mut pointers: Vec<*mut Iocb> =
            entries.iter_mut().map(|entry| &raw mut *entry).collect();
        retried(|| {
            // SAFETY: the pointers are of entries that live through the call, which copies them. The memory an entry names
            // is owned by the inflight table until its event was reaped (`Aio::entry`), its files by the engine.
            unsafe {
                libc::syscall(
                    libc::SYS_io_submit,
                    self.0,
                    pointers.len() as libc::c_long,
                    pointers.as_mut_ptr(),
                )
            }
        })
    }

    /// Takes completed events without waiting. Returns their number.
    fn events(&self, events: &mut [IoEvent]) -> Result<usize, EngineError> {
        let mut no_wait = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let taken = retried(|| {
            // SAFETY: the kernel writes at most `events.len()` events there, and only reads the time.
            unsafe {
                libc::syscall(
                    libc::SYS_io_getevents,
                    self.0,
                    0 as libc::c_long,
                    events.len() as libc::c_long,
                    events.as_mut_ptr(),
                    &raw mut no_wait,
                )
            }
        });
        taken.map_err(|errno| EngineError::Broken {
            engine: "aio",
            action: "io_getevents",
            source: std::io::Error::from_raw_os_error(errno),
        })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: nothing uses the context any more: its only owner ends.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.0) };
    }
}

/// Repeats a system call that a signal interrupts. Returns its count or the errno.
fn retried(mut call: impl FnMut() -> libc::c_long) -> Result<usize, i32> {
    for _ in 0..INTERRUPTED_MAX {
        let count = call();
        if count >= 0 {
            return Ok(count as usize);
        }
        let errno = std::io::Error::last_os_error()
            .raw_os_error()
            .expect("a failed call sets errno");
        if errno != libc::EINTR {
            return Err(errno);
        }
    }
    Err(libc::EINTR)
}

/// Explains an error of io_setup and what to do about it.
fn why_not(error: &std::io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EAGAIN) => {
            "other programs use all of the machine's events (sysctl -w fs.aio-max-nr=1048576)"
                .into()
        }
        Some(libc::ENOSYS) => "this kernel or sandbox has no AIO".into(),
        Some(libc::EPERM) => "kernel AIO is forbidden, by seccomp most likely".into(),
        _ => format!("io_setup: {error}"),
    }
}

/// A thread that panicked leaves the list intact.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}
