//! Tests with a daemon that is absent, of another version, silent, dead or wrong: the client must not hang or crash, or return bytes that nobody
//! wrote. The daemon is a fake in the test's own process that misbehaves as told.

mod fake;

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use fake::{DEVICE, FakeDaemon, IODEPTH, LATER_DEVICE, Manners};
use offload_client::{
    ClientError, Daemon, Durability, EndedOperation, FaultKind, Generation, JobDefinition, Rank,
    Session, SessionSettings, Slot, SlotClass, Tile, TileError, TileIndex, TileKind, checksum,
};

const TILE_BYTES: u32 = 8192;
/// Longer than any of these tests may take: a wait that ends only at this limit has failed.
const LONG: Duration = Duration::from_secs(30);
const SOON: Duration = Duration::from_secs(15);

fn settings(daemon: &FakeDaemon) -> SessionSettings {
    SessionSettings {
        socket: daemon.socket.clone(),
        job: "tried".into(),
        rank: Rank(0),
        local_ranks: 1,
        classes: vec![
            SlotClass {
                slot_bytes: u64::from(TILE_BYTES),
                slot_count: 6,
            },
            SlotClass {
                slot_bytes: 4096,
                slot_count: 1,
            },
        ],
        iodepth: IODEPTH,
    }
}

fn open(daemon: &FakeDaemon) -> Session {
    let mut session = Session::open(settings(daemon)).unwrap();
    let tile = |unit| Tile {
        unit,
        kind: TileKind::State,
        elem_offset: 0,
        tile_bytes: TILE_BYTES,
    };
    session
        .define_tiles(JobDefinition {
            layout: b"layout".to_vec(),
            tiles: (0..8).map(tile).collect(),
            durability: Durability::Committed,
            nodes: 1,
        })
        .unwrap();
    assert_eq!(session.resume(Generation(0)).unwrap(), Generation(1));
    session
}

fn done(session: &mut Session) -> Result<EndedOperation, ClientError> {
    let mut done = Vec::new();
    let until = Instant::now() + LONG;
    while done.is_empty() {
        assert!(Instant::now() < until, "no completion came");
        session.wait(LONG)?;
        session.poll(&mut done)?;
    }
    assert_eq!(done.len(), 1);
    Ok(done.remove(0))
}

fn filled(session: &mut Session, value: u8) -> Slot {
    let mut slot = session.take_slot(0).unwrap();
    slot.as_mut_slice().fill(value);
    slot
}

/// Writes tile 3 and reads it back.
fn round_trip(session: &mut Session) -> EndedOperation {
    let slot = filled(session, 0x5a);
    session.swap_out(TileIndex(3), slot).unwrap();
    done(session).unwrap().result.unwrap();
    let slot = filled(session, 0);
    session.swap_in(TileIndex(3), slot).unwrap();
    done(session).unwrap()
}

#[test]
fn a_tile_comes_back_as_it_was_and_its_submission_says_all() {
    let daemon = FakeDaemon::start(Manners::default());
    let mut session = open(&daemon);
    let back = round_trip(&mut session);
    assert_eq!(back.result.unwrap().bytes, TILE_BYTES);
    assert_eq!(back.slot.as_slice(), [0x5a; TILE_BYTES as usize]);
    let out = daemon.submissions.recv().unwrap();
    assert_eq!(
        (out.verb, out.tile, out.generation, out.epoch),
        (2, 3, 1, fake::EPOCH)
    );
    assert_eq!(out.checksum, checksum(&[0x5a; TILE_BYTES as usize]));
    let back = daemon.submissions.recv().unwrap();
    assert_eq!(
        (back.verb, back.tile, back.generation, back.checksum),
        (1, 3, 0, 0)
    );
    let committed = session.commit(b"blob".to_vec()).unwrap();
    assert_eq!(
        (committed.generation, committed.working),
        (Generation(1), Generation(2))
    );
    assert_eq!(session.working(), Some(Generation(2)));
    session.close().unwrap();
}

