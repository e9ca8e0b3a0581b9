//! The update worker: one thread that runs the optimizer, so that I/O goes on while an update computes.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Instant;

use crate::layout::{Kind, Layout};
use crate::lend::{Message, UpdateJob};
use crate::owner::Inbox;
use crate::swapper::Optimizer;

/// Updates what comes, in order, until the owner ends or an update panics.
pub(crate) fn run<H>(
    layout: &Arc<Layout>,
    mut optimizer: impl Optimizer<H>,
    jobs: &Receiver<UpdateJob<H>>,
    inbox: &Inbox<H>,
) {
    while let Ok(UpdateJob { mut lent, hyper }) = jobs.recv() {
        let range = lent.range;
        let since = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| {
            let (Some(param), Some(state), Some(grad)) =
                (&mut lent.param, &mut lent.state, &lent.grad)
            else {
                panic!("an update needs all three slots of its range");
            };
            optimizer.update(
                &layout.ranges()[range as usize],
                &mut param.as_mut_slice()[..layout.content_bytes(Kind::Param, range)],
                &mut state.as_mut_slice()[..layout.content_bytes(Kind::State, range)],
                &grad.as_slice()[..layout.grad_bytes(range)],
                &hyper,
            );
        }));
        let message = match result {
            Ok(()) => Message::Updated {
                lent,
                update_ns: since.elapsed().as_nanos() as u64,
            },
            Err(panic) => Message::UpdatePanicked {
                range,
                message: panic
                    .downcast_ref::<&str>()
                    .map(ToString::to_string)
                    .or_else(|| panic.downcast_ref::<String>().cloned())
                    .unwrap_or_else(|| "no message".into()),
            },
        };
        let panicked = matches!(message, Message::UpdatePanicked { .. });
        if inbox.send(message).is_err() || panicked {
            return;
        }
    }
}
