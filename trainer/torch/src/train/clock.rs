//! Measures computing time without the waiting in between: on the processor by the system clock, on a GPU by
//! events in its stream.

use std::time::Instant;

use kernels::gpu::{Event, Gpu, Stream};

use super::TrainError;

/// Sum of the time of all timed calls.
pub(super) struct Clock {
    seconds: f64,
    gpu: Option<Stream>,
    /// Start and end events of timed GPU work.
    spans: Vec<(Event, Event)>,
}

impl Clock {
    /// Makes a clock for `gpu`, or for the processor.
    pub(super) fn new(gpu: Option<&Gpu>) -> Self {
        Self {
            seconds: 0.0,
            gpu: gpu.map(Gpu::default_stream),
            spans: Vec::new(),
        }
    }

    /// Calls `f`, which computes or enqueues GPU work, and adds its time.
    ///
    /// # Errors
    /// An error of `f` or of the GPU.
    pub(super) fn time<R, E>(&mut self, f: impl FnOnce() -> Result<R, E>) -> Result<R, TrainError>
    where
        TrainError: From<E>,
    {
        let Some(stream) = &self.gpu else {
            let started = Instant::now();
            let result = f();
            self.seconds += started.elapsed().as_secs_f64();
            return Ok(result?);
        };
        let start = stream.record_timed()?;
        let result = f()?;
        self.spans.push((start, stream.record_timed()?));
        Ok(result)
    }

    /// Returns the seconds of all timed calls. Waits until their GPU work has ended.
    ///
    /// # Errors
    /// The GPU fails.
    pub(super) fn seconds(&self) -> Result<f64, TrainError> {
        let mut seconds = self.seconds;
        if let Some((_, last)) = self.spans.last() {
            last.synchronize()?;
        }
        for (start, end) in &self.spans {
            seconds += f64::from(end.elapsed_ms_since(start)?) * 1e-3;
        }
        Ok(seconds)
    }
}
