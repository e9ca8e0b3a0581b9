//! Bytes written to a device since it was formatted, in total and by job: the measure of a drive's endurance. For people only: no decision depends on
//! it, so a lost copy costs only a number.
//!
//! Written from time to time to two places in turn: an interrupted write leaves the other, at most a minute older. It causes no
//! flush of its own.
//!
//! The bytes that a job wrote to a device are stored on that device and leave with it. Therefore each device also holds the jobs'
//! totals over all devices, as rows marked with [`TOTAL`].

use std::collections::BTreeMap;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::catalog::JOBS_MAX;
use super::sealed::{self, Head, Unreadable};
use super::superblock::StoreId;
use super::{WEAR_BYTES_MAX, WEAR_OFFSETS};
use crate::blocks::Blocks;
use crate::io::AlignedBytes;

pub(crate) const MAGIC: [u8; 8] = *b"OFFLWEA1";

/// Bytes written to one device since it was formatted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wear {
    /// Number of times it was stored; the higher one of two sound copies is the newer.
    pub sequence: u64,
    /// Bytes written by everybody, the daemon's own structures included.
    pub written_bytes: u64,
    /// Bytes of tiles, by `job_id`.
    pub jobs: BTreeMap<u64, u64>,
    /// Bytes of tiles by `job_id`, to all devices of the store and those that had left it at the time.
    pub totals: BTreeMap<u64, u64>,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawWearHeader {
    head: Head,
    store: [u8; 16],
    device_index: u32,
    row_count: u32,
    sequence: u64,
    written_bytes: u64,
    reserved: u64,
}

/// Marks the `job_id` of a row as the job's total. Jobs are numbered from 1.
const TOTAL: u64 = 1 << 63;

/// One row of each kind for every job.
const ROWS_MAX: usize = 2 * JOBS_MAX;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawJob {
    job_id: u64,
    written_bytes: u64,
}

const _: () = assert!(size_of::<RawWearHeader>() == 80 && size_of::<RawJob>() == 16);
const _: () =
    assert!((size_of::<RawWearHeader>() + ROWS_MAX * size_of::<RawJob>()) as u64 <= WEAR_BYTES_MAX);

impl Wear {
    /// Returns the offset of the next copy and its sealed blocks, at most [`WEAR_BYTES_MAX`]. With more than [`JOBS_MAX`] jobs,
    /// those that wrote least are left out.
    pub fn encode(&self, store: StoreId, device_index: u32) -> (u64, AlignedBytes) {
        let mut rows = most_worn(&self.jobs);
        let totals = most_worn(&self.totals).into_iter();
        rows.extend(totals.map(|(job_id, written_bytes)| (job_id | TOTAL, written_bytes)));
        let header = RawWearHeader {
            head: Head::unsealed(MAGIC),
            store: store.0,
            device_index,
            row_count: rows.len() as u32,
            sequence: self.sequence,
            written_bytes: self.written_bytes,
            reserved: 0,
        };
        let rows: Vec<_> = (rows.into_iter())
            .map(|(job_id, written_bytes)| RawJob {
                job_id,
                written_bytes,
            })
            .collect();
        let offset = WEAR_OFFSETS[(self.sequence % 2) as usize];
        (offset, sealed::seal(&[header.as_bytes(), rows.as_bytes()]))
    }

    /// Decodes blocks whose seal is sound.
    pub fn decode(
        blocks: &AlignedBytes,
        store: StoreId,
        device_index: u32,
    ) -> Result<Self, Unreadable> {
        let (header, rest) = RawWearHeader::ref_from_prefix(blocks.as_slice()).expect("a block");
        if header.store != store.0 || header.device_index != device_index {
            // Left by the store that was here before.
            return Err(Unreadable::Blank);
        }
        let nonsense =
            || Unreadable::Damaged("its checksum is right, but its fields are invalid".into());
        let row_count = header.row_count as usize;
        if header.reserved != 0 || row_count > ROWS_MAX {
            return Err(nonsense());
        }
        let (rows, rest) =
            <[RawJob]>::ref_from_prefix_with_elems(rest, row_count).map_err(|_| nonsense())?;
        if rest.iter().any(|&byte| byte != 0) {
            return Err(nonsense());
        }
        Ok(Self {
            sequence: header.sequence,
            written_bytes: header.written_bytes,
            jobs: (rows.iter().filter(|row| row.job_id & TOTAL == 0))
                .map(|row| (row.job_id, row.written_bytes))
                .collect(),
            totals: (rows.iter().filter(|row| row.job_id & TOTAL != 0))
                .map(|row| (row.job_id & !TOTAL, row.written_bytes))
                .collect(),
        })
    }

    /// Reads the newer copy of a device; the default if neither is sound.
    pub fn read(
        blocks: &mut impl Blocks,
        position: usize,
        store: StoreId,
        device_index: u32,
    ) -> Self {
        let copies = WEAR_OFFSETS.map(|offset| {
            let sealed = sealed::read(blocks, position, offset, WEAR_BYTES_MAX, MAGIC)?;
            Self::decode(&sealed, store, device_index)
        });
        let sound = copies.into_iter().filter_map(Result::ok);
        sound.max_by_key(|wear| wear.sequence).unwrap_or_default()
    }
}

