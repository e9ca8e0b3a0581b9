//! Sessions: each is one process of a job, with its arena and its operations in flight.
//!
//! A session ends when its process closes it, dies, or breaks the protocol. No new operation starts then. Its arena is dropped
//! after its last operation, because a device may still be writing there.

use std::collections::{HashMap, HashSet};

use offload_api::fault::{Fault, FaultKind};
use offload_api::geometry::{Geometry, SlotPlace};
use offload_api::ids::{DeviceIndex, Rank, SessionToken, SlotIndex};
use offload_api::ring::RING_ENTRIES_MAX;
use offload_api::ring::entry::Request;
use offload_api::{BLOCK_BYTES, IODEPTH_MAX};
use test_hooks::safeguard::{Safeguard, is_disabled};

use super::job::{Job, RankState};
use super::stored::Activity;
use super::{AdminNote, Data, JobKey};
use crate::core::operations::Operations;
use crate::core::{Action, CallId, DeviceState, OpenReply, OpenSession, Peer, Reply};
use crate::io::{IoId, SessionId};
use crate::store::manifest::Version;
use crate::store::tile_table::Extent;

pub(super) struct Session {
    pub(super) id: SessionId,
    pub(super) key: JobKey,
    pub(super) rank: Rank,
    pub(super) uid: u32,
    pub(super) token: SessionToken,
    pub(super) geometry: Geometry,
    pub(super) iodepth: u32,
    pub(super) ring_entries: u32,
    pub(super) stage: Stage,
    /// Whether its process has fetched the descriptors.
    pub(super) claimed: bool,
    pub(super) busy_slots: HashSet<SlotIndex>,
    pub(super) inflight_count: u32,
    /// Operations in flight by ticket; for a ticket that was used twice, the operation that began last.
    pub(super) tickets: HashMap<u64, IoId>,
    /// Scratch tiles, in the order of their indices.
    pub(super) scratch: Vec<ScratchTile>,
}

/// A tile of a session's own: see [`super::scratch`].
#[derive(Debug)]
pub(super) struct ScratchTile {
    pub(super) extent: Extent,
    pub(super) bytes: u32,
    /// Content; `None` if it was never written or the last write failed.
    pub(super) content: Option<Version>,
    pub(super) activity: Activity,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The driver is making the arena; the open call waits.
    Making { open: CallId },
    /// The process uses it.
    Live,
    /// The session has ended; the arena exists until the last operation has ended.
    Ending { close: Option<CallId> },
    /// The session ended before the arena was made.
    EndingUnmade { open: CallId },
}

/// Returns twice the iodepth: completions that were not taken yet need entries beside operations in flight.
pub(super) const fn ring_entries(iodepth: u32) -> u32 {
    (2 * iodepth).next_power_of_two()
}

const _: () = assert!(ring_entries(IODEPTH_MAX) <= RING_ENTRIES_MAX);

impl ScratchTile {
    pub(super) fn new(extent: Extent, bytes: u32, content: Option<Version>) -> Self {
        Self {
            extent,
            bytes,
            content,
            activity: Activity::Idle,
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        u64::from(self.bytes)
    }

    /// Whether it has content or is being written.
    pub(super) fn is_written(&self) -> bool {
        self.content.is_some() || self.activity == Activity::Writing
    }
}

impl Session {
    /// Whether it has ended, and waits for its last operations.
    pub(super) fn is_ending(&self) -> bool {
        matches!(
            self.stage,
            Stage::Ending { .. } | Stage::EndingUnmade { .. }
        )
    }

    /// Bytes of its scratch tiles on devices.
    pub(super) fn scratch_bytes(&self) -> u64 {
        self.scratch.iter().map(ScratchTile::bytes).sum()
    }

    /// Whether it has scratch tiles with content on `device`; they are never flushed.
    pub(super) fn has_scratch_on(&self, device: DeviceIndex) -> bool {
        (self.scratch.iter()).any(|tile| tile.extent.device == device && tile.is_written())
    }

    /// Checks that the session may start an operation on this tile with this slot. Returns the tile's index, where scratch
    /// tiles follow the job's tiles, and the slot's place.
    pub(super) fn check_slot(
        &self,
        job: &Job,
        request: &Request,
    ) -> Result<(usize, SlotPlace), FaultKind> {
        if self.inflight_count >= self.iodepth {
            return Err(FaultKind::TooMany);
        }
        let index = request.tile.0 as usize;
        if index >= job.tile_count() + self.scratch.len() {
            return Err(FaultKind::UnknownTile);
        }
        if !job.has_resumed(self.rank) {
            return Err(FaultKind::WrongGeneration);
        }
        let place = (self.geometry.slot_place(request.slot)).ok_or(FaultKind::UnknownSlot)?;
        if self.busy_slots.contains(&request.slot) {
            return Err(FaultKind::SlotBusy);
        }
        Ok((index, place))
    }

