//! Makes checkpoints during training: tiles are copied as a step updates them and written while the next
//! steps run. They become a checkpoint when all ranks' files are on their drive.
//!
//! ```text
//!   begin ─▶ each rank: copies ─▶ tiles.RANK, flushed ─▶ all ranks done ─▶ first rank: checkpoint.json, rename ─▶ old ones removed
//!   before    while updates run        during the next steps                     during the next steps
//!   the updates
//! ```
//!
//! If the nodes share no directory and every node keeps the checkpoints ([`NodeDirs`]), the ranks of a node write into the node's
//! directory. When all have written, the first rank of each node sends their files to the other nodes, receives those of the others, and
//! names the node's checkpoint.
//!
//! While a checkpoint is being made, ranks exchange their progress at the end of each step. A failure on one
//! rank ends the checkpoint on all ranks; it is logged and counted, and training continues. Tiles that the
//! host does not update (all in a GPU's memory, or after the last step) are read separately.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use offload_support::units::{ApproxBytes, CountOf};
use serde_json::Value;
use test_hooks::kill_point::{Point, reach};

use crate::backend::{BackendError, TileBackend};
use crate::checkpoint_tap::{CheckpointTap, CopyReceiver};
use crate::ranks::{RankError, Ranks};
use crate::run::{
    CheckpointDescription, CheckpointError, Checkpoints, NodeDirs, RunState, SavedFile, TileWriter,
};

/// Checkpoints of one run, and the one being made.
pub struct Checkpointer {
    parts: CheckpointerParts,
    ranks: Ranks,
    under_way: Option<UnderWay>,
    newest: Option<u64>,
    /// Step of the checkpoint that is kept besides the newest ones.
    spared: Option<u64>,
    /// Errors by step; a checkpoint that is made after all removes its error.
    failures: BTreeMap<u64, String>,
    /// Whether the next checkpoint is tried in the other directory first, because writing one failed here.
    elsewhere_first: bool,
    rate: Option<f64>,
}

/// Parameters of a [`Checkpointer`].
pub struct CheckpointerParts {
    /// Those in the directory that all nodes share, or in that of this node.
    pub checkpoints: Checkpoints,
    /// The nodes' directories, if every node keeps the checkpoints in its own. Used by the first rank of each node.
    pub node_dirs: Option<NodeDirs>,
    pub checkpoint_tap: CheckpointTap,
    /// Number of newest checkpoints to keep; 0: all.
    pub kept: u64,
    pub layout: Value,
    /// Number of ranges that this rank writes; `None` if the first rank writes for all.
    pub ranges: Option<usize>,
    /// Bytes of all ranks' tiles.
    pub tile_bytes: u64,
    /// Prints a line for people; called on the rank that reports.
    pub say: Box<dyn Fn(&str) + Send>,
}

/// Checkpoints that failed while training went on.
#[derive(Debug, thiserror::Error)]
#[error("{} could not be made; the first error: {first}", CountOf(*count, "checkpoint"))]
pub struct CheckpointsFailed {
    count: u64,
    first: String,
}

/// Checkpoint being made.
struct UnderWay {
    step: u64,
    began: Instant,
    /// State after the step, set once its metrics are known.
    state: Option<RunState>,
    /// This rank's file once it is on the drive.
    file: Option<SavedFile>,
    work: Work,
}

/// Progress of this rank's part.
enum Work {
    Writing(JoinHandle<Result<SavedFile, CheckpointError>>),
    Written,
    /// A rank that manages the directory completes the checkpoint after all ranks have written.
    Finishing(JoinHandle<Result<PathBuf, CheckpointError>>),
    Finished(PathBuf),
    Failed(CheckpointError),
}

/// Progress of a rank in the exchange: one of the constants below, then bytes and fingerprint of its file, or
/// zeros.
type CopyProgress = [u64; 3];

const WORKING: u64 = 0;
const WRITTEN: u64 = 1;
const FINISHED: u64 = 2;
const FAILED: u64 = 3;

impl Checkpointer {
    /// Makes a checkpointer for a run whose newest checkpoint is of step `newest`.
    pub fn new(parts: CheckpointerParts, newest: Option<u64>, ranks: Ranks) -> Self {
        Self {
            parts,
            ranks,
            under_way: None,
            newest,
            spared: None,
            failures: BTreeMap::new(),
            elsewhere_first: false,
            rate: None,
        }
    }

