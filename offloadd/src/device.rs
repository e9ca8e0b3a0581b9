//! A device of a store: a preallocated file or a raw block device, opened for direct I/O under a lock.
//!
//! Promises: the lock is taken before the first byte is read; one daemon has a store at a time. A dying predecessor's lock
//! (it outlives its process while its last writes end, up to 0.1 s) is waited for, a living one's is named. Everything
//! that makes a device unusable is found here, with its path and what to do.

use std::fs::{File, FileType, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use offload_api::BLOCK_BYTES;
use offload_api::removable::{Mechanism, removed};
use rustix::fs::{FallocateFlags, FlockOperation, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

use crate::blocks::{AlignedBytes, BlockError, BlockErrorCause, Blocks};
use crate::core::IoOp;
use crate::store::DATA_OFFSET;
use crate::volatile;

/// How long a predecessor that still lives may take to give its lock back.
const LOCK_WAIT: Duration = Duration::from_secs(1);

/// How long one that has ended may: the kernel keeps its files until its ring is gone, which took over a second after a
/// plain exit on a drive that was busy freeing a large file.
const DEAD_LOCK_WAIT: Duration = Duration::from_secs(30);

const LOCK_RETRY: Duration = Duration::from_millis(10);

/// Zeros written at a time where a file system cannot preallocate.
const FILL_BYTES: usize = 8 << 20;

/// An opened, locked device.
#[derive(Clone, Debug)]
pub struct Device {
    path: String,
    file: Arc<File>,
    bytes: u64,
}

/// Why a device cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// Nothing is there.
    #[error(
        "device {path}: there is no such file; is its drive mounted? `offloadd format` makes a new store"
    )]
    Missing {
        /// As the settings name it.
        path: PathBuf,
    },
    /// We may not.
    #[error(
        "device {path}: not readable and writable by uid {uid}; chown it, or add the user to the group `disk`"
    )]
    NotWritable {
        /// As the settings name it.
        path: PathBuf,
        /// Ours.
        uid: u32,
    },
    /// A folder, a pipe, ...
    #[error("device {path}: neither a regular file nor a block device")]
    WrongType {
        /// As the settings name it.
        path: PathBuf,
    },
    /// The file system buffers everything.
    #[error(
        "device {path}: its file system takes no direct I/O (O_DIRECT) in blocks of {BLOCK_BYTES}; use ext4 or XFS on the drive"
    )]
    NoDirect {
        /// As the settings name it.
        path: PathBuf,
    },
    /// Another daemon, a mount, ...
    #[error("device {path}: another offloadd has this store{}; one daemon serves all processes of a node", by_pid(*pid))]
    Locked {
        /// As the settings name it.
        path: PathBuf,
        /// Of the other, where the kernel tells.
        pid: Option<u32>,
    },
    /// A block device that is mounted or used by something else.
    #[error(
        "device {path}: in use: another offloadd has this store, or a mounted file system, RAID or LVM has the drive"
    )]
    InUse {
        /// As the settings name it.
        path: PathBuf,
    },
    /// The file exists, and nobody said to overwrite it.
    #[error("device {path}: exists already; `--force` overwrites it and everything in it")]
    Exists {
        /// As named.
        path: PathBuf,
    },
    /// Something is at the beginning of a block device, and nobody said to overwrite it.
    #[error(
        "device {path}: something is at its beginning (a file system, partitions, a store); `--force` overwrites it and everything on it"
    )]
    NotBlank {
        /// As named.
        path: PathBuf,
    },
    /// Not enough room.
    #[error(
        "device {path}: {asked_bytes} bytes asked for, {free_bytes} bytes free on its file system"
    )]
    NoSpace {
        /// As named.
        path: PathBuf,
        /// For the file.
        asked_bytes: u64,
        /// On the file system.
        free_bytes: u64,
    },
    /// Anything else.
    #[error("device {path}: {action}: {source}")]
    System {
        /// As the settings name it.
        path: PathBuf,
        /// What failed.
        action: &'static str,
        /// The errno.
        source: io::Error,
    },
}

fn by_pid(pid: Option<u32>) -> String {
    pid.map_or_else(String::new, |pid| format!(" (pid {pid})"))
}

