//! Operations in flight, and what both parts of the core build from them: scripts of writes and flushes, and shared flushes.
//!
//! Knows neither jobs nor the catalog. Whoever starts a script remembers its purpose under the [`ScriptId`].

mod flush;
mod script;

pub(super) use flush::Waiter;
pub(super) use script::{ScriptEnd, ScriptFailure, Step, in_turn};

use std::collections::{BTreeMap, HashMap, VecDeque};

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::{DeviceIndex, DeviceNumber};
use offload_api::ring::entry::Priority;

use super::{Action, CallId, Reply};
use crate::io::{Buffer, IoId, IoOp, failure};
use crate::quota::Weights;
use flush::Flush;
use script::Script;

/// A script that has not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ScriptId(u64);

/// Operations and actions asked for by `data` and `admin`.
pub(super) struct Operations {
    /// The metadata device, with the catalog and the jobs' areas.
    metadata_device: DeviceIndex,
    /// By device: its path, for messages, and its number, by which processes know it.
    names: Vec<(String, DeviceNumber)>,
    /// Actions for the driver, in order.
    actions: Vec<Action>,
    inflight: HashMap<IoId, Operation>,
    scripts: BTreeMap<ScriptId, Script>,
    /// Ends of scripts that their owners have not taken yet.
    ended: VecDeque<ScriptEnd>,
    /// At most one per device.
    flushes: BTreeMap<DeviceIndex, Flush>,
    next_number: u64,
}

/// An operation of this module that the driver has not reported as done.
#[derive(Clone, Copy, Debug)]
pub(super) enum Operation {
    /// A write of a script.
    Write {
        script: ScriptId,
        device: DeviceIndex,
        offset: u64,
        bytes: u32,
    },
    Flush(DeviceIndex),
}

impl Operations {
    pub(super) fn new(metadata_device: DeviceIndex, names: Vec<(String, DeviceNumber)>) -> Self {
        Self {
            metadata_device,
            names,
            actions: Vec::new(),
            inflight: HashMap::new(),
            scripts: BTreeMap::new(),
            ended: VecDeque::new(),
            flushes: BTreeMap::new(),
            next_number: 1,
        }
    }

    pub(super) fn metadata_device(&self) -> DeviceIndex {
        self.metadata_device
    }

    pub(super) fn path(&self, device: DeviceIndex) -> &str {
        &self.names[device.0 as usize].0
    }

    /// Number of a device that has been part of the store.
    pub(super) fn number_of(&self, device: DeviceIndex) -> DeviceNumber {
        self.names[device.0 as usize].1
    }

    /// Returns the device with this number, if it was part of the store in this incarnation.
    pub(super) fn device_of(&self, number: DeviceNumber) -> Option<DeviceIndex> {
        let found = self.names.iter().position(|(_, other)| *other == number);
        found.map(|index| DeviceIndex(index as u32))
    }

    /// Adds a device that has no number yet.
    pub(super) fn add_device(&mut self, path: String) {
        self.names.push((path, DeviceNumber(u32::MAX)));
    }

    /// Sets the number of an added device when its turn comes.
    pub(super) fn set_number(&mut self, device: DeviceIndex, number: DeviceNumber) {
        self.names[device.0 as usize].1 = number;
    }

    pub(super) fn device_count(&self) -> usize {
        self.names.len()
    }

    /// Exchanges the list to which actions are appended.
    pub(super) fn swap_actions(&mut self, actions: &mut Vec<Action>) {
        std::mem::swap(&mut self.actions, actions);
    }

    pub(super) fn push(&mut self, action: Action) {
        self.actions.push(action);
    }

    pub(super) fn reply(&mut self, call: CallId, reply: Result<Reply, Fault>) {
        self.actions.push(Action::Reply { call, reply });
    }

    pub(super) fn refuse(&mut self, call: CallId, fault: Fault) {
        self.reply(call, Err(fault));
    }

    /// A number never given out in this incarnation.
    pub(super) fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    /// Asks the driver for an operation of the daemon itself. The caller keeps its purpose.
    pub(super) fn start(
        &mut self,
        device: DeviceIndex,
        op: IoOp,
        part: [u64; 2],
        buffer: Buffer,
        priority: Priority,
    ) -> IoId {
        self.start_weighted(device, op, part, buffer, priority, None)
    }

    /// Like [`Self::start`], with the weights of a session's operation.
    pub(super) fn start_weighted(
        &mut self,
        device: DeviceIndex,
        op: IoOp,
        [offset, bytes]: [u64; 2],
        buffer: Buffer,
        priority: Priority,
        weights: Option<Weights>,
    ) -> IoId {
        let io = IoId(self.number());
        self.actions.push(Action::Io {
            io,
            device,
            op,
            offset,
            bytes: bytes as u32,
            buffer,
            priority,
            weights,
        });
        io
    }

    /// Removes a write of a script or a flush from those in flight.
    pub(super) fn end_operation(&mut self, io: IoId) -> Option<Operation> {
        self.inflight.remove(&io)
    }

    pub(super) fn inflight_count(&self) -> usize {
        self.inflight.len()
    }

    /// Whether no operation and no script is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.inflight.is_empty() && self.scripts.is_empty()
    }

    /// Whether a write or a flush of `device` is in flight.
    pub(super) fn uses(&self, device: DeviceIndex) -> bool {
        (self.inflight.values()).any(|operation| match operation {
            Operation::Write { device: at, .. } | Operation::Flush(at) => *at == device,
        })
    }

    /// Describes a failed operation.
    pub(super) fn device_fault(
        &self,
        op: IoOp,
        device: DeviceIndex,
        offset: u64,
        asked_bytes: u32,
        outcome: Result<u32, i32>,
    ) -> Fault {
        let kind = outcome.map_or_else(errno_kind, |_| FaultKind::Short);
        let part = [offset, u64::from(asked_bytes)];
        Fault::new(kind, failure(op, self.path(device), part, outcome))
    }
}

pub(super) fn errno_kind(errno: i32) -> FaultKind {
    if errno == libc::ENOSPC || errno == libc::EDQUOT {
        FaultKind::NoSpace
    } else {
        FaultKind::Io
    }
}
