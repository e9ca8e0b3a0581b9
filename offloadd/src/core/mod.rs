//! The daemon's decisions, without a clock, thread, file or async code: events in, actions out.
//!
//! ```text
//!   Call, ArenaMade, PeerGone ──▶ session ──▶ who is there, what memory they have
//!   Define, DropJob, Resume   ──▶ job, resume ▶ what the store knows      ─┐
//!   ReserveScratch            ──▶ scratch ────▶ tiles that end with a session
//!   Commit, Confirm           ──▶ commit ───▶ making a generation durable  ├─▶ script: writes and flushes in order
//!   Submission, IoDone        ──▶ io ───────▶ tiles in and out            ─┤
//!   HandOver                  ──▶ flush ────▶ one flush a device at a time ─┤
//!   Reattach                  ──▶ handing ────▶ what outlives the daemon
//!   AddDevice, DrainDevice    ──▶ devices ──▶ what the store is made of   ─┤
//!   Begin-, EndMeasuring      ──▶ measuring ▶ what its devices are worth  ─┤
//!   MoveOn                    ──▶ moving, copying ▶ tiles to other devices ─┘
//!                                 reading ▶ a life in which nothing is written
//!                                 look ◀───── a driver that shows people what goes on
//! ```
//!
//! Promises: one operation in flight a slot; nothing reads a tile while it is written; a write goes where nothing that
//! can be resumed from lies; what is acknowledged is flushed; a session's arena is dropped after its last operation.
//!
//! Bounds: `sessions_max` sessions with at most their iodepth in flight each; one script a job and one for the catalog,
//! each with at most `script::INFLIGHT_MAX` operations; `catalog_queue::QUEUE_MAX` calls that wait for the catalog.
//! A few thousand operations a second pass here, so maps and short loops are far from being the wall.

mod call;
mod catalog_queue;
mod commit;
mod copying;
mod damage;
mod devices;
mod discard_unreadable;
mod event;
mod flush;
mod handing;
mod inspect;
mod io;
mod job;
mod measuring;
mod members;
mod moving;
mod quota;
mod reading;
mod resume;
mod scratch;
mod script;
mod session;
mod snapshot;

pub use call::*;
pub use event::*;
pub use handing::Adopted;
pub use inspect::{At, CommittedTile, CommittedTiles};
pub use moving::Moves;
pub use snapshot::{CommitState, JobState, Viewer};

use std::collections::{BTreeMap, BTreeSet, HashMap};

use offload_api::BLOCK_BYTES;
use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::{DeviceIndex, Epoch, Generation, SessionToken};

use crate::io::{IoId, IoOp, SessionId};
use crate::quota::{Limits, Quotas};
use crate::store::catalog::Phase;
use crate::store::placement::Space;
use crate::store::recover::{RecoveredDevice, RecoveredStore};
use catalog_queue::CatalogQueue;
use flush::Flush;
use io::Operation;
use job::{Job, JobKey};
use moving::Mover;
use script::{Script, ScriptId};
use session::Session;

/// All of the daemon's state that decides anything.
pub struct Core {
    epoch: Epoch,
    limits: Limits,
    quotas: Quotas,
    /// Never fewer: one that left keeps its index for this life.
    devices: Vec<RecoveredDevice>,
    /// Where the catalog and the jobs' areas lie.
    home: DeviceIndex,
    mover: Mover,
    space: Space,
    catalog: CatalogQueue,
    jobs: BTreeMap<JobKey, Job>,
    sessions: BTreeMap<SessionId, Session>,
    tokens: HashMap<SessionToken, SessionId>,
    operations: HashMap<IoId, Operation>,
    scripts: BTreeMap<ScriptId, Script>,
    /// Under way, at most one a device.
    flushes: BTreeMap<DeviceIndex, Flush>,
    arena_used_bytes: u64,
    measuring: Option<Measuring>,
    /// Devices of which one copy of the superblock may be damaged until the next start mends it: the other must stay.
    half_written: BTreeSet<DeviceIndex>,
    /// Why nothing is written in this life.
    reading_only: Option<Fault>,
    next_number: u64,
}

