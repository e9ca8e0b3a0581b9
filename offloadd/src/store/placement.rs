//! Which bytes of which device are free, and where a job's tiles go.
//!
//! Tiles are dealt to devices so that each has bytes in proportion to its rate and neighbours in the table lie on
//! different devices: with several tiles in flight the rates add up. A full device drops out; the rest go on.

use std::collections::BTreeMap;

use offload_api::ids::DeviceIndex;
use offload_api::removable::{Mechanism, removed};

use super::DATA_OFFSET;
use super::catalog::Area;
use super::definition::JobDefinition;
use super::manifest::record_bytes_max;
use super::tile_table::{Extent, stored_bytes};

/// Free space of all devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Space {
    devices: Vec<DeviceSpace>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct DeviceSpace {
    /// Offset to bytes; neighbours are merged.
    free: BTreeMap<u64, u64>,
    free_bytes: u64,
    /// Read and write rate together; 0 = unknown.
    rate: u64,
}

/// Everything a job needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// On device 0.
    pub area: Area,
    /// Of each tile.
    pub extents: Vec<[Extent; 2]>,
    /// Over all devices.
    pub bytes: u64,
}

/// A job does not fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoRoom {
    /// It needs this.
    pub needed_bytes: u64,
    /// Each device has this.
    pub free_bytes: Vec<u64>,
}

impl Space {
    /// All of the data of each device: `(data_bytes, rate)`.
    pub fn new(devices: impl IntoIterator<Item = (u64, u64)>) -> Self {
        let devices = devices
            .into_iter()
            .map(|(data_bytes, rate)| DeviceSpace {
                free: BTreeMap::from([(DATA_OFFSET, data_bytes)]),
                free_bytes: data_bytes,
                rate,
            })
            .collect();
        Self { devices }
    }

    /// Free bytes of `device`.
    pub fn free_bytes(&self, device: DeviceIndex) -> u64 {
        self.devices[device.0 as usize].free_bytes
    }

