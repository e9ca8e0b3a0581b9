//! The training loop of an open run: steps, their metrics, evaluations and checkpoints.

mod kept;

use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use kernels_torch::collective::Comm;
use offload_support::energy::EnergyMeter;
use offload_support::units::CountOf;
use swapper::{Bound, StepIo, StepRates, bound};
use test_hooks::kill_point::{Point, reach};

use super::TrainError;
use super::mover::{self, InGpu, WithSwapper};
use super::progress::{Flops, Progress};
use super::show;
use super::step::{self, Gradients, Stepper};
use super::stop::Stop;
use training_run::config::{Interval, OverflowPolicy, RunSettings};
use training_run::data::Data;
use training_run::evaluations::Evaluations;
use training_run::model::Dtype;
use training_run::open::{OpenRun, RunError};
use training_run::plan::{Plan, peak_tflops};
use training_state::checkpointer::{Checkpointer, CheckpointerParts};
use training_state::learning_rate::learning_rate;
use training_state::metrics::{MetricsFile, StepMetrics};
use training_state::monitor::Monitors;
use training_state::overflow::{Outcome, OverflowState};
use training_state::plan::MeasuredRates;
use training_state::ranks::Ranks;
use training_state::run::{ModelFiles, RunState};
use training_state::trace::Trace;

/// State of a run in its training loop. All ranks make the same decisions from what they tell each other once a step; the price is that each rank
/// waits for the slowest one in each step, and that a wish (a signal, a full disk) counts from the next step on.
pub(super) struct Training {
    settings: RunSettings,
    /// `None` for a run without steps.
    data: Option<Data>,
    stepper: Stepper,
    /// Outputs of each step; only the first rank has them.
    shown: Option<StepOutputs>,
    pub(super) run: OpenRun<WithSwapper, InGpu>,
    comm: Arc<Comm>,
    ranks: Ranks,
    checkpointer: Checkpointer,
    evaluations: Evaluations,
    /// Step and validation loss of the best checkpoint, with `train.checkpoint_best`.
    best_checkpoint: Option<(u64, f64)>,
    /// Step at which this start began.
    first_step: u64,
    /// When the newest checkpoint began, or this start.
    checkpointed: Instant,
    /// Whether the next step makes a checkpoint because its time has come, or because of SIGUSR1; the same on all ranks.
    checkpoint_wanted: bool,
    /// Counts from the end of the step before.
    energy: EnergyMeter,
    /// Computing time of the last step in seconds.
    compute_s: Option<f64>,
    trace: Trace,
}

/// What the ranks tell each other after a step.
struct RankRequests {
    /// Any rank was asked to stop.
    stop: bool,
    /// The next step makes a checkpoint.
    checkpoint: bool,
}

/// Reason why [`Training::run_steps`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StepsEnd {
    /// The last step of this start is done.
    Done,
    /// The validation loss has not fallen for `train.early_stopping_patience` evaluations.
    Stalled,
    /// A signal asked the run to stop.
    Asked,
}

/// Outputs of each step: metrics, monitors and the terminal.
struct StepOutputs {
    metrics: MetricsFile,
    monitors: Monitors,
    monitors_failed: bool,
    progress: Progress,
}

impl StepOutputs {
    /// Adds a step to the monitors, then to the metrics, whose line shows a later start that the monitors have the step. Logs a failure
    /// once; training does not depend on monitors.
    fn write(&mut self, metrics: &StepMetrics, samples: u64) {
        if let Err(error) = self.monitors.step(metrics, samples)
            && !std::mem::replace(&mut self.monitors_failed, true)
        {
            tracing::warn!("{error}. Training continues; the monitor misses steps");
        }
        self.metrics.write(metrics);
    }
}

/// Warns of a run of epochs that will end after more or less of the data.
fn warn_of_missed_epochs(
    settings: &RunSettings,
    data: Option<&Data>,
    state: &RunState,
    progress: &Progress,
) {
    let windows = data.map(Data::windows);
    let missed =
        windows.and_then(|windows| settings.missed_epochs(windows, state.step, state.next_sample));
    if let Some(missed) = missed {
        progress.say(&format!("warning: {missed}"));
    }
}

