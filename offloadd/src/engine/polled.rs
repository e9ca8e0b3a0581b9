//! The engine on io_uring with polled completions: no interrupt tells that an operation has ended, the drive is asked.
//!
//! ```text
//!   reads, writes ─▶ a ring that polls ── wake() stays readable while it has operations: whoever waits comes back at once
//!   flushes ───────▶ a ring as usual   ── wake() as usual: a drive is not asked for these
//! ```
//!
//! It takes a whole processor as long as anything is in flight, and saves the interrupt and its way to the thread: little
//! beside what a tile of megabytes takes, so it is chosen by the settings alone, and by nobody who does not ask. Drives need queues for it (`nvme.poll_queues=N` on the kernel's command line).

use std::fs::File;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use offload_api::ids::DeviceIndex;

use super::uring::{Flavour, Uring};
use super::{EngineError, Io, IoDone, named};
use crate::arena::{Arena, ArenaId};
use crate::core::IoOp;
use crate::drive_queue::queue_number;

/// The engine.
#[derive(Debug)]
pub struct Polled {
    data: Uring,
    flushes: Uring,
    device_count: usize,
}

impl Polled {
    /// Sets both rings up.
    pub(super) fn open(devices: &[Arc<File>], inflight_max: usize) -> Result<Self, EngineError> {
        // Some kernels take operations for drives that cannot be asked, and wait for their interrupt all the same.
        let without = |file: &&Arc<File>| queue_number(file, "io_poll") != Some(1);
        if let Some(place) = devices.iter().position(|file| without(&file)) {
            return Err(EngineError::Unavailable {
                engine: "polled",
                why: format!(
                    "{} has no queue that can be polled (nvme.poll_queues=N on the kernel's command line)",
                    named(place, &devices[place])
                ),
            });
        }
        let flushes = Uring::open(devices, inflight_max, Flavour::Plain)?;
        let data = Uring::open(devices, inflight_max, Flavour::Polled)?;
        Ok(Self {
            data,
            flushes,
            device_count: devices.len(),
        })
    }

    /// One more device, behind the others.
    pub(super) fn add(&mut self, file: Arc<File>) -> Result<(), EngineError> {
        if queue_number(&file, "io_poll") != Some(1) {
            return Err(EngineError::Unavailable {
                engine: "polled",
                why: format!(
                    "{} has no queue that can be polled",
                    named(self.device_count, &file)
                ),
            });
        }
        self.data.add(file.clone())?;
        let added = self.flushes.add(file);
        match added {
            Ok(()) => self.device_count += 1,
            Err(_) => self.data.forget_last(),
        }
        added
    }

    /// Nothing is in flight on this device, and nothing will be: closes it.
    pub(super) fn remove(&mut self, device: DeviceIndex) -> Result<(), EngineError> {
        self.data.remove(device)?;
        self.flushes.remove(device)
    }

    pub(super) fn about(&self) -> &'static str {
        self.data.about()
    }

    pub(super) fn submit(&mut self, io: Io) {
        match io.op {
            IoOp::Flush => self.flushes.submit(io),
            IoOp::Read | IoOp::Write => self.data.submit(io),
        }
    }

    pub(super) fn start(&mut self) -> Result<(), EngineError> {
        self.flushes.start()?;
        self.data.start()?;
        self.stay_readable();
        Ok(())
    }

    pub(super) fn reap(&mut self, done: &mut Vec<IoDone>) -> Result<(), EngineError> {
        self.flushes.reap(done)?;
        self.data.drain(done)?;
        self.stay_readable();
        Ok(())
    }

    /// Nothing else would say that the drive is to be asked again.
    fn stay_readable(&self) {
        if self.data.inflight_count() > 0 {
            self.flushes.signal();
        }
    }

    pub(super) fn wake(&self) -> BorrowedFd<'_> {
        self.flushes.wake()
    }

    pub(super) fn inflight_count(&self) -> usize {
        self.data.inflight_count() + self.flushes.inflight_count()
    }

    pub(super) fn register(&mut self, arena: &Arc<Arena>) {
        self.data.register(arena);
    }

    pub(super) fn forget(&mut self, arena: ArenaId) {
        self.data.forget(arena);
    }

    pub(super) fn is_forgotten(&self, arena: ArenaId) -> bool {
        self.data.is_forgotten(arena)
    }

    pub(super) fn has_work(&self) -> bool {
        self.data.has_work()
    }

    pub(super) fn again_after(&self) -> Option<Duration> {
        self.data.again_after().or(self.flushes.again_after())
    }
}
