//! The log on stderr, written by a thread of its own: a slow or stuck reader (a full pipe, a hung service manager) must not delay
//! threads that move tiles. Lines that do not fit into the queue are dropped and counted in the log.
//!
//! Lines of INFO and above about one user (events with a field `uid`) are limited, because any user can cause thousands per second:
//! [`BURST`] at once, then one per second, which tells how many were dropped. So are equal warnings and errors: [`EQUAL_BURST`] at once.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tracing::field::{Field, Visit};
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

/// Capacity of the queue: a few hundred kilobytes at most.
const WAITING_MAX: usize = 1024;

/// Lines about one user that are written at once: the ranks of a node start and end together.
const BURST: u64 = 16;

/// Equal warnings and errors that are written at once: a failed device or a full disk can cause one per operation.
const EQUAL_BURST: u64 = 3;

/// Limit of texts that are remembered; with more, the oldest is forgotten.
const TEXTS_MAX: usize = 64;

/// Interval of further lines of the same kind.
const PERIOD: Duration = Duration::from_secs(1);

/// How long the end of the program waits for the queue to drain.
const END: Duration = Duration::from_secs(1);

#[derive(Default)]
struct LineCounts {
    given: AtomicU64,
    written: AtomicU64,
    left_out: AtomicU64,
}

/// Installs the log. Queued lines are written when the returned value is dropped.
pub(super) fn to_stderr() -> LastLines {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    let counts = Arc::new(LineCounts::default());
    let (sender, waiting) = sync_channel(WAITING_MAX);
    let limited = Arc::new(LineLimits::default());
    let (seen, of_limited) = (counts.clone(), limited.clone());
    let writing = std::thread::Builder::new()
        .name("log".into())
        .spawn(move || write_all(&waiting, &seen, &of_limited));
    let last_lines = LastLines(counts.clone());
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal() && !no_color);
    match writing {
        Ok(_) => log
            .with_writer(move || LogLine {
                sender: sender.clone(),
                counts: counts.clone(),
            })
            .finish()
            .with(LimitedLines(limited))
            .init(),
        // Without a thread, write directly: errors are worth the wait.
        Err(_) => log.with_writer(std::io::stderr).init(),
    }
    last_lines
}

/// Writer of one event; the subscriber writes it in one call.
struct LogLine {
    sender: SyncSender<Vec<u8>>,
    counts: Arc<LineCounts>,
}