impl Training {
    /// Opens the outputs of an open run. Completes the last start's line of metrics if it is missing.
    ///
    /// # Errors
    /// The metrics or a monitor cannot be opened; an evaluation fails.
    pub(super) fn new(
        settings: RunSettings,
        data: Option<Data>,
        stepper: Stepper,
        run: OpenRun<WithSwapper, InGpu>,
        (comm, ranks): (Arc<Comm>, Ranks),
    ) -> Result<Self, TrainError> {
        let gpu = stepper.gpu().map(|gpu| gpu.info().pci.as_str());
        let energy = EnergyMeter::new(gpu, ranks.is_first_of_node());
        let state = &run.state;
        let (train, reports) = (&settings.train, &settings.reports);
        let (mut last_step, first_step) = (state.step, state.step);
        let shown = ranks.on_all_ranks::<_, TrainError>("opening the metrics", || {
            if !ranks.is_first() {
                return Ok(None);
            }
            let (metrics, last) = MetricsFile::open(run.dir.path(), state.step)?;
            last_step = last;
            let progress = Progress::new(state.step, train.stop_after, train.log_every);
            let progress = progress
                .telling(reports.wall_clock_breakdown)
                .with_flops(flops(&settings, &run.plan));
            warn_of_missed_epochs(&settings, data.as_ref(), state, &progress);
            // A step without a line is told again: what the monitors have of it goes.
            let told_samples = (state.next_sample).saturating_sub(u64::from(last < state.step));
            let monitors = Monitors::open(reports, told_samples)?;
            // For exports of this run.
            let files = ModelFiles::in_run_dir(run.dir.path());
            let kept = match data.as_ref().map(Data::chat_format) {
                Some(Some(format)) => files.keep_chat_format(&format.template, format.answer_end),
                // An earlier start may have named a template.
                Some(None) => files
                    .keep_own_chat_format(settings.model_dir.as_deref(), settings.tokenizer_dir()),
                None => Ok(()),
            };
            kept.map_err(RunError::from)?;
            Ok(Some(StepOutputs {
                metrics,
                monitors,
                monitors_failed: false,
                progress,
            }))
        })?;
        // Only the first rank reads the metrics, but all must evaluate.
        let is_lost = ranks.any(last_step < state.step)?;
        let lost = (state.last.clone()).filter(|last| is_lost && last.step == state.step);
        let checkpoints = run.checkpoints.clone();
        let newest = ranks.by_first::<_, TrainError>("looking for a checkpoint", || {
            Ok(checkpoints.has(state.step))
        })?;
        let (past, best_checkpoint) =
            ranks.by_first::<_, TrainError>("reading the evaluations", || {
                // Without validation data, the losses of the last ones stay.
                let evaluated = data.as_ref().filter(|data| data.holdout_windows() > 0);
                let evaluates = evaluated.map(|data| data.evaluates(train.eval_batches));
                let past = MetricsFile::evaluations(run.dir.path(), evaluates.as_deref());
                let before = MetricsFile::evaluations(run.dir.path(), None);
                if let (Some(shown), true, Some((step, _))) = (&shown, past.is_empty(), before.last())
                {
                    shown.progress.say(&format!(
                        "note: the validation data changed after the evaluation at step {step}: losses up to there do not count for the lowest one"
                    ));
                }
                let has_checkpoint = |(step, _): &&(u64, f64)| checkpoints.has(*step);
                let with_checkpoint = past.iter().filter(has_checkpoint).copied();
                let best = with_checkpoint.min_by(|a, b| a.1.total_cmp(&b.1));
                Ok((past, best.filter(|_| train.checkpoint_best)))
            })?;
        let parts = CheckpointerParts {
            checkpoints,
            node_dirs: run.node_dirs.clone(),
            checkpoint_tap: run.checkpoint_tap.clone(),
            kept: train.checkpoints_kept,
            layout: run.layout.clone(),
            ranges: run.saved_ranges()?,
            tile_bytes: run.plan.memory.all_bytes,
            say: match &shown {
                Some(shown) => Box::new(shown.progress.speaker()),
                None => Box::new(|_: &str| ()),
            },
        };
        let mut checkpointer =
            Checkpointer::new(parts, newest.then_some(state.step), ranks.clone());
        if let Some((step, _)) = best_checkpoint {
            checkpointer.spare(step);
        }
        let mut training = Self {
            settings,
            data,
            stepper,
            shown,
            run,
            comm,
            ranks,
            checkpointer,
            evaluations: Evaluations::from_steps_and_losses(&past),
            best_checkpoint,
            first_step,
            checkpointed: Instant::now(),
            checkpoint_wanted: false,
            energy,
            compute_s: None,
            trace: Trace::off(),
        };
        // The last start died between the commit and the step's line: write the line now.
        if let Some(mut last) = lost {
            training.evaluate_if_due(&mut last)?;
            if let Some(shown) = &mut training.shown {
                shown.write(&last, training.run.state.next_sample);
            }
        }
        Ok(training)
    }

