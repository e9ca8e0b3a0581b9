//! Tests that a consumer never sees an index before its entry, and that a producer never overwrites an entry that is being copied. loom runs every
//! interleaving that the C11 memory model allows for a ring of two places and three entries. The entries are cells that fail the test when two
//! accesses to one are not ordered by the protocol, so weakening any Acquire or Release of `ring/index.rs` fails here.

use std::sync::atomic::Ordering;

use loom::cell::Cell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicU32;
use offload_api::ring::index::{Consumer, Producer, SharedIndex, SharedRing};

struct Index(AtomicU32);

impl SharedIndex for Index {
    fn load(&self, order: Ordering) -> u32 {
        self.0.load(order)
    }
    fn store(&self, index: u32, order: Ordering) {
        self.0.store(index, order);
    }
}

struct Ring {
    head: Index,
    tail: Index,
    places: [Cell<u64>; 2],
}

// SAFETY: loom runs one thread at a time, and checks at each access to a cell that the protocol under test orders it.
unsafe impl Sync for Ring {}

impl SharedRing for Ring {
    type Entry = u64;
    type Index = Index;
    const NAME: &'static str = "tried";

    fn entries(&self) -> u32 {
        self.places.len() as u32
    }
    fn head(&self) -> &Index {
        &self.head
    }
    fn tail(&self) -> &Index {
        &self.tail
    }
    fn read(&self, place: u32) -> u64 {
        self.places[place as usize].get()
    }
    fn write(&self, place: u32, entry: &u64) {
        self.places[place as usize].set(*entry);
    }
}

#[test]
fn every_entry_arrives_whole_once_and_in_order_in_every_interleaving() {
    const SENT: u64 = 3;
    loom::model(|| {
        let ring = Arc::new(Ring {
            head: Index(AtomicU32::new(0)),
            tail: Index(AtomicU32::new(0)),
            places: [Cell::new(0), Cell::new(0)],
        });
        let of_producer = ring.clone();
        let producer = loom::thread::spawn(move || {
            let mut producer = Producer::default();
            for entry in 1..=SENT {
                while !producer.put(&*of_producer, &entry).unwrap() {
                    loom::thread::yield_now();
                }
            }
        });
        let mut consumer = Consumer::default();
        for expected in 1..=SENT {
            let entry = loop {
                match consumer.pop(&*ring).unwrap() {
                    Some(entry) => break entry,
                    None => loom::thread::yield_now(),
                }
            };
            assert_eq!(entry, expected);
        }
        assert_eq!(consumer.pop(&*ring).unwrap(), None);
        producer.join().unwrap();
    });
}
