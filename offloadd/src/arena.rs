//! A session's memory: a sealed memory file, mapped here for the devices and in the process for everything else.
//!
//! Promises: a new arena is a fresh file of zeros. All of it is populated before it is handed out, so that no later access needs memory that the
//! machine lacks. Nobody can resize the file (no SIGBUS). The memory is locked where limits allow; otherwise [`Arena::locked`] is false.
//!
//! Populating takes 0.04 to 4 s a GiB, depending on whether the machine's own host must find the pages, so arenas are created
//! outside the owner thread, by several threads. The daemon never reads or writes the bytes; it only hands addresses to the
//! kernel. Holds the `unsafe` of mapping.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use offload_api::fault::{Fault, FaultKind};
use offload_api::geometry::{Geometry, Piece};
use offload_support::memory;
use offload_support::units::ApproxBytes;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Bytes that one thread touches at a time: little enough to spread a small arena, enough for huge pages.
const TOUCH_BYTES: usize = 64 << 20;

/// Maximum number of populating threads; more only compete for the memory controller.
const TOUCH_THREADS_MAX: usize = 8;

/// Behaviour when memory cannot be locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockPolicy {
    /// Run with unlocked memory.
    Try,
    /// Refuse to run.
    Require,
}

/// Why there is no arena. Reported as [`FaultKind::NoMemory`].
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// The machine or its control group has less memory than asked for.
    #[error(
        "an arena of {} does not fit: {} of memory are available; ask for less, stop other programs, or raise the memory limit of the service or container",
        ApproxBytes(*asked_bytes),
        ApproxBytes(*available_bytes)
    )]
    TooLarge {
        /// Size of the arena.
        asked_bytes: u64,
        /// Memory available, see [`offload_support::memory::available_bytes`].
        available_bytes: u64,
    },
    /// A system call failed.
    #[error("an arena of {}: {action}: {source}", ApproxBytes(*asked_bytes))]
    System {
        /// Size of the arena.
        asked_bytes: u64,
        /// The system call.
        action: &'static str,
        /// errno of the system call.
        source: std::io::Error,
    },
    /// The memory must be locked and cannot be.
    #[error("an arena of {} cannot be locked: {source}; {FIX}", ApproxBytes(*asked_bytes))]
    NotLocked {
        /// Size of the arena.
        asked_bytes: u64,
        /// Errno of mlock(2).
        source: std::io::Error,
    },
}

impl From<ArenaError> for Fault {
    fn from(error: ArenaError) -> Self {
        Self::new(FaultKind::NoMemory, error.to_string())
    }
}

const FIX: &str = "to fix this, run `ulimit -l unlimited` before the start, put `* - memlock unlimited` into \
     /etc/security/limits.d/offloadd.conf and log in again, or set `LimitMEMLOCK=infinity` in the service's unit";

/// Whether this daemon can lock its memory; determined at start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockOutlook {
    /// Whether arenas up to the configured limit can be locked.
    pub can_lock: bool,
    /// Cost of unlocked memory and how to lock it; empty if memory can be locked.
    pub note: String,
}

/// Determines whether this process may lock `arena_bytes_max` bytes, by capability or by limit.
pub fn lock_outlook(arena_bytes_max: u64) -> LockOutlook {
    let capable = rustix::thread::capabilities(None).is_ok_and(|sets| {
        sets.effective
            .contains(rustix::thread::CapabilitySet::IPC_LOCK)
    });
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    match limit {
        Some(limit_bytes) if !capable && limit_bytes < arena_bytes_max => LockOutlook {
            can_lock: false,
            note: format!(
                "arena memory cannot be locked or registered: this user may lock {} (ulimit -l), arenas take \
                 up to {}. The kernel may swap it out during a step, and each read or write pins its pages \
                 again; {FIX}",
                ApproxBytes(limit_bytes),
                ApproxBytes(arena_bytes_max)
            ),
        },
        _ => LockOutlook {
            can_lock: true,
            note: String::new(),
        },
    }
}

