//! Streams and events: work on one stream runs in order; events order streams against each other and against the host.

use std::sync::Arc;

use super::buffer::DeviceAt;
use super::{Gpu, GpuError};

/// CU_EVENT_BLOCKING_SYNC, hipEventBlockingSync: a waiting thread sleeps, because the optimizer needs the cores.
const BLOCKING_SYNC: u32 = 1;
/// CU_EVENT_DISABLE_TIMING, hipEventDisableTiming.
const DISABLE_TIMING: u32 = 2;
/// CU_STREAM_NON_BLOCKING, hipStreamNonBlocking.
const NON_BLOCKING: u32 = 1;
/// Priority of a stream that nothing was said of.
const USUAL_PRIORITY: i32 = 0;
/// Lower numbers go first. Drivers raise this to the lowest that they know.
const HIGHEST_PRIORITY: i32 = -100;
/// CUDA_ERROR_NOT_READY, hipErrorNotReady.
const NOT_READY: i32 = 600;

/// A queue of work of one GPU. Clones share the queue.
///
/// Only events order work on memory that another stream uses ([`Stream::wait`]).
#[derive(Clone, Debug)]
pub struct Stream(Arc<RawStream>);

#[derive(Debug)]
struct RawStream {
    gpu: Gpu,
    /// 0 is the device's default stream.
    handle: usize,
    /// Whether the last clone destroys the stream.
    owned: bool,
}

/// A point in a stream's work.
#[derive(Debug)]
pub struct Event {
    gpu: Gpu,
    handle: usize,
}

impl Gpu {
    /// Creates a stream that is independent of the default stream.
    ///
    /// # Errors
    /// The call failed.
    pub fn stream(&self) -> Result<Stream, GpuError> {
        self.stream_of(USUAL_PRIORITY)
    }

    /// Like [`Gpu::stream`]; its kernels start before the waiting blocks of kernels on other streams. For short kernels that a copy waits for.
    ///
    /// # Errors
    /// The call failed.
    pub fn urgent_stream(&self) -> Result<Stream, GpuError> {
        self.stream_of(HIGHEST_PRIORITY)
    }

    fn stream_of(&self, priority: i32) -> Result<Stream, GpuError> {
        let mut handle = 0;
        self.make_current()?;
        // SAFETY: the pointer is live for the call.
        let code = unsafe { (self.driver().stream_create)(&mut handle, NON_BLOCKING, priority) };
        self.check(code, || "making a stream".to_owned())?;
        Ok(Stream(Arc::new(RawStream {
            gpu: self.clone(),
            handle,
            owned: true,
        })))
    }

    /// The default stream, on which torch computes.
    pub fn default_stream(&self) -> Stream {
        // SAFETY: 0 names the default stream, which always exists.
        unsafe { self.borrowed_stream(0) }
    }

    /// A stream of another library, such as torch's current one, by its handle ([`Stream::raw`]). Dropping it leaves the
    /// stream as it is.
    ///
    /// # Safety
    /// The handle is 0 or of a stream of this device, which exists as long as the result and its clones are used.
    pub unsafe fn borrowed_stream(&self, handle: usize) -> Stream {
        Stream(Arc::new(RawStream {
            gpu: self.clone(),
            handle,
            owned: false,
        }))
    }
}

