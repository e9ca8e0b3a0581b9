//! What could go wrong between a real client and a real daemon: tiles land in the wrong place, a commit is lost or too
//! much survives, one rank disturbs another, damage is handed out, a dead peer is waited for. Each test starts its own
//! daemon on two files of a drive and kills what the story needs.

use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use crate::real::*;
use offload_client::{
    ClientError, Daemon, Durability, FaultKind, Generation, Rank, Session, SlotClass, TileError,
    TileIndex,
};

#[test]
fn tiles_come_back_from_two_devices_by_either_engine() {
    for engine in ["uring", "psync"] {
        let place = Place::new();
        let mut settings = place.settings();
        settings.engine = engine.into();
        let daemon = match offload_client::private::PrivateDaemon::start(settings) {
            Ok(daemon) => daemon,
            Err(error) if engine == "uring" && error.to_string().contains("io_uring") => {
                println!("skipped uring: this machine forbids it: {error}");
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        let mut session = open_new(daemon.socket());
        assert_eq!(session.info().engine, engine);
        assert_eq!(session.info().devices.len(), 2);
        write(&mut session, 0..TILE_COUNT, 1);
        assert_content(&mut session, 0..TILE_COUNT, 1);
        // Again in the same generation, some tiles.
        write(&mut session, 3..7, 2);
        assert_content(&mut session, 0..3, 1);
        assert_content(&mut session, 3..7, 2);
        session.close().unwrap();
        // Tiles are spread: both files hold some.
        for (path, _) in place.devices() {
            let bytes = std::fs::read(&path).unwrap();
            let found = (0..3).filter(|tile| find(&bytes, &content(*tile, 1)[..4096]).is_some());
            assert!(found.count() > 0, "no tile on {}", path.display());
        }
    }
}

#[test]
fn what_was_committed_survives_kill_9_and_nothing_else_does() {
    let place = Place::new();
    let daemon = place.start();
    let mut session = open_new(daemon.socket());
    write(&mut session, 0..TILE_COUNT, 1);
    let first = session.commit(b"after one".to_vec()).unwrap();
    assert_eq!((first.generation, first.confirmed), (Generation(1), true));
    assert_eq!(first.working, Generation(2));
    write(&mut session, 0..6, 2);
    session.commit(b"after two".to_vec()).unwrap();
    write(&mut session, 0..4, 3);
    kill_9(&daemon);
    assert!(matches!(
        session.commit(Vec::new()),
        Err(ClientError::DaemonGone { .. })
    ));
    drop((session, daemon));

    let daemon = place.start();
    let mut session = Session::open(settings(daemon.socket())).unwrap();
    let job = session.info().job.clone().unwrap();
    assert_eq!(
        (job.layout, job.tiles),
        (definition().layout, definition().tiles)
    );
    // The one before the newest is not offered: tiles of the working generation went where it lay.
    assert_eq!(job.generations.len(), 1);
    assert_eq!(job.generations[0].generation, Generation(2));
    assert_eq!(job.generations[0].blobs[0].blob, b"after two");
    assert_eq!(job.generations[0].blobs[0].rank, Rank(0));
    assert_eq!(session.resume(Generation(2)).unwrap(), Generation(3));
    assert_content(&mut session, 0..6, 2);
    assert_content(&mut session, 6..TILE_COUNT, 1);
}

#[test]
fn until_it_is_confirmed_a_generation_can_be_given_up_for_the_one_before_it() {
    let place = Place::new();
    let daemon = place.start();
    let mut session = Session::open(settings(daemon.socket())).unwrap();
    let mut of_two_nodes = definition();
    of_two_nodes.nodes = 2;
    session.define_tiles(of_two_nodes).unwrap();
    session.resume(Generation(0)).unwrap();
    write(&mut session, 0..TILE_COUNT, 1);
    let first = session.commit(b"one".to_vec()).unwrap();
    assert!(!first.confirmed);
    // The other node may still be at nothing: nothing may be written over.
    let slot = session.take_slot(0).unwrap();
    session.swap_out(TileIndex(0), slot).unwrap();
    let early = wait_for(&mut session, 1).unwrap().remove(0);
    assert_eq!(early.result.unwrap_err().kind(), FaultKind::WrongGeneration);
    drop(early.slot);
    session.confirm(Generation(1)).unwrap();
    write(&mut session, 0..TILE_COUNT, 2);
    session.commit(b"two".to_vec()).unwrap();
    session.close().unwrap();

    let mut session = Session::open(settings(daemon.socket())).unwrap();
    let job = session.info().job.clone().unwrap();
    let known: Vec<_> = job
        .generations
        .iter()
        .map(|g| (g.generation.0, g.confirmed, &g.blobs[0].blob[..]))
        .collect();
    assert_eq!(known, [(1, true, &b"one"[..]), (2, false, &b"two"[..])]);
    for absent in [0, 3, u64::MAX] {
        let error = session.resume(Generation(absent)).unwrap_err();
        assert_eq!(error.fault(), Some(FaultKind::WrongGeneration), "{error}");
    }
    assert_eq!(session.resume(Generation(1)).unwrap(), Generation(2));
    assert_content(&mut session, 0..TILE_COUNT, 1);
    kill_9(&daemon);
    drop((session, daemon));

    let daemon = place.start();
    let mut session = Session::open(settings(daemon.socket())).unwrap();
    let generations = &session.info().job.as_ref().unwrap().generations;
    assert_eq!(generations.len(), 1);
    assert_eq!(generations[0].generation, Generation(1));
    session.resume(Generation(1)).unwrap();
    assert_content(&mut session, 0..TILE_COUNT, 1);
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
    assert!(done.slot.as_slice().iter().all(|b| *b == 0xff));
    drop(done.slot);
    assert_content(&mut session, 6..TILE_COUNT, 1);
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
        assert!(before.elapsed() < Duration::from_secs(2));
    });
    // And everything else fails at once too.
    let before = Instant::now();
    assert!(session.commit(Vec::new()).is_err());
    assert!(session.confirm(Generation(1)).is_err());
    assert!(session.close().is_err());
    assert!(before.elapsed() < Duration::from_secs(2));
}

