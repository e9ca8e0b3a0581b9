//! Layout of the devices, byte by byte, and the operations on it outside the data path: format, recover, verify.
//!
//! ```text
//! every device   0          superblock, copy A (one block)
//!                64 KiB     superblock, copy B
//! one device     128 KiB    catalog, copy A: header, one entry a job, one entry a device
//!   (metadata)   512 KiB    catalog, copy B
//! every device   896 KiB    unused; earlier programs kept counters here
//! every device   1 MiB      data, in whole blocks, to the end: extents of tiles; on the metadata device also each job's area:
//!
//! job's area     copy A: definition │ slot 0: record, mark │ slot 1: record, mark
//!                a gap as long as the job's largest tile
//!                copy B: the same
//! ```
//!
//! Everything except tiles has two copies: a damaged copy is reported and repaired from the other. Each copy starts
//! with the same [`sealed::Head`], whose checksum covers all its blocks. Numbers are little endian with fixed width; reserved
//! bytes are zero. The copies of a job's area are so far from each other that a misdirected write of one of its tiles cannot
//! hit both.
//!
//! - A *record* is the manifest of one generation: for each tile the extent that holds it, its checksum and the generation
//!   that wrote it; then one blob a rank. It is written after the tiles are flushed. A record that reads back whole is
//!   therefore true; one cut short by a power failure does not read back. Even generations use slot 0, odd ones slot 1.
//! - A *void* fills a slot without a record: from the definition of the job on, and after a record is discarded. A slot that
//!   holds neither a record nor a void (zeros, or another job's record) therefore means that the drive erred. If both copies
//!   are damaged like that, the slot may have held the newest generation; the job cannot be resumed until the slot is
//!   discarded. Records and voids have a sequence: of the two copies of a slot, the one with the higher sequence counts.
//! - A *mark* adds state to the record beside it without rewriting it: `confirmed` (every node has this generation), or
//!   `overwriting` (without durability: its tiles are being overwritten in place, so they are not valid).
//! - The *catalog* lists the devices of the store. One write of it adds a device, after its superblock is written, and one
//!   write removes it, before its superblock says so. After any power cut a device either belongs to the store or does not:
//!   the catalog decides. Each incarnation of a daemon writes the catalog before it serves, with a sequence two higher, so
//!   that state handed over by an incarnation is refused when another one served since. The catalog moves when its device is
//!   drained: see [`metadata_device`].
//! - A *definition* holds the tiles with their extents, and the layout.
//!   - It is written copy A, flush, copy B, flush; the sound copy with the higher revision counts.
//!   - When tiles move to another device, it is written again with a higher revision.
//!   - Records name the first or second extent of a tile and must stay true. An extent is therefore replaced only while no
//!     record names it, or by one that holds the same bytes and was flushed before.
//!   - The old extent is reused only after both copies of the new definition are durable.
//!   - A record names the revision it was written under; a definition with a lower one is damage.
//! - A job can *resume* from the newest generation, and from the one before only until the newest is confirmed: then the
//!   extents of the one before are overwritten. See [`manifest::resumable`].
//!
//! Another `version` is refused and not changed. The head and its checksum are the same in every version.

#[cfg(test)]
mod docs;

pub mod catalog;
pub mod content;
pub mod definition;
pub mod dual_copy;
pub mod format;
pub mod manifest;
pub mod metadata_device;
pub mod placement;
pub mod recover;
pub mod sealed;
pub mod superblock;
pub mod tile_table;
pub mod verify;

use std::path::Path;

use offload_api::BLOCK_BYTES;
use offload_support::paths::Word;

/// [`BLOCK_BYTES`] for offsets.
pub const BLOCK: u64 = BLOCK_BYTES as u64;

/// Version of the stored format.
///
/// 1. The first one.
/// 2. Devices come to a store and leave it: superblocks have the set of devices and its number.
/// 3. A slot for a commit's record is never empty, so that damage is told from nothing, and its copies lie farther apart than the largest tile.
///
/// Counters of written bytes, which nothing depended on, were stored between the catalogs and the data until 2026-11-29; that space is
/// not read any more. A store with them opens, and earlier programs open a store without them.
pub const FORMAT_VERSION: u32 = 3;

/// Offsets of the two superblocks of a device.
pub const SUPERBLOCK_OFFSETS: [u64; 2] = [0, 64 << 10];

/// Offsets of the two catalogs, on the metadata device.
pub const CATALOG_OFFSETS: [u64; 2] = [128 << 10, 512 << 10];

/// Bytes of one catalog.
pub const CATALOG_BYTES_MAX: u64 = CATALOG_OFFSETS[1] - CATALOG_OFFSETS[0];

/// Start of the data area on every device: after superblocks and catalogs, at a boundary that suits every drive.
pub const DATA_OFFSET: u64 = 1 << 20;

/// Most devices of one store: as many as a catalog may list.
pub use offload_api::DEVICES_MAX;

