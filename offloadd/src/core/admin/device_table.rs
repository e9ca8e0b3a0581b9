//! The table of devices: those of the store, their free space, and what fits where.

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::DeviceIndex;
use offload_support::units::ApproxBytes;

use crate::core::NewDevice;
use crate::core::data::{DeviceNumbers, JobTable, ScratchRequest, ScratchWrite};
use crate::store::DEVICES_MAX;
use crate::store::catalog::{Catalog, DeviceEntry, Phase};
use crate::store::metadata_device::place_areas;
use crate::store::placement::{Space, rate};
use crate::store::recover::RecoveredDevice;
use crate::store::superblock::{StoreId, Superblock};
use crate::store::tile_table::Extent;

/// Devices by index; a device that left keeps its index in this incarnation.
pub(in crate::core) struct DeviceTable {
    devices: Vec<RecoveredDevice>,
    /// The metadata device, with the catalog and the jobs' areas.
    metadata_device: DeviceIndex,
    pub(super) space: Space,
}

impl DeviceTable {
    pub(super) fn new(
        devices: Vec<RecoveredDevice>,
        metadata_device: DeviceIndex,
        space: Space,
    ) -> Self {
        Self {
            devices,
            metadata_device,
            space,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.devices.len()
    }

    pub(super) fn get(&self, device: DeviceIndex) -> &RecoveredDevice {
        &self.devices[device.0 as usize]
    }

    pub(super) fn get_mut(&mut self, device: DeviceIndex) -> &mut RecoveredDevice {
        &mut self.devices[device.0 as usize]
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (DeviceIndex, &RecoveredDevice)> {
        let devices = self.devices.iter().enumerate();
        devices.map(|(index, device)| (DeviceIndex(index as u32), device))
    }

    pub(super) fn metadata_device(&self) -> DeviceIndex {
        self.metadata_device
    }

    pub(super) fn path(&self, device: DeviceIndex) -> &str {
        &self.get(device).path
    }

    pub(in crate::core) fn paths(&self) -> Vec<&str> {
        self.devices
            .iter()
            .map(|device| device.path.as_str())
            .collect()
    }

    /// Superblock of a device, to tell it from another device at its path.
    pub(in crate::core) fn superblock(&self, device: DeviceIndex) -> Superblock {
        self.get(device).superblock
    }

    /// Numbers of the devices by index, as definitions name them.
    pub(super) fn numbers(&self) -> Vec<u32> {
        let numbers = self.devices.iter().map(|d| d.superblock.number);
        numbers.collect()
    }

    /// Numbers of the devices by index, as messages to the next daemon name them.
    pub(super) fn numbers_for_hand_over(&self) -> DeviceNumbers {
        let numbers = self.devices.iter();
        let numbers = numbers.map(|device| (device.superblock.number, device.phase.is_some()));
        DeviceNumbers {
            numbers: numbers.collect(),
        }
    }

    pub(super) fn in_phase(&self, phase: Phase) -> Vec<DeviceIndex> {
        self.iter()
            .filter(|(_, device)| device.phase == Some(phase))
            .map(|(index, _)| index)
            .collect()
    }

    /// Checks that one more device can be added in this incarnation: a device that left keeps its index until it ends.
    pub(in crate::core) fn check_growth(&self) -> Result<(), Fault> {
        if self.devices.len() < DEVICES_MAX as usize {
            return Ok(());
        }
        Err(Fault::new(
            FaultKind::TooMany,
            format!(
                "{} devices are or were part of the store since offloadd was started, which is the limit: restart offloadd, or drain a device first",
                self.devices.len()
            ),
        ))
    }

    /// Adds a device on which nothing is placed until the catalog names it.
    pub(super) fn add(&mut self, new: NewDevice, store: StoreId) -> DeviceIndex {
        let device = DeviceIndex(self.devices.len() as u32);
        let rates = new.rates;
        self.devices.push(RecoveredDevice {
            position: device.0 as usize,
            path: new.path,
            superblock: Superblock {
                store,
                // Assigned when its turn comes.
                number: u32::MAX,
                id: new.id,
                drained: false,
                data_bytes: new.data_bytes,
                read_bytes_per_s: rates.read_bytes_per_s,
                write_bytes_per_s: rates.write_bytes_per_s,
                created_unix_s: new.created_unix_s,
            },
            phase: None,
        });
        let rate = rate(rates.read_bytes_per_s, rates.write_bytes_per_s);
        self.space.add(new.data_bytes, rate);
        self.space.close(device);
        device
    }

    /// Finds the device at this path of the settings.
    pub(super) fn find(&self, path: &str) -> Result<DeviceIndex, Fault> {
        let found = (self.devices.iter()).position(|d| d.path == path && d.phase.is_some());
        found.map(|index| DeviceIndex(index as u32)).ok_or_else(|| {
            let known: Vec<&str> = (self.devices.iter().filter(|d| d.phase.is_some()))
                .map(|device| device.path.as_str())
                .collect();
            let known = known.join(", ");
            let what = format!("the store has no device {path}; it has {known}");
            Fault::new(FaultKind::NotFound, what)
        })
    }

    /// Returns the catalog's entry of a device.
    pub(super) fn entry_of<'a>(
        &self,
        catalog: &'a mut Catalog,
        device: DeviceIndex,
    ) -> &'a mut DeviceEntry {
        let number = self.get(device).superblock.number;
        let mut entries = catalog.devices.iter_mut();
        (entries.find(|entry| entry.number == number)).expect("a device of the store")
    }

