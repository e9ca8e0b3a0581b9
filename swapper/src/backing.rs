//! Where slots come from and tiles go to: a daemon's session, or host memory alone.

use offload_client::{MemoryArena, Session, Slot};

/// The two known cases.
pub(crate) enum Arena {
    Memory(MemoryArena),
    Session(Box<Session>),
}

impl Arena {
    /// All slots of a class: a kind's number. There are `count`, and nobody else takes any.
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
