//! An update worker: a thread that runs an optimizer while the owner thread keeps I/O going. Several workers take
//! tiles from one queue. Tiles of external units, whose content the caller has, are copied instead.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use test_hooks::kill_point::{Point, reach};

use crate::inbox::Inbox;
use crate::layout::{ByKind, Kind, Layout};
use crate::lease::{Message, UpdateJob};
use crate::optimizer::{Optimizer, TileUpdate, UninitTile};

/// Updates tiles in queue order until the owner ends or an update panics.
pub(crate) fn run<H>(
    worker: u32,
    layout: &Arc<Layout>,
    mut optimizer: Box<dyn Optimizer<H>>,
    jobs: &Mutex<Receiver<UpdateJob<H>>>,
    inbox: &Inbox<H>,
) {
    loop {
        // The lock is held while waiting: one worker waits for the queue, the others for the lock.
        let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(UpdateJob { mut lent, hyper }) = job else {
            return;
        };
        let range = lent.range;
        let start = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| {
            let ByKind([Some(param), Some(state), grad]) = &mut lent.slots else {
                panic!("an update needs the parameters and the state of its range");
            };
            let bytes = |kind| ..layout.content_bytes(kind, range);
            let param = &mut param.as_mut_slice()[bytes(Kind::Param)];
            let state = &mut state.as_mut_slice()[bytes(Kind::State)];
            let grad = (grad.as_ref()).map(|grad| &grad.as_slice()[bytes(Kind::Grad)]);
            let range = &layout.ranges()[range as usize];
            match grad {
                Some(grad) => {
                    let tile = TileUpdate {
                        range,
                        param,
                        state,
                        grad,
                    };
                    optimizer.update(tile, &hyper);
                }
                None => optimizer.copy(UninitTile {
                    range,
                    param,
                    state,
                }),
            }
            reach(Point::Updated);
        }));
        let message = match result {
            Ok(()) => Message::Updated {
                lent,
                worker,
                start,
                end: Instant::now(),
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
