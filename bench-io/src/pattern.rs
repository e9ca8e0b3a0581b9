//! Blocks that contain their own position, so that a wrong block shows where it came from.
//!
//! ```text
//!   each 4096 bytes   | "offloadp" | pass | device | offset | noise made from these three ... |
//! ```
//!
//! A drive can return another position's block (misdirected), an earlier pass's (stale or lost writes), zeros, or
//! damaged data.

use std::fmt;

use offloadd::api::BLOCK_BYTES;
use serde::Serialize;

use crate::random_data;

/// Unit of checks: the smallest unit that a device writes whole.
const BLOCK: usize = BLOCK_BYTES as usize;
const MAGIC: u64 = u64::from_le_bytes(*b"offloadp");
const WORDS: usize = BLOCK / 8;

/// Generates and checks the data of one pass over a device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pattern {
    /// Differs between passes and runs, so that stale data is detected.
    pub(crate) pass: u64,
}

/// A wrong block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct WrongBlock {
    /// Index of the target's file; through a daemon, the job's number.
    pub(crate) device: u64,
    /// Offset from the start of the file or the first tile.
    pub(crate) offset: u64,
    pub(crate) found: Found,
}

/// Actual content of the block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Found {
    Zeros,
    /// A valid block of another position.
    OtherPlace {
        device: u64,
        offset: u64,
    },
    /// A valid block of this position and another pass.
    OtherPass {
        pass: u64,
    },
    /// Offset of the first wrong byte in the block.
    Damage {
        byte: usize,
    },
    /// Not a block of this program.
    Foreign,
}

/// Wrong blocks: all are counted, the first ones are kept.
#[derive(Debug, Default)]
pub(crate) struct WrongBlocks {
    pub(crate) kept: Vec<WrongBlock>,
    pub(crate) count: u64,
}

impl WrongBlocks {
    /// 64 MiB of entries.
    pub(crate) const KEPT_MAX: usize = 1 << 20;

    pub(crate) fn add(&mut self, other: Self) {
        let room = Self::KEPT_MAX - self.kept.len();
        self.kept.extend(other.kept.into_iter().take(room));
        self.count += other.count;
    }
}

impl From<Vec<WrongBlock>> for WrongBlocks {
    fn from(kept: Vec<WrongBlock>) -> Self {
        let count = kept.len() as u64;
        Self { kept, count }
    }
}

impl fmt::Display for WrongBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at {}: ", self.offset)?;
        match self.found {
            Found::Zeros => f.write_str("zeros"),
            Found::OtherPlace { device, offset } => {
                write!(f, "the bytes of offset {offset} of device {device}")
            }
            Found::OtherPass { pass } => write!(f, "the bytes of another pass ({pass})"),
            Found::Damage { byte } => write!(f, "damaged from byte {byte} on"),
            Found::Foreign => f.write_str("bytes that were never written here"),
        }
    }
}

impl Pattern {
    /// Fills whole blocks for `offset` of `device`.
    pub(crate) fn fill(&self, bytes: &mut [u8], device: u64, offset: u64) {
        for (index, block) in bytes.chunks_exact_mut(BLOCK).enumerate() {
            let words = self.words(device, offset + (index * BLOCK) as u64);
            for (into, word) in block.chunks_exact_mut(8).zip(words) {
                into.copy_from_slice(&word.to_le_bytes());
            }
        }
    }

    /// Finds every block of `bytes` that is not the one of its position from `offset` of `device`.
    pub(crate) fn check(&self, bytes: &[u8], device: u64, offset: u64) -> Vec<WrongBlock> {
        let mut wrong = Vec::new();
        for (index, block) in bytes.chunks_exact(BLOCK).enumerate() {
            let offset = offset + (index * BLOCK) as u64;
            if differs(block, self.words(device, offset)).is_some() {
                wrong.push(WrongBlock {
                    device,
                    offset,
                    found: self.explain(block, device, offset),
                });
            }
        }
        wrong
    }

