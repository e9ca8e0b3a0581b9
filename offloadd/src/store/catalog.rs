//! The catalog: the jobs and devices of a store. It is small and written as a whole: copy A, flush, copy B, flush. The newer sound copy is valid.
//!
//! A power cut leaves the old catalog or the new one. Recovery makes both copies equal before anything is written, so copy B is
//! never older than the catalog before the one being written to A.
//!
//! Each incarnation of a daemon writes a catalog before it serves, so that its sequence number tells incarnations apart: state
//! kept by one incarnation shows whether another one served since. A daemon that cannot write the catalog writes nothing else.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::definition::{JOB_NAME_BYTES_MAX, JobName};
use super::sealed::{self, Head, Unreadable};
use super::superblock::{DeviceId, StoreId};
use super::{BLOCK, CATALOG_BYTES_MAX, CATALOG_OFFSETS, DEVICES_MAX};
use crate::blocks::{BlockError, Blocks};
use crate::io::AlignedBytes;

pub(crate) const MAGIC: [u8; 8] = *b"OFFLCAT1";

/// Most jobs of one store: the catalog has a fixed size.
pub const JOBS_MAX: usize = 1024;

/// Difference between the sequence of the last catalog and that of the first one of an incarnation. A failed write may have left a catalog with the
/// number in between.
const INCARNATION_STEP: u64 = 2;

/// Largest plausible sequence number; a higher one is damage.
const SEQUENCE_MAX: u64 = 1 << 62;

/// Longest stored path of a device; a longer one is cut.
const PATH_BYTES_MAX: usize = 256;

/// All jobs and devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Catalog {
    pub store: StoreId,
    /// Number of catalogs written; of two sound copies the higher one is the newer.
    pub sequence: u64,
    /// Lowest job id never assigned.
    pub next_job_id: u64,
    /// Lowest device number never assigned.
    pub next_number: u32,
    /// Jobs, in no particular order.
    pub entries: Vec<Entry>,
    /// Devices, by number.
    pub devices: Vec<DeviceEntry>,
}

/// A device of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceEntry {
    /// Number in the store, never reused.
    pub number: u32,
    /// Id in the device's superblock.
    pub id: DeviceId,
    /// State of the device.
    pub phase: Phase,
    /// Path of the device in the last incarnation that had it: for messages about a missing device, and to open one that the
    /// settings do not list.
    pub path: String,
}

/// State of a device. The numbers are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Phase {
    /// In normal use.
    Settled = 1,
    /// Added recently: its share of the existing tiles moves to it.
    Filling = 2,
    /// To be removed: its tiles move to other devices, and nothing new is placed on it.
    Draining = 3,
}

impl Phase {
    fn from_number(number: u32) -> Option<Self> {
        [Self::Settled, Self::Filling, Self::Draining]
            .into_iter()
            .find(|phase| *phase as u32 == number)
    }
}

/// A job of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Id in this store, never reused: a record with another id belongs to a deleted job.
    pub job_id: u64,
    /// Owner.
    pub uid: u32,
    /// Name of the job among its owner's jobs.
    pub name: JobName,
    /// Place of the job's area.
    pub area: Area,
    /// Checksum in the head of the definition's revision 0, which binds it to this entry. Later revisions repeat the job id.
    pub definition_crc: u32,
    /// Bytes of tiles and area, over all devices.
    pub reserved_bytes: u64,
}

/// Place of a job's own structures, on the metadata device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    /// First byte on the device.
    pub offset: u64,
    /// Bytes of one copy of the definition.
    pub definition_bytes: u64,
    /// Bytes for one copy of a record.
    pub record_bytes_max: u64,
    /// Unused bytes between the copies.
    pub gap_bytes: u64,
}

impl Area {
    /// Bytes of the whole area.
    pub fn bytes(&self) -> u64 {
        2 * self.copy_bytes() + self.gap_bytes
    }

    /// Offsets of both copies of the definition.
    pub fn definitions(&self) -> [u64; 2] {
        self.both(0)
    }

    /// Offsets of both copies of the record in `slot`.
    pub fn records(&self, slot: usize) -> [u64; 2] {
        self.both(self.slot(slot))
    }

    /// Offsets of both copies of the mark beside the record in `slot`.
    pub fn marks(&self, slot: usize) -> [u64; 2] {
        self.both(self.slot(slot) + self.record_bytes_max)
    }

