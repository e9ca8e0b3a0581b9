//! Source of slots and destination of tiles: a daemon's session, or host memory alone.

use offload_client::{MemoryArena, Session, Slot};

pub(crate) enum Arena {
    Memory(MemoryArena),
    Session(Box<Session>),
}

impl Arena {
    /// Takes all `count` slots of a class (a kind's number). Nobody else takes slots.
    pub(crate) fn take_all(&mut self, class: usize, count: u32) -> Vec<Option<Slot>> {
        (0..count)
            .map(|_| {
                let slot = match self {
                    Self::Memory(arena) => arena.take_slot(class),
                    Self::Session(session) => session.take_slot(class),
                };
                Some(slot.expect("an arena has the slots it was asked for"))
            })
            .collect()
    }
}
