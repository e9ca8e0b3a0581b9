//! Tests a daemon that is restarted while a session works: each ticket comes back once, acknowledged bytes are there, the result of a commit is
//! reported correctly, and no wait is endless.

use std::collections::HashSet;
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use offload_client::{ClientError, Generation, Session, Ticket, TileIndex, Verb};
use rustix::process::{Pid, Signal, kill_process};

use crate::real::*;

/// A daemon under `offloadd supervise`, ended when dropped.
struct SupervisedDaemon {
    child: Child,
    socket: PathBuf,
}

impl SupervisedDaemon {
    fn start(place: &Place) -> Self {
        let program = std::env::current_exe().unwrap();
        let program = (program.ancestors().skip(1).take(2))
            .map(|dir| dir.join("offloadd"))
            .find(|program| program.is_file())
            .expect("offloadd is built");
        let socket = place.dir.path().join("run/s");
        let config = place.dir.path().join("supervised.toml");
        let devices: Vec<_> = place.devices().into_iter().map(|(path, _)| path).collect();
        let text = format!(
            "socket = {socket:?}\ndevices = {devices:?}\narena_bytes_max = {ARENA_BYTES_MAX}\n"
        );
        fs::write(&config, text).unwrap();
        let log = fs::File::create(place.dir.path().join("supervised.log")).unwrap();
        let child = Command::new(program)
            .args(["supervise", "--config"])
            .arg(&config)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let supervised = Self { child, socket };
        supervised.wait_until("it listens", || {
            std::os::unix::net::UnixStream::connect(&supervised.socket).is_ok()
        });
        supervised
    }

