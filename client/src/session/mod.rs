//! A session: opening and closing it, its job, the generation to resume from.
//!
//! `swap` moves tiles, `commit` makes generations durable, `wait` sleeps and notices a dead daemon, `restart` reattaches to the
//! next one.

mod commit;
mod damage;
mod restart;
mod swap;
mod wait;

pub use commit::CommittedGeneration;
pub(crate) use restart::Attempts;
pub use restart::RESTART_WAIT;

use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use offload_api::fault::FaultKind;
use offload_api::geometry::Geometry;
use offload_api::handoff::{self, HandoffError, ReceivedDescriptors};
use offload_api::ids::{Epoch, Generation, SessionToken, TileIndex};
use offload_api::ring::{ProcessRings, RingError, RingMap};
use offload_api::{PROTOCOL_VERSION, proto};

use crate::checksum_pool::ChecksumPool;
use crate::control::{Client, Control, LONG_WAIT, SHORT_WAIT};
use crate::in_flight::InFlightTable;
use crate::mapping::{self, ArenaMemory};
use crate::signal::Waker;
use crate::slot::SlotPool;
use crate::types::{JobDefinition, JobRecord, SessionInfo, SessionSettings};
use crate::{ClientError, Daemon, convert};
use commit::Commit;

/// One process's part of a job, open on a daemon. Dropping it ends the session like a crash.
///
/// Tiles pass through slots in memory that the daemon shares, and checksums are computed here, so the daemon touches no byte of a tile. The price:
/// memory in slots of a few sizes, which a session reserves whole, and processes that have to be trusted with their own job's bytes.
pub struct Session {
    control: Control,
    token: Vec<u8>,
    info: SessionInfo,
    epoch: Epoch,
    /// Lengths of the job's tiles, then of the session's scratch tiles.
    tile_bytes: Vec<u32>,
    /// Number of the job's tiles.
    job_tile_count: usize,
    working: Option<Generation>,
    pool: Arc<SlotPool>,
    memory: ArenaMemory,
    rings: ProcessRings,
    in_flight: InFlightTable,
    checksum_pool: ChecksumPool,
    submission_doorbell: OwnedFd,
    completion_doorbell: OwnedFd,
    /// Hangs up when the daemon dies or evicts this session.
    life_line: OwnedFd,
    waker: Waker,
    commit: Commit,
    /// Damaged tiles reported to the daemon.
    reported_count: u32,
    /// Whether the daemon left a question for a device's path unanswered.
    names_unheard: bool,
    /// Answer to why the job is unusable, once asked; `Some(None)`: the daemon gave no reason.
    unusable: Option<Option<String>>,
}

impl Session {
    /// Connects, allocates the arena and maps it. Blocks while the daemon populates the memory, which can take seconds a GiB, and while a
    /// daemon that answered is replaced by another.
    ///
    /// # Errors
    /// [`ClientError::Connect`], [`ClientError::Busy`], [`ClientError::Version`]; refusals: `Invalid`, `NoMemory`, `Busy` (this rank is open).
    pub fn open(settings: SessionSettings) -> Result<Self, ClientError> {
        let mut attempts = Attempts::begin();
        loop {
            match Self::try_open(&settings) {
                Ok(session) => return Ok(session),
                Err(error) => attempts.again_after(error)?,
            }
        }
    }

