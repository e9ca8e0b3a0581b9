//! The two kinds of ring entries, 64 bytes each, little endian, no padding. An [`Sqe`] is unchecked; a [`Request`] has passed
//! the checks.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::fault::{Fault, FaultKind};
use crate::ids::{Epoch, Generation, SlotIndex, TicketId, TileIndex};

/// Submission entry as it stands in shared memory, unchecked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Sqe {
    /// Returned in the completion.
    pub ticket: u64,
    /// The daemon's epoch, from the handshake.
    pub epoch: u64,
    /// Working generation of a swap out; otherwise 0.
    pub generation: u64,
    /// Index of the tile in the session's job.
    pub tile: u32,
    /// Index of the slot in the session's arena.
    pub slot: u32,
    /// Checksum of the tile of a swap out; otherwise 0.
    pub checksum: u32,
    /// [`Verb`] as a number, or [`Promote::VERB`].
    pub verb: u32,
    /// [`Priority`] as a number.
    pub priority: u32,
    /// Zero.
    pub reserved: [u32; 5],
}

/// Completion entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Cqe {
    /// Ticket of the submission.
    pub ticket: u64,
    /// 0 for success, otherwise a [`FaultKind`] as a number.
    pub fault: u32,
    /// Errno of an [`FaultKind::Io`] or [`FaultKind::NoSpace`], otherwise 0.
    pub errno: i32,
    /// [`DeviceNumber`](crate::ids::DeviceNumber) of the extent's device; `u32::MAX` if no device was asked.
    pub device: u32,
    /// Checksum that the bytes of a swap in must have.
    pub checksum: u32,
    /// First byte of the extent on its device.
    pub offset: u64,
    /// Generation that wrote the bytes of a swap in.
    pub generation: u64,
    /// Bytes to move.
    pub asked_bytes: u32,
    /// Bytes the device moved.
    pub moved_bytes: u32,
    /// Time on the device, as measured by the daemon.
    pub device_ns: u64,
    /// Zero.
    pub reserved: u64,
}

const _: () = assert!(size_of::<Sqe>() == 64 && size_of::<Cqe>() == 64);

/// Direction in which to move a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// From device to slot.
    SwapIn,
    /// From slot to device.
    SwapOut,
}

impl Verb {
    /// Returns its number in an entry.
    pub fn number(self) -> u32 {
        match self {
            Self::SwapIn => 1,
            Self::SwapOut => 2,
        }
    }
}

/// How soon a tile is needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Priority {
    /// Not waited for: read ahead of its use, or written behind it.
    #[default]
    Prefetch,
    /// Waited for: goes before what its job prefetches. Other jobs still have their turns.
    Demand,
}

impl Priority {
    fn check(sqe: &Sqe) -> Result<Self, Fault> {
        [Self::Prefetch, Self::Demand]
            .into_iter()
            .find(|u| u.number() == sqe.priority)
            .ok_or_else(|| {
                Fault::new(
                    FaultKind::Protocol,
                    format!("priority {} is neither 0 nor 1", sqe.priority),
                )
            })
    }

    /// Returns its number in an entry.
    pub fn number(self) -> u32 {
        match self {
            Self::Prefetch => 0,
            Self::Demand => 1,
        }
    }
}

/// A well-formed submission. Whether its tile, slot and generation exist is checked later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Returned in the completion.
    pub ticket: TicketId,
    /// Direction of the transfer.
    pub verb: Verb,
    /// How soon the tile is needed.
    pub priority: Priority,
    /// The tile.
    pub tile: TileIndex,
    /// The slot.
    pub slot: SlotIndex,
    /// Working generation of a swap out.
    pub generation: Generation,
    /// Checksum of the tile of a swap out.
    pub checksum: u32,
}

impl Request {
    /// Returns the entry of this request under `epoch`.
    pub fn to_sqe(self, epoch: Epoch) -> Sqe {
        Sqe {
            ticket: self.ticket.0,
            epoch: epoch.0,
            generation: self.generation.0,
            tile: self.tile.0,
            slot: self.slot.0,
            checksum: self.checksum,
            verb: self.verb.number(),
            priority: self.priority.number(),
            reserved: [0; 5],
        }
    }

    /// Checks the form of an entry copied out of shared memory. Fails with [`FaultKind::StaleEpoch`] for another incarnation of
    /// the daemon, and [`FaultKind::Protocol`] for an unknown verb or priority or a non-zero reserved field.
    pub fn check(sqe: &Sqe, epoch: Epoch) -> Result<Self, Fault> {
        check_epoch(sqe, epoch)?;
        let verb = [Verb::SwapIn, Verb::SwapOut]
            .into_iter()
            .find(|v| v.number() == sqe.verb)
            .ok_or_else(|| {
                Fault::new(
                    FaultKind::Protocol,
                    format!("verb {} is neither 1 nor 2", sqe.verb),
                )
            })?;
        let priority = Priority::check(sqe)?;
        let unused_set = sqe.reserved != [0; 5]
            || (verb == Verb::SwapIn && (sqe.generation != 0 || sqe.checksum != 0));
        if unused_set {
            return Err(reserved_set());
        }
        Ok(Self {
            ticket: TicketId(sqe.ticket),
            verb,
            priority,
            tile: TileIndex(sqe.tile),
            slot: SlotIndex(sqe.slot),
            generation: Generation(sqe.generation),
            checksum: sqe.checksum,
        })
    }
}

