//! Tests a process that misuses everything it was given. What could go wrong: the daemon crashes, hangs, or disturbs another session. Each test ends
//! with a well-behaved session that still works.

use std::collections::BTreeMap;
use std::time::Duration;

use offload_api::fault::FaultKind;
use offload_api::ids::{Epoch, Generation, SlotIndex, TicketId, TileIndex};
use offload_api::proto;
use offload_api::ring::entry::{Priority, Promote, Request, Sqe, Verb};
use rustix::fs::{FallocateFlags, OFlags};

use crate::common::{
    Control, Daemon, Store, engines, eventually, expect_tiles, fill_tiles, open, swap_in, swap_out,
};

const SOON: Duration = Duration::from_secs(60);

fn nonsense(ticket: u64) -> Request {
    Request {
        ticket: TicketId(ticket),
        verb: Verb::SwapIn,
        priority: Priority::Prefetch,
        tile: TileIndex(u32::MAX),
        slot: SlotIndex(u32::MAX),
        generation: Generation(0),
        checksum: 0,
    }
}

/// Asserts that another process's session works from end to end.
fn others_are_well(daemon: &Daemon, name: &str) {
    let mut control = daemon.control();
    let mut session = control.session(name);
    session.begin(&mut control, 1);
    session.submit(nonsense(77));
    assert_eq!(session.complete().ticket, 77);
}

#[test]
fn an_impossible_ring_index_ends_that_session_alone() {
    let store = Store::new(1, "auto");
    let daemon = store.serve();
    let mut control = daemon.control();
    let free_bytes = control.arena_free_bytes();
    let session = control.session("bad");
    // The submission tail, at the offset that the rings' documentation gives.
    rustix::io::pwrite(&session.received.ring, &u32::MAX.to_le_bytes(), 128).unwrap();
    session.ring();
    assert!(session.hung_up(SOON), "thrown out");
    eventually("its memory is free", SOON, || {
        control.arena_free_bytes() == free_bytes
    });
    others_are_well(&daemon, "good");
}

/// Pseudorandom numbers, the same in each run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn one_of(&mut self, all: &[u64]) -> u64 {
        all[(self.next() % all.len() as u64) as usize]
    }
}

/// Number of slots in the arena of [`Store`]'s sessions.
const SLOTS: u64 = 4;

/// Tiles of 4 KiB, all written but the last; a tile after them is larger than a slot.
const TILES: u64 = 3;

/// Returns the daemon's expected answer to a well-formed entry: 0 for success.
fn answer_to(entry: &Sqe, working: u64) -> u32 {
    let (tile, slot) = (u64::from(entry.tile), u64::from(entry.slot));
    let writes = entry.verb == Verb::SwapOut.number();
    let fault = if tile > TILES {
        FaultKind::UnknownTile
    } else if slot >= SLOTS {
        FaultKind::UnknownSlot
    } else if tile == TILES {
        FaultKind::SlotTooSmall
    } else if writes && entry.generation != working {
        FaultKind::WrongGeneration
    } else if !writes && tile == TILES - 1 {
        FaultKind::NeverWritten
    } else {
        return 0;
    };
    fault as u32
}

