//! Moves some tiles of one job to other extents, all or none.
//!
//! ```text
//!   copy what a record names, a few tiles at a time ──▶ flush ──▶ definition with the new extents: copy A, flush, copy B,
//!   flush ──▶ the old extents are free
//! ```
//!
//! An empty extent is exchanged without a copy. A tile that is written while it is copied stays where it is until the next
//! batch. When the write of the new definition starts, writes of tiles go to the new extents, and nothing is committed until
//! the definition is durable.

use std::collections::HashSet;

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::DeviceIndex;
use offload_api::ring::entry::Priority;
use test_hooks::safeguard::{Safeguard, is_disabled};

use super::batch::{Batch, BatchScript, CopyIo, StayReason, TileMove};
use super::device_table::DeviceTable;
use super::moving::Mover;
use crate::core::JobKey;
use crate::core::data::{Data, Holds, NewExtent, TornRecords};
use crate::core::operations::{Operations, ScriptEnd, ScriptFailure, Step, in_turn};
use crate::io::{AlignedBytes, Buffer, IoId, IoOp, IoResult};
use crate::store::tile_table::Extent;

/// Tiles copied at a time: enough for a read and a write in flight on each device.
const COPIES_MAX: usize = 8;

impl Mover {
    pub(super) fn start_batch(
        &mut self,
        key: JobKey,
        job_id: u64,
        moves: Vec<TileMove>,
        devices: &mut DeviceTable,
        data: &mut Data,
        ops: &mut Operations,
    ) {
        let copies = moves.iter().enumerate().filter(|(_, p)| p.copy.is_some());
        let waiting = copies.map(|(index, _)| index).collect();
        self.batch = Some(Batch {
            key,
            job_id,
            moves,
            waiting,
            inflight_count: 0,
            failed: None,
            cleared: Vec::new(),
            script: None,
        });
        self.copy_on(devices, data, ops);
    }

    fn current_batch(&mut self) -> &mut Batch {
        self.batch.as_mut().expect("tiles move")
    }

    fn copy_on(&mut self, devices: &mut DeviceTable, data: &mut Data, ops: &mut Operations) {
        let batch = self.current_batch();
        while batch.failed.is_none() && batch.inflight_count < COPIES_MAX {
            let Some(place) = batch.waiting.pop_front() else {
                break;
            };
            if batch.moves[place].stays.is_some() {
                continue;
            }
            batch.inflight_count += 1;
            return self.read_piece(place, devices, data, ops);
        }
        if batch.inflight_count == 0 {
            self.settle_copies(devices, data, ops);
        }
    }

    fn read_piece(
        &mut self,
        place: usize,
        devices: &mut DeviceTable,
        data: &mut Data,
        ops: &mut Operations,
    ) {
        let bytes = self.current_batch().moves[place].piece_bytes();
        let buffer = AlignedBytes::zeroed(bytes as usize);
        self.copy_io(place, IoOp::Read, buffer, ops);
        // Further copies may begin.
        self.copy_on(devices, data, ops);
    }

    fn copy_io(&mut self, index: usize, op: IoOp, buffer: AlignedBytes, ops: &mut Operations) {
        let place = &self.current_batch().moves[index];
        let done_bytes = place.copy.as_ref().map_or(0, |copy| copy.done_bytes);
        let extent = match op {
            IoOp::Read => place.from,
            IoOp::Write | IoOp::Flush => place.to,
        };
        let bytes = buffer.len() as u32;
        let part = [extent.offset + u64::from(done_bytes), u64::from(bytes)];
        let buffer = Buffer::Meta(buffer);
        let io = ops.start(extent.device, op, part, buffer, Priority::Prefetch);
        let copy = CopyIo {
            place: index,
            op,
            bytes,
        };
        self.inflight.insert(io, copy);
    }

    /// Handles the end of an operation of a copy. Returns false if `id` is not one.
    pub(in crate::core) fn on_io_done(
        &mut self,
        io: IoId,
        result: IoResult,
        read: Option<AlignedBytes>,
        devices: &mut DeviceTable,
        data: &mut Data,
        ops: &mut Operations,
    ) -> bool {
        let Some(copy) = self.inflight.remove(&io) else {
            return false;
        };
        self.on_copy_done(copy, result, read, devices, data, ops);
        true
    }