    /// Records the next steps in `trace` if it wants them.
    pub(super) fn record(&mut self, trace: &Trace) -> Result<(), TrainError> {
        let steps_left = (self.settings.train.stop_after).saturating_sub(self.run.state.step);
        trace.begin(steps_left);
        if trace.recording() {
            self.run.backend.record_spans(true)?;
        }
        self.trace = trace.clone();
        Ok(())
    }

    /// Steps to the end of this start, until any rank was asked to stop, or until the validation loss has stalled.
    pub(super) fn run_steps(&mut self, stop: &Stop) -> Result<StepsEnd, TrainError> {
        // An earlier start may have ended between a commit and its checkpoint. A run without a store that
        // began at another run's checkpoint has none of its own yet.
        let step = self.run.state.step;
        let lowest = self.evaluations.lowest();
        let is_best = self.settings.train.checkpoint_best
            && lowest.is_some_and(|(lowest_step, _)| lowest_step == step);
        let wanted = self.checkpoint_is_due() || is_best || !self.settings.placement.has_store();
        if step > 0 && wanted && !self.checkpointer.has(step) {
            self.checkpoint_now()?;
        }
        if is_best {
            self.best_checkpoint = lowest;
            self.checkpointer.spare(step);
            self.settle_checkpoints()?;
        }
        let train = &self.settings.train;
        let (stop_after, patience) = (train.stop_after, train.early_stopping_patience);
        let mut asked = self.ranks.any(stop.asked())?;
        loop {
            if self.run.state.step >= stop_after {
                return Ok(StepsEnd::Done);
            }
            if self.evaluations.has_stalled(patience) {
                return Ok(StepsEnd::Stalled);
            }
            if asked {
                return Ok(StepsEnd::Asked);
            }
            asked = self.step(stop)?;
        }
    }

