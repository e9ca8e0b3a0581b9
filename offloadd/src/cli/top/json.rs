//! Two snapshots of a daemon as JSON: what the table shows and more.

use std::time::Duration;

use offloadd::metrics::samples::{self, Sample, SampleOwner, Value as Number};
use offloadd::metrics::{Counts, Latencies, Snapshot, Traffic};
use serde_json::{Value, json};

use super::between::{TransferRates, before_of_device, before_of_job, continued};
use super::table::blocked_on;
use super::users::{self, UserLine};

pub(super) fn json(before: &Snapshot, now: &Snapshot) -> Value {
    let (before, seconds) = continued(before, now);
    let devices = now.devices.iter().map(|device| {
        let earlier = before_of_device(before, device);
        let moved = TransferRates::between(earlier.map(|d| &d.counts), &device.counts, seconds);
        let mut value = moved.json(&device.counts);
        let busy = device
            .busy
            .saturating_sub(earlier.map_or(Duration::ZERO, |d| d.busy));
        let more = json!({
            "device": device.state.path,
            "busy_fraction": busy.as_secs_f64() / seconds,
            "flushed": traffic(&device.counts.flushed),
            "trouble": device.trouble,
            "phase": device.state.status.phase_name(),
            "stuck": device.state.status.stuck,
        });
        merge(&mut value, more);
        merge(&mut value, numbers(samples::DEVICE, device));
        value
    });
    let users = users::users(before, now, seconds);
    let jobs = now.jobs.iter().map(|job| {
        let earlier = before_of_job(before, job);
        let moved = TransferRates::between(earlier.map(|j| &j.counts), &job.counts, seconds);
        let mut value = moved.json(&job.counts);
        let state = &job.state;
        let more = json!({
            "job": state.job.as_str(),
            "uid": state.uid,
            "actual": users::fraction_of(&users, state.uid, &moved),
            "blocked_on": blocked_on(job, now),
            "commit_count": job.commits.count(),
            "commit_ns_p50": ns(&job.commits, 0.5),
            "commit_ns_p99": ns(&job.commits, 0.99),
        });
        merge(&mut value, more);
        merge(&mut value, numbers(samples::JOB, job));
        value
    });
    let mut value = json!({
        "uptime_s": now.uptime.as_secs_f64(),
        "interval_s": seconds,
        "read_only": now.read_only,
        "devices": devices.collect::<Vec<_>>(),
        "users": users.iter().map(user).collect::<Vec<_>>(),
        "jobs": jobs.collect::<Vec<_>>(),
    });
    merge(&mut value, numbers(samples::DAEMON, now));
    value
}

fn user(user: &UserLine) -> Value {
    let mut value = json!({
        "uid": user.state.uid,
        "read_bytes_per_s": user.read_bytes_per_s,
        "written_bytes_per_s": user.written_bytes_per_s,
        "actual": user.actual,
    });
    merge(&mut value, numbers(samples::USER, user.state));
    value
}

/// Numbers of a device, a user, a job or the daemon, by name; `null` if unknown.
pub(in crate::cli) fn numbers<T: SampleOwner>(samples: &[Sample<T>], of: &T) -> Value {
    let printed = samples.iter().filter(|sample| sample.in_json);
    let numbers = printed.map(|sample| {
        let value = match (sample.value)(of) {
            Number::Count(count) => json!(count),
            Number::Flag(is_set) => json!(is_set),
            Number::Time(time) => json!(time.as_secs_f64()),
        };
        (sample.key.to_owned(), value)
    });
    Value::Object(numbers.collect())
}

impl TransferRates {
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
