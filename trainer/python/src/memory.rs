//! Addresses of PyTorch's memory as slices: the crate's only unsafe code.
//!
//! The Python half promises of each address it passes: the storage of a whole unit lies there, it is in the processor's
//! memory, and nothing else reads or writes it until the call returns.

#![allow(unsafe_code)]

use std::ops::Range;

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
