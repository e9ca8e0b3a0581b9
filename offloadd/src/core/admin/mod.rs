//! Administration of the store: devices and their free space, the catalog, tiles that move to other devices.
//!
//! Sits above [`super::data`] and calls its functions; it never changes a job itself.
//!
//! ```text
//!   AddDevice, DrainDevice  ──▶ devices ─┐
//!                                        ├─▶ catalog_queue: one change at a time
//!   Define, DropJob         ─────────────┘
//!   RebalanceTick           ──▶ moving ──▶ copying: some tiles of one job, all together or none
//!   hand over, adopt        ──▶ handing      begin_reading ──▶ reading: a read-only incarnation
//! ```

mod catalog_queue;
mod copying;
mod devices;
mod handing;
mod moving;
mod reading;

use std::collections::{BTreeMap, HashMap};

use offload_api::BLOCK_BYTES;
use offload_api::fault::Fault;
use offload_api::ids::DeviceIndex;
use offload_support::units::ApproxBytes;

use super::data::{Data, Note, ScratchRequest, ScratchWrite};
use super::operations::{Operations, ScriptEnd, ScriptId};
use super::{DeviceState, DeviceStatus};
use crate::io::IoId;
use crate::store::catalog::{Catalog, Phase};
use crate::store::placement::Space;
use crate::store::recover::RecoveredDevice;
use crate::store::superblock::Superblock;
use crate::store::tile_table::Extent;
use catalog_queue::{CatalogChange, CatalogQueue};
use copying::CopyIo;
use moving::Mover;

pub use moving::Moves;

/// Devices, space and catalog.
pub(super) struct Admin {
    /// Devices by index; a device that left keeps its index in this incarnation.
    devices: Vec<RecoveredDevice>,
    /// The metadata device, with the catalog and the jobs' areas.
    metadata_device: DeviceIndex,
    space: Space,
    catalog: CatalogQueue,
    mover: Mover,
    /// Pieces of tiles being copied.
    inflight: HashMap<IoId, CopyIo>,
    /// Purposes of the scripts.
    scripts: BTreeMap<ScriptId, Purpose>,
    /// Reason why the store is read-only in this incarnation.
    read_only: Option<Fault>,
    /// Limit of bytes copied per second while tiles move, from the settings.
    rebalance_bytes_per_s_max: Option<u64>,
}

