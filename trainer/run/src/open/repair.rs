//! Rebuilds a damaged or missing `run.json`. The layout comes from the store's record of the job or from the
//! newest checkpoint; everything else follows from the settings.

use std::path::Path;

use serde_json::Value;
use swapper::{IODEPTH_MIN, job_layout};

use super::RunError;
use super::describe::store_words;
use super::first;
use crate::config::RunSettings;
use training_state::metrics::MetricsFile;
use training_state::run::{
    Checkpoint, Checkpoints, DirError, RunDescription, RunDir, RunId, daemon_dir, resolved,
};
use training_state::store::{StoreError, StoreFiles, start_private};

/// Arena of the private daemon that is started only to read the job's record.
const ARENA_BYTES: u64 = 64 << 20;

/// Rebuilds the run's `run.json` if it is damaged or missing. A damaged file is renamed and kept. Does
/// nothing if the directory holds no run, or a run that has made no step.
///
/// # Errors
/// Another process uses the directory; the store cannot be read; the directory's file system fails.
pub fn repair(settings: &RunSettings, say: &mut dyn FnMut(String)) -> Result<(), RunError> {
    let run_dir = resolved(&settings.train.run_dir);
    let damaged = match RunDir::described(&run_dir) {
        Ok(Some(_)) => return Ok(()),
        // A start that was killed before it wrote run.json has lost nothing.
        Ok(None) if RunId::kept(&run_dir).is_none() || MetricsFile::last_step(&run_dir) == 0 => {
            return Ok(());
        }
        Ok(None) => None,
        Err(DirError::Damaged { message, .. }) => Some(message),
        Err(error) => return Err(error.into()),
    };
    let (id, _) = RunId::for_dir(&run_dir);
    let dir = RunDir::open(&run_dir, &id)?;
    let what = match damaged {
        Some(message) => {
            let aside = dir.set_description_aside()?;
            format!(
                "was damaged ({message}) and was renamed to {}",
                aside.display()
            )
        }
        None => "was missing".to_owned(),
    };
    let paths = &settings.placement.nvme_paths;
    let files = StoreFiles::new(paths, &id.job, 0);
    let Some((layout, nodes, source)) = layout_of(settings, &dir, &files)? else {
        // Without a layout there is nothing to rebuild from; opening the run reports the reason.
        return Ok(());
    };
    dir.describe(&RunDescription {
        layout,
        store: store_words(settings),
        files: files.paths().iter().map(|path| resolved(path)).collect(),
        socket: settings.offload.socket.as_deref().map(resolved),
        first_weights: first::NOT_KNOWN.into(),
        id: Some(id),
        nodes,
        begun_unix_ms: 0,
    })?;
    say(format!(
        "{} {what}; it was rebuilt from {source}",
        run_dir.join("run.json").display()
    ));
    Ok(())
}

/// Returns the layout of the run in `dir`, the number of its nodes and the name of the source, or `None` if
/// nothing kept it.
fn layout_of(
    settings: &RunSettings,
    dir: &RunDir,
    files: &StoreFiles,
) -> Result<Option<(Value, u32, &'static str)>, RunError> {
    if !settings.placement.has_store() {
        let Some(checkpoint) = Checkpoints::in_run_dir(dir.path()).newest()? else {
            return Ok(None);
        };
        let layout = Checkpoint::open(&checkpoint, 0)?.description.layout;
        return Ok(Some((layout, 1, "the newest checkpoint")));
    }
    let ask = |socket: &Path| job_layout(socket, dir.job_name()).map_err(StoreError::Daemon);
    let kept = match &settings.offload.socket {
        Some(socket) => ask(socket)?,
        None if !files.exist() => None,
        None => {
            let own = daemon_dir(dir.path());
            let engine = &settings.offload.engine;
            let daemon = start_private(files, &own, ARENA_BYTES, IODEPTH_MIN, engine)?;
            ask(daemon.socket())?
        }
    };
    let layout = kept.and_then(|(kept, nodes)| Some((serde_json::from_slice(&kept).ok()?, nodes)));
    Ok(layout.map(|(layout, nodes)| (layout, nodes, "the store's record of the job")))
}
