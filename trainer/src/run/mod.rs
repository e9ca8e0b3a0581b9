//! A run's folder and what it remembers: `run.json` (what it is), `metrics.jsonl`, and `saves/`, copies of its state.

mod folder;
mod save;
mod state;

pub use folder::{FolderError, RunDescription, RunFolder};
pub(crate) use folder::{
    daemon_folder, differences, job_name, make_folder, resolved, tokens_folder,
};
pub use save::{
    Save, SaveDescription, SaveError, SaveFolder, SaveName, SavedFile, Saves, TileWriter,
};
pub use state::{RunState, StateError};
