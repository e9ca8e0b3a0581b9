//! The stored definition: the job's tiles with their extents, and its layout. Tiles and layout never change. Extents change
//! when tiles move to another device, with a higher revision.
//!
//! In memory a device is known by its index in this incarnation of the daemon, on the devices by its number.

use std::sync::Arc;

use offload_api::ids::DeviceIndex;
use offload_api::{LAYOUT_BYTES_MAX, TILES_MAX};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::BLOCK;
use super::definition::{Durability, JobDefinition, Tile, TileKind};
use super::sealed::{self, Head, Unreadable};
use crate::io::AlignedBytes;

pub(crate) const MAGIC: [u8; 8] = *b"OFFLDEF1";

/// Place of one version of a tile; its length is the tile's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    pub device: DeviceIndex,
    /// First byte on the device.
    pub offset: u64,
}

/// A definition with the places of its tiles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TileTable {
    /// The job's definition.
    pub definition: Arc<JobDefinition>,
    /// Two extents a tile; without durability both are the same.
    pub extents: Vec<[Extent; 2]>,
    /// Number of times extents were replaced.
    pub revision: u32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawTableHeader {
    head: Head,
    job_id: u64,
    tile_count: u64,
    layout_bytes: u32,
    revision: u32,
    durability: u32,
    nodes: u32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawTile {
    unit: u32,
    kind: u32,
    elem_offset: u64,
    tile_bytes: u32,
    devices: [u32; 2],
    reserved: u32,
    offsets: [u64; 2],
}

const _: () = assert!(size_of::<RawTableHeader>() == 64 && size_of::<RawTile>() == 48);

/// Largest size of one copy; bounds the allocation that a head can ask for.
pub(crate) const BYTES_MAX: u64 =
    (64 + 48 * TILES_MAX as u64 + LAYOUT_BYTES_MAX as u64).next_multiple_of(BLOCK);

/// Bytes of one copy.
pub fn stored_bytes(definition: &JobDefinition) -> u64 {
    let tiles = (definition.tiles().len() * size_of::<RawTile>()) as u64;
    (size_of::<RawTableHeader>() as u64 + tiles + definition.layout().len() as u64)
        .next_multiple_of(BLOCK)
}

impl TileTable {
    /// Encodes the table as sealed blocks, [`stored_bytes`] long. `numbers` has the number of each device, by index.
    pub fn encode(&self, job_id: u64, numbers: &[u32]) -> AlignedBytes {
        let definition = &self.definition;
        assert_eq!(definition.tiles().len(), self.extents.len());
        let header = RawTableHeader {
            head: Head::unsealed(MAGIC),
            job_id,
            tile_count: definition.tiles().len() as u64,
            layout_bytes: definition.layout().len() as u32,
            revision: self.revision,
            durability: definition.durability() as u32,
            nodes: definition.nodes(),
        };
        let tiles: Vec<RawTile> = definition
            .tiles()
            .iter()
            .zip(&self.extents)
            .map(|(tile, extents)| RawTile {
                unit: tile.unit,
                kind: tile.kind as u32,
                elem_offset: tile.elem_offset,
                tile_bytes: tile.tile_bytes,
                devices: extents.map(|extent| numbers[extent.device.0 as usize]),
                reserved: 0,
                offsets: extents.map(|extent| extent.offset),
            })
            .collect();
        sealed::seal(&[header.as_bytes(), tiles.as_bytes(), definition.layout()])
    }

    /// Decodes blocks whose seal is sound and that hold job `job_id`. `numbers` as for [`Self::encode`].
    pub fn decode(blocks: &AlignedBytes, job_id: u64, numbers: &[u32]) -> Result<Self, Unreadable> {
        let damaged = |what: String| Unreadable::Damaged(what);
        let (header, rest) = RawTableHeader::ref_from_prefix(blocks.as_slice()).expect("a block");
        if header.job_id != job_id {
            return Err(damaged(format!(
                "it belongs to job id {}, not {job_id}",
                header.job_id
            )));
        }
        if header.tile_count > TILES_MAX as u64 || header.layout_bytes > LAYOUT_BYTES_MAX as u32 {
            return Err(damaged("its counts exceed its size".into()));
        }
        let (raw_tiles, rest) =
            <[RawTile]>::ref_from_prefix_with_elems(rest, header.tile_count as usize)
                .map_err(|_| damaged("its tiles do not fit".into()))?;
        let layout = rest
            .get(..header.layout_bytes as usize)
            .ok_or_else(|| damaged("its layout does not fit".into()))?;
        let mut tiles = Vec::with_capacity(raw_tiles.len());
        let mut extents = Vec::with_capacity(raw_tiles.len());
        for raw in raw_tiles {
            let kind = TileKind::from_number(raw.kind)
                .filter(|_| raw.reserved == 0)
                .ok_or_else(|| damaged("a tile is invalid".into()))?;
            tiles.push(Tile {
                unit: raw.unit,
                kind,
                elem_offset: raw.elem_offset,
                tile_bytes: raw.tile_bytes,
            });
            let extent = |which: usize| {
                let number = raw.devices[which];
                let index = numbers.iter().position(|known| *known == number);
                let device = index.map(|index| DeviceIndex(index as u32));
                Some(Extent {
                    device: device?,
                    offset: raw.offsets[which],
                })
            };
            let (Some(first), Some(second)) = (extent(0), extent(1)) else {
                return Err(damaged(
                    "a tile lies on a device that is not in the store".into(),
                ));
            };
            extents.push([first, second]);
        }
        let durability = Durability::from_number(header.durability)
            .ok_or_else(|| damaged(format!("durability {}", header.durability)))?;
        let definition = JobDefinition::new(layout.to_vec(), tiles, durability, header.nodes)
            .map_err(|fault| damaged(fault.message))?;
        Ok(Self {
            definition: Arc::new(definition),
            extents,
            revision: header.revision,
        })
    }
}
