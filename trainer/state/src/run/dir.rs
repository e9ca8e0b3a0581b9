//! The run directory. One trainer at a time works in it, on one run.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Checkpoints;
use super::copies::received;
use super::dir_error::DirError;
use super::identity::{self, Origin, RunId};
use super::paths::{make_dir, resolved};
use crate::metrics::MetricsFile;

/// Time to wait for the lock. A trainer that is killed while it starts a program leaves a copy of its lock
/// until that program runs, and a rank whose launcher was killed holds it until it ends: on a busy machine
/// this takes seconds.
const LOCK_WAIT: Duration = Duration::from_secs(5);

/// Properties that stay fixed for the life of a run. Kept in `run.json`; a change needs `--fresh`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunDescription {
    /// The model's shape and precision and its division into tiles.
    pub layout: Value,
    /// Where the state is kept between starts, as text.
    pub store: String,
    /// Device files of a private store, without symbolic links. `--fresh` removes them even if the run now
    /// keeps its state elsewhere.
    #[serde(default)]
    pub files: Vec<PathBuf>,
    /// Socket of the shared daemon that holds the store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
    /// Origin of the initial weights, for display; a resumed run does not need it.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub first_weights: Value,
    /// Identity of the run, as in the file `job`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<RunId>,
    /// Number of nodes that hold the state together, or [`INCOMPLETE`](super::INCOMPLETE).
    #[serde(default = "one_node", skip_serializing_if = "is_one_node")]
    pub nodes: u32,
    /// Milliseconds since 1970 when the run last took its state from initial weights or from a checkpoint. A node with a smaller
    /// number than another one did not take part then.
    #[serde(default)]
    pub begun_unix_ms: u64,
}

/// `store` value in `run.json` for state that is kept only in checkpoints.
pub const STORE_IN_DIR: &str = "in the run directory";

/// Suffix of the `store` value in `run.json` for a store without durability.
pub const STORE_IN_PLACE: &str = ", written in place";

fn one_node() -> u32 {
    1
}

fn is_one_node(nodes: &u32) -> bool {
    *nodes == 1
}

impl RunDescription {
    /// Corrects paths inside the run's directory after it was moved to `dir`.
    fn follow(&mut self, dir: &Path) {
        let Some(before) = self.id.as_ref().map(|id| id.dir.clone()) else {
            return;
        };
        for file in &mut self.files {
            if let Ok(inside) = file.strip_prefix(&before) {
                *file = dir.join(inside);
            }
        }
        let [before, now] = [&*before, dir].map(|path| format!("{}/", path.display()));
        self.store = self.store.replace(&before, &now);
    }
}

/// Run directory locked by this process, or by the first rank of its run.
pub struct RunDir {
    path: PathBuf,
    id: RunId,
    /// Held by the first rank for all ranks.
    _lock: Option<LockedFile>,
}

/// Locked file. Dropping it releases the lock even while a child process that was just started holds a copy
/// of the file.
struct LockedFile(File);

impl Drop for LockedFile {
    fn drop(&mut self) {
        let _ = self.0.unlock();
    }
}

impl RunDir {
    /// Locks the directory of the run `id` and creates it if necessary. If it was moved, records and logs its
    /// new path.
    ///
    /// # Errors
    /// The directory cannot be created, or another trainer is using it.
    pub fn open(path: &Path, id: &RunId) -> Result<Self, DirError> {
        Self::open_within(path, id, LOCK_WAIT)
    }

