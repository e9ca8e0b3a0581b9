//! Reads a store into memory when a daemon starts, and mends what stands twice.
//!
//! [`read`] changes nothing. [`open`] also writes the sound copy of a structure over the other one and flushes: after it,
//! both copies of everything are equal and durable, which the catalog's update and the next power cut rely on.

use offload_api::ids::{DeviceIndex, Generation};

use super::StoreError;
use super::catalog::{self, Catalog, DeviceEntry, Entry, Phase};
use super::definition::Durability;
use super::home;
use super::manifest::{self, Mark, Marked, Record, SlotContent};
use super::placement::{Space, rate};
use super::sealed::{self, Unreadable};
use super::superblock::{self, DeviceId, StoreId, Superblock};
use super::tile_table::{self, TileTable};
use super::twins::{Consequence, Copy, Note, Reader, Repair};
use super::{BLOCK, CATALOG_BYTES_MAX, CATALOG_OFFSETS, DATA_OFFSET, SUPERBLOCK_OFFSETS};
use crate::blocks::{AlignedBytes, Blocks};

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
    pub outsiders: Vec<Outsider>,
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
pub struct Outsider {
    /// Device.
    pub path: String,
    /// It left in order; otherwise it was cut off while it came or went.
    pub drained: bool,
}

impl std::fmt::Display for Outsider {
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
    let superblocks = reader.superblocks()?;
    let (home_position, mut catalog, mut stale) = reader.newest_catalog(&superblocks)?;
    let id = catalog.store;
    let (devices, outsiders) = reader.devices(superblocks, &mut catalog)?;
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
        check_area(entry, &devices[home.0 as usize])?;
        let table = reader.table(home_position, entry, &numbers)?;
        if !space.retake(&table.definition, &entry.area, &table.extents) {
            return Err(StoreError::Contradiction(format!(
                "job {} of uid {} holds space that another job holds or no device has",
                entry.name, entry.uid
            )));
        }
        let slots = [
            reader.slot(home_position, entry, &table, 0)?,
            reader.slot(home_position, entry, &table, 1)?,
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
        home,
        outsiders,
        catalog,
        jobs,
        space,
        notes,
        repairs,
        stale,
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
    let Stale { whole, parts } = std::mem::take(&mut store.stale);
    for position in parts {
        home::forget_catalogs(blocks, position)?;
    }
    for position in whole {
        // The newer one counts all the same, and a drive that takes no writes any more is on its way out.
        if let Err(error) = home::forget_catalogs(blocks, position) {
            store.notes.push(Note {
                path: blocks.path(position).to_owned(),
                offset: error.offset,
                what: "an old catalog".into(),
                why: error.cause.to_string(),
                consequence: Consequence::Superseded,
            });
        }
    }
    Ok(store)
}

/// The devices of one store, in its order, and those of none, by their superblocks and the catalog alone: nothing else is
/// read and nothing changed, so that it may be done beside a daemon.
pub fn look(blocks: &mut impl Blocks) -> Result<(Vec<RecoveredDevice>, Vec<Outsider>), StoreError> {
    let mut reader = Reader {
        blocks,
        notes: Vec::new(),
        repairs: Vec::new(),
    };
    let superblocks = reader.superblocks()?;
    let (_, mut catalog, _) = reader.newest_catalog(&superblocks)?;
    reader.devices(superblocks, &mut catalog)
}

/// The catalogs of one device.
enum Found {
    Nothing,
    /// It was cut off as it came to this device or left it. If no other device has one, it is the store's, and damaged.
    CutOff(StoreError),
    Whole(Catalog),
}

impl<B: Blocks> Reader<'_, B> {
    /// The superblock of each device that has one, by position. All of one store, none twice.
    fn superblocks(&mut self) -> Result<Vec<(usize, Superblock)>, StoreError> {
        let mut found: Vec<(usize, Superblock)> = Vec::new();
        let mut blank = None;
        for position in 0..self.blocks.count() {
            match self.superblock(position) {
                Ok(superblock) => found.push((position, superblock)),
                Err(StoreError::NoStore { path }) => {
                    blank.get_or_insert(path);
                }
                Err(error) => return Err(error),
            }
        }
        let path = |position: usize| self.blocks.path(position).to_owned();
        let first = found.iter().find(|(_, superblock)| !superblock.drained);
        let &(first, Superblock { store, .. }) = match (first, &blank, found.first()) {
            (Some(first), ..) => first,
            (None, Some(_), _) => {
                let path = blank.expect("just seen");
                return Err(StoreError::NoStore { path });
            }
            (None, None, Some((position, _))) => {
                let path = path(*position);
                return Err(StoreError::Drained { path });
            }
            (None, None, None) => {
                return Err(StoreError::Invalid(
                    "a store has at least one device".into(),
                ));
            }
        };
        if let Some(blank) = blank {
            return Err(StoreError::NotAdded {
                path: blank,
                other_path: path(first),
            });
        }
        for (index, (position, superblock)) in found.iter().enumerate() {
            if superblock.store != store && !superblock.drained {
                return Err(StoreError::Foreign {
                    path: path(*position),
                    found: superblock.store.to_string(),
                    other_path: path(first),
                    expected: store.to_string(),
                });
            }
            let found_bytes = self.blocks.size_bytes(*position);
            let expected_bytes = DATA_OFFSET + superblock.data_bytes;
            if found_bytes < expected_bytes && !superblock.drained {
                return Err(StoreError::Shrunk {
                    path: path(*position),
                    found_bytes,
                    expected_bytes,
                });
            }
            let same = |(_, other): &&(usize, Superblock)| {
                (other.store, other.number, other.id)
                    == (superblock.store, superblock.number, superblock.id)
            };
            if let Some((other, _)) = found[..index].iter().find(same) {
                return Err(StoreError::Duplicate {
                    path: path(*position),
                    other_path: path(*other),
                    number: superblock.number,
                });
            }
        }
        found.retain(|(_, superblock)| superblock.store == store || superblock.drained);
        Ok(found)
    }

