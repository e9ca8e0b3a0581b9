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

use std::collections::{HashSet, VecDeque};

use offload_api::checksum::ChecksumDigest;
use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::DeviceIndex;
use offload_api::ring::entry::Priority;
use test_hooks::safeguard::{Safeguard, is_disabled};

use super::moving::Mover;
use super::{Admin, Purpose};
use crate::core::JobKey;
use crate::core::data::{Clearing, Data, Holds, NewExtent};
use crate::core::operations::{Failed, Operations, Step, in_turn};
use crate::io::{AlignedBytes, Buffer, IoId, IoOp, IoResult};
use crate::store::tile_table::Extent;

/// Tiles copied at a time: enough for a read and a write in flight on each device.
const COPIES_MAX: usize = 8;

/// Bytes of each copied tile in memory and in flight. As large as a piece of a session's read, so that a copy occupies a drive
/// no longer.
const PIECE_BYTES: u32 = 256 << 10;

/// Tiles that move together.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) key: JobKey,
    job_id: u64,
    places: Vec<Place>,
    /// Indices in `places` whose copy has not begun.
    waiting: VecDeque<usize>,
    inflight_count: usize,
    /// Reason why the batch fails; its copies are discarded.
    failed: Option<Fault>,
    /// Slots with torn records, over which voids are written before anything else.
    cleared: Vec<usize>,
}

/// One extent that moves.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) tile: u32,
    pub(super) which: u8,
    pub(super) from: Extent,
    pub(super) to: Extent,
    pub(super) bytes: u32,
    /// `None` for an empty extent.
    pub(super) copy: Option<Copying>,
    /// Reason why the extent stays where it is.
    stays: Option<Stays>,
}

#[derive(Debug)]
enum Stays {
    /// The extent was written during the copy.
    Written,
    /// The extent cannot be read, or its bytes are not those that were committed.
    Lost(Fault),
}

/// Progress of a copy.
#[derive(Debug)]
pub(super) struct Copying {
    /// Expected checksum; `None` if it is unknown.
    expected: Option<u32>,
    digest: ChecksumDigest,
    done_bytes: u32,
}

/// A piece of a copy.
#[derive(Clone, Copy, Debug)]
pub(super) struct CopyIo {
    place: usize,
    op: IoOp,
    bytes: u32,
}

impl Place {
    /// Makes a place for an extent with `content`: `None` if it is empty, else the checksum if it is known.
    pub(super) fn new(
        tile: u32,
        which: u8,
        [from, to]: [Extent; 2],
        bytes: u32,
        content: Option<Option<u32>>,
    ) -> Self {
        Self {
            tile,
            which,
            from,
            to,
            bytes,
            copy: content.map(|expected| Copying {
                expected,
                digest: ChecksumDigest::new(),
                done_bytes: 0,
            }),
            stays: None,
        }
    }

    fn piece_bytes(&self) -> u32 {
        let done_bytes = self.copy.as_ref().map_or(0, |copy| copy.done_bytes);
        (self.bytes - done_bytes).min(PIECE_BYTES)
    }
}

impl Admin {
    pub(super) fn start_batch(
        &mut self,
        key: JobKey,
        job_id: u64,
        places: Vec<Place>,
        data: &mut Data,
        ops: &mut Operations,
    ) {
        let copies = places.iter().enumerate().filter(|(_, p)| p.copy.is_some());
        let waiting = copies.map(|(index, _)| index).collect();
        self.mover.batch = Some(Batch {
            key,
            job_id,
            places,
            waiting,
            inflight_count: 0,
            failed: None,
            cleared: Vec::new(),
        });
        self.copy_on(data, ops);
    }

    fn batch(&mut self) -> &mut Batch {
        self.mover.batch.as_mut().expect("tiles move")
    }

    fn copy_on(&mut self, data: &mut Data, ops: &mut Operations) {
        let batch = self.batch();
        while batch.failed.is_none() && batch.inflight_count < COPIES_MAX {
            let Some(place) = batch.waiting.pop_front() else {
                break;
            };
            if batch.places[place].stays.is_some() {
                continue;
            }
            batch.inflight_count += 1;
            return self.read_piece(place, data, ops);
        }
        if batch.inflight_count == 0 {
            self.settle_copies(data, ops);
        }
    }

    fn read_piece(&mut self, place: usize, data: &mut Data, ops: &mut Operations) {
        let bytes = self.batch().places[place].piece_bytes();
        let buffer = AlignedBytes::zeroed(bytes as usize);
        self.copy_io(place, IoOp::Read, buffer, ops);
        // Further copies may begin.
        self.copy_on(data, ops);
    }

    fn copy_io(&mut self, index: usize, op: IoOp, buffer: AlignedBytes, ops: &mut Operations) {
        let place = &self.batch().places[index];
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
        data: &mut Data,
        ops: &mut Operations,
    ) -> bool {
        let Some(copy) = self.inflight.remove(&io) else {
            return false;
        };
        self.on_copy_done(copy, result, read, data, ops);
        true
    }

