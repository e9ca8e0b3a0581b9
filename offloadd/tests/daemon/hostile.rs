//! A process that does its worst with what it was given. What could go wrong: the daemon crashes, hangs, or lets another
//! session suffer. Each test ends with a sound session that still works.

use std::time::Duration;

use offload_api::fault::FaultKind;
use offload_api::ids::{Generation, SlotIndex, TicketId, TileIndex};
use offload_api::proto;
use offload_api::ring::entry::{Request, Urgency, Verb};
use rustix::fs::{FallocateFlags, OFlags};

use crate::common::{Control, Daemon, Store, eventually, open};

const SOON: Duration = Duration::from_secs(60);

fn nonsense(ticket: u64) -> Request {
    Request {
        ticket: TicketId(ticket),
        verb: Verb::SwapIn,
        urgency: Urgency::Ahead,
        tile: TileIndex(u32::MAX),
        slot: SlotIndex(u32::MAX),
        generation: Generation(0),
        checksum: 0,
    }
}

/// Another process's session works from end to end.
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
    // The submission tail, as drawn in the rings' own documentation.
    rustix::io::pwrite(&session.received.ring, &u32::MAX.to_le_bytes(), 128).unwrap();
    session.ring();
    assert!(session.hung_up(SOON), "thrown out");
    eventually("its memory is free", SOON, || {
        control.arena_free_bytes() == free_bytes
    });
    others_are_well(&daemon, "good");
}

#[test]
fn garbage_entries_are_answered_or_end_the_session() {
    let store = Store::new(1, "auto");
    let daemon = store.serve();
    let mut control = daemon.control();
    let mut session = control.session("bad");
    session.submit(nonsense(1));
    let cqe = session.complete();
    assert_eq!(cqe.ticket, 1);
    assert_ne!(cqe.fault, 0);
    let mut state = 88172645463325252u64;
    for round in 0..200 {
        let mut control = daemon.control();
        let session = control.session(&format!("bad{round}"));
        for _ in 0..4 {
            for place in (4096..8192).step_by(8) {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                rustix::io::pwrite(&session.received.ring, &state.to_le_bytes(), place).unwrap();
            }
        }
        rustix::io::pwrite(&session.received.ring, &4u32.to_le_bytes(), 128).unwrap();
        session.ring();
        if round % 50 == 0 {
            others_are_well(&daemon, &format!("good{round}"));
        }
    }
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
    // Full, so that one more write would block: by the descriptor itself if it lets us, and by opening it anew.
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
    let store = Store::new(1, "auto");
    let daemon = store.serve();
    let mut control = daemon.control();
    let session = control.session("bad");
    session.begin(&mut control, 1);
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    for memory in [&session.received.arena, &session.received.ring] {
        rustix::fs::fallocate(memory, hole, 0, 8192).unwrap();
        for size in [0, 1 << 30] {
            let resized = rustix::fs::ftruncate(memory, size);
            assert_eq!(resized, Err(rustix::io::Errno::PERM));
        }
    }
    session.ring();
    others_are_well(&daemon, "good");
}

#[test]
fn a_process_that_never_reaps_delays_nobody() {
    let store = Store::new(1, "auto");
    let daemon = store.serve();
    let mut control = daemon.control();
    let mut session = control.session("bad");
    // As many as its ring takes, again and again, without ever looking at the answers.
    for ticket in 0..10_000 {
        let _ = session.rings.put(&nonsense(ticket).to_sqe(session.epoch));
        if ticket % 64 == 0 {
            session.ring();
        }
    }
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
    // Its log is a pipe of 64 KiB, which is full after some calls.
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
    let notify = store.folder.path().join("notify");
    // It takes a dozen messages, then whoever sends one waits.
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
            // As many sessions as the settings allow, each beside a look at the daemon, keep nobody out.
            Control::connect(&daemon.socket).arena_free_bytes();
        }
        let mut stream = std::os::unix::net::UnixStream::connect(&daemon.socket).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_millis(20)))
            .unwrap();
        // A server that took it in says hello (HTTP/2 settings) or waits; one that threw it out has closed it.
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
    // Cut off before it is in memory.
    let fault = commit(1 << 20);
    assert!(
        fault.message.contains("message length too large"),
        "{fault}"
    );
    others_are_well(&daemon, "good");
}
