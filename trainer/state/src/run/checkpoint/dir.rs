//! The directory of a run's checkpoints: lists them, creates and names new ones, removes old ones.
//!
//! A checkpoint for which there is no room may be in another directory. Then a link to it has its name here, from the beginning: it is
//! renamed and removed as a directory would be, and everything reads it through the link.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use super::{CheckpointDescription, CheckpointError};
use crate::run::paths::{make_dir, resolved};
use crate::store::free_bytes;

const PREFIX: &str = "step-";
/// Suffix of a checkpoint that is being written.
const PARTIAL: &str = "partial";
/// Suffix of a checkpoint that is being removed.
const REMOVED: &str = "removed";
const ASIDE: &str = "aside-";

/// Space reserved for files of a checkpoint other than tiles: more than any description takes.
pub const SLACK_BYTES: u64 = 1 << 20;

/// Directory of a run's checkpoints, which need not exist.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    dir: PathBuf,
    /// Directory for checkpoints that `dir` has no room for.
    elsewhere: Option<PathBuf>,
}

/// Name of a checkpoint on the command line: its step or its directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CheckpointName {
    Step(u64),
    Dir(PathBuf),
}

impl std::str::FromStr for CheckpointName {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(text
            .parse()
            .map_or_else(|_| Self::Dir(text.into()), Self::Step))
    }
}

impl CheckpointName {
    /// Returns the checkpoint's directory. A step refers to the run in `run_dir`.
    ///
    /// # Errors
    /// The run has no checkpoint of this step; the error lists the existing ones.
    pub fn find(&self, run_dir: &Path) -> Result<PathBuf, CheckpointError> {
        match self {
            Self::Step(step) => Checkpoints::in_run_dir(run_dir).at(*step),
            Self::Dir(dir) => Ok(resolved(dir)),
        }
    }
}

/// Directory of a checkpoint that was not read yet.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CheckpointDir {
    pub step: u64,
    pub path: PathBuf,
}

impl Checkpoints {
    /// Checkpoints of the run in `run_dir`.
    pub fn in_run_dir(run_dir: &Path) -> Self {
        Self {
            dir: run_dir.join("checkpoints"),
            elsewhere: None,
        }
    }

    /// Uses `elsewhere`, which only this run may use, for checkpoints that there is no room for.
    pub fn or_in(mut self, elsewhere: Option<PathBuf>) -> Self {
        self.elsewhere = elsewhere;
        self
    }

