//! Cuts units into tiles: which elements each tile holds, its bytes, and whether it stays in host memory.
//!
//! ```text
//!   unit   | elements 0 .. n                                            |
//!   ranges | range 0 | range 1 | range 2 | range 3 | range 4 | range 5|        tile_elems each, the last one shorter
//!   shards | rank 0                      | rank 1                     |        equal in whole ranges, the last ones shorter
//! ```
//!
//! Each range is one `param`, one `state` and one `grad` tile; a range of a unit that is not trained has its `param` tile
//! only. The job's table lists all param tiles and then all state tiles, so that neighbours of one kind go to different
//! devices. Gradients are in no table: those not kept in host memory are scratch tiles of the session.
//!
//! Units may have parameters of several sizes. Slots of one kind have one size, so a unit with larger parameters has fewer
//! elements a tile.
//!
//! Ranges do not depend on the number of ranks, and a shard consists of whole ranges. On one node the table is therefore the
//! same for every number of ranks; with several nodes it lists the tiles of this node's ranks. The rank that owns a tile is computed, not stored, so
//! a run can resume with another number of ranks. The price: shards are rounded up to whole tiles, so the last ranks may own less.
//! [`choose_tile_elems`] picks sizes for which the usual numbers of ranks divide a unit's tiles.

use std::ops::{Index, IndexMut, Range};
use std::sync::Arc;

use crate::error::SwapperError;

/// Granularity of tiles and slots.
const BLOCK_BYTES: u64 = offload_client::BLOCK_BYTES as u64;

/// Ranges start at multiples of this many elements, so that a tile of any element size is whole blocks.
pub const TILE_ELEMS_STEP: u64 = BLOCK_BYTES;

/// Elements a tile may have at most: an element takes at least one byte.
pub const TILE_ELEMS_MAX: u64 = offload_client::TILE_BYTES_MAX as u64;

/// Tile size of most models: 512 KiB of bf16 parameters and 2.5 MiB of state reach a drive's full speed, and the tiles
/// in flight fit in the last-level cache. With tiles of a million elements the same step on four drives of RAM, half of
/// the state resident, took 8 % longer.
const TILE_ELEMS_LARGE: u64 = 256 << 10;

/// Smaller tiles cost more in operations than they gain in overlap.
const TILE_ELEMS_SMALL: u64 = 64 << 10;

/// A small model is still cut into this many ranges, so that transfers and compute overlap.
const RANGES_WANTED: u64 = 16;

/// A large model gets larger tiles instead of more ranges, so that tables and commit records stay small.
const RANGES_MAX: u64 = 64 << 10;

/// Numbers of ranks for which shards should be equal.
const RANKS_USUAL: [u32; 5] = [1, 2, 3, 4, 8];

/// Parameters gathered together.
#[derive(Clone, Debug)]
pub struct UnitShape {
    /// Parameters of the unit, over all ranks.
    pub elems: u64,
    /// Sizes of its tiles' parts.
    pub tile_bytes: TileBytes,
    /// Tiles of the unit whose state has another size; `None` if there are none.
    pub other_state: Option<OtherState>,
    /// Whether each step revises the unit's states before it updates them ([`crate::Swapper::revise`]).
    pub revised: bool,
    /// Whether the unit has gradients and state. The others are written once, when they get their first content.
    pub trained: bool,
    /// Whether the caller has the unit's newest content, as in a GPU's memory: its gathers and scatters give nothing, the caller updates it, and each
    /// commit takes it from [`crate::Optimizer::copy`]. Tiles on devices are the same, so the next process may choose otherwise. Needs a store.
    pub external: bool,
}

/// Elements that need a state of another size than the rest of their unit, as norms among matrices do with Muon. A tile that has any of them has this size.
#[derive(Clone, Debug)]
pub struct OtherState {
    /// The elements, in ascending order.
    pub elems: Arc<[Range<u64>]>,
    /// Bytes of the state of such a tile, from its element count.
    pub state_tile_bytes: fn(usize) -> usize,
}

