//! The deciding half: events in, actions out. No clock, no thread, no file.
//!
//! ```text
//!                    take_slot, Read              Update               Write (staged: soon; resident: for a commit)
//!   Device ─────────────────────────▶ Idle ◀──────────────▶ Updating      │
//!     ▲                              │  ▲ ◀────────────────▶ Lent         │
//!     └── evicted: clean, used later ┘  └────── Writing ◀─────────────────┘
//! ```
//!
//! **Order.** The plan is the program, expanded into uses of single ranges. Uses by the trainer are served in order, and
//! updates start in order. A use waits until it is the next one of its tile, so each tile's uses end in order.
//!
//! **Slots.** Reads are issued in plan order as far as slots allow, with one cursor a kind. A use at position p may take
//! the slot of a clean tile whose next use is after p; of these, the tile that is used last is evicted (Belady's rule
//! over a known program). The earliest unfinished use therefore always gets its slots, and two slots of each kind are
//! enough to make progress.
//!
//! **Generations.** Fills and updates belong to the working generation. No write of generation k+1 starts before
//! commit k is acknowledged, and a tile with unwritten content of k is not updated for k+1. A commit starts when
//! nothing of its generation is pending, dirty or being written.
//!
//! **Gradients.** A scatter puts gradients into an empty slot. Unless they are resident, they are written immediately. The
//! update consumes them: then the tile is empty, and the next scatter takes a slot again. Further scatters of the same
//! step add to the gradients in the slot. Gradients belong to no generation: their writes wait for no commit, and no
//! commit waits for them. Another pass of the same step and a drain keep them; those of a step that was not finished are
//! dropped when the next step begins.
//!
//! **Revisions.** A revised state waits in its slot for its update, which changes it again. It is written before only where revised states take all
//! slots, and read again.
//!
//! **External ranges.** The caller has their newest content and updates it. A commit makes them pending, if the caller has updated them since the last one:
//! a worker copies each into slots, in the order of updates, and they are written as staged tiles. The caller's next update waits for that
//! ([`Request::Settle`]). Gathers and scatters skip them.
//!
//! **A step in parts.** Updates may begin before all gradients of a step have come: those that the new plan has become pending, and what is
//! scattered later joins them. No commit is planned in between, so that one generation and one set of hyperparameters hold.
//!
//! **Bounds.** Operations in flight: half of iodepth in each direction, since drives read and write at the same time.
//! Updates in flight: [`UPDATES_PER_WORKER`] a worker; they start in plan order and end in any order. Outstanding commits: two.

mod apply;
mod events;
mod plan;
mod select;
mod tiles;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

pub use crate::layout::{ByKind, Kind};
pub use crate::op::Op;
pub use events::{Action, CoreSettings, Event, Request, SlotNumber, TileId};

use plan::{NEVER, Plan, UseKind};
use tiles::{TileState, Tiles};

/// Commits planned and not acknowledged: one in progress, and one whose updates are running.
const COMMITS_MAX: usize = 2;

/// Updates in flight for each worker: one in its hands, and others that it finds when it is done. The owner thread shares cores with
/// workers, so it may run only after several of them have ended one; with one more than workers in flight, most waited for it.
pub const UPDATES_PER_WORKER: usize = 4;

/// An operation that is being served.
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
        joins: bool,
        commits_max: usize,
    },
    /// Waits until nothing is pending and no commit is outstanding.
    Settling,
    /// Waits until nothing is pending.
    Updating,
    /// Nothing is left to do before the answer.
    Finished,
}

/// The swapper's decision state.
#[derive(Debug)]
pub struct Core {
    units: Vec<Range<u32>>,
    trained: Vec<bool>,
    external: Vec<bool>,
    /// Whether the caller has updated external ranges since they were last copied.
    external_changed: bool,
    tiles: ByKind<Tiles>,
    durable: bool,
    updates_max: usize,
    reads_max: usize,
    writes_max: usize,
    reads_inflight: usize,
    /// Read-ahead operations among the reads in flight.
    reads_ahead: Vec<TileId>,
    /// Writes in flight, by kind.
    writes_inflight: ByKind<usize>,

