//! A session: slots, tiles in flight, generations.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use offload_api::checksum::checksum;
use offload_api::fault::FaultKind;
use offload_api::geometry::Geometry;
use offload_api::handoff::{self, HandoffError, Received};
use offload_api::ids::{Epoch, Generation, SessionToken, TileIndex};
use offload_api::ring::entry::{Request, Verb};
use offload_api::ring::{ProcessRings, RingError, RingMap};
use offload_api::{BLOB_BYTES_MAX, PROTOCOL_VERSION, proto};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::control::{Control, LONG_WAIT, Pending, SHORT_WAIT};
use crate::flight::{Flights, InFlight};
use crate::mapping::{self, ArenaMemory};
use crate::signal::{self, Waker};
use crate::slot::{Slot, SlotPool};
use crate::types::{JobDefinition, SessionInfo, SessionSettings};
use crate::{ClientError, Daemon, Done, Ticket, convert};

/// One process's part of a job, open on a daemon. Dropping it ends it, as a crash would.
pub struct Session {
    control: Control,
    token: Vec<u8>,
    info: SessionInfo,
    epoch: Epoch,
    tile_bytes: Vec<u32>,
    working: Option<Generation>,
    pool: std::sync::Arc<SlotPool>,
    memory: ArenaMemory,
    rings: ProcessRings,
    flights: Flights,
    submission_doorbell: OwnedFd,
    completion_doorbell: OwnedFd,
    /// Hangs up when the daemon dies or throws this session out.
    life_line: OwnedFd,
    waker: Waker,
    commit: Commit,
}

enum Commit {
    None,
    Pending(Pending<proto::CommitReply>),
    Ended(Result<Committed, ClientError>),
}

/// A generation is durable on this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Committed {
    /// Its number.
    pub generation: Generation,
    /// With one node always. With several it is still prepared, and the next write waits for [`Session::confirm`].
    pub confirmed: bool,
    /// What writes belong to from now on.
    pub working: Generation,
}

impl Session {
    /// Connects, takes memory, maps it. Blocks while the daemon touches the memory, which can take seconds a GiB.
    ///
    /// [`ClientError::Connect`], [`ClientError::Version`]; refusals: `Invalid`, `NoMemory`, `Busy` (this rank is open).
    pub fn open(settings: SessionSettings) -> Result<Self, ClientError> {
        let geometry = Geometry::new(&settings.classes)
            .map_err(|e| ClientError::refused(FaultKind::Invalid, e.to_string()))?;
        let daemon = Daemon::connect(&settings.socket)?;
        let request = proto::OpenSessionRequest {
            protocol_version: PROTOCOL_VERSION,
            job: settings.job,
            rank: settings.rank.0,
            local_ranks: settings.local_ranks,
            classes: settings.classes.iter().map(convert::class).collect(),
            iodepth: settings.iodepth,
        };
        let reply = daemon
            .control
            .call("OpenSession", LONG_WAIT, |mut client| async move {
                client.open_session(request).await
            })?;
        let token = SessionToken::from_bytes(&reply.token).ok_or_else(|| {
            ClientError::protocol(format!("a token of {} bytes", reply.token.len()))
        })?;
        let descriptor_socket = PathBuf::from(&reply.descriptor_socket);
        let received =
            handoff::receive(&descriptor_socket, token, SHORT_WAIT).map_err(not_handed)?;
        let Received {
            arena,
            ring,
            submission_doorbell,
            completion_doorbell,
            life_line,
        } = received;
        let map = RingMap::open(&ring).map_err(broken_ring)?;
        let header = *map.header();
        let granted = reply.iodepth;
        if header.epoch != reply.epoch
            || header.entries != reply.ring_entries
            || !(1..=header.entries).contains(&granted)
        {
            return Err(ClientError::protocol(format!(
                "epoch {:x}, {} ring entries, iodepth {granted} in the reply; epoch {:x}, {} entries in the ring",
                reply.epoch, reply.ring_entries, header.epoch, header.entries
            )));
        }
        let (memory, regions) = mapping::shared(&arena, &geometry)?;
        let about = daemon.info().clone();
        let job = reply.job.map(convert::job).transpose()?;
        let session = Self {
            token: reply.token,
            epoch: Epoch(reply.epoch),
            tile_bytes: job.as_ref().map_or_else(Vec::new, |job| {
                job.tiles.iter().map(|tile| tile.tile_bytes).collect()
            }),
            info: SessionInfo {
                epoch: Epoch(reply.epoch),
                build: about.build,
                engine: about.engine,
                engine_reason: about.engine_reason,
                devices: reply.devices.into_iter().map(convert::device).collect(),
                arena_bytes: reply.arena_bytes,
                iodepth: granted,
                block_bytes: reply.block_bytes,
                memory_locked: about.memory_locked,
                memory_note: about.memory_note,
                job,
            },
            working: None,
            pool: SlotPool::new(&geometry, settings.classes.len(), regions),
            memory,
            rings: ProcessRings::new(map),
            flights: Flights::new(granted),
            submission_doorbell,
            completion_doorbell,
            life_line,
            waker: Waker::new()?,
            commit: Commit::None,
            control: daemon.control,
        };
        Ok(session)
    }