#[test]
fn entries_beyond_every_bound_are_refused_by_kind() {
    let store = Store::new(1, "auto");
    let daemon = store.serve();
    let mut control = daemon.control();
    let mut neighbour = control.session("neighbour");
    let theirs = neighbour.begin(&mut control, 4);
    fill_tiles(&mut neighbour, 4, theirs, 7);
    let mut session = control.session("bad");
    let tiles = (0..=TILES as u32).map(|unit| proto::Tile {
        unit,
        kind: 1,
        elem_offset: 0,
        tile_bytes: if unit == TILES as u32 { 8192 } else { 4096 },
    });
    let definition = proto::DefineTilesRequest {
        token: session.token.clone(),
        layout: Vec::new(),
        tiles: tiles.collect(),
        durability: 1,
        nodes: 1,
    };
    control.define_tiles(definition).unwrap();
    let working = session.resume(&mut control, 0);
    fill_tiles(&mut session, TILES as u32 - 1, working, 1);
    let mut random = Random(88172645463325252);
    let mut seen = BTreeMap::<u32, u32>::new();
    for ticket in 0..2000 {
        let any = random.next();
        let max = u64::from(u32::MAX);
        let verb = [Verb::SwapIn, Verb::SwapOut][(any & 1) as usize];
        let writes = verb == Verb::SwapOut;
        let mut entry = Request {
            ticket: TicketId(ticket),
            verb,
            priority: Priority::Prefetch,
            tile: TileIndex(random.one_of(&[0, 1, 2, TILES, TILES + 1, max, any >> 32]) as u32),
            slot: SlotIndex(random.one_of(&[0, 1, SLOTS - 1, SLOTS, max, any >> 32]) as u32),
            generation: Generation(0),
            checksum: 0,
        }
        .to_sqe(session.epoch);
        if writes {
            let generations = [working, working, 0, working + 1, working << 32, u64::MAX];
            entry.generation = random.one_of(&generations);
            entry.checksum = any as u32;
        }
        let expected = answer_to(&entry, working);
        if writes && expected == 0 && u64::from(entry.tile) == TILES - 1 {
            // The tile stays unwritten.
            continue;
        }
        assert!(session.rings.put(&entry).unwrap());
        session.ring();
        let cqe = session.complete();
        assert_eq!((cqe.ticket, cqe.fault), (ticket, expected), "{entry:?}");
        *seen.entry(expected).or_default() += 1;
    }
    assert_eq!(seen.len(), 6, "{seen:?}");
    assert!(seen.values().all(|&count| count > 10), "{seen:?}");
    expect_tiles(&mut neighbour, 4, 7);
}

#[test]
fn entries_of_a_wrong_form_end_the_session() {
    let store = Store::new(1, "auto");
    let daemon = store.serve();
    let mut control = daemon.control();
    let free_bytes = control.arena_free_bytes();
    let good = nonsense(1).to_sqe(Epoch(0));
    let promote = Promote {
        ticket: TicketId(1),
        priority: Priority::Demand,
    }
    .to_sqe(Epoch(0));
    let mut random = Random(2463534242);
    let mut wrong = vec![
        Sqe { verb: 0, ..good },
        Sqe { verb: 4, ..good },
        Sqe {
            priority: 2,
            ..good
        },
        Sqe {
            generation: 1,
            ..good
        },
        Sqe {
            checksum: 1,
            ..good
        },
        Sqe { tile: 1, ..promote },
        Sqe {
            priority: 2,
            ..promote
        },
    ];
    wrong.extend((0..5).map(|place| {
        let mut reserved = [0; 5];
        reserved[place] = 1;
        Sqe { reserved, ..good }
    }));
    for _ in 0..20 {
        let mut words = [0u64; 8];
        words.fill_with(|| random.next());
        wrong.push(zerocopy::transmute!(words));
    }
    for (nth, entry) in wrong.into_iter().enumerate() {
        let mut session = control.session(&format!("bad{nth}"));
        // With the daemon's own epoch; entries with another epoch are refused before anything else is checked.
        let epoch = session.epoch.0;
        assert!(session.rings.put(&Sqe { epoch, ..entry }).unwrap());
        session.ring();
        assert!(session.hung_up(SOON), "{entry:?}");
    }
    eventually("their memory is free", SOON, || {
        control.arena_free_bytes() == free_bytes
    });
    others_are_well(&daemon, "good");
}

#[test]
fn doorbells_cannot_be_made_to_block_the_daemon() {
    let store = Store::new(1, "auto");
    let daemon = store.serve();
    let mut control = daemon.control();
    let mut session = control.session("bad");
    session.begin(&mut control, 1);
    let bells = [
        &session.received.submission_doorbell,
        &session.received.completion_doorbell,
    ];
    for bell in bells {
        // Flags belong to the open file, which both sides share if they share the descriptor.
        let flags = rustix::fs::fcntl_getfl(bell).unwrap();
        rustix::fs::fcntl_setfl(bell, flags & !OFlags::NONBLOCK).unwrap();
    }
    // Full, so that one more write would block: through the descriptor itself if its flags allow, and through reopening it.
    let full = (u64::MAX - 1).to_ne_bytes();
    let bell = &session.received.completion_doorbell;
    let _ = rustix::io::write(bell, &full);
    let anew = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(bell));
    let flags = OFlags::WRONLY | OFlags::NONBLOCK;
    if let Ok(anew) = rustix::fs::open(anew, flags, rustix::fs::Mode::empty()) {
        while rustix::io::write(&anew, &[1; 4096]).is_ok() {}
    }
    for ticket in 0..3 {
        assert!(
            session
                .rings
                .put(&nonsense(ticket).to_sqe(session.epoch))
                .unwrap()
        );
    }
    rustix::io::write(&session.received.submission_doorbell, &full).unwrap();
    for _ in 0..3 {
        session.complete();
    }
    others_are_well(&daemon, "good");
}

