//! Aligned blocks of several devices, one synchronous operation at a time, for format, recovery and verify.
//!
//! The data path uses the engines instead. Opened devices (`device`) and the simulated disks of the tests implement [`Blocks`].

use crate::io::{AlignedBytes, IoOp};

/// Devices in the order of the settings, which need not be the store's.
pub trait Blocks {
    /// Number of devices.
    fn count(&self) -> usize;
    /// Path of device `position` for messages.
    fn path(&self, position: usize) -> &str;
    /// Size of device `position`.
    fn size_bytes(&self, position: usize) -> u64;
    /// Fills `into` from `offset` on.
    fn read(
        &mut self,
        position: usize,
        offset: u64,
        into: &mut AlignedBytes,
    ) -> Result<(), BlockError>;
    /// Writes all of `from` at `offset`. Not durable before a flush.
    fn write(
        &mut self,
        position: usize,
        offset: u64,
        from: &AlignedBytes,
    ) -> Result<(), BlockError>;
    /// Makes everything written to this device durable.
    fn flush(&mut self, position: usize) -> Result<(), BlockError>;
}

/// A device failed an operation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{op:?} of {asked_bytes} bytes at {offset} of {path}: {cause}")]
pub struct BlockError {
    /// Kind of operation.
    pub op: IoOp,
    /// Path of the device.
    pub path: String,
    /// First byte on the device.
    pub offset: u64,
    /// Length of the operation.
    pub asked_bytes: u64,
    /// Answer of the device.
    pub cause: BlockErrorCause,
}

/// Answer of a device that failed an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlockErrorCause {
    /// An errno.
    #[error("{}", std::io::Error::from_raw_os_error(*.0))]
    Errno(i32),
    /// Fewer bytes than asked.
    #[error("only {0} bytes were moved: the device is shorter than its store, or gone")]
    Short(u64),
}
