//! Operations in flight: which slot belongs to which ticket, and what a completion means.

use std::io;
use std::path::PathBuf;

use offload_api::fault::FaultKind;
use offload_api::ids::{DeviceNumber, Generation, SlotIndex, TicketId, TileIndex};
use offload_api::ring::entry::{Cqe, Verb};
use test_hooks::safeguard::{Safeguard, is_disabled};

use crate::{ClientError, Slot, TileError};

/// Name of an operation in flight. Dropping a ticket frees nothing; its [`EndedOperation`] still comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket(pub(crate) TicketId);

/// An operation that has ended, with its slot.
#[derive(Debug)]
pub struct EndedOperation {
    /// Ticket returned when the operation was started.
    pub ticket: Ticket,
    /// Direction of the transfer.
    pub verb: Verb,
    /// The tile.
    pub tile: TileIndex,
    /// The slot. After a failed swap in its bytes are all ones.
    pub slot: Slot,
    /// The bytes moved, or why the tile did not move.
    pub result: Result<TransferStats, TileError>,
}

/// A tile that was moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferStats {
    /// Length of the tile.
    pub bytes: u32,
    /// Time on the device, as measured by the daemon.
    pub device_ns: u64,
}

#[derive(Debug)]
pub(crate) struct InFlight {
    pub(crate) verb: Verb,
    pub(crate) tile: TileIndex,
    pub(crate) tile_bytes: u32,
    /// Whether the tile belongs to the session alone and to no generation.
    pub(crate) scratch: bool,
    /// Generation that a write belongs to.
    pub(crate) generation: Generation,
    /// `None` while the checksum is computed.
    pub(crate) slot: Option<Slot>,
    /// Completion of a read whose checksum is being computed.
    pub(crate) arrived: Option<Cqe>,
    /// Checksum of the first read, if it was wrong. The tile is then read a second time.
    pub(crate) misread: Option<u32>,
}

impl InFlight {
    fn is_of_a_generation(&self) -> bool {
        self.verb == Verb::SwapOut && !self.scratch
    }
}

/// Returns the path of a device. Called only after a failure.
pub(crate) type NameDevice<'a> = dyn FnMut(DeviceNumber) -> PathBuf + 'a;

/// Next action after a completion.
#[derive(Debug)]
pub(crate) enum AfterCompletion {
    /// Return this to the caller.
    Done(EndedOperation),
    /// Compute the checksum of so many bytes of the slot, then call [`InFlightTable::checked`].
    Unchecked(TicketId, Slot, u32),
}

/// Next action after the checksum of a swap in was computed.
#[derive(Debug)]
pub(crate) enum AfterChecksum {
    /// Return this to the caller; the device is the one the bytes came from.
    Done(EndedOperation, DeviceNumber),
    /// Read this tile into this slot again, with the same ticket.
    Again(TileIndex, SlotIndex),
}

/// Slots lent to the kernel. The low half of a ticket is a place in this table; the high half tells the uses of a place apart.
#[derive(Debug)]
pub(crate) struct InFlightTable {
    entries: Vec<Option<(TicketId, InFlight)>>,
    free: Vec<u32>,
    started: u32,
    swap_out_count: usize,
}

