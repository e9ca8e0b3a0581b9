//! Selects operations that can be started now. Each function starts as much as it can.

use super::plan::UseKind;
use super::tiles::{NO_GENERATION, TileState, Tiles};
use super::{Action, ByKind, Core, Kind, TileId, Waiting};

impl Core {
    /// Lends the trainer, in order, the ready ranges of its operation.
    pub(super) fn lease(&mut self, actions: &mut Vec<Action>) {
        let working = self.working();
        while let Waiting::Serving(serving) = &mut self.waiting {
            let Some(&position) = serving.left.front() else {
                return;
            };
            let one = self.plan.uses[position as usize];
            let range = one.range;
            let from = match one.what {
                UseKind::Fill | UseKind::Scatter => TileState::Claimed,
                _ => TileState::Idle,
            };
            let ready =
                |tiles: &Tiles| tiles.state(range) == from && tiles.next_use(range) == position;
            let needed = ByKind::new(|kind| one.needs(kind));
            if Kind::ALL
                .iter()
                .any(|&kind| needed[kind] && !ready(&self.tiles[kind]))
            {
                return;
            }
            let settled = self.pending_count == 0 || self.pending_generation == working;
            assert!(
                settled || one.what != UseKind::Revise,
                "a revision before the updates of an earlier step"
            );
            // A state that is not written yet belongs to the commit before this step.
            let dirty = self.tiles[Kind::State].dirty(range);
            if one.what == UseKind::Revise && dirty.is_some_and(|of| of != working) {
                return;
            }
            let overwrites = one.what == UseKind::Scatter && self.pending[range as usize];
            assert!(!overwrites, "an update has yet to read these gradients");
            serving.left.pop_front();
            serving.lent.push_back(position);
            let slots = ByKind::new(|kind| {
                needed[kind].then(|| {
                    let tiles = &mut self.tiles[kind];
                    tiles.set_state(range, TileState::Lent);
                    tiles.slot(range)
                })
            });
            actions.push(Action::Lend { range, slots });
            self.changed = true;
        }
    }

    /// Starts the next updates whose tiles are in their slots.
    pub(super) fn start_updates(&mut self, actions: &mut Vec<Action>) {
        while self.updating.len() < self.updates_max
            && let Some(&position) = self.plan.updates.get(self.next_update)
        {
            let one = self.plan.uses[position as usize];
            let range = one.range;
            let generation = self.pending_generation;
            let of_its_time =
                |dirty: Option<u64>| dirty.is_none_or(|of| of == generation || of == NO_GENERATION);
            // A copy overwrites what is in the slots.
            let copies = one.what == UseKind::Copy;
            let in_slot = |state: TileState| {
                state == TileState::Idle || copies && state == TileState::Claimed
            };
            let ready = |tiles: &Tiles| {
                in_slot(tiles.state(range))
                    && tiles.next_use(range) == position
                    && of_its_time(tiles.dirty(range))
            };
            let needed = ByKind::new(|kind| one.needs(kind));
            if Kind::ALL
                .iter()
                .any(|&kind| needed[kind] && !ready(&self.tiles[kind]))
            {
                return;
            }
            let slots = ByKind::new(|kind| {
                needed[kind].then(|| {
                    self.tiles(kind).set_state(range, TileState::Updating);
                    self.tiles(kind).slot(range)
                })
            });
            self.updating.insert(range, Some(position));
            self.next_update += 1;
            let step = self.step;
            actions.push(Action::Update { range, slots, step });
            self.changed = true;
        }
    }

    /// Writes gradients first, because backward waits for their slots and they wait for no commit; then the generation.
    pub(super) fn start_writes(&mut self, actions: &mut Vec<Action>) {
        while self.may_write()
            && let Some(range) = self.grads_to_write.pop_front()
        {
            // Skips entries that were consumed or written since, or are with a worker.
            let grads = &self.tiles[Kind::Grad];
            if grads.state(range) == TileState::Idle && grads.dirty(range).is_some() {
                let tile = grads.id(range);
                self.write(tile, actions);
            }
        }
        self.write_generation(actions);
    }

    /// Writes revised states if they take all slots and nothing is on its way to free one, when nothing else can be started: those that were revised
    /// last are updated last.
    pub(super) fn write_revised(&mut self, actions: &mut Vec<Action>) {
        let moves = self.reads_inflight > 0 || self.writes_inflight.0 != [0; 3];
        let waits = match &self.waiting {
            Waiting::Nothing => self.next_update < self.plan.updates.len(),
            // What is lent comes back, and its operation may need no further slot.
            Waiting::Serving(serving) => serving.lent.is_empty(),
            _ => true,
        };
        let is_stuck = waits && !moves && self.updating.is_empty();
        if !is_stuck || self.tiles[Kind::State].has_slot() {
            return;
        }
        while self.may_write()
            && let Some(range) = self.revised_to_write.pop()
        {
            let states = &self.tiles[Kind::State];
            let is_idle = states.state(range) == TileState::Idle && self.revised[range as usize];
            match states.dirty(range) {
                // Updated or written since.
                _ if !is_idle => {}
                None => {}
                Some(generation) if generation == self.acknowledged + 1 => {
                    let tile = states.id(range);
                    self.write(tile, actions);
                }
                // The commit before is not acknowledged yet.
                Some(_) => {
                    self.revised_to_write.push(range);
                    return;
                }
            }
        }
    }

    fn may_write(&self) -> bool {
        self.writes_inflight.0.iter().sum::<usize>() < self.writes_max
    }

