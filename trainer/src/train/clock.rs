//! How long computing took, without the waiting between: on the processor by the clock, on a GPU by events in its stream.

use std::time::Instant;

use kernels::gpu::{Event, Gpu, Stream};

use super::TrainError;

/// Sums what it was asked to time.
pub(super) struct Clock {
    seconds: f64,
    gpu: Option<Stream>,
    /// Start and end of what is under way on the GPU.
    spans: Vec<(Event, Event)>,
}

impl Clock {
    /// A clock for `gpu`, or for the processor.
    pub(super) fn new(gpu: Option<&Gpu>) -> Self {
        Self {
            seconds: 0.0,
            gpu: gpu.map(Gpu::default_stream),
            spans: Vec::new(),
        }
    }

    /// Times `f`, which computes or enqueues what computes.
    ///
    /// # Errors
    /// An error of `f` or of the GPU.
    pub(super) fn of<R, E>(&mut self, f: impl FnOnce() -> Result<R, E>) -> Result<R, TrainError>
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

    /// Seconds of all that was timed. On a GPU it must have ended.
    ///
    /// # Errors
    /// The GPU's.
    pub(super) fn seconds(&self) -> Result<f64, TrainError> {
        let mut seconds = self.seconds;
        for (start, end) in &self.spans {
            seconds += f64::from(end.elapsed_ms_since(start)?) * 1e-3;
        }
        Ok(seconds)
    }
}
