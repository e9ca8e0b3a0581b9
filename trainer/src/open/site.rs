//! The place of this process's part of a run: its node, and what the first rank has found of the run.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use swapper::Nodes;

use super::describe::tile_elems_of;
use super::{RunError, Start};
use crate::config::RunSettings;
use training_state::metrics::MetricsFile;
use training_state::ranks::Ranks;
use training_state::run::{
    CheckpointName, Checkpoints, DirError, INCOMPLETE, Origin, RunDir, RunId, make_dir, resolved,
};
use training_state::store::StoreFiles;

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

    /// Finds where [`Start::Newest`] begins: at the stores of all nodes, or at the newest checkpoint if a node's directory shows
    /// that they cannot be resumed from. The first rank also gets a line that says why. All ranks must call it.
    ///
    /// # Errors
    /// A directory cannot be read; a rank is gone.
    pub(crate) fn newest(
        &self,
        settings: &RunSettings,
    ) -> Result<(Start, Option<String>), RunError> {
        let ranks = &self.ranks;
        let problem = ranks.by_first_of_node("looking for the node's store", || {
            match settings.placement.has_store() {
                true => self.store_problem(settings),
                // The newest state is a checkpoint.
                false => Ok(None),
            }
        })?;
        let problems = ranks.messages(problem.unwrap_or_default().into_bytes())?;
        let Some(problem) = problems.into_iter().find(|problem| !problem.is_empty()) else {
            return Ok((Start::GoOn, None));
        };
        let mut note = None;
        let step = ranks.by_first::<_, RunError>("looking for the newest checkpoint", || {
            let Some(newest) = self.checkpoints().list()?.pop() else {
                return Ok(None);
            };
            let steps = MetricsFile::last_step(&self.whole_dir);
            note = Some(format!(
                "note: {}: resuming from the newest checkpoint, of step {}; {} step(s) are repeated",
                String::from_utf8_lossy(&problem),
                newest.step,
                steps.saturating_sub(newest.step)
            ));
            Ok(Some(newest.step))
        })?;
        // Without a checkpoint the run is new, or refused with the problem.
        let start = step.map_or(Start::GoOn, |step| {
            Start::Checkpoint(CheckpointName::Step(step))
        });
        Ok((start, note))
    }

    /// Returns why this node cannot resume from its store, as far as its directory and the store's files show.
    fn store_problem(&self, settings: &RunSettings) -> Result<Option<String>, RunError> {
        let (node, now) = (self.ranks.node(), self.ranks.nodes());
        let run_dir = resolved(&settings.train.run_dir);
        let Some(earlier) = RunDir::described(&run_dir)? else {
            return Ok(Some(format!("node {node} has no part of the run's state")));
        };
        if earlier.nodes == INCOMPLETE {
            let text =
                format!("an earlier start did not take all state from a checkpoint on node {node}");
            return Ok(Some(text));
        }
        if earlier.nodes != now {
            let was = earlier.nodes;
            return Ok(Some(format!(
                "the run's state is divided over {was} node(s), and this start has {now}"
            )));
        }
        if settings.offload.socket.is_some() {
            return Ok(None);
        }
        let job = self.found.id.of_node(node, &run_dir).job;
        let files = StoreFiles::new(&settings.placement.nvme_paths, &job, 0);
        let mut paths = files.paths().iter();
        let missing = paths.find(|path| !path.exists());
        Ok(missing.map(|path| format!("node {node} has lost {}", path.display())))
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
