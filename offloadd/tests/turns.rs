//! Tests how a drive's bandwidth is divided and how long operations wait: large tiles, many jobs, or returning at once or after a pause give no user
//! or job more than its weight; a drive does not idle while an operation waits; and a process that reads small tiles one by one does not wait for
//! everything that another has in flight. The drive has virtual time: it serves operations in order at its rate and answers a while later, so every
//! figure is the same on every machine.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use offload_api::geometry::{Geometry, SlotClass};
use offload_api::ids::DeviceIndex;
use offload_api::ring::entry::Priority;
use offloadd::arena::{Arena, LockPolicy};
use offloadd::engine::{Io, IoDone, Memory};
use offloadd::io::{AlignedBytes, IoId, IoOp, SessionId};
use offloadd::queue::{DeviceLimits, Owner, Queue};
use offloadd::quota::{WEIGHT_DEFAULT, WEIGHT_MAX};

const KIB: u32 = 1 << 10;
const MIB: u32 = 1 << 20;

/// Latency of the drive.
const ANSWER_NS: u64 = 100_000;

/// A client that keeps a number of operations of one size in flight.
#[derive(Clone, Copy, Debug)]
struct Client {
    owner: Owner,
    bytes: u32,
    depth: u32,
    /// Time from the end of one operation to the next.
    pause_ns: u64,
    /// Time when the client arrives.
    from_ns: u64,
}

/// Bytes and times of a client.
#[derive(Debug, Default)]
struct Got {
    bytes: u64,
    /// Duration of each operation, in the order of their ends.
    took_ns: Vec<u64>,
}

impl Got {
    /// Returns the longest duration of the second half: in the first half the queue may not know the other clients yet.
    fn longest_ns(&self) -> u64 {
        let half = &self.took_ns[self.took_ns.len() / 2..];
        *half.iter().max().expect("it got something")
    }
}

fn owner(uid: u32, share: u32, job: u64) -> Owner {
    Owner::Session {
        uid,
        user_weight: share,
        job_weight: WEIGHT_DEFAULT,
        job,
        session: SessionId(job),
    }
}

/// Owner for job `number` of one user, with this weight among the user's jobs.
fn job(number: u64, job_weight: u32) -> Owner {
    Owner::Session {
        uid: 1,
        user_weight: WEIGHT_DEFAULT,
        job_weight,
        job: number,
        session: SessionId(number),
    }
}

/// User `number` or job `number` with this weight: turns work alike for both.
const BOTH: [fn(u64, u32) -> Owner; 2] = [
    |number, share| owner(number as u32, share, number),
    |number, share| job(number, share),
];

/// A client that floods the drive: 8 tiles of 4 MiB.
fn flood(uid: u32, share: u32, job: u64) -> Client {
    Client {
        owner: owner(uid, share, job),
        bytes: 4 * MIB,
        depth: 8,
        pause_ns: 0,
        from_ns: 0,
    }
}

/// A client that reads one tile after the other.
fn one_by_one(uid: u32, bytes: u32) -> Client {
    Client {
        owner: owner(uid, WEIGHT_DEFAULT, u64::from(uid)),
        bytes,
        depth: 1,
        pause_ns: 0,
        from_ns: 0,
    }
}

/// Runs the clients for `ms` milliseconds of reads with prefetch priority.
fn run(bytes_per_s: u64, clients: &[Client], ms: u64) -> Vec<Got> {
    run_as(Priority::Prefetch, ANSWER_NS, bytes_per_s, clients, ms)
}

