//! Reads one job: the places of its tiles, its two records, and whether their tiles are being overwritten.

use offload_api::ids::Generation;

use super::RecoveredDevice;
use crate::blocks::Blocks;
use crate::io::AlignedBytes;
use crate::store::catalog::Entry;
use crate::store::definition::Durability;
use crate::store::dual_copy::{Consequence, Copy, Reader};
use crate::store::manifest::{self, Mark, MarkedRecord, Record, SequencedRecord, SlotContent};
use crate::store::sealed::{self, Unreadable};
use crate::store::tile_table::{self, TileTable};
use crate::store::{BLOCK, DATA_OFFSET, StoreError};

impl<B: Blocks> Reader<'_, B> {
    pub(super) fn table(
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
                    return Err(Unreadable::Damaged(
                        "it is not the one in the catalog".into(),
                    ));
                }
                Ok(table)
            };
            self.copy(position, offset, bytes, tile_table::MAGIC, decode)
        });
        let what = format!("definition of {}", of_job(entry));
        self.newest(&what, position, offsets, copies, |table| table.revision)
    }

    /// Reads `slot`, and raises `sequence` to that of its content.
    pub(super) fn slot(
        &mut self,
        position: usize,
        entry: &Entry,
        table: &TileTable,
        slot: usize,
        sequence: &mut u64,
    ) -> Result<SlotContent, StoreError> {
        let tile_count = table.extents.len();
        let offsets = entry.area.records(slot);
        let bytes_max = entry.area.record_bytes_max;
        let copies = offsets.map(|offset| {
            let decode = |blocks: &AlignedBytes| {
                SequencedRecord::decode(blocks, entry.job_id, slot, tile_count)
            };
            self.copy(position, offset, bytes_max, manifest::RECORD_MAGIC, decode)
        });
        let what = format!("record of {}, slot {slot}", of_job(entry));
        self.refuse_other_version(&what, position, &copies)?;
        if let [Err(first), Err(second)] = &copies {
            // An interrupted commit leaves both copies torn at worst. Anything else was caused by a drive, perhaps to an
            // acknowledged generation.
            let torn = |why: &Unreadable| matches!(why, Unreadable::Torn { .. });
            let cut_off = torn(first) && torn(second);
            let consequence = match cut_off {
                true => Consequence::GenerationLost,
                false => Consequence::Undecided,
            };
            for (why, offset) in [first, second].into_iter().zip(offsets) {
                self.note(position, offset, &what, in_slot(why), consequence);
            }
            return Ok(match cut_off {
                true => SlotContent::Unknown,
                false => SlotContent::Unreadable(format!(
                    "{what}: {}; {}",
                    in_slot(first),
                    in_slot(second)
                )),
            });
        }
        let found = self.newest(&what, position, offsets, copies, |found| found.sequence)?;
        *sequence = found.sequence.max(*sequence);
        let Some(record) = found.record else {
            return Ok(SlotContent::Empty);
        };
        if table.revision < record.table_revision {
            return Err(StoreError::Damaged {
                what: format!("definition of {}", of_job(entry)),
                path: self.blocks.path(position).to_owned(),
                first: format!("it has revision {}", table.revision),
                second: format!("{what} was written under {}", record.table_revision),
            });
        }
        let mark = self.mark(position, entry, table, &record, slot)?;
        Ok(SlotContent::Sound(MarkedRecord { record, mark }))
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
        self.refuse_other_version(&what, position, &copies)?;
        if copies.iter().all(Result::is_err) {
            // Never written, of an older record, or interrupted before it was acknowledged: the weaker state is the true one.
            // Unsound bytes are reported all the same.
            let withheld = |copy: &Copy<_>| matches!(copy, Err(Unreadable::Device(_)));
            let in_place = table.definition.durability() == Durability::None;
            for (copy, offset) in copies.iter().zip(offsets) {
                if let Err(why) = copy
                    && !matches!(why, Unreadable::Blank)
                {
                    let why = why.to_string();
                    self.note(position, offset, &what, why, Consequence::GenerationLost);
                }
            }
            // An unreadable copy may say that the tiles were being overwritten. Beside a copy that was never written it does
            // not, because both are durable before tiles are overwritten.
            let blank = |copy: &Copy<_>| matches!(copy, Err(Unreadable::Blank));
            let overwriting = in_place && copies.iter().any(withheld) && !copies.iter().any(blank);
            return Ok(overwriting.then_some(Mark::Overwriting));
        }
        self.newest(&what, position, offsets, copies, |mark| *mark as u32)
            .map(Some)
    }
}

/// Checks, before it is read, that the area lies in the data of its device and can hold what its own numbers claim.
pub(super) fn check_area(
    entry: &Entry,
    metadata_device: &RecoveredDevice,
) -> Result<(), StoreError> {
    let area = &entry.area;
    let fits = area.offset >= DATA_OFFSET
        && area.definition_bytes > 0
        && area.definition_bytes <= tile_table::BYTES_MAX
        && area.record_bytes_max > 0
        && area.record_bytes_max <= manifest::BYTES_MAX
        && area.offset + area.bytes() <= DATA_OFFSET + metadata_device.superblock.data_bytes;
    if fits {
        return Ok(());
    }
    Err(StoreError::Contradiction(format!(
        "the area of {} does not lie in {}",
        of_job(entry),
        metadata_device.path
    )))
}

/// Describes why a slot is unusable; zeros are damage there.
fn in_slot(why: &Unreadable) -> String {
    match why {
        Unreadable::Blank => "it was overwritten with zeros".into(),
        why => why.to_string(),
    }
}

fn of_job(entry: &Entry) -> String {
    format!("job {} of uid {}", entry.name, entry.uid)
}

fn mark_of(entry: &Entry, generation: Generation) -> String {
    format!("mark of generation {generation} of {}", of_job(entry))
}
