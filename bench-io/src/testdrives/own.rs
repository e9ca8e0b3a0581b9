//! Drives of one measurement: gone with it, and where it was killed, with the next one or with `bench-io testdrives down`.

use std::fs::{self, File};
use std::ops::Deref;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result};
use offload_support::errln;

use super::{Drives, DrivesPlan, dir_of, names};

/// In a set's directory, locked while the process lives whose drives they are. Drives that a person made have none.
const LOCK: &str = "lock";

/// Drives for one measurement: taken away whatever happens.
#[derive(Debug)]
pub(crate) struct OwnDrives {
    drives: Drives,
    _lock: File,
}

impl OwnDrives {
    /// Makes them. On failure nothing is left.
    ///
    /// # Errors
    /// What is missing here, or which step failed.
    pub(crate) fn create(plan: &DrivesPlan) -> Result<Self> {
        // Before there is a list of them: whoever finds one finds it locked.
        let lock = |dir: &Path| -> Result<File> {
            let path = dir.join(LOCK);
            let file = File::create(&path).and_then(|file| {
                file.try_lock()?;
                Ok(file)
            });
            file.with_context(|| format!("locking {}", path.display()))
        };
        let (drives, lock) = Drives::create_with(plan, lock)?;
        Ok(Self {
            drives,
            _lock: lock,
        })
    }
}

impl Deref for OwnDrives {
    type Target = Drives;

    fn deref(&self) -> &Drives {
        &self.drives
    }
}

impl Drop for OwnDrives {
    fn drop(&mut self) {
        if let Err(error) = self.drives.destroy() {
            errln!("bench-io: {error:#}");
        }
    }
}

/// The lock of the set in `dir`, taken, where the measurement lives no more whose drives they are.
fn left(dir: &Path) -> Option<File> {
    let path = dir.join(LOCK);
    let lock = File::open(&path).ok()?;
    lock.try_lock().ok()?;
    // Another may have taken them away since it was opened, and a third made some of that name.
    let (taken, there) = (lock.metadata().ok()?, fs::metadata(&path).ok()?);
    ((taken.dev(), taken.ino()) == (there.dev(), there.ino())).then_some(lock)
}

/// Whether the set `name` is of a measurement that was killed.
pub(crate) fn is_orphaned(name: &str) -> bool {
    left(&dir_of(name)).is_some()
}

/// Takes away what killed measurements left: their memory is gone from the machine, and their names mean nothing to anybody.
/// How many sets that were.
///
/// # Errors
/// What still uses them; the others are gone.
pub(crate) fn destroy_orphaned() -> Result<usize> {
    let (mut count, mut failed) = (0, Ok(()));
    for name in names() {
        // Held until they are gone: nobody else takes them away meanwhile.
        let Some(_held) = left(&dir_of(&name)) else {
            continue;
        };
        match Drives::open(&name).and_then(|drives| drives.destroy()) {
            Ok(()) => {
                count += 1;
                errln!(
                    "bench-io: took away the rate-limited drives {name}, which a killed measurement left"
                );
            }
            Err(error) => failed = Err(error),
        }
    }
    failed.map(|()| count)
}
