//! A run's directory: `job` (its identity), `run.json` (its description), `metrics.jsonl`, `checkpoints/`,
//! and `model/` with files that its model came with. `copies` copies files between nodes that share no directory.

mod checkpoint;
mod copies;
mod dir;
mod dir_error;
mod each_node;
mod identity;
mod model_files;
mod paths;
mod state;

pub use checkpoint::{
    Checkpoint, CheckpointDescription, CheckpointDir, CheckpointError, CheckpointName, Checkpoints,
    SavedFile, TileWriter,
};
pub use checkpoint::{SLACK_BYTES, bytes_in};
pub use copies::{SentFile, Source, copy as copy_files};
pub use dir::{Difference, check_text, daemon_dir, differences, first_weights_dir, tokens_dir};
pub use dir::{RunDescription, RunDir, STORE_IN_DIR, STORE_IN_PLACE};
pub use dir_error::{DirError, INCOMPLETE};
pub use each_node::{HeldByNodes, NodeContents, NodeDirs};
pub use identity::{Origin, RunId, node_dir, node_job, nodes_dir};
pub use model_files::ModelFiles;
pub use paths::{make_dir, resolved};
pub use state::{RunState, StateError};
