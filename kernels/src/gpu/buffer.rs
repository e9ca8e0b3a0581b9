//! GPU memory, pinned host memory, and copies between them.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use super::{Gpu, GpuError, Stream};

/// CU_MEMHOSTREGISTER_PORTABLE, hipHostRegisterPortable: pinned for every context of this process.
const PORTABLE: u32 = 1;

/// Device memory outside torch's allocator, aligned to 256 bytes. Clones share the memory; the last one frees it, unless
/// it is borrowed ([`Gpu::borrowed_buffer`]).
///
/// The initial content is undefined. Freeing waits for the device's work in flight, so a buffer may be dropped while a
/// stream still uses it; do not free within a step.
#[derive(Clone, Debug)]
pub struct DeviceBuffer(Arc<RawBuffer>);

#[derive(Debug)]
struct RawBuffer {
    gpu: Gpu,
    address: u64,
    bytes: usize,
    /// Whether the last clone frees the memory; another library's stays with it.
    owned: bool,
}

/// A position in a buffer.
#[derive(Clone, Copy, Debug)]
pub struct DeviceAt<'a> {
    /// The buffer.
    pub buffer: &'a DeviceBuffer,
    /// Offset from the buffer's start.
    pub offset_bytes: usize,
}

/// Pinned host memory: copies run at the bus's full speed. Dropping it unpins the memory.
pub struct Registration {
    gpu: Gpu,
    address: usize,
    bytes: usize,
    /// Keeps the memory mapped until it is unpinned.
    _keep: Box<dyn Any + Send + Sync>,
}

impl Gpu {
    /// Allocates `bytes` bytes on the device.
    ///
    /// # Errors
    /// Too little memory is free (see [`GpuError::is_out_of_memory`]), or the call failed.
    pub fn alloc(&self, bytes: usize) -> Result<DeviceBuffer, GpuError> {
        let mut address = 0;
        self.make_current()?;
        // SAFETY: the address is live for the call. Neither library accepts zero bytes, hence the minimum of 256.
        let code = unsafe { (self.driver().alloc)(&mut address, bytes.max(256)) };
        self.check(code, || {
            let free = self.free_bytes().map_or_else(
                |_| "an unknown number".to_owned(),
                |free_bytes| free_bytes.to_string(),
            );
            let name = &self.info().name;
            format!("allocating {bytes} bytes on {name}, of which {free} are free")
        })?;
        Ok(DeviceBuffer(Arc::new(RawBuffer {
            gpu: self.clone(),
            address,
            bytes,
            owned: true,
        })))
    }

    /// Memory of this device that another library allocated, such as a tensor of torch's. Dropping the buffer neither
    /// frees it nor waits.
    ///
    /// # Safety
    /// The `bytes` bytes at `address` are allocated on this device, and stay so until all work enqueued with the buffer
    /// or a clone of it has run.
    pub unsafe fn borrowed_buffer(&self, address: u64, bytes: usize) -> DeviceBuffer {
        DeviceBuffer(Arc::new(RawBuffer {
            gpu: self.clone(),
            address,
            bytes,
            owned: false,
        }))
    }

    /// Pins `bytes` bytes of mapped host memory at `address` until the result is dropped. `keep` owns the mapping; it
    /// is dropped after the memory is unpinned.
    ///
    /// # Errors
    /// Nothing is mapped there, part of it is already pinned, or the limit of locked memory is too low.
    pub fn register(
        &self,
        address: usize,
        bytes: usize,
        keep: Box<dyn Any + Send + Sync>,
    ) -> Result<Registration, GpuError> {
        self.make_current()?;
        // SAFETY: pinning writes nothing, and the library refuses unmapped memory. The kernel keeps pinned pages even
        // if they are unmapped, so no memory of the process can become invalid.
        let code = unsafe { (self.driver().host_register)(address, bytes, PORTABLE) };
        self.check(code, || {
            format!("pinning {bytes} bytes of host memory at {address:#x}")
        })?;
        Ok(Registration {
            gpu: self.clone(),
            address,
            bytes,
            _keep: keep,
        })
    }

    /// Copies each slice of host bytes to its offset in `to`, in order on `stream`, and waits for all copies.
    ///
    /// Panics if a slice does not fit in the buffer.
    ///
    /// # Errors
    /// A call, or earlier work on the stream, failed; it is unknown which slices arrived.
    pub fn upload(
        &self,
        stream: &Stream,
        to: &DeviceBuffer,
        pieces: &[(usize, &[u8])],
    ) -> Result<(), GpuError> {
        self.upload_then(stream, to, pieces, || Ok(()))
    }