    /// Bytes on all devices that new tiles may take.
    pub(in crate::core) fn free_bytes(&self) -> u64 {
        self.iter()
            .filter(|(device, _)| !self.space.is_closed(*device))
            .map(|(device, _)| self.space.free_bytes(device))
            .sum()
    }

    /// Lists the free space of the store's devices, for messages.
    pub(super) fn free_room(&self, free_bytes: &[u64]) -> String {
        let free: Vec<String> = (self.devices.iter().zip(free_bytes))
            .filter(|(device, _)| device.phase.is_some())
            .map(|(device, free)| format!("{} has {}", device.path, ApproxBytes(*free)))
            .collect();
        free.join(", ")
    }

    /// Bytes on `device`: tiles of jobs and of sessions, and areas.
    pub(super) fn bytes_on(&self, device: DeviceIndex) -> u64 {
        let data_bytes = self.get(device).superblock.data_bytes;
        data_bytes - self.space.free_bytes(device)
    }

    /// Frees extents.
    pub(super) fn free_all(&mut self, extents: impl IntoIterator<Item = (Extent, u32)>) {
        for (extent, bytes) in extents {
            self.space.give(extent, u64::from(bytes));
        }
    }

    /// Reserves space for a session's own tiles.
    pub(in crate::core) fn reserve_scratch(
        &mut self,
        asked: &ScratchRequest,
    ) -> Result<Vec<Extent>, Fault> {
        (self.space.reserve_tiles(asked.tile_bytes())).map_err(|no_room| {
            asked.no_room(no_room.needed_bytes, &self.free_room(&no_room.free_bytes))
        })
    }

    /// Returns another place for a session's own tile that lies on a drained device, if another device has space.
    pub(in crate::core) fn move_scratch(&mut self, write: &ScratchWrite) -> Option<Extent> {
        if !self.space.is_closed(write.extent.device) {
            return None;
        }
        let places = self.space.reserve_tiles(&[write.bytes]).ok()?;
        self.space.give(write.extent, u64::from(write.bytes));
        Some(places[0])
    }

    /// Whether the metadata device is drained and holds nothing but the catalog and the jobs' areas.
    pub(super) fn only_metadata_left(&self, jobs: &JobTable) -> bool {
        self.get(self.metadata_device).phase == Some(Phase::Draining)
            && self.bytes_on(self.metadata_device) == jobs.area_bytes()
    }

