//! Tests a real daemon on real files: every one of its operations fails once, fails from then on, or is replaced by kill -9, while it defines a job,
//! writes its tiles and commits them three times. What could go wrong: an error that is not reported, an endless wait, an acknowledged generation
//! that is gone, or one that is mixed from two.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::SlotIndex;
use offload_api::proto;

use crate::common::{
    Control, Daemon, Session, Store, engines, expect_tiles, open, readable, swap_out,
};

const TILES: u32 = 3;
const GENERATIONS: u64 = 3;

/// Results that a process got.
#[derive(Debug, Default)]
struct CallResults {
    defined: bool,
    acknowledged: u64,
    /// Kind of the refusal that ended it.
    refusal: Option<FaultKind>,
}

/// Devices as they were formatted, restored before each scenario.
struct Fresh {
    store: Store,
    devices: Vec<(PathBuf, Vec<u8>)>,
}

impl Fresh {
    fn new(engine: &str) -> Self {
        let store = Store::new(2, engine);
        let devices = store.devices.iter();
        let devices = devices.map(|path| (path.clone(), std::fs::read(path).unwrap()));
        Self {
            devices: devices.collect(),
            store,
        }
    }

    /// Runs a daemon with this fault. Returns `None` in place of the daemon if it refused to start with a reason.
    fn story(&self, injected_fault: &str) -> (CallResults, Option<Daemon>) {
        for (path, bytes) in &self.devices {
            std::fs::write(path, bytes).unwrap();
        }
        let mut command = self.store.serve_command();
        command.env("OFFLOADD_FAULT", injected_fault);
        let mut told = CallResults::default();
        let socket = self.store.socket();
        let started = std::panic::catch_unwind(AssertUnwindSafe(|| Daemon::start(command, socket)));
        let Ok(daemon) = started else {
            told.refusal = Some(FaultKind::Stopping);
            return (told, None);
        };
        told.refusal = drive_faults(&daemon, &mut told).err();
        (told, Some(daemon))
    }

    /// Asserts that a daemon without faults finds everything acknowledged, intact.
    fn check(&self, told: &CallResults, injected_fault: &str) {
        let daemon = self.store.serve();
        let mut control = daemon.control();
        let reply = control.open_session(open("tiny")).unwrap();
        let job = control.job(&reply.token);
        assert!(job.is_some() || !told.defined, "{injected_fault}: {told:?}");
        let Some(job) = &job else { return };
        let newest = job.generations.last().map_or(0, |g| g.generation);
        let sound = newest == told.acknowledged || newest == told.acknowledged + 1;
        assert!(
            sound,
            "{injected_fault}: {told:?}, and generation {newest} is there"
        );
        if newest == 0 {
            return;
        }
        let blob = &job.generations.last().unwrap().blobs[0].blob;
        assert_eq!(*blob, newest.to_le_bytes(), "{injected_fault}");
        let mut session = Session::attach(&reply).unwrap();
        session.resume(&mut control, newest);
        expect_tiles(&mut session, TILES, 10 * newest as u8);
    }
}

/// Runs all steps of a job, until something is refused.
fn drive_faults(daemon: &Daemon, told: &mut CallResults) -> Result<(), FaultKind> {
    let kind = |fault: Fault| fault.kind;
    let mut control = daemon.control();
    let reply = control.open_session(open("tiny")).map_err(kind)?;
    let Ok(mut session) = Session::attach(&reply) else {
        return Err(FaultKind::Stopping);
    };
    define(&mut control, &session).map_err(kind)?;
    told.defined = true;
    let token = session.token.clone();
    let resume = proto::ResumeRequest {
        token,
        generation: 0,
    };
    control.resume(resume).map_err(kind)?;
    for generation in 1..=GENERATIONS {
        for tile in 0..TILES {
            let place = session.geometry.slot_place(SlotIndex(tile)).unwrap();
            let bytes = [10 * generation as u8 + tile as u8; 4096];
            session.write_slot(place.offset, &bytes);
            session.submit(swap_out(tile, tile, generation, &bytes));
        }
        for _ in 0..TILES {
            let fault = completion(&mut session)?;
            if let Some(kind) = FaultKind::from_number(fault) {
                return Err(kind);
            }
        }
        let commit = proto::CommitRequest {
            token: session.token.clone(),
            generation,
            blob: generation.to_le_bytes().to_vec(),
        };
        control.commit(commit).map_err(kind)?;
        told.acknowledged = generation;
    }
    Ok(())
}

