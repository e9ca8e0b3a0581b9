//! Moves the catalog and the jobs' areas away from a device that is drained: at a start, before anybody is served.
//!
//! ```text
//!   areas copied to the new device ─▶ flush ─▶ catalog, copy A  ─▶ flush ─▶ copy B ─▶ flush ─▶ old catalogs zeroed
//! ```
//!
//! A single write decides: as soon as the new catalog is written, it counts, because it has the higher sequence. An area does
//! not contain its own offset, so its bytes are copied unchanged. The new catalog is read back before the old one is erased.

use offload_api::ids::DeviceIndex;
use offload_support::units::ApproxBytes;

use super::catalog::{Area, Phase, forget_catalogs};
use super::manifest::SlotContent;
use super::placement::Space;
use super::recover::{RecoveredStore, read_watched};
use super::{BLOCK, StoreError};
use crate::blocks::{BlockError, Blocks};
use crate::io::AlignedBytes;

/// Bytes copied at once.
const PIECE_BYTES: u64 = 1 << 20;

/// Whether the metadata device changed at a start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetadataMove {
    /// The device stays: it is not drained, or still holds tiles.
    NotDue,
    /// The metadata moved to another device.
    Moved {
        /// Path of the old metadata device.
        from: String,
        /// Path of the new one.
        to: String,
    },
    /// The move failed; nothing has changed, and the next start tries again.
    Failed(String),
}

/// Chooses the other device with the most space that has room for areas of these sizes, each in one piece, and returns their
/// places; `None` if no device has. The order of the sizes does not matter.
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

/// Moves the metadata of a store that was just opened, if its device is drained and holds no tiles. Call it only under the
/// store's lock, and only while no session has state that recovery does not know.
///
/// # Errors
/// Part of the new catalog may be written and cannot be undone: the store must be opened again.
pub fn settle(
    blocks: &mut impl Blocks,
    store: &mut RecoveredStore,
) -> Result<MetadataMove, StoreError> {
    settle_watched(blocks, store, &mut |_, _| {})
}

/// Like [`settle`], and calls `watch` with the bytes done and the bytes in all: each byte is copied and then read back.
///
/// # Errors
/// Same as [`settle`].
pub fn settle_watched(
    blocks: &mut impl Blocks,
    store: &mut RecoveredStore,
    watch: &mut dyn FnMut(u64, u64),
) -> Result<MetadataMove, StoreError> {
    let metadata_device = store.metadata_device;
    if store[metadata_device].phase != Some(Phase::Draining) {
        return Ok(MetadataMove::NotDue);
    }
    let on_metadata_device = store.jobs.iter().any(|job| {
        let mut extents = job.table.extents.iter().flatten();
        extents.any(|extent| extent.device == metadata_device)
    });
    if on_metadata_device {
        return Ok(MetadataMove::NotDue);
    }
    let withheld = store.jobs.iter().find(|job| {
        let unreadable = |slot: &SlotContent| matches!(slot, SlotContent::Unreadable(_));
        job.slots.iter().any(unreadable)
    });
    if let Some(job) = withheld {
        let name = &job.entry.name;
        return Ok(MetadataMove::Failed(format!(
            "a record of job {name} of uid {} cannot be read: `offloadd job discard-unreadable {name}` discards it",
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
            "no other device has room for the records of {} jobs ({})",
            areas.len(),
            ApproxBytes(area_bytes)
        )));
    };
    let [from, to] = [metadata_device, target].map(|device| store[device].position);
    let mut catalog = store.catalog.of_next_incarnation();
    for (entry, offset) in catalog.entries.iter_mut().zip(offsets) {
        entry.area.offset = offset;
    }
    let mut copied_bytes = 0;
    let mut on_copied = |bytes| {
        // Areas that are repaired from their other copy are copied twice.
        copied_bytes = area_bytes.min(copied_bytes + bytes);
        watch(copied_bytes, 2 * area_bytes);
    };
    let copied = areas
        .iter()
        .zip(&catalog.entries)
        .try_for_each(|(old, entry)| {
            copy_area(blocks, [from, to], *old, entry.area, &mut on_copied)
        });
    // Flushed together with the copies.
    let prepared = copied.and_then(|()| forget_catalogs(blocks, to));
    if let Err(error) = prepared {
        return Ok(MetadataMove::Failed(error.to_string()));
    }
    // The new catalog is read back before the old one is erased, because a drive may lose a write silently.
    let written = match catalog.write(blocks, to) {
        Ok(()) => {
            let mut on_read = |jobs_read, jobs| {
                watch(area_bytes + area_bytes * jobs_read / jobs, 2 * area_bytes);
            };
            read_watched(blocks, &mut on_read).and_then(|found| {
                match found[found.metadata_device].position == to {
                    true => Ok(found),
                    false => Err(StoreError::Contradiction(format!(
                        "{} does not return the catalog that was written to it",
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
    // If the old device refuses, its catalog is older all the same; the next start tries again.
    let _ = forget_catalogs(blocks, from);
    let moved = MetadataMove::Moved {
        from: store[metadata_device].path.clone(),
        to: store[target].path.clone(),
    };
    let notes = std::mem::take(&mut store.notes);
    *store = found;
    store.notes.splice(..0, notes);
    Ok(moved)
}

/// Copies definitions, records and marks, every copy of each, and calls `on_copied` for each piece. A mark is copied as it was read,
/// because no other copy can replace it.
fn copy_area(
    blocks: &mut impl Blocks,
    [from, to]: [usize; 2],
    old: Area,
    new: Area,
    on_copied: &mut dyn FnMut(u64),
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
    for (old, new, bytes, replaceable) in pairs {
        for which in 0..2 {
            let (here, other) = (old[which], old[1 - which]);
            let copied = copy(blocks, [from, to], here, new[which], bytes, on_copied);
            copied.or_else(|error| match replaceable {
                true => copy(blocks, [from, to], other, new[which], bytes, on_copied),
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
    on_copied: &mut dyn FnMut(u64),
) -> Result<(), BlockError> {
    let mut done = 0;
    while done < bytes {
        let piece = (bytes - done).min(PIECE_BYTES);
        let mut read = AlignedBytes::zeroed(piece as usize);
        blocks.read(from, old + done, &mut read)?;
        blocks.write(to, new + done, &read)?;
        done += piece;
        on_copied(piece);
    }
    Ok(())
}
