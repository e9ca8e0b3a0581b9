//! Moves the state of a run that is not being trained: its store to other directories, or into a checkpoint.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use offload_support::progress::{Audience, Progress, Unit};

use crate::open::RunError;
use crate::reader::RunReader;
use crate::run_record::RecordError;
use training_state::run::{
    CheckpointDescription, CheckpointError, Checkpoints, RunDescription, RunDir, RunId,
    STORE_IN_DIR, STORE_IN_PLACE, SavedFile, TileWriter, resolved,
};
use training_state::store::{
    NotMounted, Relocation, StoreError, check_mounted, file_name, link_of, remember_mounts,
    remove_files,
};

/// Error of moving a run's state.
#[derive(Debug, thiserror::Error)]
pub enum MoveError {
    #[error(transparent)]
    Run(#[from] RunError),
    #[error(
        "the run in {} keeps its state {store}, not in files of its own: only a private store can be moved",
        run_dir.display()
    )]
    NoStore { run_dir: PathBuf, store: String },
    #[error(
        "the state of the run in {} is divided over {nodes} nodes: resume it from a checkpoint with --resume-from STEP instead",
        run_dir.display()
    )]
    OnNodes { run_dir: PathBuf, nodes: u32 },
    #[error(
        "the store of the run in {} is {files} files, and {dirs} directories were named: name as many, in this order: {were}. For another number of drives, put the state into a checkpoint with --to-checkpoint and start with --resume-from STEP",
        run_dir.display()
    )]
    Count {
        run_dir: PathBuf,
        files: usize,
        dirs: usize,
        were: String,
    },
}

/// Makes the errors of parts that moving shares with opening a run.
macro_rules! from_run_errors {
    ($($error:ty),*) => {$(
        impl From<$error> for MoveError {
            fn from(error: $error) -> Self {
                Self::Run(error.into())
            }
        }
    )*};
}

from_run_errors!(
    CheckpointError,
    NotMounted,
    RecordError,
    StoreError,
    training_state::run::DirError
);

/// Moves the private store of the run in `run_dir` to `dirs`, one for each of its files.
///
/// # Errors
/// There is no such run, or it is being trained; the directories cannot hold the store. The store is then at its old place.
pub fn move_store(run_dir: &Path, dirs: &[PathBuf]) -> Result<(), MoveError> {
    let (mut description, dir) = private_run(run_dir)?;
    let files = own_files(&description, dir.job_name());
    if files.len() != dirs.len() {
        let were: Vec<String> = files
            .iter()
            .map(|file| file.display().to_string())
            .collect();
        return Err(MoveError::Count {
            run_dir: dir.path().to_owned(),
            files: files.len(),
            dirs: dirs.len(),
            were: were.join(", "),
        });
    }
    let dirs: Vec<PathBuf> = dirs.iter().map(|dir| resolved(dir)).collect();
    dirs.iter().try_for_each(|dir| check_mounted(dir))?;
    let mut relocation = Relocation::new(&files, &dirs)?;
    let work = Progress::new("moving the store", Unit::Bytes, Audience::Person);
    let mut work = work.with_total(relocation.bytes());
    relocation.copy(&mut |bytes| work.add(bytes))?;
    drop(work);
    let name = file_name(dir.job_name());
    let in_place = match description.store.ends_with(STORE_IN_PLACE) {
        true => STORE_IN_PLACE,
        false => "",
    };
    let names: Vec<String> = dirs.iter().map(|dir| dir.display().to_string()).collect();
    description.store = format!("in {}{in_place}", names.join(", "));
    description.files = dirs.iter().map(|dir| dir.join(&name)).collect();
    dir.describe(&description)?;
    for file in &description.files {
        // It only shows whose store the file is; the next start makes it too.
        let _ = std::os::unix::fs::symlink(dir.path(), link_of(file));
    }
    remember_mounts(dirs.iter().map(PathBuf::as_path));
    Ok(relocation.remove_old()?)
}

/// Writes the newest state of the run in `run_dir` as a checkpoint, with which settings without a store resume, and removes its private
/// store. Returns the checkpoint's step.
///
/// # Errors
/// There is no such run, or it is being trained; the checkpoint cannot be written. The store is then as before.
pub fn move_to_checkpoint(run_dir: &Path) -> Result<u64, MoveError> {
    // Only checks; the reader locks the directory itself.
    drop(private_run(run_dir)?);
    let mut reader = RunReader::open(run_dir, None)?;
    let step = reader.tiles.state.step;
    let checkpoints = Checkpoints::in_run_dir(&reader.dir);
    checkpoints.begin(step, reader.tiles.bytes(), false)?;
    let mut writer = TileWriter::create(&checkpoints.partial(step), 0)?;
    let work = Progress::new("writing the checkpoint", Unit::Bytes, Audience::Person);
    let mut work = work.with_total(reader.tiles.bytes());
    let mut failed = None;
    reader.tiles.visit(&mut |range, param, state| {
        if failed.is_none() {
            failed = writer.add(range, param, state).err();
            work.add((param.len() + state.len()) as u64);
        }
    })?;
    if let Some(error) = failed {
        checkpoints.abandon(step);
        return Err(error.into());
    }
    let file: SavedFile = writer.finish()?;
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    checkpoints.finish(&CheckpointDescription {
        step,
        unix_s: since.map_or(0, |since| since.as_secs()),
        layout: reader.record.description.layout.clone(),
        state: serde_json::to_value(&reader.tiles.state).expect("plain data"),
        files: vec![file],
    })?;
    reader.tiles.close()?;
    let (mut description, dir) = private_run(run_dir)?;
    let files = own_files(&description, dir.job_name());
    description.store = STORE_IN_DIR.to_owned();
    description.files = Vec::new();
    dir.describe(&description)?;
    remove_files(&files)?;
    Ok(step)
}

/// Reads and locks the run in `run_dir`, whose state is in a private store.
fn private_run(run_dir: &Path) -> Result<(RunDescription, RunDir), MoveError> {
    let run_dir = resolved(run_dir);
    let Some(description) = RunDir::described(&run_dir)? else {
        return Err(RecordError::NoRun { dir: run_dir }.into());
    };
    if description.nodes > 1 {
        let nodes = description.nodes;
        return Err(MoveError::OnNodes { run_dir, nodes });
    }
    if description.files.is_empty() || description.socket.is_some() {
        let store = description.store;
        return Err(MoveError::NoStore { run_dir, store });
    }
    let (id, _) = RunId::for_dir(&run_dir);
    let dir = RunDir::open(&run_dir, &id)?;
    let missing = own_files(&description, dir.job_name()).into_iter();
    let missing: Vec<String> = missing
        .filter(|file| !file.exists())
        .map(|file| file.display().to_string())
        .collect();
    if !missing.is_empty() {
        let files = missing.join(", ");
        return Err(RunError::StoreMissing { run_dir, files }.into());
    }
    Ok((description, dir))
}

/// Files of the run's store; the directory may be a copy and name another run's files.
fn own_files(description: &RunDescription, job: &str) -> Vec<PathBuf> {
    let name = file_name(job);
    let ours = |file: &&PathBuf| file.file_name().is_some_and(|found| *found == *name);
    description.files.iter().filter(ours).cloned().collect()
}
