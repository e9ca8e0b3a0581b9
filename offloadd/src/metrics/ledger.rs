//! Counts what the driver starts and what ends, for the device and for the job it is of.

mod keeping;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use offload_api::ids::DeviceIndex;

use super::endurance::{Endurance, Ratings, WearCount};
use super::slowness::{Change, JUDGED_EVERY, Slowness};
use super::{Counts, DeviceView, JobView, Latencies, MovedBeside, Traffic};
use crate::core::{DeviceState, JobState};
use crate::engine::IoDone;
use crate::io::{IoId, IoOp};
use crate::store::definition::JobName;
use crate::store::format::MeasuredRates;

/// Jobs that are counted at a time: as many as a store holds, and as many that hold nothing yet.
pub const JOBS_MAX: usize = 2048;

/// An operation that takes so long hangs: a drive that collects garbage or retries within itself takes some seconds.
pub const HANGS_AFTER: Duration = Duration::from_secs(10);

/// A device that does not end what it was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hanging {
    /// The oldest operation.
    pub op: IoOp,
    /// How long it has taken.
    pub took: Duration,
    /// Operations in flight, this one too.
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

/// A job's place in the ledger, as long as a session of it is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobPlace(usize);

impl JobPlace {
    /// This job's alone, as long as a session of it is open.
    pub fn number(self) -> u64 {
        self.0 as u64
    }
}

/// The daemon's counts. Belongs to the owner thread.
#[derive(Debug)]
pub struct Ledger {
    started: Instant,
    judged: Instant,
    devices: Vec<Device>,
    jobs: Vec<Job>,
    places: HashMap<(u32, JobName), usize>,
    /// Places whose job was dropped, for those that come.
    free: Vec<usize>,
    inflight: HashMap<IoId, InFlight>,
    endurance: Endurance,
}

#[derive(Debug)]
struct Device {
    counts: Counts,
    depth: u64,
    depth_max: u64,
    damaged_count: u64,
    slowness: Slowness,
    of_store: bool,
    /// When its wear was begun to be kept last, and how much had been written in this life.
    wear_kept: Instant,
    wear_kept_bytes: u64,
}

#[derive(Debug)]
struct Job {
    uid: u32,
    name: JobName,
    session_count: usize,
    /// It and what it wrote are gone; its last operations end here still.
    dropped: bool,
    counts: Counts,
    /// To each device.
    written_bytes: Vec<u64>,
    /// When the last rank called.
    called: Option<Instant>,
    commits: Latencies,
    commit_failed_count: u64,
    damaged_count: u64,
}

#[derive(Debug)]
struct InFlight {
    device: DeviceIndex,
    op: IoOp,
    bytes: u32,
    job: Option<JobPlace>,
    since: Instant,
}

impl Ledger {
    /// Counts for these devices from now on.
    pub fn new(devices: &[DeviceState], endurance: Endurance, now: Instant) -> Self {
        let device =
            |state: &DeviceState| Device::new(state.read_bytes_per_s, state.write_bytes_per_s, now);
        Self {
            started: now,
            judged: now,
            devices: devices.iter().map(device).collect(),
            jobs: Vec::new(),
            places: HashMap::new(),
            free: Vec::new(),
            inflight: HashMap::new(),
            endurance,
        }
    }

    /// One more device comes, behind the others.
    pub fn add_device(&mut self, path: &str, rates: &MeasuredRates, now: Instant) {
        let (read, write) = (rates.read_bytes_per_s, rates.write_bytes_per_s);
        let mut device = Device::new(read, write, now);
        device.of_store = false;
        self.devices.push(device);
        self.endurance.add(WearCount {
            path: path.to_owned(),
            ..WearCount::default()
        });
        for job in &mut self.jobs {
            job.written_bytes.push(0);
        }
    }

    /// It is of the store: its wear is kept on it.
    pub fn device_came(&mut self, device: DeviceIndex, number: u32) {
        let index = device.0 as usize;
        self.devices[index].of_store = true;
        self.endurance.number(index, number);
    }

    /// It was measured again: slow is what is slower than that.
    pub fn device_measured(&mut self, device: DeviceIndex, rates: &MeasuredRates) {
        let slowness = &mut self.devices[device.0 as usize].slowness;
        slowness.measured(rates.read_bytes_per_s, rates.write_bytes_per_s);
    }

    /// It is of no store any more: nothing is kept on it.
    pub fn device_left(&mut self, device: DeviceIndex) {
        self.devices[device.0 as usize].of_store = false;
        self.endurance.one_left();
    }

    /// When it began.
    pub fn started_at(&self) -> Instant {
        self.started
    }

    /// A session of a job begins; its operations are counted at the place given back.
    pub fn session_begins(&mut self, uid: u32, name: &JobName) -> JobPlace {
        let place = self.place(uid, name);
        self.jobs[place.0].session_count += 1;
        place
    }

