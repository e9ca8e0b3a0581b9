//! A daemon without sockets: the core, simulated disks, and the requests and views of processes.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::disks::{SimDisks, SimEngine};
use offload_api::checksum::checksum;
use offload_api::fault::{Fault, FaultKind};
use offload_api::geometry::{Geometry, SlotClass};
use offload_api::ids::{
    DeviceIndex, Epoch, Generation, Rank, SessionToken, SlotIndex, TicketId, TileIndex,
};
use offload_api::ring::entry::{Cqe, Priority, Request, Sqe, Verb};
use offloadd::blocks::Blocks;
use offloadd::core::{
    Action, Call, CallId, Core, DeviceState, Event, JobRecord, NewDevice, OpenSession, Peer, Reply,
};
use offloadd::handover::message::HandoverState;
use offloadd::io::{IoId, IoOp, SessionId};
use offloadd::quota::Limits;
use offloadd::store::StoreError;
use offloadd::store::definition::{Durability, JobDefinition, JobName, Tile, TileKind};
use offloadd::store::format::{data_bytes, format};
use offloadd::store::metadata_device::{self, MetadataMove};
use offloadd::store::recover;
use offloadd::store::superblock::MeasuredRates;
use offloadd::store::superblock::{DeviceId, StoreId};
use test_hooks::random::SimRandom;

use super::trace::Trace;
use super::trouble::Trouble;

pub(crate) const LIMITS: Limits = Limits {
    arena_bytes_max: 64 << 20,
    sessions_max: 16,
    iodepth_max: 16,
    rebalance_bytes_per_s_max: None,
};

pub(crate) const PEER: Peer = Peer { uid: 1000, pid: 1 };

/// Slots of a session here; each fits the largest tile.
pub(crate) const SLOTS: u32 = 8;
const SLOT_BYTES: u64 = 8192;

/// Makes a store of two small disks.
pub(crate) fn formatted() -> SimDisks {
    formatted_with([5 << 19, 2 << 20])
}

/// Makes a store of two disks of these sizes.
pub(crate) fn formatted_with(sizes_bytes: [u64; 2]) -> SimDisks {
    let mut disks = SimDisks::new(&sizes_bytes);
    let rates = [MeasuredRates::default(); 2];
    format(&mut disks, StoreId(*b"a store's id 16b"), &rates, 7, false).unwrap();
    disks
}

/// Defines tiles of 4 and 8 KiB alternately.
pub(crate) fn definition(tiles: u32, durability: Durability, nodes: u32) -> JobDefinition {
    let tile = |index: u32| Tile {
        unit: index / 3,
        kind: [TileKind::Param, TileKind::State, TileKind::Grad][index as usize % 3],
        elem_offset: u64::from(index) * 1000,
        tile_bytes: 4096 << (index % 2),
    };
    let layout = b"names, shapes, offsets".to_vec();
    JobDefinition::new(layout, (0..tiles).map(tile).collect(), durability, nodes).unwrap()
}

/// Returns bytes that only `seed` gives.
pub(crate) fn content(seed: u64, bytes: usize) -> Vec<u8> {
    let mut content = vec![0; bytes];
    for (index, number) in content.chunks_exact_mut(8).enumerate() {
        let mixed = seed
            .wrapping_add(index as u64)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        number.copy_from_slice(&mixed.to_le_bytes());
    }
    content
}

pub(crate) fn job(name: &str) -> JobName {
    JobName::new(name).unwrap()
}

/// A process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Process {
    pub(crate) session: SessionId,
    pub(crate) token: SessionToken,
}

pub(crate) struct World {
    pub(crate) core: Core,
    pub(crate) engine: SimEngine,
    pub(crate) random: SimRandom,
    pub(crate) replies: BTreeMap<CallId, Result<Reply, Fault>>,
    pub(crate) completions: HashMap<SessionId, VecDeque<Cqe>>,
    /// Whether the test sends [`Event::ArenaMade`] itself.
    pub(crate) arenas_take_long: bool,
    pub(crate) dropped: Vec<SessionId>,
    pub(crate) evicted: Vec<SessionId>,
    pub(crate) promoted: Vec<IoId>,
    /// Flushes of all devices so far.
    pub(crate) flush_count: usize,
    /// Flushes in progress, each with its device.
    flushes: BTreeMap<IoId, DeviceIndex>,
    /// Faults of the devices while it runs.
    pub(crate) trouble: Trouble,
    /// Positions of the disks, by device.
    pub(crate) positions: Vec<usize>,
    /// Result of moving the metadata at the start.
    pub(crate) metadata_move: MetadataMove,
    /// Positions of devices that left in this incarnation.
    pub(crate) left: Vec<usize>,
    geometries: HashMap<SessionId, Geometry>,
    pub(crate) made: HashMap<SessionToken, SessionId>,
    pub(crate) epoch: Epoch,
    next_call: u64,
    trace: Trace,
}

