//! The training loop: opens a run, steps until it is done or asked to stop, and leaves it so that the next
//! start resumes it.

mod clock;
mod error;
mod gpu_timeline;
mod inputs;
mod mover;
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
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kernels_torch::collective::{CollectiveError, Comm, GpuComm};
use swapper::{StepIo, StepRates, bound_s};
use test_hooks::kill_point::{Point, reach};

pub use error::TrainError;

use crate::compute::{self, Engine};
use crate::config::{OverflowPolicy, RunSettings};
use crate::data::{Corpus, Data, Frame};
use crate::export::copy_weights;
use crate::open::{OpenRun, Prepared, Start, repair};
use crate::ranks::{check_same_run, connect, ranks_of};
use inputs::InputPlace;
use mover::{InGpu, Memory, Shards, WithSwapper};
use offload_support::outln;
use peer_watchdog::PeerWatchdog;
use progress::Progress;
use step::{Gradients, Stepper};
use stop::Stop;
use training_state::checkpointer::{Checkpointer, CheckpointerParts};
use training_state::learning_rate::learning_rate;
use training_state::metrics::{MetricsFile, StepMetrics};
use training_state::monitor::Monitors;
use training_state::overflow::{Outcome, OverflowState};
use training_state::plan::Measured;
use training_state::ranks::Ranks;
use training_state::trace::Trace;

/// Time to wait for the news that a rank has died; a few heartbeats, which is enough on a busy machine.
/// Launchers wait twice as long.
const DEATH_WAIT: Duration = Duration::from_secs(4);

/// Interval between checks for a dead rank.
const DEATH_POLL: Duration = Duration::from_millis(20);

/// Trains until `settings.train.stop_after`, SIGTERM or SIGINT. Returns the exit status: 0 when the run is
/// done, 128 plus the signal's number when a signal asked it to stop earlier.
///
/// # Errors
/// Any failure to start the run, and any failure that ended it. States that were committed or saved before
/// are kept.
pub fn train(settings: RunSettings, start: &Start, trace: &Trace) -> Result<u8, TrainError> {
    let stop = Stop::register().map_err(TrainError::Signals)?;
    trace.check()?;
    let comm = connect()?;
    let result = run_to_its_end(settings.clone(), start, trace, &stop, &comm)
        .map_err(|error| error.of_run(&settings));
    let result = end(&comm, result);
    match trace.write() {
        Ok(Some(path)) if comm.world().rank == 0 => {
            outln!("timeline: {}, for ui.perfetto.dev", path.display());
        }
        Ok(_) => {}
        // The run's own error says more.
        Err(error) if result.is_err() => outln!("note: {error}"),
        Err(error) => return Err(error.into()),
    }
    result
}

/// Closes the connection to the other ranks: together after success; after an error it tells them the reason
/// first.
fn end<T>(comm: &Comm, result: Result<T, TrainError>) -> Result<T, TrainError> {
    match result {
        Ok(ended) => {
            comm.barrier()?;
            comm.give_up("it had finished");
            Ok(ended)
        }
        Err(error) => {
            let error = attribute(comm, error);
            comm.give_up(&error.to_string());
            Err(error)
        }
    }
}

/// Adds the rank that died to `error` if its death may be the cause. Heartbeats report a death later than the
/// operations that it breaks.
fn attribute(comm: &Comm, error: TrainError) -> TrainError {
    let until = Instant::now() + DEATH_WAIT;
    while comm.world().ranks > 1
        && error.may_follow_a_death(comm.world().rank == 0)
        && Instant::now() < until
    {
        match comm.gone() {
            Some(death @ CollectiveError::Died { .. }) => {
                let error = Box::new(error);
                return TrainError::AfterDeath { death, error };
            }
            // The rank is alive and reports its own error.
            Some(_) => break,
            None => std::thread::sleep(DEATH_POLL),
        }
    }
    error
}

