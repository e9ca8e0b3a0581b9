//! Heartbeats of all ranks, and the detection of dead ranks from them.
//!
//! ```text
//!   thread, each beat:   write own count ──▶ store ──▶ read the others' counts ──▶ HeartbeatState ──▶ verdict()
//! ```
//!
//! Heartbeats have their own thread, so that a rank in a long computation still sends them and a stopped or dead one
//! does not. Silence is measured in rounds of this thread instead of time: a node that sleeps for a minute accuses
//! nobody when it wakes.
//!
//! The responsible rank is the one whose heartbeat stopped first: ranks that give up because of it stop later.

mod dir;
mod heartbeat_store;

use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use dir::DirHeartbeatStore;
pub use heartbeat_store::{BEAT_BYTES, Beat, HeartbeatStore, LastHeartbeat};

use crate::{CollectiveError, Timeouts, World};

/// Rounds without a heartbeat after which a rank may be the first that stopped. Two rounds may pass between two
/// heartbeats of alternating threads.
const SUSPECT_ROUNDS: u64 = 4;

/// Rounds that an ended rank may be behind before it is held responsible: its last messages may still arrive.
const END_ROUNDS: u64 = 2;

/// This rank's heartbeat and its view of the others.
pub struct Heartbeat {
    shared: Arc<HeartbeatState>,
    thread: Option<JoinHandle<()>>,
}

/// State shared by the thread and the callers.
struct HeartbeatState {
    world: World,
    timeouts: Timeouts,
    /// The rank whose process runs the store, or the error to report if none does.
    host: Option<u32>,
    place: String,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    own: Beat,
    peers: Vec<Peer>,
    /// Rounds done.
    round: u64,
    /// Start of the round in progress; `None` between rounds.
    began: Option<Instant>,
    /// The store no longer answers.
    lost: Option<CollectiveError>,
    /// Part of `own` is not in the store yet.
    unwritten: bool,
    stop: bool,
    stopped: bool,
}

/// Another rank as seen from here.
#[derive(Clone, Default)]
struct Peer {
    present: bool,
    beat: Beat,
    /// Our round in which its count last changed.
    beat_round: u64,
    dead: bool,
}

impl Heartbeat {
    /// Starts sending heartbeats to `heartbeat_store`. `host` is the rank whose process runs the store, if one does.
    pub fn start(
        world: World,
        timeouts: Timeouts,
        heartbeat_store: Box<dyn HeartbeatStore>,
        host: Option<u32>,
        place: String,
    ) -> Heartbeat {
        let shared = Arc::new(HeartbeatState {
            world,
            timeouts,
            host,
            place,
            state: Mutex::new(State {
                own: Beat::default(),
                peers: vec![Peer::default(); world.ranks as usize],
                round: 0,
                began: None,
                lost: None,
                unwritten: true,
                stop: false,
                stopped: false,
            }),
            changed: Condvar::new(),
        });
        let for_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("pulse".to_owned())
            .spawn(move || for_thread.beat(heartbeat_store))
            .expect("a process may start a thread");
        Heartbeat {
            shared,
            thread: Some(thread),
        }
    }

    /// Ranks that have not come to the rendezvous, as far as known.
    pub fn absent(&self) -> Vec<u32> {
        let state = self.shared.lock();
        self.shared
            .peers()
            .filter(|&rank| !state.peers[rank as usize].present)
            .collect()
    }

    /// Whether all other ranks have ended, as far as known.
    pub fn others_ended(&self) -> bool {
        let state = self.shared.lock();
        let ended = |rank: u32| state.peers[rank as usize].beat.end.is_some();
        self.shared.peers().all(ended)
    }

    /// Records that this rank has reached operation number `reached`.
    pub fn reached(&self, reached: u64) {
        let mut state = self.shared.lock();
        state.own.reached = reached;
        state.unwritten = true;
    }

    /// Ranks that have not reached operation number `reached`, as far as known.
    pub fn behind(&self, reached: u64) -> Vec<u32> {
        let state = self.shared.lock();
        self.shared
            .peers()
            .filter(|&rank| state.peers[rank as usize].beat.reached < reached)
            .collect()
    }

    /// The error of a dead rank, for a caller in `op`; `None` while none is known.
    pub fn verdict(&self, op: &str) -> Option<CollectiveError> {
        self.shared.verdict(op)
    }

    /// Tells the other ranks that this rank ends, and why. Returns when that is written, or after two heartbeats.
    pub fn end(&self, reason: &str) {
        let mut state = self.shared.lock();
        if state.own.end.is_some() {
            return;
        }
        state.own.end = Some(reason.to_owned());
        state.unwritten = true;
        self.shared.changed.notify_all();
        let bound = 2 * self.shared.timeouts.beat;
        drop(
            self.shared
                .changed
                .wait_timeout_while(state, bound, |state| state.unwritten && !state.stopped)
                .expect("the thread does not panic"),
        );
    }

    /// The reason with which this rank has ended.
    pub fn own_end(&self) -> Option<String> {
        self.shared.lock().own.end.clone()
    }

