//! Checks that a directory can hold a private store's device file, before anything is created there.

use std::fs::{self, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use offload_support::file_systems;
use offload_support::paths::RelativeTo;
use offload_support::units::ApproxBytes;
use rustix::fs::OFlags;

/// Error of creating or starting a private store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("nvme_path: {}{} does not exist: create the directory, or name another one", path.display(), RelativeTo::not_found(path))]
    Missing { path: PathBuf },
    #[error("nvme_path: {} is not a directory: name a directory on the drive", path.display())]
    NotADir { path: PathBuf },
    #[error("nvme_path: cannot write in {}: {source}", path.display())]
    NotWritable {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "nvme_path: the file system of {} has no direct I/O (O_DIRECT): name a directory on a drive with ext4, xfs or btrfs",
        path.display()
    )]
    NoDirect { path: PathBuf },
    #[error(
        "nvme_path: the file system of {} has {} free, but the store needs {} there: free some space, name directories on more drives, or keep more in host memory",
        path.display(), ApproxBytes(*free_bytes), ApproxBytes(*needed_bytes)
    )]
    TooLittleSpace {
        path: PathBuf,
        free_bytes: u64,
        needed_bytes: u64,
    },
    #[error(
        "offload.socket: the daemon leaves this user {} on its devices, but the run needs {}: delete a job (`offloadd job list`), ask for more space, or keep more in host memory",
        ApproxBytes(*free_bytes), ApproxBytes(*needed_bytes)
    )]
    TooLittleAtDaemon { free_bytes: u64, needed_bytes: u64 },
    #[error("nvme_path: cannot {verb} {}: {source}", path.display())]
    Io {
        verb: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("nvme_path: {} exists already: if no run uses it, delete it, or name another directory", path.display())]
    Exists { path: PathBuf },
    #[error("nvme_path: {} is used by another offloadd: end the run that it serves first", path.display())]
    Busy { path: PathBuf },
    #[error(transparent)]
    Daemon(swapper::ClientError),
    #[error("{0}\nIf the run is no longer needed, --fresh creates its store again")]
    Private(swapper::ClientError),
}

impl StoreError {
    /// Whether there is too little free space.
    pub fn is_of_space(&self) -> bool {
        matches!(
            self,
            Self::TooLittleSpace { .. } | Self::TooLittleAtDaemon { .. }
        )
    }
}

/// Checks that the directories of `files` exist, support direct I/O and have space for a file of `file_bytes`
/// each. The files may exist already. Directories on one file system share its space. Creates and removes a
/// probe file in each directory.
///
/// # Errors
/// The first problem found.
pub fn check_dirs(files: &[PathBuf], file_bytes: u64) -> Result<(), StoreError> {
    for file in files {
        check_dir(file.parent().expect("a device file has a directory"))?;
    }
    check_space(files, file_bytes)
}

/// Space that a store needs on one file system.
#[derive(Clone, Debug)]
pub struct StoreSpace {
    /// Device number of the file system.
    pub system: u64,
    /// First directory of the store there.
    pub dir: PathBuf,
    /// Bytes that its files do not have yet.
    pub needed_bytes: u64,
}

/// Returns the space that `files` of `file_bytes` each need, by file system. Directories that do not exist are
/// skipped.
pub fn space_needed(files: &[PathBuf], file_bytes: u64) -> Vec<StoreSpace> {
    let mut spaces: Vec<StoreSpace> = Vec::new();
    for file in files {
        let dir = file.parent().expect("a device file has a directory");
        let Ok(system) = fs::metadata(dir).map(|metadata| metadata.dev()) else {
            continue;
        };
        // Blocks of an existing file are already allocated.
        let held_bytes = fs::metadata(file).map_or(0, |metadata| metadata.len());
        let needed_bytes = file_bytes.saturating_sub(held_bytes);
        match spaces.iter_mut().find(|space| space.system == system) {
            Some(space) => space.needed_bytes = space.needed_bytes.saturating_add(needed_bytes),
            None => spaces.push(StoreSpace {
                system,
                dir: dir.to_path_buf(),
                needed_bytes,
            }),
        }
    }
    spaces
}

