//! The core's interface: events, actions and the trainer's requests.

use std::ops::Range;

use super::{ByKind, Kind, Op};

/// One tile: a range and a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TileId {
    /// Kind of the tile.
    pub kind: Kind,
    /// Index of the range.
    pub range: u32,
}

/// Position of a slot among the slots of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotNumber(pub u32);

/// Settings of a core.
#[derive(Clone, Debug)]
pub struct CoreSettings {
    /// Ranges of each unit: consecutive, from 0.
    pub units: Vec<Range<u32>>,
    /// Whether each range has state and gradients. The others are never scattered or updated.
    pub trained: Vec<bool>,
    /// Whether the caller has each range's newest content. Commits copy it; nothing else is done with these ranges, but fills and visits.
    pub external: Vec<bool>,
    /// Whether each range's tile stays in host memory, by kind; `false` for a tile that a range does not have.
    pub resident: ByKind<Vec<bool>>,
    /// Slots for the other tiles, by kind. At least 2 where two or more tiles are not resident.
    pub staging: ByKind<u32>,
    /// Operations in flight, at least 2.
    pub iodepth: u32,
    /// Updates that run at a time, at least 1.
    pub workers: usize,
    /// Whether there is a store. Without one every tile is resident, nothing moves and commits end at once.
    pub durable: bool,
}

/// A request for which the trainer waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// The trainer's next operation: `Fill`, `Gather`, `Scatter`, `Revise`, `Visit` or `Rewrite` of a unit.
    Serve(Op),
    /// The gradients of the scattered units are complete.
    Finish {
        /// The new plan.
        ops: Vec<Op>,
        /// Whether the scattered units are updated; otherwise their gradients are dropped.
        update: bool,
        /// Whether to answer only when nothing is pending and all commits are acknowledged.
        wait: bool,
        /// Whether commits of earlier steps must be acknowledged first. Otherwise one may be outstanding.
        settled: bool,
        /// Whether updates of this step have begun with gradients that came earlier: these join them, with the same
        /// hyperparameters, and wait for none.
        joins: bool,
    },
    /// Follow a new plan and answer when nothing is pending and all commits are acknowledged.
    Drain {
        /// The new plan.
        ops: Vec<Op>,
    },
    /// Answer when nothing is pending: content of external ranges may change again.
    Settle,
}

/// Inputs of the core.
#[derive(Clone, Debug)]
pub enum Event {
    /// A step begins: a new plan. It must hold an update of every unit that has one pending. Gradients of a step that was
    /// not finished are dropped.
    Plan(Vec<Op>),
    /// Another pass of the same step, or the rest of this one in another order: a new plan that keeps the step's gradients.
    Pass(Vec<Op>),
    /// The trainer waits; there is never a second request.
    Request(Request),
    /// The trainer returns the range lent to it first.
    Returned {
        /// The lent range.
        range: u32,
    },
    /// A worker has updated a range.
    Updated {
        /// The range.
        range: u32,
    },
    /// A tile has arrived in its slot or on its device.
    Moved {
        /// The tile.
        tile: TileId,
    },
    /// The commit in progress is acknowledged.
    Committed,
    /// A permanent failure: the core does nothing more.
    Failed,
}

/// Outputs of the core.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Read a tile into a slot, whose content is discarded. Gradients are read only after they were written.
    Read {
        /// The tile.
        tile: TileId,
        /// Destination of the read.
        slot: SlotNumber,
        /// Whether the trainer's present or next operation needs the tile. Such reads go before read-ahead.
        wanted: bool,
    },
    /// Raise the priority of a read-ahead that the trainer now needs.
    Promote {
        /// The tile.
        tile: TileId,
    },
    /// Write a slot's content to its tile's device.
    Write {
        /// The tile.
        tile: TileId,
        /// Source of the write.
        slot: SlotNumber,
    },
    /// Give a range's param, state and gradients to a worker; without gradients, which external ranges have not, the worker copies the content that
    /// the caller has.
    Update {
        /// The range.
        range: u32,
        /// Slots by kind.
        slots: ByKind<Option<SlotNumber>>,
        /// The step of the update, counting steps with updates from 1.
        step: u64,
    },
    /// Lend a range to the trainer.
    Lend {
        /// The range.
        range: u32,
        /// Slots of the kinds that the use needs.
        slots: ByKind<Option<SlotNumber>>,
    },
    /// Make a generation durable.
    Commit {
        /// Number of the generation, from 1 since the core was created.
        generation: u64,
    },
    /// Answer the trainer's request.
    Done,
    /// The trainer asked for another operation than the plan's next one. Nothing happened.
    Refused {
        /// The trainer's operation.
        asked: Op,
        /// The plan's next operation.
        announced: Option<Op>,
    },
}
