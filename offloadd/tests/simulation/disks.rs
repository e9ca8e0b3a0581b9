//! Disks in memory with the faults of real ones: they execute operations in any order and report their ends in another, fail, move too few bytes,
//! lose or misdirect writes silently, and lose unflushed sectors when the power goes or a flush fails. The flush after a failed one succeeds and does
//! not report the loss. A seed determines everything.
//!
//! Tests drive the core with these disks, one event at a time. A flush of one device does not flush another.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use offload_api::ids::DeviceIndex;
use test_hooks::random::{SECTOR_BYTES, SimRandom};

use offloadd::blocks::{BlockError, BlockErrorCause, Blocks};
use offloadd::io::{AlignedBytes, Buffer, IoId, IoOp, IoResult, SessionId};

/// Fault of a disk in place of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SimFault {
    /// Returns an errno and moves nothing.
    Errno(i32),
    /// Moves the first half and reports that. A flush returns EIO.
    Short,
    /// A flush returns EIO, and all unflushed bytes are lost. Other operations succeed.
    FlushLost,
    /// Reports a write as done that did not happen. Other operations succeed.
    Lost,
    /// Writes this many bytes further on and reports success. Other operations succeed.
    Misdirected(u64),
    /// Writes return ENOSPC. Other operations succeed.
    Full,
    /// Behaves like a drive that was pulled out: reads move nothing, other operations return EIO.
    Gone,
}

impl SimFault {
    /// Whether the fault affects operations of this kind.
    fn meets(self, op: IoOp) -> bool {
        match self {
            Self::Errno(_) | Self::Short | Self::Gone => true,
            Self::FlushLost => op == IoOp::Flush,
            Self::Lost | Self::Misdirected(_) | Self::Full => op == IoOp::Write,
        }
    }
}

/// When a fault happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SimFaultPlan {
    /// Number of the operation, over all devices, from 0.
    pub(crate) at: u64,
    /// Whether all later operations have the fault too.
    pub(crate) for_good: bool,
    /// Kind of fault.
    pub(crate) fault: SimFault,
}

#[derive(Clone)]
struct SimDevice {
    path: String,
    /// Bytes that a read returns.
    live: Vec<u8>,
    /// Bytes that survive a power cut.
    durable: Vec<u8>,
    /// Unflushed writes, in order.
    unflushed: Vec<(u64, Vec<u8>)>,
    /// Permanent fault of the disk.
    broken: Option<SimFault>,
    /// Ranges whose reads return EIO until they are written.
    unreadable: Vec<Range<u64>>,
}

/// A set of simulated disks.
#[derive(Clone)]
pub(crate) struct SimDisks {
    devices: Vec<SimDevice>,
    /// Number of disks ever made: each has a name of its own.
    made_count: usize,
    operation_count: u64,
    /// The planned fault.
    pub(crate) plan: Option<SimFaultPlan>,
    /// Faults that happened, with their number.
    pub(crate) happened: BTreeMap<SimFault, u64>,
}

/// Chances of losing a sector, from "everything is kept" through "half" to "nothing".
const LOST_IN_16: [usize; 5] = [0, 1, 8, 15, 16];

impl SimDevice {
    /// Fails a flush: each unflushed sector stays unflushed or is lost, and reads then return the durable bytes there.
    fn fail_flush(&mut self, lost_in_16: usize, random: &mut SimRandom) {
        let unflushed = std::mem::take(&mut self.unflushed);
        for (offset, bytes) in &unflushed {
            let range = *offset as usize..*offset as usize + bytes.len();
            self.live[range.clone()].copy_from_slice(&self.durable[range]);
        }
        for (offset, bytes) in unflushed {
            for (index, sector) in bytes.chunks(SECTOR_BYTES).enumerate() {
                if random.below(16) >= lost_in_16 {
                    let at = offset as usize + index * SECTOR_BYTES;
                    self.live[at..at + sector.len()].copy_from_slice(sector);
                    self.unflushed.push((at as u64, sector.to_vec()));
                }
            }
        }
    }
}

impl SimDisks {
    /// Makes disks of these sizes, all zeros.
    pub(crate) fn new(sizes_bytes: &[u64]) -> Self {
        let mut disks = Self {
            devices: Vec::new(),
            made_count: 0,
            operation_count: 0,
            plan: None,
            happened: BTreeMap::new(),
        };
        for &bytes in sizes_bytes {
            disks.add(bytes);
        }
        disks
    }