fn define(control: &mut Control, session: &Session) -> Result<(), Fault> {
    let tiles = (0..TILES).map(|unit| proto::Tile {
        unit,
        kind: 1,
        elem_offset: 0,
        tile_bytes: 4096,
    });
    let define = proto::DefineTilesRequest {
        token: session.token.clone(),
        layout: b"layout".to_vec(),
        tiles: tiles.collect(),
        durability: 1,
        nodes: 1,
    };
    control.define_tiles(define).map(|_| ())
}

/// Returns the next completion's fault, or an error if the daemon hung up.
fn completion(session: &mut Session) -> Result<u32, FaultKind> {
    for _ in 0..1000 {
        if let Some(cqe) = session.rings.pop().unwrap() {
            return Ok(cqe.fault);
        }
        if readable(&session.received.life_line, Duration::ZERO) {
            return Err(FaultKind::Stopping);
        }
        readable(
            &session.received.completion_doorbell,
            Duration::from_millis(10),
        );
        let _ = rustix::io::read(&session.received.completion_doorbell, &mut [0u8; 8]);
    }
    panic!("neither a completion nor an end in 10 s");
}

/// Injects `what` (a kind of fault), with `plus` after the number, at every operation. Returns the number of operations that it reached.
fn at_every_operation(engine: &str, what: &str, plus: &str) -> u64 {
    let fresh = Fresh::new(engine);
    for at in 0.. {
        assert!(at < 200, "the story has no end");
        let injected_fault = format!("{what}@{at}{plus}");
        let (told, daemon) = fresh.story(&injected_fault);
        if let Some(mut daemon) = daemon {
            // Whatever ends a run, the log names the device and its answer, at once or soon after.
            let mut stderr = daemon.child.stderr.take().unwrap();
            rustix::io::ioctl_fionbio(&stderr, true).unwrap();
            let named = |line: &str| {
                let mut devices = fresh.store.devices.iter();
                devices.any(|device| line.contains(&device.display().to_string()))
            };
            let (mut log, until) = (Vec::new(), Instant::now() + Duration::from_secs(10));
            loop {
                let ended = stderr.read_to_end(&mut log).is_ok();
                let text = String::from_utf8_lossy(&log);
                let logged = text.lines().any(|line| {
                    named(line) && (line.contains("os error") || line.contains("bytes were moved"))
                });
                if logged || told.refusal.is_none() || what == "kill" {
                    break;
                }
                assert!(
                    !ended && Instant::now() < until,
                    "{injected_fault}: {told:?}: {text}"
                );
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = daemon.child.kill();
            let status = daemon.child.wait().unwrap();
            assert_eq!(
                status.signal(),
                Some(9),
                "{injected_fault}: it ended by itself"
            );
        }
        fresh.check(&told, &injected_fault);
        let Some(kind) = told.refusal else {
            assert_eq!(told.acknowledged, GENERATIONS);
            return at;
        };
        let expected: &[FaultKind] = match what {
            "kill" => &[FaultKind::Stopping],
            // At the probe, another engine is used or the start is refused.
            "short" => &[
                FaultKind::Short,
                FaultKind::Io,
                FaultKind::Poisoned,
                FaultKind::Stopping,
            ],
            "ENOSPC" => &[FaultKind::NoSpace, FaultKind::Poisoned, FaultKind::Stopping],
            _ => &[FaultKind::Io, FaultKind::Poisoned, FaultKind::Stopping],
        };
        assert!(expected.contains(&kind), "{injected_fault}: {kind:?}");
    }
    unreachable!("the loop returns");
}

/// Operations of definition, catalog, tiles, records and flushes.
const OPERATIONS_MIN: u64 = 30;

#[test]
fn a_daemon_killed_instead_of_any_operation_loses_nothing_acknowledged() {
    for engine in engines().iter().take(1) {
        assert!(at_every_operation(engine, "kill", "") > OPERATIONS_MIN);
    }
}

#[test]
fn an_operation_that_fails_once_is_told_and_loses_nothing_acknowledged() {
    // The first two operations of uring and aio are the probe's; threads have none.
    assert!(at_every_operation("psync", "EIO", "") > OPERATIONS_MIN);
    assert!(at_every_operation("psync", "short", "") > OPERATIONS_MIN);
}

#[test]
fn a_device_that_fails_for_good_is_told_and_loses_nothing_acknowledged() {
    assert!(at_every_operation("psync", "ENOSPC", "+") > OPERATIONS_MIN);
    assert!(at_every_operation("psync", "ETIMEDOUT", "+") > OPERATIONS_MIN);
}
