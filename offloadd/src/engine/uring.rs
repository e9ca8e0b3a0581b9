//! The engine on io_uring: one ring, owned by the thread that opened it.
//!
//! ```text
//!   submit ─▶ backlog ─start─▶ submission queue ─▶ kernel ─▶ completion queue ─reap─▶ IoDone
//!                                 │ registered files, registered pieces of arenas where the limits allow
//!   inflight table: owns each operation's memory from `submit` until its completion was reaped
//! ```
//!
//! The ring has SINGLE_ISSUER and DEFER_TASKRUN where the kernel does: it then handles completions when this thread asks, and an
//! eventfd tells when to ask. Registered memory saves pinning pages for every operation (writes of 1 MiB: 4.7 instead of
//! 2.2 GB/s on one machine); operations work without it.
//!
//! Operations that the kernel refuses for now (EAGAIN, EBUSY: it lacks memory or room for completions) stay in the submission
//! queue. The kernel does not say when it would take them, so [`Uring::again_after`] does. Completions are reaped meanwhile,
//! because they free what the kernel lacks. Holds the `unsafe` of submitting.

mod setup;
#[cfg(test)]
mod tests;

#[cfg(test)]
use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, squeue, types};
use offload_api::ids::DeviceIndex;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use self::setup::{set_up, why_not};
use super::backlog::Backlog;
use super::inflight::Inflight;
use super::{END_WAIT, EngineError, Io, IoDone, Memory, named};
use crate::arena::{Arena, ArenaId};
use crate::io::IoOp;
use offload_api::DEVICES_MAX;

/// Entries handed to the kernel in one system call; more wait one round.
const SUBMISSION_ENTRIES: u32 = 256;

/// Operations in the kernel at a time; more wait in the backlog. Drives need some tens each, and the completion queue holds
/// more.
const KERNEL_INFLIGHT_MAX: usize = 2048;

/// Registered pieces over all arenas; io_uring's limit.
const BUFFERS_MAX: u16 = 16_384;

/// Marks an unused place of the table of registered files.
const NO_FILE: i32 = -1;

/// System calls in a row where each takes only some entries or is interrupted.
const ENTERS_MAX: u32 = 2 * SUBMISSION_ENTRIES;

/// Time until refused operations are offered to the kernel again.
const AGAIN_AFTER: Duration = Duration::from_millis(5);

/// Least time between two log lines about refused operations.
const REFUSAL_TOLD_EVERY: Duration = Duration::from_secs(60);

/// Flag of io_uring_enter: run deferred work.
const ENTER_GETEVENTS: u32 = 1;

/// The engine.
#[derive(Debug)]
pub struct Uring {
    ring: Ring,
    wake: OwnedFd,
    /// How the ring was set up.
    about: &'static str,
    /// `None` after its removal.
    devices: Vec<Option<Arc<File>>>,
    inflight: Inflight,
    inflight_max: usize,
    backlog: Backlog,
    /// Whether the kernel refused operations when it was last entered.
    refused: bool,
    refusal_told: Option<Instant>,
    /// How often a test lets the kernel answer with which errno.
    #[cfg(test)]
    refuses: Cell<(u32, i32)>,
    registered: HashMap<ArenaId, Vec<Option<u16>>>,
    free_buffers: Vec<u16>,
    to_register: VecDeque<(Arc<Arena>, u32)>,
    to_unregister: VecDeque<(ArenaId, u16)>,
    registration_refused: Option<std::io::Error>,
}

struct Ring(IoUring);

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("IoUring")
    }
}

