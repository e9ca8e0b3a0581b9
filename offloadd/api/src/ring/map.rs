//! The mapping of a ring's memory file, the only place that turns its bytes into words.
//!
//! Promises: no file is mapped that could be truncated later (no SIGBUS). Every access lies inside the mapping and is atomic,
//! so that a peer that writes at the same time causes wrong values and no undefined behaviour. Holds the `unsafe` of the rings.

use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::fs::SealFlags;
use rustix::mm::{MapFlags, ProtFlags};
use zerocopy::{FromBytes, IntoBytes};

use super::{RING_MAGIC, RingError, RingHeader};
use crate::{IODEPTH_MAX, PROTOCOL_VERSION};

/// Most entries of a ring: twice the operations of the deepest session, as unreaped completions stand beside them.
pub const RING_ENTRIES_MAX: u32 = (2 * IODEPTH_MAX).next_power_of_two();

const PAGE_BYTES: usize = 4096;
pub(super) const ENTRY_BYTES: usize = 64;
const ENTRY_WORDS: usize = ENTRY_BYTES / 8;

/// Offset of each index in the file.
pub(super) const SUBMISSION_TAIL: usize = 128;
pub(super) const SUBMISSION_HEAD: usize = 256;
pub(super) const COMPLETION_TAIL: usize = 384;
pub(super) const COMPLETION_HEAD: usize = 512;

/// Offset of the submission entries.
pub(super) const SUBMISSIONS: usize = PAGE_BYTES;

/// Offset of the completion entries.
pub(super) fn completions(entries: u32) -> usize {
    SUBMISSIONS + (entries as usize * ENTRY_BYTES).next_multiple_of(PAGE_BYTES)
}

/// Size of the memory file of rings with `entries` entries each.
pub fn ring_bytes(entries: u32) -> usize {
    completions(entries) + (entries as usize * ENTRY_BYTES).next_multiple_of(PAGE_BYTES)
}

/// A mapped ring file, unmapped when dropped. Either side may drop it first.
#[derive(Debug)]
pub struct RingMap {
    base: NonNull<u8>,
    bytes: usize,
    header: RingHeader,
}

// SAFETY: the mapping belongs to this value alone, and all access to it is by atomics.
unsafe impl Send for RingMap {}
// SAFETY: as above; `&self` allows nothing but atomic access.
unsafe impl Sync for RingMap {}

impl RingMap {
    /// Prepares a new ring on the daemon's side: sizes an empty memory file (made with `ALLOW_SEALING`), reserves its pages,
    /// writes the header and seals the size. `entries` is a power of two up to [`RING_ENTRIES_MAX`].
    pub fn create(fd: impl AsFd, entries: u32, epoch: crate::ids::Epoch) -> io::Result<Self> {
        assert!(
            entries.is_power_of_two() && entries <= RING_ENTRIES_MAX,
            "{entries} ring entries"
        );
        let bytes = ring_bytes(entries);
        if rustix::fs::fstat(&fd)?.st_size as usize != bytes {
            rustix::fs::ftruncate(&fd, bytes as u64)?;
        }
        // Without this, the first access on a machine without free memory would raise SIGBUS.
        let whole = rustix::fs::FallocateFlags::empty();
        rustix::fs::fallocate(&fd, whole, 0, bytes as u64)?;
        let wanted = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        if !rustix::fs::fcntl_get_seals(&fd)?.contains(wanted) {
            rustix::fs::fcntl_add_seals(&fd, wanted)?;
        }
        let header = RingHeader {
            magic: RING_MAGIC,
            version: PROTOCOL_VERSION,
            entries,
            epoch: epoch.0,
            reserved: 0,
        };
        let map = Self {
            base: map_shared(&fd, bytes)?,
            bytes,
            header,
        };
        for (place, word) in header.as_bytes().chunks_exact(8).enumerate() {
            let word = u64::from_ne_bytes(word.try_into().expect("chunks of 8"));
            map.word64(place * 8).store(word, Ordering::Relaxed);
        }
        Ok(map)
    }

