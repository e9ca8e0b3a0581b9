//! The place of this process's part of a run: its node, and what the first rank has found of the run.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use swapper::{Daemon, Nodes};

use super::each_node::EachNode;
use super::probe::{PROBE_WAIT, seen};
use super::{RunError, StartPoint};
use crate::accelerator::{AskTorch, without_torch};
use crate::config::RunSettings;
use training_state::metrics::MetricsFile;
use training_state::ranks::Ranks;
use training_state::run::{
    CheckpointName, Checkpoints, DirError, INCOMPLETE, Origin, RunDescription, RunDir, RunId,
    resolved,
};
use training_state::store::{StoreFiles, job_at};

/// The place of this process's part of a run.
#[derive(Clone)]
pub struct Site {
    pub ranks: Ranks,
    /// Directory of the run: that of its first node, with metrics and checkpoints.
    pub whole_dir: PathBuf,
    /// Connection of the nodes, if there are several.
    pub nodes: Option<Nodes>,
    /// The nodes' directories, if every node keeps the checkpoints in its own.
    pub each_node: Option<EachNode>,
    pub found: ExistingRun,
    /// What the process knows about torch.
    pub torch: AskTorch,
}

/// What there is of the run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ExistingRun {
    /// Identity of the run, chosen now if it is new.
    pub(super) id: RunId,
    /// The run whose directory was copied to make this one, if any.
    pub(super) copy_of: Option<PathBuf>,
    /// Tile size of the run, if it exists.
    pub(super) tile_elems: Option<u64>,
    /// When the run last took its state from initial weights or a checkpoint, if it exists.
    pub(super) begun_unix_ms: Option<u64>,
}

impl ExistingRun {
    /// Looks for the run in `dir`. `is_fresh` ignores all but its identity.
    ///
    /// # Errors
    /// `run.json` cannot be read.
    pub fn in_dir(dir: &Path, is_fresh: bool) -> Result<Self, RunError> {
        let (id, origin) = RunId::for_dir(dir);
        let earlier = match RunDir::described(dir) {
            // A fresh start removes the file, so it need not be readable.
            Err(_) if is_fresh => None,
            described => described?,
        };
        let begun_unix_ms = earlier.as_ref().map(|run| run.begun_unix_ms);
        let earlier = earlier.filter(|_| !is_fresh);
        Ok(Self {
            id,
            copy_of: match origin {
                Origin::CopyOf(of) => Some(of),
                _ => None,
            },
            tile_elems: earlier.and_then(|run| run.layout["tile_elems"].as_u64()),
            begun_unix_ms,
        })
    }

    /// Name of the run's job on the first node, which identifies the run.
    pub fn run(&self) -> &str {
        &self.id.job
    }
}

impl Site {
    /// The place of a process that reads the run in `dir` alone.
    ///
    /// # Errors
    /// Same as [`ExistingRun::in_dir`].
    pub fn alone(dir: &Path) -> Result<Self, RunError> {
        Ok(Self {
            ranks: Ranks::alone(),
            whole_dir: dir.to_owned(),
            nodes: None,
            each_node: None,
            found: ExistingRun::in_dir(dir, false)?,
            torch: without_torch,
        })
    }

    pub fn checkpoints(&self) -> Checkpoints {
        Checkpoints::in_run_dir(&self.whole_dir)
    }

    /// Whether this rank manages a directory with checkpoints: the first rank, or the first one of each node.
    pub(super) fn manages_checkpoints(&self) -> bool {
        match self.each_node {
            Some(_) => self.ranks.is_first_of_node(),
            None => self.ranks.is_first(),
        }
    }

    /// Copies the files that describe the run from the first node, if every node keeps the checkpoints. All ranks must call it.
    ///
    /// # Errors
    /// A file cannot be read or written; a rank is gone.
    pub(super) fn share_files(&self) -> Result<(), RunError> {
        let Some(each_node) = &self.each_node else {
            return Ok(());
        };
        let what = "copying the run's files to all nodes";
        self.ranks
            .on_all_ranks(what, || match self.ranks.is_first_of_node() {
                true => Ok(each_node.dirs.share(0)?),
                false => Ok(()),
            })
    }

    /// Returns whether the node's part of the run, which `earlier` describes, is older than the run.
    fn is_outdated(&self, earlier: &RunDescription) -> bool {
        let begun = self.found.begun_unix_ms;
        self.each_node.is_some() && begun.is_some_and(|begun| begun != earlier.begun_unix_ms)
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
            Some(earlier) if resumes && self.is_outdated(&earlier) => Err(DirError::Outdated {
                node: self.ranks.node(),
                path: run_dir.to_owned(),
            }
            .into()),
            _ => Ok(()),
        }
    }

    /// Finds where [`StartPoint::Newest`] begins: at the stores of all nodes, or at the newest checkpoint if a node's directory shows
    /// that they cannot be resumed from. The first rank also gets a line that says why. All ranks must call it.
    ///
    /// # Errors
    /// A directory cannot be read; a rank is gone.
    pub fn newest(&self, settings: &RunSettings) -> Result<(StartPoint, Option<String>), RunError> {
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
            return Ok((StartPoint::GoOn, None));
        };
        let mut note = None;
        let step = ranks.by_first::<_, RunError>("looking for the newest checkpoint", || {
            let newest = match &self.each_node {
                Some(each_node) => each_node.newest(),
                None => self.checkpoints().list()?.pop().map(|newest| newest.step),
            };
            let Some(newest) = newest else {
                return Ok(None);
            };
            let steps = MetricsFile::last_step(&self.whole_dir);
            note = Some(format!(
                "note: {}: resuming from the newest checkpoint, of step {}; {} step(s) are repeated",
                String::from_utf8_lossy(&problem),
                newest,
                steps.saturating_sub(newest)
            ));
            Ok(Some(newest))
        })?;
        // Without a checkpoint the run is new, or refused with the problem.
        let start = step.map_or(StartPoint::GoOn, |step| {
            StartPoint::Checkpoint(CheckpointName::Step(step))
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
        if self.is_outdated(&earlier) {
            return Ok(Some(format!(
                "the state of node {node} is older than the run"
            )));
        }
        let job = self.found.id.of_node(node, &run_dir).job;
        if let Some(socket) = &settings.offload.socket {
            // The start itself reports a daemon that cannot be asked.
            let Ok(daemon) = Daemon::connect(socket) else {
                return Ok(None);
            };
            let found = job_at(&daemon, &job)?;
            let has_state = found.is_some_and(|found| found.newest_generation.0 > 0);
            let socket = socket.display();
            let words = || format!("the store of the daemon on {socket} has no state of job {job}");
            return Ok((!has_state).then(words));
        }
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
        let (ranks, dir) = (&self.ranks, &self.whole_dir);
        let seen = seen(ranks, dir, PROBE_WAIT)?;
        ranks.on_all_ranks("looking for the run's directory", || match seen.first() {
            Some(false) => Err(RunError::NotShared {
                node: ranks.node(),
                run_dir: dir.clone(),
            }),
            _ => Ok(()),
        })
    }
}