/// To whom a file belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileOwner {
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

impl Device {
    /// Opens the device at `path`, takes its lock, and reads a block to see that direct I/O works.
    ///
    /// # Errors
    /// [`DeviceError`]; the lock is given back then.
    pub fn open(path: &Path) -> Result<Self, DeviceError> {
        let failed = |action| failed(path, action);
        let kind = kind_of(path)?;
        let mut flags = OFlags::DIRECT | OFlags::CLOEXEC;
        if kind.is_block_device() && !removed(Mechanism::Lock) {
            // Keeps mounts and RAID away as well.
            flags |= OFlags::EXCL;
        }
        let limit = Instant::now() + LOCK_WAIT;
        let file = loop {
            let opened = OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags(flags.bits() as i32)
                .open(path);
            match opened {
                // A dying predecessor's claim on a block device outlives it as its lock does.
                Err(e) if is_busy(&e) && Instant::now() < limit => {
                    std::thread::sleep(LOCK_RETRY);
                }
                opened => break opened.map_err(|e| on_open(path, e))?,
            }
        };
        lock(&file, path)?;
        let bytes = if kind.is_block_device() {
            block_device_bytes(&file).map_err(failed("asking for its size"))?
        } else {
            file.metadata()
                .map_err(failed("asking for its size"))?
                .len()
        };
        let device = Self {
            path: path.display().to_string(),
            file: Arc::new(file),
            bytes,
        };
        let mut block = AlignedBytes::zeroed(BLOCK_BYTES as usize);
        match device.file.read_at(block.as_mut_slice(), 0) {
            // Short or empty: whether that is too small is for the store to say.
            Ok(_) => Ok(device),
            Err(e) if e.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
                Err(DeviceError::NoDirect {
                    path: path.to_owned(),
                })
            }
            Err(e) => Err(failed("reading its first block")(e)),
        }
    }

    /// Opens the device at `path` for reading only, without a lock: a daemon may be using it. What is read may be in the middle of
    /// a change; superblocks are not.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn look(path: &Path) -> Result<Self, DeviceError> {
        kind_of(path)?;
        let file = OpenOptions::new()
            .read(true)
            .custom_flags((OFlags::DIRECT | OFlags::CLOEXEC).bits() as i32)
            .open(path)
            .map_err(|e| on_open(path, e))?;
        let bytes = block_device_bytes(&file).map_err(failed(path, "asking for its size"))?;
        Ok(Self {
            path: path.display().to_string(),
            file: Arc::new(file),
            bytes,
        })
    }

    /// Makes (or with `force` takes over) a file of `file_bytes` with its space reserved, or takes a block device as it
    /// is; then opens it. Only for formatting.
    ///
    /// # Errors
    /// [`DeviceError`]. A file that was made and could not be filled is removed again.
    pub fn create(path: &Path, file_bytes: Option<u64>, force: bool) -> Result<Self, DeviceError> {
        Self::create_watched(path, file_bytes, force, &mut |_, _| {})
    }

    /// The same; where space cannot be reserved but only be filled, `watch` is told how many bytes of how many are.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub fn create_watched(
        path: &Path,
        file_bytes: Option<u64>,
        force: bool,
        watch: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, DeviceError> {
        Self::create_for(path, file_bytes, force, None, watch)
    }

    /// The same; a file that is made belongs to `owner` from the beginning.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub fn create_for(
        path: &Path,
        file_bytes: Option<u64>,
        force: bool,
        owner: Option<FileOwner>,
        watch: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, DeviceError> {
        let failed = |action| failed(path, action);
        let found = match std::fs::metadata(path) {
            Ok(metadata) => Some(metadata.file_type()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) => return Err(on_open(path, e)),
        };
        if found.is_some_and(|kind| kind.is_block_device()) {
            return Self::open(path);
        }
        if found.is_some() && !force {
            return Err(DeviceError::Exists {
                path: path.to_owned(),
            });
        }
        let Some(file_bytes) = file_bytes else {
            return Err(failed("making a file")(io::Error::new(
                io::ErrorKind::InvalidInput,
                "how large? Say --size 64GiB",
            )));
        };
        let mut made = None;
        if found.is_none() {
            let file = OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(path)
                .map_err(|e| on_open(path, e))?;
            made = Some(file);
        }
        let reserved = Self::open(path).and_then(|mut device| {
            if let Some(made) = &made {
                device.check_is(made)?;
            }
            if let Some(owner) = owner {
                device.give_to(owner)?;
            }
            device.reserve(path, file_bytes, watch)?;
            Ok(device)
        });
        if reserved.is_err() && found.is_none() {
            let _ = std::fs::remove_file(path);
        }
        reserved
    }

    /// Whoever may write to the folder could have laid another file there since.
    fn check_is(&self, made: &File) -> Result<(), DeviceError> {
        let failed = |action| failed(Path::new(&self.path), action);
        let number = |file: &File| file.metadata().map(|found| (found.dev(), found.ino()));
        let numbers = number(&self.file).and_then(|ours| Ok((ours, number(made)?)));
        let (ours, made) = numbers.map_err(failed("asking for its number"))?;
        if ours == made {
            return Ok(());
        }
        Err(failed("making a file")(io::Error::other(
            "another file was laid there meanwhile: who may write to its folder?",
        )))
    }

    /// Gives a file of ours to `owner`; what is another's already, a block device or has a second name stays as it is.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn give_to(&self, owner: FileOwner) -> Result<(), DeviceError> {
        let path = Path::new(&self.path);
        let failed = |action| failed(path, action);
        let found = (self.file.metadata()).map_err(failed("asking for its owner"))?;
        let ours = found.is_file()
            && found.nlink() == 1
            && found.uid() == rustix::process::geteuid().as_raw();
        // By its own name: not what a link leads to.
        let named = std::fs::symlink_metadata(path).map_err(failed("asking for its owner"))?;
        let same = (named.dev(), named.ino()) == (found.dev(), found.ino());
        let FileOwner { uid, gid } = owner;
        if !ours || !same || (found.uid(), found.gid()) == (uid, gid) {
            return Ok(());
        }
        // By the descriptor: the path may be another file's by now.
        std::os::unix::fs::fchown(&*self.file, Some(uid), Some(gid)).map_err(failed(
            "giving it to whom the store's other files belong to",
        ))
    }

    /// As the settings name it.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Refuses a device that has anything where file systems, tables of partitions and stores begin.
    ///
    /// # Errors
    /// [`DeviceError::Exists`] for a file, [`DeviceError::NotBlank`] for a block device; or it cannot be read.
    pub fn check_blank(&self) -> Result<(), DeviceError> {
        let path = Path::new(&self.path);
        let bytes = DATA_OFFSET.min(self.bytes) / u64::from(BLOCK_BYTES) * u64::from(BLOCK_BYTES);
        let mut start = AlignedBytes::zeroed(bytes as usize);
        let read = self.file.read_exact_at(start.as_mut_slice(), 0);
        read.map_err(failed(path, "reading its beginning"))?;
        if start.as_slice().iter().all(|&byte| byte == 0) {
            return Ok(());
        }
        let path = path.to_owned();
        Err(match kind_of(&path)?.is_file() {
            true => DeviceError::Exists { path },
            false => DeviceError::NotBlank { path },
        })
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether parts of the file have no space on its file system yet, so that a write may find it full. (A file system that
    /// compresses says so of every file.)
    pub fn has_holes(&self) -> bool {
        self.file
            .metadata()
            .is_ok_and(|found| found.is_file() && found.blocks() * 512 < found.len())
    }

    /// For an engine. Closing the last copy gives the lock back.
    pub fn file(&self) -> &Arc<File> {
        &self.file
    }

    fn reserve(
        &mut self,
        path: &Path,
        file_bytes: u64,
        watch: &mut dyn FnMut(u64, u64),
    ) -> Result<(), DeviceError> {
        let failed = |action| failed(path, action);
        let file_bytes = file_bytes / u64::from(BLOCK_BYTES) * u64::from(BLOCK_BYTES);
        let have_bytes = self.file.metadata().map_err(failed("stat"))?.blocks() * 512;
        let statistics =
            rustix::fs::fstatvfs(&self.file).map_err(|e| failed("statvfs")(e.into()))?;
        let free_bytes = statistics.f_bavail * statistics.f_frsize;
        let no_space = || DeviceError::NoSpace {
            path: path.to_owned(),
            asked_bytes: file_bytes,
            free_bytes,
        };
        if file_bytes.saturating_sub(have_bytes) > free_bytes {
            return Err(no_space());
        }
        let filled = match rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, file_bytes)
        {
            // Some file systems (FUSE, NFS) cannot reserve: write zeros instead, which is slow and as good.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => self.fill(file_bytes, watch),
            result => result.map_err(io::Error::from),
        };
        match filled {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::StorageFull => return Err(no_space()),
            Err(e) => return Err(failed("reserving its space")(e)),
        }
        self.file
            .set_len(file_bytes)
            .and_then(|()| self.file.sync_all())
            .map_err(failed("reserving its space"))?;
        // The name itself must survive power loss too.
        let folder = path.parent().unwrap_or(Path::new("/"));
        File::open(folder)
            .and_then(|folder| folder.sync_all())
            .map_err(failed("flushing its folder"))?;
        self.bytes = file_bytes;
        Ok(())
    }

    fn fill(&self, file_bytes: u64, watch: &mut dyn FnMut(u64, u64)) -> io::Result<()> {
        let zeros = AlignedBytes::zeroed(FILL_BYTES);
        let mut offset = 0;
        while offset < file_bytes {
            let bytes = (FILL_BYTES as u64).min(file_bytes - offset) as usize;
            self.file.write_all_at(&zeros.as_slice()[..bytes], offset)?;
            offset += bytes as u64;
            watch(offset, file_bytes);
        }
        Ok(())
    }
}

