//! Console output of a running run: a line every `log_every` steps, and before [`SILENCE_MAX`] has passed since the
//! line before if steps are shorter; a line about how far a step is whenever nothing was printed for as long; and a
//! progress bar if stderr is a terminal.

use std::io::IsTerminal;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use indicatif::{ProgressBar, ProgressStyle};

use offload_support::outln;
use offload_support::units::ApproxTime;
use training_run::runs::utc;
use training_state::metrics::StepMetrics;

/// Longest time without a line while the run takes steps.
const SILENCE_MAX: Duration = Duration::from_secs(30);

/// Columns of a terminal that a step's lines fit.
const COLUMNS: usize = 120;

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
    first_step: u64,
    activity: Arc<Mutex<Activity>>,
    _reporter: Reporter,
}

/// What the run is doing now.
struct Activity {
    /// Time of the newest line about a step.
    told: Instant,
    /// Words for the present part of a step; `None` outside of steps.
    part: Option<String>,
    /// Start of the present step or evaluation.
    since: Instant,
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
        let activity = Arc::new(Mutex::new(Activity {
            told: Instant::now(),
            part: None,
            since: Instant::now(),
        }));
        let reporter = Reporter::start(activity.clone(), SILENCE_MAX, {
            let bar = bar.clone();
            move |line| say(bar.as_ref(), line)
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
            first_step: step,
            activity,
            _reporter: reporter,
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
        let next = Duration::from_secs_f64(metrics.step_s);
        if is_due || metrics.eval_loss.is_some() || self.said.elapsed() + next >= SILENCE_MAX {
            for line in wrapped(&self.fields(metrics, bottleneck)) {
                self.say(&line);
            }
            if self.parts {
                self.say(&parts(metrics));
            }
            self.since = Since::default();
            self.said = Instant::now();
            lock(&self.activity).told = self.said;
        }
    }

    /// Begins a step or an evaluation after it.
    pub(super) fn begin(&self) {
        lock(&self.activity).since = Instant::now();
    }

    /// Says which part of step `step` comes next. A line shows it once nothing was printed for [`SILENCE_MAX`].
    pub(super) fn now(&self, step: u64, part: &str) {
        lock(&self.activity).part = Some(format!("step {step}/{}  {part}", self.steps));
    }

    /// Ends the lines about what the run is doing.
    pub(super) fn end(&self) {
        lock(&self.activity).part = None;
    }

    /// Prints `line` above the bar.
    pub(super) fn say(&self, line: &str) {
        say(self.bar.as_ref(), line);
    }

    /// Returns what prints lines as [`Progress::say`] does, for those who report beside the loop.
    pub(super) fn speaker(&self) -> impl Fn(&str) + Send + 'static {
        let bar = self.bar.clone();
        move |line| say(bar.as_ref(), line)
    }

    /// Formats what a step's line shows, the most important first.
    fn fields(&self, metrics: &StepMetrics, bottleneck: &str) -> Vec<String> {
        let since = &self.since;
        let per_s = |count: f64| count / since.step_s.max(1e-9);
        let done = metrics.step - self.first_step;
        let left = self.started.elapsed().as_secs_f64() / done.max(1) as f64
            * (self.steps - metrics.step) as f64;
        let mut fields = vec![
            utc(metrics.unix_s as u64),
            format!("step {}/{}", metrics.step, self.steps),
        ];
        fields.extend(metrics.epoch.map(|epoch| format!("epoch {epoch:.2}")));
        fields.extend([
            format!("loss {:.4}", metrics.loss),
            format!("norm {:.3}", metrics.grad_norm),
            format!("lr {:.2e}", metrics.lr),
            format!("{:.3} s/step", since.step_s / since.steps.max(1) as f64),
            format!("{} left", ApproxTime(Duration::from_secs_f64(left))),
            format!("{:.0} tokens/s", per_s(since.tokens as f64)),
        ]);
        if let Some(flops) = &self.flops {
            let used = per_s(since.tokens as f64 * flops.per_token) / flops.peak_per_s;
            fields.push(format!("MFU {:.0} %", 100.0 * used));
        }
        fields.push(format!("bottleneck: {bottleneck}"));
        if since.read_bytes + since.written_bytes > 0 {
            fields.extend([
                format!("read {:.2} GB/s", per_s(since.read_bytes as f64) / 1e9),
                format!(
                    "written {:.2} GB/s",
                    per_s(since.written_bytes as f64) / 1e9
                ),
                format!("I/O efficiency {:.0} %", 100.0 * per_s(since.bound_s)),
            ]);
        }
        fields
    }
}

/// Joins fields to lines of at most [`COLUMNS`] characters, unless a single one is longer.
fn wrapped(fields: &[String]) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for field in fields {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 2 + field.chars().count() <= COLUMNS => {
                *line += &format!("  {field}");
            }
            Some(_) => lines.push(format!("  {field}")),
            None => lines.push(field.clone()),
        }
    }
    lines
}