#[test]
fn nobody_listening_is_said_with_the_socket_and_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    for (socket, kind) in [
        (dir.path().join("nobody"), std::io::ErrorKind::NotFound),
        (dir.path().to_owned(), std::io::ErrorKind::ConnectionRefused),
    ] {
        let Err(error) = Daemon::connect(&socket) else {
            panic!("connected to {}", socket.display())
        };
        let words = error.to_string();
        assert!(words.contains(socket.to_str().unwrap()), "{words}");
        assert!(words.contains("start offloadd"), "{words}");
        assert!(
            matches!(&error, ClientError::Connect { source, .. } if source.kind() == kind),
            "{error:?}"
        );
    }
}

#[test]
fn another_version_is_refused_with_both_numbers() {
    let daemon = FakeDaemon::start(Manners {
        version: Some(99),
        ..Manners::default()
    });
    match Session::open(settings(&daemon)).err().unwrap() {
        error @ ClientError::Version { theirs: 99, .. } => {
            let words = error.to_string();
            assert!(
                words.contains("99") && words.contains("0.0.0-fake"),
                "{words}"
            );
        }
        other => panic!("{other}"),
    }
}

#[test]
fn memory_that_could_be_cut_off_under_us_is_not_mapped() {
    let daemon = FakeDaemon::start(Manners {
        unsealed_arena: true,
        ..Manners::default()
    });
    let error = Session::open(settings(&daemon)).err().unwrap();
    assert!(error.to_string().contains("not sealed"), "{error}");
}

#[test]
fn a_tile_with_a_flipped_bit_is_named_and_never_handed_out() {
    let daemon = FakeDaemon::start(Manners {
        flip: 0x10,
        ..Manners::default()
    });
    let mut session = open(&daemon);
    let back = round_trip(&mut session);
    match back.result.unwrap_err() {
        TileError::Damaged {
            device,
            offset,
            tile,
            generation,
            expected,
            found,
        } => {
            assert_eq!(device.to_str(), Some(DEVICE));
            assert_eq!(
                (offset, tile, generation),
                (3 * 4096, TileIndex(3), Generation(1))
            );
            assert_eq!(expected, checksum(&[0x5a; TILE_BYTES as usize]));
            assert_ne!(found, expected);
        }
        other => panic!("{other}"),
    }
    assert_eq!(back.slot.as_slice(), [0xff; TILE_BYTES as usize]);
}

#[test]
fn a_device_that_hangs_is_named_by_what_the_daemon_says_of_it() {
    let daemon = FakeDaemon::start(Manners::default());
    let session = open(&daemon);
    let message = format!("device {DEVICE}: a flush has not ended for 11 s");
    assert_eq!(session.device_trouble(), [message]);
}

#[test]
fn a_bit_that_flips_on_the_way_of_one_read_is_read_right_the_second_time() {
    let daemon = FakeDaemon::start(Manners {
        flip: 0x10,
        flip_once: true,
        ..Manners::default()
    });
    let mut session = open(&daemon);
    let back = round_trip(&mut session);
    assert_eq!(back.result.unwrap().bytes, TILE_BYTES);
    assert_eq!(back.slot.as_slice(), [0x5a; TILE_BYTES as usize]);
    // Written once, and read twice into the same slot.
    let sent: Vec<_> = daemon.submissions.try_iter().collect();
    let [_, first, second] = &sent[..] else {
        panic!("{sent:?}");
    };
    assert_eq!((first.verb, first.tile), (1, 3));
    let what = |sqe: &offload_api::ring::entry::Sqe| (sqe.ticket, sqe.verb, sqe.tile, sqe.slot);
    assert_eq!(what(first), what(second));
    assert_eq!(session.in_flight_count(), 0);
}

#[test]
fn without_checksums_the_flipped_bit_is_handed_out() {
    let name = "a_tile_with_a_flipped_bit_is_named_and_never_handed_out";
    let run = |removed| {
        std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name])
            .env("OFFLOADD_DISABLE", removed)
            .output()
            .unwrap()
    };
    assert!(run("").status.success());
    let without = run("checksum");
    assert!(!without.status.success(), "{name} passes without checksums");
}

