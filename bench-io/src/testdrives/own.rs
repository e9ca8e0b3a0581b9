//! Drives of one measurement, destroyed with it; if it is killed, by the next one or by `bench-io testdrives destroy`.

use std::fs::{self, File};
use std::ops::Deref;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result};
use offload_support::errln;

use super::{Drives, DrivesPlan, dir_of, names};

/// File in a set's directory, locked while the owning process lives. Sets created by a person have none.
const LOCK: &str = "lock";

/// Drives that are destroyed when dropped.
#[derive(Debug)]
pub(crate) struct OwnDrives {
    drives: Drives,
    _lock: File,
}

impl OwnDrives {
    /// Creates the drives. Leaves nothing after a failure.
    pub(crate) fn create(plan: &DrivesPlan) -> Result<Self> {
        // Locked before the drives are listed, so that nobody takes them for orphaned.
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

/// Takes the lock of the set in `dir`, if the measurement that owns it is dead.
fn left(dir: &Path) -> Option<File> {
    let path = dir.join(LOCK);
    let lock = File::open(&path).ok()?;
    lock.try_lock().ok()?;
    // The set may have been destroyed since, and another one of that name created.
    let (taken, there) = (lock.metadata().ok()?, fs::metadata(&path).ok()?);
    ((taken.dev(), taken.ino()) == (there.dev(), there.ino())).then_some(lock)
}

/// Whether the set `name` belongs to a killed measurement.
pub(crate) fn is_orphaned(name: &str) -> bool {
    left(&dir_of(name)).is_some()
}

/// Destroys the drives of killed measurements and returns the number of sets.
///
/// # Errors
/// Something still uses one; the others are destroyed.
pub(crate) fn destroy_orphaned() -> Result<usize> {
    let (mut count, mut failed) = (0, Ok(()));
    for name in names() {
        // Held until the set is destroyed.
        let Some(_held) = left(&dir_of(&name)) else {
            continue;
        };
        match Drives::open(&name).and_then(|drives| drives.destroy()) {
            Ok(()) => {
                count += 1;
                errln!(
                    "bench-io: destroyed the rate-limited drives {name} of a killed measurement"
                );
            }
            Err(error) => failed = Err(error),
        }
    }
    failed.map(|()| count)
}
