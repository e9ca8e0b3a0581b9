//! Why a device cannot be used, and what a person can do about it.

use std::fs::FileType;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use offload_api::BLOCK_BYTES;
use rustix::io::Errno;

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
    /// A directory, a pipe, ...
    #[error("device {path}: neither a regular file nor a block device")]
    WrongType {
        /// As the settings name it.
        path: PathBuf,
    },
    /// Others could read or change what is there.
    #[error(
        "device {path}: {why}, so that other users could read or change the training's state: {mend}"
    )]
    Shared {
        /// As the settings name it.
        path: PathBuf,
        /// What is found.
        why: String,
        /// What to do.
        mend: String,
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

/// Whether it is a file or a block device, as a device must be.
pub(super) fn kind_of(path: &Path) -> Result<FileType, DeviceError> {
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
pub(super) fn failed(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> DeviceError {
    let path = path.to_owned();
    move |source| DeviceError::System {
        path,
        action,
        source,
    }
}

/// What an errno of `open` or `stat` means here.
pub(super) fn on_open(path: &Path, error: io::Error) -> DeviceError {
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