#[test]
fn what_a_device_answers_arrives_with_device_tile_and_offset() {
    let daemon = FakeDaemon::start(Manners {
        // By tile: 0 EIO, 1 ENOSPC, 2 short, 3 never written, 4 another epoch.
        answer: Some(|sqe, cqe| {
            let (kind, errno, moved_bytes) = match sqe.tile {
                0 => (FaultKind::Io, 5, 0),
                1 => (FaultKind::NoSpace, 28, 0),
                2 => (FaultKind::Short, 0, 512),
                3 => (FaultKind::NeverWritten, 0, 0),
                _ => (FaultKind::StaleEpoch, 0, 0),
            };
            Some(offload_api::ring::entry::Cqe {
                fault: kind as u32,
                errno,
                moved_bytes,
                ..cqe
            })
        }),
        ..Manners::default()
    });
    let mut session = open(&daemon);
    let kinds = [
        (FaultKind::Io, "Input/output error"),
        (FaultKind::NoSpace, "No space left"),
        (FaultKind::Short, "512 of 8192 bytes"),
        (FaultKind::NeverWritten, "never written"),
        (FaultKind::StaleEpoch, "another incarnation"),
    ];
    for (tile, (kind, words)) in kinds.into_iter().enumerate() {
        let slot = filled(&mut session, 1);
        session.swap_in(TileIndex(tile as u32), slot).unwrap();
        let ended = done(&mut session).unwrap();
        let error = ended.result.unwrap_err();
        assert_eq!(error.kind(), kind);
        let message = error.to_string();
        assert!(
            message.contains(words) && message.contains(&format!("tile {tile}")),
            "{message}"
        );
        if tile < 3 {
            assert!(message.contains(DEVICE), "{message}");
        }
        assert!(ended.slot.as_slice().iter().all(|b| *b == 0xff));
    }
}

#[test]
fn a_daemons_devices_are_those_that_have_not_left() {
    let fake = FakeDaemon::start(Manners::default());
    let daemon = Daemon::connect(&fake.socket).unwrap();
    let devices = daemon.info().devices.iter();
    let paths: Vec<_> = devices
        .map(|device| device.path.to_str().unwrap())
        .collect();
    assert_eq!(paths, [DEVICE, LATER_DEVICE]);
}

/// Starts a daemon whose every read fails on a device that was added after the session opened.
fn with_a_later_device(manners: Manners) -> FakeDaemon {
    FakeDaemon::start(Manners {
        answer: Some(|_, cqe| {
            Some(offload_api::ring::entry::Cqe {
                fault: FaultKind::Io as u32,
                device: 7,
                ..cqe
            })
        }),
        ..manners
    })
}

fn message_of_a_read(session: &mut Session, tile: u32) -> String {
    let slot = filled(session, 1);
    session.swap_in(TileIndex(tile), slot).unwrap();
    done(session).unwrap().result.unwrap_err().to_string()
}

