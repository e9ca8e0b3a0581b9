//! Token files: a run's tokens on a drive, made once and read in ranges, so that they are never in memory as
//! a whole.
//!
//! ```text
//!   0       header: sixteen u64: magic, version, key, bytes of an element, documents longer than a window that were divided,
//!           training elements, validation elements, documents, fingerprint of the elements, elements that count, crc32c of the
//!           table, padding elements, documents with an empty answer, documents that repeat the beginning of a conversation, bytes of
//!           the findings and their crc32c (u32 each), crc32c of all preceding bytes
//!   128     findings, as JSON
//!   4096    elements: training, then validation. Token ids; the highest bit is set if the token is not a target of the loss,
//!           the second if it is the first of its document
//!   ...     table: crc32c of every 64 KiB of elements, u32 each
//! ```
//!
//! All numbers are little endian. A file is called KEY.tokens; the key is derived from the source files, the
//! tokenizer and the settings, so an existing file is the right one. A file appears complete or not at all.
//! It is not synced to the drive: data lost in a power cut fails its checksums and is recreated.

mod format;
mod hold;
mod stored;
mod write;

pub(super) use format::Header;
pub(super) use hold::{Claim, claim};
pub(super) use stored::TokenFile;
pub(super) use write::TokenFileWriter;

/// Bytes of elements covered by one checksum; the least that reading a window costs.
const BLOCK_BYTES: usize = 64 << 10;
/// Offset of the first element.
const ELEMENTS_AT: u64 = 4096;

/// Bytes of an element for ids below `ids_end` and the two marks.
pub(super) fn elem_bytes(ids_end: u64) -> usize {
    if ids_end <= 1 << 14 { 2 } else { 4 }
}

#[cfg(test)]
mod tests;
