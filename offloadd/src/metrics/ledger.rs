//! Counts the operations that the driver starts and completes, by device and by job.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use offload_api::ids::DeviceIndex;

use super::slowness::{JUDGED_EVERY, Slowness, SlownessChange};
use super::{Counts, DeviceView, JobView, Latencies, MovedBeside, Traffic};
use crate::core::{DeviceState, JobState};
use crate::engine::IoDone;
use crate::io::{IoId, IoOp};
use crate::store::definition::JobName;
use crate::store::superblock::MeasuredRates;

/// Limit of counted jobs: as many as a store holds, and as many again that have no data yet.
pub const JOBS_MAX: usize = 2048;

/// An operation of this duration hangs; garbage collection and internal retries of a drive take a few seconds.
const HANGS_AFTER: Duration = Duration::from_secs(10);

/// A device whose oldest operation does not end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hanging {
    /// Kind of the oldest operation.
    pub op: IoOp,
    /// Duration of that operation so far.
    pub took: Duration,
    /// Operations in flight, including this one.
    pub inflight_count: u64,
}

impl std::fmt::Display for Hanging {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let op = match self.op {
            IoOp::Read => "read",
            IoOp::Write => "write",
            IoOp::Flush => "flush",
        };
        write!(
            f,
            "a {op} has not ended for {} s, {} operations are in flight: the device hangs; look at the kernel's log and the device's cables",
            self.took.as_secs(),
            self.inflight_count
        )
    }
}

/// Index of a job in the ledger, valid while a session of the job is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobPlace(usize);

impl JobPlace {
    /// Number of the job, unique while a session of it is open.
    pub fn number(self) -> u64 {
        self.0 as u64
    }
}

/// Counters of the daemon, used by the owner thread only.
#[derive(Debug)]
pub struct Ledger {
    started: Instant,
    judged: Instant,
    devices: Vec<DeviceLedger>,
    jobs: Vec<JobLedger>,
    indices: HashMap<(u32, JobName), usize>,
    /// Free places of deleted jobs.
    free: Vec<usize>,
    inflight: HashMap<IoId, InFlight>,
}

#[derive(Debug)]
struct DeviceLedger {
    counts: Counts,
    depth: u64,
    depth_max: u64,
    damaged_count: u64,
    /// Operations on tiles that failed.
    tiles_failed_count: u64,
    slowness: Slowness,
}

#[derive(Debug)]
struct JobLedger {
    uid: u32,
    name: JobName,
    session_count: usize,
    /// Whether the job was deleted; its last operations are still counted here.
    dropped: bool,
    counts: Counts,
    /// When the last rank called commit.
    called: Option<Instant>,
    commits: Latencies,
    commit_failed_count: u64,
    damaged_count: u64,
}

#[derive(Debug)]
struct InFlight {
    device: DeviceIndex,
    op: IoOp,
    offset: u64,
    bytes: u32,
    job: Option<JobPlace>,
    since: Instant,
}

/// An operation that failed.
#[derive(Clone, Copy, Debug)]
pub struct FailedOperation {
    /// The device.
    pub device: DeviceIndex,
    /// What was asked of it.
    pub op: IoOp,
    /// First byte on the device.
    pub offset: u64,
    /// Bytes to move.
    pub bytes: u32,
    /// Whether it moved a tile of a job, and not a structure of the daemon.
    pub of_job: bool,
    /// Operations on tiles that have failed on the device, with this one.
    pub tiles_failed_count: u64,
}

impl Ledger {
    /// Makes a ledger for these devices.
    pub fn new(devices: &[DeviceState], now: Instant) -> Self {
        let device = |state: &DeviceState| {
            DeviceLedger::new(state.read_bytes_per_s, state.write_bytes_per_s, now)
        };
        Self {
            started: now,
            judged: now,
            devices: devices.iter().map(device).collect(),
            jobs: Vec::new(),
            indices: HashMap::new(),
            free: Vec::new(),
            inflight: HashMap::new(),
        }
    }

    /// Adds a device.
    pub fn add_device(&mut self, rates: &MeasuredRates, now: Instant) {
        let (read, write) = (rates.read_bytes_per_s, rates.write_bytes_per_s);
        self.devices.push(DeviceLedger::new(read, write, now));
    }

    /// When counting began.
    pub fn started_at(&self) -> Instant {
        self.started
    }

    /// Counts a session of a job. Its operations are counted under the returned index.
    pub fn session_begins(&mut self, uid: u32, name: &JobName) -> JobPlace {
        let place = self.index_of(uid, name);
        self.jobs[place.0].session_count += 1;
        place
    }