#[test]
fn a_daemon_that_does_not_say_what_a_device_is_called_is_asked_once() {
    let daemon = with_a_later_device(Manners {
        described_once: true,
        ..Manners::default()
    });
    let mut session = open(&daemon);
    let asked = || daemon.describe_calls.load(Ordering::Relaxed);
    let before = asked();
    for tile in 0..3 {
        let message = message_of_a_read(&mut session, tile);
        assert!(message.contains("device 7 of the store"), "{message}");
    }
    // Another thread sends the call, perhaps after the client has given up waiting for the answer.
    let began = Instant::now();
    while asked() == before && began.elapsed() < 2 * LONG {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(asked(), before + 1);
}

#[test]
fn a_daemon_that_refuses_to_say_what_a_device_is_called_is_asked_again() {
    let daemon = with_a_later_device(Manners {
        description_refused: true,
        ..Manners::default()
    });
    let mut session = open(&daemon);
    let refused = message_of_a_read(&mut session, 0);
    assert!(refused.contains("device 7 of the store"), "{refused}");
    for tile in 1..3 {
        let message = message_of_a_read(&mut session, tile);
        assert!(message.contains(LATER_DEVICE), "{message}");
    }
    assert_eq!(daemon.describe_calls.load(Ordering::Relaxed), 3);
}

#[test]
fn completions_nobody_asked_for_are_a_broken_protocol() {
    let lies: [fn(_, offload_api::ring::entry::Cqe) -> Option<_>; 4] = [
        |_, cqe| Some(offload_api::ring::entry::Cqe { ticket: 77, ..cqe }),
        |_, cqe| {
            Some(offload_api::ring::entry::Cqe {
                ticket: u64::MAX,
                ..cqe
            })
        },
        |_, cqe| Some(offload_api::ring::entry::Cqe { fault: 9999, ..cqe }),
        |_, cqe| {
            Some(offload_api::ring::entry::Cqe {
                moved_bytes: 1,
                ..cqe
            })
        },
    ];
    for answer in lies {
        let daemon = FakeDaemon::start(Manners {
            answer: Some(answer),
            ..Manners::default()
        });
        let mut session = open(&daemon);
        let slot = filled(&mut session, 1);
        session.swap_in(TileIndex(0), slot).unwrap();
        assert!(matches!(
            done(&mut session),
            Err(ClientError::Protocol { .. })
        ));
    }
    let daemon = FakeDaemon::start(Manners {
        tail: Some(1 << 20),
        ..Manners::default()
    });
    let mut session = open(&daemon);
    let slot = filled(&mut session, 1);
    session.swap_in(TileIndex(0), slot).unwrap();
    assert!(matches!(
        done(&mut session),
        Err(ClientError::Protocol { .. })
    ));
}

#[test]
fn a_daemon_that_hangs_up_ends_every_wait() {
    let daemon = FakeDaemon::start(Manners {
        hang_up: true,
        silent_commit: true,
        ..Manners::default()
    });
    let mut session = open(&daemon);
    let slot = filled(&mut session, 1);
    session.swap_in(TileIndex(0), slot).unwrap();
    let before = Instant::now();
    // A wait may return early, for example because the call that opened the session has ended.
    let ended = loop {
        match session.wait(LONG) {
            Ok(()) => assert!(before.elapsed() < SOON, "the wait goes on"),
            Err(error) => break error,
        }
    };
    assert!(matches!(ended, ClientError::DaemonGone { .. }));
    assert!(matches!(
        session.commit(Vec::new()),
        Err(ClientError::DaemonGone { .. })
    ));
    assert!(before.elapsed() < SOON);
    // The daemon may still write to the slot, so it is not lent again.
    assert_eq!(session.free_slot_count(0), 5);
}

#[test]
fn a_commit_whose_answer_is_lost_is_made_once_and_told_as_made() {
    for made in [true, false] {
        let daemon = FakeDaemon::start(Manners {
            lost_commit: Some(made),
            ..Manners::default()
        });
        let mut session = open(&daemon);
        let working = session.working().unwrap();
        let committed = session.commit(Vec::new()).unwrap();
        assert_eq!(committed.generation, working, "made before: {made}");
        assert_eq!(committed.working.0, working.0 + 1);
        assert_eq!(
            session.commit(Vec::new()).unwrap().generation,
            committed.working
        );
    }
}

/// Waits until `time` is over; a single wait may return early.
fn wait_out(session: &mut Session, time: Duration) {
    let begin = Instant::now();
    while begin.elapsed() < time {
        session.wait(time.saturating_sub(begin.elapsed())).unwrap();
    }
}

#[test]
fn a_wait_ends_by_its_timeout_and_by_the_waker_from_another_thread() {
    let daemon = FakeDaemon::start(Manners::default());
    let mut session = open(&daemon);
    let before = Instant::now();
    wait_out(&mut session, Duration::from_millis(50));
    session.waker().wake();
    session.wait(LONG).unwrap();
    let waker = session.waker();
    let waking = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        waker.wake();
    });
    session.wait(LONG).unwrap();
    waking.join().unwrap();
    session.begin_commit(Vec::new()).unwrap();
    while session.poll_commit().is_none() {
        session.wait(LONG).unwrap();
    }
    assert!(before.elapsed() < SOON);
}