    /// What was granted, and what the store knew of the job.
    pub fn info(&self) -> &SessionInfo {
        &self.info
    }

    /// What writes belong to; `None` before [`Session::resume`].
    pub fn working(&self) -> Option<Generation> {
        self.working
    }

    /// Where the arena lies, to register it with a GPU.
    pub fn memory(&self) -> ArenaMemory {
        self.memory.clone()
    }

    /// Gives a new job its tiles, or checks that a known job has exactly these.
    ///
    /// Refusals: `NoSpace` (names what is needed and free a device), `LayoutChanged`, `Invalid`.
    pub fn define_tiles(&mut self, definition: JobDefinition) -> Result<(), ClientError> {
        let request = convert::definition(self.token.clone(), &definition);
        self.call("DefineTiles", LONG_WAIT, |mut client| async move {
            client.define_tiles(request).await
        })?;
        self.tile_bytes = definition.tiles.iter().map(|t| t.tile_bytes).collect();
        Ok(())
    }

    /// Goes on from `generation`, giving up any later one for good; 0 starts a job that has none. Answers the working
    /// generation. All local ranks must name the same.
    ///
    /// Refusals: `WrongGeneration`, `Unclean`, `UnknownTile` (nothing defined).
    pub fn resume(&mut self, generation: Generation) -> Result<Generation, ClientError> {
        let request = proto::ResumeRequest {
            token: self.token.clone(),
            generation: generation.0,
        };
        let reply = self.call("Resume", LONG_WAIT, |mut client| async move {
            client.resume(request).await
        })?;
        let working = Generation(reply.working_generation);
        self.working = Some(working);
        Ok(working)
    }

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

