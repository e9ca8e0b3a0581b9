//! Memory that direct I/O accepts.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Alignment and granularity of direct I/O, bytes.
pub const BLOCK_BYTES: usize = 4096;

#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
struct Block([u8; BLOCK_BYTES]);

/// Whole blocks of zero-initialized memory, aligned to [`BLOCK_BYTES`]. The length is fixed.
#[derive(Clone)]
pub struct AlignedBytes(Vec<Block>);

impl AlignedBytes {
    /// Allocates `bytes` zeros, rounded up to whole blocks.
    pub fn zeroed(bytes: usize) -> Self {
        Self(vec![Block([0; BLOCK_BYTES]); bytes.div_ceil(BLOCK_BYTES)])
    }

    /// Copies `bytes` and pads them with zeros to whole blocks.
    pub fn from_slice(bytes: &[u8]) -> Self {
        let mut aligned = Self::zeroed(bytes.len());
        aligned.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
        aligned
    }

    /// All bytes, padding included.
    pub fn as_slice(&self) -> &[u8] {
        self.0.as_slice().as_bytes()
    }

    /// All bytes, padding included.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        self.0.as_mut_slice().as_mut_bytes()
    }

    /// Length in bytes, a multiple of [`BLOCK_BYTES`].
    pub fn len(&self) -> usize {
        self.0.len() * BLOCK_BYTES
    }

    /// Whether there is no block.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Shows the length only.
impl std::fmt::Debug for AlignedBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AlignedBytes({} bytes)", self.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_aligned_whole_blocks_and_padded_with_zeros() {
        let bytes = AlignedBytes::from_slice(&[7; BLOCK_BYTES + 1]);
        assert_eq!(bytes.len(), 2 * BLOCK_BYTES);
        assert_eq!(bytes.as_slice().as_ptr() as usize % BLOCK_BYTES, 0);
        let (copied, padding) = bytes.as_slice().split_at(BLOCK_BYTES + 1);
        assert!(copied.iter().all(|byte| *byte == 7) && padding.iter().all(|byte| *byte == 0));
        assert!(AlignedBytes::zeroed(0).is_empty());
    }
}
