//! Reads a store into memory when a daemon starts, and mends what stands twice.
//!
//! [`read`] changes nothing. [`open`] also writes the sound copy of a structure over the other one and flushes: after it,
//! both copies of everything are equal and durable, which the catalog's update and the next power cut rely on.

use offload_api::ids::{DeviceIndex, Generation};

use super::StoreError;
use super::catalog::{self, Catalog, Entry};
use super::manifest::{self, Mark, Marked, Record, SlotContent};
use super::placement::{Space, rate};
use super::sealed::{self, Unreadable};
use super::superblock::{self, StoreId, Superblock};
use super::tile_table::{self, TileTable};
use super::twins::{Consequence, Note, Reader, Repair};
use super::{BLOCK, CATALOG_BYTES_MAX, CATALOG_OFFSETS, DATA_OFFSET, SUPERBLOCK_OFFSETS};
use crate::blocks::{AlignedBytes, Blocks};

/// All that is known of a store.
#[derive(Clone, Debug)]
pub struct RecoveredStore {
    /// Of all devices.
    pub id: StoreId,
    /// In the store's order: a [`DeviceIndex`] is an index of this list.
    pub devices: Vec<RecoveredDevice>,
    /// The newest one.
    pub catalog: Catalog,
    /// One an entry of the catalog, in its order.
    pub jobs: Vec<RecoveredJob>,
    /// What no job holds.
    pub space: Space,
    /// Copies that were not sound.
    pub notes: Vec<Note>,
    repairs: Vec<Repair>,
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

fn read_watched(
    blocks: &mut impl Blocks,
    watch: &mut dyn FnMut(u64, u64),
) -> Result<RecoveredStore, StoreError> {
    let mut reader = Reader {
        blocks,
        notes: Vec::new(),
        repairs: Vec::new(),
    };
    let devices = reader.devices()?;
    let id = devices[0].superblock.store;
    let home = devices[0].position;
    let catalog = reader.catalog(home, id)?;
    let mut space = Space::new(devices.iter().map(|device| {
        let Superblock {
            data_bytes,
            read_bytes_per_s,
            write_bytes_per_s,
            ..
        } = device.superblock;
        (data_bytes, rate(read_bytes_per_s, write_bytes_per_s))
    }));
    let mut jobs = Vec::with_capacity(catalog.entries.len());
    for entry in &catalog.entries {
        check_area(entry, &devices[0])?;
        let table = reader.table(home, entry)?;
        if !space.retake(&table.definition, &entry.area, &table.extents) {
            return Err(StoreError::Contradiction(format!(
                "job {} of uid {} holds space that another job holds or no device has",
                entry.name, entry.uid
            )));
        }
        let slots = [
            reader.slot(home, entry, &table, 0)?,
            reader.slot(home, entry, &table, 1)?,
        ];
        jobs.push(RecoveredJob {
            entry: entry.clone(),
            table,
            slots,
        });
        watch(jobs.len() as u64, catalog.entries.len() as u64);
    }
    let Reader { notes, repairs, .. } = reader;
    Ok(RecoveredStore {
        id,
        devices,
        catalog,
        jobs,
        space,
        notes,
        repairs,
    })
}

/// Reads the store, mends unsound copies, and flushes every device. Only under the store's lock.
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
    for repair in std::mem::take(&mut store.repairs) {
        blocks.write(repair.position, repair.offset, &repair.blocks)?;
    }
    for position in 0..blocks.count() {
        blocks.flush(position)?;
    }
    Ok(store)
}

/// The devices of one store, in its order, by their superblocks alone: nothing else is read and nothing changed, so that it may
/// be done beside a daemon.
pub fn look(blocks: &mut impl Blocks) -> Result<Vec<RecoveredDevice>, StoreError> {
    let mut reader = Reader {
        blocks,
        notes: Vec::new(),
        repairs: Vec::new(),
    };
    reader.devices()
}

