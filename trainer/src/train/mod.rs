//! Training: opens a run, steps until it is done or asked to stop, leaves it where the next start goes on.

mod checkpointer;
mod clock;
mod error;
mod gpu_timeline;
mod inputs;
mod mover;
mod open;
mod peer_watchdog;
mod progress;
mod show;
mod step;
mod step_order;
mod stop;
#[cfg(test)]
mod tests;
mod watch;

use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use kernels_torch::collective::GpuComm;
use swapper::{StepRates, bound_s};
use test_hooks::kill_point::{Point, reach};

pub use error::TrainError;
pub(crate) use open::{IN_PLACE, OpenRun, Prepared, SHARED_STORE, STORE_IN_DIR, mend};

use crate::compute::{self, Engine};
use crate::config::{OverflowPolicy, RunSettings};
use crate::data::{Corpus, Data, Frame};
use crate::learning_rate::learning_rate;
use crate::metrics::{MetricsFile, StepMetrics};
use crate::monitor::Monitors;
use crate::overflow::{Outcome, OverflowState};
use crate::plan::Measured;
use crate::ranks::Ranks;
use crate::run::CheckpointName;
use crate::trace::Trace;
use checkpointer::{Checkpointer, CheckpointerParts};
use inputs::InputPlace;
use mover::Shards;
use offload_support::outln;
use peer_watchdog::PeerWatchdog;
use progress::Progress;
use step::{Gradients, Stepper};
use stop::Stop;

/// Where a start begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// Where the run was left; with fresh weights if there is none.
    GoOn,
    /// With fresh weights: an earlier run of the same directory is forgotten.
    Fresh,
    /// At a checkpoint, of this run or another.
    Checkpoint(CheckpointName),
}

/// Trains until `settings.train.stop_after`, or until SIGTERM or SIGINT. Returns the exit status: 0 when the run is done, 128
/// and the signal's number when it was asked to stop before.
///
/// # Errors
/// Whatever refused the run or ended it. What was committed or saved before stays.
pub fn train(settings: RunSettings, start: &Start, trace: &Trace) -> Result<u8, TrainError> {
    let stop = Stop::register().map_err(TrainError::Signals)?;
    trace.check()?;
    let ranks = Arc::new(Ranks::from_env()?);
    let result = run_to_its_end(settings.clone(), start, trace, &stop, &ranks)
        .map_err(|error| error.of_run(&settings));
    let result = ranks.end(result);
    match trace.write() {
        Ok(Some(path)) if ranks.is_first() => {
            outln!("timeline: {}, for ui.perfetto.dev", path.display());
        }
        Ok(_) => {}
        // The run's own failure says more.
        Err(error) if result.is_err() => outln!("note: {error}"),
        Err(error) => return Err(error.into()),
    }
    result
}

