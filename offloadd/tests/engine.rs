//! Tests all engines on real files: bytes at their places, errors and short transfers reported as such, every operation returned, and memory that
//! cannot be registered. Every test runs the same body on `uring`, `aio` and `psync`, with arena memory (registered by uring) and with the daemon's
//! own.

use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::Arc;
use std::time::{Duration, Instant};

use offload_api::geometry::{Geometry, SlotClass};
use offload_api::ids::{DeviceIndex, SlotIndex};
use offloadd::arena::{Arena, LockPolicy};
use offloadd::engine::{Engine, EngineChoice, Io, IoDone, Memory};
use offloadd::io::{AlignedBytes, IoId, IoOp};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, poll};

const BLOCK: u32 = 4096;

/// Creates a file of `bytes`, opened for direct I/O and deleted with the directory.
fn file(dir: &tempfile::TempDir, name: &str, bytes: u64) -> Arc<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .custom_flags(rustix::fs::OFlags::DIRECT.bits() as i32)
        .open(dir.path().join(name))
        .unwrap();
    file.set_len(bytes).unwrap();
    Arc::new(file)
}

/// Runs `body` on each engine of this machine; prints which ones it lacks.
fn on_each_engine(devices: &[Arc<File>], body: impl Fn(&mut Engine)) {
    for choice in EngineChoice::AUTO {
        match Engine::open(choice, devices, 4096) {
            Ok((mut engine, _)) => body(&mut engine),
            Err(error) if choice != EngineChoice::Psync => println!(
                "skipped: {}: {error}",
                std::thread::current().name().unwrap_or("a test")
            ),
            Err(error) => panic!("{error}"),
        }
    }
}

/// Starts everything submitted and waits for `count` operations to end, sleeping on the wake-up as the driver does.
fn finish(engine: &mut Engine, count: usize) -> Vec<IoDone> {
    let limit = Instant::now() + Duration::from_secs(60);
    let mut done = Vec::new();
    engine.start().unwrap();
    while done.len() < count {
        assert!(Instant::now() < limit, "{} of {count} ended", done.len());
        if engine.has_work() {
            engine.start().unwrap();
        }
        let wait = Timespec {
            tv_sec: 1,
            tv_nsec: 0,
        };
        poll(
            &mut [PollFd::new(&engine.wake(), PollFlags::IN)],
            Some(&wait),
        )
        .unwrap();
        engine.reap(&mut done).unwrap();
    }
    assert_eq!(engine.inflight_count(), 0);
    done.sort_by_key(|d| d.id.0);
    done
}

fn io(id: u64, op: IoOp, offset: u64, memory: Memory) -> Io {
    let bytes = match &memory {
        Memory::Meta(own) => own.len() as u32,
        Memory::Arena { .. } => BLOCK,
        Memory::None => 0,
    };
    let device = DeviceIndex(0);
    Io {
        id: IoId(id),
        device,
        op,
        offset,
        bytes,
        memory,
    }
}

fn meta(fill: u8, bytes: usize) -> Memory {
    let mut own = AlignedBytes::zeroed(bytes);
    own.as_mut_slice().fill(fill);
    Memory::Meta(own)
}

