//! The head of every stored structure, and its checksum.
//!
//! The head is the same in every format version, so that a reader can tell another version from damage.

use offload_api::checksum::checksum;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{BLOCK, FORMAT_VERSION};
use crate::blocks::{BlockError, Blocks};
use crate::io::AlignedBytes;

/// The first 32 bytes of every stored structure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Head {
    /// Kind of structure.
    pub magic: [u8; 8],
    /// [`FORMAT_VERSION`].
    pub version: u32,
    /// CRC-32C of all `bytes`, computed with this field zero.
    pub crc: u32,
    /// Length in bytes, this head included; whole blocks.
    pub bytes: u64,
    /// Zero.
    pub reserved: u64,
}

const _: () = assert!(size_of::<Head>() == 32);

const CRC_OFFSET: usize = 12;

impl Head {
    /// A head to be completed by [`seal`].
    pub fn unsealed(magic: [u8; 8]) -> Self {
        Self {
            magic,
            version: FORMAT_VERSION,
            crc: 0,
            bytes: 0,
            reserved: 0,
        }
    }
}

/// Why bytes are not the expected structure.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    /// Zeros, or a structure of another job or store.
    #[error("there is none")]
    Blank,
    /// Other content: another magic number.
    #[error("it holds other content")]
    Foreign,
    /// Sound, but of another format version.
    #[error("it has format version {0}")]
    OtherVersion(u32),
    /// The checksum does not match: the only state that an interrupted write leaves.
    #[error("its checksum is {found:08x} instead of {expected:08x}")]
    Torn {
        /// Checksum in the head.
        expected: u32,
        /// Checksum of the bytes.
        found: u32,
    },
    /// A sound checksum over content that no writer makes.
    #[error("{0}")]
    Damaged(String),
    /// The device could not read it.
    #[error(transparent)]
    Device(#[from] BlockError),
}

/// Seals `parts`, of which the first starts with a [`Head`], into blocks.
pub fn seal(parts: &[&[u8]]) -> AlignedBytes {
    let bytes: usize = parts.iter().map(|part| part.len()).sum();
    assert!(bytes >= size_of::<Head>());
    let mut sealed = AlignedBytes::zeroed(bytes);
    let mut at = 0;
    for part in parts {
        sealed.as_mut_slice()[at..at + part.len()].copy_from_slice(part);
        at += part.len();
    }
    let blocks_bytes = sealed.len() as u64;
    let (head, _) = Head::mut_from_prefix(sealed.as_mut_slice()).expect("a head's worth of bytes");
    head.bytes = blocks_bytes;
    head.crc = 0;
    let crc = checksum(sealed.as_slice());
    sealed.as_mut_slice()[CRC_OFFSET..CRC_OFFSET + 4].copy_from_slice(&crc.to_le_bytes());
    sealed
}

/// Returns the checksum in the head of sealed blocks.
pub fn crc_of(sealed: &AlignedBytes) -> u32 {
    let (head, _) = Head::read_from_prefix(sealed.as_slice()).expect("a head's worth of bytes");
    head.crc
}

/// Reads the structure at `offset`, at most `bytes_max` long, and checks its head and checksum.
pub fn read(
    blocks: &mut impl Blocks,
    position: usize,
    offset: u64,
    bytes_max: u64,
    magic: [u8; 8],
) -> Result<AlignedBytes, Unreadable> {
    let mut first = AlignedBytes::zeroed(BLOCK as usize);
    blocks.read(position, offset, &mut first)?;
    let bytes = check_head(first.as_slice(), bytes_max, magic)?;
    let mut all = first;
    if bytes > BLOCK {
        all = AlignedBytes::zeroed(bytes as usize);
        blocks.read(position, offset, &mut all)?;
    }
    check(&mut all, bytes_max, magic)?;
    Ok(all)
}

/// Checks the head and checksum of blocks in memory, and leaves them unchanged.
fn check(all: &mut AlignedBytes, bytes_max: u64, magic: [u8; 8]) -> Result<(), Unreadable> {
    let bytes = check_head(all.as_slice(), bytes_max, magic)?;
    if bytes != all.len() as u64 {
        return Err(Unreadable::Damaged(format!(
            "its head says {bytes} bytes, but {} were read",
            all.len()
        )));
    }
    let (head, _) = Head::read_from_prefix(all.as_slice()).expect("checked above");
    let stored = &mut all.as_mut_slice()[CRC_OFFSET..CRC_OFFSET + 4];
    stored.fill(0);
    let crc = checksum(all.as_slice());
    all.as_mut_slice()[CRC_OFFSET..CRC_OFFSET + 4].copy_from_slice(&head.crc.to_le_bytes());
    if crc != head.crc {
        return Err(Unreadable::Torn {
            expected: head.crc,
            found: crc,
        });
    }
    if head.version != FORMAT_VERSION {
        return Err(Unreadable::OtherVersion(head.version));
    }
    if head.reserved != 0 {
        return Err(Unreadable::Damaged("a reserved field is not zero".into()));
    }
    Ok(())
}

/// Returns the length in a head, if it is plausible.
fn check_head(first: &[u8], bytes_max: u64, magic: [u8; 8]) -> Result<u64, Unreadable> {
    let (head, _) = Head::read_from_prefix(first).map_err(|_| Unreadable::Blank)?;
    if head.magic != magic {
        let zeros = first.iter().all(|&byte| byte == 0);
        return Err([Unreadable::Foreign, Unreadable::Blank][usize::from(zeros)].clone());
    }
    if head.bytes == 0 || head.bytes % BLOCK != 0 || head.bytes > bytes_max {
        return Err(Unreadable::Damaged(format!(
            "its head says {} bytes, but at most {bytes_max} fit",
            head.bytes
        )));
    }
    Ok(head.bytes)
}
