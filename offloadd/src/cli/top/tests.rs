//! A pair of snapshots as a table and as JSON.

use std::time::Duration;

use offload_api::BLOCK_BYTES;
use offloadd::core::{CommitState, DeviceState, DeviceStatus, JobState, UserState};
use offloadd::metrics::{Counts, DeviceView, JobView, Latencies, Snapshot, Traffic};
use offloadd::quota::Weights;
use offloadd::store::catalog::Phase;
use offloadd::store::definition::JobName;
use serde_json::{Value, json};

use super::json::json;
use super::table::table;

fn draw(before: &Snapshot, now: &Snapshot) -> String {
    super::lines_of(&table(before, now))
}

fn traffic_of(bytes: u64, count: u64, ns: u64) -> Traffic {
    let mut latencies = Latencies::default();
    (0..count).for_each(|_| latencies.record(ns));
    Traffic {
        bytes,
        latencies,
        ..Traffic::default()
    }
}

/// After `seconds` in which one job read 6.2 GB/s and wrote 320 MB/s on the first device.
fn snapshot_after(seconds: u64) -> Snapshot {
    let device = |path: &str, counts: Counts, slow| {
        let state = DeviceState {
            path: path.into(),
            block_bytes: BLOCK_BYTES,
            data_bytes: 1 << 40,
            free_bytes: 1 << 39,
            read_bytes_per_s: 6_200_000_000,
            write_bytes_per_s: 3_200_000_000,
            status: DeviceStatus::settled(0),
        };
        DeviceView {
            queue_depth: 12,
            queue_depth_max: 64,
            busy: Duration::from_millis(750 * seconds),
            slow,
            damaged_count: u64::from(slow),
            ..DeviceView::new(state, counts)
        }
    };
    let counts = Counts {
        read: traffic_of(6_200_000_000 * seconds, 100 * seconds, 1_200_000),
        written: traffic_of(320_000_000 * seconds, 100 * seconds, 85_000),
        flushed: Traffic::default(),
    };
    let job = |name: &str, session_count, commit| {
        let state = JobState {
            reserved_bytes: 1 << 30,
            session_count,
            arena_bytes: 1 << 30,
            slot_count: 64,
            slot_used_count: 9,
            weights: Weights {
                user: 300,
                job: 200,
            },
            reading_count: 8,
            writing_count: 1,
            commit,
            newest_generation: 41,
            working_generation: 42,
            ..JobState::new(1000, JobName::new(name).unwrap())
        };
        JobView {
            commits: traffic_of(0, 41, 23_000_000).latencies,
            ..JobView::new(state, counts.clone())
        }
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
        rebalance_bytes_per_s_max: None,
        read_only: None,
        devices: vec![
            device("/mnt/nvme0/offloadd.tiles", counts.clone(), false),
            device(
                "/srv/a/very/long/directory/nvme1/offloadd.tiles",
                failing,
                true,
            ),
        ],
        users: vec![UserState {
            uid: 1000,
            weight: 300,
            host_bytes: 1 << 30,
            host_bytes_max: Some(32 << 30),
            device_bytes: 2 << 30,
            device_bytes_max: None,
            session_count: 1,
            sessions_max: 32,
            job_count: 2,
            jobs_max: 256,
        }],
        jobs: vec![job("llama", 1, gathering), job("old", 0, CommitState::None)],
    }
}

#[test]
fn the_table_shows_rates_latencies_trouble_and_what_jobs_are_blocked_on() {
    let expected = "\
offloadd up 1h01m, 1 session, host memory 1.5 GiB of 64.0 GiB

device                                read     write  busy queue      read p50/p99     write p50/p99 total written
/mnt/nvme0/offloadd.tiles        6.20 GB/s 320.0 MB/s   75%    12     1.31ms/1.31ms     90.1us/90.1us        3.8 GB
..directory/nvme1/offloadd.tiles         -         -   75%    12                 -                 -        0.0 MB  SLOW (measured 6.20 GB/s read, 3.20 GB/s written), 2 FAILED, 1 DAMAGED tile

user                                  read     write weight actual  sessions      jobs         host memory          on devices
uid 1000                         12.4 GB/s 640.0 MB/s    300   100%      1/32     2/256    1.0 GiB/32.0 GiB             2.0 GiB

job                                   read     write weight actual     slots  commit generation total written  blocked on
llama (uid 1000)                 6.20 GB/s 320.0 MB/s    200    50%      9/64  23.1ms         41        3.8 GB  8 reads, 1 write, commit (3 of 8 ranks)
1 job in the store without a session
";
    let drawn = draw(&snapshot_after(10), &snapshot_after(12));
    assert_eq!(drawn, expected, "\n{drawn}");
}

