//! Changes of a job's state, each with a name; no other module makes them.
//!
//! ```text
//!   open ──begin_resume──▶ working on n ──commit──▶ working on n + 1      (several nodes: awaiting_confirm until confirm)
//!                            │      └─ accept_write, mark_unflushed, end_write
//!                            └─ poison, lose_member ──▶ unusable ─┐
//!   the last session and script have ended: forget_uncommitted ◀──┘
//!   freeze ──▶ nothing is committed while the definition is written again ──▶ thaw, or lose_table
//! ```

use std::sync::Arc;

use offload_api::fault::Fault;
use offload_api::ids::{DeviceIndex, Generation};
use test_hooks::safeguard::{Safeguard, is_disabled};

use super::job::{Job, Stored, TileState};
use crate::core::next;
use crate::handover::message;
use crate::store::manifest::Version;

impl Job {
    /// Resumes from `generation`; writes belong to the next one.
    pub(super) fn begin_resume(&mut self, generation: Generation) {
        self.resumed = Some(generation);
        self.working = next(generation);
    }

    /// Continues the job as the previous daemon handed it over, except its tiles, which are set separately.
    pub(super) fn adopt(
        &mut self,
        job: &message::Job,
        [poison, gone]: [Option<Fault>; 2],
        unflushed: Vec<bool>,
    ) {
        self.local_ranks = job.local_ranks;
        self.resumed = job.resumed.map(Generation);
        self.working = Generation(job.working);
        self.awaiting_confirm = job.awaiting_confirm;
        self.poison = poison;
        self.gone = gone;
        self.unflushed = unflushed;
    }

    /// Notes that the record of `generation` is durable on this node.
    pub(super) fn commit(&mut self, generation: Generation, confirmed: bool) {
        self.unflushed.fill(false);
        self.working = next(generation);
        self.awaiting_confirm = !confirmed;
    }

    /// Notes that the newest generation is prepared on every node.
    pub(super) fn confirm(&mut self) {
        self.awaiting_confirm = false;
    }

    /// Poisons the job. The first fault is kept.
    pub(super) fn poison(&mut self, fault: Fault) {
        self.poison.get_or_insert(fault);
    }

    /// Notes that a member ended, so that the working generation cannot be completed. The first fault is kept.
    pub(super) fn lose_member(&mut self, fault: Fault) {
        self.gone.get_or_insert(fault);
    }

    /// Counts a write that was accepted.
    pub(super) fn accept_write(&mut self) {
        self.writes_inflight_count += 1;
    }

    /// Uncounts a write that has ended or was cancelled.
    pub(super) fn end_write(&mut self) {
        self.writes_inflight_count -= 1;
    }

    /// Notes a write to `device` that no flush covers.
    pub(super) fn mark_unflushed(&mut self, device: DeviceIndex) {
        self.unflushed[device.0 as usize] = true;
    }

    /// Notes that `device` holds no tile of the job any more.
    pub(super) fn leave_device(&mut self, device: DeviceIndex) {
        self.unflushed[device.0 as usize] = false;
    }

    /// Stops commits.
    pub(super) fn freeze(&mut self) {
        self.frozen = true;
    }

    /// Allows commits again.
    pub(super) fn thaw(&mut self) {
        self.frozen = false;
    }

    /// Notes that it is unknown, until the next start, which definition the devices hold.
    pub(super) fn lose_table(&mut self, broken: Fault, poison: Fault) {
        self.broken = Some(broken);
        self.poison(poison);
    }

    /// Marks the job as being deleted: it cannot be opened any more in this incarnation.
    pub(super) fn begin_drop(&mut self) {
        self.dropping = true;
    }

    /// Forgets everything that was not committed, after the last session and script have ended.
    pub(super) fn forget_uncommitted(&mut self) {
        assert!(self.writes_inflight_count == 0 || is_disabled(Safeguard::ReclaimAfterIo));
        *self = Self {
            stored: self.stored.take(),
            defining: self.defining.take(),
            dropping: self.dropping,
            frozen: self.frozen,
            broken: self.broken.take(),
            ..Self::new(self.unflushed.len())
        };
        if let Some(stored) = &mut self.stored {
            stored.failed_count = 0;
            stored.tiles.fill(TileState::default());
        }
    }
}

impl Stored {
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
