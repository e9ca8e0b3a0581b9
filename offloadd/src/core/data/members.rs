//! Members of jobs: a session together with its job. With the last member's end, everything that was not committed is forgotten.

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::{DeviceIndex, Rank, SessionToken};

use super::job::Job;
use super::session::Session;
use super::tile_io::ParkedWrite;
use super::{Data, Incarnation};
use crate::core::operations::Operations;
use crate::core::{Peer, Reply};
use crate::io::SessionId;
use crate::store::definition::JobName;

/// A session and its job.
pub(in crate::core) struct Member<'a> {
    pub(super) session: &'a mut Session,
    pub(super) job: &'a mut Job,
    pub(super) incarnation: &'a Incarnation,
}

impl Data {
    /// Returns the live session of a token with its job, if it belongs to this peer.
    pub(in crate::core) fn live_member(
        &mut self,
        peer: Peer,
        token: SessionToken,
    ) -> Result<Member<'_>, Fault> {
        let id = self.sessions.live(peer, token)?;
        Ok(self.member(id))
    }

    /// Returns a session with its job.
    pub(super) fn member(&mut self, id: SessionId) -> Member<'_> {
        let session = self.sessions.get_mut(id).expect("a session");
        Member {
            job: self.jobs.existing(&session.key),
            session,
            incarnation: &self.incarnation,
        }
    }

    /// Poisons all jobs with unflushed bytes on `device`, because a flush of it failed.
    pub(in crate::core) fn poison_writers_of(&mut self, device: DeviceIndex, fault: &Fault) {
        for session in self.sessions.iter() {
            if session.has_scratch_on(device) {
                self.jobs.existing(&session.key).mark_unflushed(device);
            }
        }
        for job in self.jobs.iter_mut() {
            if job.unflushed[device.0 as usize] {
                let fault = poison(&job.key.name, "a flush", fault);
                job.poison(fault);
            }
        }
    }
}

impl Member<'_> {
    pub(in crate::core) fn describe_job(&self) -> Reply {
        let stored = self.job.stored.as_ref();
        Reply::DescribeJob(stored.map(|stored| Box::new(stored.to_job_record())))
    }

    pub(in crate::core) fn reattach(&self) -> Reply {
        let Self { session, job, .. } = self;
        let resumed = job.has_resumed(session.rank);
        let unusable = self.incarnation.read_only.as_ref().or(job.unusable());
        Reply::Reattach {
            epoch: self.incarnation.epoch,
            working: resumed.then_some(job.working),
            confirmed: !job.awaiting_confirm,
            scratch_count: session.scratch.len() as u32,
            unusable: unusable.cloned(),
        }
    }
}

impl Job {
    /// Handles the end of a member: the working generation cannot be completed. Returns the member's writes that have not started.
    pub(super) fn lose_member(
        &mut self,
        rank: Rank,
        session: SessionId,
        ops: &mut Operations,
    ) -> Vec<ParkedWrite> {
        if self.resumed.is_none() {
            return Vec::new();
        }
        let fault = Fault::new(
            FaultKind::Poisoned,
            format!(
                "rank {rank} of job {} is gone: generation {} cannot be completed; close all ranks and resume",
                self.key.name, self.working
            ),
        );
        // The first fault is kept.
        self.gone.get_or_insert_with(|| fault.clone());
        // A commit whose record is being written continues: it is complete.
        if self.round.as_ref().is_some_and(|round| !round.running) {
            self.end_round(&Err(fault), ops);
        }
        let (dead, kept) = std::mem::take(&mut self.parked)
            .into_iter()
            .partition(|parked| parked.tile.session == session);
        self.parked = kept;
        dead
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