    fn open_within(path: &Path, id: &RunId, limit: Duration) -> Result<Self, DirError> {
        make_dir(path).map_err(|source| DirError::Io {
            verb: "create the directory",
            path: path.into(),
            source,
        })?;
        let path = resolved(path);
        check_text(&path)?;
        let lock_path = path.join(".lock");
        let lock = File::create(&lock_path).map_err(|source| DirError::Io {
            verb: "write",
            path: lock_path,
            source,
        })?;
        let deadline = Instant::now() + limit;
        while lock.try_lock().is_err() {
            if Instant::now() > deadline {
                return Err(DirError::Busy { path });
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let (found, origin) = RunId::for_dir(&path);
        match origin {
            Origin::New | Origin::CopyOf(_) => id.keep()?,
            // Another trainer started a run here after `id` was chosen.
            Origin::Here | Origin::MovedFrom(_) if found.job != id.job => {
                return Err(DirError::Busy { path });
            }
            Origin::Here if RunId::own(&path).is_some() => {}
            // The file `job` was lost, but run.json contains the identity.
            Origin::Here => id.keep()?,
            Origin::MovedFrom(from) => {
                tracing::warn!(
                    "the run in {} was moved from {}; it continues as job {}",
                    path.display(),
                    from.display(),
                    id.job
                );
                id.keep()?;
            }
        }
        Ok(Self {
            path,
            id: id.clone(),
            _lock: Some(LockedFile(lock)),
        })
    }

    /// Directory of a run that its first rank has locked.
    pub fn joined(path: &Path, id: &RunId) -> Self {
        Self {
            path: resolved(path),
            id: id.clone(),
            _lock: None,
        }
    }

    /// Waits until no trainer has locked the directory. One that was just killed leaves its lock for a while.
    ///
    /// # Errors
    /// Another trainer is using it.
    pub fn wait_until_unused(path: &Path) -> Result<(), DirError> {
        let deadline = Instant::now() + LOCK_WAIT;
        while Self::is_used(path) {
            if Instant::now() > deadline {
                return Err(DirError::Busy { path: path.into() });
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Whether the directory holds nothing but tokens, which `trainer preview-data` left.
    pub fn has_only_tokens(path: &Path) -> bool {
        let names = fs::read_dir(path).map(|entries| {
            let names = entries.filter_map(|entry| Some(entry.ok()?.file_name()));
            names.collect::<Vec<_>>()
        });
        // The name under which `remove` knows the directory.
        let tokens = tokens_dir(path);
        let tokens = tokens.file_name();
        names
            .is_ok_and(|names| names.iter().any(|name| Some(&**name) == tokens) && names.len() == 1)
    }

    /// Returns whether a trainer has locked the directory. Changes nothing.
    pub fn is_used(path: &Path) -> bool {
        // A shared lock, so that two listings at the same time do not take each other for a trainer.
        File::open(path.join(".lock")).is_ok_and(|lock| {
            let is_used = lock.try_lock_shared().is_err();
            drop(LockedFile(lock));
            is_used
        })
    }

    /// Identity of the run.
    pub fn id(&self) -> &RunId {
        &self.id
    }

    /// Path of the directory without symbolic links.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The name of the run's job in a store.
    pub fn job_name(&self) -> &str {
        &self.id.job
    }

    /// Record of an earlier run in the directory; `None` if there is none, or it cannot be read.
    pub fn earlier(&self) -> Option<RunDescription> {
        read_description(&self.path).ok().flatten()
    }

    /// Reads the record of the run in `path`; `None` if there is no run.
    ///
    /// # Errors
    /// `run.json` cannot be read.
    pub fn described(path: &Path) -> Result<Option<RunDescription>, DirError> {
        read_description(path)
    }

    /// Removes an earlier run from the directory: its record, metrics, model files and checkpoints.
    ///
    /// # Errors
    /// A file cannot be removed.
    pub fn forget(&self) -> Result<(), DirError> {
        for path in [
            description_path(&self.path),
            MetricsFile::path(&self.path),
            MetricsFile::old_path(&self.path),
        ] {
            remove(&path, fs::remove_file(&path))?;
        }
        super::ModelFiles::in_run_dir(&self.path).forget()?;
        self.checkpoints()
            .remove_all()
            .map_err(|error| DirError::Checkpoints {
                message: error.to_string(),
            })
    }

    /// Removes all files of the run, and the directory unless it holds other files.
    ///
    /// # Errors
    /// A file cannot be removed.
    pub fn remove(self) -> Result<(), DirError> {
        // The files that identify the run are removed last.
        self.forget()?;
        for name in DIRS {
            let path = self.path.join(name);
            remove(&path, fs::remove_dir_all(&path))?;
        }
        for name in FILES {
            for path in [self.path.join(name), received(&self.path.join(name))] {
                remove(&path, fs::remove_file(&path))?;
            }
        }
        // Fails if the directory contains other files.
        let _ = fs::remove_dir(&self.path);
        Ok(())
    }

    /// The run's checkpoints.
    pub fn checkpoints(&self) -> Checkpoints {
        Checkpoints::in_run_dir(&self.path)
    }

    /// Compares `new` with the run in `path`. Returns false if there is none.
    ///
    /// # Errors
    /// The first difference; `run.json` cannot be read.
    pub fn check(path: &Path, new: &RunDescription) -> Result<bool, DirError> {
        // `files` follow from `store`, which is easier to understand in an error.
        Self::check_values(
            path,
            new,
            |of| serde_json::json!({"layout": of.layout, "store": of.store}),
        )
    }

    /// Like [`Self::check`], without comparing where the state is kept.
    ///
    /// # Errors
    /// The first difference; `run.json` cannot be read.
    pub fn check_layout(path: &Path, new: &RunDescription) -> Result<bool, DirError> {
        Self::check_values(path, new, |of| serde_json::json!({"layout": of.layout}))
    }

    fn check_values(
        path: &Path,
        new: &RunDescription,
        value: impl Fn(&RunDescription) -> Value,
    ) -> Result<bool, DirError> {
        let Some(old) = read_description(path)? else {
            return Ok(false);
        };
        match differences(&value(&old), &value(new)).into_iter().next() {
            None => Ok(true),
            Some(Difference { what, was, now }) => Err(DirError::Changed {
                path: path.into(),
                what,
                was,
                now,
            }),
        }
    }

    /// Renames a damaged `run.json`. Returns its new path.
    ///
    /// # Errors
    /// The file cannot be renamed.
    pub fn set_description_aside(&self) -> Result<PathBuf, DirError> {
        let path = description_path(&self.path);
        let aside = path.with_extension("json.damaged");
        fs::rename(&path, &aside).map_err(|source| DirError::Io {
            verb: "rename",
            path,
            source,
        })?;
        Ok(aside)
    }

    /// Writes the run's record and syncs it.
    ///
    /// # Errors
    /// `run.json` cannot be written.
    pub fn describe(&self, description: &RunDescription) -> Result<(), DirError> {
        let path = description_path(&self.path);
        let temporary = path.with_extension("json.new");
        let text = serde_json::to_string_pretty(description).expect("plain data");
        let write = || -> std::io::Result<()> {
            let mut file = File::create(&temporary)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&temporary, &path)?;
            File::open(&self.path)?.sync_all()
        };
        write().map_err(|source| DirError::Io {
            verb: "write",
            path,
            source,
        })
    }
}

/// Directories removed by [`RunDir::remove`] in addition to those of [`RunDir::forget`].
const DIRS: [&str; 5] = [
    "offloadd",
    "tokens",
    "first-weights",
    "tensorboard",
    "csv_monitor",
];

/// Files removed by [`RunDir::remove`] in addition to those of [`RunDir::forget`].
const FILES: [&str; 8] = [
    "measured.json",
    "exported.json",
    SETTINGS,
    "run.json.damaged",
    "run.json",
    "metrics.jsonl",
    identity::NAME,
    ".lock",
];

/// Directory of a private daemon's settings, log and socket.
pub fn daemon_dir(run_dir: &Path) -> PathBuf {
    run_dir.join("offloadd")
}

/// Directory of the tokens of a run without `data.cache`. They depend only on data and settings, so `--fresh`
/// keeps them.
pub fn tokens_dir(run_dir: &Path) -> PathBuf {
    run_dir.join("tokens")
}

/// Directory of the copy of another run's weights during a start.
pub fn first_weights_dir(run_dir: &Path) -> PathBuf {
    run_dir.join("first-weights")
}

/// Name of the file with all settings of the newest start.
pub(super) const SETTINGS: &str = "settings.toml";

pub(super) fn description_path(run_dir: &Path) -> PathBuf {
    run_dir.join("run.json")
}

fn read_description(run_dir: &Path) -> Result<Option<RunDescription>, DirError> {
    let path = description_path(run_dir);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => {
            return Err(DirError::Io {
                verb: "read",
                path,
                source,
            });
        }
    };
    let read: Result<RunDescription, _> = serde_json::from_str(&text);
    let mut description = read.map_err(|error| DirError::Damaged {
        path,
        message: error.to_string(),
    })?;
    description.follow(&resolved(run_dir));
    Ok(Some(description))
}

/// Value that differs.
#[derive(Debug, PartialEq, Eq)]
pub struct Difference {
    pub what: String,
    pub was: String,
    pub now: String,
}

/// Returns all leaves in which two trees differ, with their paths.
pub fn differences(old: &Value, new: &Value) -> Vec<Difference> {
    fn walk(path: &str, old: &Value, new: &Value, found: &mut Vec<Difference>) {
        if let (Value::Object(before), Value::Object(after)) = (old, new) {
            let missing = &Value::Null;
            for (key, old) in before {
                let path = if path.is_empty() {
                    key.clone()
                } else {
                    format!("{path}.{key}")
                };
                walk(&path, old, after.get(key).unwrap_or(missing), found);
            }
            for (key, new) in after.iter().filter(|(key, _)| !before.contains_key(*key)) {
                walk(
                    &if path.is_empty() {
                        key.clone()
                    } else {
                        format!("{path}.{key}")
                    },
                    missing,
                    new,
                    found,
                );
            }
        } else if old != new {
            let text = |value: &Value| match value {
                Value::Null => "the default".to_owned(),
                Value::String(text) => text.clone(),
                value => value.to_string(),
            };
            found.push(Difference {
                what: public_name(path),
                was: text(old),
                now: text(new),
            });
        }
    }
    let mut found = Vec::new();
    walk("", old, new, &mut found);
    found
}

/// Checks that `path`, which a run's files contain, is text.
///
/// # Errors
/// It is not UTF-8.
pub fn check_text(path: &Path) -> Result<(), DirError> {
    match path.to_str() {
        Some(_) => Ok(()),
        None => Err(DirError::NotText { path: path.into() }),
    }
}

/// Names of what a run keeps about itself, and the settings that they follow from. The first that begins a path counts.
const PUBLIC_NAMES: &[(&str, &str)] = &[
    ("layout.model.biases.mlp", "the model's MLP biases"),
    (
        "layout.model.biases.attention",
        "the model's attention biases",
    ),
    ("biases.mlp", "MLP biases"),
    ("biases.attention", "attention biases"),
    ("layout.model", "model"),
    ("layout.dtype", "the precision"),
    ("layout.optimizer", "optimizer.type"),
    ("layout.moments", "optimizer.moments"),
    ("layout.master", "optimizer.master"),
    ("layout.tile_elems", "offload.tile_elems"),
    ("layout.version", "the format version"),
    ("batch.micro_batches", "gradient_accumulation_steps"),
    ("batch.micro_batch", "train_micro_batch_size_per_gpu"),
    ("batch.seq_len", "train.seq_len"),
    ("batch.sequence_ranks", "train.sequence_parallel"),
    ("ranks", "the number of ranks"),
    ("stage", "zero_optimization.stage"),
    ("optimizer.type", "optimizer.type"),
    ("optimizer.moments", "optimizer.moments"),
    ("optimizer.master", "optimizer.master"),
    ("optimizer.groups", "optimizer.groups"),
    ("optimizer.muon", "optimizer.params"),
    ("optimizer", "optimizer.params"),
    ("matmuls", "train.matmuls"),
    ("mlp_chunks", "train.mlp_chunks"),
    ("deterministic", "train.deterministic"),
    ("threads", "train.threads"),
    ("text", "the data"),
    ("validation_fraction", "data.validation_fraction"),
    ("shuffle", "data.shuffle"),
    ("cross_document_attention", "data.cross_document_attention"),
    ("seed", "train.seed"),
];

/// Replaces the beginning of `path` by the name that people know.
fn public_name(path: &str) -> String {
    let known = PUBLIC_NAMES.iter().find_map(|(inner, name)| {
        let rest = path.strip_prefix(inner)?;
        (rest.is_empty() || rest.starts_with('.')).then(|| format!("{name}{rest}"))
    });
    known.unwrap_or_else(|| path.to_owned())
}

pub(super) fn remove(path: &Path, result: std::io::Result<()>) -> Result<(), DirError> {
    match result {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => Err(DirError::Io {
            verb: "remove",
            path: path.into(),
            source,
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn one_trainer_at_a_time_uses_a_directory() {
        let dir = tempfile::tempdir().unwrap();
        let (id, _) = RunId::for_dir(&resolved(dir.path()));
        let first = RunDir::open(dir.path(), &id).unwrap();
        assert!(matches!(
            RunDir::open_within(dir.path(), &id, Duration::ZERO),
            Err(DirError::Busy { .. })
        ));
        // A copy like that of a child process between fork and exec.
        let copy = first._lock.as_ref().unwrap().0.try_clone().unwrap();
        drop(first);
        assert!(RunDir::open(dir.path(), &id).is_ok());
        drop(copy);
    }

    #[test]
    fn a_changed_model_is_named_and_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (id, _) = RunId::for_dir(&resolved(dir.path()));
        let run = RunDir::open(dir.path(), &id).unwrap();
        let with = |hidden: u64| RunDescription {
            layout: json!({"model": {"hidden_size": hidden}}),
            store: "in the run directory".into(),
            files: Vec::new(),
            socket: None,
            first_weights: Value::Null,
            id: None,
            nodes: 1,
            begun_unix_ms: 0,
        };
        let check = |hidden| RunDir::check(dir.path(), &with(hidden));
        assert!(!check(64).unwrap());
        run.describe(&with(64)).unwrap();
        assert!(check(64).unwrap());
        let text = check(128).unwrap_err().to_string();
        assert!(
            text.contains("model.hidden_size was 64 and is now 128") && text.contains("--fresh"),
            "{text}"
        );
        run.forget().unwrap();
        assert!(!check(128).unwrap());
    }

    #[test]
    fn a_resolved_path_does_not_change_when_the_directory_is_created() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(dir.path(), dir.path().join("link")).unwrap();
        let path = dir.path().join("link/a/b");
        let before = resolved(&path);
        fs::create_dir_all(&path).unwrap();
        assert_eq!(before, resolved(&path));
        assert_eq!(before, fs::canonicalize(&path).unwrap());
    }
}
