//! Calls of processes and people to the core, and its replies.
//!
//! Everything here is checked input: the server turns messages into these types and refuses what does not fit.

use offload_api::fault::Fault;
use offload_api::geometry::SlotClass;
use offload_api::ids::{
    DeviceIndex, DeviceNumber, Epoch, Generation, Rank, SessionToken, TileIndex,
};

use crate::store::catalog::Phase;
use crate::store::definition::{JobDefinition, JobName};
use crate::store::superblock::DeviceId;
use crate::store::superblock::MeasuredRates;

/// A call of a peer.
#[derive(Debug)]
pub enum Call {
    /// Asks which daemon answers, for its devices and its free memory.
    Describe,
    /// Opens a session: host memory for one process of a job.
    Open(OpenSession),
    /// Asks what the store knows of the session's job.
    DescribeJob { token: SessionToken },
    /// Defines the tiles of a job.
    Define {
        token: SessionToken,
        /// All tiles of the job on this node.
        definition: JobDefinition,
    },
    /// Reserves tiles of one session alone.
    ReserveScratch {
        token: SessionToken,
        /// Bytes of each tile.
        tile_bytes: Vec<u32>,
    },
    /// Chooses the generation to resume from.
    Resume {
        token: SessionToken,
        /// Generation; 0 starts from nothing.
        generation: Generation,
    },
    /// Commits one rank's part of a generation.
    Commit {
        token: SessionToken,
        /// The working generation.
        generation: Generation,
        /// Bytes kept beside the tiles, at most `BLOB_BYTES_MAX`.
        blob: Vec<u8>,
    },
    /// Confirms a generation that is prepared on every node.
    Confirm {
        token: SessionToken,
        /// The prepared generation.
        generation: Generation,
    },
    /// Asks how far the session is, for a process that lost its connection.
    Reattach { token: SessionToken },
    /// Reports a tile that was read and is not what was written. Nothing is decided by it.
    ReportDamage {
        token: SessionToken,
        /// Finding of the process.
        damage: TileDamage<DeviceNumber>,
    },
    /// Ends the session in order.
    Close { token: SessionToken },
    /// Asks for the caller's jobs.
    ListJobs,
    /// Deletes a job and frees its space.
    DropJob {
        /// Owner of the job; the server has checked that the caller may do this.
        uid: u32,
        job: JobName,
    },
    /// Discards records of a job that could not be read at the start. One of them may be its newest generation.
    DiscardUnreadable {
        /// Owner of the job; the server has checked that the caller may do this.
        uid: u32,
        job: JobName,
    },
    /// Adds a device to the store. The driver has it already, behind the others: its index stays used even if the call is
    /// refused.
    AddDevice(NewDevice),
    /// Moves all tiles off a device and then removes it from the store. May be repeated.
    DrainDevice {
        /// Path in the settings.
        path: String,
        /// Limit as in [`Call::LimitMoves`].
        rebalance_bytes_per_s_max: Option<u64>,
    },
    /// Limits the rate at which tiles are copied now, until all have moved.
    LimitMoves {
        /// Bytes per second, on average.
        bytes_per_s_max: u64,
    },
}

/// A device to be added to the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewDevice {
    /// Path as the settings will have it.
    pub path: String,
    /// Random ID.
    pub id: DeviceId,
    /// Bytes of the data area, whole blocks.
    pub data_bytes: u64,
    pub rates: MeasuredRates,
    /// Time of the addition.
    pub created_unix_s: u64,
    /// Limit as in [`Call::LimitMoves`].
    pub rebalance_bytes_per_s_max: Option<u64>,
}

/// A tile that a process found to be damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileDamage<Device = DeviceIndex> {
    /// Device it was read from.
    pub device: Device,
    /// First byte on the device.
    pub offset: u64,
    /// Index in the job's table.
    pub tile: TileIndex,
    /// Generation that wrote it.
    pub generation: Generation,
    /// Checksum in the record.
    pub expected: u32,
    /// Checksum of the bytes that were read.
    pub found: u32,
}

impl TileDamage<DeviceNumber> {
    /// Returns the finding with the index of its device.
    pub(super) fn on(self, device: DeviceIndex) -> TileDamage {
        let Self {
            device: _,
            offset,
            tile,
            generation,
            expected,
            found,
        } = self;
        TileDamage {
            device,
            offset,
            tile,
            generation,
            expected,
            found,
        }
    }
}

/// Request to open a session.
#[derive(Clone, Debug)]
pub struct OpenSession {
    /// 16 random bytes drawn for this session.
    pub token: SessionToken,
    /// Name of the job among the peer's jobs.
    pub job: JobName,
    /// Rank of the process among those of all nodes.
    pub rank: Rank,
    /// Ranks of the job on this node, at least 1.
    pub local_ranks: u32,
    /// Slots of the arena, by size.
    pub classes: Vec<SlotClass>,
    /// Operations in flight that it wants, at least 1.
    pub iodepth: u32,
}