#[test]
fn holes_in_shared_memory_hurt_nobody_else() {
    for engine in engines() {
        let store = Store::new(1, engine);
        let daemon = store.serve();
        let mut control = daemon.control();
        let mut neighbour = control.session("neighbour");
        let theirs = neighbour.begin(&mut control, 4);
        fill_tiles(&mut neighbour, 4, theirs, 7);
        let mut session = control.session("bad");
        let working = session.begin(&mut control, 2);
        fill_tiles(&mut session, 2, working, 1);
        for memory in [&session.received.arena, &session.received.ring] {
            for size in [0, 1 << 30] {
                let resized = rustix::fs::ftruncate(memory, size);
                assert_eq!(resized, Err(rustix::io::Errno::PERM));
            }
        }
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let punch = |memory: &std::os::fd::OwnedFd| {
            let bytes = rustix::fs::fstat(memory).unwrap().st_size as u64;
            rustix::fs::fallocate(memory, hole, 0, bytes).unwrap();
        };
        // Reads and writes over the hole. The content of the bytes is the process's own affair; that they move is not.
        for round in 0..8 {
            punch(&session.received.arena);
            let (tile, slot) = (round % 2, round % 4);
            session.submit(swap_in(tile, slot));
            let cqe = session.complete();
            assert_eq!((cqe.fault, cqe.moved_bytes), (0, 4096), "{engine}: {cqe:?}");
            punch(&session.received.arena);
            session.submit(swap_out(tile, slot, working, &[0; 4096]));
            let cqe = session.complete();
            assert_eq!((cqe.fault, cqe.moved_bytes), (0, 4096), "{engine}: {cqe:?}");
        }
        expect_tiles(&mut neighbour, 4, 7);
        // Punching the ring's file zeroes its indices: the daemon has then taken more entries than the ring says were put.
        punch(&session.received.ring);
        session.ring();
        assert!(session.hung_up(SOON), "{engine}: thrown out");
        expect_tiles(&mut neighbour, 4, 7);
        others_are_well(&daemon, "good");
    }
}

#[test]
fn a_process_that_never_reaps_delays_nobody_and_is_thrown_out() {
    let store = Store::new(1, "auto");
    let daemon = store.serve();
    let mut control = daemon.control();
    let mut neighbour = control.session("neighbour");
    let theirs = neighbour.begin(&mut control, 4);
    fill_tiles(&mut neighbour, 4, theirs, 7);
    let free_bytes = control.arena_free_bytes();
    let mut session = control.session("bad");
    let working = session.begin(&mut control, 2);
    fill_tiles(&mut session, 2, working, 1);
    // Reads that end, as many as the ring holds, again and again, without taking any completion.
    let mut taken = 0;
    eventually("it is thrown out", SOON, || {
        let entry = swap_in(taken % 2, taken % 4).to_sqe(session.epoch);
        while session.rings.put(&entry).unwrap() {
            taken += 1;
        }
        session.ring();
        expect_tiles(&mut neighbour, 4, 7);
        session.hung_up(Duration::ZERO)
    });
    let entries = session.rings.header().entries;
    assert!(taken > entries, "{taken} answers fit into {entries} places");
    eventually("its memory is free", SOON, || {
        control.arena_free_bytes() == free_bytes
    });
    others_are_well(&daemon, "good");
}

#[test]
fn calls_outside_their_limits_are_refused_by_kind() {
    let store = Store::new(1, "psync");
    let daemon = store.serve();
    let mut control = daemon.control();
    let mut kind_of = |change: fn(&mut proto::OpenSessionRequest)| {
        let mut request = open("bad");
        change(&mut request);
        control.open_session(request).unwrap_err()
    };
    let version = kind_of(|r| r.protocol_version = 99);
    assert_eq!(version.kind, FaultKind::Version);
    assert!(version.message.contains("version 99"), "{version}");
    assert_eq!(kind_of(|r| r.job = "a/b".into()).kind, FaultKind::Invalid);
    assert_eq!(
        kind_of(|r| r.classes[0].slot_bytes = 5).kind,
        FaultKind::Invalid
    );
    assert_eq!(
        kind_of(|r| r.classes[0].slot_count = u32::MAX).kind,
        FaultKind::Invalid
    );
    let large = kind_of(|r| r.classes[0].slot_count = 1 << 18);
    assert_eq!(large.kind, FaultKind::NoMemory, "1 GiB of 64 MiB");
    others_are_well(&daemon, "good");
}

