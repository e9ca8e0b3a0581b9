//! Aligned blocks of several devices, one synchronous operation at a time: how format, recovery and verify see devices.
//!
//! The data path does not come here: it goes through the engines. The simulated devices (`engine::sim`) and the opened
//! ones (`device`) implement [`Blocks`].

use crate::io::{AlignedBytes, IoOp};

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
