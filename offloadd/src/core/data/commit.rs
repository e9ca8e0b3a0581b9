//! Makes a generation durable. When all local ranks have called and all writes have ended:
//!
//! ```text
//!   flush every device written to ──▶ write the record, twice ──▶ flush it ──▶ acknowledge
//! ```
//!
//! A record that can be read back is therefore true, and an acknowledged record can be read back. If a step fails, a void is
//! written over the record and flushed before the failure is reported: no restart resumes from a generation that was reported
//! as lost. With several nodes the record is `prepared`. No write of the next generation is accepted until it is confirmed,
//! because the write would overwrite the previous generation, which another node may still need.

use std::sync::Arc;

use offload_api::BLOB_BYTES_MAX;
use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::{DeviceIndex, Generation, Rank};
use test_hooks::safeguard::{Safeguard, is_disabled};

use super::Incarnation;
use super::job::{Job, JobScriptPurpose};
use super::members::{Member, poison};
use crate::core::operations::{Operations, ScriptFailure, Step};
use crate::core::{CallId, Reply, next};
use crate::store::manifest::{
    Mark, MarkedRecord, Record, SlotContent, blob_room_bytes, blobs_bytes_max,
};

impl Member<'_> {
    /// Commits one rank's part of a generation.
    pub(in crate::core) fn commit(
        self,
        call: CallId,
        generation: Generation,
        blob: Vec<u8>,
        ops: &mut Operations,
    ) -> Result<Option<Reply>, Fault> {
        self.incarnation.check_writing()?;
        let rank = self.session.rank;
        self.job.check_commit(rank, generation, &blob)?;
        let round = self.job.round.get_or_insert_default();
        if round.running || round.calls.contains_key(&rank) {
            return Err(Fault::new(
                FaultKind::Invalid,
                format!(
                    "rank {rank} of job {} has already called commit in this generation",
                    self.job.key.name
                ),
            ));
        }
        round.calls.insert(rank, (call, blob));
        self.job.try_commit(self.incarnation, ops);
        Ok(None)
    }

    /// Confirms a generation that is prepared on every node.
    pub(in crate::core) fn confirm(
        self,
        call: CallId,
        generation: Generation,
        ops: &mut Operations,
    ) -> Result<Option<Reply>, Fault> {
        let resumed = self.job.has_resumed(self.session.rank);
        let job = self.job;
        let newest = (job.stored.as_ref().filter(|_| resumed))
            .and_then(|stored| stored.newest_marked())
            .filter(|marked| marked.record.generation == generation);
        let Some(newest) = newest else {
            // It may not be prepared because of this.
            if let Some(fault) = job.unusable() {
                return Err(fault.clone());
            }
            return Err(Fault::new(
                FaultKind::WrongGeneration,
                format!(
                    "generation {generation} of job {} is not the one prepared here",
                    job.key.name
                ),
            ));
        };
        if newest.confirmed() {
            return Ok(Some(Reply::Confirm));
        }
        if let Some(fault) = self.incarnation.read_only.as_ref().or(job.poison.as_ref()) {
            return Err(fault.clone());
        }
        if job.confirm_waiters.len() >= 2 * job.local_ranks as usize {
            return Err(Fault::new(
                FaultKind::TooMany,
                "the confirmation is being written: wait for its answer",
            ));
        }
        job.confirm_waiters.push(call);
        if job.script.is_none() {
            let mark = newest.record.encode_mark(Mark::Confirmed);
            let area = &job.stored.as_ref().expect("just seen").entry.area;
            let places = area.marks(Record::slot(generation));
            let steps = vec![
                Step::twice(ops.metadata_device(), places, mark),
                Step::flush([ops.metadata_device()]),
            ];
            job.run_script(JobScriptPurpose::Confirm, steps, ops);
        }
        Ok(None)
    }
}

impl Job {
    /// Checks that a rank may commit `generation` with this blob.
    fn check_commit(&self, rank: Rank, generation: Generation, blob: &[u8]) -> Result<(), Fault> {
        if let Some(fault) = self.unusable() {
            return Err(fault.clone());
        }
        let resumed = self.has_resumed(rank);
        if !resumed || generation != self.working || self.awaiting_confirm {
            return Err(Fault::new(
                FaultKind::WrongGeneration,
                format!(
                    "rank {rank} of job {} cannot commit generation {generation}: {}",
                    self.key.name,
                    match (resumed, self.awaiting_confirm) {
                        (false, _) => "it has not resumed".to_owned(),
                        (_, true) =>
                            format!("the one before {} waits for its confirmation", self.working),
                        _ => format!("the working generation is {}", self.working),
                    }
                ),
            ));
        }
        // Space was reserved for the ranks that defined the job; if there are more now, they share it.
        let stored = self.stored.as_ref().expect("it resumed");
        let room_bytes = blobs_bytes_max(stored.entry.area.record_bytes_max, stored.tiles.len());
        let others = self.round.iter().flat_map(|round| round.calls.values());
        let others_bytes: u64 = others.map(|(_, blob)| blob_room_bytes(blob)).sum();
        if blob.len() > BLOB_BYTES_MAX || others_bytes + blob_room_bytes(blob) > room_bytes {
            return Err(Fault::new(
                FaultKind::Invalid,
                format!(
                    "the blob of one of {} ranks has {} bytes: it may have {BLOB_BYTES_MAX}, and job {} has room for {room_bytes} in all, of which the other ranks have taken {others_bytes}",
                    self.local_ranks,
                    blob.len(),
                    self.key.name
                ),
            ));
        }
        Ok(())
    }

    /// Whether `rank` has committed, and so writes nothing more in this generation.
    pub(super) fn has_committed(&self, rank: Rank) -> bool {
        let round = self.round.as_ref();
        round.is_some_and(|round| round.calls.contains_key(&rank))
    }

