//! Saves of runs without a store: every rank's tiles and the run's state, made atomically, the last two kept.
//!
//! ```text
//!   checkpoint/STEP.ckpt        what rank 0 owns; made last: with it the checkpoint is there, without it there is none
//!   checkpoint/STEP.RANK.part   what another rank owns
//!
//!   a file   "OFFLCKP2" | version u32 | blob bytes u32 | blob | tile... | u64::MAX | parts u64 | fingerprint u64 of each part
//!            | fingerprint u64
//!   a tile   unit u64 | first element u64 | param bytes u64 | state bytes u64 | param | state
//! ```
//!
//! Numbers are little endian; the last fingerprint covers all before it, so the first file vouches for all parts. A file gets
//! its name when all of it is on the drive, so a crash leaves the checkpoint before. Tiles are found by unit and element:
//! how many ranks wrote a checkpoint does not matter to those who read it. A damaged file is named before anything of it is
//! taken, and the checkpoint before may be used by removing the first file.

mod read;
mod write;

use std::fs;
use std::path::{Path, PathBuf};

pub use read::Checkpoint;
pub use write::Begun;

const MAGIC: &[u8; 8] = b"OFFLCKP2";
const VERSION: u32 = 2;
/// Where the next tile's unit would be: a number that no unit has.
const END: u64 = u64::MAX;
const KEPT: usize = 2;
const BLOB_BYTES_MAX: u32 = 1 << 20;
const BUFFER_BYTES: usize = 1 << 20;

/// Why a save or a restore failed.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("cannot {verb} the checkpoint {}: {source}", path.display())]
    Io {
        verb: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "the checkpoint {} is damaged: {message}. Remove {} to go on from the one before, or start again with --fresh",
        path.display(), first.display()
    )]
    Damaged {
        path: PathBuf,
        first: PathBuf,
        message: String,
    },
}

impl CheckpointError {
    /// For `map_err` where `verb` was tried on `path`.
    fn io(verb: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { verb, path, source }
    }
}

/// The checkpoints of a run.
pub struct Checkpoints {
    folder: PathBuf,
}

impl Checkpoints {
    /// Those in `folder`, which need not exist.
    pub fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    /// The newest checkpoint, if there is one, for one of the run's ranks: it looks into that rank's part first.
    ///
    /// # Errors
    /// It cannot be read or is damaged.
    pub fn newest(&self, rank: u32) -> Result<Option<Checkpoint>, CheckpointError> {
        match self.list()?.pop() {
            None => Ok(None),
            Some(path) => Checkpoint::open(path, rank).map(Some),
        }
    }

    /// Removes all but the newest checkpoints, and what was never finished. No rank may be saving.
    ///
    /// # Errors
    /// Something cannot be removed.
    pub fn prune(&self) -> Result<(), CheckpointError> {
        let firsts = self.list()?;
        let (old, kept) = firsts.split_at(firsts.len().saturating_sub(KEPT));
        // First the file that makes it a checkpoint.
        for path in old {
            fs::remove_file(path).map_err(CheckpointError::io("remove", path))?;
        }
        let is_kept = |path: &Path| kept.iter().any(|first| step_of(first) == step_of(path));
        for path in self.files()? {
            let orphan = extension(&path) == "part" && !is_kept(&path);
            if orphan || extension(&path) == "new" {
                fs::remove_file(&path).map_err(CheckpointError::io("remove", &path))?;
            }
        }
        Ok(())
    }

    /// The first files of checkpoints, oldest first.
    fn list(&self) -> Result<Vec<PathBuf>, CheckpointError> {
        let mut paths = self.files()?;
        paths.retain(|path| extension(path) == "ckpt");
        paths.sort_unstable();
        Ok(paths)
    }

    fn files(&self) -> Result<Vec<PathBuf>, CheckpointError> {
        let failed = |source| CheckpointError::io("list the folder of", &self.folder)(source);
        match fs::read_dir(&self.folder) {
            Ok(entries) => entries
                .map(|entry| Ok(entry.map_err(failed)?.path()))
                .collect(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(source) => Err(failed(source)),
        }
    }
}

fn first_path(folder: &Path, step: &str) -> PathBuf {
    folder.join(format!("{step}.ckpt"))
}

fn part_path(folder: &Path, step: &str, rank: u32) -> PathBuf {
    folder.join(format!("{step}.{rank}.part"))
}

fn extension(path: &Path) -> &str {
    path.extension()
        .and_then(|extension| extension.to_str())
        .unwrap_or("")
}

/// The name up to its first dot.
fn step_of(path: &Path) -> &str {
    let name = path.file_name().and_then(|name| name.to_str());
    name.and_then(|name| name.split('.').next()).unwrap_or("")
}

#[cfg(test)]
mod tests;