/// A session's memory, unmapped when its last owner is dropped. Each operation in flight owns a reference, so that the kernel
/// never writes to memory that was reused.
#[derive(Debug)]
pub struct Arena {
    id: ArenaId,
    fd: OwnedFd,
    base: NonNull<u8>,
    bytes: usize,
    pieces: Vec<Piece>,
    locked: bool,
}

/// Identifies an arena in an engine's tables; never reused in one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ArenaId(u64);

impl ArenaError {
    fn of_call(asked_bytes: u64, action: &'static str) -> impl FnOnce(Errno) -> Self {
        move |errno| Self::System {
            asked_bytes,
            action,
            source: errno.into(),
        }
    }
}

// SAFETY: the mapping belongs to this value, and no method reads or writes its bytes.
unsafe impl Send for Arena {}
// SAFETY: as for `Send`: methods with `&self` return addresses and never access bytes.
unsafe impl Sync for Arena {}

impl Arena {
    /// Creates, maps, populates, locks and seals the memory of `geometry`. Populating can take seconds.
    ///
    /// # Errors
    /// [`ArenaError`]; nothing is left behind.
    pub fn make(geometry: &Geometry, policy: LockPolicy) -> Result<Self, ArenaError> {
        let asked_bytes = geometry.arena_bytes();
        let failed = |action| ArenaError::of_call(asked_bytes, action);
        if let Some(available_bytes) = memory::available_bytes()
            && available_bytes < asked_bytes
        {
            return Err(ArenaError::TooLarge {
                asked_bytes,
                available_bytes,
            });
        }
        let fd = memory_file("offloadd-arena").map_err(failed("memfd_create"))?;
        rustix::fs::ftruncate(&fd, asked_bytes).map_err(failed("ftruncate"))?;
        let mut arena = Self::map(fd, geometry).map_err(failed("mmap"))?;
        // May be refused: many machines set `shmem_enabled` to never.
        // SAFETY: advice about our own whole mapping; huge pages do not change what the bytes are.
        let _ = unsafe {
            rustix::mm::madvise(
                arena.base.as_ptr().cast(),
                arena.bytes,
                Advice::LinuxHugepage,
            )
        };
        arena.touch().map_err(failed(
            "populate it: the machine or a limit (cgroup, tmpfs) is out of memory",
        ))?;
        arena.lock(policy)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&arena.fd, seals).map_err(failed("sealing it"))?;
        Ok(arena)
    }

    /// Maps and locks the memory that a previous daemon created for `geometry`.
    ///
    /// # Errors
    /// [`ArenaError`]; also when the file is not what a daemon creates.
    pub fn adopt(fd: OwnedFd, geometry: &Geometry, policy: LockPolicy) -> Result<Self, ArenaError> {
        let asked_bytes = geometry.arena_bytes();
        let failed = |action| ArenaError::of_call(asked_bytes, action);
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(failed("read its seals"))?;
        let found = rustix::fs::fstat(&fd).map_err(failed("read its size"))?;
        let sealed = seals.contains(SealFlags::SHRINK | SealFlags::GROW);
        if !sealed || found.st_size as u64 != asked_bytes {
            return Err(failed("its file has another size or is not sealed")(
                Errno::INVAL,
            ));
        }
        // The pages were populated when the arena was created.
        let mut arena = Self::map(fd, geometry).map_err(failed("mmap"))?;
        arena.lock(policy)?;
        Ok(arena)
    }

    /// Maps the memory of `geometry`; dropping the arena unmaps it.
    fn map(fd: OwnedFd, geometry: &Geometry) -> Result<Self, Errno> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let bytes = geometry.arena_bytes() as usize;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of this program.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &fd,
                0,
            )
        }?;
        Ok(Self {
            id: ArenaId(NEXT.fetch_add(1, Ordering::Relaxed)),
            fd,
            base: NonNull::new(base.cast()).expect("mmap answers no null"),
            bytes,
            pieces: geometry.pieces().to_vec(),
            locked: false,
        })
    }

    fn lock(&mut self, policy: LockPolicy) -> Result<(), ArenaError> {
        // SAFETY: our own whole mapping; locking does not change what the bytes are.
        match unsafe { rustix::mm::mlock(self.base.as_ptr().cast(), self.bytes) } {
            Ok(()) => self.locked = true,
            Err(errno) if policy == LockPolicy::Require => {
                return Err(ArenaError::NotLocked {
                    asked_bytes: self.bytes as u64,
                    source: errno.into(),
                });
            }
            Err(_) => {}
        }
        Ok(())
    }

    /// Identifies the arena.
    pub fn id(&self) -> ArenaId {
        self.id
    }

    /// Size of the memory file.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether the memory is locked, so that it is never swapped out.
    pub fn locked(&self) -> bool {
        self.locked
    }

    /// Pieces to register as one buffer each.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// Returns the address of `bytes` bytes at `offset`, for the kernel. Panics beyond the arena: offsets come from the core's
    /// own geometry, never from a peer.
    pub fn address(&self, offset: u64, bytes: u64) -> *mut u8 {
        let end = offset.checked_add(bytes).expect("an offset in an arena");
        assert!(
            end <= self.bytes as u64,
            "{offset} + {bytes} lies beyond an arena of {} bytes",
            self.bytes
        );
        // SAFETY: inside the mapping, as asserted.
        unsafe { self.base.as_ptr().add(offset as usize) }
    }

    /// Populates every page, with several threads.
    fn touch(&self) -> Result<(), Errno> {
        let chunks = self.bytes.div_ceil(TOUCH_BYTES);
        let threads = std::thread::available_parallelism()
            .map_or(1, |n| n.get())
            .min(TOUCH_THREADS_MAX)
            .min(chunks);
        let next = AtomicUsize::new(0);
        let work = || {
            loop {
                let start = next.fetch_add(1, Ordering::Relaxed) * TOUCH_BYTES;
                if start >= self.bytes {
                    return Ok(());
                }
                self.populate(start, TOUCH_BYTES.min(self.bytes - start))?;
            }
        };
        std::thread::scope(|scope| {
            let helpers: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
            let mine = work();
            helpers
                .into_iter()
                .map(|helper| helper.join().expect("touching memory does not panic"))
                .fold(mine, Result::and)
        })
    }

    fn populate(&self, start: usize, bytes: usize) -> Result<(), Errno> {
        for _ in 0..1000 {
            let address = self.address(start as u64, bytes as u64);
            // SAFETY: a part of our own mapping, as `address` asserts; populating keeps the bytes.
            match unsafe { rustix::mm::madvise(address.cast(), bytes, Advice::LinuxPopulateWrite) }
            {
                // Interrupted by a signal or short of memory for a moment: populating continues where it stopped.
                Err(Errno::INTR | Errno::AGAIN) => {}
                // Kernels before 5.14 do not know this advice; writing to the pages does the same, slower.
                Err(Errno::INVAL) => {
                    let whole = rustix::fs::FallocateFlags::empty();
                    return rustix::fs::fallocate(&self.fd, whole, start as u64, bytes as u64);
                }
                result => return result,
            }
        }
        Err(Errno::AGAIN)
    }
}

impl AsFd for Arena {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: mapped in `make` or `adopt` with this size; every operation in flight owns a share of this value, so none is left.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}

/// Creates an empty memory file that can be sealed and never executed.
pub(crate) fn memory_file(name: &str) -> Result<OwnedFd, Errno> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        // Kernels before 6.3 do not know NOEXEC_SEAL.
        Err(Errno::INVAL) => rustix::fs::memfd_create(name, flags),
        result => result,
    }
}