fn run_as(
    priority: Priority,
    answer_ns: u64,
    bytes_per_s: u64,
    clients: &[Client],
    ms: u64,
) -> Vec<Got> {
    let class = SlotClass {
        slot_bytes: 4 << 20,
        slot_count: 1,
    };
    let geometry = Geometry::new(&[class]).unwrap();
    let arena = Arc::new(Arena::make(&geometry, LockPolicy::Try).unwrap());
    // Limits that the daemon has for a drive of this rate.
    let limits = DeviceLimits {
        piece_bytes: MIB,
        window_bytes: [(bytes_per_s / 100).clamp(8 << 20, 64 << 20); 2],
        bytes_per_s: [bytes_per_s; 2],
    };
    let mut queue = Queue::new(&[limits]);
    let begin = Instant::now();
    let (mut now, mut free_at, mut pushed) = (0u64, 0u64, 0u64);
    // Time of the end, time of the start, and the operation.
    let mut drive: VecDeque<(u64, u64, Io)> = VecDeque::new();
    let mut got: Vec<Got> = clients.iter().map(|_| Got::default()).collect();
    // Operations that are due to begin: time and client.
    let mut to_begin: Vec<(u64, usize)> = (clients.iter().enumerate())
        .flat_map(|(index, client)| (0..client.depth).map(move |_| (client.from_ns, index)))
        .collect();
    // Operations by id: client and start time.
    let mut under_way: Vec<(usize, u64)> = Vec::new();
    let mut pieces = Vec::new();
    loop {
        for (_, index) in to_begin.extract_if(.., |(at, _)| *at <= now) {
            let client = clients[index];
            let memory = match client.owner {
                Owner::Daemon => Memory::Meta(AlignedBytes::zeroed(client.bytes as usize)),
                Owner::Session { .. } => Memory::Arena {
                    arena: arena.clone(),
                    offset: 0,
                    piece: 0,
                },
            };
            let io = Io {
                id: IoId(under_way.len() as u64),
                device: DeviceIndex(0),
                op: IoOp::Read,
                offset: 0,
                bytes: client.bytes,
                memory,
            };
            under_way.push((index, now));
            queue.push(io, priority, client.owner);
            pushed += 1;
        }
        queue.start(begin + Duration::from_nanos(now), &mut pieces);
        for piece in pieces.drain(..) {
            let takes_ns = u64::from(piece.bytes) * 1_000_000_000 / bytes_per_s;
            free_at = free_at.max(now) + takes_ns;
            drive.push_back((free_at + answer_ns, now, piece));
        }
        let ends = drive.front().map(|(end, _, _)| *end);
        let begins = to_begin.iter().map(|(at, _)| *at).min();
        now = ends
            .into_iter()
            .chain(begins)
            .min()
            .expect("an event follows");
        if now > ms * 1_000_000 {
            break;
        }
        if ends != Some(now) {
            continue;
        }
        let (_, since, piece) = drive.pop_front().expect("just seen");
        let piece = IoDone {
            id: piece.id,
            outcome: Ok(piece.bytes),
            device_ns: now - since,
            retried_count: 0,
            memory: piece.memory,
        };
        if let Some(done) = queue.ended(piece, begin + Duration::from_nanos(now)) {
            let (index, since) = under_way[done.id.0 as usize];
            got[index].bytes += u64::from(clients[index].bytes);
            got[index].took_ns.push(now - since);
            to_begin.push((now + clients[index].pause_ns, index));
        }
    }
    assert!(pushed > 0);
    got
}

fn of_the_drive(got: &[Got], bytes_per_s: u64, ms: u64) -> f64 {
    let bytes: u64 = got.iter().map(|got| got.bytes).sum();
    bytes as f64 / (bytes_per_s * ms / 1000) as f64
}

#[test]
fn three_shares_get_three_times_as_much_as_one() {
    for [three, one] in [
        [(4 * MIB, 8), (4 * MIB, 8)],
        // Neither large tiles nor many of them give more turns.
        [(MIB, 16), (4 * MIB, 32)],
        [(4 * MIB, 8), (64 * KIB, 256)],
        [(64 * KIB, 256), (4 * MIB, 8)],
    ] {
        for owner in BOTH {
            let client = |number, share, (bytes, depth)| Client {
                owner: owner(number, share),
                bytes,
                depth,
                ..flood(0, share, 0)
            };
            let clients = [client(1, 300, three), client(2, 100, one)];
            let got = run(3_200_000_000, &clients, 2000);
            let ratio = got[0].bytes as f64 / got[1].bytes as f64;
            assert!((2.85..3.15).contains(&ratio), "{clients:?}: {ratio}");
            let used = of_the_drive(&got, 3_200_000_000, 2000);
            assert!(used > 0.95, "{clients:?}: {used} of the drive");
        }
    }
}

#[test]
fn a_users_jobs_share_its_part_and_others_keep_theirs() {
    // However large a job's weight is, the job gets a part of its user's bandwidth.
    for shares in [[WEIGHT_DEFAULT; 3], [100, 200, 300], [3, 6, 3], [2000; 3]] {
        let of = |index: usize| Client {
            owner: job(index as u64 + 1, shares[index]),
            ..flood(1, WEIGHT_DEFAULT, 0)
        };
        let clients = [of(0), of(1), of(2), flood(2, WEIGHT_DEFAULT, 4)];
        let got = run(3_200_000_000, &clients, 3000);
        let all: u64 = got.iter().map(|got| got.bytes).sum();
        let parts: Vec<f64> = got.iter().map(|g| g.bytes as f64 / all as f64).collect();
        let together = f64::from(shares.iter().sum::<u32>());
        let due = shares.map(|share| f64::from(share) / together / 2.0);
        for (part, due) in parts.iter().zip(due.into_iter().chain([0.5])) {
            assert!((part / due - 1.0).abs() < 0.05, "{shares:?}: {parts:?}");
        }
    }
}

