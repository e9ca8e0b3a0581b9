//! Everything of ours stands twice. Reading takes the sound copy, the newer of two, and notes what must be mended.

use super::StoreError;
use super::sealed::{self, Unreadable};
use crate::blocks::Blocks;
use crate::io::AlignedBytes;

/// A copy of a structure that cannot be used. The other one can, or the structure was being written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// Device.
    pub path: String,
    /// Of the copy.
    pub offset: u64,
    /// Which structure, of which job.
    pub what: String,
    /// What is wrong with it.
    pub why: String,
    /// What it means.
    pub consequence: Consequence,
}

/// What an unusable copy means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Consequence {
    /// The other copy serves.
    Mended,
    /// Neither copy of a record is whole, as power loss during a commit leaves them: it was not acknowledged.
    GenerationLost,
    /// A record that may be the newest is not given by the device, or both copies were written over: an administrator must
    /// decide what becomes of its job.
    Undecided,
    /// Left from when the home moved, on a device that does not let go of it.
    Superseded,
}

impl std::fmt::Display for Note {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let consequence = match self.consequence {
            Consequence::Mended => "the other copy serves",
            Consequence::Superseded => {
                "it cannot be zeroed; the newer one on another device serves"
            }
            Consequence::GenerationLost => {
                "a commit was cut off before it was acknowledged, or both copies were changed in place; the generation before it serves"
            }
            Consequence::Undecided => {
                "it may be the newest generation: its job is not gone on from, and its tiles stay where they are, until it can be read or is given up (`offloadd give-up`)"
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

/// One copy: what it says and its bytes.
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

    /// Of two copies the sound one with the greater key (the first of equals); the other one is to be mended.
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
                self.note(position, offsets[1], what, why, Consequence::Mended);
                (taken, blocks, 1)
            }
            (Err(why), Ok((taken, blocks))) => {
                let why = why.to_string();
                self.note(position, offsets[0], what, why, Consequence::Mended);
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
                self.note(position, offsets[stale], what, why, Consequence::Mended);
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

    /// Sound and of another version: the store is another daemon's, whatever the other copy says.
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
