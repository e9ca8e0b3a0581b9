//! Flushes of devices: each device has one at a time, shared by all that wait for it.
//!
//! ```text
//!   A asks ─▶ flush ───────────────▶ ended: A is answered
//!        B and C ask meanwhile ─▶ next flush ─▶ ended: B and C are answered
//! ```
//!
//! A flush that is under way may not cover what was written after it began, so a request that comes meanwhile waits for the next one.
//!
//! When a flush fails, the device may have lost anything written to it since the last successful flush, and the next flush
//! succeeds without saying so. With two flushes at a time, one could fail and the other succeed, and it would be unknown which
//! writes were lost. With one at a time, the failure is reported for everything unflushed on the device before any later success.

use offload_api::fault::Fault;
use offload_api::ids::DeviceIndex;
use offload_api::ring::entry::Priority;

use super::{Operation, Operations, ScriptId};
use crate::io::{Buffer, IoOp, IoResult};

/// A flush under way.
#[derive(Debug)]
pub(super) struct Flush {
    waiters: Vec<Waiter>,
    /// Waiters that came since it began.
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

    /// Handles the end of a flush. Returns its waiters and the fault if it failed. Waiters that came since it began wait for the
    /// next flush, which starts here; if this one failed, it has failed for them as well, because they have written there too.
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
