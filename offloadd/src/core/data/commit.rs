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

use std::collections::BTreeMap;
use std::sync::Arc;

use offload_api::BLOB_BYTES_MAX;
use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::{DeviceIndex, Generation, Rank};
use test_hooks::safeguard::{Safeguard, is_disabled};

use super::members::poison;
use super::{Data, JobKey, Purpose};
use crate::core::operations::{Failed, Operations, Step};
use crate::core::{CallId, Reply};
use crate::io::SessionId;
use crate::store::manifest::{Mark, Marked, Record, SlotContent, blob_room_bytes, blobs_bytes_max};

/// The calls of one commit.
#[derive(Debug, Default)]
pub(super) struct Round {
    /// Call and blob of each rank.
    pub(super) calls: BTreeMap<Rank, (CallId, Vec<u8>)>,
    /// Whether the flushes and the record are in progress.
    pub(super) running: bool,
}

impl Data {
    pub(in crate::core) fn commit(
        &mut self,
        call: CallId,
        session: SessionId,
        generation: Generation,
        blob: Vec<u8>,
        ops: &mut Operations,
    ) -> Result<Option<Reply>, Fault> {
        let session = &self.sessions[&session];
        let (key, rank, resumed) = (session.key.clone(), session.rank, session.resumed);
        self.check_writing()?;
        let job = self.jobs.get_mut(&key).expect("a session's job");
        if let Some(fault) = job.unusable() {
            return Err(fault.clone());
        }
        if !resumed || generation != job.working || job.awaiting_confirm {
            return Err(Fault::new(
                FaultKind::WrongGeneration,
                format!(
                    "rank {rank} of job {} cannot commit generation {generation}: {}",
                    key.name,
                    match (resumed, job.awaiting_confirm) {
                        (false, _) => "it has not resumed".to_owned(),
                        (_, true) =>
                            format!("the one before {} waits for its confirmation", job.working),
                        _ => format!("the working generation is {}", job.working),
                    }
                ),
            ));
        }
        // Space was reserved for the ranks that defined the job; if there are more now, they share it.
        let stored = job.stored.as_ref().expect("it resumed");
        let room_bytes = blobs_bytes_max(stored.entry.area.record_bytes_max, stored.tiles.len());
        let others = job.round.iter().flat_map(|round| round.calls.values());
        let others_bytes: u64 = others.map(|(_, blob)| blob_room_bytes(blob)).sum();
        if blob.len() > BLOB_BYTES_MAX || others_bytes + blob_room_bytes(&blob) > room_bytes {
            return Err(Fault::new(
                FaultKind::Invalid,
                format!(
                    "the blob of one of {} ranks has {} bytes: it may have {BLOB_BYTES_MAX}, and job {} has room for {room_bytes} in all, of which the other ranks have taken {others_bytes}",
                    job.local_ranks,
                    blob.len(),
                    key.name
                ),
            ));
        }
        let round = job.round.get_or_insert_default();
        if round.running || round.calls.contains_key(&rank) {
            return Err(Fault::new(
                FaultKind::Invalid,
                format!(
                    "rank {rank} of job {} has already called commit in this generation",
                    key.name
                ),
            ));
        }
        round.calls.insert(rank, (call, blob));
        self.try_commit(&key, ops);
        Ok(None)
    }

    /// Whether `rank` has committed, and so writes nothing more in this generation.
    pub(super) fn has_committed(&self, key: &JobKey, rank: Rank) -> bool {
        let round = self.jobs[key].round.as_ref();
        round.is_some_and(|round| round.calls.contains_key(&rank))
    }

