//! Types of a session's requests and answers. No message type leaves this crate.

use std::path::PathBuf;

use crate::{DeviceNumber, Durability, Epoch, Generation, Rank, SlotClass, Tile};

/// Request for a session.
#[derive(Clone, Debug)]
pub struct SessionSettings {
    /// Path of the daemon's socket.
    pub socket: PathBuf,
    /// Name of the job among the caller's jobs: 1 to 128 characters of `[A-Za-z0-9._-]`.
    pub job: String,
    /// Rank of this process, over all nodes.
    pub rank: Rank,
    /// Number of the job's ranks on this node.
    pub local_ranks: u32,
    /// Slots to allocate, by size.
    pub classes: Vec<SlotClass>,
    /// Operations in flight to ask for; [`SessionInfo::iodepth`] says how many were granted. Some 8 MiB a drive and direction
    /// keep drives busy. With many more the slots do not fit in the processor's cache, and each byte costs memory bandwidth
    /// several times.
    pub iodepth: u32,
}

/// Properties of a granted session.
#[derive(Clone, Debug)]
pub struct SessionInfo {
    /// Incarnation of the daemon.
    pub epoch: Epoch,
    /// Version of the daemon's build.
    pub build: String,
    /// I/O engine of the daemon: "uring", "aio" or "psync".
    pub engine: String,
    /// Why the daemon chose this engine.
    pub engine_reason: String,
    /// Devices by their index in this incarnation of the daemon, including those that have left the store
    /// ([`DeviceInfo::left`]).
    pub devices: Vec<DeviceInfo>,
    /// Size of this session's arena.
    pub arena_bytes: u64,
    /// Operations granted in flight.
    pub iodepth: u32,
    /// Lengths of tiles are multiples of this.
    pub block_bytes: u32,
    /// Whether the arena is locked in memory.
    pub memory_locked: bool,
    /// Cost of unlocked memory and how to lock it; empty when locked.
    pub memory_note: String,
    /// The job's record when the session opened; `None` for a new job.
    pub job: Option<JobRecord>,
}

/// A device of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Number in the store, which completions name.
    pub number: DeviceNumber,
    /// Path of the file or block device.
    pub path: PathBuf,
    /// Logical block size.
    pub block_bytes: u32,
    /// Bytes for tiles, manifests and definitions.
    pub data_bytes: u64,
    /// Bytes that no job reserves.
    pub free_bytes: u64,
    /// Read rate, measured when the device was formatted; 0 is unknown.
    pub read_bytes_per_s: u64,
    /// Write rate, measured when the device was formatted; 0 is unknown.
    pub write_bytes_per_s: u64,
    /// Whether the device has left the store; earlier completions may still name it.
    pub left: bool,
}

/// Definition of a new job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobDefinition {
    /// The job's own description of its layout, which the daemon stores and does not interpret.
    pub layout: Vec<u8>,
    /// All tiles of this node.
    pub tiles: Vec<Tile>,
    /// Content that a crash may destroy.
    pub durability: Durability,
    /// Number of nodes that commit together.
    pub nodes: u32,
}

/// The store's record of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobRecord {
    /// Layout of the definition.
    pub layout: Vec<u8>,
    /// Tiles of the definition.
    pub tiles: Vec<Tile>,
    /// Durability of the definition.
    pub durability: Durability,
    /// Nodes of the definition.
    pub nodes: u32,
    /// Durable generations: at most two, oldest first.
    pub generations: Vec<GenerationRecord>,
    /// With [`Durability::None`]: `false` after a crash, when the tiles are not valid.
    pub clean: bool,
}

/// One durable generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GenerationRecord {
    /// Number of the generation.
    pub generation: Generation,
    /// Whether it is known to be prepared on every node.
    pub confirmed: bool,
    /// Blobs of the local ranks.
    pub blobs: Vec<RankBlob>,
}

/// Blob that one rank gave to a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankBlob {
    /// The rank.
    pub rank: Rank,
    /// Content of the blob.
    pub blob: Vec<u8>,
}
