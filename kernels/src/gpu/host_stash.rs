//! Contents of device memory that wait in host memory, by number: put away while computing goes on, fetched before they are wanted.
//!
//! ```text
//!   compute   | fill | fill |  ...                        | use | use |
//!   down             | put 0 | put 1 |  ...                              a buffer is free when its copy has left
//!   up                                      | take 1 | take 0 |          the next one comes while this one is used
//! ```
//!
//! Two buffers of the device are all that passes, whatever number of pieces. They are ours and not the allocator's of whoever
//! computes, so nothing is freed or reused while a copy is under way. The host memory is pinned, taken once, and seen by copies
//! only. At 50 GB/s a piece of 64 MiB takes 1.3 ms, a block that makes it some ten times as long.

use super::buffer::Registration;
use super::{DeviceBuffer, Event, Gpu, GpuError, Stream};

/// Pages that are pinned must not be another piece of memory's too.
const PAGE_BYTES: usize = 4096;

/// One content is used or filled while the other is copied.
const BUFFERS: usize = 2;

/// Room for numbered contents of one size.
pub struct HostStash {
    gpu: Gpu,
    down: Stream,
    up: Stream,
    piece_bytes: usize,
    buffers: [Buffer; BUFFERS],
    /// The buffer whose turn it is.
    turn: usize,
    /// Of each piece: when its bytes are in host memory.
    put: Vec<Option<Event>>,
    host: Host,
}

struct Buffer {
    memory: DeviceBuffer,
    /// Behind it nothing uses what is in it.
    free: Option<Event>,
    /// A piece that comes or is here, and when it is.
    holds: Option<(usize, Event)>,
}

/// Pinned memory; the registration ends before the bytes go.
struct Host {
    _registration: Registration,
    bytes: Box<[u8]>,
    start: usize,
}

impl HostStash {
    /// Room for `pieces` of `piece_bytes`, in host memory and two of them on `gpu`.
    ///
    /// # Errors
    /// Too little memory on the device; the host's cannot be pinned.
    pub fn new(gpu: &Gpu, pieces: usize, piece_bytes: usize) -> Result<Self, GpuError> {
        let buffer = || {
            Ok::<_, GpuError>(Buffer {
                memory: gpu.alloc(piece_bytes)?,
                free: None,
                holds: None,
            })
        };
        Ok(Self {
            gpu: gpu.clone(),
            down: gpu.stream()?,
            up: gpu.stream()?,
            piece_bytes,
            buffers: [buffer()?, buffer()?],
            turn: 0,
            put: (0..pieces).map(|_| None).collect(),
            host: Host::new(gpu, pieces * piece_bytes)?,
        })
    }

    /// Bytes of host memory it takes.
    pub fn host_bytes(&self) -> usize {
        self.host.bytes.len()
    }

    /// A buffer that `stream` may write the next content to, for [`HostStash::put`].
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

    /// What `stream` has written to the buffer of [`HostStash::room`] becomes the content of `piece`.
    ///
    /// # Errors
    /// A call failed.
    pub fn put(&mut self, piece: usize, stream: &Stream) -> Result<(), GpuError> {
        let buffer = &mut self.buffers[self.turn];
        self.down.wait(&stream.record()?)?;
        // Its content of before may still be on its way up: both copies touch the same host bytes.
        let to = self.host.piece(piece, self.piece_bytes);
        // SAFETY: the bytes are ours until `Drop`, which waits for both streams, and nothing but copies of these streams touches
        // them; those are ordered by the events of `put` and `fetch`.
        unsafe {
            self.gpu
                .enqueue_download(&self.down, &buffer.memory, &mut [(0, to)])?;
        }
        buffer.free = Some(self.down.record()?);
        self.put[piece] = Some(self.down.record()?);
        self.turn = (self.turn + 1) % BUFFERS;
        Ok(())
    }

    /// Begins to bring `piece` back, if it does not come already. At most two pieces come or wait to be used at a time.
    ///
    /// Panics if it was not put, or if both buffers hold pieces.
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
        let put = self.put[piece].as_ref();
        self.up
            .wait(put.expect("a piece is fetched that was put"))?;
        let from = self.host.piece(piece, self.piece_bytes);
        // SAFETY: as in `put`.
        unsafe {
            self.gpu
                .enqueue_upload(&self.up, &buffer.memory, &[(0, from)])?;
        }
        buffer.holds = Some((piece, self.up.record()?));
        self.turn = (self.turn + 1) % BUFFERS;
        Ok(())
    }

    /// The buffer with the content of `piece`, which `stream` may use until [`HostStash::taken`].
    ///
    /// # Errors
    /// A call failed.
    pub fn take(&mut self, piece: usize, stream: &Stream) -> Result<&DeviceBuffer, GpuError> {
        self.fetch(piece)?;
        let at = self.buffer_with(piece).expect("fetched");
        let buffer = &self.buffers[at];
        let (_, arrived) = buffer.holds.as_ref().expect("it holds it");
        stream.wait(arrived)?;
        Ok(&buffer.memory)
    }

    /// `stream` needs no more of what [`HostStash::take`] gave, once what is enqueued there is done. The piece is gone.
    ///
    /// # Errors
    /// A call failed.
    pub fn taken(&mut self, piece: usize, stream: &Stream) -> Result<(), GpuError> {
        let at = self.buffer_with(piece).expect("a piece was taken before");
        let buffer = &mut self.buffers[at];
        let (_, arrived) = buffer.holds.take().expect("it holds it");
        // The next content of the piece goes where this one lay in host memory.
        self.down.wait(&arrived)?;
        buffer.free = Some(stream.record()?);
        self.put[piece] = None;
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

impl Drop for HostStash {
    fn drop(&mut self) {
        // Copies may be under way. The error of one that failed was, or will be, seen by who waits for what it copied.
        let _ = self.down.synchronize();
        let _ = self.up.synchronize();
    }
}

impl Host {
    fn new(gpu: &Gpu, bytes_count: usize) -> Result<Self, GpuError> {
        let rounded = bytes_count.next_multiple_of(PAGE_BYTES);
        let bytes = vec![0_u8; rounded + PAGE_BYTES].into_boxed_slice();
        let start = bytes.as_ptr().align_offset(PAGE_BYTES);
        let address = bytes.as_ptr() as usize + start;
        Ok(Self {
            _registration: gpu.register(address, rounded.max(PAGE_BYTES), Box::new(()))?,
            bytes,
            start,
        })
    }

    fn piece(&mut self, piece: usize, piece_bytes: usize) -> &mut [u8] {
        &mut self.bytes[self.start + piece * piece_bytes..][..piece_bytes]
    }
}
