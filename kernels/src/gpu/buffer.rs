//! Memory of a GPU, host memory pinned for it, and bytes moved between the two.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use super::{Gpu, GpuError, Stream};

/// CU_MEMHOSTREGISTER_PORTABLE, hipHostRegisterPortable: pinned for every context of this process.
const PORTABLE: u32 = 1;

/// Plain memory of a GPU, not from torch's allocator, at a multiple of 256 bytes. A clone is the same memory; the last one frees it.
///
/// What it holds at first is undefined. Freeing waits for the device's work in flight, so a buffer may be dropped while a stream still
/// uses it; it is nothing to do within a step.
#[derive(Clone, Debug)]
pub struct DeviceBuffer(Arc<RawBuffer>);

#[derive(Debug)]
struct RawBuffer {
    gpu: Gpu,
    address: u64,
    bytes: usize,
}

/// A place in a buffer.
#[derive(Clone, Copy, Debug)]
pub struct DeviceAt<'a> {
    /// The buffer.
    pub buffer: &'a DeviceBuffer,
    /// Bytes from its start.
    pub offset_bytes: usize,
}

/// Host memory that is pinned for the GPU; copies from and to it run at the bus's full speed. Dropping it unpins.
pub struct Registration {
    gpu: Gpu,
    address: usize,
    bytes: usize,
    /// Keeps the memory mapped; dropped after unpinning.
    _keep: Box<dyn Any + Send + Sync>,
}

impl Gpu {
    /// Allocates `bytes` bytes of the device.
    ///
    /// # Errors
    /// Too little memory is free (see [`GpuError::is_out_of_memory`]), or the call failed.
    pub fn alloc(&self, bytes: usize) -> Result<DeviceBuffer, GpuError> {
        let mut address = 0;
        self.make_current()?;
        // SAFETY: the place is live for the call. None may be asked for of neither library, hence the least of 256.
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
        })))
    }

    /// Pins `bytes` bytes of host memory at `address`, which this process has mapped, until the result is dropped.
    ///
    /// `keep` is what keeps them mapped; it is dropped after they are unpinned.
    ///
    /// # Errors
    /// Nothing is mapped there, part of it is pinned already, or the system's limit of locked memory is too low.
    pub fn register(
        &self,
        address: usize,
        bytes: usize,
        keep: Box<dyn Any + Send + Sync>,
    ) -> Result<Registration, GpuError> {
        self.make_current()?;
        // SAFETY: pinning writes nothing; the library refuses what is not mapped. The pages stay the kernel's to keep while pinned,
        // even if they were unmapped, so nothing here can make memory of the process invalid.
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

    /// Copies each piece of host bytes to its offset in `to`, in order on `stream`, and waits until all have arrived.
    ///
    /// Panics if a piece is not within the buffer.
    ///
    /// # Errors
    /// A call, or something enqueued before, failed; which pieces arrived is unknown then.
    pub fn upload(
        &self,
        stream: &Stream,
        to: &DeviceBuffer,
        pieces: &[(usize, &[u8])],
    ) -> Result<(), GpuError> {
        let lent = HostLoan(stream);
        // SAFETY: the host bytes are borrowed until this function returns, which `lent` lets it do only after the copies.
        unsafe { self.enqueue_upload(stream, to, pieces)? };
        lent.settle()
    }

    /// Copies bytes at each offset of `from` to host bytes, in order on `stream`, and waits until all have arrived.
    ///
    /// Panics if a piece is not within the buffer.
    ///
    /// # Errors
    /// A call, or something enqueued before, failed; the host bytes may be written in part then.
    pub fn download(
        &self,
        stream: &Stream,
        from: &DeviceBuffer,
        pieces: &mut [(usize, &mut [u8])],
    ) -> Result<(), GpuError> {
        let lent = HostLoan(stream);
        // SAFETY: as in `upload`; the borrow of the host bytes is exclusive.
        unsafe { self.enqueue_download(stream, from, pieces)? };
        lent.settle()
    }

    /// As [`Gpu::upload`], without waiting.
    ///
    /// # Safety
    /// The host bytes stay where they are, and unchanged, until `stream` has been waited for. A [`HostLoan`] sees to the wait.
    pub(super) unsafe fn enqueue_upload(
        &self,
        stream: &Stream,
        to: &DeviceBuffer,
        pieces: &[(usize, &[u8])],
    ) -> Result<(), GpuError> {
        self.make_current()?;
        for (offset_bytes, piece) in pieces.iter().filter(|(_, piece)| !piece.is_empty()) {
            let address = to.at(*offset_bytes).address(piece.len());
            // SAFETY: the range on the device is allocated (checked by `address`); the host's is the caller's promise.
            let code = unsafe {
                let from = piece.as_ptr().cast::<c_void>();
                (self.driver().copy_up)(address, from, piece.len(), stream.raw())
            };
            self.check(code, || format!("copying {} bytes up", piece.len()))?;
        }
        Ok(())
    }

    /// As [`Gpu::download`], without waiting.
    ///
    /// # Safety
    /// The host bytes stay where they are, and nobody looks at them, until `stream` has been waited for. A [`HostLoan`] sees to the wait.
    pub(super) unsafe fn enqueue_download(
        &self,
        stream: &Stream,
        from: &DeviceBuffer,
        pieces: &mut [(usize, &mut [u8])],
    ) -> Result<(), GpuError> {
        self.make_current()?;
        for (offset_bytes, piece) in pieces.iter_mut().filter(|(_, piece)| !piece.is_empty()) {
            let address = from.at(*offset_bytes).address(piece.len());
            // SAFETY: as in `enqueue_upload`.
            let code = unsafe {
                let to = piece.as_mut_ptr().cast::<c_void>();
                (self.driver().copy_down)(to, address, piece.len(), stream.raw())
            };
            self.check(code, || format!("copying {} bytes down", piece.len()))?;
        }
        Ok(())
    }
}

