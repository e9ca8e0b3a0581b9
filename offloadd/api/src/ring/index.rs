//! The index protocol of one ring, without memory maps, so that loom can explore its interleavings (`tests/ring_loom.rs`).
//!
//! Promises: a consumer sees an entry only after its producer has written all of it. A producer overwrites an entry only after
//! its consumer has copied it. Neither accepts an impossible index of the other.

use std::sync::atomic::Ordering;

use super::RingError;

/// An index that both sides see.
pub trait SharedIndex {
    /// Loads the index.
    fn load(&self, order: Ordering) -> u32;
    /// Stores the index.
    fn store(&self, index: u32, order: Ordering);
}

/// The shared half of a ring. The private half is [`Producer`] or [`Consumer`].
pub trait SharedRing {
    /// Type of the entries.
    type Entry;
    /// Type of both indices.
    type Index: SharedIndex;

    /// Name for messages: "submission" or "completion".
    const NAME: &'static str;

    /// Number of places: a power of two, and the same at every call.
    fn entries(&self) -> u32;
    /// Entries consumed.
    fn head(&self) -> &Self::Index;
    /// Entries produced.
    fn tail(&self) -> &Self::Index;
    /// Copies an entry out. `place` is below `entries()`.
    fn read(&self, place: u32) -> Self::Entry;
    /// Copies an entry in. `place` is below `entries()`.
    fn write(&self, place: u32, entry: &Self::Entry);
}

/// The side that writes entries.
#[derive(Debug, Default)]
pub struct Producer {
    tail: u32,
}

impl Producer {
    /// A producer that continues at `tail`, which its side recorded: the peer may have rewritten the ring's index.
    pub fn at(tail: u32) -> Self {
        Self { tail }
    }

    /// Entries put since the start, modulo 2^32.
    pub fn index(&self) -> u32 {
        self.tail
    }

    /// Puts an entry; `false` when the ring is full.
    pub fn put<R: SharedRing>(&mut self, ring: &R, entry: &R::Entry) -> Result<bool, RingError> {
        if self.waiting(ring)? == ring.entries() {
            return Ok(false);
        }
        ring.write(self.tail & (ring.entries() - 1), entry);
        self.tail = self.tail.wrapping_add(1);
        // Release: the entry is whole before the consumer can see its index.
        ring.tail().store(self.tail, Ordering::Release);
        Ok(true)
    }

    /// Entries put and not taken yet.
    pub fn waiting<R: SharedRing>(&self, ring: &R) -> Result<u32, RingError> {
        // Acquire: the consumer has copied the entries it counts as consumed before we overwrite them.
        let head = ring.head().load(Ordering::Acquire);
        checked_distance::<R>(ring, self.tail, head, head)
    }
}

/// The side that takes entries.
#[derive(Debug, Default)]
pub struct Consumer {
    head: u32,
}

impl Consumer {
    /// A consumer that continues at `head`, which its side recorded: the peer may have rewritten the ring's index.
    pub fn at(head: u32) -> Self {
        Self { head }
    }

    /// Entries taken since the start, modulo 2^32.
    pub fn index(&self) -> u32 {
        self.head
    }

    /// Takes the oldest entry; `None` when there is none.
    pub fn pop<R: SharedRing>(&mut self, ring: &R) -> Result<Option<R::Entry>, RingError> {
        if self.ready(ring)? == 0 {
            return Ok(None);
        }
        let entry = ring.read(self.head & (ring.entries() - 1));
        self.head = self.head.wrapping_add(1);
        // Release: the copy above is done before the producer can overwrite the entry.
        ring.head().store(self.head, Ordering::Release);
        Ok(Some(entry))
    }

    /// Entries that can be taken.
    pub fn ready<R: SharedRing>(&self, ring: &R) -> Result<u32, RingError> {
        // Acquire: we see what the producer wrote before this index.
        let tail = ring.tail().load(Ordering::Acquire);
        checked_distance::<R>(ring, tail, self.head, tail)
    }
}

fn checked_distance<R: SharedRing>(
    ring: &R,
    tail: u32,
    head: u32,
    of_peer: u32,
) -> Result<u32, RingError> {
    let distance = tail.wrapping_sub(head);
    if distance > ring.entries() {
        return Err(RingError::Index {
            ring: R::NAME,
            index: of_peer,
            ours: if of_peer == tail { head } else { tail },
            entries: ring.entries(),
        });
    }
    Ok(distance)
}
