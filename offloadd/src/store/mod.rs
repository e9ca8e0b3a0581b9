//! What lies on the devices, byte by byte, and the three things done to it outside the data path: format, recover, verify.
//!
//! ```text
//! every device   0          superblock, copy A (one block)
//!                64 KiB     superblock, copy B
//! one device     128 KiB    catalog, copy A: header, one entry a job, one entry a device
//!  (the home)    512 KiB    catalog, copy B
//! every device   896 KiB    wear, two copies written in turn: see [`wear`]
//!                960 KiB
//! every device   1 MiB      data, in whole blocks, to the end: extents of tiles; at home also each job's area:
//!
//! job's area     copy A: definition │ slot 0: record, mark │ slot 1: record, mark
//!                a gap as long as the job's largest tile
//!                copy B: the same
//! ```
//!
//! Everything but tiles and wear stands twice: one damaged copy is named and mended from the other. Each starts with the same
//! [`sealed::Head`], whose checksum covers all its blocks. Little endian, fixed width, reserved bytes zero. A job's copies
//! are so far from each other that a write of one of its tiles to a wrong place cannot hit both.
//!
//! - A *record* is the manifest of one generation: for each tile which extent holds it, its checksum and the generation
//!   that wrote it; then one blob a rank. It is written after the tiles are flushed, so a record that reads back whole
//!   is true, and one that power loss cut off does not read back. Even generations are in slot 0, odd ones in slot 1.
//! - A *void* is what a slot holds instead of a record: from when the job is defined, and after a record is given up. A slot
//!   therefore never holds zeros or another job's record unless a drive erred; both copies damaged like that may have been
//!   the newest generation, so nobody resumes until it is discarded. The copy with the higher sequence counts.
//! - A *mark* says more about the record beside it without touching it: `confirmed` (every node has this generation), or
//!   `overwriting` (durability none: its tiles are being written in place, so they are not to be trusted).
//! - The *catalog* says which devices the store is made of. A device comes by one write of it, after its superblock, and
//!   goes by one, before its superblock says so: whatever a cut leaves, a device is of the store or it is not. A superblock
//!   whose device the catalog does not list is of no store. Each life of a daemon writes the catalog before it serves, two
//!   numbers further: what was handed over by one life is refused when another one has been there since. It moves itself when
//!   its device is drained: see [`home`].
//! - A *definition* (tiles and their extents, layout) is written copy A, flush, copy B, flush, and again when tiles move to another device, with a higher revision: the newer sound copy
//!   counts. Records name the first or the second extent of a tile, so they stay true: an extent is exchanged while it
//!   holds nothing that a record names, or for one that holds the same bytes, flushed before. The old extent is taken again
//!   only when both copies of the new definition are durable. A record says the revision it was written under; a
//!   definition older than that is damage.
//! - A *generation can be resumed from* when it is the newest, or when the newest is not yet confirmed: from the moment
//!   the newest is confirmed, the extents of the one before are written again. See [`manifest::resumable`].
//!
//! Another `version` is refused by number, untouched. The head and its checksum are the same in every version.

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
pub mod wear;

use offload_api::BLOCK_BYTES;

/// [`BLOCK_BYTES`] for offsets.
pub const BLOCK: u64 = BLOCK_BYTES as u64;

/// Version of everything stored.
pub const FORMAT_VERSION: u32 = 3;

/// Where the two superblocks of a device lie.
pub const SUPERBLOCK_OFFSETS: [u64; 2] = [0, 64 << 10];

/// Where the two catalogs lie, on the device that is the store's home.
pub const CATALOG_OFFSETS: [u64; 2] = [128 << 10, 512 << 10];

/// Room of one catalog.
pub const CATALOG_BYTES_MAX: u64 = CATALOG_OFFSETS[1] - CATALOG_OFFSETS[0];

/// Where the two copies of a device's wear lie.
pub const WEAR_OFFSETS: [u64; 2] = [896 << 10, 960 << 10];

/// Room of one of them.
pub const WEAR_BYTES_MAX: u64 = WEAR_OFFSETS[1] - WEAR_OFFSETS[0];

/// Where data starts on every device: room for both catalogs, on a boundary every drive likes.
pub const DATA_OFFSET: u64 = 1 << 20;

/// Devices of one store. Bounds what a superblock can ask for.
pub use offload_api::DEVICES_MAX;

const _: () = assert!(CATALOG_OFFSETS[1] + CATALOG_BYTES_MAX <= WEAR_OFFSETS[0]);
const _: () = assert!(WEAR_OFFSETS[1] + WEAR_BYTES_MAX <= DATA_OFFSET);

