//! The catalog and the jobs' areas leave a device that is drained: at a start, before anybody is served.
//!
//! ```text
//!   areas copied to the new home ─▶ flush ─▶ catalog there, copy A ─▶ flush ─▶ copy B ─▶ flush ─▶ old catalogs zeroed
//! ```
//!
//! One write decides: until the new catalog is on its device the old one, which has a lower sequence, counts. The bytes of an
//! area do not say where they lie, so they are copied as they are. The new catalog is read before the old one goes.

use offload_api::ids::DeviceIndex;

use super::catalog::{Area, Phase};
use super::manifest::SlotContent;
use super::placement::Space;
use super::recover::{RecoveredStore, read_watched};
use super::{BLOCK, CATALOG_OFFSETS, StoreError};
use crate::blocks::{BlockError, Blocks};
use crate::io::AlignedBytes;

/// Copied at once.
const PIECE_BYTES: u64 = 1 << 20;

/// What became of the store's home at a start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetadataMove {
    /// It stays: it is not drained, or tiles are still on it.
    NotDue,
    /// To another device.
    Moved {
        /// What messages call the old one.
        from: String,
        /// And the new one.
        to: String,
    },
    /// It was to, and could not: everything is as before, and the next start tries again.
    Failed(String),
}

/// Where areas of so many bytes, each in one piece, would lie on the other device that has most room; nothing: on none. In
/// whatever order they are given, they find room or none.
pub fn place_areas(
    space: &Space,
    devices: usize,
    area_bytes: &[u64],
) -> Option<(DeviceIndex, Vec<u64>)> {
    let mut others: Vec<DeviceIndex> = (0..devices)
        .map(|device| DeviceIndex(device as u32))
        .filter(|device| !space.is_closed(*device))
        .collect();
    others.sort_by_key(|device| std::cmp::Reverse(space.free_bytes(*device)));
    let mut largest_first: Vec<usize> = (0..area_bytes.len()).collect();
    largest_first.sort_by_key(|area| std::cmp::Reverse(area_bytes[*area]));
    let sizes: Vec<u64> = largest_first.iter().map(|&area| area_bytes[area]).collect();
    others.into_iter().find_map(|device| {
        let mut offsets = vec![0; area_bytes.len()];
        for (&area, offset) in largest_first.iter().zip(space.would_lie(device, &sizes)?) {
            offsets[area] = offset;
        }
        Some((device, offsets))
    })
}

/// Moves the home of a store that was just opened, if it is drained and no tile is on it any more. Only under the store's
/// lock, and only while nobody has memory of the store's that recovery does not know, such as sessions to be taken up.
///
/// # Errors
/// Part of the new catalog may be there and cannot be taken back: the store must be opened again.
pub fn settle(
    blocks: &mut impl Blocks,
    store: &mut RecoveredStore,
) -> Result<MetadataMove, StoreError> {
    settle_watched(blocks, store, &mut |_, _| {})
}