/// Host memory is lent to the copies of a stream. On every way out, also by an error or a panic, the stream is waited for.
pub(super) struct HostLoan<'a>(pub(super) &'a Stream);

impl HostLoan<'_> {
    /// Waits until all copies are done.
    pub(super) fn settle(self) -> Result<(), GpuError> {
        let stream = self.0;
        std::mem::forget(self);
        stream.synchronize()
    }
}

impl Drop for HostLoan<'_> {
    fn drop(&mut self) {
        // The error that led here is the one to show.
        let _ = self.0.synchronize();
    }
}

impl DeviceBuffer {
    /// Bytes it holds.
    pub fn bytes(&self) -> usize {
        self.0.bytes
    }

    /// Whose memory it is.
    pub fn gpu(&self) -> &Gpu {
        &self.0.gpu
    }

    /// The device's address of its first byte, for a library that takes one. It is good while a clone of this buffer lives.
    pub fn address(&self) -> u64 {
        self.0.address
    }

    /// A place `offset_bytes` from its start.
    pub fn at(&self, offset_bytes: usize) -> DeviceAt<'_> {
        DeviceAt {
            buffer: self,
            offset_bytes,
        }
    }
}

impl DeviceAt<'_> {
    /// The device's address of this place. Panics unless `bytes` bytes from it on are within the buffer.
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
        if self.gpu.make_current().is_ok() {
            // After a failure nothing runs any more, and the memory is given back all the same.
            let _ = self.gpu.synchronize();
            // SAFETY: the library gave this address out and this was its last owner.
            let _ = unsafe { (self.gpu.driver().free)(self.address) };
        }
    }
}

impl Registration {
    /// Where the pinned memory starts.
    pub fn address(&self) -> usize {
        self.address
    }

    /// How much is pinned.
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
            // SAFETY: this address was pinned by `register` and is unpinned once; copies from and to it end before the functions
            // above return.
            let _ = unsafe { (self.gpu.driver().host_unregister)(self.address) };
        }
    }
}
