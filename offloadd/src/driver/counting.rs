//! Counts and logs of the driver: commits, damage, slow drives; and snapshots for metrics.

use std::fs::Metadata;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use offload_api::ids::DeviceIndex;
use offload_support::paths::Word;
use offload_support::units::ApproxBytes;

use super::{AnswerNote, Driver, trace};
use crate::core::{Call, Peer, TileDamage, Viewer};
use crate::device::is_sparse;
use crate::io::{IoOp, failure};
use crate::metrics::ledger::{FailedOperation, JobPlace};
use crate::metrics::slowness::SlownessChange;
use crate::metrics::{DeviceView, Snapshot};
use crate::store::DATA_OFFSET;

/// Minimum time between two snapshots; one takes a few milliseconds with a thousand jobs.
const SNAPSHOT_INTERVAL: Duration = Duration::from_millis(20);

/// Damaged tiles of one job that are logged; all are counted.
const DAMAGE_LOGGED_MAX: u64 = 16;

/// Failed operations on tiles of one device that are logged; all are counted.
const FAILURES_LOGGED_MAX: u64 = 16;

impl Driver {
    /// Returns what the answer to `request` will change in the ledger and tell the log.
    pub(super) fn note_call(&mut self, request: &Call, peer: Peer) -> AnswerNote {
        let (token, generation) = match request {
            Call::Commit {
                token, generation, ..
            } => (token, generation),
            Call::DropJob { uid, job } => return AnswerNote::DropJob(*uid, job.clone()),
            Call::DrainDevice { path, .. } => return AnswerNote::DrainDevice(path.clone()),
            _ => return AnswerNote::Nothing,
        };
        let mut sessions = self.sessions.values();
        let Some(session) = sessions.find(|s| s.token == *token && s.peer.uid == peer.uid) else {
            return AnswerNote::Nothing;
        };
        let (job, span) = (session.job, trace::commit(&session.span, *generation));
        self.ledger.commit_called(job, Instant::now());
        AnswerNote::Commit(job, span)
    }

    /// Counts and logs a damaged tile. The log is limited, because a process may report without end.
    pub(super) fn report_damage(
        &mut self,
        job: JobPlace,
        uid: u32,
        damage: TileDamage,
        by_process: bool,
    ) {
        if self.ledger.damaged(job, damage.device) > DAMAGE_LOGGED_MAX {
            return;
        }
        let (found, next) = match by_process {
            true => (
                "a process read",
                "see whether the device returns it damaged",
            ),
            false => ("a scrub found", "find further damage"),
        };
        tracing::error!(
            "{found} a damaged tile on device {} at byte {}: tile {} of job {} of uid {uid}, written by generation {}: checksum \
             {:08x}, expected {:08x}; run `offloadd verify` to {next}",
            self.core.device_states()[damage.device.0 as usize].path,
            damage.offset,
            damage.tile,
            self.ledger.name(job),
            damage.generation,
            damage.found,
            damage.expected,
        );
    }

    /// Logs an operation that failed. Those of the daemon itself (flushes, records, the catalog) are few; of those on tiles, which their
    /// processes hear of too, the first ones of each device are logged and all are counted.
    pub(super) fn report_failure(&self, failed: FailedOperation, outcome: Result<u32, i32>) {
        let FailedOperation {
            device,
            op,
            offset,
            bytes,
            of_job,
            tiles_failed_count,
        } = failed;
        let further = match (of_job, tiles_failed_count) {
            (true, FAILURES_LOGGED_MAX) => "; further failures of tiles on it are only counted",
            (true, count) if count > FAILURES_LOGGED_MAX => return,
            (false, _) if op == IoOp::Flush => {
                "; what was written to it since its last flush may be lost, so jobs that have written to it commit nothing more until they are \
                 started again"
            }
            _ => "",
        };
        let path = &self.core.device_states()[device.0 as usize].path;
        let what = failure(op, path, [offset, bytes.into()], outcome);
        tracing::error!("a device failed: {what}{further}");
    }

    /// Answers metrics calls, if any wait and the interval has passed. All callers with the same view get one snapshot, so that many
    /// callers do not slow down the owner thread.
    pub(super) fn answer_metrics(&mut self) {
        let now = Instant::now();
        if now < self.snapshot_at {
            return;
        }
        let Some(&(viewer, _)) = self.metrics_waiters.first() else {
            return;
        };
        self.snapshot_at = now + SNAPSHOT_INTERVAL;
        let snapshot = Arc::new(self.snapshot(viewer));
        let same = self
            .metrics_waiters
            .extract_if(.., |(other, _)| *other == viewer);
        for (_, answer) in same {
            // Fails only if the caller has gone.
            let _ = answer.send(Ok(snapshot.clone()));
        }
    }

