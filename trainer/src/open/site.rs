//! The place of this process's part of a run: its node, and what the first rank has found of the run.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use swapper::Nodes;

use super::RunError;
use super::describe::tile_elems_of;
use training_state::ranks::Ranks;
use training_state::run::{Checkpoints, DirError, Origin, RunDir, RunId, make_dir};

/// Time in which a file that the first node wrote appears on the others. Network file systems keep what they
/// have read of a directory for some seconds.
const PROBE_WAIT: Duration = Duration::from_secs(5);

/// The place of this process's part of a run.
#[derive(Clone)]
pub(crate) struct Site {
    pub(crate) ranks: Ranks,
    /// Directory of the run: that of its first node, with metrics and checkpoints.
    pub(crate) whole_dir: PathBuf,
    /// Connection of the nodes, if there are several.
    pub(crate) nodes: Option<Nodes>,
    pub(crate) found: Found,
}

/// What there is of the run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Found {
    /// Identity of the run, chosen now if it is new.
    pub(super) id: RunId,
    /// The run whose directory was copied to make this one, if any.
    pub(super) copy_of: Option<PathBuf>,
    /// Tile size of the run, if it exists.
    pub(super) tile_elems: Option<u64>,
}

impl Found {
    /// Looks for the run in `dir`. `is_fresh` ignores all but its identity.
    ///
    /// # Errors
    /// `run.json` cannot be read.
    pub(crate) fn look(dir: &Path, is_fresh: bool) -> Result<Self, RunError> {
        let (id, origin) = RunId::of(dir);
        let tile_elems = match is_fresh {
            true => None,
            false => tile_elems_of(dir)?,
        };
        Ok(Self {
            id,
            copy_of: match origin {
                Origin::CopyOf(of) => Some(of),
                _ => None,
            },
            tile_elems,
        })
    }

    /// Name of the run's job on the first node, which identifies the run.
    pub(crate) fn run(&self) -> &str {
        &self.id.job
    }
}

impl Site {
    /// The place of a process that reads the run in `dir` alone.
    ///
    /// # Errors
    /// Same as [`Found::look`].
    pub(crate) fn alone(dir: &Path) -> Result<Self, RunError> {
        Ok(Self {
            ranks: Ranks::alone(),
            whole_dir: dir.to_owned(),
            nodes: None,
            found: Found::look(dir, false)?,
        })
    }

    pub(crate) fn checkpoints(&self) -> Checkpoints {
        Checkpoints::of(&self.whole_dir)
    }

    /// Checks that what is in this node's directories belongs to the run, and that it was kept on as many nodes.
    /// `run_dir` is this node's directory.
    ///
    /// # Errors
    /// Names what is there.
    pub(super) fn check_dirs(&self, run_dir: &Path, resumes: bool) -> Result<(), RunError> {
        let now = self.ranks.nodes();
        if now > 1 {
            (self.found.id).check_nodes(&self.whole_dir, self.ranks.node())?;
        }
        match RunDir::described(run_dir)? {
            Some(earlier) if resumes && earlier.nodes != now => Err(DirError::Nodes {
                path: run_dir.to_owned(),
                was: earlier.nodes,
                now,
            }
            .into()),
            _ => Ok(()),
        }
    }

    /// Checks that every node sees the run's directory. All ranks must call it.
    ///
    /// # Errors
    /// A node does not see it; a rank is gone.
    pub(super) fn check_shared(&self) -> Result<(), RunError> {
        let ranks = &self.ranks;
        let dir = &self.whole_dir;
        let name = ranks.by_first::<_, RunError>("writing into the run's directory", || {
            // RandomState is seeded by the kernel's random number generator.
            let number = RandomState::new().build_hasher().finish();
            let name = format!(".seen-by-all-{number:016x}");
            let path = dir.join(&name);
            let written = make_dir(dir).and_then(|()| std::fs::write(&path, []));
            written.map_err(|source| DirError::Io {
                verb: "write",
                path,
                source,
            })?;
            Ok(name)
        })?;
        let path = dir.join(name);
        let deadline = Instant::now() + PROBE_WAIT;
        let seen = ranks.together("looking for the run's directory", || {
            while ranks.is_first_of_node() && !path.exists() {
                if Instant::now() > deadline {
                    return Err(RunError::NotShared {
                        node: ranks.node(),
                        run_dir: dir.clone(),
                    });
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            Ok(())
        });
        if ranks.is_first() {
            // A file that stays does no harm.
            let _ = std::fs::remove_file(&path);
        }
        seen
    }
}
