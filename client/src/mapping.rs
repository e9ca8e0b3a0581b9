//! Maps arena memory and cuts it into regions, one a slot. The only `unsafe` of this crate.
//!
//! Promises: regions of one mapping never overlap, cannot be copied, and keep the mapping alive. A slice of a region lasts as
//! long as the region is borrowed, and nobody else in this process sees its bytes. Other processes and the kernel write to a
//! region only while it is in flight; during that time the session holds it and lends no slice.

use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;

use offload_api::geometry::Geometry;
use offload_api::ids::SlotIndex;
use rustix::fs::SealFlags;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::ClientError;

/// Threads that populate fresh memory: the kernel clears pages at about 4 GB/s a thread, and 8 threads saturate most machines.
const TOUCH_THREADS_MAX: usize = 8;

#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping is plain memory of this process, bound to no thread.
unsafe impl Send for Mapping {}
// SAFETY: `&Mapping` only tells address and size; bytes are reached through a `Region` alone.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: made by mmap with this size; every region, and so every slice, holds an Arc of it and is gone.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}

/// The memory of an arena in this process, to register it with a GPU. Keeps the memory mapped.
#[derive(Clone, Debug)]
pub struct ArenaMemory(Arc<Mapping>);

impl ArenaMemory {
    /// Address of the first byte.
    pub fn address(&self) -> usize {
        self.0.base.as_ptr() as usize
    }

    /// Length, including gaps between slot classes.
    pub fn bytes(&self) -> usize {
        self.0.bytes
    }
}

/// The bytes of one slot.
#[derive(Debug)]
pub(crate) struct Region {
    mapping: Arc<Mapping>,
    offset: usize,
    bytes: usize,
}

impl Region {
    pub(crate) fn as_slice(&self) -> &[u8] {
        // SAFETY: inside the mapping (asserted in `split`), which lives as long as `self`; initialised, as mapped files
        // and fresh pages are zero; no other region overlaps, so no `&mut` to these bytes exists beside `&self`. The
        // daemon and the kernel write them only while the region is in flight, when the session borrows nothing of it.
        unsafe { std::slice::from_raw_parts(self.start(), self.bytes) }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `&mut self` excludes any other slice.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.bytes) }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    fn start(&self) -> *mut u8 {
        // SAFETY: `offset` lies inside the mapping, see `split`.
        unsafe { self.mapping.base.as_ptr().add(self.offset) }
    }
}

/// Maps a session's memory file, which must be sealed against shrinking: access to truncated pages raises SIGBUS.
pub(crate) fn shared(
    fd: impl AsFd,
    geometry: &Geometry,
) -> Result<(ArenaMemory, Vec<Region>), ClientError> {
    let seals = rustix::fs::fcntl_get_seals(&fd)
        .map_err(ClientError::os("read the seals of the arena's memory file"))?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err(ClientError::protocol(
            "the arena's memory file is not sealed against shrinking",
        ));
    }
    let bytes = rustix::fs::fstat(&fd)
        .map_err(ClientError::os("fstat of the arena's memory file"))?
        .st_size as u64;
    if bytes < geometry.arena_bytes() {
        return Err(ClientError::protocol(format!(
            "the arena's memory file has {bytes} bytes, the slots asked for need {}",
            geometry.arena_bytes()
        )));
    }
    let bytes = geometry.arena_bytes() as usize;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice touches no memory of this program.
    let base =
        unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, fd, 0) }
            .map_err(ClientError::os(format!("map {bytes} bytes of arena")))?;
    Ok(split(new_mapping(base, bytes), geometry))
}

/// Maps and populates memory of this process alone.
pub(crate) fn private(geometry: &Geometry) -> Result<(ArenaMemory, Vec<Region>), ClientError> {
    let bytes = geometry.arena_bytes() as usize;
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice touches no memory of this program.
    let base = unsafe {
        rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, access, MapFlags::PRIVATE)
    }
    .map_err(ClientError::os(format!("map {bytes} bytes of memory")))?;
    let mapping = new_mapping(base, bytes);
    touch(&mapping)?;
    Ok(split(mapping, geometry))
}

fn new_mapping(base: *mut std::ffi::c_void, bytes: usize) -> Mapping {
    Mapping {
        base: NonNull::new(base.cast()).expect("mmap never answers address 0 unless asked to"),
        bytes,
    }
}

/// Populates all pages now, so that missing memory is an error here and not a kill later.
fn touch(mapping: &Mapping) -> Result<(), ClientError> {
    let threads = std::thread::available_parallelism()
        .map_or(1, usize::from)
        .min(TOUCH_THREADS_MAX);
    let share = mapping
        .bytes
        .div_ceil(threads)
        .next_multiple_of(2 << 20)
        .max(64 << 20);
    std::thread::scope(|scope| {
        let touching: Vec<_> = (0..mapping.bytes)
            .step_by(share)
            .map(|start| {
                scope.spawn(move || {
                    let bytes = share.min(mapping.bytes - start);
                    // SAFETY: inside the mapping; neither advice changes what the bytes hold.
                    unsafe {
                        let at = mapping.base.as_ptr().add(start).cast();
                        // A refusal (no huge pages on this machine) only costs speed.
                        let _ = rustix::mm::madvise(at, bytes, Advice::LinuxHugepage);
                        rustix::mm::madvise(at, bytes, Advice::LinuxPopulateWrite)
                    }
                })
            })
            .collect();
        for thread in touching {
            match thread.join().expect("touching does not panic") {
                // Kernels before 5.14 do not know this advice; pages are then populated at first use.
                Ok(()) | Err(rustix::io::Errno::INVAL) => {}
                Err(errno) => {
                    return Err(ClientError::os(format!(
                        "allocate {} bytes of memory",
                        mapping.bytes
                    ))(errno));
                }
            }
        }
        Ok(())
    })
}

/// Returns one region a slot, in the order of the slots' indices.
fn split(mapping: Mapping, geometry: &Geometry) -> (ArenaMemory, Vec<Region>) {
    let mapping = Arc::new(mapping);
    let mut end = 0;
    let regions = (0..geometry.slot_count())
        .map(|slot| {
            let place = geometry
                .slot_place(SlotIndex(slot))
                .expect("below slot_count");
            let (offset, bytes) = (place.offset as usize, place.bytes as usize);
            assert!(offset >= end, "slot {slot} overlaps the one before it");
            end = offset + bytes;
            assert!(end <= mapping.bytes, "slot {slot} ends beyond the arena");
            Region {
                mapping: mapping.clone(),
                offset,
                bytes,
            }
        })
        .collect();
    (ArenaMemory(mapping), regions)
}
