//! Costs of checkpoints: bytes of each, bytes kept, and the time that they add to steps.

use std::fmt;

use offload_support::units::ApproxBytes;
use serde::Serialize;

use super::figures::{Of, Seconds};
use super::{Figure, Plan};
use crate::config::{Durability, Interval, RunSettings, TrainSettings};
use training_state::checkpoint_tap::BUFFERS;
use training_state::store::is_in_memory;

/// Most of a run's time that checkpoints may take at an interval that is proposed.
const SHARE_MAX: f64 = 0.02;

/// Intervals that are proposed, in minutes. A crash loses no more than the longest.
const INTERVALS_MIN: [u64; 6] = [1, 2, 5, 10, 20, 30];

/// Checkpoints of a run, for all its processes together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CheckpointsPlan {
    /// Steps between checkpoints, estimated if the interval is a time or an epoch; 0: one at the end of a run without a store.
    pub every: u64,
    /// Interval as it was set.
    #[serde(skip)]
    pub interval: Interval,
    /// Whether evaluations with a new lowest loss make checkpoints too.
    pub best: bool,
    /// Number of checkpoints kept; 0: all.
    pub kept: u64,
    /// Whether each of several nodes keeps them, unless the nodes share the run directory.
    pub on_each_node: bool,
    /// Bytes of one checkpoint: every tile once.
    pub checkpoint_bytes: u64,
    /// Bytes of all checkpoints that are kept.
    pub kept_bytes: u64,
    /// Bytes needed while a checkpoint is written, before an old one is removed.
    pub room_bytes: u64,
    /// Host memory of one process for copies that wait to be written.
    pub buffer_bytes: u64,
    /// Seconds to write a checkpoint at the rate below.
    pub checkpoint_s: f64,
    pub write_bytes_per_s: Figure,
    /// Average seconds that a step takes longer at most, if the drive of the run directory does nothing else
    /// during a step.
    pub step_s: f64,
}

impl Plan {
    /// Returns the costs of the checkpoints that `settings` request; `None` if there are none.
    pub(super) fn checkpoints_of(&self, settings: &RunSettings) -> Option<CheckpointsPlan> {
        let TrainSettings {
            checkpoint_every: interval,
            checkpoints_kept,
            stop_after,
            checkpoint_best,
            checkpoints_on_each_node,
            ..
        } = settings.train;
        let at_end = !settings.placement.has_store();
        let steps = self.steps as f64;
        let estimate = |every: f64| (every.min(steps) as u64).max(1);
        let every = match interval {
            Interval::Never => 0,
            Interval::Steps(steps) => steps,
            Interval::Epoch => {
                estimate((settings.train.epochs).map_or(1.0, |epochs| steps / epochs))
            }
            // The shortest step is not known before the plan's choices.
            Interval::Seconds(seconds) => estimate(seconds as f64 / self.bound.s),
        };
        if every == 0 && !at_end && !checkpoint_best {
            return None;
        }
        let made = match every {
            0 => u64::from(at_end),
            every => (stop_after / every).max(1),
        };
        let kept = match checkpoints_kept {
            0 => made,
            kept => kept.min(made),
        };
        let kept = kept + u64::from(checkpoint_best);
        let checkpoint_bytes = self.memory.all_bytes;
        let tile_bytes = self.memory.param_slot_bytes + self.memory.state_slot_bytes;
        let write_bytes_per_s = self.hardware.checkpoint_bytes_per_s;
        let checkpoint_s = checkpoint_bytes as f64 / write_bytes_per_s.value;
        Some(CheckpointsPlan {
            every,
            interval,
            best: checkpoint_best,
            kept: checkpoints_kept,
            on_each_node: checkpoints_on_each_node && self.nodes() > 1,
            checkpoint_bytes,
            kept_bytes: checkpoint_bytes.saturating_mul(kept),
            room_bytes: checkpoint_bytes.saturating_mul(kept.saturating_add(1)),
            buffer_bytes: BUFFERS as u64 * tile_bytes,
            checkpoint_s,
            write_bytes_per_s,
            step_s: if every == 0 {
                0.0
            } else {
                checkpoint_s / every as f64
            },
        })
    }

