//! Tests the quotas of users and jobs when several ask at once. What could go wrong: two requests get what only one may have, because the first one
//! is still being written; the first rank takes the share of all ranks of its job.

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::Generation;
use offloadd::core::{Call, Event, OpenSession, Peer, Reply};
use offloadd::io::SessionId;
use offloadd::quota::{JOBS_A_USER_DEFAULT, Quota, Quotas};
use offloadd::store::definition::Durability;
use offloadd::store::format::format;
use offloadd::store::superblock::MeasuredRates;
use offloadd::store::superblock::StoreId;
use test_hooks::random::SimRandom;

use crate::disks::SimDisks;

use super::world::{LIMITS, PEER, World, definition, formatted, job};

fn with(default: Quota, job: Quota) -> World {
    let mut world = World::start(formatted(), SimRandom::new(1));
    world.event(Event::Quotas(Quotas {
        default,
        job,
        ..Quotas::default()
    }));
    world
}

#[test]
fn a_definition_that_is_being_written_counts() {
    let mut world = with(Quota::default(), Quota::default());
    let first = world.open(&job("first"), 0, 1).unwrap().0;
    let tiles = || definition(6, Durability::Committed, 1);
    let Reply::Define { reserved_bytes } = world.define(first, tiles()).unwrap() else {
        panic!("another reply than asked for");
    };
    world.event(Event::Quotas(Quotas {
        default: Quota {
            device_bytes_max: Some(2 * reserved_bytes + 8192),
            ..Quota::default()
        },
        ..Quotas::default()
    }));
    let second = world.open(&job("second"), 0, 1).unwrap().0;
    let defining = world.call(Call::Define {
        token: second.token,
        definition: tiles(),
    });
    let scratch = |world: &mut World, bytes: &[u32]| {
        let (token, tile_bytes) = (first.token, bytes.to_vec());
        world.call(Call::ReserveScratch { token, tile_bytes })
    };
    // No operation of the definition has ended; calls without device operations are answered at once.
    let call = scratch(&mut world, &[8192, 4096]);
    let fault = world.replies.remove(&call).expect("at once").unwrap_err();
    assert_eq!(fault.kind, FaultKind::NoSpace);
    for word in ["8.0 KiB are free, 4.0 KiB too few", "second ", "first "] {
        assert!(fault.message.contains(word), "{word}: {fault}");
    }
    let call = scratch(&mut world, &[8192]);
    assert!(world.replies[&call].is_ok());
    assert_eq!(world.answer(defining), Ok(Reply::Define { reserved_bytes }));
}

#[test]
fn a_definition_that_failed_counts_no_more() {
    let mut world = with(Quota::default(), Quota::default());
    let first = world.open(&job("first"), 0, 1).unwrap().0;
    let defining = world.call(Call::Define {
        token: first.token,
        definition: definition(6, Durability::Committed, 1),
    });
    world.event(Event::Quotas(Quotas {
        default: Quota {
            device_bytes_max: Some(1 << 19),
            ..Quota::default()
        },
        ..Quotas::default()
    }));
    let broken = crate::disks::SimFault::Errno(libc::EIO);
    world.engine.disks.break_for_good(0, broken);
    assert_eq!(world.answer(defining).unwrap_err().kind, FaultKind::Io);
    world.engine.disks.repair();
    let again = world.define(first, definition(6, Durability::Committed, 1));
    assert!(again.is_ok(), "{again:?}");
}

/// Returns what each rank of a job gets that asks for these numbers.
fn granted(world: &mut World, name: &str, asked: &[u32]) -> Vec<Result<u32, Fault>> {
    let ranks = asked.len() as u32;
    let open = |(rank, iodepth)| {
        let request = world.open_request(&job(name), rank, ranks);
        match world.ask(Call::Open(OpenSession { iodepth, ..request })) {
            Ok(Reply::Open(reply)) => Ok(reply.iodepth),
            Ok(other) => panic!("{other:?}"),
            Err(fault) => Err(fault),
        }
    };
    (0..ranks).zip(asked.iter().copied()).map(open).collect()
}

fn inflight(max: u32) -> Quota {
    Quota {
        inflight_max: Some(max),
        ..Quota::default()
    }
}

