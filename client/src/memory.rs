//! Slots without a daemon or drives, for runs that keep everything in host memory.

use std::sync::Arc;

use offload_api::fault::FaultKind;
use offload_api::geometry::{Geometry, SlotClass};

use crate::ClientError;
use crate::mapping::{self, ArenaMemory};
use crate::slot::{Slot, SlotPool};

/// Memory of this process, cut into slots like a session's arena. All of it is taken at once, in the constructor.
#[derive(Debug)]
pub struct MemoryArena {
    pool: Arc<SlotPool>,
    memory: ArenaMemory,
}

/// Bytes an arena of `classes` takes, gaps between its parts included: what a daemon must have free for a session.
///
/// # Errors
/// [`FaultKind::Invalid`] for classes no arena has.
pub fn arena_bytes(classes: &[SlotClass]) -> Result<u64, ClientError> {
    Geometry::new(classes)
        .map(|geometry| geometry.arena_bytes())
        .map_err(|e| ClientError::refused(FaultKind::Invalid, e.to_string()))
}

impl MemoryArena {
    /// [`FaultKind::Invalid`] for classes no arena has, [`ClientError::Os`] when the memory is not there.
    pub fn new(classes: &[SlotClass]) -> Result<Self, ClientError> {
        let geometry = Geometry::new(classes)
            .map_err(|e| ClientError::refused(FaultKind::Invalid, e.to_string()))?;
        let (memory, regions) = mapping::private(&geometry)?;
        Ok(Self {
            pool: SlotPool::new(&geometry, classes.len(), regions),
            memory,
        })
    }

    /// A free slot of class `class`, `None` when there is none.
    pub fn take_slot(&mut self, class: usize) -> Option<Slot> {
        self.pool.take(class)
    }

    /// The same as dropping it.
    pub fn give_slot(&mut self, slot: Slot) {
        assert!(slot.is_of(&self.pool), "a slot of another arena");
    }

    /// Free slots of class `class`.
    pub fn free_slot_count(&self, class: usize) -> usize {
        self.pool.free_count(class)
    }

    /// Where it lies, to register it with a GPU.
    pub fn memory(&self) -> ArenaMemory {
        self.memory.clone()
    }
}