impl<B: Blocks> Reader<'_, B> {
    fn devices(&mut self) -> Result<Vec<RecoveredDevice>, StoreError> {
        let mut devices = (0..self.blocks.count())
            .map(|position| {
                Ok(RecoveredDevice {
                    position,
                    path: self.blocks.path(position).to_owned(),
                    superblock: self.superblock(position)?,
                })
            })
            .collect::<Result<Vec<_>, StoreError>>()?;
        let Some(first) = devices.first().cloned() else {
            return Err(StoreError::Invalid(
                "a store has at least one device".into(),
            ));
        };
        let (store, count) = (first.superblock.store, first.superblock.device_count);
        for device in &devices {
            if device.superblock.store != store || device.superblock.device_count != count {
                return Err(StoreError::Foreign {
                    path: device.path.clone(),
                    found: device.superblock.store.to_string(),
                    other_path: first.path,
                    expected: store.to_string(),
                });
            }
            let found_bytes = self.blocks.size_bytes(device.position);
            let expected_bytes = DATA_OFFSET + device.superblock.data_bytes;
            if found_bytes < expected_bytes {
                return Err(StoreError::Shrunk {
                    path: device.path.clone(),
                    found_bytes,
                    expected_bytes,
                });
            }
        }
        devices.sort_by_key(|device| device.superblock.device_index);
        for pair in devices.windows(2) {
            if pair[0].superblock.device_index == pair[1].superblock.device_index {
                return Err(StoreError::Duplicate {
                    path: pair[0].path.clone(),
                    other_path: pair[1].path.clone(),
                    index: pair[0].superblock.device_index,
                });
            }
        }
        for index in 0..count {
            if devices
                .get(index as usize)
                .map(|d| d.superblock.device_index)
                != Some(index)
            {
                return Err(StoreError::Missing { index, count });
            }
        }
        Ok(devices)
    }

    fn superblock(&mut self, position: usize) -> Result<Superblock, StoreError> {
        let copies = SUPERBLOCK_OFFSETS.map(|offset| {
            self.copy(
                position,
                offset,
                BLOCK,
                superblock::MAGIC,
                Superblock::decode,
            )
        });
        let path = self.blocks.path(position).to_owned();
        if let [
            Err(Unreadable::Blank | Unreadable::Foreign),
            Err(Unreadable::Blank | Unreadable::Foreign),
        ] = &copies
        {
            return Err(StoreError::NoStore { path });
        }
        self.newest("superblock", position, SUPERBLOCK_OFFSETS, copies, |_| 0)
    }

    fn catalog(&mut self, position: usize, id: StoreId) -> Result<Catalog, StoreError> {
        let copies = CATALOG_OFFSETS.map(|offset| {
            let decode = |blocks: &AlignedBytes| {
                let catalog = Catalog::decode(blocks)?;
                if catalog.store != id {
                    return Err(Unreadable::Damaged(format!(
                        "it is of store {}",
                        catalog.store
                    )));
                }
                Ok(catalog)
            };
            self.copy(position, offset, CATALOG_BYTES_MAX, catalog::MAGIC, decode)
        });
        self.newest("catalog", position, CATALOG_OFFSETS, copies, |catalog| {
            catalog.sequence
        })
    }

    fn table(&mut self, position: usize, entry: &Entry) -> Result<TileTable, StoreError> {
        let offsets = entry.area.definitions();
        let bytes = entry.area.definition_bytes;
        let copies = offsets.map(|offset| {
            let decode = |blocks: &AlignedBytes| {
                if blocks.len() as u64 != bytes || sealed::crc_of(blocks) != entry.definition_crc {
                    return Err(Unreadable::Damaged("it is not the catalog's".into()));
                }
                TileTable::decode(blocks, entry.job_id)
            };
            self.copy(position, offset, bytes, tile_table::MAGIC, decode)
        });
        let what = format!("definition of {}", of_job(entry));
        self.newest(&what, position, offsets, copies, |_| 0)
    }

    fn slot(
        &mut self,
        position: usize,
        entry: &Entry,
        table: &TileTable,
        slot: usize,
    ) -> Result<SlotContent, StoreError> {
        let tile_count = table.extents.len();
        let offsets = entry.area.records(slot);
        let bytes_max = entry.area.record_bytes_max;
        let copies = offsets.map(|offset| {
            let decode = |blocks: &AlignedBytes| {
                let record = Record::decode(blocks, entry.job_id, tile_count)?;
                if Record::slot(record.generation) != slot {
                    return Err(Unreadable::Damaged("it belongs to the other slot".into()));
                }
                Ok(record)
            };
            self.copy(position, offset, bytes_max, manifest::RECORD_MAGIC, decode)
        });
        let what = format!("record of {}, slot {slot}", of_job(entry));
        self.refuse_newer(&what, position, &copies)?;
        if let [Err(first), Err(second)] = &copies {
            if matches!(first, Unreadable::Blank) && matches!(second, Unreadable::Blank) {
                return Ok(SlotContent::Empty);
            }
            for (why, offset) in [first, second].into_iter().zip(offsets) {
                if !matches!(why, Unreadable::Blank) {
                    let why = why.to_string();
                    self.note(position, offset, &what, why, Consequence::GenerationLost);
                }
            }
            return Ok(SlotContent::Unknown);
        }
        let record = self.newest(&what, position, offsets, copies, |r: &Record| {
            (r.generation, r.epoch)
        })?;
        let mark = self.mark(position, entry, &record, slot)?;
        Ok(SlotContent::Sound(Marked { record, mark }))
    }

    fn mark(
        &mut self,
        position: usize,
        entry: &Entry,
        record: &Record,
        slot: usize,
    ) -> Result<Option<Mark>, StoreError> {
        let offsets = entry.area.marks(slot);
        let copies = offsets.map(|offset| {
            self.copy(position, offset, BLOCK, manifest::MARK_MAGIC, |block| {
                record.decode_mark(block)
            })
        });
        let what = mark_of(entry, record.generation);
        self.refuse_newer(&what, position, &copies)?;
        if copies.iter().all(Result::is_err) {
            // Never written, of an older record, or cut off before it was acknowledged: the weaker state is the true
            // one. Unsound bytes are still told.
            for (copy, offset) in copies.iter().zip(offsets) {
                if let Err(
                    why @ (Unreadable::Damaged(_) | Unreadable::Foreign | Unreadable::Device(_)),
                ) = copy
                {
                    let why = why.to_string();
                    self.note(position, offset, &what, why, Consequence::GenerationLost);
                }
            }
            return Ok(None);
        }
        self.newest(&what, position, offsets, copies, |mark| *mark as u32)
            .map(Some)
    }
}

