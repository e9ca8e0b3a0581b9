//! Engines move bytes between devices and memory, many operations at a time.
//!
//! ```text
//!   driver ── submit(Io) ──▶ backlog ──start──▶ kernel or threads ──▶ wake() is readable ──reap──▶ IoDone
//! ```
//!
//! Promises: every submitted [`Io`] comes back as exactly one [`IoDone`], with the device's answer: an errno, or the bytes it
//! moved, which may be fewer than asked. An operation owns its memory until it comes back. Nothing here waits, with two
//! exceptions: the probe of [`Engine::open`], and dropping an engine, which waits up to 30 s for operations in flight.

use std::fmt;
use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use offload_api::ids::DeviceIndex;
use offload_api::{BLOCK_BYTES, ENGINES};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::arena::{Arena, ArenaId};
use crate::io::{AlignedBytes, IoId, IoOp};

pub mod aio;
mod backlog;
mod inflight;
mod injected_fault;
pub(crate) mod power_cut_sim;
pub mod psync;
pub mod rate_limited;
pub mod uring;

/// Time limit of each operation of the probe.
const PROBE: Duration = Duration::from_secs(10);

/// How long dropping an engine waits for operations in flight. The memory of one that has not ended by then is leaked, because
/// its device may still write to it.
const END_WAIT: Duration = Duration::from_secs(30);

/// The setting `engine`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum EngineChoice {
    /// The first of [`EngineChoice::AUTO`] that works on this machine.
    #[default]
    Auto,
    /// io_uring or nothing.
    Uring,
    /// Kernel AIO or nothing.
    Aio,
    /// Threads with pread and pwrite.
    Psync,
}

impl EngineChoice {
    /// The engines that `auto` tries, in this order.
    pub const AUTO: [Self; 3] = [Self::Uring, Self::Aio, Self::Psync];

    /// Returns the choice that a value of the setting names.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Auto]
            .into_iter()
            .chain(Self::AUTO)
            .find(|choice| choice.name() == name)
    }

    /// Returns the value of the setting, one of [`offload_api::ENGINES`].
    pub fn name(self) -> &'static str {
        ENGINES[self as usize]
    }
}

/// One operation.
#[derive(Debug)]
pub struct Io {
    /// Name of the operation, repeated in its [`IoDone`].
    pub id: IoId,
    /// Index of the device in the list the engine was opened with.
    pub device: DeviceIndex,
    /// Kind of operation.
    pub op: IoOp,
    /// First byte on the device.
    pub offset: u64,
    /// Bytes to move; 0 for a flush.
    pub bytes: u32,
    /// At least `bytes` long.
    pub memory: Memory,
}

/// The memory of an operation, owned by it while it runs.
#[derive(Debug)]
pub enum Memory {
    /// A part of an arena.
    Arena {
        /// The arena, kept mapped by this reference.
        arena: Arc<Arena>,
        /// First byte within the arena.
        offset: u64,
        /// Index of the registered piece that holds the bytes.
        piece: u32,
    },
    /// The daemon's own bytes.
    Meta(AlignedBytes),
    /// No memory: the operation is a flush.
    None,
}

impl Memory {
    /// Returns where the kernel finds the bytes. Panics when the memory has fewer than `bytes`.
    fn address(&mut self, bytes: u32) -> *mut u8 {
        match self {
            Self::Arena { arena, offset, .. } => arena.address(*offset, u64::from(bytes)),
            Self::Meta(own) => {
                assert!(
                    bytes as usize <= own.len(),
                    "{bytes} of {} bytes",
                    own.len()
                );
                own.as_mut_slice().as_mut_ptr()
            }
            Self::None => {
                assert_eq!(bytes, 0, "an operation without memory moves no bytes");
                std::ptr::null_mut()
            }
        }
    }
}

/// How an operation ended.
#[derive(Debug)]
pub struct IoDone {
    /// Name of the [`Io`].
    pub id: IoId,
    /// Bytes moved (0 for a flush), or the errno.
    pub outcome: Result<u32, i32>,
    /// Time from submission to completion; with threads, from when one took the operation.
    pub device_ns: u64,
    /// How often the kernel answered EAGAIN or EINTR and the operation was repeated.
    pub retried_count: u32,
    /// The memory of the [`Io`].
    pub memory: Memory,
}