fn is_busy(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::BUSY.raw_os_error())
}

/// Whether it is a file or a block device, as a device must be.
fn kind_of(path: &Path) -> Result<FileType, DeviceError> {
    let kind = std::fs::metadata(path)
        .map_err(|e| on_open(path, e))?
        .file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(DeviceError::WrongType {
            path: path.to_owned(),
        });
    }
    Ok(kind)
}

/// Makes an error of `action` on `path` of what the system says.
fn failed(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> DeviceError {
    let path = path.to_owned();
    move |source| DeviceError::System {
        path,
        action,
        source,
    }
}

/// What an errno of `open` or `stat` means here.
fn on_open(path: &Path, error: io::Error) -> DeviceError {
    let path = path.to_owned();
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    match errno {
        Some(Errno::NOENT | Errno::NOTDIR) => DeviceError::Missing { path },
        Some(Errno::ACCESS | Errno::PERM | Errno::ROFS) => DeviceError::NotWritable {
            path,
            uid: rustix::process::getuid().as_raw(),
        },
        Some(Errno::INVAL) => DeviceError::NoDirect { path },
        Some(Errno::BUSY) => DeviceError::InUse { path },
        _ => DeviceError::System {
            path,
            action: "opening it",
            source: error,
        },
    }
}

/// Takes the store's lock on this device: from here on no other daemon reads or writes it.
fn lock(file: &File, path: &Path) -> Result<(), DeviceError> {
    if removed(Mechanism::Lock) {
        return Ok(());
    }
    let start = Instant::now();
    loop {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(Errno::WOULDBLOCK) => {
                let pid = lock_holder(file);
                let wait = if pid.is_some_and(has_ended) {
                    DEAD_LOCK_WAIT
                } else {
                    LOCK_WAIT
                };
                if start.elapsed() >= wait {
                    return Err(DeviceError::Locked {
                        path: path.to_owned(),
                        pid,
                    });
                }
                std::thread::sleep(LOCK_RETRY);
            }
            Err(Errno::INTR) => {}
            Err(errno) => {
                return Err(failed(path, "locking it")(errno.into()));
            }
        }
    }
}

