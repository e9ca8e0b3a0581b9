//! Checks free space for a run's checkpoints, beside its store and the weights that it starts with. Without the
//! check, a run whose state lives in memory would train to its end and then lose it.

use std::fmt;
use std::path::{Path, PathBuf};

use offload_support::units::ApproxBytes;
use serde::Serialize;

use super::problems::{Problem, ProblemKind};
use super::{Plan, PlanError};
use crate::config::{FirstWeights, Interval, RunSettings};
use training_state::metrics::MetricsFile;
use training_state::run::{
    CheckpointError, Checkpoints, DirError, RunDir, RunId, SLACK_BYTES, bytes_in,
    first_weights_dir, resolved,
};
use training_state::store::{StoreFiles, file_system, free_bytes};

/// Where a start begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beginning {
    /// At the newest state of the run in the run directory.
    Resumed,
    /// At a checkpoint, of this run or of another one.
    Checkpoint,
    /// With initial weights; what an earlier run left is removed.
    Fresh,
}

impl Beginning {
    /// The beginning of a start without options in `run_dir`.
    pub fn found(run_dir: &Path) -> Self {
        match RunDir::described(run_dir) {
            Ok(None) => Self::Fresh,
            Ok(Some(_)) | Err(_) => Self::Resumed,
        }
    }
}

/// A file system that a start writes to.
#[derive(Clone, Debug, Serialize)]
pub struct FileSystem {
    /// The run's first directory there.
    pub dir: PathBuf,
    /// Free space, with everything that the start removes.
    pub free_bytes: u64,
    /// Space for files of the private store that do not exist yet.
    pub store_bytes: u64,
    /// Space for the copy of another run's weights, until the start is complete.
    pub weights_bytes: u64,
    /// Space for all checkpoints that exist at the same time, beyond those that exist already.
    pub checkpoint_bytes: u64,
}

impl fmt::Display for FileSystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (dir, free) = (self.dir.display(), ApproxBytes(self.free_bytes));
        write!(f, "space     {dir} has {free} free")?;
        let mut lead = "; needs";
        for (bytes, what) in [
            (self.store_bytes, "for the store"),
            (self.weights_bytes, "for copied weights during the start"),
            (self.checkpoint_bytes, "for checkpoints"),
        ] {
            if bytes > 0 {
                write!(f, "{lead} {} {what}", ApproxBytes(bytes))?;
                lead = ",";
            }
        }
        Ok(())
    }
}

impl Plan {
    /// Compares what a start writes with the free space of the file systems, and adds what does not fit to the
    /// problems. Returns a warning when there is room for one checkpoint but not for all: whether the others
    /// fit depends on what else the drive holds by then. `whole_dir` is the directory with the run's checkpoints, which is not
    /// `train.run_dir` on a node other than the first.
    ///
    /// # Errors
    /// The run directory cannot be examined.
    pub fn check_space(
        &mut self,
        settings: &RunSettings,
        whole_dir: &Path,
        beginning: Beginning,
    ) -> Result<Option<String>, PlanError> {
        let run_dir = resolved(&settings.train.run_dir);
        let free_bytes = |dir: &Path| free_bytes(dir).map_err(unreadable(dir));
        let wanted = PlannedCheckpoints::for_start(self, settings, whole_dir, beginning)?;
        let number = file_system(&run_dir).map_err(unreadable(&run_dir))?;
        let mut there = FileSystem {
            dir: run_dir.clone(),
            free_bytes: free_bytes(&run_dir)?
                .saturating_add(removed_bytes(whole_dir, beginning)?)
                .saturating_add(bytes_in(&[first_weights_dir(&run_dir)])),
            store_bytes: 0,
            weights_bytes: self.copied_weights_bytes(settings, beginning),
            checkpoint_bytes: wanted.all_bytes(),
        };
        let mut others = Vec::new();
        let files = self.store_files(settings, &RunId::for_dir(&run_dir).0.job);
        for space in files.iter().flat_map(StoreFiles::space_needed) {
            if space.system == number {
                there.store_bytes = space.needed_bytes;
                continue;
            }
            others.push(FileSystem {
                free_bytes: free_bytes(&space.dir)?,
                dir: space.dir,
                store_bytes: space.needed_bytes,
                weights_bytes: 0,
                checkpoint_bytes: 0,
            });
        }
        let elsewhere = settings.train.checkpoint_dir.as_deref().map(free_bytes);
        let elsewhere_bytes = elsewhere.transpose()?.unwrap_or(0);
        // A store that does not fit is a problem already.
        let judged = match there.store_bytes > there.free_bytes {
            true => Ok(None),
            false => {
                (there.weights_fit()).and_then(|()| match elsewhere_bytes >= wanted.one_bytes() {
                    true => Ok(None),
                    false => wanted.judge(&there),
                })
            }
        };
        self.space = others;
        self.space.push(there);
        self.space.retain(FileSystem::is_written);
        Ok(judged.unwrap_or_else(|problem| {
            self.problems.push(problem);
            None
        }))
    }