impl OtherState {
    /// Whether a tile of `tile`, a range of the unit's elements, has any of the elements.
    pub fn is_in(&self, tile: &Range<u64>) -> bool {
        let first = self.elems.partition_point(|elems| elems.end <= tile.start);
        let first = self.elems.get(first);
        first.is_some_and(|elems| elems.start < tile.end)
    }
}

/// Sizes of a tile's three parts.
#[derive(Clone, Copy, Debug)]
pub struct TileBytes {
    /// Bytes of one parameter.
    pub param_bytes_per_elem: usize,
    /// Bytes of one gradient in host memory.
    pub grad_bytes_per_elem: usize,
    /// Bytes of the state of a tile, from its element count.
    pub state_tile_bytes: fn(usize) -> usize,
}

/// A contiguous part of a unit's elements: the content of one tile of each kind.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TileRange {
    /// Index of the unit.
    pub unit: usize,
    /// Elements, counted from the unit's first.
    pub elems: Range<u64>,
}

/// Kinds of tiles: two stored kinds, and the gradients between backward and update.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Parameters as the model computes with them.
    Param = 0,
    /// Residual or master, momentum and variance.
    State = 1,
    /// Gradients of the present step. No generation contains them.
    Grad = 2,
}

impl Kind {
    /// All kinds, in the order of every table indexed by kind.
    pub const ALL: [Self; 3] = [Self::Param, Self::State, Self::Grad];

    /// Kinds in the job's table, of which generations are made.
    pub const STORED: [Self; 2] = [Self::Param, Self::State];
}

/// One value for each kind of tile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ByKind<T>(pub [T; 3]);

impl<T> ByKind<T> {
    /// Asks `value` for each kind, in the order of [`Kind::ALL`].
    pub fn new(value: impl FnMut(Kind) -> T) -> Self {
        Self(Kind::ALL.map(value))
    }
}

impl<T> Index<Kind> for ByKind<T> {
    type Output = T;

    fn index(&self, kind: Kind) -> &T {
        &self.0[kind as usize]
    }
}

impl<T> IndexMut<Kind> for ByKind<T> {
    fn index_mut(&mut self, kind: Kind) -> &mut T {
        &mut self.0[kind as usize]
    }
}

/// One tile of the job's table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableEntry {
    /// Index of the unit.
    pub unit: u32,
    /// Kind of the tile.
    pub kind: Kind,
    /// First element, within the unit.
    pub elem_offset: u64,
    /// Size in bytes, whole blocks.
    pub tile_bytes: u32,
}

/// One rank's ranges of every unit, and the table of its node's tiles.
#[derive(Clone, Debug)]
pub struct Layout {
    units: Vec<Range<u32>>,
    ranges: Vec<TileRange>,
    table: Vec<TableEntry>,
    /// Bytes of the tiles of all nodes.
    all_bytes: u64,
    /// Index in `table` of each range's tile, by stored kind; `None` where the range has no such tile.
    table_index: [Vec<Option<u32>>; 2],
    shapes: Vec<UnitShape>,
    /// Elements of each unit's tiles.
    tile_elems: Vec<u64>,
    /// Elements of each unit's shard.
    shard_elems: Vec<u64>,
}

impl Layout {
    /// Cuts `units` into ranges of `tile_elems`, fewer where parameters are larger than those of other units, and selects
    /// those of `rank` among `ranks`, all on one node.
    pub fn new(
        units: &[UnitShape],
        tile_elems: u64,
        rank: u32,
        ranks: u32,
    ) -> Result<Self, SwapperError> {
        Self::of_node(units, tile_elems, rank, ranks, 0..ranks)
    }