/// A client that pauses saves nothing up, and its return delays no other client more than its presence would.
#[test]
fn who_comes_after_long_gets_its_share_from_then_on() {
    let rate = 3_200_000_000;
    for owner in BOTH {
        let light = Client {
            owner: owner(1, 100),
            ..flood(0, 100, 0)
        };
        let heavy = Client {
            owner: owner(2, 300),
            ..light
        };
        let late = Client {
            from_ns: 1_000_000_000,
            ..heavy
        };
        let beside = run(rate, &[light, heavy], 2000);
        let got = run(rate, &[light, late], 2000);
        let seconds = got.iter().map(|got| got.bytes as f64 / rate as f64);
        let seconds: Vec<f64> = seconds.collect();
        assert!((1.19..1.31).contains(&seconds[0]), "{light:?}: {seconds:?}");
        assert!((0.71..0.79).contains(&seconds[1]), "{light:?}: {seconds:?}");
        let longest = got[0].took_ns.iter().max().unwrap();
        let usual = beside[0].took_ns.iter().max().unwrap();
        assert!(*longest < usual * 5 / 4, "{light:?}: {longest}, {usual}");
    }
}

/// Others' jobs or ranks may have been served much more in relation to their weight: that is no debt of this user.
#[test]
fn who_reads_one_by_one_beside_others_of_his_own_never_starves() {
    let rate = 3_200_000_000;
    let rank = |session, client: Client| {
        let Owner::Session {
            uid,
            user_weight,
            job_weight,
            job,
            ..
        } = client.owner
        else {
            panic!("{client:?}");
        };
        let session = SessionId(session);
        let owner = Owner::Session {
            uid,
            user_weight,
            job_weight,
            job,
            session,
        };
        Client { owner, ..client }
    };
    let by_one = |job| Client {
        bytes: MIB,
        depth: 1,
        ..flood(2, 100, job)
    };
    for cases in [
        // Another user's job, fast because it is alone.
        vec![by_one(1), flood(1, 100, 0), flood(2, 100, 3)],
        // Another user's job, fast because of its weight.
        vec![by_one(1), flood(1, WEIGHT_MAX, 0), flood(2, 100, 3)],
        // Ranks of one job beside those of another.
        vec![
            rank(1, by_one(1)),
            rank(2, flood(2, 100, 1)),
            rank(3, flood(1, 100, 0)),
        ],
    ] {
        let got = run(rate, &cases, 3000);
        let (times, half) = (&got[0].took_ns, got[0].took_ns.len() / 2);
        assert!(half > 5, "{cases:?}: {} reads in three seconds", 2 * half);
        let longest = |times: &[u64]| *times.iter().max().unwrap() as f64;
        let (early, late) = (longest(&times[..half]), longest(&times[half..]));
        assert!(late < 1.5 * early, "{cases:?}: {early} ns, later {late}");
    }
}

#[test]
fn what_one_does_not_want_is_the_others() {
    let rate = 3_200_000_000;
    for owner in BOTH {
        // Three times the weight, and asks for 20 MiB every 20 ms: a third of the drive.
        let seldom = Client {
            owner: owner(1, 300),
            bytes: 4 * MIB,
            depth: 5,
            pause_ns: 14_000_000,
            ..flood(0, 300, 0)
        };
        let other = |share| Client {
            owner: owner(2, share),
            ..flood(0, share, 0)
        };
        let alone = run(rate, &[seldom], 2000);
        let both = run(rate, &[seldom, other(100)], 2000);
        let kept = both[0].bytes as f64 / alone[0].bytes as f64;
        assert!(kept > 0.8, "it gets what it wants: {kept}");
        let used = of_the_drive(&both, rate, 2000);
        assert!(used > 0.95, "{used} of the drive");
        assert!(both[1].bytes > both[0].bytes, "the rest is the other's");
        // Alone, a weight has no effect.
        let alone = run(rate, &[other(1)], 2000);
        assert!(of_the_drive(&alone, rate, 2000) > 0.98);
    }
}