    /// Bytes of the copy of another run's weights that a start makes.
    fn copied_weights_bytes(&self, settings: &RunSettings, beginning: Beginning) -> u64 {
        match (&settings.first_weights, beginning) {
            (FirstWeights::Run(_), Beginning::Fresh) => self
                .params_count
                .saturating_mul(4)
                .saturating_add(SLACK_BYTES),
            _ => 0,
        }
    }
}

fn unreadable(dir: &Path) -> impl FnOnce(std::io::Error) -> DirError {
    let path = dir.to_path_buf();
    move |source| DirError::Io {
        verb: "read the free space of",
        path,
        source,
    }
}

/// Bytes of checkpoints that a start removes from the run directory before it writes there.
fn removed_bytes(run_dir: &Path, beginning: Beginning) -> Result<u64, CheckpointError> {
    let checkpoints = Checkpoints::in_run_dir(run_dir);
    let earlier = match beginning {
        Beginning::Fresh => checkpoints.bytes()?,
        Beginning::Resumed | Beginning::Checkpoint => 0,
    };
    Ok(checkpoints.leftover_bytes()? + earlier)
}

impl FileSystem {
    fn is_written(&self) -> bool {
        [self.store_bytes, self.weights_bytes, self.checkpoint_bytes] != [0; 3]
    }

    /// Space that the store leaves free.
    fn left_bytes(&self) -> u64 {
        self.free_bytes.saturating_sub(self.store_bytes)
    }

    /// States the free space, as the beginning of a problem.
    fn has(&self) -> String {
        let (dir, free) = (self.dir.display(), ApproxBytes(self.free_bytes));
        match self.store_bytes {
            0 => format!("the file system of {dir} has {free} free, and"),
            store => format!(
                "the file system of {dir} has {free} free, of which the store takes {}, and",
                ApproxBytes(store)
            ),
        }
    }

    fn weights_fit(&self) -> Result<(), Problem> {
        if self.left_bytes() >= self.weights_bytes {
            return Ok(());
        }
        Err(Problem::new(
            ProblemKind::RunDirSpace,
            format!(
                "model.from: {} a copy of the other run's weights takes {} during the start",
                self.has(),
                ApproxBytes(self.weights_bytes)
            ),
            "free some space, or set a train.run_dir on a larger drive",
        ))
    }
}

/// Checkpoints that a start will make.
struct PlannedCheckpoints {
    /// Bytes of one checkpoint.
    bytes: u64,
    /// Checkpoints that exist at the same time, beyond those that exist already. The oldest is removed after
    /// a new one is complete.
    most: u64,
    /// Whether the last checkpoint is the only place where the run's state is kept.
    at_end: bool,
}

impl PlannedCheckpoints {
    fn for_start(
        plan: &Plan,
        settings: &RunSettings,
        run_dir: &Path,
        beginning: Beginning,
    ) -> Result<Self, CheckpointError> {
        let train = &settings.train;
        let (step, there) = match beginning {
            Beginning::Resumed => {
                let there = Checkpoints::in_run_dir(run_dir).list()?.len();
                (MetricsFile::last_step(run_dir), there as u64)
            }
            Beginning::Checkpoint | Beginning::Fresh => (0, 0),
        };
        let mut wanted = Self::new(
            plan.memory.all_bytes,
            step..train.stop_after,
            match train.checkpoint_every {
                Interval::Never => 0,
                Interval::Steps(steps) => steps,
                // At most one after each step.
                Interval::Epoch | Interval::Seconds(_) => 1,
            },
            train.checkpoints_kept,
            there,
            !settings.placement.has_store(),
        );
        wanted.most += u64::from(train.checkpoint_best);
        // The checkpoint to begin from may be another run's. Without a store, a copy of it is made first.
        wanted.most += u64::from(beginning == Beginning::Checkpoint && wanted.at_end);
        Ok(wanted)
    }

    fn new(
        bytes: u64,
        steps: std::ops::Range<u64>,
        every: u64,
        kept: u64,
        there: u64,
        at_end: bool,
    ) -> Self {
        let due = |step: u64| step.checked_div(every).unwrap_or(0);
        let last = at_end && !steps.is_empty() && (every == 0 || !steps.end.is_multiple_of(every));
        let made = due(steps.end).saturating_sub(due(steps.start)) + u64::from(last);
        let most = match kept {
            0 => made,
            kept => made.min(kept + 1 - there.min(kept)),
        };
        Self {
            bytes,
            most,
            at_end,
        }
    }

    fn one_bytes(&self) -> u64 {
        self.bytes.saturating_add(SLACK_BYTES)
    }

    fn all_bytes(&self) -> u64 {
        self.one_bytes().saturating_mul(self.most)
    }