    /// Waits until all other ranks have ended, or for the rounds that they need to notice that this rank has.
    pub fn wait_for_ends(&self) {
        let state = self.shared.lock();
        let enough = state.round + END_ROUNDS + 2;
        let bound = (END_ROUNDS as u32 + 4) * self.shared.timeouts.beat;
        let going_on = |state: &mut State| {
            let on = |rank: u32| state.peers[rank as usize].beat.end.is_none();
            state.round < enough && !state.stopped && self.shared.peers().any(on)
        };
        drop(
            self.shared
                .changed
                .wait_timeout_while(state, bound, going_on)
                .expect("the thread does not panic"),
        );
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.stop = true;
        self.shared.changed.notify_all();
        let bound = 2 * self.shared.timeouts.beat;
        let (state, _) = self
            .shared
            .changed
            .wait_timeout_while(state, bound, |state| !state.stopped)
            .expect("the thread does not panic");
        let stopped = state.stopped;
        drop(state);
        // A thread that hangs in a store whose host is gone is left behind; it ends with the process.
        if let (true, Some(thread)) = (stopped, self.thread.take()) {
            let _ = thread.join();
        }
    }
}

impl HeartbeatState {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nobody panics with the lock")
    }

    fn peers(&self) -> impl Iterator<Item = u32> + use<> {
        let own = self.world.rank;
        (0..self.world.ranks).filter(move |&rank| rank != own)
    }

    fn beat(&self, mut heartbeat_store: Box<dyn HeartbeatStore>) {
        let mut state = self.lock();
        // A rank that has ended counts no further, so the others see that it is gone while its process lives on.
        let mut counts = true;
        loop {
            state.own.count += u64::from(counts);
            let own = state.own.clone();
            state.began = Some(Instant::now());
            drop(state);
            let seen = heartbeat_store.write(&own).and_then(|()| {
                self.peers()
                    .map(|rank| Ok((rank, heartbeat_store.read(rank)?)))
                    .collect::<Result<Vec<_>, _>>()
            });
            state = self.lock();
            state.began = None;
            state.round += 1;
            state.unwritten = state.own.end != own.end;
            counts = own.end.is_none();
            match seen {
                Ok(seen) => state.see(seen),
                Err(error) => state.lost = Some(error),
            }
            self.changed.notify_all();
            if state.stop || state.lost.is_some() {
                break;
            }
            if !state.unwritten {
                let asleep =
                    |state: &mut State| !(state.stop || state.unwritten && state.own.end.is_some());
                state = self
                    .changed
                    .wait_timeout_while(state, self.timeouts.beat, asleep)
                    .expect("nobody panics with the lock")
                    .0;
                if state.stop && !state.unwritten {
                    break;
                }
            }
        }
        state.stopped = true;
        drop(state);
        self.changed.notify_all();
    }

    fn verdict(&self, op: &str) -> Option<CollectiveError> {
        let state = self.lock();
        let rounds =
            |time: Duration| (time.as_secs_f64() / self.timeouts.beat.as_secs_f64()).ceil() as u64;
        let silence_rounds = rounds(self.timeouts.silence);
        let quiet = |peer: &Peer| state.round - peer.beat_round;
        let first = self
            .peers()
            .filter(|&rank| state.peers[rank as usize].present)
            .filter(|&rank| {
                let peer = &state.peers[rank as usize];
                peer.dead || peer.beat.end.is_some() || quiet(peer) >= SUSPECT_ROUNDS
            })
            // If two ranks are found dead in one round, one that gave a reason may refer to the other.
            .min_by_key(|&rank| {
                let peer = &state.peers[rank as usize];
                (peer.beat_round, peer.beat.end.is_some())
            });
        if let Some(rank) = first {
            let peer = &state.peers[rank as usize];
            if let Some(reason) = &peer.beat.end {
                let settled = quiet(peer) >= END_ROUNDS || state.lost.is_some();
                return settled.then(|| CollectiveError::Left {
                    rank,
                    waiting: self.world.rank,
                    op: op.to_owned(),
                    reason: reason.clone(),
                });
            }
            if peer.dead {
                return Some(CollectiveError::Died {
                    rank,
                    op: op.to_owned(),
                });
            }
            if quiet(peer) >= silence_rounds {
                return Some(CollectiveError::Silent {
                    rank,
                    silent_s: quiet(peer) as f64 * self.timeouts.beat.as_secs_f64(),
                    op: op.to_owned(),
                });
            }
        }
        self.store_verdict(&state, op)
    }

    /// The error of a store that is gone, and with it the rank that runs it.
    fn store_verdict(&self, state: &State, op: &str) -> Option<CollectiveError> {
        if let Some(error) = &state.lost {
            return Some(match self.host {
                Some(rank) if rank != self.world.rank => CollectiveError::Died {
                    rank,
                    op: op.to_owned(),
                },
                _ => error.clone(),
            });
        }
        let silent = state.began?.elapsed();
        if silent < self.timeouts.silence {
            return None;
        }
        Some(match self.host {
            Some(rank) if rank != self.world.rank => CollectiveError::Silent {
                rank,
                silent_s: silent.as_secs_f64(),
                op: op.to_owned(),
            },
            _ => CollectiveError::Rendezvous {
                op: "a heartbeat",
                place: self.place.clone(),
                message: format!("no answer for {:.1} s", silent.as_secs_f64()),
            },
        })
    }
}

impl State {
    fn see(&mut self, seen: Vec<(u32, LastHeartbeat)>) {
        for (rank, seen) in seen {
            let peer = &mut self.peers[rank as usize];
            let (beat, dead) = match seen {
                LastHeartbeat::Nothing => continue,
                LastHeartbeat::Beat(beat) => (beat, false),
                LastHeartbeat::Dead(beat) => (beat, true),
            };
            // A heartbeat that cannot be parsed is ignored: the next one will follow.
            if let Some(beat) = beat
                && (!peer.present || beat.count != peer.beat.count)
            {
                peer.beat = beat;
                peer.beat_round = self.round;
            }
            if !peer.present {
                peer.beat_round = self.round;
            }
            peer.present = true;
            peer.dead |= dead;
        }
    }
}

#[cfg(test)]
mod tests;
