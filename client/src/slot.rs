//! Slots, and the free lists they are taken from and returned to.

use std::sync::{Arc, Mutex, PoisonError};

use offload_api::geometry::Geometry;
use offload_api::ids::SlotIndex;

use crate::mapping::Region;

/// A piece of pinned memory that belongs to its holder. Dropping it returns it to its free list.
///
/// While a tile is in flight, the session owns the slot and nobody can see its bytes.
#[derive(Debug)]
pub struct Slot {
    /// `None` only while the slot is dropped.
    region: Option<Region>,
    index: SlotIndex,
    class: usize,
    pool: Arc<SlotPool>,
}

impl Slot {
    /// Index of the slot in the arena.
    pub fn index(&self) -> SlotIndex {
        self.index
    }

    /// Index of the slot's class.
    pub fn class(&self) -> usize {
        self.class
    }

    /// Size of the slot.
    pub fn bytes(&self) -> usize {
        self.region().bytes()
    }

    /// Content of the slot.
    pub fn as_slice(&self) -> &[u8] {
        self.region().as_slice()
    }

    /// Mutable content of the slot.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        self.region
            .as_mut()
            .expect("present until dropped")
            .as_mut_slice()
    }

    pub(crate) fn is_of(&self, pool: &Arc<SlotPool>) -> bool {
        Arc::ptr_eq(&self.pool, pool)
    }

    fn region(&self) -> &Region {
        self.region.as_ref().expect("present until dropped")
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(region) = self.region.take() {
            self.pool.lock(self.class).push((self.index, region));
        }
    }
}

type FreeList = Vec<(SlotIndex, Region)>;

/// One free list a class. Any thread may drop slots; the lock is held for a push or a pop.
#[derive(Debug)]
pub(crate) struct SlotPool {
    free: Vec<Mutex<FreeList>>,
}

impl SlotPool {
    /// Makes all `regions` free. There is one for each slot of `geometry`, which has `classes` classes.
    pub(crate) fn new(geometry: &Geometry, classes: usize, regions: Vec<Region>) -> Arc<Self> {
        assert_eq!(regions.len(), geometry.slot_count() as usize);
        let mut regions = regions.into_iter();
        let free = (0..classes)
            .map(|class| {
                // Slots are popped from the end. Reversed, the lowest are used first and stay in the processor's cache.
                let slots: Vec<_> = geometry.slots_of(class).collect();
                let mut list: FreeList = slots.into_iter().zip(regions.by_ref()).collect();
                list.reverse();
                Mutex::new(list)
            })
            .collect();
        Arc::new(Self { free })
    }

    /// Takes a free slot of `class`; `None` when all are taken or the class does not exist.
    pub(crate) fn claim(self: &Arc<Self>, class: usize) -> Option<Slot> {
        if class >= self.free.len() {
            return None;
        }
        let (index, region) = self.lock(class).pop()?;
        Some(Slot {
            region: Some(region),
            index,
            class,
            pool: self.clone(),
        })
    }

    pub(crate) fn free_count(&self, class: usize) -> usize {
        self.free.get(class).map_or(0, |_| self.lock(class).len())
    }

    fn lock(&self, class: usize) -> std::sync::MutexGuard<'_, FreeList> {
        // A push or pop leaves the list intact even if another thread panicked.
        self.free[class]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
