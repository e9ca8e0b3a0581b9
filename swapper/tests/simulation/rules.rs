//! Tests single rules of the core that random incarnations meet too seldom. Transfers and updates end at once, except writes in tests that check
//! their order.

use std::collections::VecDeque;
use std::ops::Range;

use swapper::Op;
use swapper::core::{
    Action, ByKind, Core, CoreSettings, Event, Kind, Request, TileId, UPDATES_PER_WORKER,
};

struct Bench {
    core: Core,
    /// Ranges updated, in order.
    updated: Vec<u32>,
    /// Whether updates end only when the test says so.
    updates_stay: bool,
    /// Ranges lent and not returned.
    lent: Vec<u32>,
    /// Writes that have not ended, if the test keeps them.
    writes: Option<VecDeque<TileId>>,
    /// Parameters read, in order, and whether they were wanted.
    reads: Vec<(u32, bool)>,
    /// Whether reads end only when the test says so.
    reads_stay: bool,
    promoted: Vec<u32>,
    done: usize,
}

impl Bench {
    /// Makes a core with one unit of `ranges` ranges, nothing resident, the least staging, and all tiles on their devices.
    fn new(ranges: u32) -> Self {
        Self::with_staging(ranges, 2)
    }

    fn with_staging(ranges: u32, staging: u32) -> Self {
        Self::with_units(std::iter::once(0..ranges).collect(), staging)
    }

    fn with_units(units: Vec<Range<u32>>, staging: u32) -> Self {
        let ranges = units.last().expect("units").end;
        let core = Core::new(CoreSettings {
            units,
            trained: vec![true; ranges as usize],
            external: vec![false; ranges as usize],
            resident: ByKind::new(|_| vec![false; ranges as usize]),
            staging: ByKind([staging; 3]),
            iodepth: 2,
            workers: 1,
            durable: true,
        });
        Self {
            core,
            updated: Vec::new(),
            updates_stay: false,
            lent: Vec::new(),
            writes: None,
            reads: Vec::new(),
            reads_stay: false,
            promoted: Vec::new(),
            done: 0,
        }
    }

    fn event(&mut self, event: Event) {
        let mut actions = Vec::new();
        self.core.on_event(event, &mut actions);
        for action in actions {
            match action {
                Action::Write { tile, .. } if self.writes.is_some() => {
                    self.writes.as_mut().expect("kept").push_back(tile);
                }
                Action::Read { tile, wanted, .. } => {
                    if tile.kind == Kind::Param {
                        self.reads.push((tile.range, wanted));
                    }
                    if !self.reads_stay {
                        self.event(Event::Moved { tile });
                    }
                }
                Action::Promote { tile } => self.promoted.push(tile.range),
                Action::Write { tile, .. } => {
                    self.event(Event::Moved { tile });
                }
                Action::Update { range, .. } => {
                    self.updated.push(range);
                    if !self.updates_stay {
                        self.event(Event::Updated { range });
                    }
                }
                Action::Lend { range, .. } => self.lent.push(range),
                Action::Commit { .. } => self.event(Event::Committed),
                Action::Done => self.done += 1,
                Action::Refused { asked, announced } => {
                    panic!("{asked:?} refused for {announced:?}")
                }
            }
        }
    }

    /// Sends a request and returns everything that is lent; `true` when the request is served.
    fn request(&mut self, request: Request) -> bool {
        let before = self.done;
        self.event(Event::Request(request));
        while !self.lent.is_empty() {
            let range = self.lent.remove(0);
            self.event(Event::Returned { range });
        }
        self.done > before
    }

    fn serve(&mut self, op: Op) -> bool {
        self.request(Request::Serve(op))
    }

    fn finish(&mut self, ops: Vec<Op>) -> bool {
        self.request(Request::Finish {
            ops,
            update: true,
            wait: false,
            settled: false,
            joins: false,
        })
    }

    fn finish_settled(&mut self, ops: Vec<Op>) -> bool {
        self.request(Request::Finish {
            ops,
            update: true,
            wait: false,
            settled: true,
            joins: false,
        })
    }

    /// Lets what was scattered join the updates of the step that have begun.
    fn join(&mut self, ops: Vec<Op>) -> bool {
        self.request(Request::Finish {
            ops,
            update: true,
            wait: false,
            settled: true,
            joins: true,
        })
    }
}

