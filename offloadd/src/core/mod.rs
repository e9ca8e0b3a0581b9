//! The daemon's decisions, without a clock, thread, file or async code: events in, actions out.
//!
//! ```text
//!                       ┌────── AdminNote ─────┐
//!   Event ──▶ Core ──▶ data                  admin ◀── Event
//!              │        │ ◀─ Reserve, Layout, ─┘ │
//!              │        │    ReplaceExtent,      │
//!              │        │    Freeze, Thaw        │
//!              │        └────▶ operations ◀──────┘
//!              └───────────────────┴──▶ Action
//! ```
//!
//! - [`data`] owns sessions and jobs: their tiles, commits, quotas. It does not know free space, the catalog, or why tiles move.
//! - [`admin`] owns devices, free space, the catalog, and the tiles that move. It never changes a job: it asks `data` to
//!   reserve bytes for a job, to freeze it, to exchange extents of its tiles, and to thaw it, and reads where tiles lie.
//! - [`operations`] owns what is in flight for both: writes and flushes in order (scripts), and flushes that are shared. The
//!   owner of a script is told of its end.
//! - [`Core`] hands each event to the part that decides. Before it takes the next event, it passes values between the parts:
//!   ends of scripts to their owners, and notes of `data` (space freed, extent written to) to `admin`.
//!
//! The path of one tile: `Submission` ▶ [`data`] checks session, slot, tile and generation ▶ `Io` of the extent that no record
//! names ▶ `IoDone` ▶ `Complete`. `Commit` of the last rank ▶ flush of every device written to ▶ record, both copies ▶ flush
//! of the metadata device ▶ `Reply`.
//!
//! Invariants: a slot has one operation in flight; nothing reads a tile while it is written; a write goes to an extent that no
//! record names; what is acknowledged is flushed; a session's arena is dropped after its last operation.
//!
//! Bounds: `sessions_max` sessions with at most their iodepth in flight each; one script a job and one for the catalog,
//! each with at most `script::INFLIGHT_MAX` operations; `catalog_queue::QUEUE_MAX` calls that wait for the catalog.
//! A few thousand operations per second pass here, so maps and short loops are not the bottleneck.

mod admin;
mod call;
mod data;
mod event;
mod operations;

pub use admin::Moves;
pub use call::*;
pub use data::{
    AdoptedSession, CommitState, CommittedTile, CommittedTiles, JobState, TilePosition, UserState,
    Viewer,
};
pub use event::*;

use offload_api::fault::Fault;
use offload_api::ids::{DeviceIndex, DeviceNumber, Epoch, Generation};
use offload_api::ring::entry::Sqe;

use crate::blocks::BlockError;
use crate::handover::message;
use crate::io::{AlignedBytes, IoId, IoOp, IoResult, SessionId};
use crate::quota::Limits;
use crate::store::catalog::Catalog;
use crate::store::content::JobContent;
use crate::store::definition::JobName;
use crate::store::recover::RecoveredStore;
use crate::store::superblock::Superblock;
use admin::Admin;
use data::{Data, DefineOutcome};
use operations::{Operation, Operations, Waiter};

/// A job's name in the whole store.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct JobKey {
    uid: u32,
    name: JobName,
}

impl JobKey {
    fn new(uid: u32, name: JobName) -> Self {
        Self { uid, name }
    }
}

/// State and decisions of the daemon: events in, actions out, no I/O and no clock, so that a simulation can run it through any order of failures. The
/// price: what the driver knows reaches it as an event, and each answer of a device comes back through here before its caller has it.
pub struct Core {
    data: Data,
    admin: Admin,
    ops: Operations,
}

impl Core {
    /// Starts with the store as recovered and repaired. `epoch` is random for each incarnation of the daemon.
    pub fn new(store: RecoveredStore, epoch: Epoch, limits: Limits) -> Self {
        let names = (store.devices.iter())
            .map(|device| (device.path.clone(), DeviceNumber(device.superblock.number)));
        let ops = Operations::new(store.metadata_device, names.collect());
        let data = Data::new(store.jobs, store.devices.len(), epoch, limits);
        let admin = Admin::new(
            store.devices,
            store.metadata_device,
            store.space,
            store.catalog,
            limits.rebalance_bytes_per_s_max,
        );
        Self { data, admin, ops }
    }

