//! What processes and people ask of the core, and what it answers.
//!
//! Everything here is checked input: the server turns messages into these types and refuses what does not fit.

use offload_api::geometry::SlotClass;
use offload_api::ids::{DeviceIndex, Epoch, Generation, Rank, SessionToken, TileIndex};

use crate::store::catalog::Phase;
use crate::store::definition::{JobDefinition, JobName};
use crate::store::format::MeasuredRates;
use crate::store::superblock::{DeviceId, Superblock};

/// What a peer may ask for.
#[derive(Debug)]
pub enum Call {
    /// Who answers, what is free.
    Describe,
    /// Host memory for one process of a job.
    Open(OpenSession),
    /// What the store knows of the session's job.
    DescribeJob {
        /// Of the session.
        token: SessionToken,
    },
    /// Tiles of a job.
    Define {
        /// Of the session.
        token: SessionToken,
        /// All of the job's tiles on this node.
        definition: JobDefinition,
    },
    /// Tiles of one session alone.
    ReserveScratch {
        /// Of the session.
        token: SessionToken,
        /// Of each tile.
        tile_bytes: Vec<u32>,
    },
    /// Where to go on from.
    Resume {
        /// Of the session.
        token: SessionToken,
        /// 0: from nothing.
        generation: Generation,
    },
    /// One rank's part of a generation.
    Commit {
        /// Of the session.
        token: SessionToken,
        /// The working generation.
        generation: Generation,
        /// At most `BLOB_BYTES_MAX`.
        blob: Vec<u8>,
    },
    /// The generation is prepared on every node.
    Confirm {
        /// Of the session.
        token: SessionToken,
        /// The one that was prepared.
        generation: Generation,
    },
    /// How far the session is, for a process that lost its connection.
    Reattach {
        /// Of the session.
        token: SessionToken,
    },
    /// A tile that was read is not what was written. Nothing is decided by it.
    ReportDamage {
        /// Of the session.
        token: SessionToken,
        /// What its process found.
        damage: Damage,
    },
    /// Ends the session in order.
    Close {
        /// Of the session.
        token: SessionToken,
    },
    /// The caller's jobs.
    ListJobs,
    /// Gives a job's space back.
    DropJob {
        /// Of the caller's uid.
        job: JobName,
    },
    /// Forgets records of a job that the device did not give at the start: perhaps its newest generation.
    DiscardUnreadable {
        /// Its owner; whether the caller may is the server's to know.
        uid: u32,
        /// The job.
        job: JobName,
    },
    /// A device comes to the store. The driver has it already, behind those that were there: whatever the answer, its index
    /// is taken.
    AddDevice(NewDevice),
    /// All tiles leave a device, and then it leaves the store. Asked again it goes on.
    DrainDevice {
        /// As the settings name it.
        path: String,
        /// As [`Call::LimitMoves`].
        rebalance_bytes_per_s_max: Option<u64>,
    },
    /// A ceiling for what is copied while tiles move now, as long as some are to.
    LimitMoves {
        /// On the average.
        bytes_per_s_max: u64,
    },
}

/// A device that is to come to the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewDevice {
    /// As the settings will name it.
    pub path: String,
    /// Random.
    pub id: DeviceId,
    /// From the start of data on, whole blocks.
    pub data_bytes: u64,
    /// 0 = unknown.
    pub rates: MeasuredRates,
    /// Now.
    pub created_unix_s: u64,
    /// As [`Call::LimitMoves`].
    pub rebalance_bytes_per_s_max: Option<u64>,
}

/// A tile that is not what was written, as a process found it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Damage {
    /// Where it was read from.
    pub device: DeviceIndex,
    /// From the device's start.
    pub offset: u64,
    /// In the job's table.
    pub tile: TileIndex,
    /// That wrote it.
    pub generation: Generation,
    /// Checksum.
    pub expected: u32,
    /// Checksum.
    pub found: u32,
}

/// Where the server looks for a tile that a process calls damaged.
#[derive(Clone, Debug, PartialEq)]
pub struct Reported {
    /// Of the job.
    pub uid: u32,
    /// Whose tile it is.
    pub job: JobName,
    /// Of the device.
    pub path: String,
    /// To tell the device from another one at its path.
    pub superblock: Superblock,
    /// Of the tile.
    pub tile_bytes: u64,
}

/// What a process asks for when it comes.
#[derive(Clone, Debug)]
pub struct OpenSession {
    /// 16 random bytes the driver drew for this session.
    pub token: SessionToken,
    /// With the peer's uid it names the job.
    pub job: JobName,
    /// Over all nodes.
    pub rank: Rank,
    /// Ranks of the job on this node, at least 1.
    pub local_ranks: u32,
    /// Slots of the arena.
    pub classes: Vec<SlotClass>,
    /// Operations in flight it wants, at least 1.
    pub iodepth: u32,
}

