//! Free space of each device, and placement of a job's tiles.
//!
//! Tiles are dealt out so that each device gets bytes in proportion to its rate, and neighbours in the table lie on different
//! devices. With several tiles in flight the rates then add up. A device that lacks room for its part gets less, spread over
//! the whole table; if it were filled first, the second half of the table would be left to the other devices.

mod shares;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use offload_api::ids::DeviceIndex;
use test_hooks::safeguard::{Safeguard, is_disabled};

use self::shares::Deal;
pub use self::shares::rate;
use super::DATA_OFFSET;
use super::catalog::Area;
use super::definition::JobDefinition;
use super::manifest::record_bytes_max;
use super::tile_table::{Extent, stored_bytes};

/// Free space of all devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Space {
    devices: Vec<DeviceSpace>,
    /// Metadata device, which holds the jobs' areas.
    metadata_device: DeviceIndex,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct DeviceSpace {
    /// Bytes by offset; adjacent ranges are merged.
    free: BTreeMap<u64, u64>,
    free_bytes: u64,
    /// Rate as of [`rate`]; 0 is unknown.
    rate: u64,
    /// Whether nothing new is placed there.
    closed: bool,
}

/// Space reserved for a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// Area on the metadata device.
    pub area: Area,
    /// Extents of each tile.
    pub extents: Vec<[Extent; 2]>,
    /// Bytes over all devices.
    pub bytes: u64,
}

/// Why a job does not fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoRoom {
    pub needed_bytes: u64,
    /// Bytes free on each device.
    pub free_bytes: Vec<u64>,
    /// Bytes of the area, which needs one piece, and of the largest free piece on the metadata device, if that is too small.
    pub no_area: Option<(u64, u64)>,
}

impl DeviceSpace {
    fn room_bytes(&self) -> u64 {
        if self.closed { 0 } else { self.free_bytes }
    }
}

impl Space {
    /// Space without devices.
    pub fn new(metadata_device: DeviceIndex) -> Self {
        Self {
            devices: Vec::new(),
            metadata_device,
        }
    }

    /// Adds a device, all of its data area free.
    pub fn add(&mut self, data_bytes: u64, rate: u64) {
        self.devices.push(DeviceSpace {
            free: BTreeMap::from([(DATA_OFFSET, data_bytes)]),
            free_bytes: data_bytes,
            rate,
            closed: false,
        });
    }

    /// Places nothing new on `device` from now on.
    pub fn close(&mut self, device: DeviceIndex) {
        self.devices[device.0 as usize].closed = true;
    }

    /// Reverses [`Space::close`].
    pub fn open(&mut self, device: DeviceIndex) {
        self.devices[device.0 as usize].closed = false;
    }

    /// Whether nothing new is placed on `device`.
    pub fn is_closed(&self, device: DeviceIndex) -> bool {
        self.devices[device.0 as usize].closed
    }

    /// Sets a newly measured rate.
    pub fn set_rate(&mut self, device: DeviceIndex, rate: u64) {
        self.devices[device.0 as usize].rate = rate;
    }

    /// Returns offset and length of the largest free piece of `device`; `None` if it is full.
    pub fn largest_free(&self, device: DeviceIndex) -> Option<(u64, u64)> {
        let free = self.devices[device.0 as usize].free.iter();
        let largest = free.max_by_key(|&(_, &bytes)| bytes);
        largest.map(|(&offset, &bytes)| (offset, bytes))
    }

    /// Free bytes of `device`.
    pub fn free_bytes(&self, device: DeviceIndex) -> u64 {
        self.devices[device.0 as usize].free_bytes
    }

    /// Takes a range. Returns `false` when it is not entirely free or there is no such device.
    #[must_use]
    pub fn allocate(&mut self, extent: Extent, bytes: u64) -> bool {
        let Some(device) = self.devices.get_mut(extent.device.0 as usize) else {
            return false;
        };
        let Some((&start, &length)) = device.free.range(..=extent.offset).next_back() else {
            return false;
        };
        let Some(end) = extent.offset.checked_add(bytes) else {
            return false;
        };
        if bytes == 0 || end > start + length {
            return false;
        }
        device.free.remove(&start);
        if extent.offset > start {
            device.free.insert(start, extent.offset - start);
        }
        if start + length > end {
            device.free.insert(end, start + length - end);
        }
        device.free_bytes -= bytes;
        true
    }