    plan: Plan,
    /// Read cursor of each kind: position of the first use not passed yet.
    ahead: ByKind<usize>,
    /// Index of the next entry of `plan.updates` to start, and of `plan.served` to serve.
    next_update: usize,
    next_served: usize,
    /// Uses before this position belong to the trainer's present or next operation.
    wanted: usize,
    /// Fills and rewrites of the plan not done yet: its commit waits for them.
    fills_left: usize,
    /// Ranges with the workers, with their position in this plan.
    updating: BTreeMap<u32, Option<u32>>,

    /// Ranges scattered in this step.
    scattered: Vec<bool>,
    /// Ranges whose staged state was revised and not updated since, and those of them that are only in a slot, newest last; may contain stale entries.
    revised: Vec<bool>,
    revised_to_write: Vec<u32>,
    /// Ranges whose update is still to run, and its generation.
    pending: Vec<bool>,
    pending_count: usize,
    pending_generation: u64,
    /// Steps with updates so far.
    step: u64,

    /// Generation of the newest acknowledged commit; commits planned after it; whether the first of them is in
    /// progress.
    acknowledged: u64,
    commits: usize,
    committing: bool,
    /// Dirty tiles by generation, staged and resident, then by kind, oldest first. Stale entries are skipped.
    to_write: [BTreeMap<u64, [VecDeque<TileId>; 2]>; 2],
    /// Ranges whose gradients are only in a staging slot, oldest first; may contain stale entries.
    grads_to_write: VecDeque<u32>,

    waiting: Waiting,
    failed: bool,
    changed: bool,
}

impl Core {
    /// Creates a core whose tiles are all on their devices, or have no content.
    pub fn new(settings: CoreSettings) -> Self {
        let CoreSettings {
            units,
            trained,
            external,
            resident,
            staging,
            iodepth,
            workers,
            durable,
        } = settings;
        let ranges = units.last().map_or(0, |unit| unit.end) as usize;
        assert!(iodepth >= 2, "one operation each way");
        assert!(workers >= 1, "somebody updates");
        assert_eq!(trained.len(), ranges, "one mark a range");
        assert_eq!(external.len(), ranges, "one mark a range");
        let all_here = !external.contains(&true);
        assert!(durable || all_here, "nothing is copied without a store");
        for kind in Kind::ALL {
            let resident = &resident[kind];
            assert_eq!(resident.len(), ranges, "one mark a range");
            let has = |range: usize| match kind {
                Kind::Param => true,
                Kind::State => trained[range],
                Kind::Grad => trained[range] && !external[range],
            };
            let staged = (0..ranges).filter(|&range| has(range) && !resident[range]);
            let staged = staged.count();
            assert!(durable || staged == 0, "without a store all is resident");
            assert!(staging[kind] as usize >= staged.min(2));
        }
        Self {
            units,
            trained,
            external,
            external_changed: false,
            tiles: ByKind::new(|kind| Tiles::new(kind, &resident[kind], staging[kind])),
            durable,
            updates_max: workers * UPDATES_PER_WORKER,
            reads_max: iodepth.div_ceil(2) as usize,
            writes_max: (iodepth / 2) as usize,
            reads_inflight: 0,
            reads_ahead: Vec::new(),
            writes_inflight: ByKind::default(),
            plan: Plan::default(),
            ahead: ByKind::default(),
            next_update: 0,
            next_served: 0,
            wanted: 0,
            fills_left: 0,
            updating: BTreeMap::new(),
            scattered: vec![false; ranges],
            revised: vec![false; ranges],
            revised_to_write: Vec::new(),
            pending: vec![false; ranges],
            pending_count: 0,
            pending_generation: 0,
            step: 0,
            acknowledged: 0,
            commits: 0,
            committing: false,
            to_write: [BTreeMap::new(), BTreeMap::new()],
            grads_to_write: VecDeque::new(),
            waiting: Waiting::Nothing,
            failed: false,
            changed: false,
        }
    }

