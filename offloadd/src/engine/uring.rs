//! The engine on io_uring: one ring, owned by the thread that opened it.
//!
//! ```text
//!   submit ─▶ lanes ─start─▶ submission queue ─▶ kernel ─▶ completion queue ─reap─▶ IoDone
//!                                 │ registered files, registered pieces of arenas where the limits allow
//!   inflight table: owns each operation's memory from `submit` until its completion was reaped
//! ```
//!
//! SINGLE_ISSUER and DEFER_TASKRUN where the kernel has them: completions are then handled when this thread asks, not in
//! the middle of something else; an eventfd tells when to ask. Registered memory saves pinning pages for every operation
//! (2.2 against 4.7 GB/s of writes in pieces of 1 MiB on one machine); without it everything works the same.
//!
//! What the kernel does not take for now (EAGAIN, EBUSY: it lacks memory, or room for completions) stays in the submission
//! queue, and [`Uring::again_after`] says when it is to be offered again: it wakes nobody for that. Completions are asked for
//! nevertheless, because they give back what it lacks.
//! Holds the `unsafe` of submitting.

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

pub(super) use self::setup::Flavour;
use self::setup::{set_up, why_not};
use super::backlog::Backlog;
use super::inflight::Inflight;
use super::{END_WAIT, EngineError, Io, IoDone, Memory, batch_of, named, processors};
use crate::arena::{Arena, ArenaId};
use crate::core::IoOp;
use crate::store::DEVICES_MAX;

/// Entries handed to the kernel in one system call; more wait one round.
const SUBMISSION_ENTRIES: u32 = 256;

/// In the kernel at a time; more wait in the lanes. Far above what drives need (some tens), below what the completion
/// queue holds.
const KERNEL_INFLIGHT_MAX: usize = 2048;

/// Registered pieces over all arenas: io_uring's limit is 16,384.
const BUFFERS_MAX: u16 = 16_384;

/// A place of the table of files without one.
const NO_FILE: i32 = -1;

/// System calls in a row, where each takes only some entries or is interrupted.
const ENTERS_MAX: u32 = 2 * SUBMISSION_ENTRIES;

/// When what the kernel did not take is offered to it again.
const AGAIN_AFTER: Duration = Duration::from_millis(5);

/// Between two words about that.
const REFUSAL_TOLD_EVERY: Duration = Duration::from_secs(60);

/// The flag with which io_uring_enter runs what was put off, whether it waits or not.
const ENTER_GETEVENTS: u32 = 1;