    /// Waits until something can be polled, the waker is rung, a commit ends, or `timeout` is over; may also return for
    /// nothing. [`ClientError::DaemonGone`] as soon as the daemon hangs up; what it completed before can still be polled.
    pub fn wait(&mut self, timeout: Duration) -> Result<(), ClientError> {
        // `None`: later than a clock can say.
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let ready = self.rings.ready().map_err(broken_ring)? > 0;
            let commit_ended = self.advance_commit();
            let left = match deadline {
                _ if ready || commit_ended => Duration::ZERO,
                Some(deadline) => deadline.saturating_duration_since(Instant::now()),
                None => Duration::MAX,
            };
            if self.sleep(left)? || left.is_zero() {
                return Ok(());
            }
        }
    }

    /// Whether a signal came within `left`. A system call that was interrupted counts as none.
    fn sleep(&self, left: Duration) -> Result<bool, ClientError> {
        let (waker, ended) = (&self.waker, self.control.ended());
        let hang_up = PollFlags::IN | PollFlags::RDHUP;
        let mut fds = [
            PollFd::new(&self.life_line, hang_up),
            PollFd::new(&self.completion_doorbell, PollFlags::IN),
            PollFd::new(waker, PollFlags::IN),
            PollFd::new(ended, PollFlags::IN),
        ];
        // Longer than a Timespec can say is for ever.
        let limit = Timespec::try_from(left).ok();
        match poll(&mut fds, limit.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(ClientError::os("poll")(errno)),
        }
        let [line, completion, woken, ended_now] = fds.map(|fd| !fd.revents().is_empty());
        if completion {
            signal::hush(&self.completion_doorbell);
        }
        if woken {
            waker.clear();
        }
        if ended_now {
            ended.clear();
        }
        if line && self.hung_up() {
            return Err(self.gone());
        }
        Ok(completion || woken || ended_now)
    }

    /// The daemon never writes to the line after the handoff, so that anything readable is its end.
    fn hung_up(&self) -> bool {
        let mut byte = [0];
        !matches!(
            rustix::net::recv(
                self.life_line.as_fd(),
                &mut byte,
                rustix::net::RecvFlags::DONTWAIT
            ),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR)
        )
    }

    /// Ends [`Session::wait`] from other threads.
    pub fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Gives this rank's part of the working generation, with its blob (at most 64 KiB). It ends when all local ranks
    /// have and the generation is durable. Reading goes on meanwhile.
    ///
    /// Refused: `Busy` while tiles are being swapped out or a commit is pending, `Invalid` for a long blob.
    pub fn begin_commit(&mut self, blob: Vec<u8>) -> Result<(), ClientError> {
        let refuse = |kind, words| Err(ClientError::refused(kind, words));
        let Some(working) = self.working else {
            let words = "nothing to commit before resume".into();
            return refuse(FaultKind::WrongGeneration, words);
        };
        if blob.len() > BLOB_BYTES_MAX {
            let words = format!("a blob of {} bytes; at most {BLOB_BYTES_MAX}", blob.len());
            return refuse(FaultKind::Invalid, words);
        }
        let writing = self.flights.swap_out_count();
        if writing > 0 {
            let words =
                format!("{writing} tiles of generation {working} are still being swapped out");
            return refuse(FaultKind::Busy, words);
        }
        if !matches!(self.commit, Commit::None) {
            return refuse(FaultKind::Busy, "a commit is pending already".into());
        }
        let request = proto::CommitRequest {
            token: self.token.clone(),
            generation: working.0,
            blob,
        };
        self.commit = Commit::Pending(self.control.begin(
            "Commit",
            LONG_WAIT,
            |mut client| async move { client.commit(request).await },
        ));
        Ok(())
    }

    /// The result of [`Session::begin_commit`], once.
    pub fn poll_commit(&mut self) -> Option<Result<Committed, ClientError>> {
        if !self.advance_commit() {
            return None;
        }
        match std::mem::replace(&mut self.commit, Commit::None) {
            Commit::Ended(result) => Some(result),
            _ => unreachable!("advance_commit said that it ended"),
        }
    }

    /// [`Session::begin_commit`], waited for. Completions meanwhile stay to be polled.
    pub fn commit(&mut self, blob: Vec<u8>) -> Result<Committed, ClientError> {
        self.begin_commit(blob)?;
        loop {
            if let Some(result) = self.poll_commit() {
                return result;
            }
            match self.pause() {
                Err(ClientError::DaemonGone { .. }) => {
                    let ending = std::mem::replace(&mut self.commit, Commit::None);
                    let Commit::Pending(pending) = ending else {
                        unreachable!("begun above and not ended");
                    };
                    self.commit = Commit::Ended(pending.last_words().map(|r| self.committed(r)));
                }
                other => other?,
            }
        }
    }

    /// The generation is prepared on every node; the one before it may be overwritten.
    pub fn confirm(&mut self, generation: Generation) -> Result<(), ClientError> {
        let request = proto::ConfirmRequest {
            token: self.token.clone(),
            generation: generation.0,
        };
        self.call("Confirm", LONG_WAIT, |mut client| async move {
            client.confirm(request).await
        })?;
        Ok(())
    }

    /// Ends the session in order and answers when its memory is free again. What was not committed is forgotten.
    pub fn close(self) -> Result<(), ClientError> {
        let request = proto::CloseSessionRequest {
            token: self.token.clone(),
        };
        self.call("CloseSession", SHORT_WAIT, |mut client| async move {
            client.close_session(request).await
        })?;
        Ok(())
    }

    /// A call, waited for as long as the daemon lives.
    fn call<R, F>(
        &self,
        call: &'static str,
        limit: Duration,
        make: impl FnOnce(crate::control::Client) -> F,
    ) -> Result<R, ClientError>
    where
        R: Send + 'static,
        F: Future<Output = Result<tonic::Response<R>, tonic::Status>> + Send + 'static,
    {
        let pending = self.control.begin(call, limit, make);
        loop {
            if let Some(result) = pending.poll() {
                return result;
            }
            match self.pause() {
                Err(ClientError::DaemonGone { .. }) => return pending.last_words(),
                other => other?,
            }
        }
    }

    /// Sleeps until a call ends or the daemon is gone. Leaves the waker and the doorbell for [`Session::wait`].
    fn pause(&self) -> Result<(), ClientError> {
        let ended = self.control.ended();
        let hang_up = PollFlags::IN | PollFlags::RDHUP;
        let mut fds = [
            PollFd::new(&self.life_line, hang_up),
            PollFd::new(ended, PollFlags::IN),
        ];
        // A call ends by itself at its limit; the second only bounds the harm of a lost signal.
        let limit = Timespec {
            tv_sec: 1,
            tv_nsec: 0,
        };
        match poll(&mut fds, Some(&limit)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(ClientError::os("poll")(errno)),
        }
        let [line, ended_now] = fds.map(|fd| !fd.revents().is_empty());
        if ended_now {
            ended.clear();
        } else if line && self.hung_up() {
            return Err(self.gone());
        }
        Ok(())
    }

    /// Whether a commit has ended whose result nobody took yet.
    fn advance_commit(&mut self) -> bool {
        if let Commit::Pending(pending) = &self.commit
            && let Some(result) = pending.poll()
        {
            self.commit = Commit::Ended(result.map(|reply| self.committed(reply)));
        }
        matches!(self.commit, Commit::Ended(_))
    }

    fn committed(&mut self, reply: proto::CommitReply) -> Committed {
        let working = Generation(reply.working_generation);
        self.working = Some(working);
        Committed {
            generation: Generation(reply.generation),
            confirmed: reply.confirmed,
            working,
        }
    }

    fn gone(&self) -> ClientError {
        ClientError::DaemonGone {
            socket: self.control.socket().to_owned(),
        }
    }
}

fn broken_ring(error: RingError) -> ClientError {
    ClientError::protocol(error.to_string())
}

fn not_handed(error: HandoffError) -> ClientError {
    match error {
        HandoffError::Refused(fault) => ClientError::Refused(fault),
        HandoffError::Socket { path, source, .. } => ClientError::Connect {
            socket: path,
            source,
        },
        other => ClientError::protocol(other.to_string()),
    }
}
