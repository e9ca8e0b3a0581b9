//! The deciding half: events in, actions out. No clock, no thread, no file.
//!
//! ```text
//!                    take_slot, Read              Update               Write (staged: soon; resident: for a commit)
//!   Device ─────────────────────────▶ Here ◀──────────────▶ Updating      │
//!     ▲                              │  ▲ ◀────────────────▶ Lent         │
//!     └── evicted: clean, used later ┘  └────── Writing ◀─────────────────┘
//! ```
//!
//! **Order.** The plan is the program expanded to uses of single ranges. The trainer's uses are served in order, updates
//! run in order, and each tile's uses complete in order because a use waits until it is its tile's next.
//!
//! **Slots.** Reads are issued in the order of the plan as far as slots allow, one cursor a kind. The use at position p may
//! take the slot of a clean tile whose next use is later than p; the furthest one is taken (Belady's rule over the known
//! program). So the tiles of the earliest unfinished use always get slots, whatever waits behind them: with two slots
//! of each kind everything still moves.
//!
//! **Generations.** What is filled or updated belongs to the working generation. No write of generation k+1 starts before
//! commit k is acknowledged, and a tile that still holds unwritten content of k is not updated for k+1. A commit starts when
//! nothing of its generation is pending, dirty or being written.
//!
//! **Bounds.** Operations in flight: half of iodepth each way, since drives read and write at the same time. Updates in flight:
//! two, so that the worker never waits for a message. Commits outstanding: two.

mod plan;
mod tiles;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

pub use crate::layout::Kind;
pub use crate::schedule::Op;

use plan::{NEVER, Plan, UseKind};
use tiles::{Place, Tiles};

/// Updates given to the worker and not answered: one runs, one waits.
const UPDATES_MAX: usize = 2;

/// Commits planned and not acknowledged: one under way, one whose updates are running.
const COMMITS_MAX: usize = 2;

/// One tile: a range's param or state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TileId {
    /// Which of the two.
    pub kind: Kind,
    /// Index of the range.
    pub range: u32,
}

/// A slot's place among the slots of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotNumber(pub u32);

/// What the core is made from.
#[derive(Clone, Debug)]
pub struct CoreSettings {
    /// Each unit's ranges: consecutive, from 0.
    pub units: Vec<Range<u32>>,
    /// Whether each range's tile stays in host memory, by kind.
    pub resident: [Vec<bool>; 2],
    /// Slots for the others, by kind. At least 2 where there are two or more others.
    pub staging: [u32; 2],
    /// Operations in flight, at least 2.
    pub iodepth: u32,
    /// Whether there is a store. Without one every tile is resident, nothing moves and commits need nobody.
    pub durable: bool,
}

/// What the trainer waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Its next operation: `Fill`, `Gather`, `Scatter` or `Visit` of a unit.
    Serve(Op),
    /// The step's gradients are complete.
    Finish {
        /// The new plan.
        ops: Vec<Op>,
        /// Whether what was scattered is to be updated; otherwise it is dropped.
        update: bool,
        /// Whether to answer only when nothing is pending and all commits are acknowledged.
        wait: bool,
    },
    /// Follow a new plan; answer when nothing is pending and all commits are acknowledged.
    Drain {
        /// The new plan.
        ops: Vec<Op>,
    },
}

/// What happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// A pass begins: a new plan. It must hold an update of every unit that has one pending.
    Plan(Vec<Op>),
    /// The trainer waits; there is never a second request.
    Request(Request),
    /// The trainer has done with what it was lent first.
    Returned {
        /// The range it was lent.
        range: u32,
    },
    /// The worker has updated a range.
    Updated {
        /// The range.
        range: u32,
    },
    /// A tile is in its slot, or on its device.
    Moved {
        /// Which.
        tile: TileId,
    },
    /// The commit under way is acknowledged.
    Committed,
    /// Something failed for good: nothing more is done.
    Failed,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Bring a tile into a slot. What the slot held before is given up.
    Read {
        /// Which.
        tile: TileId,
        /// Where to.
        slot: SlotNumber,
    },
    /// Bring a slot's content to its tile's device.
    Write {
        /// Which.
        tile: TileId,
        /// Where from.
        slot: SlotNumber,
    },
    /// Give the worker a range: param, state and gradients.
    Update {
        /// The range.
        range: u32,
        /// Its param and state.
        slots: [SlotNumber; 2],
        /// Which step's update it is: the finishes with updates are counted from 1.
        step: u64,
    },
    /// Give the trainer a range.
    Lend {
        /// The range.
        range: u32,
        /// Its param and state, where the use needs them.
        slots: [Option<SlotNumber>; 2],
        /// Whether its gradients are what is lent.
        grad: bool,
    },
    /// Make a generation durable.
    Commit {
        /// Counted from 1 since the core was made.
        generation: u64,
    },
    /// The trainer's request is served.
    Done,
    /// The trainer asked for something else than the plan has next. Nothing happened.
    Refused {
        /// What it asked.
        asked: Op,
        /// What comes next.
        announced: Option<Op>,
    },
}