/// The same; `watch` is told how many bytes of how many are done: each is copied, and then read again.
///
/// # Errors
/// As [`settle`].
pub fn settle_watched(
    blocks: &mut impl Blocks,
    store: &mut RecoveredStore,
    watch: &mut dyn FnMut(u64, u64),
) -> Result<MetadataMove, StoreError> {
    let home = store.home;
    if store[home].phase != Some(Phase::Draining) {
        return Ok(MetadataMove::NotDue);
    }
    let on_home = store.jobs.iter().any(|job| {
        let copies = job.table.definition.durability().extents_a_tile();
        let mut extents = job.table.extents.iter().flat_map(|e| &e[..copies]);
        extents.any(|extent| extent.device == home)
    });
    if on_home {
        return Ok(MetadataMove::NotDue);
    }
    let withheld = store.jobs.iter().find(|job| {
        let unreadable = |slot: &SlotContent| matches!(slot, SlotContent::Unreadable(_));
        job.slots.iter().any(unreadable)
    });
    if let Some(job) = withheld {
        let name = &job.entry.name;
        return Ok(MetadataMove::Failed(format!(
            "a record of job {name} of uid {} cannot be read: `offloadd give-up {name}` forgets it",
            job.entry.uid
        )));
    }
    let areas: Vec<Area> = store.catalog.entries.iter().map(|e| e.area).collect();
    let sizes: Vec<u64> = areas.iter().map(Area::bytes).collect();
    // The gaps hold nothing.
    let area_bytes: u64 = (areas.iter())
        .map(|area| area.bytes() - area.gap_bytes)
        .sum();
    let Some((target, offsets)) = place_areas(&store.space, store.devices.len(), &sizes) else {
        return Ok(MetadataMove::Failed(format!(
            "the records of {} jobs, {area_bytes} bytes, find no room on one other device",
            areas.len()
        )));
    };
    let [from, to] = [home, target].map(|device| store[device].position);
    let mut catalog = store.catalog.of_next_life();
    for (entry, offset) in catalog.entries.iter_mut().zip(offsets) {
        entry.area.offset = offset;
    }
    let mut copied_bytes = 0;
    let mut tell = |bytes| {
        // What is taken from its twin is copied again.
        copied_bytes = area_bytes.min(copied_bytes + bytes);
        watch(copied_bytes, 2 * area_bytes);
    };
    let copied = areas
        .iter()
        .zip(&catalog.entries)
        .try_for_each(|(old, entry)| copy_area(blocks, [from, to], *old, entry.area, &mut tell));
    // Flushed with it.
    let prepared = copied.and_then(|()| forget_catalogs(blocks, to));
    if let Err(error) = prepared {
        return Ok(MetadataMove::Failed(error.to_string()));
    }
    // What is there is read before the old one goes: a drive may say that it wrote and not have done so.
    let written = match catalog.write(blocks, to) {
        Ok(()) => {
            let mut tell = |jobs_read, jobs| {
                watch(area_bytes + area_bytes * jobs_read / jobs, 2 * area_bytes);
            };
            read_watched(blocks, &mut tell).and_then(|found| {
                match found[found.home].position == to {
                    true => Ok(found),
                    false => Err(StoreError::Contradiction(format!(
                        "{} does not give the catalog that was written to it",
                        blocks.path(to)
                    ))),
                }
            })
        }
        Err(error) => Err(error.into()),
    };
    let found = match written {
        Ok(found) => found,
        Err(why) => {
            forget_catalogs(blocks, to)?;
            return Ok(MetadataMove::Failed(why.to_string()));
        }
    };
    // If it does not let go of the old one, that one is older all the same; the next start tries again.
    let _ = forget_catalogs(blocks, from);
    let moved = MetadataMove::Moved {
        from: store[home].path.clone(),
        to: store[target].path.clone(),
    };
    let notes = std::mem::take(&mut store.notes);
    *store = found;
    store.notes.splice(..0, notes);
    Ok(moved)
}

/// Zeroes the catalogs of a device, one copy after the other, so that a cut leaves a whole one or one beside zeros.
pub(super) fn forget_catalogs(blocks: &mut impl Blocks, position: usize) -> Result<(), BlockError> {
    let zeros = AlignedBytes::zeroed(BLOCK as usize);
    for offset in CATALOG_OFFSETS {
        blocks.write(position, offset, &zeros)?;
        blocks.flush(position)?;
    }
    Ok(())
}

/// Copies definitions, records and marks, every copy of each; `tell` hears of each piece. A mark has no stand-in: what one says
/// counts by how it was read.
fn copy_area(
    blocks: &mut impl Blocks,
    [from, to]: [usize; 2],
    old: Area,
    new: Area,
    tell: &mut dyn FnMut(u64),
) -> Result<(), BlockError> {
    let pairs = [
        (
            old.definitions(),
            new.definitions(),
            old.definition_bytes,
            true,
        ),
        (old.records(0), new.records(0), old.record_bytes_max, true),
        (old.records(1), new.records(1), old.record_bytes_max, true),
        (old.marks(0), new.marks(0), BLOCK, false),
        (old.marks(1), new.marks(1), BLOCK, false),
    ];
    for (old, new, bytes, fake) in pairs {
        for which in 0..2 {
            let (here, twin) = (old[which], old[1 - which]);
            let copied = copy(blocks, [from, to], here, new[which], bytes, tell);
            copied.or_else(|error| match fake {
                true => copy(blocks, [from, to], twin, new[which], bytes, tell),
                false => Err(error),
            })?;
        }
    }
    Ok(())
}

fn copy(
    blocks: &mut impl Blocks,
    [from, to]: [usize; 2],
    old: u64,
    new: u64,
    bytes: u64,
    tell: &mut dyn FnMut(u64),
) -> Result<(), BlockError> {
    let mut done = 0;
    while done < bytes {
        let piece = (bytes - done).min(PIECE_BYTES);
        let mut read = AlignedBytes::zeroed(piece as usize);
        blocks.read(from, old + done, &mut read)?;
        blocks.write(to, new + done, &read)?;
        done += piece;
        tell(piece);
    }
    Ok(())
}
