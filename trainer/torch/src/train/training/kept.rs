//! The end of a start: the last step is committed or in a checkpoint. A state that is only in memory stays there until its checkpoint can be
//! written, as when a drive is full.

use std::time::{Duration, Instant};

use offload_support::units::ApproxBytes;
use test_hooks::kill_point::{Point, reach};

use super::{Training, now, say};
use crate::train::TrainError;
use crate::train::stop::Stop;

/// Time between attempts to write a checkpoint of a state that is only in memory.
const RETRY_MIN: Duration = Duration::from_secs(5);
const RETRY_MAX: Duration = Duration::from_secs(600);
const RETRY_POLL: Duration = Duration::from_millis(200);

/// Time between two lines that say so.
const REMINDER: Duration = Duration::from_secs(600);

impl Training {
    /// Commits the last finished step, or writes a checkpoint of it. A state that is only in memory is kept there until its checkpoint
    /// is written, or until a signal ends the run.
    pub(in crate::train) fn keep(&mut self, stop: &Stop) -> Result<(), TrainError> {
        reach(Point::Draining);
        if let Some(shown) = &self.shown {
            shown.progress.begin();
        }
        now(&self.shown, self.run.state.step, "commit");
        (self.ranks).on_all_ranks::<_, TrainError>("committing the last step", || {
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
            if !self.checkpointer.has(step) {
                self.retry_checkpoint(stop)?;
            }
        }
        Ok(())
    }

    /// Tries to write the checkpoint of the present step again and again, until it is written or SIGTERM or SIGINT ends the run, after
    /// a last attempt: space may have been freed since the one before.
    fn retry_checkpoint(&mut self, stop: &Stop) -> Result<(), TrainError> {
        let step = self.run.state.step;
        let was_terminated = stop.terminated();
        stop.take_checkpoint_request();
        let mut wait = match self.checkpointer.turns_elsewhere() {
            true => Duration::ZERO,
            false => RETRY_MIN,
        };
        let mut told = None;
        loop {
            if !wait.is_zero() && told.is_none_or(|told: Instant| told.elapsed() >= REMINDER) {
                told = Some(Instant::now());
                self.say_what_is_in_memory(step, was_terminated);
            }
            let goes_on = self.wait_for_retry(wait, was_terminated, stop)?;
            let began = Instant::now();
            self.checkpoint_now()?;
            self.settle_checkpoints()?;
            if self.checkpointer.has(step) || !goes_on {
                return Ok(());
            }
            // An attempt that finds no room takes no time; one that writes until the drive is full wears it.
            wait = (began.elapsed() * 20).clamp(RETRY_MIN, RETRY_MAX);
        }
    }

    /// Waits until the next attempt, or until a signal asks for one. Returns false if a signal ended the run; all ranks agree.
    fn wait_for_retry(
        &self,
        wait: Duration,
        was_terminated: bool,
        stop: &Stop,
    ) -> Result<bool, TrainError> {
        let until = Instant::now() + wait;
        loop {
            let retries = stop.take_checkpoint_request() || Instant::now() >= until;
            // The second signal of a run that one has stopped ends the process.
            let ends = stop.terminated() && !was_terminated;
            let told = [u64::from(ends), u64::from(retries)];
            let all = self.ranks.numbers(told)?;
            if all.iter().any(|[ends, _]| *ends > 0) {
                return Ok(false);
            }
            if all.iter().any(|[_, retries]| *retries > 0) {
                return Ok(true);
            }
            std::thread::sleep(RETRY_POLL);
        }
    }

    /// Says on the first rank that the state is in memory, and what to do.
    fn say_what_is_in_memory(&self, step: u64, was_terminated: bool) {
        let why = self.checkpointer.failure_of(step).unwrap_or_default();
        let lost = match self.checkpointer.newest_kept() {
            Some(kept) => format!("what came after step {kept}"),
            None => "all of its steps".into(),
        };
        let ends = match was_terminated {
            // The second signal ends the process wherever it is.
            true => format!("Another SIGTERM or SIGINT ends the run at once and loses {lost}"),
            false => format!(
                "SIGTERM or SIGINT tries a last time and ends the run; without room it loses {lost}"
            ),
        };
        say(
            &self.shown,
            &format!(
                "the state of step {step} is kept in memory, because its checkpoint could not be written: {why}. It is tried again every few \
                 seconds, and at once after `kill -USR1 {}`: free {} there, or move {} to another drive and leave a link in its place. \
                 {ends}",
                std::process::id(),
                ApproxBytes(self.run.plan.memory.all_bytes),
                self.run.checkpoints.path().display()
            ),
        );
    }
}