impl Core {
    /// From what recovery read and mended. `epoch` is random per life of the daemon.
    pub fn new(store: RecoveredStore, epoch: Epoch, limits: Limits) -> Self {
        let device_count = store.devices.len();
        let jobs = store
            .jobs
            .into_iter()
            .map(|recovered| {
                let key = JobKey::new(recovered.entry.uid, recovered.entry.name.clone());
                (key, Job::stored(recovered, device_count))
            })
            .collect();
        Self {
            epoch,
            limits,
            quotas: Quotas::default(),
            devices: store.devices,
            home: store.metadata_device,
            mover: Mover::default(),
            space: store.space,
            catalog: CatalogQueue::new(store.catalog),
            jobs,
            sessions: BTreeMap::new(),
            tokens: HashMap::new(),
            operations: HashMap::new(),
            scripts: BTreeMap::new(),
            flushes: BTreeMap::new(),
            arena_used_bytes: 0,
            measuring: None,
            half_written: BTreeSet::new(),
            reading_only: None,
            next_number: 1,
        }
    }

    /// Takes one event; what must be done is pushed to `actions`.
    pub fn on_event(&mut self, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Call {
                call,
                peer,
                request,
            } => self.on_call(call, peer, request, actions),
            Event::ArenaMade { session, result } => self.on_arena_made(session, result, actions),
            // The driver bounds how long a session may stay unattached; nothing is decided by it here.
            Event::Attached { .. } => {}
            Event::Submission { session, entry } => self.on_submission(session, &entry, actions),
            Event::IoDone { io, result, read } => self.on_io_done(io, result, read, actions),
            Event::RebalanceTick { force } => self.move_on(force, actions),
            Event::RetryMoves => self.mover.retry(),
            Event::Limits(limits) => self.limits = limits,
            Event::Quotas(quotas) => self.quotas = quotas,
            Event::PeerGone { session } => self.end_session(session, None, actions),
            Event::HandOver => self.flush_for_hand_over(actions),
        }
    }

    /// Operations the driver has been asked for and has not reported as done.
    pub fn inflight_count(&self) -> usize {
        self.operations.len()
    }

    fn on_call(&mut self, call: CallId, peer: Peer, request: Call, actions: &mut Vec<Action>) {
        let answer = match request {
            Call::Describe => Ok(Some(Reply::Describe(self.describe(peer)))),
            Call::Open(open) => self.open(call, peer, open, actions),
            Call::DescribeJob { token } => {
                (self.live(peer, token)).map(|session| Some(self.describe_job(session)))
            }
            Call::Define { token, definition } => self
                .live(peer, token)
                .and_then(|session| self.define(call, session, definition, actions)),
            Call::ReserveScratch { token, tile_bytes } => self
                .live(peer, token)
                .and_then(|session| self.reserve_scratch(session, &tile_bytes)),
            Call::Resume { token, generation } => self
                .live(peer, token)
                .and_then(|session| self.resume(call, session, generation, actions)),
            Call::Commit {
                token,
                generation,
                blob,
            } => self
                .live(peer, token)
                .and_then(|session| self.commit(call, session, generation, blob, actions)),
            Call::Confirm { token, generation } => self
                .live(peer, token)
                .and_then(|session| self.confirm(call, session, generation, actions)),
            Call::Reattach { token } => self
                .live(peer, token)
                .map(|session| Some(self.reattach(session))),
            Call::ReportDamage { token, damage } => {
                (self.live(peer, token)).and_then(|session| self.hear_damage(session, damage))
            }
            Call::Close { token } => self.live(peer, token).map(|session| {
                self.end_session(session, Some(call), actions);
                None
            }),
            Call::ListJobs => Ok(Some(Reply::ListJobs(self.list_jobs(peer)))),
            Call::DropJob { job } => self.drop_job(call, JobKey::new(peer.uid, job), actions),
            Call::DiscardUnreadable { uid, job } => {
                self.discard_unreadable(call, JobKey::new(uid, job), actions)
            }
            Call::AddDevice(device) => self.add_device(call, device, actions),
            Call::DrainDevice {
                path,
                rebalance_bytes_per_s_max,
            } => self.drain_device(call, &path, rebalance_bytes_per_s_max, actions),
            Call::BeginMeasuring { path } => self.begin_measuring(&path).map(Some),
            Call::FlushMeasured => self.flush_measured(call, actions),
            Call::EndMeasuring { rates, all_ended } => {
                self.end_measuring(call, rates, all_ended, actions)
            }
            Call::LimitMoves { bytes_per_s_max } => self
                .limit_moves(bytes_per_s_max)
                .map(|()| Some(Reply::LimitMoves)),
        };
        match answer {
            Ok(None) => {}
            Ok(Some(reply)) => actions.push(Action::Reply {
                call,
                reply: Ok(reply),
            }),
            Err(fault) => refuse(call, fault, actions),
        }
    }

    fn describe(&self, peer: Peer) -> DescribeReply {
        DescribeReply {
            epoch: self.epoch,
            devices: self.device_states(),
            arena_free_bytes: self.arena_free_bytes_of(peer),
        }
    }

    /// What a home still holds that tiles have left, and whether the next start takes that away too.
    fn waits_for_a_start(&self, device: DeviceIndex) -> Option<(String, bool)> {
        if device != self.home || !self.home_waits() {
            return None;
        }
        let what = "all tiles have left it; the store's catalog and the jobs' records";
        Some(match self.find_new_home(&self.space) {
            Ok(_) => (
                format!("{what} leave it when offloadd is started next with no session to take up"),
                true,
            ),
            Err(fault) => (format!("{what} are still there: {}", fault.message), false),
        })
    }

    fn status(&self, index: DeviceIndex, device: &RecoveredDevice) -> DeviceStatus {
        let not_moving = match device.phase {
            Some(Phase::Settled) => None,
            _ => self.mover.stuck(),
        };
        let (stuck, waits_for_start) = (not_moving.or_else(|| self.only_read(index)))
            .map(|why| (why, false))
            .or_else(|| self.waits_for_a_start(index))
            .unzip();
        DeviceStatus {
            number: device.superblock.number,
            phase: device.phase,
            left_bytes: self.left_bytes(index),
            stuck,
            waits_for_start: waits_for_start.unwrap_or(false),
        }
    }

    /// What is free where, for people: of the devices that are of the store.
    fn free_room(&self, free_bytes: &[u64]) -> String {
        let free: Vec<String> = (self.devices.iter().zip(free_bytes))
            .filter(|(device, _)| device.phase.is_some())
            .map(|(device, free)| format!("{} has {free}", device.path))
            .collect();
        free.join(", ")
    }

    /// The store's devices, in its order.
    pub fn device_states(&self) -> Vec<DeviceState> {
        let state = |(index, device): (usize, &RecoveredDevice)| DeviceState {
            path: device.path.clone(),
            block_bytes: BLOCK_BYTES,
            data_bytes: device.superblock.data_bytes,
            free_bytes: self.space.free_bytes(DeviceIndex(index as u32)),
            read_bytes_per_s: device.superblock.read_bytes_per_s,
            write_bytes_per_s: device.superblock.write_bytes_per_s,
            status: self.status(DeviceIndex(index as u32), device),
        };
        self.devices.iter().enumerate().map(state).collect()
    }

    fn list_jobs(&self, peer: Peer) -> Vec<JobSummary> {
        let mine = self.jobs.iter().filter(|(key, _)| key.uid == peer.uid);
        mine.filter_map(|(key, job)| {
            let stored = job.stored.as_ref()?;
            Some(JobSummary {
                job: key.name.clone(),
                uid: key.uid,
                reserved_bytes: stored.entry.reserved_bytes,
                newest_generation: stored.newest(),
                open: !job.members.is_empty(),
            })
        })
        .collect()
    }

    fn path(&self, device: DeviceIndex) -> &str {
        &self.devices[device.0 as usize].path
    }

    /// The words for an operation that failed.
    fn device_fault(
        &self,
        op: IoOp,
        device: DeviceIndex,
        offset: u64,
        asked_bytes: u32,
        outcome: Result<u32, i32>,
    ) -> Fault {
        let (kind, why) = match outcome {
            Err(errno) => (
                errno_kind(errno),
                std::io::Error::from_raw_os_error(errno).to_string(),
            ),
            Ok(moved) => (
                FaultKind::Short,
                format!("only {moved} bytes moved; a removed drive answers so"),
            ),
        };
        let path = self.path(device);
        Fault::new(
            kind,
            format!("{op:?} of {asked_bytes} bytes at {offset} of {path}: {why}"),
        )
    }

    /// A number never given out in this life.
    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }
}

fn refuse(call: CallId, fault: Fault, actions: &mut Vec<Action>) {
    actions.push(Action::Reply {
        call,
        reply: Err(fault),
    });
}

fn errno_kind(errno: i32) -> FaultKind {
    if errno == libc::ENOSPC || errno == libc::EDQUOT {
        FaultKind::NoSpace
    } else {
        FaultKind::Io
    }
}

fn next(generation: Generation) -> Generation {
    Generation(generation.0 + 1)
}
