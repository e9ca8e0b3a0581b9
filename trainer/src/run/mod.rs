//! A run's folder and what it remembers: `job` (which run it is), `run.json` (what it is), `metrics.jsonl`, `saves/`, copies of its state, and `model/`
//! with what its model came with.

mod folder;
mod identity;
mod model_files;
mod save;
mod state;

pub(crate) use folder::{
    Difference, daemon_folder, differences, make_folder, resolved, tokens_folder,
};
pub use folder::{FolderError, RunDescription, RunFolder};
pub use identity::{Origin, RunId};
pub(crate) use model_files::ModelFiles;
pub(crate) use save::SLACK_BYTES;
pub use save::{
    Save, SaveDescription, SaveError, SaveFolder, SaveName, SavedFile, Saves, TileWriter,
};
pub use state::{RunState, StateError};
