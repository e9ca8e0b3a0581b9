//! The run folder: one trainer at a time, one model for its whole life.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Saves;
use crate::fingerprint::Fingerprint;
use crate::metrics::MetricsFile;

/// A trainer that was killed while it started a program leaves a copy of its lock until that program runs, and a rank whose
/// launcher was killed has it until it has ended: on a machine with much to do that takes a while.
const LOCK_WAIT: Duration = Duration::from_secs(5);

/// What a run is from its first step to its last. Kept in `run.json`; a change of any of it needs `--fresh`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunDescription {
    /// The model's shape and precision, and how it is cut into tiles.
    pub layout: Value,
    /// Where the state is kept between starts.
    pub store: String,
    /// Device files of a private store, links resolved: `--fresh` removes them, wherever the run goes on.
    #[serde(default)]
    pub files: Vec<PathBuf>,
    /// Of the shared daemon that has the store, if one has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
    /// What its first weights were, for people: a resumed run does not need them.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub first_weights: Value,
}

/// Why a run folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    #[error("train.run_folder: cannot {verb} {}: {source}", path.display())]
    Io {
        verb: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("train.run_folder: another trainer works in {}", path.display())]
    Busy { path: PathBuf },
    #[error("{} is damaged ({message}): start again with --fresh", path.display())]
    Damaged { path: PathBuf, message: String },
    #[error(
        "{} holds another run: {} was {was}, is now {now}. Use another train.run_folder, or start again with --fresh",
        path.display(), what
    )]
    Changed {
        path: PathBuf,
        what: String,
        was: String,
        now: String,
    },
}

/// A run folder that this process has for itself, or with the ranks of its run.
pub struct RunFolder {
    path: PathBuf,
    name: String,
    /// By the first rank for all.
    _lock: Option<Locked>,
}

/// A locked file. Its lock is given up with it even while a process that was just started still has a copy of it.
struct Locked(File);

impl Drop for Locked {
    fn drop(&mut self) {
        let _ = self.0.unlock();
    }
}

impl RunFolder {
    /// Makes the folder if need be and locks it.
    ///
    /// # Errors
    /// It cannot be made, or another trainer works in it.
    pub fn open(path: &Path) -> Result<Self, FolderError> {
        Self::open_within(path, LOCK_WAIT)
    }