    /// Starts the commit if all ranks have called and all writes have ended.
    pub(in crate::core) fn try_commit(&mut self, key: &JobKey, ops: &mut Operations) {
        let Some(job) = self.jobs.get_mut(key) else {
            return;
        };
        let Some(round) = &mut job.round else { return };
        let complete = round.calls.len() == job.local_ranks as usize;
        // While the definition is being written, tiles may lie in extents that only the new definition names.
        let frozen = job.frozen && !is_disabled(Safeguard::ExchangeFirst);
        let busy = job.script.is_some() || frozen;
        if round.running || !complete || job.writes_inflight_count > 0 || busy {
            return;
        }
        let stored = job.stored.as_mut().expect("it resumed");
        if stored.failed_count > 0 || job.poison.is_some() {
            let fault = job.poison.clone().unwrap_or_else(|| {
                Fault::new(
                    FaultKind::Poisoned,
                    format!(
                        "the last write of {} tiles of job {} failed: write them again before generation {} is committed",
                        stored.failed_count, key.name, job.working
                    ),
                )
            });
            self.end_round(key, &Err(fault), ops);
            return;
        }
        round.running = true;
        let blobs = (round.calls.iter_mut())
            .map(|(rank, (_, blob))| (*rank, std::mem::take(blob)))
            .collect();
        let versions = stored.tiles.iter().map(|tile| tile.newest()).collect();
        let record = Record {
            job_id: stored.entry.job_id,
            generation: job.working,
            epoch: self.epoch,
            born_confirmed: stored.table.definition.nodes() == 1,
            table_revision: stored.table.revision,
            versions: Arc::new(versions),
            blobs: Arc::new(blobs),
        };
        let slot = Record::slot(record.generation);
        let sequence = stored.next_sequence();
        let mut steps = Vec::new();
        if !is_disabled(Safeguard::FirstFlush) {
            let unflushed = (job.unflushed.iter().enumerate())
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
        self.run_script(key, Purpose::Commit { record }, steps, ops);
    }

    pub(super) fn finish_commit(
        &mut self,
        key: &JobKey,
        record: Record,
        result: Result<(), Failed>,
        ops: &mut Operations,
    ) {
        let job = self.jobs.get_mut(key).expect("a script's job");
        let stored = job.stored.as_mut().expect("it committed");
        let generation = record.generation;
        // Another job's flush of a device that this job wrote to may have failed meanwhile.
        let failed = result
            .err()
            .map(|failed| {
                poison(
                    &key.name,
                    &format!("committing {generation}"),
                    &failed.fault,
                )
            })
            .or(job.poison.clone());
        if let Some(fault) = failed {
            *stored.slot_of(generation) = SlotContent::Unknown;
            let writes = stored.voiding(&[Record::slot(generation)]);
            let steps = vec![
                Step::writes(ops.metadata_device(), writes),
                Step::flush([ops.metadata_device()]),
            ];
            job.poison(fault.clone());
            let purpose = Purpose::Withdraw { generation, fault };
            return self.run_script(key, purpose, steps, ops);
        }
        stored.commit_tiles();
        let confirmed = record.born_confirmed;
        *stored.slot_of(generation) = SlotContent::Sound(Marked { record, mark: None });
        job.commit(generation, confirmed);
        let reply = Reply::Commit {
            generation,
            confirmed,
            working_generation: job.working,
        };
        self.end_round(key, &Ok(reply), ops);
    }

    /// Reports the failure after the record is withdrawn. If the daemon restarts earlier, it may find the record, which is then
    /// a commit that was not answered.
    pub(super) fn finish_withdraw(
        &mut self,
        key: &JobKey,
        generation: Generation,
        fault: Fault,
        result: Result<(), Failed>,
        ops: &mut Operations,
    ) {
        if result.is_ok() {
            let job = self.jobs.get_mut(key).expect("a script's job");
            let stored = job.stored.as_mut().expect("it committed");
            *stored.slot_of(generation) = SlotContent::Empty;
        }
        // Otherwise the record may be found at the next start; resuming first writes a void over it.
        self.end_round(key, &Err(fault), ops);
    }

    fn end_round(&mut self, key: &JobKey, answer: &Result<Reply, Fault>, ops: &mut Operations) {
        let job = self.jobs.get_mut(key).expect("a committing job");
        let round = job.round.take().expect("a round");
        for (call, _) in round.calls.into_values() {
            ops.reply(call, answer.clone());
        }
    }

    pub(in crate::core) fn confirm(
        &mut self,
        call: CallId,
        session: SessionId,
        generation: Generation,
        ops: &mut Operations,
    ) -> Result<Option<Reply>, Fault> {
        let session = &self.sessions[&session];
        let (key, resumed) = (session.key.clone(), session.resumed);
        let job = self.jobs.get_mut(&key).expect("a session's job");
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
                    key.name
                ),
            ));
        };
        if newest.confirmed() {
            return Ok(Some(Reply::Confirm));
        }
        if let Some(fault) = self.read_only.as_ref().or(job.poison.as_ref()) {
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
            self.run_script(&key, Purpose::Confirm, steps, ops);
        }
        Ok(None)
    }

    pub(super) fn finish_confirm(
        &mut self,
        key: &JobKey,
        result: Result<(), Failed>,
        ops: &mut Operations,
    ) {
        let job = self.jobs.get_mut(key).expect("a script's job");
        let answer = match result {
            Ok(()) => {
                let stored = job.stored.as_mut().expect("it confirms");
                let newest = stored.newest();
                if let SlotContent::Sound(marked) = stored.slot_of(newest) {
                    marked.mark = Some(Mark::Confirmed);
                }
                job.confirm();
                Ok(Reply::Confirm)
            }
            Err(failed) => {
                let fault = poison(&key.name, "confirming", &failed.fault);
                job.poison(fault.clone());
                Err(fault)
            }
        };
        for call in std::mem::take(&mut job.confirm_waiters) {
            match &answer {
                Ok(reply) => ops.reply(call, Ok(reply.clone())),
                Err(fault) => ops.refuse(call, fault.clone()),
            }
        }
    }
}
