//! Exclusive creation of a token file: one process writes it under a temporary name and renames it at the
//! end.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use test_hooks::kill_point::{Point, reach};

use super::super::DataError;
use training_state::run::make_dir;

/// Interval between checks for a file that another process creates.
const ROUND: Duration = Duration::from_millis(100);
/// A process that has written nothing for this long is considered hung.
const SILENT_MAX: Duration = Duration::from_secs(600);

/// Exclusive right to create a token file. The lock ends with the process.
pub(in crate::data) struct Claim {
    path: PathBuf,
    temporary: PathBuf,
    file: File,
    /// Directories created for this file, innermost first; removed again if creating the file fails.
    made: Vec<PathBuf>,
    kept: bool,
}

/// Claims the creation of `path`. Returns `None` if another process has created the file in the meantime.
///
/// # Errors
/// The directory cannot be written; another process holds the claim and makes no progress.
pub(in crate::data) fn claim(
    path: &Path,
    say: &mut dyn FnMut(String),
) -> Result<Option<Claim>, DataError> {
    let failed = |source| DataError::Cache {
        verb: "write",
        path: path.into(),
        source,
    };
    let dir = path.parent().unwrap_or(Path::new("."));
    let missing = dir.ancestors().filter(|dir| !dir.as_os_str().is_empty());
    let made = missing
        .take_while(|dir| !dir.exists())
        .map(PathBuf::from)
        .collect();
    // The directory may be the run directory, so it is created as durably as the run would create it.
    make_dir(dir).map_err(failed)?;
    let temporary = path.with_extension("new");
    let mut said = false;
    let (mut seen_bytes, mut since) = (0, Instant::now());
    loop {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&temporary)
            .map_err(failed)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) if is_at(&file, &temporary) => {
                return Ok(Some(Claim {
                    path: path.into(),
                    temporary,
                    file,
                    made,
                    kept: false,
                }));
            }
            // The file may have been renamed between opening and locking it.
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                if !said {
                    say(format!(
                        "another trainer is creating {}: waiting",
                        path.display()
                    ));
                    said = true;
                }
                let bytes = file.metadata().map_err(failed)?.len();
                if bytes != seen_bytes {
                    (seen_bytes, since) = (bytes, Instant::now());
                }
                if since.elapsed() > SILENT_MAX {
                    return Err(DataError::Busy {
                        path: temporary,
                        waited_s: SILENT_MAX.as_secs(),
                    });
                }
                std::thread::sleep(ROUND);
            }
            Err(error) => return Err(failed(error.into())),
        }
        if path.exists() && !temporary.exists() {
            return Ok(None);
        }
    }
}

impl Claim {
    /// The file to write to.
    pub(in crate::data) fn file(&self) -> &File {
        &self.file
    }

    /// Renames the file to its final name.
    pub(in crate::data) fn keep(mut self) -> Result<(), DataError> {
        reach(Point::Tokens);
        fs::rename(&self.temporary, &self.path).map_err(|source| DataError::Cache {
            verb: "write",
            path: self.path.clone(),
            source,
        })?;
        self.kept = true;
        Ok(())
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.kept {
            let _ = fs::remove_file(&self.temporary);
            // Removes empty directories only.
            for dir in &self.made {
                let _ = fs::remove_dir(dir);
            }
        }
        // A child process that was just started may still hold a copy of the locked file.
        let _ = self.file.unlock();
    }
}

/// Returns whether `path` is the name of this file.
fn is_at(file: &File, path: &Path) -> bool {
    let number = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    let ours = file.metadata().map(number).ok();
    ours.is_some() && ours == fs::metadata(path).map(number).ok()
}
