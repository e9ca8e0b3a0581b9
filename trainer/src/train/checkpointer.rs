//! Checkpoints beside training: tiles are copied as the step's updates touch them, written while the next steps run, and become a
//! save when all ranks' files are on their drive.
//!
//! ```text
//!   begin ─▶ each rank: copies ─▶ tiles.RANK, flushed ─▶ all have theirs ─▶ first rank: save.json, the name ─▶ old ones go
//!   before    while updates run        beside the next steps                     beside the next steps
//!   the updates
//! ```
//!
//! Ranks tell each other how far they are at the end of each step while a checkpoint is under way. What fails on one ends that checkpoint
//! on all: it is said, counted, and training goes on. Tiles that nobody updates on the way (all in a GPU's memory, or the last
//! step) are visited instead.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use offload_support::units::ApproxBytes;
use serde_json::Value;
use test_hooks::kill_point::{Point, reach};

use super::TrainError;
use crate::backend::TileBackend;
use crate::checkpoint_tap::{CheckpointTap, Taken};
use crate::ranks::Ranks;
use crate::run::{
    CheckpointDescription, CheckpointError, Checkpoints, RunState, SavedFile, TileWriter,
};

/// Checkpoints of one run, and the one that is being made.
pub(super) struct Checkpointer {
    parts: CheckpointerParts,
    ranks: Arc<Ranks>,
    under_way: Option<UnderWay>,
    newest: Option<u64>,
    failed_count: u64,
    first_failure: Option<String>,
    rate: Option<f64>,
}

/// What a saver is made of.
pub(super) struct CheckpointerParts {
    pub(super) checkpoints: Checkpoints,
    pub(super) checkpoint_tap: CheckpointTap,
    /// Steps between checkpoints; 0: none are due.
    pub(super) every: u64,
    /// How many are kept; 0: all.
    pub(super) kept: u64,
    pub(super) layout: Value,
    /// Ranges of this rank, if it writes any: what every rank has the first one writes.
    pub(super) ranges: Option<usize>,
    /// Of all ranks.
    pub(super) tile_bytes: u64,
}

/// A checkpoint that is being made.
struct UnderWay {
    step: u64,
    began: Instant,
    /// After the step, when its metrics are known.
    state: Option<RunState>,
    /// This rank's, when it is on the drive.
    file: Option<SavedFile>,
    work: Work,
}

/// How far this rank is with it.
enum Work {
    Writing(JoinHandle<Result<SavedFile, CheckpointError>>),
    Written,
    /// The first rank's, when all have written.
    Finishing(JoinHandle<Result<PathBuf, CheckpointError>>),
    Finished(PathBuf),
    Failed(CheckpointError),
}

/// What ranks tell each other: a word, and bytes and fingerprint of the file that was written, if one was.
type Told = [u64; 3];

const WORKING: u64 = 0;
const WRITTEN: u64 = 1;
const FINISHED: u64 = 2;
const FAILED: u64 = 3;

impl Checkpointer {
    /// For a run whose step `newest` has a checkpoint already.
    pub(super) fn new(parts: CheckpointerParts, newest: Option<u64>, ranks: Arc<Ranks>) -> Self {
        Self {
            parts,
            ranks,
            under_way: None,
            newest,
            failed_count: 0,
            first_failure: None,
            rate: None,
        }
    }

    /// Whether `step` is one that is saved.
    pub(super) fn is_due(&self, step: u64) -> bool {
        self.parts.every > 0 && step.is_multiple_of(self.parts.every)
    }

    /// Whether `step` has its checkpoint, or one is being made.
    pub(super) fn has(&self, step: u64) -> bool {
        let under_way = self.under_way.as_ref().map(|checkpoint| checkpoint.step);
        self.newest == Some(step) || under_way == Some(step)
    }

    /// Bytes a second at which the newest checkpoint was made, if one was.
    pub(super) fn rate(&self) -> Option<f64> {
        self.rate
    }

