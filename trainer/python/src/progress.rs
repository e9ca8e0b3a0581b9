//! What a run reports of its steps: seconds, bytes and the bound; lines of `metrics.jsonl`, and DeepSpeed's monitors.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use offload_support::energy::EnergyMeter;
use pyo3::prelude::*;
use swapper::{OpenReport, Schedule, StepBytes, StepIo, StepRates, SwapperSettings, bound};
use training_state::metrics::{MetricsFile, StepMetrics};
use training_state::monitor::{Monitors, Reports};

use crate::errors::Error;

/// Where the caller's program is, as `Core.phase` is told.
pub(crate) const FORWARD: usize = 1;
pub(crate) const BACKWARD: usize = 2;
const PHASES: usize = 3;

/// Seconds of each phase of a step, without those of calls into this crate.
pub(crate) struct Clock {
    phase: usize,
    since: Instant,
    /// Time in calls since the phase began.
    called: Duration,
    seconds: [f64; PHASES],
    /// The end of the step before, or the first forward.
    step_began: Option<Instant>,
}

impl Clock {
    pub(crate) fn new() -> Self {
        Self {
            phase: 0,
            since: Instant::now(),
            called: Duration::ZERO,
            seconds: [0.0; PHASES],
            step_began: None,
        }
    }

    /// The program enters `phase`.
    pub(crate) fn enter(&mut self, phase: usize) {
        let now = Instant::now();
        let spent = (now - self.since).saturating_sub(self.called);
        self.seconds[self.phase] += spent.as_secs_f64();
        (self.phase, self.since, self.called) = (phase.min(PHASES - 1), now, Duration::ZERO);
        self.step_began.get_or_insert(now);
    }

    /// A call took so long.
    pub(crate) fn called(&mut self, spent: Duration) {
        self.called += spent;
    }

    /// Seconds of the step that ends now, and of its phases.
    fn end_step(&mut self) -> (f64, [f64; PHASES]) {
        self.enter(0);
        let now = self.since;
        let began = self.step_began.replace(now).unwrap_or(now);
        let phases = std::mem::take(&mut self.seconds);
        ((now - began).as_secs_f64(), phases)
    }
}

/// What is known of a step when it has ended.
#[pyclass(frozen, get_all)]
pub(crate) struct StepFacts {
    step_s: f64,
    forward_s: f64,
    backward_s: f64,
    /// Waits for tiles, updates and commits.
    waited_s: f64,
    update_s: f64,
    /// Lower bound of the step's seconds, and the resource that sets it.
    bound_s: f64,
    wall: &'static str,
    read_bytes: u64,
    written_bytes: u64,
    /// The newest committed generation.
    generation: u64,
}

/// What Python knows of a step.
pub(crate) struct Step {
    pub(crate) step: u64,
    pub(crate) samples: u64,
    /// NaN where it is unknown.
    pub(crate) loss: f64,
    pub(crate) grad_norm: f64,
    pub(crate) lr: f64,
    pub(crate) loss_scale: Option<f64>,
    pub(crate) skipped: bool,
    /// Weights that stay on the GPU between their uses.
    pub(crate) gpu_resident_bytes: u64,
}

/// The reports of one start of a run.
pub(crate) struct Reporter {
    schedule: Schedule,
    /// Bytes of a step with one forward and one backward.
    bytes: StepBytes,
    /// This rank's part of those of all devices together, bytes a second; infinite where unknown.
    rates: (f64, f64),
    staging_bytes: u64,
    host_bytes: u64,
    /// Generation that the store resumed from, and its devices, until the files are opened first.
    resumed: Option<(u64, Vec<String>)>,
    /// Address of the GPU whose energy is counted.
    gpu: Option<String>,
    /// What a process that writes reports has. The energy counts from the end of the step before.
    files: Option<(MetricsFile, Monitors, EnergyMeter)>,
}

impl Reporter {
    pub(crate) fn new(
        settings: &SwapperSettings,
        bytes: StepBytes,
        opened: &OpenReport,
        gpu: Option<String>,
    ) -> Self {
        let (read, write) = opened.rates().unwrap_or((f64::INFINITY, f64::INFINITY));
        let ranks = settings.local().len() as f64;
        Self {
            gpu,
            schedule: settings.schedule,
            bytes,
            rates: (read / ranks, write / ranks),
            staging_bytes: opened.memory.staging_bytes() + opened.memory.scratch_slot_bytes(),
            host_bytes: opened.memory.host_bytes(),
            resumed: (opened.resumed.as_ref()).map(|_| {
                let devices = opened.devices.iter().map(|device| device.path.clone());
                (opened.generation, devices.collect())
            }),
            files: None,
        }
    }

