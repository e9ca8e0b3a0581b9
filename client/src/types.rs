//! What a session is asked for and what it answers, in this crate's own words: no message type leaves the crate.

use std::path::PathBuf;

use crate::{Epoch, Generation, Rank, SlotClass};

/// What a process wants of a daemon.
#[derive(Clone, Debug)]
pub struct SessionSettings {
    /// The daemon's socket.
    pub socket: PathBuf,
    /// With the caller's uid it names the job: 1 to 128 of `[A-Za-z0-9._-]`.
    pub job: String,
    /// Of this process, over all nodes.
    pub rank: Rank,
    /// Ranks of the job on this node.
    pub local_ranks: u32,
    /// Slots wanted, by size.
    pub classes: Vec<SlotClass>,
    /// Operations wanted in flight; [`SessionInfo::iodepth`] says how many were granted. Some 8 MiB a drive and direction keep
    /// drives busy; of many more the slots leave the processor's cache, and each byte costs memory bandwidth several times.
    pub iodepth: u32,
}

/// What a session got.
#[derive(Clone, Debug)]
pub struct SessionInfo {
    /// The daemon's life.
    pub epoch: Epoch,
    /// The daemon's build, for people.
    pub build: String,
    /// How it moves bytes: "uring", "aio", "psync".
    pub engine: String,
    /// Why this one.
    pub engine_reason: String,
    /// By their numbers in this life of the daemon; with [`DeviceInfo::left`] those that have left the store since it began.
    pub devices: Vec<DeviceInfo>,
    /// Of this session.
    pub arena_bytes: u64,
    /// Operations granted in flight.
    pub iodepth: u32,
    /// Tiles are multiples of this.
    pub block_bytes: u32,
    /// Whether the arena stays in memory whatever the machine is short of.
    pub memory_locked: bool,
    /// What unlocked memory costs and the line that mends it; empty when locked.
    pub memory_note: String,
    /// What the store knew of the job when the session opened; `None` for a new job.
    pub job: Option<JobRecord>,
}

/// A device of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// File or block device.
    pub path: PathBuf,
    /// Logical block.
    pub block_bytes: u32,
    /// Room for tiles, manifests and definitions.
    pub data_bytes: u64,
    /// Of it, not reserved by any job.
    pub free_bytes: u64,
    /// Measured when the device was formatted; 0 is unknown.
    pub read_bytes_per_s: u64,
    /// Measured when the device was formatted; 0 is unknown.
    pub write_bytes_per_s: u64,
    /// It is of the store no more; completions of before may name it.
    pub left: bool,
}

/// What a tile holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TileKind {
    /// 16-bit parameters, fp32 in fp32 runs.
    Param,
    /// Residual, momentum and variance together.
    State,
    /// Gradients.
    Grad,
}

/// What a crash may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Durability {
    /// Two extents a tile, written out of place: the last committed generation survives.
    Committed,
    /// One extent, written in place: a crash loses the job's state.
    None,
}

/// One tile of a job. Its place in the job's list is its [`crate::TileIndex`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Unit it is part of.
    pub unit: u32,
    /// What it holds.
    pub kind: TileKind,
    /// First element, within the unit.
    pub elem_offset: u64,
    /// A multiple of [`SessionInfo::block_bytes`], padding included.
    pub tile_bytes: u32,
}

/// What a new job stores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobDefinition {
    /// The job's own description of what lies where. The daemon keeps it and does not look inside.
    pub layout: Vec<u8>,
    /// All tiles of this node.
    pub tiles: Vec<Tile>,
    /// What a crash may cost.
    pub durability: Durability,
    /// Nodes that commit together.
    pub nodes: u32,
}

/// What the store knows of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobRecord {
    /// As defined.
    pub layout: Vec<u8>,
    /// As defined.
    pub tiles: Vec<Tile>,
    /// As defined.
    pub durability: Durability,
    /// As defined.
    pub nodes: u32,
    /// At most two, oldest first.
    pub generations: Vec<GenerationRecord>,
    /// With [`Durability::None`]: `false` after a crash, the tiles are not to be trusted.
    pub clean: bool,
}

/// One durable generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GenerationRecord {
    /// Its number.
    pub generation: Generation,
    /// Whether it is known to be prepared on every node.
    pub confirmed: bool,
    /// One a local rank.
    pub blobs: Vec<RankBlob>,
}

/// What one rank gave to a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankBlob {
    /// Whose.
    pub rank: Rank,
    /// Its bytes.
    pub blob: Vec<u8>,
}
