//! Slots without a daemon or drives, for runs that keep everything in host memory.

use std::sync::Arc;

use offload_api::fault::FaultKind;
use offload_api::geometry::{Geometry, SlotClass};

use crate::ClientError;
use crate::mapping::{self, ArenaMemory};
use crate::slot::{Slot, SlotPool};

/// Memory of this process, cut into slots like a session's arena. The constructor populates all of it.
#[derive(Debug)]
pub struct MemoryArena {
    pool: Arc<SlotPool>,
    memory: ArenaMemory,
}

/// Returns the bytes that an arena of `classes` takes, including gaps: what a daemon must have free for a session.
///
/// # Errors
/// [`FaultKind::Invalid`] for classes that no arena can have.
pub fn arena_bytes(classes: &[SlotClass]) -> Result<u64, ClientError> {
    Geometry::new(classes)
        .map(|geometry| geometry.arena_bytes())
        .map_err(|e| ClientError::refused(FaultKind::Invalid, e.to_string()))
}

impl MemoryArena {
    /// Allocates the arena.
    ///
    /// # Errors
    /// [`FaultKind::Invalid`] for classes that no arena can have, [`ClientError::Os`] without enough memory.
    pub fn new(classes: &[SlotClass]) -> Result<Self, ClientError> {
        let geometry = Geometry::new(classes)
            .map_err(|e| ClientError::refused(FaultKind::Invalid, e.to_string()))?;
        let (memory, regions) = mapping::private(&geometry)?;
        Ok(Self {
            pool: SlotPool::new(&geometry, classes.len(), regions),
            memory,
        })
    }

    /// Takes a free slot of class `class`; `None` when there is none.
    pub fn take_slot(&mut self, class: usize) -> Option<Slot> {
        self.pool.claim(class)
    }

    /// Returns a slot, like dropping it.
    pub fn give_slot(&mut self, slot: Slot) {
        assert!(slot.is_of(&self.pool), "a slot of another arena");
    }

    /// Number of free slots of class `class`.
    pub fn free_slot_count(&self, class: usize) -> usize {
        self.pool.free_count(class)
    }

    /// The arena's memory, to register it with a GPU.
    pub fn memory(&self) -> ArenaMemory {
        self.memory.clone()
    }
}