impl World {
    /// Starts a daemon on these disks.
    pub(crate) fn start(disks: SimDisks, random: SimRandom) -> Self {
        Self::try_start(disks, random)
            .map_err(|failed| failed.0)
            .expect("a store recovers")
    }

    /// Tries to start a daemon; returns the disks when it cannot start.
    pub(crate) fn try_start(
        disks: SimDisks,
        random: SimRandom,
    ) -> Result<Self, Box<(StoreError, SimDisks)>> {
        Self::try_start_with(disks, random, |_| {})
    }

    /// Starts a daemon on these disks with the hand-over of the previous one. Also returns the sessions that continue, or why none do.
    pub(crate) fn start_after(
        disks: SimDisks,
        random: SimRandom,
        state: &HandoverState,
    ) -> (Self, Result<Vec<Process>, String>) {
        let mut adopted = Ok((Vec::new(), Vec::new()));
        let started = Self::try_start_with(disks, random, |core| {
            adopted = core.adopt(state, |_| true);
        });
        let mut world = started
            .map_err(|failed| failed.0)
            .expect("a store recovers");
        let processes = adopted.and_then(|(adopted, left_out)| {
            let sessions = adopted.into_iter().map(|one| {
                world.has_arena(one.session, one.token, one.geometry);
                Process {
                    session: one.session,
                    token: one.token,
                }
            });
            let sessions = sessions.collect();
            left_out
                .is_empty()
                .then_some(sessions)
                .ok_or_else(|| left_out.join("; "))
        });
        (world, processes)
    }

    /// Starts a daemon on disks of which one may fail the writes of a start: then nothing is written.
    pub(crate) fn start_perhaps_read_only(mut disks: SimDisks, mut random: SimRandom) -> Self {
        let mut store = recover::read(&mut disks).expect("a store recovers");
        let repaired = recover::repair(&mut disks, &mut store);
        let mut core = Core::new(store, Epoch(random.number()), LIMITS);
        let (metadata, catalog) = core.first_catalog();
        match repaired.and_then(|()| catalog.write(&mut disks, metadata)) {
            Ok(()) => core.begin_incarnation(catalog),
            Err(error) => core.begin_reading(&error),
        }
        Self::from_core(core, MetadataMove::NotDue, disks, random)
    }

    /// Starts a daemon; `adopt` runs between recovery and the beginning of the incarnation.
    fn try_start_with(
        mut disks: SimDisks,
        mut random: SimRandom,
        adopt: impl FnOnce(&mut Core),
    ) -> Result<Self, Box<(StoreError, SimDisks)>> {
        let opened = recover::open(&mut disks).and_then(|mut store| {
            let moved = metadata_device::settle(&mut disks, &mut store)?;
            Ok((store, moved))
        });
        let (store, metadata_move) = match opened {
            Ok(opened) => opened,
            Err(error) => return Err(Box::new((error, disks))),
        };
        let epoch = Epoch(random.number());
        let mut core = Core::new(store, epoch, LIMITS);
        adopt(&mut core);
        let (metadata, catalog) = core.first_catalog();
        if let Err(error) = catalog.write(&mut disks, metadata) {
            return Err(Box::new((error.into(), disks)));
        }
        core.begin_incarnation(catalog);
        Ok(Self::from_core(core, metadata_move, disks, random))
    }