    /// Finds or makes the index of a job.
    pub fn index_of(&mut self, uid: u32, name: &JobName) -> JobPlace {
        let key = (uid, name.clone());
        JobPlace(match self.indices.get(&key) {
            Some(place) => *place,
            None => self.new_place(key),
        })
    }

    fn new_place(&mut self, key: (u32, JobName)) -> usize {
        let new = JobLedger::new(key.0, key.1.clone());
        let place = if let Some(free) = self.free.pop() {
            self.jobs[free] = new;
            free
        } else if self.jobs.len() < JOBS_MAX {
            self.jobs.push(new);
            self.jobs.len() - 1
        } else {
            let place = self.least_missed();
            let before = std::mem::replace(&mut self.jobs[place], new);
            self.indices.remove(&(before.uid, before.name));
            place
        };
        self.indices.insert(key, place);
        place
    }

    /// Chooses a place to reuse. Never one of a job that wrote, whose counters would start again at 0. Another exists, because a store
    /// holds fewer jobs than there are places.
    fn least_missed(&self) -> usize {
        let jobs = self.jobs.iter().enumerate();
        let unused = jobs.filter(|(_, job)| job.session_count == 0);
        let least = unused.min_by_key(|(_, job)| {
            let Counts { read, written, .. } = &job.counts;
            (written.bytes > 0, read.count() > 0)
        });
        least.expect("fewer sessions than places").0
    }

    /// Counts the end of a session, after its last operation.
    pub fn session_ends(&mut self, place: JobPlace) {
        let job = &mut self.jobs[place.0];
        job.session_count -= 1;
        if job.dropped && job.session_count == 0 {
            self.free.push(place.0);
        }
    }

    /// Counts the start of an operation; `job` is set for a tile.
    pub fn started(
        &mut self,
        io: IoId,
        device: DeviceIndex,
        op: IoOp,
        [offset, bytes]: [u64; 2],
        job: Option<JobPlace>,
        now: Instant,
    ) {
        let of = &mut self.devices[device.0 as usize];
        of.depth += 1;
        of.depth_max = of.depth_max.max(of.depth);
        match op {
            IoOp::Read => of.slowness.started(false, bytes, now),
            IoOp::Write => of.slowness.started(true, bytes, now),
            IoOp::Flush => of.slowness.flush_started(now),
        }
        let one = InFlight {
            device,
            op,
            offset,
            bytes: bytes as u32,
            job,
            since: now,
        };
        self.inflight.insert(io, one);
    }

    /// Counts the end of an operation. Returns what failed, if it did.
    pub fn ended(&mut self, done: &IoDone, now: Instant) -> Option<FailedOperation> {
        let InFlight {
            device,
            op,
            offset,
            bytes,
            job,
            ..
        } = (self.inflight.remove(&done.id)).expect("counted when it was started");
        let of_job = job.is_some();
        let of = &mut self.devices[device.0 as usize];
        of.depth -= 1;
        let moved_bytes = u64::from(done.outcome.unwrap_or(0));
        match op {
            IoOp::Read => of.slowness.ended(false, u64::from(bytes), now),
            IoOp::Write => of.slowness.ended(true, u64::from(bytes), now),
            IoOp::Flush => of.slowness.flush_ended(now),
        }
        let failed = done.outcome != Ok(bytes);
        let job = job.map(|place| &mut self.jobs[place.0].counts);
        for counts in [&mut of.counts].into_iter().chain(job) {
            let traffic = traffic_of(counts, op);
            traffic.bytes += moved_bytes;
            traffic.failed_count += u64::from(failed);
            traffic.retried_count += u64::from(done.retried_count);
            traffic.latencies.record(done.device_ns);
        }
        failed.then(|| {
            let of = &mut self.devices[device.0 as usize];
            of.tiles_failed_count += u64::from(of_job);
            FailedOperation {
                device,
                op,
                offset,
                bytes,
                of_job,
                tiles_failed_count: of.tiles_failed_count,
            }
        })
    }

    /// Counts bytes that were moved without the queue. Their operations are not counted.
    pub fn moved_beside(&mut self, device: DeviceIndex, moved: MovedBeside) {
        let counts = &mut self.devices[device.0 as usize].counts;
        counts.read.bytes += moved.read_bytes;
        counts.written.bytes += moved.written_bytes;
    }

    /// Counts a rank's call to commit.
    pub fn commit_called(&mut self, place: JobPlace, now: Instant) {
        self.jobs[place.0].called = Some(now);
    }

