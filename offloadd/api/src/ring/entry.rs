//! The two kinds of entry, 64 bytes each, little endian, no padding. What a peer wrote is an [`Sqe`]; what survived the
//! checks is a [`Request`].

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::fault::{Fault, FaultKind};
use crate::ids::{Epoch, Generation, SlotIndex, TicketId, TileIndex};

/// Submission entry as it stands in shared memory: unchecked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Sqe {
    /// Given back in the completion.
    pub ticket: u64,
    /// The daemon's epoch, from the handshake.
    pub epoch: u64,
    /// Of a swap out: the working generation. Otherwise 0.
    pub generation: u64,
    /// Tile of the session's job.
    pub tile: u32,
    /// Slot of the session's arena.
    pub slot: u32,
    /// Of a swap out: the tile's checksum. Otherwise 0.
    pub checksum: u32,
    /// [`Verb`] as a number, or [`Promote::VERB`].
    pub verb: u32,
    /// [`Priority`] as a number.
    pub urgency: u32,
    /// Zero.
    pub reserved: [u32; 5],
}

/// Completion entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Cqe {
    /// Of the submission.
    pub ticket: u64,
    /// 0 for success, otherwise a [`FaultKind`] as a number.
    pub fault: u32,
    /// The errno behind an [`FaultKind::Io`] or [`FaultKind::NoSpace`], else 0.
    pub errno: i32,
    /// Device of the extent, `u32::MAX` where none was touched.
    pub device: u32,
    /// Of a swap in: the checksum the bytes must have.
    pub checksum: u32,
    /// Where the extent lies on its device.
    pub offset: u64,
    /// Of a swap in: the generation that wrote the bytes.
    pub generation: u64,
    /// Bytes asked for.
    pub asked_bytes: u32,
    /// Bytes the device moved.
    pub moved_bytes: u32,
    /// From submission to completion on the device, as the daemon saw it.
    pub device_ns: u64,
    /// Zero.
    pub reserved: u64,
}

const _: () = assert!(size_of::<Sqe>() == 64 && size_of::<Cqe>() == 64);

/// What to do with a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Device to slot.
    SwapIn,
    /// Slot to device.
    SwapOut,
}

impl Verb {
    /// Its number in an entry.
    pub fn number(self) -> u32 {
        match self {
            Self::SwapIn => 1,
            Self::SwapOut => 2,
        }
    }
}

/// Whether somebody waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Priority {
    /// Moved ahead of its use, or behind it.
    #[default]
    Prefetch,
    /// Its use is next: it goes before what its job moves ahead. Jobs take turns whatever they want.
    Demand,
}

impl Priority {
    fn check(sqe: &Sqe) -> Result<Self, Fault> {
        [Self::Prefetch, Self::Demand]
            .into_iter()
            .find(|u| u.number() == sqe.urgency)
            .ok_or_else(|| {
                Fault::new(
                    FaultKind::Protocol,
                    format!("urgency {} is none of 0 and 1", sqe.urgency),
                )
            })
    }

    /// Its number in an entry.
    pub fn number(self) -> u32 {
        match self {
            Self::Prefetch => 0,
            Self::Demand => 1,
        }
    }
}

/// A submission whose form is right. Whether tile, slot and generation exist is still to be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Given back in the completion.
    pub ticket: TicketId,
    /// What to do.
    pub verb: Verb,
    /// How soon.
    pub urgency: Priority,
    /// With which tile.
    pub tile: TileIndex,
    /// And which slot.
    pub slot: SlotIndex,
    /// Of a swap out: the working generation.
    pub generation: Generation,
    /// Of a swap out: the tile's checksum.
    pub checksum: u32,
}

impl Request {
    /// The entry that stands for this request under `epoch`.
    pub fn to_sqe(self, epoch: Epoch) -> Sqe {
        Sqe {
            ticket: self.ticket.0,
            epoch: epoch.0,
            generation: self.generation.0,
            tile: self.tile.0,
            slot: self.slot.0,
            checksum: self.checksum,
            verb: self.verb.number(),
            urgency: self.urgency.number(),
            reserved: [0; 5],
        }
    }

    /// Checks the form of an entry copied out of shared memory. [`FaultKind::StaleEpoch`] for another life of the
    /// daemon, [`FaultKind::Protocol`] for a bad verb or urgency, or a used reserved field.
    pub fn check(sqe: &Sqe, epoch: Epoch) -> Result<Self, Fault> {
        check_epoch(sqe, epoch)?;
        let verb = [Verb::SwapIn, Verb::SwapOut]
            .into_iter()
            .find(|v| v.number() == sqe.verb)
            .ok_or_else(|| {
                Fault::new(
                    FaultKind::Protocol,
                    format!("verb {} is none of 1 and 2", sqe.verb),
                )
            })?;
        let urgency = Priority::check(sqe)?;
        let unused_set = sqe.reserved != [0; 5]
            || (verb == Verb::SwapIn && (sqe.generation != 0 || sqe.checksum != 0));
        if unused_set {
            return Err(reserved_set());
        }
        Ok(Self {
            ticket: TicketId(sqe.ticket),
            verb,
            urgency,
            tile: TileIndex(sqe.tile),
            slot: SlotIndex(sqe.slot),
            generation: Generation(sqe.generation),
            checksum: sqe.checksum,
        })
    }
}

/// Gives an operation in flight another urgency: what was read ahead is waited for now. It has no completion, and none in
/// flight by its ticket means that it has ended meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Promote {
    /// Of the operation.
    pub ticket: TicketId,
    /// From now on.
    pub urgency: Priority,
}

impl Promote {
    /// Its number beside those of [`Verb`].
    pub const VERB: u32 = 3;

    /// The entry that stands for it under `epoch`.
    pub fn to_sqe(self, epoch: Epoch) -> Sqe {
        Sqe {
            ticket: self.ticket.0,
            epoch: epoch.0,
            generation: 0,
            tile: 0,
            slot: 0,
            checksum: 0,
            verb: Self::VERB,
            urgency: self.urgency.number(),
            reserved: [0; 5],
        }
    }

    /// Checks the form of an entry with this verb, as [`Request::check`] does for the others.
    pub fn check(sqe: &Sqe, epoch: Epoch) -> Result<Self, Fault> {
        check_epoch(sqe, epoch)?;
        let urge = Self {
            ticket: TicketId(sqe.ticket),
            urgency: Priority::check(sqe)?,
        };
        let form = Sqe {
            epoch: sqe.epoch,
            ..urge.to_sqe(epoch)
        };
        if *sqe == form {
            Ok(urge)
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
            "submission of epoch {:x}, this daemon's is {:x}: open a new session",
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
        urgency: Priority::Demand,
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
        for urgency in [2, u32::MAX] {
            assert_eq!(kind(Sqe { urgency, ..sqe }), FaultKind::Protocol);
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
    fn an_urge_names_a_ticket_and_an_urgency_and_nothing_else() {
        let urge = Promote {
            ticket: TicketId(7),
            urgency: Priority::Demand,
        };
        let sqe = urge.to_sqe(Epoch(5));
        assert_eq!(Promote::check(&sqe, Epoch(5)), Ok(urge));
        let kind = |sqe: Sqe| Promote::check(&sqe, Epoch(5)).unwrap_err().kind;
        assert_eq!(kind(Sqe { epoch: 6, ..sqe }), FaultKind::StaleEpoch);
        for sqe in [
            Sqe { urgency: 2, ..sqe },
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
