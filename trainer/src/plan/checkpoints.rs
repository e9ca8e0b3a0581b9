//! What checkpoints take: bytes each, bytes kept, and how much longer steps get.

use std::fmt;

use offload_support::units::ApproxBytes;
use serde::Serialize;

use super::text::{Of, Seconds};
use super::{Figure, Plan};
use crate::config::{RunSettings, TrainSettings};
use training_state::checkpoint_tap::BUFFERS;

/// Checkpoints of a run, of all its processes together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CheckpointsPlan {
    /// Steps between checkpoints; 0: only at the end of runs without a store.
    pub every: u64,
    /// 0: all are kept.
    pub kept: u64,
    /// Every tile once.
    pub checkpoint_bytes: u64,
    /// When all that are kept are there.
    pub kept_bytes: u64,
    /// Room for one more is needed while it is made.
    pub room_bytes: u64,
    /// Host memory of one process in which copies wait to be written.
    pub buffer_bytes: u64,
    /// Writing one, at the rate below.
    pub checkpoint_s: f64,
    pub write_bytes_per_s: Figure,
    /// Seconds longer that a step is on average, at most: when the drive of the run directory takes nothing beside the step.
    pub step_s: f64,
}

impl Plan {
    /// What the checkpoints take that `settings` ask for; nothing for a run that makes none.
    pub(super) fn checkpoints_of(&self, settings: &RunSettings) -> Option<CheckpointsPlan> {
        let TrainSettings {
            checkpoint_every: every,
            checkpoints_kept,
            stop_after,
            ..
        } = settings.train;
        let at_end = !settings.placement.has_store();
        if every == 0 && !at_end {
            return None;
        }
        let made = match every {
            0 => 1,
            every => (stop_after / every).max(1),
        };
        let kept = match checkpoints_kept {
            0 => made,
            kept => kept.min(made),
        };
        let checkpoint_bytes = self.memory.table_bytes;
        let tile_bytes = self.memory.param_slot_bytes + self.memory.state_slot_bytes;
        let write_bytes_per_s = self.hardware.checkpoint_bytes_per_s;
        let checkpoint_s = checkpoint_bytes as f64 / write_bytes_per_s.value;
        Some(CheckpointsPlan {
            every,
            kept: checkpoints_kept,
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
        match self.every {
            0 => write!(f, ", one at the end")?,
            every => write!(f, ", every {every} steps")?,
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
            kept: 2,
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
        assert!(checkpoints.to_string().contains(", one at the end, "));
    }
}