    /// Returns whether a checkpoint of `step` exists or is being made.
    pub fn has(&self, step: u64) -> bool {
        let under_way = self.under_way.as_ref().map(|checkpoint| checkpoint.step);
        self.newest == Some(step) || under_way == Some(step)
    }

    /// Keeps the checkpoint of `step` besides the newest ones, instead of the one spared before.
    pub fn spare(&mut self, step: u64) {
        self.spared = Some(step);
    }

    /// Bytes per second of the newest checkpoint, from its step to its last flush.
    pub fn rate(&self) -> Option<f64> {
        self.rate
    }

    /// Begins the checkpoint of `step`, whose updates are about to run: updated tiles are copied from now on.
    /// Waits for a checkpoint that is still being made. Returns false if the checkpoint cannot be made.
    ///
    /// # Errors
    /// A rank is gone.
    pub fn begin(&mut self, step: u64) -> Result<bool, RankError> {
        self.settle()?;
        let began = Instant::now();
        let refused = (self.ranks).on_all_ranks("making room for a checkpoint", || {
            let begun = match self.manages(self.ranks.rank()) {
                true => (self.parts.checkpoints).begin(
                    step,
                    self.parts.tile_bytes,
                    self.elsewhere_first,
                ),
                false => Ok(()),
            };
            Ok::<_, RankError>(begun.err().map(|error| error.to_string()))
        })?;
        let refused = self.ranks.messages(refused.unwrap_or_default().into())?;
        if let Some((rank, why)) = (0..).zip(refused).find(|(_, why)| !why.is_empty()) {
            let why = String::from_utf8_lossy(&why);
            match self.parts.node_dirs {
                Some(_) => self.failed(step, format!("node {}: {why}", self.ranks.node_of(rank))),
                None => self.failed(step, why.into_owned()),
            }
            self.remove(step);
            return Ok(false);
        }
        let work = match self.parts.ranges {
            None => Work::Written,
            Some(count) => {
                match TileWriter::create(&self.parts.checkpoints.partial(step), self.ranks.rank()) {
                    Ok(writer) => {
                        let taken = self.parts.checkpoint_tap.want(count);
                        Work::Writing(std::thread::spawn(move || write(writer, &taken, count)))
                    }
                    Err(error) => Work::Failed(error),
                }
            }
        };
        self.under_way = Some(UnderWay {
            step,
            began,
            state: None,
            file: None,
            work,
        });
        Ok(true)
    }

    /// Copies all tiles of `backend` for the begun checkpoint, instead of waiting for their updates.
    ///
    /// # Errors
    /// The backend fails.
    pub fn visit<S, G>(&self, backend: &mut TileBackend<S, G>) -> Result<(), BackendError> {
        let checkpoint_tap = &self.parts.checkpoint_tap;
        backend.visit(&mut |range, param, state| checkpoint_tap.offer(range, param, state))
    }

    /// Copies the tiles of `backend` that the host does not see when it updates them.
    ///
    /// # Errors
    /// The GPU fails.
    pub fn visit_updated_elsewhere<S, G>(
        &self,
        backend: &mut TileBackend<S, G>,
    ) -> Result<(), BackendError> {
        let checkpoint_tap = &self.parts.checkpoint_tap;
        backend.visit_updated_elsewhere(&mut |range, param, state| {
            checkpoint_tap.offer(range, param, state);
        })
    }

    /// Stops copying, because the updates of another step are about to run.
    pub fn all_came(&self) {
        self.parts.checkpoint_tap.stop();
    }

    /// Sets the state of the checkpoint being made, if it is of the same step.
    pub fn set_state(&mut self, state: &RunState) {
        if let Some(checkpoint) = self
            .under_way
            .as_mut()
            .filter(|checkpoint| checkpoint.step == state.step)
        {
            checkpoint.state = Some(state.clone());
        }
    }

    /// Exchanges progress with all ranks and advances the checkpoint under way. Does not wait for drives.
    ///
    /// # Errors
    /// A rank is gone.
    pub fn advance(&mut self) -> Result<(), RankError> {
        let Some(checkpoint) = &mut self.under_way else {
            return Ok(());
        };
        if checkpoint.has_ended() {
            checkpoint.wait();
        }
        let told = checkpoint.told();
        let all = self.ranks.numbers(told)?;
        self.apply_progress(&all);
        Ok(())
    }

