//! Two looks at a daemon as a table for people and as JSON for programs.

use std::fmt::Write;
use std::time::Duration;

use offloadd::core::{CommitState, Standing};
use offloadd::metrics::{Counts, DeviceView, JobView, Latencies, Snapshot, Traffic};
use offloadd::store::catalog::Phase;
use serde_json::{Value, json};

use super::users;
use crate::cli::binary;
use crate::cli::long_work::clock;

/// The table, lines of plain text.
pub(super) fn draw(before: &Snapshot, now: &Snapshot) -> String {
    let (before, seconds) = continued(before, now);
    let mut text = String::new();
    let (sessions, s) = plural(now.session_count);
    let _ = writeln!(
        text,
        "offloadd up {}, {sessions} session{s}, host memory {} of {}",
        clock(now.uptime),
        binary(now.arena_used_bytes),
        binary(now.arena_bytes_max)
    );
    let _ = writeln!(
        text,
        "\n{:<32} {:>9} {:>9} {:>5} {:>5} {:>17} {:>17} {:>13}",
        "device", "read", "write", "busy", "queue", "read p50/p99", "write p50/p99", "written ever"
    );
    for device in &now.devices {
        let earlier = before_of_device(before, device);
        let moved = Moved::between(earlier.map(|d| &d.counts), &device.counts, seconds);
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
            worn(device.worn_bytes, device.rated_bytes),
            device_notes(device).join(", ")
        );
        let _ = writeln!(text, "{}", line.trim_end());
    }
    let users = users::users(before, now, seconds);
    text += &users::draw(&users);
    let _ = writeln!(
        text,
        "\n{:<32} {:>9} {:>9} {:>5} {:>4} {:>9} {:>7} {:>6} {:>12}  waits for",
        "job", "read", "write", "share", "got", "slots", "commit", "step", "written ever"
    );
    let mut idle_count = 0;
    for job in &now.jobs {
        if job.state.session_count == 0 {
            idle_count += 1;
            continue;
        }
        let earlier = before_of_job(before, job);
        let moved = Moved::between(earlier.map(|j| &j.counts), &job.counts, seconds);
        let commits = since(earlier.map(|j| &j.commits), &job.commits);
        // Commits are rare: those since the start say more than none of this second.
        let commits = if commits.count() > 0 {
            &commits
        } else {
            &job.commits
        };
        let name = format!("{} (uid {})", job.state.job, job.state.uid);
        let line = format!(
            "{:<32} {:>9} {:>9} {:>5} {:>4} {:>9} {:>7} {:>6} {:>12}  {}",
            tail(&name, 32),
            rate(moved.read_bytes_per_s),
            rate(moved.written_bytes_per_s),
            job.state.shares.job,
            got(users::part_of(&users, job.state.uid, &moved)),
            format!("{}/{}", job.state.slot_used_count, job.state.slot_count),
            commits.quantile(0.5).map_or("-".into(), time),
            job.state.newest_generation,
            worn(job.worn_bytes, None),
            waits_for(job)
        );
        let _ = writeln!(text, "{}", line.trim_end());
    }
    if idle_count > 0 {
        let (count, s) = plural(idle_count);
        let _ = writeln!(text, "{count} job{s} in the store without a process");
    }
    text
}

/// The same and more, for programs.
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
            "busy_share": busy.as_secs_f64() / seconds,
            "queue_depth": device.queue_depth,
            "queue_depth_max": device.queue_depth_max,
            "flushed": traffic(&device.counts.flushed),
            "slow": device.slow,
            "worn_bytes": device.worn_bytes,
            "rated_bytes": device.rated_bytes,
            "damaged_count": device.damaged_count,
            "data_bytes": device.state.data_bytes,
            "free_bytes": device.state.free_bytes,
            "left_bytes": device.state.standing.left_bytes,
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
            "damaged_count": job.damaged_count,
            "slot_count": state.slot_count,
            "slot_used_count": state.slot_used_count,
            "user_share": state.shares.user,
            "share": state.shares.job,
            "got_of_user": users::part_of(&users, state.uid, &moved),
            "reading_count": state.reading_count,
            "writing_count": state.writing_count,
            "waits_for": waits_for(job),
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
        "move_bytes_per_s_max": now.move_bytes_per_s_max,
        "devices": devices.collect::<Vec<_>>(),
        "users": users.iter().map(users::User::json).collect::<Vec<_>>(),
        "jobs": jobs.collect::<Vec<_>>(),
    })
}

/// What was moved between two looks.
pub(super) struct Moved {
    pub(super) read_bytes_per_s: f64,
    pub(super) written_bytes_per_s: f64,
    read: Latencies,
    written: Latencies,
}

