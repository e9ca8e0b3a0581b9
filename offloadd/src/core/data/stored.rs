//! State of a job on the devices: its definition, its two record slots, and what each extent of its tiles holds.

use std::collections::BTreeSet;

use offload_api::ids::{Generation, TileIndex};
use test_hooks::safeguard::{Safeguard, is_disabled};

use crate::core::{GenerationRecord, JobRecord};
use crate::io::AlignedBytes;
use crate::store::catalog::Entry;
use crate::store::definition::Durability;
use crate::store::manifest::{
    Mark, MarkedRecord, Record, SlotContent, Version, resumable, voiding,
};
use crate::store::tile_table::TileTable;

/// State of a job on the devices.
pub(super) struct StoredJob {
    pub(super) entry: Entry,
    pub(super) table: TileTable,
    pub(super) slots: [SlotContent; 2],
    /// Highest sequence number written to the record slots.
    sequence: u64,
    pub(super) tiles: Vec<TileState>,
    /// Tiles whose last write failed.
    pub(super) failed_count: usize,
    /// Extents, by tile and which of its two, whose damage a process reported. A write of the extent removes it.
    pub(super) damaged: BTreeSet<(TileIndex, u8)>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TileState {
    /// Version in the generation that was resumed or committed last.
    pub(super) committed: Option<Version>,
    /// Version written since the last commit.
    pub(super) working: Option<Version>,
    pub(super) activity: Activity,
    /// Whether the last write failed, so that the content is unknown.
    pub(super) failed: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Activity {
    #[default]
    Idle,
    Reading {
        count: u32,
    },
    Writing,
}

/// Content of an extent of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::core) enum Holds {
    /// Nothing that will be read.
    Nothing,
    /// Bytes that a record names, with their checksum if it is known.
    Bytes(Option<u32>),
    /// Bytes that are being written, or were written since the last commit.
    Moving,
}

impl TileState {
    pub(super) fn newest(&self) -> Option<Version> {
        self.working.or(self.committed)
    }
}

impl StoredJob {
    pub(super) fn new(
        entry: Entry,
        table: TileTable,
        slots: [SlotContent; 2],
        sequence: u64,
    ) -> Self {
        let tiles = vec![TileState::default(); table.extents.len()];
        Self {
            entry,
            table,
            slots,
            sequence,
            tiles,
            failed_count: 0,
            damaged: BTreeSet::new(),
        }
    }

    pub(super) fn durability(&self) -> Durability {
        self.table.definition.durability()
    }

    /// Newest committed generation; 0 if there is none.
    pub(super) fn newest(&self) -> Generation {
        resumable(&self.slots)
            .last()
            .map_or(Generation(0), |marked| marked.record.generation)
    }

    pub(super) fn newest_marked(&self) -> Option<&MarkedRecord> {
        resumable(&self.slots).last().copied()
    }

    /// Returns the content of the record slot of `generation`.
    pub(super) fn slot_of(&mut self, generation: Generation) -> &mut SlotContent {
        &mut self.slots[Record::slot(generation)]
    }

    /// Returns the sequence number of the next write to a record slot.
    pub(super) fn next_sequence(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence
    }

    /// Returns the writes that make `slots` empty.
    pub(super) fn voiding(&mut self, slots: &[usize]) -> Vec<(u64, AlignedBytes)> {
        let sequence = self.next_sequence();
        let Entry { area, job_id, .. } = &self.entry;
        let of_slot = |slot: &usize| voiding(area, *job_id, *slot, sequence);
        slots.iter().flat_map(of_slot).collect()
    }

    pub(super) fn clean(&self) -> bool {
        let newest = self.newest_marked();
        newest.is_none_or(|marked| marked.mark != Some(Mark::Overwriting))
    }

    /// Reason why the job's tiles do not move and it cannot be resumed: a record is unreadable.
    pub(super) fn unreadable(&self) -> Option<&str> {
        self.slots.iter().find_map(|slot| match slot {
            SlotContent::Unreadable(why) => Some(why.as_str()),
            SlotContent::Empty | SlotContent::Unknown | SlotContent::Sound(_) => None,
        })
    }

    /// Returns the content of the first or second extent of a tile. `recorded` are the generations that can be resumed. If a
    /// slot is [`SlotContent::Unknown`], a record that cannot be read now is not considered.
    pub(super) fn holds(&self, recorded: &[&MarkedRecord], tile: usize, which: u8) -> Holds {
        let state = &self.tiles[tile];
        let newest = recorded.last();
        let clean = newest.is_none_or(|marked| marked.mark != Some(Mark::Overwriting));
        let mut recorded = (recorded.iter()).filter_map(|marked| marked.record.versions[tile]);
        if self.durability() == Durability::None {
            let newest = state.newest().or(recorded.next_back());
            return match (state.activity, newest) {
                (Activity::Writing, _) => Holds::Moving,
                (_, None) => Holds::Nothing,
                (_, Some(version)) => {
                    // Written in place by a process that did not end in order: the bytes belong to no single generation.
                    let known = (clean || state.newest().is_some()) && !state.failed;
                    Holds::Bytes(known.then_some(version.checksum))
                }
            };
        }
        let writing = state.activity == Activity::Writing
            && free_extent(self.durability(), state.committed) == which;
        let written = state.working.is_some_and(|version| version.which == which);
        if writing || written {
            return Holds::Moving;
        }
        (recorded.chain(state.committed))
            .find(|version| version.which == which)
            .map_or(Holds::Nothing, |version| {
                Holds::Bytes(Some(version.checksum))
            })
    }

    pub(super) fn to_job_record(&self) -> JobRecord {
        let generation = |marked: &MarkedRecord| GenerationRecord {
            generation: marked.record.generation,
            confirmed: marked.confirmed(),
            blobs: marked.record.blobs.clone(),
        };
        JobRecord {
            definition: self.table.definition.clone(),
            generations: resumable(&self.slots).into_iter().map(generation).collect(),
            clean: self.clean(),
        }
    }
}

/// Returns the extent for a write: the one that does not hold the committed version.
pub(super) fn free_extent(durability: Durability, committed: Option<Version>) -> u8 {
    let used = committed.map(|version| version.which);
    match (durability, used) {
        (Durability::None, _) | (_, None) => 0,
        (_, Some(used)) if is_disabled(Safeguard::OutOfPlace) => used,
        (_, Some(used)) => 1 - used,
    }
}
