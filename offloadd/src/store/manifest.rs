//! The record of one generation, and the mark beside it.

use std::sync::Arc;

use offload_api::ids::{Epoch, Generation, Rank};
use offload_api::{BLOB_BYTES_MAX, TILES_MAX};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::BLOCK;
use super::catalog::Area;
use super::sealed::{self, Head, Unreadable};
use crate::io::AlignedBytes;

pub(crate) const RECORD_MAGIC: [u8; 8] = *b"OFFLREC1";
pub(crate) const MARK_MAGIC: [u8; 8] = *b"OFFLMRK1";

/// Most local ranks of one job.
pub const LOCAL_RANKS_MAX: u32 = 1024;

/// One generation of a job, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Id of the job in the catalog.
    pub job_id: u64,
    /// Number of the generation; never 0.
    pub generation: Generation,
    /// Incarnation of the daemon that wrote it: tells two attempts at a generation apart.
    pub epoch: Epoch,
    /// Whether it was written as confirmed, because there is only one node.
    pub born_confirmed: bool,
    /// Revision of the definition when it was written; an older definition is damage.
    pub table_revision: u32,
    /// Version of each tile; `None` if never written.
    pub versions: Arc<Vec<Option<Version>>>,
    /// Blobs by rank.
    pub blobs: Arc<Vec<(Rank, Vec<u8>)>>,
}

/// Content and place of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    /// Generation that wrote the tile.
    pub generation: Generation,
    /// Checksum of all its bytes.
    pub checksum: u32,
    /// Index of the extent, 0 or 1.
    pub which: u8,
}

