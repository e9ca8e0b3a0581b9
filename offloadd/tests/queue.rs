//! Tests the order in which waiting operations go to devices: a demanded tile does not wait behind read-ahead, read-ahead does not starve, writes do
//! not take the place of reads, a failed part fails the whole tile, and no operation is lost or ends twice. The test acts as the engine: it takes
//! pieces and ends them in any order.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use offload_api::geometry::{Geometry, SlotClass};
use offload_api::ids::DeviceIndex;
use offload_api::ring::entry::Priority;
use offloadd::arena::{Arena, LockPolicy};
use offloadd::engine::{Io, IoDone, Memory};
use offloadd::io::{AlignedBytes, IoId, IoOp, SessionId};
use offloadd::queue::{DeviceLimits, INFLIGHT_COUNT_MAX, Owner, Queue, TURNS};
use offloadd::quota::WEIGHT_DEFAULT;
use test_hooks::random::SimRandom;

const MIB: u32 = 1 << 20;

/// Owner for a user with one process.
fn owner(uid: u32, share: u32) -> Owner {
    Owner::Session {
        uid,
        user_weight: share,
        job_weight: WEIGHT_DEFAULT,
        job: u64::from(uid),
        session: SessionId(u64::from(uid)),
    }
}

struct Bench {
    queue: Queue,
    arena: Arc<Arena>,
    /// Pieces handed over and not ended, in order.
    pieces: Vec<Io>,
}

impl Bench {
    /// Makes devices that take 1 MiB at a time and 8 MiB in each direction.
    fn new(devices: usize) -> Self {
        let limits = DeviceLimits {
            piece_bytes: MIB,
            window_bytes: [8 << 20; 2],
            bytes_per_s: [800_000_000; 2],
        };
        let class = SlotClass {
            slot_bytes: 16 << 20,
            slot_count: 1,
        };
        let geometry = Geometry::new(&[class]).unwrap();
        Self {
            queue: Queue::new(&vec![limits; devices]),
            arena: Arc::new(Arena::make(&geometry, LockPolicy::Try).unwrap()),
            pieces: Vec::new(),
        }
    }

    /// Queues operation `id` at offset `id` times 16 MiB.
    fn push(&mut self, id: u64, device: u32, op: IoOp, bytes: u32, priority: Priority) {
        let memory = match op {
            IoOp::Flush => Memory::None,
            _ => Memory::Arena {
                arena: self.arena.clone(),
                offset: 0,
                piece: 0,
            },
        };
        let io = Io {
            id: IoId(id),
            device: DeviceIndex(device),
            op,
            offset: id << 24,
            bytes,
            memory,
        };
        self.queue.push(io, priority, owner(1, 100));
    }

    fn start(&mut self) {
        self.queue.start(Instant::now(), &mut self.pieces);
    }

    /// Ends the piece at `place` of those in flight.
    fn end(&mut self, place: usize, outcome: Result<u32, i32>) -> Option<IoDone> {
        let io = self.pieces.remove(place);
        let piece = IoDone {
            id: io.id,
            outcome,
            device_ns: 1,
            memory: io.memory,
            retried_count: 1,
        };
        self.queue.ended(piece, Instant::now())
    }

    /// Ends the oldest piece successfully and hands over more. Returns the operation of the ended piece, and whether the piece was its last.
    fn step(&mut self) -> (u64, bool) {
        let io = &self.pieces[0];
        let (whole, bytes) = (io.offset >> 24, io.bytes);
        let done = self.end(0, Ok(bytes));
        self.start();
        (whole, done.is_some())
    }

    fn inflight_bytes(&self, device: u32, op: IoOp) -> u64 {
        let of = |io: &&Io| io.device.0 == device && io.op == op;
        self.pieces
            .iter()
            .filter(of)
            .map(|io| u64::from(io.bytes))
            .sum()
    }
}

