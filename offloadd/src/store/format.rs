//! Formats devices as a new store: superblocks and an empty catalog.

use super::catalog::{Catalog, DeviceEntry, Phase};
use super::superblock::{self, DeviceId, MeasuredRates, StoreId, Superblock};
use super::{BLOCK, CATALOG_OFFSETS, DATA_OFFSET, DEVICES_MAX, SUPERBLOCK_OFFSETS, StoreError};
use super::{sealed, sealed::Unreadable};
use crate::blocks::Blocks;
use crate::io::AlignedBytes;

/// Smallest data area of a device.
const DATA_BYTES_MIN: u64 = 1 << 20;

/// Unused bytes of a device, on which its speed can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeasuredArea {
    /// First byte on the device.
    pub offset: u64,
    /// Length; at most [`Self::BYTES_MAX`] are used.
    pub bytes: u64,
}

impl MeasuredArea {
    /// A third of a second of the fastest drives, with little wear.
    pub const BYTES_MAX: u64 = 2 << 30;
    /// One operation; with less nothing can be measured.
    pub const BYTES_MIN: u64 = 1 << 20;
}

/// Refuses what [`format()`] would refuse, and changes nothing. To be called before a measurement overwrites the devices.
pub fn check(blocks: &mut impl Blocks, force: bool) -> Result<(), StoreError> {
    let count = blocks.count();
    if count == 0 || count > DEVICES_MAX as usize {
        return Err(StoreError::Invalid(format!(
            "{count} devices are not between 1 and {DEVICES_MAX}"
        )));
    }
    for position in 0..count {
        let path = blocks.path(position).to_owned();
        let bytes = blocks.size_bytes(position);
        check_size(&path, bytes)?;
        for offset in SUPERBLOCK_OFFSETS {
            match sealed::read(blocks, position, offset, BLOCK, superblock::MAGIC) {
                Err(Unreadable::Device(error)) => return Err(error.into()),
                Ok(block) if Superblock::decode(&block).is_ok_and(|found| found.drained) => {}
                // A damaged superblock also shows that the device was in use.
                Ok(_)
                | Err(
                    Unreadable::OtherVersion(_) | Unreadable::Torn { .. } | Unreadable::Damaged(_),
                ) if !force => {
                    return Err(StoreError::HoldsStore { path });
                }
                _ => {}
            }
        }
    }
    Ok(())
}

/// Formats all devices of `blocks` as store `id`, in their order. Without `force`, a device that holds a store is refused and
/// nothing is changed. `rates` has one entry a device.
pub fn format(
    blocks: &mut impl Blocks,
    id: StoreId,
    rates: &[MeasuredRates],
    created_unix_s: u64,
    force: bool,
) -> Result<Vec<Superblock>, StoreError> {
    check(blocks, force)?;
    let count = blocks.count();
    assert_eq!(rates.len(), count, "one measurement a device");
    // The old superblocks go first, so that an interrupted format does not look like the old store with an empty catalog.
    let zeros = AlignedBytes::zeroed(BLOCK as usize);
    for position in 0..count {
        for offset in SUPERBLOCK_OFFSETS {
            blocks.write(position, offset, &zeros)?;
        }
        blocks.flush(position)?;
    }
    let devices = (0..count).map(|position| DeviceEntry {
        number: position as u32,
        id: DeviceId::default(),
        phase: Phase::Settled,
        path: blocks.path(position).to_owned(),
    });
    let catalog = Catalog::empty(id, devices.collect()).encode();
    for offset in CATALOG_OFFSETS {
        blocks.write(0, offset, &catalog)?;
    }
    blocks.flush(0)?;
    let mut superblocks = Vec::with_capacity(count);
    for (position, rate) in rates.iter().enumerate() {
        let superblock = Superblock {
            store: id,
            number: position as u32,
            id: DeviceId::default(),
            drained: false,
            data_bytes: data_bytes(blocks.size_bytes(position)),
            read_bytes_per_s: rate.read_bytes_per_s,
            write_bytes_per_s: rate.write_bytes_per_s,
            created_unix_s,
        };
        for offset in SUPERBLOCK_OFFSETS {
            blocks.write(position, offset, &superblock.encode())?;
        }
        blocks.flush(position)?;
        superblocks.push(superblock);
    }
    Ok(superblocks)
}

/// Refuses a device that is too small.
pub fn check_size(path: &str, bytes: u64) -> Result<(), StoreError> {
    let needed_bytes = DATA_OFFSET + DATA_BYTES_MIN;
    if bytes < needed_bytes {
        return Err(StoreError::TooSmall {
            path: path.to_owned(),
            bytes,
            needed_bytes,
        });
    }
    Ok(())
}

/// Bytes for data on a device of this size, in whole blocks.
pub fn data_bytes(device_bytes: u64) -> u64 {
    device_bytes.saturating_sub(DATA_OFFSET) / BLOCK * BLOCK
}