    /// Begins the checkpoint of `step`, whose updates are about to run: from now on updated tiles are copied. False when it cannot be
    /// made. Waits for one that is still under way.
    ///
    /// # Errors
    /// A rank is gone.
    pub(super) fn begin(&mut self, step: u64, say: &dyn Fn(&str)) -> Result<bool, TrainError> {
        self.settle(say)?;
        let began = Instant::now();
        let refused = self.ranks.by_first("making room for a checkpoint", || {
            let begun = self.parts.checkpoints.begin(step, self.parts.tile_bytes);
            Ok(begun.err().map(|error| error.to_string()))
        })?;
        if let Some(why) = refused {
            self.failed(&why);
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

    /// Copies all tiles of `backend` for the checkpoint that was begun, instead of waiting for their updates.
    ///
    /// # Errors
    /// What the tiles' place says.
    pub(super) fn visit(&self, backend: &mut TileBackend) -> Result<(), TrainError> {
        let checkpoint_tap = &self.parts.checkpoint_tap;
        backend.visit(&mut |range, param, state| checkpoint_tap.offer(range, param, state))?;
        Ok(())
    }

    /// The updates of another step are about to run: whatever is copied from here on is not of the checkpoint under way.
    pub(super) fn all_came(&self) {
        self.parts.checkpoint_tap.stop();
    }

    /// The checkpoint under way is of `state`.
    pub(super) fn is_of(&mut self, state: &RunState) {
        if let Some(checkpoint) = self
            .under_way
            .as_mut()
            .filter(|checkpoint| checkpoint.step == state.step)
        {
            checkpoint.state = Some(state.clone());
        }
    }

    /// Looks how far the checkpoint under way is, on all ranks, and goes on with it. Does not wait for drives.
    ///
    /// # Errors
    /// A rank is gone.
    pub(super) fn look(&mut self, say: &dyn Fn(&str)) -> Result<(), TrainError> {
        let Some(checkpoint) = &mut self.under_way else {
            return Ok(());
        };
        if checkpoint.has_ended() {
            checkpoint.wait();
        }
        let told = checkpoint.told();
        let all = self.ranks.numbers(told)?;
        self.go_on(&all, say);
        Ok(())
    }

    /// Waits until no checkpoint is under way. Its tiles were all copied.
    ///
    /// # Errors
    /// A rank is gone.
    pub(super) fn settle(&mut self, say: &dyn Fn(&str)) -> Result<(), TrainError> {
        while let Some(checkpoint) = &mut self.under_way {
            self.parts.checkpoint_tap.stop();
            if checkpoint.state.is_none() {
                let why = "its step did not end".into();
                let path = self.parts.checkpoints.partial(checkpoint.step);
                checkpoint.work = Work::Failed(CheckpointError::GivenUp { path, why });
            }
            self.ranks.together("finishing a checkpoint", || {
                checkpoint.wait();
                Ok(())
            })?;
            self.look(say)?;
        }
        Ok(())
    }

    /// What the run ends with: nothing, or that some checkpoints failed.
    pub(super) fn result(&self) -> Result<(), TrainError> {
        match &self.first_failure {
            None => Ok(()),
            Some(first) => Err(TrainError::Checkpoints {
                count: self.failed_count,
                first: first.clone(),
            }),
        }
    }

    /// All ranks come to the same.
    fn go_on(&mut self, all: &[Told], say: &dyn Fn(&str)) {
        let is = |word: u64| move |told: &Told| told[0] == word;
        if let Some(rank) = all.iter().position(is(FAILED)) {
            return self.give_up(rank);
        }
        let Some(checkpoint) = &mut self.under_way else {
            return;
        };
        if is(FINISHED)(&all[0]) {
            let seconds = checkpoint.began.elapsed().as_secs_f64();
            let bytes: u64 = all.iter().map(|told| told[1]).sum();
            self.rate = Some(bytes as f64 / seconds.max(1e-9));
            if let Work::Finished(path) = &checkpoint.work {
                let (step, path) = (checkpoint.step, path.display());
                say(&format!(
                    "saved step {step} in {path}: {}, {seconds:.1} s",
                    ApproxBytes(bytes)
                ));
            }
            self.newest = Some(checkpoint.step);
            self.under_way = None;
            return;
        }
        let (Work::Written, Some(state), true) = (
            &checkpoint.work,
            &checkpoint.state,
            self.ranks.is_first() && all.iter().all(is(WRITTEN)),
        ) else {
            return;
        };
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let files = all.iter().zip(0..).filter(|(told, _)| told[1] > 0);
        let description = CheckpointDescription {
            step: checkpoint.step,
            unix_s: since.map_or(0, |since| since.as_secs()),
            layout: self.parts.layout.clone(),
            state: serde_json::to_value(state).expect("plain data"),
            files: files
                .map(|(told, rank)| SavedFile::of_rank(rank, told[1], told[2]))
                .collect(),
        };
        let (checkpoints, kept) = (self.parts.checkpoints.clone(), self.parts.kept);
        checkpoint.work = Work::Finishing(std::thread::spawn(move || {
            reach(Point::NamingCheckpoint);
            let path = checkpoints.finish(&description)?;
            reach(Point::CheckpointNamed);
            checkpoints.keep(kept, description.step)?;
            Ok(path)
        }));
    }

    /// The checkpoint under way failed on `rank`: nothing of it stays.
    fn give_up(&mut self, rank: usize) {
        self.parts.checkpoint_tap.stop();
        let Some(mut checkpoint) = self.under_way.take() else {
            return;
        };
        // Its writer is told by the copies' end.
        checkpoint.wait();
        match &checkpoint.work {
            Work::Failed(error) => self.failed(&error.to_string()),
            _ => self.failed(&format!(
                "rank {rank} could not save step {}: see its own message",
                checkpoint.step
            )),
        }
        if self.ranks.is_first() {
            self.parts.checkpoints.give_up(checkpoint.step);
        }
    }

    /// Says so at once: the run may go on for days.
    fn failed(&mut self, why: &str) {
        self.failed_count += 1;
        self.first_failure.get_or_insert_with(|| why.to_owned());
        tracing::error!("{why}. Training goes on, with the checkpoints before");
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

    /// Waits for what this rank is doing.
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

    fn told(&self) -> Told {
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

/// Writes `count` copies as they come.
fn write(
    mut writer: TileWriter,
    taken: &Taken,
    count: usize,
) -> Result<SavedFile, CheckpointError> {
    for done in 0..count {
        let Ok(copy) = taken.full.recv() else {
            return Err(CheckpointError::GivenUp {
                path: writer.path().to_owned(),
                why: format!("{done} of {count} tiles came"),
            });
        };
        let (param, state) = copy.bytes.split_at(copy.param_bytes);
        writer.add(&copy.range, param, state)?;
        reach(Point::Checkpointing);
        // Whoever copies may have done with it.
        let _ = taken.empty.send(copy.bytes);
    }
    writer.finish()
}

fn joined<T>(thread: JoinHandle<T>) -> T {
    thread
        .join()
        .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
