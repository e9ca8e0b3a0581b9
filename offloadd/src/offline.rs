//! Changes a store that no daemon serves: runs the core without sessions and performs its actions one after the other.
//!
//! Used to add and drain devices, and to delete jobs and discard records. If the program is killed, the store stays
//! consistent, and the change continues with the next daemon or when the command is repeated.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::{DeviceIndex, Epoch, Generation};

use crate::blocks::{BlockError, BlockErrorCause, Blocks};
use crate::core::{Action, Call, CallId, Core, DeviceState, Event, Moves, NewDevice, Peer, Reply};
use crate::device::{Device, DeviceBlocks};
use crate::driver::begin_incarnation;
use crate::io::{AlignedBytes, Buffer, IoOp, IoResult};
use crate::metrics::MovedBeside;
use crate::quota::Limits;
use crate::rate_limiter::RateLimiter;
use crate::store::StoreError;
use crate::store::definition::JobName;
use crate::store::metadata_device::{self, MetadataMove};
use crate::store::recover::{self, ForeignDevice, RecoveredStore};
use crate::store::superblock::StoreId;
use crate::store::wear::{Wear, totals};

/// The store, recovered and locked.
pub struct Stopped {
    core: Core,
    store: StoreId,
    foreign_devices: Vec<ForeignDevice>,
    /// By index; `None` if the device has left the store.
    devices: Vec<Option<Device>>,
    /// Bytes written to each device.
    written_bytes: Vec<u64>,
    /// Bytes ever written by each job, by `job_id`; nothing else records those on devices that leave.
    worn_totals: BTreeMap<u64, u64>,
    reply: Option<Result<Reply, Fault>>,
    calls_made: u64,
}

impl Stopped {
    /// Recovers the store on `devices`, to read it.
    ///
    /// # Errors
    /// [`StoreError`], the same as at a daemon's start.
    pub fn open(devices: Vec<Device>) -> Result<Self, StoreError> {
        let store = recover::open(&mut DeviceBlocks(&devices))?;
        Ok(Self::of(store, devices, |_, _| Ok(()))?)
    }

    /// Recovers the store to change it. Sessions that a daemon handed over can no longer be adopted.
    ///
    /// # Errors
    /// [`StoreError`], the same as at a daemon's start.
    pub fn open_to_change(devices: Vec<Device>) -> Result<Self, StoreError> {
        let store = recover::open(&mut DeviceBlocks(&devices))?;
        Ok(Self::of(store, devices, begin_incarnation)?)
    }

    /// Recovers the store to change it, and first moves the metadata to another device if that is due. `watch` gets the bytes done and
    /// in total.
    ///
    /// # Errors
    /// [`StoreError`], the same as at a daemon's start.
    pub fn open_settled(
        devices: Vec<Device>,
        watch: &mut dyn FnMut(u64, u64),
    ) -> Result<(Self, MetadataMove), StoreError> {
        let mut blocks = DeviceBlocks(&devices);
        let mut store = recover::open(&mut blocks)?;
        let moved = metadata_device::settle_watched(&mut blocks, &mut store, watch)?;
        Ok((Self::of(store, devices, begin_incarnation)?, moved))
    }

    fn of(
        store: RecoveredStore,
        devices: Vec<Device>,
        begin: impl FnOnce(&mut Core, &[Device]) -> Result<(), BlockError>,
    ) -> Result<Self, BlockError> {
        let (id, foreign_devices) = (store.id, store.foreign_devices.clone());
        let wears = store.devices.iter().map(|device| {
            let number = device.superblock.number;
            Wear::read(&mut DeviceBlocks(&devices), device.position, id, number)
        });
        let wears: Vec<Wear> = wears.collect();
        let positions: Vec<usize> = store.devices.iter().map(|d| d.position).collect();
        // Without sessions nothing carries this number.
        let epoch = Epoch(1);
        let limits = Limits {
            arena_bytes_max: 0,
            sessions_max: 0,
            iodepth_max: 1,
            // Set for each move.
            rebalance_bytes_per_s_max: None,
        };
        let mut core = Core::new(store, epoch, limits);
        begin(&mut core, &devices)?;
        let mut listed: Vec<Option<Device>> = devices.into_iter().map(Some).collect();
        let devices = (positions.iter()).map(|&position| listed[position].take());
        let devices: Vec<_> = devices.collect();
        Ok(Self {
            written_bytes: vec![0; devices.len()],
            worn_totals: totals(wears.iter()),
            devices,
            core,
            store: id,
            foreign_devices,
            reply: None,
            calls_made: 0,
        })
    }

