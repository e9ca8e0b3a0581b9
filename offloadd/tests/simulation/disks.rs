//! Disks in memory that do what real ones may: do operations in any order and report their ends in another one, fail, move too
//! little, lie, and lose what was not flushed, sector by sector, when the power goes or a flush fails. The flush after one that
//! failed succeeds and says nothing of what was lost. Everything is drawn from a seed.
//!
//! Tests drive the core with these disks, one event at a time. A flush of one device does not flush another.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use offload_api::ids::DeviceIndex;
use test_hooks::random::{SECTOR_BYTES, SimRandom};

use offloadd::blocks::{BlockError, BlockErrorCause, Blocks};
use offloadd::io::{AlignedBytes, Buffer, IoId, IoOp, IoResult, SessionId};

/// What a disk does instead of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SimFault {
    /// Answers an errno and moves nothing.
    Errno(i32),
    /// Moves the first half and says so. A flush answers EIO.
    Short,
    /// A flush answers EIO, and everything that was not flushed is lost. Other operations are done.
    FlushLost,
    /// Says it wrote and did not. Other operations are done.
    Lost,
    /// Writes this many bytes further on and says nothing. Other operations are done.
    Misdirected(u64),
    /// Writes answer ENOSPC. Other operations are done.
    Full,
    /// As a drive that was pulled out: reads move nothing, the rest answers EIO.
    Gone,
}

impl SimFault {
    /// Whether it changes anything about such an operation.
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
    /// Of the operation, over all devices, from 0 on.
    pub(crate) at: u64,
    /// Also of every later one.
    pub(crate) for_good: bool,
    /// What.
    pub(crate) fault: SimFault,
}

#[derive(Clone)]
struct SimDevice {
    path: String,
    /// What a read sees.
    live: Vec<u8>,
    /// What survives for sure.
    durable: Vec<u8>,
    /// Written and not flushed, in order.
    unflushed: Vec<(u64, Vec<u8>)>,
    /// What it does instead of every operation.
    broken: Option<SimFault>,
    /// Reads that touch such a range answer EIO until it is written.
    unreadable: Vec<Range<u64>>,
}

/// A set of simulated disks.
#[derive(Clone)]
pub(crate) struct SimDisks {
    devices: Vec<SimDevice>,
    /// Ever made: each has a name of its own.
    made_count: usize,
    operation_count: u64,
    /// What will go wrong.
    pub(crate) plan: Option<SimFaultPlan>,
    /// What went wrong, and how often.
    pub(crate) happened: BTreeMap<SimFault, u64>,
}

/// From "nothing is kept" over "half" to "everything".
const LOST_IN_16: [usize; 5] = [0, 1, 8, 15, 16];

impl SimDevice {
    /// A flush fails: each unflushed sector stays as it is, to be flushed, or is lost, and reads see what is durable there.
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
    /// Disks of these sizes, all zeros.
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

    /// One more, all zeros. Its position.
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

    /// Operations so far, to plan the next fault.
    pub(crate) fn operation_count(&self) -> u64 {
        self.operation_count
    }

    /// One operation, done or failed at once.
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

    /// The power goes: of each unflushed write any of its sectors may be there afterwards, those of `inflight` (device,
    /// offset, bytes) too.
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

    /// From now on the device does this instead of every operation.
    pub(crate) fn break_for_good(&mut self, position: usize, fault: SimFault) {
        self.devices[position].broken = Some(fault);
    }

    /// As a drive whose cells have failed: this range cannot be read until it is written.
    pub(crate) fn wear_out(&mut self, position: usize, range: Range<u64>) {
        self.devices[position].unreadable.push(range);
    }

    /// Nothing goes wrong any more.
    pub(crate) fn repair(&mut self) {
        self.plan = None;
        for device in &mut self.devices {
            device.broken = None;
            device.unreadable.clear();
        }
    }

    /// One bit is the other way round from now on.
    pub(crate) fn flip(&mut self, position: usize, offset: u64, bit: u32) {
        let device = &mut self.devices[position];
        device.live[offset as usize] ^= 1 << bit;
        device.durable[offset as usize] ^= 1 << bit;
    }

    /// What a read would see.
    pub(crate) fn bytes(&self, position: usize) -> &[u8] {
        &self.devices[position].live
    }

    /// Other devices, in another order, of the same contents.
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

/// Operations in flight on simulated disks, and the arenas they move.
pub(crate) struct SimEngine {
    /// The disks. Device indices are positions: the set is used in the store's order.
    pub(crate) disks: SimDisks,
    arenas: HashMap<SessionId, Vec<u8>>,
    inflight: Vec<SimIo>,
    /// Done by the disks, and not reported yet.
    done: Vec<SimDone>,
    /// Its operations end after those of the others, nearly always.
    pub(crate) slow: Option<DeviceIndex>,
    /// Operations there do not end until this is taken away.
    pub(crate) held: Option<(DeviceIndex, Range<u64>)>,
    /// Operations that ended in an arena that was gone: memory that somebody else may have by now.
    pub(crate) strays_count: usize,
}

/// How an operation ended, and the daemon's own bytes that were read or written.
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
    /// Nothing in flight yet.
    pub(crate) fn new(disks: SimDisks) -> Self {
        Self {
            disks,
            arenas: HashMap::new(),
            inflight: Vec::new(),
            done: Vec::new(),
            slow: None,
            held: None,
            strays_count: 0,
        }
    }

    /// Memory for a session.
    pub(crate) fn make_arena(&mut self, session: SessionId, bytes: u64) {
        self.arenas.insert(session, vec![0; bytes as usize]);
    }

    /// Takes it back.
    pub(crate) fn drop_arena(&mut self, session: SessionId) {
        self.arenas.remove(&session).expect("an arena");
    }

    /// What the process sees of its arena.
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

    /// Reports the end of one operation, any of those that the disks have done. Memory is read and written when they do it,
    /// which may be several reports earlier. With it the daemon's own bytes it was about.
    pub(crate) fn end_one(&mut self, random: &mut SimRandom) -> Option<SimDone> {
        // Something was done long before its end is reported, and something else meanwhile.
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

    /// The disks do one operation, any of them. False: there is none.
    fn do_one(&mut self, random: &mut SimRandom) -> bool {
        let is_held = |io: &SimIo| {
            let held = self.held.as_ref();
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

    /// The power goes, or (`power` false) only the daemon is killed: its operations in flight happen or not, and what the
    /// disks were given stays.
    pub(crate) fn crash(&mut self, random: &mut SimRandom, power: bool) {
        self.held = None;
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