    fn on_copy_done(
        &mut self,
        copy: CopyIo,
        result: IoResult,
        read: Option<AlignedBytes>,
        devices: &mut DeviceTable,
        data: &mut Data,
        ops: &mut Operations,
    ) {
        let place = &self.current_batch().moves[copy.place];
        let extent = match copy.op {
            IoOp::Read => place.from,
            IoOp::Write | IoOp::Flush => place.to,
        };
        let failed = (result.outcome != Ok(copy.bytes)).then(|| {
            let CopyIo { op, bytes, .. } = copy;
            ops.device_fault(op, extent.device, extent.offset, bytes, result.outcome)
        });
        let what = self.what_moves(copy.place, ops);
        let batch = self.current_batch();
        let place = &mut batch.moves[copy.place];
        match (copy.op, failed) {
            (IoOp::Read, None) if batch.failed.is_none() && place.stays.is_none() => {
                let bytes = read.expect("a copy reads into the daemon's own bytes");
                let copying = place.copy.as_mut().expect("it is copied");
                copying.digest.add(bytes.as_slice());
                return self.copy_io(copy.place, IoOp::Write, bytes, ops);
            }
            (IoOp::Read, Some(fault)) if place.stays.is_none() => {
                place.stays = Some(StayReason::Lost(fault))
            }
            (IoOp::Write, Some(fault)) => {
                batch.failed.get_or_insert(fault);
            }
            (IoOp::Write, None) if batch.failed.is_none() && place.stays.is_none() => {
                let copying = place.copy.as_mut().expect("it is copied");
                copying.done_bytes += copy.bytes;
                if copying.done_bytes < place.bytes {
                    return self.read_piece(copy.place, devices, data, ops);
                }
                let found = copying.digest.sum();
                if copying.expected.is_some_and(|expected| expected != found) {
                    place.stays = Some(StayReason::Lost(Fault::new(
                        FaultKind::Damaged,
                        format!("{what} is damaged: checksum {found:08x}, committed was another"),
                    )));
                }
            }
            _ => {}
        }
        self.current_batch().inflight_count -= 1;
        self.copy_on(devices, data, ops);
    }

    fn what_moves(&self, place: usize, ops: &Operations) -> String {
        let batch = self.batch.as_ref().expect("tiles move");
        let TileMove { tile, from, .. } = &batch.moves[place];
        format!(
            "tile {tile} of job {} of uid {} at {} of {}",
            batch.key.name,
            batch.key.uid,
            from.offset,
            ops.path(from.device)
        )
    }

    /// Fails copies on `device` after a failed flush: they may be lost, and the next flush would not report it.
    pub(in crate::core) fn fail_copies_of(&mut self, device: DeviceIndex, fault: &Fault) {
        if let Some(batch) = &mut self.batch
            && batch.moves.iter().any(|place| place.to.device == device)
        {
            batch.failed.get_or_insert_with(|| fault.clone());
        }
    }

    /// Flushes the copies after the last one, and clears torn records, because they may name the extents that become free.
    fn settle_copies(&mut self, devices: &mut DeviceTable, data: &mut Data, ops: &mut Operations) {
        let batch = self.current_batch();
        if let Some(fault) = batch.failed.take() {
            return self.end_batch(Some(fault), devices, data, ops);
        }
        let copied = (batch.moves.iter()).filter(|p| p.copy.is_some() && p.stays.is_none());
        let mut flushed: Vec<_> = copied.map(|place| place.to.device).collect();
        let TornRecords { slots, writes } = data.jobs.existing(&batch.key).freeze_to_clear();
        batch.cleared = slots;
        let mut steps = Vec::new();
        if !writes.is_empty() {
            steps.push(Step::writes(ops.metadata_device(), writes));
            flushed.push(ops.metadata_device());
        }
        flushed.sort_unstable_by_key(|device| device.0);
        flushed.dedup();
        if !is_disabled(Safeguard::CopyFlush) {
            steps.push(Step::flush(flushed));
        }
        self.run_script(BatchScript::Settle, steps, ops);
    }

    fn finish_settle(
        &mut self,
        result: Result<(), ScriptFailure>,
        devices: &mut DeviceTable,
        data: &mut Data,
        ops: &mut Operations,
    ) {
        let batch = self.current_batch();
        let key = batch.key.clone();
        let cleared = std::mem::take(&mut batch.cleared);
        let failed = batch.failed.take();
        data.jobs.existing(&key).thaw();
        if let Some(fault) = result.err().map(|failed| failed.fault).or(failed) {
            return self.end_batch(Some(fault), devices, data, ops);
        }
        data.jobs.existing(&key).clear(&cleared);
        self.exchange(&key, devices, data, ops);
    }

