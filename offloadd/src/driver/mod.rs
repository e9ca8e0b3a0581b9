//! The owner thread: waits for everything at once, tells the core, does what the core says.
//!
//! ```text
//!   inbox (calls, memory made) ─┐                      ┌─▶ queue ─▶ engine
//!   submission doorbells ───────┤        Event         ├─▶ completion rings, doorbells
//!   engine's wake-up ───────────┼─▶ epoll ───▶ core ───┼─▶ answers to calls
//!   descriptor socket, hellos ──┤         Action       ├─▶ keeper (make, free memory)
//!   life lines, pidfds ─────────┘                      └─▶ evict
//! ```
//!
//! Promises: never waits for a process, a device or memory; takes a bounded number of entries from each ring in turn, so
//! that a busy or hostile process delays nobody else; a session's memory is freed only when the core says that its I/O
//! has ended.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use offload_api::fault::{Fault, FaultKind};
use offload_api::handoff;
use offload_api::ids::{DeviceIndex, Epoch};
use offload_api::ring::entry::Sqe;
use rustix::event::epoll::{self, EventFlags};
use tokio::sync::oneshot;

use crate::arena::LockPolicy;
use crate::blocks::BlockError;
use crate::core::{Action, CallId, Core, Event, Viewer};
use crate::device::Device;
use crate::engine::{Engine, EngineChoice, EngineError, Io, IoDone, Memory};
use crate::handover::HandedOver;
use crate::io::{IoResult, SessionId};
use crate::metrics::{Endurance, Ledger};
use crate::numa;
use crate::queue::{DeviceLimits, Queue};
use crate::quota::{Limits, Quotas};
use crate::retry;
use crate::store::DEVICES_MAX;

mod actions;
mod attach;
mod counting;
mod handing;
mod inbox;
mod incarnations;
mod keeper;
mod moving;
mod process;
mod session;
mod sleep;
mod source;
mod stop;

use actions::{Counted, Waiting};
use attach::Hello;
pub use handing::begin_life;
pub use handing::{LeftToUs, TakenUp};
pub use inbox::{Change, DriverHandle};
use inbox::{Inbox, LookAnswer, Message, stopping};
use keeper::{Ending, Keeper};
use moving::Pacing;
use session::Session;
use source::Source;

/// Calls that wait for the core's answer; a commit waits for the slowest local rank.
const CALLS_MAX: usize = 4096;

/// Submissions taken from one ring before the next one's turn.
const ENTRIES_A_TURN: usize = 64;

/// Messages taken before rings and devices have their turn: what others send meanwhile wakes us again.
const MESSAGES_A_TURN: usize = 256;

/// Events taken from the kernel at a time.
const EVENTS_A_TURN: usize = 64;

/// Room in the engine beyond the sessions' own operations: records, catalog, flushes of commits.
const META_A_SESSION: usize = 64 + 16;

/// Marks the driver's own operations; the core counts its up from 1.
const WEAR_IO: u64 = 1 << 63;

/// How long in-flight I/O may take when the daemon ends; a dead drive must not keep it for ever.
const STOP_WAIT: Duration = Duration::from_secs(60);

/// What the owner thread needs.
pub struct Parts {
    /// Decides.
    pub core: Core,
    /// In the settings' order, until this life has begun.
    pub opened: Vec<Device>,
    /// What a device did not take as the store was opened: then it is only read.
    pub unwritable: Option<BlockError>,
    /// In the store's order.
    pub devices: Vec<Arc<File>>,
    /// Of each of them.
    pub device_limits: Vec<DeviceLimits>,
    /// Which engine.
    pub engine: EngineChoice,
    /// As the core got them.
    pub limits: Limits,
    /// Of each user and job.
    pub quotas: Quotas,
    /// Of this life, for the rings.
    pub epoch: Epoch,
    /// How far the devices are worn.
    pub endurance: Endurance,
    /// Whether arenas must be locked.
    pub policy: LockPolicy,
    /// Where descriptors are handed out; nothing exists there.
    pub descriptor_socket: PathBuf,
    /// Sessions of the daemon before, which `core` has taken up.
    pub left_to_us: Option<LeftToUs>,
}

/// A running owner thread.
#[derive(Debug)]
pub struct Running {
    /// The way to it.
    pub handle: DriverHandle,
    /// "uring", "aio" or "psync".
    pub engine: &'static str,
    /// Why that one.
    pub engine_reason: String,
    /// Why nothing is written in this life, if nothing is.
    pub reading_only: Option<String>,
    /// Ends with the daemon, with what is for the next one; an error means that nothing can be done any more.
    pub thread: JoinHandle<Result<Option<HandedOver>, DriverError>>,
}