/// Changes the priority of an operation in flight: a prefetched tile is waited for now. It has no completion. If no operation
/// in flight has the ticket, it has ended meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promote {
    /// Ticket of the operation.
    pub ticket: TicketId,
    /// New priority.
    pub priority: Priority,
}

impl Promote {
    /// Number of this verb beside those of [`Verb`].
    pub const VERB: u32 = 3;

    /// Returns the entry of this request under `epoch`.
    pub fn to_sqe(self, epoch: Epoch) -> Sqe {
        Sqe {
            ticket: self.ticket.0,
            epoch: epoch.0,
            generation: 0,
            tile: 0,
            slot: 0,
            checksum: 0,
            verb: Self::VERB,
            priority: self.priority.number(),
            reserved: [0; 5],
        }
    }

    /// Checks the form of an entry with this verb, as [`Request::check`] does for the others.
    pub fn check(sqe: &Sqe, epoch: Epoch) -> Result<Self, Fault> {
        check_epoch(sqe, epoch)?;
        let promote = Self {
            ticket: TicketId(sqe.ticket),
            priority: Priority::check(sqe)?,
        };
        let form = Sqe {
            epoch: sqe.epoch,
            ..promote.to_sqe(epoch)
        };
        if *sqe == form {
            Ok(promote)
        } else {
            Err(reserved_set())
        }
    }
}

fn check_epoch(sqe: &Sqe, epoch: Epoch) -> Result<(), Fault> {
    if sqe.epoch == epoch.0 {
        return Ok(());
    }
    Err(Fault::new(
        FaultKind::StaleEpoch,
        format!(
            "the submission names epoch {:x}, this daemon has {:x}: open a new session",
            sqe.epoch, epoch.0
        ),
    ))
}

fn reserved_set() -> Fault {
    Fault::new(
        FaultKind::Protocol,
        "a reserved field of the submission is not zero",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: Request = Request {
        ticket: TicketId(7),
        verb: Verb::SwapOut,
        priority: Priority::Demand,
        tile: TileIndex(3),
        slot: SlotIndex(9),
        generation: Generation(12),
        checksum: 0xdead_beef,
    };

    #[test]
    fn a_request_survives_the_ring_and_hostile_forms_do_not() {
        let sqe = REQUEST.to_sqe(Epoch(5));
        assert_eq!(Request::check(&sqe, Epoch(5)), Ok(REQUEST));
        let kind = |sqe: Sqe| Request::check(&sqe, Epoch(5)).unwrap_err().kind;
        assert_eq!(kind(Sqe { epoch: 6, ..sqe }), FaultKind::StaleEpoch);
        for verb in [0, 3, u32::MAX] {
            assert_eq!(kind(Sqe { verb, ..sqe }), FaultKind::Protocol);
        }
        for priority in [2, u32::MAX] {
            assert_eq!(kind(Sqe { priority, ..sqe }), FaultKind::Protocol);
        }
        assert_eq!(
            kind(Sqe {
                reserved: [0, 0, 0, 0, 1],
                ..sqe
            }),
            FaultKind::Protocol
        );
        assert_eq!(
            kind(Sqe {
                verb: Verb::SwapIn.number(),
                ..sqe
            }),
            FaultKind::Protocol
        );
    }

    #[test]
    fn a_promotion_names_a_ticket_and_an_urgency_and_nothing_else() {
        let promote = Promote {
            ticket: TicketId(7),
            priority: Priority::Demand,
        };
        let sqe = promote.to_sqe(Epoch(5));
        assert_eq!(Promote::check(&sqe, Epoch(5)), Ok(promote));
        let kind = |sqe: Sqe| Promote::check(&sqe, Epoch(5)).unwrap_err().kind;
        assert_eq!(kind(Sqe { epoch: 6, ..sqe }), FaultKind::StaleEpoch);
        for sqe in [
            Sqe { priority: 2, ..sqe },
            Sqe { tile: 1, ..sqe },
            Sqe { slot: 1, ..sqe },
            Sqe { checksum: 1, ..sqe },
            Sqe {
                generation: 1,
                ..sqe
            },
            Sqe {
                reserved: [1, 0, 0, 0, 0],
                ..sqe
            },
        ] {
            assert_eq!(kind(sqe), FaultKind::Protocol, "{sqe:?}");
        }
    }

    #[test]
    fn the_bytes_of_an_entry_never_change() {
        let bytes = REQUEST.to_sqe(Epoch(5));
        let golden: [u8; 44] = [
            7, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 12, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 9,
            0, 0, 0, 0xef, 0xbe, 0xad, 0xde, 2, 0, 0, 0, 1, 0, 0, 0,
        ];
        assert_eq!(bytes.as_bytes()[..44], golden);
    }
}