/// A served operation under way.
#[derive(Debug)]
struct Serving {
    /// Positions still to lend.
    left: VecDeque<u32>,
    /// Positions lent, in order.
    lent: VecDeque<u32>,
}

/// The state of the trainer's request.
#[derive(Debug)]
enum Waiting {
    Nothing,
    Serving(Serving),
    Finishing {
        ops: Vec<Op>,
        update: bool,
        wait: bool,
    },
    /// Until nothing is pending and no commit is outstanding.
    Settling,
    /// Nothing more: answer.
    Finished,
}

/// Everything the swapper decides with.
#[derive(Debug)]
pub struct Core {
    units: Vec<Range<u32>>,
    tiles: [Tiles; 2],
    durable: bool,
    reads_max: usize,
    writes_max: usize,
    reads_inflight: usize,
    writes_inflight: usize,

    plan: Plan,
    /// Position of the first use each kind's reading has not passed.
    ahead: [usize; 2],
    /// Next of `plan.updates` to start, next of `plan.served` to serve.
    next_update: usize,
    next_served: usize,
    /// Fills of the plan not yet done: its commit waits for them.
    fills_left: usize,
    /// Ranges with the worker, with their position in this plan.
    updating: BTreeMap<u32, Option<u32>>,

    /// Ranges whose gradients came in this step.
    scattered: Vec<bool>,
    /// Ranges whose update is still to run, and the generation it belongs to.
    pending: Vec<bool>,
    pending_count: usize,
    pending_generation: u64,
    /// Finishes with updates so far.
    step: u64,

    /// Generation of the newest acknowledged commit; commits planned after it; whether the first of them is under way.
    acknowledged: u64,
    commits: usize,
    committing: bool,
    /// Dirty tiles by generation, staged and resident, oldest first. Entries that became stale are skipped.
    to_write: [BTreeMap<u64, VecDeque<TileId>>; 2],

    waiting: Waiting,
    failed: bool,
    changed: bool,
}

impl Core {
    /// A core whose tiles are all on their devices, or nowhere.
    pub fn new(settings: CoreSettings) -> Self {
        let CoreSettings {
            units,
            resident,
            staging,
            iodepth,
            durable,
        } = settings;
        let ranges = units.last().map_or(0, |unit| unit.end) as usize;
        assert!(iodepth >= 2, "one operation each way");
        for kind in Kind::ALL {
            let resident = &resident[kind as usize];
            assert_eq!(resident.len(), ranges, "one mark a range");
            let staged = resident.iter().filter(|&&resident| !resident).count();
            assert!(durable || staged == 0, "without a store all is resident");
            assert!(staging[kind as usize] as usize >= staged.min(2));
        }
        Self {
            units,
            tiles: Kind::ALL
                .map(|kind| Tiles::new(kind, &resident[kind as usize], staging[kind as usize])),
            durable,
            reads_max: iodepth.div_ceil(2) as usize,
            writes_max: (iodepth / 2) as usize,
            reads_inflight: 0,
            writes_inflight: 0,
            plan: Plan::default(),
            ahead: [0; 2],
            next_update: 0,
            next_served: 0,
            fills_left: 0,
            updating: BTreeMap::new(),
            scattered: vec![false; ranges],
            pending: vec![false; ranges],
            pending_count: 0,
            pending_generation: 0,
            step: 0,
            acknowledged: 0,
            commits: 0,
            committing: false,
            to_write: [BTreeMap::new(), BTreeMap::new()],
            waiting: Waiting::Nothing,
            failed: false,
            changed: false,
        }
    }

