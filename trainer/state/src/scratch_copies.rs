//! Moves tensors between the memory that computes and scratch tiles of the run's devices, for inputs of checkpointed blocks.
//!
//! ```text
//!   caller   leave 3 | wait 3 | ... | bring_back 7 | wait 7            numbers, no copies
//!   thread   slots free ──▶ copy ──▶ write | ... | read ──▶ copy       waits for slots and drives
//! ```
//!
//! A tensor has left when it is in slots: the drives are waited for only as long as no slot is free. Each copy takes as many slots as are free,
//! so that a tensor may be larger than all of them.

use std::cell::Cell;
use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use kernels::gpu::{DeviceBuffer, Event, Gpu, GpuError, Stream};
use swapper::{Scratch, ScratchSettings, Slot, SwapperError};

/// Memory of the processor that another thread copies from and to.
pub trait HostMemory: Send {
    /// Copies the bytes from `offset` on.
    fn read(&self, offset: usize, to: &mut [u8]);

    /// Overwrites the bytes from `offset` on.
    fn write(&self, offset: usize, from: &[u8]);
}

/// Where a tensor lies.
pub enum TensorMemory {
    Host(Box<dyn HostMemory>),
    Gpu(DeviceBuffer),
}

/// Why a copy failed. Copies that begin after a failure nobody was told of fail with the same error.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CopyError {
    #[error(transparent)]
    Swapper(Arc<SwapperError>),
    #[error(transparent)]
    Gpu(Arc<GpuError>),
    #[error("starting a thread: {0}")]
    Thread(Arc<std::io::Error>),
    /// The thread that copies has ended without a result.
    #[error("the thread that copies them panicked; standard error has its message")]
    Panicked,
}

impl From<SwapperError> for CopyError {
    fn from(error: SwapperError) -> Self {
        Self::Swapper(Arc::new(error))
    }
}

impl From<GpuError> for CopyError {
    fn from(error: GpuError) -> Self {
        Self::Gpu(Arc::new(error))
    }
}

/// A copy that was made, or on a GPU enqueued; the event stands behind it.
pub type CopyResult = Result<Option<Arc<Event>>, CopyError>;

/// The bytes of one tile of a tensor.
#[derive(Clone, Copy)]
struct Piece {
    tile: u32,
    offset: usize,
    bytes: usize,
}

/// A tensor to move.
struct TensorCopy {
    number: u64,
    leaves: bool,
    memory: TensorMemory,
    pieces: Vec<Piece>,
    /// On a GPU, stands behind the work that the copy waits for.
    after: Option<Arc<Event>>,
    /// Whether whoever waits has been told.
    is_told: Cell<bool>,
}

#[derive(Default)]
struct Results {
    state: Mutex<ResultsState>,
    changed: Condvar,
}

#[derive(Default)]
struct ResultsState {
    copies: HashMap<u64, CopyResult>,
    /// Whether the thread has ended: there will be no more results.
    has_ended: bool,
}

impl ResultsState {
    /// Whether nobody needs to wait for the result of a copy: it is there, or will never be.
    fn is_settled(&self, number: u64) -> bool {
        self.has_ended || self.copies.contains_key(&number)
    }
}

impl Results {
    fn lock(&self) -> MutexGuard<'_, ResultsState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_result(&self, number: u64, found: CopyResult) {
        self.lock().copies.insert(number, found);
        self.changed.notify_all();
    }

    fn end(&self) {
        self.lock().has_ended = true;
        self.changed.notify_all();
    }
}

/// The thread's side.
struct Worker {
    scratch: Scratch,
    /// Streams to and from a GPU, if one computes.
    streams: Option<[Stream; 2]>,
    results: Arc<Results>,
}

impl Drop for Worker {
    /// Also after a panic, or copies would be waited for in vain.
    fn drop(&mut self) {
        self.results.end();
    }
}

impl Worker {
    fn run_all(self, coming: impl IntoIterator<Item = TensorCopy>) {
        // A failure after whoever waits was told.
        let mut broken: Option<CopyError> = None;
        for copy in coming {
            let moved = match &broken {
                Some(error) => Err(error.clone()),
                None => self.run(&copy),
            };
            match (copy.is_told.get(), moved) {
                (false, moved) => self.results.set_result(copy.number, moved.map(|()| None)),
                (true, Err(error)) => broken = Some(error),
                (true, Ok(())) => {}
            }
        }
    }

    fn run(&self, copy: &TensorCopy) -> Result<(), CopyError> {
        if let (Some(after), Some([up, down])) = (&copy.after, &self.streams) {
            if copy.leaves { down } else { up }.wait(after)?;
        }
        match copy.leaves {
            true => self.leave(copy),
            false => self.bring_back(copy),
        }
    }