    /// Offsets of `at` in each copy.
    fn both(&self, at: u64) -> [u64; 2] {
        let start = self.offset + at;
        [start, start + self.copy_bytes() + self.gap_bytes]
    }

    /// Offset of `slot` in each copy.
    fn slot(&self, slot: usize) -> u64 {
        assert!(slot < 2);
        self.definition_bytes + slot as u64 * self.slot_bytes()
    }

    fn slot_bytes(&self) -> u64 {
        self.record_bytes_max + BLOCK
    }

    fn copy_bytes(&self) -> u64 {
        self.definition_bytes + 2 * self.slot_bytes()
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawCatalogHeader {
    head: Head,
    store: [u8; 16],
    sequence: u64,
    next_job_id: u64,
    entry_count: u64,
    device_count: u32,
    next_number: u32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawEntry {
    job_id: u64,
    uid: u32,
    name_bytes: u32,
    name: [u8; JOB_NAME_BYTES_MAX],
    area_offset: u64,
    definition_bytes: u64,
    record_bytes_max: u64,
    gap_bytes: u64,
    reserved_bytes: u64,
    definition_crc: u32,
    reserved: u32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawDevice {
    id: [u8; 16],
    number: u32,
    phase: u32,
    path_bytes: u32,
    reserved: u32,
    path: [u8; PATH_BYTES_MAX],
}

const _: () = assert!(size_of::<RawCatalogHeader>() == 80 && size_of::<RawEntry>() == 192);
const _: () = assert!(size_of::<RawDevice>() == 288);
const _: () = assert!(
    (size_of::<RawCatalogHeader>()
        + JOBS_MAX * size_of::<RawEntry>()
        + DEVICES_MAX as usize * size_of::<RawDevice>()) as u64
        <= CATALOG_BYTES_MAX
);

impl Catalog {
    /// The catalog of a new store on `devices`.
    pub fn empty(store: StoreId, devices: Vec<DeviceEntry>) -> Self {
        Self {
            store,
            sequence: 1,
            next_job_id: 1,
            next_number: devices.len() as u32,
            entries: Vec::new(),
            devices,
        }
    }

    /// The first catalog of a new incarnation. Only its number differs.
    #[must_use]
    pub fn of_next_incarnation(&self) -> Self {
        Self {
            sequence: self.sequence + INCARNATION_STEP,
            ..self.clone()
        }
    }

    /// Writes one copy, then the other, so that a power cut leaves a whole one.
    pub fn write(&self, blocks: &mut impl Blocks, position: usize) -> Result<(), BlockError> {
        let copy = self.encode();
        for offset in CATALOG_OFFSETS {
            blocks.write(position, offset, &copy)?;
            blocks.flush(position)?;
        }
        Ok(())
    }

    /// Encodes the catalog as sealed blocks, at most [`CATALOG_BYTES_MAX`].
    pub fn encode(&self) -> AlignedBytes {
        assert!(self.entries.len() <= JOBS_MAX);
        assert!((1..=DEVICES_MAX as usize).contains(&self.devices.len()));
        let header = RawCatalogHeader {
            head: Head::unsealed(MAGIC),
            store: self.store.0,
            sequence: self.sequence,
            next_job_id: self.next_job_id,
            entry_count: self.entries.len() as u64,
            device_count: self.devices.len() as u32,
            next_number: self.next_number,
        };
        let entries: Vec<RawEntry> = self.entries.iter().map(Entry::to_raw).collect();
        let devices: Vec<RawDevice> = self.devices.iter().map(DeviceEntry::to_raw).collect();
        sealed::seal(&[header.as_bytes(), entries.as_bytes(), devices.as_bytes()])
    }

    /// Decodes blocks whose seal is sound.
    pub fn decode(blocks: &AlignedBytes) -> Result<Self, Unreadable> {
        let damaged = |what: String| Unreadable::Damaged(what);
        let (header, rest) = RawCatalogHeader::ref_from_prefix(blocks.as_slice()).expect("a block");
        let device_count = header.device_count;
        if header.entry_count > JOBS_MAX as u64 {
            return Err(damaged(format!("it claims {} jobs", header.entry_count)));
        }
        if header.sequence > SEQUENCE_MAX {
            return Err(damaged(format!("it has number {}", header.sequence)));
        }
        if !(1..=DEVICES_MAX).contains(&device_count) {
            return Err(damaged(format!("it claims {device_count} devices")));
        }
        let (entries, rest) =
            <[RawEntry]>::ref_from_prefix_with_elems(rest, header.entry_count as usize)
                .map_err(|_| damaged(format!("{} jobs do not fit", header.entry_count)))?;
        let (devices, padding) =
            <[RawDevice]>::ref_from_prefix_with_elems(rest, device_count as usize)
                .map_err(|_| damaged(format!("{device_count} devices do not fit")))?;
        if padding.iter().any(|&byte| byte != 0) {
            return Err(damaged("its padding is not zero".into()));
        }
        let entries = entries
            .iter()
            .map(Entry::from_raw)
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| damaged("an entry is invalid".into()))?;
        let devices = devices
            .iter()
            .map(DeviceEntry::from_raw)
            .collect::<Option<Vec<_>>>()
            .filter(|devices| devices.is_sorted_by(|a, b| a.number < b.number))
            .filter(|devices| devices.iter().all(|d| d.number < header.next_number))
            .ok_or_else(|| damaged("a device is invalid".into()))?;
        Ok(Self {
            store: StoreId(header.store),
            sequence: header.sequence,
            next_job_id: header.next_job_id,
            next_number: header.next_number,
            entries,
            devices,
        })
    }
}

impl DeviceEntry {
    fn to_raw(&self) -> RawDevice {
        let mut path = [0; PATH_BYTES_MAX];
        let mut kept = self.path.len().min(PATH_BYTES_MAX);
        while !self.path.is_char_boundary(kept) {
            kept -= 1;
        }
        path[..kept].copy_from_slice(&self.path.as_bytes()[..kept]);
        RawDevice {
            id: self.id.0,
            number: self.number,
            phase: self.phase as u32,
            path_bytes: kept as u32,
            reserved: 0,
            path,
        }
    }

    fn from_raw(raw: &RawDevice) -> Option<Self> {
        let path = raw.path.get(..raw.path_bytes as usize)?;
        let sound = raw.reserved == 0 && raw.path[path.len()..].iter().all(|&byte| byte == 0);
        Some(Self {
            number: raw.number,
            id: DeviceId(raw.id),
            phase: Phase::from_number(raw.phase).filter(|_| sound)?,
            path: std::str::from_utf8(path).ok()?.to_owned(),
        })
    }
}

impl Entry {
    fn to_raw(&self) -> RawEntry {
        let mut name = [0; JOB_NAME_BYTES_MAX];
        name[..self.name.as_str().len()].copy_from_slice(self.name.as_str().as_bytes());
        RawEntry {
            job_id: self.job_id,
            uid: self.uid,
            name_bytes: self.name.as_str().len() as u32,
            name,
            area_offset: self.area.offset,
            definition_bytes: self.area.definition_bytes,
            record_bytes_max: self.area.record_bytes_max,
            gap_bytes: self.area.gap_bytes,
            reserved_bytes: self.reserved_bytes,
            definition_crc: self.definition_crc,
            reserved: 0,
        }
    }

    fn from_raw(raw: &RawEntry) -> Option<Self> {
        let name = raw.name.get(..raw.name_bytes as usize)?;
        let sound = raw.reserved == 0
            && raw.name[name.len()..].iter().all(|&byte| byte == 0)
            && [
                raw.area_offset,
                raw.definition_bytes,
                raw.record_bytes_max,
                raw.gap_bytes,
                raw.reserved_bytes,
            ]
            .iter()
            .all(|bytes| bytes % BLOCK == 0 && *bytes < 1 << 60);
        if !sound {
            return None;
        }
        Some(Self {
            job_id: raw.job_id,
            uid: raw.uid,
            name: JobName::new(std::str::from_utf8(name).ok()?).ok()?,
            area: Area {
                offset: raw.area_offset,
                definition_bytes: raw.definition_bytes,
                record_bytes_max: raw.record_bytes_max,
                gap_bytes: raw.gap_bytes,
            },
            definition_crc: raw.definition_crc,
            reserved_bytes: raw.reserved_bytes,
        })
    }
}

/// Zeroes the catalogs of a device, one copy after the other, so that a power cut leaves a whole one or one beside zeros.
pub(super) fn forget_catalogs(blocks: &mut impl Blocks, position: usize) -> Result<(), BlockError> {
    let zeros = AlignedBytes::zeroed(BLOCK as usize);
    for offset in CATALOG_OFFSETS {
        blocks.write(position, offset, &zeros)?;
        blocks.flush(position)?;
    }
    Ok(())
}
