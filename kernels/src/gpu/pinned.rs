//! Host memory that is pinned as long as it lives, for copies that the host does not wait for.

use super::buffer::Registration;
use super::{Gpu, GpuError};

/// Pinned pages must not contain other memory.
const PAGE_BYTES: usize = 4096;

/// Pinned memory; the registration ends before the bytes are freed.
pub(super) struct PinnedMemory {
    _registration: Registration,
    bytes: Box<[u8]>,
    start: usize,
}

impl PinnedMemory {
    /// Allocates and pins `bytes_count` zeros.
    pub(super) fn new(gpu: &Gpu, bytes_count: usize) -> Result<Self, GpuError> {
        let rounded = bytes_count.next_multiple_of(PAGE_BYTES);
        let bytes = vec![0_u8; rounded + PAGE_BYTES].into_boxed_slice();
        let start = bytes.as_ptr().align_offset(PAGE_BYTES);
        let address = bytes.as_ptr() as usize + start;
        Ok(Self {
            _registration: gpu.register(address, rounded.max(PAGE_BYTES), Box::new(()))?,
            bytes,
            start,
        })
    }

    /// Host memory in bytes.
    pub(super) fn bytes_count(&self) -> usize {
        self.bytes.len()
    }

    /// The `bytes` bytes from `offset_bytes` on.
    pub(super) fn bytes_mut(&mut self, offset_bytes: usize, bytes: usize) -> &mut [u8] {
        &mut self.bytes[self.start + offset_bytes..][..bytes]
    }
}
