//! The identity of a run: the name of its job in the store. The name is chosen once and kept in the
//! directory, so that a run keeps it when its directory is renamed or moved.
//!
//! ```text
//!   RUN/job        {"job": "demo-0123456789abcdef", "dir": "/home/a/runs/demo"}
//!   RUN/run.json   the same below "id": one of the two files may be lost or damaged
//! ```
//!
//! `dir` distinguishes a moved run (the old directory no longer holds it) from a copied one (it still
//! does). A copy does not share the original's store: it gets its own job.

use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use offload_support::job_name::{self, NODE};
use serde::{Deserialize, Serialize};

use super::dir_error::DirError;

/// The identity of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunId {
    /// Name of the job in a store: the directory's first name and a random number.
    pub job: String,
    /// Directory of the run when this was written, without symbolic links.
    pub(super) dir: PathBuf,
}

/// Relation of a directory to its run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// It contains no run yet.
    New,
    /// The run was here before.
    Here,
    /// The run was moved from that directory.
    MovedFrom(PathBuf),
    /// The run in that directory was copied; this is a different run.
    CopyOf(PathBuf),
}

impl RunId {
    /// Determines the identity of the run in `dir`, which must not contain symbolic links. A directory
    /// without a run, or with a copy of one, gets a new identity.
    pub fn for_dir(dir: &Path) -> (Self, Origin) {
        let here = |job| Self {
            job,
            dir: dir.to_owned(),
        };
        let Some(kept) = Self::kept(dir) else {
            return (here(new_job(dir)), Origin::New);
        };
        if kept.dir == dir || same_dir(&kept.dir, dir) {
            return (here(kept.job), Origin::Here);
        }
        let before = Self::kept(&kept.dir);
        if before.is_some_and(|before| before.job == kept.job) {
            (here(new_job(dir)), Origin::CopyOf(kept.dir))
        } else {
            (here(kept.job), Origin::MovedFrom(kept.dir))
        }
    }

    /// Identity of the part of this run that node `node` keeps in `dir`. The first node's is the run's own.
    pub fn of_node(&self, node: u32, dir: &Path) -> Self {
        Self {
            job: node_job(&self.job, node),
            dir: dir.to_owned(),
        }
    }

    /// Describes the run, or the part of a run, with the job `job`.
    pub fn describe_job(job: &str) -> String {
        match Self::part(job) {
            Some((run, node)) => format!("the part of node {node} of run {run}"),
            None => format!("run {job}"),
        }
    }

    /// Job of the run and number of the node whose part has the job `job`; `None` for the first node's.
    pub fn part(job: &str) -> Option<(&str, u32)> {
        let (run, node) = job.rsplit_once(NODE)?;
        Some((run, node.parse().ok()?))
    }

    /// Checks that all that `run_dir` holds on this node belongs to this run. `node` is the number of this
    /// node.
    ///
    /// # Errors
    /// The directory of some node holds another run, or the part of another node.
    pub fn check_nodes(&self, run_dir: &Path, node: u32) -> Result<(), DirError> {
        let entries = fs::read_dir(nodes_dir(run_dir)).into_iter().flatten();
        let numbers = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        for of in std::iter::once(0).chain(numbers) {
            let path = node_dir(run_dir, of);
            let expected = self.of_node(of, &path);
            if let Some(found) = Self::kept(&path).filter(|found| found.job != expected.job) {
                return Err(DirError::OtherRun {
                    node,
                    path,
                    found: Self::describe_job(&found.job),
                    expected: Self::describe_job(&self.job),
                });
            }
        }
        Ok(())
    }

    /// Identity kept in `dir`, if it can be read.
    pub fn kept(dir: &Path) -> Option<Self> {
        #[derive(Deserialize)]
        struct IdOfDescription {
            id: RunId,
        }
        Self::own(dir).or_else(|| {
            let text = fs::read(dir.join("run.json")).ok()?;
            let described: IdOfDescription = serde_json::from_slice(&text).ok()?;
            Some(described.id)
        })
    }

