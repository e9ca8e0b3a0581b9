//! Structures with two copies. Reading takes the newer sound copy and notes what must be repaired.

use super::StoreError;
use super::sealed::{self, Unreadable};
use crate::blocks::Blocks;
use crate::io::AlignedBytes;

/// An unusable copy of a structure. The other copy is usable, or the structure was being written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// Path of the device.
    pub path: String,
    /// Offset of the copy.
    pub offset: u64,
    /// Name of the structure and its job.
    pub what: String,
    /// Defect of the copy.
    pub why: String,
    /// Consequence for the store.
    pub consequence: Consequence,
}

/// Consequence of an unusable copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Consequence {
    /// Nothing is lost: the other copy is used.
    Repaired,
    /// Neither copy of a record is whole, as after a power cut during a commit: the generation was not acknowledged.
    GenerationLost,
    /// A record that may be the newest cannot be read, or both its copies were overwritten: an administrator must decide about
    /// its job.
    Undecided,
    /// A left-over of an earlier metadata device, on a device that refuses writes.
    Superseded,
}

impl std::fmt::Display for Note {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let consequence = match self.consequence {
            Consequence::Repaired => "the other copy is used",
            Consequence::Superseded => {
                "it cannot be erased; the newer one on another device is used"
            }
            Consequence::GenerationLost => {
                "a commit was interrupted before it was acknowledged, or both copies were changed in place; the generation before it is used"
            }
            Consequence::Undecided => {
                "it may be the newest generation, so its job cannot be resumed and keeps its tiles until the record can be read or is discarded (`offloadd job discard-unreadable`)"
            }
        };
        let Self {
            path,
            offset,
            what,
            why,
            ..
        } = self;
        write!(f, "{what} at {offset} of {path}: {why}; {consequence}")
    }
}

#[derive(Clone, Debug)]
pub(super) struct Repair {
    pub(super) position: usize,
    pub(super) offset: u64,
    pub(super) blocks: AlignedBytes,
}

pub(super) struct Reader<'a, B> {
    pub(super) blocks: &'a mut B,
    pub(super) notes: Vec<Note>,
    pub(super) repairs: Vec<Repair>,
}

/// The content of one copy and its bytes.
pub(super) type Copy<T> = Result<(T, AlignedBytes), Unreadable>;

impl<B: Blocks> Reader<'_, B> {
    pub(super) fn copy<T>(
        &mut self,
        position: usize,
        offset: u64,
        bytes_max: u64,
        magic: [u8; 8],
        decode: impl Fn(&AlignedBytes) -> Result<T, Unreadable>,
    ) -> Copy<T> {
        let blocks = sealed::read(self.blocks, position, offset, bytes_max, magic)?;
        Ok((decode(&blocks)?, blocks))
    }

    /// Returns the sound copy with the greater key (the first of equals) and notes the other one for repair.
    pub(super) fn newest<T, K: Ord>(
        &mut self,
        what: &str,
        position: usize,
        offsets: [u64; 2],
        copies: [Copy<T>; 2],
        key: impl Fn(&T) -> K,
    ) -> Result<T, StoreError> {
        self.refuse_other_version(what, position, &copies)?;
        let path = self.blocks.path(position).to_owned();
        let [first, second] = copies;
        let (taken, blocks, stale) = match (first, second) {
            (Err(first), Err(second)) => {
                return Err(StoreError::Damaged {
                    what: what.into(),
                    path,
                    first: first.to_string(),
                    second: second.to_string(),
                });
            }
            (Ok((taken, blocks)), Err(why)) => {
                let why = why.to_string();
                self.note(position, offsets[1], what, why, Consequence::Repaired);
                (taken, blocks, 1)
            }
            (Err(why), Ok((taken, blocks))) => {
                let why = why.to_string();
                self.note(position, offsets[0], what, why, Consequence::Repaired);
                (taken, blocks, 0)
            }
            (Ok((first, first_blocks)), Ok((second, second_blocks))) => {
                if first_blocks.as_slice() == second_blocks.as_slice() {
                    return Ok(first);
                }
                let (taken, blocks, stale) = if key(&first) >= key(&second) {
                    (first, first_blocks, 1)
                } else {
                    (second, second_blocks, 0)
                };
                let why = "it is older than the other copy".to_owned();
                self.note(position, offsets[stale], what, why, Consequence::Repaired);
                (taken, blocks, stale)
            }
        };
        self.repairs.push(Repair {
            position,
            offset: offsets[stale],
            blocks,
        });
        Ok(taken)
    }

    /// Refuses a sound copy of another version: the store belongs to another release, whatever the other copy holds.
    pub(super) fn refuse_other_version<T>(
        &self,
        what: &str,
        position: usize,
        copies: &[Copy<T>; 2],
    ) -> Result<(), StoreError> {
        for copy in copies {
            if let Err(Unreadable::OtherVersion(version)) = copy {
                return Err(StoreError::OtherVersion {
                    what: what.to_owned(),
                    path: self.blocks.path(position).to_owned(),
                    version: *version,
                });
            }
        }
        Ok(())
    }

    pub(super) fn note(
        &mut self,
        position: usize,
        offset: u64,
        what: &str,
        why: String,
        consequence: Consequence,
    ) {
        self.notes.push(Note {
            path: self.blocks.path(position).to_owned(),
            offset,
            what: what.to_owned(),
            why,
            consequence,
        });
    }
}
