//! Console output of a running run: a line every `log_every` steps and at the first step that ends more than
//! [`SILENCE_MAX`] after the line before, a line about how far a step is when nothing was printed for as long, and a
//! progress bar if stderr is a terminal.

use std::io::IsTerminal;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use indicatif::{ProgressBar, ProgressStyle};

use crate::runs::utc;
use offload_support::outln;
use offload_support::units::ApproxTime;
use training_state::metrics::StepMetrics;

/// Time after which a step prints a line even if none is due.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// Prints lines on stdout and a bar on stderr if that is a terminal.
pub(super) struct Progress {
    bar: Option<ProgressBar>,
    steps: u64,
    log_every: u64,
    since: Since,
    /// Whether lines show the parts of a step's time.
    parts: bool,
    flops: Option<Flops>,
    started: Instant,
    /// Time of the newest line about a step that ended.
    said: Instant,
    /// Time of the newest line about a step.
    told: Instant,
    first_step: u64,
}

/// Operations by which the use of a GPU is measured.
pub(super) struct Flops {
    /// Peak rate of all GPUs of the run together.
    pub(super) peak_per_s: f64,
    /// Operations of forward and backward for one token.
    pub(super) per_token: f64,
}

/// Sums since the previous line.
#[derive(Default)]
struct Since {
    steps: u64,
    tokens: u64,
    step_s: f64,
    bound_s: f64,
    read_bytes: u64,
    written_bytes: u64,
}

impl Progress {
    /// Makes the progress of a run that continues after `step` and ends after `steps`.
    pub(super) fn new(step: u64, steps: u64, log_every: u64) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style =
                ProgressStyle::with_template("{bar:30} {pos}/{len} steps, {eta} left {msg}");
            let bar = ProgressBar::new(steps).with_style(style.expect("the template is right"));
            bar.set_position(step);
            bar
        });
        Self {
            bar,
            steps,
            log_every,
            since: Since::default(),
            parts: false,
            flops: None,
            started: Instant::now(),
            said: Instant::now(),
            told: Instant::now(),
            first_step: step,
        }
    }

    /// Sets whether lines show the parts of a step's time.
    pub(super) fn telling(mut self, parts: bool) -> Self {
        self.parts = parts;
        self
    }

    /// Shows the model FLOPs utilization (MFU) by `flops`.
    pub(super) fn with_flops(mut self, flops: Option<Flops>) -> Self {
        self.flops = flops;
        self
    }

    /// Adds a step of `tokens` tokens whose shortest time is limited by `bottleneck`.
    pub(super) fn step(&mut self, metrics: &StepMetrics, tokens: u64, bottleneck: &str) {
        let since = &mut self.since;
        since.steps += 1;
        since.tokens += tokens;
        since.step_s += metrics.step_s;
        since.bound_s += metrics.bound_s;
        since.read_bytes += metrics.device_read_bytes;
        since.written_bytes += metrics.device_written_bytes;
        if let Some(bar) = &self.bar {
            bar.set_position(metrics.step);
            bar.set_message(format!("loss {:.3}", metrics.loss));
        }
        let last = metrics.step == self.steps;
        let is_due = metrics.step.is_multiple_of(self.log_every) || last;
        if is_due || metrics.eval_loss.is_some() || self.said.elapsed() >= SILENCE_MAX {
            let line = self.line(metrics, bottleneck);
            self.say(&line);
            if self.parts {
                self.say(&parts(metrics));
            }
            self.since = Since::default();
            self.said = Instant::now();
            self.told = self.said;
        }
    }

    /// Prints how much of `what` in step `step` is done, if no line about a step was printed for [`SILENCE_MAX`].
    pub(super) fn within(&mut self, step: u64, what: &str, done: f64) {
        if let Some(line) = self.due_within(step, what, done) {
            self.say(&line);
            self.told = Instant::now();
        }
    }

    fn due_within(&self, step: u64, what: &str, done: f64) -> Option<String> {
        (self.told.elapsed() >= SILENCE_MAX).then(|| {
            let now = SystemTime::now().duration_since(UNIX_EPOCH);
            format!(
                "{}  step {step}/{}  {what}: {:.0} % done",
                utc(now.map_or(0, |since| since.as_secs())),
                self.steps,
                100.0 * done
            )
        })
    }

    /// Prints `line` above the bar.
    pub(super) fn say(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| outln!("{line}")),
            None => outln!("{line}"),
        }
    }

    fn line(&self, metrics: &StepMetrics, bottleneck: &str) -> String {
        let since = &self.since;
        let per_s = |count: f64| count / since.step_s.max(1e-9);
        let epoch = metrics.epoch;
        let mut line = format!(
            "{}  step {}/{}{}  loss {:.4}  norm {:.3}  lr {:.2e}  {:.3} s/step  {:.0} tokens/s",
            utc(metrics.unix_s as u64),
            metrics.step,
            self.steps,
            epoch.map_or(String::new(), |epoch| format!("  epoch {epoch:.2}")),
            metrics.loss,
            metrics.grad_norm,
            metrics.lr,
            since.step_s / since.steps.max(1) as f64,
            per_s(since.tokens as f64)
        );
        if let Some(flops) = &self.flops {
            let used = per_s(since.tokens as f64 * flops.per_token) / flops.peak_per_s;
            line += &format!("  MFU {:.0} %", 100.0 * used);
        }
        line += &format!("  bottleneck: {bottleneck}");
        if since.read_bytes + since.written_bytes > 0 {
            line += &format!(
                "  read {:.2} GB/s  written {:.2} GB/s  I/O efficiency {:.0} %",
                per_s(since.read_bytes as f64) / 1e9,
                per_s(since.written_bytes as f64) / 1e9,
                100.0 * per_s(since.bound_s)
            );
        }
        let done = metrics.step - self.first_step;
        let left = self.started.elapsed().as_secs_f64() / done.max(1) as f64
            * (self.steps - metrics.step) as f64;
        line + &format!("  {} left", ApproxTime(Duration::from_secs_f64(left)))
    }
}

/// Formats the parts of a step's time. The optimizer runs in parallel, so its time is not part of the sum.
fn parts(metrics: &StepMetrics) -> String {
    let ms = |seconds: f64| format!("{:.2} ms", seconds * 1e3);
    let named = metrics.forward_s + metrics.backward_s + metrics.waited_s;
    format!(
        "  time (step {})  forward {}  backward {}  waiting {}  other {}  in parallel: updates {}",
        metrics.step,
        ms(metrics.forward_s),
        ms(metrics.backward_s),
        ms(metrics.waited_s),
        ms((metrics.step_s - named).max(0.0)),
        ms(metrics.update_s),
    )
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_step_says_how_far_it_is() {
        let mut progress = Progress::new(0, 9, 1);
        let line = |progress: &Progress| progress.due_within(3, "validation", 0.25);
        assert_eq!(line(&progress), None);
        progress.told = Instant::now().checked_sub(SILENCE_MAX).unwrap();
        let said = line(&progress).unwrap();
        assert!(
            said.ends_with("  step 3/9  validation: 25 % done"),
            "{said}"
        );
        progress.within(3, "validation", 0.25);
        assert_eq!(line(&progress), None);
    }
}