/// Why there is no engine, or why it stopped working.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The engine cannot be used on this machine.
    #[error("engine {engine}: {why}")]
    Unavailable {
        /// Name of the engine.
        engine: &'static str,
        /// The refused call and how to fix it.
        why: String,
    },
    /// A system call failed that belongs to no operation.
    #[error("engine {engine}: {action}: {source}; the daemon cannot continue")]
    Broken {
        /// Name of the engine.
        engine: &'static str,
        /// The system call.
        action: &'static str,
        /// errno of the system call.
        source: std::io::Error,
    },
}

/// A daemon's engine, chosen at start.
#[derive(Debug)]
pub enum Engine {
    /// io_uring, one ring.
    Uring(Box<uring::Uring>),
    /// Kernel AIO, one context.
    Aio(Box<aio::Aio>),
    /// Threads.
    Psync(psync::Psync),
    /// One of the others, slowed down for a test.
    RateLimited(Box<rate_limited::RateLimited>),
}

impl Engine {
    /// Opens an engine for `devices`, reads from the first one and flushes a memory file with it. Returns the engine and the
    /// reason for the choice. No device is flushed: after a failed flush a device may have lost bytes that others wrote, and
    /// only the core can tell them. A device that answers with an error of its own is logged; the engine works.
    ///
    /// At most `inflight_max` operations may be submitted and not yet reaped. Call this on the thread that will use the engine.
    ///
    /// # Errors
    /// [`EngineError`] when the engine asked for is unavailable; `Auto` tries the next one instead.
    pub fn open(
        choice: EngineChoice,
        devices: &[Arc<File>],
        inflight_max: usize,
    ) -> Result<(Self, String), EngineError> {
        power_cut_sim::devices(devices);
        let (engine, reason) = Self::choose(choice, devices, inflight_max)?;
        let Some(limits) = test_hooks::rate_limit::limits() else {
            return Ok((engine, reason));
        };
        let limits = devices
            .iter()
            .map(|file| rate_limited::rate_limit(file, &limits))
            .collect();
        let reason = format!("{reason}; {limits:?}");
        let limited = rate_limited::RateLimited::new(engine, limits)?;
        Ok((Self::RateLimited(Box::new(limited)), reason))
    }

    fn choose(
        choice: EngineChoice,
        devices: &[Arc<File>],
        inflight_max: usize,
    ) -> Result<(Self, String), EngineError> {
        // An operation that one device takes, all take.
        let one = &devices[..devices.len().min(1)];
        let memory = || {
            let memory = crate::arena::memory_file("offloadd-probe");
            memory
                .map(|file| [Arc::new(File::from(file))])
                .map_err(|errno| EngineError::Unavailable {
                    engine: "any",
                    why: format!("create a memory file for the probe: {errno}"),
                })
        };
        let uring = || {
            let memory = memory()?;
            let tried = uring::Uring::open(&memory, 1)?;
            Self::Uring(Box::new(tried)).probed(&memory, &[IoOp::Flush])?;
            let ring = uring::Uring::open(devices, inflight_max)?;
            let about = ring.about();
            let ring = Self::Uring(Box::new(ring)).probed(one, &[IoOp::Read])?;
            Ok((ring, about))
        };
        let aio = || {
            let memory = memory()?;
            let tried = aio::Aio::open(&memory, 1)?;
            Self::Aio(Box::new(tried)).probed(&memory, &[IoOp::Flush])?;
            let context = aio::Aio::open(devices, inflight_max)?;
            Self::Aio(Box::new(context)).probed(one, &[IoOp::Read])
        };
        let psync = || psync::Psync::open(devices, inflight_max).map(Self::Psync);
        let told = "chosen by the settings";
        match choice {
            EngineChoice::Uring => {
                uring().map(|(engine, about)| (engine, format!("{told}; {about}")))
            }
            EngineChoice::Aio => Ok((aio()?, told.into())),
            EngineChoice::Psync => Ok((psync()?, told.into())),
            EngineChoice::Auto => {
                let no_uring: EngineError = match uring() {
                    Ok((engine, about)) => {
                        return Ok((engine, format!("a probe read worked; {about}")));
                    }
                    Err(error) => error,
                };
                match aio() {
                    Ok(engine) => Ok((engine, format!("instead of uring: {no_uring}"))),
                    Err(no_aio) => {
                        Ok((psync()?, format!("instead of uring: {no_uring}; {no_aio}")))
                    }
                }
            }
        }
    }

