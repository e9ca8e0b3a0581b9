//! Engines move bytes between devices and memory, many operations at a time.
//!
//! ```text
//!   driver ── submit(Io) ──▶ lanes ──start──▶ kernel or threads ──▶ wake() is readable ──reap──▶ IoDone
//! ```
//!
//! Promises: every [`Io`] that was submitted comes back as exactly one [`IoDone`], with what the device said: an errno, or
//! the bytes it moved, which may be fewer than asked. An operation owns its memory until it comes back. Nothing here waits,
//! except [`Engine::open`]'s probe and dropping an engine, which waits half a minute for what is in flight.
//!
//! An enum and not a trait: there are three (and one around them in test builds), and the owner thread should not care which it has.

use std::fmt;
use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use offload_api::BLOCK_BYTES;
use offload_api::ids::DeviceIndex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::arena::{Arena, ArenaId};
use crate::blocks::AlignedBytes;
use crate::core::{IoId, IoOp};
use uring::Flavour;

pub mod aio;
mod backlog;
mod inflight;
mod injected_fault;
pub mod polled;
pub mod psync;
pub mod rate_limited;
pub mod sim;
pub mod uring;

/// How long each operation of the probe may take: a drive that needs longer is not usable.
const PROBE: Duration = Duration::from_secs(10);

/// How long the end of an engine waits for what is in flight. What has not ended then is left with its memory, which its
/// device may still write to.
const END_WAIT: Duration = Duration::from_secs(30);

/// What the settings ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum EngineChoice {
    /// The first of the others, in this order, that the machine lets us have.
    #[default]
    Auto,
    /// io_uring or nothing.
    Uring,
    /// Kernel AIO or nothing.
    Aio,
    /// Threads with pread and pwrite.
    Psync,
    /// io_uring that asks drives whether operations have ended; as usual where they cannot be asked.
    Polled,
    /// io_uring whose submissions a thread of the kernel looks for; as usual where it may not. It takes a processor and saves
    /// the submitting, some microseconds of the hundreds that a tile of a megabyte takes: never chosen unasked.
    Sqpoll,
}

impl EngineChoice {
    /// What `auto` tries, in this order. The others take a processor, which only a person can give them.
    pub const AUTO: [Self; 3] = [Self::Uring, Self::Aio, Self::Psync];

    /// The choice of a setting's word.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "auto" => Some(Self::Auto),
            "uring" => Some(Self::Uring),
            "aio" => Some(Self::Aio),
            "psync" => Some(Self::Psync),
            "polled" => Some(Self::Polled),
            "sqpoll" => Some(Self::Sqpoll),
            _ => None,
        }
    }

    /// The setting's word.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Uring => "uring",
            Self::Aio => "aio",
            Self::Psync => "psync",
            Self::Polled => "polled",
            Self::Sqpoll => "sqpoll",
        }
    }
}

/// One operation.
#[derive(Debug)]
pub struct Io {
    /// Given back when it ends.
    pub id: IoId,
    /// In the order the engine was opened with.
    pub device: DeviceIndex,
    /// What.
    pub op: IoOp,
    /// From the device's start.
    pub offset: u64,
    /// 0 for a flush.
    pub bytes: u32,
    /// At least `bytes` long.
    pub memory: Memory,
}

/// From one operation more on, in one system call, the kernel looks for neighbours among them and makes one request of those
/// (Linux 6.18: `IO_PLUG_THRESHOLD`, `AIO_PLUG_THRESHOLD`). They end together then, and most of a lone read is summed after
/// all of it has come.
const APART_MAX: usize = 2;

/// So few are handed over [`APART_MAX`] at a time. More are not of one lone read, and save system calls.
const FEW_MAX: usize = 8;

/// With fewer processors a request more costs more, in wake-ups of threads that take each other's processor, than is
/// saved: 1 MiB took 104 us in two requests and 140 in four on 2 processors, 230 and 200 on 16.
const APART_PROCESSORS_MIN: usize = 4;

/// How many of `waiting` operations to hand over in one system call that takes `most`.
fn batch_of(waiting: usize, most: usize, processors: usize) -> usize {
    match waiting <= FEW_MAX && processors >= APART_PROCESSORS_MIN {
        true => waiting.min(APART_MAX),
        false => waiting.min(most),
    }
}

