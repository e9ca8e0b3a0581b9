//! Tests processes that start, work and end in every possible way, for `OFFLOADD_SOAK_SECONDS` (15), while one floods the daemon and one does
//! nothing. What could go wrong: each of them leaves less memory, descriptors, threads, slots or space, or well-behaved processes wait for the
//! others.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use offload_api::ids::SlotIndex;
use offload_api::proto;
use test_hooks::random::SimRandom;

use crate::common::{
    Control, Daemon, Session, Store, eventually, expect_tiles, fill_tiles, open_sized, swap_in,
    swap_out,
};

const SOON: Duration = Duration::from_secs(10);

/// Resources that must not grow.
#[derive(Debug)]
struct Size {
    resident_bytes: u64,
    descriptor_count: usize,
    thread_count: usize,
    arena_free_bytes: u64,
    device_free_bytes: Vec<u64>,
    disk_bytes: u64,
}

fn size(daemon: &Daemon, store: &Store) -> Size {
    let process = format!("/proc/{}", daemon.child.id());
    let entries = |name: &str| {
        std::fs::read_dir(format!("{process}/{name}"))
            .unwrap()
            .count()
    };
    let status = std::fs::read_to_string(format!("{process}/status")).unwrap();
    let resident = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
    let resident_kib: u64 = { resident }
        .and_then(|words| words.split_whitespace().next())
        .and_then(|number| number.parse().ok())
        .expect("the kernel says how much memory a process has");
    let about = daemon
        .control()
        .describe(proto::DescribeRequest {})
        .unwrap();
    let blocks = |path: &std::path::PathBuf| {
        std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(path).unwrap())
    };
    Size {
        resident_bytes: resident_kib << 10,
        descriptor_count: entries("fd"),
        thread_count: entries("task"),
        arena_free_bytes: about.arena_free_bytes,
        device_free_bytes: about.devices.iter().map(|d| d.free_bytes).collect(),
        disk_bytes: store.devices.iter().map(blocks).sum::<u64>() * 512,
    }
}

/// Runs one process's session, with one of its possible ends. The job is gone afterwards.
fn run_session(socket: &Path, name: &str, random: &mut SimRandom) {
    let mut control = Control::connect(socket);
    let mut session = control.session(name);
    let mut working = session.begin(&mut control, 6);
    for _ in 0..1 + random.below(3) {
        let fill = random.number() as u8;
        fill_tiles(&mut session, 6, working, fill);
        expect_tiles(&mut session, 6, fill);
        working = session.commit(&mut control, working, &[fill]);
    }
    match random.below(4) {
        0 => {
            let token = session.token.clone();
            let closed = control.close_session(proto::CloseSessionRequest { token });
            closed.unwrap();
        }
        // End as a killed process does: the kernel closes its descriptors in any order, with transfers in flight.
        1 => {
            for tile in 0..3 {
                session.submit(swap_out(tile, tile, working, &[0; 4096]));
            }
            drop(session);
        }
        2 => {
            session.submit(swap_in(1, 1));
            drop(control);
            drop(session);
            control = Control::connect(socket);
        }
        _ => {
            let mut second = Control::connect(socket);
            assert!(
                second.open_session(open_sized(name, 4096)).is_err(),
                "its rank is taken"
            );
            drop(session);
        }
    }
    eventually(
        "its last operations have ended, and it can go",
        SOON,
        || {
            let job = name.to_owned();
            control
                .drop_job(proto::DropJobRequest { job, uid: None })
                .is_ok()
        },
    );
}

