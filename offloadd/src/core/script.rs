//! Writes and flushes of the daemon's own structures, in order: each step ends before the next one starts.
//!
//! The first operation that fails ends the script; nothing of it is tried again. Nor is it after somebody else's flush of a device
//! that it writes to has failed: see [`super::flush`].

use std::collections::{BTreeSet, VecDeque};

use offload_api::fault::Fault;
use offload_api::ids::{DeviceIndex, Generation};
use offload_api::ring::entry::Priority;

use super::catalog_queue::CatalogChange;
use super::flush::Waiter;
use super::io::Operation;
use super::job::JobKey;
use super::{Action, CallId, Core};
use crate::io::{AlignedBytes, Buffer, IoId, IoOp};
use crate::store::manifest::Record;

/// Operations of one script in flight.
pub(super) const INFLIGHT_MAX: usize = 8;

/// One operation of a script: a megabyte-sized piece of a large structure, as large tiles are.
const WRITE_BYTES_MAX: usize = 4 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ScriptId(u64);

/// What a script is for, and what its end needs.
#[derive(Debug)]
pub(super) enum Purpose {
    Catalog(Box<CatalogChange>),
    DiscardUnreadable {
        key: JobKey,
        generation: Generation,
    },
    Commit {
        key: JobKey,
        record: Record,
    },
    /// The record of a commit that failed is taken back.
    Withdraw {
        key: JobKey,
        generation: Generation,
        fault: Fault,
    },
    Confirm {
        key: JobKey,
    },
    Overwrite {
        key: JobKey,
    },
    /// Records that could not be read are forgotten.
    Forget {
        key: JobKey,
        call: CallId,
    },
    /// Copies of tiles are durable, and what a cut-off commit left is gone.
    Settle {
        key: JobKey,
    },
    /// A definition's new revision.
    Exchange {
        key: JobKey,
    },
}

#[derive(Debug)]
struct MetaIo {
    device: DeviceIndex,
    offset: u64,
    /// `None`: a flush.
    write: Option<AlignedBytes>,
}

/// Operations that may run at the same time.
#[derive(Debug, Default)]
pub(super) struct Step(VecDeque<MetaIo>);

