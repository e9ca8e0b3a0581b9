//! Deletes a run with its directory and its state in a store, or the file of a store that no run uses.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use offload_support::paths::Word;
use offload_support::units::ApproxBytes;
use swapper::Daemon;

use crate::run_record::RecordError;
use crate::runs::{Orphan, orphan};
use training_state::run::{DirError, RunDir, RunId, nodes_dir, resolved};
use training_state::store::{StoreError, file_name, remove_files};

/// Files and jobs to delete, found and locked.
pub struct Removal {
    /// Files of the private store with their sizes.
    files: Vec<(PathBuf, u64)>,
    run: Option<Run>,
}

struct Run {
    /// Parts of other nodes that can be deleted here.
    parts: Vec<Removal>,
    /// Directories of other nodes' parts whose state only their nodes can delete.
    parts_elsewhere: Vec<PathBuf>,
    /// False for a directory with nothing but tokens.
    has_started: bool,
    dir: RunDir,
    /// Socket of the shared daemon that holds the job.
    socket: Option<PathBuf>,
}

/// Error of a removal.
#[derive(Debug, thiserror::Error)]
pub enum RemoveError {
    #[error(transparent)]
    Run(#[from] RecordError),
    #[error(transparent)]
    Dir(#[from] DirError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(
        "{} belongs to the run in {}: remove that directory instead", file.display(), run.display()
    )]
    InUse { file: PathBuf, run: PathBuf },
    #[error(
        "{0}\nThe run's job {1} is in the store of that daemon: start the daemon, or delete run.json to leave the job there"
    )]
    Daemon(StoreError, String),
}

impl Removal {
    /// Finds the run in the directory `path`, or the file `path` of a store whose run is gone.
    ///
    /// # Errors
    /// There is neither; the run is being trained; the file belongs to an existing run.
    pub fn find(path: &Path) -> Result<Self, RemoveError> {
        let path = resolved(path);
        if path.is_file() {
            return Self::of_file(&path);
        }
        let described = RunDir::described(&path);
        let is_run = matches!(described, Ok(Some(_))) || RunId::kept(&path).is_some();
        if !is_run && !RunDir::has_only_tokens(&path) {
            return Err(RecordError::NoRun { dir: path }.into());
        }
        let (id, _) = RunId::for_dir(&path);
        let dir = RunDir::open(&path, &id)?;
        if !is_run {
            return Ok(Self {
                files: Vec::new(),
                run: Some(Run {
                    parts: Vec::new(),
                    parts_elsewhere: Vec::new(),
                    has_started: false,
                    dir,
                    socket: None,
                }),
            });
        }
        // An unreadable run.json names no store; `trainer runs` lists what remains of it.
        let described = described.ok().flatten();
        let (parts, parts_elsewhere) = parts(&path)?;
        let (files, socket) = described.map_or_else(Default::default, |described| {
            (described.files, described.socket)
        });
        // The directory may be a copy and name another run's files.
        let name = file_name(dir.job_name());
        let ours = |file: &PathBuf| file.file_name().is_some_and(|found| *found == *name);
        let files = files.into_iter().filter(ours).filter_map(|file| {
            let bytes = fs::metadata(&file).ok()?.len();
            Some((file, bytes))
        });
        Ok(Self {
            files: files.collect(),
            run: Some(Run {
                parts,
                parts_elsewhere,
                has_started: true,
                dir,
                socket,
            }),
        })
    }

    fn of_file(file: &Path) -> Result<Self, RemoveError> {
        match orphan(file, &[]) {
            Some(Orphan { file, bytes, .. }) => Ok(Self {
                files: vec![(file, bytes)],
                run: None,
            }),
            None => match fs::read_link(training_state::store::link_of(file)) {
                Ok(run) => Err(RemoveError::InUse {
                    file: file.to_owned(),
                    run,
                }),
                Err(_) => Err(RecordError::NoRun {
                    dir: file.to_owned(),
                }
                .into()),
            },
        }
    }

    /// Deletes the run: the state in the store first, so that the directory of a partly deleted run still
    /// names the rest. Files that do not belong to the run stay in the directory. Returns the directory if it
    /// still exists.
    ///
    /// # Errors
    /// A daemon uses the store or does not answer; a file cannot be deleted.
    pub fn remove(self) -> Result<Option<PathBuf>, RemoveError> {
        let files: Vec<PathBuf> = self.files.into_iter().map(|(file, _)| file).collect();
        remove_files(&files)?;
        let Some(Run {
            parts, dir, socket, ..
        }) = self.run
        else {
            return Ok(None);
        };
        for part in parts {
            part.remove()?;
        }
        // Fails if there are parts of other nodes.
        let _ = fs::remove_dir(nodes_dir(dir.path()));
        if let Some(socket) = socket {
            drop_job(&socket, dir.job_name())
                .map_err(|error| RemoveError::Daemon(error, dir.job_name().to_owned()))?;
        }
        let path = dir.path().to_owned();
        dir.remove()?;
        Ok(path.exists().then_some(path))
    }
}

/// Finds the parts of other nodes in the directory `run_dir` of a run: those that can be deleted on this machine, and the
/// directories of the others, whose state is on drives or behind a daemon of their nodes.
fn parts(run_dir: &Path) -> Result<(Vec<Removal>, Vec<PathBuf>), RemoveError> {
    let entries = fs::read_dir(nodes_dir(run_dir)).into_iter().flatten();
    let mut dirs: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect();
    dirs.retain(|dir| RunId::kept(dir).is_some());
    dirs.sort();
    let is_here = |dir: &PathBuf| match RunDir::described(dir) {
        Ok(Some(part)) => part.socket.is_none() && part.files.iter().all(|file| file.exists()),
        _ => false,
    };
    let (here, elsewhere): (Vec<_>, Vec<_>) = dirs.into_iter().partition(is_here);
    let here = here.iter().map(|dir| Removal::find(dir));
    Ok((here.collect::<Result<_, _>>()?, elsewhere))
}

fn drop_job(socket: &Path, job: &str) -> Result<(), StoreError> {
    let daemon = Daemon::connect(socket).map_err(StoreError::Daemon)?;
    let jobs = daemon.jobs().map_err(StoreError::Daemon)?;
    if jobs.iter().any(|known| known.job == job) {
        daemon.drop_job(job).map_err(StoreError::Daemon)?;
    }
    Ok(())
}

impl fmt::Display for Removal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut lines = Vec::new();
        if let Some(run) = &self.run {
            let dir = run.dir.path().display();
            let job = run.dir.job_name();
            lines.push(match RunId::part(job) {
                Some(_) => format!("{} in {dir}", RunId::describe_job(job)),
                None if !run.has_started => {
                    format!("the tokens in {dir}, of a run that was never started")
                }
                None => format!("the run in {dir}, its checkpoints included"),
            });
            if let Some(socket) = &run.socket {
                let (job, socket) = (run.dir.job_name(), socket.display());
                lines.push(format!(
                    "its job {job} in the store of the daemon at {socket}"
                ));
            }
        }
        for (file, bytes) in &self.files {
            lines.push(format!("{}, {}", file.display(), ApproxBytes(*bytes)));
        }
        if let Some(run) = &self.run {
            lines.extend(run.parts.iter().map(ToString::to_string));
            lines.extend(run.parts_elsewhere.iter().map(|dir| {
                let (shown, word) = (dir.display(), Word(dir));
                format!("not {shown}, whose state is on another node: `trainer remove {word}` there deletes it")
            }));
        }
        write!(f, "{}", lines.join("\n"))
    }
}
