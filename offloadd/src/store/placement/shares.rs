//! Computes the bytes that each device should have, from its rate and free space, and the tiles that must move for that.

use offload_api::ids::DeviceIndex;

use super::Space;

/// Rate of a device for bytes that are read once and written once, as in a step; 0 when one of the rates is unknown. A sum
/// would be wrong: a drive that reads fast and writes slowly would get tiles for its reads and delay everybody with its writes.
pub fn rate(read_bytes_per_s: u64, write_bytes_per_s: u64) -> u64 {
    let (read, write) = (u128::from(read_bytes_per_s), u128::from(write_bytes_per_s));
    (read * write).checked_div(read + write).unwrap_or(0) as u64
}

/// Bytes that each device should have, and has.
#[derive(Debug)]
pub(super) struct Deal {
    shares: Vec<u64>,
    pub(super) dealt: Vec<u64>,
}

impl Deal {
    /// Returns how full `device` is with `bytes` more, comparable between devices.
    pub(super) fn load(&self, device: usize, bytes: u64) -> u128 {
        let share = u128::from(self.shares[device].max(1));
        (u128::from(self.dealt[device] + bytes) << 32) / share
    }
}

impl Space {
    /// Returns each device's share of `tiles`, bytes with all their extents: in proportion to its rate, as far as it has room.
    pub(super) fn deal(&self, tiles: impl Iterator<Item = u64>) -> Deal {
        self.deal_bytes(tiles.map(u128::from).sum())
    }

    fn deal_bytes(&self, mut left_bytes: u128) -> Deal {
        let count = self.devices.len();
        let any_unknown = self.devices.iter().any(|d| d.rate == 0);
        let rates: Vec<_> = (self.devices.iter())
            .map(|d| if any_unknown { 1 } else { u128::from(d.rate) })
            .collect();
        let mut shares = vec![0; count];
        let mut open: Vec<usize> = (0..count).collect();
        loop {
            let all_rates: u128 = open.iter().map(|&device| rates[device]).sum();
            let room = |device: usize| self.devices[device].room_bytes();
            let share = |device: usize| (left_bytes * rates[device] / all_rates.max(1)) as u64;
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

    /// Returns the devices that have at least `least_bytes` less than their share, where `current` bytes lie on each.
    pub fn lacking(&self, current: &[u64], least_bytes: u64) -> Vec<DeviceIndex> {
        let wanted = self.deal_among(current).shares;
        let lacks = (current.iter().zip(wanted).enumerate())
            .filter(|(_, (current, wanted))| wanted.saturating_sub(**current) >= least_bytes);
        lacks.map(|(index, _)| DeviceIndex(index as u32)).collect()
    }

    /// Returns the targets of existing tiles that must move: all tiles on a closed device, and as many tiles of the others as
    /// give each device of `filling` its share, evenly over the whole table. Takes no space.
    pub fn targets(
        &self,
        tiles: &[(u64, [DeviceIndex; 2])],
        filling: &[DeviceIndex],
    ) -> Vec<(u32, DeviceIndex)> {
        let count = self.devices.len();
        let mut current = vec![0_u64; count];
        for (bytes, devices) in tiles {
            // Half for each place: a tile of one extent has the same place twice.
            for device in devices {
                current[device.0 as usize] += bytes / 2;
            }
        }
        let deal = self.deal_among(&current);
        let wanted = &deal.shares;
        let is_filling = |device: usize| filling.iter().any(|f| f.0 as usize == device);
        // Part of a device's tiles that must move, in units of 2^-32.
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
        // Each device rounds at another point, or many that must give less than a tile would give none.
        let givers = parts.iter().filter(|&&parts| parts > 0).count() as u64;
        let mut owed = vec![0_u64; count];
        for (nth, device) in (0..count).filter(|&d| parts[d] > 0).enumerate() {
            owed[device] = (2 * nth as u64 + 1) * (1 << 31) / givers;
        }
        let mut targets = Vec::new();
        for (index, &(bytes, devices)) in tiles.iter().enumerate() {
            let [first, second] = devices.map(|device| device.0 as usize);
            let half = |device: usize| is_filling(device) || self.devices[device].closed;
            if first != second && (half(first) || half(second)) {
                // Half of the tile has moved; the other half follows.
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
            // Tiles of a closed device must go somewhere, even when all shares are full.
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

    /// Shares of tiles that already lie in this order; they take room only where there are too few.
    fn deal_among(&self, current: &[u64]) -> Deal {
        let mut all = self.clone();
        for (device, bytes) in all.devices.iter_mut().zip(current) {
            device.free_bytes += bytes;
        }
        let bytes: u64 = current.iter().sum();
        all.deal_bytes(u128::from(bytes))
    }
}