    fn words(&self, device: u64, offset: u64) -> impl Iterator<Item = u64> + use<> {
        let head = [MAGIC, self.pass, device, offset];
        let mixed = head.iter().fold(0, |sum: u64, word| {
            sum.rotate_left(23) ^ word.wrapping_mul(0x9E37_79B9_7F4A_7C15)
        });
        let tail = std::iter::successors(Some(random_data::next(mixed | 1)), |&state| {
            Some(random_data::next(state))
        });
        head.into_iter().chain(tail.take(WORDS - head.len()))
    }

    fn explain(&self, block: &[u8], device: u64, offset: u64) -> Found {
        if block.iter().all(|&byte| byte == 0) {
            return Found::Zeros;
        }
        let word = |index: usize| {
            let bytes = &block[8 * index..8 * index + 8];
            u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
        };
        let (pass, its_device, its_offset) = (word(1), word(2), word(3));
        let whole = differs(block, Self { pass }.words(its_device, its_offset)).is_none();
        match whole {
            true if (its_device, its_offset) != (device, offset) => Found::OtherPlace {
                device: its_device,
                offset: its_offset,
            },
            true => Found::OtherPass { pass },
            false
                if word(0) == MAGIC
                    || (pass, its_device, its_offset) == (self.pass, device, offset) =>
            {
                let byte = differs(block, self.words(device, offset));
                Found::Damage {
                    byte: byte.expect("it differs"),
                }
            }
            false => Found::Foreign,
        }
    }
}

/// Index of the first byte of `block` that differs from `words`.
fn differs(block: &[u8], words: impl Iterator<Item = u64>) -> Option<usize> {
    for (index, (bytes, word)) in block.chunks_exact(8).zip(words).enumerate() {
        let expected = word.to_le_bytes();
        if bytes != expected {
            let within = bytes.iter().zip(expected).position(|(a, b)| *a != b);
            return Some(8 * index + within.expect("they differ"));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drive_that_is_wrong_everywhere_is_counted_in_bounded_memory() {
        let wrong = |count| {
            let block = WrongBlock {
                device: 0,
                offset: 0,
                found: Found::Zeros,
            };
            WrongBlocks::from(vec![block; count])
        };
        let mut all = WrongBlocks::default();
        for part in [5, WrongBlocks::KEPT_MAX - 2, 7] {
            all.add(wrong(part));
        }
        assert_eq!(all.count, WrongBlocks::KEPT_MAX as u64 + 10);
        assert_eq!(all.kept.len(), WrongBlocks::KEPT_MAX);
    }

    #[test]
    fn every_way_in_which_a_block_can_be_wrong_has_its_name() {
        let pattern = Pattern { pass: 7 };
        let mut good = vec![0; 4 * BLOCK];
        pattern.fill(&mut good, 1, 1 << 20);
        assert_eq!(pattern.check(&good, 1, 1 << 20), []);

        let found = |bytes: &[u8]| {
            let wrong = pattern.check(bytes, 1, 1 << 20);
            assert_eq!(wrong.len(), 1, "{wrong:?}");
            assert_eq!(wrong[0].offset, (1 << 20) + 2 * BLOCK as u64);
            wrong[0].found.clone()
        };
        let with = |block: &[u8]| {
            let mut bytes = good.clone();
            bytes[2 * BLOCK..3 * BLOCK].copy_from_slice(block);
            bytes
        };
        assert_eq!(found(&with(&[0; BLOCK])), Found::Zeros);
        assert_eq!(found(&with(&[9; BLOCK])), Found::Foreign);
        let other = Found::OtherPlace {
            device: 1,
            offset: 1 << 20,
        };
        assert_eq!(found(&with(&good[..BLOCK])), other);
        let mut old = vec![0; BLOCK];
        Pattern { pass: 6 }.fill(&mut old, 1, (1 << 20) + 2 * BLOCK as u64);
        assert_eq!(found(&with(&old)), Found::OtherPass { pass: 6 });
        let mut flipped = good.clone();
        flipped[2 * BLOCK + 777] ^= 4;
        assert_eq!(found(&flipped), Found::Damage { byte: 777 });
    }
}