impl InFlightTable {
    pub(crate) fn new(iodepth: u32) -> Self {
        Self {
            entries: (0..iodepth).map(|_| None).collect(),
            free: (0..iodepth).rev().collect(),
            started: 0,
            swap_out_count: 0,
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Swap outs that belong to a generation, for which a commit waits.
    pub(crate) fn swap_out_count(&self) -> usize {
        self.swap_out_count
    }

    pub(crate) fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// Keeps a slot until [`InFlightTable::end`]. Panics when full.
    pub(crate) fn start(&mut self, in_flight: InFlight) -> TicketId {
        let place = self.free.pop().expect("asked before: not full");
        self.started = self.started.wrapping_add(1);
        let ticket = TicketId(u64::from(self.started) << 32 | u64::from(place));
        self.swap_out_count += usize::from(in_flight.is_of_a_generation());
        self.entries[place as usize] = Some((ticket, in_flight));
        ticket
    }

    /// The operation with this ticket, if it is in flight.
    pub(crate) fn get_mut(&mut self, ticket: TicketId) -> Option<&mut InFlight> {
        match self.entries.get_mut(ticket.0 as u32 as usize)? {
            Some((expected, in_flight)) if *expected == ticket => Some(in_flight),
            _ => None,
        }
    }

    /// Ends the operation with this ticket; `None` if it is not in flight.
    pub(crate) fn end(&mut self, ticket: TicketId) -> Option<InFlight> {
        let place = ticket.0 as u32;
        let entry = self.entries.get_mut(place as usize)?;
        if !matches!(entry, Some((expected, _)) if *expected == ticket) {
            return None;
        }
        let (_, in_flight) = entry.take()?;
        self.free.push(place);
        self.swap_out_count -= usize::from(in_flight.is_of_a_generation());
        Some(in_flight)
    }

    /// Interprets a completion. A tile is checked in the process that uses it, so that damage by the drive, by the bus and by a
    /// misdirected write all show.
    pub(crate) fn arrived(
        &mut self,
        cqe: &Cqe,
        name: &mut NameDevice<'_>,
    ) -> Result<AfterCompletion, ClientError> {
        let ticket = TicketId(cqe.ticket);
        let unknown = || {
            ClientError::protocol(format!(
                "a completion for ticket {:#x}, which is not in flight",
                cqe.ticket
            ))
        };
        let in_flight = self.get_mut(ticket).ok_or_else(unknown)?;
        // No slot: its checksum is being computed, so the daemon was not asked yet or has answered already.
        let slot = in_flight.slot.take().ok_or_else(unknown)?;
        let check = in_flight.verb == Verb::SwapIn
            && cqe.fault == 0
            && cqe.moved_bytes == in_flight.tile_bytes
            && !is_disabled(Safeguard::Checksum);
        if check {
            in_flight.arrived = Some(*cqe);
            return Ok(AfterCompletion::Unchecked(
                ticket,
                slot,
                in_flight.tile_bytes,
            ));
        }
        let done = self.done(ticket, slot, cqe, cqe.checksum, name)?;
        Ok(AfterCompletion::Done(done))
    }

    /// Interprets checksum `found` of a swap in. After a wrong checksum the tile is read a second time: a bit that flipped on
    /// the way is right then, damage on the device is not.
    pub(crate) fn checked(
        &mut self,
        ticket: TicketId,
        slot: Slot,
        found: u32,
        name: &mut NameDevice<'_>,
    ) -> Result<AfterChecksum, ClientError> {
        let in_flight = self.get_mut(ticket).expect("in flight until it is checked");
        let cqe = in_flight.arrived.take().expect("it has arrived");
        match in_flight.misread {
            None if found != cqe.checksum => {
                in_flight.misread = Some(found);
                let (tile, index) = (in_flight.tile, slot.index());
                in_flight.slot = Some(slot);
                return Ok(AfterChecksum::Again(tile, index));
            }
            Some(misread) if found == cqe.checksum => tracing::warn!(
                "tile {} on {} at byte {}: the first read had checksum {misread:08x}, the second the right one, {found:08x}: \
                 a bit flipped in memory, on the bus or in the drive, and the device holds the right bytes; if this repeats, test \
                 memory and drive",
                in_flight.tile,
                name(DeviceNumber(cqe.device)).display(),
                cqe.offset,
            ),
            _ => {}
        }
        let done = self.done(ticket, slot, &cqe, found, name)?;
        Ok(AfterChecksum::Done(done, DeviceNumber(cqe.device)))
    }

    fn done(
        &mut self,
        ticket: TicketId,
        mut slot: Slot,
        cqe: &Cqe,
        found: u32,
        name: &mut NameDevice<'_>,
    ) -> Result<EndedOperation, ClientError> {
        let in_flight = self.end(ticket).expect("asked for just now");
        let result = outcome(cqe, &in_flight, found, name)?;
        if in_flight.verb == Verb::SwapIn && result.is_err() {
            slot.as_mut_slice().fill(0xff);
        }
        Ok(EndedOperation {
            ticket: Ticket(ticket),
            verb: in_flight.verb,
            tile: in_flight.tile,
            result,
            slot,
        })
    }
}

fn outcome(
    cqe: &Cqe,
    in_flight: &InFlight,
    found: u32,
    name: &mut NameDevice<'_>,
) -> Result<Result<TransferStats, TileError>, ClientError> {
    let mut device = || name(DeviceNumber(cqe.device));
    let (verb, tile, offset) = (in_flight.verb, in_flight.tile, cqe.offset);
    if cqe.fault == 0 {
        if cqe.moved_bytes != in_flight.tile_bytes {
            return Err(ClientError::protocol(format!(
                "tile {tile} has {} bytes, and the daemon says that it moved {}",
                in_flight.tile_bytes, cqe.moved_bytes
            )));
        }
        if verb == Verb::SwapIn && found != cqe.checksum {
            return Ok(Err(TileError::Damaged {
                device: device(),
                offset,
                tile,
                generation: Generation(cqe.generation),
                expected: cqe.checksum,
                found,
            }));
        }
        return Ok(Ok(TransferStats {
            bytes: in_flight.tile_bytes,
            device_ns: cqe.device_ns,
        }));
    }
    let kind = FaultKind::from_number(cqe.fault).ok_or_else(|| {
        ClientError::protocol(format!("a completion with the unknown fault {}", cqe.fault))
    })?;
    Ok(Err(match kind {
        FaultKind::Io | FaultKind::NoSpace => TileError::Io {
            verb,
            tile,
            device: device(),
            offset,
            asked_bytes: cqe.asked_bytes,
            source: io::Error::from_raw_os_error(cqe.errno),
        },
        FaultKind::Short => TileError::Short {
            verb,
            tile,
            device: device(),
            offset,
            asked_bytes: cqe.asked_bytes,
            moved_bytes: cqe.moved_bytes,
        },
        kind => TileError::refused(verb, tile, kind),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MemoryArena, SlotClass};

    #[test]
    fn a_ticket_ends_once_and_an_old_one_never_takes_a_newer_ones_slot() {
        let mut arena = MemoryArena::new(&[SlotClass {
            slot_bytes: 4096,
            slot_count: 2,
        }])
        .unwrap();
        let mut in_flight = InFlightTable::new(2);
        let mut start = |in_flight: &mut InFlightTable, verb| {
            in_flight.start(InFlight {
                verb,
                tile: TileIndex(0),
                tile_bytes: 4096,
                scratch: false,
                generation: Generation(1),
                slot: arena.take_slot(0),
                arrived: None,
                misread: None,
            })
        };
        let first = start(&mut in_flight, Verb::SwapOut);
        let second = start(&mut in_flight, Verb::SwapIn);
        assert!(in_flight.is_full());
        assert_eq!((in_flight.count(), in_flight.swap_out_count()), (2, 1));
        drop(in_flight.end(first).unwrap());
        assert!(in_flight.end(first).is_none());
        let third = start(&mut in_flight, Verb::SwapIn);
        // The same place, another use of it.
        assert_eq!(third.0 as u32, first.0 as u32);
        assert!(in_flight.end(first).is_none());
        for never in [0, 7, u64::MAX] {
            assert!(in_flight.end(TicketId(never)).is_none());
        }
        assert!(in_flight.end(second).is_some() && in_flight.end(third).is_some());
        assert_eq!((in_flight.count(), in_flight.swap_out_count()), (0, 0));
    }
}
