//! Reads a store into memory when a daemon starts, and repairs structures with two copies.
//!
//! [`read`] changes nothing. [`open`] also writes the sound copy of a structure over the other one and flushes. Afterwards both
//! copies of everything are equal and durable, which the catalog's update and the next power cut rely on.

mod devices;
mod jobs;
mod unlisted;

use std::collections::BTreeSet;
use std::path::Path;

use offload_api::ids::DeviceIndex;
use offload_support::paths::Word;

use super::catalog::{Catalog, Entry, Phase, forget_catalogs};
use super::dual_copy::{Consequence, Note, Reader, Repair};
use super::manifest::{self, Mark, SlotContent};
use super::placement::{Space, rate};
use super::superblock::{StoreId, Superblock};
use super::tile_table::TileTable;
use super::{CATALOG_OFFSETS, StoreError};
use crate::blocks::{BlockError, Blocks};

pub use self::unlisted::{UnlistedDevice, unlisted};

/// Everything known of a store.
#[derive(Clone, Debug)]
pub struct RecoveredStore {
    /// Id of the store, on all devices.
    pub id: StoreId,
    /// Devices; a [`DeviceIndex`] is an index of this list.
    pub devices: Vec<RecoveredDevice>,
    /// Device that holds the catalog and the jobs' areas.
    pub metadata_device: DeviceIndex,
    /// Devices that the settings list and that belong to no store.
    pub foreign_devices: Vec<ForeignDevice>,
    /// The newest catalog.
    pub catalog: Catalog,
    /// One job for each entry of the catalog, in its order.
    pub jobs: Vec<RecoveredJob>,
    /// Space that no job takes.
    pub space: Space,
    /// Copies that are not sound.
    pub notes: Vec<Note>,
    repairs: Vec<Repair>,
    stale: Stale,
}

/// Positions of devices with superseded catalogs, from before the metadata device changed.
#[derive(Clone, Debug, Default)]
struct Stale {
    whole: Vec<usize>,
    /// Partial catalogs of an interrupted arrival or departure.
    parts: Vec<usize>,
}

/// A device of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecoveredDevice {
    /// Index in the list it was opened from (the settings' order).
    pub position: usize,
    /// Path for messages.
    pub path: String,
    /// Superblock of the device.
    pub superblock: Superblock,
    /// State of the device; `None` if it has left the store in this incarnation or is not yet added.
    pub phase: Option<Phase>,
}

/// A device that belongs to no store although its superblock names the store of the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignDevice {
    /// Path of the device.
    pub path: String,
    /// Whether it left in order; if not, its arrival or departure was interrupted.
    pub drained: bool,
}

impl std::fmt::Display for ForeignDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { path, drained } = self;
        match drained {
            true => write!(f, "{path} was drained and belongs to no store")?,
            false => write!(
                f,
                "{path} does not belong to the store: its addition or removal was interrupted (`offloadd device add {}` adds it)",
                Word(Path::new(path))
            )?,
        }
        f.write_str("; remove it from the list `devices`; it is not changed")
    }
}

/// A job of the store.
#[derive(Clone, Debug)]
pub struct RecoveredJob {
    /// Entry in the catalog.
    pub entry: Entry,
    /// Tiles and their places.
    pub table: TileTable,
    /// Slots of even and of odd generations.
    pub slots: [SlotContent; 2],
    /// Highest sequence number in the slots.
    pub sequence: u64,
}

impl RecoveredJob {
    /// Whether the tiles are valid: false for a job without durability that did not end in order.
    pub fn clean(&self) -> bool {
        manifest::resumable(&self.slots)
            .iter()
            .all(|marked| marked.mark != Some(Mark::Overwriting))
    }
}

/// Reads the store on all devices of `blocks` and changes nothing.
pub fn read(blocks: &mut impl Blocks) -> Result<RecoveredStore, StoreError> {
    read_watched(blocks, &mut |_, _| {})
}