    /// Counts an operation with this slot as begun.
    pub(super) fn use_slot(&mut self, slot: SlotIndex) {
        self.inflight_count += 1;
        self.busy_slots.insert(slot);
    }

    /// Counts an operation with this slot as ended.
    pub(super) fn free_slot(&mut self, slot: SlotIndex) {
        self.inflight_count -= 1;
        self.busy_slots.remove(&slot);
    }
}

impl Data {
    pub(in crate::core) fn open(
        &mut self,
        call: CallId,
        peer: Peer,
        open: OpenSession,
        ops: &mut Operations,
    ) -> Result<Option<Reply>, Fault> {
        let key = JobKey::new(peer.uid, open.job.clone());
        let admission = self.admission();
        let geometry = admission.check_open(&key, &open)?;
        admission.check_unclaimed(peer.uid)?;
        let iodepth = admission.admit_session(&key, &open, geometry.arena_bytes())?;
        let ring_entries = ring_entries(iodepth);
        let id = SessionId(ops.number());
        let job = self.jobs.get_or_new(&key, ops.device_count());
        job.local_ranks = open.local_ranks;
        let state = RankState {
            pid: peer.pid,
            resumed: false,
        };
        job.members.insert(open.rank, state);
        ops.push(Action::MakeArena {
            session: id,
            token: open.token,
            peer,
            job: open.job,
            geometry: geometry.clone(),
            ring_entries,
            iodepth,
        });
        self.sessions.insert(Session {
            id,
            key,
            rank: open.rank,
            uid: peer.uid,
            token: open.token,
            geometry,
            iodepth,
            ring_entries,
            stage: Stage::Making { open: call },
            claimed: false,
            busy_slots: HashSet::new(),
            inflight_count: 0,
            tickets: HashMap::new(),
            scratch: Vec::new(),
        });
        Ok(None)
    }

    pub(in crate::core) fn on_arena_made(
        &mut self,
        id: SessionId,
        result: Result<(), Fault>,
        devices: Vec<DeviceState>,
        ops: &mut Operations,
    ) {
        let member = self.member(id);
        let session = member.session;
        match (session.stage, result) {
            (Stage::Making { open }, Ok(())) => {
                session.stage = Stage::Live;
                let reply = OpenReply {
                    token: session.token,
                    epoch: member.incarnation.epoch,
                    arena_bytes: session.geometry.arena_bytes(),
                    ring_entries: session.ring_entries,
                    iodepth: session.iodepth,
                    block_bytes: BLOCK_BYTES,
                    devices,
                };
                ops.reply(open, Ok(Reply::Open(Box::new(reply))));
            }
            (Stage::EndingUnmade { open }, Ok(())) => {
                session.stage = Stage::Ending { close: None };
                let gone = Fault::new(
                    FaultKind::NotFound,
                    "the process ended while it opened its session",
                );
                ops.refuse(open, gone);
                self.try_drop(id, ops);
            }
            (Stage::Making { open } | Stage::EndingUnmade { open }, Err(fault)) => {
                ops.refuse(open, fault);
                self.forget(id);
            }
            (Stage::Live | Stage::Ending { .. }, _) => panic!("an arena is made once"),
        }
    }

    /// Ends a session: its process has closed it (the call `close` waits for the end), has died, or broke the protocol.
    pub(in crate::core) fn end_session(
        &mut self,
        id: SessionId,
        close: Option<CallId>,
        ops: &mut Operations,
    ) {
        // A session may end twice: its process closes it and then exits while the last operations end.
        if self.sessions.end(id, close) {
            let member = self.member(id);
            for write in member.job.lose_member(member.session.rank, id, ops) {
                self.cancel_write(&write);
            }
            self.try_drop(id, ops);
        }
    }

    /// Drops the arena of an ended session after its last operation.
    pub(super) fn try_drop(&mut self, id: SessionId, ops: &mut Operations) {
        let session = self.member(id).session;
        let Stage::Ending { close } = session.stage else {
            return;
        };
        if session.inflight_count > 0 && !is_disabled(Safeguard::ReclaimAfterIo) {
            return;
        }
        ops.push(Action::DropArena { session: id });
        self.forget(id);
        if let Some(call) = close {
            ops.reply(call, Ok(Reply::Close));
        }
    }

    fn forget(&mut self, id: SessionId) {
        let session = self.sessions.remove(id);
        if !session.scratch.is_empty() {
            let extents = session
                .scratch
                .iter()
                .map(|tile| (tile.extent, tile.bytes()));
            self.notes.push_back(AdminNote::Freed(extents.collect()));
        }
        self.jobs
            .existing(&session.key)
            .members
            .remove(&session.rank);
        self.jobs.settle(&session.key);
    }
}
