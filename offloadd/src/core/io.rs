//! Tiles in and out: an entry is checked against session, slot, tile and generation, then becomes one operation.

use offload_api::fault::FaultKind;
use offload_api::geometry::SlotPlace;
use offload_api::ids::{DeviceIndex, Epoch, SlotIndex};
use offload_api::ring::entry::{Cqe, Promote, Request, Sqe, Verb};
use test_hooks::safeguard::{Safeguard, is_disabled};

use super::copying::CopyIo;
use super::job::{Activity, JobKey};
use super::members::poison;
use super::script::{Failed, Purpose, ScriptId, Step};
use super::session::Stage;
use super::{Action, Core, errno_kind};
use crate::io::{AlignedBytes, Buffer, IoId, IoOp, IoResult, SessionId};
use crate::store::definition::Durability;
use crate::store::manifest::{Mark, Record, SlotContent, Version};
use crate::store::tile_table::Extent;

/// An operation the driver has not reported as done.
#[derive(Debug)]
pub(super) enum Operation {
    Tile(TileIo),
    /// A write of one of the daemon's own structures.
    Script {
        script: ScriptId,
        device: DeviceIndex,
        offset: u64,
        bytes: u32,
    },
    Flush(DeviceIndex),
    /// A piece of a tile that moves to another device.
    Copy(CopyIo),
}

/// One tile on its way.
#[derive(Clone, Debug)]
pub(super) struct TileIo {
    pub(super) session: SessionId,
    pub(super) key: JobKey,
    pub(super) request: Request,
    pub(super) extent: Extent,
    pub(super) bytes: u32,
    /// Swap in: what the bytes must be. Swap out: what they will be.
    pub(super) version: Version,
    /// Which of the session's own tiles; `None`: one of the job's.
    pub(super) scratch: Option<usize>,
}

/// A write that waits until its job is marked as being written over.
#[derive(Clone, Debug)]
pub(super) struct ParkedWrite {
    pub(super) session: SessionId,
    place: SlotPlace,
    tile: TileIo,
}