#[test]
fn small_reads_take_at_most_twice_as_long_while_another_floods() {
    for (rate, answer_ns) in [
        (620_000_000, 100_000),
        (3_200_000_000, 100_000),
        (3_200_000_000, 500_000),
        (6_200_000_000, 100_000),
        (14_000_000_000, 1_000_000),
    ] {
        let run = |clients: &[Client]| run_as(Priority::Prefetch, answer_ns, rate, clients, 1000);
        for bytes in [4 * KIB, 64 * KIB, 256 * KIB] {
            let small = one_by_one(1, bytes);
            let quiet = run(&[small])[0].longest_ns();
            let floods = [small, flood(2, 100, 2), flood(3, 100, 3)];
            // For the longest reads, a third of the drive is not enough.
            let count = if bytes < 256 * KIB { 3 } else { 2 };
            let among = run(&floods[..count]);
            let longest = among[0].longest_ns();
            let case = format!("{bytes} bytes at {rate} that answers in {answer_ns} ns");
            assert!(
                longest <= 2 * quiet,
                "{case}: {quiet} ns alone, {longest} among floods"
            );
            let used = of_the_drive(&among, rate, 1000);
            assert!(used > 0.7, "{case}: {used} of the drive");
        }
    }
}

/// A client that has all its operations in flight at once waits for no turn.
#[test]
fn shares_count_also_where_all_that_is_wanted_fits_the_window() {
    let rate = 3_200_000_000;
    for (shares, depths, part) in [
        ([300, 100], [8, 8], 3.0),
        ([300, 100], [8, 6], 3.0),
        ([300, 100], [6, 12], 3.0),
        ([200, 100], [8, 8], 2.0),
        ([WEIGHT_DEFAULT; 2], [8, 8], 1.0),
    ] {
        for owner in BOTH {
            let eight = |of: usize| Client {
                owner: owner(of as u64 + 1, shares[of]),
                bytes: MIB,
                depth: depths[of],
                ..flood(0, 0, 0)
            };
            let clients = [0, 1].map(eight);
            let got = run(rate, &clients, 2000);
            let ratio = got[0].bytes as f64 / got[1].bytes as f64;
            assert!((0.9..1.1).contains(&(ratio / part)), "{clients:?}: {ratio}");
            let used = of_the_drive(&got, rate, 2000);
            assert!(used > 0.95, "{clients:?}: {used} of the drive");
        }
    }
}

#[test]
fn one_who_reads_now_and_then_holds_nobody_back() {
    let rate = 3_200_000_000;
    let seldom = Client {
        pause_ns: 100_000_000,
        ..one_by_one(1, 4 * KIB)
    };
    let got = run(rate, &[seldom, flood(2, 100, 2)], 2000);
    assert!(got[0].took_ns.len() > 10);
    let used = of_the_drive(&got, rate, 2000);
    assert!(used > 0.97, "{used} of the drive");
}

/// A client that has left holds back no bandwidth.
#[test]
fn a_flood_has_the_drive_for_itself_again_when_the_other_has_ended() {
    let rate = 3_200_000_000;
    let once = Client {
        pause_ns: u64::MAX / 2,
        ..one_by_one(1, 64 * KIB)
    };
    let got = run(rate, &[once, flood(2, 100, 2)], 2000);
    assert_eq!(got[0].took_ns.len(), 1);
    let used = of_the_drive(&got, rate, 2000);
    assert!(used > 0.97, "{used} of the drive");
}

#[test]
fn tiles_that_move_take_a_small_part_from_those_who_want_the_drive() {
    let moves = Client {
        owner: Owner::Daemon,
        bytes: MIB,
        depth: 16,
        pause_ns: 0,
        from_ns: 0,
    };
    let rate = 3_200_000_000;
    for share in [1, 10, WEIGHT_DEFAULT, WEIGHT_MAX] {
        let got = run(rate, &[moves, flood(2, share, 2)], 2000);
        let part = got[0].bytes as f64 / (got[0].bytes + got[1].bytes) as f64;
        assert!((0.09..0.125).contains(&part), "{share}: {part}");
    }
    let alone = run(rate, &[moves], 2000);
    assert!(of_the_drive(&alone, rate, 2000) > 0.98);
}

#[test]
fn records_do_not_wait_for_their_turn_whatever_the_users_shares_are() {
    let rate = 3_200_000_000;
    let records = Client {
        owner: Owner::Daemon,
        bytes: MIB,
        depth: 1,
        pause_ns: 0,
        from_ns: 0,
    };
    let longest = [1, WEIGHT_DEFAULT, WEIGHT_MAX].map(|share| {
        let floods = [flood(1, share, 1), flood(2, share, 2)];
        let clients = [records, floods[0], floods[1]];
        run_as(Priority::Demand, ANSWER_NS, rate, &clients, 1000)[0].longest_ns()
    });
    // Only the operations in flight go before them.
    let window_ns = 10_000_000 + 10 * ANSWER_NS;
    assert!(longest.iter().all(|&ns| ns < window_ns), "{longest:?}");
}
