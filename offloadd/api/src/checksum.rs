//! The checksum of tiles: CRC-32C (Castagnoli), computed by carry-less multiplication where the processor has it.
//!
//! It covers all bytes of a tile, padding included, and is kept in the manifest and never beside the data, so that a lost,
//! stale or misdirected write does not match. The process that writes a tile computes it and the process that reads the tile
//! checks it, so that damage in memory or on the bus shows as well as damage on the drive. Every single-bit flip changes it.
//!
//! One core with AVX-512 (EPYC, 2026-11-22) sums 50 GB/s in its caches and 23.5 out of memory, which is the memory's limit; the
//! crc32 instruction reaches 25 and 12.3.

/// CRC-32C of `bytes`.
pub fn checksum(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// Computes a checksum piece by piece.
#[derive(Debug)]
pub struct ChecksumDigest(crc_fast::Digest);

impl ChecksumDigest {
    /// A checksum of no bytes yet.
    #[expect(clippy::new_without_default)]
    pub fn new() -> Self {
        Self(crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi))
    }

    /// Adds the next piece.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Returns the [`checksum`] of all pieces together.
    pub fn sum(&self) -> u32 {
        self.0.finalize() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_on_devices_never_changes() {
        assert_eq!(checksum(b""), 0);
        assert_eq!(checksum(b"123456789"), 0xe306_9283);
        assert_eq!(checksum(&[0; 4096]), 0x98f9_4189);
    }

    #[test]
    fn pieces_have_the_sum_of_the_whole() {
        let bytes: Vec<u8> = (0..20_000_u32).map(|i| ((i * i) >> 5) as u8).collect();
        let mut digest = ChecksumDigest::new();
        for piece in bytes.chunks(4096) {
            digest.add(piece);
        }
        assert_eq!(digest.sum(), checksum(&bytes));
    }

    /// Other code runs for short and long input, and for each length of the rest after the last whole vector.
    #[test]
    fn every_length_and_alignment_is_as_another_implementation_has_it() {
        let bytes: Vec<u8> = (0..70_000_u32)
            .map(|i| (i.wrapping_mul(i) >> 7) as u8)
            .collect();
        for start in 0..65 {
            for length in (0..1100).chain([4096, 65_535, 65_536]) {
                let part = &bytes[start..start + length];
                assert_eq!(checksum(part), crc32c::crc32c(part), "{start}, {length}");
            }
        }
    }
}