/// Formats the parts of a step's time. The optimizer runs in parallel, so its time is not part of the sum.
fn parts(metrics: &StepMetrics) -> String {
    let ms = |seconds: f64| format!("{:.2} ms", seconds * 1e3);
    let named = metrics.forward_s
        + metrics.backward_s
        + metrics.directions_s
        + metrics.waited_s
        + metrics.exchange_s;
    let directions = match metrics.directions_s {
        0.0 => String::new(),
        s => format!("  directions {}", ms(s)),
    };
    format!(
        "  time (step {})  forward {}  backward {}{directions}  waiting {}  other ranks {}  other {}  in parallel: updates {}",
        metrics.step,
        ms(metrics.forward_s),
        ms(metrics.backward_s),
        ms(metrics.waited_s),
        ms(metrics.exchange_s),
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

/// Prints `line` above `bar`.
fn say(bar: Option<&ProgressBar>, line: &str) {
    match bar {
        Some(bar) => bar.suspend(|| outln!("{line}")),
        None => outln!("{line}"),
    }
}

/// Locks plain data, which no panic leaves half changed.
fn lock(activity: &Mutex<Activity>) -> MutexGuard<'_, Activity> {
    activity.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Thread that says what the run is doing when nothing else was printed for some time.
struct Reporter {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Reporter {
    fn start(
        activity: Arc<Mutex<Activity>>,
        silence_max: Duration,
        say: impl Fn(&str) + Send + 'static,
    ) -> Self {
        let (stop, stopped) = channel();
        Self {
            stop: Some(stop),
            thread: Some(std::thread::spawn(move || {
                report(&activity, silence_max, &stopped, say);
            })),
        }
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // The thread holds no state, and it has printed its own panic.
            let _ = thread.join();
        }
    }
}

fn report(
    activity: &Mutex<Activity>,
    silence_max: Duration,
    stopped: &Receiver<()>,
    say: impl Fn(&str),
) {
    let mut wait = silence_max;
    while stopped.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
        let mut now = lock(activity);
        let line = (now.part.as_ref()).filter(|_| now.told.elapsed() >= silence_max);
        let line = line.map(|part| {
            let unix = SystemTime::now().duration_since(UNIX_EPOCH);
            format!(
                "{}  {part}, {:.0} s so far",
                utc(unix.map_or(0, |since| since.as_secs())),
                now.since.elapsed().as_secs_f64()
            )
        });
        if line.is_some() {
            now.told = Instant::now();
        }
        // Without anything to say, the thread looks again after a while.
        wait = match silence_max.saturating_sub(now.told.elapsed()) {
            Duration::ZERO => silence_max / 30,
            left => left,
        };
        drop(now);
        if let Some(line) = line {
            say(&line);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::TryRecvError;

    use super::*;

    #[test]
    fn a_long_unit_says_again_and_again_what_is_computed() {
        let activity = Arc::new(Mutex::new(Activity {
            told: Instant::now(),
            part: None,
            since: Instant::now(),
        }));
        let (sender, lines) = channel();
        let silence_max = Duration::from_millis(20);
        let reporter = Reporter::start(activity.clone(), silence_max, move |line| {
            sender.send(line.to_owned()).unwrap();
        });
        // Outside of a step nothing is said.
        assert!(lines.recv_timeout(4 * silence_max).is_err());
        lock(&activity).part = Some("step 3/9  forward, unit 4 of 26".into());
        for _ in 0..2 {
            let line = lines.recv().unwrap();
            assert!(
                line.contains("  step 3/9  forward, unit 4 of 26, ") && line.ends_with(" s so far"),
                "{line}"
            );
        }
        // Waits for the end of the thread, which says no more.
        drop(reporter);
        lines.try_iter().for_each(drop);
        assert_eq!(lines.try_recv(), Err(TryRecvError::Disconnected));
    }

    #[test]
    fn the_lines_of_a_step_fit_a_terminal() {
        let fields: Vec<String> = (0..9)
            .map(|number| format!("field {number} {}", "x".repeat(19)))
            .collect();
        let lines = wrapped(&fields);
        assert_eq!(lines.len(), 3, "{lines:?}");
        assert!(lines.iter().all(|line| line.len() <= COLUMNS), "{lines:?}");
        assert!(lines[1].starts_with("  field 4 "), "{lines:?}");
        assert_eq!(lines.join("").matches("field").count(), 9);
    }

    #[test]
    fn a_line_of_a_step_puts_off_the_next_one() {
        let silence_max = Duration::from_millis(50);
        let activity = Arc::new(Mutex::new(Activity {
            told: Instant::now() + Duration::from_secs(3600),
            part: Some("step 3/9  forward, unit 4 of 26".into()),
            since: Instant::now(),
        }));
        let (sender, lines) = channel();
        let reporter = Reporter::start(activity, silence_max, move |line| {
            sender.send(line.to_owned()).unwrap();
        });
        assert!(lines.recv_timeout(4 * silence_max).is_err());
        drop(reporter);
    }
}
