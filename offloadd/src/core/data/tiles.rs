//! Tiles in and out: checks a ring entry against session, slot, tile and generation, and makes one operation of it.

use offload_api::fault::{Fault, FaultKind};
use offload_api::geometry::SlotPlace;
use offload_api::ids::{DeviceNumber, Epoch};
use offload_api::ring::entry::{Cqe, Promote, Request, Sqe, Verb};
use test_hooks::safeguard::{Safeguard, is_disabled};

use super::job::{Job, JobScriptPurpose};
use super::members::{Member, poison};
use super::script::ScriptResult;
use super::session::{Session, Stage};
use super::stored::{Activity, free_extent};
use super::tile_io::{ParkedWrite, TileIo};
use super::{AdminNote, Data, Incarnation};
use crate::core::Action;
use crate::core::operations::{Operations, ScriptFailure, Step, errno_kind};
use crate::io::{Buffer, IoId, IoOp, IoResult, SessionId};
use crate::store::definition::{Durability, Tile, TileKind};
use crate::store::manifest::{Mark, Record, SlotContent, Version};
use crate::store::tile_table::Extent;

impl Data {
    pub(in crate::core) fn on_submission(
        &mut self,
        id: SessionId,
        entry: &Sqe,
        ops: &mut Operations,
    ) {
        // Entries that a process wrote before its session ended may still be in its ring.
        let Some(session) = self.sessions.get(id) else {
            return;
        };
        if session.stage != Stage::Live {
            return;
        }
        let epoch = match is_disabled(Safeguard::Epoch) {
            true => Epoch(entry.epoch),
            false => self.incarnation.epoch,
        };
        let started = if entry.verb == Promote::VERB {
            Promote::check(entry, epoch).map(|promote| {
                self.promote(id, promote, ops);
                Ok(())
            })
        } else {
            Request::check(entry, epoch).map(|request| self.start_tile(id, request, ops))
        };
        match started {
            Ok(Ok(())) => {}
            Ok(Err(kind)) => complete(id, refusal(entry.ticket, kind), ops),
            Err(fault) if fault.kind == FaultKind::Protocol => {
                ops.push(Action::Evict {
                    session: id,
                    why: fault,
                });
                self.end_session(id, None, ops);
            }
            // A promotion has no completion, and its ticket belongs to an earlier incarnation.
            Err(_) if entry.verb == Promote::VERB => {}
            Err(fault) => complete(id, refusal(entry.ticket, fault.kind), ops),
        }
    }

    /// Raises the priority of an operation. Takes constant time, also for unknown tickets, because a process may send as many
    /// as its ring holds.
    fn promote(&mut self, id: SessionId, promote: Promote, ops: &mut Operations) {
        let session = self.member(id).session;
        let Some(&io) = session.tickets.get(&promote.ticket.0) else {
            return;
        };
        let tile = self.inflight.get_mut(&io);
        let tile = tile.expect("a ticket is of a tile in flight");
        tile.request.priority = promote.priority;
        ops.push(Action::Promote {
            io,
            priority: promote.priority,
        });
    }

    fn start_tile(
        &mut self,
        id: SessionId,
        request: Request,
        ops: &mut Operations,
    ) -> Result<(), FaultKind> {
        let Member {
            session,
            job,
            incarnation,
        } = self.member(id);
        let (index, place) = session.check_slot(job, &request)?;
        let tile = match index.checked_sub(job.tile_count()) {
            Some(scratch) => session.start_scratch(job, incarnation, scratch, request, place)?,
            None => job.start_tile(session, incarnation, request, place)?,
        };
        session.use_slot(request.slot);
        if tile.scratch.is_some() || request.verb == Verb::SwapIn {
            self.issue(tile, place, ops);
            return Ok(());
        }
        let write = ParkedWrite { tile, place };
        if job.must_mark() {
            job.park(write, ops);
        } else {
            self.start_write(write, ops);
        }
        Ok(())
    }

    /// Starts a write of a job's tile.
    pub(super) fn start_write(&mut self, write: ParkedWrite, ops: &mut Operations) {
        self.notes.push_back(AdminNote::Overwrites {
            key: write.tile.key.clone(),
            tile: write.tile.request.tile.0,
            which: write.tile.version.which,
        });
        self.jobs
            .existing(&write.tile.key)
            .mark_unflushed(write.tile.extent.device);
        self.issue(write.tile, write.place, ops);
    }

    fn issue(&mut self, tile: TileIo, place: SlotPlace, ops: &mut Operations) {
        let op = match tile.request.verb {
            Verb::SwapIn => IoOp::Read,
            Verb::SwapOut => IoOp::Write,
        };
        let buffer = Buffer::Slot {
            session: tile.session,
            place,
        };
        let TileIo { extent, bytes, .. } = tile;
        let part = [extent.offset, u64::from(bytes)];
        let priority = tile.request.priority;
        let weights = Some(self.quotas.weights(tile.key.uid, &tile.key.name));
        let io = ops.start_weighted(extent.device, op, part, buffer, priority, weights);
        if let Some(session) = self.sessions.get_mut(tile.session) {
            session.tickets.insert(tile.request.ticket.0, io);
        }
        self.inflight.insert(io, tile);
    }