    /// Devices of the store, without those that have left it.
    fn devices_of_store(&self) -> Vec<DeviceView> {
        let mut views = self.ledger.devices(self.core.device_states());
        for (index, view) in views.iter_mut().enumerate() {
            view.trouble = self.trouble(DeviceIndex(index as u32));
        }
        views.retain(|view| view.state.status.phase.is_some());
        views
    }

    /// Returns a problem of a device that needs an administrator.
    fn trouble(&self, device: DeviceIndex) -> Option<String> {
        if let Some(hanging) = self.ledger.hanging(device, Instant::now()) {
            return Some(hanging.to_string());
        }
        let file = self.files[device.0 as usize].as_ref()?;
        let found = file.metadata().ok().filter(Metadata::is_file)?;
        if found.nlink() == 0 {
            let (pid, descriptor) = (std::process::id(), file.as_raw_fd());
            let (uid, gid) = (found.uid(), found.gid());
            let devices = self.core.device_states();
            let path = Word(Path::new(&devices[device.0 as usize].path));
            return Some(format!(
                "its file was deleted, and its data is lost when offloadd ends; stop the jobs and copy it first: cp --sparse=never \
                 /proc/{pid}/fd/{descriptor} NEW; then stop offloadd, mv NEW {path}, chown {uid}:{gid} {path}, chmod 600 {path}, and start \
                 offloadd"
            ));
        }
        let length = DATA_OFFSET + self.core.superblock_of(device).data_bytes;
        let cut = found.len() < length;
        // A write after a truncation makes the file as long again; what it lost stays a hole.
        let emptied = is_sparse(&found) && !self.had_holes[device.0 as usize];
        (cut || emptied).then(|| {
            format!(
                "its file was truncated or overwritten by another program ({} of {} have space on the file system): tiles on it are lost; \
                 `offloadd verify` names them",
                ApproxBytes((found.blocks() * 512).min(found.len())),
                ApproxBytes(length.max(found.len()))
            )
        })
    }

    /// Returns the reason why the store is read-only, if it is.
    pub(super) fn read_only(&self) -> Option<String> {
        let why = self.core.read_only();
        why.map(|fault| fault.message.clone())
    }

    fn snapshot(&self, viewer: Viewer) -> Snapshot {
        let (arena_used_bytes, session_count) = self.core.arena_used();
        let jobs = self.core.job_states(viewer).into_iter();
        Snapshot {
            uptime: self.ledger.started_at().elapsed(),
            arena_used_bytes,
            arena_bytes_max: self.limits.arena_bytes_max,
            session_count,
            rebalance_bytes_per_s_max: self.core.rebalance_bytes_per_s_max(),
            read_only: self.read_only(),
            devices: self.devices_of_store(),
            users: self.core.user_states(viewer),
            jobs: jobs.map(|job| self.ledger.job(job)).collect(),
        }
    }

    /// Logs which devices have become slow or have recovered.
    pub(super) fn judge_devices(&mut self) {
        let Some(changes) = self.ledger.judge(Instant::now()) else {
            return;
        };
        for (index, state) in self.core.device_states().iter().enumerate() {
            let trouble = self.trouble(DeviceIndex(index as u32));
            let logged = &mut self.in_trouble[index];
            match (&trouble, *logged) {
                (Some(trouble), false) => tracing::error!("device {}: {trouble}", state.path),
                (None, true) => tracing::info!("device {} has recovered", state.path),
                _ => {}
            }
            *logged = trouble.is_some();
        }
        for (device, change) in changes {
            let DeviceIndex(index) = device;
            let state = &self.core.device_states()[index as usize];
            match change {
                SlownessChange::Slow { bytes_per_s, times } => tracing::warn!(
                    "device {} has become slow: {:.0} MB/s while busy, measured {:.0} MB/s read and {:.0} MB/s written ({times:.0} times \
                     slower): check its temperature, its health and other users of it",
                    state.path,
                    bytes_per_s / 1e6,
                    state.read_bytes_per_s as f64 / 1e6,
                    state.write_bytes_per_s as f64 / 1e6,
                ),
                SlownessChange::Well => {
                    tracing::info!("device {} is as fast as measured again", state.path);
                }
            }
        }
    }
}