/// The answer to a [`Call`] of the same name.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    /// Who answers.
    Describe(DescribeReply),
    /// The session exists.
    Open(Box<OpenReply>),
    /// The session's job; `None`: the store does not know it yet.
    DescribeJob(Option<Box<JobRecord>>),
    /// The tiles exist.
    Define {
        /// Of the whole job, over all devices.
        reserved_bytes: u64,
    },
    /// The session's own tiles exist.
    ReserveScratch {
        /// Over all devices.
        reserved_bytes: u64,
    },
    /// Tiles can be read and written.
    Resume {
        /// What writes must name.
        working_generation: Generation,
    },
    /// The generation is durable here.
    Commit {
        /// As called.
        generation: Generation,
        /// False while other nodes must still prepare it.
        confirmed: bool,
        /// The next one.
        working_generation: Generation,
    },
    /// The one before may be overwritten.
    Confirm,
    /// The session is there.
    Reattach {
        /// The life that gave it.
        epoch: Epoch,
        /// What writes must name; `None` before it resumed.
        working: Option<Generation>,
        /// Nothing waits for a confirmation.
        confirmed: bool,
        /// Tiles of its own.
        scratch_count: u32,
    },
    /// It fits the job: where to look for it.
    ReportDamage(Reported),
    /// The session's I/O has ended.
    Close,
    /// The caller's jobs, by name.
    ListJobs(Vec<JobSummary>),
    /// The job is gone.
    DropJob {
        /// Over all devices.
        freed_bytes: u64,
    },
    /// The records are forgotten.
    DiscardUnreadable {
        /// What the job can be gone on from; 0 = nothing.
        newest_generation: Generation,
    },
    /// The device is of the store; tiles will move to it.
    AddDevice {
        /// Of the store, for good.
        number: u32,
    },
    /// Nothing new goes to the device; its tiles will move.
    DrainDevice {
        /// That must move.
        left_bytes: u64,
    },
    /// Tiles move so from now on.
    LimitMoves,
}

/// What the core knows about the daemon; engine and memory notes are the driver's.
#[derive(Clone, Debug, PartialEq)]
pub struct DescribeReply {
    /// This life.
    pub epoch: Epoch,
    /// In the store's order.
    pub devices: Vec<DeviceState>,
    /// Host memory a new session may still take.
    pub arena_free_bytes: u64,
}

/// A device of the store.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceState {
    /// As the settings name it.
    pub path: String,
    /// Smallest unit of I/O.
    pub block_bytes: u32,
    /// For tiles and records.
    pub data_bytes: u64,
    /// Of them not reserved.
    pub free_bytes: u64,
    /// Measured at format, 0 = unknown.
    pub read_bytes_per_s: u64,
    /// Measured at format, 0 = unknown.
    pub write_bytes_per_s: u64,
    /// Its place in the store.
    pub status: DeviceStatus,
}

/// A device's place in the store, and what goes on with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceStatus {
    /// Of the store, for good.
    pub number: u32,
    /// `None`: it has left the store, or did not come.
    pub phase: Option<Phase>,
    /// Of extents that are still to come to it, or to leave it, as far as is known.
    pub left_bytes: u64,
    /// Why they do not move.
    pub stuck: Option<String>,
    /// The next start of the daemon goes on with it, and nothing else is lacking.
    pub waits_for_start: bool,
}

impl DeviceStatus {
    /// Of a device on which nothing goes on.
    pub fn settled(number: u32) -> Self {
        Self {
            number,
            phase: Some(Phase::Settled),
            left_bytes: 0,
            stuck: None,
            waits_for_start: false,
        }
    }

    /// One word for people and programs.
    pub fn phase_name(&self) -> &'static str {
        match self.phase {
            None => "left",
            Some(Phase::Settled) => "settled",
            Some(Phase::Filling) => "filling",
            Some(Phase::Draining) => "draining",
        }
    }

    /// What is to come to it or to leave it does not, and nobody's start mends that.
    pub fn is_stuck(&self) -> bool {
        let moves = matches!(self.phase, Some(Phase::Filling | Phase::Draining));
        moves && self.stuck.is_some() && !self.waits_for_start
    }
}

/// What a new session needs; the server adds where the descriptor socket is.
#[derive(Clone, Debug, PartialEq)]
pub struct OpenReply {
    /// For every later call.
    pub token: SessionToken,
    /// This life.
    pub epoch: Epoch,
    /// Of the arena's memory file.
    pub arena_bytes: u64,
    /// Of each ring.
    pub ring_entries: u32,
    /// Granted.
    pub iodepth: u32,
    /// Tiles are multiples of this.
    pub block_bytes: u32,
    /// In the store's order: a completion's `device` is an index of this list.
    pub devices: Vec<DeviceState>,
}

/// A job as the store has it.
#[derive(Clone, Debug, PartialEq)]
pub struct JobRecord {
    /// Layout, tiles, durability, nodes.
    pub definition: std::sync::Arc<JobDefinition>,
    /// That can be resumed from, oldest first, at most two.
    pub generations: Vec<GenerationRecord>,
    /// False: written in place and not ended in order.
    pub clean: bool,
}

/// A generation on the devices.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationRecord {
    /// Its number.
    pub generation: Generation,
    /// Prepared on every node.
    pub confirmed: bool,
    /// One a local rank that committed, by rank.
    pub blobs: std::sync::Arc<Vec<(Rank, Vec<u8>)>>,
}

/// A line of the list of jobs.
#[derive(Clone, Debug, PartialEq)]
pub struct JobSummary {
    /// With `uid` it names the job.
    pub job: JobName,
    /// Its owner.
    pub uid: u32,
    /// Over all devices.
    pub reserved_bytes: u64,
    /// 0 = none yet.
    pub newest_generation: Generation,
    /// Whether a session of it is open.
    pub open: bool,
}