/// The answer to a [`Call`] of the same name.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    /// The daemon that answers.
    Describe(DescribeReply),
    /// The session exists.
    Open(Box<OpenReply>),
    /// The session's job; `None` if the store does not have it yet.
    DescribeJob(Option<Box<JobRecord>>),
    /// The tiles exist.
    Define {
        /// Bytes of the whole job on all devices.
        reserved_bytes: u64,
    },
    /// The session's own tiles exist.
    ReserveScratch {
        /// Their bytes on all devices.
        reserved_bytes: u64,
    },
    /// Tiles can be read and written.
    Resume {
        /// Generation that writes must name.
        working_generation: Generation,
    },
    /// The generation is durable here.
    Commit {
        /// The committed generation.
        generation: Generation,
        /// Whether no other node must still prepare it.
        confirmed: bool,
        /// Generation that writes must name from now on.
        working_generation: Generation,
    },
    /// The generation is confirmed; the one before may be overwritten.
    Confirm,
    /// The session continues.
    Reattach {
        /// Incarnation that opened it.
        epoch: Epoch,
        /// Generation that writes must name; `None` before it resumed.
        working: Option<Generation>,
        /// Whether no generation waits for a confirmation.
        confirmed: bool,
        /// Number of its own tiles.
        scratch_count: u32,
        /// Reason why nothing can be written or committed.
        unusable: Option<Fault>,
    },
    /// The report fits the job, and this damage was not reported before.
    ReportDamage {
        /// Owner of the job.
        uid: u32,
        job: JobName,
        damage: TileDamage,
    },
    /// The session's I/O has ended.
    Close,
    /// The caller's jobs, sorted by name.
    ListJobs(Vec<JobSummary>),
    /// The job is deleted.
    DropJob {
        /// Bytes freed on all devices.
        freed_bytes: u64,
    },
    /// The records are discarded.
    DiscardUnreadable {
        /// Newest generation that the job can resume from; 0 if none.
        newest_generation: Generation,
    },
    /// The device belongs to the store; tiles will move to it.
    AddDevice {
        /// Number in the store, never reused.
        number: u32,
    },
    /// Nothing new is placed on the device; its tiles will move.
    DrainDevice {
        /// Bytes that must move.
        left_bytes: u64,
    },
    /// The limit holds from now on.
    LimitMoves,
}

/// Description of the daemon, without engine and memory, which the driver knows.
#[derive(Clone, Debug, PartialEq)]
pub struct DescribeReply {
    /// Epoch of this incarnation.
    pub epoch: Epoch,
    /// Devices in the store's order.
    pub devices: Vec<DeviceState>,
    /// Bytes of host memory that a new session may take.
    pub arena_free_bytes: u64,
    /// Bytes on all devices that a new job of the peer may reserve.
    pub device_free_bytes: u64,
    /// Sessions that the peer may still open.
    pub session_free_count: u32,
}

/// A device of the store.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceState {
    /// Path in the settings.
    pub path: String,
    /// Smallest unit of I/O.
    pub block_bytes: u32,
    /// Bytes for tiles and records.
    pub data_bytes: u64,
    /// Bytes of them that are not reserved.
    pub free_bytes: u64,
    /// Measured read rate; 0 is unknown.
    pub read_bytes_per_s: u64,
    /// Measured write rate; 0 is unknown.
    pub write_bytes_per_s: u64,
    /// Status in the store.
    pub status: DeviceStatus,
}

/// Status of a device in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceStatus {
    /// Number in the store, never reused.
    pub number: u32,
    /// State; `None` if it has left the store or could not be added.
    pub phase: Option<Phase>,
    /// Bytes of extents that are still to move to it or from it, as far as known.
    pub left_bytes: u64,
    /// Reason why they do not move.
    pub stuck: Option<String>,
    /// Whether the next start of the daemon continues the move, and nothing else is missing.
    pub waits_for_start: bool,
}

impl DeviceStatus {
    /// Status of a device that nothing moves to or from.
    pub fn settled(number: u32) -> Self {
        Self {
            number,
            phase: Some(Phase::Settled),
            left_bytes: 0,
            stuck: None,
            waits_for_start: false,
        }
    }

    /// State as one word.
    pub fn phase_name(&self) -> &'static str {
        match self.phase {
            None => "left",
            Some(Phase::Settled) => "settled",
            Some(Phase::Filling) => "filling",
            Some(Phase::Draining) => "draining",
        }
    }

    /// Whether tiles that are to move do not, and the next start would not repair that.
    pub fn is_stuck(&self) -> bool {
        let moves = matches!(self.phase, Some(Phase::Filling | Phase::Draining));
        moves && self.stuck.is_some() && !self.waits_for_start
    }
}

/// Description of a new session. The server adds the path of the descriptor socket.
#[derive(Clone, Debug, PartialEq)]
pub struct OpenReply {
    /// Token for every later call.
    pub token: SessionToken,
    /// Epoch of this incarnation.
    pub epoch: Epoch,
    /// Bytes of the arena's memory file.
    pub arena_bytes: u64,
    /// Entries of each ring.
    pub ring_entries: u32,
    /// Operations in flight that are granted.
    pub iodepth: u32,
    /// Bytes of which tiles are multiples.
    pub block_bytes: u32,
    /// Devices in the store's order; a completion's `device` is an index of this list.
    pub devices: Vec<DeviceState>,
}

/// A job in the store.
#[derive(Clone, Debug, PartialEq)]
pub struct JobRecord {
    /// Layout, tiles, durability, nodes.
    pub definition: std::sync::Arc<JobDefinition>,
    /// Generations that can be resumed from, oldest first, at most two.
    pub generations: Vec<GenerationRecord>,
    /// Whether the tiles are valid: false if they were written in place and the job did not end in order.
    pub clean: bool,
}

/// A generation on the devices.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationRecord {
    /// Number of the generation.
    pub generation: Generation,
    /// Whether it is prepared on every node.
    pub confirmed: bool,
    /// Blob of each local rank that committed, by rank.
    pub blobs: std::sync::Arc<Vec<(Rank, Vec<u8>)>>,
}

/// A line of the list of jobs.
#[derive(Clone, Debug, PartialEq)]
pub struct JobSummary {
    pub job: JobName,
    /// Owner of the job.
    pub uid: u32,
    /// Bytes reserved on all devices.
    pub reserved_bytes: u64,
    /// Newest generation; 0 if none.
    pub newest_generation: Generation,
    /// Whether a session of it is open.
    pub open: bool,
}