    fn from_core(
        core: Core,
        metadata_move: MetadataMove,
        disks: SimDisks,
        random: SimRandom,
    ) -> Self {
        let path_of = |state: DeviceState| {
            let mut positions = 0..disks.count();
            positions.find(|&position| disks.path(position) == state.path)
        };
        let positions = core.device_states().into_iter();
        let positions = positions.map(|state| path_of(state).expect("a disk"));
        Self {
            positions: positions.collect(),
            left: Vec::new(),
            metadata_move,
            epoch: core.epoch(),
            core,
            engine: SimEngine::new(disks),
            trace: Trace::new(&random),
            random,
            replies: BTreeMap::new(),
            completions: HashMap::new(),
            arenas_take_long: false,
            dropped: Vec::new(),
            evicted: Vec::new(),
            promoted: Vec::new(),
            flush_count: 0,
            flushes: BTreeMap::new(),
            trouble: Trouble::None,
            geometries: HashMap::new(),
            made: HashMap::new(),
            next_call: 1,
        }
    }

    /// Makes the call that adds a new disk to the store.
    pub(crate) fn add_disk(&mut self, bytes: u64, rates: MeasuredRates) -> CallId {
        let position = self.engine.disks.add(bytes);
        self.positions.push(position);
        let mut id = [0; 16];
        id[..8].copy_from_slice(&self.random.number().to_le_bytes());
        let path = self.engine.disks.path(position).to_owned();
        self.call(Call::AddDevice(NewDevice {
            path,
            id: DeviceId(id),
            data_bytes: data_bytes(bytes),
            rates,
            created_unix_s: 8,
            rebalance_bytes_per_s_max: None,
        }))
    }

    pub(crate) fn drain_call(&mut self, path: &str) -> CallId {
        self.drain_call_under(path, None)
    }

    /// Drains with a rate limit, which here only limits the size of batches.
    pub(crate) fn drain_call_under(&mut self, path: &str, rate: Option<u64>) -> CallId {
        self.call(Call::DrainDevice {
            path: path.to_owned(),
            rebalance_bytes_per_s_max: rate,
        })
    }

    /// Lets tiles move until nothing changes any more: no tile is left to move, or those that are left wait.
    pub(crate) fn move_all(&mut self) {
        let state = |world: &Self| (world.core.moved_bytes(), world.core.device_states());
        let mut unchanged_count = 0;
        for _ in 0..1000 {
            let before = state(self);
            self.event(Event::RebalanceTick { force: true });
            self.run();
            // The last step may have been the last commit of a device, or its settling, which moves no byte.
            unchanged_count = match state(self) == before {
                true => unchanged_count + 1,
                false => 0,
            };
            if unchanged_count == 2 {
                return;
            }
        }
        panic!("tiles move without end");
    }

    /// Cuts the power, or only kills the daemon. Returns the disks.
    pub(crate) fn crash(mut self, power: bool) -> (SimDisks, SimRandom) {
        self.engine.crash(&mut self.random, power);
        (self.engine.disks, self.random)
    }

    pub(crate) fn event(&mut self, event: Event) {
        let mut actions = Vec::new();
        self.trace.event(&event);
        self.core.on_event(event, &mut actions);
        actions.iter().for_each(|action| self.trace.action(action));
        self.trace.state(&self.core);
        for action in actions {
            self.act(action);
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Io {
                io,
                device,
                op,
                offset,
                bytes,
                buffer,
                priority: _,
                weights: _,
            } => {
                let position = self.positions[device.0 as usize];
                assert!(!self.left.contains(&position), "a device that left is used");
                if op == IoOp::Flush {
                    let shared = !self.flushes.values().any(|flushed| *flushed == device);
                    assert!(shared, "two flushes of {device:?} at a time");
                    self.flushes.insert(io, device);
                    self.flush_count += 1;
                }
                let at = DeviceIndex(position as u32);
                self.engine.submit(io, at, op, offset, bytes, buffer);
            }
            Action::ForgetDevice { device } => self.left.push(self.positions[device.0 as usize]),
            Action::Promote { io, .. } => self.promoted.push(io),
            Action::Complete { session, entry } => self
                .completions
                .entry(session)
                .or_default()
                .push_back(entry),
            Action::Reply { call, reply } => {
                let before = self.replies.insert(call, reply);
                assert!(before.is_none(), "{call:?} was answered twice");
            }
            Action::MakeArena {
                session,
                token,
                geometry,
                ..
            } => {
                self.has_arena(session, token, geometry);
                if self.arenas_take_long {
                    return;
                }
                self.event(Event::ArenaMade {
                    session,
                    result: Ok(()),
                });
            }
            Action::DropArena { session } => {
                self.engine.drop_arena(session);
                self.dropped.push(session);
            }
            Action::Evict { session, .. } => self.evicted.push(session),
        }
    }