    fn open_within(path: &Path, limit: Duration) -> Result<Self, FolderError> {
        make_folder(path).map_err(|source| FolderError::Io {
            verb: "make the folder",
            path: path.into(),
            source,
        })?;
        let path = resolved(path);
        let lock_path = path.join(".lock");
        let lock = File::create(&lock_path).map_err(|source| FolderError::Io {
            verb: "write",
            path: lock_path,
            source,
        })?;
        let deadline = Instant::now() + limit;
        while lock.try_lock().is_err() {
            if Instant::now() > deadline {
                return Err(FolderError::Busy { path });
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let name = job_name(&path);
        Ok(Self {
            path,
            name,
            _lock: Some(Locked(lock)),
        })
    }

    /// The folder that another rank of the same run has locked, for as long as that one goes on.
    pub fn joined(path: &Path) -> Self {
        let path = resolved(path);
        Self {
            name: job_name(&path),
            path,
            _lock: None,
        }
    }

    /// The folder, links resolved.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The run's name for a store: the folder's name and a fingerprint of its path, so that two runs never share a job.
    pub fn job_name(&self) -> &str {
        &self.name
    }

    /// What the folder says of an earlier run; nothing when it says none, or nothing that can be read.
    pub fn earlier(&self) -> Option<RunDescription> {
        read_description(&self.path).ok().flatten()
    }

    /// What the folder at `path` holds, if it holds a run.
    ///
    /// # Errors
    /// An unreadable `run.json`.
    pub fn described(path: &Path) -> Result<Option<RunDescription>, FolderError> {
        read_description(path)
    }

    /// Removes all that an earlier run left in the folder.
    ///
    /// # Errors
    /// Something cannot be removed.
    pub fn forget(&self) -> Result<(), FolderError> {
        for path in [
            description_path(&self.path),
            MetricsFile::path(&self.path),
            MetricsFile::old_path(&self.path),
        ] {
            remove(&path, fs::remove_file(&path))?;
        }
        super::ModelFiles::of(&self.path).forget()?;
        let saves = self.saves();
        remove(saves.path(), fs::remove_dir_all(saves.path()))
    }

    /// Copies of its state.
    pub fn saves(&self) -> Saves {
        Saves::of(&self.path)
    }

    /// Refuses `new` when the folder at `path` holds a run that is something else, naming the first thing that differs.
    /// False when it holds no run.
    ///
    /// # Errors
    /// The difference, or an unreadable `run.json`.
    pub fn check(path: &Path, new: &RunDescription) -> Result<bool, FolderError> {
        // Where the files lie follows from `store`, which is told in a person's words.
        Self::check_values(
            path,
            new,
            |of| serde_json::json!({"layout": of.layout, "store": of.store}),
        )
    }

    /// As [`Self::check`], but the state may have been kept elsewhere.
    ///
    /// # Errors
    /// The difference, or an unreadable `run.json`.
    pub fn check_layout(path: &Path, new: &RunDescription) -> Result<bool, FolderError> {
        Self::check_values(path, new, |of| serde_json::json!({"layout": of.layout}))
    }

    fn check_values(
        path: &Path,
        new: &RunDescription,
        value: impl Fn(&RunDescription) -> Value,
    ) -> Result<bool, FolderError> {
        let Some(old) = read_description(path)? else {
            return Ok(false);
        };
        match differences(&value(&old), &value(new)).into_iter().next() {
            None => Ok(true),
            Some(Difference { what, was, now }) => Err(FolderError::Changed {
                path: path.into(),
                what,
                was,
                now,
            }),
        }
    }

    /// Remembers what the run is.
    ///
    /// # Errors
    /// `run.json` cannot be written.
    pub fn describe(&self, description: &RunDescription) -> Result<(), FolderError> {
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
        write().map_err(|source| FolderError::Io {
            verb: "write",
            path,
            source,
        })
    }
}

/// Where a private daemon has its settings, its log and its socket.
pub(crate) fn daemon_folder(run_folder: &Path) -> PathBuf {
    run_folder.join("offloadd")
}

/// Where a run without `data.cache` keeps its tokens. They follow from its data and settings, so they outlive `--fresh`.
pub(crate) fn tokens_folder(run_folder: &Path) -> PathBuf {
    run_folder.join("tokens")
}

fn description_path(run_folder: &Path) -> PathBuf {
    run_folder.join("run.json")
}

/// The description that an earlier start left, if there was one.
fn read_description(run_folder: &Path) -> Result<Option<RunDescription>, FolderError> {
    let path = description_path(run_folder);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => {
            return Err(FolderError::Io {
                verb: "read",
                path,
                source,
            });
        }
    };
    serde_json::from_str(&text)
        .map(Some)
        .map_err(|error| FolderError::Damaged {
            path,
            message: error.to_string(),
        })
}

/// `path` from the root, links resolved as far as it exists: the same for a folder before and after it is made.
pub(crate) fn resolved(path: &Path) -> PathBuf {
    let whole = std::path::absolute(path).unwrap_or_else(|_| path.into());
    let existing = whole
        .ancestors()
        .find_map(|ancestor| Some((ancestor, fs::canonicalize(ancestor).ok()?)));
    match existing {
        Some((ancestor, real)) => match whole.strip_prefix(ancestor) {
            Ok(rest) if !rest.as_os_str().is_empty() => real.join(rest),
            _ => real,
        },
        None => whole,
    }
}

/// One value that is not what it was.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Difference {
    pub(crate) what: String,
    pub(crate) was: String,
    pub(crate) now: String,
}