fn bytes_of(done: &IoDone) -> &[u8] {
    match &done.memory {
        Memory::Meta(own) => own.as_slice(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_was_written_is_read_back_from_the_right_place() {
    let dir = tempfile::tempdir().unwrap();
    let device = file(&dir, "a", 1 << 20);
    on_each_engine(std::slice::from_ref(&device), |engine| {
        for i in 0..64 {
            engine.submit(io(i, IoOp::Write, i * 4096, meta(i as u8 + 1, 4096)));
        }
        engine.submit(io(64, IoOp::Flush, 0, Memory::None));
        let done = finish(engine, 65);
        assert!(done[..64].iter().all(|d| d.outcome == Ok(BLOCK)));
        assert_eq!(done[64].outcome, Ok(0), "the flush");
        for i in 0..64 {
            engine.submit(io(i, IoOp::Read, i * 4096, meta(0, 4096)));
        }
        for (i, d) in finish(engine, 64).iter().enumerate() {
            assert_eq!(d.outcome, Ok(BLOCK));
            assert!(bytes_of(d).iter().all(|b| *b == i as u8 + 1), "block {i}");
        }
        // Reads back by another way than the same engine.
        let mut own = AlignedBytes::zeroed(4096);
        device.read_exact_at(own.as_mut_slice(), 5 * 4096).unwrap();
        assert!(own.as_slice().iter().all(|b| *b == 6));
    });
}

#[test]
fn an_arena_moves_bytes_before_during_and_after_its_registration() {
    let dir = tempfile::tempdir().unwrap();
    let device = file(&dir, "a", 1 << 20);
    let classes = [8192, 4096].map(|slot_bytes| SlotClass {
        slot_bytes,
        slot_count: 4,
    });
    let geometry = Geometry::new(&classes).unwrap();
    on_each_engine(&[device], |engine| {
        let arena = Arc::new(Arena::make(&geometry, LockPolicy::Try).unwrap());
        let place = geometry.slot_place(SlotIndex(6)).unwrap();
        let slot = || Memory::Arena {
            arena: arena.clone(),
            offset: place.offset,
            piece: place.piece,
        };
        for (round, step) in ["before", "during", "after"].iter().enumerate() {
            match *step {
                "during" => engine.register(&arena),
                "after" => engine.forget(arena.id()),
                _ => {}
            }
            // The process writes to its own mapping of the same memory file.
            let fill = [round as u8 + 7; 4096];
            rustix::io::pwrite(arena.as_fd(), &fill, place.offset).unwrap();
            // The first start registers one piece, the second start the other.
            engine.submit(io(1, IoOp::Flush, 0, Memory::None));
            finish(engine, 1);
            engine.submit(io(2, IoOp::Write, 8192, slot()));
            assert_eq!(finish(engine, 1)[0].outcome, Ok(BLOCK), "{step}");
            rustix::io::pwrite(arena.as_fd(), &[0; 4096], place.offset).unwrap();
            engine.submit(io(3, IoOp::Read, 8192, slot()));
            assert_eq!(finish(engine, 1)[0].outcome, Ok(BLOCK), "{step}");
            let mut seen = [0; 4096];
            rustix::io::pread(arena.as_fd(), &mut seen, place.offset).unwrap();
            assert_eq!(seen, fill, "{step}");
            // The neighbouring slot is unchanged.
            let before = geometry.slot_place(SlotIndex(5)).unwrap();
            rustix::io::pread(arena.as_fd(), &mut seen, before.offset).unwrap();
            assert_eq!(seen, [0; 4096]);
        }
    });
}

#[test]
fn reading_over_the_end_is_short_and_not_success() {
    let dir = tempfile::tempdir().unwrap();
    let device = file(&dir, "a", 3 * 4096);
    on_each_engine(&[device], |engine| {
        engine.submit(io(0, IoOp::Read, 2 * 4096, meta(9, 2 * 4096)));
        engine.submit(io(1, IoOp::Read, 1 << 30, meta(9, 4096)));
        let done = finish(engine, 2);
        assert_eq!(done[0].outcome, Ok(BLOCK), "half of it");
        assert_eq!(done[1].outcome, Ok(0), "what a removed drive answers");
    });
}

#[test]
fn an_errno_comes_back_as_the_errno_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let good = file(&dir, "a", 1 << 20);
    // Opened read-only: every write is EBADF. An offset that direct I/O does not accept: EINVAL.
    let read_only = Arc::new(
        OpenOptions::new()
            .read(true)
            .custom_flags(rustix::fs::OFlags::DIRECT.bits() as i32)
            .open(dir.path().join("a"))
            .unwrap(),
    );
    on_each_engine(&[good, read_only], |engine| {
        let mut write = io(0, IoOp::Write, 0, meta(1, 4096));
        write.device = DeviceIndex(1);
        engine.submit(write);
        engine.submit(io(1, IoOp::Write, 77, meta(1, 4096)));
        engine.submit(io(2, IoOp::Write, 4096, meta(1, 4096)));
        let done = finish(engine, 3);
        assert_eq!(done[0].outcome, Err(9), "EBADF");
        assert_eq!(done[1].outcome, Err(22), "EINVAL");
        assert_eq!(done[2].outcome, Ok(BLOCK), "the others continue");
    });
}

#[test]
fn a_full_device_is_enospc() {
    let Ok(full) = OpenOptions::new().read(true).write(true).open("/dev/full") else {
        println!(
            "skipped: {}: there is no /dev/full",
            std::thread::current().name().unwrap_or("a test")
        );
        return;
    };
    // Kernel AIO does not write to it; the test below has a file system for that engine.
    on_each_engine(&[Arc::new(full)], |engine| {
        if engine.name() == "aio" {
            return;
        }
        engine.submit(io(0, IoOp::Write, 0, meta(1, 4096)));
        assert_eq!(finish(engine, 1)[0].outcome, Err(28));
    });
}

#[test]
fn a_full_file_system_is_enospc() {
    let dir = tempfile::tempdir().unwrap();
    let Some(_mounted) = SmallFileSystem::mount(dir.path()) else {
        return;
    };
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(dir.path().join("a"))
        .unwrap();
    device.set_len(1 << 20).unwrap();
    let devices = [Arc::new(device)];
    on_each_engine(&devices, |engine| {
        engine.submit(io(0, IoOp::Write, 0, meta(1, 4096)));
        let done = finish(engine, 1);
        assert_eq!(done[0].outcome, Ok(BLOCK), "there is room for this one");
        // Some of the 128 KiB do not fit: fewer bytes are moved, or none and ENOSPC.
        engine.submit(io(1, IoOp::Write, 4096, meta(1, 128 << 10)));
        engine.submit(io(2, IoOp::Write, 256 << 10, meta(1, 128 << 10)));
        let done = finish(engine, 2);
        assert!(done.iter().all(|d| d.outcome != Ok(128 << 10)), "{done:?}");
        assert!(done.iter().any(|d| d.outcome == Err(28)), "{done:?}");
        devices[0].set_len(0).unwrap();
        devices[0].set_len(1 << 20).unwrap();
    });
}

/// A file system of 64 KiB, unmounted when dropped. Only root may mount one.
struct SmallFileSystem<'a>(&'a std::path::Path);

impl<'a> SmallFileSystem<'a> {
    fn mount(dir: &'a std::path::Path) -> Option<Self> {
        let mounted = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=64k", "tmpfs"])
            .arg(dir)
            .output();
        if mounted.is_ok_and(|output| output.status.success()) {
            return Some(Self(dir));
        }
        println!(
            "skipped: {}: this user may not mount a small file system",
            std::thread::current().name().unwrap_or("a test")
        );
        None
    }
}

impl Drop for SmallFileSystem<'_> {
    fn drop(&mut self) {
        // Lazily: a ring's files stay open for a moment after it has ended.
        let _ = std::process::Command::new("umount")
            .arg("-l")
            .arg(self.0)
            .status();
    }
}