/// Like [`read`], and calls `watch` after each job with the jobs read and the jobs in all.
pub fn read_watched(
    blocks: &mut impl Blocks,
    watch: &mut dyn FnMut(u64, u64),
) -> Result<RecoveredStore, StoreError> {
    let mut reader = Reader {
        blocks,
        notes: Vec::new(),
        repairs: Vec::new(),
    };
    let superblocks = reader.superblocks()?;
    let (metadata_position, mut catalog, mut stale) = reader.newest_catalog(&superblocks)?;
    let id = catalog.store;
    let (devices, foreign_devices) = reader.devices(superblocks, &catalog)?;
    for positions in [&mut stale.whole, &mut stale.parts] {
        positions.retain(|position| devices.iter().any(|device| device.position == *position));
    }
    // These are zeroed, not repaired.
    reader.repairs.retain(|repair| {
        !stale.whole.contains(&repair.position) || !CATALOG_OFFSETS.contains(&repair.offset)
    });
    let metadata_device = devices.iter().position(|d| d.position == metadata_position);
    let Some(metadata_device) = metadata_device.map(|index| DeviceIndex(index as u32)) else {
        return Err(StoreError::Contradiction(format!(
            "{} holds the newest catalog, which does not list it",
            reader.blocks.path(metadata_position)
        )));
    };
    let numbers: Vec<u32> = devices.iter().map(|d| d.superblock.number).collect();
    let mut space = Space::new(metadata_device);
    for (index, device) in devices.iter().enumerate() {
        let Superblock {
            data_bytes,
            read_bytes_per_s,
            write_bytes_per_s,
            ..
        } = device.superblock;
        space.add(data_bytes, rate(read_bytes_per_s, write_bytes_per_s));
        if device.phase == Some(Phase::Draining) {
            space.close(DeviceIndex(index as u32));
        }
    }
    let mut jobs = Vec::with_capacity(catalog.entries.len());
    for (entry, device) in catalog.devices.iter_mut().zip(&devices) {
        entry.path.clone_from(&device.path);
    }
    for entry in &catalog.entries {
        jobs::check_area(entry, &devices[metadata_device.0 as usize])?;
        let table = reader.table(metadata_position, entry, &numbers)?;
        if !space.retake(&table.definition, &entry.area, &table.extents) {
            return Err(StoreError::Contradiction(format!(
                "job {} of uid {} has space that another job has or that no device has",
                entry.name, entry.uid
            )));
        }
        let mut sequence = manifest::FIRST_SEQUENCE;
        let slots = [
            reader.slot(metadata_position, entry, &table, 0, &mut sequence)?,
            reader.slot(metadata_position, entry, &table, 1, &mut sequence)?,
        ];
        jobs.push(RecoveredJob {
            entry: entry.clone(),
            table,
            slots,
            sequence,
        });
        watch(jobs.len() as u64, catalog.entries.len() as u64);
    }
    let Reader { notes, repairs, .. } = reader;
    Ok(RecoveredStore {
        id,
        devices,
        metadata_device,
        foreign_devices,
        catalog,
        jobs,
        space,
        notes,
        repairs,
        stale,
    })
}

/// Reads the store, flushes every device, and repairs unsound copies, flushed too. Call it only under the store's lock.
///
/// The flush is necessary: if a daemon was killed between a record's write and its flush, the record may have been read from a
/// drive's cache. Work that resumes from it overwrites the generation before it, so the record must survive the next power cut.
pub fn open(blocks: &mut impl Blocks) -> Result<RecoveredStore, StoreError> {
    open_watched(blocks, &mut |_, _| {})
}

/// Like [`open`], and calls `watch` after each job with the jobs read and the jobs in all.
pub fn open_watched(
    blocks: &mut impl Blocks,
    watch: &mut dyn FnMut(u64, u64),
) -> Result<RecoveredStore, StoreError> {
    let mut store = read_watched(blocks, watch)?;
    repair(blocks, &mut store)?;
    Ok(store)
}

/// Does the writing part of [`open`] after [`read_watched`]. Without it a store may be read and must not be written.
///
/// # Errors
/// A device fails a write or a flush.
pub fn repair(blocks: &mut impl Blocks, store: &mut RecoveredStore) -> Result<(), BlockError> {
    // The sound copy may have been read from a drive's cache, so it is made durable before the other copy is overwritten.
    for position in 0..blocks.count() {
        blocks.flush(position)?;
    }
    let mut written = BTreeSet::new();
    for repair in std::mem::take(&mut store.repairs) {
        blocks.write(repair.position, repair.offset, &repair.blocks)?;
        written.insert(repair.position);
    }
    for position in written {
        blocks.flush(position)?;
    }
    let Stale { whole, parts } = std::mem::take(&mut store.stale);
    for position in parts {
        forget_catalogs(blocks, position)?;
    }
    for position in whole {
        // The newer catalog counts in any case, and a drive that refuses writes is failing.
        if let Err(error) = forget_catalogs(blocks, position) {
            store.notes.push(Note {
                path: blocks.path(position).to_owned(),
                offset: error.offset,
                what: "an old catalog".into(),
                why: error.cause.to_string(),
                consequence: Consequence::Superseded,
            });
        }
    }
    Ok(())
}

/// Finds the devices of one store, in its order, and those of none, by superblocks and catalog alone. Nothing else is read and
/// nothing is changed, so it may run beside a daemon.
pub fn identify(
    blocks: &mut impl Blocks,
) -> Result<(Vec<RecoveredDevice>, Vec<ForeignDevice>), StoreError> {
    let mut reader = Reader {
        blocks,
        notes: Vec::new(),
        repairs: Vec::new(),
    };
    let superblocks = reader.superblocks()?;
    let (_, catalog, _) = reader.newest_catalog(&superblocks)?;
    reader.devices(superblocks, &catalog)
}

/// The device that a [`DeviceIndex`] names.
impl std::ops::Index<DeviceIndex> for RecoveredStore {
    type Output = RecoveredDevice;
    fn index(&self, device: DeviceIndex) -> &RecoveredDevice {
        &self.devices[device.0 as usize]
    }
}