/// State of a generation beyond its record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Mark {
    /// Every node has this generation.
    Confirmed = 1,
    /// Without durability: its tiles are being overwritten.
    Overwriting = 2,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawRecord {
    head: Head,
    job_id: u64,
    /// 0 marks a void.
    generation: u64,
    /// Slot of a void.
    epoch: u64,
    sequence: u64,
    tile_count: u64,
    blob_count: u32,
    born_confirmed: u32,
    table_revision: u32,
    reserved: u32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawVersion {
    generation: u64,
    checksum: u32,
    /// 0 if never written, otherwise 1 or 2 for the extents.
    place: u32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawBlob {
    rank: u32,
    bytes: u32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawMark {
    head: Head,
    job_id: u64,
    generation: u64,
    epoch: u64,
    mark: u32,
    reserved: u32,
}

const _: () = assert!(size_of::<RawRecord>() == 88 && size_of::<RawVersion>() == 16);
const _: () = assert!(size_of::<RawBlob>() == 8 && size_of::<RawMark>() == 64);

/// Largest size of one copy; bounds the allocation that a head can ask for.
pub(crate) const BYTES_MAX: u64 = record_bytes_max(TILES_MAX, LOCAL_RANKS_MAX);

/// Bytes of one copy of a record when every rank brings its largest blob.
pub const fn record_bytes_max(tile_count: usize, local_ranks: u32) -> u64 {
    let blob = size_of::<RawBlob>() + BLOB_BYTES_MAX;
    let bytes =
        size_of::<RawRecord>() + tile_count * size_of::<RawVersion>() + local_ranks as usize * blob;
    (bytes as u64).next_multiple_of(BLOCK)
}

/// Bytes that a record of `bytes` has left for blobs, each with its entry in the table.
pub(crate) fn blobs_bytes_max(bytes: u64, tile_count: usize) -> u64 {
    let rest = size_of::<RawRecord>() + tile_count * size_of::<RawVersion>();
    bytes.saturating_sub(rest as u64)
}

/// Bytes that one blob takes.
pub(crate) fn blob_room_bytes(blob: &[u8]) -> u64 {
    (size_of::<RawBlob>() + blob.len()) as u64
}

impl Record {
    /// Slot of a generation.
    pub fn slot(generation: Generation) -> usize {
        (generation.0 % 2) as usize
    }

    /// Encodes the record as sealed blocks. `sequence` must be higher than any in the slot before.
    pub fn encode(&self, sequence: u64) -> AlignedBytes {
        let header = RawRecord {
            head: Head::unsealed(RECORD_MAGIC),
            job_id: self.job_id,
            generation: self.generation.0,
            epoch: self.epoch.0,
            sequence,
            tile_count: self.versions.len() as u64,
            blob_count: self.blobs.len() as u32,
            born_confirmed: u32::from(self.born_confirmed),
            table_revision: self.table_revision,
            reserved: 0,
        };
        let versions: Vec<RawVersion> = self.versions.iter().map(to_raw).collect();
        let table: Vec<RawBlob> = self
            .blobs
            .iter()
            .map(|(rank, blob)| RawBlob {
                rank: rank.0,
                bytes: blob.len() as u32,
            })
            .collect();
        let mut parts = vec![header.as_bytes(), versions.as_bytes(), table.as_bytes()];
        parts.extend(self.blobs.iter().map(|(_, blob)| blob.as_slice()));
        sealed::seal(&parts)
    }

    /// Decodes blocks whose seal is sound; `None` for a void.
    fn decode(
        blocks: &AlignedBytes,
        job_id: u64,
        slot: usize,
        tile_count: usize,
    ) -> Result<Option<Self>, Unreadable> {
        let damaged = |what: &str| Unreadable::Damaged(what.into());
        let (header, rest) = RawRecord::ref_from_prefix(blocks.as_slice()).expect("a block");
        if header.job_id != job_id {
            return Err(damaged("it is another job's"));
        }
        let is_void = header.generation == 0;
        let of_slot = match is_void {
            true => header.epoch == slot as u64,
            false => Self::slot(Generation(header.generation)) == slot,
        };
        if !of_slot {
            return Err(damaged("it belongs to the other slot"));
        }
        if is_void {
            return match blocks.as_slice() == void(job_id, slot, header.sequence).as_slice() {
                true => Ok(None),
                false => Err(damaged("its checksum is right, but its fields are invalid")),
            };
        }
        let sound = header.tile_count == tile_count as u64
            && header.blob_count <= LOCAL_RANKS_MAX
            && header.born_confirmed <= 1
            && header.reserved == 0;
        if !sound {
            return Err(damaged("its checksum is right, but its fields are invalid"));
        }
        let (versions, rest) = <[RawVersion]>::ref_from_prefix_with_elems(rest, tile_count)
            .map_err(|_| damaged("its tiles do not fit"))?;
        let (table, mut rest) =
            <[RawBlob]>::ref_from_prefix_with_elems(rest, header.blob_count as usize)
                .map_err(|_| damaged("its blobs do not fit"))?;
        let versions = versions
            .iter()
            .map(from_raw)
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| damaged("a tile's place is invalid"))?;
        let mut blobs = Vec::with_capacity(table.len());
        for entry in table {
            let (blob, after) = rest
                .split_at_checked(entry.bytes as usize)
                .ok_or_else(|| damaged("a blob does not fit"))?;
            blobs.push((Rank(entry.rank), blob.to_vec()));
            rest = after;
        }
        Ok(Some(Self {
            job_id,
            generation: Generation(header.generation),
            epoch: Epoch(header.epoch),
            born_confirmed: header.born_confirmed == 1,
            table_revision: header.table_revision,
            versions: Arc::new(versions),
            blobs: Arc::new(blobs),
        }))
    }

    /// Encodes mark `mark` of this record, one block.
    pub fn encode_mark(&self, mark: Mark) -> AlignedBytes {
        let raw = RawMark {
            head: Head::unsealed(MARK_MAGIC),
            job_id: self.job_id,
            generation: self.generation.0,
            epoch: self.epoch.0,
            mark: mark as u32,
            reserved: 0,
        };
        sealed::seal(&[raw.as_bytes()])
    }

    /// Decodes a mark of this record from a sound block. A mark of another record is [`Unreadable::Blank`].
    pub fn decode_mark(&self, block: &AlignedBytes) -> Result<Mark, Unreadable> {
        let (raw, _) = RawMark::ref_from_prefix(block.as_slice()).expect("a block");
        let same = raw.job_id == self.job_id
            && raw.generation == self.generation.0
            && raw.epoch == self.epoch.0;
        if !same {
            return Err(Unreadable::Blank);
        }
        [Mark::Confirmed, Mark::Overwriting]
            .into_iter()
            .find(|mark| *mark as u32 == raw.mark && raw.reserved == 0)
            .ok_or_else(|| Unreadable::Damaged(format!("it says {}", raw.mark)))
    }
}

/// Content of one copy of a slot and its sequence number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SequencedRecord {
    /// Number of writes to the job's slots; of two sound copies the higher one counts.
    pub sequence: u64,
    /// `None` for a void.
    pub record: Option<Record>,
}

impl SequencedRecord {
    /// Decodes blocks whose seal is sound. Content of another job or slot is damage, because each slot starts with a void of
    /// its own.
    pub fn decode(
        blocks: &AlignedBytes,
        job_id: u64,
        slot: usize,
        tile_count: usize,
    ) -> Result<Self, Unreadable> {
        let record = Record::decode(blocks, job_id, slot, tile_count)?;
        let (header, _) = RawRecord::ref_from_prefix(blocks.as_slice()).expect("a block");
        Ok(Self {
            sequence: header.sequence,
            record,
        })
    }
}

/// Sequence number of a slot's first void.
pub const FIRST_SEQUENCE: u64 = 1;

/// Returns the blocks that make `slot` empty, with their offsets on the metadata device: a void in both copies, and no mark.
pub fn voiding(
    area: &Area,
    job_id: u64,
    slot: usize,
    sequence: u64,
) -> impl Iterator<Item = (u64, AlignedBytes)> {
    let voids = area
        .records(slot)
        .map(|at| (at, void(job_id, slot, sequence)));
    let marks = area.marks(slot);
    let marks = marks.map(|at| (at, AlignedBytes::zeroed(BLOCK as usize)));
    voids.into_iter().chain(marks)
}

fn void(job_id: u64, slot: usize, sequence: u64) -> AlignedBytes {
    let raw = RawRecord {
        head: Head::unsealed(RECORD_MAGIC),
        job_id,
        generation: 0,
        epoch: slot as u64,
        sequence,
        tile_count: 0,
        blob_count: 0,
        born_confirmed: 0,
        table_revision: 0,
        reserved: 0,
    };
    sealed::seal(&[raw.as_bytes()])
}

/// A record with its mark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MarkedRecord {
    pub record: Record,
    /// Mark beside the record.
    pub mark: Option<Mark>,
}

