//! Tiles in and out: checks a ring entry against session, slot, tile and generation, and makes one operation of it.

use offload_api::fault::{Fault, FaultKind};
use offload_api::geometry::SlotPlace;
use offload_api::ids::{DeviceNumber, Epoch, SlotIndex};
use offload_api::ring::entry::{Cqe, Promote, Request, Sqe, Verb};
use test_hooks::safeguard::{Safeguard, is_disabled};

use super::job::{Activity, Job};
use super::members::poison;
use super::session::Stage;
use super::{Data, JobKey, Note, Purpose};
use crate::core::Action;
use crate::core::operations::{Failed, Operations, Step, errno_kind};
use crate::io::{Buffer, IoId, IoOp, IoResult, SessionId};
use crate::store::definition::{Durability, Tile, TileKind};
use crate::store::manifest::{Mark, Record, SlotContent, Version};
use crate::store::tile_table::Extent;

/// One tile in flight.
#[derive(Clone, Debug)]
pub(super) struct TileIo {
    pub(super) session: SessionId,
    pub(super) key: JobKey,
    pub(super) request: Request,
    pub(super) extent: Extent,
    pub(super) bytes: u32,
    /// Swap in: version that is expected. Swap out: version that is written.
    pub(super) version: Version,
    /// Index of a scratch tile; `None` for a tile of the job.
    pub(super) scratch: Option<usize>,
}

/// A write that waits until its job is marked as being overwritten.
#[derive(Clone, Debug)]
pub(super) struct ParkedWrite {
    pub(super) session: SessionId,
    place: SlotPlace,
    tile: TileIo,
}