fn run_to_its_end(
    settings: RunSettings,
    start: &Start,
    trace: &Trace,
    stop: &Stop,
    ranks: &Arc<Ranks>,
) -> Result<u8, TrainError> {
    if *start != Start::Fresh {
        ranks.by_first("looking for the run", || {
            mend(&settings, &mut |note| outln!("{note}"))
        })?;
    }
    let (corpus, mut prepared) = ranks.together("checking the run", || {
        // A run without steps is made to be exported, or to go on from.
        let corpus = match settings.train.steps {
            0 => None,
            _ => Some(Corpus::find(&settings.data, &Frame::of(&settings))?),
        };
        let prepared = Prepared::new(settings.clone(), start, ranks.clone())?;
        prepared.check_room()?;
        Ok((corpus, prepared))
    })?;
    ranks.check_same_run(&settings, corpus.as_ref().map_or(0, Corpus::fingerprint))?;
    if ranks.is_first() {
        show::plan(&prepared.settings, &prepared.plan, corpus.as_ref());
    }
    ranks.by_first("checking the weights", || prepared.check_weights())?;
    let data = corpus.map(|corpus| read_data(&settings, &corpus, ranks));
    let data = data.transpose()?;
    if let Some(data) = &data {
        prepared.train_on(data);
    }
    start_threads(settings.train.threads)?;
    // All ranks at once, so not within what each does by itself. A machine may have fewer GPUs than ranks.
    let computes = prepared.gpu.as_ref().map_or("the processor", |_| "a GPU");
    (ranks.comm()).same_everywhere("what computes (train.device)", computes)?;
    let gpus = match &prepared.gpu {
        Some(gpu) if ranks.count() > 1 => Some(Arc::new(GpuComm::connect(&ranks.comm(), gpu)?)),
        _ => None,
    };
    let stepper = ranks.together("taking memory to compute in", || {
        let gpu = prepared.gpu.clone();
        let on = match &gpu {
            None => compute::ComputeDevice::Cpu,
            Some(gpu) => compute::ComputeDevice::Gpu(gpu.clone()),
        };
        let engine = Engine::on(&on, &settings.model, settings.dtype, settings.batch.seq_len)?
            .with_checkpointing(prepared.plan.checkpointing)
            .in_tiles(settings.train.mlp_chunks)
            .leaving_out(settings.dropout, settings.train.seed);
        let live = prepared.plan.lives_in_gpu;
        let stage = settings.placement.stage;
        let (master, tiles) = (prepared.plan.master, &prepared.plan.swapper);
        let shards = Shards::new(ranks.comm(), gpus, &tiles.units, tiles.tile_elems, stage);
        let batch = settings.batch;
        let inputs = match &gpu {
            Some(gpu) if prepared.plan.inputs_away => {
                let input_elems = batch.micro_batch * batch.seq_len * settings.model.hidden_size;
                let input_bytes = input_elems * settings.dtype.elem_bytes();
                InputPlace::away(gpu, &settings.model, batch.micro_batches, input_bytes)?
            }
            _ => InputPlace::here(batch.micro_batches),
        };
        let stepper = Stepper::new(engine, gpu, batch, master, live, stage, shards)?;
        Ok(stepper.with_inputs_in(inputs))
    })?;

    let first = ranks.is_first();
    let (run, resumed) = prepared.open(start, &mut |note| {
        if first {
            outln!("{note}");
        }
    })?;
    if first {
        show::opened(&run, resumed);
    }
    let canceller = run.backend.canceller().filter(|_| ranks.count() > 1);
    let peer_watchdog = canceller.map(|canceller| PeerWatchdog::start(ranks.comm(), canceller));
    let mut training = Training::new(settings, data, stepper, run, ranks.clone())?;
    training.record(trace)?;
    let result = training.run_steps(stop);
    match &result {
        // No tile has changed since the step before, which is worth keeping. All ranks have come to the same.
        Ok(_) | Err(TrainError::Diverged { .. } | TrainError::LeastScale { .. }) => {
            training.keep()?;
        }
        // Before this rank's part ends, and its private daemon: that is not why.
        Err(error) => {
            ranks.give_up(error);
            trace.add(training.run.backend.take_spans());
        }
    }
    // Ranks that have ended are no longer missed.
    drop(peer_watchdog);
    match result {
        Ok(asked) => {
            training.end(asked)?;
            Ok(if asked { stop.status() } else { 0 })
        }
        Err(diverged @ (TrainError::Diverged { .. } | TrainError::LeastScale { .. })) => {
            training.run.close()?;
            Err(diverged)
        }
        Err(error) => Err(error),
    }
}

/// The tokens of the run: the first rank makes them if they are not there, all read them.
fn read_data(settings: &RunSettings, corpus: &Corpus, ranks: &Ranks) -> Result<Data, TrainError> {
    ranks.by_first("making the tokens", || {
        let mut say = |note| outln!("{note}");
        Ok(corpus.prepare(settings, &mut say)?)
    })?;
    let data = ranks.together("opening the tokens", || Ok(corpus.open(settings)?))?;
    if ranks.is_first() {
        outln!("  data      {}", data.describe());
    }
    Ok(data)
}

/// Sets up torch's and the optimizer's threads, once for the process.
fn start_threads(count: usize) -> Result<(), TrainError> {
    crate::compute::set_up(count)?;
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(count)
        .build_global();
    pool.map_err(|error| TrainError::Threads {
        count,
        message: error.to_string(),
    })
}

/// A run in its loop.
struct Training {
    settings: RunSettings,
    /// None where the run has no steps.
    data: Option<Data>,
    stepper: Stepper,
    /// What people see; the first rank's.
    shown: Option<Shown>,
    run: OpenRun,
    ranks: Arc<Ranks>,
    checkpointer: Checkpointer,
    /// Seconds of computing in the last step.
    compute_s: Option<f64>,
    trace: Trace,
}

/// Where steps are told.
struct Shown {
    metrics: MetricsFile,
    monitors: Monitors,
    monitors_failed: bool,
    progress: Progress,
}