/// The engine.
#[derive(Debug)]
pub struct Uring {
    ring: Ring,
    wake: OwnedFd,
    flavour: Flavour,
    /// How the ring was set up, for people.
    about: &'static str,
    /// Of this machine, or of what we may use of it.
    processors: usize,
    /// `None`: it was removed.
    devices: Vec<Option<Arc<File>>>,
    inflight: Inflight,
    inflight_max: usize,
    /// What they handed on is in the submission queue or with the kernel.
    backlog: Backlog,
    /// The kernel did not take all, the last time it was entered.
    refused: bool,
    refusal_told: Option<Instant>,
    /// So many times a test has the kernel answer with this errno.
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
    pub(super) fn open(
        devices: &[Arc<File>],
        inflight_max: usize,
        flavour: Flavour,
    ) -> Result<Self, EngineError> {
        let unavailable = |why| EngineError::Unavailable {
            engine: flavour.name(),
            why,
        };
        let (ring, about) = set_up(flavour).map_err(|e| unavailable(why_not(&e)))?;
        let refused =
            |action: &'static str| move |e: std::io::Error| unavailable(format!("{action}: {e}"));
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| refused("eventfd")(e.into()))?;
        let submitter = ring.submitter();
        submitter
            .register_eventfd(wake.as_raw_fd())
            .map_err(refused("registering the wake-up"))?;
        let mut fds: Vec<_> = devices.iter().map(|file| file.as_raw_fd()).collect();
        // Room for devices that come later.
        fds.resize(fds.len().max(DEVICES_MAX as usize), NO_FILE);
        submitter
            .register_files(&fds)
            .map_err(refused("registering the devices"))?;
        let free_buffers = match submitter.register_buffers_sparse(u32::from(BUFFERS_MAX)) {
            Ok(()) => (0..BUFFERS_MAX).rev().collect(),
            // Before 5.19, or no memory to be pinned: unregistered, then.
            Err(_) => Vec::new(),
        };
        let mut backlog = Backlog::new(KERNEL_INFLIGHT_MAX);
        devices.iter().for_each(|_| backlog.add());
        Ok(Self {
            ring: Ring(ring),
            wake,
            flavour,
            about,
            processors: processors(),
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

    pub(super) fn name(&self) -> &'static str {
        self.flavour.name()
    }

    /// One more device, behind the others.
    pub(super) fn add(&mut self, file: Arc<File>) -> Result<(), EngineError> {
        let place = self.devices.len();
        self.update(place, file.as_raw_fd())
            .map_err(|error| self.refused_device("registering", place, &file, &error))?;
        self.backlog.add();
        self.devices.push(Some(file));
        Ok(())
    }

    /// Nothing is in flight on this device, and nothing will be: closes it.
    pub(super) fn remove(&mut self, device: DeviceIndex) -> Result<(), EngineError> {
        let place = device.0 as usize;
        let file = self.devices[place].clone();
        let file = file.expect("nothing is removed twice");
        self.update(place, NO_FILE)
            .map_err(|error| self.refused_device("unregistering", place, &file, &error))?;
        self.backlog.remove(device);
        self.devices[place] = None;
        Ok(())
    }

    /// The one that was added last was not to be: its place is the next one's.
    pub(super) fn forget_last(&mut self) {
        // A file that stays registered is replaced by the next.
        let _ = self.update(self.devices.len() - 1, NO_FILE);
        self.backlog.forget_last();
        self.devices.pop();
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
            engine: self.flavour.name(),
            why: format!("{action} {}: {error}", named(place, file)),
        }
    }

