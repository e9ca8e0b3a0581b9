//! State shared by all calls of a rank: the group, the heartbeats, the operation counter and the first failure.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use super::connect::{CHECK_INTERVAL, Connections, attribute, connect, connect_side};
use super::gloo::{Group, Operation, Store};
use crate::HostBuffer;
use training_ranks::{CollectiveError, Heartbeat, Rendezvous, Timeouts, World};

/// Most operations in flight: each holds a buffer of a unit.
const IN_FLIGHT_MAX: usize = 16;

/// State shared by all calls of a rank.
pub(super) struct Link {
    pub(super) world: World,
    pub(super) timeouts: Timeouts,
    at: Rendezvous,
    state: Mutex<State>,
    heartbeat: Arc<Heartbeat>,
    /// Whether this is a second group beside the one that counts operations and ends with the rank.
    is_side: bool,
    /// The store's server, if this rank runs it.
    store: Mutex<Option<Store>>,
}

struct State {
    /// `None` after giving up.
    group: Option<Group>,
    /// Operations started, in the same order on all ranks.
    started: u64,
    in_flight: usize,
    /// The first failure. Ranks that continued after it would no longer be in the same operation.
    broken: Option<CollectiveError>,
    /// Receive buffers for reuse.
    scratch: Vec<HostBuffer>,
}

/// An operation in progress.
pub(super) struct StartedOperation {
    op: Operation,
    /// Number of the operation.
    number: u64,
    name: String,
}

impl Link {
    pub(super) fn open(
        world: World,
        at: &Rendezvous,
        timeouts: Timeouts,
    ) -> Result<Link, CollectiveError> {
        let connected = connect(world, at, timeouts)?;
        Ok(Link::new(world, at, timeouts, connected, false))
    }

    /// Connects the ranks of `world`, which are some or all of this group's, in another group called `name`. The operations
    /// of both may run beside each other, and both share heartbeats.
    pub(super) fn open_side(&self, world: World, name: &str) -> Result<Link, CollectiveError> {
        let timeouts = self.timeouts;
        let connected = Connections {
            group: connect_side(world, &self.at, timeouts, &self.heartbeat, name)?,
            heartbeat: Arc::clone(&self.heartbeat),
            store: None,
        };
        Ok(Link::new(world, &self.at, timeouts, connected, true))
    }

    fn new(
        world: World,
        at: &Rendezvous,
        timeouts: Timeouts,
        connected: Connections,
        is_side: bool,
    ) -> Link {
        Link {
            world,
            timeouts,
            at: at.clone(),
            state: Mutex::new(State {
                group: Some(connected.group),
                started: 0,
                in_flight: 0,
                broken: None,
                scratch: Vec::new(),
            }),
            heartbeat: connected.heartbeat,
            is_side,
            store: Mutex::new(connected.store),
        }
    }

    /// Starts an operation as the next in this rank's order.
    pub(super) fn start(
        &self,
        name: String,
        start: impl FnOnce(&mut Group) -> Result<Operation, String>,
    ) -> Result<StartedOperation, CollectiveError> {
        let mut state = self.lock();
        if let Some(error) = &state.broken {
            return Err(error.clone());
        }
        assert!(
            state.in_flight < IN_FLIGHT_MAX,
            "at most {IN_FLIGHT_MAX} operations in flight"
        );
        state.started += 1;
        let number = state.started;
        if !self.is_side {
            self.heartbeat.reached(number);
        }
        let group = state.group.as_mut().expect("there until it is broken");
        match start(group) {
            Ok(op) => {
                state.in_flight += 1;
                Ok(StartedOperation { op, number, name })
            }
            Err(message) => {
                drop(state);
                Err(self.fail(&name, message))
            }
        }
    }

    /// Waits until `started` has succeeded. After an error the operation may still be in progress.
    pub(super) fn wait(&self, started: &StartedOperation) -> Result<(), CollectiveError> {
        let ended = self.wait_for(started);
        let mut state = self.lock();
        state.in_flight -= 1;
        if let Err(error) = &ended {
            state.broken.get_or_insert_with(|| error.clone());
        }
        ended
    }

    fn wait_for(&self, started: &StartedOperation) -> Result<(), CollectiveError> {
        let began = Instant::now();
        let broken = self.lock().broken.clone();
        loop {
            match started.op.wait(CHECK_INTERVAL) {
                Some(Ok(())) => return Ok(()),
                Some(Err(message)) => return Err(self.fail(&started.name, message)),
                None => {}
            }
            // An earlier operation has already waited that long.
            if let Some(error) = &broken {
                return Err(error.clone());
            }
            if let Some(reason) = self.heartbeat.own_end() {
                let op = started.name.clone();
                return Err(CollectiveError::GivenUp { op, reason });
            }
            if let Some(gone) = self.heartbeat.verdict(&started.name) {
                return Err(gone);
            }
            let waited = began.elapsed();
            if waited < self.timeouts.operation {
                continue;
            }
            let (op, waited_s) = (started.name.clone(), waited.as_secs_f64());
            if self.is_side {
                // The heartbeats do not count these operations.
                let message =
                    format!("not done after {waited_s:.0} s although all ranks are alive");
                return Err(CollectiveError::Backend { op, message });
            }
            let ranks = self.heartbeat.behind(started.number);
            return Err(if ranks.is_empty() {
                CollectiveError::Slow { waited_s, op }
            } else {
                CollectiveError::Behind {
                    ranks,
                    waited_s,
                    op,
                }
            });
        }
    }

    /// The cause of a Gloo failure: a dead rank, or else Gloo itself.
    fn fail(&self, name: &str, message: String) -> CollectiveError {
        let error = attribute(&self.heartbeat, self.timeouts, name).unwrap_or_else(|| {
            CollectiveError::Backend {
                op: name.to_owned(),
                message,
            }
        });
        self.lock().broken.get_or_insert(error).clone()
    }

    /// A receive buffer of at least `bytes` bytes, if one is left over.
    pub(super) fn take_scratch(&self, bytes: usize) -> Option<HostBuffer> {
        let scratch = &mut self.lock().scratch;
        let found = scratch.iter().position(|buffer| buffer.elems() >= bytes)?;
        Some(scratch.swap_remove(found))
    }

    pub(super) fn give_scratch(&self, buffer: HostBuffer) {
        // Never more than were in flight at a time.
        self.lock().scratch.push(buffer);
    }

    /// The error of a dead rank, if one is known.
    pub(super) fn gone(&self, op: &str) -> Option<CollectiveError> {
        self.heartbeat.verdict(op)
    }

    /// After a failure: the error of the dead rank, once it is known.
    pub(super) fn attribute(&self, op: &str) -> Option<CollectiveError> {
        attribute(&self.heartbeat, self.timeouts, op)
    }

    /// Tells the other ranks that this rank ends.
    pub(super) fn end(&self, reason: &str) {
        self.heartbeat.end(reason);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nobody panics with the lock")
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if !self.is_side {
            self.heartbeat.end(if std::thread::panicking() {
                "it panicked"
            } else {
                "it ended early, without saying why"
            });
        }
        if self.store.get_mut().is_ok_and(|store| store.is_some()) {
            // The other ranks read there why this rank ends.
            self.heartbeat.wait_for_ends();
        }
        let state = self.state.get_mut().unwrap_or_else(|e| e.into_inner());
        if let (Some(_), Some(group)) = (&state.broken, state.group.take()) {
            // Gloo's threads may wait until the timeout of an operation that nobody will complete. Nobody waits for
            // them: the memory they touch was leaked.
            std::thread::spawn(move || drop(group));
        }
    }
}
