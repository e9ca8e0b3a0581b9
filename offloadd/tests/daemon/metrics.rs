//! Compares the daemon's metrics with what was done. What could go wrong: bytes counted twice, for another job or not at all, a commit without its
//! duration, a slow drive that is not named.

use std::io::{BufRead, BufReader};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use offload_api::fault::FaultKind;
use offload_api::ids::SlotIndex;
use offload_api::proto;
use offloadd::metrics::Snapshot;

use crate::common::{
    Control, Daemon, Session, Store, eventually, expect_tiles, fill_tiles, open_sized, program,
    swap_in, swap_out, words,
};

fn snapshot(control: &mut Control) -> Snapshot {
    let reply = control.metrics(proto::MetricsRequest {}).unwrap();
    Snapshot::try_from(reply).unwrap()
}

#[test]
fn what_was_moved_is_what_was_counted_by_device_and_by_job() {
    for engine in ["auto", "psync"] {
        let store = Store::new(2, engine);
        let daemon = store.serve();
        let mut control = daemon.control();
        let mut other = control.session("other");
        let mut tiny = control.session("tiny");
        let (first, second) = (other.begin(&mut control, 2), tiny.begin(&mut control, 6));
        let before = snapshot(&mut control);
        fill_tiles(&mut other, 2, first, 1);
        fill_tiles(&mut tiny, 6, second, 10);
        expect_tiles(&mut tiny, 3, 10);
        tiny.commit(&mut control, second, b"step 1");

        let now = snapshot(&mut control);
        assert!(now.uptime > before.uptime);
        assert_eq!((now.session_count, now.devices.len()), (2, 2));
        assert!(now.arena_used_bytes > 0 && now.arena_used_bytes < now.arena_bytes_max);
        let jobs: Vec<_> = now.jobs.iter().map(|job| job.state.job.as_str()).collect();
        assert_eq!(jobs, ["other", "tiny"]);
        let moved = |job: usize| {
            let counts = &now.jobs[job].counts;
            [&counts.read, &counts.written].map(|traffic| (traffic.bytes / 4096, traffic.count()))
        };
        assert_eq!(moved(0), [(0, 0), (2, 2)]);
        assert_eq!(moved(1), [(3, 3), (6, 6)]);
        let [other, tiny] = [&now.jobs[0], &now.jobs[1]];
        assert_eq!((other.commits.count(), tiny.commits.count()), (0, 1));
        assert!(tiny.commits.sum_ns() > 0);
        assert_eq!(tiny.state.newest_generation, 1);
        assert_eq!(tiny.state.working_generation, 2);
        assert_eq!((tiny.state.slot_count, tiny.state.slot_used_count), (4, 0));
        // The devices moved what the jobs did, plus the commit's record and flushes.
        let sum = |count: fn(&offloadd::metrics::DeviceView) -> u64| {
            let since = now.devices.iter().zip(&before.devices);
            since
                .map(|(now, before)| count(now) - count(before))
                .sum::<u64>()
        };
        assert_eq!(sum(|d| d.counts.read.bytes), 3 * 4096);
        assert_eq!(sum(|d| d.counts.written.bytes), (8 + 2) * 4096);
        assert_eq!(sum(|d| d.counts.written.count()), 8 + 2);
        // The devices that were written to, one or both according to their rates, and the first one for the record.
        let flushed = sum(|d| d.counts.flushed.count());
        assert!((1 + 1..=2 + 1).contains(&flushed), "{flushed}");
        for device in (now.devices.iter()).filter(|d| d.counts.written.bytes > 0) {
            let counts = &device.counts;
            for traffic in [&counts.read, &counts.written, &counts.flushed] {
                assert_eq!(traffic.failed_count, 0);
            }
            assert!(counts.written.latencies.sum_ns() > 0);
            assert_eq!(device.queue_depth, 0);
            assert!(device.queue_depth_max >= 1 && !device.slow);
        }
    }
}

