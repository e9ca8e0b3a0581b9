//! The directories of a run whose nodes share none: every node keeps every checkpoint whole, and a copy of the small files that
//! describe the run.
//!
//! ```text
//!   a start      held ─▶ meet ─▶ update: nodes that missed a beginning get the run's files ─▶ bring: all nodes get one checkpoint
//!   a checkpoint each rank: tiles.RANK ─▶ finish: the nodes exchange files ─▶ each node: rename
//! ```
//!
//! A run *begins* when it takes its state from initial weights or from a checkpoint; `run.json` has the time. The nodes with the
//! newest beginning are *current*. What another node holds may belong to steps that were given up, so it counts only if it is asked
//! for by its step.

use std::fs;
use std::path::{Path, PathBuf};

use offload_support::units::ApproxBytes;
use serde::{Deserialize, Serialize};
use test_hooks::kill_point::{Point, reach};

use super::checkpoint::DESCRIPTION;
use super::copies::{SentFile, agree, copy};
use super::dir;
use super::dir_error::INCOMPLETE;
use super::identity;
use super::{
    Checkpoint, CheckpointDescription, CheckpointError, Checkpoints, ModelFiles, RunDir, RunId,
    SavedFile,
};
use crate::metrics::MetricsFile;
use crate::ranks::Ranks;

/// The run's directory on each node, seen from the first rank of one.
#[derive(Clone)]
pub struct NodeDirs {
    /// The first ranks of the nodes, numbered like their nodes.
    nodes: Ranks,
    run_dir: PathBuf,
    checkpoints: Checkpoints,
}

/// What a node's directory holds of the run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct NodeContents {
    job: Option<String>,
    begun_unix_ms: Option<u64>,
    checkpoints: Vec<HeldCheckpoint>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct HeldCheckpoint {
    step: u64,
    /// Bytes of its files with tiles.
    bytes: u64,
    /// Fingerprint of its description, which has those of all its other files.
    fingerprint: u64,
}

impl NodeContents {
    /// Reads what `run_dir` holds. A checkpoint that is not whole does not count.
    ///
    /// # Errors
    /// The directory of the checkpoints cannot be read.
    pub fn read(run_dir: &Path) -> Result<Self, CheckpointError> {
        let described = RunDir::described(run_dir).ok().flatten();
        let checkpoints = Checkpoints::in_run_dir(run_dir).list()?.into_iter();
        let checkpoints = checkpoints.filter_map(|found| {
            let (opened, fingerprint) = Checkpoint::whole(&found.path)?;
            Some(HeldCheckpoint {
                step: found.step,
                bytes: opened.description.bytes(),
                fingerprint,
            })
        });
        Ok(Self {
            job: RunId::kept(run_dir).map(|id| id.job),
            begun_unix_ms: described.map(|described| described.begun_unix_ms),
            checkpoints: checkpoints.collect(),
        })
    }

    fn checkpoint(&self, step: u64) -> Option<&HeldCheckpoint> {
        self.checkpoints.iter().find(|held| held.step == step)
    }

    fn newest(&self) -> Option<u64> {
        self.checkpoints.iter().map(|held| held.step).max()
    }
}

/// What the nodes' directories hold, by node.
#[derive(Clone, Debug)]
pub struct HeldByNodes(Vec<NodeContents>);

impl HeldByNodes {
    /// Nodes in the order in which what they hold counts: the newest beginning first, then the lowest number.
    fn in_order(&self) -> Vec<usize> {
        let mut nodes: Vec<usize> = (0..self.0.len()).collect();
        nodes.sort_by_key(|&node| std::cmp::Reverse(self.0[node].begun_unix_ms));
        nodes
    }

    fn is_current(&self, node: usize) -> bool {
        let newest = self.0.iter().map(|held| held.begun_unix_ms).max();
        Some(self.0[node].begun_unix_ms) == newest
    }

    /// Step of the newest checkpoint of the current nodes.
    pub fn newest(&self) -> Option<u64> {
        let current = (0..self.0.len()).filter(|&node| self.is_current(node));
        current.filter_map(|node| self.0[node].newest()).max()
    }