    /// How the ring was set up, for people.
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
        // One piece a turn, either way, so that the other sessions' operations wait for no more than that.
        if let Some((_, buffer)) = self.to_unregister.pop_front() {
            self.unregister(buffer);
        } else if let Some((arena, piece)) = self.to_register.pop_front() {
            self.register_piece(&arena, piece);
        }
        // What it did not take goes first.
        if self.refused && !self.enter()? {
            return Ok(());
        }
        let most = SUBMISSION_ENTRIES as usize;
        let batch = batch_of(self.backlog.waiting_count(), most, self.processors);
        while self.backlog.waiting_count() > 0 {
            let filled_count = self.ring.0.submission().len();
            // With a thread of the kernel's it is full until that has come to it; `reap` comes back here.
            if filled_count >= batch && (!self.enter()? || self.ring.0.submission().is_full()) {
                return Ok(());
            }
            let Some(place) = self.backlog.take() else {
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
        // First the signal, then the queue: what comes between the two signals again.
        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
        self.drain(done)
    }

    /// The same without the signal.
    pub(super) fn drain(&mut self, done: &mut Vec<IoDone>) -> Result<(), EngineError> {
        // Asks the drive (polled), or runs what the kernel put off (DEFER_TASKRUN): this is where completions appear.
        self.enter()?;
        loop {
            let Some(completion) = self.ring.0.completion().next() else {
                break;
            };
            let place = completion.user_data() as usize;
            let result = i64::from(completion.result());
            let device = self.inflight.io(place).device;
            self.backlog.gave_back(device);
            if self.inflight.again(place, result) {
                self.backlog.push(device, place);
            } else {
                done.push(self.inflight.end(place, result));
            }
        }
        // What was put back, and what waited for room.
        if self.backlog.waiting_count() == 0 {
            Ok(())
        } else {
            self.start()
        }
    }

    pub(super) fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// As if something had ended.
    pub(super) fn signal(&self) {
        // Can only fail when 2^64 - 2 signals were not read.
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

    /// Releases the pages of one piece: as long as [`Self::register_piece`] takes.
    fn unregister(&mut self, buffer: u16) {
        let nothing = libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 0,
        };
        // SAFETY: an empty buffer refers to no memory. The kernel keeps what operations in flight still use.
        let emptied = unsafe {
            self.ring
                .0
                .submitter()
                .register_buffers_update(buffer.into(), &[nothing], None)
        };
        match emptied {
            Ok(()) => self.free_buffers.push(buffer),
            // Its pages stay pinned until the ring ends: a leak to know about, no wrong bytes.
            Err(error) => tracing::error!(%error, buffer, "cannot unregister arena memory"),
        }
    }

    pub(super) fn has_work(&self) -> bool {
        !self.to_register.is_empty() || !self.to_unregister.is_empty()
    }

    /// When [`Self::start`] is to be called although nothing ends.
    pub(super) fn again_after(&self) -> Option<Duration> {
        self.refused.then_some(AGAIN_AFTER)
    }

    /// One piece, at most 1 GiB: 20 to 80 ms with small pages. The reason why only one is done a turn.
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
                        "arena memory cannot be registered with io_uring: each operation pins its pages anew. Raise the \
                         memlock limit (`ulimit -l unlimited`, or LimitMEMLOCK=infinity in the unit)"
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

    /// Hands over the submission queue and runs what was put off. Whether the kernel took all; it stays in the queue otherwise,
    /// and [`Self::again_after`] says so.
    fn enter(&mut self) -> Result<bool, EngineError> {
        let before = self.refused;
        let refusal = self.offer()?;
        self.refused = refusal.is_some();
        if let Some(error) = refusal {
            self.run_what_was_put_off()?;
            self.tell(&error);
        }
        // The signal of these may have been read when the kernel refused to hand them out.
        if (before || self.refused) && !self.ring.0.completion().is_empty() {
            self.signal();
        }
        Ok(!self.refused)
    }

    /// One system call, or some more until the kernel has taken all: why it has not.
    fn offer(&mut self) -> Result<Option<std::io::Error>, EngineError> {
        for _ in 0..ENTERS_MAX {
            match self.submit_all() {
                // The kernel's thread takes them when it comes to them.
                Ok(_) if self.flavour == Flavour::Sqpoll => return Ok(None),
                Ok(_) if self.ring.0.submission().is_empty() => return Ok(None),
                Ok(_) => {}
                Err(e) if e.raw_os_error() == Some(libc::EINTR) => {}
                Err(e) if is_for_now(&e) => return Ok(Some(e)),
                Err(source) => return Err(broken(source)),
            }
        }
        Ok(Some(std::io::ErrorKind::Interrupted.into()))
    }

    /// A refused call does not come to this.
    fn run_what_was_put_off(&self) -> Result<(), EngineError> {
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

    fn tell(&mut self, error: &std::io::Error) {
        if (self.refusal_told).is_some_and(|at| at.elapsed() < REFUSAL_TOLD_EVERY) {
            return;
        }
        self.refusal_told = Some(Instant::now());
        tracing::warn!(
            %error,
            "io_uring takes no more operations for now; they are offered to it again every {} ms. If this lasts, the kernel \
             lacks memory: see what uses it (`free`, `slabtop`)",
            AGAIN_AFTER.as_millis()
        );
    }
}

/// No memory for a request, or completions that wait to be reaped: it passes.
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
    /// The kernel may still write to memory we own: wait for it, or never give that memory back.
    fn drop(&mut self) {
        let limit = Instant::now() + END_WAIT;
        let mut done = Vec::new();
        self.backlog.discard_unreadable();
        while self.backlog.kernel_count() > 0 && Instant::now() < limit {
            if self.reap(&mut done).is_err() {
                break;
            }
            self.backlog.discard_unreadable();
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
