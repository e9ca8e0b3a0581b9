//! A device is measured again: its rates are kept with it, and tiles go where they say.
//!
//! ```text
//!   BeginMeasuring ─▶ free room is lent ─▶ somebody writes there ─▶ FlushMeasured ─▶ somebody reads there ─▶ EndMeasuring
//!     ─▶ superblock, one copy after the other ─▶ catalog: who lacks tiles by the new rates fills ─▶ tiles move
//! ```
//!
//! A cut leaves the old rates or the new ones; with the new ones and the old catalog jobs that come go by them, and tiles that
//! are there move when the device is measured again.

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::DeviceIndex;

use super::Admin;
use super::catalog_queue::{Work, catalog_steps};
use super::devices::DeviceChange;
use super::moving::Moves;
use crate::core::data::Data;
use crate::core::operations::{Operations, Step, Waiter, in_turn};
use crate::core::{CallId, Measuring, Reply};
use crate::store::catalog::{Catalog, Phase};
use crate::store::format::{MeasuredArea, MeasuredRates};
use crate::store::placement::rate;
use crate::store::superblock::Superblock;
use crate::store::tile_table::Extent;
use crate::store::{BLOCK, SUPERBLOCK_OFFSETS};

impl Admin {
    pub(in crate::core) fn begin_measuring(
        &mut self,
        path: &str,
        data: &Data,
    ) -> Result<Reply, Fault> {
        let device = self.device_named(path)?;
        self.check_stays(device)?;
        self.catalog.check()?;
        if self.half_written.contains(&device) {
            let what = format!(
                "the rates of {path} could not be written to it: start offloadd again before it is measured"
            );
            return Err(Fault::new(FaultKind::Poisoned, what));
        }
        if let Some(other) = &self.measuring {
            let what = format!(
                "{} is being measured: ask again when that has ended",
                self.path(other.device)
            );
            return Err(Fault::new(FaultKind::Busy, what));
        }
        let (free, free_bytes) = self.space.largest_free(device).unwrap_or((0, 0));
        // Not all of it: somebody may want to define a job meanwhile. From the end, where nothing is put first.
        let half = (free_bytes / 2).clamp(MeasuredArea::BYTES_MIN, MeasuredArea::BYTES_MAX);
        let bytes = half / BLOCK * BLOCK;
        let offset = (free + free_bytes).saturating_sub(bytes);
        if free_bytes < bytes || !self.space.take(Extent { device, offset }, bytes) {
            return Err(Fault::new(
                FaultKind::NoSpace,
                format!(
                    "{path} can be measured in free space only: that takes {bytes} bytes in one piece, and its largest one has {free_bytes}; delete a job (`offloadd job delete`) or let tiles move away first"
                ),
            ));
        }
        let superblock = &self.devices[device.0 as usize].superblock;
        let measuring = Measuring {
            device,
            number: superblock.number,
            area: MeasuredArea { offset, bytes },
            before: superblock.rates(),
            busy: self.devices_are_busy(data),
        };
        self.measuring = Some(measuring);
        Ok(Reply::BeginMeasuring(measuring))
    }

    pub(in crate::core) fn flush_measured(
        &mut self,
        call: CallId,
        ops: &mut Operations,
    ) -> Result<Option<Reply>, Fault> {
        let Some(measuring) = self.measuring else {
            return Err(nothing_measured());
        };
        ops.flush(measuring.device, Waiter::Call(call));
        Ok(None)
    }

    pub(in crate::core) fn end_measuring(
        &mut self,
        call: CallId,
        rates: Option<MeasuredRates>,
        all_ended: bool,
        data: &mut Data,
        ops: &mut Operations,
    ) -> Result<Option<Reply>, Fault> {
        let Some(measuring) = self.measuring.take() else {
            return Err(nothing_measured());
        };
        let Measuring { device, area, .. } = measuring;
        let busy = measuring.busy || self.devices_are_busy(data);
        let lent = Extent {
            device,
            offset: area.offset,
        };
        // What may still be written there would be written over a tile: it stays taken until the next start.
        if all_ended {
            self.space.give(lent, area.bytes);
        }
        let Some(rates) = rates else {
            return Ok(Some(Reply::EndMeasuring { device, busy }));
        };
        assert!(all_ended, "rates are of operations that have all ended");
        self.limit_next_moves(None, data);
        let change = DeviceChange::Measure {
            call,
            device,
            rates,
            busy,
        };
        let queued = self.change_catalog(Work::Device(change), data, ops);
        if let Err(fault) = &queued
            && fault.kind == FaultKind::TooMany
        {
            // Whoever measured asks again, and nothing is lost until then.
            assert!(self.space.take(lent, area.bytes), "just given back");
            self.measuring = Some(measuring);
        }
        queued.map(|()| None)
    }

