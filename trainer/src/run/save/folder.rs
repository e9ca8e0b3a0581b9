//! The saves of a run: which there are, how one gets its name and how it goes.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use super::{SaveDescription, SaveError};
use crate::run::folder::{make_folder, resolved};
use crate::store::free_bytes;

const PREFIX: &str = "step-";
/// Of a save that is not whole yet.
const PARTIAL: &str = "partial";
/// Of a save that is whole no more.
const REMOVED: &str = "removed";
const ASIDE: &str = "aside-";

/// Other files beside the tiles of a save: more than any description takes.
pub(crate) const SLACK_BYTES: u64 = 1 << 20;

/// The folder of a run's saves, which need not exist.
#[derive(Clone, Debug)]
pub struct Saves {
    folder: PathBuf,
}

/// How a person names a save: by its step, or by its folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SaveName {
    Step(u64),
    Folder(PathBuf),
}

impl std::str::FromStr for SaveName {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(text
            .parse()
            .map_or_else(|_| Self::Folder(text.into()), Self::Step))
    }
}

impl SaveName {
    /// Its folder; a step is one of the run in `run_folder`.
    ///
    /// # Errors
    /// The run has no save of that step: those that there are are named.
    pub fn find(&self, run_folder: &Path) -> Result<PathBuf, SaveError> {
        match self {
            Self::Step(step) => Saves::of(run_folder).at(*step),
            Self::Folder(folder) => Ok(resolved(folder)),
        }
    }
}

/// One of them, not looked into.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SaveFolder {
    pub step: u64,
    pub path: PathBuf,
}

impl Saves {
    /// Of the run in `run_folder`.
    pub fn of(run_folder: &Path) -> Self {
        Self {
            folder: run_folder.join("saves"),
        }
    }

