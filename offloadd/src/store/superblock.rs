//! Which store a device belongs to, and how it is cut up. Two equal copies a device.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::sealed::{self, Head, Unreadable};
use super::{BLOCK, DATA_OFFSET, DEVICES_MAX};
use crate::blocks::AlignedBytes;
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

/// A device's superblock, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// Of the store.
    pub store: StoreId,
    /// Of this device in the store.
    pub device_index: u32,
    /// Devices of the store.
    pub device_count: u32,
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
    device_index: u32,
    device_count: u32,
    block_bytes: u32,
    reserved: u32,
    data_offset: u64,
    data_bytes: u64,
    read_bytes_per_s: u64,
    write_bytes_per_s: u64,
    created_unix_s: u64,
}

const _: () = assert!(size_of::<Raw>() == 104);

impl Superblock {
    /// One sealed block.
    pub fn encode(&self) -> AlignedBytes {
        let raw = Raw {
            head: Head::unsealed(MAGIC),
            store: self.store.0,
            device_index: self.device_index,
            device_count: self.device_count,
            block_bytes: BLOCK_BYTES,
            reserved: 0,
            data_offset: DATA_OFFSET,
            data_bytes: self.data_bytes,
            read_bytes_per_s: self.read_bytes_per_s,
            write_bytes_per_s: self.write_bytes_per_s,
            created_unix_s: self.created_unix_s,
        };
        sealed::seal(&[raw.as_bytes()])
    }

    /// From a block whose seal is sound.
    pub fn decode(block: &AlignedBytes) -> Result<Self, Unreadable> {
        let (raw, rest) = Raw::ref_from_prefix(block.as_slice()).expect("a block");
        let sound = raw.reserved == 0
            && rest.iter().all(|&byte| byte == 0)
            && raw.block_bytes == BLOCK_BYTES
            && raw.data_offset == DATA_OFFSET
            && raw.data_bytes % BLOCK == 0
            && raw.data_bytes > 0
            && raw.data_bytes < 1 << 60
            && (1..=DEVICES_MAX).contains(&raw.device_count)
            && raw.device_index < raw.device_count;
        if !sound {
            return Err(Unreadable::Damaged(
                "its checksum fits, its fields make no sense".into(),
            ));
        }
        Ok(Self {
            store: StoreId(raw.store),
            device_index: raw.device_index,
            device_count: raw.device_count,
            data_bytes: raw.data_bytes,
            read_bytes_per_s: raw.read_bytes_per_s,
            write_bytes_per_s: raw.write_bytes_per_s,
            created_unix_s: raw.created_unix_s,
        })
    }
}