impl Stream {
    /// The stream's GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.0.gpu
    }

    /// The library's handle (`cudaStream_t`, `hipStream_t`) as an address, for a library that takes one. 0 is the
    /// default stream.
    pub fn raw(&self) -> usize {
        self.0.handle
    }

    /// Records an event that is reached when everything enqueued so far is done.
    ///
    /// # Errors
    /// The call failed.
    pub fn record(&self) -> Result<Event, GpuError> {
        self.record_with(BLOCKING_SYNC | DISABLE_TIMING)
    }

    /// Like [`Stream::record`], with the time at which it is reached; slightly slower.
    ///
    /// # Errors
    /// The call failed.
    pub fn record_timed(&self) -> Result<Event, GpuError> {
        self.record_with(BLOCKING_SYNC)
    }

    fn record_with(&self, flags: u32) -> Result<Event, GpuError> {
        let mut handle = 0;
        let driver = self.gpu().driver();
        self.gpu().make_current()?;
        // SAFETY: the pointer is live for the call.
        let code = unsafe { (driver.event_create)(&mut handle, flags) };
        self.gpu().check(code, || "making an event".to_owned())?;
        let event = Event {
            gpu: self.gpu().clone(),
            handle,
        };
        // SAFETY: both handles are live and of this device.
        let code = unsafe { (driver.event_record)(handle, self.raw()) };
        self.gpu().check(code, || "recording an event".to_owned())?;
        Ok(event)
    }

    /// Makes later work on this stream start after `event`. The host does not wait. The event may be dropped at once.
    ///
    /// # Errors
    /// The call failed.
    pub fn wait(&self, event: &Event) -> Result<(), GpuError> {
        self.gpu().make_current()?;
        // SAFETY: both handles are live.
        let code = unsafe { (self.gpu().driver().stream_wait)(self.raw(), event.handle, 0) };
        self.gpu()
            .check(code, || "letting a stream wait for an event".to_owned())
    }

    /// Waits, without spinning, until all enqueued work is done.
    ///
    /// # Errors
    /// Enqueued work failed.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        if self.record().and_then(|event| event.synchronize()).is_ok() {
            return Ok(());
        }
        // No memory for an event, or an earlier failure. Copies may still use host memory, so this must wait all the
        // same.
        self.gpu().make_current()?;
        // SAFETY: the handle is live.
        let code = unsafe { (self.gpu().driver().stream_synchronize)(self.raw()) };
        self.gpu()
            .check(code, || "work enqueued on a stream".to_owned())
    }

    /// Enqueues a copy within the device.
    ///
    /// Panics if a range is not within its buffer, or if the ranges overlap: a device copies in no defined order.
    ///
    /// # Errors
    /// The call failed.
    pub fn copy(&self, from: DeviceAt<'_>, to: DeviceAt<'_>, bytes: usize) -> Result<(), GpuError> {
        let (from, to) = (from.address(bytes), to.address(bytes));
        assert!(
            bytes == 0 || from.abs_diff(to) >= bytes as u64,
            "{bytes} bytes copied from {from:#x} to {to:#x} overlap"
        );
        if bytes == 0 {
            return Ok(());
        }
        self.gpu().make_current()?;
        // SAFETY: both ranges are device memory that is allocated (checked by `address`).
        let code = unsafe { (self.gpu().driver().copy_across)(to, from, bytes, self.raw()) };
        self.gpu()
            .check(code, || format!("copying {bytes} bytes within the device"))
    }

    /// Enqueues writing zeros to `bytes` bytes.
    ///
    /// Panics if they are not within the buffer.
    ///
    /// # Errors
    /// The call failed.
    pub fn fill_zero(&self, to: DeviceAt<'_>, bytes: usize) -> Result<(), GpuError> {
        let to = to.address(bytes);
        if bytes == 0 {
            return Ok(());
        }
        self.gpu().make_current()?;
        // SAFETY: the range is device memory that is allocated (checked by `address`).
        let code = unsafe { (self.gpu().driver().fill)(to, 0, bytes, self.raw()) };
        self.gpu()
            .check(code, || format!("zeroing {bytes} bytes of the device"))
    }
}

impl Drop for RawStream {
    fn drop(&mut self) {
        if !self.owned || self.gpu.make_current().is_err() {
            return;
        }
        // SAFETY: this was the last owner. Enqueued work still runs to its end; whoever waits for its event sees a
        // failure.
        let _ = unsafe { (self.gpu.driver().stream_destroy)(self.handle) };
    }
}

impl Event {
    /// Whether the event was reached.
    ///
    /// # Errors
    /// Work before it failed.
    pub fn is_done(&self) -> Result<bool, GpuError> {
        self.gpu.make_current()?;
        // SAFETY: the handle is live.
        let code = unsafe { (self.gpu.driver().event_query)(self.handle) };
        if code == NOT_READY {
            return Ok(false);
        }
        self.gpu
            .check(code, || "work before an event".to_owned())
            .map(|()| true)
    }

    /// Waits, without spinning, until the event is reached.
    ///
    /// # Errors
    /// Work before it failed.
    pub fn synchronize(&self) -> Result<(), GpuError> {
        self.gpu.make_current()?;
        // SAFETY: the handle is live.
        let code = unsafe { (self.gpu.driver().event_synchronize)(self.handle) };
        self.gpu.check(code, || "work before an event".to_owned())
    }

    /// Milliseconds from `earlier` to this event, both from [`Stream::record_timed`] and both reached.
    ///
    /// # Errors
    /// An event is not reached yet or was recorded without a time.
    pub fn elapsed_ms_since(&self, earlier: &Event) -> Result<f32, GpuError> {
        let mut elapsed_ms = 0.0;
        self.gpu.make_current()?;
        // SAFETY: the pointer and both handles are live for the call.
        let code = unsafe {
            (self.gpu.driver().event_elapsed)(&mut elapsed_ms, earlier.handle, self.handle)
        };
        self.gpu
            .check(code, || "asking the time between two events".to_owned())?;
        Ok(elapsed_ms)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.gpu.make_current().is_ok() {
            // SAFETY: this was the only owner; streams that wait for the event keep waiting.
            let _ = unsafe { (self.gpu.driver().event_destroy)(self.handle) };
        }
    }
}
