//! Slots, and tiles on their way between slots and devices.

use offload_api::checksum::checksum;
use offload_api::fault::FaultKind;
use offload_api::ids::{Generation, TileIndex};
use offload_api::ring::entry::{Request, Verb};

use super::commit::Commit;
use super::{Session, broken_ring};
use crate::flight::InFlight;
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
        self.flights.count()
    }

    /// Starts reading `tile` into `slot`, which may be larger.
    ///
    /// Refused at once, with the slot: `TooMany` (iodepth reached: poll first), `UnknownTile`, `SlotTooSmall`,
    /// `WrongGeneration` (not resumed).
    pub fn swap_in(&mut self, tile: TileIndex, slot: Slot) -> Result<Ticket, (Slot, ClientError)> {
        self.start(Verb::SwapIn, tile, slot)
    }

    /// Starts writing `tile` from `slot` into the working generation. Its checksum is computed here, where the bytes
    /// were made: at about 14 GB/s a core.
    ///
    /// Refused at once, with the slot, like [`Session::swap_in`]; and with `Busy` while a commit is pending, as the
    /// write would belong to the generation that is being closed.
    pub fn swap_out(&mut self, tile: TileIndex, slot: Slot) -> Result<Ticket, (Slot, ClientError)> {
        if matches!(self.commit, Commit::Pending(_)) {
            let error = ClientError::refused(
                FaultKind::Busy,
                format!("tile {tile} cannot be swapped out while a commit is pending"),
            );
            return Err((slot, error));
        }
        self.start(Verb::SwapOut, tile, slot)
    }

    fn start(
        &mut self,
        verb: Verb,
        tile: TileIndex,
        slot: Slot,
    ) -> Result<Ticket, (Slot, ClientError)> {
        let (tile_bytes, working) = match self.startable(tile, &slot) {
            Ok(checked) => checked,
            Err(error) => return Err((slot, error)),
        };
        let (generation, checksum) = match verb {
            Verb::SwapIn => (Generation(0), 0),
            Verb::SwapOut => (working, checksum(&slot.as_slice()[..tile_bytes as usize])),
        };
        let index = slot.index();
        let ticket = self.flights.start(InFlight {
            verb,
            tile,
            tile_bytes,
            slot,
        });
        let request = Request {
            ticket,
            verb,
            tile,
            slot: index,
            generation,
            checksum,
        };
        let error = match self.rings.put(&request.to_sqe(self.epoch)) {
            Ok(true) => {
                signal::ring(&self.submission_doorbell);
                return Ok(Ticket(ticket));
            }
            // As many entries as operations in flight, so it has room unless the daemon left entries lying: it died.
            Ok(false) => self.gone(),
            Err(error) => broken_ring(error),
        };
        let flight = self.flights.end(ticket).expect("started above");
        Err((flight.slot, error))
    }

    fn startable(&self, tile: TileIndex, slot: &Slot) -> Result<(u32, Generation), ClientError> {
        let refuse = |kind, words| Err(ClientError::refused(kind, words));
        assert!(slot.is_of(&self.pool), "a slot of another arena");
        if self.flights.is_full() {
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

    /// Appends what has ended since the last call, without waiting. Swapped-in bytes are checked here.
    pub fn poll(&mut self, done: &mut Vec<Done>) -> Result<(), ClientError> {
        while let Some(cqe) = self.rings.take().map_err(broken_ring)? {
            done.push(self.flights.complete(&cqe, &self.info.devices)?);
        }
        Ok(())
    }
}
