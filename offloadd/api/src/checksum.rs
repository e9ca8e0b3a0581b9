//! The one checksum: CRC-32C (Castagnoli), by the CPU's instruction where there is one.
//!
//! A tile's checksum covers all of its bytes, padding included, and is kept in the manifest, never beside the data: a
//! lost, stale or misdirected write leaves data that does not fit the manifest. Computed where the bytes are made (the
//! process that writes the tile) and checked where they are used (the process that reads it), so damage on the way, in
//! memory or on the bus, shows as well as damage on the drive. Every single-bit flip changes it.

/// CRC-32C of `bytes`.
pub fn checksum(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes)
}
