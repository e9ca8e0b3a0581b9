//! Administration of the store: devices and their free space, the catalog, tiles that move to other devices.
//!
//! Sits above [`super::data`] and calls its functions; it never changes a job itself.
//!
//! ```text
//!   AddDevice, DrainDevice  ──▶ devices ─┐
//!                                        ├─▶ catalog_queue: one change at a time
//!   Define, DropJob         ─────────────┘
//!   RebalanceTick           ──▶ moving: which tiles ──▶ copying: some tiles of one job, all together or none
//!   hand over, adopt        ──▶ handing      begin_reading ──▶ reading: a read-only incarnation
//!
//!   Admin ─┬─ DeviceTable: the devices and their free space
//!          ├─ CatalogQueue: changes of the catalog
//!          └─ Mover: the plan, and the batch of tiles that moves now
//! ```

mod batch;
mod catalog_change;
mod catalog_queue;
mod copying;
mod device_table;
mod devices;
mod handing;
mod moving;
mod reading;

use offload_api::BLOCK_BYTES;
use offload_api::fault::Fault;
use offload_api::ids::DeviceIndex;

use super::data::{AdminNote, Data};
use super::operations::{Operations, ScriptEnd};
use super::{DeviceState, DeviceStatus};
use crate::io::{AlignedBytes, IoId, IoResult};
use crate::store::catalog::{Catalog, Phase};
use crate::store::placement::Space;
use crate::store::recover::RecoveredDevice;
use catalog_queue::CatalogQueue;
use device_table::DeviceTable;
use moving::Mover;

pub use moving::Moves;

/// Devices, space and catalog.
pub(super) struct Admin {
    pub(super) devices: DeviceTable,
    catalog: CatalogQueue,
    pub(super) mover: Mover,
    /// Reason why the store is read-only in this incarnation.
    read_only: Option<Fault>,
}

impl Admin {
    pub(super) fn new(
        devices: Vec<RecoveredDevice>,
        metadata_device: DeviceIndex,
        space: Space,
        catalog: Catalog,
        rebalance_bytes_per_s_max: Option<u64>,
    ) -> Self {
        Self {
            devices: DeviceTable::new(devices, metadata_device, space),
            catalog: CatalogQueue::new(catalog),
            mover: Mover::new(rebalance_bytes_per_s_max),
            read_only: None,
        }
    }

    /// Handles a note about sessions and jobs.
    pub(super) fn on_note(&mut self, note: AdminNote) {
        match note {
            AdminNote::Freed(extents) => {
                for (extent, bytes) in extents {
                    self.devices.space.give(extent, bytes);
                }
            }
            AdminNote::Overwrites { key, tile, which } => {
                self.mover.invalidate_copy(&key, tile, which)
            }
            AdminNote::Forgotten => self.mover.retry(),
        }
    }

    pub(super) fn on_script_end(&mut self, end: ScriptEnd, data: &mut Data, ops: &mut Operations) {
        match self.catalog.end_write(end.script) {
            Some(change) => self.finish_catalog(change, end.result, data, ops),
            None => (self.mover).on_script_end(end, &mut self.devices, data, ops),
        }
        // The deletion of a job may have waited for its tiles.
        self.next_change(data, ops);
    }

    /// Handles the end of an operation of a copy. Returns false if `io` is not one.
    pub(super) fn on_io_done(
        &mut self,
        io: IoId,
        result: IoResult,
        read: Option<AlignedBytes>,
        data: &mut Data,
        ops: &mut Operations,
    ) -> bool {
        let copied = (self.mover).on_io_done(io, result, read, &mut self.devices, data, ops);
        if copied {
            self.next_change(data, ops);
        }
        copied
    }

    /// Devices in the store's order.
    pub(super) fn device_states(&self, data: &Data) -> Vec<DeviceState> {
        let state = |(index, device): (DeviceIndex, &RecoveredDevice)| DeviceState {
            path: device.path.clone(),
            block_bytes: BLOCK_BYTES,
            data_bytes: device.superblock.data_bytes,
            free_bytes: self.devices.space.free_bytes(index),
            read_bytes_per_s: device.superblock.read_bytes_per_s,
            write_bytes_per_s: device.superblock.write_bytes_per_s,
            status: self.status(index, device, data),
        };
        self.devices.iter().map(state).collect()
    }

    fn status(&self, index: DeviceIndex, device: &RecoveredDevice, data: &Data) -> DeviceStatus {
        let not_moving = match device.phase {
            Some(Phase::Settled) => None,
            _ => self.mover.stuck(),
        };
        // Reported for one device.
        let only_read = (self.read_only.as_ref())
            .filter(|_| index == self.devices.metadata_device())
            .map(|fault| fault.message.clone());
        let (stuck, waits_for_start) = (not_moving.or(only_read))
            .map(|why| (why, false))
            .or_else(|| self.devices.waits_for_a_start(index, &data.jobs))
            .unzip();
        DeviceStatus {
            number: device.superblock.number,
            phase: device.phase,
            left_bytes: self.left_bytes(index, data),
            stuck,
            waits_for_start: waits_for_start.unwrap_or(false),
        }
    }
}