    /// Handles one event and pushes the actions that follow to `actions`.
    pub fn on_event(&mut self, event: Event, actions: &mut Vec<Action>) {
        self.ops.swap_actions(actions);
        let Self { data, admin, ops } = self;
        match event {
            Event::Call {
                call,
                peer,
                request,
            } => self.on_call(call, peer, request),
            Event::ArenaMade { session, result } => {
                let devices = admin.device_states(data);
                data.on_arena_made(session, result, devices, ops);
            }
            // The driver limits how long a session may stay unattached.
            Event::Attached { session } => data.sessions.on_attached(session),
            Event::Submission { session, entry } => self.on_submission(session, &entry),
            Event::IoDone { io, result, read } => self.on_io_done(io, result, read),
            Event::RebalanceTick { force } => admin.move_next(force, data, ops),
            Event::RetryMoves => admin.mover.retry(),
            Event::Limits(limits) => {
                admin
                    .mover
                    .set_bytes_per_s_max(limits.rebalance_bytes_per_s_max);
                data.set_limits(limits);
            }
            Event::Quotas(quotas) => data.set_quotas(quotas),
            Event::PeerGone { session } => data.end_session(session, None, ops),
            Event::HandOver => admin.flush_for_hand_over(data, ops),
        }
        self.carry();
        self.ops.swap_actions(actions);
    }

    /// Carries values between the cores until none is left.
    fn carry(&mut self) {
        let Self { data, admin, ops } = self;
        loop {
            if let Some(note) = data.next_note() {
                admin.on_note(note);
            } else if let Some(end) = ops.next_end() {
                if let Some(end) = data.on_script_end(end, ops) {
                    admin.on_script_end(end, data, ops);
                }
            } else {
                return;
            }
        }
    }

    fn on_submission(&mut self, session: SessionId, entry: &Sqe) {
        let Self { data, admin, ops } = self;
        if let Some(write) = data.scratch_write(session, entry)
            && let Some(extent) = admin.devices.move_scratch(&write)
        {
            data.replace_scratch(&write, extent);
        }
        data.on_submission(session, entry, ops);
    }

    fn on_io_done(&mut self, io: IoId, result: IoResult, read: Option<AlignedBytes>) {
        let Self { data, admin, ops } = self;
        if let Some(extent) = data.on_io_done(io, result, ops) {
            return (admin.mover).free_left(Some(extent), &mut admin.devices, data);
        }
        match ops.end_operation(io) {
            Some(Operation::Write {
                script,
                device,
                offset,
                bytes,
            }) => {
                let failed = (result.outcome != Ok(bytes))
                    .then(|| ops.device_fault(IoOp::Write, device, offset, bytes, result.outcome));
                ops.on_script_io_done(script, failed);
            }
            Some(Operation::Flush(device)) => self.on_flush_done(device, result),
            None => {
                let copied = admin.on_io_done(io, result, read, data, ops);
                assert!(copied, "an operation in flight");
            }
        }
    }

    /// If the flush failed, first tells every job and copy with something unflushed on the device; then the waiters, in order.
    fn on_flush_done(&mut self, device: DeviceIndex, result: IoResult) {
        let (waiters, failed) = self.ops.on_flush_done(device, result);
        if let Some(fault) = &failed {
            self.data.poison_writers_of(device, fault);
            self.admin.mover.fail_copies_of(device, fault);
        }
        for waiter in waiters {
            match waiter {
                Waiter::Script(script) => {
                    self.ops.on_script_io_done(script, failed.clone());
                    self.carry();
                }
                Waiter::HandOver => {}
            }
        }
    }

    fn on_call(&mut self, call: CallId, peer: Peer, request: Call) {
        match self.answer(call, peer, request) {
            Ok(None) => {}
            Ok(Some(reply)) => self.ops.reply(call, Ok(reply)),
            Err(fault) => self.ops.refuse(call, fault),
        }
    }