impl MarkedRecord {
    /// Whether every node has this generation.
    pub fn confirmed(&self) -> bool {
        // Tiles are overwritten only after a confirmation, so `Overwriting` implies it.
        self.record.born_confirmed || self.mark.is_some()
    }
}

/// Content of one of a job's two slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SlotContent {
    /// A void.
    Empty,
    /// Bytes that are no valid record: cut off by a power cut, or by a failed write.
    Unknown,
    /// The device cannot read the record, or the record was overwritten: perhaps the newest, acknowledged one, naming any
    /// extents. It stays until somebody discards it. Holds the reason.
    Unreadable(String),
    /// A record.
    Sound(MarkedRecord),
}

impl SlotContent {
    /// The record, if it is sound.
    pub fn sound(&self) -> Option<&MarkedRecord> {
        match self {
            Self::Sound(marked) => Some(marked),
            Self::Empty | Self::Unknown | Self::Unreadable(_) => None,
        }
    }
}

/// Returns the generations that can be resumed from, oldest first: the newest, and the one before it while the newest is not
/// confirmed. Once it is, the next generation overwrites the tiles of the one before.
pub fn resumable(slots: &[SlotContent; 2]) -> Vec<&MarkedRecord> {
    let mut sound: Vec<&MarkedRecord> = slots.iter().filter_map(SlotContent::sound).collect();
    sound.sort_by_key(|marked| marked.record.generation);
    if sound.len() == 2 && sound[1].confirmed() {
        sound.remove(0);
    }
    sound
}

fn to_raw(version: &Option<Version>) -> RawVersion {
    match version {
        None => RawVersion {
            generation: 0,
            checksum: 0,
            place: 0,
        },
        Some(version) => RawVersion {
            generation: version.generation.0,
            checksum: version.checksum,
            place: u32::from(version.which) + 1,
        },
    }
}

/// `None` for a version that no writer makes.
fn from_raw(raw: &RawVersion) -> Option<Option<Version>> {
    match raw.place {
        0 if raw.generation == 0 && raw.checksum == 0 => Some(None),
        1 | 2 => Some(Some(Version {
            generation: Generation(raw.generation),
            checksum: raw.checksum,
            which: (raw.place - 1) as u8,
        })),
        _ => None,
    }
}