#[test]
fn more_operations_than_the_rings_hold_all_end_once() {
    let dir = tempfile::tempdir().unwrap();
    let device = file(&dir, "a", 1 << 20);
    on_each_engine(&[device], |engine| {
        for i in 0..4000 {
            engine.submit(io(i, IoOp::Write, i % 256 * 4096, meta(3, 4096)));
        }
        let done = finish(engine, 4000);
        let ids: Vec<_> = done.iter().map(|d| d.id.0).collect();
        assert_eq!(ids, (0..4000).collect::<Vec<_>>());
        assert!(done.iter().all(|d| d.outcome == Ok(BLOCK)));
    });
}

/// More operations than the kernel takes at a time wait for a device that does not answer.
#[test]
fn a_device_that_never_answers_stops_no_other() {
    const UNANSWERED: u64 = 2500;
    let dir = tempfile::tempdir().unwrap();
    let good = file(&dir, "a", 1 << 20);
    // One read per answer. Threads get an error from it; `engine/psync.rs` has a test for them.
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE;
    let answers = rustix::event::eventfd(0, flags).unwrap();
    let silent = Arc::new(File::from(answers.try_clone().unwrap()));
    on_each_engine(&[good, silent], |engine| {
        for i in 0..UNANSWERED {
            let mut read = io(i, IoOp::Read, 0, meta(0, 4096));
            read.device = DeviceIndex(1);
            engine.submit(read);
        }
        engine.start().unwrap();
        for i in 0..10 {
            engine.submit(io(UNANSWERED + i, IoOp::Read, 0, meta(0, 4096)));
        }
        engine.start().unwrap();
        let is_good = |done: &&IoDone| done.id.0 >= UNANSWERED && done.outcome == Ok(BLOCK);
        let good_ended = |done: &[IoDone]| done.iter().filter(is_good).count() == 10;
        let mut done = Vec::new();
        reap_until(engine, &mut done, good_ended);
        rustix::io::write(&answers, &UNANSWERED.to_ne_bytes()).unwrap();
        let all_ended = |done: &[IoDone]| done.len() as u64 == UNANSWERED + 10;
        reap_until(engine, &mut done, all_ended);
        // Operations that no thread took.
        let flags = rustix::fs::fcntl_getfl(&answers).unwrap();
        rustix::fs::fcntl_setfl(&answers, flags | rustix::fs::OFlags::NONBLOCK).unwrap();
        while rustix::io::read(&answers, &mut [0; 8]).is_ok() {}
        rustix::fs::fcntl_setfl(&answers, flags).unwrap();
    });
}