    /// Runs one step, writes its metrics, and does what is due after it. Returns whether any rank was asked to stop.
    fn step(&mut self, stop: &Stop) -> Result<bool, TrainError> {
        let started = Instant::now();
        let step = self.run.state.step + 1;
        let rules = self.settings.overflow;
        let mut overflow = OverflowState::new(&rules, self.run.state.overflow);
        let scale = overflow.scale;
        // Skipped steps count neither for the optimizer nor for its learning rate.
        let update = step - overflow.skipped;
        let shown = &self.shown;
        if let Some(shown) = shown {
            shown.progress.begin();
        }
        let gradients = self.stepper.forward_backward(
            &mut self.run.backend,
            self.data.as_ref().expect("a run with steps has data"),
            (self.run.state.next_sample, scale),
            &self.trace,
            &mut |part| now(shown, step, part),
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
        let saving = (self.checkpoint_wanted || self.checkpoint_is_due()) && {
            self.checkpointed = Instant::now();
            self.checkpointer.begin(step)?
        };
        let hyper =
            (outcome == Outcome::Updates).then(|| step::hyper(&self.settings, update, norm, scale));
        if let Some(hyper) = &hyper {
            now(&self.shown, step, "directions");
            metrics.directions_s =
                (self.stepper).orthogonalize(&mut self.run.backend, hyper, &self.trace)?;
        }
        now(&self.shown, step, "update");
        let io = mover::finish_step(&mut self.run.backend, hyper, blob)?;
        (self.trace).finish_step(step, started, self.run.backend.take_spans());
        if self.trace.has_ended() {
            self.run.backend.record_spans(false)?;
        }
        metrics.step_s = started.elapsed().as_secs_f64();
        let requests = self.count_io(&mut metrics, &io, stop)?;
        self.checkpoint_wanted = requests.checkpoint;
        let asked = requests.stop;
        let bound = self.bound(&gradients, metrics.directions_s, io.update_ns);
        metrics.bound_s = bound.s;
        self.compute_s = Some(gradients.forward_s + gradients.backward_s);
        let is_best = self.evaluate_if_due(&mut metrics)?;
        let evaluated = metrics.eval_loss.is_some();
        self.show_step(&metrics, &overflow, &bound);
        let skipped = metrics.skipped;
        self.run.state.last = Some(metrics);
        let backend = &mut self.run.backend;
        // The tap sees only tiles that the host updates; the checkpointer reads all others itself.
        match (saving, skipped) {
            (false, _) => {}
            (true, false) => self.checkpointer.visit_updated_elsewhere(backend)?,
            (true, true) => self.checkpointer.visit(backend)?,
        }
        self.checkpointer.set_state(&self.run.state);
        if is_best && self.settings.train.checkpoint_best {
            self.best_checkpoint = self.evaluations.lowest();
            self.checkpointer.spare(step);
            if !self.checkpointer.has(step) {
                self.checkpoint_now()?;
            }
            // The next commit would leave no state to repeat an interrupted checkpoint from.
            self.settle_checkpoints()?;
        }
        self.checkpointer.advance()?;
        // An evaluation may take longer than a step. All ranks have the same `asked` and `evaluated`.
        Ok(asked || evaluated && self.ranks.any(stop.asked())?)
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
            epoch: self.epoch(),
            generation: 0,
            step_s: started.elapsed().as_secs_f64(),
            forward_s: gradients.forward_s,
            backward_s: gradients.backward_s,
            waited_s: 0.0,
            exchange_s: gradients.exchange_s,
            directions_s: 0.0,
            update_s: 0.0,
            device_read_bytes: plan.node_bytes.all_read_bytes() as u64,
            device_written_bytes: plan.node_bytes.all_written_bytes() as u64,
            device_grad_read_bytes: plan.node_bytes.grad_written_bytes as u64,
            device_grad_written_bytes: plan.node_bytes.grad_written_bytes as u64,
            gathered_bytes: gradients.exchanged.gathered_bytes,
            reduced_bytes: gradients.exchanged.reduced_bytes,
            grads_held_bytes: gradients.held_bytes,
            host_bytes: plan.host_bytes() * u64::from(settings.ranks),
            gpu_resident_bytes: 0,
            gpu_energy_j: None,
            cpu_energy_j: None,
            bound_s: self.bound(gradients, 0.0, 0).s,
            eval_loss: None,
            eval_data: None,
            eval_perplexity: None,
        }
    }

