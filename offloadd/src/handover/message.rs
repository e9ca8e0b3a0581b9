//! What a daemon knows beyond its store, as a message to the next one. Unchecked: [`crate::core::Core::adopt`] looks at
//! every field.

/// No device has this number.
pub const NO_DEVICE: u32 = u32::MAX;

/// All of it.
#[derive(Clone, PartialEq, prost::Message)]
pub struct State {
    /// Of the store it belongs to.
    #[prost(bytes = "vec", tag = "1")]
    pub store: Vec<u8>,
    /// The life that goes on: entries in the rings name it.
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
    /// Numbers of the store's devices, in the order that sessions were told; [`NO_DEVICE`] where one left or never came.
    #[prost(uint32, repeated, tag = "3")]
    pub devices: Vec<u32>,
    /// That somebody uses.
    #[prost(message, repeated, tag = "4")]
    pub jobs: Vec<Job>,
    /// Of all of them.
    #[prost(message, repeated, tag = "5")]
    pub sessions: Vec<Session>,
    /// Drawn for this hand-over: its descriptors have it in their names.
    #[prost(uint32, tag = "6")]
    pub handover: u32,
    /// Number of the store's catalog: each life of a daemon writes another one before it serves.
    #[prost(uint64, tag = "7")]
    pub catalog: u64,
    /// The devices may have the one after it: its write failed.
    #[prost(bool, tag = "8")]
    pub catalog_unsure: bool,
}

/// A job in use.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Job {
    /// Its owner.
    #[prost(uint32, tag = "1")]
    pub uid: u32,
    /// With `uid` it names the job.
    #[prost(string, tag = "2")]
    pub name: String,
    /// In the store; absent before it has tiles.
    #[prost(message, optional, tag = "3")]
    pub stored: Option<Stored>,
    /// On this node.
    #[prost(uint32, tag = "4")]
    pub local_ranks: u32,
    /// The generation gone on from; absent before somebody resumed.
    #[prost(uint64, optional, tag = "5")]
    pub resumed: Option<u64>,
    /// What is being written.
    #[prost(uint64, tag = "6")]
    pub working: u64,
    /// The newest one is not prepared everywhere.
    #[prost(bool, tag = "7")]
    pub awaiting_confirm: bool,
    /// Nothing can be made durable any more, and why.
    #[prost(message, optional, tag = "8")]
    pub poison: Option<Fault>,
    /// A member went, and who.
    #[prost(message, optional, tag = "9")]
    pub gone: Option<Fault>,
    /// Numbers of devices written to since the last commit.
    #[prost(uint32, repeated, tag = "10")]
    pub touched: Vec<u32>,
    /// Those that were written since, by index.
    #[prost(message, repeated, tag = "11")]
    pub tiles: Vec<Tile>,
}

/// What ties a job to what the devices say.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Stored {
    /// Unique for ever in its store.
    #[prost(uint64, tag = "1")]
    pub job_id: u64,
    /// Of its table.
    #[prost(uint32, tag = "2")]
    pub revision: u32,
    /// 0: none yet.
    #[prost(uint64, tag = "3")]
    pub newest: u64,
    /// Of the life that wrote it.
    #[prost(uint64, tag = "4")]
    pub newest_epoch: u64,
}

/// A tile that was written since the last commit.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Tile {
    /// In the job's table.
    #[prost(uint32, tag = "1")]
    pub index: u32,
    /// The last write that went well.
    #[prost(message, optional, tag = "2")]
    pub written: Option<Written>,
    /// The last write did not.
    #[prost(bool, tag = "3")]
    pub failed: bool,
}

/// What a write left.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Written {
    /// Of the tile's two extents; of a session's own tiles 0.
    #[prost(uint32, tag = "1")]
    pub which: u32,
    /// Of all its bytes.
    #[prost(uint32, tag = "2")]
    pub checksum: u32,
    /// While this was the working one.
    #[prost(uint64, tag = "3")]
    pub generation: u64,
    /// Number of the device.
    #[prost(uint32, tag = "4")]
    pub device: u32,
    /// From its start.
    #[prost(uint64, tag = "5")]
    pub offset: u64,
}

/// One process of a job.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Session {
    /// Its descriptors have it in their names.
    #[prost(uint64, tag = "1")]
    pub number: u64,
    /// Index of its job.
    #[prost(uint32, tag = "2")]
    pub job: u32,
    /// Over all nodes.
    #[prost(uint32, tag = "3")]
    pub rank: u32,
    /// For messages.
    #[prost(uint32, tag = "4")]
    pub pid: u32,
    /// It knows no other key.
    #[prost(bytes = "vec", tag = "5")]
    pub token: Vec<u8>,
    /// Of its arena.
    #[prost(message, repeated, tag = "6")]
    pub classes: Vec<Class>,
    /// Granted.
    #[prost(uint32, tag = "7")]
    pub iodepth: u32,
    /// Tiles can be read and written.
    #[prost(bool, tag = "8")]
    pub resumed: bool,
    /// Submissions taken from its ring: the process can rewrite what stands in there.
    #[prost(uint32, tag = "9")]
    pub submission_head: u32,
    /// Completions put.
    #[prost(uint32, tag = "10")]
    pub completion_tail: u32,
    /// Tiles of its own.
    #[prost(message, repeated, tag = "11")]
    pub scratch: Vec<Scratch>,
}

/// Slots of equal size.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Class {
    /// Of each.
    #[prost(uint64, tag = "1")]
    pub slot_bytes: u64,
    /// How many.
    #[prost(uint32, tag = "2")]
    pub slot_count: u32,
}

/// One of a session's own tiles.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Scratch {
    /// Number of the device.
    #[prost(uint32, tag = "1")]
    pub device: u32,
    /// From its start.
    #[prost(uint64, tag = "2")]
    pub offset: u64,
    /// Of the tile.
    #[prost(uint32, tag = "3")]
    pub bytes: u32,
    /// Absent: never, or the last write failed.
    #[prost(message, optional, tag = "4")]
    pub written: Option<Written>,
}

/// Why something fails from now on.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Fault {
    /// A `FaultKind` as a number.
    #[prost(uint32, tag = "1")]
    pub kind: u32,
    /// For people.
    #[prost(string, tag = "2")]
    pub message: String,
}
