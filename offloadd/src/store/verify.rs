//! Reads everything a store holds, without changing it, and reports all damage.
//!
//! It checks the tiles of every generation that can be resumed from. The one before a confirmed newest is not checked, because
//! the next generation is being written over it. Beside an unreadable record nobody knows which generation is the newest, so
//! tiles that differ are counted and not called damaged.

use offload_api::BLOCK_BYTES;
use offload_api::checksum::checksum;
use offload_api::ids::{Generation, TileIndex};
use test_hooks::safeguard::{Safeguard, is_disabled};

use super::StoreError;
use super::definition::{JobName, Tile};
use super::dual_copy::Note;
use super::manifest::{self, Mark, MarkedRecord, SlotContent};
use super::recover::{self, RecoveredJob, RecoveredStore};
use crate::blocks::Blocks;
use crate::io::AlignedBytes;

/// Content of a store and its damage.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Jobs checked.
    pub job_count: usize,
    /// Versions of tiles read and compared.
    pub tile_count: usize,
    /// Bytes of these tiles.
    pub tile_bytes: u64,
    /// Tiles that are not what was committed.
    pub damaged_tiles: Vec<DamagedTile>,
    /// Unusable copies of the store's structures.
    pub notes: Vec<Note>,
    /// Jobs without durability that did not end in order; their tiles were not compared.
    pub unclean_jobs: Vec<(u32, JobName)>,
    /// Jobs with an unreadable record.
    pub undecided_jobs: Vec<UndecidedJob>,
}

/// A job with an unreadable record, perhaps the newest, after which the one before it was overwritten.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UndecidedJob {
    /// Owner.
    pub uid: u32,
    pub job: JobName,
    /// Newest readable generation; 0 if there is none.
    pub generation: Generation,
    /// Tiles that differ from the readable records: overwritten since, or damaged.
    pub differing_count: u64,
}

impl Report {
    /// Whether no damage was found.
    pub fn is_sound(&self) -> bool {
        self.damaged_tiles.is_empty() && self.notes.is_empty() && self.undecided_jobs.is_empty()
    }
}

/// A tile that is not what was committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DamagedTile {
    /// Path of the device.
    pub path: String,
    /// First byte of the extent.
    pub offset: u64,
    /// Owner of the job.
    pub uid: u32,
    pub job: JobName,
    /// Index in the job's table.
    pub tile: TileIndex,
    /// The tile in the job's definition.
    pub spec: Tile,
    /// Generation whose record was checked.
    pub generation: Generation,
    /// Generation that wrote the tile.
    pub written_by: Generation,
    /// Kind of the damage.
    pub damage: Damage,
}

/// Damage of a tile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Damage {
    /// The checksum does not match.
    Checksum {
        /// Checksum in the record.
        expected: u32,
        /// Checksum of the bytes.
        found: u32,
    },
    /// The device could not read the tile.
    Unreadable(String),
}

impl std::fmt::Display for DamagedTile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let spec = &self.spec;
        write!(
            f,
            "{} bytes at {} of {}: tile {} (unit {}, {:?}, element {}) of generation {} of job {} of uid {}, written by generation {}: ",
            spec.tile_bytes,
            self.offset,
            self.path,
            self.tile,
            spec.unit,
            spec.kind,
            spec.elem_offset,
            self.generation,
            self.job,
            self.uid,
            self.written_by
        )?;
        match &self.damage {
            Damage::Checksum { expected, found } => {
                write!(f, "checksum {found:08x} instead of {expected:08x}")
            }
            Damage::Unreadable(why) => f.write_str(why),
        }
    }
}

/// Checks the whole store on `blocks`. Call it only under the store's lock, or a running daemon's writes look like damage.
pub fn verify(blocks: &mut impl Blocks) -> Result<Report, StoreError> {
    verify_watched(blocks, &mut |_, _| {})
}

/// Like [`verify`], and calls `watch` after each tile with the bytes read and the bytes in all.
pub fn verify_watched(
    blocks: &mut impl Blocks,
    watch: &mut dyn FnMut(u64, u64),
) -> Result<Report, StoreError> {
    let store = recover::read(blocks)?;
    let total_bytes = store.jobs.iter().map(job_bytes).sum();
    let watch = &mut |done_bytes| watch(done_bytes, total_bytes);
    let mut report = Report {
        job_count: store.jobs.len(),
        notes: store.notes.clone(),
        ..Report::default()
    };
    for job in &store.jobs {
        verify_job(blocks, &store, job, &mut report, watch);
    }
    Ok(report)
}

/// Returns the generations whose tiles are compared.
fn compared(job: &RecoveredJob) -> impl Iterator<Item = &MarkedRecord> {
    let marked = manifest::resumable(&job.slots).into_iter();
    marked.filter(|marked| marked.mark != Some(Mark::Overwriting))
}

fn job_bytes(job: &RecoveredJob) -> u64 {
    let of = |marked: &MarkedRecord| -> u64 {
        let specs = job.table.definition.tiles().iter();
        let written = specs
            .zip(&*marked.record.versions)
            .filter(|(_, v)| v.is_some());
        written.map(|(spec, _)| u64::from(spec.tile_bytes)).sum()
    };
    compared(job).map(of).sum()
}

fn verify_job(
    blocks: &mut impl Blocks,
    store: &RecoveredStore,
    job: &RecoveredJob,
    report: &mut Report,
    watch: &mut dyn FnMut(u64),
) {
    if !job.clean() {
        report
            .unclean_jobs
            .push((job.entry.uid, job.entry.name.clone()));
    }
    let withheld = |slot: &SlotContent| matches!(slot, SlotContent::Unreadable(_));
    let undecided = job.slots.iter().any(withheld);
    let mut differing_count = 0;
    for marked in compared(job) {
        let specs = job.table.definition.tiles().iter();
        let places = specs.zip(&job.table.extents).zip(&*marked.record.versions);
        for (index, ((spec, extents), version)) in places.enumerate() {
            let Some(version) = version else { continue };
            let extent = extents[usize::from(version.which)];
            let device = &store[extent.device];
            let mut bytes = AlignedBytes::zeroed(spec.tile_bytes as usize);
            assert!(spec.tile_bytes % BLOCK_BYTES == 0);
            report.tile_count += 1;
            report.tile_bytes += u64::from(spec.tile_bytes);
            let read = blocks.read(device.position, extent.offset, &mut bytes);
            watch(report.tile_bytes);
            let damage = match read {
                Err(error) => Damage::Unreadable(error.to_string()),
                Ok(()) => {
                    let (expected, found) = (version.checksum, checksum(bytes.as_slice()));
                    if expected == found || is_disabled(Safeguard::Checksum) {
                        continue;
                    }
                    if undecided {
                        differing_count += 1;
                        continue;
                    }
                    Damage::Checksum { expected, found }
                }
            };
            report.damaged_tiles.push(DamagedTile {
                path: device.path.clone(),
                offset: extent.offset,
                uid: job.entry.uid,
                job: job.entry.name.clone(),
                tile: TileIndex(index as u32),
                spec: *spec,
                generation: marked.record.generation,
                written_by: version.generation,
                damage,
            });
        }
    }
    if undecided {
        let newest = manifest::resumable(&job.slots).last().copied();
        report.undecided_jobs.push(UndecidedJob {
            uid: job.entry.uid,
            job: job.entry.name.clone(),
            generation: newest.map_or(Generation(0), |marked| marked.record.generation),
            differing_count,
        });
    }
}