    /// Adds a disk of zeros. Returns its position.
    pub(crate) fn add(&mut self, bytes: u64) -> usize {
        self.devices.push(SimDevice {
            path: format!("sim{}", self.made_count),
            live: vec![0; bytes as usize],
            durable: vec![0; bytes as usize],
            unflushed: Vec::new(),
            broken: None,
            unreadable: Vec::new(),
        });
        self.made_count += 1;
        self.devices.len() - 1
    }

    /// Returns the number of operations so far, to plan the next fault.
    pub(crate) fn operation_count(&self) -> u64 {
        self.operation_count
    }

    /// Executes one operation, or fails it, at once.
    pub(crate) fn apply(
        &mut self,
        op: IoOp,
        position: usize,
        offset: u64,
        memory: &mut [u8],
    ) -> Result<u32, i32> {
        let number = self.operation_count;
        self.operation_count += 1;
        let fault = (self.plan)
            .filter(|plan| plan.at == number || (plan.for_good && plan.at < number))
            .map(|plan| plan.fault);
        let device = &mut self.devices[position];
        let fault = fault.or(device.broken);
        if let Some(fault) = fault.filter(|fault| fault.meets(op)) {
            *self.happened.entry(fault).or_default() += 1;
        }
        let room = (device.live.len() as u64).saturating_sub(offset);
        let mut moved = memory.len().min(room as usize);
        let mut start = offset as usize;
        if op == IoOp::Flush
            && let Some(fault) = fault.filter(|fault| fault.meets(op))
        {
            let mut random = SimRandom::new(number);
            let lost_in_16 = match fault {
                SimFault::FlushLost => 16,
                _ => LOST_IN_16[random.below(LOST_IN_16.len())],
            };
            device.fail_flush(lost_in_16, &mut random);
            return Err(match fault {
                SimFault::Errno(errno) => errno,
                _ => libc::EIO,
            });
        }
        match (fault, op) {
            (Some(SimFault::Errno(errno)), _) => return Err(errno),
            (Some(SimFault::Short), _) => moved /= 2,
            (Some(SimFault::Lost), IoOp::Write) => return Ok(moved as u32),
            (Some(SimFault::Misdirected(by)), IoOp::Write) => {
                start = (start + by as usize).min(device.live.len() - moved);
            }
            (Some(SimFault::Full), IoOp::Write) => return Err(libc::ENOSPC),
            (Some(SimFault::Gone), IoOp::Read) => return Ok(0),
            (Some(SimFault::Gone), _) => return Err(libc::EIO),
            (
                Some(
                    SimFault::FlushLost
                    | SimFault::Lost
                    | SimFault::Misdirected(_)
                    | SimFault::Full,
                )
                | None,
                _,
            ) => {}
        }
        let touched = start as u64..(start + moved) as u64;
        let touches = |bad: &Range<u64>| bad.start < touched.end && touched.start < bad.end;
        match op {
            IoOp::Read if device.unreadable.iter().any(touches) => return Err(libc::EIO),
            IoOp::Write => device.unreadable.retain(|bad| !touches(bad)),
            IoOp::Read | IoOp::Flush => {}
        }
        match op {
            IoOp::Read => memory[..moved].copy_from_slice(&device.live[start..start + moved]),
            IoOp::Write => {
                device.live[start..start + moved].copy_from_slice(&memory[..moved]);
                let written = memory[..moved].to_vec();
                device.unflushed.push((start as u64, written));
            }
            IoOp::Flush => {
                for (offset, bytes) in device.unflushed.drain(..) {
                    let at = offset as usize;
                    device.durable[at..at + bytes.len()].copy_from_slice(&bytes);
                }
            }
        }
        Ok(moved as u32)
    }

    /// Cuts the power: any of the sectors of unflushed writes may survive, including those of `inflight` (device, offset, bytes).
    pub(crate) fn crash(&mut self, seed: u64, inflight: Vec<(usize, u64, Vec<u8>)>) {
        let mut random = SimRandom::new(seed);
        for (position, offset, bytes) in inflight {
            let device = &mut self.devices[position];
            let room = device.live.len().saturating_sub(offset as usize);
            let kept = bytes.len().min(room);
            device.unflushed.push((offset, bytes[..kept].to_vec()));
        }
        for device in &mut self.devices {
            let lost_in_16 = LOST_IN_16[random.below(LOST_IN_16.len())];
            let unflushed = std::mem::take(&mut device.unflushed);
            for (offset, bytes) in &unflushed {
                for (index, sector) in bytes.chunks(SECTOR_BYTES).enumerate() {
                    if random.below(16) >= lost_in_16 {
                        let at = *offset as usize + index * SECTOR_BYTES;
                        device.durable[at..at + sector.len()].copy_from_slice(sector);
                    }
                }
            }
            for (offset, bytes) in &unflushed {
                let range = *offset as usize..*offset as usize + bytes.len();
                device.live[range.clone()].copy_from_slice(&device.durable[range]);
            }
        }
    }

