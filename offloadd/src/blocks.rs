//! Aligned blocks of several devices, one synchronous operation at a time: how format, recovery and verify see devices.
//!
//! The data path does not come here: it goes through the engines. The simulated devices (`engine::sim`) and the opened
//! ones (`device`) implement [`Blocks`].

use offload_api::BLOCK_BYTES;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::core::IoOp;

/// One block, where O_DIRECT wants it.
#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
struct Block([u8; BLOCK_BYTES as usize]);

/// Whole blocks of memory that O_DIRECT takes: 4096-aligned, zeroed at first, of fixed length.
#[derive(Clone)]
pub struct AlignedBytes(Vec<Block>);

impl AlignedBytes {
    /// `bytes` zeros, rounded up to whole blocks.
    pub fn zeroed(bytes: usize) -> Self {
        let blocks = bytes.div_ceil(BLOCK_BYTES as usize);
        Self(vec![Block([0; BLOCK_BYTES as usize]); blocks])
    }

    /// A copy of `bytes`, padded with zeros to whole blocks.
    pub fn from_slice(bytes: &[u8]) -> Self {
        let mut aligned = Self::zeroed(bytes.len());
        aligned.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
        aligned
    }

    /// All bytes.
    pub fn as_slice(&self) -> &[u8] {
        self.0.as_slice().as_bytes()
    }

    /// All bytes.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        self.0.as_mut_slice().as_mut_bytes()
    }

    /// Always a multiple of [`BLOCK_BYTES`].
    pub fn len(&self) -> usize {
        self.0.len() * BLOCK_BYTES as usize
    }

    /// Whether there is not one block.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The length only: a megabyte in a log helps nobody.
impl std::fmt::Debug for AlignedBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AlignedBytes({} bytes)", self.len())
    }
}

/// Devices in the order of the settings (which need not be the store's order).
pub trait Blocks {
    /// How many.
    fn count(&self) -> usize;
    /// What messages call device `position`.
    fn path(&self, position: usize) -> &str;
    /// Its size.
    fn size_bytes(&self, position: usize) -> u64;
    /// Fills `into` from `offset` on, all of it or an error.
    fn read(
        &mut self,
        position: usize,
        offset: u64,
        into: &mut AlignedBytes,
    ) -> Result<(), BlockError>;
    /// Writes all of `from` at `offset`, or an error. Not durable before a flush.
    fn write(
        &mut self,
        position: usize,
        offset: u64,
        from: &AlignedBytes,
    ) -> Result<(), BlockError>;
    /// Everything written to this device survives power loss.
    fn flush(&mut self, position: usize) -> Result<(), BlockError>;
}

/// A device did not do it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{op:?} of {asked_bytes} bytes at {offset} of {path}: {cause}")]
pub struct BlockError {
    /// What was tried.
    pub op: IoOp,
    /// On which device.
    pub path: String,
    /// From its start.
    pub offset: u64,
    /// How much.
    pub asked_bytes: u64,
    /// What it answered.
    pub cause: BlockErrorCause,
}

/// What a device answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlockErrorCause {
    /// An errno.
    #[error("{}", std::io::Error::from_raw_os_error(*.0))]
    Errno(i32),
    /// Fewer bytes than asked.
    #[error("only {0} bytes moved: the device is shorter than its store, or gone")]
    Short(u64),
}
