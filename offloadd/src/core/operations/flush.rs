//! Flushes of devices: one at a time each, shared by all that wait for it.
//!
//! ```text
//!   A asks ─▶ flush ───────────────▶ ended: A is answered
//!        B and C ask meanwhile ─▶ next flush ─▶ ended: B and C are answered
//! ```
//!
//! A flush that is under way may not cover what was written after it began: whoever asks meanwhile waits for the next one.
//!
//! When a flush fails, the device may have lost anything written to it since the last successful flush, and the next one
//! succeeds and does not say so. Two flushes at the same time would hide it: one fails and the other succeeds, and nobody
//! knows which of them lost what. With one at a time, everybody with something unflushed on the device is told of the failure
//! before anybody is told of a later success.

use offload_api::fault::Fault;
use offload_api::ids::DeviceIndex;
use offload_api::ring::entry::Priority;

use super::script::ScriptId;
use super::{Operation, Operations};
use crate::io::{Buffer, IoOp, IoResult};

/// A flush under way.
#[derive(Debug)]
pub(super) struct Flush {
    waiters: Vec<Waiter>,
    /// Came since it began.
    next: Vec<Waiter>,
}

#[derive(Clone, Copy, Debug)]
pub(in crate::core) enum Waiter {
    Script(ScriptId),
    /// The next daemon adopts sessions only with what is durable, or with the poison.
    HandOver,
}

impl Operations {
    pub(in crate::core) fn flush(&mut self, device: DeviceIndex, waiter: Waiter) {
        match self.flushes.get_mut(&device) {
            Some(flush) => flush.next.push(waiter),
            None => self.start_flush(device, vec![waiter]),
        }
    }

    fn start_flush(&mut self, device: DeviceIndex, waiters: Vec<Waiter>) {
        let next = Vec::new();
        self.flushes.insert(device, Flush { waiters, next });
        let priority = Priority::Demand;
        let io = self.start(device, IoOp::Flush, [0, 0], Buffer::None, priority);
        self.inflight.insert(io, Operation::Flush(device));
    }

    /// Takes the end of a flush: who waited for it, and why it failed. Who came since it began waits for the next one, which
    /// begins here; if this one failed, it has failed for them as well, as they have written there too.
    pub(in crate::core) fn on_flush_done(
        &mut self,
        device: DeviceIndex,
        result: IoResult,
    ) -> (Vec<Waiter>, Option<Fault>) {
        let Flush { mut waiters, next } = self.flushes.remove(&device).expect("under way");
        let failed = (result.outcome != Ok(0))
            .then(|| self.device_fault(IoOp::Flush, device, 0, 0, result.outcome));
        match &failed {
            Some(fault) => {
                self.fail_scripts_of(device, fault);
                waiters.extend(next);
            }
            None if next.is_empty() => {}
            None => self.start_flush(device, next),
        }
        (waiters, failed)
    }
}