    /// Processes one event and appends the resulting actions, in order.
    pub fn on_event(&mut self, event: Event, actions: &mut Vec<Action>) {
        if self.failed {
            return;
        }
        match event {
            Event::Plan(ops) => {
                assert!(matches!(self.waiting, Waiting::Nothing));
                self.scattered.fill(false);
                self.revised_to_write
                    .retain(|&range| self.revised[range as usize]);
                self.set_plan(&ops);
            }
            Event::Pass(ops) => {
                assert!(matches!(self.waiting, Waiting::Nothing));
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
            self.promote(actions);
            self.lease(actions);
            self.start_updates(actions);
            self.start_writes(actions);
            self.start_reads(actions);
            self.start_commit(actions);
            if !self.changed {
                self.write_revised(actions);
            }
            if !self.changed {
                return;
            }
        }
    }

    /// Describes unfinished work, for an error about a stall.
    pub fn describe(&self) -> String {
        format!(
            "{} reads, {} writes, {} updates in flight; {} updates pending; {} commits planned, under way: {}; {:?}",
            self.reads_inflight,
            self.writes_inflight.0.iter().sum::<usize>(),
            self.updating.len(),
            self.pending_count,
            self.commits,
            self.committing,
            self.waiting,
        )
    }

    /// Generation of present fills and updates.
    fn working(&self) -> u64 {
        self.acknowledged + self.commits as u64 + 1
    }

    /// Advances `wanted` to the end of the trainer's next operation.
    fn want(&mut self) {
        let next = self.plan.served.get(self.next_served);
        if let Some(&last) = next.and_then(|(_, positions)| positions.last()) {
            self.wanted = last as usize + 1;
        }
    }

    fn tiles(&mut self, kind: Kind) -> &mut Tiles {
        &mut self.tiles[kind]
    }

    /// Makes external ranges pending whose content a commit lacks.
    fn want_copies(&mut self) {
        let generation = self.working();
        assert!(
            self.pending_count == 0 || self.pending_generation == generation,
            "updates of an earlier generation are pending"
        );
        for range in 0..self.pending.len() {
            if self.external[range] && self.trained[range] {
                assert!(!std::mem::replace(&mut self.pending[range], true));
                self.pending_count += 1;
            }
        }
        self.pending_generation = generation;
    }

    fn set_plan(&mut self, ops: &[Op]) {
        if ops.contains(&Op::Commit) && std::mem::take(&mut self.external_changed) {
            self.want_copies();
        }
        // The new plan claims slots for copies again.
        for range in 0..self.pending.len() {
            for kind in Kind::STORED {
                if self.pending[range] && self.tiles[kind].state(range as u32) == TileState::Claimed
                {
                    self.tiles(kind).clear(range as u32);
                }
            }
        }
        for range in 0..self.pending.len() {
            if !self.pending[range] && !self.scattered[range] {
                self.tiles(Kind::Grad).abandon(range as u32);
            }
        }
        let mut first = ByKind::new(|_| vec![NEVER; self.pending.len()]);
        let (pending, updating) = (&self.pending, &self.updating);
        self.plan = Plan::new(
            ops,
            &self.units,
            [&self.trained, &self.external],
            |range| pending[range as usize] && !updating.contains_key(&range),
            self.scattered.clone(),
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
            self.tiles(kind).replan(&first[kind]);
        }
        self.ahead = ByKind::default();
        self.next_update = 0;
        self.next_served = 0;
        self.wanted = self.plan.uses.len();
        self.want();
        let fills = |one: &&plan::Use| matches!(one.what, UseKind::Fill | UseKind::Rewrite);
        self.fills_left = self.plan.uses.iter().filter(fills).count();
        if self.plan.commits {
            self.commits += 1;
            assert!(self.commits <= COMMITS_MAX, "too many commits outstanding");
        }
        self.changed = true;
    }
}