    /// Whether there is another directory to try.
    pub fn has_elsewhere(&self) -> bool {
        self.elsewhere.is_some()
    }

    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// Lists all complete checkpoints, oldest first.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn list(&self) -> Result<Vec<CheckpointDir>, CheckpointError> {
        let mut checkpoints = list_in(&self.dir)?;
        checkpoints.sort_unstable();
        Ok(checkpoints)
    }

    /// Lists checkpoints that were moved aside, in no particular order.
    ///
    /// # Errors
    /// A directory cannot be read.
    pub fn list_aside(&self) -> Result<Vec<CheckpointDir>, CheckpointError> {
        let mut checkpoints = Vec::new();
        for path in entries(&self.dir)? {
            if name_of(&path).starts_with(ASIDE) {
                checkpoints.extend(list_in(&path)?);
            }
        }
        Ok(checkpoints)
    }

    /// Returns the newest checkpoint.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn newest(&self) -> Result<Option<PathBuf>, CheckpointError> {
        Ok(self.list()?.pop().map(|checkpoint| checkpoint.path))
    }

    /// Returns the checkpoint of `step`.
    ///
    /// # Errors
    /// There is none; the error lists the existing ones.
    pub fn at(&self, step: u64) -> Result<PathBuf, CheckpointError> {
        let path = self.dir.join(step_name(step));
        if path.is_dir() {
            return Ok(path);
        }
        let has = self
            .list()?
            .iter()
            .map(|checkpoint| checkpoint.step)
            .collect();
        Err(CheckpointError::Missing { path, has })
    }

    /// Returns whether there is a checkpoint of `step`.
    pub fn has(&self, step: u64) -> bool {
        self.dir.join(step_name(step)).is_dir()
    }

    /// Creates the directory in which the checkpoint of `step` is written, for tiles of `tile_bytes` in
    /// total. Removes interrupted checkpoints first. With `elsewhere_first`, the other directory is used if there is one with room.
    ///
    /// # Errors
    /// Too little space, or the directory cannot be created.
    pub fn begin(
        &self,
        step: u64,
        tile_bytes: u64,
        elsewhere_first: bool,
    ) -> Result<(), CheckpointError> {
        let path = self.partial(step);
        make_dir(&self.dir).map_err(CheckpointError::io("create the directory of", &path))?;
        self.clean()?;
        let needed_bytes = tile_bytes.saturating_add(SLACK_BYTES);
        let here = || {
            check_room(&self.dir, step, needed_bytes)?;
            fs::create_dir(&path).map_err(CheckpointError::io("make", &path))
        };
        let Some(elsewhere) = &self.elsewhere else {
            return here();
        };
        let there = || self.begin_in(elsewhere, step, needed_bytes);
        match elsewhere_first {
            true => there().or_else(|_| here()),
            false => here().or_else(|refused| match there() {
                Err(CheckpointError::TooLittleSpace { .. }) => Err(refused),
                begun => begun,
            }),
        }
    }

    /// Creates the directory of the checkpoint of `step` in `elsewhere`, and the link to it.
    fn begin_in(
        &self,
        elsewhere: &Path,
        step: u64,
        needed_bytes: u64,
    ) -> Result<(), CheckpointError> {
        let link = self.partial(step);
        make_dir(elsewhere).map_err(CheckpointError::io("create the directory of", elsewhere))?;
        check_room(elsewhere, step, needed_bytes)?;
        // A step that is repeated may have a checkpoint there already.
        let taken = (0..).map(|number| match number {
            0 => elsewhere.join(step_name(step)),
            number => elsewhere.join(format!("{}-{number}", step_name(step))),
        });
        let mut free = taken.filter(|dir| dir.symlink_metadata().is_err());
        let dir = free.next().expect("there is an unused number");
        fs::create_dir(&dir).map_err(CheckpointError::io("make", &dir))?;
        flush(elsewhere)?;
        std::os::unix::fs::symlink(&dir, &link).map_err(|source| {
            // Nothing is in it yet.
            let _ = fs::remove_dir(&dir);
            CheckpointError::io("make", &link)(source)
        })
    }

    /// Directory in which the checkpoint of `step` is written.
    pub fn partial(&self, step: u64) -> PathBuf {
        self.dir.join(format!("{}.{PARTIAL}", step_name(step)))
    }

    /// Completes a checkpoint from its tile files, which are on the drive. Replaces an earlier checkpoint of
    /// the same step.
    ///
    /// # Errors
    /// The drive is full or fails; an earlier checkpoint is kept.
    pub fn finish(&self, description: &CheckpointDescription) -> Result<PathBuf, CheckpointError> {
        description.write(&self.partial(description.step))?;
        self.name(description.step)
    }

    /// Completes a checkpoint of which all files are on the drive, like [`Self::finish`].
    ///
    /// # Errors
    /// Same as [`Self::finish`].
    pub(in crate::run) fn name(&self, step: u64) -> Result<PathBuf, CheckpointError> {
        let (partial, path) = (self.partial(step), self.dir.join(step_name(step)));
        flush(&partial)?;
        if path.exists() {
            // The step was repeated; a checkpoint of it exists at every moment.
            exchange(&partial, &path).map_err(CheckpointError::io("rename", &path))?;
            flush(&self.dir)?;
            remove_tree(&partial).map_err(CheckpointError::io("remove", &partial))?;
        } else {
            fs::rename(&partial, &path).map_err(CheckpointError::io("name", &path))?;
            flush(&self.dir)?;
        }
        Ok(path)
    }

    /// Removes the unfinished checkpoint of `step`.
    pub fn abandon(&self, step: u64) {
        // What is left is removed before the next checkpoint begins.
        let _ = remove_tree(&self.partial(step));
    }

    /// Removes the oldest checkpoints until `count` are left, but never those of `step` and `spared`; 0 keeps all.
    /// The spared one is not counted, unless it is that of `step`.
    ///
    /// # Errors
    /// A checkpoint cannot be removed.
    pub fn keep(&self, count: u64, step: u64, spared: Option<u64>) -> Result<(), CheckpointError> {
        let mut checkpoints = self.list()?;
        let spared = spared.filter(|spared| *spared != step);
        checkpoints.retain(|checkpoint| Some(checkpoint.step) != spared);
        let over = match usize::try_from(count) {
            Ok(0) | Err(_) => 0,
            Ok(count) => checkpoints.len().saturating_sub(count),
        };
        checkpoints.retain(|checkpoint| checkpoint.step != step);
        let over = over.min(checkpoints.len());
        checkpoints[..over]
            .iter()
            .try_for_each(|checkpoint| self.remove(&checkpoint.path))
    }

    /// Removes checkpoints whose writing or removal was interrupted.
    ///
    /// # Errors
    /// A checkpoint cannot be removed.
    pub fn clean(&self) -> Result<(), CheckpointError> {
        for path in self.leftovers()? {
            remove_tree(&path).map_err(CheckpointError::io("remove the remains of", &path))?;
        }
        Ok(())
    }

    /// Bytes that [`Self::clean`] frees.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn leftover_bytes(&self) -> Result<u64, CheckpointError> {
        Ok(bytes_in(&self.leftovers()?))
    }

    /// Bytes of all complete checkpoints except those moved aside.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn bytes(&self) -> Result<u64, CheckpointError> {
        let checkpoints: Vec<PathBuf> = self
            .list()?
            .into_iter()
            .map(|checkpoint| checkpoint.path)
            .collect();
        Ok(bytes_in(&checkpoints))
    }

    /// Directories of checkpoints whose writing or removal was interrupted.
    fn leftovers(&self) -> Result<Vec<PathBuf>, CheckpointError> {
        let mut left = entries(&self.dir)?;
        left.retain(|path| {
            let name = name_of(path);
            let ending = name.rsplit_once('.').map_or("", |(_, ending)| ending);
            name.starts_with(PREFIX) && [PARTIAL, REMOVED].contains(&ending)
        });
        Ok(left)
    }

    /// Moves all checkpoints newer than `step` aside, with a copy of the metrics. Returns their new directory
    /// if there are any.
    ///
    /// # Errors
    /// A checkpoint cannot be moved.
    pub fn set_aside_after(
        &self,
        step: u64,
        metrics: &Path,
    ) -> Result<Option<PathBuf>, CheckpointError> {
        let mut newer = self.list()?;
        newer.retain(|checkpoint| checkpoint.step > step);
        if newer.is_empty() {
            return Ok(None);
        }
        let aside = (1..)
            .map(|number| self.dir.join(format!("{ASIDE}{number}")))
            .find(|aside| !aside.exists())
            .expect("there is an unused number");
        fs::create_dir(&aside).map_err(CheckpointError::io("make", &aside))?;
        if metrics.exists() {
            let copy = aside.join("metrics.jsonl");
            fs::copy(metrics, &copy).map_err(CheckpointError::io("write", &copy))?;
        }
        for checkpoint in newer {
            let to = aside.join(step_name(checkpoint.step));
            fs::rename(&checkpoint.path, &to)
                .map_err(CheckpointError::io("move aside", &checkpoint.path))?;
        }
        flush(&aside)?;
        flush(&self.dir)?;
        Ok(Some(aside))
    }

    /// Renames the checkpoint before removing its files, so that an incomplete one is never taken for
    /// complete.
    fn remove(&self, path: &Path) -> Result<(), CheckpointError> {
        let removed = path.with_extension(REMOVED);
        fs::rename(path, &removed)
            .and_then(|()| remove_tree(&removed))
            .map_err(CheckpointError::io("remove", path))
    }

    /// Removes all checkpoints and what is left of others.
    ///
    /// # Errors
    /// A checkpoint cannot be removed.
    pub fn remove_all(&self) -> Result<(), CheckpointError> {
        for path in entries(&self.dir)? {
            if name_of(&path).starts_with(PREFIX) {
                remove_tree(&path).map_err(CheckpointError::io("remove", &path))?;
            }
        }
        match fs::remove_dir_all(&self.dir) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(CheckpointError::io("remove", &self.dir)(error))
            }
            _ => Ok(()),
        }
    }
}

