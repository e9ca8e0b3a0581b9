//! Devices that are added and drained, and the pace at which tiles move: at full speed without sessions, a quarter of the time with
//! them, so that jobs keep their bandwidth; and never faster than the configured limit.

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use offload_api::fault::{Fault, FaultKind};
use offload_api::ids::DeviceIndex;
use tokio::sync::oneshot;

use super::inbox::stopping;
use super::{AnswerNote, CALLS_MAX, Driver, Waiting};
use crate::core::{Call, CallId, Event, Moves, NewDevice, Peer, Reply};
use crate::metrics::MovedBeside;
use crate::queue::DeviceLimits;
use crate::rate_limiter::RateLimiter;

/// While sessions are open, a batch is followed by a pause of this many times its duration.
const RESTS: u32 = 3;

/// Limit of that pause.
const REST_MAX: Duration = Duration::from_secs(10);

/// Interval of checks while all remaining tiles wait for their job's next write or commit.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// After this time without progress, tiles are copied even if their job may write them soon.
const PATIENCE: Duration = Duration::from_secs(10);

/// Interval of retries after a failure.
const RETRY: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(super) struct Pacing {
    next: Instant,
    /// Start of the current batch, and the bytes copied before it.
    began: Option<(Instant, u64)>,
    rate_limiter: RateLimiter,
    /// When tiles last moved, or will be allowed to by the limit.
    progress: Instant,
    logged_stopped: bool,
}

impl Pacing {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            next: now,
            began: None,
            rate_limiter: RateLimiter::default(),
            progress: now,
            logged_stopped: false,
        }
    }
}

impl Driver {
    /// When to call [`Self::move_tiles`] next.
    pub(super) fn move_at(&self) -> Option<Instant> {
        match self.core.moves() {
            Moves::Waiting if self.stop_deadline.is_none() => Some(self.may_move_at()),
            Moves::Stopped if self.stop_deadline.is_none() => Some(self.pacing.next),
            _ => None,
        }
    }

    /// When the next batch may start.
    fn may_move_at(&self) -> Instant {
        let allowed = self.allowed_at();
        allowed.map_or(self.pacing.next, |at| at.max(self.pacing.next))
    }

    /// When the rate limit allows the next batch.
    fn allowed_at(&self) -> Option<Instant> {
        (self.pacing.rate_limiter).next(self.core.rebalance_bytes_per_s_max())
    }

    /// Starts the next batch of moves, if tiles are to move and it is time.
    pub(super) fn move_tiles(&mut self) {
        if self.stop_deadline.is_some() {
            return;
        }
        let now = Instant::now();
        match self.core.moves() {
            Moves::Moving => {}
            Moves::None => self.pacing.progress = now,
            Moves::Stopped => {
                if !std::mem::replace(&mut self.pacing.logged_stopped, true) {
                    let states = self.core.device_states();
                    let why = states.into_iter().find_map(|state| state.status.stuck);
                    tracing::error!(
                        "tiles cannot be moved to or from a device: {}; will retry every {} s",
                        why.unwrap_or_default(),
                        RETRY.as_secs()
                    );
                    self.pacing.next = now + RETRY;
                } else if now >= self.pacing.next {
                    self.pacing.next = now + RETRY;
                    self.events.push_back(Event::RetryMoves);
                    self.decide();
                }
            }
            Moves::Waiting => {
                if let Some((began, copied_before)) = self.pacing.began.take() {
                    let copied_bytes = self.core.copied_bytes() - copied_before;
                    self.pacing.rate_limiter.copied(began, copied_bytes);
                    let took = now.saturating_duration_since(began);
                    let rests = if self.sessions.is_empty() { 0 } else { RESTS };
                    self.pacing.next = now + (took * rests).min(REST_MAX);
                    // Waiting for the rate limit does not count as missing progress.
                    self.pacing.progress = self.allowed_at().map_or(now, |at| at.max(now));
                    self.pacing.logged_stopped = false;
                }
                if now < self.may_move_at() {
                    return;
                }
                let force = now.saturating_duration_since(self.pacing.progress) > PATIENCE;
                let copied_bytes = self.core.copied_bytes();
                self.events.push_back(Event::RebalanceTick { force });
                self.decide();
                match self.core.moves() {
                    Moves::Moving => self.pacing.began = Some((now, copied_bytes)),
                    _ => self.pacing.next = now + CHECK_INTERVAL,
                }
            }
        }
    }

    /// Adds a device to engine, queue and ledger, then to the core. Its index stays used even if the core refuses it.
    pub(super) fn add_device(
        &mut self,
        peer: Peer,
        file: Arc<File>,
        device: NewDevice,
        moved: MovedBeside,
        answer: oneshot::Sender<Result<Reply, Fault>>,
    ) {
        if self.stop_deadline.is_some() {
            let _ = answer.send(Err(stopping()));
            return;
        }
        let limits = DeviceLimits::for_device(&file, &device.rates);
        let room = if self.calls.len() < CALLS_MAX {
            self.core.check_growth()
        } else {
            let what = format!("{CALLS_MAX} calls already wait for an answer");
            Err(Fault::new(FaultKind::TooMany, what))
        };
        let added = room.and_then(|()| {
            (self.engine.add(file.clone())).map_err(|e| Fault::new(FaultKind::Io, e.to_string()))
        });
        if let Err(fault) = added {
            let _ = answer.send(Err(fault));
            return;
        }
        let index = DeviceIndex(self.core.device_states().len() as u32);
        self.had_holes.push(super::has_holes(&file));
        self.files.push(Some(file));
        self.queue.add(&limits);
        self.ledger.add_device(&device.rates, Instant::now());
        self.ledger.moved_beside(index, moved);
        let call = CallId(self.calls_made);
        self.calls_made += 1;
        let waiting = Waiting {
            peer,
            answer,
            noted: AnswerNote::AddDevice(index),
        };
        self.calls.insert(call, waiting);
        self.events.push_back(Event::Call {
            call,
            peer,
            request: Call::AddDevice(device),
        });
    }

    pub(super) fn device_answered(
        &mut self,
        peer: Peer,
        device: DeviceIndex,
        reply: Option<&Reply>,
    ) {
        let Peer { uid, pid } = peer;
        let path = |driver: &Self| {
            let state = driver.core.device_states().swap_remove(device.0 as usize);
            state.path
        };
        if let Some(Reply::AddDevice { .. }) = reply {
            tracing::info!(
                uid,
                pid,
                "added device {} to the store; tiles move to it. Add it to `devices` in the settings before the next start",
                path(self)
            );
        } else {
            self.close_device(device);
        }
    }

    pub(super) fn forget_device(&mut self, device: DeviceIndex) {
        let state = self.core.device_states().swap_remove(device.0 as usize);
        tracing::info!(
            "drained device {}, which is not part of the store any more: remove it from `devices` in the settings",
            state.path
        );
        self.close_device(device);
    }

    fn close_device(&mut self, device: DeviceIndex) {
        self.files[device.0 as usize] = None;
        if let Err(error) = self.engine.remove(device) {
            tracing::warn!(%error, "cannot close a device that left the store; it stays open until offloadd ends");
        }
    }
}