/// Bytes that each job ever wrote, the most that any device of the store knows.
pub fn totals<'a>(devices: impl Iterator<Item = &'a Wear> + Clone) -> BTreeMap<u64, u64> {
    let mut totals = BTreeMap::<u64, u64>::new();
    for (job_id, written_bytes) in devices.clone().flat_map(|wear| &wear.jobs) {
        let known = totals.entry(*job_id).or_default();
        *known = known.saturating_add(*written_bytes);
    }
    for (job_id, total) in devices.flat_map(|wear| &wear.totals) {
        let known = totals.entry(*job_id).or_default();
        *known = (*known).max(*total);
    }
    totals
}

/// Returns at most [`JOBS_MAX`] jobs, by number.
fn most_worn(jobs: &BTreeMap<u64, u64>) -> Vec<(u64, u64)> {
    let mut rows: Vec<_> = jobs.iter().map(|(id, bytes)| (*id, *bytes)).collect();
    rows.sort_by_key(|(_, written_bytes)| std::cmp::Reverse(*written_bytes));
    rows.truncate(JOBS_MAX);
    rows.sort();
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    const STORE: StoreId = StoreId([7; 16]);

    fn worn() -> Wear {
        Wear {
            sequence: 6,
            written_bytes: 0x0102_0304_0506_0708,
            jobs: [(3, 30), (9, 90)].into(),
            totals: BTreeMap::new(),
        }
    }

    #[test]
    fn totals_are_rows_that_those_of_before_take_for_other_jobs() {
        let wear = Wear {
            totals: [(3, 50), (4, 40)].into(),
            ..worn()
        };
        let (_, blocks) = wear.encode(STORE, 2);
        let bytes = blocks.as_slice();
        assert_eq!(bytes[52..56], [4, 0, 0, 0]);
        // Behind the jobs, which stay where they were.
        assert_eq!(
            bytes[80..112],
            worn().encode(STORE, 2).1.as_slice()[80..112]
        );
        assert_eq!(
            bytes[112..128],
            [3, 0, 0, 0, 0, 0, 0, 0x80, 50, 0, 0, 0, 0, 0, 0, 0]
        );
        assert_eq!(Wear::decode(&blocks, STORE, 2), Ok(wear.clone()));
        // A device stored earlier than the other, and one without totals.
        let other = Wear {
            jobs: [(3, 5), (9, 9)].into(),
            totals: [(3, 40)].into(),
            ..worn()
        };
        let known = totals([&wear, &other].into_iter());
        assert_eq!(known, [(3, 50), (4, 40), (9, 99)].into());
    }

    #[test]
    fn the_bytes_are_what_they_were() {
        let (offset, blocks) = worn().encode(STORE, 2);
        assert_eq!((offset, blocks.len()), (896 << 10, 4096));
        let bytes = blocks.as_slice();
        assert_eq!(&bytes[..8], b"OFFLWEA1");
        assert_eq!(&bytes[32..48], [7; 16]);
        assert_eq!(&bytes[48..56], [2, 0, 0, 0, 2, 0, 0, 0]);
        assert_eq!(&bytes[56..64], [6, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(&bytes[64..72], [8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!(&bytes[72..80], [0; 8]);
        assert_eq!(
            &bytes[80..96],
            [3, 0, 0, 0, 0, 0, 0, 0, 30, 0, 0, 0, 0, 0, 0, 0]
        );
        assert_eq!(Wear::decode(&blocks, STORE, 2), Ok(worn()));
        // The next write leaves the first copy in place.
        let next = Wear {
            sequence: 7,
            ..worn()
        };
        assert_eq!(next.encode(STORE, 2).0, 960 << 10);
    }

    #[test]
    fn another_stores_and_another_devices_wear_is_not_ours() {
        let (_, blocks) = worn().encode(STORE, 2);
        assert_eq!(
            Wear::decode(&blocks, StoreId([8; 16]), 2),
            Err(Unreadable::Blank)
        );
        assert_eq!(Wear::decode(&blocks, STORE, 1), Err(Unreadable::Blank));
        let mut nonsense = blocks.clone();
        nonsense.as_mut_slice()[53] = 0xff;
        assert!(matches!(
            Wear::decode(&nonsense, STORE, 2),
            Err(Unreadable::Damaged(_))
        ));
    }

    #[test]
    fn of_too_many_jobs_those_that_wrote_most_are_kept() {
        let many = Wear {
            jobs: (0..2 * JOBS_MAX as u64).map(|id| (id, id)).collect(),
            totals: (0..2 * JOBS_MAX as u64).map(|id| (id, id)).collect(),
            ..worn()
        };
        let (_, blocks) = many.encode(STORE, 0);
        assert!(blocks.len() as u64 <= WEAR_BYTES_MAX);
        let Wear { jobs, totals, .. } = Wear::decode(&blocks, STORE, 0).unwrap();
        for kept in [jobs, totals] {
            assert_eq!(kept.len(), JOBS_MAX);
            assert_eq!(
                kept.first_key_value(),
                Some((&(JOBS_MAX as u64), &(JOBS_MAX as u64)))
            );
        }
    }
}
