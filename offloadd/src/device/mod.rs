//! A device of a store: a preallocated file or a raw block device, opened for direct I/O under a lock.
//!
//! Promises: the lock is taken before the first byte is read, so one daemon has a store at a time. The kernel may keep the lock
//! of a process that has ended; it is waited for up to 30 s. If a living process still holds the lock after a second, the error
//! names that process. Everything that makes a device unusable is found here and reported with its path and what to do.

mod blocks;
mod error;
mod lock;
mod risk;

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use offload_api::BLOCK_BYTES;
use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;
use test_hooks::safeguard::{Safeguard, is_disabled};

pub use self::blocks::DeviceBlocks;
pub use self::error::DeviceError;
pub(crate) use self::error::fix_of_permission;
use self::error::{failed, kind_of, limited, on_open};
use self::lock::{LOCK_RETRY, LOCK_WAIT, is_busy, lock};
pub use self::risk::{IN_MEMORY, Risk};
use crate::io::AlignedBytes;
use crate::store::DATA_OFFSET;

/// Zeros written at once where a file system cannot preallocate.
const FILL_BYTES: usize = 8 << 20;

/// An opened, locked device.
#[derive(Clone, Debug)]
pub struct Device {
    path: String,
    file: Arc<File>,
    bytes: u64,
}

/// Whether parts of a file have no space on its file system.
pub fn is_sparse(file: &Metadata) -> bool {
    file.blocks() * 512 < file.len()
}

