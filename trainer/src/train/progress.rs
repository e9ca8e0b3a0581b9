//! Console output of a running run: a line every `log_every` steps, and a progress bar if stderr is a
//! terminal.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use offload_support::outln;
use offload_support::units::ApproxTime;
use training_state::metrics::StepMetrics;

/// Prints lines on stdout and a bar on stderr if that is a terminal.
pub(super) struct Progress {
    bar: Option<ProgressBar>,
    steps: u64,
    log_every: u64,
    since: Since,
    /// Whether lines show the parts of a step's time.
    parts: bool,
    started: Instant,
    first_step: u64,
}

/// Sums since the previous line.
#[derive(Default)]
struct Since {
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
            started: Instant::now(),
            first_step: step,
        }
    }

    /// Sets whether lines show the parts of a step's time.
    pub(super) fn telling(mut self, parts: bool) -> Self {
        self.parts = parts;
        self
    }

    /// Adds a step of `tokens` tokens.
    pub(super) fn step(&mut self, metrics: &StepMetrics, tokens: u64) {
        let since = &mut self.since;
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
        if metrics.step.is_multiple_of(self.log_every) || last || metrics.eval_loss.is_some() {
            let line = self.line(metrics);
            self.say(&line);
            if self.parts {
                self.say(&parts(metrics));
            }
            self.since = Since::default();
        }
    }

    /// Prints `line` above the bar.
    pub(super) fn say(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| outln!("{line}")),
            None => outln!("{line}"),
        }
    }

    fn line(&self, metrics: &StepMetrics) -> String {
        let since = &self.since;
        let per_s = |count: u64| count as f64 / since.step_s.max(1e-9);
        let mut line = format!(
            "step {:>5}/{}  loss {:.4}  norm {:.3}  lr {:.2e}  {:.0} tok/s",
            metrics.step,
            self.steps,
            metrics.loss,
            metrics.grad_norm,
            metrics.lr,
            per_s(since.tokens)
        );
        if since.read_bytes + since.written_bytes > 0 {
            line += &format!(
                "  read {:.2} GB/s  written {:.2} GB/s  {:.0} % of the bound",
                per_s(since.read_bytes) / 1e9,
                per_s(since.written_bytes) / 1e9,
                100.0 * since.bound_s / since.step_s.max(1e-9)
            );
        }
        if let Some(loss) = metrics.eval_loss {
            line += &format!("  eval loss {loss:.4}");
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
