//! A definition as it is stored: the job's tiles with their extents, and its layout. The tiles and the layout never change;
//! the extents do when tiles move to another device, with a higher revision.
//!
//! In memory a device is known by its place in the list of this life of the daemon, on the devices by its number.

use std::sync::Arc;

use offload_api::ids::DeviceIndex;
use offload_api::{LAYOUT_BYTES_MAX, TILES_MAX};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::BLOCK;
use super::definition::{Durability, JobDefinition, TileKind, TileSpec};
use super::sealed::{self, Head, Unreadable};
use crate::io::AlignedBytes;

pub(crate) const MAGIC: [u8; 8] = *b"OFFLDEF1";

/// Where one version of a tile lies; its length is the tile's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// In the store's order.
    pub device: DeviceIndex,
    /// From the device's start.
    pub offset: u64,
}

/// A definition with the places of its tiles.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TileTable {
    /// What the job defined.
    pub definition: Arc<JobDefinition>,
    /// Of each tile; with durability none both are the same one.
    pub extents: Vec<[Extent; 2]>,
    /// How often extents were exchanged.
    pub revision: u32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct RawHeader {
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

const _: () = assert!(size_of::<RawHeader>() == 64 && size_of::<RawTile>() == 48);

/// Most one copy can need; bounds what a head can make a reader allocate.
pub(crate) const BYTES_MAX: u64 =
    (64 + 48 * TILES_MAX as u64 + LAYOUT_BYTES_MAX as u64).next_multiple_of(BLOCK);

/// Bytes of one copy.
pub fn stored_bytes(definition: &JobDefinition) -> u64 {
    let tiles = (definition.tiles().len() * size_of::<RawTile>()) as u64;
    (size_of::<RawHeader>() as u64 + tiles + definition.layout().len() as u64)
        .next_multiple_of(BLOCK)
}

impl TileTable {
    /// Sealed blocks, [`stored_bytes`] long. `numbers`: of the devices, by their index.
    pub fn encode(&self, job_id: u64, numbers: &[u32]) -> AlignedBytes {
        let definition = &self.definition;
        assert_eq!(definition.tiles().len(), self.extents.len());
        let header = RawHeader {
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

    /// From blocks whose seal is sound; `job_id` must be the one in them. `numbers`: as of [`Self::encode`].
    pub fn decode(blocks: &AlignedBytes, job_id: u64, numbers: &[u32]) -> Result<Self, Unreadable> {
        let damaged = |what: String| Unreadable::Damaged(what);
        let (header, rest) = RawHeader::ref_from_prefix(blocks.as_slice()).expect("a block");
        if header.job_id != job_id {
            return Err(damaged(format!(
                "it is of job id {}, not {job_id}",
                header.job_id
            )));
        }
        if header.tile_count > TILES_MAX as u64 || header.layout_bytes > LAYOUT_BYTES_MAX as u32 {
            return Err(damaged("it claims more than fits".into()));
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
                .ok_or_else(|| damaged("a tile makes no sense".into()))?;
            tiles.push(TileSpec {
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
                return Err(damaged("a tile lies on a device the store has not".into()));
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
