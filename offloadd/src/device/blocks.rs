//! Implements [`Blocks`] for opened devices: one synchronous operation at a time, while nothing else runs.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use offload_api::BLOCK_BYTES;
use rustix::io::Errno;

use super::Device;
use crate::blocks::{BlockError, BlockErrorCause, Blocks};
use crate::engine::power_cut_sim;
use crate::io::{AlignedBytes, IoOp};

/// Opened devices.
#[derive(Debug)]
pub struct DeviceBlocks<'a>(pub &'a [Device]);

impl DeviceBlocks<'_> {
    fn whole(
        &self,
        position: usize,
        op: IoOp,
        offset: u64,
        asked_bytes: usize,
        mut step: impl FnMut(&File, usize) -> io::Result<usize>,
    ) -> Result<(), BlockError> {
        let device = &self.0[position];
        let failed = |cause| BlockError {
            op,
            path: device.path.clone(),
            offset,
            asked_bytes: asked_bytes as u64,
            cause,
        };
        let mut moved_bytes = 0;
        while moved_bytes < asked_bytes {
            match step(&device.file, moved_bytes) {
                // The end of the device, or a drive that is gone. Direct I/O cannot continue within a block.
                Ok(bytes)
                    if bytes == 0
                        || !(moved_bytes + bytes).is_multiple_of(BLOCK_BYTES as usize)
                            && moved_bytes + bytes < asked_bytes =>
                {
                    let moved = (moved_bytes + bytes) as u64;
                    return Err(failed(BlockErrorCause::Short(moved)));
                }
                Ok(bytes) => moved_bytes += bytes,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => {
                    let errno = e.raw_os_error().unwrap_or(Errno::IO.raw_os_error());
                    return Err(failed(BlockErrorCause::Errno(errno)));
                }
            }
        }
        Ok(())
    }
}

impl Blocks for DeviceBlocks<'_> {
    fn count(&self) -> usize {
        self.0.len()
    }

    fn path(&self, position: usize) -> &str {
        &self.0[position].path
    }

    fn size_bytes(&self, position: usize) -> u64 {
        self.0[position].bytes
    }

    fn read(
        &mut self,
        position: usize,
        offset: u64,
        into: &mut AlignedBytes,
    ) -> Result<(), BlockError> {
        let bytes = into.len();
        self.whole(position, IoOp::Read, offset, bytes, |file, moved| {
            file.read_at(&mut into.as_mut_slice()[moved..], offset + moved as u64)
        })
    }

    fn write(
        &mut self,
        position: usize,
        offset: u64,
        from: &AlignedBytes,
    ) -> Result<(), BlockError> {
        power_cut_sim::writes(&self.0[position].file, offset, from.len());
        self.whole(position, IoOp::Write, offset, from.len(), |file, moved| {
            file.write_at(&from.as_slice()[moved..], offset + moved as u64)
        })
    }

    fn flush(&mut self, position: usize) -> Result<(), BlockError> {
        let device = &self.0[position];
        device.file.sync_data().map_err(|e| BlockError {
            op: IoOp::Flush,
            path: device.path.clone(),
            offset: 0,
            asked_bytes: 0,
            cause: BlockErrorCause::Errno(e.raw_os_error().unwrap_or(Errno::IO.raw_os_error())),
        })?;
        power_cut_sim::flushed(&device.file);
        Ok(())
    }
}