#[test]
fn what_a_job_waits_for_is_seen_while_it_waits() {
    let store = Store::new(1, "auto");
    let mut command = store.serve_command();
    // A tile takes a second.
    command.env("OFFLOADD_RATE_LIMIT", "65536,65536");
    let daemon = Daemon::start(command, store.socket());
    let mut control = daemon.control();
    let reply = control.open_session(open_sized("tiny", 64 << 10)).unwrap();
    let mut session = Session::attach_sized(&reply, 64 << 10).unwrap();
    let working = session.begin_sized(&mut control, 2, 64 << 10);
    let bytes = [7; 64 << 10];
    let place = session.geometry.slot_place(SlotIndex(0)).unwrap();
    session.write_slot(place.offset, &bytes);
    session.submit(swap_out(0, 0, working, &bytes));
    eventually("its write is seen", Duration::from_secs(60), || {
        let job = snapshot(&mut control).jobs.remove(0).state;
        (job.writing_count, job.reading_count, job.slot_used_count) == (1, 0, 1)
    });
    assert_eq!(snapshot(&mut control).devices[0].queue_depth, 1);
    assert_eq!(session.complete().fault, 0);
    session.submit(swap_in(0, 1));
    eventually("its read is seen", Duration::from_secs(60), || {
        let job = snapshot(&mut control).jobs.remove(0).state;
        (job.writing_count, job.reading_count, job.slot_used_count) == (0, 1, 1)
    });
    assert_eq!(session.complete().fault, 0);
    assert_eq!(snapshot(&mut control).jobs[0].state.slot_used_count, 0);
}

#[test]
fn a_report_of_damage_counts_once_and_only_if_it_fits_the_job() {
    let store = Store::new(2, "psync");
    let mut daemon = store.serve();
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    let working = session.begin(&mut control, 2);
    fill_tiles(&mut session, 2, working, 1);
    let damaged = report_of(&mut session, 0);
    let path = &store.devices[damaged.device as usize];
    // Reports that do not fit the job's tiles.
    let changes: [fn(&mut proto::ReportDamageRequest); 6] = [
        |report| report.device += 1,
        |report| report.device = 1000,
        |report| report.offset += 4096,
        |report| report.tile = 1000,
        |report| report.generation += 1,
        |report| report.expected ^= 1,
    ];
    for change in changes {
        let mut wrong = damaged.clone();
        change(&mut wrong);
        let refused = control.report_damage(wrong).unwrap_err();
        assert_eq!(refused.kind, FaultKind::Invalid, "{refused}");
    }
    let mut wrong = damaged.clone();
    wrong.token = vec![9; 16];
    let refused = control.report_damage(wrong).unwrap_err();
    assert_eq!(refused.kind, FaultKind::NotFound);
    assert_eq!(snapshot(&mut control).jobs[0].damaged_count, 0);
    control.report_damage(damaged.clone()).unwrap();
    for _ in 0..20 {
        let refused = control.report_damage(damaged.clone()).unwrap_err();
        assert_eq!(refused.kind, FaultKind::Invalid, "{refused}");
    }
    let seen = snapshot(&mut control);
    assert_eq!(seen.jobs[0].damaged_count, 1);
    let counts = seen.devices.iter().map(|device| device.damaged_count);
    assert_eq!(counts.sum::<u64>(), 1);
    assert_eq!(seen.devices[damaged.device as usize].damaged_count, 1);
    daemon.child.kill().unwrap();
    let log = BufReader::new(daemon.child.stderr.take().unwrap());
    let lines: Vec<String> = log.lines().map(Result::unwrap).collect();
    let told = |what: &str| -> Vec<&String> {
        let lines = lines.iter().filter(|line| line.contains(what));
        lines.collect()
    };
    let [line] = told("a damaged tile")[..] else {
        panic!("{lines:?}");
    };
    let expected = format!("{:08x}", damaged.expected);
    for word in [path.to_str().unwrap(), "tile 0 of job tiny", &expected] {
        assert!(line.contains(word), "{word}: {line}");
    }
}

/// Returns the report of a process that read `tile` and found other bytes.
fn report_of(session: &mut Session, tile: u32) -> proto::ReportDamageRequest {
    session.submit(swap_in(tile, 0));
    let cqe = session.complete();
    assert_eq!(cqe.fault, 0);
    proto::ReportDamageRequest {
        token: session.token.to_vec(),
        device: cqe.device,
        offset: cqe.offset,
        tile,
        generation: cqe.generation,
        expected: cqe.checksum,
        found: !cqe.checksum,
    }
}

