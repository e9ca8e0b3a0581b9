//! Costs of checkpoints: bytes of each, bytes kept, and the time that they add to steps.

use std::fmt;

use offload_support::units::ApproxBytes;
use serde::Serialize;

use super::text::{Of, Seconds};
use super::{Figure, Plan};
use crate::config::{RunSettings, TrainSettings};
use training_state::checkpoint_tap::BUFFERS;

/// Checkpoints of a run, for all its processes together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CheckpointsPlan {
    /// Steps between checkpoints; 0: one at the end of a run without a store.
    pub every: u64,
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
            checkpoint_every: every,
            checkpoints_kept,
            stop_after,
            checkpoint_best,
            checkpoints_on_each_node,
            ..
        } = settings.train;
        let at_end = !settings.placement.has_store();
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
        match (self.every, self.best) {
            (0, true) => write!(f, ", one for each lowest validation loss")?,
            (0, false) => write!(f, ", one at the end")?,
            (every, _) => write!(f, ", every {every} steps")?,
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
    use crate::plan::Source;

    #[test]
    fn checkpoints_are_shown_with_their_cost() {
        let mut checkpoints = CheckpointsPlan {
            every: 100,
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
                source: Source::Assumed,
            },
            step_s: 0.02,
        };
        assert_eq!(
            checkpoints.to_string(),
            "checkpoints     6.0 GiB each, every 100 steps, 12.0 GiB kept, 18.0 GiB while one is made; 2.00 s to write one at 3.20 GB/s (assumed): at most 20.0 ms a step"
        );
        checkpoints.every = 0;
        checkpoints.on_each_node = true;
        let text = checkpoints.to_string();
        assert!(
            text.contains("6.0 GiB each on each node, one at the end, "),
            "{text}"
        );
    }
}
