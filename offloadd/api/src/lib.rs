//! What the daemon and a process agree on, and nothing else.
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
//! Numbers both sides need travel in the handshake (`OpenSessionReply`, [`ring::RingHeader`]); rules both sides
//! follow (where a slot lies, what a checksum covers) are functions here.

#![deny(unsafe_code)]
#![warn(missing_docs)]

pub mod checksum;
pub mod fault;
pub mod geometry;
pub mod handoff;
pub mod ids;
pub mod ring;

/// Generated from `proto/offload.proto`.
#[allow(missing_docs, unreachable_pub, clippy::all)]
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

/// Raised whenever a message, the rings or the handoff change their meaning. Other versions are refused by number.
pub const PROTOCOL_VERSION: u32 = 6;

/// Tiles, slots and extents are multiples of this: the largest logical block any drive we open may have.
pub const BLOCK_BYTES: u32 = 4096;

/// A commit's blob for one rank (step, RNG, next sample, ...) is at most this long.
pub const BLOB_BYTES_MAX: usize = 64 << 10;

/// A job's own layout description is at most this long.
pub const LAYOUT_BYTES_MAX: usize = 16 << 20;

/// Tiles of one job on one node; bounds every table that is sized by a peer's request.
pub const TILES_MAX: usize = 1 << 20;

/// One gRPC message: the largest tile table (24 encoded bytes a tile) and layout fit.
pub const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// A tile is at most this long: it must fit one registered piece of the arena many times over.
pub const TILE_BYTES_MAX: u32 = 256 << 20;

/// Operations in flight that a process which trains cannot do without: one each way.
pub const IODEPTH_MIN: u32 = 2;

/// Operations in flight of one session.
pub const IODEPTH_MAX: u32 = 1024;

/// Operations in flight of one session, where the settings do not say: what several drives need to be busy with tiles of
/// megabytes.
pub const IODEPTH_DEFAULT: u32 = 64;

/// Values of the setting `engine`, of the daemon and of a trainer whose private daemon gets it. The first is the default.
pub const ENGINES: [&str; 4] = ["auto", "uring", "aio", "psync"];

/// Devices of one store. Bounds every table with a line a device.
pub const DEVICES_MAX: u32 = 64;

/// Bytes of the path of a daemon's socket: with `.fds` behind it, it must fit the 107 bytes of a unix socket's address.
pub const SOCKET_PATH_BYTES_MAX: usize = 103;