#[test]
fn what_cannot_start_is_refused_at_once_with_the_slot() {
    let daemon = FakeDaemon::start(Manners {
        silent_commit: true,
        answer: Some(|sqe, cqe| (sqe.tile == 7).then_some(cqe)),
        ..Manners::default()
    });
    let mut session = open(&daemon);
    let kind = |result: Result<_, (Slot, ClientError)>| {
        let (slot, error) = result.unwrap_err();
        assert_eq!(slot.as_slice()[0], 9, "another slot came back");
        error.fault().unwrap()
    };
    let slot = filled(&mut session, 9);
    assert_eq!(
        kind(session.swap_in(TileIndex(8), slot)),
        FaultKind::UnknownTile
    );
    let mut small = session.take_slot(1).unwrap();
    small.as_mut_slice().fill(9);
    assert_eq!(
        kind(session.swap_in(TileIndex(0), small)),
        FaultKind::SlotTooSmall
    );

    let slot = filled(&mut session, 9);
    session.swap_out(TileIndex(0), slot).unwrap();
    let commit = session.begin_commit(Vec::new()).unwrap_err();
    assert_eq!(commit.fault(), Some(FaultKind::Busy));
    for tile in 1..IODEPTH {
        let slot = filled(&mut session, 9);
        session.swap_in(TileIndex(tile), slot).unwrap();
    }
    let slot = filled(&mut session, 9);
    assert_eq!(
        kind(session.swap_in(TileIndex(7), slot)),
        FaultKind::TooMany
    );
    assert_eq!(session.in_flight_count(), IODEPTH as usize);

    let daemon = FakeDaemon::start(Manners {
        silent_commit: true,
        ..Manners::default()
    });
    let mut session = open(&daemon);
    let long = vec![0; offload_client::BLOB_BYTES_MAX + 1];
    assert_eq!(
        session.begin_commit(long).unwrap_err().fault(),
        Some(FaultKind::Invalid)
    );
    session.begin_commit(Vec::new()).unwrap();
    let again = session.begin_commit(Vec::new()).unwrap_err();
    assert_eq!(again.fault(), Some(FaultKind::Busy));
    let slot = filled(&mut session, 9);
    assert_eq!(kind(session.swap_out(TileIndex(0), slot)), FaultKind::Busy);
    let slot = filled(&mut session, 9);
    session.swap_in(TileIndex(0), slot).unwrap();

    let fresh = FakeDaemon::start(Manners::default());
    let mut session = Session::open(settings(&fresh)).unwrap();
    assert_eq!(
        session.begin_commit(Vec::new()).unwrap_err().fault(),
        Some(FaultKind::WrongGeneration)
    );
}

#[test]
fn a_refusal_keeps_its_kind_and_words() {
    let daemon = FakeDaemon::start(Manners::default());
    let connected = Daemon::connect(&daemon.socket).unwrap();
    // The answer that follows those which ask for a moment.
    match connected.drop_job("no such").unwrap_err() {
        ClientError::Refused(fault) => {
            assert_eq!(fault.kind, FaultKind::NotFound);
            assert_eq!(fault.message, "the fake keeps no jobs");
        }
        other => panic!("{other}"),
    }
    assert!(matches!(
        connected.jobs(),
        Err(ClientError::Protocol { .. })
    ));
}

const STARTED_AGAIN: &str = "OFFLOAD_TEST_STARTED_AGAIN";

/// After a failure of a daemon, launchers may start their processes before the service manager starts the daemon.
#[test]
fn a_process_that_was_started_again_waits_for_a_daemon_that_is_starting_again() {
    if let Some(socket) = std::env::var_os(STARTED_AGAIN) {
        Daemon::connect(std::path::Path::new(&socket)).unwrap();
        return;
    }
    let daemon = FakeDaemon::start(Manners::default());
    let away = daemon.socket.with_extension("away");
    std::fs::rename(&daemon.socket, &away).unwrap();
    let start = |restarts: &str| {
        let mut process = std::process::Command::new(std::env::current_exe().unwrap());
        let test = "a_process_that_was_started_again_waits_for_a_daemon_that_is_starting_again";
        process
            .args(["--exact", test])
            .env(STARTED_AGAIN, &daemon.socket);
        process.env("TORCHELASTIC_RESTART_COUNT", restarts);
        process
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null());
        process.spawn().unwrap()
    };
    let began = Instant::now();
    assert!(
        !start("0").wait().unwrap().success(),
        "a first start is told at once"
    );
    assert!(began.elapsed() < SOON);
    let mut again = start("1");
    std::thread::sleep(Duration::from_millis(300));
    assert!(again.try_wait().unwrap().is_none(), "it waits");
    std::fs::rename(&away, &daemon.socket).unwrap();
    assert!(again.wait().unwrap().success());
}