    /// ID of the store.
    pub fn id(&self) -> StoreId {
        self.store
    }

    /// Listed devices that do not belong to the store.
    pub fn foreign_devices(&self) -> &[ForeignDevice] {
        &self.foreign_devices
    }

    /// Devices of the store, including those that have left.
    pub fn devices(&self) -> Vec<DeviceState> {
        self.core.device_states()
    }

    /// Bytes ever written to a device.
    pub fn worn_bytes(&self, device: &DeviceState) -> u64 {
        let numbers = self.devices().into_iter().map(|d| d.status.number);
        let index = numbers.clone().position(|n| n == device.status.number);
        let opened = index.and_then(|index| Some((index, self.devices[index].as_ref()?)));
        opened.map_or(0, |(index, opened)| {
            let kept = self.wear_of(opened, device.status.number);
            kept.written_bytes + self.written_bytes[index]
        })
    }

    fn wear_of(&self, device: &Device, number: u32) -> Wear {
        let mut blocks = DeviceBlocks(std::slice::from_ref(device));
        Wear::read(&mut blocks, 0, self.store, number)
    }

    /// Adds a prepared device; `moved` was counted while it was measured.
    ///
    /// # Errors
    /// If the core refuses or a device fails.
    pub fn add(
        &mut self,
        device: Device,
        new: NewDevice,
        moved: MovedBeside,
    ) -> Result<Reply, Fault> {
        self.core.check_growth()?;
        self.devices.push(Some(device));
        self.written_bytes.push(moved.written_bytes);
        self.call(Call::AddDevice(new))
    }

    /// Starts to drain the device at `path`.
    ///
    /// # Errors
    /// If the core refuses or a device fails.
    pub fn drain(&mut self, path: &str) -> Result<Reply, Fault> {
        self.call(Call::DrainDevice {
            path: path.to_owned(),
            rebalance_bytes_per_s_max: None,
        })
    }

    /// Discards the unreadable records of a job. Returns the generation from which the job resumes, or 0.
    ///
    /// # Errors
    /// If the core refuses or a device fails.
    pub fn discard_unreadable(&mut self, uid: u32, job: JobName) -> Result<Generation, Fault> {
        match self.call(Call::DiscardUnreadable { uid, job })? {
            Reply::DiscardUnreadable { newest_generation } => Ok(newest_generation),
            other => unreachable!("the core answered another call: {other:?}"),
        }
    }

    /// Deletes a job. Returns the bytes freed.
    ///
    /// # Errors
    /// If the core refuses or a device fails.
    pub fn drop_job(&mut self, uid: u32, job: JobName) -> Result<u64, Fault> {
        match self.call_as(uid, Call::DropJob { job })? {
            Reply::DropJob { freed_bytes } => Ok(freed_bytes),
            other => unreachable!("the core answered another call: {other:?}"),
        }
    }

    /// Moves all tiles that are to move, within the rate limit. `watch` gets the bytes moved.
    ///
    /// # Errors
    /// If some tiles cannot be moved.
    pub fn move_all(
        &mut self,
        bytes_per_s_max: Option<u64>,
        watch: &mut dyn FnMut(u64),
    ) -> Result<(), Fault> {
        if let Some(bytes_per_s_max) = bytes_per_s_max
            && self.core.moves() != Moves::None
        {
            self.call(Call::LimitMoves { bytes_per_s_max })?;
        }
        let mut rate_limiter = RateLimiter::default();
        let mut idle_turns = 0;
        loop {
            let moved_bytes = self.core.moved_bytes();
            match self.core.moves() {
                Moves::None => return Ok(()),
                // A drain ends two turns after the last tile: one to find that it is done, one to write the catalog.
                Moves::Waiting if idle_turns < 4 => {}
                Moves::Waiting | Moves::Moving | Moves::Stopped => {
                    let states = self.core.device_states().into_iter();
                    let why = states.filter_map(|state| state.status.stuck).next();
                    let why = why.unwrap_or_else(|| "some tiles cannot be moved".into());
                    return Err(Fault::new(FaultKind::Io, why));
                }
            }
            if let Some(paid) = rate_limiter.next(bytes_per_s_max) {
                std::thread::sleep(paid.saturating_duration_since(Instant::now()));
            }
            let (began, copied_before) = (Instant::now(), self.core.copied_bytes());
            self.carry_out(Event::RebalanceTick { force: true });
            rate_limiter.copied(began, self.core.copied_bytes() - copied_before);
            watch(self.core.moved_bytes());
            idle_turns = match self.core.moved_bytes() == moved_bytes {
                true => idle_turns + 1,
                false => 0,
            };
        }
    }