    fn leave(&self, copy: &TensorCopy) -> Result<(), CopyError> {
        let mut left = &copy.pieces[..];
        while !left.is_empty() {
            let mut slots = vec![self.scratch.slot()?];
            while slots.len() < left.len()
                && let Some(slot) = self.scratch.free_slot()
            {
                slots.push(slot);
            }
            let (now, later) = left.split_at(slots.len());
            if let Err(error) = self.copy_to(copy, now, &mut slots, later.is_empty()) {
                slots
                    .drain(..)
                    .for_each(|slot| self.scratch.give_back(slot));
                return Err(error.into());
            }
            for (piece, slot) in now.iter().zip(slots) {
                self.scratch.write(piece.tile, slot);
            }
            left = later;
        }
        Ok(())
    }

    fn bring_back(&self, copy: &TensorCopy) -> Result<(), CopyError> {
        let mut left = copy.pieces.iter().copied();
        let mut coming = VecDeque::new();
        let brought = self.bring_pieces(copy, &mut left, &mut coming);
        // After a failure.
        for piece in coming {
            if let Ok(slot) = self.scratch.wait(piece.tile) {
                self.scratch.give_back(slot);
            }
        }
        brought
    }

    /// Reads pieces as slots are free, and copies them in their order.
    fn bring_pieces(
        &self,
        copy: &TensorCopy,
        left: &mut impl ExactSizeIterator<Item = Piece>,
        coming: &mut VecDeque<Piece>,
    ) -> Result<(), CopyError> {
        loop {
            while left.len() > 0 {
                let slot = match coming.is_empty() {
                    true => self.scratch.slot()?,
                    false => match self.scratch.free_slot() {
                        Some(slot) => slot,
                        None => break,
                    },
                };
                let piece = left.next().expect("some are left");
                self.scratch.begin_read(piece.tile, slot);
                coming.push_back(piece);
            }
            let Some(first) = coming.pop_front() else {
                return Ok(());
            };
            let mut pieces = vec![first];
            let mut slots = vec![self.scratch.wait(first.tile)?];
            let mut failed = None;
            while let Some(next) = coming.front()
                && let Some(read) = self.scratch.poll(next.tile)
            {
                pieces.extend(coming.pop_front());
                match read {
                    Ok(slot) => slots.push(slot),
                    Err(error) => {
                        pieces.pop();
                        failed = Some(error);
                        break;
                    }
                }
            }
            let is_last = left.len() == 0 && coming.is_empty() && failed.is_none();
            let copied = self.copy_from(copy, &pieces, &slots, is_last);
            slots
                .into_iter()
                .for_each(|slot| self.scratch.give_back(slot));
            copied?;
            if let Some(error) = failed {
                return Err(error.into());
            }
        }
    }

    /// Copies pieces of a tensor to slots. With the last ones, whoever waits for the copy may go on.
    fn copy_to(
        &self,
        copy: &TensorCopy,
        pieces: &[Piece],
        slots: &mut [Slot],
        is_last: bool,
    ) -> Result<(), GpuError> {
        let parts = pieces.iter().zip(slots);
        let parts = parts.map(|(piece, slot)| (piece, &mut slot.as_mut_slice()[..piece.bytes]));
        match &copy.memory {
            TensorMemory::Host(from) => {
                parts.for_each(|(piece, to)| from.read(piece.offset, to));
                Ok(())
            }
            TensorMemory::Gpu(from) => {
                let mut parts: Vec<_> = parts.map(|(piece, to)| (piece.offset, to)).collect();
                let [_, down] = self.streams.as_ref().expect("a GPU computes");
                let enqueued = || self.tell_enqueued(copy, down, is_last);
                from.gpu().download_then(down, from, &mut parts, enqueued)
            }
        }
    }

    /// Copies slots to pieces of a tensor.
    fn copy_from(
        &self,
        copy: &TensorCopy,
        pieces: &[Piece],
        slots: &[Slot],
        is_last: bool,
    ) -> Result<(), GpuError> {
        let parts = pieces.iter().zip(slots);
        let parts = parts.map(|(piece, slot)| (piece, &slot.as_slice()[..piece.bytes]));
        match &copy.memory {
            TensorMemory::Host(to) => {
                parts.for_each(|(piece, from)| to.write(piece.offset, from));
                Ok(())
            }
            TensorMemory::Gpu(to) => {
                let parts: Vec<_> = parts.map(|(piece, from)| (piece.offset, from)).collect();
                let [up, _] = self.streams.as_ref().expect("a GPU computes");
                let enqueued = || self.tell_enqueued(copy, up, is_last);
                to.gpu().upload_then(up, to, &parts, enqueued)
            }
        }
    }