const _: () = assert!(CATALOG_OFFSETS[1] + CATALOG_BYTES_MAX <= DATA_OFFSET);

/// Why a store cannot be opened or formatted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// A device failed.
    #[error(transparent)]
    Device(#[from] crate::blocks::BlockError),
    /// There is no superblock.
    #[error("{path} holds no store: run `offloadd format` on all devices of the store first")]
    NoStore {
        /// Path of the device.
        path: String,
    },
    /// There is no superblock but other content.
    #[error(
        "{path} holds content that offloadd did not write: remove it from the list `devices`; if it was a device of the store, it was overwritten: restore it from a backup"
    )]
    NotOurs {
        /// Path of the device.
        path: String,
    },
    /// Format would destroy a store.
    #[error(
        "{path} already holds a store: remove it from the list, or format it with --force, which deletes that store"
    )]
    HoldsStore {
        /// Path of the device.
        path: String,
    },
    /// Another release made the structure.
    #[error(
        "{what} of {path} has format version {version}, this offloadd reads only version {FORMAT_VERSION}: use the release that made the store, or format the device, which deletes the store; nothing was changed"
    )]
    OtherVersion {
        /// Name of the structure.
        what: String,
        /// Path of the device.
        path: String,
        /// Version found.
        version: u32,
    },
    /// Neither copy can be read.
    #[error(
        "{what} of {path}: both copies are damaged ({first}; {second}): restore the device from a backup, or format it and start again"
    )]
    Damaged {
        /// Name of the structure and its job.
        what: String,
        /// Path of the device.
        path: String,
        /// Defect of copy A.
        first: String,
        /// Defect of copy B.
        second: String,
    },
    /// No listed device holds the catalog.
    #[error(
        "none of {paths} has the store's catalog: the device that holds it is missing from the list `devices`, or has lost it"
    )]
    NoCatalog {
        /// Paths of the listed devices.
        paths: String,
    },
    /// A device belongs to another store.
    #[error(
        "{path} belongs to store {found}, {other_path} to {expected}: list the devices of one store"
    )]
    Foreign {
        /// Path of the device.
        path: String,
        /// Id of its store.
        found: String,
        /// Path of the first device.
        other_path: String,
        /// Id of its store.
        expected: String,
    },
    /// A device is listed twice, or is a copy of another.
    #[error(
        "{path} and {other_path} are both device {number} of their store: one is listed twice or is a copy"
    )]
    Duplicate {
        /// Path of the device.
        path: String,
        /// Path of the other device.
        other_path: String,
        /// Number of both in the store.
        number: u32,
    },
    /// A device of the store is missing.
    #[error(
        "device {number} of the store{} is missing from the list `devices`: add it there; a store opens only with all its devices",
        known_as(path)
    )]
    Missing {
        /// Number of the device in the store.
        number: u32,
        /// Last known path of the device.
        path: Option<String>,
    },
    /// A device of no store is listed beside devices of a store.
    #[error(
        "{path} does not belong to the store of {other_path}: remove it from the list `devices`, and add it to the store with `offloadd device add {}`",
        Word(Path::new(path))
    )]
    NotAdded {
        /// Path of the device.
        path: String,
        /// Path of a device of the store.
        other_path: String,
    },
    /// A blank device is listed, and a device of the store is missing.
    #[error(
        "{path} holds no superblock, and the store of {other_path} lacks a device: either `offloadd format` was interrupted, or {path} lost its first blocks. If the store is new, run `offloadd format --force` on all devices of the list `devices`, which deletes their content; otherwise restore {path} from a backup"
    )]
    Incomplete {
        /// Path of the device.
        path: String,
        /// Path of a device of the store.
        other_path: String,
    },
    /// All listed devices have left their store.
    #[error(
        "{path} was drained and belongs to no store: list the remaining devices of its store, or make a new store with `offloadd format`"
    )]
    Drained {
        /// Path of the device.
        path: String,
    },
    /// The device is smaller than when it was formatted.
    #[error(
        "{path} has {found_bytes} bytes, its store needs {expected_bytes}: it was truncated or replaced"
    )]
    Shrunk {
        /// Path of the device.
        path: String,
        /// Size now.
        found_bytes: u64,
        /// Size when it was formatted.
        expected_bytes: u64,
    },
    /// The device is too small for a store.
    #[error("{path} has {bytes} bytes, a device of a store needs at least {needed_bytes}")]
    TooSmall {
        /// Path of the device.
        path: String,
        /// Size of the device.
        bytes: u64,
        /// Least size.
        needed_bytes: u64,
    },
    /// The catalog contradicts itself or the devices.
    #[error(
        "the store contradicts itself: {0}; please report this with the output of `offloadd verify`"
    )]
    Contradiction(String),
    /// A request outside the limits.
    #[error("{0}")]
    Invalid(String),
}

fn known_as(path: &Option<String>) -> String {
    (path.as_ref()).map_or_else(String::new, |path| format!(" (last seen at {path})"))
}