impl Shown {
    /// Tells the monitors of a step. One that fails is said once: training does not depend on it.
    fn monitor(&mut self, metrics: &StepMetrics, samples: u64) {
        if let Err(error) = self.monitors.step(metrics, samples)
            && !std::mem::replace(&mut self.monitors_failed, true)
        {
            tracing::warn!("{error}. Training goes on; the monitor lacks steps");
        }
    }
}

impl Training {
    fn new(
        settings: RunSettings,
        data: Option<Data>,
        stepper: Stepper,
        run: OpenRun,
        ranks: Arc<Ranks>,
    ) -> Result<Self, TrainError> {
        let state = &run.state;
        let (train, reports) = (&settings.train, &settings.reports);
        let mut last_step = state.step;
        let shown = ranks.together("opening the metrics", || {
            if !ranks.is_first() {
                return Ok(None);
            }
            let (metrics, last) = MetricsFile::open(run.dir.path(), state.step)?;
            last_step = last;
            let progress = Progress::new(state.step, train.stop_after, train.log_every);
            let progress = progress.telling(reports.wall_clock_breakdown);
            let monitors = Monitors::open(reports, state.next_sample)?;
            Ok(Some(Shown {
                metrics,
                monitors,
                monitors_failed: false,
                progress,
            }))
        })?;
        // The first rank knows; all evaluate.
        let is_lost = ranks.any(last_step < state.step)?;
        let lost = (state.last.clone()).filter(|last| is_lost && last.step == state.step);
        let checkpoints = run.dir.checkpoints();
        let newest = ranks.by_first("looking for a checkpoint", || {
            Ok(checkpoints.has(state.step))
        })?;
        let parts = CheckpointerParts {
            checkpoints,
            checkpoint_tap: run.checkpoint_tap.clone(),
            every: train.checkpoint_every,
            kept: train.checkpoints_kept,
            layout: run.layout.clone(),
            ranges: run.saved_ranges()?,
            tile_bytes: run.plan.memory.table_bytes,
        };
        let checkpointer = Checkpointer::new(parts, newest.then_some(state.step), ranks.clone());
        let mut training = Self {
            settings,
            data,
            stepper,
            shown,
            run,
            ranks,
            checkpointer,
            compute_s: None,
            trace: Trace::off(),
        };
        // The commit was the last that happened before the end: the step's line is made up for.
        if let Some(mut last) = lost {
            training.evaluate_if_due(&mut last)?;
            if let Some(shown) = &mut training.shown {
                shown.metrics.write(&last);
            }
        }
        Ok(training)
    }

    /// From now on steps are recorded in `trace`, those that it wants.
    fn record(&mut self, trace: &Trace) -> Result<(), TrainError> {
        let steps_left = (self.settings.train.stop_after).saturating_sub(self.run.state.step);
        trace.begin(steps_left);
        if trace.recording() {
            self.run.backend.record_spans(true)?;
        }
        self.trace = trace.clone();
        Ok(())
    }

    /// Steps to where this start ends, or until a rank was asked to stop before: whether one was.
    fn run_steps(&mut self, stop: &Stop) -> Result<bool, TrainError> {
        // The end before may have come between a commit and its checkpoint; a run without a store that began elsewhere has none of its own.
        let step = self.run.state.step;
        let wanted = self.checkpointer.is_due(step) || !self.settings.placement.has_store();
        if step > 0 && wanted && !self.checkpointer.has(step) {
            self.checkpoint_now()?;
        }
        loop {
            if self.run.state.step >= self.settings.train.stop_after {
                return Ok(false);
            }
            if self.ranks.any(stop.asked())? {
                return Ok(true);
            }
            self.step()?;
        }
    }