const GATHER: Op = Op::Gather { unit: 0 };
const SCATTER: Op = Op::Scatter { unit: 0 };
const UPDATE: Op = Op::Update { unit: 0 };
const UPDATE_AND_GATHER: Op = Op::UpdateAndGather { unit: 0 };

#[test]
fn a_program_left_early_does_not_keep_the_slots_its_updates_need() {
    let mut bench = Bench::new(6);
    bench.event(Event::Plan(vec![GATHER, SCATTER]));
    assert!(bench.serve(GATHER) && bench.serve(SCATTER));
    assert!(bench.finish(vec![UPDATE_AND_GATHER]));
    assert!(
        bench.updated.len() < 6,
        "gathers that wait hold the slots of updates behind them"
    );
    assert!(bench.finish(Vec::new()), "{}", bench.core.describe());
    assert_eq!(bench.updated, [0, 1, 2, 3, 4, 5]);
}

#[test]
fn a_worker_finds_its_next_updates_waiting() {
    let ranges = 2 * UPDATES_PER_WORKER as u32;
    let mut bench = Bench::with_staging(ranges, ranges);
    bench.event(Event::Plan(vec![SCATTER]));
    assert!(bench.serve(SCATTER));
    bench.updates_stay = true;
    assert!(bench.finish(vec![UPDATE]));
    assert_eq!(bench.updated, [0, 1, 2, 3], "more than one waits for it");
    bench.event(Event::Updated { range: 1 });
    assert_eq!(bench.updated, [0, 1, 2, 3, 4], "they end in any order");
}

#[test]
fn updates_begin_while_other_gradients_come_and_these_wait_for_none() {
    let mut bench = Bench::with_units(vec![0..1, 1..2], 2);
    let scatter = Op::Scatter { unit: 1 };
    bench.event(Event::Plan(vec![SCATTER, scatter]));
    assert!(bench.serve(SCATTER));
    bench.reads_stay = true;
    assert!(bench.finish_settled(vec![UPDATE]));
    assert!(bench.updated.is_empty(), "its tiles are still to come");
    bench.event(Event::Pass(vec![scatter, UPDATE]));
    assert!(bench.serve(scatter));
    let both = vec![UPDATE, Op::Update { unit: 1 }];
    assert!(bench.join(both), "it waits for no update");
    bench.reads_stay = false;
    let tile = TileId {
        kind: Kind::Param,
        range: 0,
    };
    bench.event(Event::Moved { tile });
    assert_eq!(bench.updated, [0, 1]);
    bench.event(Event::Pass(vec![Op::Commit]));
    assert!(bench.finish(Vec::new()));
}

#[test]
fn an_update_waits_for_a_gather_before_it() {
    let mut bench = Bench::new(1);
    bench.event(Event::Plan(vec![SCATTER]));
    assert!(bench.serve(SCATTER));
    assert!(bench.finish(vec![GATHER, UPDATE]));
    assert!(bench.updated.is_empty(), "the gather would see the update");
    assert!(bench.serve(GATHER));
    assert_eq!(bench.updated, [0]);
}

#[test]
fn gradients_of_a_pass_that_was_given_up_are_dropped() {
    let mut bench = Bench::new(2);
    bench.event(Event::Plan(vec![SCATTER]));
    assert!(bench.serve(SCATTER));
    bench.event(Event::Plan(vec![GATHER]));
    assert!(bench.finish(vec![UPDATE]));
    assert!(bench.updated.is_empty());
}

#[test]
fn a_request_out_of_order_is_refused_and_the_next_one_served() {
    let mut bench = Bench::new(1);
    bench.event(Event::Plan(vec![GATHER]));
    let mut actions = Vec::new();
    let asked = Request::Serve(SCATTER);
    bench.core.on_event(Event::Request(asked), &mut actions);
    let refused = Action::Refused {
        asked: SCATTER,
        announced: Some(GATHER),
    };
    assert_eq!(actions, [refused]);
    assert!(bench.serve(GATHER));
}

