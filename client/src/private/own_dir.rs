//! Temporary directories that are removed with their process: for sockets whose configured directory has too long a path, for
//! the rendezvous of ranks, and for files of a measurement. A directory that a killed process left is removed when the next one
//! is created beside it.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// File that is locked while the process that created the directory lives.
const LOCK: &str = "lock";

/// Name of that file until it is locked, so that nobody finds the lock file unlocked while its process lives.
const LOCK_NEW: &str = "lock.new";

/// Names to try, in case processes with the same number left directories where files cannot be locked.
const NAMES_MAX: usize = 1000;

/// A directory that nobody else may enter, removed when dropped.
#[derive(Debug)]
pub struct OwnDir {
    path: PathBuf,
    _lock: File,
}

impl OwnDir {
    /// Creates a directory in `base` whose name begins with `prefix`, and removes those that dead processes of this user left.
    ///
    /// # Errors
    /// The directory cannot be created: `base` does not exist, is full, or belongs to another user.
    pub fn new(base: &Path, prefix: &str) -> io::Result<Self> {
        // Not an error: a user who may not list `base` may still create directories there.
        let _ = remove_left(base, prefix);
        let path = make(base, prefix)?;
        let new = path.join(LOCK_NEW);
        let locked = File::create_new(&new).inspect(|lock| {
            // On a file system without locks the file keeps this name, and the directory is never removed as left over.
            if lock.lock().is_ok() {
                let _ = fs::rename(&new, path.join(LOCK));
            }
        });
        match locked {
            Ok(lock) => Ok(Self { path, _lock: lock }),
            Err(error) => {
                let _ = fs::remove_dir(&path);
                Err(error)
            }
        }
    }

    /// Path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for OwnDir {
    fn drop(&mut self) {
        // The next start tries again to remove the rest.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Creates a directory with a name that no living process of this user has.
fn make(base: &Path, prefix: &str) -> io::Result<PathBuf> {
    static MADE: AtomicU32 = AtomicU32::new(0);
    let mut last = io::Error::from(io::ErrorKind::AlreadyExists);
    for _ in 0..NAMES_MAX {
        let nth = MADE.fetch_add(1, Ordering::Relaxed);
        let path = base.join(format!("{prefix}{}-{nth}", std::process::id()));
        match DirBuilder::new().mode(0o700).create(&path) {
            Ok(()) => return Ok(path),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

fn remove_left(base: &Path, prefix: &str) -> io::Result<()> {
    let us = rustix::process::geteuid().as_raw();
    let is_named = |name: &OsStr| name.as_encoded_bytes().starts_with(prefix.as_bytes());
    for entry in base.read_dir()?.flatten() {
        let ours = is_named(&entry.file_name())
            // Metadata of the entry itself: links are left alone.
            && entry.metadata().is_ok_and(|found| found.is_dir() && found.uid() == us);
        // The lock is held until the directory is gone, so that nobody else removes it or a new one of that name.
        if ours && let Ok(Some(_held)) = left(&entry.path()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    Ok(())
}

/// Locks a left directory: returns its lock if its process is dead. A directory without a lock is being created.
fn left(dir: &Path) -> io::Result<Option<File>> {
    let path = dir.join(LOCK);
    let lock = File::open(&path)?;
    // Since it was opened, somebody may have removed the directory and another process created one with the same name.
    let is_there = |taken: &File| -> io::Result<bool> {
        let (taken, there) = (taken.metadata()?, fs::metadata(&path)?);
        Ok((taken.dev(), taken.ino()) == (there.dev(), there.ino()))
    };
    Ok((lock.try_lock().is_ok() && is_there(&lock)?).then_some(lock))
}

#[cfg(test)]
mod tests {
    //! Tests that a directory is never taken from under a living daemon and never stays behind.

    use super::*;

    const PREFIX: &str = "offloadd-private-";

    /// Leaves a directory behind as a killed process does. Unlocks it explicitly: another test's thread may be about to start a process, which has a
    /// copy of the file for a moment.
    fn leave(base: &Path) -> PathBuf {
        let dir = OwnDir::new(base, PREFIX).unwrap();
        dir._lock.unlock().unwrap();
        let path = dir.path.clone();
        std::mem::forget(dir);
        path
    }

    #[test]
    fn what_a_killed_process_left_is_removed_by_the_next_start() {
        let base = tempfile::tempdir().unwrap();
        let first = leave(base.path());
        fs::write(first.join("offloadd.sock"), "").unwrap();
        let next = OwnDir::new(base.path(), PREFIX).unwrap();
        assert!(!first.exists());
        assert_eq!(fs::metadata(next.path()).unwrap().mode() & 0o777, 0o700);
        let path = next.path().to_owned();
        drop(next);
        assert!(!path.exists());
    }

    #[test]
    fn what_another_removes_already_is_left_to_it() {
        let base = tempfile::tempdir().unwrap();
        let dir = leave(base.path());
        let held = left(&dir).unwrap().expect("nobody has it");
        assert!(left(&dir).unwrap().is_none());
        drop(held);
    }

    #[test]
    fn what_somebody_may_use_stays() {
        let base = tempfile::tempdir().unwrap();
        let in_base = |name: &str| base.path().join(name);
        let living = OwnDir::new(base.path(), PREFIX).unwrap();
        let being_made = in_base("offloadd-private-1-0");
        let not_locked_yet = in_base("offloadd-private-2-0");
        let another = in_base("offloadd-launch-x");
        let link = in_base("offloadd-private-3-0");
        for dir in [&being_made, &not_locked_yet, &another] {
            fs::create_dir(dir).unwrap();
        }
        fs::write(not_locked_yet.join(LOCK_NEW), "").unwrap();
        fs::write(another.join(LOCK), "").unwrap();
        std::os::unix::fs::symlink(&another, &link).unwrap();
        let _next = OwnDir::new(base.path(), PREFIX).unwrap();
        let [new, next] = [&being_made, &not_locked_yet];
        for stays in [living.path(), new, next, &another, &link] {
            assert!(stays.exists(), "{}", stays.display());
        }
    }

    /// Fails now and then if a lock can be seen before it is taken.
    #[test]
    fn processes_that_start_at_once_leave_each_other_their_directories() {
        let base = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..250 {
                        let own = OwnDir::new(base.path(), PREFIX).unwrap();
                        assert!(own.path().join(LOCK).exists());
                    }
                });
            }
        });
        assert_eq!(base.path().read_dir().unwrap().count(), 0);
    }

    #[test]
    fn a_base_that_cannot_be_used_is_an_error() {
        let base = tempfile::tempdir().unwrap();
        assert!(OwnDir::new(&base.path().join("missing"), PREFIX).is_err());
    }
}
