//! Tests that tiles are stored at their places and on all devices, that damage or a lost device never returns other bytes than were written, that a
//! daemon's death is noticed, and that memory and space are checked.

use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use offload_client::private::PrivateDaemon;
use offload_client::{
    ClientError, Daemon, Durability, FaultKind, Generation, Session, SlotClass, TileError,
    TileIndex,
};

use crate::real::*;

#[test]
fn tiles_come_back_from_two_devices_by_each_engine() {
    for engine in ["uring", "aio", "psync"] {
        let place = Place::new();
        let mut settings = place.settings();
        settings.engine = engine.into();
        let daemon = match PrivateDaemon::start(settings) {
            Ok(daemon) => daemon,
            Err(error) if engine != "psync" && error.to_string().contains("engine ") => {
                println!(
                    "skipped: {}: {engine}: this machine forbids it: {error}",
                    std::thread::current().name().unwrap_or("a test")
                );
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        let mut session = open_new(daemon.socket());
        assert_eq!(session.info().engine, engine);
        assert_eq!(session.info().devices.len(), 2);
        write(&mut session, 0..TILE_COUNT, 1);
        assert_content(&mut session, 0..TILE_COUNT, 1);
        // Some tiles are written again in the same generation.
        write(&mut session, 3..7, 2);
        assert_content(&mut session, 0..3, 1);
        assert_content(&mut session, 3..7, 2);
        session.close().unwrap();
        // Tiles are spread: both files hold some. The measured rates determine how many.
        for (path, _) in place.devices() {
            let bytes = std::fs::read(&path).unwrap();
            let mut tiles = 0..TILE_COUNT;
            let found = tiles.any(|tile| find(&bytes, &content(tile, 1)[..4096]).is_some());
            assert!(found, "no tile on {}", path.display());
        }
    }
}

#[test]
fn a_flipped_byte_on_a_drive_is_named_and_never_handed_out() {
    let place = Place::new();
    let daemon = place.start();
    let mut session = open_new(daemon.socket());
    write(&mut session, 0..TILE_COUNT, 1);
    session.commit(Vec::new()).unwrap();
    let bad = content(5, 1);
    let (path, at) = place
        .devices()
        .into_iter()
        .find_map(|(path, _)| {
            let at = find(&std::fs::read(&path).unwrap(), &bad)?;
            Some((path, at as u64))
        })
        .expect("tile 5 lies on one of the devices");
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&[bad[777] ^ 1], at + 777).unwrap();
    file.sync_all().unwrap();

    let done = read(&mut session, 5);
    match done.result.unwrap_err() {
        TileError::Damaged {
            device,
            offset,
            tile,
            generation,
            expected,
            found,
        } => {
            assert_eq!((device, offset), (path, at));
            assert_eq!((tile, generation), (TileIndex(5), Generation(1)));
            assert_eq!(expected, offload_client::checksum(&bad));
            assert_ne!(found, expected);
        }
        other => panic!("{other}"),
    }
    // The administrator sees the damage too.
    let seen = top(&daemon);
    let damaged = |of: &str| -> Vec<u64> {
        let all = seen[of].as_array().unwrap().iter();
        all.map(|one| one["damaged_count"].as_u64().unwrap())
            .collect()
    };
    assert_eq!(damaged("devices").iter().sum::<u64>(), 1);
    assert_eq!(damaged("jobs"), [1]);
    assert!(done.slot.as_slice().iter().all(|b| *b == 0xff));
    drop(done.slot);
    assert_content(&mut session, 6..TILE_COUNT, 1);
}

#[test]
fn damage_on_a_device_that_came_after_the_session_is_named_and_told() {
    let place = Place::new();
    let daemon = place.start();
    let mut session = open_new(daemon.socket());
    let new = place.dir.path().join("new.tiles");
    let mut add = offloadd_of(&daemon);
    add.args(["device", "add", "--size", "32MiB", "--socket"]);
    let output = add.arg(daemon.socket()).arg(&new).output().unwrap();
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words}");
    // New tiles move there without a command.
    let until = Instant::now() + 2 * LONG;
    let mut seed = 0;
    let (tile, at) = loop {
        seed += 1;
        assert!(Instant::now() < until, "no tile came to the new device");
        write(&mut session, 0..TILE_COUNT, seed);
        session.commit(Vec::new()).unwrap();
        let bytes = std::fs::read(&new).unwrap();
        let mut found = (0..TILE_COUNT).map(|tile| (tile, find(&bytes, &content(tile, seed))));
        if let Some((tile, at)) = found.find_map(|(tile, at)| Some((tile, at?))) {
            break (tile, at as u64);
        }
    };
    let file = std::fs::OpenOptions::new().write(true).open(&new).unwrap();
    file.write_all_at(&[content(tile, seed)[777] ^ 1], at + 777)
        .unwrap();
    file.sync_all().unwrap();
    match read(&mut session, tile).result.unwrap_err() {
        TileError::Damaged { device, offset, .. } => assert_eq!((device, offset), (new, at)),
        other => panic!("{other}"),
    }
    let seen = top(&daemon);
    let devices = seen["devices"].as_array().unwrap().iter();
    let damaged: Vec<_> = devices.map(|one| one["damaged_count"].clone()).collect();
    assert_eq!(damaged, [0, 0, 1]);
}

#[test]
fn without_checksums_the_flipped_byte_is_handed_out() {
    assert_depends_on(
        "tiles::a_flipped_byte_on_a_drive_is_named_and_never_handed_out",
        "checksum",
    );
}