    /// Like [`Layout::new`], for a node with the ranks `local`: the table lists the tiles of these ranks.
    pub fn of_node(
        units: &[UnitShape],
        tile_elems: u64,
        rank: u32,
        ranks: u32,
        local: Range<u32>,
    ) -> Result<Self, SwapperError> {
        let refuse = |what: String| Err(SwapperError::Settings { what });
        if tile_elems == 0 || !tile_elems.is_multiple_of(TILE_ELEMS_STEP) {
            return refuse(format!(
                "tile_elems = {tile_elems}: must be a multiple of {TILE_ELEMS_STEP}"
            ));
        }
        if rank >= ranks || !local.contains(&rank) || local.end > ranks {
            return refuse(format!(
                "rank {rank} of {ranks} ranks, of which {local:?} are on this node: must be one of them"
            ));
        }
        if units.iter().all(|unit| unit.elems == 0) {
            return refuse("the model has no parameters".into());
        }
        let unit_tile_elems: Vec<u64> = param_sizes(units)
            .map(|size| (tile_elems / size).next_multiple_of(TILE_ELEMS_STEP))
            .collect();
        let tiles = units.iter().zip(&unit_tile_elems);
        let mut layout = Self {
            units: Vec::with_capacity(units.len()),
            ranges: Vec::new(),
            table: Vec::new(),
            all_bytes: 0,
            table_index: [Vec::new(), Vec::new()],
            shapes: units.to_vec(),
            shard_elems: tiles
                .map(|(unit, &tile_elems)| shard_elems(unit.elems, tile_elems, ranks))
                .collect(),
            tile_elems: unit_tile_elems,
        };
        let largest = layout
            .slot_bytes(Kind::State)
            .max(layout.slot_bytes(Kind::Param));
        if largest > u64::from(u32::MAX) {
            return refuse(format!(
                "tile_elems = {tile_elems} makes tiles of {largest} bytes: use fewer elements"
            ));
        }
        for kind in Kind::STORED {
            for (unit, shape) in units.iter().enumerate() {
                let first = layout.ranges.len() as u32;
                let tile_elems = layout.tile_elems[unit];
                let of_rank = |rank| shard_of(shape.elems, tile_elems, rank, ranks);
                let owned = of_rank(rank);
                let on_node = of_rank(local.start).start..of_rank(local.end - 1).end;
                let mut start = 0;
                while start < shape.elems {
                    let elems = start..shape.elems.min(start + tile_elems);
                    start = elems.end;
                    let bytes = layout.bytes_of(kind, unit, &elems);
                    let stored = kind == Kind::Param || shape.trained;
                    if owned.contains(&elems.start) {
                        let index = stored.then_some(layout.table.len() as u32);
                        layout.table_index[kind as usize].push(index);
                        if kind == Kind::Param {
                            let elems = elems.clone();
                            layout.ranges.push(TileRange { unit, elems });
                        }
                    }
                    if !stored {
                        continue;
                    }
                    let tile_bytes = bytes.next_multiple_of(BLOCK_BYTES);
                    layout.all_bytes += tile_bytes;
                    if on_node.contains(&elems.start) {
                        layout.table.push(TableEntry {
                            unit: unit as u32,
                            kind,
                            elem_offset: elems.start,
                            tile_bytes: tile_bytes as u32,
                        });
                    }
                }
                if kind == Kind::Param {
                    layout.units.push(first..layout.ranges.len() as u32);
                }
            }
        }
        Ok(layout)
    }

    /// Refuses a node whose ranks, `local` of `ranks`, have no tiles at all: a store needs some. `tile_elems` is what the layout was cut with.
    pub(crate) fn check_node(
        &self,
        tile_elems: u64,
        ranks: u32,
        local: Range<u32>,
    ) -> Result<(), SwapperError> {
        if !self.table.is_empty() {
            return Ok(());
        }
        Err(SwapperError::Settings {
            what: format!(
                "the model is too small for {ranks} ranks on several nodes: tiles of {tile_elems} elements leave none to ranks {local:?}: use fewer nodes, or smaller tiles (the trainer's offload.tile_elems)"
            ),
        })
    }

