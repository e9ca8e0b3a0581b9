//! Two snapshots of a daemon as a table.

use std::time::Duration;

use offload_support::units::{ApproxBytes, ApproxTime, CountOf};
use offloadd::core::{CommitState, DeviceStatus};
use offloadd::metrics::{DeviceView, JobView, Latencies, Snapshot};
use offloadd::store::catalog::Phase;

use super::between::{TransferRates, before_of_device, before_of_job, continued, since};
use super::users::{self, UserLine, quota_columns, quota_titles};

pub(super) fn table(before: &Snapshot, now: &Snapshot) -> Vec<String> {
    let (before, seconds) = continued(before, now);
    let mut lines = vec![format!(
        "offloadd up {}, {}, host memory {} of {}",
        ApproxTime(now.uptime),
        CountOf(now.session_count, "session"),
        ApproxBytes(now.arena_used_bytes),
        ApproxBytes(now.arena_bytes_max)
    )];
    if let Some(why) = &now.read_only {
        lines.push(format!("READ-ONLY: {why}"));
    }
    lines.push(String::new());
    lines.push(format!(
        "{:<32} {:>9} {:>9} {:>5} {:>5} {:>17} {:>17} {:>13}",
        "device",
        "read",
        "write",
        "busy",
        "queue",
        "read p50/p99",
        "write p50/p99",
        "total written"
    ));
    for device in &now.devices {
        let earlier = before_of_device(before, device);
        let moved = TransferRates::between(earlier.map(|d| &d.counts), &device.counts, seconds);
        let busy = device
            .busy
            .saturating_sub(earlier.map_or(Duration::ZERO, |d| d.busy));
        let line = format!(
            "{:<32} {:>9} {:>9} {:>5} {:>5} {:>17} {:>17} {:>13}  {}",
            tail(&device.state.path, 32),
            rate(moved.read_bytes_per_s),
            rate(moved.written_bytes_per_s),
            percent(busy.as_secs_f64() / seconds),
            device.queue_depth,
            moved.read.halves(),
            moved.written.halves(),
            total(device.counts.written.bytes),
            device_notes(device).join(", ")
        );
        lines.push(line.trim_end().to_owned());
    }
    let users = users::users(before, now, seconds);
    lines.extend(users_at_work(&users));
    lines.push(String::new());
    lines.push(format!(
        "{:<32} {:>9} {:>9} {:>6} {:>6} {:>9} {:>7} {:>10} {:>13}  blocked on",
        "job",
        "read",
        "write",
        "weight",
        "actual",
        "slots",
        "commit",
        "generation",
        "total written"
    ));
    let mut idle_count = 0;
    for job in &now.jobs {
        if job.state.session_count == 0 {
            idle_count += 1;
            continue;
        }
        let earlier = before_of_job(before, job);
        let moved = TransferRates::between(earlier.map(|j| &j.counts), &job.counts, seconds);
        let commits = since(earlier.map(|j| &j.commits), &job.commits);
        // Commits are rare: without one in this interval, the median is over all since the daemon's start.
        let commits = if commits.count() > 0 {
            &commits
        } else {
            &job.commits
        };
        let name = format!("{} (uid {})", job.state.job, job.state.uid);
        let line = format!(
            "{:<32} {:>9} {:>9} {:>6} {:>6} {:>9} {:>7} {:>10} {:>13}  {}",
            tail(&name, 32),
            rate(moved.read_bytes_per_s),
            rate(moved.written_bytes_per_s),
            job.state.weights.job,
            actual(users::fraction_of(&users, job.state.uid, &moved)),
            format!("{}/{}", job.state.slot_used_count, job.state.slot_count),
            commits.quantile(0.5).map_or("-".into(), time),
            job.state.newest_generation,
            total(job.counts.written.bytes),
            blocked_on(job, now)
        );
        lines.push(line.trim_end().to_owned());
    }
    if idle_count > 0 {
        let jobs = CountOf(idle_count, "job");
        lines.push(format!("{jobs} in the store without a session"));
    }
    lines
}

/// Formats the users with sessions, each beside all others; nothing if there are none.
fn users_at_work(users: &[UserLine]) -> Vec<String> {
    let at_work = users.iter().filter(|user| user.state.session_count > 0);
    let mut lines: Vec<_> = at_work
        .map(|user| {
            format!(
                "{:<32} {:>9} {:>9} {:>6} {:>6} {}",
                format!("uid {}", user.state.uid),
                rate(user.read_bytes_per_s),
                rate(user.written_bytes_per_s),
                user.state.weight,
                actual(user.actual),
                quota_columns(user.state)
            )
        })
        .collect();
    if !lines.is_empty() {
        let head = format!(
            "{:<32} {:>9} {:>9} {:>6} {:>6} {}",
            "user",
            "read",
            "write",
            "weight",
            "actual",
            quota_titles()
        );
        lines.splice(0..0, [String::new(), head]);
    }
    lines
}