    /// The store's newest catalog, the position it was found at, and those of older ones and of parts: from when its home
    /// moved, or of version 1.
    fn newest_catalog(
        &mut self,
        found: &[(usize, Superblock)],
    ) -> Result<(usize, Catalog, Stale), StoreError> {
        let store = (found.iter().find(|(_, s)| !s.drained))
            .map(|(_, superblock)| superblock.store)
            .expect("a device of a store");
        let mut catalogs: Vec<(usize, Catalog)> = Vec::new();
        let mut cut_off = Vec::new();
        for &(position, superblock) in found {
            if superblock.drained {
                continue;
            }
            match self.catalog(position, store)? {
                Found::Nothing => {}
                Found::CutOff(error) => cut_off.push((position, error)),
                Found::Whole(catalog) => catalogs.push((position, catalog)),
            }
        }
        // The first of equals.
        catalogs.sort_by_key(|(_, catalog)| std::cmp::Reverse(catalog.sequence));
        let mut catalogs = catalogs.into_iter();
        if let Some((position, newest)) = catalogs.next() {
            let stale = Stale {
                whole: catalogs.map(|(position, _)| position).collect(),
                parts: cut_off.into_iter().map(|(position, _)| position).collect(),
            };
            return Ok((position, newest, stale));
        }
        if let Some((_, error)) = cut_off.into_iter().next() {
            return Err(error);
        }
        let listed = found.iter().filter(|(_, s)| !s.drained);
        let listed: Vec<&str> = listed
            .map(|(position, _)| self.blocks.path(*position))
            .collect();
        Err(StoreError::NoCatalog {
            paths: listed.join(", "),
        })
    }