#[test]
fn nothing_grows_however_processes_come_and_go() {
    let seconds = std::env::var("OFFLOADD_SOAK_SECONDS")
        .map_or(15, |seconds| seconds.parse().expect("a number of seconds"));
    let store = Store::new(2, "auto");
    let daemon = store.serve();
    let sessions = AtomicU64::new(0);
    let soak = |duration: Duration| {
        let end = Instant::now() + duration;
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (sessions, socket) = (&sessions, &daemon.socket);
                scope.spawn(move || {
                    let mut random = SimRandom::new(thread);
                    while Instant::now() < end {
                        run_session(socket, &format!("job-{thread}"), &mut random);
                        sessions.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
    };
    // Caches and pools have their size after a while.
    soak(Duration::from_secs(3));
    let warm = size(&daemon, &store);
    let begun = sessions.load(Ordering::Relaxed);
    soak(Duration::from_secs(seconds));
    let ended = sessions.load(Ordering::Relaxed) - begun;
    assert!(ended > 20, "{ended} processes came and went");
    let mut last = size(&daemon, &store);
    eventually("it is as small as it was", SOON, || {
        last = size(&daemon, &store);
        last.descriptor_count <= warm.descriptor_count + 1 && last.thread_count <= warm.thread_count
    });
    println!("{ended} sessions in {seconds} s: {warm:?}, then {last:?}");
    assert_eq!(last.arena_free_bytes, warm.arena_free_bytes);
    assert_eq!(last.device_free_bytes, warm.device_free_bytes);
    assert_eq!(last.disk_bytes, warm.disk_bytes);
    let grown = last.resident_bytes.saturating_sub(warm.resident_bytes);
    assert!(grown < 8 << 20, "{grown} bytes more after {ended} sessions");
}

const RATE_LIMIT: &str = "2000000,2000000";
const TILE_BYTES: u32 = 64 << 10;

/// Returns the durations of `count` reads of one tile, one after the other, sorted.
fn times(session: &mut Session, count: usize) -> Vec<Duration> {
    let mut times: Vec<_> = (0..count)
        .map(|_| {
            let start = Instant::now();
            session.submit(swap_in(0, 1));
            assert_eq!(session.complete().fault, 0);
            start.elapsed()
        })
        .collect();
    times.sort();
    times
}

#[test]
fn who_floods_or_sleeps_does_not_double_the_others_latency() {
    let store = Store::new(1, "auto");
    let mut command = store.serve_command();
    // A tile takes a thirtieth of a second on any disk: the test measures waiting and not the machine.
    command.env("OFFLOADD_RATE_LIMIT", RATE_LIMIT);
    let daemon = Daemon::start(command, store.socket());
    let mut control = daemon.control();
    let open = |control: &mut Control, job: &str| {
        let reply = control.open_session(open_sized(job, u64::from(TILE_BYTES)));
        Session::attach_sized(&reply.unwrap(), u64::from(TILE_BYTES)).unwrap()
    };
    let mut honest = open(&mut control, "honest");
    let working = honest.begin_sized(&mut control, 1, TILE_BYTES);
    let bytes = vec![3; TILE_BYTES as usize];
    let place = honest.geometry.slot_place(SlotIndex(0)).unwrap();
    honest.write_slot(place.offset, &bytes);
    honest.submit(swap_out(0, 0, working, &bytes));
    assert_eq!(honest.complete().fault, 0);
    let alone = times(&mut honest, 40);

    let mut flooding = open(&mut control, "flooding");
    flooding.begin_sized(&mut control, 1, TILE_BYTES);
    let mut sleeping = open(&mut control, "sleeping");
    sleeping.begin_sized(&mut control, 1, TILE_BYTES);
    // Fills its ring and never takes completions, nor reads a byte of its connection.
    while sleeping
        .rings
        .put(&swap_in(0, 0).to_sqe(sleeping.epoch))
        .unwrap()
    {}
    sleeping.ring();
    let going = AtomicBool::new(true);
    let among = std::thread::scope(|scope| {
        scope.spawn(|| {
            while going.load(Ordering::Relaxed) {
                let _ = flooding.rings.put(&swap_in(0, 0).to_sqe(flooding.epoch));
                flooding.ring();
                while let Ok(Some(_)) = flooding.rings.pop() {}
            }
        });
        scope.spawn(|| {
            let mut control = daemon.control();
            while going.load(Ordering::Relaxed) {
                control.describe(proto::DescribeRequest {}).unwrap();
            }
        });
        let among = times(&mut honest, 40);
        going.store(false, Ordering::Relaxed);
        among
    });
    // On a busy machine one in ten may also wait for the processor.
    for (what, index, besides) in [("half", 20, 0), ("nine tenths", 36, 33)] {
        let (alone, among) = (alone[index], among[index]);
        println!("{what} within {alone:?} alone, {among:?} among them");
        let limit = 2 * alone + Duration::from_millis(besides);
        assert!(
            among < limit,
            "{what}: {alone:?} alone, {among:?} among them"
        );
    }
}