/// The area must lie in device 0's data and be large enough to hold what its own numbers claim, before it is read.
fn check_area(entry: &Entry, home: &RecoveredDevice) -> Result<(), StoreError> {
    let area = &entry.area;
    let fits = area.offset >= DATA_OFFSET
        && area.definition_bytes > 0
        && area.definition_bytes <= tile_table::BYTES_MAX
        && area.record_bytes_max > 0
        && area.record_bytes_max <= manifest::BYTES_MAX
        && area.offset + area.bytes() <= DATA_OFFSET + home.superblock.data_bytes;
    if fits {
        return Ok(());
    }
    Err(StoreError::Contradiction(format!(
        "the area of {} does not lie in {}",
        of_job(entry),
        home.path
    )))
}

pub(crate) fn of_job(entry: &Entry) -> String {
    format!("job {} of uid {}", entry.name, entry.uid)
}

fn mark_of(entry: &Entry, generation: Generation) -> String {
    format!("mark of generation {generation} of {}", of_job(entry))
}

/// The device a [`DeviceIndex`] names.
impl std::ops::Index<DeviceIndex> for RecoveredStore {
    type Output = RecoveredDevice;
    fn index(&self, device: DeviceIndex) -> &RecoveredDevice {
        &self.devices[device.0 as usize]
    }
}
