//! Two snapshots of a daemon as JSON: what the table shows and more.

use std::time::Duration;

use offloadd::metrics::{Counts, Latencies, Snapshot, Traffic};
use serde_json::{Value, json};

use super::between::{Moved, before_of_device, before_of_job, continued};
use super::table::blocked_on;
use super::users;

pub(super) fn json(before: &Snapshot, now: &Snapshot) -> Value {
    let (before, seconds) = continued(before, now);
    let devices = now.devices.iter().map(|device| {
        let earlier = before_of_device(before, device);
        let moved = Moved::between(earlier.map(|d| &d.counts), &device.counts, seconds);
        let mut value = moved.json(&device.counts);
        let busy = device
            .busy
            .saturating_sub(earlier.map_or(Duration::ZERO, |d| d.busy));
        let more = json!({
            "device": device.state.path,
            "busy_fraction": busy.as_secs_f64() / seconds,
            "queue_depth": device.queue_depth,
            "queue_depth_max": device.queue_depth_max,
            "flushed": traffic(&device.counts.flushed),
            "slow": device.slow,
            "trouble": device.trouble,
            "worn_bytes": device.worn_bytes,
            "rated_bytes": device.rated_bytes,
            "damaged_count": device.damaged_count,
            "data_bytes": device.state.data_bytes,
            "free_bytes": device.state.free_bytes,
            "phase": device.state.status.phase_name(),
            "left_bytes": device.state.status.left_bytes,
            "stuck": device.state.status.stuck,
            "waits_for_start": device.state.status.waits_for_start,
            "measured_read_bytes_per_s": device.state.read_bytes_per_s,
            "measured_write_bytes_per_s": device.state.write_bytes_per_s,
        });
        merge(&mut value, more);
        value
    });
    let users = users::users(before, now, seconds);
    let jobs = now.jobs.iter().map(|job| {
        let earlier = before_of_job(before, job);
        let moved = Moved::between(earlier.map(|j| &j.counts), &job.counts, seconds);
        let mut value = moved.json(&job.counts);
        let state = &job.state;
        let more = json!({
            "job": state.job.as_str(),
            "uid": state.uid,
            "session_count": state.session_count,
            "arena_bytes": state.arena_bytes,
            "reserved_bytes": state.reserved_bytes,
            "worn_bytes": job.worn_bytes,
            "worn": job.worn.iter().map(|worn| json!({
                "device": path_of(now, worn.number),
                "worn_bytes": worn.bytes,
            })).collect::<Vec<_>>(),
            "damaged_count": job.damaged_count,
            "slot_count": state.slot_count,
            "slot_used_count": state.slot_used_count,
            "user_weight": state.weights.user,
            "weight": state.weights.job,
            "actual": users::fraction_of(&users, state.uid, &moved),
            "reading_count": state.reading_count,
            "writing_count": state.writing_count,
            "blocked_on": blocked_on(job, now),
            "newest_generation": state.newest_generation,
            "working_generation": state.working_generation,
            "commit_count": job.commits.count(),
            "commit_failed_count": job.commit_failed_count,
            "commit_ns_p50": ns(&job.commits, 0.5),
            "commit_ns_p99": ns(&job.commits, 0.99),
            "poisoned": state.poisoned,
        });
        merge(&mut value, more);
        value
    });
    json!({
        "uptime_s": now.uptime.as_secs_f64(),
        "interval_s": seconds,
        "arena_used_bytes": now.arena_used_bytes,
        "arena_bytes_max": now.arena_bytes_max,
        "session_count": now.session_count,
        "rebalance_bytes_per_s_max": now.rebalance_bytes_per_s_max,
        "read_only": now.read_only,
        "devices": devices.collect::<Vec<_>>(),
        "users": users,
        "jobs": jobs.collect::<Vec<_>>(),
    })
}

fn path_of(now: &Snapshot, number: u32) -> Option<&str> {
    let mut devices = now.devices.iter().map(|device| &device.state);
    let found = devices.find(|state| state.status.number == number);
    found.map(|state| state.path.as_str())
}

impl Moved {
    fn json(&self, counts: &Counts) -> Value {
        json!({
            "read_bytes_per_s": self.read_bytes_per_s,
            "written_bytes_per_s": self.written_bytes_per_s,
            "read_latency_ns_p50": ns(&self.read, 0.5),
            "read_latency_ns_p99": ns(&self.read, 0.99),
            "written_latency_ns_p50": ns(&self.written, 0.5),
            "written_latency_ns_p99": ns(&self.written, 0.99),
            "read": traffic(&counts.read),
            "written": traffic(&counts.written),
        })
    }
}

/// Counters since the daemon started.
fn traffic(traffic: &Traffic) -> Value {
    json!({
        "bytes": traffic.bytes,
        "count": traffic.count(),
        "failed_count": traffic.failed_count,
        "retried_count": traffic.retried_count,
        "latency_ns_p50": ns(&traffic.latencies, 0.5),
        "latency_ns_p99": ns(&traffic.latencies, 0.99),
    })
}

fn merge(value: &mut Value, more: Value) {
    let (Value::Object(value), Value::Object(more)) = (value, more) else {
        unreachable!("both are written here");
    };
    value.extend(more);
}

fn ns(latencies: &Latencies, quantile: f64) -> Option<u64> {
    let time = latencies.quantile(quantile)?;
    Some(time.as_nanos() as u64)
}