impl Step {
    /// Writes of one device: each is blocks and where they go.
    pub(super) fn writes(
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
    pub(super) fn twice(device: DeviceIndex, offsets: [u64; 2], bytes: AlignedBytes) -> Self {
        Self::writes(device, [(offsets[0], bytes.clone()), (offsets[1], bytes)])
    }

    /// Flushes of these devices.
    pub(super) fn flush(devices: impl IntoIterator<Item = DeviceIndex>) -> Self {
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
    purpose: Purpose,
    steps: VecDeque<Step>,
    steps_done: usize,
    inflight_count: usize,
    failed: Option<Fault>,
    /// Where it writes, or what it relies on was written.
    devices: BTreeSet<DeviceIndex>,
}

/// Where and why a script failed.
#[derive(Debug)]
pub(super) struct Failed {
    /// Steps that ended well before it.
    pub(super) steps_done: usize,
    pub(super) fault: Fault,
}

impl Core {
    /// Starts `steps`; `purpose` is finished when the last has ended, or the first has failed. A script without any
    /// operation is finished at once.
    pub(super) fn run_script(
        &mut self,
        purpose: Purpose,
        steps: Vec<Step>,
        actions: &mut Vec<Action>,
    ) {
        let id = ScriptId(self.number());
        if let Some(key) = purpose.job() {
            let job = self.jobs.get_mut(key).expect("a script's job exists");
            assert!(job.script.is_none(), "one script a job");
            job.script = Some(id);
        }
        let operations = steps.iter().flat_map(|step| &step.0);
        let script = Script {
            devices: operations.map(|meta| meta.device).collect(),
            purpose,
            steps: steps.into(),
            steps_done: 0,
            inflight_count: 0,
            failed: None,
        };
        self.scripts.insert(id, script);
        self.advance(id, actions);
    }

    pub(super) fn on_script_io_done(
        &mut self,
        id: ScriptId,
        failed: Option<Fault>,
        actions: &mut Vec<Action>,
    ) {
        let script = self.scripts.get_mut(&id).expect("it waits for this");
        script.inflight_count -= 1;
        if script.failed.is_none() {
            script.failed = failed;
        }
        self.advance(id, actions);
    }

    /// A flush of `device` failed: what a script has written there, or was to make durable, may be lost.
    pub(super) fn fail_scripts_of(&mut self, device: DeviceIndex, fault: &Fault) {
        for script in self.scripts.values_mut() {
            if script.devices.contains(&device) {
                script.failed.get_or_insert_with(|| fault.clone());
            }
        }
    }

    fn advance(&mut self, id: ScriptId, actions: &mut Vec<Action>) {
        loop {
            let script = self.scripts.get_mut(&id).expect("a running script");
            let idle = script.inflight_count == 0;
            if script.failed.is_some() {
                if idle {
                    self.finish(id, actions);
                }
                return;
            }
            let Some(step) = script.steps.front_mut() else {
                self.finish(id, actions);
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
            self.start_meta(id, meta, actions);
        }
    }

    fn start_meta(&mut self, script: ScriptId, meta: MetaIo, actions: &mut Vec<Action>) {
        let MetaIo {
            device,
            offset,
            write,
        } = meta;
        let Some(bytes) = write else {
            return self.flush(device, Waiter::Script(script), actions);
        };
        let io = IoId(self.number());
        let length = bytes.len() as u32;
        self.operations.insert(
            io,
            Operation::Script {
                script,
                device,
                offset,
                bytes: length,
            },
        );
        actions.push(Action::Io {
            io,
            device,
            op: IoOp::Write,
            offset,
            bytes: length,
            buffer: Buffer::Meta(bytes),
            // A call waits for each of them.
            priority: Priority::Demand,
        });
    }

    fn finish(&mut self, id: ScriptId, actions: &mut Vec<Action>) {
        let Script {
            purpose,
            steps_done,
            failed,
            ..
        } = self.scripts.remove(&id).expect("a running script");
        let result = match failed {
            None => Ok(()),
            Some(fault) => Err(Failed { steps_done, fault }),
        };
        let key = purpose.job().cloned();
        if let Some(key) = &key {
            let job = self.jobs.get_mut(key).expect("a script's job exists");
            job.script = None;
        }
        match purpose {
            Purpose::Catalog(change) => self.finish_catalog(*change, result, actions),
            Purpose::DiscardUnreadable { key, generation } => {
                self.finish_give_up(&key, generation, result, actions);
            }
            Purpose::Commit { key, record } => self.finish_commit(&key, record, result, actions),
            Purpose::Withdraw {
                key,
                generation,
                fault,
            } => self.finish_withdraw(&key, generation, fault, result, actions),
            Purpose::Confirm { key } => self.finish_confirm(&key, result, actions),
            Purpose::Overwrite { key } => self.finish_overwrite(&key, result, actions),
            Purpose::Forget { key, call } => self.finish_forget(&key, call, result, actions),
            Purpose::Settle { key } => self.finish_settle(&key, result, actions),
            Purpose::Exchange { key } => self.finish_exchange(&key, result, actions),
        }
        if let Some(key) = key {
            self.settle(&key);
        }
    }
}

impl Purpose {
    /// Whose script it is, of which a job has one. The mover's run beside it.
    fn job(&self) -> Option<&JobKey> {
        match self {
            Self::Catalog(_) | Self::Settle { .. } | Self::Exchange { .. } => None,
            Self::DiscardUnreadable { key, .. }
            | Self::Commit { key, .. }
            | Self::Withdraw { key, .. }
            | Self::Confirm { key }
            | Self::Overwrite { key }
            | Self::Forget { key, .. } => Some(key),
        }
    }
}