    /// Waits until no checkpoint is being made.
    ///
    /// # Errors
    /// A rank is gone.
    pub fn settle(&mut self) -> Result<(), RankError> {
        while let Some(checkpoint) = &mut self.under_way {
            self.parts.checkpoint_tap.stop();
            if checkpoint.state.is_none() {
                let why = "its step did not finish".into();
                let path = self.parts.checkpoints.partial(checkpoint.step);
                checkpoint.work = Work::Failed(CheckpointError::Abandoned { path, why });
            }
            self.ranks.on_all_ranks("finishing a checkpoint", || {
                checkpoint.wait();
                Ok::<(), RankError>(())
            })?;
            self.advance()?;
        }
        Ok(())
    }

    /// Returns whether all checkpoints of this start were made.
    ///
    /// # Errors
    /// The number of failures and the first error.
    pub fn result(&self) -> Result<(), CheckpointsFailed> {
        match self.failures.values().next() {
            None => Ok(()),
            Some(first) => Err(CheckpointsFailed {
                count: self.failures.len() as u64,
                first: first.clone(),
            }),
        }
    }

    /// Advances according to all ranks' progress; every rank gets the same result.
    fn apply_progress(&mut self, all: &[CopyProgress]) {
        let is = |word: u64| move |told: &CopyProgress| told[0] == word;
        if let Some(rank) = all.iter().position(is(FAILED)) {
            return self.abandon(rank);
        }
        let Some(checkpoint) = &self.under_way else {
            return;
        };
        let mut managing = (0..).zip(all).filter(|(rank, _)| self.manages(*rank));
        if managing.all(|(_, told)| is(FINISHED)(told)) {
            let seconds = checkpoint.began.elapsed().as_secs_f64();
            let bytes: u64 = all.iter().map(|told| told[1]).sum();
            self.rate = Some(bytes as f64 / seconds.max(1e-9));
            if let Work::Finished(path) = &checkpoint.work {
                let (step, path) = (checkpoint.step, path.display());
                let copies = self.parts.node_dirs.as_ref();
                let copies = copies.map_or(String::new(), |dirs| {
                    format!(" on each of {} nodes", dirs.count())
                });
                (self.parts.say)(&format!(
                    "checkpoint of step {step} in {path}{copies}: {}, {seconds:.1} s",
                    ApproxBytes(bytes)
                ));
            }
            self.newest = Some(checkpoint.step);
            self.failures.remove(&checkpoint.step);
            self.under_way = None;
            return;
        }
        let (Work::Written, Some(state), true) = (
            &checkpoint.work,
            &checkpoint.state,
            self.manages(self.ranks.rank()) && all.iter().all(is(WRITTEN)),
        ) else {
            return;
        };
        let step = checkpoint.step;
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let files = all.iter().zip(0..).filter(|(told, _)| told[1] > 0);
        let files = files.map(|(told, rank)| (rank, SavedFile::of_rank(rank, told[1], told[2])));
        let (own, others): (Vec<_>, Vec<_>) =
            files.partition(|(rank, _)| self.ranks.local().contains(rank));
        let own: Vec<SavedFile> = own.into_iter().map(|(_, file)| file).collect();
        let others = others.into_iter().map(|(_, file)| file);
        let description = self.ranks.is_first().then(|| CheckpointDescription {
            step,
            unix_s: since.map_or(0, |since| since.as_secs()),
            layout: self.parts.layout.clone(),
            state: serde_json::to_value(state).expect("plain data"),
            files: own.iter().cloned().chain(others).collect(),
        });
        let (checkpoints, kept) = (self.parts.checkpoints.clone(), self.parts.kept);
        let (node_dirs, spared) = (self.parts.node_dirs.clone(), self.spared);
        let finish = move || {
            let path = match node_dirs {
                Some(dirs) => dirs.finish(step, description.as_ref(), &own)?,
                None => {
                    let description = description.expect("the first rank manages the directory");
                    reach(Point::NamingCheckpoint);
                    checkpoints.finish(&description)?
                }
            };
            reach(Point::CheckpointNamed);
            checkpoints.keep(kept, step, spared)?;
            Ok(path)
        };
        if let Some(checkpoint) = &mut self.under_way {
            checkpoint.work = Work::Finishing(std::thread::spawn(finish));
        }
    }

