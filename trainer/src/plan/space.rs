//! Checks free space for the checkpoints of a run before training. Without the check, a run whose state lives
//! in memory would train to its end and then lose it.

use std::path::Path;

use super::RunError;
use crate::config::RunSettings;
use crate::plan::Plan;
use offload_support::units::ApproxBytes;
use training_state::metrics::MetricsFile;
use training_state::run::{Checkpoints, DirError, SLACK_BYTES};
use training_state::store::free_bytes;

/// Checkpoints that a start will make.
struct Wanted {
    /// Bytes of one checkpoint.
    bytes: u64,
    /// Checkpoints that exist at the same time, beyond those that exist already. The oldest is removed after
    /// a new one is complete.
    most: u64,
    /// Whether the last checkpoint is the only place where the run's state is kept.
    at_end: bool,
}

/// Checks the free space of the run's directory for checkpoints. Returns a warning when there is room for one
/// but not for all: whether the others fit depends on what else the drive holds by then. A run that is not
/// `begun` replaces what an earlier one left; a run that starts `from_checkpoint` counts as having no
/// checkpoints.
///
/// # Errors
/// There is no room for one checkpoint, or, if checkpoints are the only place where state is kept, not for
/// all; the directory cannot be examined.
pub(super) fn check(
    settings: &RunSettings,
    plan: &Plan,
    run_dir: &Path,
    begun: bool,
    from_checkpoint: bool,
) -> Result<Option<String>, RunError> {
    let checkpoints = Checkpoints::of(run_dir);
    let train = &settings.train;
    let (step, there) = match begun && !from_checkpoint {
        true => (MetricsFile::last_step(run_dir), checkpoints.list()?.len()),
        false => (0, 0),
    };
    let mut wanted = Wanted::new(
        plan.memory.table_bytes,
        step..train.stop_after,
        train.checkpoint_every,
        train.checkpoints_kept,
        there as u64,
        !settings.placement.has_store(),
    );
    // The checkpoint to begin from may be another run's. Without a store, a copy of it is made first.
    wanted.most += u64::from(from_checkpoint && wanted.at_end);
    if wanted.most == 0 {
        return Ok(None);
    }
    // Leftovers of unfinished checkpoints are removed first, and all checkpoints of an earlier run when a
    // fresh one begins.
    let free = free_bytes(run_dir).map_err(|source| DirError::Io {
        verb: "read the free space of",
        path: run_dir.into(),
        source,
    })?;
    let fresh = !begun && !from_checkpoint;
    let goes = checkpoints.leftover_bytes()? + if fresh { checkpoints.bytes()? } else { 0 };
    let free = free.saturating_add(goes);
    wanted.judge(run_dir, free)
}

impl Wanted {
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

    fn judge(&self, dir: &Path, free_bytes: u64) -> Result<Option<String>, RunError> {
        let one_bytes = self.bytes.saturating_add(SLACK_BYTES);
        let all_bytes = one_bytes.saturating_mul(self.most);
        let (needed_bytes, what, change) = if self.at_end {
            (
                all_bytes,
                "the state of this run is kept only in checkpoints there, which take up to",
                "free some space, lower train.checkpoints_kept, set a train.run_dir on a larger drive, or keep the state on nvme",
            )
        } else {
            (
                one_bytes,
                "a checkpoint takes",
                "free some space, set a train.run_dir on a larger drive, or train.checkpoint_every = 0",
            )
        };
        if free_bytes < needed_bytes {
            return Err(RunError::CheckpointSpace {
                dir: dir.to_owned(),
                free_bytes,
                needed_bytes,
                what,
                change,
            });
        }
        Ok((free_bytes < all_bytes).then(|| {
            format!(
                "the file system of {} has {} free, and up to {} checkpoints of {} take {}: those that do not fit are skipped. Free some space or lower train.checkpoints_kept",
                dir.display(),
                ApproxBytes(free_bytes),
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
        Wanted::new(GIB, steps, every, kept, there, at_end).most
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

    #[test]
    fn no_room_for_the_only_state_is_an_error_and_for_a_later_checkpoint_a_warning() {
        let dir = Path::new("/runs/large");
        let wanted = |at_end| Wanted::new(145 * GIB, 0..100, 10, 2, 0, at_end);
        let refused = |at_end| {
            wanted(at_end)
                .judge(dir, 128 * GIB)
                .unwrap_err()
                .to_string()
        };
        let text = refused(true);
        assert!(
            text.contains("/runs/large has 128.0 GiB free")
                && text.contains("is kept only in checkpoints there, which take up to 435.0 GiB")
                && text.contains("train.checkpoints_kept"),
            "{text}"
        );
        assert!(refused(false).contains("train.checkpoint_every = 0"));
        // The last checkpoint is the run's result: room for the earlier ones is not enough.
        assert!(wanted(true).judge(dir, 300 * GIB).is_err());
        let warned = wanted(false).judge(dir, 300 * GIB).unwrap().unwrap();
        assert!(
            warned.contains("up to 3 checkpoints of 145.0 GiB take 435.0 GiB")
                && warned.contains("train.checkpoints_kept"),
            "{warned}"
        );
        assert_eq!(wanted(true).judge(dir, 436 * GIB).unwrap(), None);
    }
}