#[test]
fn a_log_that_nobody_reads_delays_nobody() {
    let store = Store::new(1, "auto");
    let mut command = store.serve_command();
    command.env("RUST_LOG", "trace");
    // The log is a pipe of 64 KiB, which is full after some calls.
    let mut daemon = Daemon::start(command, store.socket());
    let mut control = daemon.control();
    for _ in 0..300 {
        control.arena_free_bytes();
    }
    others_are_well(&daemon, "good");
    drop(control);
    daemon.signal(rustix::process::Signal::TERM);
    assert_eq!(daemon.wait(SOON), Some(0));
    let mut log = String::new();
    let mut stderr = daemon.child.stderr.take().unwrap();
    std::io::Read::read_to_string(&mut stderr, &mut log).unwrap();
    assert!(
        log.len() >= 60 << 10,
        "{} bytes are no full pipe",
        log.len()
    );
}

#[test]
fn a_service_manager_that_listens_no_more_delays_nobody() {
    let store = Store::new(1, "auto");
    let notify = store.dir.path().join("notify");
    // The socket takes a dozen messages; then a sender waits.
    let _manager = std::os::unix::net::UnixDatagram::bind(&notify).unwrap();
    let mut command = store.serve_command();
    command
        .env("NOTIFY_SOCKET", &notify)
        .env("WATCHDOG_USEC", "15000");
    let mut daemon = Daemon::start(command, store.socket());
    std::thread::sleep(Duration::from_millis(300));
    others_are_well(&daemon, "good");
    daemon.signal(rustix::process::Signal::TERM);
    assert_eq!(daemon.wait(SOON), Some(0));
}

#[test]
fn one_users_connections_are_bounded() {
    let store = Store::new(1, "psync");
    let text = std::fs::read_to_string(&store.config).unwrap();
    std::fs::write(&store.config, text + "sessions_max = 40\n").unwrap();
    let daemon = store.serve();
    let mut held = Vec::new();
    let mut closed = 0;
    for nth in 0..160 {
        if nth == 100 {
            // Open as many connections as the settings allow sessions, each with one call: they must keep no other process out.
            Control::connect(&daemon.socket).arena_free_bytes();
        }
        let mut stream = std::os::unix::net::UnixStream::connect(&daemon.socket).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_millis(20)))
            .unwrap();
        // A server that accepted the connection says hello (HTTP/2 settings) or waits; otherwise it has closed it.
        match std::io::Read::read(&mut stream, &mut [0; 64]) {
            Ok(0) => closed += 1,
            _ => held.push(stream),
        }
    }
    assert!(closed >= 160 - 144, "{closed} of 160 were closed");
    drop(held);
    eventually("room again", SOON, || {
        let socket = daemon.socket.clone();
        std::panic::catch_unwind(move || Control::connect(&socket).arena_free_bytes()).is_ok()
    });
}

#[test]
fn only_definitions_may_be_large() {
    let store = Store::new(1, "psync");
    let daemon = store.serve();
    let mut control = daemon.control();
    let session = control.session("large");
    let tile = proto::Tile {
        unit: 0,
        kind: 1,
        elem_offset: 0,
        tile_bytes: 4096,
    };
    let mut definition = proto::DefineTilesRequest {
        token: session.token.clone(),
        layout: vec![7; 1 << 20],
        tiles: vec![tile],
        durability: 1,
        nodes: 1,
    };
    control
        .define_tiles(definition.clone())
        .expect("1 MiB of layout");
    definition.layout = vec![7; (16 << 20) + 1];
    let fault = control.define_tiles(definition).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Invalid, "{fault}");
    let working = session.resume(&mut control, 0);
    let mut commit = |bytes: usize| {
        let token = session.token.clone();
        let blob = vec![0; bytes];
        control
            .commit(proto::CommitRequest {
                token,
                generation: working,
                blob,
            })
            .unwrap_err()
    };
    assert_eq!(commit((64 << 10) + 1).kind, FaultKind::Invalid);
    // Refused before it is in memory.
    let fault = commit(1 << 20);
    assert!(
        fault.message.contains("message length too large"),
        "{fault}"
    );
    others_are_well(&daemon, "good");
}
