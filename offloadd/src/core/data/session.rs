//! Sessions: each is one process of a job, with its arena and its operations in flight.
//!
//! A session ends when its process closes it, dies, or breaks the protocol. No new operation starts then. Its arena is dropped
//! after its last operation, because a device may still be writing there.

use std::collections::{HashMap, HashSet};

use offload_api::fault::{Fault, FaultKind};
use offload_api::geometry::Geometry;
use offload_api::ids::{DeviceIndex, Rank, SessionToken, SlotIndex};
use offload_api::ring::RING_ENTRIES_MAX;
use offload_api::{BLOCK_BYTES, IODEPTH_MAX};
use offload_support::units::ApproxBytes;
use test_hooks::safeguard::{Safeguard, is_disabled};

use super::job::Job;
use super::scratch::ScratchTile;
use super::{Data, JobKey, Note};
use crate::core::operations::Operations;
use crate::core::{Action, CallId, DeviceState, OpenReply, OpenSession, Peer, Reply};
use crate::io::{IoId, SessionId};
use crate::store::manifest::LOCAL_RANKS_MAX;

pub(super) struct Session {
    pub(super) key: JobKey,
    pub(super) rank: Rank,
    pub(super) uid: u32,
    /// Process number, for messages.
    pub(super) pid: u32,
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
    /// Whether the session has resumed, so that tiles can be read and written.
    pub(super) resumed: bool,
    /// Scratch tiles, in the order of their indices.
    pub(super) scratch: Vec<ScratchTile>,
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

impl Session {
    /// Bytes of its scratch tiles on devices.
    pub(super) fn scratch_bytes(&self) -> u64 {
        self.scratch.iter().map(ScratchTile::bytes).sum()
    }

    /// Whether it has scratch tiles with content on `device`; they are never flushed.
    pub(super) fn has_scratch_on(&self, device: DeviceIndex) -> bool {
        (self.scratch.iter()).any(|tile| tile.extent.device == device && tile.is_written())
    }
}

impl Data {
    pub(super) fn arena_free_bytes(&self) -> u64 {
        // After the limit was lowered, more than the limit may be in use.
        (self.limits.arena_bytes_max).saturating_sub(self.arena_used_bytes)
    }

    pub(in crate::core) fn has_sessions(&self) -> bool {
        !self.sessions.is_empty()
    }

    /// Returns the live session of a token, if it belongs to this peer.
    pub(in crate::core) fn live(
        &self,
        peer: Peer,
        token: SessionToken,
    ) -> Result<SessionId, Fault> {
        let found = self.tokens.get(&token).copied().filter(|id| {
            let session = &self.sessions[id];
            session.uid == peer.uid && session.stage == Stage::Live
        });
        found.ok_or_else(|| {
            Fault::new(
                FaultKind::NotFound,
                "no session has this token: the session has ended, or belongs to another daemon",
            )
        })
    }

    pub(in crate::core) fn open(
        &mut self,
        call: CallId,
        peer: Peer,
        open: OpenSession,
        ops: &mut Operations,
    ) -> Result<Option<Reply>, Fault> {
        let key = JobKey::new(peer.uid, open.job.clone());
        let geometry = self.check_open(&key, &open)?;
        self.check_unclaimed(peer.uid)?;
        let iodepth = self.admit_session(&key, &open, geometry.arena_bytes())?;
        let ring_entries = ring_entries(iodepth);
        let id = SessionId(ops.number());
        self.arena_used_bytes += geometry.arena_bytes();
        let device_count = ops.device_count();
        let job = (self.jobs.entry(key.clone())).or_insert_with(|| Job::new(device_count));
        job.local_ranks = open.local_ranks;
        job.members.insert(open.rank, id);
        self.tokens.insert(open.token, id);
        ops.push(Action::MakeArena {
            session: id,
            token: open.token,
            peer,
            job: open.job,
            geometry: geometry.clone(),
            ring_entries,
            iodepth,
        });
        let session = Session {
            key,
            rank: open.rank,
            uid: peer.uid,
            pid: peer.pid,
            token: open.token,
            geometry,
            iodepth,
            ring_entries,
            stage: Stage::Making { open: call },
            claimed: false,
            busy_slots: HashSet::new(),
            inflight_count: 0,
            tickets: HashMap::new(),
            resumed: false,
            scratch: Vec::new(),
        };
        self.sessions.insert(id, session);
        Ok(None)
    }