#[test]
fn the_daemons_death_ends_a_wait_at_once() {
    let place = Place::new();
    let daemon = place.start();
    let mut session = open_new(daemon.socket());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            kill_9(&daemon);
        });
        let before = Instant::now();
        assert!(matches!(
            session.wait(LONG),
            Err(ClientError::DaemonGone { .. })
        ));
        assert!(before.elapsed() < LONG / 2);
    });
    // All other calls fail at once too.
    let before = Instant::now();
    assert!(session.commit(Vec::new()).is_err());
    assert!(session.confirm(Generation(1)).is_err());
    assert!(session.close().is_err());
    assert!(before.elapsed() < LONG / 2);
}

#[test]
fn a_job_that_is_defined_otherwise_or_too_large_is_refused() {
    let place = Place::new();
    let daemon = place.start();
    let session = open_new(daemon.socket());
    session.close().unwrap();
    let mut session = Session::open(settings(daemon.socket())).unwrap();
    session.define_tiles(definition()).unwrap();
    let mut other = definition();
    other.tiles.pop();
    let mut in_place = definition();
    in_place.durability = Durability::None;
    for other in [other, in_place] {
        let error = session.define_tiles(other).unwrap_err();
        assert_eq!(error.fault(), Some(FaultKind::LayoutChanged), "{error}");
    }
    session.close().unwrap();

    let mut large = settings(daemon.socket());
    large.job = "large".into();
    let mut session = Session::open(large).unwrap();
    let mut definition = definition();
    for tile in &mut definition.tiles {
        tile.tile_bytes = 8 << 20;
    }
    let error = session.define_tiles(definition).unwrap_err();
    assert_eq!(error.fault(), Some(FaultKind::NoSpace), "{error}");
    assert!(error.to_string().contains("a.tiles"), "{error}");
    session.close().unwrap();

    let store = Daemon::connect(daemon.socket()).unwrap();
    let jobs = store.jobs().unwrap();
    let known: Vec<_> = jobs.iter().map(|j| (&j.job[..], j.open)).collect();
    assert!(known.contains(&("tried", false)), "{known:?}");
    assert!(store.drop_job("tried").unwrap() > 0);
    assert!(!store.jobs().unwrap().iter().any(|j| j.job == "tried"));
}

#[test]
fn more_memory_than_the_daemon_has_is_refused_with_what_is_free() {
    let place = Place::new();
    let daemon = place.start();
    let mut settings = settings(daemon.socket());
    settings.classes = vec![SlotClass {
        slot_bytes: 1 << 20,
        slot_count: 65,
    }];
    let error = Session::open(settings.clone()).err().unwrap();
    assert_eq!(error.fault(), Some(FaultKind::NoMemory), "{error}");
    settings.classes[0].slot_count = 64;
    Session::open(settings).unwrap();
}

#[test]
fn a_device_that_lost_its_end_is_named_and_the_other_one_works_on() {
    let place = Place::new();
    let daemon = place.start();
    let mut session = open_new(daemon.socket());
    write(&mut session, 0..TILE_COUNT, 1);
    session.commit(Vec::new()).unwrap();
    let (lost, _) = place.devices().remove(0);
    let file = std::fs::OpenOptions::new().write(true).open(&lost).unwrap();
    file.set_len(1 << 20).unwrap();
    let (mut short_count, mut whole_count) = (0, 0);
    for tile in 0..TILE_COUNT {
        let done = read(&mut session, tile);
        match done.result {
            Ok(_) => {
                assert!(done.slot.as_slice() == content(tile, 1));
                whole_count += 1;
            }
            Err(TileError::Short {
                device,
                asked_bytes,
                moved_bytes,
                ..
            }) => {
                assert_eq!(device, lost);
                assert!(asked_bytes == TILE_BYTES && moved_bytes < TILE_BYTES);
                assert!(done.slot.as_slice().iter().all(|b| *b == 0xff));
                short_count += 1;
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert!(short_count > 0 && whole_count > 0);
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    // Tiles start at whole blocks.
    (0..bytes.len())
        .step_by(4096)
        .find(|at| bytes[*at..].starts_with(wanted))
}

#[test]
fn hastening_takes_no_room_from_operations_that_were_granted() {
    let place = Place::new();
    let daemon = place.start();
    let mut session = open_new(daemon.socket());
    write(&mut session, 0..TILE_COUNT, 1);
    let pid = rustix::process::Pid::from_raw(daemon.pid() as i32).unwrap();
    let signal = |signal| rustix::process::kill_process(pid, signal).unwrap();
    // Nobody takes submitted entries.
    signal(rustix::process::Signal::STOP);
    let iodepth = session.info().iodepth;
    let tickets: Vec<_> = (0..iodepth)
        .map(|tile| {
            let slot = session.take_slot(0).unwrap();
            let ticket = session.swap_in(TileIndex(tile), slot);
            let ticket = ticket.map_err(|(_, error)| error).unwrap();
            for _ in 0..100 {
                session.promote(ticket).unwrap();
            }
            ticket
        })
        .collect();
    signal(rustix::process::Signal::CONT);
    let done = wait_for(&mut session, iodepth as usize).unwrap();
    for one in done {
        assert!(tickets.contains(&one.ticket));
        one.result.unwrap();
    }
    assert_content(&mut session, 0..TILE_COUNT, 1);
}
