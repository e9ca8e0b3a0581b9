//! Copies of parts of device memory in pinned host memory, by number: made while computing continues, and copied back any
//! number of times.
//!
//! ```text
//!   caller's stream   | fill | use |  ...    | fill | use |                      | use |   | use |
//!   down                     | keep 0 |             | keep 1 |
//!   caller's stream                                            | put_back 1 | put_back 0 |
//! ```
//!
//! The caller's buffers are copied from and to directly, so the caller keeps them unchanged while a copy is in progress:
//! [`HostCopies::keep`] returns the event after which they may change. The host memory is pinned and allocated once.

use super::pinned::PinnedMemory;
use super::{DeviceAt, Event, Gpu, GpuError, Stream};

/// Numbered copies of fixed sizes.
pub struct HostCopies {
    gpu: Gpu,
    down: Stream,
    host: PinnedMemory,
    copies: Vec<HostCopy>,
}

struct HostCopy {
    offset_bytes: usize,
    bytes: usize,
    /// The event after which the bytes are in host memory.
    kept: Option<Event>,
    /// The event after which the newest copy to the device has ended.
    put_back: Option<Event>,
}

impl HostCopies {
    /// Allocates host memory for copies of these numbers of bytes.
    ///
    /// # Errors
    /// The host memory cannot be pinned.
    pub fn new(gpu: &Gpu, bytes: &[usize]) -> Result<Self, GpuError> {
        let mut offset_bytes = 0;
        let copies = bytes.iter().map(|&bytes| {
            let start = offset_bytes;
            offset_bytes += bytes;
            HostCopy {
                offset_bytes: start,
                bytes,
                kept: None,
                put_back: None,
            }
        });
        Ok(Self {
            gpu: gpu.clone(),
            down: gpu.stream()?,
            copies: copies.collect(),
            host: PinnedMemory::new(gpu, offset_bytes)?,
        })
    }

    /// Host memory in bytes.
    pub fn host_bytes(&self) -> usize {
        self.host.bytes_count()
    }

    /// Enqueues keeping the bytes at `from`, once `written` is reached. They must not change before the returned event.
    ///
    /// # Errors
    /// A call failed.
    pub fn keep(
        &mut self,
        number: usize,
        from: DeviceAt<'_>,
        written: &Event,
    ) -> Result<Event, GpuError> {
        let copy = &mut self.copies[number];
        self.down.wait(written)?;
        if let Some(put_back) = copy.put_back.take() {
            self.down.wait(&put_back)?;
        }
        let to = self.host.bytes_mut(copy.offset_bytes, copy.bytes);
        // SAFETY: the host bytes are ours until `Drop`, which waits for the copies, and only copies of this type touch them;
        // the events of `keep` and `put_back` order those.
        unsafe {
            let pieces = &mut [(from.offset_bytes, to)];
            (self.gpu).enqueue_download(&self.down, from.buffer, pieces)?;
        }
        copy.kept = Some(self.down.record()?);
        self.down.record()
    }

    /// Enqueues copying the bytes that were kept to `to`, on `stream`.
    ///
    /// Panics if none were kept.
    ///
    /// # Errors
    /// A call failed.
    pub fn put_back(
        &mut self,
        number: usize,
        to: DeviceAt<'_>,
        stream: &Stream,
    ) -> Result<(), GpuError> {
        let copy = &mut self.copies[number];
        let kept = copy.kept.as_ref();
        stream.wait(kept.expect("bytes are kept before they are put back"))?;
        let from = self.host.bytes_mut(copy.offset_bytes, copy.bytes);
        // SAFETY: as in `keep`.
        unsafe {
            let pieces = &[(to.offset_bytes, &*from)];
            (self.gpu).enqueue_upload(stream, to.buffer, pieces)?;
        }
        copy.put_back = Some(stream.record()?);
        Ok(())
    }
}

impl Drop for HostCopies {
    fn drop(&mut self) {
        // Copies may be in progress. Whoever waits for a failed copy sees its error.
        let _ = self.down.synchronize();
        for copy in &self.copies {
            let _ = copy.put_back.as_ref().map(Event::synchronize);
        }
    }
}
