//! What is in flight: which slot belongs to which ticket, and what a completion means.

use std::io;
use std::path::PathBuf;

use offload_api::BLOCK_BYTES;
use offload_api::checksum::ChecksumDigest;
use offload_api::fault::FaultKind;
use offload_api::ids::{DeviceIndex, Generation, SlotIndex, TicketId, TileIndex};
use offload_api::ring::entry::{Cqe, Verb};
use offload_api::safeguard::{Safeguard, removed};

use crate::checksum_pool::ALONE_BYTES_MAX;
use crate::{ClientError, Slot, TileError};

/// Names one operation in flight. It owns nothing: dropping it frees nothing and the [`Done`] still comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket(pub(crate) TicketId);

/// One operation has ended and its slot is the caller's again.
#[derive(Debug)]
pub struct Done {
    /// As answered when it was started.
    pub ticket: Ticket,
    /// Which way.
    pub verb: Verb,
    /// Which tile.
    pub tile: TileIndex,
    /// The slot; after a failed swap in its bytes are all ones.
    pub slot: Slot,
    /// What came of it.
    pub result: Result<Moved, TileError>,
}

/// A tile has moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// The tile's length.
    pub bytes: u32,
    /// On the device, as the daemon saw it.
    pub device_ns: u64,
}

#[derive(Debug)]
pub(crate) struct InFlight {
    pub(crate) verb: Verb,
    pub(crate) tile: TileIndex,
    pub(crate) tile_bytes: u32,
    /// Part of no generation.
    pub(crate) scratch: bool,
    /// What a write belongs to.
    pub(crate) generation: Generation,
    /// `None` while its checksum is computed.
    pub(crate) slot: Option<Slot>,
    /// What the daemon said of a read whose checksum is computed.
    pub(crate) arrived: Option<Cqe>,
    /// How far a read has come that is under way.
    pub(crate) partial: PartialRead,
    /// The checksum that its first read came to, if that was not the tile's: it is read once more.
    pub(crate) misread: Option<u32>,
}

/// The first bytes of a lone read, which are there before the others.
#[derive(Debug, Default)]
pub(crate) struct PartialRead {
    /// As the daemon said.
    bytes_ready: u32,
    summed_bytes: u32,
    digest: Option<Box<ChecksumDigest>>,
}

impl PartialRead {
    /// Sums what is there of `slot`, at most `bytes_max` more. Whether there was anything to sum.
    fn advance(&mut self, slot: &Slot, bytes_max: u32) -> bool {
        let end = (self.bytes_ready).min(self.summed_bytes.saturating_add(bytes_max));
        if end == self.summed_bytes {
            return false;
        }
        let new = slot.part(self.summed_bytes as usize..end as usize);
        let begin = || Box::new(ChecksumDigest::new());
        self.digest.get_or_insert_with(begin).add(new);
        self.summed_bytes = end;
        true
    }

    /// What is not summed yet of `bytes`.
    pub(crate) fn left_bytes(&self, bytes: u32) -> u32 {
        bytes - self.summed_bytes
    }

    /// The checksum of the first `bytes` of `slot`, of which all are there now.
    pub(crate) fn sum(mut self, slot: &Slot, bytes: u32) -> u32 {
        self.bytes_ready = bytes;
        self.advance(slot, bytes);
        self.digest
            .map_or_else(|| ChecksumDigest::new().sum(), |digest| digest.sum())
    }
}

impl InFlight {
    fn is_of_a_generation(&self) -> bool {
        self.verb == Verb::SwapOut && !self.scratch
    }

    /// A lone read has come as far as `cqe` says.
    fn part(&mut self, cqe: &Cqe) -> Result<(), ClientError> {
        let (before, now) = (self.partial.bytes_ready, cqe.moved_bytes);
        if now < before || now >= self.tile_bytes || !now.is_multiple_of(BLOCK_BYTES) {
            return Err(ClientError::protocol(format!(
                "{now} of {} bytes of tile {} were said to be there, {before} before",
                self.tile_bytes, self.tile
            )));
        }
        self.partial.bytes_ready = now;
        Ok(())
    }
}

