//! Tests with a peer that writes arbitrary bytes into the shared pages (indices, entries, header) or hands over a file that can be truncated: the
//! daemon must not read beyond the ring, loop forever, or die of SIGBUS. The peer here writes with `pwrite` to the memory file, as a real one could.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use offload_api::ids::Epoch;
use offload_api::ring::entry::{Cqe, Sqe};
use offload_api::ring::{DaemonRings, ProcessRings, RingError, RingMap, ring_bytes};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::pwrite;
use zerocopy::FromZeros;

const ENTRIES: u32 = 8;
const SUBMISSION_TAIL: u64 = 128;
const COMPLETION_HEAD: u64 = 512;

fn memory_file() -> OwnedFd {
    memfd_create("ring", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap()
}

fn pair() -> (OwnedFd, DaemonRings, ProcessRings) {
    let file = memory_file();
    let daemon = DaemonRings::new(RingMap::create(&file, ENTRIES, Epoch(77)).unwrap());
    let process = ProcessRings::new(RingMap::open(&file).unwrap());
    (file, daemon, process)
}

fn sqe(ticket: u64) -> Sqe {
    Sqe {
        ticket,
        tile: ticket as u32,
        priority: 7,
        reserved: [1, 2, 3, 4, 5],
        ..Sqe::new_zeroed()
    }
}

fn cqe(ticket: u64) -> Cqe {
    Cqe {
        ticket,
        errno: -5,
        reserved: 9,
        ..Cqe::new_zeroed()
    }
}

#[test]
fn entries_cross_in_order_many_times_round_the_ring() {
    let (_file, mut daemon, mut process) = pair();
    assert_eq!(process.header().epoch, 77);
    for round in 0..100u64 {
        let count = round % u64::from(ENTRIES) + 1;
        for i in 0..count {
            assert!(process.put(&sqe(round * 100 + i)).unwrap());
        }
        for i in 0..count {
            assert_eq!(daemon.pop().unwrap(), Some(sqe(round * 100 + i)));
            daemon.put(&cqe(round * 100 + i)).unwrap();
        }
        assert_eq!(daemon.pop().unwrap(), None);
        assert_eq!(u64::from(process.ready().unwrap()), count);
        for i in 0..count {
            assert_eq!(process.pop().unwrap(), Some(cqe(round * 100 + i)));
        }
        assert_eq!(process.pop().unwrap(), None);
    }
}

#[test]
fn a_full_ring_refuses_and_loses_nothing() {
    let (_file, mut daemon, mut process) = pair();
    for i in 0..u64::from(ENTRIES) {
        assert!(process.put(&sqe(i)).unwrap());
        daemon.put(&cqe(i)).unwrap();
    }
    assert!(!process.put(&sqe(99)).unwrap());
    assert!(matches!(daemon.put(&cqe(99)), Err(RingError::Full { .. })));
    assert_eq!(daemon.pop().unwrap(), Some(sqe(0)));
    assert!(process.put(&sqe(8)).unwrap());
    assert_eq!(process.pop().unwrap(), Some(cqe(0)));
    daemon.put(&cqe(8)).unwrap();
}

#[test]
fn an_impossible_index_is_an_error_not_an_access() {
    let (file, mut daemon, _process) = pair();
    // More entries produced than fit.
    for hostile in [ENTRIES + 1, 1 << 31, u32::MAX] {
        pwrite(&file, &hostile.to_le_bytes(), SUBMISSION_TAIL).unwrap();
        assert!(matches!(daemon.pop(), Err(RingError::Index { index, .. }) if index == hostile));
    }
    // More entries consumed than were ever produced, or so few that the ring would hold more than fit.
    for hostile in [1, 1 << 31, u32::MAX - ENTRIES] {
        pwrite(&file, &hostile.to_le_bytes(), COMPLETION_HEAD).unwrap();
        let refused = daemon.put(&cqe(0));
        assert!(matches!(refused, Err(RingError::Index { index, .. }) if index == hostile));
    }
}

#[test]
fn the_daemons_own_indices_and_header_are_not_read_back() {
    let (file, mut daemon, mut process) = pair();
    process.put(&sqe(1)).unwrap();
    // Everything that the daemon wrote, overwritten: header, submission head, completion tail.
    pwrite(&file, &[0xff; 64], 0).unwrap();
    pwrite(&file, &[0xff; 64], 256).unwrap();
    pwrite(&file, &[0xff; 64], 384).unwrap();
    assert_eq!(daemon.pop().unwrap(), Some(sqe(1)));
    assert_eq!(daemon.pop().unwrap(), None);
    daemon.put(&cqe(1)).unwrap();
    assert_eq!(process.pop().unwrap(), Some(cqe(1)));
}

#[test]
fn a_peer_that_scribbles_everywhere_gets_bounded_answers() {
    let (file, mut daemon, _process) = pair();
    let stop = AtomicBool::new(false);
    let file = file.as_fd();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut state = 0x9e37_79b9_7f4a_7c15_u64;
            while !stop.load(Ordering::Relaxed) {
                state = state
                    .wrapping_mul(6364136223846793005)
                    .wrapping_add(1442695040888963407);
                // Half of the writes change the indices, with small numbers that are often plausible.
                let (offset, value) = if state >> 63 == 0 {
                    (128 * (1 + (state >> 40) % 4), (state >> 33) % 16)
                } else {
                    (
                        (state >> 20) % (ring_bytes(ENTRIES) as u64 - 8),
                        state.rotate_left(17),
                    )
                };
                pwrite(file, &value.to_le_bytes(), offset).unwrap();
            }
        });
        let until = Instant::now() + Duration::from_millis(300);
        let (mut taken, mut refused) = (0u64, 0u64);
        while Instant::now() < until {
            match daemon.pop() {
                Ok(Some(_)) => taken += 1,
                Ok(None) => {}
                Err(RingError::Index { .. }) => refused += 1,
                Err(other) => panic!("{other}"),
            }
            match daemon.put(&cqe(taken)) {
                Ok(()) | Err(RingError::Full { .. } | RingError::Index { .. }) => {}
                Err(other) => panic!("{other}"),
            }
        }
        stop.store(true, Ordering::Relaxed);
        assert!(taken > 0 && refused > 0, "{taken} taken, {refused} refused");
    });
}

