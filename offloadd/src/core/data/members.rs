//! Handles the end of a job's members: with the last one, everything that was not committed is forgotten.

use std::collections::VecDeque;

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::DeviceIndex;

use super::{Data, JobKey};
use crate::core::operations::Operations;
use crate::io::SessionId;
use crate::store::definition::JobName;

impl Data {
    /// Handles the end of a member: the working generation cannot be completed.
    pub(super) fn lose_member(&mut self, id: SessionId, ops: &mut Operations) {
        let session = &self.sessions[&id];
        let (key, rank) = (session.key.clone(), session.rank);
        let job = self.jobs.get_mut(&key).expect("a session's job");
        if job.resumed.is_none() {
            return;
        }
        let fault = Fault::new(
            FaultKind::Poisoned,
            format!(
                "rank {rank} of job {} is gone: generation {} cannot be completed; close all ranks and resume",
                key.name, job.working
            ),
        );
        job.lose_member(fault.clone());
        // A commit whose record is being written continues: it is complete.
        if job.round.as_ref().is_some_and(|round| !round.running) {
            let round = job.round.take().expect("just seen");
            for (call, _) in round.calls.into_values() {
                ops.refuse(call, fault.clone());
            }
        }
        let (dead, kept): (VecDeque<_>, VecDeque<_>) = std::mem::take(&mut job.parked)
            .into_iter()
            .partition(|parked| parked.session == id);
        job.parked = kept;
        for parked in dead {
            self.cancel_write(&parked);
        }
    }

    /// Forgets what was not committed, if the job's last session and script have ended.
    pub(super) fn settle(&mut self, key: &JobKey) {
        let Some(job) = self.jobs.get_mut(key) else {
            return;
        };
        if !job.members.is_empty() || job.script.is_some() {
            return;
        }
        job.forget_uncommitted();
        if job.stored.is_none() && job.defining.is_none() {
            self.jobs.remove(key);
        }
    }

    /// Poisons all jobs with unflushed bytes on `device`, because a flush of it failed.
    pub(in crate::core) fn poison_writers_of(&mut self, device: DeviceIndex, fault: &Fault) {
        for session in self.sessions.values() {
            if session.has_scratch_on(device) {
                let job = self.jobs.get_mut(&session.key).expect("a session's job");
                job.mark_unflushed(device);
            }
        }
        for (key, job) in &mut self.jobs {
            if job.unflushed[device.0 as usize] {
                job.poison(poison(&key.name, "a flush", fault));
            }
        }
    }
}

/// Fault of a poisoned job.
pub(super) fn poison(name: &JobName, doing: &str, cause: &Fault) -> Fault {
    Fault::new(
        FaultKind::Poisoned,
        format!(
            "job {name}: {doing} failed ({}); its working generation is abandoned: repair the device, close all ranks and resume from the last commit",
            cause.message
        ),
    )
}
