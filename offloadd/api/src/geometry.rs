//! Places of the slots in an arena. Both sides compute them from the slot classes, so no offset is ever sent.
//!
//! ```text
//!   arena  | class 0: slot 0 | slot 1 | ... | gap | class 1: slot n | ...            |
//!          | piece 0                        |     | piece 1          | piece 2 ...   |
//! ```
//!
//! io_uring registers at most 1 GiB a buffer, so slots lie in *pieces* of at most [`PIECE_BYTES_MAX`] that no slot crosses.
//! Pieces start at multiples of 2 MiB, where huge pages can.

use crate::ids::SlotIndex;
use crate::{BLOCK_BYTES, proto};

/// Largest size of a registered buffer (io_uring's limit).
pub const PIECE_BYTES_MAX: u64 = 1 << 30;

/// Pieces start at multiples of this.
const PIECE_ALIGN_BYTES: u64 = 2 << 20;

/// Slots of one arena. Bounds tables sized by a peer's request.
pub const SLOTS_MAX: u64 = 1 << 20;

/// A number of slots with equal size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotClass {
    /// Size of a slot, a multiple of [`BLOCK_BYTES`].
    pub slot_bytes: u64,
    /// Number of slots.
    pub slot_count: u32,
}

impl From<&SlotClass> for proto::SlotClass {
    fn from(class: &SlotClass) -> Self {
        Self {
            slot_bytes: class.slot_bytes,
            slot_count: class.slot_count,
        }
    }
}

impl From<&proto::SlotClass> for SlotClass {
    fn from(class: &proto::SlotClass) -> Self {
        Self {
            slot_bytes: class.slot_bytes,
            slot_count: class.slot_count,
        }
    }
}

/// A run of slots that is registered as one buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First byte, within the arena.
    pub offset: u64,
    /// Length, at most [`PIECE_BYTES_MAX`].
    pub bytes: u64,
}

/// Place of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotPlace {
    /// First byte, within the arena.
    pub offset: u64,
    /// Size of the slot.
    pub bytes: u64,
    /// Index of the piece that holds the slot.
    pub piece: u32,
}

/// Why classes cannot form an arena.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GeometryError {
    /// A slot size that the kernel or the ring cannot take.
    #[error(
        "slot class {class} has {slot_bytes} bytes; it must be a multiple of {BLOCK_BYTES} and at most 1 GiB"
    )]
    SlotBytes {
        /// Index of the class in the request.
        class: usize,
        /// Size in the request.
        slot_bytes: u64,
    },
    /// More slots than a session may have, or none.
    #[error("{slots} slots are not between 1 and {SLOTS_MAX}; use larger tiles")]
    SlotCount {
        /// Slots in the request, over all classes.
        slots: u64,
    },
}

/// Places of all slots of an arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    classes: Vec<ClassPlace>,
    pieces: Vec<Piece>,
    arena_bytes: u64,
    slot_count: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct ClassPlace {
    class: SlotClass,
    first_slot: u32,
    first_piece: u32,
    slots_a_piece: u32,
}

