//! Scripts: writes and flushes of the daemon's own structures in steps, each of which ends before the next one starts.
//!
//! The first failed operation ends the script; nothing is retried. A failed flush of a device that the script writes to ends it
//! too, whoever asked for that flush: see [`super::flush`].

use std::collections::{BTreeSet, VecDeque};

use offload_api::fault::Fault;
use offload_api::ids::DeviceIndex;
use offload_api::ring::entry::Priority;

use super::flush::Waiter;
use super::{Operation, Operations, ScriptId};
use crate::io::{AlignedBytes, Buffer, IoOp};

/// Limit of operations in flight per script.
const INFLIGHT_MAX: usize = 8;

/// Largest write of a script: a piece of a large structure, of the size of a large tile.
const WRITE_BYTES_MAX: usize = 4 << 20;

#[derive(Debug)]
struct MetaIo {
    device: DeviceIndex,
    offset: u64,
    /// Bytes to write; `None` for a flush.
    write: Option<AlignedBytes>,
}

/// Operations that may run at the same time.
#[derive(Debug, Default)]
pub(in crate::core) struct Step(VecDeque<MetaIo>);

impl Step {
    /// Writes to one device, each with its offset.
    pub(in crate::core) fn writes(
        device: DeviceIndex,
        writes: impl IntoIterator<Item = (u64, AlignedBytes)>,
    ) -> Self {
        let mut step = Self::default();
        for (offset, bytes) in writes {
            let whole = bytes.len() <= WRITE_BYTES_MAX;
            if whole {
                step.push(device, offset, Some(bytes));
                continue;
            }
            for (index, piece) in bytes.as_slice().chunks(WRITE_BYTES_MAX).enumerate() {
                let at = offset + (index * WRITE_BYTES_MAX) as u64;
                let piece = AlignedBytes::from_slice(piece);
                step.push(device, at, Some(piece));
            }
        }
        step
    }

    /// The same blocks at two places of one device.
    pub(in crate::core) fn twice(
        device: DeviceIndex,
        offsets: [u64; 2],
        bytes: AlignedBytes,
    ) -> Self {
        Self::writes(device, [(offsets[0], bytes.clone()), (offsets[1], bytes)])
    }

    /// Flushes of these devices.
    pub(in crate::core) fn flush(devices: impl IntoIterator<Item = DeviceIndex>) -> Self {
        let mut step = Self::default();
        for device in devices {
            step.push(device, 0, None);
        }
        step
    }

    fn push(&mut self, device: DeviceIndex, offset: u64, write: Option<AlignedBytes>) {
        self.0.push_back(MetaIo {
            device,
            offset,
            write,
        });
    }
}

#[derive(Debug)]
pub(super) struct Script {
    steps: VecDeque<Step>,
    steps_done: usize,
    inflight_count: usize,
    failed: Option<Fault>,
    /// Devices it writes to or flushes.
    devices: BTreeSet<DeviceIndex>,
}

/// Step at which a script failed, and the fault.
#[derive(Debug)]
pub(in crate::core) struct ScriptFailure {
    /// Steps that succeeded before.
    pub(in crate::core) steps_done: usize,
    pub(in crate::core) fault: Fault,
}

/// End of a script, for its owner.
#[derive(Debug)]
pub(in crate::core) struct ScriptEnd {
    pub(in crate::core) script: ScriptId,
    pub(in crate::core) result: Result<(), ScriptFailure>,
}

impl Operations {
    /// Starts `steps`. [`Self::next_end`] returns the end when the last operation has ended or, after a failure, all those in
    /// flight; at once for a script without operations.
    pub(in crate::core) fn run_script(&mut self, steps: Vec<Step>) -> ScriptId {
        let id = ScriptId(self.number());
        let operations = steps.iter().flat_map(|step| &step.0);
        let script = Script {
            devices: operations.map(|meta| meta.device).collect(),
            steps: steps.into(),
            steps_done: 0,
            inflight_count: 0,
            failed: None,
        };
        self.scripts.insert(id, script);
        self.advance(id);
        id
    }

    /// Takes the oldest end of a script.
    pub(in crate::core) fn next_end(&mut self) -> Option<ScriptEnd> {
        self.ended.pop_front()
    }

    /// Handles the end of a script's write or flush.
    pub(in crate::core) fn on_script_io_done(&mut self, id: ScriptId, failed: Option<Fault>) {
        let script = self.scripts.get_mut(&id).expect("it waits for this");
        script.inflight_count -= 1;
        if script.failed.is_none() {
            script.failed = failed;
        }
        self.advance(id);
    }

    /// Fails all scripts that use `device`, because a flush failed and may have lost what they wrote there.
    pub(super) fn fail_scripts_of(&mut self, device: DeviceIndex, fault: &Fault) {
        for script in self.scripts.values_mut() {
            if script.devices.contains(&device) {
                script.failed.get_or_insert_with(|| fault.clone());
            }
        }
    }

    fn advance(&mut self, id: ScriptId) {
        loop {
            let script = self.scripts.get_mut(&id).expect("a running script");
            let idle = script.inflight_count == 0;
            if script.failed.is_some() {
                if idle {
                    self.finish(id);
                }
                return;
            }
            let Some(step) = script.steps.front_mut() else {
                self.finish(id);
                return;
            };
            if step.0.is_empty() {
                if !idle {
                    return;
                }
                script.steps.pop_front();
                script.steps_done += 1;
                continue;
            }
            if script.inflight_count == INFLIGHT_MAX {
                return;
            }
            let meta = step.0.pop_front().expect("not empty");
            script.inflight_count += 1;
            self.start_meta(id, meta);
        }
    }

    fn start_meta(&mut self, script: ScriptId, meta: MetaIo) {
        let MetaIo {
            device,
            offset,
            write,
        } = meta;
        let Some(bytes) = write else {
            return self.flush(device, Waiter::Script(script));
        };
        let length = bytes.len() as u32;
        let extent = [offset, u64::from(length)];
        // A call waits for it.
        let priority = Priority::Demand;
        let io = self.start(device, IoOp::Write, extent, Buffer::Meta(bytes), priority);
        let write = Operation::Write {
            script,
            device,
            offset,
            bytes: length,
        };
        self.inflight.insert(io, write);
    }

    fn finish(&mut self, id: ScriptId) {
        let Script {
            steps_done, failed, ..
        } = self.scripts.remove(&id).expect("a running script");
        let result = match failed {
            None => Ok(()),
            Some(fault) => Err(ScriptFailure { steps_done, fault }),
        };
        self.ended.push_back(ScriptEnd { script: id, result });
    }
}

/// Writes the same blocks to two places, the second when the first is durable, so that a power cut leaves a whole one.
pub(in crate::core) fn in_turn(
    device: DeviceIndex,
    offsets: [u64; 2],
    blocks: AlignedBytes,
) -> Vec<Step> {
    let [first, second] = offsets;
    vec![
        Step::writes(device, [(first, blocks.clone())]),
        Step::flush([device]),
        Step::writes(device, [(second, blocks)]),
        Step::flush([device]),
    ]
}
