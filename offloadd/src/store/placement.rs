//! Which bytes of which device are free, and where a job's tiles go.
//!
//! Tiles are dealt to devices so that each has bytes in proportion to its rate and neighbours in the table lie on
//! different devices: with several tiles in flight the rates add up. A device without room for its share gets what it has
//! room for, spread over the whole table: were it full halfway, the second half would have the other devices alone.

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
    /// Where jobs' areas lie.
    home: DeviceIndex,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct DeviceSpace {
    /// Offset to bytes; neighbours are merged.
    free: BTreeMap<u64, u64>,
    free_bytes: u64,
    /// See [`rate`]; 0 = unknown.
    rate: u64,
    /// Nothing new goes there.
    closed: bool,
}

/// Everything a job needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// At home.
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
    /// The job's records need so much in one piece at home, where the largest is so much: tiles of others lie between.
    pub in_pieces: Option<(u64, u64)>,
}

/// What a device does in a second of bytes that are read once and written once, as a step does with its tiles; 0 where
/// one of the rates is unknown. Not the sum: a drive that reads well and writes badly would get tiles for its reads and
/// make everybody wait for its writes.
pub fn rate(read_bytes_per_s: u64, write_bytes_per_s: u64) -> u64 {
    let (read, write) = (u128::from(read_bytes_per_s), u128::from(write_bytes_per_s));
    (read * write).checked_div(read + write).unwrap_or(0) as u64
}

impl DeviceSpace {
    fn room_bytes(&self) -> u64 {
        if self.closed { 0 } else { self.free_bytes }
    }
}

/// How many bytes each device is to get, and has.
#[derive(Debug)]
struct Deal {
    shares: Vec<u64>,
    dealt: Vec<u64>,
}

impl Deal {
    /// How full `device` is with `bytes` more: comparable between devices.
    fn load(&self, device: usize, bytes: u64) -> u128 {
        let share = u128::from(self.shares[device].max(1));
        (u128::from(self.dealt[device] + bytes) << 32) / share
    }
}

impl Space {
    /// Of no device yet.
    pub fn new(home: DeviceIndex) -> Self {
        Self {
            devices: Vec::new(),
            home,
        }
    }

    /// One more device, all of its data free.
    pub fn add(&mut self, data_bytes: u64, rate: u64) {
        self.devices.push(DeviceSpace {
            free: BTreeMap::from([(DATA_OFFSET, data_bytes)]),
            free_bytes: data_bytes,
            rate,
            closed: false,
        });
    }

    /// Nothing new goes to `device` from now on.
    pub fn close(&mut self, device: DeviceIndex) {
        self.devices[device.0 as usize].closed = true;
    }

    /// What comes may go to `device` again.
    pub fn open(&mut self, device: DeviceIndex) {
        self.devices[device.0 as usize].closed = false;
    }

    /// Whether nothing new goes to `device`.
    pub fn is_closed(&self, device: DeviceIndex) -> bool {
        self.devices[device.0 as usize].closed
    }

    /// It was measured again.
    pub fn set_rate(&mut self, device: DeviceIndex, rate: u64) {
        self.devices[device.0 as usize].rate = rate;
    }

    /// The largest piece of `device` that is free: from where on, and how much. `None`: it is full.
    pub fn largest_free(&self, device: DeviceIndex) -> Option<(u64, u64)> {
        let free = self.devices[device.0 as usize].free.iter();
        let largest = free.max_by_key(|&(_, &bytes)| bytes);
        largest.map(|(&offset, &bytes)| (offset, bytes))
    }