impl Device {
    /// Opens the device at `path`, locks it, and reads a block to check that direct I/O works.
    ///
    /// # Errors
    /// [`DeviceError`]; the lock is released then.
    pub fn open(path: &Path) -> Result<Self, DeviceError> {
        let failed = |action| failed(path, action);
        let kind = kind_of(path)?;
        let mut flags = OFlags::DIRECT | OFlags::CLOEXEC;
        if kind.is_block_device() && !is_disabled(Safeguard::Lock) {
            // Keeps mounts and RAID away, too.
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
                // A dying predecessor also holds a block device longer than its process lives.
                Err(e) if is_busy(&e) && Instant::now() < limit => {
                    std::thread::sleep(LOCK_RETRY);
                }
                opened => break opened.map_err(|e| on_open(path, e))?,
            }
        };
        lock(&file, path)?;
        let bytes = if kind.is_block_device() {
            block_device_bytes(&file).map_err(failed("read its size"))?
        } else {
            file.metadata().map_err(failed("read its size"))?.len()
        };
        let device = Self {
            path: path.display().to_string(),
            file: Arc::new(file),
            bytes,
        };
        let mut block = AlignedBytes::zeroed(BLOCK_BYTES as usize);
        match device.file.read_at(block.as_mut_slice(), 0) {
            // Short or empty: the store decides whether it is too small.
            Ok(_) => Ok(device),
            Err(e) if e.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
                Err(DeviceError::NoDirect {
                    path: path.to_owned(),
                })
            }
            Err(e) => Err(failed("read its first block")(e)),
        }
    }

    /// Opens the device at `path` read-only and without a lock, beside a daemon that may use it. What is read may be changing;
    /// superblocks do not change.
    ///
    /// # Errors
    /// [`DeviceError`].
    pub fn open_readonly(path: &Path) -> Result<Self, DeviceError> {
        kind_of(path)?;
        let file = OpenOptions::new()
            .read(true)
            .custom_flags((OFlags::DIRECT | OFlags::CLOEXEC).bits() as i32)
            .open(path)
            .map_err(|e| on_open(path, e))?;
        let bytes = block_device_bytes(&file).map_err(failed(path, "read its size"))?;
        Ok(Self {
            path: path.display().to_string(),
            file: Arc::new(file),
            bytes,
        })
    }

    /// Creates (or with `force` takes over) a file of `file_bytes` and reserves its space, or takes a block device as it is;
    /// then opens it. Only for formatting.
    ///
    /// # Errors
    /// [`DeviceError`]. A file that was created and could not be filled is deleted.
    pub fn create(path: &Path, file_bytes: Option<u64>, force: bool) -> Result<Self, DeviceError> {
        Self::create_watched(path, file_bytes, force, &mut |_, _| {})
    }

    /// Like [`Self::create`]; where space must be filled instead of reserved, calls `watch` with the bytes done and in all.
    ///
    /// # Errors
    /// Same as [`Self::create`].
    pub fn create_watched(
        path: &Path,
        file_bytes: Option<u64>,
        force: bool,
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
        if found.is_some_and(|kind| !kind.is_file()) {
            return Err(DeviceError::WrongType {
                path: path.to_owned(),
            });
        }
        if found.is_some() && !force {
            return Err(DeviceError::Exists {
                path: path.to_owned(),
            });
        }
        let Some(file_bytes) = file_bytes else {
            return Err(failed("making a file")(io::Error::new(
                io::ErrorKind::InvalidInput,
                "its size is missing: add --size, such as --size 500GiB",
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
            if made.is_none() {
                // A file that is taken over becomes as private as a new one.
                let mode = rustix::fs::Mode::from_raw_mode(0o600);
                let closed = rustix::fs::fchmod(&*device.file, mode);
                closed.map_err(|e| failed("remove other users' access (chmod)")(e.into()))?;
            }
            device.reserve(path, file_bytes, watch)?;
            Ok(device)
        });
        if reserved.is_err() && found.is_none() {
            let _ = std::fs::remove_file(path);
        }
        reserved
    }

    /// Checks that the path still leads to the file `made`: anybody who may write to the directory could have replaced it.
    fn check_is(&self, made: &File) -> Result<(), DeviceError> {
        let failed = |action| failed(Path::new(&self.path), action);
        let number = |file: &File| file.metadata().map(|found| (found.dev(), found.ino()));
        let numbers = number(&self.file).and_then(|ours| Ok((ours, number(made)?)));
        let (ours, made) = numbers.map_err(failed("read its metadata"))?;
        if ours == made {
            return Ok(());
        }
        Err(failed("making a file")(io::Error::other(
            "another file replaced it meanwhile; check who may write to its directory",
        )))
    }

    /// Refuses a file that other users can access, and one reached by a symbolic link: in a shared directory anybody may have
    /// put it under the expected name. Checks the opened file, not the name. Block devices are the administrator's.
    ///
    /// # Errors
    /// [`DeviceError::Shared`], or the file's metadata cannot be read.
    pub fn check_ours_alone(&self) -> Result<(), DeviceError> {
        let path = Path::new(&self.path);
        let failed = |action| failed(path, action);
        let found = (self.file.metadata()).map_err(failed("read its owner"))?;
        if !found.is_file() {
            return Ok(());
        }
        let refused = |why: String, fix: String| {
            Err(DeviceError::Shared {
                path: path.to_owned(),
                why,
                fix,
            })
        };
        let elsewhere = "configure a file of your own, or remove this one".to_owned();
        let named = std::fs::symlink_metadata(path).map_err(failed("read its owner"))?;
        if (named.dev(), named.ino()) != (found.dev(), found.ino()) {
            return refused("it is a symbolic link".into(), elsewhere);
        }
        let us = rustix::process::geteuid().as_raw();
        if ![us, 0].contains(&found.uid()) {
            let why = format!("it belongs to uid {}, and this is uid {us}", found.uid());
            return refused(why, elsewhere);
        }
        match self.mode_for_others() {
            Some((why, fix)) => refused(why, fix),
            None => Ok(()),
        }
    }

    /// Path in the settings.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Refuses a device that has content where file systems, partition tables and stores begin.
    ///
    /// # Errors
    /// [`DeviceError::Exists`] for a file, [`DeviceError::NotBlank`] for a block device; or it cannot be read.
    pub fn check_blank(&self) -> Result<(), DeviceError> {
        let path = Path::new(&self.path);
        // Whole blocks, even of a file that ends within one: direct reads are cut at its end.
        let bytes = DATA_OFFSET
            .min(self.bytes)
            .next_multiple_of(u64::from(BLOCK_BYTES));
        let mut start = AlignedBytes::zeroed(bytes as usize);
        let mut read_bytes = 0;
        while (read_bytes as u64) < self.bytes.min(bytes) {
            let read =
                (self.file).read_at(&mut start.as_mut_slice()[read_bytes..], read_bytes as u64);
            match read.map_err(failed(path, "read its first bytes"))? {
                0 => break,
                more => read_bytes += more,
            }
        }
        if start.as_slice().iter().all(|&byte| byte == 0) {
            return Ok(());
        }
        let path = path.to_owned();
        Err(match kind_of(&path)?.is_file() {
            true => DeviceError::Exists { path },
            false => DeviceError::NotBlank { path },
        })
    }

    /// Size of the device.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The file, for an engine. Closing the last copy releases the lock.
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
            // Some file systems (FUSE, NFS) cannot reserve space. Writing zeros does the same, slowly.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => self.fill(file_bytes, watch),
            result => result.map_err(io::Error::from),
        };
        match filled {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::StorageFull => return Err(no_space()),
            Err(e) => {
                let limited = limited(path, &e, file_bytes);
                return Err(limited.unwrap_or_else(|| failed("reserve its space")(e)));
            }
        }
        self.file
            .set_len(file_bytes)
            .and_then(|()| self.file.sync_all())
            .map_err(failed("reserve its space"))?;
        // The name must survive a power cut, too.
        let dir = path.parent().unwrap_or(Path::new("/"));
        File::open(dir)
            .and_then(|dir| dir.sync_all())
            .map_err(failed("flush its directory"))?;
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

fn block_device_bytes(mut file: &File) -> io::Result<u64> {
    use std::io::Seek;
    file.seek(io::SeekFrom::End(0))
}