    fn has_arena(&mut self, session: SessionId, token: SessionToken, geometry: Geometry) {
        // The rest of the arena is only rounding.
        self.engine
            .make_arena(session, u64::from(SLOTS) * SLOT_BYTES);
        self.geometries.insert(session, geometry);
        self.made.insert(token, session);
    }

    /// Ends one of the operations. Returns false when none is in flight.
    pub(crate) fn step(&mut self) -> bool {
        (self.trouble).before_operation(&mut self.engine, &mut self.random);
        let Some((io, result, read)) = self.engine.end_one(&mut self.random) else {
            return false;
        };
        self.flushes.remove(&io);
        self.event(Event::IoDone { io, result, read });
        true
    }

    pub(crate) fn run(&mut self) {
        while self.step() {}
    }

    pub(crate) fn call(&mut self, request: Call) -> CallId {
        self.call_as(PEER, request)
    }

    pub(crate) fn call_as(&mut self, peer: Peer, request: Call) -> CallId {
        let call = CallId(self.next_call);
        self.next_call += 1;
        self.event(Event::Call {
            call,
            peer,
            request,
        });
        call
    }

    /// Calls and runs until there is an answer.
    pub(crate) fn ask(&mut self, request: Call) -> Result<Reply, Fault> {
        let call = self.call(request);
        self.answer(call)
    }

    pub(crate) fn answer(&mut self, call: CallId) -> Result<Reply, Fault> {
        while !self.replies.contains_key(&call) {
            assert!(self.step(), "{call:?} is never answered");
        }
        self.replies.remove(&call).unwrap()
    }

    pub(crate) fn open_request(
        &mut self,
        job: &JobName,
        rank: u32,
        local_ranks: u32,
    ) -> OpenSession {
        let mut token = [0; 16];
        token[..8].copy_from_slice(&self.random.number().to_le_bytes());
        OpenSession {
            token: SessionToken(token),
            job: job.clone(),
            rank: Rank(rank),
            local_ranks,
            classes: vec![SlotClass {
                slot_bytes: SLOT_BYTES,
                slot_count: SLOTS,
            }],
            iodepth: SLOTS,
        }
    }

    pub(crate) fn open(
        &mut self,
        job: &JobName,
        rank: u32,
        local_ranks: u32,
    ) -> Result<(Process, Option<JobRecord>), Fault> {
        let request = self.open_request(job, rank, local_ranks);
        let token = request.token;
        let Reply::Open(reply) = self.ask(Call::Open(request))? else {
            panic!("another reply than asked for");
        };
        let session = self.made[&reply.token];
        self.event(Event::Attached { session });
        let Reply::DescribeJob(job) = self.ask(Call::DescribeJob { token })? else {
            panic!("another reply than asked for");
        };
        Ok((Process { session, token }, job.map(|job| *job)))
    }

    /// Opens one rank of a new job with tiles, and resumes from nothing.
    pub(crate) fn begin(&mut self, name: &str, tiles: u32, durability: Durability) -> Process {
        let (process, record) = self.open(&job(name), 0, 1).unwrap();
        assert_eq!(record, None);
        self.define(process, definition(tiles, durability, 1))
            .unwrap();
        self.resume(process, 0).unwrap();
        process
    }

    /// Opens the one rank of an existing job and resumes it from `generation`.
    pub(crate) fn reopen(&mut self, name: &str, generation: u64) -> Process {
        let (process, _) = self.open(&job(name), 0, 1).unwrap();
        self.resume(process, generation).unwrap();
        process
    }

    pub(crate) fn define(
        &mut self,
        process: Process,
        definition: JobDefinition,
    ) -> Result<Reply, Fault> {
        let token = process.token;
        self.ask(Call::Define { token, definition })
    }

    pub(crate) fn resume(&mut self, process: Process, generation: u64) -> Result<Reply, Fault> {
        self.ask(Call::Resume {
            token: process.token,
            generation: Generation(generation),
        })
    }