    fn on_copy_done(
        &mut self,
        copy: CopyIo,
        result: IoResult,
        read: Option<AlignedBytes>,
        data: &mut Data,
        ops: &mut Operations,
    ) {
        let place = &self.batch().places[copy.place];
        let extent = match copy.op {
            IoOp::Read => place.from,
            IoOp::Write | IoOp::Flush => place.to,
        };
        let failed = (result.outcome != Ok(copy.bytes)).then(|| {
            let CopyIo { op, bytes, .. } = copy;
            ops.device_fault(op, extent.device, extent.offset, bytes, result.outcome)
        });
        let what = self.what_moves(copy.place);
        let batch = self.batch();
        let place = &mut batch.places[copy.place];
        match (copy.op, failed) {
            (IoOp::Read, None) if batch.failed.is_none() && place.stays.is_none() => {
                let bytes = read.expect("a copy reads into the daemon's own bytes");
                let copying = place.copy.as_mut().expect("it is copied");
                copying.digest.add(bytes.as_slice());
                return self.copy_io(copy.place, IoOp::Write, bytes, ops);
            }
            (IoOp::Read, Some(fault)) if place.stays.is_none() => {
                place.stays = Some(Stays::Lost(fault))
            }
            (IoOp::Write, Some(fault)) => {
                batch.failed.get_or_insert(fault);
            }
            (IoOp::Write, None) if batch.failed.is_none() && place.stays.is_none() => {
                let copying = place.copy.as_mut().expect("it is copied");
                copying.done_bytes += copy.bytes;
                if copying.done_bytes < place.bytes {
                    return self.read_piece(copy.place, data, ops);
                }
                let found = copying.digest.sum();
                if copying.expected.is_some_and(|expected| expected != found) {
                    place.stays = Some(Stays::Lost(Fault::new(
                        FaultKind::Damaged,
                        format!("{what} is damaged: checksum {found:08x}, committed was another"),
                    )));
                }
            }
            _ => {}
        }
        self.batch().inflight_count -= 1;
        self.copy_on(data, ops);
    }

    fn what_moves(&self, place: usize) -> String {
        let batch = self.mover.batch.as_ref().expect("tiles move");
        let Place { tile, from, .. } = &batch.places[place];
        format!(
            "tile {tile} of job {} of uid {} at {} of {}",
            batch.key.name,
            batch.key.uid,
            from.offset,
            self.path(from.device)
        )
    }

    /// Fails copies on `device` after a failed flush: they may be lost, and the next flush would not report it.
    pub(in crate::core) fn fail_copies_of(&mut self, device: DeviceIndex, fault: &Fault) {
        if let Some(batch) = &mut self.mover.batch
            && batch.places.iter().any(|place| place.to.device == device)
        {
            batch.failed.get_or_insert_with(|| fault.clone());
        }
    }

    /// Flushes the copies after the last one, and clears torn records, because they may name the extents that become free.
    fn settle_copies(&mut self, data: &mut Data, ops: &mut Operations) {
        let batch = self.batch();
        if let Some(fault) = batch.failed.take() {
            return self.end_batch(Some(fault), data, ops);
        }
        let copied = (batch.places.iter()).filter(|p| p.copy.is_some() && p.stays.is_none());
        let mut flushed: Vec<_> = copied.map(|place| place.to.device).collect();
        let Clearing { slots, writes } = data.freeze_to_clear(&batch.key);
        batch.cleared = slots;
        let mut steps = Vec::new();
        if !writes.is_empty() {
            steps.push(Step::writes(self.metadata_device, writes));
            flushed.push(self.metadata_device);
        }
        flushed.sort_unstable_by_key(|device| device.0);
        flushed.dedup();
        if !is_disabled(Safeguard::CopyFlush) {
            steps.push(Step::flush(flushed));
        }
        self.run_script(Purpose::Settle, steps, ops);
    }

    pub(super) fn finish_settle(
        &mut self,
        result: Result<(), Failed>,
        data: &mut Data,
        ops: &mut Operations,
    ) {
        let batch = self.batch();
        let key = batch.key.clone();
        let cleared = std::mem::take(&mut batch.cleared);
        let failed = batch.failed.take();
        data.thaw(&key);
        if let Some(fault) = result.err().map(|failed| failed.fault).or(failed) {
            return self.end_batch(Some(fault), data, ops);
        }
        data.clear(&key, &cleared);
        self.exchange(&key, data, ops);
    }