/// At least one.
fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The memory of an operation, owned by it while it runs.
#[derive(Debug)]
pub enum Memory {
    /// A part of an arena.
    Arena {
        /// Kept mapped.
        arena: Arc<Arena>,
        /// From its start.
        offset: u64,
        /// The registered piece it lies in.
        piece: u32,
    },
    /// The daemon's own bytes.
    Meta(AlignedBytes),
    /// Of a flush.
    None,
}

impl Memory {
    /// Where the kernel finds the bytes. Panics when there are fewer than `bytes`.
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
    /// Of the [`Io`].
    pub id: IoId,
    /// Bytes moved (a flush: 0), or the errno.
    pub outcome: Result<u32, i32>,
    /// From submission to completion, as the engine saw it; of threads, from when one took it.
    pub device_ns: u64,
    /// Times the kernel put it back (EAGAIN, EINTR) and it was tried again.
    pub retried_count: u32,
    /// Given back.
    pub memory: Memory,
}

/// No engine, or one that no longer works.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The machine does not let us.
    #[error("engine {engine}: {why}")]
    Unavailable {
        /// Its name.
        engine: &'static str,
        /// What was refused, and what would help.
        why: String,
    },
    /// The kernel's half failed in a way no operation explains.
    #[error("engine {engine}: {action}: {source}; the daemon cannot go on")]
    Broken {
        /// Its name.
        engine: &'static str,
        /// What failed.
        action: &'static str,
        /// The errno.
        source: std::io::Error,
    },
}

/// The engine a daemon has, chosen once.
#[derive(Debug)]
pub enum Engine {
    /// io_uring, one ring.
    Uring(Box<uring::Uring>),
    /// Kernel AIO, one context.
    Aio(Box<aio::Aio>),
    /// Threads.
    Psync(psync::Psync),
    /// io_uring, two rings.
    Polled(Box<polled::Polled>),
    /// One of these, slowed down for a test.
    Paced(Box<rate_limited::Paced>),
}

impl Engine {
    /// Opens an engine for `devices`, reads from the first one with it, and flushes a memory file. Gives the reason for the
    /// choice, for people. No device is flushed: if that failed, the device might have lost what others wrote, and only the
    /// core can tell them. A device that answers with an error of its own is told in the log; the engine works.
    ///
    /// `inflight_max` bounds what may be submitted and not yet reaped. Call it on the thread that will use the engine.
    ///
    /// # Errors
    /// [`EngineError`] when what was asked for is not to be had; `Auto` goes on to the next one instead.
    pub fn open(
        choice: EngineChoice,
        devices: &[Arc<File>],
        inflight_max: usize,
    ) -> Result<(Self, String), EngineError> {
        crate::power_cut_sim::devices(devices);
        let (engine, reason) = Self::choose(choice, devices, inflight_max)?;
        let Some(paces) = offload_api::pace::paces() else {
            return Ok((engine, reason));
        };
        let paces = devices
            .iter()
            .map(|file| rate_limited::of(file, &paces))
            .collect();
        let reason = format!("{reason}; {paces:?}");
        let paced = rate_limited::Paced::new(engine, paces)?;
        Ok((Self::Paced(Box::new(paced)), reason))
    }

