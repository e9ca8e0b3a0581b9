//! Slots, and tiles on their way between slots and devices.

use offload_api::fault::FaultKind;
use offload_api::ids::{Generation, TicketId, TileIndex};
use offload_api::ring::entry::{Priority, Promote, Request, Sqe, Verb};

use super::commit::Commit;
use super::damage::name_of;
use super::{Session, broken_ring};
use crate::checksum_pool::Summed;
use crate::in_flight::{Arrived, Checked, InFlight};
use crate::{ClientError, Done, Slot, Ticket, signal};

impl Session {
    /// A free slot of class `class` (of [`SessionSettings::classes`]); `None` when all are taken or in flight.
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

    /// Operations in flight.
    pub fn in_flight_count(&self) -> usize {
        self.in_flight.count()
    }

    /// Starts reading `tile` into `slot`, which may be larger.
    ///
    /// Refused at once, with the slot: `TooMany` (iodepth reached: poll first), `UnknownTile`, `SlotTooSmall`,
    /// `WrongGeneration` (not resumed).
    pub fn swap_in(&mut self, tile: TileIndex, slot: Slot) -> Result<Ticket, (Slot, ClientError)> {
        self.start(Verb::SwapIn, Priority::Prefetch, tile, slot)
    }

    /// The same for a tile whose use is next: it goes before what the processes of this job read ahead.
    pub fn swap_in_wanted(
        &mut self,
        tile: TileIndex,
        slot: Slot,
    ) -> Result<Ticket, (Slot, ClientError)> {
        self.start(Verb::SwapIn, Priority::Demand, tile, slot)
    }

    /// Lets a swap in that has not ended go before what its job reads ahead, as if it had been started by
    /// [`Session::swap_in_wanted`]. Nothing happens to one that has ended, or that nobody could still overtake.
    pub fn promote(&mut self, ticket: Ticket) -> Result<(), ClientError> {
        let Some(in_flight) = self.in_flight.get_mut(ticket.0) else {
            return Ok(());
        };
        // Without its slot it has arrived, and its bytes are being checked.
        if in_flight.verb != Verb::SwapIn || in_flight.slot.is_none() {
            return Ok(());
        }
        // All operations that were granted keep their room. A daemon so far behind has not come to this one either.
        let untaken = self.rings.untaken().map_err(broken_ring)?;
        if untaken + self.info.iodepth >= self.rings.header().entries {
            return Ok(());
        }
        let urge = Promote {
            ticket: ticket.0,
            urgency: Priority::Demand,
        };
        self.put(&urge.to_sqe(self.epoch))
    }

    /// Starts writing `tile` from `slot` into the working generation. Its checksum is computed on this side, where the bytes
    /// were made, beside this thread; [`Session::poll`] passes the write on when it is there.
    ///
    /// Refused at once, with the slot, like [`Session::swap_in`]; and with `Busy` while a commit is pending, as the
    /// write would belong to the generation that is being closed. Tiles of this session alone belong to none.
    pub fn swap_out(&mut self, tile: TileIndex, slot: Slot) -> Result<Ticket, (Slot, ClientError)> {
        if matches!(self.commit, Commit::Pending(..) | Commit::Lost(_)) && !self.is_scratch(tile) {
            let error = ClientError::refused(
                FaultKind::Busy,
                format!("tile {tile} cannot be swapped out while a commit is pending"),
            );
            return Err((slot, error));
        }
        self.start(Verb::SwapOut, Priority::Prefetch, tile, slot)
    }

    fn start(
        &mut self,
        verb: Verb,
        urgency: Priority,
        tile: TileIndex,
        slot: Slot,
    ) -> Result<Ticket, (Slot, ClientError)> {
        let (tile_bytes, working) = match self.startable(tile, &slot) {
            Ok(checked) => checked,
            Err(error) => return Err((slot, error)),
        };
        let index = slot.index();
        let mut in_flight = InFlight {
            verb,
            tile,
            tile_bytes,
            scratch: self.is_scratch(tile),
            generation: working,
            slot: None,
            arrived: None,
            misread: None,
        };
        if verb == Verb::SwapOut {
            // The daemon is asked in `poll`, when it can be told the checksum.
            let ticket = self.in_flight.start(in_flight);
            self.checksum_pool.begin(ticket, slot, tile_bytes);
            return Ok(Ticket(ticket));
        }
        in_flight.slot = Some(slot);
        let ticket = self.in_flight.start(in_flight);
        let request = Request {
            ticket,
            verb,
            urgency,
            tile,
            slot: index,
            generation: Generation(0),
            checksum: 0,
        };
        self.put(&request.to_sqe(self.epoch))
            .map(|()| Ticket(ticket))
            .map_err(|error| {
                let in_flight = self.in_flight.end(ticket).expect("started above");
                (in_flight.slot.expect("put there above"), error)
            })
    }