    /// Reads the first block of each of `devices`, or flushes them, and waits for the wake-ups.
    fn probed(mut self, devices: &[Arc<File>], ops: &[IoOp]) -> Result<Self, EngineError> {
        let engine = self.name();
        let each = |device| ops.iter().map(move |op| (device, *op));
        for ((device, file), op) in devices.iter().enumerate().flat_map(each) {
            let (bytes, memory, tried) = match op {
                IoOp::Read => {
                    let block = AlignedBytes::zeroed(BLOCK_BYTES as usize);
                    let tried = format!("reading {BLOCK_BYTES} bytes at 0 of");
                    (BLOCK_BYTES, Memory::Meta(block), tried)
                }
                _ => (0, Memory::None, "flushing".to_string()),
            };
            let refused = |what: String| EngineError::Unavailable {
                engine,
                why: format!("a probe: {tried} {}: {what}", named(device, file)),
            };
            self.submit(Io {
                id: IoId(0),
                device: DeviceIndex(device as u32),
                op,
                offset: 0,
                bytes,
                memory,
            });
            self.start()?;
            let mut done = Vec::new();
            let limit = Instant::now() + PROBE;
            while done.is_empty() {
                let left = limit.saturating_duration_since(Instant::now());
                let wait = self.again_after().map_or(left, |again| again.min(left));
                let wait = Timespec::try_from(wait).expect("seconds");
                let wake = self.wake();
                match poll(&mut [PollFd::new(&wake, PollFlags::IN)], Some(&wait)) {
                    Ok(0) if left.is_zero() => {
                        return Err(refused(format!("no answer in {} s", PROBE.as_secs())));
                    }
                    Ok(0) => self.start()?,
                    Ok(_) => self.reap(&mut done)?,
                    Err(rustix::io::Errno::INTR) => {}
                    Err(e) => return Err(refused(format!("poll: {e}"))),
                }
            }
            if let Err(errno) = done[0].outcome {
                let error = std::io::Error::from_raw_os_error(errno);
                if !is_of_device(errno) {
                    return Err(refused(error.to_string()));
                }
                tracing::warn!("{tried} {}: {error}", named(device, file));
            }
        }
        Ok(self)
    }

    /// Adds a device, behind the others.
    ///
    /// # Errors
    /// [`EngineError`]; the engine is unchanged.
    pub fn add(&mut self, file: Arc<File>) -> Result<(), EngineError> {
        match self {
            Self::Uring(e) => e.add(file),
            Self::Aio(e) => e.add(file),
            Self::Psync(e) => e.add(file),
            Self::RateLimited(e) => e.add(file),
        }
    }

    /// Closes a device and so unlocks it. Nothing may be in flight on it, now or later.
    ///
    /// # Errors
    /// [`EngineError`]; the device stays open until the engine ends.
    pub fn remove(&mut self, device: DeviceIndex) -> Result<(), EngineError> {
        match self {
            Self::Uring(e) => e.remove(device),
            Self::Aio(e) => {
                e.remove(device);
                Ok(())
            }
            Self::Psync(e) => {
                e.remove(device);
                Ok(())
            }
            Self::RateLimited(e) => e.inner_mut().remove(device),
        }
    }

