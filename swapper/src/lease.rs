//! What travels between the threads: requests to the owner, slots lent to trainer and worker, and slots coming back.

use std::time::{Duration, Instant};

use offload_client::Slot;

use crate::core::Request;
use crate::layout::Kind;
use crate::schedule::Op;
use crate::span::Spans;
use crate::{StepIo, SwapperError};

/// One range's slots, away from the owner. Which are there depends on the use.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) range: u32,
    /// By kind.
    pub(crate) slots: [Option<Slot>; 3],
}

impl Lease {
    /// The bytes of a kind that this use must have.
    pub(crate) fn whole(&mut self, kind: Kind) -> &mut [u8] {
        self.slots[kind as usize]
            .as_mut()
            .expect("the owner lends the slots its use needs")
            .as_mut_slice()
    }
}

/// To the owner.
#[derive(Debug)]
pub(crate) enum Message<H> {
    /// A step begins, or another pass of it that keeps its gradients. The blob goes with the plan's commit, if it has one.
    Plan {
        ops: Vec<Op>,
        keep: bool,
        blob: Option<Vec<u8>>,
    },
    /// Answered by any number of [`Reply::Lend`] and one [`Reply::Done`] or [`Reply::Failed`].
    Request {
        request: Request,
        hyper: Option<H>,
        blob: Option<Vec<u8>>,
    },
    /// The trainer has done with a range.
    Returned(Lease),
    /// A worker has updated a range.
    Updated {
        lent: Lease,
        worker: u32,
        start: Instant,
        end: Instant,
    },
    /// The optimizer panicked; the slots are lost with it.
    UpdatePanicked { range: u32, message: String },
    /// Whether spans are collected.
    Record(bool),
    /// How long nothing may complete.
    StallMax(Duration),
    /// Somebody else knows that this cannot go on.
    Cancel { why: String },
    /// End. In order, the session is closed; otherwise it ends as in a crash.
    Close { in_order: bool },
}

/// To the trainer.
#[derive(Debug)]
pub(crate) enum Reply {
    /// The next range of the unit that was asked for.
    Lend(Lease),
    /// The request is served. `io` counts since the start; `spans` are those since the answer before.
    Done { io: StepIo, spans: Spans },
    /// Nothing more will be served.
    Failed(SwapperError),
}

/// To the update workers.
#[derive(Debug)]
pub(crate) struct UpdateJob<H> {
    pub(crate) lent: Lease,
    pub(crate) hyper: H,
}