    fn wait_until(&self, what: &str, mut is_so: impl FnMut() -> bool) {
        let end = Instant::now() + 2 * LONG;
        while !is_so() {
            assert!(Instant::now() < end, "not yet: {what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn daemon(&self) -> Option<Pid> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        let children = tasks
            .map(|task| fs::read_to_string(task.unwrap().path().join("children")))
            .map(Result::unwrap_or_default);
        let children: String = children.collect();
        Pid::from_raw(children.split_whitespace().next()?.parse().unwrap())
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Asks for a restart; returns the daemon that will be replaced.
    fn restart(&self) -> Option<Pid> {
        let daemon = self.daemon();
        self.signal(Signal::USR2);
        daemon
    }

    /// Waits until `before` has been replaced.
    fn wait_for_another(&self, before: Option<Pid>) {
        self.wait_until("another daemon", || {
            self.daemon().is_some_and(|now| Some(now) != before)
        });
    }
}

impl Drop for SupervisedDaemon {
    fn drop(&mut self) {
        self.signal(Signal::TERM);
        self.child.wait().unwrap();
    }
}

/// Returns the next number of a pseudorandom series.
fn next(state: &mut u64) -> u64 {
    *state = state
        .wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407);
    *state >> 33
}

/// Moves tiles, and records the expected content of each and the tickets in flight.
struct Worker {
    session: Session,
    seeds: [u64; TILE_COUNT as usize],
    out: HashSet<Ticket>,
    busy: [bool; TILE_COUNT as usize],
    reads: u32,
}

impl Worker {
    /// Starts one operation, if a slot is free.
    fn start(&mut self, state: &mut u64) {
        let tile = (next(state) % u64::from(TILE_COUNT)) as u32;
        let full = self.session.in_flight_count() as u32 == self.session.info().iodepth;
        if full || self.busy[tile as usize] {
            return;
        }
        let mut slot = self.session.take_slot(0).expect("more slots than iodepth");
        let written = self.seeds[tile as usize] != 0;
        let ticket = if written && next(state).is_multiple_of(2) {
            self.session.swap_in(TileIndex(tile), slot)
        } else {
            let seed = next(state) | 1;
            slot.as_mut_slice().copy_from_slice(&content(tile, seed));
            self.seeds[tile as usize] = seed;
            self.session.swap_out(TileIndex(tile), slot)
        };
        let ticket = ticket.map_err(|(_, error)| error).unwrap();
        self.busy[tile as usize] = true;
        assert!(self.out.insert(ticket), "a ticket is out once");
    }

    fn collect(&mut self) {
        let mut done = Vec::new();
        self.session.poll(&mut done).unwrap();
        for one in done {
            assert!(self.out.remove(&one.ticket), "it comes back once");
            let tile = one.tile.0;
            one.result.unwrap_or_else(|error| panic!("{error}"));
            self.busy[tile as usize] = false;
            if one.verb == Verb::SwapIn {
                self.reads += 1;
                assert!(
                    one.slot.as_slice() == content(tile, self.seeds[tile as usize]),
                    "tile {tile} does not hold what was written last"
                );
            }
        }
    }

    fn finish(&mut self) {
        let end = Instant::now() + 2 * LONG;
        while !self.out.is_empty() {
            assert!(
                Instant::now() < end,
                "{} tickets do not come back",
                self.out.len()
            );
            self.session.wait(LONG).unwrap();
            self.collect();
        }
    }
}

#[test]
fn restarts_at_any_moment_lose_no_byte_no_ticket_and_no_commit() {
    let place = Place::new();
    let supervised = SupervisedDaemon::start(&place);
    let mut worker = Worker {
        session: open_new(&supervised.socket),
        seeds: [0; TILE_COUNT as usize],
        out: HashSet::new(),
        busy: [false; TILE_COUNT as usize],
        reads: 0,
    };
    let count: u64 = std::env::var("OFFLOADD_RESTARTS").map_or(12, |n| n.parse().unwrap());
    let mut state = 7;
    for generation in 1..=count {
        // At some point in a generation: between two operations, or during its commit.
        let (operations, when) = (40 + next(&mut state) % 40, next(&mut state) % 100);
        let mut before = None;
        for operation in 0..operations {
            if operation == when {
                before = supervised.restart();
            }
            worker.start(&mut state);
            worker.collect();
        }
        worker.finish();
        for tile in 0..TILE_COUNT {
            if worker.seeds[tile as usize] == 0 {
                worker.seeds[tile as usize] = 1;
                write(&mut worker.session, [tile], 1);
            }
        }
        if when >= operations {
            before = supervised.restart();
            std::thread::sleep(Duration::from_micros(next(&mut state) % 30_000));
        }
        let committed = worker.session.commit(vec![generation as u8]).unwrap();
        assert_eq!(
            committed.generation,
            Generation(generation),
            "each counts once"
        );
        assert_eq!(committed.working, Generation(generation + 1));
        supervised.wait_for_another(before);
    }
    assert!(worker.reads > 0);
    let seeds = worker.seeds;
    worker.session.close().unwrap();
    drop(supervised);

    let supervised = SupervisedDaemon::start(&place);
    let mut session = Session::open(settings(&supervised.socket)).unwrap();
    let newest = session
        .info()
        .job
        .clone()
        .unwrap()
        .generations
        .pop()
        .unwrap();
    assert_eq!(newest.generation, Generation(count));
    session.resume(newest.generation).unwrap();
    for tile in 0..TILE_COUNT {
        assert_content(&mut session, tile..tile + 1, seeds[tile as usize]);
    }
}

#[test]
fn calls_that_a_restart_interrupts_are_made_once() {
    let place = Place::new();
    let supervised = SupervisedDaemon::start(&place);
    // Each call begins while the daemon may be absent.
    let mut session = Session::open(settings(&supervised.socket)).unwrap();
    supervised.restart();
    session.define_tiles(definition()).unwrap();
    supervised.restart();
    assert_eq!(session.resume(Generation(0)).unwrap(), Generation(1));
    supervised.restart();
    let first = session.reserve_scratch(&[TILE_BYTES; 2]).unwrap();
    write(&mut session, [first.0, first.0 + 1], 5);
    supervised.restart();
    assert_content(&mut session, first.0..first.0 + 2, 5);
    write(&mut session, 0..TILE_COUNT, 3);
    for generation in 1..=5 {
        session.begin_commit(vec![generation]).unwrap();
        std::thread::sleep(Duration::from_millis(u64::from(generation)));
        supervised.restart();
        let committed = loop {
            session.wait(Duration::from_secs(1)).unwrap();
            if let Some(result) = session.poll_commit() {
                break result.unwrap();
            }
        };
        assert_eq!(committed.generation, Generation(generation.into()));
    }
    supervised.restart();
    assert_content(&mut session, first.0..first.0 + 2, 5);
    session.close().unwrap();
}

#[test]
fn a_daemon_that_ends_without_handing_over_ends_its_sessions_at_once() {
    let place = Place::new();
    let supervised = SupervisedDaemon::start(&place);
    let mut session = open_new(&supervised.socket);
    write(&mut session, 0..TILE_COUNT, 3);
    kill_process(supervised.daemon().unwrap(), Signal::KILL).unwrap();
    let ended = session.commit(Vec::new());
    assert!(
        matches!(ended, Err(ClientError::DaemonGone { .. })),
        "{ended:?}"
    );
    assert!(matches!(
        session.wait(LONG),
        Err(ClientError::DaemonGone { .. })
    ));
}
