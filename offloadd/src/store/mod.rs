//! What lies on the devices, byte by byte, and the three things done to it outside the data path: format, recover, verify.
//!
//! ```text
//! every device   0          superblock, copy A (one block)
//!                64 KiB     superblock, copy B
//! device 0 only  128 KiB    catalog, copy A: header, one entry a job
//!                512 KiB    catalog, copy B
//! every device   896 KiB    wear, two copies written in turn: see [`wear`]
//!                960 KiB
//! every device   1 MiB      data, in whole blocks, to the end: extents of tiles; on device 0 also each job's area:
//!
//! job's area     definition, copy A │ copy B      tiles and their extents, layout; written once
//!                slot 0: record A │ record B │ mark A │ mark B     even generations
//!                slot 1: record A │ record B │ mark A │ mark B     odd generations
//! ```
//!
//! Everything but tiles and wear stands twice: one damaged copy is named and mended from the other. Each starts with the same
//! [`sealed::Head`], whose checksum covers all its blocks. Little endian, fixed width, reserved bytes zero.
//!
//! - A *record* is the manifest of one generation: for each tile which extent holds it, its checksum and the generation
//!   that wrote it; then one blob a rank. It is written after the tiles are flushed, so a record that reads back whole
//!   is true, and one that power loss cut off does not read back.
//! - A *mark* says more about the record beside it without touching it: `confirmed` (every node has this generation), or
//!   `overwriting` (durability none: its tiles are being written in place, so they are not to be trusted).
//! - A *generation can be resumed from* when it is the newest, or when the newest is not yet confirmed: from the moment
//!   the newest is confirmed, the extents of the one before are written again. See [`manifest::resumable`].
//!
//! New reader, old data and the other way round: another `version` is refused by number, untouched. The head and its
//! checksum are the same in every version.

pub mod catalog;
pub mod content;
pub mod definition;
pub mod format;
pub mod manifest;
pub mod placement;
pub mod recover;
pub mod sealed;
pub mod superblock;
pub mod tile_table;
pub mod twins;
pub mod verify;
pub mod wear;

use offload_api::BLOCK_BYTES;

/// [`BLOCK_BYTES`] for offsets.
pub const BLOCK: u64 = BLOCK_BYTES as u64;

/// Version of everything stored.
pub const FORMAT_VERSION: u32 = 1;

/// Where the two superblocks of a device lie.
pub const SUPERBLOCK_OFFSETS: [u64; 2] = [0, 64 << 10];

/// Where the two catalogs lie, on device 0.
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
pub const DEVICES_MAX: u32 = 64;

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
    /// Format would destroy one.
    #[error(
        "{path} holds a store already: drop it from the list, or format with --force to lose what is in it"
    )]
    HoldsStore {
        /// Device.
        path: String,
    },
    /// Made by a later offloadd.
    #[error(
        "{what} of {path} has format version {version}, this offloadd knows {FORMAT_VERSION}: use the newer offloadd; nothing was changed"
    )]
    NewerVersion {
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
        "{path} and {other_path} are both device {index} of their store: one is listed twice or is a copy"
    )]
    Duplicate {
        /// Device.
        path: String,
        /// The other.
        other_path: String,
        /// Their index.
        index: u32,
    },
    /// Not all devices are there.
    #[error(
        "device {index} of {count} is missing from the list: a store opens with all its devices or not at all"
    )]
    Missing {
        /// Its index.
        index: u32,
        /// Devices of the store.
        count: u32,
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