/// The owner thread cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// No engine, or a broken one.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The device with the store's catalog, and sessions wait for a daemon that writes.
    #[error(
        "beginning to serve the store: {0}; the sessions of the daemon before are left to the next start"
    )]
    Store(#[from] BlockError),
    /// A system call it cannot do without.
    #[error("{action}: {source}")]
    System {
        /// What failed.
        action: String,
        /// The errno.
        source: std::io::Error,
    },
    /// In-flight I/O does not end.
    #[error("{} operations have not ended {} s after the stop: a device hangs", inflight_count, STOP_WAIT.as_secs())]
    Hanging {
        /// Still in flight.
        inflight_count: usize,
    },
}

fn system(action: impl Into<String>) -> impl FnOnce(std::io::Error) -> DriverError {
    let action = action.into();
    move |source| DriverError::System { action, source }
}

/// Starts the owner thread and waits until it serves.
///
/// # Errors
/// [`DriverError`]; nothing runs then.
pub fn start(parts: Parts) -> Result<Running, DriverError> {
    let (inbox, handle) = Inbox::new().map_err(system("eventfd"))?;
    let (ready, started) = sync_channel(1);
    let to_keeper = handle.clone();
    let thread = std::thread::Builder::new()
        .name("owner".into())
        .spawn(move || {
            let place = numa::stay_near(&parts.devices);
            // Here and not before: io_uring belongs to the thread that made it.
            let mut driver = match Driver::new(parts, inbox, to_keeper) {
                Ok((driver, mut reason)) => {
                    if let Some(place) = place {
                        reason = format!("{reason}; {place}");
                    }
                    let _ = ready.send(Ok((driver.engine.name(), reason, driver.reading_only())));
                    driver
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                    return Ok(None);
                }
            };
            driver.run()?;
            driver.give()
        })
        .map_err(system("starting the owner thread"))?;
    let (engine, engine_reason, reading_only) =
        started.recv().expect("the owner thread says how it went")?;
    Ok(Running {
        handle,
        engine,
        engine_reason,
        reading_only,
        thread,
    })
}

struct Driver {
    core: Core,
    queue: Queue,
    engine: Engine,
    /// Of each device; `None`: it has left.
    files: Vec<Option<Arc<File>>>,
    keeper: Keeper,
    /// Memory of sessions that are over, which the kernel still holds, by user.
    ending: Vec<(u32, Ending)>,
    epoll: OwnedFd,
    inbox: Inbox,
    listener: OwnedFd,
    descriptor_socket: PathBuf,
    hellos: HashMap<u64, Hello>,
    hellos_made: u64,
    /// When connections are taken next; `None`: none wait.
    accept_at: Option<Instant>,
    sessions: HashMap<SessionId, Session>,
    /// Whose rings may hold more than was taken.
    busy: VecDeque<SessionId>,
    calls: HashMap<CallId, Waiting>,
    calls_made: u64,
    limits: Limits,
    ledger: Ledger,
    metrics_waiters: Vec<(Viewer, LookAnswer)>,
    /// Who waits for the end of this turn.
    turn_waiters: Vec<oneshot::Sender<()>>,
    /// When the next look may be.
    look_at: Instant,
    /// Devices that left the store and are still open.
    left: Vec<DeviceIndex>,
    /// Devices whose trouble is in the log.
    in_trouble: [bool; DEVICES_MAX as usize],
    /// The last time is over.
    wear_kept: bool,
    pacing: Pacing,
    events: VecDeque<Event>,
    actions: Vec<Action>,
    pieces: Vec<Io>,
    ended: Vec<IoDone>,
    entries: Vec<Sqe>,
    stop_deadline: Option<Instant>,
    /// The stop leaves sessions to the next daemon.
    handing: bool,
    /// What they wrote is flushed for it, or is being flushed.
    handing_flushed: bool,
    /// When a stop that lasts is told next.
    tell_stop_at: Option<Instant>,
}

