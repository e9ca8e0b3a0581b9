//! Resumes a job from a generation. Later records are durably discarded before a write is accepted: otherwise a crash while
//! their tiles are overwritten would leave a record that is not true.

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::{DeviceIndex, Generation};

use super::Incarnation;
use super::job::{Job, JobScriptPurpose};
use super::members::{Member, poison};
use super::stored::StoredJob;
use crate::core::operations::{Operations, ScriptFailure, Step};
use crate::core::{CallId, Reply, next};
use crate::store::definition::{Durability, JobName};
use crate::store::manifest::{Mark, Record, SlotContent, resumable};

impl Member<'_> {
    /// Chooses the generation to resume from.
    pub(in crate::core) fn resume(
        self,
        call: CallId,
        generation: Generation,
        ops: &mut Operations,
    ) -> Result<Option<Reply>, Fault> {
        let (job, rank) = (self.job, self.session.rank);
        if let Some(fault) = job.unusable() {
            return Err(fault.clone());
        }
        let waits = (job.resume_waiters.iter()).any(|(_, waiter)| *waiter == rank);
        if job.has_resumed(rank) || waits {
            return Err(Fault::new(
                FaultKind::Invalid,
                "the session has resumed already: open a new one to go back",
            ));
        }
        let Some(stored) = &mut job.stored else {
            return Err(Fault::new(
                FaultKind::NotFound,
                format!("job {} has no tiles yet: define them first", job.key.name),
            ));
        };
        if let Some(chosen) = job.resumed {
            if chosen != generation {
                return Err(Fault::new(
                    FaultKind::WrongGeneration,
                    format!(
                        "another rank of job {} resumes from generation {chosen}, this one wants {generation}",
                        job.key.name
                    ),
                ));
            }
            job.resume_waiters.push((call, rank));
            if job.script.is_none() {
                job.answer_resume(&Ok(()), ops);
            }
            return Ok(None);
        }
        stored.check_resume(&job.key.name, generation)?;
        // A read-only store overwrites nothing, so later records may stay.
        let steps = match &self.incarnation.read_only {
            None => give_up_steps(ops.metadata_device(), stored, generation),
            Some(_) => Vec::new(),
        };
        // Writes belong to the generation after it.
        job.resumed = Some(generation);
        job.working = next(generation);
        job.resume_waiters.push((call, rank));
        job.run_script(JobScriptPurpose::Resume { generation }, steps, ops);
        Ok(None)
    }
}

impl Job {
    /// Completes a resume after later generations are durably discarded; the resumed one counts as confirmed.
    pub(super) fn finish_resume(
        &mut self,
        generation: Generation,
        result: Result<(), ScriptFailure>,
        incarnation: &Incarnation,
        ops: &mut Operations,
    ) {
        let stored = self.stored.as_mut().expect("it resumes");
        let writes = incarnation.read_only.is_none();
        for slot in &mut stored.slots {
            if writes && is_given_up(slot, generation) {
                *slot = match result {
                    Ok(()) => SlotContent::Empty,
                    Err(_) => SlotContent::Unknown,
                };
            }
        }
        let answer = match result {
            Ok(()) => {
                let mut versions = None;
                if let (SlotContent::Sound(marked), true) =
                    (stored.slot_of(generation), generation.0 > 0)
                {
                    if writes && !marked.confirmed() {
                        marked.mark = Some(Mark::Confirmed);
                    }
                    versions = Some(marked.record.versions.clone());
                }
                stored.resume_tiles(versions.as_ref());
                Ok(())
            }
            Err(failed) => {
                let what = "giving up later generations";
                let fault = poison(&self.key.name, what, &failed.fault);
                self.poison(fault.clone());
                Err(fault)
            }
        };
        self.answer_resume(&answer, ops);
    }

    fn answer_resume(&mut self, answer: &Result<(), Fault>, ops: &mut Operations) {
        let working_generation = next(self.resumed.expect("it resumes"));
        for (call, rank) in std::mem::take(&mut self.resume_waiters) {
            let reply = match answer {
                Ok(()) => Ok(Reply::Resume { working_generation }),
                Err(fault) => Err(fault.clone()),
            };
            if let (Ok(_), Some(state)) = (&reply, self.members.get_mut(&rank)) {
                state.resumed = true;
            }
            ops.reply(call, reply);
        }
    }
}

impl StoredJob {
    /// Checks that the job can resume from `generation`.
    fn check_resume(&self, name: &JobName, generation: Generation) -> Result<(), Fault> {
        if let Some(why) = self.unreadable() {
            return Err(Fault::new(
                FaultKind::Damaged,
                format!(
                    "job {name}: {why}; it may be its newest generation, so the job cannot be resumed: start offloadd again if the device can read it now, or run `offloadd job discard-unreadable {name}` to continue without it, or delete the job"
                ),
            ));
        }
        if !self.clean() {
            return Err(Fault::new(
                FaultKind::Unclean,
                format!(
                    "job {name} has durability none and did not end in order: its tiles are written in place and belong to no single generation; delete the job and start again, or use durability full"
                ),
            ));
        }
        let list = resumable(&self.slots);
        let newest_unconfirmed = list.last().is_some_and(|marked| !marked.confirmed());
        let numbers: Vec<u64> = list.iter().map(|m| m.record.generation.0).collect();
        let known = match generation.0 {
            // A fresh start: there is no generation, or only a first one that other nodes do not have.
            0 => numbers.is_empty() || (numbers == [1] && newest_unconfirmed),
            _ => numbers.contains(&generation.0),
        };
        if !known {
            return Err(Fault::new(
                FaultKind::WrongGeneration,
                format!(
                    "job {name} cannot resume from generation {generation}: the store has {numbers:?}; delete the job to start from nothing"
                ),
            ));
        }
        let in_place = self.durability() == Durability::None;
        if in_place && generation.0 > 0 && generation != self.newest() {
            return Err(Fault::new(
                FaultKind::Unclean,
                format!(
                    "job {name} has durability none: generation {generation} was overwritten by {}",
                    self.newest()
                ),
            ));
        }
        Ok(())
    }
}

fn is_given_up(slot: &SlotContent, generation: Generation) -> bool {
    match slot {
        // A job with an unreadable record cannot be resumed.
        SlotContent::Empty | SlotContent::Unreadable(_) => false,
        SlotContent::Unknown => true,
        SlotContent::Sound(marked) => marked.record.generation > generation,
    }
}

/// Returns the steps before a write is accepted: overwrite records later than `generation`, and mark `generation` as confirmed,
/// because the previous one will be overwritten.
fn give_up_steps(
    metadata_device: DeviceIndex,
    stored: &mut StoredJob,
    generation: Generation,
) -> Vec<Step> {
    let slots = 0..stored.slots.len();
    let given_up = slots.filter(|&slot| is_given_up(&stored.slots[slot], generation));
    let given_up: Vec<usize> = given_up.collect();
    let mut writes = stored.voiding(&given_up);
    if let Some(marked) = (stored.slots.iter().filter_map(SlotContent::sound))
        .find(|marked| marked.record.generation == generation && !marked.confirmed())
    {
        let mark = marked.record.encode_mark(Mark::Confirmed);
        let places = stored.entry.area.marks(Record::slot(generation));
        writes.extend(places.map(|offset| (offset, mark.clone())));
    }
    if writes.is_empty() {
        return Vec::new();
    }
    vec![
        Step::writes(metadata_device, writes),
        Step::flush([metadata_device]),
    ]
}
