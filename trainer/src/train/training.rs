//! The training loop of an open run: steps, their metrics, evaluations and checkpoints.

use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use kernels_torch::collective::Comm;
use swapper::{Bound, StepIo, StepRates, bound};
use test_hooks::kill_point::{Point, reach};

use super::TrainError;
use super::mover::{self, InGpu, WithSwapper};
use super::progress::{Flops, Progress};
use super::show;
use super::step::{self, Gradients, Stepper};
use super::stop::Stop;
use crate::config::{Interval, OverflowPolicy, RunSettings};
use crate::data::Data;
use crate::evaluations::Evaluations;
use crate::model::Dtype;
use crate::open::OpenRun;
use crate::plan::{Plan, peak_tflops};
use training_state::checkpointer::{Checkpointer, CheckpointerParts};
use training_state::learning_rate::learning_rate;
use training_state::metrics::{MetricsFile, StepMetrics};
use training_state::monitor::Monitors;
use training_state::overflow::{Outcome, OverflowState};
use training_state::plan::Measured;
use training_state::ranks::Ranks;
use training_state::trace::Trace;

/// State of a run in its training loop.
pub(super) struct Training {
    settings: RunSettings,
    /// `None` for a run without steps.
    data: Option<Data>,
    stepper: Stepper,
    /// Outputs of each step; only the first rank has them.
    shown: Option<Shown>,
    pub(super) run: OpenRun<WithSwapper, InGpu>,
    comm: Arc<Comm>,
    ranks: Ranks,
    checkpointer: Checkpointer,
    evaluations: Evaluations,
    /// Step and validation loss of the best checkpoint, with `train.checkpoint_best`.
    best_checkpoint: Option<(u64, f64)>,
    /// Computing time of the last step in seconds.
    compute_s: Option<f64>,
    trace: Trace,
}