#[test]
fn a_wanted_read_behind_64_read_aheads_is_submitted_next() {
    let mut bench = Bench::new(1);
    for id in 0..64 {
        bench.push(id, 0, IoOp::Read, 4 * MIB, Priority::Prefetch);
    }
    bench.start();
    assert_eq!(bench.pieces.len(), 8, "the window and no more");
    bench.push(64, 0, IoOp::Read, 4 * MIB, Priority::Demand);
    // A demanded piece follows each of the eight pieces in flight as it ends, even before the rest of a tile already begun.
    for piece in 0..4 {
        bench.step();
        let handed = bench.pieces.last().unwrap();
        assert_eq!(handed.offset, (64 << 24) + u64::from(piece * MIB));
    }
    bench.step();
    assert!(
        bench.pieces.last().unwrap().offset < 64 << 24,
        "then they continue"
    );
}

#[test]
fn read_ahead_progresses_however_much_is_wanted() {
    let mut bench = Bench::new(1);
    bench.push(0, 0, IoOp::Read, 16 * MIB, Priority::Prefetch);
    for id in 1..=100 {
        bench.push(id, 0, IoOp::Read, 4 * MIB, Priority::Demand);
    }
    bench.start();
    let mut pieces_before = 0;
    for pieces in 0.. {
        match bench.step() {
            (0, true) => break,
            (0, false) => {}
            _ => pieces_before += 1,
        }
        assert!(pieces < 16 * TURNS + 8, "it starves");
    }
    assert!(
        pieces_before >= 16 * (TURNS - 1) - 8,
        "and yet {pieces_before} pieces went before its sixteen"
    );
}

/// A linear search would take minutes here: a process may promote as fast as its ring allows, while all others wait.
#[test]
fn promoting_costs_the_same_however_much_waits() {
    const COUNT: u64 = 200_000;
    let mut bench = Bench::new(1);
    for id in 0..COUNT {
        bench.push(id, 0, IoOp::Read, 4 * MIB, Priority::Prefetch);
    }
    let begun = Instant::now();
    for id in (0..COUNT).rev() {
        for (id, priority) in [
            (id, Priority::Demand),
            (id, Priority::Prefetch),
            (COUNT + id, Priority::Demand),
        ] {
            bench.queue.promote(IoId(id), priority);
        }
        let took = begun.elapsed();
        assert!(took < Duration::from_secs(60), "{took:?} down to {id}");
    }
    bench.start();
    let first = bench.pieces[0].offset >> 24;
    assert_eq!(first, COUNT - 1, "the first that went behind all others");
}

#[test]
fn what_was_read_ahead_goes_first_once_it_is_wanted() {
    let mut bench = Bench::new(1);
    for id in 0..64 {
        bench.push(id, 0, IoOp::Read, 4 * MIB, Priority::Prefetch);
    }
    bench.start();
    // One that waits, one that is in flight as a whole, one that does not exist.
    for id in [63, 0, 99] {
        bench.queue.promote(IoId(id), Priority::Demand);
    }
    let last: Vec<_> = (0..4)
        .map(|_| {
            bench.step();
            bench.pieces.last().unwrap().offset >> 24
        })
        .collect();
    assert_eq!(last, [63; 4]);
    // The priority goes back: the operation is behind the others of its priority.
    bench.queue.promote(IoId(62), Priority::Demand);
    bench.queue.promote(IoId(62), Priority::Prefetch);
    let mut order = Vec::new();
    while bench.queue.count() > 0 {
        if let (id, true) = bench.step() {
            order.push(id);
        }
    }
    assert_eq!(order.last(), Some(&62));
    // The first one ended above.
    assert_eq!(order.len(), 63, "none is lost and none ends twice");
}

