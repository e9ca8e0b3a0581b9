//! Opens rings whose shared pages were changed by another process: header, indices, entries. Each side takes the valid entries, refuses the rest, and
//! reads nothing outside its mapping.

#![no_main]

use std::os::fd::OwnedFd;

use libfuzzer_sys::fuzz_target;
use offloadd::api::ids::Epoch;
use offloadd::api::ring::entry::{Request, Promote};
use offloadd::api::ring::{DaemonRings, ProcessRings, RingMap};
use rustix::fs::MemfdFlags;

const ENTRIES: u32 = 8;
const EPOCH: Epoch = Epoch(7);

/// Makes a ring and the daemon's side of it.
fn ring() -> (OwnedFd, RingMap) {
    let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC;
    let fd = rustix::fs::memfd_create("ring", flags).expect("memory");
    let map = RingMap::create(&fd, ENTRIES, EPOCH).expect("a ring");
    (fd, map)
}

/// Overwrites bytes of the ring. The input is a sequence of: two bytes of offset, in units of eight, one byte of length, and the new bytes.
fn rewrite(fd: &OwnedFd, bytes: &[u8]) -> usize {
    let mut at = 0;
    while let Some(&[low, high, count]) = bytes.get(at..at + 3) {
        let place = u64::from(u16::from_le_bytes([low, high])) * 8 % (3 * 4096);
        at += 3;
        let end = (at + usize::from(count)).min(bytes.len());
        rustix::io::pwrite(fd, &bytes[at..end], place).expect("it is memory");
        at = end;
    }
    at
}

fuzz_target!(|bytes: &[u8]| {
    let (fd, map) = ring();
    let mut daemon = DaemonRings::new(map);
    rewrite(&fd, bytes);
    // One more than there can be: no entry is taken twice.
    for _ in 0..=ENTRIES {
        let Ok(Some(sqe)) = daemon.pop() else { break };
        if let Ok(request) = Request::check(&sqe, EPOCH) {
            assert_eq!(request.to_sqe(EPOCH), sqe, "what was checked is all of it");
        }
        let _ = Promote::check(&sqe, EPOCH);
    }
    let Ok(map) = RingMap::open(&fd) else { return };
    let mut process = ProcessRings::new(map);
    for _ in 0..=ENTRIES {
        let Ok(Some(_)) = process.pop() else { break };
    }
    let _ = (process.untaken(), process.ready());
});
