//! Which run a folder holds: the name of its job in the store. It is chosen once and kept in the folder, so that a run whose
//! folder is renamed or moved stays the same run.
//!
//! ```text
//!   RUN/job        {"job": "demo-0123456789abcdef", "folder": "/home/a/runs/demo"}
//!   RUN/run.json   the same below "id": either file may be lost or damaged
//! ```
//!
//! `folder` tells a run that was moved (nothing of it is left there) from a copy (the run is still there). A copy does not
//! share the store of the run that it was copied from: it gets a job of its own.

use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::folder::FolderError;

/// The identity of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunId {
    /// Name of its job in a store: the folder's first name and a random number.
    pub(crate) job: String,
    /// Where the run was when this was written, links resolved.
    pub(super) folder: PathBuf,
}

/// What a folder says of its identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// It holds no run yet.
    New,
    /// The run was here before.
    Here,
    /// The run was in that folder, which holds it no more.
    MovedFrom(PathBuf),
    /// The run in that folder was copied; this is another run.
    CopyOf(PathBuf),
}

impl RunId {
    /// Of the run in `folder`, whose links are resolved. A new one where it holds none, or a copy.
    pub fn of(folder: &Path) -> (Self, Origin) {
        let here = |job| Self {
            job,
            folder: folder.to_owned(),
        };
        let Some(kept) = Self::kept(folder) else {
            return (here(new_job(folder)), Origin::New);
        };
        if kept.folder == folder || same_folder(&kept.folder, folder) {
            return (here(kept.job), Origin::Here);
        }
        let before = Self::kept(&kept.folder);
        if before.is_some_and(|before| before.job == kept.job) {
            (here(new_job(folder)), Origin::CopyOf(kept.folder))
        } else {
            (here(kept.job), Origin::MovedFrom(kept.folder))
        }
    }

    /// What is written in `folder`, if it can be read.
    pub(crate) fn kept(folder: &Path) -> Option<Self> {
        #[derive(Deserialize)]
        struct Described {
            id: RunId,
        }
        Self::own(folder).or_else(|| {
            let text = fs::read(folder.join("run.json")).ok()?;
            let described: Described = serde_json::from_slice(&text).ok()?;
            Some(described.id)
        })
    }

    /// What is written in the file of its own.
    pub(super) fn own(folder: &Path) -> Option<Self> {
        let text = fs::read(folder.join(NAME)).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Writes it in its folder, so that it outlives a loss of power.
    pub(super) fn keep(&self) -> Result<(), FolderError> {
        let path = self.folder.join(NAME);
        let new = self.folder.join(format!("{NAME}.new"));
        let text = serde_json::to_string(self).expect("plain data");
        let write = || -> std::io::Result<()> {
            let mut file = File::create(&new)?;
            writeln!(file, "{text}")?;
            file.sync_all()?;
            fs::rename(&new, &path)?;
            File::open(&self.folder)?.sync_all()
        };
        write().map_err(|source| FolderError::Io {
            verb: "write",
            path: path.clone(),
            source,
        })
    }
}

/// The file in a run's folder.
pub(super) const NAME: &str = "job";

/// Whether two paths lead to one folder, as where a file system is mounted twice.
fn same_folder(one: &Path, other: &Path) -> bool {
    let number = |path| fs::metadata(path).map(|found| (found.dev(), found.ino()));
    matches!((number(one), number(other)), (Ok(one), Ok(other)) if one == other)
}

/// Letters, digits, '-' and '_' only, and short: the store takes it as a job's name.
fn new_job(folder: &Path) -> String {
    let stem = folder
        .file_name()
        .map_or_else(|| "run".into(), |name| name.to_string_lossy().into_owned());
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    let stem: String = stem
        .chars()
        .map(|c| if plain(c) { c } else { '-' })
        .take(32)
        .collect();
    let stem = stem.trim_start_matches('-');
    let stem = if stem.is_empty() { "run" } else { stem };
    // Seeded by the kernel's random numbers.
    format!("{stem}-{:016x}", RandomState::new().build_hasher().finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept_in(folder: &Path) -> (RunId, Origin) {
        let (id, origin) = RunId::of(folder);
        id.keep().unwrap();
        (id, origin)
    }

    #[test]
    fn a_moved_run_is_the_same_and_a_copied_one_is_another() {
        let folder = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(folder.path()).unwrap();
        let [first, second, third] = ["first", "second", "third"].map(|name| root.join(name));
        fs::create_dir(&first).unwrap();
        let (id, origin) = kept_in(&first);
        assert_eq!(origin, Origin::New);
        assert_eq!(RunId::of(&first), (id.clone(), Origin::Here));
        fs::rename(&first, &second).unwrap();
        let (moved, origin) = kept_in(&second);
        assert_eq!(
            (&moved.job, origin),
            (&id.job, Origin::MovedFrom(first.clone()))
        );
        assert_eq!(RunId::of(&second).1, Origin::Here);
        fs::create_dir(&third).unwrap();
        fs::copy(second.join(NAME), third.join(NAME)).unwrap();
        let (copy, origin) = kept_in(&third);
        assert_ne!(copy.job, id.job);
        assert_eq!(origin, Origin::CopyOf(second));
        // Another run where the first one was is none of these.
        fs::create_dir(&first).unwrap();
        let (new, origin) = kept_in(&first);
        assert_eq!(origin, Origin::New);
        assert!(new.job != id.job && new.job.starts_with("first-"));
    }

    #[test]
    fn either_file_tells_who_a_run_is() {
        let folder = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(folder.path()).unwrap();
        let (id, _) = kept_in(&root);
        let described = serde_json::json!({"id": id, "layout": null}).to_string();
        fs::write(root.join("run.json"), described).unwrap();
        fs::write(root.join(NAME), "\0\0").unwrap();
        assert_eq!(RunId::of(&root), (id.clone(), Origin::Here));
        id.keep().unwrap();
        fs::write(root.join("run.json"), "\0\0").unwrap();
        assert_eq!(RunId::of(&root), (id, Origin::Here));
    }

    #[test]
    fn job_names_are_plain_and_differ() {
        let job = |path| new_job(Path::new(path));
        let one = job("/a/größe 1");
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        assert!(one.chars().all(plain) && one.len() <= 49, "{one}");
        assert_ne!(one, job("/a/größe 1"));
        assert!(job("/").starts_with("run-"));
    }
}