#[test]
fn a_daemon_that_only_reads_says_why_and_no_job_is_told_to_resume() {
    let mut now = snapshot_after(12);
    now.read_only = Some("the store is read-only: /mnt/a takes no writes".into());
    now.jobs[0].state.poisoned = true;
    let drawn = draw(&snapshot_after(10), &now);
    let second = drawn.lines().nth(1).unwrap();
    assert_eq!(
        second,
        "READ-ONLY: the store is read-only: /mnt/a takes no writes"
    );
    let job = drawn.lines().find(|line| line.starts_with("llama"));
    let job = job.unwrap();
    assert!(
        job.ends_with(
            "  a restart of offloadd: the store is read-only, 8 reads, 1 write, commit (3 of 8 ranks)"
        ),
        "{drawn}"
    );
    assert_eq!(
        json(&snapshot_after(10), &now)["read_only"],
        json!(now.read_only)
    );
    // With a store that takes writes, the job itself failed.
    now.read_only = None;
    let drawn = draw(&snapshot_after(10), &now);
    assert!(drawn.contains("  resuming: "), "{drawn}");
    assert!(!drawn.contains("READ-ONLY"), "{drawn}");
}

#[test]
fn a_drain_that_is_stuck_says_why() {
    let mut now = snapshot_after(12);
    now.devices[0].state.status = DeviceStatus {
        number: 3,
        phase: Some(Phase::Draining),
        left_bytes: 3 << 20,
        stuck: Some("the others have no room".into()),
        waits_for_start: false,
    };
    let drawn = draw(&snapshot_after(10), &now);
    let line = drawn.lines().find(|line| line.contains("/mnt/nvme0/"));
    let line = line.unwrap();
    assert!(
        line.ends_with("  drained, 3.0 MiB to move, STUCK: the others have no room"),
        "{line}"
    );
    let device = &json(&snapshot_after(10), &now)["devices"][0];
    assert_eq!(device["phase"], "draining");
    assert_eq!(device["stuck"], "the others have no room");
    // A device that only waits for a start, and one whose tiles move, are not reported as stuck.
    now.devices[0].state.status.waits_for_start = true;
    let drawn = draw(&snapshot_after(10), &now);
    assert!(drawn.contains("to move, the others have"), "{drawn}");
    now.devices[0].state.status.stuck = None;
    assert!(!draw(&snapshot_after(10), &now).contains("STUCK"));
}

#[test]
fn a_device_that_hangs_says_so_first() {
    let mut now = snapshot_after(12);
    now.devices[0].trouble = Some("a flush has not ended for 12 s".into());
    let drawn = draw(&snapshot_after(10), &now);
    let line = drawn.lines().find(|line| line.contains("/mnt/nvme0/"));
    let line = line.unwrap();
    assert!(
        line.contains("TROUBLE: a flush has not ended for 12 s"),
        "{line}"
    );
    let device = &json(&snapshot_after(10), &now)["devices"][0];
    assert_eq!(device["trouble"], "a flush has not ended for 12 s");
}

#[test]
fn json_says_the_same_in_numbers() {
    let value = json(&snapshot_after(10), &snapshot_after(12));
    assert_eq!(value["interval_s"], 2.0);
    let device = &value["devices"][0];
    assert_eq!(device["read_bytes_per_s"], 6.2e9);
    assert_eq!(device["read"]["bytes"], 6_200_000_000u64 * 12);
    assert_eq!(device["read"]["count"], 1200);
    assert_eq!(device["busy_fraction"], 0.75);
    let p50 = device["written_latency_ns_p50"].as_u64().unwrap();
    assert!((85_000..96_000).contains(&p50), "{p50}");
    assert_eq!(value["devices"][1]["slow"], true);
    assert_eq!(value["devices"][1]["read"]["failed_count"], 2);
    assert_eq!(value["devices"][1]["read_latency_ns_p50"], Value::Null);
    let job = &value["jobs"][0];
    assert_eq!(job["blocked_on"], "8 reads, 1 write, commit (3 of 8 ranks)");
    assert_eq!(
        (&job["newest_generation"], &job["commit_count"]),
        (&json!(41), &json!(41))
    );
    assert_eq!(value["jobs"].as_array().unwrap().len(), 2);
}

