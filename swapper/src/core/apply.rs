//! State changes of each event. Nothing is started here: `select.rs` then finds what has become possible.

use std::collections::VecDeque;

use super::plan::UseKind;
use super::tiles::{NO_GENERATION, TileState};
use super::{Action, COMMITS_MAX, Core, Kind, Op, Request, Serving, TileId, Waiting};

impl Core {
    pub(super) fn ask(&mut self, request: Request, actions: &mut Vec<Action>) {
        assert!(
            matches!(self.waiting, Waiting::Nothing),
            "two requests at once"
        );
        self.waiting = match request {
            Request::Serve(asked) => {
                let announced = self.plan.served.get(self.next_served);
                if announced.map(|(op, _)| *op) != Some(asked) {
                    actions.push(Action::Refused {
                        asked,
                        announced: announced.map(|(op, _)| *op),
                    });
                    return;
                }
                let left = std::mem::take(&mut self.plan.served[self.next_served].1).into();
                self.next_served += 1;
                self.want();
                Waiting::Serving(Serving {
                    left,
                    lent: VecDeque::new(),
                })
            }
            Request::Settle => {
                self.plan_rest();
                Waiting::Updating
            }
            Request::Finish {
                ops,
                update,
                wait,
                settled,
                joins,
            } => {
                if !joins {
                    self.plan_rest();
                }
                Waiting::Finishing {
                    ops,
                    update,
                    wait,
                    joins,
                    commits_max: if settled { 0 } else { COMMITS_MAX - 1 },
                }
            }
            Request::Drain { ops } => {
                self.set_plan(&ops);
                Waiting::Settling
            }
        };
    }

    /// Plans the pending updates alone if the trainer left its program early: updates behind gathers that never come must not claim slots.
    fn plan_rest(&mut self) {
        if self.pending_count > 0 && self.next_served < self.plan.served.len() {
            let units = 0..self.units.len();
            let left: Vec<Op> = units.map(|unit| Op::Update { unit }).collect();
            self.set_plan(&left);
        }
    }

    /// Ends the use at `position`: its tiles' next uses become current.
    pub(super) fn complete(&mut self, position: u32) {
        let one = self.plan.uses[position as usize];
        for kind in Kind::ALL {
            if one.needs(kind) {
                assert_eq!(self.tiles(kind).next_use(one.range), position);
                self.tiles(kind).set_next_use(one.range, one.next[kind]);
            }
        }
    }

    /// Puts a tile back into its slot, and queues it for writing if its content is newer than its device's.
    pub(super) fn put_back(&mut self, kind: Kind, range: u32) {
        self.tiles(kind).set_state(range, TileState::Idle);
        if kind == Kind::Grad {
            if self.tiles(kind).dirty(range).is_some() {
                self.grads_to_write.push_back(range);
            }
        } else if kind == Kind::State && self.revised[range as usize] {
            self.revised_to_write.push(range);
        } else if let Some(generation) = self.tiles(kind).dirty(range) {
            let resident = self.tiles(kind).resident(range);
            let tile = self.tiles(kind).id(range);
            self.to_write[usize::from(resident)]
                .entry(generation)
                .or_default()[kind as usize]
                .push_back(tile);
        }
    }

    pub(super) fn returned(&mut self, range: u32) {
        let Waiting::Serving(serving) = &mut self.waiting else {
            panic!("range {range} came back and nothing was lent");
        };
        let position = serving.lent.pop_front().expect("what comes back was lent");
        let one = self.plan.uses[position as usize];
        assert_eq!(
            one.range, range,
            "ranges come back in the order they were lent"
        );
        let working = self.working();
        match one.what {
            UseKind::Scatter | UseKind::Add => {
                self.scattered[range as usize] = true;
                let staged = !self.tiles(Kind::Grad).resident(range);
                self.tiles(Kind::Grad)
                    .set_dirty(range, staged.then_some(NO_GENERATION));
            }
            UseKind::Revise => {
                // Of the generation that the update of this step will be of.
                let dirty = self.durable.then_some(working);
                self.tiles(Kind::State).set_dirty(range, dirty);
                self.revised[range as usize] = !self.tiles(Kind::State).resident(range);
            }
            UseKind::Fill | UseKind::Rewrite => {
                self.fills_left -= 1;
                // The plan's own commit is already counted.
                let generation = working - u64::from(self.plan.commits);
                for kind in Kind::STORED.into_iter().filter(|&kind| one.needs(kind)) {
                    let dirty = self.durable.then_some(generation);
                    self.tiles(kind).set_dirty(range, dirty);
                }
            }
            _ => {}
        }
        self.complete(position);
        for kind in Kind::ALL {
            if one.needs(kind) {
                self.put_back(kind, range);
            }
        }
    }

