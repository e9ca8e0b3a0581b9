//! The two sides of a session's rings: the daemon takes submissions and puts completions, the process the other way round.

use std::sync::atomic::{AtomicU32, Ordering};

use zerocopy::{FromBytes, IntoBytes};

use super::entry::{Cqe, Sqe};
use super::index::{Consumer, Producer, SharedIndex, SharedRing};
use super::map::{self, ENTRY_BYTES, RingMap};
use super::{RingError, RingHeader};

/// Indices that the daemon writes, as recorded by the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingPositions {
    /// Submissions taken.
    pub submission_head: u32,
    /// Completions put.
    pub completion_tail: u32,
}

/// The daemon's side.
#[derive(Debug)]
pub struct DaemonRings {
    map: RingMap,
    submissions: Consumer,
    completions: Producer,
}

impl DaemonRings {
    /// Starts on a map just created.
    pub fn new(map: RingMap) -> Self {
        Self {
            map,
            submissions: Consumer::default(),
            completions: Producer::default(),
        }
    }

    /// Continues on the map of a previous daemon.
    pub fn resume(map: RingMap, reached: RingPositions) -> Self {
        Self {
            map,
            submissions: Consumer::at(reached.submission_head),
            completions: Producer::at(reached.completion_tail),
        }
    }

    /// Indices reached so far.
    pub fn reached(&self) -> RingPositions {
        RingPositions {
            submission_head: self.submissions.index(),
            completion_tail: self.completions.index(),
        }
    }

    /// Header of the ring when it was made.
    pub fn header(&self) -> &RingHeader {
        self.map.header()
    }

    /// Takes a copy of the oldest submission, unchecked. An error means that the peer violated the protocol.
    pub fn pop(&mut self) -> Result<Option<Sqe>, RingError> {
        self.submissions.pop(&Submissions(&self.map))
    }

    /// Puts a completion. [`RingError::Full`] means that the peer has more operations in flight than it was granted.
    pub fn put(&mut self, cqe: &Cqe) -> Result<(), RingError> {
        let ring = Completions(&self.map);
        if self.completions.put(&ring, cqe)? {
            Ok(())
        } else {
            Err(RingError::Full {
                ring: Completions::NAME,
            })
        }
    }
}

/// The side of the process.
#[derive(Debug)]
pub struct ProcessRings {
    map: RingMap,
    submissions: Producer,
    completions: Consumer,
}

impl ProcessRings {
    /// Starts on a map just received, with empty rings.
    pub fn new(map: RingMap) -> Self {
        Self {
            map,
            submissions: Producer::default(),
            completions: Consumer::default(),
        }
    }

    /// Header that the daemon wrote.
    pub fn header(&self) -> &RingHeader {
        self.map.header()
    }

    /// Puts a submission; `false` when the ring is full.
    pub fn put(&mut self, sqe: &Sqe) -> Result<bool, RingError> {
        self.submissions.put(&Submissions(&self.map), sqe)
    }

    /// Submissions that the daemon has not taken yet.
    pub fn untaken(&self) -> Result<u32, RingError> {
        self.submissions.waiting(&Submissions(&self.map))
    }

    /// Takes the oldest completion.
    pub fn pop(&mut self) -> Result<Option<Cqe>, RingError> {
        self.completions.pop(&Completions(&self.map))
    }

    /// Completions that can be taken.
    pub fn ready(&self) -> Result<u32, RingError> {
        self.completions.ready(&Completions(&self.map))
    }
}

impl SharedIndex for AtomicU32 {
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }

    fn store(&self, index: u32, order: Ordering) {
        self.store(index, order);
    }
}

struct Submissions<'a>(&'a RingMap);

impl SharedRing for Submissions<'_> {
    type Entry = Sqe;
    type Index = AtomicU32;
    const NAME: &'static str = "submission";

    fn entries(&self) -> u32 {
        self.0.header().entries
    }
    fn head(&self) -> &AtomicU32 {
        self.0.index(map::SUBMISSION_HEAD)
    }
    fn tail(&self) -> &AtomicU32 {
        self.0.index(map::SUBMISSION_TAIL)
    }
    fn read(&self, place: u32) -> Sqe {
        let bytes = self
            .0
            .read_entry(map::SUBMISSIONS + place as usize * ENTRY_BYTES);
        Sqe::read_from_bytes(&bytes).expect("as many bytes")
    }
    fn write(&self, place: u32, entry: &Sqe) {
        let offset = map::SUBMISSIONS + place as usize * ENTRY_BYTES;
        self.0.write_entry(offset, entry.as_bytes());
    }
}

struct Completions<'a>(&'a RingMap);

impl SharedRing for Completions<'_> {
    type Entry = Cqe;
    type Index = AtomicU32;
    const NAME: &'static str = "completion";

    fn entries(&self) -> u32 {
        self.0.header().entries
    }
    fn head(&self) -> &AtomicU32 {
        self.0.index(map::COMPLETION_HEAD)
    }
    fn tail(&self) -> &AtomicU32 {
        self.0.index(map::COMPLETION_TAIL)
    }
    fn read(&self, place: u32) -> Cqe {
        let start = map::completions(self.entries());
        let bytes = self.0.read_entry(start + place as usize * ENTRY_BYTES);
        Cqe::read_from_bytes(&bytes).expect("as many bytes")
    }
    fn write(&self, place: u32, entry: &Cqe) {
        let start = map::completions(self.entries());
        self.0
            .write_entry(start + place as usize * ENTRY_BYTES, entry.as_bytes());
    }
}