    /// Returns whether `rank` manages a directory with the checkpoint: the first rank, or the first one of each node.
    fn manages(&self, rank: u32) -> bool {
        match self.parts.node_dirs {
            Some(_) => self.ranks.first_ranks().contains(&rank),
            None => rank == 0,
        }
    }

    /// Removes the unfinished checkpoint of `step`.
    fn remove(&self, step: u64) {
        if self.manages(self.ranks.rank()) {
            self.parts.checkpoints.abandon(step);
        }
    }

    /// Ends the checkpoint being made, which failed on `rank`, and removes its files.
    fn abandon(&mut self, rank: usize) {
        self.parts.checkpoint_tap.stop();
        let Some(mut checkpoint) = self.under_way.take() else {
            return;
        };
        // The writer ends when the copies end.
        checkpoint.wait();
        let step = checkpoint.step;
        let why = match &checkpoint.work {
            Work::Failed(error) => error.to_string(),
            _ => format!(
                "rank {rank} could not write the checkpoint of step {step}: see its own message"
            ),
        };
        self.failed(step, why);
        self.elsewhere_first = !self.elsewhere_first && self.parts.checkpoints.has_elsewhere();
        self.remove(checkpoint.step);
    }

    /// Logs the failure at once, because the run may continue for days. Another attempt at the same step is not logged again.
    fn failed(&mut self, step: u64, why: String) {
        if !self.failures.contains_key(&step) {
            tracing::error!("{why}; earlier checkpoints are kept");
        }
        self.failures.insert(step, why);
    }

    /// Why the checkpoint of `step` could not be made.
    pub fn failure_of(&self, step: u64) -> Option<&str> {
        self.failures.get(&step).map(String::as_str)
    }

    /// Whether the next attempt is made in another directory than the last one.
    pub fn turns_elsewhere(&self) -> bool {
        self.elsewhere_first
    }

    /// Step of the newest checkpoint in the directory.
    pub fn newest_kept(&self) -> Option<u64> {
        let checkpoints = self.parts.checkpoints.list();
        Some(checkpoints.ok()?.pop()?.step)
    }
}

impl UnderWay {
    fn has_ended(&self) -> bool {
        match &self.work {
            Work::Writing(thread) => thread.is_finished(),
            Work::Finishing(thread) => thread.is_finished(),
            _ => false,
        }
    }

    /// Waits for this rank's current work.
    fn wait(&mut self) {
        self.work = match std::mem::replace(&mut self.work, Work::Written) {
            Work::Writing(thread) => match joined(thread) {
                Ok(file) => {
                    self.file = Some(file);
                    Work::Written
                }
                Err(error) => Work::Failed(error),
            },
            Work::Finishing(thread) => joined(thread).map_or_else(Work::Failed, Work::Finished),
            still => still,
        };
    }

    fn told(&self) -> CopyProgress {
        let word = match &self.work {
            Work::Writing(_) | Work::Finishing(_) => WORKING,
            Work::Written => WRITTEN,
            Work::Finished(_) => FINISHED,
            Work::Failed(_) => FAILED,
        };
        let file = self.file.as_ref();
        let [bytes, fingerprint] = file.map_or([0; 2], |file| [file.bytes, file.fingerprint]);
        [word, bytes, fingerprint]
    }
}

/// Writes `count` copies as they arrive.
fn write(
    mut writer: TileWriter,
    taken: &CopyReceiver,
    count: usize,
) -> Result<SavedFile, CheckpointError> {
    for done in 0..count {
        let Ok(copy) = taken.full.recv() else {
            return Err(CheckpointError::Abandoned {
                path: writer.path().to_owned(),
                why: format!("received only {done} of {count} tiles"),
            });
        };
        let (param, state) = copy.bytes.split_at(copy.param_bytes);
        writer.add(&copy.range, param, state)?;
        reach(Point::Checkpointing);
        // The tap may have ended.
        let _ = taken.empty.send(copy.bytes);
    }
    writer.finish()
}

fn joined<T>(thread: JoinHandle<T>) -> T {
    thread
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
