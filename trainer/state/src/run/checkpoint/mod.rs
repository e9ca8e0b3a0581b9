//! Checkpoints: copies of every tile and of the run's state after one step, each in its own directory.
//!
//! ```text
//!   checkpoints/step-00000040/checkpoint.json   step, layout, the run's state, and fingerprints of the other files
//!   checkpoints/step-00000040/tiles.0           tiles of rank 0, tiles.1 of rank 1, ...
//!   checkpoints/step-00000050.partial           a checkpoint that is being written, or was interrupted
//!   checkpoints/step-00000030.removed           a checkpoint that is being removed
//!   checkpoints/aside-1/step-00000045           newer than the checkpoint that the run returned to, with a copy of metrics.jsonl
//!
//!   tiles.N    "OFFLSAV1" | tile... | u64::MAX | fingerprint u64 of all preceding bytes
//!   a tile     unit u64 | first element u64 | param bytes u64 | state bytes u64 | param | state
//! ```
//!
//! Numbers are little endian. A directory gets its final name after all its files are synced, so a crash
//! leaves only complete checkpoints under final names. Tiles are found by unit and element, in any order: any
//! number of ranks can read what any number wrote. A damaged file is reported before any tile of it is used.
//! Reading a checkpoint needs nothing outside its directory.

mod description;
mod dir;
mod read;
mod write;

use offload_support::units::ApproxBytes;
use std::path::{Path, PathBuf};

use super::dir_error::DirError;
use crate::ranks::RankError;
pub(super) use description::DESCRIPTION;
pub use description::{CheckpointDescription, SavedFile};
pub(super) use dir::flush;
pub use dir::{CheckpointDir, CheckpointName, Checkpoints, SLACK_BYTES, bytes_in};
pub use read::Checkpoint;
pub(super) use read::FINGERPRINT_BYTES;
pub use write::TileWriter;

const MAGIC: &[u8; 8] = b"OFFLSAV1";
/// End mark after the last tile, in place of a unit's number; no unit has it.
const END: u64 = u64::MAX;
const BUFFER_BYTES: usize = 1 << 20;

/// Error of making or reading a checkpoint.
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
    #[error("the checkpoint {} cannot be resumed by this run: {what} is {was} there and {now} here. A new run can start with the checkpoint's weights", path.display())]
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
    #[error("there is no checkpoint in {}: {}", path.display(), others(has))]
    Missing { path: PathBuf, has: Vec<u64> },
    #[error("the checkpoint {} was abandoned: {why}", path.display())]
    Abandoned { path: PathBuf, why: String },
    #[error("node {node}: {message}")]
    OtherNode { node: u32, message: String },
    #[error(transparent)]
    Rank(#[from] RankError),
    #[error(transparent)]
    Dir(#[from] DirError),
}

impl CheckpointError {
    /// Returns a conversion for `map_err` for the operation `verb` on `path`.
    pub(super) fn io(verb: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { verb, path, source }
    }

    pub(super) fn damaged(path: &Path, message: impl Into<String>) -> Self {
        Self::Damaged {
            path: path.to_owned(),
            message: message.into(),
        }
    }
}

/// Describes the existing checkpoints.
fn others(has: &[u64]) -> String {
    if has.is_empty() {
        return "the run has none. Name a step that `trainer runs` lists, or the directory of a checkpoint".into();
    }
    let steps: Vec<String> = has.iter().map(u64::to_string).collect();
    format!("the run has checkpoints of step {}", steps.join(", "))
}

#[cfg(test)]
mod tests;
