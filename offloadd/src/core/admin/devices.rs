//! Adding and draining devices.
//!
//! ```text
//!   add:    superblock ──▶ catalog (filling) ──▶ tiles move to it ──▶ catalog (settled)
//!   drain:  catalog (draining) ──▶ tiles leave it ──▶ catalog without it ──▶ superblock says so
//! ```
//!
//! One write of the catalog decides, so a power cut leaves a store with the device or without it; an interrupted change continues
//! at the next start. Tiles leave a drained metadata device like any other; the catalog and the jobs' areas leave it at a start:
//! see [`crate::store::metadata_device`].

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::DeviceNumber;

use super::Admin;
use super::catalog_change::{DeviceChange, QueuedChange, catalog_steps};
use crate::core::data::Data;
use crate::core::operations::{Operations, ScriptFailure, Step, in_turn};
use crate::core::{Action, CallId, NewDevice, Reply};
use crate::io::AlignedBytes;
use crate::store::catalog::{Catalog, DeviceEntry, Phase};
use crate::store::{BLOCK, CATALOG_OFFSETS, DEVICES_MAX, SUPERBLOCK_OFFSETS};

impl Admin {
    pub(in crate::core) fn add_device(
        &mut self,
        call: CallId,
        new: NewDevice,
        data: &mut Data,
        ops: &mut Operations,
    ) -> Result<Option<Reply>, Fault> {
        self.check_writing()?;
        self.limit_next_moves(new.rebalance_bytes_per_s_max, data);
        ops.add_device(new.path.clone());
        let device = self.devices.add(new, self.catalog.catalog.store);
        data.jobs.add_device();
        let change = DeviceChange::Add { call, device };
        self.change_catalog(QueuedChange::Device(change), data, ops)?;
        Ok(None)
    }

    pub(in crate::core) fn drain_device(
        &mut self,
        call: CallId,
        path: &str,
        rebalance_bytes_per_s_max: Option<u64>,
        data: &mut Data,
        ops: &mut Operations,
    ) -> Result<Option<Reply>, Fault> {
        let device = self.devices.find(path)?;
        self.check_writing()?;
        if self.devices.space.is_closed(device) {
            if self.devices.get(device).phase != Some(Phase::Draining) {
                let what = format!("a drain of {path} is about to start: try again");
                return Err(Fault::new(FaultKind::Busy, what));
            }
            self.limit_next_moves(rebalance_bytes_per_s_max, data);
            self.mover.retry();
            let left_bytes = self.left_bytes(device, data);
            return Ok(Some(Reply::DrainDevice { left_bytes }));
        }
        (self.devices).check_room_without(device, &data.jobs)?;
        self.limit_next_moves(rebalance_bytes_per_s_max, data);
        // From now on nothing new is placed on the device.
        self.devices.space.close(device);
        let change = DeviceChange::Drain { call, device };
        if let Err(fault) = self.change_catalog(QueuedChange::Device(change), data, ops) {
            self.devices.space.open(device);
            return Err(fault);
        }
        Ok(None)
    }

    /// Applies `change` to `catalog` and returns the steps of its script; `None` if it is refused or not due any more.
    pub(super) fn device_steps(
        &mut self,
        change: &DeviceChange,
        catalog: &mut Catalog,
        ops: &mut Operations,
    ) -> Option<Vec<Step>> {
        match *change {
            DeviceChange::Add { call, device } => {
                if catalog.devices.len() >= DEVICES_MAX as usize {
                    let what = format!(
                        "the store has {DEVICES_MAX} devices, which is the limit: drain one first"
                    );
                    ops.refuse(call, Fault::new(FaultKind::TooMany, what));
                    return None;
                }
                let number = catalog.next_number;
                let Some(next) = number.checked_add(1) else {
                    let what = "all device numbers are used, and a number is never used again: format a new store";
                    ops.refuse(call, Fault::new(FaultKind::TooMany, what));
                    return None;
                };
                catalog.next_number = next;
                let new = self.devices.get_mut(device);
                new.superblock.number = number;
                ops.set_number(device, DeviceNumber(number));
                catalog.devices.push(DeviceEntry {
                    number,
                    id: new.superblock.id,
                    phase: Phase::Filling,
                    path: new.path.clone(),
                });
                let blocks = new.superblock.encode();
                let superblocks = SUPERBLOCK_OFFSETS.map(|offset| (offset, blocks.clone()));
                // An earlier store may have left catalogs there.
                let zeros = AlignedBytes::zeroed(BLOCK as usize);
                let catalogs = CATALOG_OFFSETS.map(|offset| (offset, zeros.clone()));
                let mut steps = vec![
                    Step::writes(device, superblocks.into_iter().chain(catalogs)),
                    Step::flush([device]),
                ];
                steps.extend(catalog_steps(self.devices.metadata_device(), catalog));
                Some(steps)
            }
            DeviceChange::Drain { device, .. } => {
                self.devices.entry_of(catalog, device).phase = Phase::Draining;
                Some(catalog_steps(self.devices.metadata_device(), catalog))
            }
            DeviceChange::Settle { device } => {
                // While this change waited, the device may have been drained, or another one added: then everything is planned
                // again.
                let filling = self.devices.get(device).phase == Some(Phase::Filling);
                if !filling || !self.mover.is_done() {
                    return None;
                }
                self.devices.entry_of(catalog, device).phase = Phase::Settled;
                Some(catalog_steps(self.devices.metadata_device(), catalog))
            }
            DeviceChange::Remove { device } => {
                // The change was queued twice.
                if self.devices.get(device).phase != Some(Phase::Draining) {
                    return None;
                }
                let superblock = &mut self.devices.get_mut(device).superblock;
                let number = superblock.number;
                superblock.drained = true;
                let blocks = superblock.encode();
                catalog.devices.retain(|entry| entry.number != number);
                let mut steps = catalog_steps(self.devices.metadata_device(), catalog);
                // The catalog decides: a device that is drained because it fails may refuse this write. One copy after the other,
                // so that a power cut leaves a whole one.
                steps.extend(in_turn(device, SUPERBLOCK_OFFSETS, blocks));
                Some(steps)
            }
        }
    }

    pub(super) fn finish_device_change(
        &mut self,
        change: DeviceChange,
        result: Result<(), ScriptFailure>,
        data: &mut Data,
        ops: &mut Operations,
    ) {
        let (DeviceChange::Add { device, .. }
        | DeviceChange::Drain { device, .. }
        | DeviceChange::Settle { device }
        | DeviceChange::Remove { device }) = change;
        if let Err(failed) = result {
            if let DeviceChange::Drain { .. } = change {
                self.devices.space.open(device);
            }
            self.mover.stop(&failed.fault);
            if let Some(call) = change.call() {
                ops.refuse(call, failed.fault);
            }
            return;
        }
        let state = self.devices.get_mut(device);
        let answer = match change {
            DeviceChange::Add { call, .. } => {
                state.phase = Some(Phase::Filling);
                let number = state.superblock.number;
                self.devices.space.open(device);
                Some((call, Reply::AddDevice { number }))
            }
            DeviceChange::Drain { call, .. } => {
                state.phase = Some(Phase::Draining);
                let left_bytes = self.left_bytes(device, data);
                Some((call, Reply::DrainDevice { left_bytes }))
            }
            DeviceChange::Settle { .. } => {
                state.phase = Some(Phase::Settled);
                None
            }
            DeviceChange::Remove { .. } => {
                state.phase = None;
                ops.push(Action::ForgetDevice { device });
                None
            }
        };
        self.mover.retry();
        if let Some((call, reply)) = answer {
            ops.reply(call, Ok(reply));
        }
    }
}
