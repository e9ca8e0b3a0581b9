//! Tests that a commit is neither lost nor partial, that a generation whose tiles were overwritten is not offered, that ranks commit together, that
//! one rank's death does not leave the others waiting, and that a crash of a job without durability is noticed.

use std::path::Path;
use std::time::{Duration, Instant};

use offload_api::proto::MetricsRequest;
use offload_client::{
    BLOB_BYTES_MAX, ClientError, Durability, FaultKind, Generation, Rank, Session, SessionSettings,
    TileIndex,
};

use crate::hostile::connect;
use crate::real::*;

/// Opens one of several ranks of the job.
fn open_rank(socket: &Path, rank: u32, local_ranks: u32) -> Result<Session, ClientError> {
    Session::open(SessionSettings {
        rank: Rank(rank),
        local_ranks,
        ..settings(socket)
    })
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
    // The generation before the newest is not offered: tiles of the working generation have overwritten it.
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
    // The other node may have nothing yet, so nothing may be overwritten.
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
fn ranks_commit_together_and_each_finds_its_blob() {
    let place = Place::new();
    let daemon = place.start();
    let rank = |rank| open_rank(daemon.socket(), rank, 2);
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
    until_called(daemon.socket(), 1);
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

/// Waits until the daemon has the commit calls of `ranks` ranks of its only job.
fn until_called(socket: &Path, ranks: u32) {
    let (runtime, mut calls) = connect(socket);
    let until = Instant::now() + LONG;
    let mut called = 0;
    while called != ranks {
        assert!(Instant::now() < until, "{called} of {ranks} ranks");
        let answer = runtime.block_on(calls.metrics(MetricsRequest {})).unwrap();
        called = answer.into_inner().jobs[0].commit_ranks_called;
    }
}

#[test]
fn more_ranks_than_defined_the_job_share_the_room_for_blobs() {
    let place = Place::new();
    let daemon = place.start();
    let mut alone = Session::open(settings(daemon.socket())).unwrap();
    alone.define_tiles(definition()).unwrap();
    alone.resume(Generation(0)).unwrap();
    alone.commit(vec![1; BLOB_BYTES_MAX]).unwrap();
    alone.close().unwrap();
    // Three ranks together may have as many operations as one.
    let mut ranks: Vec<Session> = (0..3)
        .map(|rank| open_rank(daemon.socket(), rank, 3).unwrap())
        .collect();
    for session in &mut ranks {
        session.define_tiles(definition()).unwrap();
        session.resume(Generation(1)).unwrap();
    }
    let [zero, one, two] = &mut ranks[..] else {
        unreachable!("three")
    };
    for session in [&mut *zero, &mut *one] {
        session.begin_commit(vec![2; BLOB_BYTES_MAX / 3]).unwrap();
    }
    until_called(daemon.socket(), 2);
    let refused = two.commit(vec![2; BLOB_BYTES_MAX / 2]).unwrap_err();
    assert_eq!(refused.fault(), Some(FaultKind::Invalid), "{refused}");
    assert!(refused.to_string().contains("has room for"), "{refused}");
    let committed = two.commit(vec![2; BLOB_BYTES_MAX / 4]).unwrap();
    assert_eq!(committed.generation, Generation(2));
}

#[test]
fn a_rank_that_dies_ends_the_generation_for_the_others() {
    let place = Place::new();
    let daemon = place.start();
    let rank = |rank| open_rank(daemon.socket(), rank, 2).unwrap();
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
    assert!(before.elapsed() < LONG / 2);
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
    assert!(error.to_string().contains("rank 1 of job"), "{error}");
}

#[test]
fn a_job_without_durability_says_so_after_a_crash_and_resumes_after_an_end_in_order() {
    let place = Place::new();
    let mut daemon = place.start();
    let mut session = Session::open(settings(daemon.socket())).unwrap();
    let mut in_place = definition();
    in_place.durability = Durability::None;
    session.define_tiles(in_place).unwrap();
    session.resume(Generation(0)).unwrap();
    write(&mut session, 0..TILE_COUNT, 1);
    session.commit(Vec::new()).unwrap();
    kill_9(&daemon);
    drop((session, daemon));

    // Nothing was written since the commit.
    daemon = place.start();
    let mut session = Session::open(settings(daemon.socket())).unwrap();
    assert!(session.info().job.as_ref().unwrap().clean);
    session.resume(Generation(1)).unwrap();
    assert_content(&mut session, 0..TILE_COUNT, 1);
    write(&mut session, 0..1, 2);
    kill_9(&daemon);
    drop((session, daemon));

    daemon = place.start();
    let mut session = Session::open(settings(daemon.socket())).unwrap();
    assert!(!session.info().job.as_ref().unwrap().clean);
    let error = session.resume(Generation(1)).unwrap_err();
    assert_eq!(error.fault(), Some(FaultKind::Unclean), "{error}");
}

#[test]
fn tiles_of_a_session_alone_move_beside_a_commit_and_end_with_it() {
    let place = Place::new();
    let daemon = place.start();
    let mut session = open_new(daemon.socket());
    let first = session.reserve_scratch(&[TILE_BYTES; 4]).unwrap();
    assert_eq!(first, TileIndex(TILE_COUNT));
    let scratch = TILE_COUNT..TILE_COUNT + 4;
    write(&mut session, 0..TILE_COUNT, 1);
    session.begin_commit(b"one".to_vec()).unwrap();
    write(&mut session, scratch.clone(), 7);
    let until = Instant::now() + LONG;
    let committed = loop {
        assert!(Instant::now() < until);
        session.wait(Duration::from_millis(10)).unwrap();
        if let Some(committed) = session.poll_commit() {
            break committed.unwrap();
        }
    };
    assert_eq!(committed.generation, Generation(1));
    assert_content(&mut session, scratch.clone(), 7);
    // A commit need not wait for writes of scratch tiles.
    let mut slot = session.take_slot(0).unwrap();
    slot.as_mut_slice().fill(3);
    session.swap_out(first, slot).unwrap();
    session.begin_commit(b"two".to_vec()).unwrap();
    wait_for(&mut session, 1).unwrap();
    drop(session);

    // It waits until the last operations of the session before have ended.
    let mut session = Session::open(settings(daemon.socket())).unwrap();
    let newest = session.info().job.clone().unwrap().generations.pop();
    let newest = newest.unwrap().generation;
    session.resume(newest).unwrap();
    assert_content(&mut session, 0..TILE_COUNT, 1);
    let slot = session.take_slot(0).unwrap();
    let (_, error) = session.swap_in(first, slot).unwrap_err();
    assert_eq!(error.fault(), Some(FaultKind::UnknownTile), "{error}");
}