    fn tell_enqueued(
        &self,
        copy: &TensorCopy,
        stream: &Stream,
        is_last: bool,
    ) -> Result<(), GpuError> {
        if is_last {
            let event = Arc::new(stream.record()?);
            copy.is_told.set(true);
            self.results.set_result(copy.number, Ok(Some(event)));
        }
        Ok(())
    }
}

/// A queue of copies, and the thread that makes them in order.
struct Queue {
    /// `None` once it is stopped.
    copies: Option<Sender<TensorCopy>>,
    thread: Option<JoinHandle<()>>,
    next: u64,
}

/// Copies between tensors and an area of scratch tiles, for any thread.
pub struct ScratchCopies {
    area: ScratchSettings,
    queue: Mutex<Queue>,
    results: Arc<Results>,
}

impl ScratchCopies {
    /// Starts the thread that copies between `scratch` and the memory of `gpu`, or of the processor.
    ///
    /// # Errors
    /// The GPU fails; the system has no thread left.
    pub fn start(scratch: Scratch, gpu: Option<&Gpu>) -> Result<Self, CopyError> {
        let streams = match gpu {
            Some(gpu) => Some([gpu.stream()?, gpu.stream()?]),
            None => None,
        };
        let (area, results) = (scratch.settings(), Arc::<Results>::default());
        let (copies, coming) = channel();
        let worker = Worker {
            scratch,
            streams,
            results: results.clone(),
        };
        let thread = std::thread::Builder::new()
            .name("offloadd inputs".into())
            .spawn(move || worker.run_all(coming))
            .map_err(|error| CopyError::Thread(Arc::new(error)))?;
        Ok(Self {
            area,
            queue: Mutex::new(Queue {
                copies: Some(copies),
                thread: Some(thread),
                next: 0,
            }),
            results,
        })
    }

    /// Size of the area.
    pub fn area(&self) -> ScratchSettings {
        self.area
    }

    /// Begins to take `bytes` bytes of `from` to `tiles`, behind `after`. Returns the number to wait for, until when the memory must stay as it
    /// is; `None` once the copies are stopped.
    ///
    /// Panics if `tiles` are not as many as the bytes need.
    pub fn leave(
        &self,
        from: TensorMemory,
        bytes: usize,
        tiles: impl ExactSizeIterator<Item = u32>,
        after: Option<Arc<Event>>,
    ) -> Option<u64> {
        self.begin(true, from, bytes, tiles, after)
    }

    /// Begins to bring what `tiles` hold to `to`, which may be overwritten behind `after`; otherwise as [`ScratchCopies::leave`].
    pub fn bring_back(
        &self,
        to: TensorMemory,
        bytes: usize,
        tiles: impl ExactSizeIterator<Item = u32>,
        after: Option<Arc<Event>>,
    ) -> Option<u64> {
        self.begin(false, to, bytes, tiles, after)
    }

    fn begin(
        &self,
        leaves: bool,
        memory: TensorMemory,
        bytes: usize,
        tiles: impl ExactSizeIterator<Item = u32>,
        after: Option<Arc<Event>>,
    ) -> Option<u64> {
        let tile_bytes = self.area.tile_bytes as usize;
        assert_eq!(
            tiles.len(),
            self.area.tiles_of(bytes as u64) as usize,
            "tiles for {bytes} bytes"
        );
        let piece = |(index, tile): (usize, u32)| Piece {
            tile,
            offset: index * tile_bytes,
            bytes: tile_bytes.min(bytes - index * tile_bytes),
        };
        let mut queue = self.lock();
        let number = queue.next;
        queue.next += 1;
        let copy = TensorCopy {
            number,
            leaves,
            memory,
            pieces: tiles.enumerate().map(piece).collect(),
            after,
            is_told: Cell::new(false),
        };
        // After a panic nobody receives it, and whoever waits for it is told.
        let _ = queue.copies.as_ref()?.send(copy);
        Some(number)
    }

    /// Returns the result of a copy when it is made, or on a GPU enqueued; `None` if that takes longer than `most`. The result is returned once.
    /// It is an error if the thread panicked before.
    pub fn wait(&self, number: u64, most: Duration) -> Option<CopyResult> {
        let state = self.results.lock();
        let waits = |state: &mut ResultsState| !state.is_settled(number);
        let waited = (self.results.changed).wait_timeout_while(state, most, waits);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let found = state.copies.remove(&number);
        found.or_else(|| state.has_ended.then_some(Err(CopyError::Panicked)))
    }

    /// Whether [`ScratchCopies::wait`] for a copy, which nobody has waited for, returns at once.
    pub fn has_result(&self, number: u64) -> bool {
        self.results.lock().is_settled(number)
    }

    /// Accepts no more copies. Returns the thread, which ends when those that have begun are made; `None` if it was stopped before.
    pub fn stop(&self) -> Option<JoinHandle<()>> {
        let mut queue = self.lock();
        queue.copies = None;
        queue.thread.take()
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