    /// Cancels a write that waited and was not started.
    pub(super) fn cancel_write(&mut self, write: &ParkedWrite) {
        let TileIo { key, request, .. } = &write.tile;
        self.jobs.existing(key).cancel_write(request);
        self.sessions.free_slot(write.tile.session, request.slot);
    }

    /// Cancels a write that waited, and reports that the job is poisoned.
    pub(super) fn refuse_write(&mut self, write: &ParkedWrite, ops: &mut Operations) {
        self.cancel_write(write);
        let ticket = write.tile.request.ticket.0;
        let refused = refusal(ticket, FaultKind::Poisoned);
        complete(write.tile.session, refused, ops);
    }

    /// Handles the end of a tile's operation. Returns the tile's extent; `None` if `id` is not a tile's operation.
    pub(in crate::core) fn on_io_done(
        &mut self,
        io: IoId,
        result: IoResult,
        ops: &mut Operations,
    ) -> Option<Extent> {
        let tile = self.inflight.remove(&io)?;
        self.on_tile_done(io, &tile, result, ops);
        Some(tile.extent)
    }

    fn on_tile_done(&mut self, id: IoId, io: &TileIo, result: IoResult, ops: &mut Operations) {
        let fault = match result.outcome {
            Ok(moved) if moved == io.bytes => None,
            Ok(_) => Some(FaultKind::Short),
            Err(errno) => Some(errno_kind(errno)),
        };
        if self.sessions.get(io.session).is_none() {
            assert!(is_disabled(Safeguard::ReclaimAfterIo));
            return;
        }
        let Member { session, job, .. } = self.member(io.session);
        // Another operation may have got the same ticket since.
        if session.tickets.get(&io.request.ticket.0) == Some(&id) {
            session.tickets.remove(&io.request.ticket.0);
        }
        match io.scratch {
            Some(scratch) => session.end_scratch(scratch, io.version, fault.is_none()),
            None => job.end_tile(io, fault.is_none()),
        }
        session.free_slot(io.request.slot);
        if session.stage == Stage::Live {
            let device = ops.number_of(io.extent.device);
            complete(io.session, entry(io, device, fault, result), ops);
        }
        self.try_drop(io.session, ops);
        if io.request.verb == Verb::SwapOut {
            self.try_commit(&io.key, ops);
        }
    }
}

impl Job {
    /// Returns the reason why nothing can be written.
    pub(super) fn unwritable<'a>(&'a self, incarnation: &'a Incarnation) -> Option<&'a Fault> {
        incarnation.read_only.as_ref().or(self.unusable())
    }

    /// Marks a tile as being read or written, if that is allowed now.
    fn start_tile(
        &mut self,
        session: &Session,
        incarnation: &Incarnation,
        request: Request,
        place: SlotPlace,
    ) -> Result<TileIo, FaultKind> {
        let index = request.tile.0 as usize;
        let stored = self.stored.as_ref().expect("it resumed");
        let Tile {
            tile_bytes: bytes,
            kind,
            ..
        } = stored.table.definition.tiles()[index];
        if place.bytes < u64::from(bytes) {
            return Err(FaultKind::SlotTooSmall);
        }
        let tile = stored.tiles[index];
        let (version, activity) = match request.verb {
            Verb::SwapIn => {
                let reading = match tile.activity {
                    Activity::Idle => 1,
                    Activity::Reading { count } => count + 1,
                    Activity::Writing => return Err(FaultKind::TileBusy),
                };
                let version =
                    (tile.newest().filter(|_| !tile.failed)).ok_or(FaultKind::NeverWritten)?;
                // A failed flush may have lost it.
                if self.poison.is_some() && tile.working.is_some() {
                    return Err(FaultKind::Poisoned);
                }
                (version, Activity::Reading { count: reading })
            }
            Verb::SwapOut => {
                if self.unwritable(incarnation).is_some() {
                    return Err(FaultKind::Poisoned);
                }
                let unconfirmed = self.awaiting_confirm && !is_disabled(Safeguard::ConfirmFirst);
                let closed = unconfirmed || self.has_committed(session.rank);
                let other = request.generation != self.working;
                if closed || (other && !is_disabled(Safeguard::GenerationCheck)) {
                    return Err(FaultKind::WrongGeneration);
                }
                if tile.activity != Activity::Idle {
                    return Err(FaultKind::TileBusy);
                }
                // Its only extent holds what is committed.
                if kind == TileKind::Frozen && tile.committed.is_some() {
                    return Err(FaultKind::Invalid);
                }
                let version = Version {
                    generation: self.working,
                    checksum: request.checksum,
                    which: free_extent(stored.durability(), tile.committed),
                };
                (version, Activity::Writing)
            }
        };
        let io = TileIo {
            session: session.id,
            key: self.key.clone(),
            request,
            extent: stored.table.extents[index][usize::from(version.which)],
            bytes,
            version,
            scratch: None,
        };
        let stored = self.stored.as_mut().expect("just seen");
        stored.tiles[index].activity = activity;
        self.writes_inflight_count += u32::from(request.verb == Verb::SwapOut);
        Ok(io)
    }

