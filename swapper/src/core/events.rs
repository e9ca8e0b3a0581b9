//! The core's words: what happened, what is to be done, and what the trainer may ask.

use std::ops::Range;

use super::{Kind, Op};

/// One tile: a range's param, state or gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TileId {
    /// Which of them.
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
    pub resident: [Vec<bool>; 3],
    /// Slots for the others, by kind. At least 2 where there are two or more others.
    pub staging: [u32; 3],
    /// Operations in flight, at least 2.
    pub iodepth: u32,
    /// Updates that run at a time, at least 1.
    pub workers: usize,
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
    /// A step begins: a new plan. It must hold an update of every unit that has one pending. Gradients of a step that was
    /// not finished are dropped.
    Plan(Vec<Op>),
    /// Another pass of the same step, or the rest of this one in another order: a new plan that keeps the step's gradients.
    Pass(Vec<Op>),
    /// The trainer waits; there is never a second request.
    Request(Request),
    /// The trainer has done with what it was lent first.
    Returned {
        /// The range it was lent.
        range: u32,
    },
    /// A worker has updated a range.
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
    /// Bring a tile into a slot. What the slot held before is given up. Gradients are read only where they were written before.
    Read {
        /// Which.
        tile: TileId,
        /// Where to.
        slot: SlotNumber,
        /// The trainer's present operation or its next one uses it: before what is read ahead.
        wanted: bool,
    },
    /// A tile on its way in, read ahead, is wanted now.
    Hasten {
        /// Which.
        tile: TileId,
    },
    /// Bring a slot's content to its tile's device.
    Write {
        /// Which.
        tile: TileId,
        /// Where from.
        slot: SlotNumber,
    },
    /// Give the workers a range: param, state and gradients.
    Update {
        /// The range.
        range: u32,
        /// Of each kind.
        slots: [SlotNumber; 3],
        /// Which step's update it is: the finishes with updates are counted from 1.
        step: u64,
    },
    /// Give the trainer a range.
    Lend {
        /// The range.
        range: u32,
        /// Of the kinds the use needs.
        slots: [Option<SlotNumber>; 3],
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