    /// Counts the answer to a rank. The ranks of a commit are answered together, and the commit is counted once.
    pub fn commit_answered(&mut self, place: JobPlace, durable: bool, now: Instant) {
        let job = &mut self.jobs[place.0];
        if !durable {
            job.commit_failed_count += 1;
        } else if let Some(called) = job.called.take() {
            let took = now.saturating_duration_since(called);
            job.commits.record(took.as_nanos() as u64);
        }
    }

    /// Counts a damaged tile. Returns the number found by the job.
    pub fn damaged(&mut self, place: JobPlace, device: DeviceIndex) -> u64 {
        self.devices[device.0 as usize].damaged_count += 1;
        let job = &mut self.jobs[place.0];
        job.damaged_count += 1;
        job.damaged_count
    }

    /// Returns the name of a job.
    pub fn name(&self, place: JobPlace) -> &JobName {
        &self.jobs[place.0].name
    }

    /// Forgets a deleted job; a later one of the same name is another job.
    pub fn job_dropped(&mut self, uid: u32, name: &JobName) {
        let Some(place) = self.indices.remove(&(uid, name.clone())) else {
            return;
        };
        let job = &mut self.jobs[place];
        job.dropped = true;
        if job.session_count == 0 {
            self.free.push(place);
        }
    }

    /// When to call [`Self::judge`] next; `None` while nothing is in flight.
    pub fn judge_at(&self) -> Option<Instant> {
        let busy = self.devices.iter().any(|device| device.depth > 0);
        busy.then(|| self.judged + JUDGED_EVERY)
    }

    /// Returns devices that became slow or recovered; `None` before a second has passed.
    pub fn judge(&mut self, now: Instant) -> Option<Vec<(DeviceIndex, SlownessChange)>> {
        if now < self.judged + JUDGED_EVERY {
            return None;
        }
        self.judged = now;
        let devices = self.devices.iter_mut().enumerate();
        let changes = devices.filter_map(|(index, device)| {
            let change = device.slowness.judge(now)?;
            Some((DeviceIndex(index as u32), change))
        });
        Some(changes.collect())
    }

    /// Returns the oldest operation of a device, if it hangs.
    pub fn hanging(&self, device: DeviceIndex, now: Instant) -> Option<Hanging> {
        let inflight = self.inflight.values().filter(|one| one.device == device);
        let oldest = inflight.min_by_key(|one| one.since)?;
        let took = now.saturating_duration_since(oldest.since);
        (took >= HANGS_AFTER).then(|| Hanging {
            op: oldest.op,
            took,
            inflight_count: self.devices[device.0 as usize].depth,
        })
    }

    /// Combines counters with the core's states of the devices.
    pub fn devices(&self, states: Vec<DeviceState>) -> Vec<DeviceView> {
        let views = states.into_iter().zip(&self.devices);
        let view = |(state, device): (DeviceState, &DeviceLedger)| DeviceView {
            damaged_count: device.damaged_count,
            queue_depth: device.depth,
            queue_depth_max: device.depth_max,
            busy: device.slowness.busy(),
            slow: device.slowness.is_slow(),
            ..DeviceView::new(state, device.counts.clone())
        };
        views.map(view).collect()
    }

    fn counted(&self, state: &JobState) -> Option<&JobLedger> {
        let place = self.indices.get(&(state.uid, state.job.clone()))?;
        Some(&self.jobs[*place])
    }

    /// Combines counters with the core's state of a job.
    pub fn job(&self, state: JobState) -> JobView {
        let counted = self.counted(&state);
        JobView {
            counts: counted.map(|job| job.counts.clone()).unwrap_or_default(),
            commits: counted.map(|job| job.commits.clone()).unwrap_or_default(),
            commit_failed_count: counted.map_or(0, |job| job.commit_failed_count),
            damaged_count: counted.map_or(0, |job| job.damaged_count),
            state,
        }
    }
}

impl DeviceLedger {
    fn new(read_bytes_per_s: u64, write_bytes_per_s: u64, now: Instant) -> Self {
        Self {
            counts: Counts::default(),
            depth: 0,
            depth_max: 0,
            damaged_count: 0,
            tiles_failed_count: 0,
            slowness: Slowness::new(read_bytes_per_s, write_bytes_per_s, now),
        }
    }
}

impl JobLedger {
    fn new(uid: u32, name: JobName) -> Self {
        Self {
            uid,
            name,
            session_count: 0,
            dropped: false,
            counts: Counts::default(),
            called: None,
            commits: Latencies::default(),
            commit_failed_count: 0,
            damaged_count: 0,
        }
    }
}

fn traffic_of(counts: &mut Counts, op: IoOp) -> &mut Traffic {
    match op {
        IoOp::Read => &mut counts.read,
        IoOp::Write => &mut counts.written,
        IoOp::Flush => &mut counts.flushed,
    }
}
