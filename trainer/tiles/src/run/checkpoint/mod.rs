//! Checkpoints: copies of every tile and of the run's state after one step, each in a directory of its own.
//!
//! ```text
//!   checkpoints/step-00000040/save.json   step, layout, the run's state, and fingerprints of the other files
//!   checkpoints/step-00000040/tiles.0     what rank 0 owned, tiles.1 what rank 1 owned, ...
//!   checkpoints/step-00000050.partial     a checkpoint that is being written, or was interrupted
//!   checkpoints/step-00000030.removed     a checkpoint that is being removed
//!   checkpoints/aside-1/step-00000045     newer than the checkpoint that the run went back to, with a copy of metrics.jsonl
//!
//!   tiles.N    "OFFLSAV1" | tile... | u64::MAX | fingerprint u64 of all before it
//!   a tile     unit u64 | first element u64 | param bytes u64 | state bytes u64 | param | state
//! ```
//!
//! Numbers are little endian. A directory gets its name when all its files are flushed, so a crash at any instant leaves only whole
//! checkpoints. Tiles are found by unit and element, in any order: any number of ranks reads what any number wrote. A damaged file is
//! reported before any tile of it is used. A checkpoint is read without anything outside its directory.

mod description;
mod dir;
mod read;
mod write;

use offload_support::units::ApproxBytes;
use std::path::{Path, PathBuf};

pub use description::{CheckpointDescription, SavedFile};
pub use dir::SLACK_BYTES;
pub use dir::{CheckpointDir, CheckpointName, Checkpoints};
pub use read::Checkpoint;
pub use write::TileWriter;

const MAGIC: &[u8; 8] = b"OFFLSAV1";
/// Stands in the place of a unit's number after the last tile; no unit has it.
const END: u64 = u64::MAX;
const BUFFER_BYTES: usize = 1 << 20;

/// Why a checkpoint could not be made, or not be read.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    #[error("cannot {verb} the checkpoint {}: {source}", path.display())]
    Io {
        verb: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("cannot write the checkpoint {} after its first {written_bytes} bytes: {source}", path.display())]
    Write {
        path: PathBuf,
        written_bytes: u64,
        source: std::io::Error,
    },
    #[error(
        "the checkpoint {} takes {}, but the file system has {} free: free some space, keep fewer checkpoints (train.checkpoints_kept), or move train.run_dir",
        path.display(), ApproxBytes(*needed_bytes), ApproxBytes(*free_bytes)
    )]
    TooLittleSpace {
        path: PathBuf,
        needed_bytes: u64,
        free_bytes: u64,
    },
    #[error(
        "the checkpoint {} is damaged: {message}. `trainer runs` lists the others: --resume-from STEP resumes from one of them, --fresh starts again",
        path.display()
    )]
    Damaged { path: PathBuf, message: String },
    #[error("the checkpoint {} belongs to another run: its {what} is {was}, this run's is {now}", path.display())]
    Other {
        path: PathBuf,
        what: String,
        was: String,
        now: String,
    },
    #[error("{} has format version {found}, but this trainer reads version {known}: use the trainer that wrote it", path.display())]
    Version {
        path: PathBuf,
        found: u64,
        known: u64,
    },
    #[error("{} is not a checkpoint: {}", path.display(), others(has))]
    Missing { path: PathBuf, has: Vec<u64> },
    #[error("the checkpoint {} was abandoned: {why}", path.display())]
    Abandoned { path: PathBuf, why: String },
}

impl CheckpointError {
    /// For `map_err`: `verb` failed on `path`.
    fn io(verb: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { verb, path, source }
    }

    fn damaged(path: &Path, message: impl Into<String>) -> Self {
        Self::Damaged {
            path: path.to_owned(),
            message: message.into(),
        }
    }
}

/// The checkpoints that a run has instead.
fn others(has: &[u64]) -> String {
    if has.is_empty() {
        return "the run has none. Name a step that `trainer runs` lists, or a directory with a save.json".into();
    }
    let steps: Vec<String> = has.iter().map(u64::to_string).collect();
    format!("the run has checkpoints of step {}", steps.join(", "))
}

#[cfg(test)]
mod tests;
