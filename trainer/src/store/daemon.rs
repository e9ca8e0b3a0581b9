//! A private daemon for one run: its device files lie in the directories of `nvme_path`, named after the job.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use swapper::private::{PrivateDaemon, PrivateSettings};

use super::{StoreError, check_dirs, check_space};

/// A lock outlives its killed process by some 0.1 s.
const LOCK_WAIT: Duration = Duration::from_secs(1);

/// The device files of a run's private store.
#[derive(Clone, Debug)]
pub struct StoreFiles {
    files: Vec<PathBuf>,
    file_bytes: u64,
}

impl StoreFiles {
    /// `offloadd-JOB.tiles` in each of `dirs`, of `file_bytes` each.
    pub fn new(dirs: &[PathBuf], job: &str, file_bytes: u64) -> Self {
        let files = dirs.iter().map(|dir| dir.join(file_name(job))).collect();
        Self { files, file_bytes }
    }

    /// Checks that the directories can hold their files, all of them together.
    ///
    /// # Errors
    /// The first directory that cannot, and why. Nothing is made.
    pub fn check(&self) -> Result<(), StoreError> {
        check_dirs(&self.files, self.file_bytes)
    }

    /// Checks that the directories that exist have room for their files, all of them together. Touches nothing.
    ///
    /// # Errors
    /// The first file system that has too little.
    pub fn check_space(&self) -> Result<(), StoreError> {
        check_space(&self.files, self.file_bytes)
    }

    /// Whether all of them exist.
    pub fn exist(&self) -> bool {
        self.files.iter().all(|file| file.exists())
    }

    /// Makes a link to the run's directory beside each of them: it tells whose store a file is, and that it is nobody's when the
    /// run is gone.
    ///
    /// # Errors
    /// A link cannot be made.
    pub fn link_run(&self, run_dir: &Path) -> Result<(), StoreError> {
        for file in &self.files {
            let link = link_of(file);
            if fs::read_link(&link).is_ok_and(|found| found == run_dir) {
                continue;
            }
            removed(&link)?;
            std::os::unix::fs::symlink(run_dir, &link).map_err(|source| StoreError::Io {
                verb: "make",
                path: link,
                source,
            })?;
        }
        Ok(())
    }

    /// Their paths, for people.
    pub fn names(&self) -> Vec<String> {
        self.files
            .iter()
            .map(|file| file.display().to_string())
            .collect()
    }

    /// Their paths.
    pub fn paths(&self) -> &[PathBuf] {
        &self.files
    }
}

/// The name of `job`'s device files.
pub(crate) fn file_name(job: &str) -> String {
    format!("offloadd-{job}.tiles")
}

/// The job whose device file is called `name`, if it is one's.
pub(crate) fn job_of(name: &str) -> Option<&str> {
    name.strip_prefix("offloadd-")?.strip_suffix(".tiles")
}

/// The link beside a device file that leads to its run's directory.
pub(crate) fn link_of(file: &Path) -> PathBuf {
    file.with_extension("run")
}

/// Removes those of `files` that exist, for a run that starts again.
///
/// # Errors
/// A daemon still has one of them; it cannot be removed.
pub(crate) fn remove_files(files: &[PathBuf]) -> Result<(), StoreError> {
    for path in files {
        let failed = |verb| {
            move |source| StoreError::Io {
                verb,
                path: path.clone(),
                source,
            }
        };
        let file = match File::open(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                removed(&link_of(path))?;
                continue;
            }
            opened => opened.map_err(failed("open"))?,
        };
        // The daemon's own lock: a store in use is never removed under it.
        lock(&file).map_err(|_| StoreError::Busy { path: path.clone() })?;
        fs::remove_file(path).map_err(failed("remove"))?;
        removed(&link_of(path))?;
    }
    Ok(())
}

/// Removes a link, if it is there.
fn removed(link: &Path) -> Result<(), StoreError> {
    match fs::remove_file(link) {
        Err(source) if source.kind() != ErrorKind::NotFound => Err(StoreError::Io {
            verb: "remove",
            path: link.to_owned(),
            source,
        }),
        _ => Ok(()),
    }
}

/// Takes the lock, waiting for a daemon that was just killed: its writes in flight outlive it.
fn lock(file: &File) -> Result<(), rustix::io::Errno> {
    let deadline = Instant::now() + LOCK_WAIT;
    loop {
        match rustix::fs::flock(file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(10)),
            result => return result,
        }
    }
}

/// Formats the files if they are new, and starts a daemon on them that ends with this process. Its log is in `dir`.
///
/// # Errors
/// The daemon's own words.
pub fn start_private(
    files: &StoreFiles,
    dir: &Path,
    arena_bytes_max: u64,
    iodepth_max: u32,
    engine: &str,
) -> Result<PrivateDaemon, StoreError> {
    let devices = files
        .files
        .iter()
        .map(|file| (file.clone(), files.file_bytes))
        .collect();
    let settings = PrivateSettings {
        program: None,
        dir: dir.to_path_buf(),
        devices,
        arena_bytes_max,
        iodepth_max,
        engine: engine.to_owned(),
    };
    PrivateDaemon::start(settings).map_err(StoreError::Private)
}
