//! Parks pieces of one size on devices, by number, in scratch tiles of the run's session: they end with it and are in no commit.
//!
//! ```text
//!   compute   | fill | fill |  ...                               | use | use |
//!   thread           | put 0 ─▶ slots ─▶ tiles | put 1 | ...                      a buffer is free when its content is in slots
//!   thread                                           tiles ─▶ slots ─▶ take 1 | take 0 |    the next one comes while this one is used
//! ```
//!
//! All pieces pass through two buffers, as those in host memory do (`kernels::gpu::HostStash`). Who puts one waits for the drives only as long as no
//! slot is free. At 6 GB/s a piece of 64 MiB takes 11 ms; the plan compares such times with those of computing.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kernels::gpu::{DeviceBuffer, Event, Gpu, GpuError, Stream};
use swapper::Scratch;

use crate::scratch_copies::{CopyError, CopyResult, HostMemory, ScratchCopies, TensorMemory};

/// One buffer is in use while the other one is copied.
const BUFFERS: usize = 2;

/// After so long a wait looks again; a result wakes it at once.
const WAIT: Duration = Duration::from_secs(1);

/// Alignment of a buffer in host memory: a cache line.
const ALIGN_BYTES: usize = 64;

/// A buffer that holds one piece.
pub enum StashBuffer<'a> {
    /// Aligned to a cache line.
    Host(&'a mut [u8]),
    Gpu(&'a DeviceBuffer),
}

/// Storage for numbered pieces of one size.
pub struct TileStash {
    /// `None` until the tiles are attached.
    copies: Option<ScratchCopies>,
    /// The stream on which a GPU computes.
    compute: Option<Stream>,
    piece_bytes: usize,
    buffers: [Buffer; BUFFERS],
    /// The buffer to use next.
    turn: usize,
}

struct Buffer {
    memory: BufferMemory,
    /// The copy that uses the buffer and that nobody has waited for.
    copy: Option<u64>,
    /// On a GPU, nothing uses the buffer's content after this event.
    free: Option<Arc<Event>>,
    /// The piece that is arriving or present.
    holds: Option<usize>,
}

enum BufferMemory {
    Host(SharedBuffer),
    Gpu(DeviceBuffer),
}

/// A buffer that the thread which copies has, too. Nobody waits for the lock: a copy is waited for before its buffer is used.
#[derive(Clone)]
struct SharedBuffer(Arc<Mutex<Vec<u8>>>);

impl SharedBuffer {
    fn new(bytes: usize) -> Self {
        Self(Arc::new(Mutex::new(vec![0; bytes + ALIGN_BYTES])))
    }

    /// Calls `f` with the aligned bytes.
    fn with<T>(&self, f: impl FnOnce(&mut [u8]) -> T) -> T {
        let mut bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let first = bytes.as_ptr().align_offset(ALIGN_BYTES);
        let end = bytes.len() - ALIGN_BYTES + first;
        f(&mut bytes[first..end])
    }
}

impl HostMemory for SharedBuffer {
    fn read(&self, offset: usize, to: &mut [u8]) {
        self.with(|bytes| to.copy_from_slice(&bytes[offset..offset + to.len()]));
    }

    fn write(&self, offset: usize, from: &[u8]) {
        self.with(|bytes| bytes[offset..offset + from.len()].copy_from_slice(from));
    }
}

impl BufferMemory {
    fn new(gpu: Option<&Gpu>, bytes: usize) -> Result<Self, GpuError> {
        Ok(match gpu {
            Some(gpu) => Self::Gpu(gpu.alloc(bytes)?),
            None => Self::Host(SharedBuffer::new(bytes)),
        })
    }

    /// Calls `f` with the buffer.
    fn with<T>(&self, f: impl FnOnce(StashBuffer<'_>) -> T) -> T {
        match self {
            Self::Host(buffer) => buffer.with(|bytes| f(StashBuffer::Host(bytes))),
            Self::Gpu(buffer) => f(StashBuffer::Gpu(buffer)),
        }
    }

    /// The buffer, for a copy.
    fn of_copy(&self) -> TensorMemory {
        match self {
            Self::Host(buffer) => TensorMemory::Host(Box::new(buffer.clone())),
            Self::Gpu(buffer) => TensorMemory::Gpu(buffer.clone()),
        }
    }
}

impl TileStash {
    /// Allocates buffers for pieces of `piece_bytes` on `gpu` or on the host.
    ///
    /// # Errors
    /// The GPU has too little memory.
    pub fn new(gpu: Option<&Gpu>, piece_bytes: usize) -> Result<Self, GpuError> {
        let buffer = || {
            Ok::<_, GpuError>(Buffer {
                memory: BufferMemory::new(gpu, piece_bytes)?,
                copy: None,
                free: None,
                holds: None,
            })
        };
        Ok(Self {
            copies: None,
            compute: gpu.map(Gpu::default_stream),
            piece_bytes,
            buffers: [buffer()?, buffer()?],
            turn: 0,
        })
    }

    /// Keeps pieces in `scratch` from now on, copied from and to the memory of `gpu` or of the host.
    ///
    /// # Errors
    /// The GPU fails; the system has no thread left.
    pub fn attach(&mut self, scratch: Scratch, gpu: Option<&Gpu>) -> Result<(), CopyError> {
        self.copies = Some(ScratchCopies::start(scratch, gpu)?);
        Ok(())
    }

    /// Stores as `piece` what `fill` writes to a buffer, on a GPU on the stream that computes.
    ///
    /// # Errors
    /// `fill`, the GPU, the store or an earlier copy failed.
    pub fn put<T, E: From<CopyError>>(
        &mut self,
        piece: usize,
        fill: impl FnOnce(StashBuffer<'_>) -> Result<T, E>,
    ) -> Result<T, E> {
        let (at, left) = self.next_buffer()?;
        self.compute_waits(left.as_deref())?;
        let filled = self.buffers[at].memory.with(fill)?;
        let after = self.record()?;
        let (memory, tiles) = (self.buffers[at].memory.of_copy(), self.tiles_of(piece));
        let copy = self.copies().leave(memory, self.piece_bytes, tiles, after);
        let buffer = &mut self.buffers[at];
        buffer.copy = Some(copy.expect("copies are accepted until this is dropped"));
        buffer.free = None;
        Ok(filled)
    }

    /// Starts fetching `piece`, unless it is being fetched already. At most two pieces may be on their way or waiting for use.
    ///
    /// Panics if both buffers hold pieces.
    ///
    /// # Errors
    /// The GPU, the store or an earlier copy failed.
    pub fn fetch(&mut self, piece: usize) -> Result<(), CopyError> {
        if self.buffer_with(piece).is_some() {
            return Ok(());
        }
        let (at, left) = self.next_buffer()?;
        let after = left.or(self.buffers[at].free.take());
        let (memory, tiles) = (self.buffers[at].memory.of_copy(), self.tiles_of(piece));
        let copy = self
            .copies()
            .bring_back(memory, self.piece_bytes, tiles, after);
        let buffer = &mut self.buffers[at];
        buffer.copy = Some(copy.expect("copies are accepted until this is dropped"));
        buffer.holds = Some(piece);
        Ok(())
    }

    /// The buffer whose turn it is, once its copy has ended, with the event behind that copy.
    ///
    /// Panics if it holds a piece that waits to be used.
    fn next_buffer(&mut self) -> Result<(usize, Option<Arc<Event>>), CopyError> {
        let at = self.turn;
        self.turn = (at + 1) % BUFFERS;
        assert!(
            self.buffers[at].holds.is_none(),
            "a fetched piece waits to be used"
        );
        Ok((at, self.settle(at)?))
    }

    /// Calls `take` with a buffer that holds `piece`, on a GPU for the stream that computes; then the buffer is free.
    ///
    /// # Errors
    /// `take`, the GPU or the store failed, or the bytes came back damaged.
    pub fn take_piece<T, E: From<CopyError>>(
        &mut self,
        piece: usize,
        take: impl FnOnce(StashBuffer<'_>) -> Result<T, E>,
    ) -> Result<T, E> {
        self.fetch(piece)?;
        let at = self.buffer_with(piece).expect("fetched");
        let arrived = self.settle(at)?;
        self.compute_waits(arrived.as_deref())?;
        let taken = self.buffers[at].memory.with(take)?;
        let free = self.record()?;
        let buffer = &mut self.buffers[at];
        buffer.holds = None;
        buffer.free = free;
        Ok(taken)
    }

    /// Waits for the copy that uses a buffer. On a GPU, the copy is enqueued and the returned event stands behind it.
    fn settle(&mut self, at: usize) -> CopyResult {
        let Some(copy) = self.buffers[at].copy.take() else {
            return Ok(None);
        };
        loop {
            if let Some(copied) = self.copies().wait(copy, WAIT) {
                return copied;
            }
        }
    }

    /// An event behind what the stream that computes was given.
    fn record(&self) -> Result<Option<Arc<Event>>, CopyError> {
        let event = self.compute.as_ref().map(Stream::record).transpose()?;
        Ok(event.map(Arc::new))
    }

    fn compute_waits(&self, event: Option<&Event>) -> Result<(), CopyError> {
        match (&self.compute, event) {
            (Some(compute), Some(event)) => Ok(compute.wait(event)?),
            _ => Ok(()),
        }
    }

    /// Each piece has tiles of its own.
    fn tiles_of(&self, piece: usize) -> std::ops::Range<u32> {
        let count = self.copies().area().tiles_of(self.piece_bytes as u64);
        let first = piece as u32 * count;
        first..first + count
    }

    fn copies(&self) -> &ScratchCopies {
        self.copies.as_ref().expect("tiles are attached")
    }

    fn buffer_with(&self, piece: usize) -> Option<usize> {
        let holds = |buffer: &Buffer| buffer.holds == Some(piece);
        self.buffers.iter().position(holds)
    }
}

impl Drop for TileStash {
    /// The thread uses the buffers.
    fn drop(&mut self) {
        if let Some(thread) = self.copies.as_ref().and_then(ScratchCopies::stop) {
            // After a panic there, the copy was waited for in vain.
            let _ = thread.join();
        }
    }
}