/// Who has the lock, from the kernel's list; best effort.
fn lock_holder(file: &File) -> Option<u32> {
    let inode = file.metadata().ok()?.ino();
    let list = std::fs::read_to_string("/proc/locks").ok()?;
    // `1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF`
    list.lines().find_map(|line| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let place = fields.iter().position(|f| *f == "FLOCK")?;
        let found: u64 = fields.get(place + 4)?.rsplit(':').next()?.parse().ok()?;
        (found == inode).then(|| fields.get(place + 3)?.parse().ok())?
    })
}

/// Whether no program runs under this pid any more; what is left of it is the kernel's to tidy up.
fn has_ended(pid: u32) -> bool {
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        // `1234 (name) Z ...`: the name may hold anything, so the state is what follows its last parenthesis.
        Ok(stat) => stat
            .rsplit(')')
            .next()
            .is_some_and(|rest| rest.trim_start().starts_with(['Z', 'X'])),
        // Hidden from us (a service that sees its own processes only), or gone.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Pid::from_raw(pid as i32).is_none_or(|pid| test_kill_process(pid) == Err(Errno::SRCH))
        }
        Err(_) => false,
    }
}

fn block_device_bytes(mut file: &File) -> io::Result<u64> {
    use std::io::Seek;
    file.seek(io::SeekFrom::End(0))
}