    /// Returns the engine's name in the settings.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Uring(_) => "uring",
            Self::Aio(_) => "aio",
            Self::Psync(_) => "psync",
            Self::RateLimited(e) => e.inner().name(),
        }
    }

    /// Takes an operation. It runs after the next [`Self::start`].
    pub fn submit(&mut self, io: Io) {
        if !matches!(self, Self::RateLimited(_)) {
            injected_fault::before(&io);
        }
        match self {
            Self::Uring(e) => e.submit(io),
            Self::Aio(e) => e.submit(io),
            Self::Psync(e) => e.submit(io),
            Self::RateLimited(e) => e.submit(io),
        }
    }

    /// Starts what was submitted, and does one small piece of postponed work.
    ///
    /// # Errors
    /// [`EngineError::Broken`]: the engine ends no more operations.
    pub fn start(&mut self) -> Result<(), EngineError> {
        match self {
            Self::Uring(e) => e.start(),
            Self::Aio(e) => {
                e.start();
                Ok(())
            }
            Self::Psync(_) => Ok(()),
            Self::RateLimited(e) => e.inner_mut().start(),
        }
    }

    /// Appends the operations that have ended to `done`, without waiting.
    ///
    /// # Errors
    /// [`EngineError::Broken`]: the engine ends no more operations.
    pub fn reap(&mut self, done: &mut Vec<IoDone>) -> Result<(), EngineError> {
        let first = done.len();
        match self {
            Self::Uring(e) => e.reap(done)?,
            Self::Aio(e) => e.reap(done)?,
            Self::Psync(e) => e.reap(done),
            Self::RateLimited(e) => return e.reap(done),
        }
        injected_fault::after(&mut done[first..]);
        Ok(())
    }

    /// Descriptor that is readable when [`Self::reap`] will find something.
    pub fn wake(&self) -> BorrowedFd<'_> {
        match self {
            Self::Uring(e) => e.wake(),
            Self::Aio(e) => e.wake(),
            Self::Psync(e) => e.wake(),
            Self::RateLimited(e) => e.wake(),
        }
    }

    /// Operations submitted and not yet reaped.
    pub fn inflight_count(&self) -> usize {
        match self {
            Self::Uring(e) => e.inflight_count(),
            Self::Aio(e) => e.inflight_count(),
            Self::Psync(e) => e.inflight_count(),
            Self::RateLimited(e) => e.inflight_count(),
        }
    }

    /// Registers an arena's memory with the kernel, one piece with each [`Self::start`], where the engine profits from it.
    /// Operations work before that, and also when the machine's limits forbid it.
    pub fn register(&mut self, arena: &Arc<Arena>) {
        match self {
            Self::Uring(e) => e.register(arena),
            Self::Aio(_) | Self::Psync(_) => {}
            Self::RateLimited(e) => e.inner_mut().register(arena),
        }
    }

    /// Reverses [`Self::register`], one piece with each [`Self::start`].
    pub fn forget(&mut self, arena: ArenaId) {
        match self {
            Self::Uring(e) => e.forget(arena),
            Self::Aio(_) | Self::Psync(_) => {}
            Self::RateLimited(e) => e.inner_mut().forget(arena),
        }
    }

    /// Whether the kernel holds no piece of an arena after [`Self::forget`].
    pub fn is_forgotten(&self, arena: ArenaId) -> bool {
        match self {
            Self::Uring(e) => e.is_forgotten(arena),
            Self::Aio(_) | Self::Psync(_) => true,
            Self::RateLimited(e) => e.inner().is_forgotten(arena),
        }
    }

    /// Whether [`Self::start`] has postponed work left, so that the caller should not sleep.
    pub fn has_work(&self) -> bool {
        match self {
            Self::Uring(e) => e.has_work(),
            Self::Aio(_) | Self::Psync(_) => false,
            Self::RateLimited(e) => e.inner().has_work(),
        }
    }

    /// When to call [`Self::start`] again although nothing ends: the kernel refused some operations for now, and does not say
    /// when it will take them.
    pub fn again_after(&self) -> Option<Duration> {
        match self {
            Self::Uring(e) => e.again_after(),
            Self::Aio(_) | Self::Psync(_) => None,
            Self::RateLimited(e) => e.inner().again_after(),
        }
    }
}

/// Whether the errno comes from a device that failed, and not from a kernel that refuses the operation.
fn is_of_device(errno: i32) -> bool {
    [
        libc::EIO,
        libc::ETIMEDOUT,
        libc::ETIME,
        libc::ENOLINK,
        libc::EREMOTEIO,
        libc::EBADE,
        libc::ENODATA,
        libc::EILSEQ,
        libc::ENOSPC,
    ]
    .contains(&errno)
}

/// Describes a device for messages.
fn named(place: usize, file: &File) -> String {
    match path_of(file) {
        Some(path) => format!("device {place} ({})", path.display()),
        None => format!("device {place}"),
    }
}

fn path_of(file: &File) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::EngineChoice;

    #[test]
    fn every_value_of_the_setting_is_a_choice() {
        for engine in offload_api::ENGINES {
            let choice = EngineChoice::from_name(engine);
            assert_eq!(choice.map(EngineChoice::name), Some(engine));
        }
        assert_eq!(EngineChoice::default().name(), offload_api::ENGINES[0]);
        assert_eq!(EngineChoice::from_name("mmap"), None);
    }
}
