//! When each turn of a step computed, for a timeline: by the clock, or by events in a GPU's stream.

use kernels::gpu::{Gpu, GpuError, Stream};

use super::TrainError;
use super::gpu_timeline::Enqueued;
use super::step_order::Turn;
use training_state::trace::{Trace, Track};

/// Watches the turns of one pass.
pub(super) struct Watch<'a> {
    trace: &'a Trace,
    gpu: Option<(Stream, Enqueued)>,
}

impl<'a> Watch<'a> {
    /// Watches turns on `gpu`, or on the processor.
    pub(super) fn new(trace: &'a Trace, gpu: Option<&Gpu>) -> Self {
        Self {
            trace,
            gpu: gpu.map(|gpu| (gpu.default_stream(), Enqueued::new(Track::Compute))),
        }
    }

    /// Does `turn`, which `f` does.
    ///
    /// # Errors
    /// An error of `f` or of the GPU.
    pub(super) fn of(
        &mut self,
        turn: Turn,
        f: impl FnOnce() -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        if !turn.computes() {
            return f();
        }
        if let Some((stream, gpu_timeline)) = &mut self.gpu {
            return gpu_timeline.of(self.trace, stream, || turn.to_string(), f);
        }
        let _span = self.trace.span(Track::Compute, || turn.to_string());
        f()
    }

    /// Records what a GPU has done; waits until it has.
    ///
    /// # Errors
    /// The GPU's.
    pub(super) fn end(self) -> Result<(), GpuError> {
        match self.gpu {
            Some((stream, mut gpu_timeline)) => gpu_timeline.tell(self.trace, &stream),
            None => Ok(()),
        }
    }
}
