//! A run's folder and what it remembers: `run.json` (what it is), `metrics.jsonl`, and `checkpoint/` for runs without a store.

mod checkpoint;
mod folder;
mod state;

pub use checkpoint::{Begun, Checkpoint, CheckpointError, Checkpoints};
pub use folder::{FolderError, RunDescription, RunFolder};
pub(crate) use folder::{
    daemon_folder, differences, job_name, make_folder, resolved, tokens_folder,
};
pub use state::{RunState, StateError};
