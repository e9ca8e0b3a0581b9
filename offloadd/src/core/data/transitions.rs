//! How the state of a job changes: each step by name, here and nowhere else.
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
    /// The members resume from `generation`; what they write belongs to the next one.
    pub(super) fn begin_resume(&mut self, generation: Generation) {
        self.resumed = Some(generation);
        self.working = next(generation);
    }

    /// The job continues as the previous daemon handed it over; its tiles are set apart.
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

    /// The record of `generation` is durable on this node.
    pub(super) fn commit(&mut self, generation: Generation, confirmed: bool) {
        self.unflushed.fill(false);
        self.working = next(generation);
        self.awaiting_confirm = !confirmed;
    }

    /// The newest generation is prepared on every node.
    pub(super) fn confirm(&mut self) {
        self.awaiting_confirm = false;
    }

    /// Nothing is durable any more, because of `fault`. The first cause is kept.
    pub(super) fn poison(&mut self, fault: Fault) {
        self.poison.get_or_insert(fault);
    }

    /// The working generation cannot be completed, because a member is gone. The first one is kept.
    pub(super) fn lose_member(&mut self, fault: Fault) {
        self.gone.get_or_insert(fault);
    }

    /// A write of one of its tiles is accepted.
    pub(super) fn accept_write(&mut self) {
        self.writes_inflight_count += 1;
    }

    /// A write that was accepted has ended, or is cancelled.
    pub(super) fn end_write(&mut self) {
        self.writes_inflight_count -= 1;
    }

    /// Something is written to `device` that no flush covers.
    pub(super) fn mark_unflushed(&mut self, device: DeviceIndex) {
        self.unflushed[device.0 as usize] = true;
    }

    /// Nothing of it is on `device` any more.
    pub(super) fn leave_device(&mut self, device: DeviceIndex) {
        self.unflushed[device.0 as usize] = false;
    }

    /// Nothing is committed from now on.
    pub(super) fn freeze(&mut self) {
        self.frozen = true;
    }

    /// Generations are committed again.
    pub(super) fn thaw(&mut self) {
        self.frozen = false;
    }

    /// Which definition the devices hold is not known before the next start.
    pub(super) fn lose_table(&mut self, broken: Fault, poison: Fault) {
        self.broken = Some(broken);
        self.poison(poison);
    }

    /// Its catalog entry is being removed: nobody opens it any more in this incarnation.
    pub(super) fn begin_drop(&mut self) {
        self.dropping = true;
    }

    /// The last session and script have ended: everything that was not committed is forgotten.
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
    /// The tiles are those of a record, or none.
    pub(super) fn resume_tiles(&mut self, versions: Option<&Arc<Vec<Option<Version>>>>) {
        for (index, tile) in self.tiles.iter_mut().enumerate() {
            tile.committed = versions.and_then(|versions| versions[index]);
        }
    }

    /// What was written since the last commit is committed.
    pub(super) fn commit_tiles(&mut self) {
        for tile in &mut self.tiles {
            tile.committed = tile.newest();
            tile.working = None;
        }
    }
}
