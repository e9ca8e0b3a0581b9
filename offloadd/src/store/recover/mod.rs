//! Reads a store into memory when a daemon starts, and mends what stands twice.
//!
//! [`read`] changes nothing. [`open`] also writes the sound copy of a structure over the other one and flushes: after it,
//! both copies of everything are equal and durable, which the catalog's update and the next power cut rely on.

mod devices;
mod jobs;
mod unlisted;

use std::collections::BTreeSet;

use offload_api::ids::DeviceIndex;

use super::catalog::{Catalog, Entry, Phase};
use super::dual_copy::{Consequence, Note, Reader, Repair};
use super::manifest::{self, Mark, SlotContent};
use super::metadata_device;
use super::placement::{Space, rate};
use super::superblock::{StoreId, Superblock};
use super::tile_table::TileTable;
use super::{CATALOG_OFFSETS, StoreError};
use crate::blocks::{BlockError, Blocks};

pub use self::unlisted::{Unlisted, unlisted};

/// All that is known of a store.
#[derive(Clone, Debug)]
pub struct RecoveredStore {
    /// Of all devices.
    pub id: StoreId,
    /// In the store's order: a [`DeviceIndex`] is an index of this list.
    pub devices: Vec<RecoveredDevice>,
    /// Where the catalog and the jobs' areas lie.
    pub home: DeviceIndex,
    /// Listed by the settings, and of no store.
    pub foreign_devices: Vec<ForeignDevice>,
    /// The newest one.
    pub catalog: Catalog,
    /// One an entry of the catalog, in its order.
    pub jobs: Vec<RecoveredJob>,
    /// What no job holds.
    pub space: Space,
    /// Copies that were not sound.
    pub notes: Vec<Note>,
    repairs: Vec<Repair>,
    stale: Stale,
}

/// Positions of devices with catalogs that count no more: from when the home moved.
#[derive(Clone, Debug, Default)]
struct Stale {
    whole: Vec<usize>,
    /// Cut off as they came or went.
    parts: Vec<usize>,
}

/// A device of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecoveredDevice {
    /// Its place in the list it was opened from (the settings' order).
    pub position: usize,
    /// What messages call it.
    pub path: String,
    /// What it says of itself.
    pub superblock: Superblock,
    /// What goes on with it; `None`: it has left the store in this life, or has not come yet.
    pub phase: Option<Phase>,
}

/// A device that is of no store, though its superblock names the one of the others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignDevice {
    /// Device.
    pub path: String,
    /// It left in order; otherwise it was cut off while it came or went.
    pub drained: bool,
}

impl std::fmt::Display for ForeignDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { path, drained } = self;
        match drained {
            true => write!(f, "{path} was drained and is of no store any more")?,
            false => write!(
                f,
                "{path} is not of the store: it was cut off while it came or went (`offloadd device add {path}` brings it in)"
            )?,
        }
        f.write_str("; take it from the list `devices`. It is left alone")
    }
}

/// A job of the store.
#[derive(Clone, Debug)]
pub struct RecoveredJob {
    /// From the catalog.
    pub entry: Entry,
    /// Its tiles and where they lie.
    pub table: TileTable,
    /// Even and odd generations.
    pub slots: [SlotContent; 2],
    /// The highest one found in them.
    pub sequence: u64,
}

impl RecoveredJob {
    /// False: written in place and not ended in order, so the tiles are not to be trusted.
    pub fn clean(&self) -> bool {
        manifest::resumable(&self.slots)
            .iter()
            .all(|marked| marked.mark != Some(Mark::Overwriting))
    }
}

/// Reads the store of all devices of `blocks` and changes nothing.
pub fn read(blocks: &mut impl Blocks) -> Result<RecoveredStore, StoreError> {
    read_watched(blocks, &mut |_, _| {})
}

/// The same; `watch` is told after each job how many of how many were read.
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
    let (home_position, mut catalog, mut stale) = reader.newest_catalog(&superblocks)?;
    let id = catalog.store;
    let (devices, foreign_devices) = reader.devices(superblocks, &catalog)?;
    for positions in [&mut stale.whole, &mut stale.parts] {
        positions.retain(|position| devices.iter().any(|device| device.position == *position));
    }
    // They are zeroed, not mended.
    reader.repairs.retain(|repair| {
        !stale.whole.contains(&repair.position) || !CATALOG_OFFSETS.contains(&repair.offset)
    });
    let home = devices.iter().position(|d| d.position == home_position);
    let Some(home) = home.map(|index| DeviceIndex(index as u32)) else {
        return Err(StoreError::Contradiction(format!(
            "{} holds the newest catalog, which does not list it",
            reader.blocks.path(home_position)
        )));
    };
    let numbers: Vec<u32> = devices.iter().map(|d| d.superblock.number).collect();
    let mut space = Space::new(home);
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
        jobs::check_area(entry, &devices[home.0 as usize])?;
        let table = reader.table(home_position, entry, &numbers)?;
        if !space.retake(&table.definition, &entry.area, &table.extents) {
            return Err(StoreError::Contradiction(format!(
                "job {} of uid {} holds space that another job holds or no device has",
                entry.name, entry.uid
            )));
        }
        let mut sequence = manifest::FIRST_SEQUENCE;
        let slots = [
            reader.slot(home_position, entry, &table, 0, &mut sequence)?,
            reader.slot(home_position, entry, &table, 1, &mut sequence)?,
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
        home,
        foreign_devices,
        catalog,
        jobs,
        space,
        notes,
        repairs,
        stale,
    })
}

/// Reads the store, flushes every device, and mends unsound copies, flushed too. Only under the store's lock.
///
/// The flush is no formality: after a daemon was killed between a record's write and its flush, the record may have been
/// read out of a drive's cache. Work that goes on from it writes over the generation before it, so it must not vanish in
/// the next power cut.
pub fn open(blocks: &mut impl Blocks) -> Result<RecoveredStore, StoreError> {
    open_watched(blocks, &mut |_, _| {})
}

/// The same; `watch` is told after each job how many of how many were read.
pub fn open_watched(
    blocks: &mut impl Blocks,
    watch: &mut dyn FnMut(u64, u64),
) -> Result<RecoveredStore, StoreError> {
    let mut store = read_watched(blocks, watch)?;
    mend(blocks, &mut store)?;
    Ok(store)
}

/// What [`open`] does after [`read_watched`]: whoever cannot have it done may read, and must write nothing.
///
/// # Errors
/// A device takes no writes, or no flush.
pub fn mend(blocks: &mut impl Blocks, store: &mut RecoveredStore) -> Result<(), BlockError> {
    // The sound copy may have been read out of a drive's cache: it is durable before the other one is written over.
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
        metadata_device::forget_catalogs(blocks, position)?;
    }
    for position in whole {
        // The newer one counts all the same, and a drive that takes no writes any more is on its way out.
        if let Err(error) = metadata_device::forget_catalogs(blocks, position) {
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

/// The devices of one store, in its order, and those of none, by their superblocks and the catalog alone: nothing else is
/// read and nothing changed, so that it may be done beside a daemon.
pub fn look(
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

/// The device a [`DeviceIndex`] names.
impl std::ops::Index<DeviceIndex> for RecoveredStore {
    type Output = RecoveredDevice;
    fn index(&self, device: DeviceIndex) -> &RecoveredDevice {
        &self.devices[device.0 as usize]
    }
}
