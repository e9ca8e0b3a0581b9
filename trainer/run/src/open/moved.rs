//! Runs whose state was moved, or whose settings keep it elsewhere than before.
//!
//! | the state was | and is now | |
//! |---|---|---|
//! | in checkpoints | on drives | resumes from the newest checkpoint |
//! | in a private store | in another directory that has the files of this run | resumes; the daemon checks that they hold its job |
//! | in a private store | anywhere else | refused, with the commands that move it |

use std::path::{Path, PathBuf};

use offload_support::paths::Word;

use super::RunError;
use crate::config::RunSettings;
use training_state::run::{
    Checkpoints, RunDescription, RunDir, STORE_IN_DIR, STORE_IN_PLACE, resolved,
};
use training_state::store::StoreFiles;

/// Returns the newest checkpoint of the run in `run_dir` if it has kept its state only in checkpoints.
pub(super) fn checkpoint_of_memory(run_dir: &Path) -> Result<Option<PathBuf>, RunError> {
    match RunDir::described(run_dir)? {
        Some(earlier) if earlier.store == STORE_IN_DIR => {
            Ok(Checkpoints::in_run_dir(run_dir).newest()?)
        }
        _ => Ok(None),
    }
}

/// Checks that the state of the run in `run_dir` is where `settings` keep it; `store` describes that place.
///
/// # Errors
/// It is elsewhere.
pub(super) fn check(
    settings: &RunSettings,
    run_dir: &Path,
    job: &str,
    store: &str,
) -> Result<(), RunError> {
    let Some(earlier) = RunDir::described(run_dir)? else {
        return Ok(());
    };
    if earlier.store == store {
        return Ok(());
    }
    let is_private = |words: &str| words.starts_with("in ") && words != STORE_IN_DIR;
    let same_durability =
        earlier.store.ends_with(STORE_IN_PLACE) == store.ends_with(STORE_IN_PLACE);
    let remedy = match (is_private(&earlier.store), is_private(store)) {
        (true, true) if same_durability => {
            let files = StoreFiles::new(&settings.placement.nvme_paths, job, 0);
            if files.exist() {
                note_old_files(&earlier, &files);
                return Ok(());
            }
            let dirs = settings.placement.nvme_paths.iter();
            let dirs: Vec<String> = dirs.map(|dir| format!("--nvme {}", Word(dir))).collect();
            format!(
                "set nvme_path back, or move the state with `trainer move {} {}`",
                Word(run_dir),
                dirs.join(" ")
            )
        }
        (true, false) if store == STORE_IN_DIR => format!(
            "set the devices back, or put the state into a checkpoint with `trainer move {} --to-checkpoint`",
            Word(run_dir)
        ),
        _ => "set zero_optimization and offload back".to_owned(),
    };
    Err(RunError::Elsewhere {
        run_dir: run_dir.to_owned(),
        was: earlier.store,
        now: store.to_owned(),
        remedy,
    })
}

/// Says which files of the store were copied and not moved.
fn note_old_files(earlier: &RunDescription, files: &StoreFiles) {
    let now: Vec<PathBuf> = files.paths().iter().map(|path| resolved(path)).collect();
    let left = (earlier.files.iter()).filter(|file| file.exists() && !now.contains(file));
    for file in left {
        tracing::warn!(
            "the run continues with the store in {}; the one in {} is no longer used and can be deleted",
            now[0].display(),
            file.display()
        );
    }
}