#[test]
fn a_device_file_that_is_deleted_or_truncated_while_it_serves_is_told_where_people_look() {
    let store = Store::new(2, "psync");
    let mut daemon = store.serve();
    let mut control = daemon.control();
    let troubles = |control: &mut Control| {
        let devices = snapshot(control).devices.into_iter();
        devices.map(|device| device.trouble).collect::<Vec<_>>()
    };
    assert_eq!(troubles(&mut control), [None, None]);
    std::fs::remove_file(&store.devices[1]).unwrap();
    let [None, Some(trouble)] = &troubles(&mut control)[..] else {
        panic!("nothing is printed");
    };
    assert!(trouble.contains("its file was deleted"), "{trouble}");
    // Without holes: a full file system would fail the copy's writes later.
    let path = store.devices[1].display();
    for what in [
        "cp --sparse=never /proc/",
        &format!("mv NEW {path}"),
        "chmod 600",
    ] {
        assert!(trouble.contains(what), "{what}: {trouble}");
    }
    let mut list = program();
    list.args(["device", "list", "--socket"]);
    let output = list.arg(store.socket()).output().unwrap();
    assert!(
        words(&output).contains("device 1: its file was deleted"),
        "{}",
        words(&output)
    );
    // Cut while it serves, and made as long again by a write behind the cut.
    let cut = std::fs::OpenOptions::new()
        .write(true)
        .open(&store.devices[0])
        .unwrap();
    let length = cut.metadata().unwrap().len();
    for bytes in [length / 2, length] {
        cut.set_len(bytes).unwrap();
        let [Some(trouble), Some(_)] = &troubles(&mut control)[..] else {
            panic!("nothing is printed");
        };
        assert!(trouble.contains("its file was truncated"), "{trouble}");
    }
    // The log has the line once, however long the state lasts.
    eventually("some seconds pass", Duration::from_secs(60), || {
        snapshot(&mut control).uptime > Duration::from_secs(3)
    });
    daemon.child.kill().unwrap();
    let log = BufReader::new(daemon.child.stderr.take().unwrap());
    let lines = log.lines().map(Result::unwrap);
    let told = lines.filter(|line| line.contains("its file was deleted"));
    assert_eq!(told.count(), 1);
}

#[test]
fn any_number_of_metrics_calls_does_not_delay_tiles() {
    let store = Store::new(1, "auto");
    let daemon = store.serve();
    let mut control = daemon.control();
    let mut session = control.session("tiny");
    let working = session.begin(&mut control, 4);
    let answered = AtomicU64::new(0);
    let moving = AtomicBool::new(true);
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                let mut control = daemon.control();
                while moving.load(Ordering::Relaxed) {
                    assert_eq!(snapshot(&mut control).jobs.len(), 1);
                    answered.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(1) {
            fill_tiles(&mut session, 4, working, 3);
        }
        moving.store(false, Ordering::Relaxed);
    });
    // Each user gets fifty answers a second, and not as many as it asks for.
    let answered = answered.into_inner();
    assert!((16..=16 * 100).contains(&answered), "{answered}");
    let counts = snapshot(&mut control).jobs.remove(0).counts;
    assert!(counts.written.count() >= 100, "{}", counts.written.count());
}

#[test]
fn a_drive_that_has_become_ten_times_slower_is_named_within_ten_seconds() {
    const TILE_BYTES: u32 = 1 << 20;
    let store = Store::new(1, "auto");
    // Sets plausible rates, whatever this machine's disk does.
    store.set_rates(&[200_000_000]);
    let mut command = store.serve_command();
    command.env("OFFLOADD_RATE_LIMIT", "4000000,4000000");
    let mut daemon = Daemon::start(command, store.socket());
    let mut control = daemon.control();
    let measured = snapshot(&mut control).devices.remove(0).state;
    let reply = (control.open_session(open_sized("tiny", u64::from(TILE_BYTES)))).unwrap();
    let mut session = Session::attach_sized(&reply, u64::from(TILE_BYTES)).unwrap();
    let working = session.begin_sized(&mut control, 2, TILE_BYTES);
    let bytes = vec![5; TILE_BYTES as usize];
    for tile in 0..2 {
        let place = session.geometry.slot_place(SlotIndex(tile)).unwrap();
        session.write_slot(place.offset, &bytes);
        session.submit(swap_out(tile, tile, working, &bytes));
    }
    let start = Instant::now();
    while !snapshot(&mut control).devices[0].slow {
        assert!(start.elapsed() < Duration::from_secs(10), "it is not named");
        let done = session.complete();
        assert_eq!(done.fault, 0);
        let tile = (done.ticket % 100) as u32;
        session.submit(swap_in(tile, tile));
    }
    let log = BufReader::new(daemon.child.stderr.take().unwrap());
    let line = log.lines().map(Result::unwrap);
    let line = { line }
        .find(|line| line.contains("has become slow"))
        .unwrap();
    assert!(line.contains(&measured.path), "{line}");
}
