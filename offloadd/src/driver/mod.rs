//! The owner thread: waits for events, passes them to the core, and performs the actions that the core returns.
//!
//! ```text
//!   inbox (calls, memory made) ─┐                      ┌─▶ queue ─▶ engine
//!   submission doorbells ───────┤        Event         ├─▶ completion rings, doorbells
//!   engine's wake-up ───────────┼─▶ epoll ───▶ core ───┼─▶ answers to calls
//!   descriptor socket, hellos ──┤         Action       ├─▶ keeper (make, free memory)
//!   life lines, pidfds ─────────┘                      └─▶ evict
//! ```
//!
//! The thread never blocks on a process, a device or memory. It takes a limited number of entries from each ring in turn, so that a
//! busy or hostile process does not delay others. It frees a session's memory only when the core reports that its I/O has ended.

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
use offload_api::ids::Epoch;
use offload_api::ring::entry::Sqe;
use rustix::event::epoll::{self, EventFlags};
use tokio::sync::oneshot;

use crate::arena::LockPolicy;
use crate::blocks::BlockError;
use crate::core::{Action, CallId, Core, Event, Viewer};
use crate::device::{Device, is_sparse};
use crate::engine::{Engine, EngineChoice, EngineError, Io, IoDone, Memory};
use crate::handover::HandedOver;
use crate::io::{IoResult, SessionId};
use crate::metrics::Ledger;
use crate::numa;
use crate::queue::{DeviceLimits, Queue};
use crate::quota::{Limits, Quotas};
use crate::store::DEVICES_MAX;

mod actions;
mod attach;
mod counting;
mod handing;
mod inbox;
mod keeper;
mod lifecycle;
mod moving;
mod process;
mod session;
mod session_memory;
mod sleep;
mod source;
mod stop;
mod trace;

use actions::{AnswerNote, Waiting};
use attach::Hello;
pub use handing::{InheritedSession, InheritedSessions};
pub use inbox::{DriverHandle, SettingsChange};
use inbox::{Inbox, Message, SnapshotAnswer, stopping};
use keeper::{Ending, Keeper};
use moving::Pacing;
use session::DriverSession;
use source::Source;
use trace::Spans;

/// Limit of calls that wait for the core's answer; a commit waits for the slowest local rank.
const CALLS_MAX: usize = 4096;

/// Submissions taken from one ring before the next ring has its turn.
const ENTRIES_A_TURN: usize = 64;

/// Messages taken before rings and devices have their turn.
const MESSAGES_A_TURN: usize = 256;

/// Events taken from the kernel at a time.
const EVENTS_A_TURN: usize = 64;

/// Engine operations per session beyond its tiles: records, catalog, flushes of commits.
const META_A_SESSION: usize = 64 + 16;

/// How long a stop waits for I/O in flight; a dead drive must not keep the daemon from ending.
const STOP_WAIT: Duration = Duration::from_secs(60);

/// Parts of the owner thread.
pub struct Parts {
    /// State and decisions.
    pub core: Core,
    /// Devices in the settings' order, locked; closed when the driver has started.
    pub opened: Vec<Device>,
    /// Error of a device on which the store could not be repaired; the store is then read-only.
    pub unwritable: Option<BlockError>,
    /// Files of the devices in the store's order.
    pub devices: Vec<Arc<File>>,
    /// Limits of each device, in the same order.
    pub device_limits: Vec<DeviceLimits>,
    /// Engine to open.
    pub engine: EngineChoice,
    /// Limits, the same as the core's.
    pub limits: Limits,
    /// Quotas of users and jobs.
    pub quotas: Quotas,
    /// Epoch of this incarnation, for the rings.
    pub epoch: Epoch,
    /// Whether arenas must be locked.
    pub policy: LockPolicy,
    /// Path of the descriptor socket; no file exists there.
    pub descriptor_socket: PathBuf,
    /// Sessions of the previous daemon, which `core` has adopted.
    pub inherited: Option<InheritedSessions>,
}

/// A running owner thread.
#[derive(Debug)]
pub struct Running {
    /// Sends messages to the thread.
    pub handle: DriverHandle,
    /// "uring", "aio" or "psync".
    pub engine: &'static str,
    pub engine_reason: String,
    /// Reason why the store is read-only, if it is.
    pub read_only: Option<String>,
    /// Returns what is handed over to the next daemon, or an error after which the daemon cannot continue.
    pub thread: JoinHandle<Result<Option<HandedOver>, DriverError>>,
}