/// Opened devices, one synchronous operation at a time.
#[derive(Debug)]
pub struct DeviceBlocks<'a>(pub &'a [Device]);

impl DeviceBlocks<'_> {
    fn whole(
        &self,
        position: usize,
        op: IoOp,
        offset: u64,
        asked_bytes: usize,
        mut step: impl FnMut(&File, usize) -> io::Result<usize>,
    ) -> Result<(), BlockError> {
        let device = &self.0[position];
        let failed = |cause| BlockError {
            op,
            path: device.path.clone(),
            offset,
            asked_bytes: asked_bytes as u64,
            cause,
        };
        let mut moved_bytes = 0;
        while moved_bytes < asked_bytes {
            match step(&device.file, moved_bytes) {
                // The end of the device, or a drive that is gone; and direct I/O cannot go on from within a block.
                Ok(bytes)
                    if bytes == 0
                        || !(moved_bytes + bytes).is_multiple_of(BLOCK_BYTES as usize)
                            && moved_bytes + bytes < asked_bytes =>
                {
                    let moved = (moved_bytes + bytes) as u64;
                    return Err(failed(BlockErrorCause::Short(moved)));
                }
                Ok(bytes) => moved_bytes += bytes,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => {
                    let errno = e.raw_os_error().unwrap_or(Errno::IO.raw_os_error());
                    return Err(failed(BlockErrorCause::Errno(errno)));
                }
            }
        }
        Ok(())
    }
}

impl Blocks for DeviceBlocks<'_> {
    fn count(&self) -> usize {
        self.0.len()
    }

    fn path(&self, position: usize) -> &str {
        &self.0[position].path
    }

    fn size_bytes(&self, position: usize) -> u64 {
        self.0[position].bytes
    }

    fn read(
        &mut self,
        position: usize,
        offset: u64,
        into: &mut AlignedBytes,
    ) -> Result<(), BlockError> {
        let bytes = into.len();
        self.whole(position, IoOp::Read, offset, bytes, |file, moved| {
            file.read_at(&mut into.as_mut_slice()[moved..], offset + moved as u64)
        })
    }

    fn write(
        &mut self,
        position: usize,
        offset: u64,
        from: &AlignedBytes,
    ) -> Result<(), BlockError> {
        volatile::writes(&self.0[position].file, offset, from.len());
        self.whole(position, IoOp::Write, offset, from.len(), |file, moved| {
            file.write_at(&from.as_slice()[moved..], offset + moved as u64)
        })
    }

    fn flush(&mut self, position: usize) -> Result<(), BlockError> {
        let device = &self.0[position];
        device.file.sync_data().map_err(|e| BlockError {
            op: IoOp::Flush,
            path: device.path.clone(),
            offset: 0,
            asked_bytes: 0,
            cause: BlockErrorCause::Errno(e.raw_os_error().unwrap_or(Errno::IO.raw_os_error())),
        })?;
        volatile::flushed(&device.file);
        Ok(())
    }
}
