//! A job's tiles: one checked type for the daemon, its store and a process.

use crate::fault::{Fault, FaultKind};
use crate::proto;

/// Content of a tile. The numbers are stored and part of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum TileKind {
    /// 16-bit parameters; fp32 in fp32 runs.
    Param = 1,
    /// fp32 residual, momentum and variance together.
    State = 2,
    /// Gradients.
    Grad = 3,
    /// Parameters that are not trained. Such a tile may be written until it is committed, and never after.
    Frozen = 4,
}

impl TileKind {
    /// Returns the kind with this number.
    pub fn from_number(number: u32) -> Option<Self> {
        [Self::Param, Self::State, Self::Grad, Self::Frozen]
            .into_iter()
            .find(|kind| *kind as u32 == number)
    }
}

/// Content that a crash may destroy. The numbers are stored and part of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Durability {
    /// Two extents a tile, written alternately: the last committed generation survives. A tile that is written once has one extent.
    Committed = 1,
    /// One extent a tile, overwritten in place: a crash destroys the job's state.
    None = 2,
}

impl Durability {
    /// Returns the durability with this number.
    pub fn from_number(number: u32) -> Option<Self> {
        [Self::Committed, Self::None]
            .into_iter()
            .find(|durability| *durability as u32 == number)
    }

    /// Number of extents of a tile of `kind`.
    pub fn extents(self, kind: TileKind) -> usize {
        match (self, kind) {
            (_, TileKind::Frozen) | (Self::None, _) => 1,
            (Self::Committed, _) => 2,
        }
    }

    /// Checks the number in a message.
    ///
    /// # Errors
    /// [`FaultKind::Invalid`] for an unknown number.
    pub fn check(number: i32) -> Result<Self, Fault> {
        (u32::try_from(number).ok())
            .and_then(Self::from_number)
            .ok_or_else(|| {
                Fault::new(
                    FaultKind::Invalid,
                    format!("durability {number} is unknown"),
                )
            })
    }
}

/// One tile of a job. Its place in the job's list is its [`crate::ids::TileIndex`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Unit that the tile is part of.
    pub unit: u32,
    /// Content of the tile.
    pub kind: TileKind,
    /// First element, within the unit.
    pub elem_offset: u64,
    /// Length in bytes, padding included: a multiple of [`crate::BLOCK_BYTES`], at most [`crate::TILE_BYTES_MAX`].
    pub tile_bytes: u32,
}

impl From<&Tile> for proto::Tile {
    fn from(tile: &Tile) -> Self {
        Self {
            unit: tile.unit,
            kind: tile.kind as i32,
            elem_offset: tile.elem_offset,
            tile_bytes: tile.tile_bytes,
        }
    }
}

impl TryFrom<&proto::Tile> for Tile {
    type Error = Fault;

    /// Fails with [`FaultKind::Invalid`] for an unknown kind. The length is checked with the definition.
    fn try_from(tile: &proto::Tile) -> Result<Self, Fault> {
        let kind = (u32::try_from(tile.kind).ok())
            .and_then(TileKind::from_number)
            .ok_or_else(|| {
                Fault::new(
                    FaultKind::Invalid,
                    format!("a tile has the unknown kind {}", tile.kind),
                )
            })?;
        Ok(Self {
            unit: tile.unit,
            kind,
            elem_offset: tile.elem_offset,
            tile_bytes: tile.tile_bytes,
        })
    }
}