impl Uring {
    /// Sets the ring up.
    pub(super) fn open(devices: &[Arc<File>], inflight_max: usize) -> Result<Self, EngineError> {
        let unavailable = |why| EngineError::Unavailable {
            engine: "uring",
            why,
        };
        let (ring, about) = set_up().map_err(|e| unavailable(why_not(&e)))?;
        let refused =
            |action: &'static str| move |e: std::io::Error| unavailable(format!("{action}: {e}"));
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| refused("eventfd")(e.into()))?;
        let submitter = ring.submitter();
        submitter
            .register_eventfd(wake.as_raw_fd())
            .map_err(refused("registering the wake-up"))?;
        let mut fds: Vec<_> = devices.iter().map(|file| file.as_raw_fd()).collect();
        // Room for devices that are added later.
        fds.resize(fds.len().max(DEVICES_MAX as usize), NO_FILE);
        submitter
            .register_files(&fds)
            .map_err(refused("registering the devices"))?;
        let free_buffers = match submitter.register_buffers_sparse(u32::from(BUFFERS_MAX)) {
            Ok(()) => (0..BUFFERS_MAX).rev().collect(),
            // Linux before 5.19, or no memory may be pinned: memory stays unregistered.
            Err(_) => Vec::new(),
        };
        let mut backlog = Backlog::new(KERNEL_INFLIGHT_MAX);
        devices.iter().for_each(|_| backlog.add());
        Ok(Self {
            ring: Ring(ring),
            wake,
            about,
            devices: devices.iter().cloned().map(Some).collect(),
            inflight: Inflight::default(),
            inflight_max,
            backlog,
            refused: false,
            refusal_told: None,
            #[cfg(test)]
            refuses: Cell::default(),
            registered: HashMap::new(),
            free_buffers,
            to_register: VecDeque::new(),
            to_unregister: VecDeque::new(),
            registration_refused: None,
        })
    }

    /// Adds a device, behind the others.
    pub(super) fn add(&mut self, file: Arc<File>) -> Result<(), EngineError> {
        let place = self.devices.len();
        self.update(place, file.as_raw_fd())
            .map_err(|error| self.refused_device("registering", place, &file, &error))?;
        self.backlog.add();
        self.devices.push(Some(file));
        Ok(())
    }

    /// Closes a device. Nothing may be in flight on it, now or later.
    pub(super) fn remove(&mut self, device: DeviceIndex) -> Result<(), EngineError> {
        let place = device.0 as usize;
        let file = self.devices[place].clone();
        let file = file.expect("no device is removed twice");
        self.update(place, NO_FILE)
            .map_err(|error| self.refused_device("unregistering", place, &file, &error))?;
        self.backlog.remove(device);
        self.devices[place] = None;
        Ok(())
    }

    fn update(&self, place: usize, fd: i32) -> std::io::Result<()> {
        let updated = (self.ring.0.submitter()).register_files_update(place as u32, &[fd]);
        updated.map(drop)
    }

    fn refused_device(
        &self,
        action: &str,
        place: usize,
        file: &File,
        error: &std::io::Error,
    ) -> EngineError {
        EngineError::Unavailable {
            engine: "uring",
            why: format!("{action} {}: {error}", named(place, file)),
        }
    }

    /// Describes how the ring was set up.
    pub(super) fn about(&self) -> &'static str {
        self.about
    }

    pub(super) fn submit(&mut self, io: Io) {
        assert!(
            self.inflight_count() < self.inflight_max,
            "more in flight than the engine was opened for"
        );
        assert!((io.device.0 as usize) < self.devices.len());
        self.backlog.push(io.device, self.inflight.add(io));
    }

    pub(super) fn start(&mut self) -> Result<(), EngineError> {
        // One piece a call, so that operations of other sessions wait for no more than that.
        if let Some((_, buffer)) = self.to_unregister.pop_front() {
            self.unregister(buffer);
        } else if let Some((arena, piece)) = self.to_register.pop_front() {
            self.register_piece(&arena, piece);
        }
        // Refused operations go first.
        if self.refused && !self.enter()? {
            return Ok(());
        }
        while self.backlog.waiting_count() > 0 {
            if self.ring.0.submission().is_full() && !self.enter()? {
                return Ok(());
            }
            let Some(place) = self.backlog.next_operation() else {
                break;
            };
            let entry = self.entry(place);
            // SAFETY: the entry's file is registered, and its memory is owned by the inflight table until its completion
            // was reaped (see `entry` and `reap`).
            let pushed = unsafe { self.ring.0.submission().push(&entry) };
            assert!(pushed.is_ok(), "the submission queue has room");
        }
        if self.ring.0.submission().is_empty() {
            return Ok(());
        }
        self.enter().map(drop)
    }

    pub(super) fn reap(&mut self, done: &mut Vec<IoDone>) -> Result<(), EngineError> {
        // First the signal, then the queue: a completion between the two signals again.
        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
        // Runs deferred work (DEFER_TASKRUN), which makes completions appear.
        self.enter()?;
        loop {
            let Some(completion) = self.ring.0.completion().next() else {
                break;
            };
            let place = completion.user_data() as usize;
            let result = i64::from(completion.result());
            let device = self.inflight.io(place).device;
            self.backlog.gave_back(device);
            if self.inflight.retry(place, result) {
                self.backlog.push(device, place);
            } else {
                done.push(self.inflight.end(place, result));
            }
        }
        // Operations to repeat, and operations that waited for room.
        if self.backlog.waiting_count() == 0 {
            Ok(())
        } else {
            self.start()
        }
    }

    pub(super) fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Makes [`Self::wake`] readable.
    fn signal(&self) {
        // Fails only after 2^64 - 2 unread signals.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    pub(super) fn inflight_count(&self) -> usize {
        self.inflight.count()
    }

    pub(super) fn register(&mut self, arena: &Arc<Arena>) {
        let pieces = arena.pieces().len();
        self.registered.insert(arena.id(), vec![None; pieces]);
        self.to_register
            .extend((0..pieces as u32).map(|piece| (arena.clone(), piece)));
    }

    pub(super) fn forget(&mut self, arena: ArenaId) {
        self.to_register
            .retain(|(waiting, _)| waiting.id() != arena);
        let pieces = self.registered.remove(&arena).unwrap_or_default();
        self.to_unregister
            .extend(pieces.into_iter().flatten().map(|buffer| (arena, buffer)));
    }

    pub(super) fn is_forgotten(&self, arena: ArenaId) -> bool {
        !self.registered.contains_key(&arena)
            && (self.to_unregister.iter()).all(|(waiting, _)| *waiting != arena)
    }

    /// Releases the pages of one piece. Takes as long as [`Self::register_piece`].
    fn unregister(&mut self, buffer: u16) {
        let nothing = libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        // SAFETY: an empty buffer refers to no memory. The kernel keeps the pages that operations in flight still use.
        let emptied = unsafe {
            self.ring
                .0
                .submitter()
                .register_buffers_update(buffer.into(), &[nothing], None)
        };
        match emptied {
            Ok(()) => self.free_buffers.push(buffer),
            Err(error) => tracing::error!(
                %error,
                buffer,
                "cannot unregister arena memory: its pages stay pinned until the daemon ends"
            ),
        }
    }

    pub(super) fn has_work(&self) -> bool {
        !self.to_register.is_empty() || !self.to_unregister.is_empty()
    }

    /// When to call [`Self::start`] although nothing ends.
    pub(super) fn again_after(&self) -> Option<Duration> {
        self.refused.then_some(AGAIN_AFTER)
    }

    /// Registers one piece, at most 1 GiB. With small pages this takes 20 to 80 ms, which is why a call does only one.
    fn register_piece(&mut self, arena: &Arc<Arena>, piece: u32) {
        let Some(buffer) = self.free_buffers.pop() else {
            return;
        };
        let place = arena.pieces()[piece as usize];
        let memory = libc::iovec {
            iov_base: arena.address(place.offset, place.bytes).cast(),
            iov_len: place.bytes as usize,
        };
        // SAFETY: the memory is mapped as long as the arena lives. It may be unmapped while still registered: the kernel
        // has pinned the pages themselves, and no operation names the buffer after `forget`.
        let registered = unsafe {
            self.ring
                .0
                .submitter()
                .register_buffers_update(buffer.into(), &[memory], None)
        };
        match registered {
            Ok(()) => {
                let pieces = self.registered.get_mut(&arena.id());
                pieces.expect("registering until forgotten")[piece as usize] = Some(buffer);
            }
            Err(error) => {
                self.free_buffers.push(buffer);
                if self.registration_refused.is_none() {
                    tracing::warn!(
                        %error,
                        "cannot register arena memory with io_uring, so every operation pins its pages again, which costs \
                         throughput; raise the memlock limit (`ulimit -l unlimited`, or LimitMEMLOCK=infinity in the unit)"
                    );
                    self.registration_refused = Some(error);
                }
            }
        }
    }

    /// The kernel's entry for the operation at `place` of the table.
    fn entry(&mut self, place: usize) -> squeue::Entry {
        let io = self.inflight.io(place);
        let device = types::Fixed(io.device.0);
        let buffer = match &io.memory {
            Memory::Arena { arena, piece, .. } => self
                .registered
                .get(&arena.id())
                .and_then(|pieces| pieces[*piece as usize]),
            _ => None,
        };
        let address = io.memory.address(io.bytes);
        let entry = match (io.op, buffer) {
            (IoOp::Read, Some(index)) => opcode::ReadFixed::new(device, address, io.bytes, index)
                .offset(io.offset)
                .build(),
            (IoOp::Read, None) => opcode::Read::new(device, address, io.bytes)
                .offset(io.offset)
                .build(),
            (IoOp::Write, Some(index)) => opcode::WriteFixed::new(device, address, io.bytes, index)
                .offset(io.offset)
                .build(),
            (IoOp::Write, None) => opcode::Write::new(device, address, io.bytes)
                .offset(io.offset)
                .build(),
            (IoOp::Flush, _) => opcode::Fsync::new(device)
                .flags(types::FsyncFlags::DATASYNC)
                .build(),
        };
        entry.user_data(place as u64)
    }

    /// Hands over the submission queue and runs deferred work. Returns whether the kernel took all entries; if not, the others
    /// stay in the queue until [`Self::again_after`].
    fn enter(&mut self) -> Result<bool, EngineError> {
        let before = self.refused;
        let refusal = self.offer()?;
        self.refused = refusal.is_some();
        if let Some(error) = refusal {
            self.run_deferred()?;
            self.report(&error);
        }
        // The signal of these completions may have been read before the kernel handed them out.
        if (before || self.refused) && !self.ring.0.completion().is_empty() {
            self.signal();
        }
        Ok(!self.refused)
    }

    /// Enters the kernel until it has taken all entries. Returns the error with which it refused the rest.
    fn offer(&mut self) -> Result<Option<std::io::Error>, EngineError> {
        for _ in 0..ENTERS_MAX {
            match self.submit_all() {
                Ok(_) if self.ring.0.submission().is_empty() => return Ok(None),
                Ok(_) => {}
                Err(e) if e.raw_os_error() == Some(libc::EINTR) => {}
                Err(e) if is_for_now(&e) => return Ok(Some(e)),
                Err(source) => return Err(broken(source)),
            }
        }
        Ok(Some(std::io::ErrorKind::Interrupted.into()))
    }

    /// Runs deferred work after a refused call, which did not get to it.
    fn run_deferred(&self) -> Result<(), EngineError> {
        let submitter = self.ring.0.submitter();
        // SAFETY: no entry is handed over, and nothing is waited for: there is no argument the kernel could read.
        match unsafe { submitter.enter::<libc::sigset_t>(0, 0, ENTER_GETEVENTS, None) } {
            Err(e) if e.raw_os_error() != Some(libc::EINTR) && !is_for_now(&e) => Err(broken(e)),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    fn submit_all(&self) -> std::io::Result<usize> {
        #[cfg(test)]
        if let (count @ 1.., errno) = self.refuses.get() {
            self.refuses.set((count - 1, errno));
            return Err(std::io::Error::from_raw_os_error(errno));
        }
        self.ring.0.submit()
    }

    fn report(&mut self, error: &std::io::Error) {
        if (self.refusal_told).is_some_and(|at| at.elapsed() < REFUSAL_TOLD_EVERY) {
            return;
        }
        self.refusal_told = Some(Instant::now());
        tracing::warn!(
            %error,
            "io_uring refuses operations for now; they are retried every {} ms. If this lasts, the kernel is short of memory: \
             see what uses it (`free`, `slabtop`)",
            AGAIN_AFTER.as_millis()
        );
    }
}

/// Whether the error passes: no memory for a request, or too many unreaped completions.
fn is_for_now(error: &std::io::Error) -> bool {
    [Some(libc::EAGAIN), Some(libc::EBUSY)].contains(&error.raw_os_error())
}

fn broken(source: std::io::Error) -> EngineError {
    EngineError::Broken {
        engine: "uring",
        action: "io_uring_enter",
        source,
    }
}

impl Drop for Uring {
    /// Waits for the operations in flight, or leaks their memory, because the kernel may still write to it.
    fn drop(&mut self) {
        let limit = Instant::now() + END_WAIT;
        let mut done = Vec::new();
        self.backlog.clear();
        while self.backlog.kernel_count() > 0 && Instant::now() < limit {
            if self.reap(&mut done).is_err() {
                break;
            }
            self.backlog.clear();
            if self.backlog.kernel_count() > 0 {
                let wait = Timespec {
                    tv_sec: 0,
                    tv_nsec: 10_000_000,
                };
                let _ = poll(&mut [PollFd::new(&self.wake, PollFlags::IN)], Some(&wait));
            }
        }
        if self.backlog.kernel_count() > 0 {
            self.inflight.leak();
        }
    }
}