/// Programs read these names.
#[test]
fn json_keeps_its_names() {
    let value = json(&snapshot_after(10), &snapshot_after(12));
    let names = |value: &Value, names: &str| {
        let missing = |name: &&str| value.get(name).is_none();
        let missing: Vec<&str> = names.split_whitespace().filter(missing).collect();
        assert!(missing.is_empty(), "{missing:?} of {value}");
    };
    names(
        &value,
        "uptime_s interval_s arena_used_bytes arena_bytes_max session_count rebalance_bytes_per_s_max read_only devices users jobs",
    );
    names(
        &value["devices"][0],
        "device read_bytes_per_s written_bytes_per_s read_latency_ns_p50 written_latency_ns_p99 read written flushed busy_fraction \
         queue_depth queue_depth_max slow trouble damaged_count data_bytes free_bytes phase left_bytes stuck \
         waits_for_start measured_read_bytes_per_s measured_write_bytes_per_s",
    );
    names(
        &value["users"][0],
        "uid weight session_count sessions_max job_count jobs_max host_bytes host_bytes_max device_bytes device_bytes_max \
         read_bytes_per_s written_bytes_per_s actual",
    );
    names(
        &value["jobs"][0],
        "job uid session_count arena_bytes reserved_bytes damaged_count slot_count slot_used_count user_weight weight \
         actual reading_count writing_count blocked_on newest_generation working_generation commit_count commit_failed_count \
         commit_ns_p50 commit_ns_p99 poisoned",
    );
}

/// Two users: one moved three quarters of the bytes with two jobs, the other one quarter.
fn shared(seconds: u64) -> Snapshot {
    let mut look = snapshot_after(seconds);
    look.session_count = 3;
    let job = |uid, name: &str, weights: [u32; 2], bytes_per_s: u64| {
        let mut job = look.jobs[0].clone();
        job.state.uid = uid;
        job.state.job = JobName::new(name).unwrap();
        let [user, own] = weights;
        job.state.weights = Weights { user, job: own };
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
    let mut other = look.users[0].clone();
    (other.uid, other.weight) = (1001, 100);
    look.users[0].session_count = 2;
    look.users.push(other);
    look.devices[0].counts.read = traffic_of(8_000_000_000 * seconds, 3 * seconds, 1_200_000);
    look.devices[0].counts.written = Traffic::default();
    look
}

#[test]
fn several_users_have_their_weight_and_actual_fraction() {
    let drawn = draw(&shared(10), &shared(12));
    let (_, jobs) = drawn.split_once("\njob").unwrap();
    let expected = "
job                                   read     write weight actual     slots  commit generation total written  blocked on
llama (uid 1000)                 4.00 GB/s         -    200    67%      9/64  23.1ms         41        0.0 MB  8 reads, 1 write, commit (3 of 8 ranks)
trial (uid 1000)                 2.00 GB/s         -    100    33%      9/64  23.1ms         41        0.0 MB  8 reads, 1 write, commit (3 of 8 ranks)
gpt (uid 1001)                   2.00 GB/s         -    100   100%      9/64  23.1ms         41        0.0 MB  8 reads, 1 write, commit (3 of 8 ranks)
";
    assert_eq!(format!("\njob{jobs}"), expected, "\n{drawn}");
    let value = json(&shared(10), &shared(12));
    let user = &value["users"][0];
    assert_eq!((&user["uid"], &user["weight"]), (&json!(1000), &json!(300)));
    assert_eq!(
        (&user["actual"], &user["session_count"]),
        (&json!(0.75), &json!(2))
    );
    let trial = &value["jobs"][1];
    assert_eq!(
        (&trial["weight"], &trial["user_weight"]),
        (&json!(100), &json!(300))
    );
    assert_eq!(trial["actual"], 1.0 / 3.0);
    let value = json(&shared(10), &shared(10));
    assert_eq!(value["users"][0]["actual"], Value::Null);
}

#[test]
fn a_daemon_that_started_again_in_between_counts_from_its_start() {
    let mut fresh = snapshot_after(3);
    fresh.uptime = Duration::from_secs(3);
    let value = json(&snapshot_after(10), &fresh);
    assert_eq!(value["interval_s"], 3.0);
    assert_eq!(value["devices"][0]["read_bytes_per_s"], 6.2e9);
}

#[test]
fn the_screen_is_never_fuller_than_the_terminal() {
    let looks = super::TopContent::Snapshots(Box::new((snapshot_after(10), snapshot_after(12))));
    let trouble = super::TopContent::Trouble("one\n\nthree".into());
    for rows in 1..30 {
        for columns in [1, 2, 79, 300] {
            for shown in [&looks, &trouble] {
                let screen = shown.on_screen([rows, columns]);
                let lines: Vec<_> = screen.split("\r\n").collect();
                assert!(lines.len() <= rows, "{rows}: {screen:?}");
                let plain = |line: &str| {
                    let line = ["\x1b[H", "\x1b[K", "\x1b[J"]
                        .iter()
                        .fold(line.to_owned(), |line, code| line.replace(code, ""));
                    line.chars().count()
                };
                assert!(
                    lines.iter().all(|line| plain(line) <= columns),
                    "{screen:?}"
                );
            }
        }
    }
    let ended = |rows| looks.on_screen([rows, 80]).contains("Ctrl-C ends");
    assert_eq!([14, 13].map(ended), [true, false]);
    let screen = looks.on_screen([4, 80]);
    assert!(
        screen.contains("and 9 more lines: offloadd top --once"),
        "{screen}"
    );
}
