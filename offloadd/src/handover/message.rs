//! The message with which a daemon hands over what its store does not contain. Unchecked: [`crate::core::Core::adopt`] checks
//! every field.

/// The whole message.
#[derive(Clone, PartialEq, prost::Message)]
pub struct HandoverState {
    /// Id of the store.
    #[prost(bytes = "vec", tag = "1")]
    pub store: Vec<u8>,
    /// Epoch of the daemon; entries in the rings name it.
    #[prost(uint64, tag = "2")]
    pub epoch: u64,
    /// Jobs in use.
    #[prost(message, repeated, tag = "4")]
    pub jobs: Vec<HandoverJob>,
    /// Sessions of all jobs.
    #[prost(message, repeated, tag = "5")]
    pub sessions: Vec<HandoverSession>,
    /// Random number of this hand-over, which the names of its descriptors contain.
    #[prost(uint32, tag = "6")]
    pub handover: u32,
    /// Sequence of the store's catalog, which each incarnation of a daemon raises before it serves.
    #[prost(uint64, tag = "7")]
    pub catalog: u64,
    /// Whether a write of the next catalog failed, so that the devices may hold it.
    #[prost(bool, tag = "8")]
    pub catalog_unsure: bool,
}

/// A job in use.
#[derive(Clone, PartialEq, prost::Message)]
pub struct HandoverJob {
    /// Owner.
    #[prost(uint32, tag = "1")]
    pub uid: u32,
    /// Name of the job among its owner's jobs.
    #[prost(string, tag = "2")]
    pub name: String,
    /// State on the devices; absent before the job has tiles.
    #[prost(message, optional, tag = "3")]
    pub stored: Option<HandoverJobState>,
    /// Ranks on this node.
    #[prost(uint32, tag = "4")]
    pub local_ranks: u32,
    /// Generation resumed from; absent before.
    #[prost(uint64, optional, tag = "5")]
    pub resumed: Option<u64>,
    /// Working generation.
    #[prost(uint64, tag = "6")]
    pub working: u64,
    /// Whether the newest generation is not prepared on every node.
    #[prost(bool, tag = "7")]
    pub awaiting_confirm: bool,
    /// Why nothing can become durable until the job resumes.
    #[prost(message, optional, tag = "8")]
    pub poison: Option<HandoverFault>,
    /// Why a member left.
    #[prost(message, optional, tag = "9")]
    pub gone: Option<HandoverFault>,
    /// Numbers of devices written to since the last commit.
    #[prost(uint32, repeated, tag = "10")]
    pub touched: Vec<u32>,
    /// Tiles written since the last commit, by index.
    #[prost(message, repeated, tag = "11")]
    pub tiles: Vec<HandoverTile>,
}

/// State of a job that the devices must have for the hand-over to be valid.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct HandoverJobState {
    /// Id in the store, never reused.
    #[prost(uint64, tag = "1")]
    pub job_id: u64,
    /// Revision of the job's table.
    #[prost(uint32, tag = "2")]
    pub revision: u32,
    /// Newest generation; 0 if none.
    #[prost(uint64, tag = "3")]
    pub newest: u64,
    /// Epoch of the daemon that wrote it.
    #[prost(uint64, tag = "4")]
    pub newest_epoch: u64,
}

/// A tile written since the last commit.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct HandoverTile {
    /// Index in the job's table.
    #[prost(uint32, tag = "1")]
    pub index: u32,
    /// The last successful write.
    #[prost(message, optional, tag = "2")]
    pub written: Option<HandoverWrite>,
    /// Whether the last write failed.
    #[prost(bool, tag = "3")]
    pub failed: bool,
}

/// Result of a write.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct HandoverWrite {
    /// Index of the extent, 0 or 1; 0 for a scratch tile.
    #[prost(uint32, tag = "1")]
    pub which: u32,
    /// Checksum of the tile.
    #[prost(uint32, tag = "2")]
    pub checksum: u32,
    /// Working generation at the time.
    #[prost(uint64, tag = "3")]
    pub generation: u64,
    /// Number of the device.
    #[prost(uint32, tag = "4")]
    pub device: u32,
    /// First byte on the device.
    #[prost(uint64, tag = "5")]
    pub offset: u64,
}

/// A session of a job.
#[derive(Clone, PartialEq, prost::Message)]
pub struct HandoverSession {
    /// Number that the names of its descriptors contain.
    #[prost(uint64, tag = "1")]
    pub number: u64,
    /// Index of its job.
    #[prost(uint32, tag = "2")]
    pub job: u32,
    /// Rank over all nodes.
    #[prost(uint32, tag = "3")]
    pub rank: u32,
    /// Process id, for messages.
    #[prost(uint32, tag = "4")]
    pub pid: u32,
    /// Token of the session.
    #[prost(bytes = "vec", tag = "5")]
    pub token: Vec<u8>,
    /// Slot classes of its arena.
    #[prost(message, repeated, tag = "6")]
    pub classes: Vec<HandoverClass>,
    /// Operations granted in flight.
    #[prost(uint32, tag = "7")]
    pub iodepth: u32,
    /// Whether tiles can be read and written.
    #[prost(bool, tag = "8")]
    pub resumed: bool,
    /// Submissions taken from its ring; the process could change the ring's own index.
    #[prost(uint32, tag = "9")]
    pub submission_head: u32,
    /// Completions put into its ring.
    #[prost(uint32, tag = "10")]
    pub completion_tail: u32,
    /// Scratch tiles.
    #[prost(message, repeated, tag = "11")]
    pub scratch: Vec<Scratch>,
}

/// A number of slots with equal size.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct HandoverClass {
    /// Size of a slot.
    #[prost(uint64, tag = "1")]
    pub slot_bytes: u64,
    /// Number of slots.
    #[prost(uint32, tag = "2")]
    pub slot_count: u32,
}

/// A scratch tile of a session.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Scratch {
    /// Number of the device.
    #[prost(uint32, tag = "1")]
    pub device: u32,
    /// First byte on the device.
    #[prost(uint64, tag = "2")]
    pub offset: u64,
    /// Length of the tile.
    #[prost(uint32, tag = "3")]
    pub bytes: u32,
    /// The last write; absent if there was none or it failed.
    #[prost(message, optional, tag = "4")]
    pub written: Option<HandoverWrite>,
}

/// Why something fails from now on.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct HandoverFault {
    /// A `FaultKind` as a number.
    #[prost(uint32, tag = "1")]
    pub kind: u32,
    /// Message for people.
    #[prost(string, tag = "2")]
    pub message: String,
}