#[test]
fn parameters_are_written_before_state_so_that_backward_finds_their_slots_free() {
    let mut bench = Bench::with_staging(4, 4);
    bench.event(Event::Plan(vec![SCATTER]));
    assert!(bench.serve(SCATTER));
    bench.writes = Some(VecDeque::new());
    assert!(bench.finish(vec![UPDATE, Op::Commit]));
    assert_eq!(bench.updated, [0, 1, 2, 3], "updates need no writes here");
    let mut order = Vec::new();
    while let Some(tile) = bench.writes.as_mut().and_then(VecDeque::pop_front) {
        order.push((tile.kind, tile.range));
        bench.event(Event::Moved { tile });
    }
    let of = |kind| (0..4).map(move |range| (kind, range));
    let wanted: Vec<_> = of(Kind::Param).chain(of(Kind::State)).collect();
    assert_eq!(order, wanted);
}

#[test]
fn a_settled_finish_waits_until_the_step_before_is_committed() {
    let mut bench = Bench::with_staging(2, 4);
    bench.event(Event::Plan(vec![SCATTER]));
    assert!(bench.serve(SCATTER));
    bench.writes = Some(VecDeque::new());
    assert!(bench.finish(vec![UPDATE, Op::Commit]));
    bench.event(Event::Plan(vec![SCATTER]));
    assert!(bench.serve(SCATTER));
    assert!(!bench.finish_settled(vec![UPDATE]));
    assert_eq!(bench.updated, [0, 1], "the second step has not ended");
    let mut written = Vec::new();
    while bench.done == 3 {
        let tile = bench.writes.as_mut().and_then(VecDeque::pop_front).unwrap();
        written.extend((tile.kind != Kind::Grad).then_some(tile.kind));
        bench.event(Event::Moved { tile });
    }
    assert_eq!(
        written.len(),
        4,
        "parameters and state of both ranges: {written:?}"
    );
    assert_eq!(bench.updated, [0, 1, 0, 1]);
}

/// Makes a core with four units of one range, and three slots of each kind.
fn four_units() -> Bench {
    let core = Core::new(CoreSettings {
        units: (0..4).map(|unit| unit..unit + 1).collect(),
        trained: vec![true; 4],
        external: vec![false; 4],
        resident: ByKind::new(|_| vec![false; 4]),
        staging: ByKind([3; 3]),
        iodepth: 16,
        workers: 1,
        durable: true,
    });
    Bench {
        core,
        ..Bench::new(1)
    }
}

fn four_gathers() -> Event {
    Event::Plan((0..4).map(|unit| Op::Gather { unit }).collect())
}

#[test]
fn what_is_read_ahead_is_hastened_when_its_operation_comes_next() {
    let mut bench = four_units();
    bench.reads_stay = true;
    bench.event(four_gathers());
    assert_eq!(bench.reads, [(0, true), (1, false), (2, false)]);
    assert_eq!(bench.promoted, [0; 0]);
    let param = |range| {
        let kind = Kind::Param;
        Event::Moved {
            tile: TileId { kind, range },
        }
    };
    // The first unit is requested: the second is next, once.
    bench.event(Event::Request(Request::Serve(Op::Gather { unit: 0 })));
    assert_eq!(bench.promoted, [1]);
    bench.event(param(0));
    let range = bench.lent.remove(0);
    bench.event(Event::Returned { range });
    assert_eq!(bench.promoted, [1]);
    // The third read ends before anybody waits for it.
    bench.event(param(2));
    bench.event(param(1));
    assert!(bench.serve(Op::Gather { unit: 1 }));
    assert_eq!(bench.promoted, [1]);
}

#[test]
fn reads_of_the_next_operation_are_wanted_and_those_behind_it_are_ahead() {
    let mut bench = four_units();
    bench.event(four_gathers());
    // The third read is behind the second, which is next while the first is served.
    assert_eq!(bench.reads, [(0, true), (1, false), (2, false)]);
    assert!(bench.serve(Op::Gather { unit: 0 }));
    assert!(bench.serve(Op::Gather { unit: 1 }));
    assert!(bench.serve(Op::Gather { unit: 2 }));
    // The slot for unit 3 was free when the first unit came back, two operations before this unit's own.
    assert_eq!(bench.reads[3..], [(3, false)]);
    // With slots for one unit alone, a unit is read only when it is next.
    let mut tight = Bench::new(3);
    tight.event(Event::Plan(vec![GATHER]));
    assert!(tight.serve(GATHER));
    assert_eq!(tight.reads, [(0, true), (1, true), (2, true)]);
}