    /// Frees a taken range.
    pub fn give(&mut self, extent: Extent, bytes: u64) {
        let device = &mut self.devices[extent.device.0 as usize];
        let (mut start, mut end) = (extent.offset, extent.offset + bytes);
        if let Some((&before, &length)) = device.free.range(..start).next_back() {
            assert!(before + length <= start, "a free range was given back");
            if before + length == start {
                start = before;
            }
        }
        if let Some((&after, &length)) = device.free.range(extent.offset..).next() {
            assert!(after >= end, "a free range was given back");
            if after == end {
                end = after + length;
                device.free.remove(&after);
            }
        }
        device.free.insert(start, end - start);
        device.free_bytes += bytes;
    }

    /// Reserves everything a job needs, or nothing.
    pub fn reserve(
        &mut self,
        definition: &JobDefinition,
        local_ranks: u32,
    ) -> Result<Reservation, NoRoom> {
        let before = self.clone();
        self.try_reserve(definition, local_ranks).ok_or_else(|| {
            let mut area = area_at(0, definition, local_ranks).bytes();
            let metadata_device = &before.devices[before.metadata_device.0 as usize];
            let largest = metadata_device.free.values().copied().max().unwrap_or(0);
            let no_area = (largest < area).then_some((area, largest));
            for tile in definition.tiles() {
                area += definition.reserved_bytes(tile);
            }
            *self = before;
            NoRoom {
                needed_bytes: area,
                free_bytes: self.devices.iter().map(DeviceSpace::room_bytes).collect(),
                no_area,
            }
        })
    }

    /// Reserves one extent for each of `tile_bytes`, or nothing.
    pub fn reserve_tiles(&mut self, tile_bytes: &[u32]) -> Result<Vec<Extent>, NoRoom> {
        let before = self.clone();
        let mut deal = self.deal(tile_bytes.iter().map(|&bytes| u64::from(bytes)));
        let mut place = |&bytes: &u32| Some(self.place_tile(u64::from(bytes), 1, &mut deal)?[0]);
        let placed: Option<Vec<Extent>> = tile_bytes.iter().map(&mut place).collect();
        placed.ok_or_else(|| {
            *self = before;
            NoRoom {
                needed_bytes: tile_bytes.iter().map(|&bytes| u64::from(bytes)).sum(),
                free_bytes: self.devices.iter().map(DeviceSpace::room_bytes).collect(),
                no_area: None,
            }
        })
    }

    /// Frees what [`Space::reserve`] took.
    pub fn release(&mut self, definition: &JobDefinition, area: &Area, extents: &[[Extent; 2]]) {
        for (tile, extents) in definition.tiles().iter().zip(extents) {
            for extent in &extents[..definition.extents(tile)] {
                self.give(*extent, u64::from(tile.tile_bytes));
            }
        }
        self.give(self.area_extent(area), area.bytes());
    }

    /// Takes the space of a stored job. Returns `false` when some of it is taken or impossible.
    #[must_use]
    pub fn retake(
        &mut self,
        definition: &JobDefinition,
        area: &Area,
        extents: &[[Extent; 2]],
    ) -> bool {
        self.allocate(self.area_extent(area), area.bytes())
            && definition
                .tiles()
                .iter()
                .zip(extents)
                .all(|(tile, extents)| {
                    let copies = definition.extents(tile);
                    extents[..copies]
                        .iter()
                        .all(|extent| self.allocate(*extent, u64::from(tile.tile_bytes)))
                        && (copies == 2 || extents[0] == extents[1])
                })
    }

    fn try_reserve(&mut self, definition: &JobDefinition, local_ranks: u32) -> Option<Reservation> {
        let mut area = area_at(0, definition, local_ranks);
        // Also while it is drained: areas leave a device last, all together.
        area.offset = self.first_free(self.metadata_device.0 as usize, area.bytes())?;
        let mut bytes = area.bytes();
        let tiles = definition.tiles().iter();
        let mut deal = self.deal(tiles.map(|tile| definition.reserved_bytes(tile)));
        let mut extents = Vec::with_capacity(definition.tiles().len());
        for tile in definition.tiles() {
            let tile_bytes = u64::from(tile.tile_bytes);
            extents.push(self.place_tile(tile_bytes, definition.extents(tile), &mut deal)?);
            bytes += definition.reserved_bytes(tile);
        }
        Some(Reservation {
            area,
            extents,
            bytes,
        })
    }