    /// Returns what a crash would lose if the run commits nothing and makes no checkpoint before its end; `None` if it does.
    pub fn loss_warning(&self, settings: &RunSettings) -> Option<String> {
        let (train, offload) = (&settings.train, &settings.offload);
        if train.checkpoint_every != Interval::Never || train.steps == 0 {
            return None;
        }
        if let Some(dir) = (settings.placement.nvme_paths.iter()).find(|dir| is_in_memory(dir)) {
            return Some(format!(
                "nvme_path: {} keeps its files in memory: a power cut or a restart of the machine loses the run, and no checkpoints are made. Name a \
                 directory on a drive, or set train.checkpoint_every, for example \"30min\"",
                dir.display()
            ));
        }
        let evaluates = train.eval_every != Interval::Never;
        let (lost, why) = match settings.placement.has_store() {
            false if train.checkpoint_best => (
                "all steps since the last evaluation with a new lowest loss",
                "the state is only in memory",
            ),
            false => (
                "all steps of this start",
                "the state is only in memory until the end",
            ),
            true if offload.durability == Durability::None => match train.checkpoint_best {
                true => (
                    "all steps since the last evaluation with a new lowest loss",
                    "offload.durability is \"none\"",
                ),
                false => ("the whole run", "offload.durability is \"none\""),
            },
            true if self.swapper.commit_every == 0 && evaluates => (
                "all steps since the last evaluation",
                "offload.commit_every is 0",
            ),
            true if self.swapper.commit_every == 0 => {
                ("all steps of this start", "offload.commit_every is 0")
            }
            true => return None,
        };
        Some(format!(
            "a crash, `kill -9` or a power cut loses {lost}: {why}, and no checkpoints are made. Set train.checkpoint_every, for example \"30min\"{}",
            match settings.placement.has_store() {
                true => "",
                false => ", or keep the state on nvme",
            }
        ))
    }
}

impl CheckpointsPlan {
    /// Shortest of some usual intervals at which checkpoints take at most [`SHARE_MAX`] of the time, in minutes; the
    /// longest of them if none is long enough.
    pub fn interval_min(&self) -> u64 {
        let long_enough = |minutes: &u64| self.checkpoint_s <= SHARE_MAX * (*minutes * 60) as f64;
        let [.., longest] = INTERVALS_MIN;
        INTERVALS_MIN
            .into_iter()
            .find(long_enough)
            .unwrap_or(longest)
    }
}

impl fmt::Display for CheckpointsPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "checkpoints     {} each",
            ApproxBytes(self.checkpoint_bytes)
        )?;
        if self.on_each_node {
            write!(f, " on each node")?;
        }
        match (self.interval, self.best) {
            (Interval::Never, true) => write!(f, ", one for each lowest validation loss")?,
            (Interval::Never, false) => write!(f, ", one at the end")?,
            (interval, _) => write!(f, ", {interval}")?,
        }
        write!(
            f,
            ", {} kept, {} while one is made; {} to write one at {}",
            ApproxBytes(self.kept_bytes),
            ApproxBytes(self.room_bytes),
            Seconds(self.checkpoint_s),
            Of(&self.write_bytes_per_s, 1e9, "GB/s")
        )?;
        if self.every > 0 {
            write!(f, ": at most {} a step", Seconds(self.step_s))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::FigureSource;

    #[test]
    fn checkpoints_are_shown_with_their_cost() {
        let mut checkpoints = CheckpointsPlan {
            every: 100,
            interval: Interval::Steps(100),
            best: false,
            kept: 2,
            on_each_node: false,
            checkpoint_bytes: 6 << 30,
            kept_bytes: 12 << 30,
            room_bytes: 18 << 30,
            buffer_bytes: 14 << 20,
            checkpoint_s: 2.0,
            write_bytes_per_s: Figure {
                value: 3.2e9,
                source: FigureSource::Assumed,
            },
            step_s: 0.02,
        };
        assert_eq!(
            checkpoints.to_string(),
            "checkpoints     6.0 GiB each, every 100 steps, 12.0 GiB kept, 18.0 GiB while one is made; 2.00 s to write one at 3.20 GB/s (assumed): at most 20.0 ms a step"
        );
        checkpoints.interval = Interval::Seconds(1800);
        let text = checkpoints.to_string();
        assert!(text.contains("6.0 GiB each, every 30 min, "), "{text}");
        for (checkpoint_s, minutes) in [(0.5, 1), (2.0, 2), (6.1, 10), (36.0, 30), (500.0, 30)] {
            checkpoints.checkpoint_s = checkpoint_s;
            assert_eq!(checkpoints.interval_min(), minutes, "{checkpoint_s} s");
        }
        (checkpoints.every, checkpoints.interval) = (0, Interval::Never);
        checkpoints.on_each_node = true;
        let text = checkpoints.to_string();
        assert!(
            text.contains("6.0 GiB each on each node, one at the end, "),
            "{text}"
        );
    }
}