    /// From now on the device has this fault at every operation.
    pub(crate) fn break_for_good(&mut self, position: usize, fault: SimFault) {
        self.devices[position].broken = Some(fault);
    }

    /// Makes a range unreadable until it is written, as failed cells do.
    pub(crate) fn wear_out(&mut self, position: usize, range: Range<u64>) {
        self.devices[position].unreadable.push(range);
    }

    /// Ends all faults.
    pub(crate) fn repair(&mut self) {
        self.plan = None;
        for device in &mut self.devices {
            device.broken = None;
            device.unreadable.clear();
        }
    }

    /// Flips one bit.
    pub(crate) fn flip(&mut self, position: usize, offset: u64, bit: u32) {
        let device = &mut self.devices[position];
        device.live[offset as usize] ^= 1 << bit;
        device.durable[offset as usize] ^= 1 << bit;
    }

    /// Returns the bytes that a read would return.
    pub(crate) fn bytes(&self, position: usize) -> &[u8] {
        &self.devices[position].live
    }

    /// Returns other devices, in another order, with the same contents.
    pub(crate) fn pick(&self, positions: &[usize]) -> Self {
        let devices = positions.iter().map(|&at| self.devices[at].clone());
        Self {
            devices: devices.collect(),
            made_count: self.made_count,
            operation_count: 0,
            plan: None,
            happened: BTreeMap::new(),
        }
    }
}

impl Blocks for SimDisks {
    fn count(&self) -> usize {
        self.devices.len()
    }

    fn path(&self, position: usize) -> &str {
        &self.devices[position].path
    }

    fn size_bytes(&self, position: usize) -> u64 {
        self.devices[position].live.len() as u64
    }

    fn read(
        &mut self,
        position: usize,
        offset: u64,
        into: &mut AlignedBytes,
    ) -> Result<(), BlockError> {
        let outcome = self.apply(IoOp::Read, position, offset, into.as_mut_slice());
        self.told(IoOp::Read, position, offset, into.len(), outcome)
    }

    fn write(
        &mut self,
        position: usize,
        offset: u64,
        from: &AlignedBytes,
    ) -> Result<(), BlockError> {
        let mut copy = from.clone();
        let outcome = self.apply(IoOp::Write, position, offset, copy.as_mut_slice());
        self.told(IoOp::Write, position, offset, from.len(), outcome)
    }

    fn flush(&mut self, position: usize) -> Result<(), BlockError> {
        let outcome = self.apply(IoOp::Flush, position, 0, &mut []);
        self.told(IoOp::Flush, position, 0, 0, outcome)
    }
}

impl SimDisks {
    fn told(
        &self,
        op: IoOp,
        position: usize,
        offset: u64,
        asked: usize,
        outcome: Result<u32, i32>,
    ) -> Result<(), BlockError> {
        let cause = match outcome {
            Ok(moved) if moved as usize == asked => return Ok(()),
            Ok(moved) => BlockErrorCause::Short(u64::from(moved)),
            Err(errno) => BlockErrorCause::Errno(errno),
        };
        Err(BlockError {
            op,
            path: self.devices[position].path.clone(),
            offset,
            asked_bytes: asked as u64,
            cause,
        })
    }
}

/// Operations in flight on simulated disks, and the arenas of sessions.
pub(crate) struct SimEngine {
    /// The disks. Device indices are positions: the set is used in the store's order.
    pub(crate) disks: SimDisks,
    arenas: HashMap<SessionId, Vec<u8>>,
    inflight: Vec<SimIo>,
    /// Executed by the disks, and not reported yet.
    done: Vec<SimDone>,
    /// A device whose operations nearly always end after those of the others.
    pub(crate) slow: Option<DeviceIndex>,
    /// A range in which operations do not end until this is removed.
    pub(crate) blocked: Option<(DeviceIndex, Range<u64>)>,
    /// Operations that ended in a freed arena, whose memory may belong to another session by then.
    pub(crate) strays_count: usize,
}

/// The end of an operation, with the daemon's own bytes that were read or written.
pub(crate) type SimDone = (IoId, IoResult, Option<AlignedBytes>);

struct SimIo {
    io: IoId,
    device: DeviceIndex,
    op: IoOp,
    offset: u64,
    bytes: u32,
    buffer: Buffer,
}

impl SimEngine {
    /// Makes an engine with nothing in flight.
    pub(crate) fn new(disks: SimDisks) -> Self {
        Self {
            disks,
            arenas: HashMap::new(),
            inflight: Vec::new(),
            done: Vec::new(),
            slow: None,
            blocked: None,
            strays_count: 0,
        }
    }