    /// Marks a tile as read or written.
    fn end_tile(&mut self, io: &TileIo, moved: bool) {
        let stored = self.stored.as_mut().expect("it moves tiles");
        let tile = &mut stored.tiles[io.request.tile.0 as usize];
        match io.request.verb {
            Verb::SwapIn => {
                let Activity::Reading { count } = tile.activity else {
                    panic!("a tile that is read is marked so");
                };
                tile.activity = match count {
                    1 => Activity::Idle,
                    _ => Activity::Reading { count: count - 1 },
                };
            }
            Verb::SwapOut => {
                assert_eq!(tile.activity, Activity::Writing);
                let written = (io.request.tile, io.version.which);
                stored.damaged.remove(&written);
                tile.activity = Activity::Idle;
                stored.failed_count -= usize::from(tile.failed);
                tile.failed = !moved;
                stored.failed_count += usize::from(tile.failed);
                tile.working = moved.then_some(io.version).or(tile.working);
                self.writes_inflight_count -= 1;
            }
        }
    }

    /// Marks a tile whose write was not started as idle again.
    fn cancel_write(&mut self, request: &Request) {
        let stored = self.stored.as_mut().expect("it waits");
        stored.tiles[request.tile.0 as usize].activity = Activity::Idle;
        self.writes_inflight_count -= 1;
    }

    /// Whether the newest record must be marked before the first tile is overwritten, which durability `none` requires.
    fn must_mark(&self) -> bool {
        let stored = self.stored.as_ref().expect("it resumed");
        let newest = stored.newest_marked();
        stored.durability() == Durability::None
            && newest.is_some_and(|marked| marked.mark != Some(Mark::Overwriting))
    }

    fn park(&mut self, write: ParkedWrite, ops: &mut Operations) {
        self.parked.push(write);
        if self.script.is_some() {
            return;
        }
        let stored = self.stored.as_ref().expect("it resumed");
        let record = &stored.newest_marked().expect("it must be marked").record;
        let places = stored.entry.area.marks(Record::slot(record.generation));
        let mark = record.encode_mark(Mark::Overwriting);
        let steps = vec![
            Step::twice(ops.metadata_device(), places, mark),
            Step::flush([ops.metadata_device()]),
        ];
        self.run_script(JobScriptPurpose::Overwrite, steps, ops);
    }

    /// Returns the writes that waited for the mark.
    pub(super) fn finish_overwrite(&mut self, result: Result<(), ScriptFailure>) -> ScriptResult {
        let parked = std::mem::take(&mut self.parked);
        match result {
            Ok(()) => {
                let stored = self.stored.as_mut().expect("it writes");
                let newest = stored.newest();
                if let SlotContent::Sound(marked) = stored.slot_of(newest) {
                    marked.mark = Some(Mark::Overwriting);
                }
                ScriptResult::Overwrites(parked)
            }
            Err(failed) => {
                let what = "marking it as being written";
                let fault = poison(&self.key.name, what, &failed.fault);
                self.poison(fault);
                ScriptResult::CannotOverwrite(parked)
            }
        }
    }
}

/// Completion of an operation that reached a device.
fn entry(io: &TileIo, device: DeviceNumber, fault: Option<FaultKind>, result: IoResult) -> Cqe {
    let reads = io.request.verb == Verb::SwapIn;
    Cqe {
        ticket: io.request.ticket.0,
        fault: fault.map_or(0, |kind| kind as u32),
        errno: result.outcome.err().unwrap_or(0),
        device: device.0,
        checksum: if reads { io.version.checksum } else { 0 },
        offset: io.extent.offset,
        generation: if reads { io.version.generation.0 } else { 0 },
        asked_bytes: io.bytes,
        moved_bytes: result.outcome.unwrap_or(0),
        device_ns: result.device_ns,
        reserved: 0,
    }
}

fn complete(session: SessionId, entry: Cqe, ops: &mut Operations) {
    ops.push(Action::Complete { session, entry });
}

/// Completion of an entry that was refused before it reached a device.
fn refusal(ticket: u64, kind: FaultKind) -> Cqe {
    Cqe {
        ticket,
        fault: kind as u32,
        errno: 0,
        device: u32::MAX,
        checksum: 0,
        offset: 0,
        generation: 0,
        asked_bytes: 0,
        moved_bytes: 0,
        device_ns: 0,
        reserved: 0,
    }
}
