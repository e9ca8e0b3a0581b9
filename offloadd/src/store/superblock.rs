//! The superblock: the store a device belongs to, and its layout. A device has two equal copies.
//!
//! The store's catalog takes precedence: a device that it does not list belongs to no store.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

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

/// Random bytes drawn when a device is added to a store; zeros for the devices it was formatted with. Together with the number
/// it identifies a device for ever: a device whose admission was interrupted is not mistaken for a later one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceId(pub [u8; 16]);

/// Measured or configured rates of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MeasuredRates {
    /// Bytes read a second; 0 is unknown.
    pub read_bytes_per_s: u64,
    /// Bytes written a second; 0 is unknown.
    pub write_bytes_per_s: u64,
}

/// A device's superblock, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    pub store: StoreId,
    /// Number of this device in the store, never reused.
    pub number: u32,
    /// Id that tells it from another device of this number.
    pub id: DeviceId,
    /// Whether it has left the store in order.
    pub drained: bool,
    /// Bytes from [`DATA_OFFSET`] on, in whole blocks.
    pub data_bytes: u64,
    /// Read rate measured at format; 0 is unknown.
    pub read_bytes_per_s: u64,
    /// Write rate measured at format; 0 is unknown.
    pub write_bytes_per_s: u64,
    /// Time of the format, in seconds of the unix clock.
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
    /// Rates measured when the device was added.
    pub fn rates(&self) -> MeasuredRates {
        MeasuredRates {
            read_bytes_per_s: self.read_bytes_per_s,
            write_bytes_per_s: self.write_bytes_per_s,
        }
    }

    /// Encodes the superblock as one sealed block.
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

    /// Decodes a block whose seal is sound.
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
                "its checksum is right, but its fields are invalid".into(),
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