#[test]
fn reads_and_writes_do_not_take_each_others_place() {
    let mut bench = Bench::new(2);
    for id in 0..20 {
        bench.push(id, 0, IoOp::Write, 4 * MIB, Priority::Prefetch);
    }
    bench.start();
    for id in 20..40 {
        bench.push(id, 0, IoOp::Read, 4 * MIB, Priority::Prefetch);
    }
    bench.push(40, 1, IoOp::Read, 4 * MIB, Priority::Prefetch);
    bench.start();
    let window = 8 << 20;
    assert_eq!(bench.inflight_bytes(0, IoOp::Write), window);
    assert_eq!(bench.inflight_bytes(0, IoOp::Read), window);
    assert_eq!(
        bench.inflight_bytes(1, IoOp::Read),
        4 << 20,
        "another device"
    );
    // The order stays while both wait.
    for _ in 0..60 {
        bench.step();
    }
    assert_eq!(bench.inflight_bytes(0, IoOp::Write), window);
    assert_eq!(bench.inflight_bytes(0, IoOp::Read), window);
    // A flush does not wait.
    bench.push(41, 0, IoOp::Flush, 0, Priority::Demand);
    bench.start();
    assert_eq!(bench.pieces.last().unwrap().op, IoOp::Flush);
    let place = bench.pieces.len() - 1;
    assert_eq!(bench.end(place, Ok(0)).unwrap().outcome, Ok(0));
}

#[test]
fn a_large_tile_is_in_flight_in_pieces_and_ends_once() {
    let mut bench = Bench::new(1);
    let bytes = 6 * MIB + 4096;
    bench.push(3, 0, IoOp::Write, bytes, Priority::Demand);
    bench.start();
    let places: Vec<_> = bench
        .pieces
        .iter()
        .map(|io| {
            let Memory::Arena { offset, .. } = io.memory else {
                panic!("{:?}", io.memory);
            };
            (io.offset - (3 << 24), offset, io.bytes)
        })
        .collect();
    let whole = |piece: u64| (piece << 20, piece << 20, MIB);
    let mut expected: Vec<_> = (0..6).map(whole).collect();
    expected.push((6 << 20, 6 << 20, 4096));
    assert_eq!(
        places, expected,
        "where on the device, where in memory, how much"
    );
    // Pieces end in any order.
    for left in (0..7).rev() {
        let place = if left % 2 == 0 { 0 } else { left };
        let moved = bench.pieces[place].bytes;
        let done = bench.end(place, Ok(moved));
        assert_eq!(done.is_some(), left == 0);
        if let Some(done) = done {
            assert_eq!((done.id, done.outcome), (IoId(3), Ok(bytes)));
            assert_eq!(done.retried_count, 7, "of all its pieces");
        }
    }
    assert_eq!(bench.queue.count(), 0);
    // The daemon's own bytes are one piece: they are its buffer, not a part of an arena.
    let own = Io {
        id: IoId(4),
        device: DeviceIndex(0),
        op: IoOp::Write,
        offset: 0,
        bytes: 2 * MIB,
        memory: Memory::Meta(AlignedBytes::zeroed(2 << 20)),
    };
    bench.queue.push(own, Priority::Demand, Owner::Daemon);
    bench.start();
    assert_eq!(bench.pieces[0].bytes, 2 * MIB);
    assert_eq!(bench.end(0, Ok(2 * MIB)).unwrap().outcome, Ok(2 * MIB));
}

