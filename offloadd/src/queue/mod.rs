//! Chooses which operations go to each device next, and in what pieces. A core: no clock, thread or file.
//!
//! ```text
//!                    each device, each direction
//!   push(Io, priority) ──▶ demand ───┐   pieces, while the
//!                          prefetch ─┴─▶ window has room ──start──▶ engine ──ended──▶ the whole operation, once
//!   flushes ─────────────────────────────────────────────▶ immediately
//! ```
//!
//! **Order.** Users take turns, counted in bytes and in proportion to their weights; so do a user's jobs. The sessions of a job
//! have equal parts. A turn that is not used is not saved up. Within a job, operations of [`Priority::Demand`] go before those
//! of [`Priority::Prefetch`], except that one of [`TURNS`] pieces is a prefetch, so that prefetches always progress. Within a
//! session, the oldest goes first. The daemon's own records have the largest weight; they are few and short, so they hardly
//! wait. Tiles that move between devices have an eighth of the smallest weight that is waiting.
//!
//! **Directions.** Reads and writes of a device have separate windows: drives do both at the same time, and neither can take
//! the place of the other.
//!
//! **Windows** are as short as keeps the device busy ([`DeviceLimits`]), because an operation that the kernel has cannot be
//! overtaken. Beside a job that asks for little, windows and pieces are shorter, so that it hardly waits ([`interference`]).
//!
//! **Pieces.** A large operation is cut into pieces that the device takes as one request; they are in flight together and end
//! as one. The first piece, by offset, that fails or is short fails the operation, and its other pieces are not handed over.
//!
//! **Bounds.** The core bounds the operations here; pieces exist only while in flight. A drive of 3.2 GB/s takes 3,200 pieces
//! of 1 MiB a second. Beside a process that reads small tiles one by one, four pieces fit into the time in which the drive
//! answers: at 100 us, 40,000 a second. Each takes some hundred nanoseconds here.

mod answer;
mod direction;
mod fair;
mod interference;
mod limits;
mod owner;

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use offload_api::ids::DeviceIndex;
use offload_api::ring::entry::Priority;

use crate::engine::{Io, IoDone, Memory};
use crate::io::{IoId, IoOp};

use direction::Direction;
pub use direction::INFLIGHT_COUNT_MAX;
pub use limits::DeviceLimits;
pub use owner::{Owner, TURNS};

/// Queues of all devices.
#[derive(Debug)]
pub struct Queue {
    devices: Vec<DeviceQueue>,
    wholes: Vec<Option<Whole>>,
    /// Place of each operation in `wholes`.
    indices: HashMap<IoId, usize>,
    free: Vec<usize>,
    flushes: VecDeque<usize>,
    /// Operations of which something is not handed over yet.
    waiting_count: usize,
}

#[derive(Debug)]
struct DeviceQueue {
    piece_bytes: u32,
    /// Reads and writes.
    directions: [Direction; 2],
}

impl DeviceQueue {
    fn new(limits: &DeviceLimits) -> Self {
        Self {
            piece_bytes: limits.piece_bytes,
            directions: [0, 1].map(|direction| {
                Direction::new(
                    limits.window_bytes[direction],
                    limits.bytes_per_s[direction],
                )
            }),
        }
    }
}

/// An operation of the core.
#[derive(Debug)]
struct Whole {
    io: Io,
    owner: Owner,
    priority: Priority,
    /// Set when the first piece is handed over.
    piece_bytes: u32,
    /// Bytes handed over, from the start.
    cut_bytes: u32,
    inflight_count: u32,
    /// Failure with the lowest offset: start of the piece, and its outcome.
    failed: Option<(u32, Result<u32, i32>)>,
    /// Time when the first piece was handed over.
    since: Option<Instant>,
    retried_count: u32,
}

impl Whole {
    fn ended(&self) -> bool {
        self.inflight_count == 0 && self.since.is_some() && !self.waits()
    }

    fn waits(&self) -> bool {
        self.failed.is_none() && (self.cut_bytes < self.io.bytes || self.since.is_none())
    }

    fn piece_bytes_at(&self, at: u32) -> u32 {
        (self.io.bytes - at).min(self.piece_bytes)
    }

    /// Cuts the next piece. The engine knows it by `place` and its offset within the operation.
    fn cut(&mut self, place: usize, now: Instant) -> Io {
        let at = self.cut_bytes;
        let bytes = self.piece_bytes_at(at);
        let memory = match &self.io.memory {
            Memory::Arena {
                arena,
                offset,
                piece,
            } => Memory::Arena {
                arena: arena.clone(),
                offset: offset + u64::from(at),
                piece: *piece,
            },
            // Such memory is never cut.
            Memory::Meta(_) | Memory::None => std::mem::replace(&mut self.io.memory, Memory::None),
        };
        self.cut_bytes += bytes;
        self.inflight_count += 1;
        self.since.get_or_insert(now);
        Io {
            id: IoId((place as u64) << 32 | u64::from(at)),
            device: self.io.device,
            op: self.io.op,
            offset: self.io.offset + u64::from(at),
            bytes,
            memory,
        }
    }
}

impl Queue {
    /// Makes empty queues, one a device in the store's order.
    pub fn new(devices: &[DeviceLimits]) -> Self {
        Self {
            devices: devices.iter().map(DeviceQueue::new).collect(),
            wholes: Vec::new(),
            indices: HashMap::new(),
            free: Vec::new(),
            flushes: VecDeque::new(),
            waiting_count: 0,
        }
    }

    /// Adds a device, behind the others.
    pub fn add(&mut self, limits: &DeviceLimits) {
        self.devices.push(DeviceQueue::new(limits));
    }

