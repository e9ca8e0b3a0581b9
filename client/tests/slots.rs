//! Tests that slots share no bytes, that no slot is lent twice, and that a slot dropped on an error path is not lost.

use std::collections::HashSet;

use offload_client::{ClientError, FaultKind, MemoryArena, SlotClass};

const CLASSES: [SlotClass; 3] = [
    SlotClass {
        slot_bytes: 8192,
        slot_count: 5,
    },
    SlotClass {
        slot_bytes: 4096,
        slot_count: 0,
    },
    SlotClass {
        slot_bytes: 3 << 20,
        slot_count: 4,
    },
];

#[test]
fn slots_are_zeroed_lie_apart_and_hold_what_was_put_into_them() {
    let mut arena = MemoryArena::new(&CLASSES).unwrap();
    let mut slots = Vec::new();
    for (class, expected) in CLASSES.iter().enumerate() {
        let taken: Vec<_> = std::iter::from_fn(|| arena.take_slot(class)).collect();
        assert_eq!(taken.len(), expected.slot_count as usize);
        assert!(
            taken
                .iter()
                .all(|s| s.bytes() as u64 == expected.slot_bytes && s.class() == class)
        );
        slots.extend(taken);
    }
    assert!(arena.take_slot(3).is_none());
    let indices: HashSet<_> = slots.iter().map(|slot| slot.index()).collect();
    assert_eq!(indices.len(), 9);
    for (value, slot) in slots.iter_mut().enumerate() {
        assert!(slot.as_slice().iter().all(|b| *b == 0));
        slot.as_mut_slice().fill(value as u8 + 1);
    }
    let memory = arena.memory();
    for (value, slot) in slots.iter().enumerate() {
        assert!(slot.as_slice().iter().all(|b| *b == value as u8 + 1));
        let start = slot.as_slice().as_ptr() as usize;
        assert!(start.is_multiple_of(4096) && start >= memory.address());
        assert!(start + slot.bytes() <= memory.address() + memory.bytes());
    }
}

#[test]
fn a_dropped_slot_is_free_again_and_one_given_back_too() {
    let mut arena = MemoryArena::new(&CLASSES).unwrap();
    assert_eq!(arena.free_slot_count(0), 5);
    let first = arena.take_slot(0).unwrap();
    let second = arena.take_slot(0).unwrap();
    assert_ne!(first.index(), second.index());
    assert_eq!(arena.free_slot_count(0), 3);
    let dropped_elsewhere = std::thread::spawn(move || drop(first));
    dropped_elsewhere.join().unwrap();
    arena.give_slot(second);
    assert_eq!(arena.free_slot_count(0), 5);
}

#[test]
fn a_slot_keeps_its_bytes_when_its_arena_is_gone() {
    let mut arena = MemoryArena::new(&CLASSES).unwrap();
    let mut slot = arena.take_slot(2).unwrap();
    slot.as_mut_slice().fill(7);
    drop(arena);
    assert!(slot.as_slice().iter().all(|b| *b == 7));
}

#[test]
fn memory_that_is_not_there_is_an_error_before_anything_starts() {
    let none = MemoryArena::new(&[]).unwrap_err();
    assert_eq!(none.fault(), Some(FaultKind::Invalid));
    // 1 PiB: more than any machine maps.
    let huge = MemoryArena::new(&[SlotClass {
        slot_bytes: 1 << 30,
        slot_count: 1 << 20,
    }]);
    assert!(matches!(huge, Err(ClientError::Os { .. })), "{huge:?}");
}

#[test]
fn sessions_and_slots_can_move_to_another_thread_and_wakers_be_shared() {
    fn moves<T: Send>() {}
    fn is_shared<T: Sync>() {}
    moves::<offload_client::Session>();
    moves::<offload_client::Slot>();
    moves::<offload_client::Waker>();
    is_shared::<offload_client::Waker>();
}
