//! When each turn of a step computed, for a timeline: by the clock, or by events in a GPU's stream, whose times are known when
//! the GPU is done.

use std::time::{Duration, Instant};

use kernels::gpu::{Event, Gpu, GpuError, Stream};

use super::TrainError;
use super::turns::Turn;
use crate::trace::{Trace, Track};

/// Watches the turns of one pass.
pub(super) struct Watch<'a> {
    trace: &'a Trace,
    gpu: Option<Stream>,
    /// Begin and end of turns that were enqueued.
    enqueued: Vec<(Turn, Event, Event)>,
}

impl<'a> Watch<'a> {
    /// Of turns that `gpu` computes, or the processor.
    pub(super) fn new(trace: &'a Trace, gpu: Option<&Gpu>) -> Self {
        Self {
            trace,
            gpu: gpu.map(Gpu::default_stream),
            enqueued: Vec::new(),
        }
    }

    /// Does `turn`, which `f` does.
    ///
    /// # Errors
    /// What `f` returns; the GPU's.
    pub(super) fn of(
        &mut self,
        turn: Turn,
        f: impl FnOnce() -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        if !turn.computes() || !self.trace.recording() {
            return f();
        }
        let Some(stream) = &self.gpu else {
            let _span = self.trace.span(Track::Compute, || turn.to_string());
            return f();
        };
        let start = stream.record_timed()?;
        f()?;
        self.enqueued.push((turn, start, stream.record_timed()?));
        Ok(())
    }

    /// Records what a GPU has done; waits until it has.
    ///
    /// # Errors
    /// The GPU's.
    pub(super) fn end(self) -> Result<(), GpuError> {
        let (Some(stream), false) = (&self.gpu, self.enqueued.is_empty()) else {
            return Ok(());
        };
        // The one point whose time both clocks know.
        let last = stream.record_timed()?;
        last.synchronize()?;
        let now = Instant::now();
        let at = |event: &Event| -> Result<Instant, GpuError> {
            let before_ms = f64::from(last.elapsed_ms_since(event)?).max(0.0);
            let before = Duration::from_secs_f64(before_ms * 1e-3);
            Ok(now.checked_sub(before).unwrap_or(now))
        };
        for (turn, start, end) in &self.enqueued {
            let name = turn.to_string();
            self.trace
                .record(Track::Compute, name, at(start)?, at(end)?);
        }
        Ok(())
    }
}