/// A store is not to be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// A device failed.
    #[error(transparent)]
    Device(#[from] crate::blocks::BlockError),
    /// No superblock.
    #[error("{path} holds no store: run `offloadd format` on all devices of the store first")]
    NoStore {
        /// Device.
        path: String,
    },
    /// No superblock, and something else.
    #[error(
        "{path} holds something that offloadd did not write: take it from the list `devices`, or restore it from a backup if it was a device of the store"
    )]
    NotOurs {
        /// Device.
        path: String,
    },
    /// Format would destroy one.
    #[error(
        "{path} holds a store already: drop it from the list, or format with --force to lose what is in it"
    )]
    HoldsStore {
        /// Device.
        path: String,
    },
    /// Made by another offloadd.
    #[error(
        "{what} of {path} has format version {version}, this offloadd reads only version {FORMAT_VERSION}: use the offloadd that made the store, or format the device to lose what is in it; nothing was changed"
    )]
    OtherVersion {
        /// Which structure.
        what: String,
        /// Device.
        path: String,
        /// As found.
        version: u32,
    },
    /// Neither copy can be read.
    #[error(
        "{what} of {path}: both copies are damaged ({first}; {second}): restore the device from a backup, or format it and start again"
    )]
    Damaged {
        /// Which structure, of which job.
        what: String,
        /// Device.
        path: String,
        /// About copy A.
        first: String,
        /// About copy B.
        second: String,
    },
    /// The device that has it is not listed, or has lost it.
    #[error(
        "none of {paths} has the store's catalog: the device that has it is missing from the list `devices`, or has lost it"
    )]
    NoCatalog {
        /// Those that are listed.
        paths: String,
    },
    /// A device of another store.
    #[error(
        "{path} belongs to store {found}, {other_path} to {expected}: list the devices of one store"
    )]
    Foreign {
        /// Device.
        path: String,
        /// Its store.
        found: String,
        /// The first device.
        other_path: String,
        /// Its store.
        expected: String,
    },
    /// The same device twice, or a copy of it.
    #[error(
        "{path} and {other_path} are both device {number} of their store: one is listed twice or is a copy"
    )]
    Duplicate {
        /// Device.
        path: String,
        /// The other.
        other_path: String,
        /// Theirs in the store.
        number: u32,
    },
    /// Not all devices are there.
    #[error(
        "device {number} of the store{} is missing from the list `devices`: add it there. A store opens with all its devices or not at all",
        known_as(path)
    )]
    Missing {
        /// In the store.
        number: u32,
        /// What it was called when it came to the store, as far as that is known.
        path: Option<String>,
    },
    /// Beside the devices of a store, one that is of none.
    #[error(
        "{path} is not of the store that {other_path} belongs to: take it from the list `devices`, and bring it into the store with `offloadd device add {path}`"
    )]
    NotAdded {
        /// Device.
        path: String,
        /// One of the store.
        other_path: String,
    },
    /// A blank device, and the store lacks one.
    #[error(
        "{path} holds no superblock, and the store that {other_path} belongs to lacks a device: either `offloadd format` was cut off, or {path} lost its beginning. If the store is new, run `offloadd format --force` on all devices of the list `devices`, which loses what is in them; otherwise restore {path} from a backup"
    )]
    Incomplete {
        /// Device.
        path: String,
        /// One of the store.
        other_path: String,
    },
    /// Only devices that have left their store.
    #[error(
        "{path} was drained: it is of no store any more. List the devices that `offloadd device drain` left, or make a new store with `offloadd format`"
    )]
    Drained {
        /// Device.
        path: String,
    },
    /// The device has become smaller.
    #[error(
        "{path} has {found_bytes} bytes, its store was made for {expected_bytes}: it was cut short or replaced"
    )]
    Shrunk {
        /// Device.
        path: String,
        /// Now.
        found_bytes: u64,
        /// At format.
        expected_bytes: u64,
    },
    /// Too small to hold a store.
    #[error("{path} has {bytes} bytes: a device of a store has at least {needed_bytes}")]
    TooSmall {
        /// Device.
        path: String,
        /// Its size.
        bytes: u64,
        /// Least size.
        needed_bytes: u64,
    },
    /// What the catalog says cannot be.
    #[error("the store contradicts itself: {0}. Please report this; `offloadd verify` shows more")]
    Contradiction(String),
    /// A request outside the limits.
    #[error("{0}")]
    Invalid(String),
}

fn known_as(path: &Option<String>) -> String {
    (path.as_ref()).map_or_else(String::new, |path| format!(" ({path} when it came)"))
}