    /// Opens a ring on the side of the process: checks that the file cannot shrink, has the right size and is a ring of this
    /// version.
    pub fn open(fd: impl AsFd) -> Result<Self, RingError> {
        let os = |op| {
            move |e: rustix::io::Errno| RingError::Os {
                op,
                source: e.into(),
            }
        };
        let form = |what: String| RingError::Form { what };
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(os("fcntl(F_GET_SEALS)"))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(form("it is not sealed against shrinking".into()));
        }
        // After the seal is checked: before, the size could still change.
        let bytes = rustix::fs::fstat(&fd).map_err(os("fstat"))?.st_size as usize;
        if !(ring_bytes(1)..=ring_bytes(RING_ENTRIES_MAX)).contains(&bytes) {
            return Err(form(format!("it has {bytes} bytes")));
        }
        let mut map = Self {
            base: map_shared(&fd, bytes).map_err(os("mmap"))?,
            bytes,
            header: RingHeader {
                magic: 0,
                version: 0,
                entries: 0,
                epoch: 0,
                reserved: 0,
            },
        };
        let mut copy = [0u8; size_of::<RingHeader>()];
        for (place, word) in copy.chunks_exact_mut(8).enumerate() {
            word.copy_from_slice(&map.word64(place * 8).load(Ordering::Relaxed).to_ne_bytes());
        }
        let header = RingHeader::read_from_bytes(&copy).expect("as many bytes");
        if header.magic != RING_MAGIC {
            return Err(form(format!("its magic is {:#018x}", header.magic)));
        }
        if header.version != PROTOCOL_VERSION {
            return Err(form(format!(
                "version {}, this program speaks {PROTOCOL_VERSION}",
                header.version
            )));
        }
        let entries = header.entries;
        if !entries.is_power_of_two() || entries > RING_ENTRIES_MAX || ring_bytes(entries) != bytes
        {
            return Err(form(format!("{entries} entries in {bytes} bytes")));
        }
        map.header = header;
        Ok(map)
    }

    /// Opens the ring of a previous daemon. Entries and epoch are that daemon's own record, because the process may have
    /// rewritten the header.
    pub fn adopt(fd: impl AsFd, entries: u32, epoch: crate::ids::Epoch) -> Result<Self, RingError> {
        let os = |op| {
            move |e: rustix::io::Errno| RingError::Os {
                op,
                source: e.into(),
            }
        };
        let form = |what: String| RingError::Form { what };
        if !entries.is_power_of_two() || entries > RING_ENTRIES_MAX {
            return Err(form(format!("{entries} entries")));
        }
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(os("fcntl(F_GET_SEALS)"))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(form("it is not sealed against shrinking".into()));
        }
        let bytes = rustix::fs::fstat(&fd).map_err(os("fstat"))?.st_size as usize;
        if bytes != ring_bytes(entries) {
            return Err(form(format!("{entries} entries in {bytes} bytes")));
        }
        Ok(Self {
            base: map_shared(&fd, bytes).map_err(os("mmap"))?,
            bytes,
            header: RingHeader {
                magic: RING_MAGIC,
                version: PROTOCOL_VERSION,
                entries,
                epoch: epoch.0,
                reserved: 0,
            },
        })
    }

    /// The header when the ring was made or opened.
    pub fn header(&self) -> &RingHeader {
        &self.header
    }

    /// The index at `offset`.
    pub(super) fn index(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.bytes);
        // SAFETY: aligned and inside the mapping (asserted; the base is page aligned), which lives as long as `self`;
        // other processes may write it, which an atomic allows.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// Copies the 64 bytes at `offset` out, each word once.
    pub(super) fn read_entry(&self, offset: usize) -> [u8; ENTRY_BYTES] {
        let mut copy = [0; ENTRY_BYTES];
        for (place, word) in copy.chunks_exact_mut(8).enumerate() {
            // Relaxed: the index that made this entry visible was read with Acquire.
            let value = self.word64(offset + place * 8).load(Ordering::Relaxed);
            word.copy_from_slice(&value.to_ne_bytes());
        }
        copy
    }

    /// Copies 64 bytes in at `offset`.
    pub(super) fn write_entry(&self, offset: usize, entry: &[u8]) {
        assert_eq!(entry.len(), ENTRY_WORDS * 8);
        for (place, word) in entry.chunks_exact(8).enumerate() {
            let value = u64::from_ne_bytes(word.try_into().expect("chunks of 8"));
            self.word64(offset + place * 8)
                .store(value, Ordering::Relaxed);
        }
    }

    fn word64(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.bytes);
        // SAFETY: as in `index`.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }
}

impl Drop for RingMap {
    fn drop(&mut self) {
        // SAFETY: mapped by `map_shared` with this size, and nothing borrows from it any more.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}

fn map_shared(fd: impl AsFd, bytes: usize) -> rustix::io::Result<NonNull<u8>> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice touches no memory of this program.
    let base = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            bytes,
            access,
            MapFlags::SHARED | MapFlags::POPULATE,
            fd,
            0,
        )?
    };
    Ok(NonNull::new(base.cast()).expect("mmap never answers address 0 unless asked to"))
}