#[test]
fn ranks_commit_together_and_each_finds_its_blob() {
    let place = Place::new();
    let daemon = place.start();
    let rank = |rank| {
        let mut settings = settings(daemon.socket());
        settings.rank = Rank(rank);
        settings.local_ranks = 2;
        Session::open(settings)
    };
    let (mut zero, mut one) = (rank(0).unwrap(), rank(1).unwrap());
    assert_eq!(rank(0).err().unwrap().fault(), Some(FaultKind::Busy));
    let mut alone = settings(daemon.socket());
    alone.rank = Rank(2);
    assert!(Session::open(alone).err().unwrap().fault().is_some());
    for session in [&mut zero, &mut one] {
        session.define_tiles(definition()).unwrap();
    }
    // One rank's resume may wait for the other's.
    std::thread::scope(|scope| {
        scope.spawn(|| one.resume(Generation(0)).unwrap());
        zero.resume(Generation(0)).unwrap();
    });
    write(&mut zero, 0..6, 1);
    write(&mut one, 6..TILE_COUNT, 1);
    zero.begin_commit(b"zero".to_vec()).unwrap();
    zero.wait(Duration::from_millis(200)).unwrap();
    assert!(zero.poll_commit().is_none(), "committed without rank 1");
    let of_one = one.commit(b"one".to_vec()).unwrap();
    let of_zero = loop {
        zero.wait(LONG).unwrap();
        if let Some(result) = zero.poll_commit() {
            break result.unwrap();
        }
    };
    assert_eq!(of_zero, of_one);
    zero.close().unwrap();
    one.close().unwrap();

    let again = rank(1).unwrap();
    let generation = again.info().job.as_ref().unwrap().generations[0].clone();
    let blobs: Vec<_> = generation
        .blobs
        .iter()
        .map(|b| (b.rank.0, &b.blob[..]))
        .collect();
    assert_eq!(blobs, [(0, &b"zero"[..]), (1, &b"one"[..])]);
}

#[test]
fn a_rank_that_dies_ends_the_generation_for_the_others() {
    let place = Place::new();
    let daemon = place.start();
    let rank = |rank| {
        let mut settings = settings(daemon.socket());
        settings.rank = Rank(rank);
        settings.local_ranks = 2;
        Session::open(settings).unwrap()
    };
    let (mut zero, mut one) = (rank(0), rank(1));
    zero.define_tiles(definition()).unwrap();
    one.define_tiles(definition()).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| one.resume(Generation(0)).unwrap());
        zero.resume(Generation(0)).unwrap();
    });
    write(&mut zero, 0..6, 1);
    zero.begin_commit(Vec::new()).unwrap();
    drop(one);
    let before = Instant::now();
    let refused = loop {
        zero.wait(LONG).unwrap();
        if let Some(result) = zero.poll_commit() {
            break result.unwrap_err();
        }
    };
    assert!(before.elapsed() < Duration::from_secs(2));
    assert!(refused.fault().is_some(), "{refused}");
    assert!(refused.to_string().contains("rank 1"), "{refused}");
    let mut slot = zero.take_slot(0).unwrap();
    slot.as_mut_slice().fill(1);
    zero.swap_out(TileIndex(0), slot).unwrap();
    let error = wait_for(&mut zero, 1)
        .unwrap()
        .remove(0)
        .result
        .unwrap_err();
    assert_eq!(error.kind(), FaultKind::Poisoned);
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

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    // Tiles lie on whole blocks.
    (0..bytes.len())
        .step_by(4096)
        .find(|at| bytes[*at..].starts_with(wanted))
}