trait Halves {
    /// Median and 99th percentile.
    fn halves(&self) -> String;
}

impl Halves for Latencies {
    fn halves(&self) -> String {
        match (self.quantile(0.5), self.quantile(0.99)) {
            (Some(p50), Some(p99)) => format!("{}/{}", time(p50), time(p99)),
            _ => "-".into(),
        }
    }
}

fn device_notes(device: &DeviceView) -> Vec<String> {
    let counts = &device.counts;
    let directions = [&counts.read, &counts.written, &counts.flushed];
    let failed: u64 = directions.iter().map(|traffic| traffic.failed_count).sum();
    let mut notes = Vec::new();
    notes.extend(device.trouble.as_ref().map(|why| format!("TROUBLE: {why}")));
    if device.slow {
        let state = &device.state;
        notes.push(format!(
            "SLOW (measured {} read, {} written)",
            rate(state.read_bytes_per_s as f64),
            rate(state.write_bytes_per_s as f64)
        ));
    }
    let DeviceStatus {
        phase,
        left_bytes,
        stuck,
        ..
    } = &device.state.status;
    if let Some(Phase::Filling | Phase::Draining) = phase {
        let what = match phase {
            Some(Phase::Draining) => "drained",
            _ => "filled",
        };
        notes.push(format!("{what}, {} to move", ApproxBytes(*left_bytes)));
        match (stuck, device.state.status.is_stuck()) {
            (Some(why), true) => notes.push(format!("STUCK: {why}")),
            (Some(why), false) => notes.push(why.clone()),
            (None, _) => {}
        }
    }
    if failed > 0 {
        notes.push(format!("{failed} FAILED"));
    }
    if device.damaged_count > 0 {
        notes.push(CountOf(device.damaged_count, "DAMAGED tile").to_string());
    }
    notes
}

/// Names what a job's sessions wait for; "-" if the daemon has no request of theirs.
pub(super) fn blocked_on(job: &JobView, now: &Snapshot) -> String {
    let state = &job.state;
    let mut waits = Vec::new();
    if now.read_only.is_some() {
        // Reads continue. Resuming the job does not help.
        waits.push("a restart of offloadd: the store is read-only".into());
    } else if state.poisoned {
        return "resuming: a flush or a record FAILED".into();
    }
    if state.reading_count > 0 {
        waits.push(CountOf(state.reading_count, "read").to_string());
    }
    if state.writing_count > 0 {
        waits.push(CountOf(state.writing_count, "write").to_string());
    }
    match state.commit {
        CommitState::None => {}
        CommitState::Gathering {
            ranks_called,
            ranks,
        } => waits.push(format!("commit ({ranks_called} of {ranks} ranks)")),
        CommitState::Writing => waits.push("commit (writing the record)".into()),
    }
    match waits.is_empty() {
        true => "-".into(),
        false => waits.join(", "),
    }
}

/// "6.20 GB/s", "31.0 MB/s", "-".
fn rate(bytes_per_s: f64) -> String {
    match bytes_per_s {
        none if none < 1.0 => "-".into(),
        small if small < 1e6 => format!("{:.1} kB/s", small / 1e3),
        middle if middle < 1e9 => format!("{:.1} MB/s", middle / 1e6),
        large if large < 1e10 => format!("{:.2} GB/s", large / 1e9),
        larger => format!("{:.1} GB/s", larger / 1e9),
    }
}

/// "12.3 TB": decimal units, as vendors rate drives.
fn total(bytes: u64) -> String {
    match bytes as f64 {
        mb if mb < 1e9 => format!("{:.1} MB", mb / 1e6),
        gb if gb < 1e12 => format!("{:.1} GB", gb / 1e9),
        tb => format!("{:.1} TB", tb / 1e12),
    }
}

/// Three digits: "85.2us", "1.30ms", "12.0s".
fn time(time: Duration) -> String {
    let us = time.as_secs_f64() * 1e6;
    let (value, unit) = match us {
        us if us < 1e3 => (us, "us"),
        us if us < 1e6 => (us / 1e3, "ms"),
        us => (us / 1e6, "s"),
    };
    let digits = match value {
        v if v < 10.0 => 2,
        v if v < 100.0 => 1,
        _ => 0,
    };
    format!("{value:.digits$}{unit}")
}

fn percent(fraction: f64) -> String {
    format!("{:.0}%", 100.0 * fraction.clamp(0.0, 1.0))
}

/// "75%", or "-" if no bytes were moved.
fn actual(fraction: Option<f64>) -> String {
    fraction.map_or("-".into(), percent)
}

/// Shortens a long name to its end, where paths differ.
fn tail(name: &str, chars_max: usize) -> String {
    let count = name.chars().count();
    if count <= chars_max {
        return name.into();
    }
    let end: String = name.chars().skip(count - chars_max + 2).collect();
    format!("..{end}")
}