impl Moved {
    pub(super) fn bytes_per_s(&self) -> f64 {
        self.read_bytes_per_s + self.written_bytes_per_s
    }

    pub(super) fn between(before: Option<&Counts>, now: &Counts, seconds: f64) -> Self {
        let rate = |way: fn(&Counts) -> &Traffic| {
            let earlier = before.map_or(0, |before| way(before).bytes);
            way(now).bytes.saturating_sub(earlier) as f64 / seconds
        };
        let latencies = |way: fn(&Counts) -> &Traffic| {
            since(
                before.map(|before| &way(before).latencies),
                &way(now).latencies,
            )
        };
        Self {
            read_bytes_per_s: rate(|counts| &counts.read),
            written_bytes_per_s: rate(|counts| &counts.written),
            read: latencies(|counts| &counts.read),
            written: latencies(|counts| &counts.written),
        }
    }

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

/// Since the daemon started.
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

fn ns(latencies: &Latencies, share: f64) -> Option<u64> {
    let time = latencies.quantile(share)?;
    Some(time.as_nanos() as u64)
}

fn since(before: Option<&Latencies>, now: &Latencies) -> Latencies {
    before.map_or_else(|| now.clone(), |before| now.since(before))
}

/// The look before, and how long ago it was. Another daemon may have started in between: then everything counts from its
/// start.
fn continued<'a>(before: &'a Snapshot, now: &Snapshot) -> (Option<&'a Snapshot>, f64) {
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

fn device_notes(device: &DeviceView) -> Vec<String> {
    let counts = &device.counts;
    let ways = [&counts.read, &counts.written, &counts.flushed];
    let failed: u64 = ways.iter().map(|traffic| traffic.failed_count).sum();
    let mut notes = Vec::new();
    if device.slow {
        let state = &device.state;
        notes.push(format!(
            "SLOW (measured {} read, {} written)",
            rate(state.read_bytes_per_s as f64),
            rate(state.write_bytes_per_s as f64)
        ));
    }
    let Standing {
        phase, left_bytes, ..
    } = &device.state.standing;
    if let Some(Phase::Filling | Phase::Draining) = phase {
        let what = match phase {
            Some(Phase::Draining) => "drained",
            _ => "filled",
        };
        notes.push(format!("{what}, {} to move", binary(*left_bytes)));
    }
    if failed > 0 {
        notes.push(format!("{failed} FAILED"));
    }
    if device.damaged_count > 0 {
        let (count, s) = plural(device.damaged_count);
        notes.push(format!("{count} DAMAGED tile{s}"));
    }
    notes
}

/// What a job's processes cannot go on without; "-" when the daemon has nothing of theirs.
fn waits_for(job: &JobView) -> String {
    let state = &job.state;
    if state.poisoned {
        return "a new resume: a flush or a record FAILED".into();
    }
    let mut waits = Vec::new();
    if state.reading_count > 0 {
        let (count, s) = plural(state.reading_count);
        waits.push(format!("{count} read{s}"));
    }
    if state.writing_count > 0 {
        let (count, s) = plural(state.writing_count);
        waits.push(format!("{count} write{s}"));
    }
    match state.commit {
        CommitState::None => {}
        CommitState::Gathering {
            ranks_called,
            ranks,
        } => waits.push(format!("commit ({ranks_called} of {ranks} ranks)")),
        CommitState::Writing => waits.push("commit (its record)".into()),
    }
    match waits.is_empty() {
        true => "-".into(),
        false => waits.join(", "),
    }
}

/// "6.20 GB/s", "31.0 MB/s", "-".
pub(super) fn rate(bytes_per_s: f64) -> String {
    match bytes_per_s {
        none if none < 1.0 => "-".into(),
        small if small < 1e6 => format!("{:.1} kB/s", small / 1e3),
        middle if middle < 1e9 => format!("{:.1} MB/s", middle / 1e6),
        large => format!("{:.2} GB/s", large / 1e9),
    }
}

/// "12.3 TB 2%": as the makers of drives count.
fn worn(bytes: u64, rated_bytes: Option<u64>) -> String {
    let bytes = bytes as f64;
    let written = match bytes {
        mb if mb < 1e9 => format!("{:.1} MB", mb / 1e6),
        gb if gb < 1e12 => format!("{:.1} GB", gb / 1e9),
        tb => format!("{:.1} TB", tb / 1e12),
    };
    match rated_bytes {
        None => written,
        Some(rated) => format!("{written} {:.0}%", 100.0 * bytes / rated as f64),
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

pub(super) fn percent(part: f64) -> String {
    format!("{:.0}%", 100.0 * part.clamp(0.0, 1.0))
}

/// "75%", "-" where nothing was moved.
pub(super) fn got(part: Option<f64>) -> String {
    part.map_or("-".into(), percent)
}

/// The end of a long name: paths differ there.
fn tail(name: &str, chars_max: usize) -> String {
    let count = name.chars().count();
    if count <= chars_max {
        return name.into();
    }
    let end: String = name.chars().skip(count - chars_max + 2).collect();
    format!("..{end}")
}

fn plural(count: u64) -> (u64, &'static str) {
    (count, if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use offload_api::BLOCK_BYTES;
    use offloadd::core::{DeviceState, JobState, Shares};
    use offloadd::store::definition::JobName;

    use super::*;

    fn traffic_of(bytes: u64, count: u64, ns: u64) -> Traffic {
        let mut latencies = Latencies::default();
        (0..count).for_each(|_| latencies.record(ns));
        Traffic {
            bytes,
            latencies,
            ..Traffic::default()
        }
    }

    /// After so many seconds of 6.2 GB/s read and 320 MB/s written on the first device, of one job.
    fn look(seconds: u64) -> Snapshot {
        let device = |path: &str, counts: Counts, slow| DeviceView {
            state: DeviceState {
                path: path.into(),
                block_bytes: BLOCK_BYTES,
                data_bytes: 1 << 40,
                free_bytes: 1 << 39,
                read_bytes_per_s: 6_200_000_000,
                write_bytes_per_s: 3_200_000_000,
                standing: Standing::settled(0),
            },
            counts,
            queue_depth: 12,
            queue_depth_max: 64,
            busy: Duration::from_millis(750 * seconds),
            slow,
            worn_bytes: 12_300_000_000_000,
            rated_bytes: slow.then_some(600_000_000_000_000),
            damaged_count: u64::from(slow),
        };
        let counts = Counts {
            read: traffic_of(6_200_000_000 * seconds, 100 * seconds, 1_200_000),
            written: traffic_of(320_000_000 * seconds, 100 * seconds, 85_000),
            flushed: Traffic::default(),
        };
        let job = |name: &str, session_count, commit| JobView {
            state: JobState {
                uid: 1000,
                job: JobName::new(name).unwrap(),
                job_id: Some(1),
                reserved_bytes: 1 << 30,
                session_count,
                arena_bytes: 1 << 30,
                slot_count: 64,
                slot_used_count: 9,
                shares: Shares {
                    user: 300,
                    job: 200,
                },
                reading_count: 8,
                writing_count: 1,
                commit,
                newest_generation: 41,
                working_generation: 42,
                poisoned: false,
            },
            counts: counts.clone(),
            commits: traffic_of(0, 41, 23_000_000).latencies,
            commit_failed_count: 0,
            worn_bytes: 1_500_000_000,
            damaged_count: 0,
        };
        let gathering = CommitState::Gathering {
            ranks_called: 3,
            ranks: 8,
        };
        let failing = Counts {
            read: Traffic {
                failed_count: 2,
                ..Traffic::default()
            },
            ..Counts::default()
        };
        Snapshot {
            uptime: Duration::from_secs(3700 + seconds),
            arena_used_bytes: 3 << 29,
            arena_bytes_max: 64 << 30,
            session_count: 1,
            move_bytes_per_s_max: None,
            devices: vec![
                device("/mnt/nvme0/offloadd.tiles", counts.clone(), false),
                device(
                    "/srv/a/very/long/folder/nvme1/offloadd.tiles",
                    failing,
                    true,
                ),
            ],
            jobs: vec![job("llama", 1, gathering), job("old", 0, CommitState::None)],
        }
    }

    #[test]
    fn the_table_shows_rates_latencies_trouble_and_what_jobs_wait_for() {
        let expected = "\
offloadd up 1h01m, 1 session, host memory 1.5 GiB of 64.0 GiB

device                                read     write  busy queue      read p50/p99     write p50/p99  written ever
/mnt/nvme0/offloadd.tiles        6.20 GB/s 320.0 MB/s   75%    12     1.31ms/1.31ms     90.1us/90.1us       12.3 TB
..ng/folder/nvme1/offloadd.tiles         -         -   75%    12                 -                 -    12.3 TB 2%  SLOW (measured 6.20 GB/s read, 3.20 GB/s written), 2 FAILED, 1 DAMAGED tile

job                                   read     write share  got     slots  commit   step written ever  waits for
llama (uid 1000)                 6.20 GB/s 320.0 MB/s   200  50%      9/64  23.1ms     41       1.5 GB  8 reads, 1 write, commit (3 of 8 ranks)
1 job in the store without a process
";
        let drawn = draw(&look(10), &look(12));
        assert_eq!(drawn, expected, "\n{drawn}");
    }

    #[test]
    fn json_says_the_same_in_numbers() {
        let value = json(&look(10), &look(12));
        assert_eq!(value["interval_s"], 2.0);
        let device = &value["devices"][0];
        assert_eq!(device["read_bytes_per_s"], 6.2e9);
        assert_eq!(device["read"]["bytes"], 6_200_000_000u64 * 12);
        assert_eq!(device["read"]["count"], 1200);
        assert_eq!(device["busy_share"], 0.75);
        let p50 = device["written_latency_ns_p50"].as_u64().unwrap();
        assert!((85_000..96_000).contains(&p50), "{p50}");
        assert_eq!(value["devices"][1]["slow"], true);
        assert_eq!(value["devices"][1]["read"]["failed_count"], 2);
        assert_eq!(value["devices"][1]["read_latency_ns_p50"], Value::Null);
        let job = &value["jobs"][0];
        assert_eq!(job["waits_for"], "8 reads, 1 write, commit (3 of 8 ranks)");
        assert_eq!(
            (&job["newest_generation"], &job["commit_count"]),
            (&json!(41), &json!(41))
        );
        assert_eq!(value["jobs"].as_array().unwrap().len(), 2);
    }

    /// Two users: of what the drive moved one got three quarters with two jobs, the other a quarter.
    fn shared(seconds: u64) -> Snapshot {
        let mut look = look(seconds);
        look.session_count = 3;
        let job = |uid, name: &str, shares: [u32; 2], bytes_per_s: u64| {
            let mut job = look.jobs[0].clone();
            job.state.uid = uid;
            job.state.job = JobName::new(name).unwrap();
            let [user, own] = shares;
            job.state.shares = Shares { user, job: own };
            job.counts = Counts {
                read: traffic_of(bytes_per_s * seconds, seconds, 1_200_000),
                ..Counts::default()
            };
            job
        };
        look.jobs = vec![
            job(1000, "llama", [300, 200], 4_000_000_000),
            job(1000, "trial", [300, 100], 2_000_000_000),
            job(1001, "gpt", [100, 100], 2_000_000_000),
        ];
        look.devices[0].counts.read = traffic_of(8_000_000_000 * seconds, 3 * seconds, 1_200_000);
        look.devices[0].counts.written = Traffic::default();
        look
    }

    #[test]
    fn who_got_what_stands_beside_the_shares_where_there_are_several() {
        let drawn = draw(&shared(10), &shared(12));
        let (_, users) = drawn.split_once("\nuser").unwrap();
        let expected = "
user                                  read     write share  got  sessions
uid 1000                         6.00 GB/s         -   300  75%         2
uid 1001                         2.00 GB/s         -   100  25%         1

job                                   read     write share  got     slots  commit   step written ever  waits for
llama (uid 1000)                 4.00 GB/s         -   200  67%      9/64  23.1ms     41       1.5 GB  8 reads, 1 write, commit (3 of 8 ranks)
trial (uid 1000)                 2.00 GB/s         -   100  33%      9/64  23.1ms     41       1.5 GB  8 reads, 1 write, commit (3 of 8 ranks)
gpt (uid 1001)                   2.00 GB/s         -   100 100%      9/64  23.1ms     41       1.5 GB  8 reads, 1 write, commit (3 of 8 ranks)
";
        assert_eq!(format!("\nuser{users}"), expected, "\n{drawn}");
        let value = json(&shared(10), &shared(12));
        let user = &value["users"][0];
        assert_eq!((&user["uid"], &user["share"]), (&json!(1000), &json!(300)));
        assert_eq!(
            (&user["got"], &user["session_count"]),
            (&json!(0.75), &json!(2))
        );
        let trial = &value["jobs"][1];
        assert_eq!(
            (&trial["share"], &trial["user_share"]),
            (&json!(100), &json!(300))
        );
        assert_eq!(trial["got_of_user"], 1.0 / 3.0);
        // Nothing was moved: nobody got anything of it.
        let value = json(&shared(10), &shared(10));
        assert_eq!(value["users"][0]["got"], Value::Null);
    }

    #[test]
    fn a_daemon_that_started_again_in_between_counts_from_its_start() {
        let mut fresh = look(3);
        fresh.uptime = Duration::from_secs(3);
        let value = json(&look(10), &fresh);
        assert_eq!(value["interval_s"], 3.0);
        assert_eq!(value["devices"][0]["read_bytes_per_s"], 6.2e9);
    }
}