    /// The devices the catalog lists, all of them, by number; and those that it does not.
    fn devices(
        &mut self,
        found: Vec<(usize, Superblock)>,
        catalog: &mut Catalog,
    ) -> Result<(Vec<RecoveredDevice>, Vec<Outsider>), StoreError> {
        if catalog.devices.is_empty() {
            list_founders(&found, catalog)?;
        }
        let mut devices = Vec::new();
        for entry in &catalog.devices {
            let listed = |(_, superblock): &&(usize, Superblock)| {
                (superblock.number, superblock.id) == (entry.number, entry.id)
                    && !superblock.drained
            };
            let Some(&(position, superblock)) = found.iter().find(listed) else {
                return Err(StoreError::Missing {
                    number: entry.number,
                    path: (!entry.path.is_empty()).then(|| entry.path.clone()),
                });
            };
            devices.push(RecoveredDevice {
                position,
                path: self.blocks.path(position).to_owned(),
                superblock,
                phase: Some(entry.phase),
            });
        }
        let listed = |position| devices.iter().any(|device| device.position == position);
        let outsiders = (found.iter())
            .filter(|(position, _)| !listed(*position))
            .map(|(position, superblock)| Outsider {
                path: self.blocks.path(*position).to_owned(),
                drained: superblock.drained,
            })
            .collect();
        Ok((devices, outsiders))
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

    fn catalog(&mut self, position: usize, id: StoreId) -> Result<Found, StoreError> {
        let copies = CATALOG_OFFSETS.map(|offset| {
            let decode = |blocks: &AlignedBytes| {
                let catalog = Catalog::decode(blocks)?;
                // Left by another store, on a device that is not the home of this one.
                match catalog.store == id {
                    true => Ok(catalog),
                    false => Err(Unreadable::Foreign),
                }
            };
            self.copy(position, offset, CATALOG_BYTES_MAX, catalog::MAGIC, decode)
        });
        let nothing = |copy: &Copy<_>| matches!(copy, Err(Unreadable::Blank | Unreadable::Foreign));
        if copies.iter().all(nothing) {
            return Ok(Found::Nothing);
        }
        // They are written, and zeroed, one after the other.
        let damaged =
            |copy: &Copy<_>| matches!(copy, Err(Unreadable::Damaged(_) | Unreadable::Device(_)));
        let cut_off = copies.iter().any(nothing) && copies.iter().any(damaged);
        let newest = self.newest("catalog", position, CATALOG_OFFSETS, copies, |catalog| {
            catalog.sequence
        });
        match newest {
            Ok(catalog) => Ok(Found::Whole(catalog)),
            Err(error) if cut_off => Ok(Found::CutOff(error)),
            Err(error) => Err(error),
        }
    }

    fn table(
        &mut self,
        position: usize,
        entry: &Entry,
        numbers: &[u32],
    ) -> Result<TileTable, StoreError> {
        let offsets = entry.area.definitions();
        let bytes = entry.area.definition_bytes;
        let copies = offsets.map(|offset| {
            let decode = |blocks: &AlignedBytes| {
                let table = TileTable::decode(blocks, entry.job_id, numbers)?;
                let first = table.revision == 0;
                let bound = !first || sealed::crc_of(blocks) == entry.definition_crc;
                if blocks.len() as u64 != bytes || !bound {
                    return Err(Unreadable::Damaged("it is not the catalog's".into()));
                }
                Ok(table)
            };
            self.copy(position, offset, bytes, tile_table::MAGIC, decode)
        });
        let what = format!("definition of {}", of_job(entry));
        self.newest(&what, position, offsets, copies, |table| table.revision)
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
            let blank = |why: &Unreadable| matches!(why, Unreadable::Blank);
            if blank(first) && blank(second) {
                return Ok(SlotContent::Empty);
            }
            // Both copies are durable before a commit is acknowledged: beside zeros there is nothing to lose.
            let withheld = |why: &Unreadable| matches!(why, Unreadable::Device(_));
            let undecided =
                (withheld(first) || withheld(second)) && !blank(first) && !blank(second);
            let consequence = match undecided {
                true => Consequence::Undecided,
                false => Consequence::GenerationLost,
            };
            for (why, offset) in [first, second].into_iter().zip(offsets) {
                if !blank(why) {
                    self.note(position, offset, &what, why.to_string(), consequence);
                }
            }
            return Ok(match undecided {
                true => SlotContent::Unreadable(format!("{what}: {first}; {second}")),
                false => SlotContent::Unknown,
            });
        }
        let record = self.newest(&what, position, offsets, copies, |r: &Record| {
            (r.generation, r.epoch)
        })?;
        if table.revision < record.table_revision {
            return Err(StoreError::Damaged {
                what: format!("definition of {}", of_job(entry)),
                path: self.blocks.path(position).to_owned(),
                first: format!("it has revision {}", table.revision),
                second: format!("{what} was written under {}", record.table_revision),
            });
        }
        let mark = self.mark(position, entry, table, &record, slot)?;
        Ok(SlotContent::Sound(Marked { record, mark }))
    }

    fn mark(
        &mut self,
        position: usize,
        entry: &Entry,
        table: &TileTable,
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
            let withheld = |copy: &Copy<_>| matches!(copy, Err(Unreadable::Device(_)));
            let in_place = table.definition.durability() == Durability::None;
            for (copy, offset) in copies.iter().zip(offsets) {
                if let Err(
                    why @ (Unreadable::Damaged(_) | Unreadable::Foreign | Unreadable::Device(_)),
                ) = copy
                {
                    let why = why.to_string();
                    self.note(position, offset, &what, why, Consequence::GenerationLost);
                }
            }
            // What a device withholds may say that the tiles were being written over; beside a copy that was never
            // written it does not, as both are durable before.
            let blank = |copy: &Copy<_>| matches!(copy, Err(Unreadable::Blank));
            let overwriting = in_place && copies.iter().any(withheld) && !copies.iter().any(blank);
            return Ok(overwriting.then_some(Mark::Overwriting));
        }
        self.newest(&what, position, offsets, copies, |mark| *mark as u32)
            .map(Some)
    }
}

/// Of version 1 the superblocks say how many devices there are.
fn list_founders(found: &[(usize, Superblock)], catalog: &mut Catalog) -> Result<(), StoreError> {
    let founders = found.iter().filter(|(_, superblock)| {
        superblock.store == catalog.store && superblock.id == DeviceId::default()
    });
    let count = founders.map(|(_, s)| s.device_count).max().unwrap_or(0);
    if count == 0 {
        return Err(StoreError::Contradiction(
            "neither the catalog nor a superblock says how many devices there are".into(),
        ));
    }
    catalog.next_number = count;
    catalog.devices = (0..count)
        .map(|number| DeviceEntry {
            number,
            id: DeviceId::default(),
            phase: Phase::Settled,
            path: String::new(),
        })
        .collect();
    Ok(())
}

/// The area must lie in the home's data and be large enough to hold what its own numbers claim, before it is read.
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