#[test]
fn the_memory_cannot_be_cut_off_under_the_daemon() {
    let (file, _daemon, _process) = pair();
    for bytes in [0, 4096, 1 << 20] {
        let refused = rustix::fs::ftruncate(&file, bytes).unwrap_err();
        assert_eq!(
            io::Error::from(refused).kind(),
            io::ErrorKind::PermissionDenied
        );
    }
}

#[test]
fn a_file_that_is_no_ring_is_refused_by_name() {
    let form = |file: &OwnedFd| match RingMap::open(file) {
        Err(error @ RingError::Form { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    };
    let unsealed = memory_file();
    rustix::fs::ftruncate(&unsealed, ring_bytes(ENTRIES) as u64).unwrap();
    assert!(form(&unsealed).contains("not sealed"));
    for (bytes, words) in [(0, "0 bytes"), (4096, "4096 bytes"), (1 << 30, "bytes")] {
        let file = memory_file();
        rustix::fs::ftruncate(&file, bytes).unwrap();
        rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::SHRINK).unwrap();
        assert!(form(&file).contains(words));
    }
    // magic, version, entries
    for (offset, value, words) in [
        (0, 1u32, "magic"),
        (8, 99, "version 99"),
        (12, 7, "7 entries"),
        (12, 1 << 30, "entries"),
        (12, 256, "256 entries"),
    ] {
        let file = memory_file();
        drop(RingMap::create(&file, ENTRIES, Epoch(1)).unwrap());
        pwrite(&file, &value.to_le_bytes(), offset).unwrap();
        let message = form(&file);
        assert!(message.contains(words), "{message}");
    }
    let pipe = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
    assert!(matches!(RingMap::open(&pipe), Err(RingError::Os { .. })));
}

#[test]
fn the_bytes_of_the_pages_never_change() {
    let (file, mut daemon, mut process) = pair();
    process.put(&sqe(0x1122)).unwrap();
    daemon.pop().unwrap().unwrap();
    daemon.put(&cqe(0x3344)).unwrap();
    daemon.put(&cqe(0x5566)).unwrap();
    process.pop().unwrap().unwrap();
    let mut pages = vec![0; ring_bytes(ENTRIES)];
    assert_eq!(pages.len(), 3 * 4096);
    assert_eq!(
        rustix::io::pread(&file, &mut pages, 0).unwrap(),
        pages.len()
    );
    let u32_at = |at: usize| u32::from_le_bytes(pages[at..at + 4].try_into().unwrap());
    assert_eq!(&pages[..8], b"OFFLRING");
    assert_eq!(
        [u32_at(8), u32_at(12), u32_at(16), u32_at(20)],
        [8, 8, 77, 0]
    );
    // submission tail, head, completion tail, head
    assert_eq!([128, 256, 384, 512].map(u32_at), [1, 1, 2, 1]);
    assert_eq!(u32_at(4096), 0x1122);
    assert_eq!([u32_at(8192), u32_at(8192 + 64)], [0x3344, 0x5566]);
}
