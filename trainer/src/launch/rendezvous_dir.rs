//! The directory through which ranks find each other. Their launcher removes it. If it was killed, the next
//! launcher does.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use tempfile::TempDir;

const PREFIX: &str = "offloadd-launch-";

/// Lock file held while the launcher lives. Ranks also lock the files that they put beside it.
const LOCK: &str = "launcher";

/// Name of the lock file before it is locked: under its final name it must never be seen unlocked while the
/// launcher lives.
const LOCK_NEW: &str = "launcher.new";

/// Rendezvous directory of one launch, removed on drop.
#[derive(Debug)]
pub(super) struct RendezvousDir {
    dir: TempDir,
    _lock: File,
}

impl RendezvousDir {
    /// Creates a directory in `base`. Removes directories of this user's launches in which neither the
    /// launcher nor a rank is alive.
    pub(super) fn new(base: &Path) -> io::Result<Self> {
        // Leftovers disturb nobody, and a user who cannot list the base may still create directories there.
        let _ = remove_left(base);
        let dir = tempfile::Builder::new().prefix(PREFIX).tempdir_in(base)?;
        let new = dir.path().join(LOCK_NEW);
        let lock = File::create_new(&new)?;
        lock.lock()?;
        std::fs::rename(new, dir.path().join(LOCK))?;
        Ok(Self { dir, _lock: lock })
    }

    pub(super) fn path(&self) -> &Path {
        self.dir.path()
    }
}

fn remove_left(base: &Path) -> io::Result<()> {
    let us = rustix::process::geteuid().as_raw();
    for entry in base.read_dir()?.flatten() {
        let ours = entry.file_name().as_encoded_bytes().starts_with(PREFIX.as_bytes())
            // Metadata of the entry itself, so that links are ignored.
            && entry.metadata().is_ok_and(|found| found.is_dir() && found.uid() == us);
        if ours && is_left(&entry.path()).unwrap_or(false) {
            // Another launcher may be removing it at the same time.
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
    Ok(())
}

/// Returns whether no live process holds a lock in the directory. A directory without a launcher's lock is
/// just being created.
fn is_left(dir: &Path) -> io::Result<bool> {
    let is_free = |path: &Path| Ok::<_, io::Error>(File::open(path)?.try_lock_shared().is_ok());
    if !is_free(&dir.join(LOCK))? {
        return Ok(false);
    }
    for entry in dir.read_dir()? {
        if !is_free(&entry?.path())? {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    //! Errors that these tests find: a directory is removed while its ranks live, or is never removed.

    use super::*;

    /// Makes a directory like that of a killed launcher. It is unlocked explicitly, because another test's
    /// thread may be starting a process, which holds a copy of the file for a moment.
    fn left(base: &Path) -> std::path::PathBuf {
        let RendezvousDir { dir, _lock } = RendezvousDir::new(base).unwrap();
        _lock.unlock().unwrap();
        dir.keep()
    }

    #[test]
    fn the_directory_of_a_killed_launcher_is_removed_by_the_next() {
        let base = tempfile::tempdir().unwrap();
        let first = left(base.path());
        std::fs::write(first.join("beat-0"), "1 2 -").unwrap();
        let next = RendezvousDir::new(base.path()).unwrap();
        assert!(!first.exists());
        assert!(next.path().exists());
        let path = next.path().to_owned();
        drop(next);
        assert!(!path.exists());
    }

    #[test]
    fn a_directory_that_may_be_in_use_is_kept() {
        let base = tempfile::tempdir().unwrap();
        let of_ranks = left(base.path());
        let beat = File::create_new(of_ranks.join("beat-1")).unwrap();
        beat.lock().unwrap();
        let living = RendezvousDir::new(base.path()).unwrap();
        let being_made = base.path().join(format!("{PREFIX}new"));
        std::fs::create_dir(&being_made).unwrap();
        let not_locked_yet = base.path().join(format!("{PREFIX}locked-next"));
        std::fs::create_dir(&not_locked_yet).unwrap();
        std::fs::write(not_locked_yet.join(LOCK_NEW), "").unwrap();
        let another = base.path().join("another");
        std::fs::create_dir(&another).unwrap();
        std::fs::write(another.join(LOCK), "").unwrap();
        let link = base.path().join(format!("{PREFIX}link"));
        std::os::unix::fs::symlink(&another, &link).unwrap();
        let _next = RendezvousDir::new(base.path()).unwrap();
        let [new, next] = [&being_made, &not_locked_yet];
        for stays in [&of_ranks, living.path(), new, next, &another, &link] {
            assert!(stays.exists(), "{}", stays.display());
        }
        beat.unlock().unwrap();
        let _next = RendezvousDir::new(base.path()).unwrap();
        assert!(!of_ranks.exists());
    }

    /// Fails sometimes if a lock file is visible before it is locked, and never otherwise.
    #[test]
    fn launchers_that_start_at_once_do_not_remove_each_others_directories() {
        let base = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..250 {
                        let own = RendezvousDir::new(base.path()).unwrap();
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
        assert!(RendezvousDir::new(&base.path().join("missing")).is_err());
    }
}
