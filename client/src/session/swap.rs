//! Slots, and moving tiles between slots and devices.

use offload_api::fault::FaultKind;
use offload_api::ids::{Generation, TicketId, TileIndex};
use offload_api::ring::entry::{Priority, Promote, Request, Sqe, Verb};

use super::commit::Commit;
use super::damage::name_of;
use super::{Session, broken_ring};
use crate::checksum_pool::ChecksummedTile;
use crate::in_flight::{AfterChecksum, AfterCompletion, InFlight};
use crate::{ClientError, EndedOperation, Slot, Ticket, signal};

impl Session {
    /// Takes a free slot of class `class`, an index into [`classes`](crate::SessionSettings::classes); `None` when all are taken or in flight.
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

    /// Number of operations in flight.
    pub fn in_flight_count(&self) -> usize {
        self.in_flight.count()
    }

    /// Starts reading `tile` into `slot`, which may be larger.
    ///
    /// Refusals return the slot: `TooMany` (iodepth reached: poll first), `UnknownTile`, `SlotTooSmall`, `WrongGeneration` (not
    /// resumed).
    pub fn swap_in(&mut self, tile: TileIndex, slot: Slot) -> Result<Ticket, (Slot, ClientError)> {
        self.start(Verb::SwapIn, Priority::Prefetch, tile, slot)
    }

    /// Starts reading a tile that is needed next, ahead of everything the job's processes prefetch.
    pub fn swap_in_wanted(
        &mut self,
        tile: TileIndex,
        slot: Slot,
    ) -> Result<Ticket, (Slot, ClientError)> {
        self.start(Verb::SwapIn, Priority::Demand, tile, slot)
    }

    /// Raises a swap in that has not ended to the priority of [`Session::swap_in_wanted`]. Does nothing for one that has ended
    /// or that nothing could overtake any more.
    pub fn promote(&mut self, ticket: Ticket) -> Result<(), ClientError> {
        let Some(in_flight) = self.in_flight.get_mut(ticket.0) else {
            return Ok(());
        };
        // Without a slot it has arrived, and its checksum is being computed.
        if in_flight.verb != Verb::SwapIn || in_flight.slot.is_none() {
            return Ok(());
        }
        // Operations that were granted keep their room in the ring. A daemon so far behind has not seen this read either.
        let untaken = self.rings.untaken().map_err(broken_ring)?;
        if untaken + self.info.iodepth >= self.rings.header().entries {
            return Ok(());
        }
        let promote = Promote {
            ticket: ticket.0,
            priority: Priority::Demand,
        };
        self.put(&promote.to_sqe(self.epoch))
    }

    /// Starts writing `tile` from `slot` into the working generation. Another thread of this process computes the checksum;
    /// [`Session::poll`] then submits the write.
    ///
    /// Refusals return the slot: those of [`Session::swap_in`], and `Busy` while a commit is pending, as the write would belong
    /// to the generation that is being closed. Scratch tiles belong to no generation and are not refused.
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
        priority: Priority,
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
            // `poll` submits the write when the checksum is known.
            let ticket = self.in_flight.start(in_flight);
            self.checksum_pool.begin(ticket, slot, tile_bytes);
            return Ok(Ticket(ticket));
        }
        in_flight.slot = Some(slot);
        let ticket = self.in_flight.start(in_flight);
        let request = Request {
            ticket,
            verb,
            priority,
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

    /// Submits an entry.
    fn put(&mut self, entry: &Sqe) -> Result<(), ClientError> {
        match self.rings.put(entry) {
            Ok(true) => {
                signal::ring(&self.submission_doorbell);
                Ok(())
            }
            // The ring has room for all operations, so a full one means that the daemon stopped taking entries.
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
                "{} operations are in flight, as many as were granted",
                self.info.iodepth
            );
            return refuse(FaultKind::TooMany, words);
        }
        let Some(&tile_bytes) = self.tile_bytes.get(tile.0 as usize) else {
            let words = format!(
                "tile {tile} does not exist: the job has {} tiles",
                self.tile_bytes.len()
            );
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
            let words = "no generation was chosen: call resume first".into();
            return refuse(FaultKind::WrongGeneration, words);
        };
        Ok((tile_bytes, working))
    }

    /// Appends the operations that have ended since the last call, without waiting. Swapped-in bytes have been checked. Submits
    /// the writes whose checksum is known.
    pub fn poll(&mut self, done: &mut Vec<EndedOperation>) -> Result<(), ClientError> {
        while let Some(cqe) = self.rings.pop().map_err(broken_ring)? {
            let (known, unheard) = (&mut self.info.devices, &mut self.names_unheard);
            let mut name = |device| name_of(device, known, unheard, &self.control);
            match self.in_flight.arrived(&cqe, &mut name)? {
                AfterCompletion::Done(mut one) => {
                    self.explain(&mut one);
                    done.push(one);
                }
                AfterCompletion::Unchecked(ticket, slot, bytes) => {
                    self.checksum_pool.begin(ticket, slot, bytes)
                }
            }
        }
        while let Some(summed) = self.checksum_pool.next_result() {
            let ChecksummedTile {
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
                priority: Priority::Prefetch,
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

    /// Handles checksum `found` of a swap in. Returns `None` if the tile is read again.
    fn checked(
        &mut self,
        ticket: TicketId,
        slot: Slot,
        found: u32,
    ) -> Result<Option<EndedOperation>, ClientError> {
        let (known, unheard) = (&mut self.info.devices, &mut self.names_unheard);
        let mut name = |device| name_of(device, known, unheard, &self.control);
        match (self.in_flight).checked(ticket, slot, found, &mut name)? {
            AfterChecksum::Done(done, device) => {
                self.report_damage(&done, device);
                Ok(Some(done))
            }
            AfterChecksum::Again(tile, slot) => {
                let request = Request {
                    ticket,
                    verb: Verb::SwapIn,
                    priority: Priority::Demand,
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