    /// One step, its line in the metrics, and what is due after it.
    fn step(&mut self) -> Result<(), TrainError> {
        let started = Instant::now();
        let step = self.run.state.step + 1;
        let rules = self.settings.overflow;
        let mut overflow = OverflowState::new(&rules, self.run.state.overflow);
        let scale = overflow.scale;
        // Steps that changed nothing count for neither the optimizer nor its rate.
        let update = step - overflow.skipped;
        let lr = learning_rate(&self.settings.lr, update);
        let gradients = self.stepper.forward_backward(
            &mut self.run.backend,
            self.data.as_ref().expect("a run with steps has data"),
            self.run.state.next_sample,
            scale,
            &self.trace,
        )?;
        let Gradients { loss, norm, .. } = gradients;
        let outcome = overflow.step(&rules, loss.is_finite() && norm.is_finite());
        if outcome == Outcome::Ends {
            return Err(match rules {
                OverflowPolicy::Scales(dynamic) => TrainError::LeastScale {
                    step,
                    scale: dynamic.min,
                },
                _ => TrainError::Diverged { step, loss, norm },
            });
        }
        let planned_bound_s = self.bound_s(&gradients, 0);
        let (settings, state, plan) = (&self.settings, &mut self.run.state, &self.run.plan);
        state.step = step;
        state.tokens += settings.step_tokens();
        state.next_sample += settings.step_samples();
        state.lr = lr;
        state.overflow = Some(overflow);
        let is_scaled = matches!(
            rules,
            OverflowPolicy::Scaled { .. } | OverflowPolicy::Scales(_)
        );
        let mut metrics = StepMetrics {
            step,
            loss,
            grad_norm: norm,
            loss_scale: is_scaled.then_some(scale),
            skipped: outcome == Outcome::Skips,
            lr,
            unix_s: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0.0, |since| since.as_secs_f64()),
            tokens: state.tokens,
            generation: 0,
            step_s: started.elapsed().as_secs_f64(),
            forward_s: gradients.forward_s,
            backward_s: gradients.backward_s,
            waited_s: 0.0,
            update_s: 0.0,
            device_read_bytes: plan.node_bytes.read_bytes() as u64,
            device_written_bytes: plan.node_bytes.written_bytes as u64,
            device_grad_read_bytes: plan.node_bytes.grad_written_bytes as u64,
            device_grad_written_bytes: plan.node_bytes.grad_written_bytes as u64,
            gathered_bytes: gradients.exchanged.gathered_bytes,
            reduced_bytes: gradients.exchanged.reduced_bytes,
            grads_held_bytes: gradients.held_bytes,
            host_bytes: plan.host_bytes() * u64::from(settings.ranks),
            bound_s: planned_bound_s,
            eval_loss: None,
        };
        // What is not known before the update is as planned here; only a line made up for after a crash shows it.
        state.last = Some(metrics.clone());
        let blob = state.encode();
        // What moves once the step is finished is the next one's.
        if self.trace.begins_after() {
            self.run.backend.record_spans(true)?;
        }
        self.checkpointer.all_came();
        let saving = self.checkpointer.is_due(step) && {
            let shown = &self.shown;
            self.checkpointer.begin(step, &|line| say(shown, line))?
        };
        let hyper =
            (outcome == Outcome::Updates).then(|| step::hyper(&self.settings, update, norm, scale));
        let io = self.run.backend.finish_step(hyper, blob)?;
        (self.trace).finish_step(step, started, self.run.backend.take_spans());
        if self.trace.has_ended() {
            self.run.backend.record_spans(false)?;
        }
        metrics.step_s = started.elapsed().as_secs_f64();
        metrics.generation = io.generation;
        metrics.waited_s = io.waited_ns as f64 * 1e-9;
        metrics.update_s = io.update_ns as f64 * 1e-9;
        // The drives are all ranks'; times are this one's.
        let mut moved = [
            io.read_bytes as f64,
            io.written_bytes as f64,
            io.grad_read_bytes as f64,
            io.grad_written_bytes as f64,
        ];
        self.ranks.sum(&mut moved)?;
        [
            metrics.device_read_bytes,
            metrics.device_written_bytes,
            metrics.device_grad_read_bytes,
            metrics.device_grad_written_bytes,
        ] = moved.map(|bytes| bytes as u64);
        metrics.bound_s = self.bound_s(&gradients, io.update_ns);
        self.compute_s = Some(gradients.forward_s + gradients.backward_s);
        self.evaluate_if_due(&mut metrics)?;
        if let Some(shown) = &mut self.shown {
            reach(Point::Telling);
            shown.metrics.write(&metrics);
            shown.monitor(&metrics, self.run.state.next_sample);
            if metrics.skipped {
                shown.progress.say(&show::skipped(&metrics, &overflow));
            }
            shown.progress.step(&metrics, self.settings.step_tokens());
        }
        // Tiles that nobody updates on the host are not copied on the way.
        let visited = metrics.skipped || !self.run.backend.updates_on_host();
        self.run.state.last = Some(metrics);
        if saving && visited {
            self.checkpointer.visit(&mut self.run.backend)?;
        }
        self.checkpointer.is_of(&self.run.state);
        let shown = &self.shown;
        self.checkpointer.look(&|line| say(shown, line))
    }

    /// Seconds this step could not have been faster than, from this rank's computing, all ranks' bytes and the devices' measured
    /// rates.
    fn bound_s(&self, gradients: &Gradients, update_ns: u64) -> f64 {
        let plan = &self.run.plan;
        let rates = self.run.opened.rates();
        // Devices nobody measured bound nothing that could be stated.
        let bytes = if rates.is_some() {
            plan.node_bytes
        } else {
            swapper::StepBytes::default()
        };
        let (read_bytes_per_s, write_bytes_per_s) = rates.unwrap_or_default();
        let rates = StepRates {
            read_bytes_per_s,
            write_bytes_per_s,
            staging_bytes: plan.rates.staging_bytes,
            forward_s: gradients.forward_s,
            backward_s: gradients.backward_s,
            update_s: update_ns as f64 * 1e-9,
            // What it carries is known, its rate nobody measured.
            bus_s: 0.0,
        };
        bound_s(plan.swapper.schedule, &bytes, &rates)
    }

    fn evaluate_if_due(&mut self, metrics: &mut StepMetrics) -> Result<(), TrainError> {
        let train = &self.settings.train;
        if train.eval_every > 0 && metrics.step.is_multiple_of(train.eval_every) {
            self.run.backend.drain()?;
            let data = self.data.as_ref().expect("a run with steps has data");
            let loss = self
                .stepper
                .evaluate(&mut self.run.backend, data, train.eval_batches)?;
            metrics.eval_loss = Some(loss);
        }
        Ok(())
    }

    /// Begins a checkpoint of the tiles as they are; it is finished beside what comes next.
    fn checkpoint_now(&mut self) -> Result<(), TrainError> {
        let shown = &self.shown;
        if self
            .checkpointer
            .begin(self.run.state.step, &|line| say(shown, line))?
        {
            self.checkpointer.visit(&mut self.run.backend)?;
            self.checkpointer.is_of(&self.run.state);
        }
        Ok(())
    }

    fn settle_checkpoints(&mut self) -> Result<(), TrainError> {
        let shown = &self.shown;
        self.checkpointer.settle(&|line| say(shown, line))
    }

    /// What the next plan should know of this machine.
    fn measured(&self) -> Measured {
        let rates = self.run.opened.rates();
        let plan = &self.run.plan;
        let operations = 6.0 * plan.params_count as f64 * self.settings.batch.tokens() as f64;
        Measured {
            read_bytes_per_s: rates.map(|(read, _)| read),
            write_bytes_per_s: rates.map(|(_, write)| write),
            tflops: self.compute_s.map(|s| operations / s / 1e12),
            on_gpu: plan.hardware.gpu.is_some(),
            checkpoint_bytes_per_s: self.checkpointer.rate(),
        }
    }

    /// Ends where the run was to end, or was asked to; all is kept, or an error says what is not.
    fn end(self, asked: bool) -> Result<(), TrainError> {
        if let Some(shown) = &self.shown {
            let say = |line: &str| shown.progress.say(line);
            if let Err(error) = self.measured().write(self.run.dir.path()) {
                // Only a plan misses it.
                say(&format!("note: cannot keep what was measured: {error}"));
            }
            let why = if asked { "stopped as asked" } else { "done" };
            let step = self.run.state.step;
            let kept = match (
                self.settings.placement.has_store(),
                self.checkpointer.has(step),
            ) {
                (true, _) => "all of it committed",
                (false, true) => "all of it saved",
                (false, false) => "not all of it saved",
            };
            say(&format!(
                "{why}: at step {step} of {}, {kept}; {}",
                self.settings.train.steps,
                MetricsFile::path(self.run.dir.path()).display()
            ));
        }
        reach(Point::Closing);
        self.run.close()?;
        self.checkpointer.result()
    }

    /// Commits or saves the last step that was finished.
    fn keep(&mut self) -> Result<(), TrainError> {
        reach(Point::Draining);
        (self.ranks).together("committing the last step", || {
            Ok(self.run.backend.drain()?)
        })?;
        self.settle_checkpoints()?;
        let step = self.run.state.step;
        let worth = step > 0 || self.settings.train.steps == 0;
        if worth && !self.settings.placement.has_store() && !self.checkpointer.has(step) {
            self.checkpoint_now()?;
            self.settle_checkpoints()?;
        }
        Ok(())
    }
}

/// To those who look, if this is the rank that speaks.
fn say(shown: &Option<Shown>, line: &str) {
    if let Some(shown) = shown {
        shown.progress.say(line);
    }
}