    /// Like [`Gpu::upload`]; `enqueued` runs between the last copy's enqueueing and the wait. An event that it records on
    /// `stream` lets other streams wait for the copies before this function returns.
    ///
    /// # Errors
    /// Those of [`Gpu::upload`] and of `enqueued`.
    pub fn upload_then(
        &self,
        stream: &Stream,
        to: &DeviceBuffer,
        pieces: &[(usize, &[u8])],
        enqueued: impl FnOnce() -> Result<(), GpuError>,
    ) -> Result<(), GpuError> {
        let lent = HostLoan(stream);
        // SAFETY: the host bytes are borrowed until this function returns, and `lent` delays that until the copies are
        // done.
        unsafe { self.enqueue_upload(stream, to, pieces)? };
        enqueued()?;
        lent.settle()
    }

    /// Copies bytes at each offset of `from` to host slices, in order on `stream`, and waits for all copies.
    ///
    /// Panics if a slice reaches beyond the buffer.
    ///
    /// # Errors
    /// A call, or earlier work on the stream, failed; the host bytes may be partly written.
    pub fn download(
        &self,
        stream: &Stream,
        from: &DeviceBuffer,
        pieces: &mut [(usize, &mut [u8])],
    ) -> Result<(), GpuError> {
        self.download_then(stream, from, pieces, || Ok(()))
    }

    /// Like [`Gpu::download`]; `enqueued` runs between the last copy's enqueueing and the wait, as in
    /// [`Gpu::upload_then`].
    ///
    /// # Errors
    /// Those of [`Gpu::download`] and of `enqueued`.
    pub fn download_then(
        &self,
        stream: &Stream,
        from: &DeviceBuffer,
        pieces: &mut [(usize, &mut [u8])],
        enqueued: impl FnOnce() -> Result<(), GpuError>,
    ) -> Result<(), GpuError> {
        let lent = HostLoan(stream);
        // SAFETY: as in `upload_then`; the borrow of the host bytes is exclusive.
        unsafe { self.enqueue_download(stream, from, pieces)? };
        enqueued()?;
        lent.settle()
    }

    /// Like [`Gpu::upload`], without waiting.
    ///
    /// # Safety
    /// The host bytes must stay in place and unchanged until `stream` was waited for. A [`HostLoan`] ensures that.
    pub(super) unsafe fn enqueue_upload(
        &self,
        stream: &Stream,
        to: &DeviceBuffer,
        pieces: &[(usize, &[u8])],
    ) -> Result<(), GpuError> {
        self.make_current()?;
        let pieces = pieces
            .iter()
            .map(|(offset, piece)| Run::new(*offset, piece.as_ptr(), piece.len()));
        for run in joined(pieces) {
            let address = to.at(run.offset_bytes).address(run.bytes);
            let from = std::ptr::with_exposed_provenance(run.host);
            // SAFETY: the device range is allocated (checked by `address`); the caller promises the host range, each part
            // of which is one of the pieces.
            let code = unsafe { (self.driver().copy_up)(address, from, run.bytes, stream.raw()) };
            self.check(code, || {
                format!("copying {} bytes to the device", run.bytes)
            })?;
        }
        Ok(())
    }

    /// Like [`Gpu::download`], without waiting.
    ///
    /// # Safety
    /// The host bytes must stay in place and unread until `stream` was waited for. A [`HostLoan`] ensures that.
    pub(super) unsafe fn enqueue_download(
        &self,
        stream: &Stream,
        from: &DeviceBuffer,
        pieces: &mut [(usize, &mut [u8])],
    ) -> Result<(), GpuError> {
        self.make_current()?;
        let pieces = pieces
            .iter_mut()
            .map(|(offset, piece)| Run::new(*offset, piece.as_mut_ptr(), piece.len()));
        for run in joined(pieces) {
            let address = from.at(run.offset_bytes).address(run.bytes);
            let to = std::ptr::with_exposed_provenance_mut(run.host);
            // SAFETY: as in `enqueue_upload`.
            let code = unsafe { (self.driver().copy_down)(to, address, run.bytes, stream.raw()) };
            self.check(code, || {
                format!("copying {} bytes from the device", run.bytes)
            })?;
        }
        Ok(())
    }
}

