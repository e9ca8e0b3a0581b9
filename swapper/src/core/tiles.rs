//! Where each tile is, and which slots are free. Every change of place goes through here, so the counts always agree.

use std::collections::{BTreeMap, BTreeSet};

use super::plan::NEVER;
use super::{Kind, SlotNumber, TileId};

/// What unwritten gradients belong to: no commit waits for them.
pub(super) const NO_GENERATION: u64 = u64::MAX;

/// Where a tile is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// On its device only (or nowhere yet). A resident tile's slot waits for it.
    Device,
    /// Its slot is taken and empty: the trainer will fill it, with first contents or with gradients.
    Claimed,
    /// On the way in.
    Reading,
    /// In its slot, and nobody uses it.
    Here,
    /// In its slot, the trainer has it.
    Lease,
    /// In its slot, the optimizer has it.
    Updating,
    /// In its slot, on the way out.
    Writing,
}

#[derive(Clone, Debug)]
struct Tile {
    place: Place,
    /// Always there for a resident tile, otherwise unless `place` is `Device`.
    slot: Option<SlotNumber>,
    resident: bool,
    /// The generation it was changed in, until that content is on its device.
    dirty: Option<u64>,
    /// Position of its next use in the plan, or `NEVER`.
    next_use: u32,
    /// Nobody wants its content any more; it is cleared when it has stopped moving.
    dead: bool,
}

/// All tiles of one kind, and the staging slots they share.
#[derive(Debug)]
pub(super) struct Tiles {
    kind: Kind,
    tiles: Vec<Tile>,
    free: Vec<SlotNumber>,
    /// Staged, clean, idle tiles by next use: the last one is given up first.
    evictable: BTreeSet<(u32, u32)>,
    /// Tiles of each generation whose content is not on a device.
    dirty_counts: BTreeMap<u64, usize>,
}

impl Tiles {
    /// Slots `0..staging` are shared; resident tiles have those after them.
    pub(super) fn new(kind: Kind, resident: &[bool], staging: u32) -> Self {
        let mut next_resident = staging;
        let tiles = resident
            .iter()
            .map(|&resident| Tile {
                place: Place::Device,
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

    pub(super) fn place(&self, range: u32) -> Place {
        self.tiles[range as usize].place
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

    /// Moves a tile to `place`, in its slot.
    pub(super) fn set_place(&mut self, range: u32, place: Place) {
        self.unlist(range);
        self.tiles[range as usize].place = place;
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

    /// Takes a new plan's first uses.
    pub(super) fn replan(&mut self, first: &[u32]) {
        for (range, &first) in first.iter().enumerate() {
            let range = range as u32;
            assert_ne!(
                self.place(range),
                Place::Claimed,
                "a plan is replaced while it fills"
            );
            self.set_next_use(range, first);
        }
    }

    /// A tile has arrived in its slot or on its device.
    pub(super) fn stop_moving(&mut self, range: u32) {
        match self.tiles[range as usize].dead {
            true => self.clear(range),
            false => self.set_place(range, Place::Here),
        }
    }

    /// Gives up a tile's content, which nobody uses: at once, or when it has stopped moving.
    pub(super) fn abandon(&mut self, range: u32) {
        match self.place(range) {
            Place::Device => {}
            Place::Claimed | Place::Here => self.clear(range),
            Place::Reading | Place::Writing => self.tiles[range as usize].dead = true,
            place @ (Place::Lease | Place::Updating) => panic!("{place:?} content is abandoned"),
        }
    }

    /// The tile has no content any more, in its slot or elsewhere. Its slot is free.
    pub(super) fn clear(&mut self, range: u32) {
        self.set_dirty(range, None);
        self.unlist(range);
        let tile = &mut self.tiles[range as usize];
        tile.place = Place::Device;
        tile.dead = false;
        if !tile.resident {
            self.free.extend(tile.slot.take());
        }
    }

    /// Gives a tile that is on its device a slot for the use at `position`: its own, a free one, or that of the tile
    /// whose next use is furthest away and later than `position`. `false` when there is none.
    pub(super) fn take_slot(&mut self, range: u32, position: u32) -> bool {
        assert_eq!(self.place(range), Place::Device);
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
        assert!(tile.place == Place::Here && !tile.resident);
        tile.place = Place::Device;
        self.free.extend(tile.slot.take());
    }

    fn evictable_key(&self, range: u32) -> Option<(u32, u32)> {
        let tile = &self.tiles[range as usize];
        let may = !tile.resident && tile.place == Place::Here && tile.dirty.is_none();
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