    /// The ranges of each unit, as indices into [`Layout::ranges`].
    pub fn units(&self) -> &[Range<u32>] {
        &self.units
    }

    /// This rank's ranges, ordered by unit and element.
    pub fn ranges(&self) -> &[TileRange] {
        &self.ranges
    }

    /// Tiles of this node's ranks; the position is the tile's index for the daemon.
    pub fn table(&self) -> &[TableEntry] {
        &self.table
    }

    /// Position in [`Layout::table`] of a range's tile of a stored `kind`.
    ///
    /// # Panics
    /// The range has no such tile, see [`Layout::has`].
    pub fn table_index(&self, kind: Kind, range: u32) -> u32 {
        self.table_index[kind as usize][range as usize].expect("its unit is trained")
    }

    /// Whether the unit has gradients and state.
    pub fn trained(&self, unit: usize) -> bool {
        self.shapes[unit].trained
    }

    /// Whether the caller has the unit's newest content.
    pub fn external(&self, unit: usize) -> bool {
        self.shapes[unit].external
    }

    /// Whether each step revises the states of the range, and updates it before the next step.
    pub fn revised(&self, range: u32) -> bool {
        self.shapes[self.ranges[range as usize].unit].revised
    }

    /// Whether the caller has the newest content of the range.
    pub fn has_external(&self, range: u32) -> bool {
        self.external(self.ranges[range as usize].unit)
    }

    /// Whether the range has a tile of `kind` here. Gradients of an external unit are the caller's.
    pub fn has(&self, kind: Kind, range: u32) -> bool {
        let trained = self.trained(self.ranges[range as usize].unit);
        match kind {
            Kind::Param => true,
            Kind::State => trained,
            Kind::Grad => trained && !self.has_external(range),
        }
    }

    /// Elements of a range.
    pub fn elems(&self, range: u32) -> u64 {
        let elems = &self.ranges[range as usize].elems;
        elems.end - elems.start
    }

    /// Elements of each rank's shard of `unit`, padded so that all shards are equal. A gather over all ranks yields
    /// `ranks * shard_elems` elements.
    pub fn shard_elems(&self, unit: usize) -> u64 {
        self.shard_elems[unit]
    }

    /// Bytes of a tile's content, without padding; 0 where the range has no such tile.
    pub fn content_bytes(&self, kind: Kind, range: u32) -> usize {
        if !self.has(kind, range) {
            return 0;
        }
        let TileRange { unit, elems } = &self.ranges[range as usize];
        self.bytes_of(kind, *unit, elems) as usize
    }

    /// Bytes of a tile on a device: its content padded to whole blocks.
    pub fn moved_bytes(&self, kind: Kind, range: u32) -> u64 {
        (self.content_bytes(kind, range) as u64).next_multiple_of(BLOCK_BYTES)
    }

    /// Bytes of a slot that fits any tile of `kind`.
    pub fn slot_bytes(&self, kind: Kind) -> u64 {
        let units = 0..self.shapes.len();
        let bytes = units.flat_map(|unit| {
            let shape = &self.shapes[unit];
            let has_other = kind == Kind::State && shape.other_state.is_some();
            let sizes = [Some(false), has_other.then_some(true)];
            (sizes.into_iter().flatten())
                .map(move |other| self.longest_tile_bytes(kind, unit, other))
        });
        bytes.max().unwrap_or(BLOCK_BYTES)
    }

    /// Bytes of a slot that fits the tile of a range, and those like it in other places of the unit: equal for all but a few tiles of one kind.
    pub fn own_slot_bytes(&self, kind: Kind, range: u32) -> u64 {
        let TileRange { unit, elems } = &self.ranges[range as usize];
        let other = kind == Kind::State && self.has_other_state(*unit, elems);
        self.longest_tile_bytes(kind, *unit, other)
    }