    pub(super) fn updated(&mut self, range: u32) {
        let position = self
            .updating
            .remove(&range)
            .expect("only what was given is updated");
        assert!(std::mem::take(&mut self.pending[range as usize]));
        self.pending_count -= 1;
        if let Some(position) = position {
            self.complete(position);
        }
        self.revised[range as usize] = false;
        for kind in Kind::STORED {
            let dirty = self.durable.then_some(self.pending_generation);
            self.tiles(kind).set_dirty(range, dirty);
            self.put_back(kind, range);
        }
        self.tiles(Kind::Grad).clear(range);
    }

    pub(super) fn moved(&mut self, tile: TileId) {
        let tiles = &mut self.tiles[tile.kind];
        match tiles.state(tile.range) {
            TileState::Reading => {
                self.reads_inflight -= 1;
                self.reads_ahead.retain(|&other| other != tile);
            }
            TileState::Writing => {
                self.writes_inflight[tile.kind] -= 1;
                tiles.set_dirty(tile.range, None);
            }
            state => panic!("{tile:?} moved while {state:?}"),
        }
        tiles.stop_moving(tile.range);
    }

    pub(super) fn committed(&mut self) {
        assert!(std::mem::take(&mut self.committing));
        self.acknowledged += 1;
        self.commits -= 1;
        for queues in &mut self.to_write {
            // Only stale entries are left in the queue.
            queues.remove(&self.acknowledged);
        }
    }

    pub(super) fn advance_request(&mut self, actions: &mut Vec<Action>) {
        // Updates of the previous step share one generation and one set of hyperparameters: they go first.
        if let Waiting::Finishing {
            commits_max, joins, ..
        } = self.waiting
            && (joins || self.pending_count == 0)
            && self.commits <= commits_max
        {
            self.finish();
        }
        let done = match &self.waiting {
            Waiting::Nothing | Waiting::Finishing { .. } => false,
            Waiting::Serving(serving) => serving.left.is_empty() && serving.lent.is_empty(),
            Waiting::Settling => self.pending_count == 0 && self.commits == 0,
            Waiting::Updating => self.pending_count == 0,
            Waiting::Finished => true,
        };
        if done {
            self.waiting = Waiting::Nothing;
            actions.push(Action::Done);
        }
    }

    /// Makes the scattered ranges pending in the working generation, under a new plan.
    pub(super) fn finish(&mut self) {
        let Waiting::Finishing {
            ops,
            update,
            wait,
            joins,
            ..
        } = std::mem::replace(&mut self.waiting, Waiting::Nothing)
        else {
            unreachable!("asked only while finishing");
        };
        let generation = self.working();
        assert!(
            !joins || self.pending_generation == generation,
            "a commit between the parts of a step"
        );
        self.pending_generation = generation;
        if update {
            self.step += u64::from(!joins);
            self.external_changed = true;
            // Gradients of other units stay for further passes.
            for op in &ops {
                if let Op::Update { unit } | Op::UpdateAndGather { unit } = *op {
                    for range in self.units[unit].clone() {
                        let scattered = &mut self.scattered[range as usize];
                        self.pending[range as usize] |= std::mem::take(scattered);
                    }
                }
            }
            self.pending_count = self.pending.iter().filter(|&&pending| pending).count();
        } else {
            self.scattered.fill(false);
        }
        self.set_plan(&ops);
        self.waiting = if wait {
            Waiting::Settling
        } else {
            Waiting::Finished
        };
    }
}