/// Reason why the owner thread cannot start or continue.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// An engine could not be opened, or failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The metadata device failed a write, and sessions wait to be adopted by a daemon that can write.
    #[error(
        "starting to serve the store: {0}; the sessions of the previous daemon remain for the next start"
    )]
    Store(#[from] BlockError),
    /// A system call failed.
    #[error("{action}: {source}")]
    System {
        /// The attempted action.
        action: String,
        /// Error of the system.
        source: std::io::Error,
    },
    /// I/O did not end within the time limit of a stop.
    #[error("a device hangs: {} operations have not ended within {} s of the stop", inflight_count, STOP_WAIT.as_secs())]
    Hanging {
        /// Operations in flight.
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
            // On this thread, because io_uring belongs to the thread that creates it.
            let mut driver = match Driver::new(parts, inbox, to_keeper) {
                Ok((driver, mut reason)) => {
                    if let Some(place) = place {
                        reason = format!("{reason}; {place}");
                    }
                    let _ = ready.send(Ok((driver.engine.name(), reason, driver.read_only())));
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
    let (engine, engine_reason, read_only) = started
        .recv()
        .expect("the owner thread reports whether it started")?;
    Ok(Running {
        handle,
        engine,
        engine_reason,
        read_only,
        thread,
    })
}

/// What the owner thread has. One thread decides and submits everything, so no state of the daemon has a lock and each event is handled whole;
/// the price is that one core bounds the operations per second of all sessions together, and that nothing here may wait.
struct Driver {
    core: Core,
    queue: Queue,
    engine: Engine,
    /// By device index; `None` if the device has left the store.
    files: Vec<Option<Arc<File>>>,
    /// By device index: whether parts of its file had no space when it was opened.
    had_holes: Vec<bool>,
    keeper: Keeper,
    /// Memory of ended sessions that the kernel still uses, with the user ID.
    ending: Vec<(u32, Ending)>,
    epoll: OwnedFd,
    inbox: Inbox,
    listener: OwnedFd,
    descriptor_socket: PathBuf,
    hellos: HashMap<u64, Hello>,
    hellos_made: u64,
    /// When to accept connections next; `None` if none wait.
    accept_at: Option<Instant>,
    sessions: HashMap<SessionId, DriverSession>,
    /// Sessions whose rings may hold more entries.
    busy: VecDeque<SessionId>,
    calls: HashMap<CallId, Waiting>,
    calls_made: u64,
    limits: Limits,
    ledger: Ledger,
    metrics_waiters: Vec<(Viewer, SnapshotAnswer)>,
    /// Answered at the end of this turn.
    turn_waiters: Vec<oneshot::Sender<()>>,
    /// Time of the next snapshot for `metrics_waiters`.
    snapshot_at: Instant,
    /// Devices whose trouble has been logged.
    in_trouble: [bool; DEVICES_MAX as usize],
    pacing: Pacing,
    spans: Spans,
    events: VecDeque<Event>,
    actions: Vec<Action>,
    pieces: Vec<Io>,
    ended: Vec<IoDone>,
    entries: Vec<Sqe>,
    stop_deadline: Option<Instant>,
    /// Whether the stop hands the sessions over to the next daemon.
    handing: bool,
    /// Whether the flush of the sessions' writes before the hand-over has been started.
    handing_flushed: bool,
    /// Time of the next log line about a stop that takes long.
    report_stop_at: Option<Instant>,
}

fn has_holes(file: &File) -> bool {
    file.metadata().is_ok_and(|found| is_sparse(&found))
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
            policy,
            descriptor_socket,
            inherited,
        } = parts;
        let a_session = limits.iodepth_max as usize + META_A_SESSION;
        // Devices may be added later.
        let devices_max = devices.len().max(DEVICES_MAX as usize);
        let operations_max = limits.sessions_max as usize * a_session;
        let inflight_max = Queue::inflight_max(devices_max, operations_max);
        let (engine, reason) = Engine::open(engine, &devices, inflight_max)?;
        let keeper = Keeper::new(handle, epoch, policy, limits.arena_bytes_max);
        let listener = handoff::listen(&descriptor_socket).map_err(system(format!(
            "listening at {}",
            descriptor_socket.display()
        )))?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|e| system("epoll_create")(e.into()))?;
        let ledger = Ledger::new(&core.device_states(), Instant::now());
        let mut driver = Self {
            core,
            queue: Queue::new(&device_limits),
            engine,
            had_holes: devices.iter().map(|file| has_holes(file)).collect(),
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
            snapshot_at: Instant::now(),
            in_trouble: [false; DEVICES_MAX as usize],
            pacing: Pacing::new(Instant::now()),
            spans: Spans::default(),
            events: VecDeque::from([Event::Quotas(quotas)]),
            actions: Vec::new(),
            pieces: Vec::new(),
            ended: Vec::new(),
            entries: Vec::new(),
            stop_deadline: None,
            handing: false,
            handing_flushed: false,
            report_stop_at: None,
        };
        driver.watch(driver.inbox.wake(), Source::Inbox, EventFlags::IN)?;
        driver.watch(driver.engine.wake(), Source::Engine, EventFlags::IN)?;
        // Edge-triggered: a connection that cannot be accepted yet must not wake the thread again and again.
        let edge = EventFlags::IN | EventFlags::ET;
        driver.watch(&driver.listener, Source::Listener, edge)?;
        // Inherited sessions can be claimed only once, so everything that can fail precedes this point.
        driver.begin_incarnation(&opened, unwritable, inherited.is_some())?;
        drop(opened);
        if let Some(inherited) = inherited {
            driver.adopt_all(inherited, epoch, policy);
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
                    // Nothing is ever sent over a life line, so an event means that it was closed. A pidfd is readable when its
                    // process has ended.
                    Source::LifeLine(session) => self.gone(session, "its process ended"),
                }
            }
            for _ in 0..self.busy.len() {
                self.serve_ring();
            }
            self.expire();
            self.judge_devices();
            self.move_tiles();
            self.accept();
            self.decide();
            self.submit_queued()?;
            self.free_ended();
            for session in self.sessions.values_mut() {
                session.ring();
            }
            self.answer_metrics();
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
            let Some(message) = self.inbox.next_message() else {
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
                        let what = format!("{CALLS_MAX} calls already wait for an answer");
                        let _ = answer.send(Err(Fault::new(FaultKind::TooMany, what)));
                        continue;
                    }
                    let call = CallId(self.calls_made);
                    self.calls_made += 1;
                    let noted = self.note_call(&request, peer);
                    let waiting = Waiting {
                        peer,
                        answer,
                        noted,
                    };
                    self.calls.insert(call, waiting);
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
                Message::Snapshot { viewer, answer } => {
                    if self.metrics_waiters.len() < CALLS_MAX {
                        self.metrics_waiters.push((viewer, answer));
                    } else {
                        let what = format!("{CALLS_MAX} metrics calls already wait for an answer");
                        let _ = answer.send(Err(Fault::new(FaultKind::TooMany, what)));
                    }
                }
                Message::Made { session, made } => self.made(session, made),
                Message::Ask(question) => question.answer(&self.core),
                Message::Damaged {
                    by_process,
                    uid,
                    job,
                    damage,
                } => {
                    // A process's report was compared with what was counted when it came.
                    if by_process || self.core.is_new_damage(uid, &job, &damage) {
                        let place = self.ledger.index_of(uid, &job);
                        self.report_damage(place, uid, damage, by_process);
                    }
                }
                Message::Change(change) => {
                    self.limits = change.limits;
                    self.keeper.limit(change.limits.arena_bytes_max);
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
        let mut failures = Vec::new();
        for piece in self.ended.drain(..) {
            let Some(done) = self.queue.ended(piece, now) else {
                continue;
            };
            if let Some(failed) = self.ledger.ended(&done, now) {
                failures.push((failed, done.outcome));
            }
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
        for (failed, outcome) in failures {
            self.report_failure(failed, outcome);
        }
        Ok(())
    }

    /// Submits queued operations as far as the devices' limits allow.
    fn submit_queued(&mut self) -> Result<(), DriverError> {
        self.queue.start(Instant::now(), &mut self.pieces);
        for piece in self.pieces.drain(..) {
            self.engine.submit(piece);
        }
        Ok(self.engine.start()?)
    }

    /// Takes submissions from the ring that has waited longest.
    fn serve_ring(&mut self) {
        let Some(id) = self.busy.pop_front() else {
            return;
        };
        let Some(session) = self.sessions.get_mut(&id) else {
            return;
        };
        self.entries.clear();
        let taken = session.take_submissions(ENTRIES_A_TURN, &mut self.entries);
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
