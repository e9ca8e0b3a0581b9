//! Which store a device belongs to, and how it is cut up. Two equal copies a device.
//!
//! The store's catalog has the last word: a device that it does not list is of no store.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::format::MeasuredRates;
use super::sealed::{self, Head, Unreadable};
use super::{BLOCK, DATA_OFFSET};
use crate::io::AlignedBytes;
use offload_api::BLOCK_BYTES;

pub(crate) const MAGIC: [u8; 8] = *b"OFFLDEV1";

/// 16 random bytes drawn at format, the same on all devices of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreId(pub [u8; 16]);

impl std::fmt::Display for StoreId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Random bytes drawn when a device comes to a store; zeros of those it was formatted with. A number and it are one device
/// for ever: a device that was cut off while it came is not taken for the one that came later.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceId(pub [u8; 16]);

/// A device's superblock, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Of the store.
    pub store: StoreId,
    /// Of this device in the store, never given to another.
    pub number: u32,
    /// Tells it from another of this number.
    pub id: DeviceId,
    /// It has left the store, in order.
    pub drained: bool,
    /// From [`DATA_OFFSET`] on, whole blocks.
    pub data_bytes: u64,
    /// Measured at format, 0 = unknown.
    pub read_bytes_per_s: u64,
    /// Measured at format, 0 = unknown.
    pub write_bytes_per_s: u64,
    /// Seconds of the unix clock.
    pub created_unix_s: u64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Raw {
    head: Head,
    store: [u8; 16],
    number: u32,
    reserved: u32,
    block_bytes: u32,
    drained: u32,
    data_offset: u64,
    data_bytes: u64,
    read_bytes_per_s: u64,
    write_bytes_per_s: u64,
    created_unix_s: u64,
    id: [u8; 16],
}

const _: () = assert!(size_of::<Raw>() == 120);

impl Superblock {
    /// As they were measured when the device came.
    pub fn rates(&self) -> MeasuredRates {
        MeasuredRates {
            read_bytes_per_s: self.read_bytes_per_s,
            write_bytes_per_s: self.write_bytes_per_s,
        }
    }

    /// One sealed block.
    pub fn encode(&self) -> AlignedBytes {
        let raw = Raw {
            head: Head::unsealed(MAGIC),
            store: self.store.0,
            number: self.number,
            reserved: 0,
            block_bytes: BLOCK_BYTES,
            drained: u32::from(self.drained),
            data_offset: DATA_OFFSET,
            data_bytes: self.data_bytes,
            read_bytes_per_s: self.read_bytes_per_s,
            write_bytes_per_s: self.write_bytes_per_s,
            created_unix_s: self.created_unix_s,
            id: self.id.0,
        };
        sealed::seal(&[raw.as_bytes()])
    }

    /// From a block whose seal is sound.
    pub fn decode(block: &AlignedBytes) -> Result<Self, Unreadable> {
        let (raw, rest) = Raw::ref_from_prefix(block.as_slice()).expect("a block");
        let sound = raw.reserved == 0
            && raw.drained <= 1
            && rest.iter().all(|&byte| byte == 0)
            && raw.block_bytes == BLOCK_BYTES
            && raw.data_offset == DATA_OFFSET
            && raw.data_bytes % BLOCK == 0
            && raw.data_bytes > 0
            && raw.data_bytes < 1 << 60;
        if !sound {
            return Err(Unreadable::Damaged(
                "its checksum fits, its fields make no sense".into(),
            ));
        }
        Ok(Self {
            store: StoreId(raw.store),
            number: raw.number,
            id: DeviceId(raw.id),
            drained: raw.drained == 1,
            data_bytes: raw.data_bytes,
            read_bytes_per_s: raw.read_bytes_per_s,
            write_bytes_per_s: raw.write_bytes_per_s,
            created_unix_s: raw.created_unix_s,
        })
    }
}