    /// Where a job is counted, whether somebody uses it or not.
    pub fn place(&mut self, uid: u32, name: &JobName) -> JobPlace {
        let key = (uid, name.clone());
        JobPlace(match self.places.get(&key) {
            Some(place) => *place,
            None => self.new_place(key),
        })
    }

    fn new_place(&mut self, key: (u32, JobName)) -> usize {
        let new = Job::new(key.0, key.1.clone(), self.devices.len());
        let place = if let Some(free) = self.free.pop() {
            self.jobs[free] = new;
            free
        } else if self.jobs.len() < JOBS_MAX {
            self.jobs.push(new);
            self.jobs.len() - 1
        } else {
            let place = self.least_missed();
            let before = std::mem::replace(&mut self.jobs[place], new);
            self.places.remove(&(before.uid, before.name));
            place
        };
        self.places.insert(key, place);
        place
    }

    /// The place of which what is counted is lost. Not of a job that wrote: its bytes would be missing in its wear for good, and
    /// a store holds fewer jobs than there are places, so that there is another as long as few hold nothing and are in use.
    fn least_missed(&self) -> usize {
        let jobs = self.jobs.iter().enumerate();
        let unused = jobs.filter(|(_, job)| job.session_count == 0);
        let least = unused.min_by_key(|(_, job)| {
            let wrote = job.written_bytes.iter().any(|&bytes| bytes > 0);
            (wrote, job.counts.read.count() > 0)
        });
        least.expect("fewer sessions than places").0
    }

    /// It has ended, with its last operation.
    pub fn session_ends(&mut self, place: JobPlace) {
        let job = &mut self.jobs[place.0];
        job.session_count -= 1;
        if job.dropped && job.session_count == 0 {
            self.free.push(place.0);
        }
    }

    /// The driver hands an operation to the engine. `job`: of a tile.
    pub fn started(
        &mut self,
        io: IoId,
        device: DeviceIndex,
        op: IoOp,
        bytes: u32,
        job: Option<JobPlace>,
        now: Instant,
    ) {
        let of = &mut self.devices[device.0 as usize];
        of.depth += 1;
        of.depth_max = of.depth_max.max(of.depth);
        match op {
            IoOp::Read => of.slowness.started(false, u64::from(bytes), now),
            IoOp::Write => of.slowness.started(true, u64::from(bytes), now),
            IoOp::Flush => of.slowness.flush_started(now),
        }
        let one = InFlight {
            device,
            op,
            bytes,
            job,
            since: now,
        };
        self.inflight.insert(io, one);
    }

    /// The engine gave it back.
    pub fn ended(&mut self, done: &IoDone, now: Instant) {
        let InFlight {
            device,
            op,
            bytes,
            job,
            ..
        } = (self.inflight.remove(&done.id)).expect("counted when it was started");
        let of = &mut self.devices[device.0 as usize];
        of.depth -= 1;
        let moved_bytes = u64::from(done.outcome.unwrap_or(0));
        match op {
            IoOp::Read => of.slowness.ended(false, u64::from(bytes), now),
            IoOp::Write => of.slowness.ended(true, u64::from(bytes), now),
            IoOp::Flush => of.slowness.flush_ended(now),
        }
        let failed = done.outcome != Ok(bytes);
        if let (IoOp::Write, Some(place)) = (op, job) {
            self.jobs[place.0].written_bytes[device.0 as usize] += moved_bytes;
        }
        let job = job.map(|place| &mut self.jobs[place.0].counts);
        for counts in [&mut of.counts].into_iter().chain(job) {
            let traffic = traffic_of(counts, op);
            traffic.bytes += moved_bytes;
            traffic.failed_count += u64::from(failed);
            traffic.retried_count += u64::from(done.retried_count);
            traffic.latencies.record(done.device_ns);
        }
    }

    /// Bytes that did not pass the queue: they wear the device out too. Of their operations nothing is known.
    pub fn moved_beside(&mut self, device: DeviceIndex, moved: MovedBeside) {
        let counts = &mut self.devices[device.0 as usize].counts;
        counts.read.bytes += moved.read_bytes;
        counts.written.bytes += moved.written_bytes;
    }

    /// A rank's call to commit has come in.
    pub fn commit_called(&mut self, place: JobPlace, now: Instant) {
        self.jobs[place.0].called = Some(now);
    }

    /// A rank's call is answered. The ranks of a round are answered together: the round is counted once.
    pub fn commit_answered(&mut self, place: JobPlace, durable: bool, now: Instant) {
        let job = &mut self.jobs[place.0];
        if !durable {
            job.commit_failed_count += 1;
        } else if let Some(called) = job.called.take() {
            let took = now.saturating_duration_since(called);
            job.commits.record(took.as_nanos() as u64);
        }
    }