/// What people call a device. Asked only where something failed.
pub(crate) type NameDevice<'a> = dyn FnMut(DeviceIndex) -> PathBuf + 'a;

/// What a completion asks for.
#[derive(Debug)]
pub(crate) enum Arrived {
    /// Nothing more.
    Done(Done),
    /// Nothing yet: more is to come.
    Part,
    /// The checksum of these bytes, then [`InFlightTable::checked`].
    Unchecked(TicketId, Slot, u32, PartialRead),
}

/// What the checksum of a swap in asks for.
#[derive(Debug)]
pub(crate) enum Checked {
    /// Nothing more; the device that the bytes came from.
    Done(Done, DeviceIndex),
    /// Reading this tile into this slot once more, with the same ticket.
    Again(TileIndex, SlotIndex),
}

/// Slots lent to the kernel. A ticket's low half is a place in this table, its high half tells uses of a place apart.
#[derive(Debug)]
pub(crate) struct InFlightTable {
    places: Vec<Option<(TicketId, InFlight)>>,
    free: Vec<u32>,
    started: u32,
    swap_out_count: usize,
}

impl InFlightTable {
    pub(crate) fn new(iodepth: u32) -> Self {
        Self {
            places: (0..iodepth).map(|_| None).collect(),
            free: (0..iodepth).rev().collect(),
            started: 0,
            swap_out_count: 0,
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// One swap in and nothing else is in flight, and its bytes have not come.
    pub(crate) fn is_a_lone_read(&self) -> bool {
        let mut in_flight = self.places.iter().flatten();
        let read =
            |in_flight: &InFlight| in_flight.verb == Verb::SwapIn && in_flight.slot.is_some();
        self.count() == 1 && in_flight.any(|(_, in_flight)| read(in_flight))
    }

    /// Sums what has come of a lone read and is not summed, as long as that does not take long. Whether there was anything.
    pub(crate) fn sum_what_came(&mut self) -> bool {
        let mut in_flight = self.places.iter_mut().flatten();
        let Some((_, in_flight)) = in_flight.next() else {
            return false;
        };
        let Some(slot) = &in_flight.slot else {
            return false;
        };
        !removed(Safeguard::Checksum) && in_flight.partial.advance(slot, ALONE_BYTES_MAX)
    }

    /// Of the job's tiles: what a commit waits for.
    pub(crate) fn swap_out_count(&self) -> usize {
        self.swap_out_count
    }

    pub(crate) fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// Keeps the slot until [`InFlightTable::end`]. Not to be called when full.
    pub(crate) fn start(&mut self, in_flight: InFlight) -> TicketId {
        let place = self.free.pop().expect("asked before: not full");
        self.started = self.started.wrapping_add(1);
        let ticket = TicketId(u64::from(self.started) << 32 | u64::from(place));
        self.swap_out_count += usize::from(in_flight.is_of_a_generation());
        self.places[place as usize] = Some((ticket, in_flight));
        ticket
    }

    /// The operation of a ticket that is in flight.
    pub(crate) fn get_mut(&mut self, ticket: TicketId) -> Option<&mut InFlight> {
        match self.places.get_mut(ticket.0 as u32 as usize)? {
            Some((expected, in_flight)) if *expected == ticket => Some(in_flight),
            _ => None,
        }
    }

    /// Gives the slot back; `None` for a ticket that is not in flight.
    pub(crate) fn end(&mut self, ticket: TicketId) -> Option<InFlight> {
        let place = ticket.0 as u32;
        let entry = self.places.get_mut(place as usize)?;
        if !matches!(entry, Some((expected, _)) if *expected == ticket) {
            return None;
        }
        let (_, in_flight) = entry.take()?;
        self.free.push(place);
        self.swap_out_count -= usize::from(in_flight.is_of_a_generation());
        Some(in_flight)
    }

    /// What a completion says. A swapped-in tile is checked where its bytes will be used, so that damage by the drive, the
    /// bus or a misdirected write shows alike.
    pub(crate) fn arrived(
        &mut self,
        cqe: &Cqe,
        name: &mut NameDevice<'_>,
    ) -> Result<Arrived, ClientError> {
        let ticket = TicketId(cqe.ticket);
        let unknown = || {
            ClientError::protocol(format!(
                "a completion for ticket {:#x}, which is not in flight",
                cqe.ticket
            ))
        };
        let in_flight = self.get_mut(ticket).ok_or_else(unknown)?;
        if cqe.is_part() && in_flight.verb == Verb::SwapIn && in_flight.slot.is_some() {
            return in_flight.part(cqe).map(|()| Arrived::Part);
        }
        // Its bytes are being summed: the daemon has not been asked yet, or has answered already.
        let slot = in_flight.slot.take().ok_or_else(unknown)?;
        let check = in_flight.verb == Verb::SwapIn
            && cqe.fault == 0
            && cqe.moved_bytes == in_flight.tile_bytes
            && !removed(Safeguard::Checksum);
        if check {
            in_flight.arrived = Some(*cqe);
            let partial = std::mem::take(&mut in_flight.partial);
            let bytes = in_flight.tile_bytes;
            return Ok(Arrived::Unchecked(ticket, slot, bytes, partial));
        }
        let done = self.done(ticket, slot, cqe, cqe.checksum, name)?;
        Ok(Arrived::Done(done))
    }

    /// What follows from checksum `found` of a swap in's bytes. One that does not fit is read once more: a bit that flipped on
    /// the way is right the second time, damage on the device is not.
    pub(crate) fn checked(
        &mut self,
        ticket: TicketId,
        slot: Slot,
        found: u32,
        name: &mut NameDevice<'_>,
    ) -> Result<Checked, ClientError> {
        let in_flight = self.get_mut(ticket).expect("in flight until it is checked");
        let cqe = in_flight.arrived.take().expect("it has arrived");
        match in_flight.misread {
            None if found != cqe.checksum => {
                in_flight.misread = Some(found);
                let (tile, index) = (in_flight.tile, slot.index());
                in_flight.slot = Some(slot);
                return Ok(Checked::Again(tile, index));
            }
            Some(misread) if found == cqe.checksum => tracing::warn!(
                "tile {} on {} at byte {} was read with checksum {misread:08x} and, once more, with {found:08x} as it was written: \
                 a bit flipped on the way (memory, bus or drive), nothing is damaged on the device; if this repeats, test memory \
                 and drive",
                in_flight.tile,
                name(DeviceIndex(cqe.device)).display(),
                cqe.offset,
            ),
            _ => {}
        }
        let done = self.done(ticket, slot, &cqe, found, name)?;
        Ok(Checked::Done(done, DeviceIndex(cqe.device)))
    }

    fn done(
        &mut self,
        ticket: TicketId,
        mut slot: Slot,
        cqe: &Cqe,
        found: u32,
        name: &mut NameDevice<'_>,
    ) -> Result<Done, ClientError> {
        let in_flight = self.end(ticket).expect("asked for just now");
        let result = outcome(cqe, &in_flight, found, name)?;
        if in_flight.verb == Verb::SwapIn && result.is_err() {
            slot.as_mut_slice().fill(0xff);
        }
        Ok(Done {
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
) -> Result<Result<Moved, TileError>, ClientError> {
    let mut device = || name(DeviceIndex(cqe.device));
    let (verb, tile, offset) = (in_flight.verb, in_flight.tile, cqe.offset);
    if cqe.fault == 0 {
        if cqe.moved_bytes != in_flight.tile_bytes {
            return Err(ClientError::protocol(format!(
                "tile {tile} of {} bytes was said to be moved with {}",
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
        return Ok(Ok(Moved {
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
        kind => TileError::Refused { verb, tile, kind },
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MemoryArena, SlotClass};

    /// A lone read of `bytes` that comes in parts which end at `ends`, each summed when it has come if `eager`.
    fn come(ends: &[u32], bytes: &[u8], expected: u32, eager: bool) -> Done {
        let class = SlotClass {
            slot_bytes: 1 << 21,
            slot_count: 1,
        };
        let mut arena = MemoryArena::new(&[class]).unwrap();
        let mut slot = arena.take_slot(0).unwrap();
        slot.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
        let mut in_flight = InFlightTable::new(2);
        let ticket = in_flight.start(InFlight {
            verb: Verb::SwapIn,
            tile: TileIndex(0),
            tile_bytes: bytes.len() as u32,
            scratch: false,
            generation: Generation(1),
            slot: Some(slot),
            arrived: None,
            partial: PartialRead::default(),
            misread: None,
        });
        let mut cqe = Cqe {
            ticket: ticket.0,
            fault: 0,
            errno: 0,
            device: 0,
            checksum: expected,
            offset: 0,
            generation: 1,
            asked_bytes: bytes.len() as u32,
            moved_bytes: 0,
            device_ns: 0,
            reserved: 0,
        };
        let mut name = |_| PathBuf::from("device");
        for &end in ends {
            cqe.moved_bytes = end;
            let part = in_flight.arrived(&cqe, &mut name).unwrap();
            assert!(matches!(part, Arrived::Part), "{part:?}");
            if eager {
                assert!(in_flight.sum_what_came(), "something came");
                while in_flight.sum_what_came() {}
            }
        }
        cqe.moved_bytes = bytes.len() as u32;
        let Arrived::Unchecked(ticket, slot, length, partial) =
            in_flight.arrived(&cqe, &mut name).unwrap()
        else {
            panic!("it is there");
        };
        let early = ends.last().filter(|_| eager).copied();
        assert_eq!(partial.left_bytes(length), length - early.unwrap_or(0));
        let found = partial.sum(&slot, length);
        let mut checked = in_flight.checked(ticket, slot, found, &mut name).unwrap();
        if let Checked::Again(..) = checked {
            let arrived = in_flight.arrived(&cqe, &mut name).unwrap();
            let Arrived::Unchecked(ticket, slot, length, partial) = arrived else {
                panic!("it is there again");
            };
            let found = partial.sum(&slot, length);
            checked = in_flight.checked(ticket, slot, found, &mut name).unwrap();
        }
        let Checked::Done(done, _) = checked else {
            panic!("a third read");
        };
        done
    }

    const LONG: u32 = (1 << 20) + 8192;

    fn noise() -> Vec<u8> {
        let byte = |i: u32| (i.wrapping_mul(i) >> 7) as u8;
        (0..LONG).map(byte).collect()
    }

    #[test]
    fn parts_that_are_summed_as_they_come_have_the_sum_of_the_whole() {
        let bytes = noise();
        let sum = offload_api::checksum::checksum(&bytes);
        let splits: [&[u32]; 5] = [
            &[],
            &[4096],
            &[512 << 10, 768 << 10, 896 << 10],
            &[LONG - 4096],
            &[4096, 8192, 65_536, LONG - 4096],
        ];
        for ends in splits {
            for eager in [false, true] {
                let done = come(ends, &bytes, sum, eager);
                assert_eq!(done.result.unwrap().bytes, LONG, "{ends:?}");
            }
        }
    }

    #[test]
    fn damage_in_any_part_is_named() {
        let bytes = noise();
        let sum = offload_api::checksum::checksum(&bytes);
        let ends = [512 << 10, 768 << 10, 896 << 10];
        for at in [0, ends[0] - 1, ends[0], ends[1], ends[2], LONG - 1] {
            let mut damaged = bytes.clone();
            damaged[at as usize] ^= 4;
            let is = offload_api::checksum::checksum(&damaged);
            for eager in [false, true] {
                let done = come(&ends, &damaged, sum, eager);
                let Err(TileError::Damaged {
                    expected, found, ..
                }) = done.result
                else {
                    panic!("byte {at} was changed");
                };
                assert_eq!((expected, found), (sum, is));
                assert!(done.slot.as_slice().iter().all(|byte| *byte == 0xff));
            }
        }
    }

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
                partial: PartialRead::default(),
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
