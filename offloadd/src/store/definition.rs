//! Definition of a job's tiles, checked.

use offload_api::fault::{Fault, FaultKind};
pub use offload_api::tile::{Durability, Tile, TileKind};
use offload_api::{BLOCK_BYTES, LAYOUT_BYTES_MAX, TILE_BYTES_MAX, TILES_MAX};

/// Longest name of a job.
pub const JOB_NAME_BYTES_MAX: usize = 128;

/// Most nodes of one job.
const NODES_MAX: u32 = 1 << 16;

/// Name of a job: 1 to 128 characters of `[A-Za-z0-9._-]`, which need no quoting in paths, logs and command lines.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobName(String);

impl JobName {
    /// Checks a name.
    ///
    /// # Errors
    /// [`FaultKind::Invalid`] for any other text.
    pub fn new(name: impl Into<String>) -> Result<Self, Fault> {
        let name = name.into();
        let fits = (1..=JOB_NAME_BYTES_MAX).contains(&name.len())
            && name
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
        if !fits {
            let shown: String = name.chars().take(40).collect();
            return Err(Fault::new(
                FaultKind::Invalid,
                format!(
                    "job name {shown:?} is invalid: use 1 to {JOB_NAME_BYTES_MAX} characters of A-Z a-z 0-9 . _ -"
                ),
            ));
        }
        Ok(Self(name))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for JobName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// Checks the sizes of tiles.
///
/// # Errors
/// [`FaultKind::Invalid`] for a size outside the limits of `offload_api`.
pub(crate) fn check_tile_bytes(tiles: impl Iterator<Item = u32>) -> Result<(), Fault> {
    for (index, bytes) in tiles.enumerate() {
        if bytes == 0 || bytes % BLOCK_BYTES != 0 || bytes > TILE_BYTES_MAX {
            return Err(Fault::new(
                FaultKind::Invalid,
                format!(
                    "tile {index} has {bytes} bytes; it must be a multiple of {BLOCK_BYTES} and at most {TILE_BYTES_MAX}"
                ),
            ));
        }
    }
    Ok(())
}

/// All of a job's tiles on this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobDefinition {
    layout: Vec<u8>,
    tiles: Vec<Tile>,
    durability: Durability,
    nodes: u32,
}

impl JobDefinition {
    /// Checks a definition.
    ///
    /// # Errors
    /// [`FaultKind::Invalid`] for sizes and counts outside the limits of `offload_api`.
    pub fn new(
        layout: Vec<u8>,
        tiles: Vec<Tile>,
        durability: Durability,
        nodes: u32,
    ) -> Result<Self, Fault> {
        let invalid = |message: String| Err(Fault::new(FaultKind::Invalid, message));
        if layout.len() > LAYOUT_BYTES_MAX {
            return invalid(format!(
                "the layout has {} bytes, at most {LAYOUT_BYTES_MAX} are allowed",
                layout.len()
            ));
        }
        if tiles.is_empty() || tiles.len() > TILES_MAX {
            return invalid(format!(
                "{} tiles are not between 1 and {TILES_MAX}; use larger tiles",
                tiles.len()
            ));
        }
        if nodes == 0 || nodes > NODES_MAX {
            return invalid(format!("{nodes} nodes are not between 1 and {NODES_MAX}"));
        }
        check_tile_bytes(tiles.iter().map(|tile| tile.tile_bytes))?;
        Ok(Self {
            layout,
            tiles,
            durability,
            nodes,
        })
    }

    /// The job's own description, stored without being interpreted.
    pub fn layout(&self) -> &[u8] {
        &self.layout
    }

    /// Tiles of the job. The place in this list is the tile's index.
    pub fn tiles(&self) -> &[Tile] {
        &self.tiles
    }

    /// Returns the number of extents of a tile.
    pub fn extents(&self, tile: &Tile) -> usize {
        self.durability.extents(tile.kind)
    }

    /// Returns the bytes of all extents of a tile.
    pub fn reserved_bytes(&self, tile: &Tile) -> u64 {
        self.extents(tile) as u64 * u64::from(tile.tile_bytes)
    }

    /// Content that a crash may destroy.
    pub fn durability(&self) -> Durability {
        self.durability
    }

    /// Nodes that commit together; at least 1.
    pub fn nodes(&self) -> u32 {
        self.nodes
    }
}
