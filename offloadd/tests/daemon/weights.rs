//! Tests that two jobs of one user that keep a drive busy get its bandwidth in proportion to their weights, through the whole daemon. What could go
//! wrong: the weights get lost between settings, sessions and queue, or apply only to reads or only to writes. The queue alone is tested in virtual
//! time (`tests/turns.rs`).
//!
//! Each job submits all operations of a pass before the test looks, and the owner thread counts the ended operations of both jobs at one moment, so
//! it does not matter how late this process looks.

use std::time::Duration;

use offload_api::checksum::checksum;
use offload_api::geometry::SlotClass;
use offload_api::proto;
use offload_api::ring::entry::Request;

use crate::common::{Control, Daemon, Session, Store, open, program, swap_in, swap_out, words};

const TILE_BYTES: u32 = 64 << 10;

/// Tiles of the job with weight 300, and of the one with weight 100.
const TILES: [u32; 2] = [768, 512];

/// Bytes per second in each direction: slow enough that every machine is faster, and that the test looks often during a pass.
const RATE_LIMIT: &str = "40000000,40000000";

/// Bytes in flight on the device before the other job arrives: they had no competitor.
const BEFORE_BYTES: u64 = 2 << 20;

/// While more than this is left, a job still waits for turns: the queue hands over no more to a device at a time.
const LEFT_BYTES: u64 = 8 << 20;

/// Fewest bytes to judge by: a tile is half a percent of it.
const JUDGED_BYTES: u64 = 12 << 20;

/// Attempts, in case this process is kept from looking for seconds.
const PASSES: usize = 12;

const JOBS: [&str; 2] = ["three", "one"];

/// Starts a daemon for a store on a device that was measured under the limit.
fn serve(quotas: &str) -> (Store, Daemon) {
    let dir = tempfile::tempdir().unwrap();
    let device = dir.path().join("device0");
    let output = program()
        .args(["format", "--size", "256MiB"])
        .arg(&device)
        .env("OFFLOADD_RATE_LIMIT", RATE_LIMIT)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", words(&output));
    let store = Store {
        config: dir.path().join("offloadd.toml"),
        devices: vec![device],
        dir,
    };
    let socket = store.socket();
    let text = format!(
        "socket = {socket:?}\ndevices = {:?}\narena_bytes_max = \"128MiB\"\niodepth_max = 1024\n{quotas}",
        store.devices
    );
    std::fs::write(&store.config, text).unwrap();
    let mut command = store.serve_command();
    command.env("OFFLOADD_RATE_LIMIT", RATE_LIMIT);
    let daemon = Daemon::start(command, socket);
    (store, daemon)
}

/// Opens a session that can have all its tiles in flight at once.
fn session(control: &mut Control, job: &str, tiles: u32) -> Session {
    let class = SlotClass {
        slot_bytes: u64::from(TILE_BYTES),
        slot_count: tiles,
    };
    let reply = control.open_session(proto::OpenSessionRequest {
        classes: vec![proto::SlotClass {
            slot_bytes: class.slot_bytes,
            slot_count: class.slot_count,
        }],
        iodepth: tiles,
        ..open(job)
    });
    let reply = reply.unwrap();
    assert_eq!(reply.iodepth, tiles);
    Session::attach_of(&reply, class).unwrap()
}

/// Returns the bytes of each job that have ended in one direction, counted by the daemon at one moment.
fn ended_bytes(control: &mut Control, out: bool) -> [u64; 2] {
    let jobs = control.metrics(proto::MetricsRequest {}).unwrap().jobs;
    JOBS.map(|name| {
        let job = jobs.iter().find(|job| job.job == name).unwrap();
        let traffic = if out { &job.written } else { &job.read };
        traffic.as_ref().unwrap().bytes
    })
}

/// Moves all tiles of both jobs. Returns the ratio of the first job's bytes to the second's while both waited for more, if the test looked in time.
fn pass(
    control: &mut Control,
    sessions: &mut [Session; 2],
    request: impl Fn(u32) -> Request,
    out: bool,
) -> Option<f64> {
    let before = ended_bytes(control, out);
    for (session, tiles) in sessions.iter_mut().zip(TILES) {
        for tile in 0..tiles {
            let entry = request(tile).to_sqe(session.epoch);
            assert!(session.rings.put(&entry).unwrap());
        }
    }
    for session in &mut *sessions {
        session.ring();
    }
    let all = TILES.map(|tiles| u64::from(tiles) * u64::from(TILE_BYTES));
    let (mut from, mut to) = (None, None);
    loop {
        let ended = ended_bytes(control, out);
        let ended = [0, 1].map(|job| ended[job] - before[job]);
        if ended == all {
            break;
        }
        if ended[1] >= BEFORE_BYTES {
            from.get_or_insert(ended);
        }
        if [0, 1]
            .iter()
            .all(|&job| ended[job] + LEFT_BYTES <= all[job])
        {
            to = Some(ended);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    for (session, tiles) in sessions.iter_mut().zip(TILES) {
        for _ in 0..tiles {
            assert_eq!(session.complete().fault, 0);
        }
    }
    let (from, to) = (from?, to?);
    let [first, second] = [0, 1].map(|job| to[job].saturating_sub(from[job]));
    (first + second >= JUDGED_BYTES).then(|| first as f64 / second as f64)
}

/// Returns the ratio of the first pass in which the test looked in time.
fn ratio(
    control: &mut Control,
    sessions: &mut [Session; 2],
    request: impl Fn(u32) -> Request + Copy,
    out: bool,
) -> f64 {
    let mut passes = (0..PASSES).map(|_| pass(control, sessions, request, out));
    let found = passes.find_map(|ratio| ratio);
    found.unwrap_or_else(|| panic!("none of {PASSES} passes was looked at in time"))
}

#[test]
fn two_jobs_with_weights_3_and_1_get_reads_and_writes_in_that_proportion() {
    let uid = rustix::process::geteuid().as_raw();
    let quotas = format!(
        "[quota.uid.{uid}.job.three]\nweight = 300\n[quota.uid.{uid}.job.one]\nweight = 100\n"
    );
    let (_store, daemon) = serve(&quotas);
    let mut control = daemon.control();
    let mut sessions = [0, 1].map(|job| session(&mut control, JOBS[job], TILES[job]));
    for (session, tiles) in sessions.iter().zip(TILES) {
        assert_eq!(session.begin_sized(&mut control, tiles, TILE_BYTES), 1);
    }
    let zeros = checksum(&vec![0; TILE_BYTES as usize]);
    let write = |tile| Request {
        checksum: zeros,
        ..swap_out(tile, tile, 1, &[])
    };
    let written = ratio(&mut control, &mut sessions, write, true);
    let read = ratio(
        &mut control,
        &mut sessions,
        |tile| swap_in(tile, tile),
        false,
    );
    println!("written {written:.2} to 1, read {read:.2} to 1");
    assert!((2.7..3.3).contains(&written), "written {written} to 1");
    assert!((2.7..3.3).contains(&read), "read {read} to 1");
}