/// Checks that the file systems of `files` have space for a file of `file_bytes` each. Directories that do
/// not exist are skipped. Writes nothing.
///
/// # Errors
/// The first file system with too little space.
pub fn check_space(files: &[PathBuf], file_bytes: u64) -> Result<(), StoreError> {
    for space in space_needed(files, file_bytes) {
        let free_bytes = free_bytes(&space.dir).map_err(|source| StoreError::Io {
            verb: "read the free space of",
            path: space.dir.clone(),
            source,
        })?;
        if free_bytes < space.needed_bytes {
            return Err(StoreError::TooLittleSpace {
                path: space.dir,
                free_bytes,
                needed_bytes: space.needed_bytes,
            });
        }
    }
    Ok(())
}

/// Device number of the file system of `path`, or of its first existing parent.
///
/// # Errors
/// The directory's metadata cannot be read.
pub fn file_system(path: &Path) -> std::io::Result<u64> {
    Ok(fs::metadata(existing(path))?.dev())
}

/// Free bytes of the file system of `path`, or of its first existing parent.
///
/// # Errors
/// The file system does not report its free space.
pub fn free_bytes(path: &Path) -> std::io::Result<u64> {
    let space = rustix::fs::statvfs(existing(path))?;
    Ok(space.f_bavail.saturating_mul(space.f_frsize))
}

/// Whether the files of `path`, or of its first existing parent, are in memory: they do not survive a restart of the machine.
pub fn is_in_memory(path: &Path) -> bool {
    let found = rustix::fs::statfs(existing(path));
    found.is_ok_and(|found| file_systems::in_memory(found.f_type as u64).is_some())
}

/// Returns `path` or its first existing parent.
fn existing(path: &Path) -> &Path {
    path.ancestors().find(|dir| dir.exists()).unwrap_or(path)
}

/// Checks that `dir` exists and supports direct I/O.
fn check_dir(dir: &Path) -> Result<(), StoreError> {
    check_is_dir(dir)?;
    probe(dir)
}

/// Checks that `dir` is an existing directory.
///
/// # Errors
/// It is missing, something else, or cannot be looked at.
pub fn check_is_dir(dir: &Path) -> Result<(), StoreError> {
    let path = || dir.to_path_buf();
    match fs::metadata(dir) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Err(StoreError::Missing { path: path() })
        }
        Err(source) => Err(StoreError::Io {
            verb: "read the metadata of",
            path: path(),
            source,
        }),
        Ok(metadata) if !metadata.is_dir() => Err(StoreError::NotADir { path: path() }),
        Ok(_) => Ok(()),
    }
}

/// Creates a file and opens it again for direct I/O.
fn probe(dir: &Path) -> Result<(), StoreError> {
    let probe = dir.join(format!(".offloadd-probe-{}", std::process::id()));
    let not_writable = |source| StoreError::NotWritable {
        path: dir.to_path_buf(),
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
                    path: dir.to_path_buf(),
                },
                _ => not_writable(error),
            })
    });
    // The probe may not have been created.
    let _ = fs::remove_file(&probe);
    direct.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(dir: &Path, bytes: u64) -> String {
        check_dirs(&[dir.join("store")], bytes)
            .expect_err("must be refused")
            .to_string()
    }

    #[test]
    fn a_directory_that_cannot_hold_a_store_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("missing");
        assert!(
            refused(&missing, 1)
                .ends_with("missing does not exist: create the directory, or name another one")
        );
        let file = dir.path().join("file");
        fs::write(&file, "x").unwrap();
        assert!(refused(&file, 1).contains("file is not a directory: name "));
        // Nobody can create files there, not even root.
        assert!(refused(Path::new("/proc"), 1).contains("cannot write in /proc"));
    }

    #[test]
    fn too_little_space_is_reported_and_leaves_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let text = refused(dir.path(), 1 << 60);
        assert!(text.contains("the store needs 1048576.0 TiB"), "{text}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn directories_on_one_file_system_share_its_space() {
        let dir = tempfile::tempdir().unwrap();
        let files = ["a", "b"].map(|name| dir.path().join(name).join("store"));
        for file in &files {
            fs::create_dir(file.parent().unwrap()).unwrap();
        }
        let space = rustix::fs::statvfs(dir.path()).unwrap();
        let most_bytes = space.f_bavail * space.f_frsize / 10 * 7;
        check_dirs(&files[..1], most_bytes).unwrap();
        let text = check_dirs(&files, most_bytes).unwrap_err().to_string();
        assert!(
            text.contains(&format!("the store needs {}", ApproxBytes(2 * most_bytes))),
            "{text}"
        );
    }
}