/// Checks that the file system of `dir` has `needed_bytes` for the checkpoint of `step`.
fn check_room(dir: &Path, step: u64, needed_bytes: u64) -> Result<(), CheckpointError> {
    let path = dir.join(step_name(step));
    let free_bytes =
        free_bytes(dir).map_err(CheckpointError::io("read the free space for", &path))?;
    match free_bytes < needed_bytes {
        true => Err(CheckpointError::TooLittleSpace {
            path,
            needed_bytes,
            free_bytes,
        }),
        false => Ok(()),
    }
}

/// Removes a directory, or a link with the directory that it points to.
fn remove_tree(path: &Path) -> std::io::Result<()> {
    let Ok(target) = fs::read_link(path) else {
        return fs::remove_dir_all(path);
    };
    match fs::remove_dir_all(&target) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // Fails if it holds other checkpoints.
    let _ = target.parent().map(fs::remove_dir);
    fs::remove_file(path)
}

/// Bytes of the files in `dirs`; directories that cannot be read count as empty.
pub fn bytes_in(dirs: &[PathBuf]) -> u64 {
    let files = dirs.iter().filter_map(|path| fs::read_dir(path).ok());
    let files = files
        .flatten()
        .filter_map(|file| file.ok()?.metadata().ok());
    files.map(|file| file.len()).sum()
}

/// Name of a checkpoint's directory.
fn step_name(step: u64) -> String {
    format!("{PREFIX}{step:08}")
}

fn list_in(dir: &Path) -> Result<Vec<CheckpointDir>, CheckpointError> {
    let checkpoints = entries(dir)?.into_iter().filter_map(|path| {
        let step = name_of(&path).strip_prefix(PREFIX)?.parse().ok()?;
        Some(CheckpointDir { step, path })
    });
    Ok(checkpoints.collect())
}

fn entries(dir: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let failed = |source| CheckpointError::io("list the directory of", dir)(source);
    match fs::read_dir(dir) {
        Ok(entries) => entries
            .map(|entry| Ok(entry.map_err(failed)?.path()))
            .collect(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(source) => Err(failed(source)),
    }
}

fn name_of(path: &Path) -> &str {
    path.file_name()
        .and_then(|name| name.to_str())
        .unwrap_or("")
}

/// Exchanges the names of two directories atomically.
fn exchange(one: &Path, other: &Path) -> std::io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    Ok(renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE)?)
}

/// Syncs a directory, so that the names in it survive a power loss.
pub(in crate::run) fn flush(dir: &Path) -> Result<(), CheckpointError> {
    File::open(dir)
        .and_then(|dir| dir.sync_all())
        .map_err(CheckpointError::io("sync the directory", dir))
}
