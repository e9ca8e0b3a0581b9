//! Whether a folder can hold a private store's device file, asked before anything is made there.

use std::fs::{self, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// Why a store cannot be in a folder, or not be started.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("nvme_path: {} does not exist: make the folder, or name another one", path.display())]
    Missing { path: PathBuf },
    #[error("nvme_path: {} is not a folder", path.display())]
    NotAFolder { path: PathBuf },
    #[error("nvme_path: cannot write in {}: {source}", path.display())]
    NotWritable {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "nvme_path: the file system of {} has no direct I/O (O_DIRECT): name a folder on a drive (ext4, xfs, btrfs)",
        path.display()
    )]
    NoDirect { path: PathBuf },
    #[error(
        "nvme_path: {} has {} free, the store needs {}: free some, name more folders, or keep more in host memory",
        path.display(), Gib(*free_bytes), Gib(*needed_bytes)
    )]
    TooLittleSpace {
        path: PathBuf,
        free_bytes: u64,
        needed_bytes: u64,
    },
    #[error("nvme_path: cannot {verb} {}: {source}", path.display())]
    Io {
        verb: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("nvme_path: {} is used by another offloadd: end the run it serves first", path.display())]
    Busy { path: PathBuf },
    #[error(
        "nvme_path: {} is not a folder of the store behind offload.socket, whose devices are {devices}: name one of their folders, or leave nvme_path out",
        path.display()
    )]
    NotOfTheStore { path: PathBuf, devices: String },
    #[error(transparent)]
    Daemon(swapper::ClientError),
    #[error("{0}\nIf the run has nothing to lose, --fresh makes its store anew")]
    Private(swapper::ClientError),
}

/// Bytes as a person reads them.
pub(crate) struct Gib(pub(crate) u64);

impl std::fmt::Display for Gib {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let bytes = self.0 as f64;
        match self.0 {
            0..0x10_0000 => write!(f, "{:.1} KiB", bytes / 1024.0),
            0x10_0000..0x4000_0000 => write!(f, "{:.1} MiB", bytes / f64::from(1 << 20)),
            _ => write!(f, "{:.1} GiB", bytes / f64::from(1 << 30)),
        }
    }
}

/// Checks that `folder` exists, takes direct I/O and has room for a file of `file_bytes` at `file`, which may exist already.
///
/// # Errors
/// The first thing that is wrong. A probe file is made and removed; nothing else is touched.
pub fn check_folder(folder: &Path, file: &Path, file_bytes: u64) -> Result<(), StoreError> {
    let path = || folder.to_path_buf();
    match fs::metadata(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(StoreError::Missing { path: path() });
        }
        Err(source) => {
            return Err(StoreError::Io {
                verb: "look at",
                path: path(),
                source,
            });
        }
        Ok(metadata) if !metadata.is_dir() => return Err(StoreError::NotAFolder { path: path() }),
        Ok(_) => {}
    }
    probe(folder)?;
    let space = rustix::fs::statvfs(folder).map_err(|error| StoreError::Io {
        verb: "ask the free space of",
        path: path(),
        source: error.into(),
    })?;
    // A store of an earlier start has its blocks already.
    let held_bytes = fs::metadata(file).map_or(0, |metadata| metadata.len());
    let free_bytes = space.f_bavail.saturating_mul(space.f_frsize);
    let needed_bytes = file_bytes.saturating_sub(held_bytes);
    if free_bytes < needed_bytes {
        return Err(StoreError::TooLittleSpace {
            path: path(),
            free_bytes,
            needed_bytes,
        });
    }
    Ok(())
}

/// Makes a file and opens it again for direct I/O.
fn probe(folder: &Path) -> Result<(), StoreError> {
    let probe = folder.join(format!(".offloadd-probe-{}", std::process::id()));
    let not_writable = |source| StoreError::NotWritable {
        path: folder.to_path_buf(),
        source,
    };
    let made = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .open(&probe);
    let direct = made.map_err(not_writable).and_then(|_| {
        let flags = OFlags::DIRECT.bits() as i32;
        OpenOptions::new()
            .write(true)
            .custom_flags(flags)
            .open(&probe)
            .map_err(|error| match error.kind() {
                ErrorKind::InvalidInput => StoreError::NoDirect {
                    path: folder.to_path_buf(),
                },
                _ => not_writable(error),
            })
    });
    // Whatever came of it, the probe goes; a probe that was never made is no error here.
    let _ = fs::remove_file(&probe);
    direct.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(folder: &Path, bytes: u64) -> String {
        check_folder(folder, &folder.join("store"), bytes)
            .expect_err("must be refused")
            .to_string()
    }

    #[test]
    fn a_folder_that_cannot_hold_a_store_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("missing");
        assert!(
            refused(&missing, 1)
                .ends_with("missing does not exist: make the folder, or name another one")
        );
        let file = folder.path().join("file");
        fs::write(&file, "x").unwrap();
        assert!(refused(&file, 1).ends_with("file is not a folder"));
        // Nobody makes files there, not even root.
        assert!(refused(Path::new("/proc"), 1).contains("cannot write in /proc"));
    }

    #[test]
    fn too_little_space_says_how_much_is_missing_and_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        let text = refused(folder.path(), 1 << 60);
        assert!(text.contains("the store needs 1073741824.0 GiB"), "{text}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
