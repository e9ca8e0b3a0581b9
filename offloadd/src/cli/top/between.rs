//! Differences between two snapshots of a daemon.

use offloadd::metrics::{Counts, DeviceView, JobView, Latencies, Snapshot, Traffic};

/// Returns the earlier snapshot and the seconds since. If the daemon restarted in between, returns no snapshot and the seconds
/// since its start.
pub(super) fn continued<'a>(before: &'a Snapshot, now: &Snapshot) -> (Option<&'a Snapshot>, f64) {
    match now.uptime.checked_sub(before.uptime) {
        Some(between) => (Some(before), between.as_secs_f64().max(1e-3)),
        None => (None, now.uptime.as_secs_f64().max(1e-3)),
    }
}

pub(super) fn before_of_device<'a>(
    before: Option<&'a Snapshot>,
    device: &DeviceView,
) -> Option<&'a DeviceView> {
    let mut devices = before?.devices.iter();
    devices.find(|other| other.state.path == device.state.path)
}

pub(super) fn before_of_job<'a>(
    before: Option<&'a Snapshot>,
    job: &JobView,
) -> Option<&'a JobView> {
    let mut jobs = before?.jobs.iter();
    jobs.find(|other| other.state.uid == job.state.uid && other.state.job == job.state.job)
}

pub(super) struct TransferRates {
    pub(super) read_bytes_per_s: f64,
    pub(super) written_bytes_per_s: f64,
    pub(super) read: Latencies,
    pub(super) written: Latencies,
}

impl TransferRates {
    pub(super) fn bytes_per_s(&self) -> f64 {
        self.read_bytes_per_s + self.written_bytes_per_s
    }

    pub(super) fn between(before: Option<&Counts>, now: &Counts, seconds: f64) -> Self {
        let rate = |direction: fn(&Counts) -> &Traffic| {
            let earlier = before.map_or(0, |before| direction(before).bytes);
            direction(now).bytes.saturating_sub(earlier) as f64 / seconds
        };
        let latencies = |direction: fn(&Counts) -> &Traffic| {
            since(
                before.map(|before| &direction(before).latencies),
                &direction(now).latencies,
            )
        };
        Self {
            read_bytes_per_s: rate(|counts| &counts.read),
            written_bytes_per_s: rate(|counts| &counts.written),
            read: latencies(|counts| &counts.read),
            written: latencies(|counts| &counts.written),
        }
    }
}

pub(super) fn since(before: Option<&Latencies>, now: &Latencies) -> Latencies {
    before.map_or_else(|| now.clone(), |before| now.since(before))
}
