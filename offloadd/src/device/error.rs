//! Why a device cannot be used, and what to do about it.

use std::fs::FileType;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use offload_api::BLOCK_BYTES;
use offload_support::paths::Word;
use offload_support::units::ApproxBytes;
use rustix::fs::{Access, AtFlags, CWD, accessat};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// Consequence of a file that is not its owner's alone.
pub(super) const OTHERS_COULD: &str =
    "so that other users could read or change the training's state";

/// Why a device cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// There is no such file.
    #[error(
        "device {path}: no such file; mount its drive, or make a new store with `offloadd format`"
    )]
    Missing {
        /// Path in the settings.
        path: PathBuf,
    },
    /// No permission.
    #[error("device {path}: uid {uid} may not read and write it: {fix}")]
    NotWritable {
        /// Path in the settings.
        path: PathBuf,
        /// User of this process.
        uid: u32,
        /// How to permit it.
        fix: String,
    },
    /// Its file system permits no writes.
    #[error(
        "device {path}: its file system is read-only for this process: the service may write only to the paths named in its unit; otherwise look \
         at `findmnt` and `dmesg`"
    )]
    ReadOnly {
        /// Path in the settings.
        path: PathBuf,
    },
    /// Neither a file nor a block device, but a directory or a pipe, for example.
    #[error("device {path}: neither a regular file nor a block device")]
    WrongType {
        /// Path in the settings.
        path: PathBuf,
    },
    /// Other users could read or change the file.
    #[error("device {path}: {why}, {OTHERS_COULD}: {fix}")]
    Shared {
        /// Path in the settings.
        path: PathBuf,
        /// Defect of the file.
        why: String,
        /// How to fix it.
        fix: String,
    },
    /// The file system does not support direct I/O.
    #[error(
        "device {path}: its file system does not support direct I/O (O_DIRECT) in blocks of {BLOCK_BYTES} bytes; use ext4 or XFS"
    )]
    NoDirect {
        /// Path in the settings.
        path: PathBuf,
    },
    /// Another daemon holds the lock.
    #[error("device {path}: locked by another offloadd{}; one daemon serves all processes of a node", by_pid(*pid))]
    Locked {
        /// Path in the settings.
        path: PathBuf,
        /// Process of the other daemon, if the kernel tells.
        pid: Option<u32>,
    },
    /// A block device that is mounted or otherwise in use.
    #[error("device {path}: in use by another offloadd, a mounted file system, RAID or LVM")]
    InUse {
        /// Path in the settings.
        path: PathBuf,
    },
    /// The file exists, without --force.
    #[error("device {path}: the file exists; `--force` overwrites it")]
    Exists {
        /// Path in the command.
        path: PathBuf,
    },
    /// A block device is not blank, without --force.
    #[error(
        "device {path}: not blank: it begins with a file system, partitions or a store; `--force` overwrites it"
    )]
    NotBlank {
        /// Path in the command.
        path: PathBuf,
    },
    /// The file system has too little space.
    #[error(
        "device {path}: its file system has {} free, {} are needed",
        ApproxBytes(*free_bytes),
        ApproxBytes(*asked_bytes)
    )]
    NoSpace {
        /// Path in the command.
        path: PathBuf,
        /// Size of the file.
        asked_bytes: u64,
        /// Bytes free on the file system.
        free_bytes: u64,
    },
    /// This process may not write a file of that size.
    #[error(
        "device {path}: a file of this process may have {} at most (`ulimit -f`), {} are needed: raise the limit, or give a smaller --size",
        ApproxBytes(*limit_bytes),
        ApproxBytes(*asked_bytes)
    )]
    Limited {
        /// Path in the command.
        path: PathBuf,
        /// Size of the file.
        asked_bytes: u64,
        /// Largest file that the process may write.
        limit_bytes: u64,
    },
    /// Another system call failed.
    #[error("device {path}: {action}: {source}")]
    System {
        /// Path in the settings.
        path: PathBuf,
        /// The step that failed.
        action: &'static str,
        /// errno of the step.
        source: io::Error,
    },
}

fn by_pid(pid: Option<u32>) -> String {
    pid.map_or_else(String::new, |pid| format!(" (pid {pid})"))
}

/// Returns the error for a file that is larger than this process may write, if that is why `error` came.
pub(super) fn limited(path: &Path, error: &io::Error, asked_bytes: u64) -> Option<DeviceError> {
    let limit_bytes = getrlimit(Resource::Fsize).current?;
    let is_it = error.kind() == io::ErrorKind::FileTooLarge && limit_bytes < asked_bytes;
    is_it.then(|| DeviceError::Limited {
        path: path.to_owned(),
        asked_bytes,
        limit_bytes,
    })
}

/// Returns whether it is a file or a block device; an error for anything else.
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

/// Makes an error of `action` on `path` from a system error.
pub(super) fn failed(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> DeviceError {
    let path = path.to_owned();
    move |source| DeviceError::System {
        path,
        action,
        source,
    }
}

/// Returns the command that lets `uid` read and write a device: of the first directory on its path that `uid` may not enter, else of the
/// device itself.
pub(crate) fn fix_of_permission(path: &Path, uid: u32) -> String {
    let enter = |dir: &&Path| accessat(CWD, *dir, Access::EXEC_OK, AtFlags::EACCESS).is_err();
    let mut dirs: Vec<_> = path
        .ancestors()
        .skip(1)
        .filter(|dir| !dir.as_os_str().is_empty())
        .collect();
    dirs.reverse();
    if let Some(closed) = dirs.iter().find(|dir| enter(dir)) {
        return format!(
            "it may not enter {}: chown {uid} {}",
            closed.display(),
            Word(closed)
        );
    }
    match std::fs::metadata(path).is_ok_and(|found| found.file_type().is_block_device()) {
        true => format!(
            "add the user to the group `disk`, or: chown {uid} {}",
            Word(path)
        ),
        false => format!("chown {uid} {}", Word(path)),
    }
}

/// Explains an error of `open` or `stat`.
pub(super) fn on_open(path: &Path, error: io::Error) -> DeviceError {
    let path = path.to_owned();
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    match errno {
        Some(Errno::NOENT | Errno::NOTDIR) => DeviceError::Missing { path },
        Some(Errno::ACCESS | Errno::PERM) => {
            let uid = rustix::process::geteuid().as_raw();
            let fix = fix_of_permission(&path, uid);
            DeviceError::NotWritable { path, uid, fix }
        }
        Some(Errno::ROFS) => DeviceError::ReadOnly { path },
        Some(Errno::INVAL) => DeviceError::NoDirect { path },
        Some(Errno::BUSY) => DeviceError::InUse { path },
        _ => DeviceError::System {
            path,
            action: "open",
            source: error,
        },
    }
}