    fn write(&mut self, tile: TileId, actions: &mut Vec<Action>) {
        self.tiles(tile.kind)
            .set_state(tile.range, TileState::Writing);
        self.writes_inflight[tile.kind] += 1;
        let slot = self.tiles(tile.kind).slot(tile.range);
        actions.push(Action::Write { tile, slot });
        self.changed = true;
    }

    /// Writes tiles of the generation after the acknowledged one: staged tiles early, since their slots are needed,
    /// resident ones only for a commit and only once no update will change them before it.
    ///
    /// Parameters go first: backward gathers them again and needs their slots, while unwritten state may stay in its
    /// slot until the next forward. When writes followed the order of the updates, backward's reads were as slow as the
    /// state writes before them.
    fn write_generation(&mut self, actions: &mut Vec<Action>) {
        let generation = self.acknowledged + 1;
        let updates_left = self.pending_generation == generation;
        for resident in [false, true] {
            if resident && self.commits == 0 {
                return;
            }
            while self.may_write()
                && let Some([params, states]) =
                    self.to_write[usize::from(resident)].get_mut(&generation)
                && let Some(tile) = params.pop_front().or_else(|| states.pop_front())
            {
                let tiles = &self.tiles[tile.kind];
                // Lent, updated again or written since it was queued: it is queued again when needed.
                let stale = tiles.dirty(tile.range) != Some(generation)
                    || tiles.state(tile.range) != TileState::Idle
                    || (resident && updates_left && self.pending[tile.range as usize]);
                if stale {
                    continue;
                }
                self.write(tile, actions);
            }
        }
    }

    /// Reads along the plan, the earliest miss of all kinds first. Tiles that the trainer fills get their slots here
    /// too.
    pub(super) fn start_reads(&mut self, actions: &mut Vec<Action>) {
        let mut out_of_slots = ByKind::<bool>::default();
        loop {
            let mut next = None;
            for kind in Kind::ALL {
                out_of_slots[kind] |= !self.skip_present(kind);
                let at = self.ahead[kind];
                let earlier = next.is_none_or(|(position, _)| at < position);
                if at < self.plan.uses.len() && !out_of_slots[kind] && earlier {
                    next = Some((at, kind));
                }
            }
            let Some((position, kind)) = next else {
                return;
            };
            let one = self.plan.uses[position];
            let fill = matches!(one.what, UseKind::Fill | UseKind::Scatter | UseKind::Copy);
            if !fill && self.reads_inflight == self.reads_max {
                return;
            }
            let tiles = &mut self.tiles[kind];
            if !tiles.take_slot(one.range, position as u32) {
                out_of_slots[kind] = true;
                continue;
            }
            if fill {
                tiles.set_state(one.range, TileState::Claimed);
            } else {
                tiles.set_state(one.range, TileState::Reading);
                self.reads_inflight += 1;
                let (tile, slot) = (tiles.id(one.range), tiles.slot(one.range));
                let wanted = position < self.wanted;
                if !wanted {
                    self.reads_ahead.push(tile);
                }
                actions.push(Action::Read { tile, slot, wanted });
            }
            self.changed = true;
        }
    }

    /// Promotes read-ahead that the trainer's present or next operation now needs.
    pub(super) fn promote(&mut self, actions: &mut Vec<Action>) {
        let (tiles, wanted) = (&self.tiles, self.wanted);
        self.reads_ahead.retain(|&tile| {
            let soon = (tiles[tile.kind].next_use(tile.range) as usize) < wanted;
            if soon {
                actions.push(Action::Promote { tile });
            }
            !soon
        });
    }

    /// Moves a kind's cursor to the next use whose tile is on its device. Returns `false` when the cursor waits for
    /// gradients whose slot still holds those of the previous step.
    pub(super) fn skip_present(&mut self, kind: Kind) -> bool {
        let tiles = &self.tiles[kind];
        let ahead = &mut self.ahead[kind];
        while let Some(one) = self.plan.uses.get(*ahead) {
            if one.needs(kind) && tiles.state(one.range) == TileState::Device {
                let next_use = tiles.next_use(one.range);
                assert!(next_use as usize >= *ahead, "a tile was given up too early");
                // Otherwise the use is over: it found the tile before the cursor reached it.
                if next_use as usize == *ahead {
                    return true;
                }
            } else if one.what == UseKind::Scatter && kind == Kind::Grad {
                let claimed =
                    matches!(tiles.state(one.range), TileState::Claimed | TileState::Lent);
                if !claimed && tiles.next_use(one.range) as usize <= *ahead {
                    return false;
                }
            }
            *ahead += 1;
        }
        true
    }

    pub(super) fn start_commit(&mut self, actions: &mut Vec<Action>) {
        let generation = self.acknowledged + 1;
        let updated = self.pending_count == 0 || self.pending_generation != generation;
        let clean = |tiles: &Tiles| tiles.dirty_count(generation) == 0;
        let writing = Kind::STORED.map(|kind| self.writes_inflight[kind]);
        if self.commits == 0
            || self.committing
            || !updated
            || self.fills_left > 0
            || !self.tiles.0.iter().all(clean)
        {
            return;
        }
        // Only this generation may be written, and a tile that is being written is still dirty.
        assert_eq!(writing, [0; 2]);
        self.committing = true;
        self.changed = true;
        if self.durable {
            actions.push(Action::Commit { generation });
        } else {
            self.committed();
        }
    }
}