    /// Identity in the file `job`.
    pub(super) fn own(dir: &Path) -> Option<Self> {
        let text = fs::read(dir.join(NAME)).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Writes the identity into its directory and syncs it.
    pub(super) fn keep(&self) -> Result<(), DirError> {
        let path = self.dir.join(NAME);
        let new = self.dir.join(format!("{NAME}.new"));
        let text = serde_json::to_string(self).expect("plain data");
        let write = || -> std::io::Result<()> {
            let mut file = File::create(&new)?;
            writeln!(file, "{text}")?;
            file.sync_all()?;
            fs::rename(&new, &path)?;
            File::open(&self.dir)?.sync_all()
        };
        write().map_err(|source| DirError::Io {
            verb: "write",
            path: path.clone(),
            source,
        })
    }
}

/// Name of the job of node `node` in a run whose first node has the job `job`.
pub fn node_job(job: &str, node: u32) -> String {
    job_name::of_node(job, node)
}

/// Directory of node `node` in the directory of its run: the run's own directory for the first one.
pub fn node_dir(run_dir: &Path, node: u32) -> PathBuf {
    match node {
        0 => run_dir.to_owned(),
        node => nodes_dir(run_dir).join(node.to_string()),
    }
}

/// Directory with the directories of all nodes but the first.
pub fn nodes_dir(run_dir: &Path) -> PathBuf {
    run_dir.join("nodes")
}

/// Name of the file in a run's directory.
pub(super) const NAME: &str = "job";

/// Returns whether two paths refer to one directory, for example if a file system is mounted twice.
fn same_dir(one: &Path, other: &Path) -> bool {
    let number = |path| fs::metadata(path).map(|found| (found.dev(), found.ino()));
    matches!((number(one), number(other)), (Ok(one), Ok(other)) if one == other)
}

/// Makes the name of the job of a run in `dir`.
fn new_job(dir: &Path) -> String {
    let name = dir.file_name().unwrap_or_default();
    // RandomState is seeded by the kernel's random number generator.
    job_name::of_run(
        &name.to_string_lossy(),
        RandomState::new().build_hasher().finish(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept_in(dir: &Path) -> (RunId, Origin) {
        let (id, origin) = RunId::for_dir(dir);
        id.keep().unwrap();
        (id, origin)
    }

    #[test]
    fn a_moved_run_keeps_its_identity_and_a_copy_gets_another() {
        let dir = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(dir.path()).unwrap();
        let [first, second, third] = ["first", "second", "third"].map(|name| root.join(name));
        fs::create_dir(&first).unwrap();
        let (id, origin) = kept_in(&first);
        assert_eq!(origin, Origin::New);
        assert_eq!(RunId::for_dir(&first), (id.clone(), Origin::Here));
        fs::rename(&first, &second).unwrap();
        let (moved, origin) = kept_in(&second);
        assert_eq!(
            (&moved.job, origin),
            (&id.job, Origin::MovedFrom(first.clone()))
        );
        assert_eq!(RunId::for_dir(&second).1, Origin::Here);
        fs::create_dir(&third).unwrap();
        fs::copy(second.join(NAME), third.join(NAME)).unwrap();
        let (copy, origin) = kept_in(&third);
        assert_ne!(copy.job, id.job);
        assert_eq!(origin, Origin::CopyOf(second));
        // A new run in the first directory is neither of them.
        fs::create_dir(&first).unwrap();
        let (new, origin) = kept_in(&first);
        assert_eq!(origin, Origin::New);
        assert!(new.job != id.job && new.job.starts_with("first-"));
    }

    #[test]
    fn a_directory_with_the_part_of_another_run_or_node_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(dir.path()).unwrap();
        let (run, _) = RunId::for_dir(&root);
        let second = node_dir(&root, 1);
        fs::create_dir_all(&second).unwrap();
        run.check_nodes(&root, 1).unwrap();
        run.of_node(1, &second).keep().unwrap();
        run.check_nodes(&root, 1).unwrap();
        // The first node is started where the second one was.
        let other = RunId {
            job: "other".into(),
            ..run.clone()
        };
        let told = other.check_nodes(&root, 0).unwrap_err().to_string();
        let says = format!("holds the part of node 1 of run {}", run.job);
        assert!(
            told.starts_with("node 0: ") && told.contains(&says),
            "{told}"
        );
        // The second one where the first one was.
        other.keep().unwrap();
        let told = run.check_nodes(&root, 1).unwrap_err().to_string();
        assert!(
            told.contains("holds run other, and this run is run "),
            "{told}"
        );
        // Another node's part in a node's directory.
        run.keep().unwrap();
        run.of_node(2, &second).keep().unwrap();
        let told = run.check_nodes(&root, 1).unwrap_err().to_string();
        assert!(told.contains("the part of node 2"), "{told}");
    }

    #[test]
    fn either_file_identifies_the_run() {
        let dir = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(dir.path()).unwrap();
        let (id, _) = kept_in(&root);
        let described = serde_json::json!({"id": id, "layout": null}).to_string();
        fs::write(root.join("run.json"), described).unwrap();
        fs::write(root.join(NAME), "\0\0").unwrap();
        assert_eq!(RunId::for_dir(&root), (id.clone(), Origin::Here));
        id.keep().unwrap();
        fs::write(root.join("run.json"), "\0\0").unwrap();
        assert_eq!(RunId::for_dir(&root), (id, Origin::Here));
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