    /// Compares the checkpoints with the space that the store leaves free. Returns a warning if not all of
    /// them fit.
    fn judge(&self, there: &FileSystem) -> Result<Option<String>, Problem> {
        let (one_bytes, all_bytes) = (self.one_bytes(), self.all_bytes());
        let (needed_bytes, what, change) = if self.at_end {
            (
                all_bytes,
                "the state of this run is kept only in checkpoints there, which take up to",
                "free some space, lower train.checkpoints_kept, set a train.run_dir on a larger drive, or keep the state on nvme",
            )
        } else {
            (
                one_bytes.min(all_bytes),
                "a checkpoint takes",
                "free some space, set a train.run_dir on a larger drive, or train.checkpoint_every = 0",
            )
        };
        let left_bytes = there.left_bytes();
        if left_bytes < needed_bytes {
            return Err(Problem::new(
                ProblemKind::RunDirSpace,
                format!("{} {what} {}", there.has(), ApproxBytes(needed_bytes)),
                change,
            ));
        }
        Ok((left_bytes < all_bytes).then(|| {
            format!(
                "{} up to {} checkpoints of {} take {}: those that do not fit are skipped. Free some space or lower train.checkpoints_kept",
                there.has(),
                self.most,
                ApproxBytes(one_bytes),
                ApproxBytes(all_bytes)
            )
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn most(steps: std::ops::Range<u64>, every: u64, kept: u64, there: u64, at_end: bool) -> u64 {
        PlannedCheckpoints::new(GIB, steps, every, kept, there, at_end).most
    }

    #[test]
    fn checkpoints_that_exist_at_the_same_time_are_counted() {
        // One at the end; none if the end was reached before or the store keeps the state.
        assert_eq!(most(0..100, 0, 2, 0, true), 1);
        assert_eq!(most(100..100, 0, 2, 1, true), 0);
        assert_eq!(most(0..100, 0, 2, 0, false), 0);
        // Two that are kept, and one being written.
        assert_eq!(most(0..100, 10, 2, 0, true), 3);
        assert_eq!(most(50..100, 10, 2, 2, true), 1);
        assert_eq!(most(0..20, 10, 2, 0, true), 2);
        assert_eq!(most(0..25, 10, 0, 0, true), 3);
        assert_eq!(most(0..25, 10, 0, 0, false), 2);
    }

    fn file_system(free_bytes: u64, store_bytes: u64) -> FileSystem {
        FileSystem {
            dir: "/runs/large".into(),
            free_bytes,
            store_bytes,
            weights_bytes: 0,
            checkpoint_bytes: 0,
        }
    }

    fn wanted(at_end: bool) -> PlannedCheckpoints {
        PlannedCheckpoints::new(145 * GIB, 0..100, 10, 2, 0, at_end)
    }

    #[test]
    fn no_room_for_the_only_state_is_an_error_and_for_a_later_checkpoint_a_warning() {
        let refused = |at_end| {
            let there = file_system(128 * GIB, 0);
            wanted(at_end).judge(&there).unwrap_err().to_string()
        };
        let text = refused(true);
        assert!(
            text.contains("/runs/large has 128.0 GiB free, and the state")
                && text.contains("is kept only in checkpoints there, which take up to 435.0 GiB")
                && text.contains("train.checkpoints_kept"),
            "{text}"
        );
        assert!(refused(false).contains("train.checkpoint_every = 0"));
        let larger = file_system(300 * GIB, 0);
        // The last checkpoint is the run's result: room for the earlier ones is not enough.
        assert!(wanted(true).judge(&larger).is_err());
        let warned = wanted(false).judge(&larger).unwrap().unwrap();
        assert!(
            warned.contains("up to 3 checkpoints of 145.0 GiB take 435.0 GiB")
                && warned.contains("train.checkpoints_kept"),
            "{warned}"
        );
        let enough = file_system(436 * GIB, 0);
        assert_eq!(wanted(true).judge(&enough), Ok(None));
    }

    #[test]
    fn a_store_and_checkpoints_on_one_file_system_are_counted_together() {
        // Room for either, and not for both.
        let shared = |store_gib| file_system(200 * GIB, store_gib * GIB);
        assert!(wanted(false).judge(&shared(0)).unwrap().is_some());
        let text = wanted(false).judge(&shared(100)).unwrap_err().to_string();
        assert!(
            text.contains("has 200.0 GiB free, of which the store takes 100.0 GiB, and a checkpoint takes 145.0 GiB: "),
            "{text}"
        );
        let mut there = shared(100);
        there.weights_bytes = 100 * GIB;
        assert_eq!(there.weights_fit(), Ok(()));
        there.weights_bytes += 1;
        let text = there.weights_fit().unwrap_err().to_string();
        assert!(
            text.contains("model.from: the file system of /runs/large has 200.0 GiB free, of which the store takes 100.0 GiB, and a copy of the other run's weights takes 100.0 GiB"),
            "{text}"
        );
        assert_eq!(
            there.to_string(),
            "space     /runs/large has 200.0 GiB free; needs 100.0 GiB for the store, 100.0 GiB for copied weights during the start"
        );
    }
}
