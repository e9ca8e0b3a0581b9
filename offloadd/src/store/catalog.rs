//! The jobs of a store. Small, written whole each time: copy A, flush, copy B, flush; the newer sound one counts.
//!
//! A power cut leaves the old catalog or the new one. Recovery makes both copies equal again before anything is written,
//! so copy B is never older than the catalog before the one being written to A.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::definition::{JOB_NAME_BYTES_MAX, JobName};
use super::sealed::{self, Head, Unreadable};
use super::superblock::StoreId;
use super::{BLOCK, CATALOG_BYTES_MAX};
use crate::blocks::AlignedBytes;

pub(crate) const MAGIC: [u8; 8] = *b"OFFLCAT1";

/// Jobs of one store: the catalog has a fixed room.
pub const JOBS_MAX: usize = 1024;

/// All jobs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Catalog {
    /// Of the store.
    pub store: StoreId,
    /// Counts catalogs written; the higher one of two sound copies is the newer.
    pub sequence: u64,
    /// Never given out yet.
    pub next_job_id: u64,
    /// In no order.
    pub entries: Vec<Entry>,
}

/// One job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Unique for ever in this store: a record of another id is of a dropped job.
    pub job_id: u64,
    /// Owner.
    pub uid: u32,
    /// With `uid` it names the job.
    pub name: JobName,
    /// The job's area.
    pub area: Area,
    /// Of the definition's head: binds the definition to this entry.
    pub definition_crc: u32,
    /// Tiles and area, over all devices.
    pub reserved_bytes: u64,
}

/// Where a job's own structures lie on device 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    /// From the device's start.
    pub offset: u64,
    /// Of one copy of the definition.
    pub definition_bytes: u64,
    /// Room of one copy of a record.
    pub record_bytes_max: u64,
}

impl Area {
    /// Bytes of all of it.
    pub fn bytes(&self) -> u64 {
        2 * self.definition_bytes + 2 * self.slot_bytes()
    }

    /// Both copies of the definition.
    pub fn definitions(&self) -> [u64; 2] {
        [self.offset, self.offset + self.definition_bytes]
    }

    /// Both copies of the record in `slot`.
    pub fn records(&self, slot: usize) -> [u64; 2] {
        let start = self.slot(slot);
        [start, start + self.record_bytes_max]
    }

    /// Both copies of the mark beside the record in `slot`; they are neighbours.
    pub fn marks(&self, slot: usize) -> [u64; 2] {
        let start = self.slot(slot) + 2 * self.record_bytes_max;
        [start, start + BLOCK]
    }

    fn slot(&self, slot: usize) -> u64 {
        assert!(slot < 2);
        self.offset + 2 * self.definition_bytes + slot as u64 * self.slot_bytes()
    }

    fn slot_bytes(&self) -> u64 {
        2 * self.record_bytes_max + 2 * BLOCK
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawHeader {
    head: Head,
    store: [u8; 16],
    sequence: u64,
    next_job_id: u64,
    entry_count: u64,
    reserved: u64,
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
    reserved_bytes: u64,
    definition_crc: u32,
    reserved: [u32; 3],
}

const _: () = assert!(size_of::<RawHeader>() == 80 && size_of::<RawEntry>() == 192);
const _: () = assert!(
    (size_of::<RawHeader>() + JOBS_MAX * size_of::<RawEntry>()) as u64 <= CATALOG_BYTES_MAX
);

impl Catalog {
    /// Of a new store.
    pub fn empty(store: StoreId) -> Self {
        Self {
            store,
            sequence: 1,
            next_job_id: 1,
            entries: Vec::new(),
        }
    }

    /// Sealed blocks, at most [`CATALOG_BYTES_MAX`].
    pub fn encode(&self) -> AlignedBytes {
        assert!(self.entries.len() <= JOBS_MAX);
        let header = RawHeader {
            head: Head::unsealed(MAGIC),
            store: self.store.0,
            sequence: self.sequence,
            next_job_id: self.next_job_id,
            entry_count: self.entries.len() as u64,
            reserved: 0,
        };
        let entries: Vec<RawEntry> = self.entries.iter().map(Entry::to_raw).collect();
        sealed::seal(&[header.as_bytes(), entries.as_bytes()])
    }

    /// From blocks whose seal is sound.
    pub fn decode(blocks: &AlignedBytes) -> Result<Self, Unreadable> {
        let damaged = |what: String| Unreadable::Damaged(what);
        let (header, rest) = RawHeader::ref_from_prefix(blocks.as_slice()).expect("a block");
        if header.reserved != 0 || header.entry_count > JOBS_MAX as u64 {
            return Err(damaged(format!("it claims {} jobs", header.entry_count)));
        }
        let (entries, padding) =
            <[RawEntry]>::ref_from_prefix_with_elems(rest, header.entry_count as usize)
                .map_err(|_| damaged(format!("{} jobs do not fit", header.entry_count)))?;
        if padding.iter().any(|&byte| byte != 0) {
            return Err(damaged("its padding is not zero".into()));
        }
        let entries = entries
            .iter()
            .map(Entry::from_raw)
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| damaged("an entry makes no sense".into()))?;
        Ok(Self {
            store: StoreId(header.store),
            sequence: header.sequence,
            next_job_id: header.next_job_id,
            entries,
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
            reserved_bytes: self.reserved_bytes,
            definition_crc: self.definition_crc,
            reserved: [0; 3],
        }
    }

    fn from_raw(raw: &RawEntry) -> Option<Self> {
        let name = raw.name.get(..raw.name_bytes as usize)?;
        let sound = raw.reserved == [0; 3]
            && raw.name[name.len()..].iter().all(|&byte| byte == 0)
            && [
                raw.area_offset,
                raw.definition_bytes,
                raw.record_bytes_max,
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
            },
            definition_crc: raw.definition_crc,
            reserved_bytes: raw.reserved_bytes,
        })
    }
}