impl Write for LogLine {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.counts.given.fetch_add(1, Ordering::Relaxed);
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) =
            self.sender.try_send(bytes.to_vec())
        {
            self.counts.given.fetch_sub(1, Ordering::Relaxed);
            self.counts.left_out.fetch_add(1, Ordering::Relaxed);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn write_all(waiting: &Receiver<Vec<u8>>, counts: &LineCounts, limited: &LineLimits) {
    let mut told_at = Instant::now();
    loop {
        match waiting.recv_timeout(PERIOD.saturating_sub(told_at.elapsed())) {
            Ok(line) => {
                write(&line);
                counts.written.fetch_add(1, Ordering::Release);
                // After the line, which has made room for this one.
                let left_out = counts.left_out.swap(0, Ordering::Relaxed);
                if left_out > 0 {
                    tracing::warn!("{left_out} log lines were dropped: the reader is too slow");
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        if told_at.elapsed() >= PERIOD {
            told_at = Instant::now();
            for (kind, count) in limited.left_out(told_at) {
                match kind {
                    Kind::Uid(uid) => {
                        tracing::warn!("{count} more log lines about uid {uid} were dropped");
                    }
                    Kind::Text(text) => {
                        tracing::warn!("{count} more log lines were equal to: {text}");
                    }
                }
            }
        }
    }
}

fn write(mut line: &[u8]) {
    // Without locking stderr: a panic elsewhere must not wait for this.
    while !line.is_empty() {
        match rustix::io::write(std::io::stderr(), line) {
            Ok(written) => line = &line[written..],
            Err(rustix::io::Errno::INTR) => {}
            // There is no other place to report this.
            Err(_) => break,
        }
    }
}

/// What limited lines have in common.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Kind {
    /// They are about this user.
    Uid(u64),
    /// They are equal.
    Text(String),
}

impl Kind {
    fn burst(&self) -> u64 {
        match self {
            Self::Uid(_) => BURST,
            Self::Text(_) => EQUAL_BURST,
        }
    }
}

/// Lines that may still be written, by kind. Kinds without recent lines are forgotten.
#[derive(Default)]
struct LineLimits(Mutex<HashMap<Kind, LineAllowance>>);

struct LineAllowance {
    left: u64,
    /// `left` grows by one for each period since.
    since: Instant,
    left_out: u64,
}

impl LineLimits {
    /// Whether a line of this kind may be written; counts it if not.
    fn may_write(&self, kind: Kind, now: Instant) -> bool {
        let mut kinds = self.0.lock().unwrap_or_else(|e| e.into_inner());
        let is_text = matches!(kind, Kind::Text(_));
        if is_text && !kinds.contains_key(&kind) && kinds.len() >= TEXTS_MAX {
            let texts = kinds
                .iter()
                .filter(|(other, _)| matches!(other, Kind::Text(_)));
            let oldest = texts.min_by_key(|(_, lines)| lines.since);
            let oldest = oldest.map(|(kind, _)| kind.clone());
            if let Some(oldest) = oldest {
                kinds.remove(&oldest);
            }
        }
        let burst = kind.burst();
        let lines = kinds.entry(kind).or_insert(LineAllowance {
            left: burst,
            since: now,
            left_out: 0,
        });
        lines.refill(burst, now);
        match lines.left {
            0 => lines.left_out += 1,
            _ => lines.left -= 1,
        }
        lines.left_out == 0
    }

    /// Returns the kinds and counts of lines dropped since the last call. The line about that is the kind's line of this period.
    fn left_out(&self, now: Instant) -> Vec<(Kind, u64)> {
        let mut kinds = self.0.lock().unwrap_or_else(|e| e.into_inner());
        let mut left_out = Vec::new();
        kinds.retain(|kind, lines| {
            match std::mem::take(&mut lines.left_out) {
                0 => lines.refill(kind.burst(), now),
                count => {
                    lines.since = now;
                    left_out.push((kind.clone(), count));
                }
            }
            lines.left < kind.burst()
        });
        left_out
    }
}

impl LineAllowance {
    fn refill(&mut self, burst: u64, now: Instant) {
        let periods = (now.saturating_duration_since(self.since)).as_secs() / PERIOD.as_secs();
        if periods > 0 {
            self.left = burst.min(self.left + periods);
            self.since = now;
        }
    }
}

/// Drops lines over the limits of [`LineLimits`].
struct LimitedLines(Arc<LineLimits>);

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for LimitedLines {
    fn event_enabled(&self, event: &tracing::Event<'_>, _: Context<'_, S>) -> bool {
        let level = *event.metadata().level();
        if level > tracing::Level::INFO {
            return true;
        }
        let mut fields = Fields::default();
        event.record(&mut fields);
        let kind = match fields.uid {
            Some(uid) => Kind::Uid(uid),
            None if level <= tracing::Level::WARN => Kind::Text(fields.text),
            None => return true,
        };
        self.0.may_write(kind, Instant::now())
    }
}

/// Fields of an event: the user it is about, and all as text.
#[derive(Default)]
struct Fields {
    uid: Option<u64>,
    text: String,
}

impl Visit for Fields {
    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "uid" {
            self.uid = Some(value);
        }
        self.record_debug(field, &value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let gap = if self.text.is_empty() { "" } else { " " };
        // Writing to a String cannot fail.
        let _ = match field.name() {
            "message" => write!(self.text, "{gap}{value:?}"),
            name => write!(self.text, "{gap}{name}={value:?}"),
        };
    }
}

/// Waits on drop until queued lines are written.
pub(super) struct LastLines(Arc<LineCounts>);

impl Drop for LastLines {
    fn drop(&mut self) {
        let limit = Instant::now() + END;
        let done =
            || self.0.written.load(Ordering::Acquire) >= self.0.given.load(Ordering::Relaxed);
        while !done() && Instant::now() < limit {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_has_a_burst_of_lines_then_one_per_period_and_dropped_lines_are_counted() {
        let users = LineLimits::default();
        let start = Instant::now();
        let written = |uid, count, now| {
            let may_write = |_: &u64| users.may_write(Kind::Uid(uid), now);
            (0..count).filter(may_write).count()
        };
        assert_eq!(written(7, 1000, start), BURST as usize);
        assert_eq!(written(8, 3, start), 3, "limits are per user");
        let mut now = start + PERIOD;
        assert_eq!(users.left_out(now), [(Kind::Uid(7), 1000 - BURST)]);
        // While it continues, the count is the one line.
        for _ in 0..5 {
            assert_eq!(written(7, 500, now + PERIOD / 2), 0);
            now += PERIOD;
            assert_eq!(users.left_out(now), [(Kind::Uid(7), 500)]);
        }
        assert_eq!(written(7, 2, now + PERIOD), 1);
        now += (BURST as u32 + 2) * PERIOD;
        users.left_out(now);
        users.left_out(now + (BURST as u32 + 2) * PERIOD);
        assert!(
            users.0.lock().unwrap().is_empty(),
            "quiet users are forgotten"
        );
    }
    #[test]
    fn equal_errors_are_counted_and_others_are_written() {
        let lines = LineLimits::default();
        let now = Instant::now();
        let text = |text: &str| Kind::Text(text.to_owned());
        let written = (0..38).filter(|_| lines.may_write(text("the disk is full"), now));
        assert_eq!(written.count() as u64, EQUAL_BURST);
        assert!(lines.may_write(text("another error"), now));
        let counted = [(text("the disk is full"), 38 - EQUAL_BURST)];
        assert_eq!(lines.left_out(now + PERIOD), counted);
        for number in 0..2 * TEXTS_MAX {
            assert!(lines.may_write(text(&number.to_string()), now));
        }
        assert!(lines.0.lock().unwrap().len() <= TEXTS_MAX);
    }
}