/// Sleeps on the wake-up between two checks, for a second at most.
fn reap_until(engine: &mut Engine, done: &mut Vec<IoDone>, enough: impl Fn(&[IoDone]) -> bool) {
    let limit = Instant::now() + Duration::from_secs(60);
    while !enough(done) {
        assert!(Instant::now() < limit, "{} ended", done.len());
        let wait = Timespec {
            tv_sec: 1,
            tv_nsec: 0,
        };
        let wake = engine.wake();
        poll(&mut [PollFd::new(&wake, PollFlags::IN)], Some(&wait)).unwrap();
        engine.reap(done).unwrap();
    }
}

#[test]
fn the_automatic_choice_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let device = file(&dir, "a", 1 << 20);
    let (engine, reason) = Engine::open(EngineChoice::Auto, &[device], 16).unwrap();
    match engine.name() {
        "uring" => assert!(reason.contains("probe read worked"), "{reason}"),
        _ => assert!(reason.contains("instead of uring: "), "{reason}"),
    }
}

/// Asserts that for a device that cannot be flushed or read, the automatic choice takes the same engine as for others.
fn expect_chosen_as_usual(path: &str) {
    let dir = tempfile::tempdir().unwrap();
    let (usual, _) = Engine::open(EngineChoice::Auto, &[file(&dir, "a", 1 << 20)], 16).unwrap();
    let device = Arc::new(OpenOptions::new().read(true).open(path).unwrap());
    let (engine, reason) = Engine::open(EngineChoice::Auto, &[device], 16).unwrap();
    assert_eq!(engine.name(), usual.name(), "{reason}");
}

#[test]
fn a_probe_flushes_no_device() {
    // The file can be read, and a flush is refused.
    expect_chosen_as_usual("/dev/zero");
}

