//! Parks contents of device memory in host memory, by number: stored while computing continues, fetched before they are
//! needed.
//!
//! ```text
//!   compute   | fill | fill |  ...                        | use | use |
//!   down             | put 0 | put 1 |  ...                              a buffer is free when its copy has left
//!   up                                      | take 1 | take 0 |          the next one comes while this one is used
//! ```
//!
//! All pieces pass through two device buffers. They are not torch's memory, so nothing is freed or reused while a copy
//! is in progress. The host memory is that of [`HostCopies`]. At 50 GB/s a piece of 64 MiB takes 1.3 ms; the block
//! that produces it computes about ten times as long.

use super::{DeviceBuffer, Event, Gpu, GpuError, HostCopies, Stream};

/// One buffer is in use while the other one is copied.
const BUFFERS: usize = 2;

/// Storage for numbered pieces of one size.
pub struct HostStash {
    /// Dropped before the buffers: that waits for the copies in progress.
    copies: HostCopies,
    up: Stream,
    buffers: [Buffer; BUFFERS],
    /// The buffer to use next.
    turn: usize,
}

struct Buffer {
    memory: DeviceBuffer,
    /// After this event nothing uses the buffer's content.
    free: Option<Event>,
    /// The piece that is arriving or present, and the event of its arrival.
    holds: Option<(usize, Event)>,
}

impl HostStash {
    /// Allocates `pieces` of `piece_bytes` in host memory, and two on `gpu`.
    ///
    /// # Errors
    /// The device has too little memory, or the host memory cannot be pinned.
    pub fn new(gpu: &Gpu, pieces: usize, piece_bytes: usize) -> Result<Self, GpuError> {
        let buffer = || {
            Ok::<_, GpuError>(Buffer {
                memory: gpu.alloc(piece_bytes)?,
                free: None,
                holds: None,
            })
        };
        Ok(Self {
            copies: HostCopies::new(gpu, &vec![piece_bytes; pieces])?,
            up: gpu.stream()?,
            buffers: [buffer()?, buffer()?],
            turn: 0,
        })
    }

    /// Host memory in bytes.
    pub fn host_bytes(&self) -> usize {
        self.copies.host_bytes()
    }

    /// Returns a buffer to which `stream` may write the next piece, for [`HostStash::put`].
    ///
    /// # Errors
    /// A call failed.
    pub fn room(&mut self, stream: &Stream) -> Result<&DeviceBuffer, GpuError> {
        let buffer = &mut self.buffers[self.turn];
        assert!(buffer.holds.is_none(), "a fetched piece waits to be used");
        if let Some(free) = &buffer.free {
            stream.wait(free)?;
        }
        Ok(&buffer.memory)
    }

    /// Stores what `stream` has written to the buffer of [`HostStash::room`] as `piece`.
    ///
    /// # Errors
    /// A call failed.
    pub fn put(&mut self, piece: usize, stream: &Stream) -> Result<(), GpuError> {
        let buffer = &mut self.buffers[self.turn];
        let written = stream.record()?;
        buffer.free = Some(self.copies.keep(piece, buffer.memory.at(0), &written)?);
        self.turn = (self.turn + 1) % BUFFERS;
        Ok(())
    }

    /// Starts fetching `piece`, unless it is already being fetched. At most two pieces may be in transit or waiting for
    /// use.
    ///
    /// Panics if the piece was not stored, or if both buffers hold pieces.
    ///
    /// # Errors
    /// A call failed.
    pub fn fetch(&mut self, piece: usize) -> Result<(), GpuError> {
        if self.buffer_with(piece).is_some() {
            return Ok(());
        }
        let buffer = &mut self.buffers[self.turn];
        assert!(buffer.holds.is_none(), "both buffers hold pieces");
        if let Some(free) = buffer.free.take() {
            self.up.wait(&free)?;
        }
        self.copies.put_back(piece, buffer.memory.at(0), &self.up)?;
        buffer.holds = Some((piece, self.up.record()?));
        self.turn = (self.turn + 1) % BUFFERS;
        Ok(())
    }

    /// Returns the buffer with the content of `piece`. `stream` may use it until [`HostStash::taken`].
    ///
    /// # Errors
    /// A call failed.
    pub fn buffer_of(&mut self, piece: usize, stream: &Stream) -> Result<&DeviceBuffer, GpuError> {
        self.fetch(piece)?;
        let at = self.buffer_with(piece).expect("fetched");
        let buffer = &self.buffers[at];
        let (_, arrived) = buffer.holds.as_ref().expect("it holds it");
        stream.wait(arrived)?;
        Ok(&buffer.memory)
    }

    /// Ends the use of [`HostStash::buffer_of`]'s buffer, after the work enqueued on `stream`.
    ///
    /// # Errors
    /// A call failed.
    pub fn taken(&mut self, piece: usize, stream: &Stream) -> Result<(), GpuError> {
        let at = self.buffer_with(piece).expect("a piece was taken before");
        let buffer = &mut self.buffers[at];
        buffer.holds = None;
        buffer.free = Some(stream.record()?);
        Ok(())
    }

    fn buffer_with(&self, piece: usize) -> Option<usize> {
        let holds = |buffer: &Buffer| {
            buffer
                .holds
                .as_ref()
                .is_some_and(|(held, _)| *held == piece)
        };
        self.buffers.iter().position(holds)
    }
}