    /// Which devices have less than their share, by `least_bytes` or more, where so much of all tiles lies on each.
    pub fn lacking(&self, current: &[u64], least_bytes: u64) -> Vec<DeviceIndex> {
        let wanted = self.deal_among(current, 1).shares;
        let lacks = (current.iter().zip(wanted).enumerate())
            .filter(|(_, (current, wanted))| wanted.saturating_sub(**current) >= least_bytes);
        lacks.map(|(index, _)| DeviceIndex(index as u32)).collect()
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
            let home = &before.devices[before.home.0 as usize];
            let largest = home.free.values().copied().max().unwrap_or(0);
            let in_pieces = (largest < area && area <= home.free_bytes).then_some((area, largest));
            let copies = definition.durability().extents_a_tile() as u64;
            for tile in definition.tiles() {
                area += copies * u64::from(tile.tile_bytes);
            }
            *self = before;
            NoRoom {
                needed_bytes: area,
                free_bytes: self.devices.iter().map(DeviceSpace::room_bytes).collect(),
                in_pieces,
            }
        })
    }

    /// Takes one extent for each of `tile_bytes`, or nothing.
    pub fn reserve_tiles(&mut self, tile_bytes: &[u32]) -> Result<Vec<Extent>, NoRoom> {
        let before = self.clone();
        let mut deal = self.deal(tile_bytes.iter().copied(), 1);
        let mut place = |&bytes: &u32| Some(self.place(u64::from(bytes), 1, &mut deal)?[0]);
        let placed: Option<Vec<Extent>> = tile_bytes.iter().map(&mut place).collect();
        placed.ok_or_else(|| {
            *self = before;
            NoRoom {
                needed_bytes: tile_bytes.iter().map(|&bytes| u64::from(bytes)).sum(),
                free_bytes: self.devices.iter().map(DeviceSpace::room_bytes).collect(),
                in_pieces: None,
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
        self.give(self.area_extent(area), area.bytes());
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
        self.take(self.area_extent(area), area.bytes())
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
        // Also while it is drained: areas leave it last, all together.
        area.offset = self.first_free(self.home.0 as usize, area.bytes())?;
        let copies = definition.durability().extents_a_tile();
        let mut bytes = area.bytes();
        let tiles = definition.tiles().iter().map(|tile| tile.tile_bytes);
        let mut deal = self.deal(tiles, copies);
        let mut extents = Vec::with_capacity(definition.tiles().len());
        for tile in definition.tiles() {
            let tile_bytes = u64::from(tile.tile_bytes);
            extents.push(self.place(tile_bytes, copies, &mut deal)?);
            bytes += copies as u64 * tile_bytes;
        }
        Some(Reservation {
            area,
            extents,
            bytes,
        })
    }

    /// Each device's share of all `tiles`: in proportion to its rate, as far as it has room for `copies` of them.
    fn deal(&self, tiles: impl Iterator<Item = u32>, copies: usize) -> Deal {
        self.deal_bytes(tiles.map(u128::from).sum(), copies)
    }

    fn deal_bytes(&self, mut left_bytes: u128, copies: usize) -> Deal {
        let count = self.devices.len();
        let any_unknown = self.devices.iter().any(|d| d.rate == 0);
        let rates: Vec<_> = (self.devices.iter())
            .map(|d| if any_unknown { 1 } else { u128::from(d.rate) })
            .collect();
        let mut shares = vec![0; count];
        let mut open: Vec<usize> = (0..count).collect();
        loop {
            let together: u128 = open.iter().map(|&device| rates[device]).sum();
            let room = |device: usize| self.devices[device].room_bytes() / copies as u64;
            let share = |device: usize| (left_bytes * rates[device] / together.max(1)) as u64;
            let (full, rest): (Vec<_>, Vec<_>) = open
                .iter()
                .partition(|&&device| share(device) > room(device));
            if full.is_empty() {
                for device in rest {
                    shares[device] = share(device);
                }
                return Deal {
                    shares,
                    dealt: vec![0; count],
                };
            }
            for &device in &full {
                shares[device] = room(device);
            }
            left_bytes -= full
                .iter()
                .map(|&device| u128::from(room(device)))
                .sum::<u128>();
            open = rest;
        }
    }

    /// Where tiles of a job that is there already are to lie, of those that are to move: all that lie on a closed device,
    /// and of the other devices' tiles so many that each device of `filling` has its share; evenly over the whole table.
    /// Takes nothing.
    pub fn targets(
        &self,
        tiles: &[(u32, [DeviceIndex; 2])],
        copies: usize,
        filling: &[DeviceIndex],
    ) -> Vec<(u32, DeviceIndex)> {
        let count = self.devices.len();
        let mut current = vec![0_u64; count];
        for (bytes, devices) in tiles {
            // Of each of both extents half, so that it is one tile in all.
            for device in devices {
                current[device.0 as usize] += u64::from(*bytes) / 2;
            }
        }
        let deal = self.deal_among(&current, copies);
        let wanted = &deal.shares;
        let is_filling = |device: usize| filling.iter().any(|f| f.0 as usize == device);
        // Of a device's tiles, so many parts of 2^32 go.
        let mut parts = vec![0_u64; count];
        for device in 0..count {
            let surplus = current[device].saturating_sub(wanted[device]);
            let gives = !is_filling(device) && !filling.is_empty() && surplus > 0;
            if self.devices[device].closed {
                parts[device] = 1 << 32;
            } else if gives {
                parts[device] = ((u128::from(surplus) << 32) / u128::from(current[device])) as u64;
            }
        }
        // Each rounds at another point, or many that owe less than a tile each would give none together.
        let givers = parts.iter().filter(|&&parts| parts > 0).count() as u64;
        let mut owed = vec![0_u64; count];
        for (nth, device) in (0..count).filter(|&d| parts[d] > 0).enumerate() {
            owed[device] = (2 * nth as u64 + 1) * (1 << 31) / givers;
        }
        let mut targets = Vec::new();
        for (index, &(bytes, devices)) in tiles.iter().enumerate() {
            let bytes = u64::from(bytes);
            let [first, second] = devices.map(|device| device.0 as usize);
            let half = |device: usize| is_filling(device) || self.devices[device].closed;
            if first != second && (half(first) || half(second)) {
                // Half of it has moved: the other half follows.
                let stays = |device: usize| !self.devices[device].closed;
                let target = [first, second].into_iter().filter(|&device| stays(device));
                if let Some(target) = target.max_by_key(|&device| is_filling(device)) {
                    targets.push((index as u32, DeviceIndex(target as u32)));
                    continue;
                }
            }
            owed[first] += parts[first];
            if owed[first] < 1 << 32 {
                continue;
            }
            let leaves = self.devices[first].closed;
            let may_take = |device: &usize| {
                let open = *device != first && !self.devices[*device].closed;
                open && (leaves || is_filling(*device)) && current[*device] < wanted[*device]
            };
            let lack = |device: &usize| {
                let lacking = u128::from(wanted[*device] - current[*device]);
                (lacking << 32) / u128::from(wanted[*device])
            };
            let taker = (0..count).filter(may_take).max_by_key(lack);
            // What leaves a closed device must go somewhere, even where the shares are full.
            let somewhere = || (0..count).find(|&d| leaves && !self.devices[d].closed);
            let Some(taker) = taker.or_else(somewhere) else {
                continue;
            };
            owed[first] -= 1 << 32;
            current[first] = current[first].saturating_sub(bytes);
            current[taker] += bytes;
            targets.push((index as u32, DeviceIndex(taker as u32)));
        }
        targets
    }

    /// Takes an extent on `device`, or where the most room is if `anywhere` is as good.
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

    /// Where ranges of `sizes` would lie on `device`, each as [`Space::take_on`] would take it after those before it; nothing:
    /// not all of them find room. Takes nothing and copies nothing: whoever only looks does so often.
    pub fn would_lie(&self, device: DeviceIndex, sizes: &[u64]) -> Option<Vec<u64>> {
        let device = &self.devices[device.0 as usize];
        // What is gone of a free range, at its beginning.
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

    /// The shares of tiles that lie so already, and take room only where there are not so many yet.
    fn deal_among(&self, current: &[u64], copies: usize) -> Deal {
        let mut all = self.clone();
        for (device, bytes) in all.devices.iter_mut().zip(current) {
            device.free_bytes += copies as u64 * bytes;
        }
        let bytes: u64 = current.iter().sum();
        all.deal_bytes(u128::from(bytes), copies)
    }

    /// Takes one tile's extents on the device that is the emptiest for its share.
    fn place(&mut self, tile_bytes: u64, copies: usize, deal: &mut Deal) -> Option<[Extent; 2]> {
        let mut by_load: Vec<usize> = (0..self.devices.len()).collect();
        if !removed(Mechanism::Placement) {
            by_load.sort_by_key(|&device| (deal.load(device, tile_bytes), device));
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
        deal.dealt[device] += tile_bytes;
        Some(places)
    }

    fn area_extent(&self, area: &Area) -> Extent {
        Extent {
            device: self.home,
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
        assert!(self.take(extent, bytes));
        Some(offset)
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

    fn space<const N: usize>(devices: [(u64, u64); N]) -> Space {
        let mut space = Space::new(DeviceIndex(0));
        for (data_bytes, rate) in devices {
            space.add(data_bytes, rate);
        }
        space
    }

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

    /// Free in pieces of many sizes: a look says the same as taking, and leaves all as it was.
    #[test]
    fn where_ranges_would_lie_is_where_they_are_taken() {
        let device = DeviceIndex(0);
        let mut refused = 0;
        for seed in 0..200_u64 {
            let number = |nth: u64| (seed + 1).wrapping_mul(nth + 7).wrapping_mul(0x9E37_79B9) >> 8;
            let mut space = space([(64 * 4096, 0), (64 * 4096, 0)]);
            for nth in 0..8 {
                let offset = DATA_OFFSET + number(nth) % 64 * 4096;
                // Where another lies already nothing is taken.
                let _ = space.take(Extent { device, offset }, 4096);
            }
            let count = 1 + number(20) % 9;
            let sizes: Vec<u64> = (0..count)
                .map(|nth| (1 + number(nth) % 12) * 4096)
                .collect();
            let before = space.clone();
            let told = space.would_lie(device, &sizes);
            assert_eq!(space, before);
            let mut take = |bytes: &u64| Some(space.take_on(device, *bytes, false)?.offset);
            let taken: Option<Vec<u64>> = sizes.iter().map(&mut take).collect();
            refused += u32::from(taken.is_none());
            assert_eq!(told, taken, "seed {seed}: {sizes:?}");
        }
        assert!((20..180).contains(&refused), "{refused}");
    }

    #[test]
    fn room_that_is_in_pieces_is_told_from_room_that_is_not_there() {
        let definition = definition(4, 4096);
        let area_bytes = area_at(0, &definition, 1).bytes();
        let blocks_bytes = area_bytes.next_multiple_of(4096);
        let mut parted = space([(2 * blocks_bytes, 0), (1 << 30, 0)]);
        let middle = Extent {
            device: DeviceIndex(0),
            offset: DATA_OFFSET + blocks_bytes - 4096,
        };
        assert!(parted.take(middle, 8192));
        let no_room = parted.reserve(&definition, 1).unwrap_err();
        assert_eq!(no_room.in_pieces, Some((area_bytes, blocks_bytes - 4096)));
        let no_room = space([(4096, 0), (1 << 30, 0)])
            .reserve(&definition, 1)
            .unwrap_err();
        assert_eq!(no_room.in_pieces, None);
    }

    #[test]
    fn tiles_go_to_devices_in_proportion_to_their_rates_and_alternate() {
        let mut space = space([(1 << 30, 300), (1 << 30, 100)]);
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
    fn a_device_with_little_room_has_tiles_all_along_the_table() {
        let mut space = space([(1 << 30, 100), (100 << 20, 100), (1 << 30, 200)]);
        let reservation = space.reserve(&definition(400, 1 << 20), 1).unwrap();
        let devices: Vec<u32> = (reservation.extents.iter())
            .map(|e| e[0].device.0)
            .collect();
        let on = |device: u32| devices.iter().filter(|&&d| d == device).count();
        // 50 tiles fill it; the rest goes to the others as one to two.
        assert_eq!([on(0), on(1), on(2)].iter().sum::<usize>(), 400);
        assert!((49..=50).contains(&on(1)), "{}", on(1));
        assert!((116..=118).contains(&on(0)), "{}", on(0));
        for part in devices.chunks(100) {
            let here = part.iter().filter(|&&d| d == 1).count();
            assert!((11..=14).contains(&here), "{here} of a hundred tiles");
        }
    }

    #[test]
    fn many_devices_with_few_tiles_each_give_a_new_one_its_share() {
        for (old, tiles_each) in [(2, 15), (3, 1), (8, 4), (8, 5), (15, 2)] {
            let mut space = Space::new(DeviceIndex(0));
            for _ in 0..=old {
                space.add(1 << 30, 100);
            }
            let tiles: Vec<_> = (0..old * tiles_each)
                .map(|tile| (1 << 20, [DeviceIndex(tile % old); 2]))
                .collect();
            let new = DeviceIndex(old);
            let come = space.targets(&tiles, 2, &[new]);
            assert!(come.iter().all(|&(_, target)| target == new));
            let share = tiles.len() as f64 / f64::from(old + 1);
            let found = come.len() as f64;
            assert!((found - share).abs() <= 1.0, "{found} tiles of {share}");
            for device in 0..old {
                let gives = |&&(tile, _): &&(u32, DeviceIndex)| tile % old == device;
                let given = come.iter().filter(gives).count() as f64;
                assert!((given - share / f64::from(old)).abs() <= 1.0, "{given}");
            }
        }
    }

    #[test]
    fn a_rate_counts_the_slower_way_more() {
        assert_eq!(rate(6_000, 3_000), 2_000);
        assert_eq!(rate(6_000, 1_000), 857);
        assert_eq!((rate(0, 5), rate(5, 0), rate(0, 0)), (0, 0, 0));
        assert_eq!(rate(u64::MAX, u64::MAX), u64::MAX / 2);
    }

    #[test]
    fn what_is_given_back_can_be_taken_again_and_nothing_overlaps() {
        let mut space = space([(64 << 20, 0), (64 << 20, 0)]);
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
        let mut space = space([(4 << 20, 300), (4 << 20, 100)]);
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
        let mut space = space([(4 << 20, 0), (64 << 20, 0)]);
        let fresh = space.clone();
        let no_room = space.reserve(&definition(100, 1 << 20), 1).unwrap_err();
        assert!(no_room.needed_bytes > 200 << 20);
        assert_eq!(no_room.free_bytes, [4 << 20, 64 << 20]);
        assert_eq!(space, fresh);
    }
}
