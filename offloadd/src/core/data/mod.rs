//! Sessions and the tiles of their jobs: reads and writes of tiles, commits, and the generation that a job resumes from.
//!
//! Owns the state of every job and session. No other module changes it. The administration uses the functions of [`layout`]
//! and [`jobs`], and learns of events here by an [`AdminNote`].
//!
//! ```text
//!   Data ─┬─ JobTable ──▶ Job: define, resume ──▶ tiles ──▶ commit ──▶ confirm
//!         │                │                        └─ damage       forget: records that could not be read
//!         │                └─ StoredJob: its state on the devices   transitions: how the state of a job changes
//!         ├─ SessionTable ──▶ Session: slots, operations in flight, scratch
//!         └─ Admission: limits and quotas, over both tables
//!   members: a session with its job     layout: functions for the administration
//!   adopt: state that outlives the daemon     snapshot, inspect: reports
//! ```
//!
//! What concerns one job is a method of [`Job`](job::Job), with the job's state and what it needs of the incarnation as its only inputs.
//! [`Data`] finds the job, and does what concerns sessions or several jobs.

mod adopt;
mod commit;
mod damage;
mod define;
mod forget;
mod inspect;
mod job;
mod jobs;
mod layout;
mod members;
mod quota;
mod resume;
mod scratch;
mod script;
mod session;
mod sessions;
mod snapshot;
mod stored;
mod tile_io;
mod tiles;
mod transitions;

use std::collections::{HashMap, VecDeque};

use offload_api::fault::Fault;
use offload_api::ids::Epoch;

use super::operations::{Operations, ScriptEnd};
use super::{CallId, JobKey, Reply};
use crate::io::IoId;
use crate::quota::{Limits, Quotas};
use crate::store::recover::RecoveredJob;
use crate::store::tile_table::Extent;
use quota::Admission;
use script::ScriptResult;
use sessions::SessionTable;
use tile_io::TileIo;

pub use adopt::AdoptedSession;
pub use inspect::{CommittedTile, CommittedTiles, TilePosition};
pub use quota::UserState;
pub use snapshot::{CommitState, JobState, Viewer};

pub(super) use adopt::DeviceNumbers;
pub(super) use define::DefineOutcome;
pub(super) use jobs::JobTable;
pub(super) use layout::{Layout, Movable, NewExtent, TornRecords};
pub(super) use scratch::{ScratchRequest, ScratchWrite};
pub(super) use stored::Holds;

/// Sessions, jobs and tiles in flight.
pub(super) struct Data {
    incarnation: Incarnation,
    limits: Limits,
    quotas: Quotas,
    pub(super) jobs: JobTable,
    pub(super) sessions: SessionTable,
    /// Tiles that the driver has not reported as done.
    inflight: HashMap<IoId, TileIo>,
    notes: VecDeque<AdminNote>,
}

/// What all jobs share in this incarnation of the daemon.
pub(super) struct Incarnation {
    epoch: Epoch,
    /// Reason why nothing is written.
    read_only: Option<Fault>,
}

/// A change that the administration must know.
#[derive(Debug)]
pub(super) enum AdminNote {
    /// Extents of a session's own tiles became free.
    Freed(Vec<(Extent, u64)>),
    /// A job writes to this extent of a tile.
    Overwrites { key: JobKey, tile: u32, which: u8 },
    /// A job's unreadable records were discarded, so its tiles can move.
    Forgotten,
}

impl Incarnation {
    fn check_writing(&self) -> Result<(), Fault> {
        self.read_only.clone().map_or(Ok(()), Err)
    }
}

impl Data {
    pub(super) fn new(
        jobs: Vec<RecoveredJob>,
        device_count: usize,
        epoch: Epoch,
        limits: Limits,
    ) -> Self {
        Self {
            incarnation: Incarnation {
                epoch,
                read_only: None,
            },
            limits,
            quotas: Quotas::default(),
            jobs: JobTable::new(jobs, device_count),
            sessions: SessionTable::default(),
            inflight: HashMap::new(),
            notes: VecDeque::new(),
        }
    }

    pub(super) fn epoch(&self) -> Epoch {
        self.incarnation.epoch
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
        self.incarnation.read_only = Some(why);
    }

    /// Returns the limits and quotas, to check a request.
    pub(super) fn admission(&self) -> Admission<'_> {
        Admission {
            limits: &self.limits,
            quotas: &self.quotas,
            jobs: &self.jobs,
            sessions: &self.sessions,
        }
    }

    pub(super) fn next_note(&mut self) -> Option<AdminNote> {
        self.notes.pop_front()
    }

    pub(super) fn inflight_count(&self) -> usize {
        self.inflight.len()
    }

    /// Starts the job's commit if all ranks have called and all writes have ended.
    pub(super) fn try_commit(&mut self, key: &JobKey, ops: &mut Operations) {
        if let Some(job) = self.jobs.get_mut(key) {
            job.try_commit(&self.incarnation, ops);
        }
    }

    /// Discards the unreadable records of a job that has no sessions.
    pub(super) fn discard_unreadable(
        &mut self,
        call: CallId,
        key: &JobKey,
        ops: &mut Operations,
    ) -> Result<Option<Reply>, Fault> {
        self.incarnation.check_writing()?;
        let ending = self.sessions.ending(key);
        (self.jobs.closed_mut(key, &ending)?).discard_unreadable(call, ops)
    }

    /// Handles the end of a job's script. Returns the end if the script is not a job's.
    pub(super) fn on_script_end(
        &mut self,
        end: ScriptEnd,
        ops: &mut Operations,
    ) -> Option<ScriptEnd> {
        let Some(job) = self.jobs.running(end.script) else {
            return Some(end);
        };
        let key = job.key.clone();
        match job.on_script_end(end.result, &self.incarnation, ops) {
            ScriptResult::Done => {}
            ScriptResult::Overwrites(writes) => {
                for write in writes {
                    self.start_write(write, ops);
                }
            }
            ScriptResult::CannotOverwrite(writes) => {
                for write in writes {
                    self.refuse_write(&write, ops);
                }
                self.try_commit(&key, ops);
            }
            // The record kept the job's tiles from moving.
            ScriptResult::Forgot => self.notes.push_back(AdminNote::Forgotten),
        }
        self.jobs.settle(&key);
        None
    }
}