    /// Takes one event and appends what is to be done, in order.
    pub fn on_event(&mut self, event: Event, actions: &mut Vec<Action>) {
        if self.failed {
            return;
        }
        match event {
            Event::Plan(ops) => {
                assert!(matches!(self.waiting, Waiting::Nothing));
                self.scattered.fill(false);
                self.set_plan(&ops);
            }
            Event::Request(request) => self.ask(request, actions),
            Event::Returned { range } => self.returned(range),
            Event::Updated { range } => self.updated(range),
            Event::Moved { tile } => self.moved(tile),
            Event::Committed => self.committed(),
            Event::Failed => {
                self.failed = true;
                return;
            }
        }
        loop {
            self.changed = false;
            self.advance_request(actions);
            self.lend(actions);
            self.start_updates(actions);
            self.start_writes(actions);
            self.start_reads(actions);
            self.start_commit(actions);
            if !self.changed {
                return;
            }
        }
    }

    /// What is unfinished, for a message about a stall.
    pub fn describe(&self) -> String {
        format!(
            "{} reads, {} writes, {} updates in flight; {} updates pending; {} commits planned, under way: {}; {:?}",
            self.reads_inflight,
            self.writes_inflight,
            self.updating.len(),
            self.pending_count,
            self.commits,
            self.committing,
            self.waiting,
        )
    }

    /// The generation that what is filled or updated now will belong to.
    fn working(&self) -> u64 {
        self.acknowledged + self.commits as u64 + 1
    }

    fn tiles(&mut self, kind: Kind) -> &mut Tiles {
        &mut self.tiles[kind as usize]
    }

    fn set_plan(&mut self, ops: &[Op]) {
        let mut first = [
            vec![NEVER; self.pending.len()],
            vec![NEVER; self.pending.len()],
        ];
        let (pending, updating) = (&self.pending, &self.updating);
        self.plan = Plan::new(
            ops,
            &self.units,
            |range| pending[range as usize] && !updating.contains_key(&range),
            &mut first,
        );
        assert_eq!(
            self.plan.updates.len() + self.updating.len(),
            self.pending_count,
            "a plan that forgets a pending update"
        );
        for position in self.updating.values_mut() {
            *position = None;
        }
        for kind in Kind::ALL {
            self.tiles(kind).replan(&first[kind as usize]);
        }
        self.ahead = [0; 2];
        self.next_update = 0;
        self.next_served = 0;
        let fills = |one: &&plan::Use| one.what == UseKind::Fill;
        self.fills_left = self.plan.uses.iter().filter(fills).count();
        if self.plan.commits {
            self.commits += 1;
            assert!(self.commits <= COMMITS_MAX, "too many commits outstanding");
        }
        self.changed = true;
    }

