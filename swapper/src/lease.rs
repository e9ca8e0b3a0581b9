//! Messages between the threads: requests to the owner, slots lent to trainer and workers, and slots that come back.

use std::time::{Duration, Instant};

use offload_client::{Generation, Slot};

use crate::core::Request;
use crate::layout::{ByKind, Kind};
use crate::op::Op;
use crate::scratch::ScratchOperation;
use crate::span::Spans;
use crate::{StepIo, SwapperError};

/// One range's slots, lent by the owner. The use decides which of them are present.
#[derive(Debug)]
pub(crate) struct Lease {
    pub(crate) range: u32,
    pub(crate) slots: ByKind<Option<Slot>>,
}

impl Lease {
    /// The bytes of `kind`. Panics if the use has no slot of that kind.
    pub(crate) fn whole(&mut self, kind: Kind) -> &mut [u8] {
        self.slots[kind]
            .as_mut()
            .expect("the owner lends the slots its use needs")
            .as_mut_slice()
    }
}

/// Messages to the owner.
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
    /// The trainer returns ranges.
    Returned(Vec<Lease>),
    /// A worker has updated a range.
    Updated {
        lent: Lease,
        worker: u32,
        start: Instant,
        end: Instant,
    },
    /// The optimizer panicked; its slots are lost.
    UpdatePanicked { range: u32, message: String },
    /// The caller moves a tile of its own.
    Scratch(ScratchOperation),
    /// Starts or stops collecting spans.
    Record(bool),
    /// Sets how long operations may be in flight without a completion.
    StallMax(Duration),
    /// All nodes may confirm this generation.
    Confirmable(Result<Generation, SwapperError>),
    /// Another thread knows that the present request cannot be served.
    Cancel { why: String },
    /// Ends the owner thread. In order, the session is closed; otherwise the session ends as in a crash.
    Close { in_order: bool },
}

/// Answers to the trainer.
#[derive(Debug)]
pub(crate) enum Reply {
    /// The next ranges of the requested unit.
    Lend(Vec<Lease>),
    /// The request is served. `io` counts from the start; `spans` are those since the previous answer.
    Done { io: StepIo, spans: Spans },
    /// The owner has failed and serves nothing more.
    Failed(SwapperError),
}

/// Work for an update worker.
#[derive(Debug)]
pub(crate) struct UpdateJob<H> {
    pub(crate) lent: Lease,
    pub(crate) hyper: H,
}