    /// Writes the wear counters to the devices. Nothing depends on them.
    ///
    /// # Errors
    /// If a device fails.
    pub fn keep_wear(&mut self) -> Result<(), BlockError> {
        let one_left = self.devices.iter().any(Option::is_none);
        for (index, state) in self.devices().into_iter().enumerate() {
            let Some(device) = &self.devices[index] else {
                continue;
            };
            let is_wanted = one_left || self.written_bytes[index] > 0;
            if !is_wanted || state.status.phase.is_none() {
                continue;
            }
            let mut wear = self.wear_of(device, state.status.number);
            wear.sequence += 1;
            wear.written_bytes += std::mem::take(&mut self.written_bytes[index]);
            wear.totals.clone_from(&self.worn_totals);
            let (offset, blocks) = wear.encode(self.store, state.status.number);
            DeviceBlocks(std::slice::from_ref(device)).write(0, offset, &blocks)?;
        }
        Ok(())
    }

    fn call(&mut self, request: Call) -> Result<Reply, Fault> {
        self.call_as(rustix::process::geteuid().as_raw(), request)
    }

    fn call_as(&mut self, uid: u32, request: Call) -> Result<Reply, Fault> {
        self.calls_made += 1;
        self.carry_out(Event::Call {
            call: CallId(self.calls_made),
            peer: Peer { uid, pid: 0 },
            request,
        });
        let reply = self.reply.take();
        reply.expect("all operations have ended")
    }

    fn carry_out(&mut self, event: Event) {
        let mut events = VecDeque::from([event]);
        let mut actions = Vec::new();
        while let Some(event) = events.pop_front() {
            self.core.on_event(event, &mut actions);
            for action in actions.drain(..) {
                match action {
                    Action::Io {
                        io,
                        device,
                        op,
                        offset,
                        buffer,
                        ..
                    } => {
                        let mut own = match buffer {
                            Buffer::Meta(own) => Some(own),
                            Buffer::None => None,
                            Buffer::Slot { .. } => unreachable!("there are no sessions"),
                        };
                        let result = perform(
                            &mut self.devices,
                            &mut self.written_bytes,
                            device,
                            op,
                            offset,
                            own.as_mut(),
                        );
                        events.push_back(Event::IoDone {
                            io,
                            result,
                            read: own,
                        });
                    }
                    Action::Reply { reply, .. } => self.reply = Some(reply),
                    Action::ForgetDevice { device } => self.devices[device.0 as usize] = None,
                    Action::Promote { .. }
                    | Action::Complete { .. }
                    | Action::MakeArena { .. }
                    | Action::DropArena { .. }
                    | Action::Evict { .. } => unreachable!("there are no sessions"),
                }
            }
        }
    }
}

fn perform(
    devices: &mut [Option<Device>],
    written_bytes: &mut [u64],
    device: DeviceIndex,
    op: IoOp,
    offset: u64,
    own: Option<&mut AlignedBytes>,
) -> IoResult {
    let index = device.0 as usize;
    let opened = devices[index].as_ref();
    let opened = opened.expect("no operation goes to a device that left");
    let mut blocks = DeviceBlocks(std::slice::from_ref(opened));
    let (done, bytes) = match (op, own) {
        (IoOp::Read, Some(own)) => (blocks.read(0, offset, own), own.len() as u32),
        (IoOp::Write, Some(own)) => {
            written_bytes[index] += own.len() as u64;
            (blocks.write(0, offset, own), own.len() as u32)
        }
        _ => (blocks.flush(0), 0),
    };
    let outcome = match done {
        Ok(()) => Ok(bytes),
        Err(BlockError { cause, .. }) => match cause {
            BlockErrorCause::Errno(errno) => Err(errno),
            BlockErrorCause::Short(moved) => Ok(moved as u32),
        },
    };
    IoResult {
        outcome,
        device_ns: 0,
    }
}