    /// Writes the definition with the new extents of all places that still can move.
    fn exchange(&mut self, key: &JobKey, data: &mut Data, ops: &mut Operations) {
        let batch = self.mover.batch.as_mut().expect("tiles move");
        let places = batch.places.iter().map(|place| (place.tile, place.which));
        let Some(holds) = data.exchangeable(key, places) else {
            return self.end_batch(None, data, ops);
        };
        let mut given_up = Vec::new();
        let mut holds = holds.into_iter();
        let mut lost = Vec::new();
        batch.places.retain_mut(|place| {
            let moves = match holds.next().expect("one a place") {
                Holds::Moving => false,
                Holds::Nothing => place.copy.is_none() || place.stays.is_none(),
                Holds::Bytes(_) => place.copy.is_some() && place.stays.is_none(),
            };
            if !moves {
                if let Some(Stays::Lost(fault)) = place.stays.take() {
                    lost.push((place.tile, place.which, fault));
                }
                given_up.push((place.to, place.bytes));
            }
            moves
        });
        for (tile, which, fault) in lost {
            (self.mover.stuck).add(batch.job_id, tile, which, fault);
        }
        if batch.places.is_empty() {
            self.give_all(given_up);
            return self.end_batch(None, data, ops);
        }
        let extents = batch.places.iter().map(|place| NewExtent {
            tile: place.tile,
            which: place.which,
            to: place.to,
        });
        let numbers: Vec<u32> = (self.devices.iter().map(|d| d.superblock.number)).collect();
        let Some((places, blocks)) = data.replace_extents(key, extents, &numbers) else {
            self.give_all(given_up);
            let what = format!(
                "the definition of job {} of uid {} has the highest revision number: its tiles do not move until the job is deleted",
                key.name, key.uid
            );
            let fault = Fault::new(FaultKind::TooMany, what);
            return self.end_batch(Some(fault), data, ops);
        };
        if is_disabled(Safeguard::LeaveLast) {
            let left = batch.places.iter().map(|place| (place.from, place.bytes));
            let left: Vec<_> = left.collect();
            self.give_all(left);
        }
        self.give_all(given_up);
        self.run_script(
            Purpose::Exchange,
            in_turn(self.metadata_device, places, blocks),
            ops,
        );
    }

    pub(super) fn finish_exchange(
        &mut self,
        result: Result<(), Failed>,
        data: &mut Data,
        ops: &mut Operations,
    ) {
        let batch = self.mover.batch.take().expect("tiles move");
        let key = &batch.key;
        data.thaw(key);
        // Copies were flushed before, so a flush that failed since has lost none of them, and `batch.failed` does not matter
        // here.
        match result {
            Ok(()) => {
                if !is_disabled(Safeguard::LeaveLast) {
                    let left = batch.places.iter().map(|place| (place.from, place.bytes));
                    self.mover.left.extend(left);
                }
                self.free_left(None, data);
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
                data.lose_table(key, broken, &failed.fault);
                self.mover.stop(&failed.fault);
            }
        }
        data.try_commit(key, ops);
        self.next_change(data, ops);
    }

    /// Discards the batch and frees its new extents. With a fault, no tile moves until an administrator asks again.
    fn end_batch(&mut self, fault: Option<Fault>, data: &mut Data, ops: &mut Operations) {
        let batch = self.mover.batch.take().expect("tiles move");
        if let Some(fault) = fault {
            self.mover.stop(&fault);
        }
        let given_up = batch.places.into_iter();
        self.give_all(given_up.map(|place| (place.to, place.bytes)));
        data.try_commit(&batch.key, ops);
        self.next_change(data, ops);
    }

    fn run_script(&mut self, purpose: Purpose, steps: Vec<Step>, ops: &mut Operations) {
        let script = ops.run_script(steps);
        self.scripts.insert(script, purpose);
    }

    fn give_all(&mut self, extents: impl IntoIterator<Item = (Extent, u32)>) {
        for (extent, bytes) in extents {
            self.space.give(extent, u64::from(bytes));
        }
    }

    /// Frees extents that tiles have left, when no read of them is in flight. `ended` is the extent whose operation has ended;
    /// `None` checks all.
    pub(in crate::core) fn free_left(&mut self, ended: Option<Extent>, data: &Data) {
        if self.mover.left.is_empty() {
            return;
        }
        if let Some(extent) = ended
            && !self.mover.left.iter().any(|(left, _)| *left == extent)
        {
            return;
        }
        let used: HashSet<Extent> = data.extents_in_use().collect();
        let left = std::mem::take(&mut self.mover.left);
        let (kept, free): (Vec<_>, Vec<_>) =
            (left.into_iter()).partition(|(extent, _)| used.contains(extent));
        self.mover.left = kept;
        self.give_all(free);
    }
}

impl Mover {
    /// Discards the copy of an extent that the job writes to.
    pub(super) fn invalidate_copy(&mut self, key: &JobKey, tile: u32, which: u8) {
        let Some(batch) = self.batch.as_mut().filter(|batch| batch.key == *key) else {
            return;
        };
        let same = |place: &&mut Place| place.tile == tile && place.which == which;
        if let Some(place) = batch.places.iter_mut().find(same)
            && place.copy.is_some()
        {
            place.stays = Some(Stays::Written);
        }
    }
}