/// All leaves in which two trees differ, by path.
pub(crate) fn differences(old: &Value, new: &Value) -> Vec<Difference> {
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
            let text = |value: &Value| {
                value
                    .as_str()
                    .map_or_else(|| value.to_string(), str::to_owned)
            };
            found.push(Difference {
                what: path.to_owned(),
                was: text(old),
                now: text(new),
            });
        }
    }
    let mut found = Vec::new();
    walk("", old, new, &mut found);
    found
}

/// Makes the folder at `path` and those above it, so that power loss does not take them with what is flushed inside.
pub(crate) fn make_folder(path: &Path) -> std::io::Result<()> {
    let whole = resolved(path);
    let missing = whole.ancestors().filter(|ancestor| !ancestor.exists());
    let above: Vec<&Path> = missing.filter_map(Path::parent).collect();
    fs::create_dir_all(&whole)?;
    above
        .into_iter()
        .try_for_each(|folder| File::open(folder)?.sync_all())
}

pub(super) fn remove(path: &Path, result: std::io::Result<()>) -> Result<(), FolderError> {
    match result {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => Err(FolderError::Io {
            verb: "remove",
            path: path.into(),
            source,
        }),
        _ => Ok(()),
    }
}

/// Letters, digits, '-' and '_' only, and short: the store takes it as a job's name.
pub(crate) fn job_name(path: &Path) -> String {
    let stem = path
        .file_name()
        .map_or_else(|| "run".into(), |name| name.to_string_lossy().into_owned());
    let stem: String = stem
        .chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() || c == '-' || c == '_' {
                c
            } else {
                '-'
            }
        })
        .take(32)
        .collect();
    let stem = stem.trim_start_matches('-');
    format!(
        "{}-{:016x}",
        if stem.is_empty() { "run" } else { stem },
        Fingerprint::of(path.as_os_str().as_encoded_bytes())
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn one_trainer_works_in_a_folder() {
        let folder = tempfile::tempdir().unwrap();
        let first = RunFolder::open(folder.path()).unwrap();
        assert!(matches!(
            RunFolder::open_within(folder.path(), Duration::ZERO),
            Err(FolderError::Busy { .. })
        ));
        // As in a process that is forked just now and not yet its own program.
        let copy = first._lock.as_ref().unwrap().0.try_clone().unwrap();
        drop(first);
        assert!(RunFolder::open(folder.path()).is_ok());
        drop(copy);
    }

    #[test]
    fn a_changed_model_is_named_and_refused() {
        let folder = tempfile::tempdir().unwrap();
        let run = RunFolder::open(folder.path()).unwrap();
        let with = |hidden: u64| RunDescription {
            layout: json!({"model": {"hidden_size": hidden}}),
            store: "in the run folder".into(),
            files: Vec::new(),
            socket: None,
            first_weights: Value::Null,
        };
        let check = |hidden| RunFolder::check(folder.path(), &with(hidden));
        assert!(!check(64).unwrap());
        run.describe(&with(64)).unwrap();
        assert!(check(64).unwrap());
        let text = check(128).unwrap_err().to_string();
        assert!(
            text.contains("layout.model.hidden_size was 64, is now 128")
                && text.contains("--fresh"),
            "{text}"
        );
        run.forget().unwrap();
        assert!(!check(128).unwrap());
    }

    #[test]
    fn a_folder_has_one_name_before_and_after_it_is_made() {
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(folder.path(), folder.path().join("link")).unwrap();
        let path = folder.path().join("link/a/b");
        let before = resolved(&path);
        fs::create_dir_all(&path).unwrap();
        assert_eq!(before, resolved(&path));
        assert_eq!(before, fs::canonicalize(&path).unwrap());
    }

    #[test]
    fn job_names_are_plain_and_differ_by_folder() {
        let one = job_name(Path::new("/a/größe 1"));
        assert!(
            one.chars()
                .all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_')
                && one.len() <= 49,
            "{one}"
        );
        assert_ne!(one, job_name(Path::new("/b/größe 1")));
        assert!(job_name(Path::new("/")).starts_with("run-"));
    }
}