    fn check_open(&self, key: &JobKey, open: &OpenSession) -> Result<Geometry, Fault> {
        let fault = |kind, message| Err(Fault::new(kind, message));
        let (name, rank) = (&key.name, open.rank);
        if self.sessions.len() >= self.limits.sessions_max as usize {
            return fault(
                FaultKind::TooMany,
                format!(
                    "{} sessions are open, which is the limit",
                    self.sessions.len()
                ),
            );
        }
        if self.tokens.contains_key(&open.token) {
            return fault(FaultKind::Invalid, "the token is in use".into());
        }
        if open.local_ranks == 0 || open.local_ranks > LOCAL_RANKS_MAX || open.iodepth == 0 {
            return fault(
                FaultKind::Invalid,
                format!(
                    "{} local ranks with iodepth {}: expected 1 to {LOCAL_RANKS_MAX} local ranks and an iodepth of at least 1",
                    open.local_ranks, open.iodepth
                ),
            );
        }
        if let Some(job) = self.jobs.get(key) {
            job.check_member(name, rank, open.local_ranks)?;
        }
        let geometry = Geometry::new(&open.classes)
            .map_err(|error| Fault::new(FaultKind::Invalid, error.to_string()))?;
        if geometry.arena_bytes() > self.arena_free_bytes() {
            return fault(
                FaultKind::NoMemory,
                format!(
                    "rank {rank} of job {name} asks for {} of host memory, {} of {} are free, {} too few: ask for less, or raise arena_bytes_max",
                    ApproxBytes(geometry.arena_bytes()),
                    ApproxBytes(self.arena_free_bytes()),
                    ApproxBytes(self.limits.arena_bytes_max),
                    ApproxBytes(geometry.arena_bytes() - self.arena_free_bytes())
                ),
            );
        }
        Ok(geometry)
    }

    /// Handles that the session's process has fetched the descriptors.
    pub(in crate::core) fn on_attached(&mut self, id: SessionId) {
        if let Some(session) = self.sessions.get_mut(&id) {
            session.claimed = true;
        }
    }

    pub(in crate::core) fn on_arena_made(
        &mut self,
        id: SessionId,
        result: Result<(), Fault>,
        devices: Vec<DeviceState>,
        ops: &mut Operations,
    ) {
        let session = self.sessions.get_mut(&id).expect("the arena of a session");
        match (session.stage, result) {
            (Stage::Making { open }, Ok(())) => {
                session.stage = Stage::Live;
                let reply = Ok(Reply::Open(Box::new(self.open_reply(id, devices))));
                ops.reply(open, reply);
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

    fn open_reply(&self, id: SessionId, devices: Vec<DeviceState>) -> OpenReply {
        let session = &self.sessions[&id];
        OpenReply {
            token: session.token,
            epoch: self.epoch,
            arena_bytes: session.geometry.arena_bytes(),
            ring_entries: session.ring_entries,
            iodepth: session.iodepth,
            block_bytes: BLOCK_BYTES,
            devices,
        }
    }

    pub(in crate::core) fn describe_job(&self, id: SessionId) -> Reply {
        let job = &self.jobs[&self.sessions[&id].key];
        let stored = job.stored.as_ref();
        Reply::DescribeJob(stored.map(|stored| Box::new(stored.to_job_record())))
    }

    /// Ends a session: its process has closed it (the call `close` waits for the end), has died, or broke the protocol.
    pub(in crate::core) fn end_session(
        &mut self,
        id: SessionId,
        close: Option<CallId>,
        ops: &mut Operations,
    ) {
        // A session may end twice: its process closes it and then exits while the last operations end.
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        session.stage = match session.stage {
            Stage::Making { open } => Stage::EndingUnmade { open },
            Stage::Live => Stage::Ending { close },
            Stage::Ending { .. } | Stage::EndingUnmade { .. } => return,
        };
        self.tokens.remove(&session.token);
        self.lose_member(id, ops);
        self.try_drop(id, ops);
    }

    /// Drops the arena of an ended session after its last operation.
    pub(super) fn try_drop(&mut self, id: SessionId, ops: &mut Operations) {
        let session = &self.sessions[&id];
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
        let session = self.sessions.remove(&id).expect("a session");
        self.tokens.remove(&session.token);
        self.arena_used_bytes -= session.geometry.arena_bytes();
        if !session.scratch.is_empty() {
            let extents = session
                .scratch
                .iter()
                .map(|tile| (tile.extent, tile.bytes()));
            self.notes.push_back(Note::Freed(extents.collect()));
        }
        let job = self.jobs.get_mut(&session.key).expect("a session's job");
        job.members.remove(&session.rank);
        self.settle(&session.key);
    }
}