    fn choose(
        choice: EngineChoice,
        devices: &[Arc<File>],
        inflight_max: usize,
    ) -> Result<(Self, String), EngineError> {
        // What one takes all take, except being asked.
        let one = &devices[..devices.len().min(1)];
        let memory = || {
            let memory = crate::arena::memory_file("offloadd-probe");
            memory
                .map(|file| [Arc::new(File::from(file))])
                .map_err(|errno| EngineError::Unavailable {
                    engine: "any",
                    why: format!("a memory file to try it with: {errno}"),
                })
        };
        let ring = |flavour| {
            let memory = memory()?;
            let tried = uring::Uring::open(&memory, 1, Flavour::Plain)?;
            Self::Uring(Box::new(tried)).probed(&memory, &[IoOp::Flush])?;
            let ring = uring::Uring::open(devices, inflight_max, flavour)?;
            let about = ring.about();
            let ring = Self::Uring(Box::new(ring)).probed(one, &[IoOp::Read])?;
            Ok((ring, about))
        };
        let uring = || ring(Flavour::Plain);
        let polled = || {
            let rings = polled::Polled::open(devices, inflight_max)?;
            let about = rings.about();
            let rings = Self::Polled(Box::new(rings));
            Ok((rings.probed(devices, &[IoOp::Read])?, about))
        };
        let or_as_usual = |special: Result<(Self, &str), EngineError>| match special {
            Ok((engine, about)) => Ok((engine, format!("chosen by the settings; {about}"))),
            Err(refused) => {
                uring().map(|(engine, about)| (engine, format!("instead of {refused}; {about}")))
            }
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
                uring().map(|(engine, flavour)| (engine, format!("{told}; {flavour}")))
            }
            EngineChoice::Polled => or_as_usual(polled()),
            EngineChoice::Sqpoll => or_as_usual(ring(Flavour::Sqpoll)),
            EngineChoice::Aio => Ok((aio()?, told.into())),
            EngineChoice::Psync => Ok((psync()?, told.into())),
            EngineChoice::Auto => {
                let no_uring: EngineError = match uring() {
                    Ok((engine, flavour)) => {
                        return Ok((engine, format!("a probe read worked; {flavour}")));
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

    /// Reads the first block of `devices`, or flushes them, and sees the wake-up come.
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

    /// One more device, behind the others.
    ///
    /// # Errors
    /// [`EngineError`]; the engine is as it was.
    pub fn add(&mut self, file: Arc<File>) -> Result<(), EngineError> {
        match self {
            Self::Uring(e) => e.add(file),
            Self::Polled(e) => e.add(file),
            Self::Aio(e) => e.add(file),
            Self::Psync(e) => e.add(file),
            Self::Paced(e) => e.add(file),
        }
    }

    /// Nothing is in flight on this device, and nothing will be: closes it, which gives its lock back.
    ///
    /// # Errors
    /// [`EngineError`]; it stays open until the engine ends.
    pub fn remove(&mut self, device: DeviceIndex) -> Result<(), EngineError> {
        match self {
            Self::Uring(e) => e.remove(device),
            Self::Polled(e) => e.remove(device),
            Self::Aio(e) => {
                e.remove(device);
                Ok(())
            }
            Self::Psync(e) => {
                e.remove(device);
                Ok(())
            }
            Self::Paced(e) => e.inner_mut().remove(device),
        }
    }

    /// As the settings call it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Uring(e) => e.name(),
            Self::Aio(_) => "aio",
            Self::Psync(_) => "psync",
            Self::Polled(_) => "polled",
            Self::Paced(e) => e.inner().name(),
        }
    }

    /// Takes an operation. It runs after the next [`Self::start`].
    pub fn submit(&mut self, io: Io) {
        if !matches!(self, Self::Paced(_)) {
            injected_fault::before(&io);
        }
        match self {
            Self::Uring(e) => e.submit(io),
            Self::Aio(e) => e.submit(io),
            Self::Psync(e) => e.submit(io),
            Self::Polled(e) => e.submit(io),
            Self::Paced(e) => e.submit(io),
        }
    }

    /// Sets going what was submitted, and does one small piece of work put off until now.
    ///
    /// # Errors
    /// [`EngineError::Broken`]: nothing more will come of this engine.
    pub fn start(&mut self) -> Result<(), EngineError> {
        match self {
            Self::Uring(e) => e.start(),
            Self::Aio(e) => {
                e.start();
                Ok(())
            }
            Self::Psync(_) => Ok(()),
            Self::Polled(e) => e.start(),
            Self::Paced(e) => e.inner_mut().start(),
        }
    }

    /// Takes what has ended, without waiting.
    ///
    /// # Errors
    /// [`EngineError::Broken`]: nothing more will come of this engine.
    pub fn reap(&mut self, done: &mut Vec<IoDone>) -> Result<(), EngineError> {
        let first = done.len();
        match self {
            Self::Uring(e) => e.reap(done)?,
            Self::Aio(e) => e.reap(done)?,
            Self::Psync(e) => e.reap(done),
            Self::Polled(e) => e.reap(done)?,
            Self::Paced(e) => return e.reap(done),
        }
        injected_fault::after(&mut done[first..]);
        Ok(())
    }

    /// Readable when [`Self::reap`] will find something.
    pub fn wake(&self) -> BorrowedFd<'_> {
        match self {
            Self::Uring(e) => e.wake(),
            Self::Aio(e) => e.wake(),
            Self::Psync(e) => e.wake(),
            Self::Polled(e) => e.wake(),
            Self::Paced(e) => e.wake(),
        }
    }

    /// Submitted and not yet reaped.
    pub fn inflight_count(&self) -> usize {
        match self {
            Self::Uring(e) => e.inflight_count(),
            Self::Aio(e) => e.inflight_count(),
            Self::Psync(e) => e.inflight_count(),
            Self::Polled(e) => e.inflight_count(),
            Self::Paced(e) => e.inflight_count(),
        }
    }

    /// Makes an arena's memory known to the kernel, piece by piece with each [`Self::start`], where that helps. Operations
    /// work before, and when the machine's limits forbid it.
    pub fn register(&mut self, arena: &Arc<Arena>) {
        match self {
            Self::Uring(e) => e.register(arena),
            Self::Polled(e) => e.register(arena),
            Self::Aio(_) | Self::Psync(_) => {}
            Self::Paced(e) => e.inner_mut().register(arena),
        }
    }

    /// Ends what [`Self::register`] began, piece by piece with each [`Self::start`].
    pub fn forget(&mut self, arena: ArenaId) {
        match self {
            Self::Uring(e) => e.forget(arena),
            Self::Polled(e) => e.forget(arena),
            Self::Aio(_) | Self::Psync(_) => {}
            Self::Paced(e) => e.inner_mut().forget(arena),
        }
    }

    /// Whether the kernel holds nothing of an arena that was to be forgotten.
    pub fn is_forgotten(&self, arena: ArenaId) -> bool {
        match self {
            Self::Uring(e) => e.is_forgotten(arena),
            Self::Polled(e) => e.is_forgotten(arena),
            Self::Aio(_) | Self::Psync(_) => true,
            Self::Paced(e) => e.inner().is_forgotten(arena),
        }
    }

    /// Whether [`Self::start`] has put-off work left, so that the caller should not sleep.
    pub fn has_work(&self) -> bool {
        match self {
            Self::Uring(e) => e.has_work(),
            Self::Polled(e) => e.has_work(),
            Self::Aio(_) | Self::Psync(_) => false,
            Self::Paced(e) => e.inner().has_work(),
        }
    }

    /// When [`Self::start`] is to be called again although nothing ends: the kernel did not take all, and does not say when
    /// it would.
    pub fn again_after(&self) -> Option<Duration> {
        match self {
            Self::Uring(e) => e.again_after(),
            Self::Polled(e) => e.again_after(),
            Self::Aio(_) | Self::Psync(_) => None,
            Self::Paced(e) => e.inner().again_after(),
        }
    }
}

/// What the kernel answers for a device that did not do an operation, and not for an operation that it does not take.
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

/// A device as people know it.
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
    use super::{EngineChoice, batch_of};

    #[test]
    fn every_value_of_the_setting_is_a_choice() {
        for engine in offload_api::ENGINES {
            let choice = EngineChoice::from_name(engine);
            assert_eq!(choice.map(EngineChoice::name), Some(engine));
        }
        assert_eq!(EngineChoice::default().name(), offload_api::ENGINES[0]);
        assert_eq!(EngineChoice::from_name("mmap"), None);
    }

    #[test]
    fn few_are_handed_over_two_by_two_where_there_are_processors() {
        assert_eq!(batch_of(4, 256, 16), 2);
        assert_eq!(batch_of(8, 256, 4), 2);
        assert_eq!(batch_of(9, 256, 16), 9);
        assert_eq!(batch_of(300, 256, 16), 256);
        assert_eq!(batch_of(4, 256, 3), 4);
        assert_eq!(batch_of(1, 256, 16), 1);
        assert_eq!(batch_of(0, 256, 1), 0);
    }
}