    /// Takes an extent on `device`; if `anywhere`, on the device with the most space instead when `device` has no room.
    pub fn take_on(&mut self, device: DeviceIndex, bytes: u64, anywhere: bool) -> Option<Extent> {
        let on = |space: &mut Self, device: usize| {
            let offset = space.first_fit(device, bytes)?;
            Some(Extent {
                device: DeviceIndex(device as u32),
                offset,
            })
        };
        if let Some(extent) = on(self, device.0 as usize) {
            return Some(extent);
        }
        let mut others: Vec<usize> = (0..self.devices.len()).filter(|_| anywhere).collect();
        others.sort_by_key(|&device| std::cmp::Reverse(self.devices[device].room_bytes()));
        others.into_iter().find_map(|device| on(self, device))
    }

    /// Returns the places that [`Space::take_on`] would give to ranges of `sizes` on `device`, one after the other; `None` if
    /// they do not all fit. Takes nothing and copies nothing, because it is called often.
    pub fn would_lie(&self, device: DeviceIndex, sizes: &[u64]) -> Option<Vec<u64>> {
        let device = &self.devices[device.0 as usize];
        // Bytes taken from the start of a free range.
        let mut gone: BTreeMap<u64, u64> = BTreeMap::new();
        let place = |&bytes: &u64| {
            let left = |(start, length): (&u64, &u64)| {
                let gone_bytes = gone.get(start).copied().unwrap_or(0);
                (length - gone_bytes >= bytes).then_some((*start, gone_bytes))
            };
            let (start, gone_bytes) = device.free.iter().find_map(left)?;
            gone.insert(start, gone_bytes + bytes);
            Some(start + gone_bytes)
        };
        match device.closed {
            true => None,
            false => sizes.iter().map(place).collect(),
        }
    }

    /// Takes the extents of one tile on the device that is emptiest relative to its share.
    fn place_tile(
        &mut self,
        tile_bytes: u64,
        copies: usize,
        deal: &mut Deal,
    ) -> Option<[Extent; 2]> {
        let mut by_load: Vec<usize> = (0..self.devices.len()).collect();
        if !is_disabled(Safeguard::Placement) {
            by_load.sort_by_key(|&device| (deal.load(device, copies as u64 * tile_bytes), device));
        }
        let (device, places) = by_load.into_iter().find_map(|device| {
            let first = self.first_fit(device, tile_bytes)?;
            let at = |offset| Extent {
                device: DeviceIndex(device as u32),
                offset,
            };
            if copies == 1 {
                return Some((device, [at(first); 2]));
            }
            let Some(second) = self.first_fit(device, tile_bytes) else {
                self.give(at(first), tile_bytes);
                return None;
            };
            Some((device, [at(first), at(second)]))
        })?;
        deal.dealt[device] += copies as u64 * tile_bytes;
        Some(places)
    }

    fn area_extent(&self, area: &Area) -> Extent {
        Extent {
            device: self.metadata_device,
            offset: area.offset,
        }
    }

    fn first_fit(&mut self, device: usize, bytes: u64) -> Option<u64> {
        match self.devices[device].closed {
            true => None,
            false => self.first_free(device, bytes),
        }
    }

    fn first_free(&mut self, device: usize, bytes: u64) -> Option<u64> {
        let mut free = self.devices[device].free.iter();
        let (&offset, _) = free.find(|(_, length)| **length >= bytes)?;
        let extent = Extent {
            device: DeviceIndex(device as u32),
            offset,
        };
        assert!(self.allocate(extent, bytes));
        Some(offset)
    }
}

fn area_at(offset: u64, definition: &JobDefinition, local_ranks: u32) -> Area {
    let largest = definition.tiles().iter().map(|tile| tile.tile_bytes).max();
    Area {
        offset,
        definition_bytes: stored_bytes(definition),
        record_bytes_max: record_bytes_max(definition.tiles().len(), local_ranks),
        gap_bytes: largest.map_or(0, u64::from),
    }
}