    /// Creates the memory of a session.
    pub(crate) fn make_arena(&mut self, session: SessionId, bytes: u64) {
        self.arenas.insert(session, vec![0; bytes as usize]);
    }

    /// Frees it.
    pub(crate) fn drop_arena(&mut self, session: SessionId) {
        self.arenas.remove(&session).expect("an arena");
    }

    /// Returns the arena as the process sees it.
    pub(crate) fn arena(&mut self, session: SessionId) -> &mut [u8] {
        self.arenas.get_mut(&session).expect("an arena")
    }

    /// Starts an operation; it ends in some later [`SimEngine::end_one`].
    pub(crate) fn submit(
        &mut self,
        io: IoId,
        device: DeviceIndex,
        op: IoOp,
        offset: u64,
        bytes: u32,
        buffer: Buffer,
    ) {
        self.inflight.push(SimIo {
            io,
            device,
            op,
            offset,
            bytes,
            buffer,
        });
    }

    /// Reports the end of one of the executed operations. The disks access memory when they execute an operation, which may be several reports
    /// earlier. Also returns the daemon's own bytes of the operation.
    pub(crate) fn end_one(&mut self, random: &mut SimRandom) -> Option<SimDone> {
        // An operation may be executed long before its end is reported, while others follow.
        while self.done.is_empty() || random.one_in(3) {
            if !self.do_one(random) {
                break;
            }
        }
        if self.done.is_empty() {
            return None;
        }
        Some(self.done.swap_remove(random.below(self.done.len())))
    }

    /// Executes one of the operations. Returns false if there is none.
    fn do_one(&mut self, random: &mut SimRandom) -> bool {
        let is_held = |io: &SimIo| {
            let held = self.blocked.as_ref();
            held.is_some_and(|(device, range)| *device == io.device && range.contains(&io.offset))
        };
        let free = self
            .inflight
            .iter()
            .enumerate()
            .filter(|(_, io)| !is_held(io));
        let free: Vec<usize> = free.map(|(index, _)| index).collect();
        if free.is_empty() {
            return false;
        }
        let mut chosen = free[random.below(free.len())];
        if self.slow == Some(self.inflight[chosen].device) && !random.one_in(16) {
            let quick = |at: &&usize| Some(self.inflight[**at].device) != self.slow;
            chosen = free.iter().find(quick).copied().unwrap_or(chosen);
        }
        let mut io = self.inflight.swap_remove(chosen);
        let position = io.device.0 as usize;
        let memory: &mut [u8] = match &mut io.buffer {
            Buffer::None => &mut [],
            Buffer::Meta(bytes) => bytes.as_mut_slice(),
            Buffer::Slot { session, place } => match self.arenas.get_mut(session) {
                Some(arena) => {
                    let start = place.offset as usize;
                    &mut arena[start..start + io.bytes as usize]
                }
                None => {
                    self.strays_count += 1;
                    &mut []
                }
            },
        };
        let outcome = self.disks.apply(io.op, position, io.offset, memory);
        let result = IoResult {
            outcome,
            device_ns: 1,
        };
        let own = match io.buffer {
            Buffer::Meta(bytes) => Some(bytes),
            Buffer::Slot { .. } | Buffer::None => None,
        };
        self.done.push((io.io, result, own));
        true
    }

    /// Cuts the power, or with `power` false only kills the daemon: its operations in flight happen or not, and executed writes stay.
    pub(crate) fn crash(&mut self, random: &mut SimRandom, power: bool) {
        self.blocked = None;
        let mut torn = Vec::new();
        while !self.inflight.is_empty() {
            if power {
                let io = self.inflight.pop().expect("not empty");
                if io.op == IoOp::Write {
                    let bytes = self.bytes_of(&io);
                    torn.push((io.device.0 as usize, io.offset, bytes));
                }
            } else if random.one_in(2) {
                self.do_one(random);
            } else {
                self.inflight.pop();
            }
        }
        self.done.clear();
        self.arenas.clear();
        if power {
            self.disks.crash(random.number(), torn);
        }
    }

    fn bytes_of(&self, io: &SimIo) -> Vec<u8> {
        match &io.buffer {
            Buffer::None => Vec::new(),
            Buffer::Meta(bytes) => bytes.as_slice().to_vec(),
            Buffer::Slot { session, place } => {
                let start = place.offset as usize;
                let arena = self.arenas.get(session);
                arena.map_or_else(Vec::new, |a| a[start..start + io.bytes as usize].to_vec())
            }
        }
    }
}
