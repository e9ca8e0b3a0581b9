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

use super::io::Operation;
use super::job::Job;
use super::members::poison;
use super::script::ScriptId;
use super::{Action, CallId, Core, Reply, refuse};
use crate::io::{Buffer, IoId, IoOp, IoResult};

/// A flush under way.
#[derive(Debug)]
pub(super) struct Flush {
    waiters: Vec<Waiter>,
    /// Came since it began.
    next: Vec<Waiter>,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Waiter {
    Script(ScriptId),
    /// Whoever measures the device.
    Call(CallId),
    /// The next daemon takes sessions up only with what is durable, or with the poison.
    HandOver,
}

impl Core {
    pub(super) fn flush(&mut self, device: DeviceIndex, waiter: Waiter, actions: &mut Vec<Action>) {
        match self.flushes.get_mut(&device) {
            Some(flush) => flush.next.push(waiter),
            None => self.start_flush(device, vec![waiter], actions),
        }
    }

    fn start_flush(
        &mut self,
        device: DeviceIndex,
        waiters: Vec<Waiter>,
        actions: &mut Vec<Action>,
    ) {
        let io = IoId(self.number());
        let next = Vec::new();
        self.flushes.insert(device, Flush { waiters, next });
        self.operations.insert(io, Operation::Flush(device));
        actions.push(Action::Io {
            io,
            device,
            op: IoOp::Flush,
            offset: 0,
            bytes: 0,
            buffer: Buffer::None,
            priority: Priority::Demand,
        });
    }

    pub(super) fn on_flush_done(
        &mut self,
        device: DeviceIndex,
        result: IoResult,
        actions: &mut Vec<Action>,
    ) {
        let Flush { mut waiters, next } = self.flushes.remove(&device).expect("under way");
        let failed = (result.outcome != Ok(0))
            .then(|| self.device_fault(IoOp::Flush, device, 0, 0, result.outcome));
        match &failed {
            Some(fault) => {
                self.hear_failed_flush(device, fault);
                // They have written there too.
                waiters.extend(next);
            }
            None if next.is_empty() => {}
            None => self.start_flush(device, next, actions),
        }
        for waiter in waiters {
            match (waiter, &failed) {
                (Waiter::Script(script), _) => {
                    self.on_script_io_done(script, failed.clone(), actions);
                }
                (Waiter::Call(call), None) => actions.push(Action::Reply {
                    call,
                    reply: Ok(Reply::FlushMeasured),
                }),
                (Waiter::Call(call), Some(fault)) => refuse(call, fault.clone(), actions),
                (Waiter::HandOver, _) => {}
            }
        }
    }

    /// A flush of `device` failed: everybody with something unflushed there is told.
    pub(super) fn hear_failed_flush(&mut self, device: DeviceIndex, fault: &Fault) {
        self.poison_writers_of(device, fault);
        self.fail_scripts_of(device, fault);
        self.fail_copies_of(device, fault);
    }

    /// No job may believe that what it wrote to `device` is still to be flushed.
    fn poison_writers_of(&mut self, device: DeviceIndex, fault: &Fault) {
        for session in self.sessions.values() {
            if session.has_scratch_on(device) {
                let job = self.jobs.get_mut(&session.key).expect("a session's job");
                job.touched[device.0 as usize] = true;
            }
        }
        for (key, job) in &mut self.jobs {
            if job.touched[device.0 as usize] {
                job.poison
                    .get_or_insert_with(|| poison(&key.name, "a flush", fault));
            }
        }
    }

    /// Flushes whatever sessions have written, so that a flush that fails while the next daemon starts loses nothing of
    /// theirs. What fails poisons their jobs, and is handed over with them. Everything else has come to rest.
    pub(super) fn flush_for_hand_over(&mut self, actions: &mut Vec<Action>) {
        let devices = (0..self.devices.len()).map(|index| DeviceIndex(index as u32));
        let written = |device: &DeviceIndex| {
            let touched = |job: &Job| job.touched[device.0 as usize];
            let mut sessions = self.sessions.values();
            self.devices[device.0 as usize].phase.is_some()
                && (self.jobs.values().any(touched)
                    || sessions.any(|session| session.has_scratch_on(*device)))
        };
        for device in devices.filter(written).collect::<Vec<_>>() {
            self.flush(device, Waiter::HandOver, actions);
        }
    }
}
