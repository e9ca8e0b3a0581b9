//! The contract between the daemon and a process, and nothing else.
//!
//! ```text
//!   process (client)                                            offloadd
//!   ────────────────                                            ────────
//!   proto::offload_client ── gRPC, offloadd.sock ─────────────▶ proto::offload_server      control
//!   handoff::receive      ◀─ SCM_RIGHTS, descriptor socket ──── handoff::send              once a session
//!   ring (producer)       ── submission ring + doorbell ──────▶ ring (consumer)            tile, slot, verb
//!   ring (consumer)       ◀─ completion ring + doorbell ─────── ring (producer)            ticket, typed result
//!   arena mapping         ◀═ payload, O_DIRECT by the kernel ═▶ arena mapping              bytes
//! ```
//!
//! Numbers that both sides need travel in the handshake (`OpenSessionReply`, [`ring::RingHeader`]). Rules that both sides
//! follow (the place of a slot, the bytes a checksum covers) are functions of this crate.

#![deny(unsafe_code)]
#![warn(missing_docs)]

pub mod checksum;
pub mod fault;
pub mod geometry;
pub mod handoff;
pub mod ids;
pub mod ring;
pub mod tile;

/// Generated from `proto/offload.proto`.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::too_many_lines)]
pub mod proto {
    tonic::include_proto!("offload.v1");
}

impl proto::JobRecord {
    /// Appends the next part of a record that is sent in parts (`DescribeJob`).
    pub fn append(&mut self, part: Self) {
        self.layout.extend(part.layout);
        self.tiles.extend(part.tiles);
        for generation in part.generations {
            match self.generations.last_mut() {
                Some(last) if last.generation == generation.generation => {
                    last.blobs.extend(generation.blobs);
                }
                _ => self.generations.push(generation),
            }
        }
    }
}

/// Version of the messages, the rings and the handoff, raised with every change of meaning. Other versions are refused.
///
/// 1. The first one.
/// 2. Tiles of a session's own, which no commit has.
/// 3. A submission says whether somebody waits for it.
/// 4. An operation in flight can become wanted, or less so.
/// 5. The daemon tells how far a read has come.
/// 6. The answer to a new session has bounds; its job's record comes in parts.
/// 7. Sessions know devices by their number in the store, and a refusal has the job's first fault.
pub const PROTOCOL_VERSION: u32 = 8;

/// Unit of tiles, slots and extents: the largest logical block that a supported drive may have.
pub const BLOCK_BYTES: u32 = 4096;

/// Most bytes of a commit's blob for one rank (step, RNG, next sample and so on).
pub const BLOB_BYTES_MAX: usize = 64 << 10;

/// Most bytes of a job's own description of its layout.
pub const LAYOUT_BYTES_MAX: usize = 16 << 20;

/// Most tiles of one job on one node. Bounds every table that is sized by a peer's request.
pub const TILES_MAX: usize = 1 << 20;

/// Most bytes of one gRPC message: the largest tile table (24 encoded bytes a tile) and layout fit.
pub const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// Most bytes of a tile: many must fit one registered piece of the arena.
pub const TILE_BYTES_MAX: u32 = 256 << 20;

/// Fewest operations in flight with which a process can train: one in each direction.
pub const IODEPTH_MIN: u32 = 2;

/// Most operations in flight of one session.
pub const IODEPTH_MAX: u32 = 1024;

/// Operations in flight of one session unless configured: enough to keep several drives busy with tiles of megabytes.
pub const IODEPTH_DEFAULT: u32 = 64;

/// Values of the setting `engine` of the daemon, and of a trainer for its private daemon. The first is the default.
pub const ENGINES: [&str; 4] = ["auto", "uring", "aio", "psync"];

/// Most devices of one store. Bounds every table with a row a device.
pub const DEVICES_MAX: u32 = 64;

/// Most bytes of the path of a daemon's socket: with `.fds` behind it, it must fit the 107 bytes of a unix socket's address.
pub const SOCKET_PATH_BYTES_MAX: usize = 103;