    /// Returns the answer to a call; `None` if it comes later.
    fn answer(&mut self, call: CallId, peer: Peer, request: Call) -> Result<Option<Reply>, Fault> {
        let Self { data, admin, ops } = self;
        match request {
            Call::Describe => {
                let admission = data.admission();
                let free_bytes = admin.devices.free_bytes();
                Ok(Some(Reply::Describe(DescribeReply {
                    epoch: data.epoch(),
                    devices: admin.device_states(data),
                    arena_free_bytes: admission.arena_free_bytes_of(peer),
                    device_free_bytes: admission.device_free_bytes_of(peer, free_bytes),
                    session_free_count: admission.session_free_count_of(peer),
                })))
            }
            Call::Open(open) => data.open(call, peer, open, ops),
            Call::DescribeJob { token } => Ok(Some(data.live_member(peer, token)?.describe_job())),
            Call::Define { token, definition } => {
                match data.live_member(peer, token)?.define(call, definition)? {
                    DefineOutcome::Known(reserved_bytes) => {
                        return Ok(Some(Reply::Define { reserved_bytes }));
                    }
                    DefineOutcome::Waits => {}
                    DefineOutcome::New {
                        key,
                        definition,
                        local_ranks,
                    } => admin.define(key, definition, local_ranks, data, ops)?,
                }
                Ok(None)
            }
            Call::ReserveScratch { token, tile_bytes } => {
                let asked = data.check_scratch(data.sessions.live(peer, token)?, tile_bytes)?;
                let extents = admin.devices.reserve_scratch(&asked)?;
                Ok(Some(data.give_scratch(asked, extents)))
            }
            Call::Resume { token, generation } => {
                let member = data.live_member(peer, token)?;
                member.resume(call, generation, ops)
            }
            Call::Commit {
                token,
                generation,
                blob,
            } => {
                let member = data.live_member(peer, token)?;
                member.commit(call, generation, blob, ops)
            }
            Call::Confirm { token, generation } => {
                let member = data.live_member(peer, token)?;
                member.confirm(call, generation, ops)
            }
            Call::Reattach { token } => Ok(Some(data.live_member(peer, token)?.reattach())),
            Call::ReportDamage { token, damage } => {
                let member = data.live_member(peer, token)?;
                member.report_damage(damage, ops).map(Some)
            }
            Call::Close { token } => {
                let session = data.sessions.live(peer, token)?;
                data.end_session(session, Some(call), ops);
                Ok(None)
            }
            Call::ListJobs => Ok(Some(Reply::ListJobs(data.jobs.summaries(peer)))),
            Call::DropJob { uid, job } => admin.drop_job(call, JobKey::new(uid, job), data, ops),
            Call::DiscardUnreadable { uid, job } => {
                data.discard_unreadable(call, &JobKey::new(uid, job), ops)
            }
            Call::AddDevice(device) => admin.add_device(call, device, data, ops),
            Call::DrainDevice {
                path,
                rebalance_bytes_per_s_max,
            } => admin.drain_device(call, &path, rebalance_bytes_per_s_max, data, ops),
            Call::LimitMoves { bytes_per_s_max } => {
                admin.limit_moves(bytes_per_s_max, data)?;
                Ok(Some(Reply::LimitMoves))
            }
        }
    }

    /// Returns the catalog that must be durable before this incarnation serves, and the position of the device to write it to.
    /// Call [`Self::begin_incarnation`] when it is.
    pub fn first_catalog(&self) -> (usize, Catalog) {
        self.admin.first_catalog()
    }

    /// The first catalog of this incarnation is durable: state that was handed over earlier is refused from now on.
    pub fn begin_incarnation(&mut self, first: Catalog) {
        self.admin.begin_incarnation(first);
    }

    /// Begins a read-only incarnation, because of `error`, in place of [`Core::begin_incarnation`].
    pub fn begin_reading(&mut self, error: &BlockError) {
        self.admin.begin_reading(error, &mut self.data);
    }

    /// Adopts the state that the previous daemon handed over, before any other event. Returns the adopted sessions, and one line
    /// for each job that is not adopted. `has_descriptors` tells whether a session, by its index in the state, has descriptors.
    ///
    /// # Errors
    /// The state belongs to another store, or another daemon has served the store since.
    pub fn adopt(
        &mut self,
        state: &message::HandoverState,
        has_descriptors: impl Fn(usize) -> bool,
    ) -> Result<(Vec<AdoptedSession>, Vec<String>), String> {
        let Self { data, admin, ops } = self;
        admin.adopt(state, has_descriptors, data, ops)
    }

