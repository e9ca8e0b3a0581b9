//! The private daemon of one run. Its device files are in the directories of `nvme_path`, named after the
//! job.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use swapper::private::{PrivateDaemon, PrivateSettings};
use swapper::{Daemon, Durability, JobSummary, MemoryPlan};

use super::{StoreError, StoreSpace, check_dirs, check_space, space_needed};

/// Time to wait for a file's lock, which outlives a killed process by about 0.1 s.
const LOCK_WAIT: Duration = Duration::from_secs(1);

/// Space in a device file besides tiles: superblocks, catalog, definitions, manifests and gaps between extents.
const DEVICE_SLACK_BYTES: u64 = 32 << 20;

/// Size of each of `count` equal device files that hold the tiles of `memory`.
pub fn device_file_bytes(memory: &MemoryPlan, durability: Durability, count: u64) -> u64 {
    // Faster drives get more tiles: each file has room for an eighth more than its equal part, a pair of
    // tiles, and the gap between the two copies of the job's records, which is as long as a tile.
    let part_bytes = memory.device_bytes(durability).div_ceil(count.max(1));
    let spread_bytes = if count > 1 { part_bytes / 8 } else { 0 };
    (part_bytes + spread_bytes + 3 * memory.state_slot_bytes + DEVICE_SLACK_BYTES)
        .next_multiple_of(1 << 20)
}

/// The device files of a run's private store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreFiles {
    files: Vec<PathBuf>,
    file_bytes: u64,
}

impl StoreFiles {
    /// Describes the files `offloadd-JOB.tiles` in each of `dirs`, each of `file_bytes`.
    pub fn new(dirs: &[PathBuf], job: &str, file_bytes: u64) -> Self {
        let files = dirs.iter().map(|dir| dir.join(file_name(job))).collect();
        Self { files, file_bytes }
    }

    /// Checks that the directories can hold all files together.
    ///
    /// # Errors
    /// The first directory that cannot, with the reason. No file is created.
    pub fn check(&self) -> Result<(), StoreError> {
        check_dirs(&self.files, self.file_bytes)
    }

    /// Checks that the existing directories have space for all files together. Writes nothing.
    ///
    /// # Errors
    /// The first file system with too little space.
    pub fn check_space(&self) -> Result<(), StoreError> {
        check_space(&self.files, self.file_bytes)
    }

    /// Returns the space that the files need, by file system.
    pub fn space_needed(&self) -> Vec<StoreSpace> {
        space_needed(&self.files, self.file_bytes)
    }

    /// Size of the smallest file; `None` if there is none yet. A file keeps the size that it was made with.
    pub fn existing_bytes(&self) -> Option<u64> {
        let files = self.files.iter();
        let found = files.filter_map(|file| Some(fs::metadata(file).ok()?.len()));
        found.min()
    }

    /// Returns whether all files exist.
    pub fn exist(&self) -> bool {
        self.files.iter().all(|file| file.exists())
    }

    /// Creates a link to the run's directory beside each file. It shows whose store the file is; a dangling
    /// link means that the run is gone.
    ///
    /// # Errors
    /// A link cannot be created.
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

    /// Paths of the files for messages.
    pub fn names(&self) -> Vec<String> {
        self.files
            .iter()
            .map(|file| file.display().to_string())
            .collect()
    }

    pub fn paths(&self) -> &[PathBuf] {
        &self.files
    }
}

/// Name of `job`'s device files.
pub fn file_name(job: &str) -> String {
    format!("offloadd-{job}.tiles")
}

/// Returns the job whose device file is called `name`.
pub fn job_of(name: &str) -> Option<&str> {
    name.strip_prefix("offloadd-")?.strip_suffix(".tiles")
}

/// Path of the link beside a device file that points to its run's directory.
pub fn link_of(file: &Path) -> PathBuf {
    file.with_extension("run")
}

/// File in a run's directory of the Python package that tells where the run's tiles lie; its key `job` names them.
pub const PACKAGE_RUN_FILE: &str = "store.json";

/// Whether the directory `run` has a run of the Python package whose tiles are `job`'s.
pub fn is_package_run(run: &Path, job: &str) -> bool {
    let text = fs::read(run.join(PACKAGE_RUN_FILE)).unwrap_or_default();
    serde_json::from_slice::<serde_json::Value>(&text).is_ok_and(|store| store["job"] == job)
}

/// Removes existing `files` and their links.
///
/// # Errors
/// A daemon uses a file; a file cannot be removed.
pub fn remove_files(files: &[PathBuf]) -> Result<(), StoreError> {
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
        // A running daemon holds this lock, so a store in use is never removed.
        lock(&file).map_err(|_| StoreError::Busy { path: path.clone() })?;
        fs::remove_file(path).map_err(failed("remove"))?;
        removed(&link_of(path))?;
    }
    Ok(())
}

/// Removes a link if it exists.
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

/// Locks the file. Waits for a daemon that was just killed, because its writes in flight outlive it.
pub(super) fn lock(file: &File) -> Result<(), rustix::io::Errno> {
    let deadline = Instant::now() + LOCK_WAIT;
    loop {
        match rustix::fs::flock(file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(10)),
            result => return result,
        }
    }
}

/// What a private store holds instead of a job.
pub struct OtherJob {
    /// Name of the job that it holds.
    pub job: String,
    /// The store's device files, for messages.
    pub devices: String,
}

/// What `daemon` has of this user's job of this name.
///
/// # Errors
/// The daemon does not answer.
pub fn job_at(daemon: &Daemon, job: &str) -> Result<Option<JobSummary>, StoreError> {
    let jobs = daemon.jobs().map_err(StoreError::Daemon)?;
    Ok(jobs.into_iter().find(|found| found.job == job))
}

/// Bytes of its devices that `daemon` leaves a run, whose job there, if any, has space that the run can take.
pub fn device_free_bytes(daemon: &Daemon, job: Option<&JobSummary>) -> u64 {
    daemon.info().device_free_bytes + job.map_or(0, |job| job.reserved_bytes)
}

/// Checks that `daemon` has room for a run.
///
/// # Errors
/// [`StoreError::TooLittleAtDaemon`]; the daemon does not answer.
pub fn check_daemon(daemon: &Daemon, job: &str, needed_bytes: u64) -> Result<(), StoreError> {
    let free_bytes = device_free_bytes(daemon, job_at(daemon, job)?.as_ref());
    match needed_bytes <= free_bytes {
        true => Ok(()),
        false => Err(StoreError::TooLittleAtDaemon {
            free_bytes,
            needed_bytes,
        }),
    }
}

/// Returns what the private store behind `daemon` holds if it is not `job`; `None` for an empty one.
///
/// # Errors
/// The daemon does not answer.
pub fn other_job(daemon: &PrivateDaemon, job: &str) -> Result<Option<OtherJob>, StoreError> {
    let daemon = Daemon::connect(daemon.socket()).map_err(StoreError::Daemon)?;
    let jobs = daemon.jobs().map_err(StoreError::Daemon)?;
    if jobs.iter().any(|held| held.job == job) {
        return Ok(None);
    }
    let devices = daemon.info().devices.iter();
    let devices: Vec<String> = devices
        .map(|device| device.path.display().to_string())
        .collect();
    Ok(jobs.into_iter().next().map(|other| OtherJob {
        job: other.job,
        devices: devices.join(", "),
    }))
}

/// Starts a daemon on the files, which are formatted if they are new. The daemon ends with this process and
/// logs into `dir`.
///
/// # Errors
/// The daemon does not start.
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