    fn ask(&mut self, request: Request, actions: &mut Vec<Action>) {
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
                Waiting::Serving(Serving {
                    left,
                    lent: VecDeque::new(),
                })
            }
            Request::Finish { ops, update, wait } => {
                if self.pending_count > 0 {
                    // The trainer left its program early. Updates behind gathers that never come would want their slots.
                    let left: Vec<Op> = (0..self.units.len())
                        .map(|unit| Op::Update { unit })
                        .collect();
                    self.set_plan(&left);
                }
                Waiting::Finishing { ops, update, wait }
            }
            Request::Drain { ops } => {
                self.scattered.fill(false);
                self.set_plan(&ops);
                Waiting::Settling
            }
        };
    }

    /// The use at `position` is over: its tiles' next uses come up.
    fn complete(&mut self, position: u32) {
        let one = self.plan.uses[position as usize];
        for kind in Kind::ALL {
            if one.what.needs(kind) {
                assert_eq!(self.tiles(kind).next_use(one.range), position);
                self.tiles(kind)
                    .set_next_use(one.range, one.next[kind as usize]);
            }
        }
    }

    /// A tile is back in its slot; if its content is newer than its device's, it joins those to write.
    fn put_back(&mut self, kind: Kind, range: u32) {
        self.tiles(kind).set_place(range, Place::Here);
        if let Some(generation) = self.tiles(kind).dirty(range) {
            let resident = self.tiles(kind).resident(range);
            let tile = self.tiles(kind).id(range);
            self.to_write[usize::from(resident)]
                .entry(generation)
                .or_default()
                .push_back(tile);
        }
    }

    fn returned(&mut self, range: u32) {
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
            UseKind::Scatter => self.scattered[range as usize] = true,
            UseKind::Fill => {
                self.fills_left -= 1;
                // The plan's own commit is counted already.
                let generation = working - u64::from(self.plan.commits);
                for kind in Kind::ALL {
                    let dirty = self.durable.then_some(generation);
                    self.tiles(kind).set_dirty(range, dirty);
                }
            }
            _ => {}
        }
        self.complete(position);
        for kind in Kind::ALL {
            if one.what.needs(kind) {
                self.put_back(kind, range);
            }
        }
    }

    fn updated(&mut self, range: u32) {
        let position = self
            .updating
            .remove(&range)
            .expect("only what was given is updated");
        assert!(std::mem::take(&mut self.pending[range as usize]));
        self.pending_count -= 1;
        if let Some(position) = position {
            self.complete(position);
        }
        for kind in Kind::ALL {
            let dirty = self.durable.then_some(self.pending_generation);
            self.tiles(kind).set_dirty(range, dirty);
            self.put_back(kind, range);
        }
    }

    fn moved(&mut self, tile: TileId) {
        let tiles = &mut self.tiles[tile.kind as usize];
        match tiles.place(tile.range) {
            Place::Reading => self.reads_inflight -= 1,
            Place::Writing => {
                self.writes_inflight -= 1;
                tiles.set_dirty(tile.range, None);
            }
            place => panic!("{tile:?} moved while {place:?}"),
        }
        tiles.set_place(tile.range, Place::Here);
    }

    fn committed(&mut self) {
        assert!(std::mem::take(&mut self.committing));
        self.acknowledged += 1;
        self.commits -= 1;
        for queues in &mut self.to_write {
            // Only stale entries are left of it.
            queues.remove(&self.acknowledged);
        }
    }

    fn advance_request(&mut self, actions: &mut Vec<Action>) {
        // The updates of the step before share one generation and one hyper: they go first.
        if matches!(self.waiting, Waiting::Finishing { .. })
            && self.pending_count == 0
            && self.commits < COMMITS_MAX
        {
            self.finish();
        }
        let done = match &self.waiting {
            Waiting::Nothing | Waiting::Finishing { .. } => false,
            Waiting::Serving(serving) => serving.left.is_empty() && serving.lent.is_empty(),
            Waiting::Settling => self.pending_count == 0 && self.commits == 0,
            Waiting::Finished => true,
        };
        if done {
            self.waiting = Waiting::Nothing;
            actions.push(Action::Done);
        }
    }

    /// What was scattered becomes pending in the working generation, under a new plan.
    fn finish(&mut self) {
        let Waiting::Finishing { ops, update, wait } =
            std::mem::replace(&mut self.waiting, Waiting::Nothing)
        else {
            unreachable!("asked only while finishing");
        };
        self.pending_generation = self.working();
        if update {
            self.step += 1;
            self.pending.copy_from_slice(&self.scattered);
            self.pending_count = self.pending.iter().filter(|&&pending| pending).count();
        }
        self.scattered.fill(false);
        self.set_plan(&ops);
        self.waiting = if wait {
            Waiting::Settling
        } else {
            Waiting::Finished
        };
    }

    /// Lends the trainer, in order, what its operation needs and is ready.
    fn lend(&mut self, actions: &mut Vec<Action>) {
        while let Waiting::Serving(serving) = &mut self.waiting {
            let Some(&position) = serving.left.front() else {
                return;
            };
            let one = self.plan.uses[position as usize];
            let range = one.range;
            let from = match one.what {
                UseKind::Fill => Place::Claimed,
                _ => Place::Here,
            };
            let ready =
                |tiles: &Tiles| tiles.place(range) == from && tiles.next_use(range) == position;
            let needed = Kind::ALL.map(|kind| one.what.needs(kind));
            // Gradients that an update has yet to read must not be overwritten.
            let grad = one.what == UseKind::Scatter;
            if grad && self.pending[range as usize]
                || Kind::ALL
                    .iter()
                    .any(|&kind| needed[kind as usize] && !ready(&self.tiles[kind as usize]))
            {
                return;
            }
            serving.left.pop_front();
            serving.lent.push_back(position);
            let slots = Kind::ALL.map(|kind| {
                needed[kind as usize].then(|| {
                    let tiles = &mut self.tiles[kind as usize];
                    tiles.set_place(range, Place::Lent);
                    tiles.slot(range)
                })
            });
            actions.push(Action::Lend { range, slots, grad });
            self.changed = true;
        }
    }

    /// Gives the worker the next updates whose tiles are in their slots.
    fn start_updates(&mut self, actions: &mut Vec<Action>) {
        while self.updating.len() < UPDATES_MAX
            && let Some(&position) = self.plan.updates.get(self.next_update)
        {
            let range = self.plan.uses[position as usize].range;
            let generation = self.pending_generation;
            let ready = self.tiles.iter().all(|tiles| {
                tiles.place(range) == Place::Here
                    && tiles.next_use(range) == position
                    && tiles.dirty(range).is_none_or(|dirty| dirty == generation)
            });
            if !ready {
                return;
            }
            let slots = Kind::ALL.map(|kind| {
                self.tiles(kind).set_place(range, Place::Updating);
                self.tiles(kind).slot(range)
            });
            self.updating.insert(range, Some(position));
            self.next_update += 1;
            let step = self.step;
            actions.push(Action::Update { range, slots, step });
            self.changed = true;
        }
    }

    /// Writes what belongs to the generation after the acknowledged one: staged tiles soon, since their slots are wanted,
    /// resident ones only for a commit, and only once no update will change them before it.
    fn start_writes(&mut self, actions: &mut Vec<Action>) {
        let generation = self.acknowledged + 1;
        let updates_left = self.pending_generation == generation;
        for resident in [false, true] {
            if resident && self.commits == 0 {
                return;
            }
            let queues = &mut self.to_write[usize::from(resident)];
            while self.writes_inflight < self.writes_max
                && let Some(tile) = queues
                    .get_mut(&generation)
                    .and_then(|queue| queue.pop_front())
            {
                let tiles = &mut self.tiles[tile.kind as usize];
                // Lent, updated again or written since it was put here: it comes back to the queue when it must.
                let stale = tiles.dirty(tile.range) != Some(generation)
                    || tiles.place(tile.range) != Place::Here
                    || (resident && updates_left && self.pending[tile.range as usize]);
                if stale {
                    continue;
                }
                tiles.set_place(tile.range, Place::Writing);
                self.writes_inflight += 1;
                let slot = tiles.slot(tile.range);
                actions.push(Action::Write { tile, slot });
                self.changed = true;
            }
        }
    }

    /// Reads along the plan, the earlier of both kinds' next misses first.
    fn start_reads(&mut self, actions: &mut Vec<Action>) {
        let mut out_of_slots = [false; 2];
        loop {
            let mut next = None;
            for kind in Kind::ALL {
                self.skip_present(kind);
                let at = self.ahead[kind as usize];
                let earlier = next.is_none_or(|(position, _)| at < position);
                if at < self.plan.uses.len() && !out_of_slots[kind as usize] && earlier {
                    next = Some((at, kind));
                }
            }
            let Some((position, kind)) = next else {
                return;
            };
            let one = self.plan.uses[position];
            let fill = one.what == UseKind::Fill;
            if !fill && self.reads_inflight == self.reads_max {
                return;
            }
            let tiles = &mut self.tiles[kind as usize];
            if !tiles.take_slot(one.range, position as u32) {
                out_of_slots[kind as usize] = true;
                continue;
            }
            if fill {
                tiles.set_place(one.range, Place::Claimed);
            } else {
                tiles.set_place(one.range, Place::Reading);
                self.reads_inflight += 1;
                let (tile, slot) = (tiles.id(one.range), tiles.slot(one.range));
                actions.push(Action::Read { tile, slot });
            }
            self.changed = true;
        }
    }

    /// Moves a kind's cursor to the next use whose tile is on its device.
    fn skip_present(&mut self, kind: Kind) {
        let tiles = &self.tiles[kind as usize];
        let ahead = &mut self.ahead[kind as usize];
        while let Some(one) = self.plan.uses.get(*ahead) {
            if one.what.needs(kind) && tiles.place(one.range) == Place::Device {
                let next_use = tiles.next_use(one.range);
                assert!(next_use as usize >= *ahead, "a tile was given up too early");
                // Otherwise the use is over: it found the tile before the cursor came by.
                if next_use as usize == *ahead {
                    return;
                }
            }
            *ahead += 1;
        }
    }

    fn start_commit(&mut self, actions: &mut Vec<Action>) {
        let generation = self.acknowledged + 1;
        let updated = self.pending_count == 0 || self.pending_generation != generation;
        let clean = |tiles: &Tiles| tiles.dirty_count(generation) == 0;
        if self.commits == 0
            || self.committing
            || !updated
            || self.fills_left > 0
            || !self.tiles.iter().all(clean)
        {
            return;
        }
        // Only this generation was allowed to be written, and what is being written is still dirty.
        assert_eq!(self.writes_inflight, 0);
        self.committing = true;
        self.changed = true;
        if self.durable {
            actions.push(Action::Commit { generation });
        } else {
            self.committed();
        }
    }
}