/// Reason why [`Training::run_steps`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// The last step of this start is done.
    Done,
    /// The validation loss has not fallen for `train.early_stopping_patience` evaluations.
    Stalled,
    /// A signal asked the run to stop.
    Asked,
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
            let progress = progress
                .telling(reports.wall_clock_breakdown)
                .with_flops(flops(&settings, &run.plan));
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
        let checkpoints = run.checkpoints.clone();
        let newest = ranks.by_first::<_, TrainError>("looking for a checkpoint", || {
            Ok(checkpoints.has(state.step))
        })?;
        let (past, best_checkpoint) =
            ranks.by_first::<_, TrainError>("reading the evaluations", || {
                let past = MetricsFile::evaluations(run.dir.path());
                let has_checkpoint = |(step, _): &&(u64, f64)| checkpoints.has(*step);
                let with_checkpoint = past.iter().filter(has_checkpoint).copied();
                let best = with_checkpoint.min_by(|a, b| a.1.total_cmp(&b.1));
                Ok((past, best.filter(|_| train.checkpoint_best)))
            })?;
        let parts = CheckpointerParts {
            checkpoints,
            node_dirs: run.node_dirs.clone(),
            checkpoint_tap: run.checkpoint_tap.clone(),
            every: train.checkpoint_every,
            kept: train.checkpoints_kept,
            layout: run.layout.clone(),
            ranges: run.saved_ranges()?,
            tile_bytes: run.plan.memory.all_bytes,
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
            evaluations: Evaluations::of(&past),
            best_checkpoint,
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
    pub(super) fn run_steps(&mut self, stop: &Stop) -> Result<Ended, TrainError> {
        // An earlier start may have ended between a commit and its checkpoint. A run without a store that
        // began at another run's checkpoint has none of its own yet.
        let step = self.run.state.step;
        let lowest = self.evaluations.lowest();
        let is_best = self.settings.train.checkpoint_best
            && lowest.is_some_and(|(lowest_step, _)| lowest_step == step);
        let wanted =
            self.checkpointer.is_due(step) || is_best || !self.settings.placement.has_store();
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
                return Ok(Ended::Done);
            }
            if self.evaluations.has_stalled(patience) {
                return Ok(Ended::Stalled);
            }
            if asked {
                return Ok(Ended::Asked);
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
        let saving = self.checkpointer.is_due(step) && {
            let shown = &self.shown;
            self.checkpointer.begin(step, &|line| say(shown, line))?
        };
        let hyper =
            (outcome == Outcome::Updates).then(|| step::hyper(&self.settings, update, norm, scale));
        now(&self.shown, step, "update");
        let io = mover::finish_step(&mut self.run.backend, hyper, blob)?;
        (self.trace).finish_step(step, started, self.run.backend.take_spans());
        if self.trace.has_ended() {
            self.run.backend.record_spans(false)?;
        }
        metrics.step_s = started.elapsed().as_secs_f64();
        let asked = self.count_io(&mut metrics, &io, stop)?;
        let bound = self.bound(&gradients, io.update_ns);
        metrics.bound_s = bound.s;
        self.compute_s = Some(gradients.forward_s + gradients.backward_s);
        let is_best = self.evaluate_if_due(&mut metrics)?;
        let evaluated = metrics.eval_loss.is_some();
        self.show_step(&metrics, &overflow, &bound);
        // The tap sees only tiles that the host updates; the checkpointer reads all others itself.
        let visited = metrics.skipped || !self.run.backend.updates_on_host();
        self.run.state.last = Some(metrics);
        if saving && visited {
            self.checkpointer.visit(&mut self.run.backend)?;
        }
        self.checkpointer.is_of(&self.run.state);
        if is_best && self.settings.train.checkpoint_best {
            self.best_checkpoint = self.evaluations.lowest();
            self.checkpointer.spare(step);
            if !self.checkpointer.has(step) {
                self.checkpoint_now()?;
            }
            // The next commit would leave no state to repeat an interrupted checkpoint from.
            self.settle_checkpoints()?;
        }
        let shown = &self.shown;
        self.checkpointer.look(&|line| say(shown, line))?;
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
            update_s: 0.0,
            device_read_bytes: plan.node_bytes.read_bytes() as u64,
            device_written_bytes: plan.node_bytes.written_bytes as u64,
            device_grad_read_bytes: plan.node_bytes.grad_written_bytes as u64,
            device_grad_written_bytes: plan.node_bytes.grad_written_bytes as u64,
            gathered_bytes: gradients.exchanged.gathered_bytes,
            reduced_bytes: gradients.exchanged.reduced_bytes,
            grads_held_bytes: gradients.held_bytes,
            host_bytes: plan.host_bytes() * u64::from(settings.ranks),
            bound_s: self.bound(gradients, 0).s,
            eval_loss: None,
            eval_perplexity: None,
        }
    }

    /// Adds the step's transfers, summed over all ranks; times are this rank's. Returns whether any rank was asked to stop, which the
    /// ranks tell each other in the same message.
    fn count_io(
        &self,
        metrics: &mut StepMetrics,
        io: &StepIo,
        stop: &Stop,
    ) -> Result<bool, TrainError> {
        metrics.generation = io.generation;
        metrics.waited_s = io.waited_ns as f64 * 1e-9;
        metrics.update_s = io.update_ns as f64 * 1e-9;
        let mut moved = [
            io.read_bytes as f64,
            io.written_bytes as f64,
            io.grad_read_bytes as f64,
            io.grad_written_bytes as f64,
            f64::from(u8::from(stop.asked())),
        ];
        self.comm.all_reduce_sum_f64(&mut moved)?;
        let [moved @ .., asked] = moved;
        [
            metrics.device_read_bytes,
            metrics.device_written_bytes,
            metrics.device_grad_read_bytes,
            metrics.device_grad_written_bytes,
        ] = moved.map(|bytes| bytes as u64);
        Ok(asked > 0.0)
    }

    /// Writes the step's line to the metrics, the monitors and the terminal, on the first rank.
    fn show_step(&mut self, metrics: &StepMetrics, overflow: &OverflowState, bound: &Bound) {
        let Some(shown) = &mut self.shown else {
            return;
        };
        reach(Point::Telling);
        shown.metrics.write(metrics);
        shown.monitor(metrics, self.run.state.next_sample);
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
    fn bound(&self, gradients: &Gradients, update_ns: u64) -> Bound {
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
        let state = &self.run.state;
        match (self.settings.train.eval_every, &self.data) {
            (Interval::Never, _) | (_, None) => false,
            (Interval::Steps(steps), _) => state.step.is_multiple_of(steps),
            (Interval::Epoch, Some(data)) => {
                let before = state.next_sample - self.settings.step_samples();
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
        metrics.eval_perplexity = Some(loss.exp());
        Ok(self.evaluations.add(metrics.step, loss))
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
        now(shown, self.run.state.step, "checkpoint");
        Ok(self.checkpointer.settle(&|line| say(shown, line))?)
    }

    /// Measurements of this machine for the next plan.
    fn measured(&self) -> Measured {
        let rates = self.run.opened.rates();
        let plan = &self.run.plan;
        let operations = plan.operations.sum();
        Measured {
            read_bytes_per_s: rates.map(|(read, _)| read),
            write_bytes_per_s: rates.map(|(_, write)| write),
            tflops: self.compute_s.map(|s| operations / s / 1e12),
            on_gpu: plan.hardware.gpu.is_some(),
            checkpoint_bytes_per_s: self.checkpointer.rate(),
        }
    }

    /// Ends the run at its last step or where it was asked to stop. An error says what was not kept.
    pub(super) fn end(self, ended: Ended) -> Result<(), TrainError> {
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
                Ended::Asked => "stopped as asked",
                Ended::Done => "done",
                Ended::Stalled => "finished (early stopping)",
            };
            let step = self.run.state.step;
            let kept = match (
                self.settings.placement.has_store(),
                self.checkpointer.has(step),
            ) {
                (true, _) => "all of it committed",
                (false, true) => "all of it in the checkpoint",
                (false, false) => "later than the newest checkpoint",
            };
            say(&format!(
                "{why}: at step {step} of {}, {kept}; {}",
                self.settings.train.steps,
                MetricsFile::path(self.run.dir.path()).display()
            ));
            if ended == Ended::Asked {
                say("next      the same command resumes the run at this step");
            }
            if let (Ended::Stalled, Some((step, loss))) = (ended, self.evaluations.lowest()) {
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

    /// Commits the last finished step, or writes a checkpoint of it.
    pub(super) fn keep(&mut self) -> Result<(), TrainError> {
        reach(Point::Draining);
        if let Some(shown) = &self.shown {
            shown.progress.begin();
        }
        now(&self.shown, self.run.state.step, "commit");
        (self.ranks).together::<_, TrainError>("committing the last step", || {
            Ok(self.run.backend.drain()?)
        })?;
        self.settle_checkpoints()?;
        let step = self.run.state.step;
        let train = &self.settings.train;
        let worth = step > 0 || train.steps == 0;
        let is_complete =
            step >= train.steps || self.evaluations.has_stalled(train.early_stopping_patience);
        let exports = self.is_on_nodes() && train.export_to.is_some() && is_complete;
        let is_only_copy = !self.settings.placement.has_store() || exports;
        if worth && is_only_copy && !self.checkpointer.has(step) {
            self.checkpoint_now()?;
            self.settle_checkpoints()?;
        }
        Ok(())
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
fn now(shown: &Option<Shown>, step: u64, part: &str) {
    if let Some(shown) = shown {
        shown.progress.now(step, part);
    }
}

/// Prints a line on the first rank.
fn say(shown: &Option<Shown>, line: &str) {
    if let Some(shown) = shown {
        shown.progress.say(line);
    }
}