    /// Adds the step's transfers, summed over all ranks; times are this rank's. Returns the requests, which the ranks tell each other in
    /// the same message.
    fn count_io(
        &mut self,
        metrics: &mut StepMetrics,
        io: &StepIo,
        stop: &Stop,
    ) -> Result<RankRequests, TrainError> {
        let is_time = self.ranks.is_first() && self.checkpoint_time_comes(metrics.step_s);
        let is_asked = stop.take_checkpoint_request();
        // Nodes that make no checkpoints need to share no directory, so there may be no place for one.
        let has_place = self.ranks.nodes() == 1
            || self.run.node_dirs.is_some()
            || self.settings.makes_checkpoints();
        if is_asked && !has_place {
            say(
                &self.shown,
                "note: SIGUSR1 makes no checkpoint: the run's nodes have no directory for checkpoints (train.checkpoints_on_each_node)",
            );
        }
        let checkpoint = is_asked && has_place || is_time;
        metrics.generation = io.generation;
        metrics.waited_s = io.waited_ns as f64 * 1e-9;
        metrics.update_s = io.update_ns as f64 * 1e-9;
        let energy = self.energy.joules_since_last();
        // What one rank cannot read is unknown of all.
        let [gpu_j, cpu_j] =
            [energy.gpu, energy.processors].map(|joules| joules.unwrap_or(f64::NAN));
        let cpu_j = if self.ranks.is_first_of_node() {
            cpu_j
        } else {
            0.0
        };
        let mut moved = [
            io.read_bytes as f64,
            io.written_bytes as f64,
            io.grad_read_bytes as f64,
            io.grad_written_bytes as f64,
            gpu_j,
            cpu_j,
            f64::from(u8::from(stop.asked())),
            f64::from(u8::from(checkpoint)),
        ];
        self.comm.all_reduce_sum_f64(&mut moved)?;
        let [moved @ .., gpu_j, cpu_j, asked, checkpoint] = moved;
        let known = |joules: f64| joules.is_finite().then_some(joules);
        (metrics.gpu_energy_j, metrics.cpu_energy_j) = (known(gpu_j), known(cpu_j));
        [
            metrics.device_read_bytes,
            metrics.device_written_bytes,
            metrics.device_grad_read_bytes,
            metrics.device_grad_written_bytes,
        ] = moved.map(|bytes| bytes as u64);
        Ok(RankRequests {
            stop: asked > 0.0,
            checkpoint: checkpoint > 0.0,
        })
    }

    /// Whether the time of a checkpoint comes before the end of the next step, if it takes `step_s` seconds as the last one did.
    fn checkpoint_time_comes(&self, step_s: f64) -> bool {
        match self.settings.train.checkpoint_every {
            Interval::Seconds(seconds) => {
                self.checkpointed.elapsed().as_secs_f64() + step_s >= seconds as f64
            }
            Interval::Never | Interval::Steps(_) | Interval::Epoch => false,
        }
    }

    /// Writes the step's line to the metrics, the monitors and the terminal, on the first rank.
    fn show_step(&mut self, metrics: &StepMetrics, overflow: &OverflowState, bound: &Bound) {
        let Some(shown) = &mut self.shown else {
            return;
        };
        reach(Point::Telling);
        shown.write(metrics, self.run.state.next_sample);
        if metrics.skipped {
            shown.progress.say(&show::skipped(metrics, overflow));
        }
        let times = (metrics.exchange_s, metrics.step_s);
        let bottleneck = show::bottleneck(times, bound, self.ranks.nodes());
        (shown.progress).step(metrics, self.settings.step_tokens(), &bottleneck);
        if let Some(loss) = metrics.eval_loss {
            let is_lowest =
                (self.evaluations.lowest()).is_some_and(|(step, _)| step == metrics.step);
            shown
                .progress
                .say(&show::evaluated(metrics, loss, is_lowest));
        }
    }

    /// Returns a lower bound of the step's seconds from this rank's computing time, all ranks' bytes and the
    /// devices' measured rates.
    fn bound(&self, gradients: &Gradients, directions_s: f64, update_ns: u64) -> Bound {
        let plan = &self.run.plan;
        let rates = self.run.opened.rates();
        // Without measured rates, devices do not contribute to the bound.
        let bytes = if rates.is_some() {
            plan.node_bytes
        } else {
            swapper::StepBytes::default()
        };
        let (read_bytes_per_s, write_bytes_per_s) = rates.unwrap_or_default();
        let [forward_s, backward_s] =
            plan.beside_updates(gradients.forward_s, gradients.backward_s);
        let rates = StepRates {
            read_bytes_per_s,
            write_bytes_per_s,
            staging_bytes: plan.rates.staging_bytes,
            forward_s,
            // Directions wait for the norm of all gradients.
            backward_s: backward_s + directions_s,
            update_s: update_ns as f64 * 1e-9,
            // The bytes on the bus and between nodes are known, but their rates were not measured.
            bus_s: 0.0,
            network_s: 0.0,
        };
        bound(plan.swapper.schedule, &bytes, &rates)
    }

