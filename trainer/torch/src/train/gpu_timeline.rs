//! Records when work in a GPU's streams ran, for a timeline. Events enclose the work; their times are known
//! when the GPU is done.

use std::time::{Duration, Instant};

use kernels::gpu::{Event, GpuError, Stream};

use super::TrainError;
use training_state::trace::{Trace, Track};

/// Work of one track whose times are not known yet.
pub(super) struct EnqueuedWork {
    track: Track,
    list: Vec<(String, Event, Event)>,
}

impl EnqueuedWork {
    pub(super) fn new(track: Track) -> Self {
        Self {
            track,
            list: Vec::new(),
        }
    }

    /// Calls `f`, which enqueues the work called `name` on `stream`. Records nothing outside recorded steps.
    ///
    /// # Errors
    /// An error of `f` or of the GPU.
    pub(super) fn record<E: Into<TrainError>>(
        &mut self,
        trace: &Trace,
        stream: &Stream,
        name: impl FnOnce() -> String,
        f: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), TrainError> {
        if !trace.recording() {
            return f().map_err(Into::into);
        }
        let start = stream.record_timed()?;
        f().map_err(Into::into)?;
        self.list.push((name(), start, stream.record_timed()?));
        Ok(())
    }

    /// Adds all recorded work to `trace`. Waits until `stream` has completed it.
    ///
    /// # Errors
    /// The GPU fails.
    pub(super) fn flush_to(&mut self, trace: &Trace, stream: &Stream) -> Result<(), GpuError> {
        if self.list.is_empty() {
            return Ok(());
        }
        // The only moment whose time is known on both clocks.
        let last = stream.record_timed()?;
        last.synchronize()?;
        let now = Instant::now();
        let at = |event: &Event| -> Result<Instant, GpuError> {
            let before_ms = f64::from(last.elapsed_ms_since(event)?).max(0.0);
            let before = Duration::from_secs_f64(before_ms * 1e-3);
            Ok(now.checked_sub(before).unwrap_or(now))
        };
        for (name, start, end) in self.list.drain(..) {
            trace.record(self.track, name, at(&start)?, at(&end)?);
        }
        Ok(())
    }
}