    /// Opens the files of a run that has done `step` steps with `samples` samples. Returns a warning when the store that it resumes from is
    /// older than they are.
    pub(crate) fn open(
        &mut self,
        run_dir: &Path,
        step: u64,
        samples: u64,
        tensorboard: Option<PathBuf>,
        csv: Option<PathBuf>,
        wall_clock_breakdown: bool,
    ) -> PyResult<Option<String>> {
        let resumed = self.resumed.take().filter(|_| step > 0);
        let older = resumed.and_then(|(generation, devices)| {
            MetricsFile::last(run_dir)?.of_newer_store(step, generation, &devices)
        });
        let reports = Reports {
            wall_clock_breakdown,
            tensorboard,
            csv,
        };
        let (metrics, _) =
            MetricsFile::open(run_dir, step).map_err(|error| Error::new_err(error.to_string()))?;
        let monitors =
            Monitors::open(&reports, samples).map_err(|error| Error::new_err(error.to_string()))?;
        let energy = EnergyMeter::new(self.gpu.as_deref(), true);
        self.files = Some((metrics, monitors, energy));
        Ok(older)
    }

    /// Writes what is known of a step that ended, and returns it.
    pub(crate) fn report(
        &mut self,
        clock: &mut Clock,
        io: &StepIo,
        step: &Step,
    ) -> PyResult<StepFacts> {
        let (step_s, phases) = clock.end_step();
        let (forward_s, backward_s) = (phases[FORWARD], phases[BACKWARD]);
        let seconds = |ns: u64| ns as f64 / 1e9;
        let some_stay = step.gpu_resident_bytes > 0;
        let read_bytes = io.read_bytes - io.scratch_read_bytes;
        let bytes = StepBytes {
            scratch_written_bytes: io.scratch_written_bytes as f64,
            scratch_read_bytes: io.scratch_read_bytes as f64,
            ..self.bytes.that_read(read_bytes as f64, some_stay)
        };
        let rates = StepRates {
            read_bytes_per_s: self.rates.0,
            write_bytes_per_s: self.rates.1,
            staging_bytes: self.staging_bytes as f64,
            forward_s,
            backward_s,
            update_s: seconds(io.update_ns),
            bus_s: 0.0,
            network_s: 0.0,
        };
        let bound = bound(self.schedule, &bytes, &rates);
        let facts = StepFacts {
            step_s,
            forward_s,
            backward_s,
            waited_s: seconds(io.waited_ns),
            update_s: seconds(io.update_ns),
            bound_s: bound.s,
            wall: bound.wall.word(),
            read_bytes: io.read_bytes,
            written_bytes: io.written_bytes,
            generation: io.generation,
        };
        let Some((file, monitors, energy)) = &mut self.files else {
            return Ok(facts);
        };
        let energy = energy.joules_since_last();
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let metrics = StepMetrics {
            step: step.step,
            loss: step.loss,
            grad_norm: step.grad_norm,
            loss_scale: step.loss_scale,
            skipped: step.skipped,
            lr: step.lr,
            unix_s: now.unwrap_or_default().as_secs_f64(),
            tokens: 0,
            epoch: None,
            generation: io.generation,
            step_s,
            forward_s,
            backward_s,
            waited_s: facts.waited_s,
            directions_s: 0.0,
            exchange_s: 0.0,
            update_s: facts.update_s,
            device_read_bytes: io.read_bytes,
            device_written_bytes: io.written_bytes,
            device_grad_read_bytes: io.grad_read_bytes,
            device_grad_written_bytes: io.grad_written_bytes,
            gathered_bytes: 0,
            reduced_bytes: 0,
            grads_held_bytes: 0,
            host_bytes: self.host_bytes,
            gpu_resident_bytes: step.gpu_resident_bytes,
            gpu_energy_j: energy.gpu,
            cpu_energy_j: energy.processors,
            bound_s: bound.s,
            eval_loss: None,
            eval_data: None,
            eval_perplexity: None,
        };
        file.write(&metrics);
        monitors
            .step(&metrics, step.samples)
            .map_err(|error| Error::new_err(error.to_string()))?;
        Ok(facts)
    }
}