    fn try_open(settings: &SessionSettings) -> Result<Self, ClientError> {
        let geometry = Geometry::new(&settings.classes)
            .map_err(|e| ClientError::refused(FaultKind::Invalid, e.to_string()))?;
        let daemon = Daemon::connect(&settings.socket)?;
        let request = proto::OpenSessionRequest {
            protocol_version: PROTOCOL_VERSION,
            job: settings.job.clone(),
            rank: settings.rank.0,
            local_ranks: settings.local_ranks,
            classes: settings
                .classes
                .iter()
                .map(proto::SlotClass::from)
                .collect(),
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
        let received = handoff::receive(&descriptor_socket, token, SHORT_WAIT)
            .map_err(|error| not_handed(error, &settings.socket))?;
        let ReceivedDescriptors {
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
        let job = describe_job(&daemon.control, &reply.token)?;
        let waker = Waker::new()?;
        let session = Self {
            checksum_pool: ChecksumPool::start(&waker),
            token: reply.token,
            epoch: Epoch(reply.epoch),
            job_tile_count: job.as_ref().map_or(0, |job| job.tiles.len()),
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
            reported_count: 0,
            names_unheard: false,
            unusable: None,
            pool: SlotPool::new(&geometry, settings.classes.len(), regions),
            memory,
            rings: ProcessRings::new(map),
            in_flight: InFlightTable::new(granted),
            submission_doorbell,
            completion_doorbell,
            life_line,
            waker,
            commit: Commit::None,
            control: daemon.control,
        };
        Ok(session)
    }

    /// Properties of the session, and the store's record of the job when it opened.
    pub fn info(&self) -> &SessionInfo {
        &self.info
    }

    /// Generation that writes belong to; `None` before [`Session::resume`].
    pub fn working(&self) -> Option<Generation> {
        self.working
    }

    /// The arena's memory, to register it with a GPU.
    pub fn memory(&self) -> ArenaMemory {
        self.memory.clone()
    }

    /// Defines the tiles of a new job, or checks that a known job has exactly these.
    ///
    /// Refusals: `NoSpace` (names the bytes needed and free on each device), `LayoutChanged`, `Invalid`.
    pub fn define_tiles(&mut self, definition: JobDefinition) -> Result<(), ClientError> {
        let request = convert::definition(self.token.clone(), &definition);
        self.call("DefineTiles", LONG_WAIT, || {
            let request = request.clone();
            |mut client: Client| async move { client.define_tiles(request).await }
        })?;
        let scratch = self.tile_bytes.split_off(self.job_tile_count);
        self.tile_bytes = definition.tiles.iter().map(|t| t.tile_bytes).collect();
        self.job_tile_count = self.tile_bytes.len();
        self.tile_bytes.extend(scratch);
        Ok(())
    }

    /// Reserves scratch tiles: they belong to this session and to no generation, can be written at any time, and end with the
    /// session. Returns the index of the first; the others follow it. Allowed once a session, after its job has tiles.
    ///
    /// Refusals: `NoSpace` (names the bytes needed and free on each device), `Invalid`.
    pub fn reserve_scratch(&mut self, tile_bytes: &[u32]) -> Result<TileIndex, ClientError> {
        let request = proto::ReserveScratchRequest {
            token: self.token.clone(),
            tile_bytes: tile_bytes.to_vec(),
        };
        let reserve = || {
            let request = request.clone();
            |mut client: Client| async move { client.reserve_scratch(request).await }
        };
        // A repeated call would be refused, so the next daemon is asked whether the first succeeded.
        self.call_once("ReserveScratch", SHORT_WAIT, reserve, |found| {
            (found.scratch_count > 0).then_some(proto::ReserveScratchReply { reserved_bytes: 0 })
        })?;
        self.tile_bytes.extend(tile_bytes);
        Ok(TileIndex(self.job_tile_count as u32))
    }

    /// Resumes from `generation` and discards any later one; 0 starts a job that has none. Returns the working generation. All
    /// local ranks must name the same generation.
    ///
    /// Refusals: `WrongGeneration`, `Unclean`, `UnknownTile` (nothing defined).
    pub fn resume(&mut self, generation: Generation) -> Result<Generation, ClientError> {
        let request = proto::ResumeRequest {
            token: self.token.clone(),
            generation: generation.0,
        };
        let resume = || {
            let request = request.clone();
            |mut client: Client| async move { client.resume(request).await }
        };
        // A repeated call would be refused, so the next daemon is asked whether the first succeeded.
        let reply = self.call_once("Resume", LONG_WAIT, resume, |found| {
            let working_generation = found.working_generation;
            (working_generation > 0).then_some(proto::ResumeReply { working_generation })
        })?;
        let working = Generation(reply.working_generation);
        self.working = Some(working);
        Ok(working)
    }

    /// Closes the session and returns when its memory is free again. Uncommitted writes are discarded.
    pub fn close(self) -> Result<(), ClientError> {
        let request = proto::CloseSessionRequest {
            token: self.token.clone(),
        };
        self.call("CloseSession", SHORT_WAIT, || {
            let request = request.clone();
            |mut client: Client| async move { client.close_session(request).await }
        })?;
        Ok(())
    }
}

/// Collects the job's record from the parts in which it is sent.
fn describe_job(control: &Control, token: &[u8]) -> Result<Option<JobRecord>, ClientError> {
    let request = proto::DescribeJobRequest {
        token: token.to_vec(),
    };
    let record = control.call("DescribeJob", LONG_WAIT, |mut client| async move {
        let mut parts = client.describe_job(request).await?.into_inner();
        let mut whole: Option<proto::JobRecord> = None;
        while let Some(part) = parts.message().await? {
            match &mut whole {
                None => whole = Some(part),
                Some(whole) => whole.append(part),
            }
        }
        Ok(tonic::Response::new(whole))
    })?;
    record.map(convert::job).transpose()
}

fn broken_ring(error: RingError) -> ClientError {
    ClientError::protocol(error.to_string())
}

fn not_handed(error: HandoffError, socket: &Path) -> ClientError {
    let gone = || ClientError::DaemonGone {
        socket: socket.to_owned(),
    };
    match error {
        // The daemon that opened the session has just ended it: it stops, or this process came too late.
        HandoffError::Refused(fault) if fault.kind == FaultKind::NotFound => gone(),
        HandoffError::Refused(fault) => ClientError::Refused(fault),
        HandoffError::Socket { source, .. }
            if matches!(
                source.kind(),
                ErrorKind::NotFound | ErrorKind::ConnectionRefused
            ) =>
        {
            gone()
        }
        HandoffError::Socket { path, source, .. } => ClientError::Connect {
            socket: path,
            source,
        },
        HandoffError::HungUp { .. } => gone(),
        other => ClientError::protocol(other.to_string()),
    }
}