    /// Takes a range that must be free: `false` when it is not (all of it) or there is no such device.
    #[must_use]
    pub fn take(&mut self, extent: Extent, bytes: u64) -> bool {
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

    /// Gives a taken range back.
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

    /// Takes everything a job needs, or nothing.
    pub fn reserve(
        &mut self,
        definition: &JobDefinition,
        local_ranks: u32,
    ) -> Result<Reservation, NoRoom> {
        let before = self.clone();
        self.try_reserve(definition, local_ranks).ok_or_else(|| {
            let mut area = area_at(0, definition, local_ranks).bytes();
            let copies = definition.durability().extents_a_tile() as u64;
            for tile in definition.tiles() {
                area += copies * u64::from(tile.tile_bytes);
            }
            *self = before;
            NoRoom {
                needed_bytes: area,
                free_bytes: self.devices.iter().map(|d| d.free_bytes).collect(),
            }
        })
    }

    /// Takes one extent for each of `tile_bytes`, or nothing.
    pub fn reserve_tiles(&mut self, tile_bytes: &[u32]) -> Result<Vec<Extent>, NoRoom> {
        let before = self.clone();
        let mut dealt = vec![0_u64; self.devices.len()];
        let mut place = |&bytes: &u32| Some(self.place(u64::from(bytes), 1, &mut dealt)?[0]);
        let placed: Option<Vec<Extent>> = tile_bytes.iter().map(&mut place).collect();
        placed.ok_or_else(|| {
            *self = before;
            NoRoom {
                needed_bytes: tile_bytes.iter().map(|&bytes| u64::from(bytes)).sum(),
                free_bytes: self.devices.iter().map(|d| d.free_bytes).collect(),
            }
        })
    }

    /// Gives back what [`Space::reserve`] took.
    pub fn release(&mut self, definition: &JobDefinition, area: &Area, extents: &[[Extent; 2]]) {
        for (tile, extents) in definition.tiles().iter().zip(extents) {
            for extent in &extents[..definition.durability().extents_a_tile()] {
                self.give(*extent, u64::from(tile.tile_bytes));
            }
        }
        self.give(area_extent(area), area.bytes());
    }

    /// Takes what a stored job holds: `false` when something of it is taken or impossible.
    #[must_use]
    pub fn retake(
        &mut self,
        definition: &JobDefinition,
        area: &Area,
        extents: &[[Extent; 2]],
    ) -> bool {
        let copies = definition.durability().extents_a_tile();
        self.take(area_extent(area), area.bytes())
            && definition
                .tiles()
                .iter()
                .zip(extents)
                .all(|(tile, extents)| {
                    extents[..copies]
                        .iter()
                        .all(|extent| self.take(*extent, u64::from(tile.tile_bytes)))
                        && (copies == 2 || extents[0] == extents[1])
                })
    }

    fn try_reserve(&mut self, definition: &JobDefinition, local_ranks: u32) -> Option<Reservation> {
        let mut area = area_at(0, definition, local_ranks);
        area.offset = self.first_fit(0, area.bytes())?;
        let copies = definition.durability().extents_a_tile();
        let mut bytes = area.bytes();
        let mut dealt = vec![0_u64; self.devices.len()];
        let mut extents = Vec::with_capacity(definition.tiles().len());
        for tile in definition.tiles() {
            let tile_bytes = u64::from(tile.tile_bytes);
            extents.push(self.place(tile_bytes, copies, &mut dealt)?);
            bytes += copies as u64 * tile_bytes;
        }
        Some(Reservation {
            area,
            extents,
            bytes,
        })
    }

    /// Takes one tile's extents on the device that is the emptiest for its rate after what was `dealt`.
    fn place(&mut self, tile_bytes: u64, copies: usize, dealt: &mut [u64]) -> Option<[Extent; 2]> {
        let mut by_load: Vec<usize> = (0..self.devices.len()).collect();
        if !removed(Mechanism::Placement) {
            by_load.sort_by_key(|&device| (self.load(dealt[device] + tile_bytes, device), device));
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
        dealt[device] += tile_bytes;
        Some(places)
    }

    /// How full `device` is with `bytes`, in units of its rate: comparable between devices.
    fn load(&self, bytes: u64, device: usize) -> u128 {
        let any_unknown = self.devices.iter().any(|d| d.rate == 0);
        let rate = if any_unknown {
            1
        } else {
            self.devices[device].rate
        };
        (u128::from(bytes) << 32) / u128::from(rate)
    }

    fn first_fit(&mut self, device: usize, bytes: u64) -> Option<u64> {
        let (&offset, _) = self.devices[device]
            .free
            .iter()
            .find(|(_, length)| **length >= bytes)?;
        let extent = Extent {
            device: DeviceIndex(device as u32),
            offset,
        };
        assert!(self.take(extent, bytes));
        Some(offset)
    }
}

fn area_extent(area: &Area) -> Extent {
    Extent {
        device: DeviceIndex(0),
        offset: area.offset,
    }
}

fn area_at(offset: u64, definition: &JobDefinition, local_ranks: u32) -> Area {
    Area {
        offset,
        definition_bytes: stored_bytes(definition),
        record_bytes_max: record_bytes_max(definition.tiles().len(), local_ranks),
    }
}

#[cfg(test)]
mod tests {
    use super::super::definition::{Durability, TileKind, TileSpec};
    use super::*;

    fn definition(tiles: u32, tile_bytes: u32) -> JobDefinition {
        let tile = |unit| TileSpec {
            unit,
            kind: TileKind::State,
            elem_offset: 0,
            tile_bytes,
        };
        let tiles = (0..tiles).map(tile).collect();
        JobDefinition::new(Vec::new(), tiles, Durability::Committed, 1).unwrap()
    }

    #[test]
    fn tiles_go_to_devices_in_proportion_to_their_rates_and_alternate() {
        let mut space = Space::new([(1 << 30, 300), (1 << 30, 100)]);
        let reservation = space.reserve(&definition(400, 1 << 20), 1).unwrap();
        let on_first = reservation
            .extents
            .iter()
            .filter(|e| e[0].device.0 == 0)
            .count();
        assert_eq!(on_first, 300);
        let longest = reservation
            .extents
            .chunk_by(|a, b| a[0].device == b[0].device)
            .map(<[_]>::len)
            .max();
        assert_eq!(
            longest,
            Some(3),
            "three tiles in a row, then the other device"
        );
    }

    #[test]
    fn what_is_given_back_can_be_taken_again_and_nothing_overlaps() {
        let mut space = Space::new([(64 << 20, 0), (64 << 20, 0)]);
        let fresh = space.clone();
        let definition = definition(10, 1 << 20);
        let one = space.reserve(&definition, 2).unwrap();
        let two = space.reserve(&definition, 2).unwrap();
        let mut ranges: Vec<(u32, u64)> = one
            .extents
            .iter()
            .chain(&two.extents)
            .flatten()
            .map(|e| (e.device.0, e.offset))
            .collect();
        ranges.sort_unstable();
        let apart = ranges
            .windows(2)
            .all(|w| w[0].0 != w[1].0 || w[1].1 - w[0].1 >= 1 << 20);
        assert!(apart);
        space.release(&definition, &one.area, &one.extents);
        space.release(&definition, &two.area, &two.extents);
        assert_eq!(space, fresh);
    }

    #[test]
    fn single_tiles_are_spread_too_and_take_all_or_nothing() {
        let mut space = Space::new([(4 << 20, 300), (4 << 20, 100)]);
        let fresh = space.clone();
        let extents = space.reserve_tiles(&[1 << 20; 4]).unwrap();
        let on_first = extents.iter().filter(|e| e.device.0 == 0).count();
        assert_eq!(on_first, 3);
        for extent in extents {
            space.give(extent, 1 << 20);
        }
        assert_eq!(space, fresh);
        let no_room = space.reserve_tiles(&[1 << 20; 9]).unwrap_err();
        assert_eq!(no_room.needed_bytes, 9 << 20);
        assert_eq!(space, fresh);
    }

    #[test]
    fn a_job_that_does_not_fit_takes_nothing() {
        let mut space = Space::new([(4 << 20, 0), (64 << 20, 0)]);
        let fresh = space.clone();
        let no_room = space.reserve(&definition(100, 1 << 20), 1).unwrap_err();
        assert!(no_room.needed_bytes > 200 << 20);
        assert_eq!(no_room.free_bytes, [4 << 20, 64 << 20]);
        assert_eq!(space, fresh);
    }
}