    pub(crate) fn commit_call(&mut self, process: Process, generation: u64, blob: &[u8]) -> CallId {
        self.call(Call::Commit {
            token: process.token,
            generation: Generation(generation),
            blob: blob.to_vec(),
        })
    }

    pub(crate) fn commit(&mut self, process: Process, generation: u64) -> Result<Reply, Fault> {
        let call = self.commit_call(process, generation, &generation.to_le_bytes());
        self.answer(call)
    }

    pub(crate) fn close(&mut self, process: Process) -> Result<Reply, Fault> {
        let token = process.token;
        self.ask(Call::Close { token })
    }

    /// Returns a slot as the process sees it.
    pub(crate) fn slot(&mut self, process: Process, slot: u32, bytes: usize) -> &mut [u8] {
        let place = self.geometries[&process.session]
            .slot_place(SlotIndex(slot))
            .unwrap();
        let start = place.offset as usize;
        &mut self.engine.arena(process.session)[start..start + bytes]
    }

    pub(crate) fn submit(&mut self, process: Process, request: Request) {
        self.submit_raw(process, request.to_sqe(self.epoch));
    }

    pub(crate) fn submit_raw(&mut self, process: Process, entry: Sqe) {
        self.event(Event::Submission {
            session: process.session,
            entry,
        });
    }

    /// Puts `seed`'s content into a slot and submits its swap out. The ticket is the slot.
    pub(crate) fn submit_write(
        &mut self,
        process: Process,
        generation: u64,
        tile: u32,
        slot: u32,
        seed: u64,
    ) {
        let bytes = content(seed, 4096 << (tile % 2));
        self.slot(process, slot, bytes.len())
            .copy_from_slice(&bytes);
        self.submit(
            process,
            Request {
                ticket: TicketId(u64::from(slot)),
                verb: Verb::SwapOut,
                priority: Priority::Prefetch,
                tile: TileIndex(tile),
                slot: SlotIndex(slot),
                generation: Generation(generation),
                checksum: checksum(&bytes),
            },
        );
    }

    /// Submits a swap in. The ticket is the slot.
    pub(crate) fn submit_read(&mut self, process: Process, tile: u32, slot: u32) {
        self.submit(
            process,
            Request {
                ticket: TicketId(u64::from(slot)),
                verb: Verb::SwapIn,
                priority: Priority::Prefetch,
                tile: TileIndex(tile),
                slot: SlotIndex(slot),
                generation: Generation(0),
                checksum: 0,
            },
        );
    }

    pub(crate) fn completion(&mut self, process: Process) -> Option<Cqe> {
        self.completions.get_mut(&process.session)?.pop_front()
    }

    fn wait(&mut self, process: Process) -> Cqe {
        loop {
            if let Some(entry) = self.completion(process) {
                return entry;
            }
            assert!(self.step(), "a submission is never completed");
        }
    }

    /// Writes one tile and waits.
    pub(crate) fn write(
        &mut self,
        process: Process,
        generation: u64,
        tile: u32,
        seed: u64,
    ) -> Result<(), FaultKind> {
        self.submit_write(process, generation, tile, 0, seed);
        outcome(&self.wait(process))
    }

    /// Reads one tile, waits, and checks it as a client does.
    pub(crate) fn read(&mut self, process: Process, tile: u32) -> Result<Vec<u8>, FaultKind> {
        self.submit_read(process, tile, 0);
        let entry = self.wait(process);
        outcome(&entry)?;
        let bytes = self.slot(process, 0, 4096 << (tile % 2)).to_vec();
        if checksum(&bytes) != entry.checksum {
            return Err(FaultKind::Damaged);
        }
        Ok(bytes)
    }

    /// Asserts that a tile has the content of `seed`.
    pub(crate) fn expect_tile(&mut self, process: Process, tile: u32, seed: u64) {
        let bytes = self.read(process, tile).unwrap();
        assert!(
            bytes == content(seed, bytes.len()),
            "tile {tile} is not what was written last"
        );
    }
}

pub(crate) fn outcome(entry: &Cqe) -> Result<(), FaultKind> {
    match FaultKind::from_number(entry.fault) {
        None => Ok(()),
        Some(kind) => Err(kind),
    }
}
