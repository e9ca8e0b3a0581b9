//! An engine that slows devices down to the speed a test asks for: each device moves one operation after the other, reads and
//! writes independently, and an operation ends when its bytes have had their time.
//!
//! ```text
//!   submit ──▶ due = max(now, when the device is free that way) + bytes / rate      ──▶ the real engine at once
//!   reap   ◀── what has ended really, and is due; a timer tells when the next one is
//! ```
//!
//! In test builds only (`test_hooks::rate_limit`): runs on any machine then have drives of a known speed, and their steps can
//! be compared with the predicted bound. The device below must be faster than the limit.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};
use test_hooks::rate_limit::{RateLimit, RateLimits};

use super::{Engine, EngineError, Io, IoDone, path_of};
use crate::io::{IoId, IoOp};

/// Returns the speed of the device that `file` is.
pub(super) fn rate_limit(file: &File, limits: &RateLimits) -> RateLimit {
    let path = path_of(file);
    let name = path.and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
    limits.for_file(&name.unwrap_or_default())
}

/// An engine with limited devices.
#[derive(Debug)]
pub struct RateLimited {
    inner: Engine,
    /// Speed of each device.
    limits: Vec<RateLimit>,
    /// When each device will have moved everything it was given, for reads and writes.
    free: Vec<[Instant; 2]>,
    /// When each operation may end, and when it was submitted.
    due: HashMap<IoId, (Instant, Instant)>,
    /// Operations that ended below and are not due, by time.
    next: BinaryHeap<Reverse<(Instant, IoId)>>,
    early: HashMap<IoId, IoDone>,
    timer: OwnedFd,
    /// Readable when the engine below or the timer is.
    wake: OwnedFd,
}

impl RateLimited {
    /// Limits the devices of `inner`, in their order.
    ///
    /// # Errors
    /// No descriptors are left.
    pub(crate) fn new(inner: Engine, limits: Vec<RateLimit>) -> Result<Self, EngineError> {
        let broken = |action| {
            move |errno: rustix::io::Errno| EngineError::Broken {
                engine: "rate-limited",
                action,
                source: errno.into(),
            }
        };
        let timer = timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK,
        )
        .map_err(broken("timerfd_create"))?;
        let wake = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(broken("epoll_create"))?;
        for source in [timer.as_fd(), inner.wake()] {
            epoll::add(&wake, source, EventData::new_u64(0), EventFlags::IN)
                .map_err(broken("epoll_ctl"))?;
        }
        Ok(Self {
            inner,
            free: vec![[Instant::now(); 2]; limits.len()],
            limits,
            due: HashMap::new(),
            next: BinaryHeap::new(),
            early: HashMap::new(),
            timer,
            wake,
        })
    }

    pub(super) fn inner(&self) -> &Engine {
        &self.inner
    }

    pub(super) fn inner_mut(&mut self) -> &mut Engine {
        &mut self.inner
    }

    pub(super) fn submit(&mut self, io: Io) {
        let now = Instant::now();
        let limit = self.limits[io.device.0 as usize];
        let due = match io.op {
            IoOp::Read => self.queue(&io, 0, limit.read_bytes_per_s, now),
            IoOp::Write => self.queue(&io, 1, limit.write_bytes_per_s, now),
            IoOp::Flush => now,
        };
        let before = self.due.insert(io.id, (due, now));
        assert!(before.is_none(), "{:?} is in flight already", io.id);
        self.inner.submit(io);
    }

    /// Adds a device, behind the others.
    pub(super) fn add(&mut self, file: Arc<File>) -> Result<(), EngineError> {
        let limit = test_hooks::rate_limit::limits().map(|limits| rate_limit(&file, &limits));
        self.inner.add(file)?;
        self.limits
            .push(limit.expect("engines are limited only then"));
        self.free.push([Instant::now(); 2]);
        Ok(())
    }

    fn queue(&mut self, io: &Io, direction: usize, rate: u64, now: Instant) -> Instant {
        let free = &mut self.free[io.device.0 as usize][direction];
        let time = Duration::from_secs_f64(f64::from(io.bytes) / rate as f64);
        *free = (*free).max(now) + time;
        *free
    }

    pub(super) fn reap(&mut self, done: &mut Vec<IoDone>) -> Result<(), EngineError> {
        let mut ended = Vec::new();
        self.inner.reap(&mut ended)?;
        for one in ended {
            let (due, _) = self.due[&one.id];
            self.next.push(Reverse((due, one.id)));
            self.early.insert(one.id, one);
        }
        // The timer's signal is taken before the clock is read: an operation that becomes due in between signals again.
        let _ = rustix::io::read(&self.timer, &mut [0u8; 8]);
        let now = Instant::now();
        while let Some(&Reverse((due, id))) = self.next.peek()
            && due <= now
        {
            self.next.pop();
            let (_, since) = self.due.remove(&id).expect("submitted");
            let mut one = self.early.remove(&id).expect("ended");
            one.device_ns = since.elapsed().as_nanos() as u64;
            done.push(one);
        }
        self.arm(now)
    }

    /// Sets the timer to the next due operation, or to never.
    fn arm(&self, now: Instant) -> Result<(), EngineError> {
        let left = match self.next.peek() {
            // Zero would mean never.
            Some(Reverse((due, _))) => (*due - now).max(Duration::from_nanos(1)),
            None => Duration::ZERO,
        };
        let once = Itimerspec {
            it_interval: Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            },
            it_value: Timespec::try_from(left).expect("a short time"),
        };
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once)
            .map(drop)
            .map_err(|errno| EngineError::Broken {
                engine: "rate-limited",
                action: "timerfd_settime",
                source: errno.into(),
            })
    }

    pub(super) fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    pub(super) fn inflight_count(&self) -> usize {
        self.due.len()
    }
}