    /// Asks the daemon.
    fn put(&mut self, entry: &Sqe) -> Result<(), ClientError> {
        match self.rings.put(entry) {
            Ok(true) => {
                signal::ring(&self.submission_doorbell);
                Ok(())
            }
            // As many entries as operations in flight, so it has room unless the daemon left entries lying: it died.
            Ok(false) => Err(self.gone()),
            Err(error) => Err(broken_ring(error)),
        }
    }

    fn is_scratch(&self, tile: TileIndex) -> bool {
        tile.0 as usize >= self.job_tile_count
    }

    fn startable(&self, tile: TileIndex, slot: &Slot) -> Result<(u32, Generation), ClientError> {
        let refuse = |kind, words| Err(ClientError::refused(kind, words));
        assert!(slot.is_of(&self.pool), "a slot of another arena");
        if self.in_flight.is_full() {
            let words = format!(
                "{} operations in flight, which is all that was granted",
                self.info.iodepth
            );
            return refuse(FaultKind::TooMany, words);
        }
        let Some(&tile_bytes) = self.tile_bytes.get(tile.0 as usize) else {
            let words = format!("tile {tile}: the job has {}", self.tile_bytes.len());
            return refuse(FaultKind::UnknownTile, words);
        };
        if slot.bytes() < tile_bytes as usize {
            let words = format!(
                "tile {tile} has {tile_bytes} bytes, the slot {}",
                slot.bytes()
            );
            return refuse(FaultKind::SlotTooSmall, words);
        }
        let Some(working) = self.working else {
            let words = "choose the generation to go on from first (resume)".into();
            return refuse(FaultKind::WrongGeneration, words);
        };
        Ok((tile_bytes, working))
    }

    /// Appends what has ended since the last call, without waiting. Bytes that were swapped in have been checked; writes
    /// whose checksum is ready are passed on.
    pub fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), ClientError> {
        while let Some(cqe) = self.rings.take().map_err(broken_ring)? {
            let (known, unheard) = (&mut self.info.devices, &mut self.names_unheard);
            let mut name = |device| name_of(device, known, unheard, &self.control);
            match self.in_flight.arrived(&cqe, &mut name)? {
                Arrived::Done(one) => done.push(one),
                Arrived::Unchecked(ticket, slot, bytes) => {
                    self.checksum_pool.begin(ticket, slot, bytes)
                }
            }
        }
        while let Some(summed) = self.checksum_pool.take() {
            let Summed {
                ticket,
                slot,
                checksum,
            } = summed;
            let in_flight = self.in_flight.get_mut(ticket);
            let in_flight = in_flight.expect("in flight while it is summed");
            if in_flight.verb == Verb::SwapIn {
                done.extend(self.checked(ticket, slot, checksum)?);
                continue;
            }
            let request = Request {
                ticket,
                verb: Verb::SwapOut,
                urgency: Priority::Prefetch,
                tile: in_flight.tile,
                slot: slot.index(),
                generation: in_flight.generation,
                checksum,
            };
            in_flight.slot = Some(slot);
            self.put(&request.to_sqe(self.epoch))?;
        }
        Ok(())
    }

    /// The end of a swap in whose bytes came to checksum `found`, wherever they were summed; nothing: it is read once more.
    fn checked(
        &mut self,
        ticket: TicketId,
        slot: Slot,
        found: u32,
    ) -> Result<Option<Done>, ClientError> {
        let (known, unheard) = (&mut self.info.devices, &mut self.names_unheard);
        let mut name = |device| name_of(device, known, unheard, &self.control);
        match (self.in_flight).checked(ticket, slot, found, &mut name)? {
            Checked::Done(done, device) => {
                self.report_damage(&done, device);
                Ok(Some(done))
            }
            Checked::Again(tile, slot) => {
                let request = Request {
                    ticket,
                    verb: Verb::SwapIn,
                    urgency: Priority::Demand,
                    tile,
                    slot,
                    generation: Generation(0),
                    checksum: 0,
                };
                self.put(&request.to_sqe(self.epoch)).map(|()| None)
            }
        }
    }
}