/// Bytes that are copied in one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    /// Offset in the buffer on the device.
    offset_bytes: usize,
    /// Address in host memory.
    host: usize,
    bytes: usize,
}

impl Run {
    fn new(offset_bytes: usize, host: *const u8, bytes: usize) -> Self {
        Self {
            offset_bytes,
            host: host.expose_provenance(),
            bytes,
        }
    }
}

/// Joins pieces that follow each other on both sides: one copy of many tiles takes the bus at its full rate, where a copy for
/// each tile loses a fifth of it to their beginnings.
fn joined(pieces: impl Iterator<Item = Run>) -> impl Iterator<Item = Run> {
    let mut pieces = pieces.filter(|piece| piece.bytes > 0).peekable();
    std::iter::from_fn(move || {
        let mut run = pieces.next()?;
        let follows = |run: &Run, next: &Run| {
            next.offset_bytes == run.offset_bytes + run.bytes && next.host == run.host + run.bytes
        };
        while let Some(next) = pieces.next_if(|next| follows(&run, next)) {
            run.bytes += next.bytes;
        }
        Some(run)
    })
}

/// Lends host memory to the copies of a stream. Dropping it waits for the stream, also after an error or a panic.
pub(super) struct HostLoan<'a>(pub(super) &'a Stream);

impl HostLoan<'_> {
    /// Waits for all copies.
    pub(super) fn settle(self) -> Result<(), GpuError> {
        let stream = self.0;
        std::mem::forget(self);
        stream.synchronize()
    }
}

impl Drop for HostLoan<'_> {
    fn drop(&mut self) {
        // The error that led here is the one to report.
        let _ = self.0.synchronize();
    }
}

impl DeviceBuffer {
    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.0.bytes
    }

    /// The GPU that holds the memory.
    pub fn gpu(&self) -> &Gpu {
        &self.0.gpu
    }

    /// Device address of the first byte, for a library that takes one. Valid while a clone of this buffer lives.
    pub fn address(&self) -> u64 {
        self.0.address
    }

    /// The position `offset_bytes` from the start.
    pub fn at(&self, offset_bytes: usize) -> DeviceAt<'_> {
        DeviceAt {
            buffer: self,
            offset_bytes,
        }
    }
}

impl DeviceAt<'_> {
    /// Device address of this position. Panics unless `bytes` bytes from it are within the buffer.
    pub fn address(self, bytes: usize) -> u64 {
        let end = self.offset_bytes.checked_add(bytes);
        assert!(
            end.is_some_and(|end| end <= self.buffer.bytes()),
            "{bytes} bytes from {} on are not within a buffer of {}",
            self.offset_bytes,
            self.buffer.bytes()
        );
        self.buffer.address() + self.offset_bytes as u64
    }
}

impl Drop for RawBuffer {
    fn drop(&mut self) {
        if self.owned && self.gpu.make_current().is_ok() {
            // After a failure nothing runs any more, and the memory is freed all the same.
            let _ = self.gpu.synchronize();
            // SAFETY: the library returned this address, and this was its last owner.
            let _ = unsafe { (self.gpu.driver().free)(self.address) };
        }
    }
}

impl Registration {
    /// Start of the pinned memory.
    pub fn address(&self) -> usize {
        self.address
    }

    /// Size of the pinned memory in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration")
            .field("address", &self.address)
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if self.gpu.make_current().is_ok() {
            // SAFETY: `register` pinned this address and it is unpinned once; copies from and to it end before the
            // functions above return.
            let _ = unsafe { (self.gpu.driver().host_unregister)(self.address) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_joined_where_they_follow_each_other_on_both_sides() {
        let run = |offset_bytes, host, bytes| Run {
            offset_bytes,
            host,
            bytes,
        };
        let pieces = [
            run(0, 1000, 8),
            run(8, 1008, 8),
            run(16, 1016, 0),
            run(16, 1016, 4),
            // A gap in host memory, one on the device, and pieces in another order.
            run(20, 1024, 4),
            run(32, 1028, 4),
            run(24, 1032, 8),
        ];
        let found: Vec<Run> = joined(pieces.into_iter()).collect();
        let expected = [
            run(0, 1000, 20),
            run(20, 1024, 4),
            run(32, 1028, 4),
            run(24, 1032, 8),
        ];
        assert_eq!(found, expected);
        assert_eq!(joined(std::iter::empty()).count(), 0);
    }
}