    /// Most operations in an engine at a time, with up to `flushes_max` flushes.
    pub fn inflight_max(device_count: usize, flushes_max: usize) -> usize {
        device_count * 2 * INFLIGHT_COUNT_MAX + flushes_max
    }

    /// Queues an operation.
    pub fn push(&mut self, io: Io, priority: Priority, owner: Owner) {
        let place = self.free.pop().unwrap_or_else(|| {
            self.wholes.push(None);
            self.wholes.len() - 1
        });
        let (device, op, bytes) = (io.device, io.op, io.bytes);
        let before = self.indices.insert(io.id, place);
        assert_eq!(before, None, "{:?} is in flight already", io.id);
        let piece_bytes = match io.memory {
            Memory::Arena { .. } => self.devices[device.0 as usize].piece_bytes,
            // The daemon's own structures already come in pieces of some megabytes.
            Memory::Meta(_) | Memory::None => u32::MAX,
        };
        self.wholes[place] = Some(Whole {
            io,
            owner,
            priority,
            piece_bytes,
            cut_bytes: 0,
            inflight_count: 0,
            failed: None,
            since: None,
            retried_count: 0,
        });
        self.waiting_count += 1;
        match self.direction(device, op) {
            Some(direction) => direction.push(place, priority, owner, bytes),
            None => self.flushes.push_back(place),
        }
    }

    /// Changes the priority of an operation: its pieces that wait go behind those of the new priority. Does nothing for one
    /// that was handed over or has ended. Takes constant time.
    pub fn promote(&mut self, io: IoId, priority: Priority) {
        let Some(&place) = self.indices.get(&io) else {
            return;
        };
        let whole = self.wholes[place].as_mut().expect("known by its id");
        let before = std::mem::replace(&mut whole.priority, priority);
        if before == priority || !whole.waits() {
            return;
        }
        let (device, op, owner) = (whole.io.device, whole.io.op, whole.owner);
        if let Some(direction) = self.direction(device, op) {
            direction.promote(place, priority, owner);
        }
    }

    /// Hands over as many pieces as the devices have room for.
    pub fn start(&mut self, now: Instant, pieces: &mut Vec<Io>) {
        if self.waiting_count == 0 {
            return;
        }
        while let Some(place) = self.flushes.pop_front() {
            let whole = self.wholes[place].as_mut().expect("it waits");
            pieces.push(whole.cut(place, now));
            self.waiting_count -= 1;
        }
        for device in &mut self.devices {
            for direction in &mut device.directions {
                while let Some(next) = direction.next() {
                    let whole = self.wholes[next.place].as_mut().expect("it waits");
                    if whole.since.is_none() && matches!(whole.io.memory, Memory::Arena { .. }) {
                        // Computed again each time, because jobs beside it come and go.
                        whole.piece_bytes = device.piece_bytes.min(direction.piece_bytes_max(next));
                    }
                    if !direction.has_room(next, whole.piece_bytes_at(whole.cut_bytes)) {
                        break;
                    }
                    let piece = whole.cut(next.place, now);
                    let last = !whole.waits();
                    direction.hand_over(next, piece.id, piece.bytes, last);
                    self.waiting_count -= usize::from(last);
                    pieces.push(piece);
                }
            }
        }
    }

    /// Takes a piece that has ended. Returns the whole operation with its last piece.
    pub fn ended(&mut self, piece: IoDone, now: Instant) -> Option<IoDone> {
        let (place, at) = ((piece.id.0 >> 32) as usize, piece.id.0 as u32);
        let whole = self.wholes[place]
            .as_mut()
            .expect("a piece of an operation");
        let asked_bytes = whole.piece_bytes_at(at);
        let (device, op, priority) = (whole.io.device, whole.io.op, whole.priority);
        let (owner, uncut_bytes) = (whole.owner, whole.io.bytes - whole.cut_bytes);
        let waited = whole.waits();
        whole.inflight_count -= 1;
        whole.retried_count += piece.retried_count;
        let first = whole.failed.is_none_or(|(before, _)| at < before);
        if piece.outcome != Ok(asked_bytes) && first {
            whole.failed = Some((at, piece.outcome));
        }
        let gives_up = waited && !whole.waits();
        let (id, done) = (whole.io.id, whole.ended());
        if let Some(direction) = self.direction(device, op) {
            let took_ns = (piece.outcome == Ok(asked_bytes)).then_some(piece.device_ns);
            direction.take_back(owner, priority, piece.id, asked_bytes, took_ns);
            if gives_up {
                direction.abandon(place, priority, owner, uncut_bytes);
            }
        }
        self.waiting_count -= usize::from(gives_up);
        if !done {
            return None;
        }
        let whole = self.wholes[place].take().expect("just seen");
        self.free.push(place);
        self.indices.remove(&id);
        let since = whole.since.expect("it was handed over");
        Some(IoDone {
            id,
            outcome: match whole.failed {
                None => Ok(whole.io.bytes),
                // One operation would give the same answer: the bytes moved from its start.
                Some((at, Ok(moved))) => Ok(at + moved),
                Some((_, Err(errno))) => Err(errno),
            },
            device_ns: now.saturating_duration_since(since).as_nanos() as u64,
            memory: piece.memory,
            retried_count: whole.retried_count,
        })
    }

    /// Operations queued and not ended.
    pub fn count(&self) -> usize {
        self.wholes.len() - self.free.len()
    }

    /// Flushes are not queued.
    fn direction(&mut self, device: DeviceIndex, op: IoOp) -> Option<&mut Direction> {
        let directions = &mut self.devices[device.0 as usize].directions;
        match op {
            IoOp::Read => Some(&mut directions[0]),
            IoOp::Write => Some(&mut directions[1]),
            IoOp::Flush => None,
        }
    }
}
