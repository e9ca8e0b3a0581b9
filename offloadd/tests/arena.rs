//! Tests a session's memory: the process cannot shrink it while the kernel uses it, it never holds another session's bytes, unlocked memory is
//! reported, and the daemon runs wherever it can.

mod another_user;

use std::os::fd::AsFd;
use std::sync::Arc;

use offload_api::fault::{Fault, FaultKind};
use offload_api::geometry::{Geometry, SlotClass};
use offload_api::ids::DeviceIndex;
use offloadd::arena::{Arena, ArenaError, LockPolicy, lock_outlook};
use offloadd::engine::{Engine, EngineChoice, Io, Memory};
use offloadd::io::{IoId, IoOp};
use rustix::fs::SealFlags;
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit};

use another_user::{again, expect_success};

fn geometry(slot_bytes: u64, slot_count: u32) -> Geometry {
    let class = SlotClass {
        slot_bytes,
        slot_count,
    };
    Geometry::new(&[class]).unwrap()
}

#[test]
fn an_arena_is_zeros_and_cannot_be_resized_by_anyone() {
    let arena = Arena::make(&geometry(1 << 20, 5), LockPolicy::Try).unwrap();
    let mut bytes = vec![1; arena.bytes()];
    rustix::io::pread(arena.as_fd(), &mut bytes[..], 0).unwrap();
    assert!(bytes.iter().all(|b| *b == 0));
    for size in [0, arena.bytes() as u64 - 4096, arena.bytes() as u64 + 4096] {
        let resized = rustix::fs::ftruncate(arena.as_fd(), size);
        assert_eq!(resized, Err(Errno::PERM), "to {size}");
    }
    // A peer cannot seal it against our writes either.
    let sealed = rustix::fs::fcntl_add_seals(arena.as_fd(), SealFlags::WRITE);
    assert_eq!(sealed, Err(Errno::PERM));
}

#[test]
fn more_memory_than_the_machine_has_is_refused_before_it_is_taken() {
    let fault = Fault::from(Arena::make(&geometry(1 << 30, 1 << 14), LockPolicy::Try).unwrap_err());
    assert_eq!(fault.kind, FaultKind::NoMemory);
    assert!(fault.message.contains("an arena of 16.0 TiB"), "{fault}");
    assert!(
        fault
            .message
            .contains("of memory are available; ask for less"),
        "{fault}"
    );
}

#[test]
#[should_panic(expected = "lies beyond an arena")]
fn no_address_beyond_the_arena_is_given_out() {
    let arena = Arena::make(&geometry(4096, 1), LockPolicy::Try).unwrap();
    arena.address(arena.bytes() as u64 - 4096, 8192);
}

const CHILD: &str = "OFFLOADD_TEST_UNPRIVILEGED";

/// Runs the test again as a user who may lock 64 KiB.
#[test]
fn a_user_without_memlock_runs_unlocked_and_unregistered_and_is_told_so() {
    if std::env::var_os(CHILD).is_some() {
        return unprivileged();
    }
    let mut child = again("a_user_without_memlock_runs_unlocked_and_unregistered_and_is_told_so");
    child.env(CHILD, "1").env("TMPDIR", "/tmp");
    expect_success(child);
}

fn unprivileged() {
    let limit = Rlimit {
        current: Some(64 << 10),
        maximum: Some(64 << 10),
    };
    rustix::process::setrlimit(Resource::Memlock, limit).unwrap();
    let geometry = geometry(1 << 20, 4);

    let outlook = lock_outlook(geometry.arena_bytes());
    assert!(!outlook.can_lock);
    for words in [
        "may lock 64.0 KiB",
        "swap",
        "ulimit -l unlimited",
        "LimitMEMLOCK",
    ] {
        assert!(outlook.note.contains(words), "{}", outlook.note);
    }

    let required = Arena::make(&geometry, LockPolicy::Require);
    let error = required.expect_err("the service refuses");
    assert!(matches!(error, ArenaError::NotLocked { .. }), "{error}");
    assert!(error.to_string().contains("ulimit -l unlimited"), "{error}");

    let arena = Arc::new(Arena::make(&geometry, LockPolicy::Try).unwrap());
    assert!(!arena.locked());
    // The same limit forbids registering; I/O works without it.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    std::fs::write(&path, vec![7; 8192]).unwrap();
    let file = Arc::new(
        std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .unwrap(),
    );
    let (mut engine, reason) = Engine::open(EngineChoice::Auto, &[file], 8).unwrap();
    println!("{} ({reason})", engine.name());
    engine.register(&arena);
    let mut done = Vec::new();
    for id in 0..2 {
        engine.submit(Io {
            id: IoId(id),
            device: DeviceIndex(0),
            op: IoOp::Read,
            offset: 4096,
            bytes: 4096,
            memory: Memory::Arena {
                arena: arena.clone(),
                offset: 1 << 20,
                piece: 0,
            },
        });
        while done.len() <= id as usize {
            engine.start().unwrap();
            engine.reap(&mut done).unwrap();
        }
        assert_eq!(done[id as usize].outcome, Ok(4096));
    }
    let mut bytes = [0; 4096];
    rustix::io::pread(arena.as_fd(), &mut bytes, 1 << 20).unwrap();
    assert_eq!(bytes, [7; 4096]);
}
