//! Changes of a job's state that several events cause. Only methods of [`Job`] and [`StoredJob`] change it.
//!
//! ```text
//!   open ──resume──▶ working on n ──commit──▶ working on n + 1      (several nodes: awaiting_confirm until confirm)
//!                            │      └─ start_tile, mark_unflushed, end_tile
//!                            └─ poison, lose_member ──▶ unusable ─┐
//!   the last session and script have ended: forget_uncommitted ◀──┘
//!   replace_extents ──▶ nothing is committed while the definition is written again ──▶ thaw, or lose_table
//! ```

use std::sync::Arc;

use offload_api::fault::Fault;
use offload_api::ids::DeviceIndex;
use test_hooks::safeguard::{Safeguard, is_disabled};

use super::job::Job;
use super::members::poison;
use super::stored::{StoredJob, TileState};
use crate::store::manifest::Version;

impl Job {
    /// Poisons the job. The first fault is kept.
    pub(super) fn poison(&mut self, fault: Fault) {
        self.poison.get_or_insert(fault);
    }

    /// Notes a write to `device` that no flush covers.
    pub(super) fn mark_unflushed(&mut self, device: DeviceIndex) {
        self.unflushed[device.0 as usize] = true;
    }

    /// Allows commits again.
    pub(in crate::core) fn thaw(&mut self) {
        self.frozen = false;
    }

    /// Notes that it is unknown, until the next start, which table the devices hold.
    pub(in crate::core) fn lose_table(&mut self, broken: Fault, cause: &Fault) {
        self.broken = Some(broken);
        self.poison(poison(&self.key.name, "moving its tiles", cause));
    }

    /// Forgets everything that was not committed, after the last session and script have ended.
    pub(super) fn forget_uncommitted(&mut self) {
        assert!(self.writes_inflight_count == 0 || is_disabled(Safeguard::ReclaimAfterIo));
        *self = Self {
            stored: self.stored.take(),
            definition: self.definition.take(),
            dropping: self.dropping,
            frozen: self.frozen,
            broken: self.broken.take(),
            ..Self::new(self.key.clone(), self.unflushed.len())
        };
        if let Some(stored) = &mut self.stored {
            stored.failed_count = 0;
            stored.tiles.fill(TileState::default());
        }
    }
}

impl StoredJob {
    /// Sets the versions of the tiles to those of a record, or to none.
    pub(super) fn resume_tiles(&mut self, versions: Option<&Arc<Vec<Option<Version>>>>) {
        for (index, tile) in self.tiles.iter_mut().enumerate() {
            tile.committed = versions.and_then(|versions| versions[index]);
        }
    }

    /// Makes the versions written since the last commit the committed ones.
    pub(super) fn commit_tiles(&mut self) {
        for tile in &mut self.tiles {
            tile.committed = tile.newest();
            tile.working = None;
        }
    }
}
