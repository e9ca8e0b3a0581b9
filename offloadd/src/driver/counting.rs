//! What the driver counts and tells: commits, damage, wear, drives that became slow, and answers for those who look.

use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use offload_api::ids::DeviceIndex;
use offload_api::ring::entry::Priority;

use super::{Counted, Driver, WEAR_IO};
use crate::core::{Call, Damage, Peer, Viewer};
use crate::engine::{Io, Memory};
use crate::io::{IoId, IoOp};
use crate::metrics::slowness::Change;
use crate::metrics::{DeviceView, Snapshot, ledger::JobPlace};
use crate::queue::Owner;

/// Between two looks at everything; each takes up to some milliseconds when there are a thousand jobs.
const LOOKS_APART: Duration = Duration::from_millis(20);

/// Damaged tiles of one job that are told in the log; all are counted.
const DAMAGE_TOLD_MAX: u64 = 16;

impl Driver {
    /// What the answer to `request` will change in the ledger.
    pub(super) fn count_call(&mut self, request: &Call, peer: Peer) -> Counted {
        let token = match request {
            Call::Commit { token, .. } => token,
            Call::EndMeasuring { rates: Some(_), .. } => return Counted::Measured,
            Call::DropJob { job } => return Counted::Drop(peer.uid, job.clone()),
            _ => return Counted::Nothing,
        };
        let mut sessions = self.sessions.values();
        let found = sessions.find(|s| s.token == *token && s.peer.uid == peer.uid);
        let Some(job) = found.map(|session| session.job) else {
            return Counted::Nothing;
        };
        self.ledger.commit_called(job, Instant::now());
        Counted::Commit(job)
    }

    /// Someone must look at that drive. A process that reports without end fills no log.
    pub(super) fn hear_damage(&mut self, job: JobPlace, uid: u32, damage: Damage) {
        if self.ledger.damaged(job, damage.device) > DAMAGE_TOLD_MAX {
            return;
        }
        tracing::error!(
            "a damaged tile on device {} at byte {}: tile {} of job {} of uid {uid}, written by generation {}: checksum {:08x}, \
             committed was {:08x}; `offloadd verify` finds what else is damaged",
            self.core.device_states()[damage.device.0 as usize].path,
            damage.offset,
            damage.tile,
            self.ledger.name(job),
            damage.generation,
            damage.found,
            damage.expected,
        );
    }

    /// Answers those who look, if some do and it is time: all who see the same get one copy, so that no number of them
    /// takes the owner thread from those who move tiles.
    pub(super) fn answer_lookers(&mut self) {
        let now = Instant::now();
        if now < self.look_at {
            return;
        }
        let Some(&(viewer, _)) = self.metrics_waiters.first() else {
            return;
        };
        self.look_at = now + LOOKS_APART;
        let snapshot = Arc::new(self.look(viewer));
        let same = self
            .metrics_waiters
            .extract_if(.., |(other, _)| *other == viewer);
        for (_, answer) in same {
            // An error means that nobody looks any more.
            let _ = answer.send(Ok(snapshot.clone()));
        }
    }

    /// Those that left are of no interest to anybody.
    fn devices_of_store(&self) -> Vec<DeviceView> {
        let mut views = self.ledger.devices(self.core.device_states());
        for (index, view) in views.iter_mut().enumerate() {
            view.trouble = self.trouble(DeviceIndex(index as u32));
        }
        views.retain(|view| view.state.status.phase.is_some());
        views
    }

    /// Why an administrator must look at a device now.
    fn trouble(&self, device: DeviceIndex) -> Option<String> {
        if let Some(hanging) = self.ledger.hanging(device, Instant::now()) {
            return Some(hanging.to_string());
        }
        let file = self.files[device.0 as usize].as_ref()?;
        let deleted = file
            .metadata()
            .is_ok_and(|found| found.is_file() && found.nlink() == 0);
        deleted.then(|| {
            let descriptor = file.as_raw_fd();
            format!(
                "its file was deleted: what is in it is lost when offloadd ends. Stop the jobs and copy it first: cp \
                 --sparse=always /proc/{}/fd/{descriptor} NEW",
                std::process::id()
            )
        })
    }

    /// Why nothing is written in this life, in words.
    pub(super) fn reading_only(&self) -> Option<String> {
        let why = self.core.reading_only();
        why.map(|fault| fault.message.clone())
    }

    fn look(&self, viewer: Viewer) -> Snapshot {
        let (arena_used_bytes, session_count) = self.core.arena_used();
        let jobs = self.core.look(viewer).into_iter();
        Snapshot {
            uptime: self.ledger.started_at().elapsed(),
            arena_used_bytes,
            arena_bytes_max: self.limits.arena_bytes_max,
            session_count,
            rebalance_bytes_per_s_max: self.core.rebalance_bytes_per_s_max(),
            reading_only: self.reading_only(),
            devices: self.devices_of_store(),
            jobs: jobs.map(|job| self.ledger.job(job)).collect(),
        }
    }

    /// Writes how far the devices are worn to them, if it is time or `immediate`. A device's next one waits for its last to end.
    pub(super) fn keep_wear(&mut self, at_once: bool) {
        let now = Instant::now();
        let due = (self.ledger.keep_wear_at()).is_some_and(|at| at_once || at <= now);
        if !due {
            return;
        }
        let jobs = self.core.look(Viewer::All);
        for to_keep in self.ledger.keep_wear(&jobs, now, at_once) {
            let io = Io {
                id: IoId(WEAR_IO | u64::from(to_keep.device.0)),
                device: to_keep.device,
                op: IoOp::Write,
                offset: to_keep.offset,
                bytes: to_keep.blocks.len() as u32,
                memory: Memory::Meta(to_keep.blocks),
            };
            self.queue.push(io, Priority::Prefetch, Owner::Daemon);
        }
    }

    /// Says which devices have become slow or fast again, which are in trouble or no longer, and which are nearly worn out.
    pub(super) fn judge_devices(&mut self) {
        for (device, share) in self.ledger.newly_worn() {
            tracing::warn!(
                "device {} has taken {:.0} % of the bytes it is rated for (`rated_tbw`): plan to replace it",
                self.core.device_states()[device.0 as usize].path,
                100.0 * share
            );
        }
        let Some(changes) = self.ledger.judge(Instant::now()) else {
            return;
        };
        for (index, state) in self.core.device_states().iter().enumerate() {
            let trouble = self.trouble(DeviceIndex(index as u32));
            let told = &mut self.in_trouble[index];
            match (&trouble, *told) {
                (Some(trouble), false) => tracing::error!("device {}: {trouble}", state.path),
                (None, true) => tracing::info!("device {}: its trouble has ended", state.path),
                _ => {}
            }
            *told = trouble.is_some();
        }
        for (device, change) in changes {
            let DeviceIndex(index) = device;
            let state = &self.core.device_states()[index as usize];
            match change {
                Change::Slow { bytes_per_s, times } => tracing::warn!(
                    "device {} has become slow: it moves {:.0} MB/s while it is busy and was measured with {:.0} read and \
                     {:.0} written ({times:.0} times slower): look at its temperature, its health, and who else uses it",
                    state.path,
                    bytes_per_s / 1e6,
                    state.read_bytes_per_s as f64 / 1e6,
                    state.write_bytes_per_s as f64 / 1e6,
                ),
                Change::Well => {
                    tracing::info!("device {} is as fast as it was measured", state.path);
                }
            }
        }
    }
}