    /// Bytes of a slot for the longest tile of a unit, on any rank, with the unit's other size of state or its usual one.
    fn longest_tile_bytes(&self, kind: Kind, unit: usize, other: bool) -> u64 {
        let elems = self.tile_elems[unit].min(self.shapes[unit].elems);
        let bytes = self.sized(kind, unit, elems, other);
        bytes.next_multiple_of(BLOCK_BYTES).max(BLOCK_BYTES)
    }

    fn has_other_state(&self, unit: usize, elems: &Range<u64>) -> bool {
        let other = self.shapes[unit].other_state.as_ref();
        other.is_some_and(|other| other.is_in(elems))
    }

    /// Bytes of the tiles of all ranks of all nodes, each counted once.
    pub fn all_bytes(&self) -> u64 {
        self.all_bytes
    }

    /// Bytes of the tiles of this node's ranks, each counted once.
    pub fn table_bytes(&self) -> u64 {
        self.table
            .iter()
            .map(|tile| u64::from(tile.tile_bytes))
            .sum()
    }

    /// Bytes of the tiles of this node's ranks of units that are not trained.
    pub fn frozen_bytes(&self) -> u64 {
        let tiles = self.table.iter();
        tiles
            .filter(|tile| !self.trained(tile.unit as usize))
            .map(|tile| u64::from(tile.tile_bytes))
            .sum()
    }

    fn bytes_of(&self, kind: Kind, unit: usize, elems: &Range<u64>) -> u64 {
        let other = kind == Kind::State && self.has_other_state(unit, elems);
        self.sized(kind, unit, elems.end - elems.start, other)
    }

    /// Bytes of a tile of `elems` elements, with the unit's other size of state or its usual one.
    fn sized(&self, kind: Kind, unit: usize, elems: u64, other: bool) -> u64 {
        let UnitShape {
            tile_bytes,
            other_state,
            trained,
            ..
        } = &self.shapes[unit];
        match kind {
            Kind::Param => elems * tile_bytes.param_bytes_per_elem as u64,
            _ if !trained => 0,
            Kind::State => {
                let other = other_state.as_ref().filter(|_| other);
                let bytes =
                    other.map_or(tile_bytes.state_tile_bytes, |other| other.state_tile_bytes);
                bytes(elems as usize) as u64
            }
            Kind::Grad => elems * tile_bytes.grad_bytes_per_elem as u64,
        }
    }
}

/// How many times larger each unit's parameters are than the smallest of all units.
fn param_sizes(units: &[UnitShape]) -> impl Iterator<Item = u64> + '_ {
    let bytes = |unit: &UnitShape| unit.tile_bytes.param_bytes_per_elem as u64;
    let smallest = units.iter().map(bytes).min().unwrap_or(1).max(1);
    units.iter().map(move |unit| bytes(unit) / smallest)
}

/// Elements of each shard of a padded unit: whole tiles, or the whole unit for one rank.
pub fn shard_elems(unit_elems: u64, tile_elems: u64, ranks: u32) -> u64 {
    if ranks == 1 {
        return unit_elems;
    }
    let tiles_count = unit_elems.div_ceil(tile_elems);
    tiles_count.div_ceil(u64::from(ranks)) * tile_elems
}

/// Elements of a unit that `rank` among `ranks` owns: equal shards of whole tiles, the last ones shorter or empty.
pub fn shard_of(unit_elems: u64, tile_elems: u64, rank: u32, ranks: u32) -> Range<u64> {
    let shard_elems = shard_elems(unit_elems, tile_elems, ranks);
    let at = |rank: u32| unit_elems.min(shard_elems * u64::from(rank));
    at(rank)..at(rank + 1)
}

