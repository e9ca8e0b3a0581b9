//! Addresses of PyTorch's memory as slices: the crate's only unsafe code.
//!
//! The Python half promises of each address it passes: the storage of a whole unit lies there, it is in the processor's
//! memory, and nothing else reads or writes it until the call returns. For addresses in a GPU's memory it promises that
//! the storage stays until `GpuMover::release`, or until `GpuMover::grad_room` for its buffer, and is freed on the stream
//! `room`; what `Fp8Converter` reads and writes was allocated on the stream that it gets; handles of streams are PyTorch's, which it never destroys.

#![allow(unsafe_code)]

use std::ops::Range;

use kernels::gpu::{DeviceBuffer, Fp8Addresses, Fp8Format, Fp8Kernels, Gpu, GpuError, Stream};

/// The bytes of `elems` of a unit that lies at `address`.
pub(crate) fn elements<'a>(address: usize, elems: &Range<u64>, elem_bytes: usize) -> &'a [u8] {
    let start = address + elems.start as usize * elem_bytes;
    let bytes = (elems.end - elems.start) as usize * elem_bytes;
    // SAFETY: the module's promise; a unit's elements are within its storage.
    unsafe { std::slice::from_raw_parts(start as *const u8, bytes) }
}

/// Writes `from` over `elems` of a unit that lies at `address`.
pub(crate) fn write(address: usize, elems: &Range<u64>, elem_bytes: usize, from: &[u8]) {
    let start = address + elems.start as usize * elem_bytes;
    assert_eq!(from.len(), (elems.end - elems.start) as usize * elem_bytes);
    // SAFETY: the module's promise; `from` is a slot of the swapper's own memory.
    unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), start as *mut u8, from.len()) }
}

/// The `bytes` bytes of a unit that lies at `address` in the memory of `gpu`.
pub(crate) fn on_gpu(gpu: &Gpu, address: usize, bytes: usize) -> DeviceBuffer {
    // SAFETY: the module's promise; `GpuMover` enqueues nothing with a unit's buffer after it has released the unit.
    unsafe { gpu.borrowed_buffer(address as u64, bytes) }
}

/// PyTorch's stream of this handle.
pub(crate) fn torch_stream(gpu: &Gpu, handle: usize) -> Stream {
    // SAFETY: the module's promise.
    unsafe { gpu.borrowed_stream(handle) }
}

/// Enqueues the conversion of the matrix at `from.0` with scratch memory at `from.1`.
pub(crate) fn to_fp8(
    kernels: &Fp8Kernels,
    stream: &Stream,
    from: (u64, u64),
    to: Fp8Addresses,
    format: Fp8Format,
    sizes: [usize; 2],
) -> Result<(), GpuError> {
    let [rows, columns] = sizes;
    // SAFETY: the module's promise: PyTorch allocated all of it for these sizes, and keeps it until its stream has run.
    unsafe {
        kernels.largest(stream, from.0, rows * columns, from.1)?;
        kernels.convert(stream, from, to, format, sizes)
    }
}