#[test]
fn operations_in_flight_are_parted_among_the_ranks_of_a_job() {
    for (default, job) in [
        (Quota::default(), inflight(10)),
        (inflight(10), Quota::default()),
    ] {
        let mut world = with(default, job);
        let got = granted(&mut world, "one", &[8, 8, 8, 8]);
        assert_eq!(got, [Ok(2), Ok(2), Ok(3), Ok(3)]);
    }
    let mut world = with(Quota::default(), inflight(10));
    // A rank that asks for little leaves more to the others, and a job alone gets everything.
    let got = granted(&mut world, "one", &[1, 8, 8]);
    assert_eq!(got, [Ok(1), Ok(4), Ok(5)]);
    assert_eq!(granted(&mut world, "two", &[16]), [Ok(10)]);
}

#[test]
fn what_the_ranks_of_a_begun_job_need_is_kept_from_another() {
    let mut world = with(inflight(8), Quota::default());
    let open = |world: &mut World, name: &str, rank| {
        let request = world.open_request(&job(name), rank, 2);
        match world.ask(Call::Open(OpenSession {
            iodepth: 8,
            ..request
        })) {
            Ok(Reply::Open(reply)) => Ok(reply.iodepth),
            Ok(other) => panic!("{other:?}"),
            Err(fault) => Err(fault),
        }
    };
    assert_eq!(open(&mut world, "one", 0), Ok(4));
    let fault = open(&mut world, "two", 0).unwrap_err();
    assert_eq!(fault.kind, FaultKind::TooMany);
    for word in [
        "8 operations in flight and has 4;",
        "other jobs that have not joined yet need 2",
        "2 ranks of job two",
    ] {
        assert!(fault.message.contains(word), "{word}: {fault}");
    }
    assert_eq!(open(&mut world, "one", 1), Ok(4));
}

#[test]
fn fewer_operations_than_ranks_are_refused_to_the_first_of_them() {
    let mut world = with(Quota::default(), inflight(3));
    let got = granted(&mut world, "one", &[8, 8, 8, 8]);
    let fault = got[0].clone().unwrap_err();
    assert_eq!(fault.kind, FaultKind::TooMany);
    for word in [
        "may have 3 operations",
        "4 ranks of job one",
        "inflight_max",
    ] {
        assert!(fault.message.contains(word), "{word}: {fault}");
    }
}

/// A rank may have to wait until all others have closed.
#[test]
fn nothing_is_kept_for_ranks_of_a_job_that_lost_one() {
    let mut world = with(inflight(8), Quota::default());
    let open = |world: &mut World, name: &str, rank, ranks| {
        let request = world.open_request(&job(name), rank, ranks);
        let (token, iodepth) = (request.token, 8);
        match world.ask(Call::Open(OpenSession { iodepth, ..request })) {
            Ok(Reply::Open(reply)) => (world.made[&token], token, reply.iodepth),
            other => panic!("{other:?}"),
        }
    };
    let (_, token, iodepth) = open(&mut world, "one", 0, 2);
    assert_eq!(iodepth, 4);
    let (second, ..) = open(&mut world, "one", 1, 2);
    let definition = definition(6, Durability::Committed, 1);
    world.ask(Call::Define { token, definition }).unwrap();
    let generation = Generation(0);
    world.ask(Call::Resume { token, generation }).unwrap();
    world.event(Event::PeerGone { session: second });
    world.run();
    let back = world.open_request(&job("one"), 1, 2);
    let fault = world.ask(Call::Open(back)).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Busy, "{fault}");
    assert_eq!(open(&mut world, "two", 0, 1).2, 4);
}

#[test]
fn a_user_has_as_many_jobs_as_his_quota_says_and_leaves_others_their_places() {
    let max = Quota {
        jobs_max: Some(2),
        ..Quota::default()
    };
    let mut world = with(max, Quota::default());
    let tiles = || definition(1, Durability::Committed, 1);
    for name in ["one", "two"] {
        let process = world.open(&job(name), 0, 1).unwrap().0;
        world.define(process, tiles()).unwrap();
        world
            .ask(Call::Close {
                token: process.token,
            })
            .unwrap();
    }
    let third = world.open(&job("three"), 0, 1).unwrap().0;
    let fault = world.define(third, tiles()).unwrap_err();
    assert_eq!(fault.kind, FaultKind::TooMany);
    for word in ["may have 2 jobs and has 2", "jobs_max"] {
        assert!(fault.message.contains(word), "{word}: {fault}");
    }
    // A job that exists is not a new job.
    let two = world.open(&job("two"), 0, 1).unwrap().0;
    world.define(two, tiles()).unwrap();

    let other = Peer {
        uid: PEER.uid + 1,
        ..PEER
    };
    let request = world.open_request(&job("one"), 0, 1);
    let token = request.token;
    let opening = world.call_as(other, Call::Open(request));
    world.answer(opening).unwrap();
    let definition = tiles();
    let defining = world.call_as(other, Call::Define { token, definition });
    world.answer(defining).unwrap();

    world
        .ask(Call::DropJob {
            uid: PEER.uid,
            job: job("one"),
        })
        .unwrap();
    world.define(third, tiles()).unwrap();
}