    /// Under a ceiling tiles move some of the time only: none may just now.
    fn devices_are_busy(&self, data: &Data) -> bool {
        let move_tiles = matches!(self.moves(data), Moves::Moving | Moves::Waiting);
        move_tiles || data.has_sessions()
    }

    /// Of a device that leaves nobody needs to know how fast it is.
    fn check_stays(&self, device: DeviceIndex) -> Result<(), Fault> {
        let draining = self.devices[device.0 as usize].phase == Some(Phase::Draining);
        if !draining && !self.space.is_closed(device) {
            return Ok(());
        }
        let what = format!(
            "{} is drained: no tiles go there any more, however fast it is",
            self.path(device)
        );
        Err(Fault::new(FaultKind::Invalid, what))
    }

    /// As [`Admin::device_steps`].
    pub(super) fn measure_steps(
        &mut self,
        call: CallId,
        device: DeviceIndex,
        rates: &MeasuredRates,
        catalog: &mut Catalog,
        data: &Data,
        ops: &mut Operations,
    ) -> Option<Vec<Step>> {
        // It may have been asked to leave meanwhile.
        if let Err(fault) = self.check_stays(device) {
            ops.refuse(call, fault);
            return None;
        }
        let lacking = self.lacking_with(device, rates, data);
        for (index, state) in self.devices.iter().enumerate() {
            let number = state.superblock.number;
            let entry = catalog.devices.iter_mut().find(|e| e.number == number);
            if let Some(entry) = entry.filter(|entry| entry.phase != Phase::Draining) {
                entry.phase = match lacking.contains(&DeviceIndex(index as u32)) {
                    true => Phase::Filling,
                    false => Phase::Settled,
                };
            }
        }
        let superblock = self.superblock_with(device, rates);
        let mut steps = in_turn(device, SUPERBLOCK_OFFSETS, superblock.encode());
        steps.extend(catalog_steps(self.home, catalog));
        Some(steps)
    }

    /// Both are durable.
    pub(super) fn take_measured(&mut self, device: DeviceIndex, rates: &MeasuredRates) {
        self.devices[device.0 as usize].superblock = self.superblock_with(device, rates);
        let rate = rate(rates.read_bytes_per_s, rates.write_bytes_per_s);
        self.space.set_rate(device, rate);
        for state in self.devices.iter_mut().filter(|d| d.phase.is_some()) {
            let number = state.superblock.number;
            let entries = self.catalog.catalog.devices.iter();
            let entry = { entries }.find(|entry| entry.number == number);
            state.phase = entry.map(|entry| entry.phase);
        }
    }

    fn superblock_with(&self, device: DeviceIndex, rates: &MeasuredRates) -> Superblock {
        Superblock {
            read_bytes_per_s: rates.read_bytes_per_s,
            write_bytes_per_s: rates.write_bytes_per_s,
            ..self.devices[device.0 as usize].superblock
        }
    }

    /// Who has fewer of all tiles than its rate says, if `device` has these rates, by one tile at least.
    fn lacking_with(
        &self,
        device: DeviceIndex,
        rates: &MeasuredRates,
        data: &Data,
    ) -> Vec<DeviceIndex> {
        let mut current = vec![0; self.devices.len()];
        let mut least_bytes = u64::MAX;
        for layout in data.layouts() {
            let copies = layout.copies();
            for (tile, extents) in layout.table.extents.iter().enumerate() {
                let bytes = layout.tile_bytes(tile);
                least_bytes = least_bytes.min(bytes);
                for extent in &extents[..copies] {
                    current[extent.device.0 as usize] += bytes;
                }
            }
        }
        let mut space = self.space.clone();
        space.set_rate(
            device,
            rate(rates.read_bytes_per_s, rates.write_bytes_per_s),
        );
        space.lacking(&current, least_bytes)
    }
}

fn nothing_measured() -> Fault {
    Fault::new(FaultKind::Invalid, "no device is being measured")
}
