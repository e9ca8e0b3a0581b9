//! What goes to which device next, and in what pieces. A core: no clock, thread or file.
//!
//! ```text
//!                      each device, each way
//!   push(Io, urgency) ──▶ wanted ──┐   pieces, while the
//!                         ahead ───┴─▶ window has room ──start──▶ engine ──ended──▶ the whole operation, once
//!   flushes ─────────────────────────────────────────────▶ at once
//! ```
//!
//! **Order.** Users take turns by bytes, each in proportion to its share, and so do the jobs of a user; the sessions of a job
//! have equal parts. What one does not want is the others'. Of a job, what somebody waits for goes before what is moved ahead of its
//! use; of [`TURNS`] pieces one is of the latter, so that it progresses whatever comes. Within a session, first come first
//! served. The daemon's records go first; tiles that move to another device have an eighth of the smallest share that waits.
//! **Ways.** Reads and writes of a device have windows of their own: drives do both at the same time, and neither can fill
//! the place of the other.
//! **Windows** are as short as keeps the device busy ([`DeviceLimits`]): what is in the kernel cannot be overtaken. Beside a
//! job that asks for little they are shorter, and pieces too, so that it hardly waits ([`interference`]).
//! **Pieces.** A large operation is cut into pieces the device takes as one request; they are in flight together and end as
//! one. The first that fails or is short, by its place, fails the whole, and what was not handed over stays here.
//!
//! **Bound.** As many operations as the core has in flight, which its limits bound; pieces only while they are handed over.
//! A drive of 3.2 GB/s takes 3,200 pieces of 1 MiB a second; beside one who reads small tiles one by one they are four to the
//! time in which it answers, 40,000 a second where that is 100 us. Each passes here in some hundred nanoseconds.

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
pub use direction::{INFLIGHT_COUNT_MAX, TURNS};
pub use limits::DeviceLimits;
pub use owner::Owner;

/// All devices' queues.
#[derive(Debug)]
pub struct Queue {
    devices: Vec<Device>,
    wholes: Vec<Option<Whole>>,
    /// Where the operation of an id is among them.
    places: HashMap<IoId, usize>,
    free: Vec<usize>,
    flushes: VecDeque<usize>,
    /// Not handed over, or not all of it.
    waiting_count: usize,
}

#[derive(Debug)]
struct Device {
    piece_bytes: u32,
    /// Reads, writes.
    directions: [Direction; 2],
}

impl Device {
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

/// An operation as the core knows it.
#[derive(Debug)]
struct Whole {
    io: Io,
    owner: Owner,
    urgency: Priority,
    /// Settled when the first one is handed over.
    piece_bytes: u32,
    /// From its start, handed over.
    cut_bytes: u32,
    inflight_count: u32,
    /// The failure nearest to its start: where its piece begins, and what became of that.
    failed: Option<(u32, Result<u32, i32>)>,
    /// Since its first piece was handed over.
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

    /// The next piece, known to the engine by `place` and where it begins.
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
            // Never cut.
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
    /// Empty queues, one a device in the store's order.
    pub fn new(devices: &[DeviceLimits]) -> Self {
        Self {
            devices: devices.iter().map(Device::new).collect(),
            wholes: Vec::new(),
            places: HashMap::new(),
            free: Vec::new(),
            flushes: VecDeque::new(),
            waiting_count: 0,
        }
    }

    /// One more device, behind the others.
    pub fn add(&mut self, limits: &DeviceLimits) {
        self.devices.push(Device::new(limits));
    }

    /// A device was measured again: what is in flight stays, what comes goes by these.
    pub fn set_limits(&mut self, device: DeviceIndex, limits: &DeviceLimits) {
        let directions = self.devices[device.0 as usize].directions.iter_mut();
        for (index, direction) in directions.enumerate() {
            direction.set_limits(limits.window_bytes[index], limits.bytes_per_s[index]);
        }
    }

    /// Pieces that may be in an engine at a time, beside `flushes_max` flushes.
    pub fn inflight_max(device_count: usize, flushes_max: usize) -> usize {
        device_count * 2 * INFLIGHT_COUNT_MAX + flushes_max
    }

    /// Takes an operation.
    pub fn push(&mut self, io: Io, urgency: Priority, owner: Owner) {
        let place = self.free.pop().unwrap_or_else(|| {
            self.wholes.push(None);
            self.wholes.len() - 1
        });
        let (device, op, bytes) = (io.device, io.op, io.bytes);
        let before = self.places.insert(io.id, place);
        assert_eq!(before, None, "{:?} is in flight already", io.id);
        let piece_bytes = match io.memory {
            Memory::Arena { .. } => self.devices[device.0 as usize].piece_bytes,
            // The daemon's own structures: pieces of some megabytes already.
            Memory::Meta(_) | Memory::None => u32::MAX,
        };
        self.wholes[place] = Some(Whole {
            io,
            owner,
            urgency,
            piece_bytes,
            cut_bytes: 0,
            inflight_count: 0,
            failed: None,
            since: None,
            retried_count: 0,
        });
        self.waiting_count += 1;
        match self.direction(device, op) {
            Some(direction) => direction.push(place, urgency, owner, bytes),
            None => self.flushes.push_back(place),
        }
    }

    /// Gives an operation another urgency: its pieces that still wait go with those of that class, behind them. One that was
    /// handed over or has ended stays as it is. Costs the same whatever waits.
    pub fn urge(&mut self, io: IoId, urgency: Priority) {
        let Some(&place) = self.places.get(&io) else {
            return;
        };
        let whole = self.wholes[place].as_mut().expect("known by its id");
        let before = std::mem::replace(&mut whole.urgency, urgency);
        if before == urgency || !whole.waits() {
            return;
        }
        let (device, op, owner) = (whole.io.device, whole.io.op, whole.owner);
        if let Some(direction) = self.direction(device, op) {
            direction.urge(place, urgency, owner);
        }
    }

    /// Hands over all the devices have room for.
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
                        // Anew each time it is looked at: who was beside it then may be gone.
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
        let (device, op, urgency) = (whole.io.device, whole.io.op, whole.urgency);
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
            direction.take_back(owner, urgency, piece.id, asked_bytes, took_ns);
            if gives_up {
                direction.discard_unreadable(place, urgency, owner, uncut_bytes);
            }
        }
        self.waiting_count -= usize::from(gives_up);
        if !done {
            return None;
        }
        let whole = self.wholes[place].take().expect("just seen");
        self.free.push(place);
        self.places.remove(&id);
        let since = whole.since.expect("it was handed over");
        Some(IoDone {
            id,
            outcome: match whole.failed {
                None => Ok(whole.io.bytes),
                // As one operation would say: so much is there, from its start on.
                Some((at, Ok(moved))) => Ok(at + moved),
                Some((_, Err(errno))) => Err(errno),
            },
            device_ns: now.saturating_duration_since(since).as_nanos() as u64,
            memory: piece.memory,
            retried_count: whole.retried_count,
        })
    }

    /// Operations taken and not given back.
    pub fn count(&self) -> usize {
        self.wholes.len() - self.free.len()
    }

    /// A flush has no way: nothing is before or behind it.
    fn direction(&mut self, device: DeviceIndex, op: IoOp) -> Option<&mut Direction> {
        let directions = &mut self.devices[device.0 as usize].directions;
        match op {
            IoOp::Read => Some(&mut directions[0]),
            IoOp::Write => Some(&mut directions[1]),
            IoOp::Flush => None,
        }
    }
}
