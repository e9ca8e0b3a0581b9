//! Records when each turn of a step computed, for a timeline: by the system clock, or by events in a GPU's
//! stream.

use kernels::gpu::{Gpu, GpuError, Stream};

use super::TrainError;
use super::gpu_timeline::EnqueuedWork;
use super::step_order::Turn;
use training_state::trace::{Trace, Track};

/// Records the turns of one pass.
pub(super) struct Watch<'a> {
    trace: &'a Trace,
    gpu: Option<(Stream, EnqueuedWork)>,
}

impl<'a> Watch<'a> {
    /// Makes a recorder for `gpu`, or for the processor.
    pub(super) fn new(trace: &'a Trace, gpu: Option<&Gpu>) -> Self {
        Self {
            trace,
            gpu: gpu.map(|gpu| (gpu.default_stream(), EnqueuedWork::new(Track::Compute))),
        }
    }

    /// Runs `f`, which does the work of `turn`, and records its time.
    ///
    /// # Errors
    /// An error of `f` or of the GPU.
    pub(super) fn record(
        &mut self,
        turn: Turn,
        f: impl FnOnce() -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        if !turn.computes() {
            return f();
        }
        if let Some((stream, gpu_timeline)) = &mut self.gpu {
            return gpu_timeline.record(self.trace, stream, || turn.to_string(), f);
        }
        let _span = self.trace.span(Track::Compute, || turn.to_string());
        f()
    }

    /// Records the GPU's turns; waits until they have ended.
    ///
    /// # Errors
    /// The GPU fails.
    pub(super) fn end(self) -> Result<(), GpuError> {
        match self.gpu {
            Some((stream, mut gpu_timeline)) => gpu_timeline.flush_to(self.trace, &stream),
            None => Ok(()),
        }
    }
}