impl Core {
    pub(super) fn on_submission(&mut self, id: SessionId, entry: &Sqe, actions: &mut Vec<Action>) {
        // What a peer wrote before it was ended may still be read out of its ring.
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
                self.promote(id, promote, actions);
                Ok(())
            })
        } else {
            Request::check(entry, epoch).map(|request| self.start_tile(id, request, actions))
        };
        match started {
            Ok(Ok(())) => {}
            Ok(Err(kind)) => complete(id, refusal(entry.ticket, kind), actions),
            Err(fault) if fault.kind == FaultKind::Protocol => {
                actions.push(Action::Evict {
                    session: id,
                    why: fault,
                });
                self.end_session(id, None, actions);
            }
            // It would have no completion: what it was about has none either, in this life.
            Err(_) if entry.verb == Promote::VERB => {}
            Err(fault) => complete(id, refusal(entry.ticket, fault.kind), actions),
        }
    }

    /// Costs the same whatever is in flight, and whether the ticket is known: a process may send as many as its ring takes.
    fn promote(&mut self, id: SessionId, promote: Promote, actions: &mut Vec<Action>) {
        let session = &self.sessions[&id];
        let Some(&io) = session.tickets.get(&promote.ticket.0) else {
            return;
        };
        let Some(Operation::Tile(tile)) = self.operations.get_mut(&io) else {
            panic!("a ticket is of a tile in flight");
        };
        tile.request.priority = promote.priority;
        actions.push(Action::Promote {
            io,
            priority: promote.priority,
        });
    }

    fn start_tile(
        &mut self,
        id: SessionId,
        request: Request,
        actions: &mut Vec<Action>,
    ) -> Result<(), FaultKind> {
        let session = &self.sessions[&id];
        let key = session.key.clone();
        if session.inflight_count >= session.iodepth {
            return Err(FaultKind::TooMany);
        }
        let index = request.tile.0 as usize;
        let tile_count = self.tile_count(&key);
        if index >= tile_count + session.scratch.len() {
            return Err(FaultKind::UnknownTile);
        }
        if !session.resumed {
            return Err(FaultKind::WrongGeneration);
        }
        let place = (session.geometry.place(request.slot)).ok_or(FaultKind::UnknownSlot)?;
        if session.busy_slots.contains(&request.slot) {
            return Err(FaultKind::SlotBusy);
        }
        if let Some(scratch) = index.checked_sub(tile_count) {
            let (io, op) = self.start_scratch(id, scratch, request, place)?;
            self.count_in(id, request.slot);
            self.issue(io, op, place, actions);
            return Ok(());
        }
        let job = &self.jobs[&key];
        let stored = job.stored.as_ref().expect("it resumed");
        let bytes = stored.table.definition.tiles()[index].tile_bytes;
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
                // A flush that failed may have lost it.
                if job.poison.is_some() && tile.working.is_some() {
                    return Err(FaultKind::Poisoned);
                }
                (version, Activity::Reading { count: reading })
            }
            Verb::SwapOut => {
                if self.unusable(job).is_some() {
                    return Err(FaultKind::Poisoned);
                }
                let closed = job.awaiting_confirm || self.has_committed(&key, session.rank);
                let other = request.generation != job.working;
                if closed || (other && !is_disabled(Safeguard::GenerationCheck)) {
                    return Err(FaultKind::WrongGeneration);
                }
                if tile.activity != Activity::Idle {
                    return Err(FaultKind::TileBusy);
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
            job.writes_inflight_count += 1;
            let parked = ParkedWrite {
                session: id,
                place,
                tile: io,
            };
            if self.must_mark(&key) {
                self.park(&key, parked, actions);
            } else {
                self.start_write(parked, actions);
            }
            return Ok(());
        }
        self.issue(io, IoOp::Read, place, actions);
        Ok(())
    }

    fn start_write(&mut self, write: ParkedWrite, actions: &mut Vec<Action>) {
        let TileIo { key, request, .. } = &write.tile;
        self.invalidate_copy(key, request.tile, write.tile.version.which);
        let job = self.jobs.get_mut(&write.tile.key).expect("it writes");
        job.touched[write.tile.extent.device.0 as usize] = true;
        self.issue(write.tile, IoOp::Write, write.place, actions);
    }

    fn issue(&mut self, tile: TileIo, op: IoOp, place: SlotPlace, actions: &mut Vec<Action>) {
        let io = IoId(self.number());
        actions.push(Action::Io {
            io,
            device: tile.extent.device,
            op,
            offset: tile.extent.offset,
            bytes: tile.bytes,
            buffer: Buffer::Slot {
                session: tile.session,
                place,
            },
            priority: tile.request.priority,
        });
        if let Some(session) = self.sessions.get_mut(&tile.session) {
            session.tickets.insert(tile.request.ticket.0, io);
        }
        self.operations.insert(io, Operation::Tile(tile));
    }

    /// Durability none: the newest record must say that its tiles are being written over, before the first one is.
    fn must_mark(&self, key: &JobKey) -> bool {
        let stored = self.jobs[key].stored.as_ref().expect("it resumed");
        let newest = stored.newest_marked();
        stored.durability() == Durability::None
            && newest.is_some_and(|marked| marked.mark != Some(Mark::Overwriting))
    }

    fn park(&mut self, key: &JobKey, write: ParkedWrite, actions: &mut Vec<Action>) {
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
            Step::twice(self.home, places, mark),
            Step::flush([self.home]),
        ];
        self.run_script(Purpose::Overwrite { key: key.clone() }, steps, actions);
    }

    pub(super) fn finish_overwrite(
        &mut self,
        key: &JobKey,
        result: Result<(), Failed>,
        actions: &mut Vec<Action>,
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
                    self.start_write(write, actions);
                }
            }
            Err(failed) => {
                job.poison = Some(poison(
                    &key.name,
                    "marking it as being written",
                    &failed.fault,
                ));
                for write in parked {
                    self.cancel_write(&write);
                    let ticket = write.tile.request.ticket.0;
                    complete(write.session, refusal(ticket, FaultKind::Poisoned), actions);
                }
                self.try_commit(key, actions);
            }
        }
    }

    /// A write that waited is given up before it began.
    pub(super) fn cancel_write(&mut self, write: &ParkedWrite) {
        let TileIo { key, request, .. } = &write.tile;
        self.tile_mut(key, request.tile).expect("it waits").activity = Activity::Idle;
        let job = self.jobs.get_mut(key).expect("it waits");
        job.writes_inflight_count -= 1;
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

    pub(super) fn on_io_done(
        &mut self,
        io: IoId,
        result: IoResult,
        read: Option<AlignedBytes>,
        actions: &mut Vec<Action>,
    ) {
        let operation = self.operations.remove(&io).expect("an operation in flight");
        match operation {
            Operation::Script {
                script,
                device,
                offset,
                bytes,
            } => {
                let failed = (result.outcome != Ok(bytes))
                    .then(|| self.device_fault(IoOp::Write, device, offset, bytes, result.outcome));
                self.on_script_io_done(script, failed, actions);
            }
            Operation::Flush(device) => self.on_flush_done(device, result, actions),
            Operation::Tile(tile) => {
                self.on_tile_done(io, &tile, result, actions);
                self.free_left(Some(tile.extent));
            }
            Operation::Copy(copy) => self.on_copy_done(copy, result, read, actions),
        }
    }

    fn on_tile_done(&mut self, id: IoId, io: &TileIo, result: IoResult, actions: &mut Vec<Action>) {
        let fault = match result.outcome {
            Ok(moved) if moved == io.bytes => None,
            Ok(_) => Some(FaultKind::Short),
            Err(errno) => Some(errno_kind(errno)),
        };
        let Some(session) = self.sessions.get_mut(&io.session) else {
            assert!(is_disabled(Safeguard::ReclaimAfterIo));
            return;
        };
        // Another may have been given the same ticket since.
        if session.tickets.get(&io.request.ticket.0) == Some(&id) {
            session.tickets.remove(&io.request.ticket.0);
        }
        self.end_activity(io, fault.is_none());
        self.free_slot(io.session, io.request.slot);
        let reads = io.request.verb == Verb::SwapIn;
        let session = &self.sessions[&io.session];
        if session.stage == Stage::Live {
            complete(io.session, entry(io, fault, result), actions);
        }
        self.try_drop(io.session, actions);
        if !reads {
            self.try_commit(&io.key, actions);
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
                tile.activity = Activity::Idle;
                stored.failed_count -= usize::from(tile.failed);
                tile.failed = !moved;
                stored.failed_count += usize::from(tile.failed);
                tile.working = moved.then_some(io.version).or(tile.working);
                let written = (io.request.tile, io.version.which);
                stored.damaged.remove(&written);
                job.writes_inflight_count -= 1;
            }
        }
    }
}