#[test]
fn a_user_without_a_quota_has_256_jobs_and_leaves_others_their_places() {
    let mut disks = SimDisks::new(&[96 << 20]);
    let rates = [MeasuredRates::default()];
    format(&mut disks, StoreId([9; 16]), &rates, 7, false).unwrap();
    let mut world = World::start(disks, SimRandom::new(1));
    let other = Peer {
        uid: PEER.uid + 1,
        ..PEER
    };
    let mut create = |peer: Peer, name: &str| {
        let request = world.open_request(&job(name), 0, 1);
        let token = request.token;
        let opening = world.call_as(peer, Call::Open(request));
        world.answer(opening).unwrap();
        let definition = definition(1, Durability::Committed, 1);
        let defining = world.call_as(peer, Call::Define { token, definition });
        let defined = world.answer(defining);
        let closing = world.call_as(peer, Call::Close { token });
        world.answer(closing).unwrap();
        defined
    };
    assert_eq!(JOBS_A_USER_DEFAULT, 256);
    for index in 0..JOBS_A_USER_DEFAULT {
        create(PEER, &format!("job-{index}")).unwrap();
    }
    let fault = create(PEER, "one-more").unwrap_err();
    assert_eq!(fault.kind, FaultKind::TooMany);
    for word in ["may have 256 jobs and has 256", "jobs_max"] {
        assert!(fault.message.contains(word), "{word}: {fault}");
    }
    create(other, "one").unwrap();
}

/// Opens a session of `peer` whose process has not fetched the descriptors.
fn open_unclaimed(world: &mut World, peer: Peer, name: &str) -> Result<SessionId, Fault> {
    let request = world.open_request(&job(name), 0, 1);
    let call = world.call_as(peer, Call::Open(request));
    match world.answer(call)? {
        Reply::Open(reply) => Ok(world.made[&reply.token]),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_user_has_half_of_all_sessions_and_few_that_wait_for_their_process() {
    let mut world = with(Quota::default(), Quota::default());
    let other = Peer { uid: 1001, pid: 2 };
    let mut unclaimed = Vec::new();
    let mut refused = Vec::new();
    for number in 0..LIMITS.sessions_max {
        match open_unclaimed(&mut world, PEER, &format!("of-one-{number}")) {
            Ok(session) => unclaimed.push(session),
            Err(fault) => refused.push(fault.kind),
        }
    }
    assert_eq!(unclaimed.len(), 4);
    assert!(refused.iter().all(|kind| *kind == FaultKind::Queued));
    open_unclaimed(&mut world, other, "of-another").unwrap();
    // One that is claimed, and one whose process has ended, make room for another each.
    let claimed = unclaimed.pop().unwrap();
    world.event(Event::Attached { session: claimed });
    unclaimed.push(open_unclaimed(&mut world, PEER, "next").unwrap());
    let session = unclaimed.pop().unwrap();
    world.event(Event::PeerGone { session });
    unclaimed.push(open_unclaimed(&mut world, PEER, "after-it").unwrap());
    for session in unclaimed {
        world.event(Event::Attached { session });
    }
    let mut held = 5;
    let fault = loop {
        match world.open(&job(&format!("claimed-{held}")), 0, 1) {
            Ok(_) => held += 1,
            Err(fault) => break fault,
        }
    };
    assert_eq!(
        (fault.kind, held),
        (FaultKind::TooMany, LIMITS.sessions_max / 2)
    );
    let words = format!("uid 1000 may have {held} sessions and has {held}");
    assert!(fault.message.contains(&words), "{fault}");
    open_unclaimed(&mut world, other, "of-another-too").unwrap();
}
