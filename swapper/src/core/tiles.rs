//! The state of each tile and the free slots. Every state change goes through here, so the counts always agree.

use std::collections::{BTreeMap, BTreeSet};

use super::plan::NEVER;
use super::{Kind, SlotNumber, TileId};

/// Generation of unwritten gradients: no commit waits for them.
pub(super) const NO_GENERATION: u64 = u64::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TileState {
    /// On its device only, or without content. A resident tile keeps its slot.
    Device,
    /// A slot is assigned and empty: the trainer will fill it.
    Claimed,
    /// Being read.
    Reading,
    /// In its slot and idle.
    Idle,
    /// In its slot, lent to the trainer.
    Lent,
    /// In its slot, with the optimizer.
    Updating,
    /// In its slot, being written.
    Writing,
}

#[derive(Clone, Debug)]
struct Tile {
    state: TileState,
    /// Always present for a resident tile, otherwise unless `state` is `Device`.
    slot: Option<SlotNumber>,
    resident: bool,
    /// Generation of content that is not on its device yet.
    dirty: Option<u64>,
    /// Position of its next use in the plan, or [`NEVER`].
    next_use: u32,
    /// The content was abandoned during a transfer; the tile is cleared when the transfer ends.
    dead: bool,
}

/// All tiles of one kind, and the staging slots they share.
#[derive(Debug)]
pub(super) struct Tiles {
    kind: Kind,
    tiles: Vec<Tile>,
    free: Vec<SlotNumber>,
    /// Staged, clean, idle tiles by next use; the last one is evicted first.
    evictable: BTreeSet<(u32, u32)>,
    /// Tiles of each generation whose content is not on a device.
    dirty_counts: BTreeMap<u64, usize>,
}

impl Tiles {
    /// Slots `0..staging` are shared; each resident tile has one of the slots after them.
    pub(super) fn new(kind: Kind, resident: &[bool], staging: u32) -> Self {
        let mut next_resident = staging;
        let tiles = resident
            .iter()
            .map(|&resident| Tile {
                state: TileState::Device,
                slot: resident.then(|| {
                    next_resident += 1;
                    SlotNumber(next_resident - 1)
                }),
                resident,
                dirty: None,
                next_use: NEVER,
                dead: false,
            })
            .collect();
        Self {
            kind,
            tiles,
            free: (0..staging).rev().map(SlotNumber).collect(),
            evictable: BTreeSet::new(),
            dirty_counts: BTreeMap::new(),
        }
    }

    pub(super) fn state(&self, range: u32) -> TileState {
        self.tiles[range as usize].state
    }

    pub(super) fn next_use(&self, range: u32) -> u32 {
        self.tiles[range as usize].next_use
    }

    pub(super) fn dirty(&self, range: u32) -> Option<u64> {
        self.tiles[range as usize].dirty
    }

    pub(super) fn resident(&self, range: u32) -> bool {
        self.tiles[range as usize].resident
    }

    /// The slot of a tile that has one.
    pub(super) fn slot(&self, range: u32) -> SlotNumber {
        self.tiles[range as usize]
            .slot
            .expect("a tile in use has a slot")
    }

    /// Tiles of `generation` whose content is not on a device.
    pub(super) fn dirty_count(&self, generation: u64) -> usize {
        self.dirty_counts.get(&generation).copied().unwrap_or(0)
    }

    /// Moves a tile to `state`. It keeps its slot.
    pub(super) fn set_state(&mut self, range: u32, state: TileState) {
        self.unlist(range);
        self.tiles[range as usize].state = state;
        self.list(range);
    }

    pub(super) fn set_dirty(&mut self, range: u32, dirty: Option<u64>) {
        self.unlist(range);
        let was = std::mem::replace(&mut self.tiles[range as usize].dirty, dirty);
        if let Some(was) = was {
            let count = self
                .dirty_counts
                .get_mut(&was)
                .expect("a dirty tile is counted");
            *count -= 1;
            if *count == 0 {
                self.dirty_counts.remove(&was);
            }
        }
        if let Some(now) = dirty {
            *self.dirty_counts.entry(now).or_default() += 1;
        }
        self.list(range);
    }

    pub(super) fn set_next_use(&mut self, range: u32, next_use: u32) {
        self.unlist(range);
        self.tiles[range as usize].next_use = next_use;
        self.list(range);
    }

    /// Sets the first uses of a new plan.
    pub(super) fn replan(&mut self, first: &[u32]) {
        for (range, &first) in first.iter().enumerate() {
            let range = range as u32;
            assert_ne!(
                self.state(range),
                TileState::Claimed,
                "a plan is replaced while it fills"
            );
            self.set_next_use(range, first);
        }
    }

    /// Ends a tile's transfer to its slot or device.
    pub(super) fn stop_moving(&mut self, range: u32) {
        match self.tiles[range as usize].dead {
            true => self.clear(range),
            false => self.set_state(range, TileState::Idle),
        }
    }

    /// Drops the content of an unused tile, at once or when its transfer ends.
    pub(super) fn abandon(&mut self, range: u32) {
        match self.state(range) {
            TileState::Device => {}
            TileState::Claimed | TileState::Idle => self.clear(range),
            TileState::Reading | TileState::Writing => self.tiles[range as usize].dead = true,
            state @ (TileState::Lent | TileState::Updating) => {
                panic!("{state:?} content is abandoned")
            }
        }
    }

    /// Frees a tile's slot; its content is gone.
    pub(super) fn clear(&mut self, range: u32) {
        self.set_dirty(range, None);
        self.unlist(range);
        let tile = &mut self.tiles[range as usize];
        tile.state = TileState::Device;
        tile.dead = false;
        if !tile.resident {
            self.free.extend(tile.slot.take());
        }
    }

    /// Assigns a slot to a tile on its device for the use at `position`: its own, a free one, or that of the tile whose
    /// next use is furthest away and later than `position`. Returns whether there was one.
    pub(super) fn take_slot(&mut self, range: u32, position: u32) -> bool {
        assert_eq!(self.state(range), TileState::Device);
        if self.resident(range) {
            return true;
        }
        if self.free.is_empty()
            && let Some(&(next_use, victim)) = self.evictable.last()
            && next_use > position
        {
            self.give_up(victim);
        }
        let slot = self.free.pop();
        self.tiles[range as usize].slot = slot;
        slot.is_some()
    }

    /// Whether a staging slot is free, or can be.
    pub(super) fn has_slot(&self) -> bool {
        !(self.free.is_empty() && self.evictable.is_empty())
    }

    pub(super) fn id(&self, range: u32) -> TileId {
        TileId {
            kind: self.kind,
            range,
        }
    }

    fn give_up(&mut self, range: u32) {
        self.unlist(range);
        let tile = &mut self.tiles[range as usize];
        assert!(tile.dirty.is_none(), "an unwritten tile was given up");
        assert!(tile.state == TileState::Idle && !tile.resident);
        tile.state = TileState::Device;
        self.free.extend(tile.slot.take());
    }

    fn evictable_key(&self, range: u32) -> Option<(u32, u32)> {
        let tile = &self.tiles[range as usize];
        let may = !tile.resident && tile.state == TileState::Idle && tile.dirty.is_none();
        may.then_some((tile.next_use, range))
    }

    fn unlist(&mut self, range: u32) {
        if let Some(key) = self.evictable_key(range) {
            self.evictable.remove(&key);
        }
    }

    fn list(&mut self, range: u32) {
        self.evictable.extend(self.evictable_key(range));
    }
}