    /// Writes the definition with the new extents of all moves that still can move.
    fn exchange(
        &mut self,
        key: &JobKey,
        devices: &mut DeviceTable,
        data: &mut Data,
        ops: &mut Operations,
    ) {
        let batch = self.batch.as_mut().expect("tiles move");
        let moves = batch.moves.iter().map(|place| (place.tile, place.which));
        let Some(holds) = data.jobs.existing(key).exchangeable(moves) else {
            return self.end_batch(None, devices, data, ops);
        };
        let mut given_up = Vec::new();
        let mut holds = holds.into_iter();
        let mut lost = Vec::new();
        batch.moves.retain_mut(|place| {
            let moves = match holds.next().expect("one a place") {
                Holds::Moving => false,
                Holds::Nothing => place.copy.is_none() || place.stays.is_none(),
                Holds::Bytes(_) => place.copy.is_some() && place.stays.is_none(),
            };
            if !moves {
                if let Some(StayReason::Lost(fault)) = place.stays.take() {
                    lost.push((place.tile, place.which, fault));
                }
                given_up.push((place.to, place.bytes));
            }
            moves
        });
        for (tile, which, fault) in lost {
            (self.stuck).add(batch.job_id, tile, which, fault);
        }
        if batch.moves.is_empty() {
            devices.free_all(given_up);
            return self.end_batch(None, devices, data, ops);
        }
        let extents = batch.moves.iter().map(|place| NewExtent {
            tile: place.tile,
            which: place.which,
            to: place.to,
        });
        let numbers = devices.numbers();
        let Some((offsets, blocks)) = data.jobs.existing(key).replace_extents(extents, &numbers)
        else {
            devices.free_all(given_up);
            let what = format!(
                "the definition of job {} of uid {} has the highest revision number: its tiles do not move until the job is deleted",
                key.name, key.uid
            );
            let fault = Fault::new(FaultKind::TooMany, what);
            return self.end_batch(Some(fault), devices, data, ops);
        };
        if is_disabled(Safeguard::LeaveLast) {
            let left = batch.moves.iter().map(|place| (place.from, place.bytes));
            let left: Vec<_> = left.collect();
            devices.free_all(left);
        }
        devices.free_all(given_up);
        self.run_script(
            BatchScript::Exchange,
            in_turn(ops.metadata_device(), offsets, blocks),
            ops,
        );
    }

    fn finish_exchange(
        &mut self,
        result: Result<(), ScriptFailure>,
        devices: &mut DeviceTable,
        data: &mut Data,
        ops: &mut Operations,
    ) {
        let batch = self.batch.take().expect("tiles move");
        let key = &batch.key;
        data.jobs.existing(key).thaw();
        // Copies were flushed before, so a flush that failed since has lost none of them, and `batch.failed` does not matter
        // here.
        match result {
            Ok(()) => {
                if !is_disabled(Safeguard::LeaveLast) {
                    let left = batch.moves.iter().map(|place| (place.from, place.bytes));
                    self.left.extend(left);
                }
                self.free_left(None, devices, data);
            }
            Err(failed) => {
                // Both extents of each tile stay reserved, because it is unknown which definition the devices hold.
                let broken = Fault::new(
                    FaultKind::Poisoned,
                    format!(
                        "job {}: the table of its tiles could not be written ({}): start offloadd again on sound devices",
                        key.name, failed.fault.message
                    ),
                );
                data.jobs.existing(key).lose_table(broken, &failed.fault);
                self.stop(&failed.fault);
            }
        }
        data.try_commit(key, ops);
    }

    /// Discards the batch and frees its new extents. With a fault, no tile moves until an administrator asks again.
    fn end_batch(
        &mut self,
        fault: Option<Fault>,
        devices: &mut DeviceTable,
        data: &mut Data,
        ops: &mut Operations,
    ) {
        let batch = self.batch.take().expect("tiles move");
        if let Some(fault) = fault {
            self.stop(&fault);
        }
        let given_up = batch.moves.into_iter();
        devices.free_all(given_up.map(|place| (place.to, place.bytes)));
        data.try_commit(&batch.key, ops);
    }

    fn run_script(&mut self, purpose: BatchScript, steps: Vec<Step>, ops: &mut Operations) {
        let script = ops.run_script(steps);
        self.current_batch().script = Some((script, purpose));
    }

    /// Handles the end of the batch's script.
    pub(super) fn on_script_end(
        &mut self,
        end: ScriptEnd,
        devices: &mut DeviceTable,
        data: &mut Data,
        ops: &mut Operations,
    ) {
        let (script, purpose) = self.current_batch().script.take().expect("our script");
        assert_eq!(script, end.script, "a batch has one script at a time");
        match purpose {
            BatchScript::Settle => self.finish_settle(end.result, devices, data, ops),
            BatchScript::Exchange => self.finish_exchange(end.result, devices, data, ops),
        }
    }

    /// Frees extents that tiles have left, when no read of them is in flight. `ended` is the extent whose operation has ended;
    /// `None` checks all.
    pub(in crate::core) fn free_left(
        &mut self,
        ended: Option<Extent>,
        devices: &mut DeviceTable,
        data: &Data,
    ) {
        if self.left.is_empty() {
            return;
        }
        if let Some(extent) = ended
            && !self.left.iter().any(|(left, _)| *left == extent)
        {
            return;
        }
        let used: HashSet<Extent> = data.extents_in_use().collect();
        let left = std::mem::take(&mut self.left);
        let (kept, free): (Vec<_>, Vec<_>) =
            (left.into_iter()).partition(|(extent, _)| used.contains(extent));
        self.left = kept;
        devices.free_all(free);
    }

    /// Discards the copy of an extent that the job writes to.
    pub(super) fn invalidate_copy(&mut self, key: &JobKey, tile: u32, which: u8) {
        let Some(batch) = self.batch.as_mut().filter(|batch| batch.key == *key) else {
            return;
        };
        let same = |place: &&mut TileMove| place.tile == tile && place.which == which;
        if let Some(place) = batch.moves.iter_mut().find(same)
            && place.copy.is_some()
        {
            place.stays = Some(StayReason::Written);
        }
    }
}