impl Data {
    pub(in crate::core) fn on_submission(
        &mut self,
        id: SessionId,
        entry: &Sqe,
        ops: &mut Operations,
    ) {
        // Entries that a process wrote before its session ended may still be in its ring.
        let Some(session) = self.sessions.get(&id) else {
            return;
        };
        if session.stage != Stage::Live {
            return;
        }
        let epoch = match is_disabled(Safeguard::Epoch) {
            true => Epoch(entry.epoch),
            false => self.epoch,
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
        let session = &self.sessions[&id];
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

    /// Checks that the session may start an operation on this tile with this slot. Returns the tile's index, where scratch
    /// tiles follow the job's tiles, and the slot's place.
    pub(super) fn check_slot(
        &self,
        id: SessionId,
        request: &Request,
    ) -> Result<(usize, SlotPlace), FaultKind> {
        let session = &self.sessions[&id];
        if session.inflight_count >= session.iodepth {
            return Err(FaultKind::TooMany);
        }
        let index = request.tile.0 as usize;
        if index >= self.tile_count(&session.key) + session.scratch.len() {
            return Err(FaultKind::UnknownTile);
        }
        if !session.resumed {
            return Err(FaultKind::WrongGeneration);
        }
        let place = (session.geometry.place(request.slot)).ok_or(FaultKind::UnknownSlot)?;
        if session.busy_slots.contains(&request.slot) {
            return Err(FaultKind::SlotBusy);
        }
        Ok((index, place))
    }

    fn start_tile(
        &mut self,
        id: SessionId,
        request: Request,
        ops: &mut Operations,
    ) -> Result<(), FaultKind> {
        let (index, place) = self.check_slot(id, &request)?;
        let session = &self.sessions[&id];
        let (key, rank) = (session.key.clone(), session.rank);
        let tile_count = self.tile_count(&key);
        if let Some(scratch) = index.checked_sub(tile_count) {
            let (io, op) = self.start_scratch(id, scratch, request, place)?;
            self.count_in(id, request.slot);
            self.issue(io, op, place, ops);
            return Ok(());
        }
        let job = &self.jobs[&key];
        let stored = job.stored.as_ref().expect("it resumed");
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
                if job.poison.is_some() && tile.working.is_some() {
                    return Err(FaultKind::Poisoned);
                }
                (version, Activity::Reading { count: reading })
            }
            Verb::SwapOut => {
                if self.unusable(job).is_some() {
                    return Err(FaultKind::Poisoned);
                }
                let unconfirmed = job.awaiting_confirm && !is_disabled(Safeguard::ConfirmFirst);
                let closed = unconfirmed || self.has_committed(&key, rank);
                let other = request.generation != job.working;
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
                    generation: job.working,
                    checksum: request.checksum,
                    which: free_extent(stored.durability(), tile.committed),
                };
                (version, Activity::Writing)
            }
        };
        let extent = stored.table.extents[index][usize::from(version.which)];
        let io = TileIo {
            session: id,
            key: key.clone(),
            request,
            extent,
            bytes,
            version,
            scratch: None,
        };
        self.tile_mut(&key, request.tile).expect("checked").activity = activity;
        self.count_in(id, request.slot);
        if request.verb == Verb::SwapOut {
            let job = self.jobs.get_mut(&key).expect("checked");
            job.accept_write();
            let parked = ParkedWrite {
                session: id,
                place,
                tile: io,
            };
            if self.must_mark(&key) {
                self.park(&key, parked, ops);
            } else {
                self.start_write(parked, ops);
            }
            return Ok(());
        }
        self.issue(io, IoOp::Read, place, ops);
        Ok(())
    }

    fn start_write(&mut self, write: ParkedWrite, ops: &mut Operations) {
        self.notes.push_back(Note::Overwrites {
            key: write.tile.key.clone(),
            tile: write.tile.request.tile.0,
            which: write.tile.version.which,
        });
        let job = self.jobs.get_mut(&write.tile.key).expect("it writes");
        job.mark_unflushed(write.tile.extent.device);
        self.issue(write.tile, IoOp::Write, write.place, ops);
    }

    fn issue(&mut self, tile: TileIo, op: IoOp, place: SlotPlace, ops: &mut Operations) {
        let buffer = Buffer::Slot {
            session: tile.session,
            place,
        };
        let TileIo { extent, bytes, .. } = tile;
        let part = [extent.offset, u64::from(bytes)];
        let priority = tile.request.priority;
        let weights = Some(self.weights_of(tile.key.uid, &tile.key.name));
        let io = ops.start_weighted(extent.device, op, part, buffer, priority, weights);
        if let Some(session) = self.sessions.get_mut(&tile.session) {
            session.tickets.insert(tile.request.ticket.0, io);
        }
        self.inflight.insert(io, tile);
    }

    /// Whether the newest record must be marked before the first tile is overwritten, which durability `none` requires.
    fn must_mark(&self, key: &JobKey) -> bool {
        let stored = self.jobs[key].stored.as_ref().expect("it resumed");
        let newest = stored.newest_marked();
        stored.durability() == Durability::None
            && newest.is_some_and(|marked| marked.mark != Some(Mark::Overwriting))
    }

    fn park(&mut self, key: &JobKey, write: ParkedWrite, ops: &mut Operations) {
        let job = self.jobs.get_mut(key).expect("it writes");
        job.parked.push_back(write);
        if job.script.is_some() {
            return;
        }
        let stored = job.stored.as_ref().expect("it resumed");
        let record = &stored.newest_marked().expect("it must be marked").record;
        let places = stored.entry.area.marks(Record::slot(record.generation));
        let mark = record.encode_mark(Mark::Overwriting);
        let steps = vec![
            Step::twice(ops.metadata_device(), places, mark),
            Step::flush([ops.metadata_device()]),
        ];
        self.run_script(key, Purpose::Overwrite, steps, ops);
    }

    pub(super) fn finish_overwrite(
        &mut self,
        key: &JobKey,
        result: Result<(), Failed>,
        ops: &mut Operations,
    ) {
        let job = self.jobs.get_mut(key).expect("a script's job");
        let stored = job.stored.as_mut().expect("it writes");
        let parked = std::mem::take(&mut job.parked);
        match result {
            Ok(()) => {
                let newest = stored.newest();
                if let SlotContent::Sound(marked) = stored.slot_of(newest) {
                    marked.mark = Some(Mark::Overwriting);
                }
                for write in parked {
                    self.start_write(write, ops);
                }
            }
            Err(failed) => {
                let fault = poison(&key.name, "marking it as being written", &failed.fault);
                job.poison(fault);
                for write in parked {
                    self.cancel_write(&write);
                    let ticket = write.tile.request.ticket.0;
                    complete(write.session, refusal(ticket, FaultKind::Poisoned), ops);
                }
                self.try_commit(key, ops);
            }
        }
    }

    /// Cancels a write that waited and was not started.
    pub(super) fn cancel_write(&mut self, write: &ParkedWrite) {
        let TileIo { key, request, .. } = &write.tile;
        self.tile_mut(key, request.tile).expect("it waits").activity = Activity::Idle;
        let job = self.jobs.get_mut(key).expect("it waits");
        job.end_write();
        self.free_slot(write.session, request.slot);
    }

    fn count_in(&mut self, id: SessionId, slot: SlotIndex) {
        let session = self.sessions.get_mut(&id).expect("its submission is taken");
        session.inflight_count += 1;
        session.busy_slots.insert(slot);
    }

    fn free_slot(&mut self, session: SessionId, slot: SlotIndex) {
        if let Some(session) = self.sessions.get_mut(&session) {
            session.inflight_count -= 1;
            session.busy_slots.remove(&slot);
        }
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
        let Some(session) = self.sessions.get_mut(&io.session) else {
            assert!(is_disabled(Safeguard::ReclaimAfterIo));
            return;
        };
        // Another operation may have got the same ticket since.
        if session.tickets.get(&io.request.ticket.0) == Some(&id) {
            session.tickets.remove(&io.request.ticket.0);
        }
        self.end_activity(io, fault.is_none());
        self.free_slot(io.session, io.request.slot);
        let reads = io.request.verb == Verb::SwapIn;
        let session = &self.sessions[&io.session];
        if session.stage == Stage::Live {
            let device = ops.number_of(io.extent.device);
            complete(io.session, entry(io, device, fault, result), ops);
        }
        self.try_drop(io.session, ops);
        if !reads {
            self.try_commit(&io.key, ops);
        }
    }

    fn end_activity(&mut self, io: &TileIo, moved: bool) {
        if let Some(scratch) = io.scratch {
            return self.end_scratch(io, scratch, moved);
        }
        let job = self.jobs.get_mut(&io.key).expect("it moves tiles");
        let stored = job.stored.as_mut().expect("it moves tiles");
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
                job.end_write();
            }
        }
    }

    /// Returns the reason why `job` cannot write or commit any more.
    pub(super) fn unusable<'a>(&'a self, job: &'a Job) -> Option<&'a Fault> {
        self.read_only.as_ref().or(job.unusable())
    }
}

/// Returns the extent for a write: the one that does not hold the committed version.
pub(super) fn free_extent(durability: Durability, committed: Option<Version>) -> u8 {
    let used = committed.map(|version| version.which);
    match (durability, used) {
        (Durability::None, _) | (_, None) => 0,
        (_, Some(used)) if is_disabled(Safeguard::OutOfPlace) => used,
        (_, Some(used)) => 1 - used,
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
