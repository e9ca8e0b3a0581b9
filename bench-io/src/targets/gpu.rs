//! The last part of a tile's path: into a GPU's memory before the tile counts as read, and out of it before the tile is written.
//!
//! ```text
//!   read    device ──▶ slot ──▶ GPU          a session moves tiles between devices and slots; copiers, threads with a
//!   write   GPU ──▶ slot ──▶ device          stream each, between slots and the GPU, while more tiles are on their way
//! ```

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use kernels::gpu::{DeviceBuffer, Gpu, GpuError, Registration, Stream};
use offload_client::{Session, Slot};

use super::{Flight, Way};

/// Two copiers keep the bus busy in both directions.
const COPIERS: usize = 2;

/// A slot to copy to or from the GPU, with its operation.
struct Copy {
    slot: Slot,
    flight: Flight,
}

/// A completed copy.
pub(crate) struct CompletedCopy {
    pub(crate) slot: Slot,
    pub(crate) flight: Flight,
    pub(crate) result: Result<(), GpuError>,
}

/// A GPU's memory with a place for each slot, and the copying threads.
pub(crate) struct GpuMemory {
    about: String,
    outstanding: usize,
    /// `None` once the copiers are to end.
    orders: Option<Sender<Copy>>,
    copied: Receiver<CompletedCopy>,
    copiers: Vec<JoinHandle<()>>,
    /// The slots' memory, pinned until the copiers have ended.
    _pinned: Registration,
}

impl GpuMemory {
    /// Allocates a place for each of `slots` slots of `slot_bytes`, and pins `session`'s arena.
    ///
    /// # Errors
    /// There is no GPU, it has too little memory, or pinning is refused.
    pub(crate) fn open(session: &Session, slots: u32, slot_bytes: u32) -> Result<Self> {
        let gpu = Gpu::open(0).context("--target gpu")?;
        let arena = session.memory();
        let pinned = gpu.register(arena.address(), arena.bytes(), Box::new(arena.clone()))?;
        let memory = gpu.alloc(slots as usize * slot_bytes as usize)?;
        let (orders, to_do) = channel();
        let (say, copied) = channel();
        let to_do = Arc::new(Mutex::new(to_do));
        let mut copiers = Vec::new();
        for index in 0..COPIERS {
            let copier = Copier {
                stream: gpu.stream()?,
                gpu: gpu.clone(),
                memory: memory.clone(),
                slot_bytes: slot_bytes as usize,
                to_do: Arc::clone(&to_do),
                say: say.clone(),
            };
            let thread = std::thread::Builder::new().name(format!("copy-{index}"));
            copiers.push(
                thread
                    .spawn(move || copier.run())
                    .context("starting a thread")?,
            );
        }
        let info = gpu.info();
        Ok(Self {
            about: format!("{} ({})", info.name, info.driver),
            outstanding: 0,
            orders: Some(orders),
            copied,
            copiers,
            _pinned: pinned,
        })
    }

    /// Name of the GPU and its driver.
    pub(crate) fn about(&self) -> &str {
        &self.about
    }

    /// Whether a copy is in flight.
    pub(crate) fn is_busy(&self) -> bool {
        self.outstanding > 0
    }

    /// Starts the GPU's part of `flight`.
    ///
    /// # Errors
    /// The copiers ended.
    pub(crate) fn start(&mut self, slot: Slot, flight: Flight) -> Result<()> {
        let copy = Copy { slot, flight };
        let orders = self.orders.as_ref().context("taken in drop only")?;
        orders.send(copy).ok().context("the copiers ended")?;
        self.outstanding += 1;
        Ok(())
    }

    /// Returns completed copies; waits at most `limit` for the first.
    ///
    /// # Errors
    /// The copiers ended.
    pub(crate) fn wait(&mut self, limit: Duration) -> Result<Vec<CompletedCopy>> {
        use std::sync::mpsc::RecvTimeoutError::{Disconnected, Timeout};
        let mut copied = Vec::new();
        match self.copied.recv_timeout(limit) {
            Ok(first) => copied.push(first),
            Err(Timeout) => {}
            Err(Disconnected) => bail!("the copiers ended"),
        }
        copied.extend(self.copied.try_iter());
        self.outstanding -= copied.len();
        Ok(copied)
    }
}

impl Drop for GpuMemory {
    fn drop(&mut self) {
        drop(self.orders.take());
        for copier in self.copiers.drain(..) {
            // The thread has printed its panic.
            let _ = copier.join();
        }
    }
}

/// Copies one slot after the other.
struct Copier {
    gpu: Gpu,
    stream: Stream,
    memory: DeviceBuffer,
    slot_bytes: usize,
    to_do: Arc<Mutex<Receiver<Copy>>>,
    say: Sender<CompletedCopy>,
}

impl Copier {
    fn run(self) {
        loop {
            // The lock is held while waiting: one copier waits for the queue, the other for the lock.
            let next = self
                .to_do
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .recv();
            let Ok(mut copy) = next else { return };
            let result = self.copy(&mut copy);
            let Copy { slot, flight } = copy;
            let copied = CompletedCopy {
                slot,
                flight,
                result,
            };
            if self.say.send(copied).is_err() {
                return;
            }
        }
    }

    fn copy(&self, copy: &mut Copy) -> Result<(), GpuError> {
        let place = copy.slot.index().0 as usize * self.slot_bytes;
        let bytes = &mut copy.slot.as_mut_slice()[..self.slot_bytes];
        let (gpu, stream) = (&self.gpu, &self.stream);
        match copy.flight.way {
            Way::Read => gpu.upload(stream, &self.memory, &[(place, bytes)]),
            Way::Write => gpu.download(stream, &self.memory, &mut [(place, bytes)]),
        }
    }
}