/// Where a write goes: not where what is committed lies.
pub(super) fn free_extent(durability: Durability, committed: Option<Version>) -> u8 {
    let used = committed.map(|version| version.which);
    match (durability, used) {
        (Durability::None, _) | (_, None) => 0,
        (_, Some(used)) if is_disabled(Safeguard::OutOfPlace) => used,
        (_, Some(used)) => 1 - used,
    }
}

/// What the process is told of an operation that reached a device.
fn entry(io: &TileIo, fault: Option<FaultKind>, result: IoResult) -> Cqe {
    let reads = io.request.verb == Verb::SwapIn;
    Cqe {
        ticket: io.request.ticket.0,
        fault: fault.map_or(0, |kind| kind as u32),
        errno: result.outcome.err().unwrap_or(0),
        device: io.extent.device.0,
        checksum: if reads { io.version.checksum } else { 0 },
        offset: io.extent.offset,
        generation: if reads { io.version.generation.0 } else { 0 },
        asked_bytes: io.bytes,
        moved_bytes: result.outcome.unwrap_or(0),
        device_ns: result.device_ns,
        reserved: 0,
    }
}

fn complete(session: SessionId, entry: Cqe, actions: &mut Vec<Action>) {
    actions.push(Action::Complete { session, entry });
}

/// The completion of what never reached a device.
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
