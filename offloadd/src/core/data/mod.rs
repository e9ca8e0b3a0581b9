//! Sessions and the tiles of their jobs: reads and writes of tiles, commits, and the generation that a job resumes from.
//!
//! Owns the state of every job and session. No other module changes it. The administration uses the functions of [`layout`],
//! and learns of events here by a [`Note`].
//!
//! ```text
//!   session ──▶ define, resume ──▶ tiles ──▶ commit ──▶ confirm
//!      └─ scratch, quota              └─ damage       forget: records that could not be read
//!   transitions: how the state of a job changes
//!   layout: functions for the administration     adopt: state that outlives the daemon     snapshot, inspect: reports
//! ```

mod adopt;
mod commit;
mod damage;
mod forget;
mod inspect;
mod job;
mod layout;
mod members;
mod quota;
mod resume;
mod scratch;
mod session;
mod snapshot;
mod tiles;
mod transitions;

use std::collections::{BTreeMap, HashMap, VecDeque};

use offload_api::fault::Fault;
use offload_api::ids::{Epoch, Generation, SessionToken};

use super::operations::{Operations, ScriptEnd, ScriptId, Step};
use super::{CallId, JobKey};
use crate::io::{IoId, SessionId};
use crate::quota::{Limits, Quotas};
use crate::store::manifest::Record;
use crate::store::recover::RecoveredJob;
use crate::store::tile_table::Extent;
use job::Job;
use session::Session;
use tiles::TileIo;

pub use adopt::Adopted;
pub use inspect::{At, CommittedTile, CommittedTiles};
pub use snapshot::{CommitState, JobState, Viewer};

pub(super) use adopt::DeviceNumbers;
pub(super) use job::{Define, Holds};
pub(super) use layout::{Clearing, Layout, Movable, NewExtent};
pub(super) use scratch::{ScratchRequest, ScratchWrite};

/// Sessions, jobs and tiles in flight.
pub(super) struct Data {
    epoch: Epoch,
    limits: Limits,
    quotas: Quotas,
    /// Reason why nothing is written in this incarnation.
    read_only: Option<Fault>,
    jobs: BTreeMap<JobKey, Job>,
    sessions: BTreeMap<SessionId, Session>,
    tokens: HashMap<SessionToken, SessionId>,
    /// Tiles that the driver has not reported as done.
    inflight: HashMap<IoId, TileIo>,
    /// Purposes of the scripts of jobs.
    scripts: BTreeMap<ScriptId, (JobKey, Purpose)>,
    arena_used_bytes: u64,
    notes: VecDeque<Note>,
}

/// A change that the administration must know.
#[derive(Debug)]
pub(super) enum Note {
    /// Extents of a session's own tiles became free.
    Freed(Vec<(Extent, u64)>),
    /// A job writes to this extent of a tile.
    Overwrites { key: JobKey, tile: u32, which: u8 },
    /// A job's unreadable records were discarded, so its tiles can move.
    Forgotten,
}

/// Purpose of a job's script, with the values that its end needs.
#[derive(Debug)]
enum Purpose {
    /// Discards later generations.
    Resume {
        generation: Generation,
    },
    Commit {
        record: Record,
    },
    /// Withdraws the record of a failed commit.
    Withdraw {
        generation: Generation,
        fault: Fault,
    },
    Confirm,
    /// Marks the newest record: its tiles are being overwritten.
    Overwrite,
    /// Discards unreadable records.
    Forget {
        call: CallId,
    },
}

impl Data {
    pub(super) fn new(
        jobs: Vec<RecoveredJob>,
        device_count: usize,
        epoch: Epoch,
        limits: Limits,
    ) -> Self {
        let jobs = jobs.into_iter().map(|recovered| {
            let key = JobKey::new(recovered.entry.uid, recovered.entry.name.clone());
            (key, Job::stored(recovered, device_count))
        });
        Self {
            epoch,
            limits,
            quotas: Quotas::default(),
            read_only: None,
            jobs: jobs.collect(),
            sessions: BTreeMap::new(),
            tokens: HashMap::new(),
            inflight: HashMap::new(),
            scripts: BTreeMap::new(),
            arena_used_bytes: 0,
            notes: VecDeque::new(),
        }
    }

    pub(super) fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Sets the limits of future requests; granted resources stay.
    pub(super) fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    pub(super) fn set_quotas(&mut self, quotas: Quotas) {
        self.quotas = quotas;
    }

    /// Makes the store read-only for the reason `why`.
    pub(super) fn begin_read_only(&mut self, why: Fault) {
        self.read_only = Some(why);
    }

    fn check_writing(&self) -> Result<(), Fault> {
        self.read_only.clone().map_or(Ok(()), Err)
    }

    pub(super) fn next_note(&mut self) -> Option<Note> {
        self.notes.pop_front()
    }

    pub(super) fn inflight_count(&self) -> usize {
        self.inflight.len()
    }

    /// Runs a job's script; a job has at most one.
    fn run_script(
        &mut self,
        key: &JobKey,
        purpose: Purpose,
        steps: Vec<Step>,
        ops: &mut Operations,
    ) {
        let job = self.jobs.get_mut(key).expect("a script's job exists");
        assert!(job.script.is_none(), "one script a job");
        let id = ops.run_script(steps);
        job.script = Some(id);
        self.scripts.insert(id, (key.clone(), purpose));
    }

    /// Handles the end of a job's script. Returns the end if the script is not a job's.
    pub(super) fn on_script_end(
        &mut self,
        end: ScriptEnd,
        ops: &mut Operations,
    ) -> Option<ScriptEnd> {
        let Some((key, purpose)) = self.scripts.remove(&end.script) else {
            return Some(end);
        };
        let job = self.jobs.get_mut(&key).expect("a script's job exists");
        job.script = None;
        let result = end.result;
        match purpose {
            Purpose::Resume { generation } => self.finish_resume(&key, generation, result, ops),
            Purpose::Commit { record } => self.finish_commit(&key, record, result, ops),
            Purpose::Withdraw { generation, fault } => {
                self.finish_withdraw(&key, generation, fault, result, ops);
            }
            Purpose::Confirm => self.finish_confirm(&key, result, ops),
            Purpose::Overwrite => self.finish_overwrite(&key, result, ops),
            Purpose::Forget { call } => self.finish_forget(&key, call, result, ops),
        }
        self.settle(&key);
        None
    }
}