/// Purpose of a script.
#[derive(Debug)]
enum Purpose {
    Catalog(Box<CatalogChange>),
    /// Makes copies of tiles durable, and clears what an interrupted commit left.
    Settle,
    /// Writes a new revision of a definition.
    Exchange,
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
            devices,
            metadata_device,
            space,
            catalog: CatalogQueue::new(catalog),
            mover: Mover::default(),
            inflight: HashMap::new(),
            scripts: BTreeMap::new(),
            read_only: None,
            rebalance_bytes_per_s_max,
        }
    }

    pub(super) fn set_rebalance_bytes_per_s_max(&mut self, bytes_per_s_max: Option<u64>) {
        self.rebalance_bytes_per_s_max = bytes_per_s_max;
    }

    pub(super) fn inflight_count(&self) -> usize {
        self.inflight.len()
    }

    /// Handles a note about sessions and jobs.
    pub(super) fn hear(&mut self, note: Note) {
        match note {
            Note::Freed(extents) => {
                for (extent, bytes) in extents {
                    self.space.give(extent, bytes);
                }
            }
            Note::Overwrites { key, tile, which } => self.mover.invalidate_copy(&key, tile, which),
            Note::Forgotten => self.mover.retry(),
        }
    }

    pub(super) fn on_script_end(&mut self, end: ScriptEnd, data: &mut Data, ops: &mut Operations) {
        let purpose = self.scripts.remove(&end.script).expect("our script");
        match purpose {
            Purpose::Catalog(change) => self.finish_catalog(*change, end.result, data, ops),
            Purpose::Settle => self.finish_settle(end.result, data, ops),
            Purpose::Exchange => self.finish_exchange(end.result, data, ops),
        }
    }

    /// Bytes on all devices that new tiles may take.
    pub(super) fn free_bytes(&self) -> u64 {
        (0..self.devices.len() as u32)
            .map(DeviceIndex)
            .filter(|device| !self.space.is_closed(*device))
            .map(|device| self.space.free_bytes(device))
            .sum()
    }

    /// Reserves space for a session's own tiles.
    pub(super) fn reserve_scratch(&mut self, asked: &ScratchRequest) -> Result<Vec<Extent>, Fault> {
        (self.space.reserve_tiles(asked.tile_bytes())).map_err(|no_room| {
            asked.no_room(no_room.needed_bytes, &self.free_room(&no_room.free_bytes))
        })
    }

    /// Returns another place for a session's own tile that lies on a drained device, if another device has space.
    pub(super) fn move_scratch(&mut self, write: &ScratchWrite) -> Option<Extent> {
        if !self.space.is_closed(write.extent.device) {
            return None;
        }
        let places = self.space.reserve_tiles(&[write.bytes]).ok()?;
        self.space.give(write.extent, u64::from(write.bytes));
        Some(places[0])
    }

    fn path(&self, device: DeviceIndex) -> &str {
        &self.devices[device.0 as usize].path
    }

    pub(super) fn paths(&self) -> Vec<&str> {
        self.devices
            .iter()
            .map(|device| device.path.as_str())
            .collect()
    }

    /// Superblock of a device, to tell it from another device at its path.
    pub(super) fn superblock(&self, device: DeviceIndex) -> Superblock {
        self.devices[device.0 as usize].superblock
    }

    /// Devices in the store's order.
    pub(super) fn device_states(&self, data: &Data) -> Vec<DeviceState> {
        let state = |(index, device): (usize, &RecoveredDevice)| DeviceState {
            path: device.path.clone(),
            block_bytes: BLOCK_BYTES,
            data_bytes: device.superblock.data_bytes,
            free_bytes: self.space.free_bytes(DeviceIndex(index as u32)),
            read_bytes_per_s: device.superblock.read_bytes_per_s,
            write_bytes_per_s: device.superblock.write_bytes_per_s,
            status: self.status(DeviceIndex(index as u32), device, data),
        };
        self.devices.iter().enumerate().map(state).collect()
    }

    fn status(&self, index: DeviceIndex, device: &RecoveredDevice, data: &Data) -> DeviceStatus {
        let not_moving = match device.phase {
            Some(Phase::Settled) => None,
            _ => self.mover.stuck(),
        };
        let (stuck, waits_for_start) = (not_moving.or_else(|| self.only_read(index)))
            .map(|why| (why, false))
            .or_else(|| self.waits_for_a_start(index, data))
            .unzip();
        DeviceStatus {
            number: device.superblock.number,
            phase: device.phase,
            left_bytes: self.left_bytes(index, data),
            stuck,
            waits_for_start: waits_for_start.unwrap_or(false),
        }
    }

    /// Describes what a drained metadata device without tiles still holds, and whether the next start moves that too.
    fn waits_for_a_start(&self, device: DeviceIndex, data: &Data) -> Option<(String, bool)> {
        if device != self.metadata_device || !self.only_metadata_left(data) {
            return None;
        }
        let what = "all tiles have left it; the store's catalog and the jobs' records";
        Some(match self.find_new_metadata_device(&self.space, data) {
            Ok(_) => (
                format!("{what} leave it when offloadd is started next with no session to adopt"),
                true,
            ),
            Err(fault) => (format!("{what} are still there: {}", fault.message), false),
        })
    }

    /// Lists the free space of the store's devices, for messages.
    fn free_room(&self, free_bytes: &[u64]) -> String {
        let free: Vec<String> = (self.devices.iter().zip(free_bytes))
            .filter(|(device, _)| device.phase.is_some())
            .map(|(device, free)| format!("{} has {}", device.path, ApproxBytes(*free)))
            .collect();
        free.join(", ")
    }
}
