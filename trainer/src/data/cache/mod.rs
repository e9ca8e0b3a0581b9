//! The tokens of a run on a drive, made once: read again in ranges, so that they are never whole in memory.
//!
//! ```text
//!   0       header: sixteen u64: magic, version, key, bytes of an element, whether some do not count, elements for training,
//!           elements held out, documents, fingerprint of the elements, elements that count, crc32c of the table, four zeros,
//!           crc32c of all before it
//!   4096    elements: training, then held out. Token ids; the highest bit is set where a token is no target of the loss
//!   ...     table: crc32c of every 64 KiB of elements, u32 each
//! ```
//!
//! All little endian. A file is called KEY.tokens; the key follows from the files that were read, the tokenizer and the settings,
//! so one that exists is the right one. It appears whole or not at all, and nothing waits for the drive: what power loss takes
//! fails its checksums, and is made again.

mod format;
mod hold;
mod stored;
mod write;

pub(super) use format::Header;
pub(super) use hold::{Claim, claim};
pub(super) use stored::Stored;
pub(super) use write::Writer;

/// Of elements, for one checksum: what a window costs to read at least.
const BLOCK_BYTES: usize = 64 << 10;
/// Where elements begin.
const ELEMENTS_AT: u64 = 4096;

/// Bytes of an element for ids below `ids_end`, with a bit for what does not count if `masked`.
pub(super) fn elem_bytes(ids_end: u64, masked: bool) -> usize {
    let spare = u32::from(masked);
    match ids_end {
        end if end <= 1 << (8 - spare) => 1,
        end if end <= 1 << (16 - spare) => 2,
        _ => 4,
    }
}

#[cfg(test)]
mod tests;