    /// Passes over the training data so far; `None` for a run without steps.
    fn epoch(&self) -> Option<f64> {
        let windows = self.data.as_ref()?.windows();
        Some(self.run.state.next_sample as f64 / windows as f64)
    }

    fn evaluation_is_due(&self) -> bool {
        self.is_due(self.settings.train.eval_every)
    }

    /// Whether the present step ends an interval between checkpoints. The time of one is told by [`Self::count_io`].
    fn checkpoint_is_due(&self) -> bool {
        self.is_due(self.settings.train.checkpoint_every)
    }

    /// Whether the present step ends an interval of steps or epochs.
    fn is_due(&self, interval: Interval) -> bool {
        let state = &self.run.state;
        match (interval, &self.data) {
            (Interval::Never | Interval::Seconds(_), _) | (_, None) => false,
            (Interval::Steps(steps), _) => state.step.is_multiple_of(steps),
            (Interval::Epoch, Some(data)) => {
                let before = (state.next_sample).saturating_sub(self.settings.step_samples());
                state.next_sample / data.windows() > before / data.windows()
            }
        }
    }

    /// Evaluates if that is due after the current step. Returns whether the loss is the lowest so far.
    fn evaluate_if_due(&mut self, metrics: &mut StepMetrics) -> Result<bool, TrainError> {
        if !self.evaluation_is_due() {
            return Ok(false);
        }
        now(&self.shown, metrics.step, "commit before the validation");
        self.run.backend.drain()?;
        let data = self.data.as_ref().expect("a run with steps has data");
        let most = self.settings.train.eval_batches;
        let (shown, step) = (&self.shown, metrics.step);
        if let Some(shown) = shown {
            shown.progress.begin();
        }
        let mut begins = |part: &str| now(shown, step, part);
        let backend = &mut self.run.backend;
        let loss = self.stepper.evaluate(backend, data, most, &mut begins)?;
        metrics.eval_loss = Some(loss);
        metrics.eval_data = Some(data.evaluates(most));
        metrics.eval_perplexity = Some(loss.exp());
        Ok(self.evaluations.add(metrics.step, loss))
    }

    /// Begins a checkpoint of the present tiles; it is completed during the following steps.
    fn checkpoint_now(&mut self) -> Result<(), TrainError> {
        if self.checkpointer.begin(self.run.state.step)? {
            self.checkpointer.visit(&mut self.run.backend)?;
            self.checkpointer.set_state(&self.run.state);
        }
        Ok(())
    }

    fn settle_checkpoints(&mut self) -> Result<(), TrainError> {
        now(&self.shown, self.run.state.step, "checkpoint");
        Ok(self.checkpointer.settle()?)
    }

    /// Measurements of this machine for the next plan.
    fn measured(&self) -> MeasuredRates {
        let rates = self.run.opened.rates();
        let plan = &self.run.plan;
        let operations = plan.operations.sum();
        MeasuredRates {
            read_bytes_per_s: rates.map(|(read, _)| read),
            write_bytes_per_s: rates.map(|(_, write)| write),
            tflops: self.compute_s.map(|s| operations / s / 1e12),
            on_gpu: plan.hardware.gpu.is_some(),
            checkpoint_bytes_per_s: self.checkpointer.rate(),
        }
    }

