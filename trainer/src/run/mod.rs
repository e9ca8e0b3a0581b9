//! A run's directory and what it remembers: `job` (which run it is), `run.json` (what it is), `metrics.jsonl`, `checkpoints/`, copies of its state, and `model/`
//! with what its model came with.

mod checkpoint;
mod dir;
mod identity;
mod model_files;
mod state;

pub(crate) use checkpoint::SLACK_BYTES;
pub use checkpoint::{
    Checkpoint, CheckpointDescription, CheckpointDir, CheckpointError, CheckpointName, Checkpoints,
    SavedFile, TileWriter,
};
pub(crate) use dir::{Difference, daemon_dir, differences, make_dir, resolved, tokens_dir};
pub use dir::{DirError, RunDescription, RunDir};
pub use identity::{Origin, RunId};
pub(crate) use model_files::ModelFiles;
pub use state::{RunState, StateError};