#[test]
fn a_device_that_answers_a_probe_with_an_error_is_no_missing_engine() {
    // Nothing is mapped at the file's start: a read returns EIO. Kernel AIO accepts no such file.
    let dir = tempfile::tempdir().unwrap();
    let devices = [file(&dir, "a", 1 << 20)];
    if Engine::open(EngineChoice::Uring, &devices, 16).is_err() {
        println!(
            "skipped: {}: no io_uring here",
            std::thread::current().name().unwrap_or("a test")
        );
        return;
    }
    expect_chosen_as_usual("/proc/self/mem");
}

#[test]
fn registered_memory_is_pinned_until_it_is_forgotten() {
    let dir = tempfile::tempdir().unwrap();
    let device = file(&dir, "a", 1 << 20);
    let Ok((mut engine, _)) = Engine::open(EngineChoice::Uring, &[device], 16) else {
        println!(
            "skipped: {}: no io_uring here",
            std::thread::current().name().unwrap_or("a test")
        );
        return;
    };
    // Much more than the other tests of this process pin at the same time.
    let class = |slot_bytes: u64| SlotClass {
        slot_bytes,
        slot_count: ((32 << 20) / slot_bytes) as u32,
    };
    let geometry = Geometry::new(&[class(1 << 20), class(1 << 19)]).unwrap();
    let arena = Arc::new(Arena::make(&geometry, LockPolicy::Try).unwrap());
    assert_eq!(arena.pieces().len(), 2);
    if !arena.locked() {
        println!(
            "skipped: {}: this user may not lock 64 MiB, so nothing is registered",
            std::thread::current().name().unwrap_or("a test")
        );
        return;
    }
    let pinned_kib = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|l| l.strip_prefix("VmPin:"));
        let kib = line.unwrap().trim().strip_suffix("kB").unwrap();
        kib.trim().parse::<u64>().unwrap()
    };
    let (half, before) = (32 << 10, pinned_kib());
    engine.register(&arena);
    for _ in 0..2 {
        assert!(engine.has_work());
        engine.start().unwrap();
    }
    assert!(!engine.has_work());
    assert!(pinned_kib() > before + half, "{} kB", pinned_kib());
    engine.forget(arena.id());
    // A large arena takes long: one piece per call, and its memory is freed after the last.
    for _ in 0..2 {
        assert!(engine.has_work() && !engine.is_forgotten(arena.id()));
        engine.start().unwrap();
    }
    assert!(!engine.has_work() && engine.is_forgotten(arena.id()));
    let limit = Instant::now() + Duration::from_secs(60);
    while pinned_kib() > before + half {
        assert!(Instant::now() < limit, "still pinned");
        engine.submit(io(1, IoOp::Flush, 0, Memory::None));
        finish(&mut engine, 1);
    }
}

#[test]
fn probes_that_fail_mean_threads_and_the_reasons_are_told() {
    let dir = tempfile::tempdir().unwrap();
    drop(file(&dir, "a", 1 << 20));
    let path = dir.path().join("a");
    let cannot_read = Arc::new(OpenOptions::new().write(true).open(&path).unwrap());
    let devices = [cannot_read];
    let (engine, reason) = Engine::open(EngineChoice::Auto, &devices, 16).unwrap();
    assert_eq!(engine.name(), "psync");
    assert!(reason.contains("instead of uring: "), "{reason}");
    assert!(reason.contains("engine aio: "), "{reason}");
    for choice in [EngineChoice::Uring, EngineChoice::Aio] {
        let error = Engine::open(choice, &devices, 16).unwrap_err();
        let printed = error.to_string();
        let name = if choice == EngineChoice::Aio {
            "aio"
        } else {
            "uring"
        };
        assert!(
            printed.starts_with(&format!("engine {name}: ")),
            "{printed}"
        );
        let tried = format!("reading 4096 bytes at 0 of device 0 ({}): ", path.display());
        assert!(printed.contains(&tried), "{printed}");
    }
}