    /// Where they are.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// All whole saves, oldest first.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn list(&self) -> Result<Vec<SaveFolder>, SaveError> {
        let mut saves = list_in(&self.folder)?;
        saves.sort_unstable();
        Ok(saves)
    }

    /// Those of ways that were left, in no order.
    ///
    /// # Errors
    /// A folder cannot be read.
    pub fn list_aside(&self) -> Result<Vec<SaveFolder>, SaveError> {
        let mut saves = Vec::new();
        for path in entries(&self.folder)? {
            if name_of(&path).starts_with(ASIDE) {
                saves.extend(list_in(&path)?);
            }
        }
        Ok(saves)
    }

    /// The newest, if there is one.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn newest(&self) -> Result<Option<PathBuf>, SaveError> {
        Ok(self.list()?.pop().map(|save| save.path))
    }

    /// The save of `step`.
    ///
    /// # Errors
    /// There is none: those that there are are named.
    pub fn at(&self, step: u64) -> Result<PathBuf, SaveError> {
        let path = self.folder.join(step_name(step));
        if path.is_dir() {
            return Ok(path);
        }
        let has = self.list()?.iter().map(|save| save.step).collect();
        Err(SaveError::Missing { path, has })
    }

    /// Whether there is a save of `step`.
    pub fn has(&self, step: u64) -> bool {
        self.folder.join(step_name(step)).is_dir()
    }

    /// Makes the folder in which the files of `step`'s save are written, for tiles of `tile_bytes` in all. What was cut off
    /// before goes first.
    ///
    /// # Errors
    /// Too little room, or no folder can be made there.
    pub fn begin(&self, step: u64, tile_bytes: u64) -> Result<(), SaveError> {
        let path = self.partial(step);
        make_folder(&self.folder).map_err(SaveError::io("make the folder of", &path))?;
        self.clean()?;
        let free_bytes =
            free_bytes(&self.folder).map_err(SaveError::io("ask the free space for", &path))?;
        let needed_bytes = tile_bytes.saturating_add(SLACK_BYTES);
        if free_bytes < needed_bytes {
            return Err(SaveError::TooLittleSpace {
                path: self.folder.join(step_name(step)),
                needed_bytes,
                free_bytes,
            });
        }
        fs::create_dir(&path).map_err(SaveError::io("make", &path))
    }

    /// Where the files of `step`'s save are written.
    pub fn partial(&self, step: u64) -> PathBuf {
        self.folder.join(format!("{}.{PARTIAL}", step_name(step)))
    }

    /// All files of tiles are on the drive: makes them a save. One that the step had before goes.
    ///
    /// # Errors
    /// The drive is full or fails; what was there before stays.
    pub fn finish(&self, description: &SaveDescription) -> Result<PathBuf, SaveError> {
        let (partial, step) = (self.partial(description.step), description.step);
        let path = self.folder.join(step_name(step));
        description.write(&partial)?;
        flush(&partial)?;
        if path.exists() {
            // The step was done again: at no instant is it without a save.
            exchange(&partial, &path).map_err(SaveError::io("name", &path))?;
            flush(&self.folder)?;
            fs::remove_dir_all(&partial).map_err(SaveError::io("remove", &partial))?;
        } else {
            fs::rename(&partial, &path).map_err(SaveError::io("name", &path))?;
            flush(&self.folder)?;
        }
        Ok(path)
    }

    /// Gives up `step`'s save, which is not whole.
    pub fn give_up(&self, step: u64) {
        // What stays is removed before the next save begins.
        let _ = fs::remove_dir_all(self.partial(step));
    }

    /// Removes the oldest saves but that of `step`, until there are `count`; 0 keeps all.
    ///
    /// # Errors
    /// Something cannot be removed.
    pub fn keep(&self, count: u64, step: u64) -> Result<(), SaveError> {
        let mut saves = self.list()?;
        let over = match usize::try_from(count) {
            Ok(0) | Err(_) => 0,
            Ok(count) => saves.len().saturating_sub(count),
        };
        saves.retain(|save| save.step != step);
        let over = over.min(saves.len());
        saves[..over]
            .iter()
            .try_for_each(|save| self.remove(&save.path))
    }

    /// Removes what was cut off while it was made or removed.
    ///
    /// # Errors
    /// Something cannot be removed.
    pub fn clean(&self) -> Result<(), SaveError> {
        for path in self.leftovers()? {
            fs::remove_dir_all(&path).map_err(SaveError::io("remove what was left of", &path))?;
        }
        Ok(())
    }

    /// Bytes that [`Self::clean`] gives back.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn leftover_bytes(&self) -> Result<u64, SaveError> {
        Ok(bytes_in(&self.leftovers()?))
    }

    /// Bytes of all whole saves but those put aside.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn bytes(&self) -> Result<u64, SaveError> {
        let saves: Vec<PathBuf> = self.list()?.into_iter().map(|save| save.path).collect();
        Ok(bytes_in(&saves))
    }

    /// What was cut off while it was made or removed.
    fn leftovers(&self) -> Result<Vec<PathBuf>, SaveError> {
        let mut left = entries(&self.folder)?;
        left.retain(|path| {
            let name = name_of(path);
            let ending = name.rsplit_once('.').map_or("", |(_, ending)| ending);
            name.starts_with(PREFIX) && [PARTIAL, REMOVED].contains(&ending)
        });
        Ok(left)
    }

    /// Moves all saves newer than `step` out of the way, with a copy of the metrics. Answers where to, if there were any.
    ///
    /// # Errors
    /// Something cannot be moved.
    pub fn set_aside_after(&self, step: u64, metrics: &Path) -> Result<Option<PathBuf>, SaveError> {
        let mut newer = self.list()?;
        newer.retain(|save| save.step > step);
        if newer.is_empty() {
            return Ok(None);
        }
        let aside = (1..)
            .map(|number| self.folder.join(format!("{ASIDE}{number}")))
            .find(|aside| !aside.exists())
            .expect("a number that is free");
        fs::create_dir(&aside).map_err(SaveError::io("make", &aside))?;
        if metrics.exists() {
            let copy = aside.join("metrics.jsonl");
            fs::copy(metrics, &copy).map_err(SaveError::io("write", &copy))?;
        }
        for save in newer {
            let to = aside.join(step_name(save.step));
            fs::rename(&save.path, &to).map_err(SaveError::io("move away", &save.path))?;
        }
        flush(&aside)?;
        flush(&self.folder)?;
        Ok(Some(aside))
    }

    /// Under a name that says so first: a save that lacks files is never taken for one.
    fn remove(&self, path: &Path) -> Result<(), SaveError> {
        let removed = path.with_extension(REMOVED);
        fs::rename(path, &removed)
            .and_then(|()| fs::remove_dir_all(&removed))
            .map_err(SaveError::io("remove", path))
    }
}

/// Bytes of the files in `folders`.
fn bytes_in(folders: &[PathBuf]) -> u64 {
    let files = folders.iter().filter_map(|path| fs::read_dir(path).ok());
    let files = files
        .flatten()
        .filter_map(|file| file.ok()?.metadata().ok());
    files.map(|file| file.len()).sum()
}

/// The name of a save's folder.
fn step_name(step: u64) -> String {
    format!("{PREFIX}{step:08}")
}

fn list_in(folder: &Path) -> Result<Vec<SaveFolder>, SaveError> {
    let saves = entries(folder)?.into_iter().filter_map(|path| {
        let step = name_of(&path).strip_prefix(PREFIX)?.parse().ok()?;
        Some(SaveFolder { step, path })
    });
    Ok(saves.collect())
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>, SaveError> {
    let failed = |source| SaveError::io("list the folder of", folder)(source);
    match fs::read_dir(folder) {
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

/// Each gets the other's name, at once.
fn exchange(one: &Path, other: &Path) -> std::io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    Ok(renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE)?)
}

fn flush(folder: &Path) -> Result<(), SaveError> {
    File::open(folder)
        .and_then(|folder| folder.sync_all())
        .map_err(SaveError::io("flush the folder", folder))
}