#[test]
fn a_part_that_fails_or_is_short_fails_the_whole_and_the_first_one_is_told() {
    for (ends, outcome) in [
        // Which piece ends how, in this order; all others succeed.
        (vec![(5, Ok(4096))], Ok(5 * MIB + 4096)),
        (vec![(5, Ok(0)), (2, Ok(512))], Ok(2 * MIB + 512)),
        (vec![(5, Err(5)), (2, Ok(0))], Ok(2 * MIB)),
        (vec![(2, Err(5)), (5, Ok(0))], Err(5)),
        (vec![(0, Err(28)), (7, Err(5))], Err(28)),
    ] {
        let mut bench = Bench::new(1);
        bench.push(0, 0, IoOp::Write, 16 * MIB, Priority::Prefetch);
        bench.start();
        for &(piece, end) in &ends {
            let offset = u64::from(piece * MIB);
            let place = bench.pieces.iter().position(|io| io.offset == offset);
            assert!(bench.end(place.unwrap(), end).is_none());
        }
        bench.start();
        assert_eq!(bench.pieces.len(), 8 - ends.len(), "the rest stays here");
        while bench.pieces.len() > 1 {
            assert!(bench.end(0, Ok(MIB)).is_none());
        }
        assert_eq!(bench.end(0, Ok(MIB)).unwrap().outcome, outcome);
        assert_eq!(bench.queue.count(), 0);
        // The failed operation's place is free again.
        bench.push(1, 0, IoOp::Write, 16 * MIB, Priority::Prefetch);
        bench.start();
        assert_eq!(bench.inflight_bytes(0, IoOp::Write), 8 << 20);
    }
}

#[test]
fn small_operations_are_bounded_by_their_count_and_large_ones_never_stuck() {
    let mut bench = Bench::new(1);
    for id in 0..2 * INFLIGHT_COUNT_MAX as u64 {
        bench.push(id, 0, IoOp::Read, 4096, Priority::Prefetch);
    }
    bench.start();
    assert_eq!(bench.pieces.len(), INFLIGHT_COUNT_MAX);
    // A piece larger than the window goes alone.
    let limits = DeviceLimits {
        piece_bytes: MIB,
        window_bytes: [4096; 2],
        bytes_per_s: [800_000_000; 2],
    };
    bench.queue = Queue::new(&[limits]);
    bench.pieces.clear();
    bench.push(0, 0, IoOp::Write, 2 * MIB, Priority::Prefetch);
    bench.start();
    assert_eq!(bench.pieces.len(), 1);
    assert_eq!(bench.step(), (0, false));
    assert_eq!(bench.step(), (0, true));
}

#[test]
fn whatever_comes_and_ends_each_operation_ends_once_and_windows_hold() {
    let mut bench = Bench::new(3);
    for seed in 0..200 {
        let mut random = SimRandom::new(seed);
        let (mut pushed, mut ended) = (HashMap::new(), HashSet::new());
        while ended.len() < 200 {
            if pushed.len() < 200 && random.one_in(3) {
                let id = pushed.len() as u64;
                let op = [IoOp::Read, IoOp::Write, IoOp::Flush][random.below(3)];
                let priority = [Priority::Prefetch, Priority::Demand][random.below(2)];
                let bytes = match op {
                    IoOp::Flush => 0,
                    _ => 4096 * (1 + random.below(4096) as u32),
                };
                bench.push(id, random.below(3) as u32, op, bytes, priority);
                pushed.insert(id, (bytes, false));
            }
            if random.one_in(2) {
                bench.start();
            }
            for device in 0..3 {
                for op in [IoOp::Read, IoOp::Write] {
                    assert!(bench.inflight_bytes(device, op) <= 8 << 20, "seed {seed}");
                }
            }
            if bench.pieces.is_empty() {
                continue;
            }
            let place = random.below(bench.pieces.len());
            let (whole, bytes) = (bench.pieces[place].offset >> 24, bench.pieces[place].bytes);
            let fails = random.one_in(50);
            let outcome = if fails { Err(5) } else { Ok(bytes) };
            pushed.get_mut(&whole).expect("pushed").1 |= fails;
            if let Some(done) = bench.end(place, outcome) {
                assert!(
                    ended.insert(done.id),
                    "seed {seed}: {:?} ended twice",
                    done.id
                );
                let (bytes, failed) = pushed[&done.id.0];
                let outcome = if failed { Err(5) } else { Ok(bytes) };
                assert_eq!(done.outcome, outcome, "seed {seed}");
            }
        }
        assert_eq!(
            (bench.queue.count(), bench.pieces.len()),
            (0, 0),
            "seed {seed}"
        );
    }
}