    /// Ends the run at its last step or where it was asked to stop. An error says what was not kept.
    pub(super) fn end(self, ended: StepsEnd) -> Result<(), TrainError> {
        if self.ranks.is_first_of_node()
            && let Err(error) = self.measured().write(self.run.dir.path())
        {
            // Only later plans need them.
            tracing::warn!("cannot store the measurements for later plans: {error}");
        }
        if let Some(shown) = &self.shown {
            shown.progress.end();
            let say = |line: &str| shown.progress.say(line);
            let why = match ended {
                StepsEnd::Asked => "stopped as asked",
                StepsEnd::Done => "done",
                StepsEnd::Stalled => "finished (early stopping)",
            };
            let (step, steps) = (self.run.state.step, self.settings.train.steps);
            let is_kept = self.settings.placement.has_store() || self.checkpointer.has(step);
            let lost = match self.checkpointer.newest_kept() {
                Some(kept) => format!("and what came after the checkpoint of step {kept} is lost"),
                None => "and all of it is lost: there is no checkpoint".to_owned(),
            };
            let kept = match (
                self.settings.placement.has_store(),
                self.checkpointer.has(step),
            ) {
                (true, _) if self.compute_s.is_some() => "all of it committed",
                (true, _) => {
                    "committed (its tiles were not read again: `offloadd verify` compares them with their checksums)"
                }
                (false, true) => "all of it in the checkpoint",
                (false, false) if step == 0 => "nothing was trained",
                (false, false) => &lost,
            };
            let metrics = MetricsFile::path(self.run.dir.path());
            let metrics = metrics.display();
            let is_idle = step == self.first_step && ended == StepsEnd::Done;
            match (is_idle, self.settings.placement.has_store()) {
                (true, _) if step > steps => say(&format!(
                    "done: the run is at step {step}, beyond the {} that the settings ask for, so no step was made; {metrics}",
                    CountOf(steps, "step")
                )),
                // Tiles that nobody read may be damaged.
                (true, true) if step > 0 => say(&format!(
                    "done before: at step {step} of {steps}, no step was made; the tiles were not read: `offloadd verify` checks them; {metrics}"
                )),
                _ => say(&format!(
                    "{why}: at step {step} of {steps}, {kept}; {metrics}"
                )),
            }
            if ended == StepsEnd::Asked && is_kept {
                say(
                    "next      the same command resumes the run at this step (without --fresh or --resume-from STEP, which go back)",
                );
            }
            if let (StepsEnd::Stalled, Some((step, loss))) = (ended, self.evaluations.lowest()) {
                say(&format!(
                    "the validation loss was lowest at step {step} ({loss:.4}) and has not fallen for {} evaluations (train.early_stopping_patience)",
                    self.settings.train.early_stopping_patience
                ));
            }
        }
        reach(Point::Closing);
        self.run.close()?;
        Ok(self.checkpointer.result()?)
    }

    /// Step of the checkpoint whose weights are exported at the end of the run; `None` for those in the store.
    pub(super) fn exported_checkpoint(&self) -> Option<u64> {
        let best = self.best_checkpoint.map(|(step, _)| step);
        let best = best.filter(|step| self.run.checkpoints.has(*step));
        let last = self.is_on_nodes().then_some(self.run.state.step);
        best.or(last.filter(|step| self.checkpointer.has(*step)))
    }

    /// Whether no process can read all of the store, because other nodes have parts of it.
    fn is_on_nodes(&self) -> bool {
        self.ranks.nodes() > 1 && self.settings.placement.has_store()
    }
}

/// Rate of all ranks' GPUs that would be an MFU of 1, and the operations of a token; `None` where the rate is not
/// known.
fn flops(settings: &RunSettings, plan: &Plan) -> Option<Flops> {
    let gpu = plan.hardware.gpu.as_ref()?;
    let peak = peak_tflops(&gpu.name).filter(|_| settings.dtype != Dtype::Fp32)?;
    Some(Flops {
        peak_per_s: peak * 1e12 * f64::from(settings.ranks),
        per_token: plan.operations.sum() / settings.batch.tokens() as f64,
    })
}

/// Says on the first rank which part of a step begins.
fn now(shown: &Option<StepOutputs>, step: u64, part: &str) {
    if let Some(shown) = shown {
        shown.progress.now(step, part);
    }
}

/// Prints a line on the first rank.
fn say(shown: &Option<StepOutputs>, line: &str) {
    if let Some(shown) = shown {
        shown.progress.say(line);
    }
}
