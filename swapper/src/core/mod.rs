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
//! **Gradients** come with a scatter into an empty slot, are written as soon as they are there unless they are resident, and
//! are used up by the update: after it the tile has no content, and the next scatter claims its slot again. They belong to no
//! generation: their writes wait for no commit and no commit for them. Further scatters of a step find the first one's
//! gradients in the slot and add to them. Gradients that are not updated are dropped when the next step begins; passes of
//! one step keep them.
//!
//! **Bounds.** Operations in flight: half of iodepth each way, since drives read and write at the same time. Updates in flight:
//! one more than workers, so that none waits for a message; they start in the order of the plan and end in any. Commits outstanding: two.

mod apply;
mod events;
mod plan;
mod select;
mod tiles;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

pub use crate::layout::Kind;
pub use crate::schedule::Op;
pub use events::{Action, CoreSettings, Event, Request, SlotNumber, TileId};

use plan::{NEVER, Plan, UseKind};
use tiles::Tiles;

/// Commits planned and not acknowledged: one under way, one whose updates are running.
const COMMITS_MAX: usize = 2;

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
    tiles: [Tiles; 3],
    durable: bool,
    updates_max: usize,
    reads_max: usize,
    writes_max: usize,
    reads_inflight: usize,
    /// Of them, those read ahead.
    reads_ahead: Vec<TileId>,
    /// By kind.
    writes_inflight: [usize; 3],

    plan: Plan,
    /// Position of the first use each kind's reading has not passed.
    ahead: [usize; 3],
    /// Next of `plan.updates` to start, next of `plan.served` to serve.
    next_update: usize,
    next_served: usize,
    /// The trainer's present operation and its next one use what comes before this position.
    wanted: usize,
    /// Fills of the plan not yet done: its commit waits for them.
    fills_left: usize,
    /// Ranges with the workers, with their position in this plan.
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
    /// Dirty tiles by generation, staged and resident, then by kind, oldest first. Entries that became stale are skipped.
    to_write: [BTreeMap<u64, [VecDeque<TileId>; 2]>; 2],
    /// Ranges whose gradients are in a staged slot and nowhere else, oldest first, and some that were.
    grads_to_write: VecDeque<u32>,

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
            workers,
            durable,
        } = settings;
        let ranges = units.last().map_or(0, |unit| unit.end) as usize;
        assert!(iodepth >= 2, "one operation each way");
        assert!(workers >= 1, "somebody updates");
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
            updates_max: workers + 1,
            reads_max: iodepth.div_ceil(2) as usize,
            writes_max: (iodepth / 2) as usize,
            reads_inflight: 0,
            reads_ahead: Vec::new(),
            writes_inflight: [0; 3],
            plan: Plan::default(),
            ahead: [0; 3],
            next_update: 0,
            next_served: 0,
            wanted: 0,
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
            grads_to_write: VecDeque::new(),
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
                return;
            }
        }
    }

    /// What is unfinished, for a message about a stall.
    pub fn describe(&self) -> String {
        format!(
            "{} reads, {} writes, {} updates in flight; {} updates pending; {} commits planned, under way: {}; {:?}",
            self.reads_inflight,
            self.writes_inflight.iter().sum::<usize>(),
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

    /// Looks how far the operation reaches that the trainer asks for next; behind the last one nothing is wanted.
    fn want(&mut self) {
        let next = self.plan.served.get(self.next_served);
        if let Some(&last) = next.and_then(|(_, positions)| positions.last()) {
            self.wanted = last as usize + 1;
        }
    }

    fn tiles(&mut self, kind: Kind) -> &mut Tiles {
        &mut self.tiles[kind as usize]
    }

    fn set_plan(&mut self, ops: &[Op]) {
        for range in 0..self.pending.len() {
            if !self.pending[range] && !self.scattered[range] {
                self.tiles(Kind::Grad).abandon(range as u32);
            }
        }
        let mut first = [(); 3].map(|()| vec![NEVER; self.pending.len()]);
        let (pending, updating) = (&self.pending, &self.updating);
        self.plan = Plan::new(
            ops,
            &self.units,
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
            self.tiles(kind).replan(&first[kind as usize]);
        }
        self.ahead = [0; 3];
        self.next_update = 0;
        self.next_served = 0;
        self.wanted = self.plan.uses.len();
        self.want();
        let fills = |one: &&plan::Use| one.what == UseKind::Fill;
        self.fills_left = self.plan.uses.iter().filter(fills).count();
        if self.plan.commits {
            self.commits += 1;
            assert!(self.commits <= COMMITS_MAX, "too many commits outstanding");
        }
        self.changed = true;
    }
}