    /// Starts the commit if all ranks have called and all writes have ended.
    pub(in crate::core) fn try_commit(&mut self, incarnation: &Incarnation, ops: &mut Operations) {
        let Some(round) = &mut self.round else { return };
        let complete = round.calls.len() == self.local_ranks as usize;
        // While the definition is being written, tiles may lie in extents that only the new definition names.
        let frozen = self.frozen && !is_disabled(Safeguard::ExchangeFirst);
        let busy = self.script.is_some() || frozen;
        if round.running || !complete || self.writes_inflight_count > 0 || busy {
            return;
        }
        let stored = self.stored.as_mut().expect("it resumed");
        if stored.failed_count > 0 || self.poison.is_some() {
            let fault = self.poison.clone().unwrap_or_else(|| {
                Fault::new(
                    FaultKind::Poisoned,
                    format!(
                        "the last write of {} tiles of job {} failed: write them again before generation {} is committed",
                        stored.failed_count, self.key.name, self.working
                    ),
                )
            });
            self.end_round(&Err(fault), ops);
            return;
        }
        round.running = true;
        let blobs = (round.calls.iter_mut())
            .map(|(rank, (_, blob))| (*rank, std::mem::take(blob)))
            .collect();
        let versions = stored.tiles.iter().map(|tile| tile.newest()).collect();
        let record = Record {
            job_id: stored.entry.job_id,
            generation: self.working,
            epoch: incarnation.epoch,
            born_confirmed: stored.table.definition.nodes() == 1,
            table_revision: stored.table.revision,
            versions: Arc::new(versions),
            blobs: Arc::new(blobs),
        };
        let slot = Record::slot(record.generation);
        let sequence = stored.next_sequence();
        let mut steps = Vec::new();
        if !is_disabled(Safeguard::FirstFlush) {
            let unflushed = (self.unflushed.iter().enumerate())
                .filter(|(_, unflushed)| **unflushed)
                .map(|(device, _)| DeviceIndex(device as u32));
            steps.push(Step::flush(unflushed));
        }
        steps.push(Step::twice(
            ops.metadata_device(),
            stored.entry.area.records(slot),
            record.encode(sequence),
        ));
        if !is_disabled(Safeguard::SecondFlush) {
            steps.push(Step::flush([ops.metadata_device()]));
        }
        self.run_script(JobScriptPurpose::Commit { record }, steps, ops);
    }

    pub(super) fn finish_commit(
        &mut self,
        record: Record,
        result: Result<(), ScriptFailure>,
        ops: &mut Operations,
    ) {
        let stored = self.stored.as_mut().expect("it committed");
        let generation = record.generation;
        // Another job's flush of a device that this job wrote to may have failed meanwhile.
        let failed = result
            .err()
            .map(|failed| {
                poison(
                    &self.key.name,
                    &format!("committing {generation}"),
                    &failed.fault,
                )
            })
            .or(self.poison.clone());
        if let Some(fault) = failed {
            *stored.slot_of(generation) = SlotContent::Unknown;
            let writes = stored.voiding(&[Record::slot(generation)]);
            let steps = vec![
                Step::writes(ops.metadata_device(), writes),
                Step::flush([ops.metadata_device()]),
            ];
            self.poison(fault.clone());
            let purpose = JobScriptPurpose::Withdraw { generation, fault };
            return self.run_script(purpose, steps, ops);
        }
        stored.commit_tiles();
        let confirmed = record.born_confirmed;
        *stored.slot_of(generation) = SlotContent::Sound(MarkedRecord { record, mark: None });
        self.unflushed.fill(false);
        self.working = next(generation);
        self.awaiting_confirm = !confirmed;
        let reply = Reply::Commit {
            generation,
            confirmed,
            working_generation: self.working,
        };
        self.end_round(&Ok(reply), ops);
    }

    /// Reports the failure after the record is withdrawn. If the daemon restarts earlier, it may find the record, which is then
    /// a commit that was not answered.
    pub(super) fn finish_withdraw(
        &mut self,
        generation: Generation,
        fault: Fault,
        result: Result<(), ScriptFailure>,
        ops: &mut Operations,
    ) {
        if result.is_ok() {
            let stored = self.stored.as_mut().expect("it committed");
            *stored.slot_of(generation) = SlotContent::Empty;
        }
        // Otherwise the record may be found at the next start; resuming first writes a void over it.
        self.end_round(&Err(fault), ops);
    }

    /// Answers all calls of the commit.
    pub(super) fn end_round(&mut self, answer: &Result<Reply, Fault>, ops: &mut Operations) {
        let round = self.round.take().expect("a round");
        for (call, _) in round.calls.into_values() {
            ops.reply(call, answer.clone());
        }
    }

    pub(super) fn finish_confirm(
        &mut self,
        result: Result<(), ScriptFailure>,
        ops: &mut Operations,
    ) {
        let answer = match result {
            Ok(()) => {
                let stored = self.stored.as_mut().expect("it confirms");
                let newest = stored.newest();
                if let SlotContent::Sound(marked) = stored.slot_of(newest) {
                    marked.mark = Some(Mark::Confirmed);
                }
                self.awaiting_confirm = false;
                Ok(Reply::Confirm)
            }
            Err(failed) => {
                let fault = poison(&self.key.name, "confirming", &failed.fault);
                self.poison(fault.clone());
                Err(fault)
            }
        };
        for call in std::mem::take(&mut self.confirm_waiters) {
            match &answer {
                Ok(reply) => ops.reply(call, Ok(reply.clone())),
                Err(fault) => ops.refuse(call, fault.clone()),
            }
        }
    }
}