impl Geometry {
    /// The classes this geometry was made of.
    pub fn classes(&self) -> impl Iterator<Item = SlotClass> + '_ {
        self.classes.iter().map(|place| place.class)
    }

    /// Lays out `classes` in order. A class without slots takes no bytes.
    pub fn new(classes: &[SlotClass]) -> Result<Self, GeometryError> {
        let slots: u64 = classes.iter().map(|c| u64::from(c.slot_count)).sum();
        if slots == 0 || slots > SLOTS_MAX {
            return Err(GeometryError::SlotCount { slots });
        }
        let mut geometry = Self {
            classes: Vec::with_capacity(classes.len()),
            pieces: Vec::new(),
            arena_bytes: 0,
            slot_count: 0,
        };
        for (index, &class) in classes.iter().enumerate() {
            let SlotClass {
                slot_bytes,
                slot_count,
            } = class;
            if slot_bytes == 0
                || slot_bytes % u64::from(BLOCK_BYTES) != 0
                || slot_bytes > PIECE_BYTES_MAX
            {
                return Err(GeometryError::SlotBytes {
                    class: index,
                    slot_bytes,
                });
            }
            // At most PIECE_BYTES_MAX / BLOCK_BYTES = 2^18, so it fits.
            let slots_a_piece = (PIECE_BYTES_MAX / slot_bytes) as u32;
            geometry.classes.push(ClassPlace {
                class,
                first_slot: geometry.slot_count,
                first_piece: geometry.pieces.len() as u32,
                slots_a_piece,
            });
            let mut left = slot_count;
            while left > 0 {
                let count = left.min(slots_a_piece);
                let bytes = u64::from(count) * slot_bytes;
                geometry.pieces.push(Piece {
                    offset: geometry.arena_bytes,
                    bytes,
                });
                geometry.arena_bytes =
                    (geometry.arena_bytes + bytes).next_multiple_of(PIECE_ALIGN_BYTES);
                left -= count;
            }
            geometry.slot_count += slot_count;
        }
        Ok(geometry)
    }

    /// Size of the arena's memory file.
    pub fn arena_bytes(&self) -> u64 {
        self.arena_bytes
    }

    /// Number of slots over all classes.
    pub fn slot_count(&self) -> u32 {
        self.slot_count
    }

    /// Pieces to register, in order.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// Place of `slot`; `None` when there is no such slot.
    pub fn slot_place(&self, slot: SlotIndex) -> Option<SlotPlace> {
        let index = self
            .classes
            .partition_point(|c| c.first_slot <= slot.0)
            .checked_sub(1)?;
        // A class without slots has the same first slot as its successor; the last of them owns it.
        let place = &self.classes[index];
        let within = slot.0 - place.first_slot;
        if within >= place.class.slot_count {
            return None;
        }
        let piece = place.first_piece + within / place.slots_a_piece;
        let in_piece = u64::from(within % place.slots_a_piece);
        let bytes = place.class.slot_bytes;
        Some(SlotPlace {
            offset: self.pieces[piece as usize].offset + in_piece * bytes,
            bytes,
            piece,
        })
    }

    /// Slots of class `class`, in order.
    pub fn slots_of(&self, class: usize) -> impl Iterator<Item = SlotIndex> + use<> {
        let place = &self.classes[class];
        (place.first_slot..place.first_slot + place.class.slot_count).map(SlotIndex)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_lie_apart_in_pieces_no_slot_crosses() {
        let classes = [(768 << 20, 3), (4096, 0), (4096, 5), (3 << 20, 700)].map(
            |(slot_bytes, slot_count)| SlotClass {
                slot_bytes,
                slot_count,
            },
        );
        let geometry = Geometry::new(&classes).unwrap();
        let mut end = 0;
        for slot in 0..geometry.slot_count() {
            let place = geometry.slot_place(SlotIndex(slot)).unwrap();
            assert!(
                place.offset >= end,
                "slot {slot} overlaps the one before it"
            );
            end = place.offset + place.bytes;
            let piece = geometry.pieces()[place.piece as usize];
            assert!(
                place.offset >= piece.offset && end <= piece.offset + piece.bytes,
                "slot {slot} crosses its piece"
            );
            assert!(
                piece.bytes <= PIECE_BYTES_MAX && piece.offset.is_multiple_of(PIECE_ALIGN_BYTES)
            );
        }
        assert!(end <= geometry.arena_bytes());
        assert_eq!(geometry.slot_place(SlotIndex(geometry.slot_count())), None);
        assert_eq!(
            geometry.slots_of(2).collect::<Vec<_>>(),
            (3..8).map(SlotIndex).collect::<Vec<_>>()
        );
        assert_eq!(geometry.slot_place(SlotIndex(3)).unwrap().bytes, 4096);
    }

    #[test]
    fn odd_sizes_and_counts_are_refused() {
        let one = |slot_bytes, slot_count| {
            Geometry::new(&[SlotClass {
                slot_bytes,
                slot_count,
            }])
        };
        assert!(matches!(one(4095, 1), Err(GeometryError::SlotBytes { .. })));
        assert!(matches!(one(0, 1), Err(GeometryError::SlotBytes { .. })));
        assert!(matches!(
            one((1 << 30) + 4096, 1),
            Err(GeometryError::SlotBytes { .. })
        ));
        assert!(matches!(one(4096, 0), Err(GeometryError::SlotCount { .. })));
        assert!(matches!(
            one(4096, u32::MAX),
            Err(GeometryError::SlotCount { .. })
        ));
        assert!(one(1 << 30, 2).is_ok());
    }
}