    /// Reserves space for the areas of all jobs on one device, each contiguous.
    fn reserve_new_metadata_device(&self, trial: &mut Space, jobs: &JobTable) -> Result<(), Fault> {
        for (extent, bytes) in self.find_new_metadata_device(trial, jobs)? {
            assert!(trial.allocate(extent, bytes), "just found free");
        }
        Ok(())
    }

    /// Finds one device with space for the areas of all jobs. Returns the extent and the length of each area.
    pub(super) fn find_new_metadata_device(
        &self,
        space: &Space,
        jobs: &JobTable,
    ) -> Result<Vec<(Extent, u64)>, Fault> {
        let sizes = jobs.layouts().map(|layout| layout.entry.area.bytes());
        let sizes: Vec<u64> = sizes.collect();
        let Some((to, offsets)) = place_areas(space, self.devices.len(), &sizes) else {
            return Err(Fault::new(
                FaultKind::NoSpace,
                format!(
                    "{} holds the store's catalog and {} of its jobs' records. No other device has space for all of them, with the records of each job in one piece: delete a job (`offloadd job delete`) or add a device first",
                    self.path(self.metadata_device),
                    ApproxBytes(sizes.iter().sum::<u64>())
                ),
            ));
        };
        let extents = (offsets.into_iter()).map(|offset| Extent { device: to, offset });
        Ok(extents.zip(sizes).collect())
    }

    /// Describes what a drained metadata device without tiles still holds, and whether the next start moves that too.
    pub(super) fn waits_for_a_start(
        &self,
        device: DeviceIndex,
        jobs: &JobTable,
    ) -> Option<(String, bool)> {
        if device != self.metadata_device() || !self.only_metadata_left(jobs) {
            return None;
        }
        let what = "all tiles have left it; the store's catalog and the jobs' records";
        Some(match self.find_new_metadata_device(&self.space, jobs) {
            Ok(_) => (
                format!("{what} leave it when offloadd is started next with no session to adopt"),
                true,
            ),
            Err(fault) => (format!("{what} are still there: {}", fault.message), false),
        })
    }

    /// Checks that the tiles of `device` fit on the other devices. The error has the numbers.
    pub(super) fn check_room_without(
        &self,
        device: DeviceIndex,
        jobs: &JobTable,
    ) -> Result<(), Fault> {
        let mut trial = self.space.clone();
        trial.close(device);
        // Drained earlier: it waits for a start.
        if trial.is_closed(self.metadata_device) {
            self.reserve_new_metadata_device(&mut trial, jobs)?;
        }
        let room: Vec<(DeviceIndex, u64)> = (self.iter())
            .filter(|(other, state)| state.phase.is_some() && !trial.is_closed(*other))
            .map(|(other, _)| (other, trial.free_bytes(other)))
            .collect();
        let fits = jobs.layouts().all(|layout| {
            (layout.table.extents.iter().enumerate()).all(|(tile, extents)| {
                let (copies, bytes) = (layout.copies(tile), layout.tile_bytes(tile));
                let leaving = extents[..copies].iter().filter(|e| e.device == device);
                let mut all = leaving.map(|_| trial.take_on(device, bytes, true));
                all.all(|taken| taken.is_some())
            })
        });
        if fits {
            return Ok(());
        }
        let free: Vec<String> = (room.iter())
            .map(|(other, free)| format!("{} has {}", self.path(*other), ApproxBytes(*free)))
            .collect();
        Err(Fault::new(
            FaultKind::NoSpace,
            format!(
                "{} lie on {} and do not fit on the other devices (free: {}): delete a job (`offloadd job delete`) or add a device first",
                ApproxBytes(self.bytes_on(device)),
                self.path(device),
                free.join(", ")
            ),
        ))
    }
}