/// Chooses the elements of a tile: a quarter of a million, fewer for a small model, more for a very large one, and so
/// that the last tiles' slots and the shards of [`RANKS_USUAL`] need little padding. The result does not depend on the
/// number of ranks.
pub fn choose_tile_elems(units: &[UnitShape]) -> u64 {
    let units = (units.iter().zip(param_sizes(units))).map(|(unit, size)| unit.elems * size);
    let units: Vec<u64> = units.filter(|&elems| elems > 0).collect();
    let total: u64 = units.iter().sum();
    let target = (total / RANGES_WANTED)
        .clamp(TILE_ELEMS_SMALL, TILE_ELEMS_LARGE)
        .max(total / RANGES_MAX)
        .next_multiple_of(TILE_ELEMS_STEP);
    // Slots have one size: a unit slightly larger than a whole number of tiles wastes most of a slot, and one slightly
    // larger than a whole number of tiles a rank wastes most of a slot on every rank.
    let padded_elems = |tile_elems: u64| -> u64 {
        let of = |elems: u64, ranks: u32| {
            shard_elems(elems, tile_elems, ranks).next_multiple_of(tile_elems) * u64::from(ranks)
        };
        let of_unit = |&elems: &u64| RANKS_USUAL.map(|ranks| of(elems, ranks));
        units.iter().flat_map(of_unit).sum()
    };
    // Candidates between three quarters and all of the target; the larger one wins a tie.
    (0..=64)
        .map(|part| {
            (target - target * part / 256)
                .next_multiple_of(TILE_ELEMS_STEP)
                .max(TILE_ELEMS_STEP)
        })
        .min_by_key(|&tile_elems| (padded_elems(tile_elems), u64::MAX - tile_elems))
        .unwrap_or(target)
}

