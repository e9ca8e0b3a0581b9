//! State of the core at one moment, for metrics and lists. Changes nothing.

use std::collections::BTreeMap;

use offload_api::ring::entry::Verb;

use super::job::Job;
use super::jobs::JobTable;
use super::{Data, JobKey};
use crate::core::{JobSummary, Peer};
use crate::quota::Weights;
use crate::store::definition::JobName;

/// Jobs that a caller may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Viewer {
    /// All jobs: for root and the user who runs the daemon.
    All,
    /// Jobs of this user.
    Uid(u32),
}

/// A job as the core sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobState {
    /// Owner.
    pub uid: u32,
    /// Name of the job among its owner's jobs.
    pub job: JobName,
    /// Bytes reserved on all devices.
    pub reserved_bytes: u64,
    /// Weights in the drives' queues.
    pub weights: Weights,
    pub session_count: u64,
    /// Host memory of the sessions.
    pub arena_bytes: u64,
    /// Slots of the sessions' arenas.
    pub slot_count: u64,
    /// Slots with an operation in flight.
    pub slot_used_count: u64,
    /// Tiles on their way.
    pub reading_count: u64,
    /// Tiles on their way.
    pub writing_count: u64,
    /// Progress of the next commit.
    pub commit: CommitState,
    /// Newest committed generation; 0 if there is none.
    pub newest_generation: u64,
    /// Working generation; 0 while no session has resumed.
    pub working_generation: u64,
    /// Whether the job is poisoned: a flush or a record failed, so nothing is committed until it resumes.
    pub poisoned: bool,
}

impl JobState {
    /// Returns a job without tiles, sessions or generations.
    pub fn new(uid: u32, job: JobName) -> Self {
        Self {
            uid,
            job,
            reserved_bytes: 0,
            weights: Weights::default(),
            session_count: 0,
            arena_bytes: 0,
            slot_count: 0,
            slot_used_count: 0,
            reading_count: 0,
            writing_count: 0,
            commit: CommitState::None,
            newest_generation: 0,
            working_generation: 0,
            poisoned: false,
        }
    }
}

/// Progress of a commit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CommitState {
    /// No commit is in progress.
    #[default]
    None,
    /// Some ranks have called; others have not, or writes have not ended.
    Gathering {
        /// Ranks that have called.
        ranks_called: u32,
        /// Ranks on this node.
        ranks: u32,
    },
    /// Flushes and the record are in progress.
    Writing,
}

impl Viewer {
    /// Whether the viewer may see this job.
    pub(super) fn sees(self, key: &JobKey) -> bool {
        match self {
            Self::All => true,
            Self::Uid(uid) => key.uid == uid,
        }
    }
}

impl Data {
    /// Returns the jobs of this viewer, by owner and name.
    pub(in crate::core) fn job_states(&self, viewer: Viewer) -> Vec<JobState> {
        let mut jobs: BTreeMap<&JobKey, JobState> = (self.jobs.iter())
            .filter(|job| viewer.sees(&job.key))
            .map(|job| {
                let weights = self.quotas.weights(job.key.uid, &job.key.name);
                let read_only = self.incarnation.read_only.is_some();
                (&job.key, state(job, weights, read_only))
            })
            .collect();
        for session in self.sessions.iter() {
            let Some(job) = jobs.get_mut(&session.key) else {
                continue;
            };
            job.session_count += 1;
            job.arena_bytes += session.geometry.arena_bytes();
            job.slot_count += u64::from(session.geometry.slot_count());
            job.slot_used_count += session.busy_slots.len() as u64;
        }
        for tile in self.inflight.values() {
            let Some(job) = jobs.get_mut(&tile.key) else {
                continue;
            };
            match tile.request.verb {
                Verb::SwapIn => job.reading_count += 1,
                Verb::SwapOut => job.writing_count += 1,
            }
        }
        jobs.into_values().collect()
    }
}

impl JobTable {
    /// Returns the caller's jobs in the store.
    pub(in crate::core) fn summaries(&self, peer: Peer) -> Vec<JobSummary> {
        let mine = self.iter().filter(|job| job.key.uid == peer.uid);
        mine.filter_map(|job| {
            let stored = job.stored.as_ref()?;
            Some(JobSummary {
                job: job.key.name.clone(),
                uid: job.key.uid,
                reserved_bytes: stored.entry.reserved_bytes,
                newest_generation: stored.newest(),
                open: !job.members.is_empty(),
            })
        })
        .collect()
    }
}

fn state(job: &Job, weights: Weights, read_only: bool) -> JobState {
    let stored = job.stored.as_ref();
    let commit = match &job.round {
        None => CommitState::None,
        Some(round) if round.running => CommitState::Writing,
        Some(round) => CommitState::Gathering {
            ranks_called: round.calls.len() as u32,
            ranks: job.local_ranks,
        },
    };
    JobState {
        reserved_bytes: stored.map_or(0, |stored| stored.entry.reserved_bytes),
        weights,
        // Writes that wait for the overwriting mark are not on a device yet.
        writing_count: job.parked.len() as u64,
        commit,
        newest_generation: stored.map_or(0, |stored| stored.newest().0),
        working_generation: job.resumed.map_or(0, |_| job.working.0),
        poisoned: read_only || job.poison.is_some(),
        ..JobState::new(job.key.uid, job.key.name.clone())
    }
}