    /// A process found a tile of a device damaged. How many its job has found now.
    pub fn damaged(&mut self, place: JobPlace, device: DeviceIndex) -> u64 {
        self.devices[device.0 as usize].damaged_count += 1;
        let job = &mut self.jobs[place.0];
        job.damaged_count += 1;
        job.damaged_count
    }

    /// What the job at a place is called.
    pub fn name(&self, place: JobPlace) -> &JobName {
        &self.jobs[place.0].name
    }

    /// A job and what it wrote are gone; the next of its name is another.
    pub fn job_dropped(&mut self, uid: u32, name: &JobName) {
        let Some(place) = self.places.remove(&(uid, name.clone())) else {
            return;
        };
        let job = &mut self.jobs[place];
        job.dropped = true;
        if job.session_count == 0 {
            self.free.push(place);
        }
    }

    /// What may be written to each device, from now on.
    pub fn rate(&mut self, ratings: Ratings) {
        self.endurance.rate(ratings);
    }

    /// Devices that have newly come near the end of their rating, and how near.
    pub fn newly_worn(&mut self) -> Vec<(DeviceIndex, f64)> {
        let devices = self.devices.iter().enumerate();
        let worn = devices.filter_map(|(index, device)| {
            let share = (self.endurance).newly_worn(index, device.counts.written.bytes)?;
            Some((DeviceIndex(index as u32), share))
        });
        worn.collect()
    }

    /// When [`Self::judge`] is wanted next; `None` while nothing is in flight.
    pub fn judge_at(&self) -> Option<Instant> {
        let busy = self.devices.iter().any(|device| device.depth > 0);
        busy.then(|| self.judged + JUDGED_EVERY)
    }

    /// What has changed about the devices' speed; `None`: a second is not over.
    pub fn judge(&mut self, now: Instant) -> Option<Vec<(DeviceIndex, Change)>> {
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

    /// The oldest operation of a device, if it takes so long that the device hangs.
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

    /// Devices with what the core says of them.
    pub fn devices(&self, states: Vec<DeviceState>) -> Vec<DeviceView> {
        let views = states.into_iter().zip(&self.devices).enumerate();
        let view = |(index, (state, device)): (usize, (DeviceState, &Device))| DeviceView {
            worn_bytes: (self.endurance).written_bytes(index, device.counts.written.bytes),
            rated_bytes: self.endurance.rated_bytes(index),
            unlisted: !self.endurance.is_listed(index),
            damaged_count: device.damaged_count,
            state,
            counts: device.counts.clone(),
            queue_depth: device.depth,
            queue_depth_max: device.depth_max,
            busy: device.slowness.busy(),
            slow: device.slowness.is_slow(),
            trouble: None,
        };
        views.map(view).collect()
    }

    fn counted(&self, state: &JobState) -> Option<&Job> {
        let place = self.places.get(&(state.uid, state.job.clone()))?;
        Some(&self.jobs[*place])
    }

    /// A job with what the core says of it.
    pub fn job(&self, state: JobState) -> JobView {
        let counted = self.counted(&state);
        let now_bytes = counted.map_or(&[][..], |job| &job.written_bytes);
        let ever = |id| self.endurance.job_bytes(id, now_bytes);
        let of_store = |index: &usize| self.devices[*index].of_store;
        let on = |id| {
            let devices = (0..self.devices.len()).filter(of_store).map(|index| {
                let now_bytes = now_bytes.get(index).copied().unwrap_or(0);
                self.endurance.job_bytes_on(id, index, now_bytes)
            });
            devices.filter(|worn| worn.bytes > 0).collect()
        };
        JobView {
            worn: state.job_id.map(on).unwrap_or_default(),
            worn_bytes: state.job_id.map_or(0, ever),
            counts: counted.map(|job| job.counts.clone()).unwrap_or_default(),
            commits: counted.map(|job| job.commits.clone()).unwrap_or_default(),
            commit_failed_count: counted.map_or(0, |job| job.commit_failed_count),
            damaged_count: counted.map_or(0, |job| job.damaged_count),
            state,
        }
    }
}

impl Device {
    fn new(read_bytes_per_s: u64, write_bytes_per_s: u64, now: Instant) -> Self {
        Self {
            counts: Counts::default(),
            depth: 0,
            depth_max: 0,
            damaged_count: 0,
            slowness: Slowness::new(read_bytes_per_s, write_bytes_per_s, now),
            of_store: true,
            wear_kept: now,
            wear_kept_bytes: 0,
        }
    }
}

impl Job {
    fn new(uid: u32, name: JobName, device_count: usize) -> Self {
        Self {
            uid,
            name,
            session_count: 0,
            dropped: false,
            counts: Counts::default(),
            written_bytes: vec![0; device_count],
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