    /// The node whose checkpoint of `step` counts.
    fn holder(&self, step: u64) -> Option<(usize, &HeldCheckpoint)> {
        let mut nodes = self.in_order().into_iter();
        // The other nodes have moved newer ones aside.
        let counts = |node: usize| self.is_current(node) || Some(step) <= self.newest();
        nodes.find_map(|node| {
            let held = self.0[node].checkpoint(step).filter(|_| counts(node))?;
            Some((node, held))
        })
    }
}

impl NodeDirs {
    /// `nodes` has the first ranks of the nodes, which have the run in `run_dir`.
    pub fn new(nodes: Ranks, run_dir: &Path) -> Self {
        Self {
            nodes,
            run_dir: run_dir.to_owned(),
            checkpoints: Checkpoints::in_run_dir(run_dir),
        }
    }

    /// Number of nodes.
    pub fn count(&self) -> u32 {
        self.nodes.count()
    }

    fn me(&self) -> usize {
        self.nodes.rank() as usize
    }

    /// Tells the other nodes what this one holds.
    ///
    /// # Errors
    /// A node is gone.
    pub fn meet(&self, own: &NodeContents) -> Result<HeldByNodes, CheckpointError> {
        let own = serde_json::to_vec(own).expect("plain data");
        let all = self.nodes.messages(own)?;
        let all = all.iter().map(|held| {
            let held = serde_json::from_slice(held);
            held.expect("the same program on every node")
        });
        Ok(HeldByNodes(all.collect()))
    }

    /// Gives the run's files to the nodes that are not current, and moves their checkpoints aside that are newer than those of the
    /// current nodes. Returns the directory of this node's. Does nothing if the nodes hold different runs.
    ///
    /// # Errors
    /// A node cannot write; a node is gone.
    pub fn update(&self, all: &HeldByNodes) -> Result<Option<PathBuf>, CheckpointError> {
        let source = all.in_order()[0];
        let job = |node: usize| all.0[node].job.as_ref();
        let is_one_run =
            || (0..all.0.len()).all(|node| job(node).is_none_or(|_| job(node) == job(source)));
        if all.0[source].begun_unix_ms.is_none() || !is_one_run() {
            return Ok(None);
        }
        let mut aside = Ok(None);
        if !all.is_current(self.me()) {
            let (newest, metrics) = (all.newest().unwrap_or(0), MetricsFile::path(&self.run_dir));
            aside = self.checkpoints.set_aside_after(newest, &metrics);
        }
        let (aside, moved) = match aside {
            Ok(aside) => (aside, Ok(())),
            Err(error) => (None, Err(error)),
        };
        agree(&self.nodes, moved)?;
        self.share(source as u32)?;
        Ok(aside)
    }

    /// Copies the files that describe the run from the directory of `source` to those of the other nodes.
    ///
    /// # Errors
    /// A file cannot be read or written; a node is gone.
    pub fn share(&self, source: u32) -> Result<(), CheckpointError> {
        let own = match self.nodes.rank() == source {
            true => run_files(&self.run_dir),
            false => Ok(Vec::new()),
        };
        copy(&self.nodes, &self.run_dir, own, true)
    }

    /// Step of the checkpoint with the lowest validation loss in this node's metrics, among those that a node has.
    pub fn best(&self, all: &HeldByNodes) -> Option<u64> {
        let past = MetricsFile::evaluations(&self.run_dir, None).into_iter();
        let with_checkpoint = past.filter(|(step, _)| all.holder(*step).is_some());
        let best = with_checkpoint.min_by(|a, b| a.1.total_cmp(&b.1));
        best.map(|(step, _)| step)
    }