    /// Whether nothing is in flight or waits to be.
    pub fn is_quiet(&self) -> bool {
        self.ops.is_idle() && self.admin.is_quiet() && self.data.is_quiet()
    }

    /// Returns the state that the next daemon cannot read from the devices.
    pub fn hand_over(&self) -> message::HandoverState {
        assert!(self.is_quiet(), "operations are in flight at a hand-over");
        self.admin.hand_over(&self.data)
    }

    /// Epoch that messages must name.
    pub fn epoch(&self) -> Epoch {
        self.data.epoch()
    }

    /// Operations that the driver has not reported as done.
    pub fn inflight_count(&self) -> usize {
        self.ops.inflight_count() + self.data.inflight_count() + self.admin.mover.inflight_count()
    }

    /// Reason why the store is read-only in this incarnation, if it is.
    pub fn read_only(&self) -> Option<&Fault> {
        self.admin.read_only()
    }

    /// Devices in the store's order.
    pub fn device_states(&self) -> Vec<DeviceState> {
        self.admin.device_states(&self.data)
    }

    /// Checks that one more device can be added in this incarnation: a device that left keeps its index until it ends.
    ///
    /// # Errors
    /// All indices are used.
    pub fn check_growth(&self) -> Result<(), Fault> {
        self.admin.devices.check_growth()
    }

    /// Superblock of a device, to tell it from another device at its path.
    pub fn superblock_of(&self, device: DeviceIndex) -> Superblock {
        self.admin.devices.superblock(device)
    }

    /// Returns the state of the moves.
    pub fn moves(&self) -> Moves {
        self.admin.moves(&self.data)
    }

    /// Number of times that all tiles were searched for those that are to move.
    pub fn plans_made(&self) -> u64 {
        self.admin.mover.plans_made()
    }

    /// Bytes of tiles moved since the daemon started, copied or not.
    pub fn moved_bytes(&self) -> u64 {
        self.admin.mover.moved_bytes()
    }

    /// Bytes of them that the daemon copied, to which the rate limit applies.
    pub fn copied_bytes(&self) -> u64 {
        self.admin.mover.copied_bytes()
    }

    /// Limit of bytes copied per second while tiles move; `None` if there is none, or no tiles move.
    pub fn rebalance_bytes_per_s_max(&self) -> Option<u64> {
        self.admin.rebalance_bytes_per_s_max(&self.data)
    }

    /// Jobs that `viewer` may see, sorted by owner and name.
    pub fn job_states(&self, viewer: Viewer) -> Vec<JobState> {
        self.data.job_states(viewer)
    }

    /// Users of the jobs that `viewer` may see, sorted by user ID.
    pub fn user_states(&self, viewer: Viewer) -> Vec<UserState> {
        self.data.admission().user_states(viewer)
    }

    /// Bytes of host memory of all sessions, and their number.
    pub fn arena_used(&self) -> (u64, u64) {
        let sessions = &self.data.sessions;
        (sessions.arena_bytes(), sessions.len() as u64)
    }

    /// Jobs in the store that `viewer` may see, sorted by owner and name.
    pub fn contents(&self, viewer: Viewer) -> Vec<JobContent> {
        self.data.jobs.contents(viewer)
    }

    /// Whether damage that a scrub found is new: each version of a tile counts once, whoever finds it.
    pub fn is_new_damage(&mut self, uid: u32, job: &JobName, damage: &TileDamage) -> bool {
        let key = JobKey::new(uid, job.clone());
        self.data.jobs.is_new_damage(&key, damage)
    }

    /// Some committed tiles of a job from `at` on; `None` if there is no such job.
    pub fn committed_tiles(&self, at: &TilePosition) -> Option<CommittedTiles> {
        let paths = self.admin.devices.paths();
        self.data.jobs.committed_tiles(at, &paths)
    }
}

fn next(generation: Generation) -> Generation {
    Generation(generation.0 + 1)
}