/// Selects the `fraction` of `count` ranges that stays in host memory, spread evenly.
pub fn resident(count: usize, fraction: f64) -> Vec<bool> {
    let chosen = (count as f64 * fraction).round() as u64;
    let count = count as u64;
    (0..count)
        .map(|i| (i + 1) * chosen / count > i * chosen / count)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes() -> TileBytes {
        TileBytes {
            param_bytes_per_elem: 2,
            grad_bytes_per_elem: 2,
            state_tile_bytes: |elems| elems * 10,
        }
    }

    fn shapes(elems: &[u64]) -> Vec<UnitShape> {
        let shape = |&elems: &u64| UnitShape {
            elems,
            tile_bytes: bytes(),
            other_state: None,
            revised: false,
            trained: true,
            external: false,
        };
        elems.iter().map(shape).collect()
    }

    #[test]
    fn every_element_is_in_one_tile_of_one_rank() {
        let mut units = shapes(&[10_000, 4096, 0, 50_001, 20_000, 30_000]);
        units[1].trained = false;
        units[4].tile_bytes.param_bytes_per_elem = 4;
        units[5].tile_bytes.param_bytes_per_elem = 4;
        units[5].trained = false;
        for ranks in [1, 2, 3, 8] {
            let mut seen: Vec<Vec<bool>> = units
                .iter()
                .map(|u| vec![false; u.elems as usize])
                .collect();
            let mut table_seen = Vec::new();
            for rank in 0..ranks {
                let layout = Layout::new(&units, 8192, rank, ranks).unwrap();
                for (range, tile) in layout.ranges().iter().enumerate() {
                    assert!(layout.units()[tile.unit].contains(&(range as u32)));
                    // Within the rank's shard of the padded unit, where it is gathered to.
                    let shard_elems = layout.shard_elems(tile.unit);
                    let shard = shard_elems * u64::from(rank)..shard_elems * u64::from(rank + 1);
                    assert!(shard.contains(&tile.elems.start) && tile.elems.end <= shard.end);
                    for elem in tile.elems.clone() {
                        assert!(!std::mem::replace(
                            &mut seen[tile.unit][elem as usize],
                            true
                        ));
                    }
                    for kind in Kind::STORED {
                        if !layout.has(kind, range as u32) {
                            assert_eq!(kind, Kind::State, "parameters are stored");
                            assert!(!units[tile.unit].trained);
                            continue;
                        }
                        let index = layout.table_index(kind, range as u32);
                        let entry = &layout.table()[index as usize];
                        assert_eq!((entry.unit as usize, entry.kind), (tile.unit, kind));
                        assert_eq!(entry.elem_offset, tile.elems.start);
                        assert_eq!(
                            u64::from(entry.tile_bytes),
                            layout.moved_bytes(kind, range as u32)
                        );
                        assert!(
                            u64::from(entry.tile_bytes) <= layout.slot_bytes(kind),
                            "a slot holds any tile of its kind"
                        );
                        table_seen.push(index);
                    }
                }
            }
            assert!(seen.iter().flatten().all(|&seen| seen), "{ranks} ranks");
            table_seen.sort_unstable();
            let table = Layout::new(&units, 8192, 0, ranks).unwrap();
            assert_eq!(
                table_seen,
                (0..table.table().len() as u32).collect::<Vec<_>>()
            );
        }
    }

    #[test]
    fn the_tables_of_all_nodes_have_each_tile_once() {
        let mut units = shapes(&[10_000, 4096, 0, 50_001, 90_000]);
        units[1].trained = false;
        let all = Layout::new(&units, 8192, 0, 1).unwrap();
        for nodes in [&[0..1, 1..2][..], &[0..2, 2..3], &[0..1, 1..4, 4..6]] {
            let ranks = nodes.last().unwrap().end;
            let mut found = Vec::new();
            for local in nodes {
                let layouts = local
                    .clone()
                    .map(|rank| Layout::of_node(&units, 8192, rank, ranks, local.clone()).unwrap());
                let layouts: Vec<Layout> = layouts.collect();
                let table = layouts[0].table();
                let mut own = 0;
                for layout in &layouts {
                    assert_eq!(layout.table(), table, "the ranks of a node share a table");
                    assert_eq!(layout.all_bytes(), all.table_bytes());
                    for (range, number) in layout.ranges().iter().zip(0..) {
                        for kind in Kind::STORED {
                            if layout.has(kind, number) {
                                let entry = &table[layout.table_index(kind, number) as usize];
                                assert_eq!(entry.elem_offset, range.elems.start);
                                own += 1;
                            }
                        }
                    }
                }
                assert_eq!(own, table.len(), "no tile of another node");
                found.extend(table.to_vec());
            }
            let key = |tile: &TableEntry| (tile.kind as u8, tile.unit, tile.elem_offset);
            found.sort_by_key(key);
            assert_eq!(found, all.table(), "{nodes:?}");
        }
        let layout = Layout::of_node(&shapes(&[8192]), 8192, 1, 2, 1..2).unwrap();
        let error = layout.check_node(8192, 2, 1..2).unwrap_err();
        assert!(
            error.to_string().contains("the model is too small"),
            "{error}"
        );
    }

    #[test]
    fn larger_parameters_make_no_larger_slots() {
        let mut units = shapes(&[1 << 20, 1 << 20]);
        let small = Layout::new(&units, 1 << 16, 0, 1).unwrap();
        units[1].tile_bytes.param_bytes_per_elem = 4;
        let mixed = Layout::new(&units, 1 << 16, 0, 1).unwrap();
        assert_eq!(mixed.slot_bytes(Kind::Param), small.slot_bytes(Kind::Param));
        let ranges = |layout: &Layout| layout.units().iter().map(|unit| unit.len()).collect();
        assert_eq!(
            (ranges(&small), ranges(&mixed)),
            (vec![16, 16], vec![16, 32])
        );
    }

    #[test]
    fn the_table_is_the_same_for_every_number_of_ranks() {
        let mut units = shapes(&[10_000, 4096, 0, 50_001]);
        units[3].trained = false;
        units[1].tile_bytes.param_bytes_per_elem = 4;
        let alone = Layout::new(&units, 8192, 0, 1).unwrap();
        for (rank, ranks) in [(0, 2), (1, 2), (2, 3), (6, 7)] {
            let one_of_some = Layout::new(&units, 8192, rank, ranks).unwrap();
            assert_eq!(alone.table(), one_of_some.table(), "rank {rank} of {ranks}");
        }
    }

    #[test]
    fn chosen_tiles_divide_evenly_among_the_usual_numbers_of_ranks() {
        // Blocks of models with 1.3, 7 and 13 G parameters.
        for elems in [50_596_864, 202_383_360, 317_204_480] {
            let units = shapes(&[elems; 24]);
            let tile_elems = choose_tile_elems(&units);
            for ranks in RANKS_USUAL {
                let padded = shard_elems(elems, tile_elems, ranks) * u64::from(ranks);
                assert!(
                    padded - elems <= elems / 50,
                    "{ranks} ranks pad {elems} to {padded} with tiles of {tile_elems}"
                );
            }
        }
    }

    #[test]
    fn the_fraction_is_met_and_spread_evenly() {
        for count in [1, 7, 64] {
            for fraction in [0.0, 0.3, 0.5, 1.0] {
                let chosen = resident(count, fraction);
                let total = chosen.iter().filter(|&&r| r).count();
                assert_eq!(total, (count as f64 * fraction).round() as usize);
                for half in [&chosen[..count / 2], &chosen[count / 2..]] {
                    let part = half.iter().filter(|&&r| r).count() as f64;
                    assert!((part - half.len() as f64 * total as f64 / count as f64).abs() <= 1.0);
                }
            }
        }
    }

    #[test]
    fn tile_sizes_suit_the_model() {
        let units = shapes(&[200_000; 10]);
        let small = choose_tile_elems(&units);
        let layout = Layout::new(&units, small, 0, 1).unwrap();
        assert!(layout.ranges().len() as u64 >= RANGES_WANTED);
        assert!(units[0].elems.next_multiple_of(small) - units[0].elems < small / 8);
        let tiny = choose_tile_elems(&shapes(&[3000]));
        assert!((TILE_ELEMS_SMALL / 2..=TILE_ELEMS_SMALL).contains(&tiny));
        // Slightly more than twelve tiles: with the default size 8 % of the slots would be padding.
        let units = shapes(&[12 * TILE_ELEMS_LARGE + 4096; 32]);
        let large = choose_tile_elems(&units);
        let waste = units[0].elems.next_multiple_of(large) - units[0].elems;
        assert!(
            large > TILE_ELEMS_LARGE / 2 && waste < units[0].elems / 32,
            "{large}, {waste} unused"
        );
        assert_eq!(large % TILE_ELEMS_STEP, 0);
        // A model of 70 G parameters.
        let units = shapes(&[875_000_000; 80]);
        let ranges = 70_000_000_000 / choose_tile_elems(&units);
        assert!(
            (RANGES_MAX / 2..=RANGES_MAX * 3 / 2).contains(&ranges),
            "{ranges}"
        );
    }

    #[test]
    fn slots_are_as_long_as_the_longest_tile() {
        let of = |units: &[u64], kind| {
            let layout = Layout::new(&shapes(units), 8192, 0, 1).unwrap();
            (layout.slot_bytes(kind), layout.own_slot_bytes(kind, 0))
        };
        for kind in Kind::ALL {
            let whole = of(&[8192], kind);
            assert_eq!(of(&[20_000, 2048], kind), whole);
            // Adapters have fewer elements than a tile.
            let small = of(&[2048, 2048], kind);
            assert_eq!((whole.0, whole.1), (4 * small.0, 4 * small.1));
        }
    }

    #[test]
    fn impossible_cuts_are_refused() {
        let large = 1 << 40;
        for (unit, elems, rank, ranks) in [
            (1000, 0, 0, 1),
            (1000, 5000, 0, 1),
            (1000, 4096, 1, 1),
            (large, large, 0, 1),
        ] {
            assert!(matches!(
                Layout::new(&shapes(&[unit]), elems, rank, ranks),
                Err(SwapperError::Settings { .. })
            ));
        }
        assert!(Layout::new(&shapes(&[0]), 4096, 0, 1).is_err());
    }
}