impl Driver {
    fn new(
        parts: Parts,
        inbox: Inbox,
        handle: DriverHandle,
    ) -> Result<(Self, String), DriverError> {
        let Parts {
            core,
            opened,
            unwritable,
            devices,
            device_limits,
            engine,
            limits,
            quotas,
            epoch,
            endurance,
            policy,
            descriptor_socket,
            left_to_us,
        } = parts;
        let a_session = limits.iodepth_max as usize + META_A_SESSION;
        // A write of its wear to each device besides. More devices may come.
        let devices_max = devices.len().max(DEVICES_MAX as usize);
        let operations_max = limits.sessions_max as usize * a_session + devices_max;
        let inflight_max = Queue::inflight_max(devices_max, operations_max);
        let (engine, reason) = Engine::open(engine, &devices, inflight_max)?;
        let keeper = Keeper::new(handle, epoch, policy, limits.arena_bytes_max);
        let listener = handoff::listen(&descriptor_socket).map_err(system(format!(
            "listening at {}",
            descriptor_socket.display()
        )))?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|e| system("epoll_create")(e.into()))?;
        let ledger = Ledger::new(&core.device_states(), endurance, Instant::now());
        let mut driver = Self {
            core,
            queue: Queue::new(&device_limits),
            engine,
            files: devices.into_iter().map(Some).collect(),
            keeper,
            ending: Vec::new(),
            epoll,
            inbox,
            listener,
            descriptor_socket,
            hellos: HashMap::new(),
            hellos_made: 0,
            accept_at: None,
            sessions: HashMap::new(),
            busy: VecDeque::new(),
            calls: HashMap::new(),
            calls_made: 0,
            limits,
            ledger,
            metrics_waiters: Vec::new(),
            turn_waiters: Vec::new(),
            look_at: Instant::now(),
            left: Vec::new(),
            in_trouble: [false; DEVICES_MAX as usize],
            wear_kept: false,
            pacing: Pacing::new(Instant::now()),
            events: VecDeque::from([Event::Quotas(quotas)]),
            actions: Vec::new(),
            pieces: Vec::new(),
            ended: Vec::new(),
            entries: Vec::new(),
            stop_deadline: None,
            handing: false,
            handing_flushed: false,
            tell_stop_at: None,
        };
        driver.watch(driver.inbox.wake(), Source::Inbox, EventFlags::IN)?;
        driver.watch(driver.engine.wake(), Source::Engine, EventFlags::IN)?;
        // Edges: while there is no room, a connection that waits must not keep us awake.
        let edge = EventFlags::IN | EventFlags::ET;
        driver.watch(&driver.listener, Source::Listener, edge)?;
        // All that can fail has been done: what is left to us is spent from here on.
        let begun = match unwritable {
            None => {
                // Who waits is left to the next start at once.
                let waits = match left_to_us {
                    None => &retry::WAITS[..],
                    Some(_) => &[],
                };
                retry::retry(waits.iter().copied(), || {
                    begin_life(&mut driver.core, &opened)
                })
            }
            Some(error) => Err(error),
        };
        if let Err(error) = begun {
            // What fails now may not fail in a second; to be read from is nothing that they could go on with.
            if left_to_us.is_some() {
                return Err(error.into());
            }
            driver.core.begin_reading(&error);
            let why = driver.core.reading_only().expect("just begun");
            tracing::error!("nothing is written: {}", why.message);
        }
        // The engine has what it needs.
        drop(opened);
        if let Some(left) = left_to_us {
            driver.take_up_all(left, epoch, policy);
        }
        Ok((driver, reason))
    }

    fn run(&mut self) -> Result<(), DriverError> {
        let mut ready = Vec::with_capacity(EVENTS_A_TURN);
        self.judge_devices();
        loop {
            self.sleep(&mut ready)?;
            for event in &ready {
                match Source::unpack(event.data) {
                    Source::Inbox => self.read_inbox(),
                    Source::Engine => self.reap()?,
                    Source::Listener => self.accept_at = Some(Instant::now()),
                    Source::Hello(key) => self.hello(key),
                    Source::Doorbell(session) => {
                        if !self.handing && !self.busy.contains(&session) {
                            self.busy.push_back(session);
                        }
                    }
                    // Nothing is ever sent over it, so anything is its end. A pidfd is readable when the process is gone.
                    Source::LifeLine(session) => self.gone(session, "its process ended"),
                }
            }
            for _ in 0..self.busy.len() {
                self.serve_ring();
            }
            self.expire();
            self.judge_devices();
            self.keep_wear(false);
            self.move_tiles();
            self.accept();
            self.decide();
            self.close_left();
            self.hand_over()?;
            self.free_ended();
            for session in self.sessions.values_mut() {
                session.ring();
            }
            self.answer_lookers();
            if self.ended_in_order()? {
                return Ok(());
            }
            for waiter in self.turn_waiters.drain(..) {
                let _ = waiter.send(());
            }
        }
    }

    fn read_inbox(&mut self) {
        self.inbox.drain();
        for taken in 0.. {
            if taken == MESSAGES_A_TURN {
                return self.inbox.ring();
            }
            let Some(message) = self.inbox.take() else {
                return;
            };
            match message {
                Message::Call {
                    peer,
                    request,
                    answer,
                } => {
                    if self.stop_deadline.is_some() {
                        let _ = answer.send(Err(stopping()));
                        continue;
                    }
                    if self.calls.len() >= CALLS_MAX {
                        let what = format!("{CALLS_MAX} calls wait for their answer already");
                        let _ = answer.send(Err(Fault::new(FaultKind::TooMany, what)));
                        continue;
                    }
                    let call = CallId(self.calls_made);
                    self.calls_made += 1;
                    let counted = self.count_call(&request, peer);
                    self.calls.insert(call, Waiting { answer, counted });
                    self.events.push_back(Event::Call {
                        call,
                        peer,
                        request,
                    });
                }
                Message::AddDevice {
                    peer,
                    file,
                    device,
                    moved,
                    answer,
                } => self.add_device(peer, file, device, moved, answer),
                Message::MovedBeside { device, moved } => self.ledger.moved_beside(device, moved),
                Message::File { device, answer } => {
                    // An error means that nobody waits for it any more.
                    let _ = answer.send(self.files[device.0 as usize].clone());
                }
                Message::Look { viewer, answer } => {
                    if self.metrics_waiters.len() < CALLS_MAX {
                        self.metrics_waiters.push((viewer, answer));
                    } else {
                        let what = format!("{CALLS_MAX} look at the metrics already");
                        let _ = answer.send(Err(Fault::new(FaultKind::TooMany, what)));
                    }
                }
                Message::Made { session, made } => self.made(session, made),
                Message::Ask(question) => (question.0)(&self.core),
                Message::Damaged { uid, job, damage } => {
                    let place = self.ledger.place(uid, &job);
                    self.hear_damage(place, uid, damage);
                }
                Message::Reported { uid, job, damage } => {
                    if self.core.confirm_damage(uid, &job, &damage) {
                        let place = self.ledger.place(uid, &job);
                        self.hear_damage(place, uid, damage);
                    }
                }
                Message::Change(change) => {
                    self.limits = change.limits;
                    self.keeper.limit(change.limits.arena_bytes_max);
                    self.ledger.rate(change.ratings);
                    self.events.push_back(Event::Limits(change.limits));
                    self.events.push_back(Event::Quotas(change.quotas));
                }
                Message::Turn(waiter) => self.turn_waiters.push(waiter),
                Message::Stop => self.stop(),
                Message::HandOver => self.begin_to_hand_over(),
            }
            self.decide();
        }
    }

    fn reap(&mut self) -> Result<(), DriverError> {
        self.engine.reap(&mut self.ended)?;
        let now = Instant::now();
        for piece in self.ended.drain(..) {
            let Some(done) = self.queue.ended(piece, now) else {
                continue;
            };
            if done.id.0 & WEAR_IO != 0 {
                let device = DeviceIndex((done.id.0 & !WEAR_IO) as u32);
                let moved_bytes = done.outcome.ok().map(u64::from);
                if !self.ledger.wear_kept(device, moved_bytes) {
                    let why = match done.outcome {
                        Err(errno) => std::io::Error::from_raw_os_error(errno).to_string(),
                        Ok(moved) => format!("only {moved} bytes moved"),
                    };
                    tracing::warn!(
                        "how far device {} is worn could not be kept on it, tried again later: {why}",
                        self.core.device_states()[device.0 as usize].path
                    );
                }
                continue;
            }
            self.ledger.ended(&done, now);
            self.events.push_back(Event::IoDone {
                io: done.id,
                result: IoResult {
                    outcome: done.outcome,
                    device_ns: done.device_ns,
                },
                read: match done.memory {
                    Memory::Meta(own) => Some(own),
                    Memory::Arena { .. } | Memory::None => None,
                },
            });
        }
        Ok(())
    }

    /// Gives the engine what its devices have room for.
    fn hand_over(&mut self) -> Result<(), DriverError> {
        self.queue.start(Instant::now(), &mut self.pieces);
        for piece in self.pieces.drain(..) {
            self.engine.submit(piece);
        }
        Ok(self.engine.start()?)
    }

    /// One turn of the ring that has waited longest.
    fn serve_ring(&mut self) {
        let Some(id) = self.busy.pop_front() else {
            return;
        };
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        self.entries.clear();
        let taken = session.take(ENTRIES_A_TURN, &mut self.entries);
        if self.entries.len() == ENTRIES_A_TURN {
            self.busy.push_back(id);
        }
        for entry in self.entries.drain(..) {
            self.events
                .push_back(Event::Submission { session: id, entry });
        }
        if let Err(error) = taken {
            self.gone(id, &error.to_string());
        }
    }

    fn watch(&self, fd: impl AsFd, source: Source, flags: EventFlags) -> Result<(), DriverError> {
        epoll::add(&self.epoll, fd, source.pack(), flags)
            .map_err(|e| system(format!("watching {source:?}"))(e.into()))
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.descriptor_socket);
    }
}