    /// Copies the checkpoint of `step` to the nodes that lack it, or have another one of this step, and says so. Does nothing if no
    /// node has it.
    ///
    /// # Errors
    /// A node has too little space, before anything is written; its file is damaged; a node is gone.
    pub fn restore(
        &self,
        all: &HeldByNodes,
        step: u64,
        say: &dyn Fn(String),
    ) -> Result<(), CheckpointError> {
        let Some((source, held)) = all.holder(step) else {
            return Ok(());
        };
        let has = |of: &NodeContents| {
            let own = of.checkpoint(step);
            own.is_some_and(|own| own.fingerprint == held.fingerprint)
        };
        let lacking = (0..).zip(&all.0).filter(|(_, held)| !has(held));
        let lacking: Vec<String> = lacking
            .map(|(node, _): (u32, _)| node.to_string())
            .collect();
        if lacking.is_empty() {
            return Ok(());
        }
        say(format!(
            "copying the checkpoint of step {step}, {}, from node {source} to node {}",
            ApproxBytes(held.bytes),
            lacking.join(", ")
        ));
        let lacks = !has(&all.0[self.me()]);
        let begun = match lacks {
            true => self.checkpoints.begin(step, held.bytes, false),
            false => Ok(()),
        };
        let own = begun.and_then(|()| match self.me() == source {
            true => {
                let dir = self.checkpoints.at(step)?;
                let files = Checkpoint::open(&dir, 0)?.description.files;
                self.checkpoint_files(step, &dir, &files, true)
            }
            false => Ok(Vec::new()),
        });
        let copied = copy(&self.nodes, &self.run_dir, own, lacks);
        let named = copied.and_then(|()| match lacks {
            true => self.checkpoints.name(step).map(drop),
            false => Ok(()),
        });
        if lacks && named.is_err() {
            self.checkpoints.abandon(step);
        }
        agree(&self.nodes, named)
    }

    /// Completes the checkpoint of `step` on every node. Each node has begun it and sends `files`, which its ranks have written; the
    /// first one describes it.
    ///
    /// # Errors
    /// A drive is full or fails, on this or another node; a node is gone.
    pub fn finish(
        &self,
        step: u64,
        description: Option<&CheckpointDescription>,
        files: &[SavedFile],
    ) -> Result<PathBuf, CheckpointError> {
        let partial = self.checkpoints.partial(step);
        let own = match description {
            None => self.checkpoint_files(step, &partial, files, false),
            Some(description) => description.write(&partial).and_then(|()| {
                let mut own = self.checkpoint_files(step, &partial, files, true)?;
                own.extend(run_files(&self.run_dir)?);
                Ok(own)
            }),
        };
        copy(&self.nodes, &self.run_dir, own, true)?;
        reach(Point::NamingCheckpoint);
        self.checkpoints.name(step)
    }

    /// Files of the checkpoint of `step` to send from `dir`, and its description too if it `is_described`. Other nodes receive them as
    /// a checkpoint that is being written.
    fn checkpoint_files(
        &self,
        step: u64,
        dir: &Path,
        files: &[SavedFile],
        is_described: bool,
    ) -> Result<Vec<SentFile>, CheckpointError> {
        let partial = self.checkpoints.partial(step);
        let below = partial.strip_prefix(&self.run_dir);
        let below = below.expect("checkpoints are in the run's directory");
        let sent = files.iter().map(|file| SentFile {
            name: below.join(&file.name),
            ..SentFile::of_tiles(dir, file)
        });
        let mut sent: Vec<SentFile> = sent.collect();
        if is_described {
            let path = dir.join(DESCRIPTION);
            let text = fs::read(&path).map_err(CheckpointError::io("read", &path))?;
            sent.push(SentFile::from_contents(below.join(DESCRIPTION), text));
        }
        Ok(sent)
    }
}

/// The files that describe the run in `run_dir`, for other nodes. `run.json` comes last: a node that has it has the others.
fn run_files(run_dir: &Path) -> Result<Vec<SentFile>, CheckpointError> {
    let metrics = MetricsFile::path(run_dir);
    let mut paths = vec![
        run_dir.join(identity::NAME),
        metrics,
        run_dir.join(dir::SETTINGS),
    ];
    let model = ModelFiles::in_run_dir(run_dir);
    paths.extend(
        fs::read_dir(model.dir())
            .into_iter()
            .flatten()
            .flatten()
            .map(|file| file.path()),
    );
    let below = |path: &Path| {
        let below = path.strip_prefix(run_dir);
        below.expect("a path in the directory").to_owned()
    };
    let mut files = Vec::new();
    for path in paths {
        match fs::read(&path) {
            Ok(contents) => files.push(SentFile::from_contents(below(&path), contents)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(source) => return Err(CheckpointError::io("copy", &path)(source)),
        }
    }
    if let Some(mut description) = RunDir::described(run_dir)? {
        // The state in stores is that of the node itself.
        description.nodes = INCOMPLETE;
        description.files.clear();
        let text = serde_json::to_vec_pretty(&description).expect("plain data");
        files.push(SentFile::from_contents(
            below(&dir::description_path(run_dir)),
            text,
        ));
    }
    Ok(files)
}

#[cfg(test)]
mod tests;
