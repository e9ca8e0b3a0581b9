//! Tests with a kernel that refuses operations for a while, and with devices that it refuses.

use super::*;
use crate::io::{AlignedBytes, IoId};

const NO_HANG: Duration = Duration::from_secs(60);

/// Opens an engine on these files; `None` where the machine forbids it.
fn opened(files: &[Arc<File>]) -> Option<Uring> {
    let opened = Uring::open(files, 256);
    let skipped = |error: &EngineError| {
        let test = std::thread::current();
        println!("skipped: {}: {error}", test.name().unwrap_or("a test"));
    };
    opened.inspect_err(skipped).ok()
}

fn read(id: u64, device: u32) -> Io {
    Io {
        id: IoId(id),
        device: DeviceIndex(device),
        op: IoOp::Read,
        offset: 0,
        bytes: 4096,
        memory: Memory::Meta(AlignedBytes::zeroed(4096)),
    }
}

fn file() -> Arc<File> {
    let file = tempfile::tempfile().unwrap();
    file.set_len(4096).unwrap();
    Arc::new(file)
}

/// Reaps until `count` have ended, as the driver does: woken by the engine, or by the time it gave.
fn finish(engine: &mut Uring, count: usize) -> Vec<IoDone> {
    let limit = Instant::now() + NO_HANG;
    let mut done = Vec::new();
    while done.len() < count {
        assert!(Instant::now() < limit, "{} of {count} ended", done.len());
        let wait = engine.again_after().unwrap_or(NO_HANG);
        let wait = Timespec::try_from(wait).unwrap();
        let mut wake = [PollFd::new(&engine.wake, PollFlags::IN)];
        match poll(&mut wake, Some(&wait)).unwrap() {
            0 => engine.start().unwrap(),
            _ => engine.reap(&mut done).unwrap(),
        }
    }
    done
}

#[test]
fn what_the_kernel_does_not_take_for_now_is_offered_again_and_nothing_breaks() {
    for errno in [libc::EAGAIN, libc::EBUSY] {
        let Some(mut engine) = opened(&[file()]) else {
            return;
        };
        for id in 0..100 {
            engine.submit(read(id, 0));
        }
        engine.refuses.set((3000, errno));
        engine.start().unwrap();
        assert_eq!(engine.refuses.get().0, 2999, "the thread continues at once");
        assert_eq!(engine.again_after(), Some(AGAIN_AFTER));
        while engine.refuses.get().0 > 0 {
            engine.start().unwrap();
        }
        // No operation has ended that could wake the driver, so the time-out does.
        let mut done = finish(&mut engine, 100);
        done.sort_by_key(|done| done.id.0);
        let ids: Vec<_> = done.iter().map(|done| done.id.0).collect();
        assert_eq!(ids, Vec::from_iter(0..100), "each once");
        assert!(done.iter().all(|done| done.outcome == Ok(4096)));
        assert_eq!((engine.again_after(), engine.inflight_count()), (None, 0));
    }
}

#[test]
fn what_ends_is_reaped_while_the_kernel_takes_no_more() {
    let signal = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let signalled = Arc::new(File::from(signal.try_clone().unwrap()));
    let Some(mut engine) = opened(&[signalled, file()]) else {
        return;
    };
    engine.submit(read(1, 0));
    engine.start().unwrap();
    assert_eq!(engine.again_after(), None);
    engine.submit(read(2, 1));
    engine.refuses.set((u32::MAX, libc::EAGAIN));
    engine.start().unwrap();
    rustix::io::write(&signal, &1u64.to_ne_bytes()).unwrap();
    let done = finish(&mut engine, 1);
    assert_eq!((done[0].id.0, &done[0].outcome), (1, &Ok(8)));
    assert!(engine.refuses.get().0 > 0);
    // A refused call has read the signal: the completions that it did not return are signalled again.
    engine.refuses.set((0, 0));
    assert_eq!(finish(&mut engine, 1)[0].outcome, Ok(4096));
}

#[test]
fn a_device_that_cannot_be_registered_is_named() {
    let files = vec![file(); DEVICES_MAX as usize];
    let Some(mut engine) = opened(&files) else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("one-too-many");
    let error = engine.add(Arc::new(File::create(&path).unwrap()));
    let told = error.unwrap_err().to_string();
    let named = format!("registering device 64 ({})", path.display());
    assert!(told.contains(&named), "{told}");
}