fn run_to_its_end(
    settings: RunSettings,
    start: &Start,
    trace: &Trace,
    stop: &Stop,
    comm: &Arc<Comm>,
) -> Result<u8, TrainError> {
    let ranks = &ranks_of(comm);
    if *start != Start::Fresh {
        ranks.by_first("looking for the run", || {
            repair(&settings, &mut |note| outln!("note: {note}"))
        })?;
    }
    let (corpus, mut prepared) = ranks.together::<_, TrainError>("checking the run", || {
        // A run without steps exists to be exported or resumed from.
        let corpus = match settings.train.steps {
            0 => None,
            _ => Some(Corpus::find(&settings.data, &Frame::of(&settings))?),
        };
        let prepared = Prepared::new(settings.clone(), start, ranks.clone())?;
        prepared.check_room()?;
        Ok((corpus, prepared))
    })?;
    let fingerprint = corpus.as_ref().map_or(0, Corpus::fingerprint);
    check_same_run(comm, &settings.lines(), fingerprint)?;
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
    // Called by all ranks at once, so outside `together`. A machine may have fewer GPUs than ranks.
    let computes = prepared.gpu.as_ref().map_or("the processor", |_| "a GPU");
    comm.same_everywhere("what computes (train.device)", computes)?;
    let gpus = match &prepared.gpu {
        Some(gpu) if ranks.count() > 1 => Some(Arc::new(GpuComm::connect(comm, gpu)?)),
        _ => None,
    };
    let (stepper, memory) = ranks.together("taking memory to compute in", || {
        take_memory(&settings, &prepared, comm, gpus)
    })?;

    let first = ranks.is_first();
    let (run, resumed) = prepared.open(start, &copy_weights, &mut |note| {
        if first {
            outln!("{note}");
        }
    })?;
    if first {
        show::opened(&run, resumed);
    }
    let run = run.with_backend(|backend| memory.attach(backend));
    let canceller = run.backend.canceller().filter(|_| ranks.count() > 1);
    let peer_watchdog = canceller.map(|canceller| PeerWatchdog::start(comm.clone(), canceller));
    let mut training = Training::new(settings, data, stepper, run, comm.clone())?;
    training.record(trace)?;
    let result = training.run_steps(stop);
    match &result {
        // The tiles still hold the state of the step before, which is worth keeping. All ranks have reached
        // the same decision.
        Ok(_) | Err(TrainError::Diverged { .. } | TrainError::LeastScale { .. }) => {
            training.keep()?;
        }
        // Reported before this rank's session and its private daemon end, so that the others do not take that
        // for the cause.
        Err(error) => {
            comm.give_up(&error.to_string());
            trace.add(training.run.backend.take_spans());
        }
    }
    // Other ranks may end from here on without being taken for dead.
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

/// Makes the engine, the storage of block inputs and the memory to compute in.
fn take_memory(
    settings: &RunSettings,
    prepared: &Prepared,
    comm: &Arc<Comm>,
    gpus: Option<Arc<GpuComm>>,
) -> Result<(Stepper, Memory), TrainError> {
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
    let shards = Shards::new(comm.clone(), gpus, &tiles.units, tiles.tile_elems, stage);
    let batch = settings.batch;
    let inputs = match &gpu {
        Some(gpu) if prepared.plan.inputs_away => {
            let input_elems = batch.micro_batch * batch.seq_len * settings.model.hidden_size;
            let input_bytes = input_elems * settings.dtype.elem_bytes();
            InputPlace::away(gpu, &settings.model, batch.micro_batches, input_bytes)?
        }
        _ => InputPlace::here(batch.micro_batches),
    };
    let (stepper, memory) = Stepper::new(engine, gpu, batch, master, live, stage, shards)?;
    Ok((stepper.with_inputs_in(inputs), memory))
}

/// Opens the run's tokens: the first rank tokenizes if the cache lacks them, then all read them.
fn read_data(settings: &RunSettings, corpus: &Corpus, ranks: &Ranks) -> Result<Data, TrainError> {
    ranks.by_first::<_, TrainError>("making the tokens", || {
        let mut say = |note| outln!("{note}");
        Ok(corpus.prepare(settings, &mut say)?)
    })?;
    let data =
        ranks.together::<_, TrainError>("opening the tokens", || Ok(corpus.open(settings)?))?;
    if ranks.is_first() {
        outln!("  data      {}", data.describe());
    }
    Ok(data)
}

/// Sets the thread counts of torch and of the optimizer, once for the process.
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

/// State of a run in its training loop.
struct Training {
    settings: RunSettings,
    /// `None` for a run without steps.
    data: Option<Data>,
    stepper: Stepper,
    /// Outputs of each step; only the first rank has them.
    shown: Option<Shown>,
    run: OpenRun<WithSwapper, InGpu>,
    comm: Arc<Comm>,
    ranks: Ranks,
    checkpointer: Checkpointer,
    /// Computing time of the last step in seconds.
    compute_s: Option<f64>,
    trace: Trace,
}

/// Outputs of each step: metrics, monitors and the terminal.
struct Shown {
    metrics: MetricsFile,
    monitors: Monitors,
    monitors_failed: bool,
    progress: Progress,
}

impl Shown {
    /// Adds a step to the monitors. Logs a failure once; training does not depend on monitors.
    fn monitor(&mut self, metrics: &StepMetrics, samples: u64) {
        if let Err(error) = self.monitors.step(metrics, samples)
            && !std::mem::replace(&mut self.monitors_failed, true)
        {
            tracing::warn!("{error}. Training continues; the monitor misses steps");
        }
    }
}

impl Training {
    fn new(
        settings: RunSettings,
        data: Option<Data>,
        stepper: Stepper,
        run: OpenRun<WithSwapper, InGpu>,
        comm: Arc<Comm>,
    ) -> Result<Self, TrainError> {
        let ranks = ranks_of(&comm);
        let state = &run.state;
        let (train, reports) = (&settings.train, &settings.reports);
        let mut last_step = state.step;
        let shown = ranks.together::<_, TrainError>("opening the metrics", || {
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
        // Only the first rank reads the metrics, but all must evaluate.
        let is_lost = ranks.any(last_step < state.step)?;
        let lost = (state.last.clone()).filter(|last| is_lost && last.step == state.step);
        let checkpoints = run.dir.checkpoints();
        let newest = ranks.by_first::<_, TrainError>("looking for a checkpoint", || {
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
            comm,
            ranks,
            checkpointer,
            compute_s: None,
            trace: Trace::off(),
        };
        // The last start died between the commit and the step's line: write the line now.
        if let Some(mut last) = lost {
            training.evaluate_if_due(&mut last)?;
            if let Some(shown) = &mut training.shown {
                shown.metrics.write(&last);
            }
        }
        Ok(training)
    }

    /// Records the next steps in `trace` if it wants them.
    fn record(&mut self, trace: &Trace) -> Result<(), TrainError> {
        let steps_left = (self.settings.train.stop_after).saturating_sub(self.run.state.step);
        trace.begin(steps_left);
        if trace.recording() {
            self.run.backend.record_spans(true)?;
        }
        self.trace = trace.clone();
        Ok(())
    }

    /// Steps to the end of this start, or until any rank was asked to stop. Returns whether one was.
    fn run_steps(&mut self, stop: &Stop) -> Result<bool, TrainError> {
        // An earlier start may have ended between a commit and its checkpoint. A run without a store that
        // began at another run's checkpoint has none of its own yet.
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

    /// Runs one step, writes its metrics, and does what is due after it.
    fn step(&mut self) -> Result<(), TrainError> {
        let started = Instant::now();
        let step = self.run.state.step + 1;
        let rules = self.settings.overflow;
        let mut overflow = OverflowState::new(&rules, self.run.state.overflow);
        let scale = overflow.scale;
        // Skipped steps count neither for the optimizer nor for its learning rate.
        let update = step - overflow.skipped;
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
        let (settings, state) = (&self.settings, &mut self.run.state);
        state.step = step;
        state.tokens += settings.step_tokens();
        state.next_sample += settings.step_samples();
        state.lr = learning_rate(&settings.lr, update);
        state.overflow = Some(overflow);
        let is_scaled = matches!(
            rules,
            OverflowPolicy::Scaled { .. } | OverflowPolicy::Scales(_)
        );
        let mut metrics = StepMetrics {
            loss_scale: is_scaled.then_some(scale),
            skipped: outcome == Outcome::Skips,
            ..self.planned_metrics(&gradients, started)
        };
        // Values that are known only after the update are planned ones here. Only a line that is rewritten
        // after a crash shows them.
        self.run.state.last = Some(metrics.clone());
        let blob = self.run.state.encode();
        // Transfers after this point belong to the next step.
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
        self.count_io(&mut metrics, &io)?;
        metrics.bound_s = self.bound_s(&gradients, io.update_ns);
        self.compute_s = Some(gradients.forward_s + gradients.backward_s);
        self.evaluate_if_due(&mut metrics)?;
        self.show_step(&metrics, &overflow);
        // The tap sees only tiles that the host updates; the checkpointer reads all others itself.
        let visited = metrics.skipped || !self.run.backend.updates_on_host();
        self.run.state.last = Some(metrics);
        if saving && visited {
            self.checkpointer.visit(&mut self.run.backend)?;
        }
        self.checkpointer.is_of(&self.run.state);
        let shown = &self.shown;
        Ok(self.checkpointer.look(&|line| say(shown, line))?)
    }

    /// Returns the metrics of the current step as far as they are known before its update; the rest comes
    /// from the plan.
    fn planned_metrics(&self, gradients: &Gradients, started: Instant) -> StepMetrics {
        let (settings, state, plan) = (&self.settings, &self.run.state, &self.run.plan);
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        StepMetrics {
            step: state.step,
            loss: gradients.loss,
            grad_norm: gradients.norm,
            loss_scale: None,
            skipped: false,
            lr: state.lr,
            unix_s: now.map_or(0.0, |since| since.as_secs_f64()),
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
            bound_s: self.bound_s(gradients, 0),
            eval_loss: None,
        }
    }

    /// Adds the step's transfers, summed over all ranks; times are this rank's.
    fn count_io(&self, metrics: &mut StepMetrics, io: &StepIo) -> Result<(), TrainError> {
        metrics.generation = io.generation;
        metrics.waited_s = io.waited_ns as f64 * 1e-9;
        metrics.update_s = io.update_ns as f64 * 1e-9;
        let mut moved = [
            io.read_bytes as f64,
            io.written_bytes as f64,
            io.grad_read_bytes as f64,
            io.grad_written_bytes as f64,
        ];
        self.comm.all_reduce_sum_f64(&mut moved)?;
        [
            metrics.device_read_bytes,
            metrics.device_written_bytes,
            metrics.device_grad_read_bytes,
            metrics.device_grad_written_bytes,
        ] = moved.map(|bytes| bytes as u64);
        Ok(())
    }

    /// Writes the step's line to the metrics, the monitors and the terminal, on the first rank.
    fn show_step(&mut self, metrics: &StepMetrics, overflow: &OverflowState) {
        let Some(shown) = &mut self.shown else {
            return;
        };
        reach(Point::Telling);
        shown.metrics.write(metrics);
        shown.monitor(metrics, self.run.state.next_sample);
        if metrics.skipped {
            shown.progress.say(&show::skipped(metrics, overflow));
        }
        shown.progress.step(metrics, self.settings.step_tokens());
    }

    /// Returns a lower bound of the step's seconds from this rank's computing time, all ranks' bytes and the
    /// devices' measured rates.
    fn bound_s(&self, gradients: &Gradients, update_ns: u64) -> f64 {
        let plan = &self.run.plan;
        let rates = self.run.opened.rates();
        // Without measured rates, devices do not contribute to the bound.
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
            // The bytes on the bus are known, but its rate was not measured.
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

    /// Begins a checkpoint of the present tiles; it is completed during the following steps.
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
        Ok(self.checkpointer.settle(&|line| say(shown, line))?)
    }

    /// Measurements of this machine for the next plan.
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

    /// Ends the run at its last step or where it was asked to stop. An error says what was not kept.
    fn end(self, asked: bool) -> Result<(), TrainError> {
        if let Some(shown) = &self.shown {
            let say = |line: &str| shown.progress.say(line);
            if let Err(error) = self.measured().write(self.run.dir.path()) {
                // Only later plans need them.
                say(&format!(
                    "note: cannot store the measurements for later plans: {error}"
                ));
            }
            let why = if asked { "stopped as asked" } else { "done" };
            let step = self.run.state.step;
            let kept = match (
                self.settings.placement.has_store(),
                self.checkpointer.has(step),
            ) {
                (true, _) => "all of it committed",
                (false, true) => "all of it saved",
                (false, false) => "not all of it was saved",
            };
            say(&format!(
                "{why}: at step {step} of {}, {kept}; {}",
                self.settings.train.steps,
                MetricsFile::path(self.run.dir.path()).display()
            ));
        }
        reach(Point::Closing);
        self.run.close()?;
        Ok(self.checkpointer.result()?)
    }

    /// Commits or saves the last finished step.
    fn keep(&mut self) -> Result<(), TrainError> {
        reach(Point::Draining);
        (self.ranks).together::<_, TrainError>("committing the last step", || {
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

/// Prints a line on the first rank.
fn say(shown: &Option<Shown>, line: &str) {
    if let Some(shown) = shown {
        shown.progress.say(line);
    }
}
