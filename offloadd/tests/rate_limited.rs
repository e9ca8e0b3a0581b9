//! Tests that rate-limited devices are exactly as fast as a test asks for: reads and writes, and two devices, do not share a limit, no operation ends
//! early, and none is forgotten.

use std::fs::OpenOptions;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use offload_api::ids::DeviceIndex;
use offloadd::engine::{Engine, EngineChoice, Io, Memory};
use offloadd::io::{AlignedBytes, IoId, IoOp};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use test_hooks::rate_limit::{RateLimit, RateLimits};

/// Bytes of each operation; 32 of them are a tenth of a second's writes.
const BYTES: usize = 64 << 10;
const READS: u64 = 64;
const WRITES: u64 = 32;

/// Bytes per second: all reads of a device take as long as all its writes.
const READ_RATE: u64 = 640 * BYTES as u64;
const WRITE_RATE: u64 = 320 * BYTES as u64;
const WHOLE: Duration = Duration::from_millis(100);

/// The limit applies to a whole process, so the body runs in a process of its own.
#[test]
fn each_device_reads_and_writes_at_its_own_rate_at_the_same_time() {
    let name = "each_device_reads_and_writes_at_its_own_rate_at_the_same_time";
    if std::env::var_os("OFFLOADD_RATE_LIMIT").is_none() {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name])
            .env("OFFLOADD_RATE_LIMIT", format!("{READ_RATE},{WRITE_RATE}"))
            .output()
            .unwrap();
        let printed = String::from_utf8_lossy(&output.stdout);
        assert!(printed.contains("1 passed"), "{printed}");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let devices = ["a", "b"].map(|name| {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(dir.path().join(name))
            .unwrap();
        file.set_len(READS * BYTES as u64).unwrap();
        Arc::new(file)
    });
    for choice in [EngineChoice::Auto, EngineChoice::Aio, EngineChoice::Psync] {
        let (mut engine, reason) = Engine::open(choice, &devices, 1024).unwrap();
        assert!(reason.contains("RateLimit"), "{reason}");
        // An operation may never be early. On a busy machine it may be late, so one run in time is enough.
        let times: Vec<Duration> = (0..10).map(|_| move_all(&mut engine)).collect();
        assert!(times.iter().all(|time| *time >= WHOLE), "{times:?}");
        // If the two directions or the two devices shared a limit, it would take twice as long.
        assert!(times.iter().any(|time| *time < WHOLE * 3 / 2), "{times:?}");
    }
}

/// Reads and writes everything on both devices. Returns the duration.
fn move_all(engine: &mut Engine) -> Duration {
    let since = Instant::now();
    let mut submitted = 0;
    for (op, count) in [(IoOp::Read, READS), (IoOp::Write, WRITES)] {
        for device in 0..2 {
            for index in 0..count {
                engine.submit(Io {
                    id: IoId(submitted),
                    device: DeviceIndex(device),
                    op,
                    offset: index * BYTES as u64,
                    bytes: BYTES as u32,
                    memory: Memory::Meta(AlignedBytes::zeroed(BYTES)),
                });
                submitted += 1;
            }
        }
    }
    let mut done = Vec::new();
    while done.len() < submitted as usize {
        engine.start().unwrap();
        let wait = Timespec {
            tv_sec: 10,
            tv_nsec: 0,
        };
        let ready = poll(
            &mut [PollFd::new(&engine.wake(), PollFlags::IN)],
            Some(&wait),
        );
        assert_ne!(ready, Ok(0), "{} of {submitted} ended", done.len());
        engine.reap(&mut done).unwrap();
    }
    assert_eq!(engine.inflight_count(), 0);
    assert!(done.iter().all(|one| one.outcome == Ok(BYTES as u32)));
    since.elapsed()
}

#[test]
fn a_rate_limit_is_two_rates_and_nothing_else() {
    let limit = RateLimit::parse("60000000, 30000000").unwrap();
    assert_eq!(
        (limit.read_bytes_per_s, limit.write_bytes_per_s),
        (60_000_000, 30_000_000)
    );
    let limits = RateLimits::parse("slow=30,15;60,30").unwrap();
    let read = |name| limits.for_file(name).read_bytes_per_s;
    assert_eq!((read("slow.tiles"), read("a.slow"), read("")), (30, 60, 60));
    for text in ["", ";", "a=1,1", "1,1;1,1", "=1,1;1,1", "a=1;1,1", "a=1,1;"] {
        assert_eq!(RateLimits::parse(text), None, "{text}");
    }
    for text in ["", "1", "1,", "0,1", "1,0", "1,2,3", "fast,slow", "-1,1"] {
        assert_eq!(RateLimit::parse(text), None, "{text}");
    }
}
