//! The log on stderr, written by a thread of its own: a slow or stuck reader (a full pipe, a hung service manager) must not delay
//! threads that move tiles. Lines that do not fit into the queue are dropped and counted in the log.
//!
//! Lines of INFO and above about one user (events with a field `uid`) are limited, because any user can cause thousands per second:
//! [`BURST`] at once, then one per second, which tells how many were dropped.

use std::collections::HashMap;
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

/// Interval of further lines about that user.
const PERIOD: Duration = Duration::from_secs(1);

/// How long the end of the program waits for the queue to drain.
const END: Duration = Duration::from_secs(1);

#[derive(Default)]
struct Counts {
    given: AtomicU64,
    written: AtomicU64,
    left_out: AtomicU64,
}

/// Installs the log. Queued lines are written when the returned value is dropped.
pub(super) fn to_stderr() -> LastLines {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    let counts = Arc::new(Counts::default());
    let (sender, waiting) = sync_channel(WAITING_MAX);
    let users = Arc::new(Users::default());
    let (seen, of_users) = (counts.clone(), users.clone());
    let writing = std::thread::Builder::new()
        .name("log".into())
        .spawn(move || write_all(&waiting, &seen, &of_users));
    let last_lines = LastLines(counts.clone());
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal() && !no_color);
    match writing {
        Ok(_) => log
            .with_writer(move || Line {
                sender: sender.clone(),
                counts: counts.clone(),
            })
            .finish()
            .with(PerUser(users))
            .init(),
        // Without a thread, write directly: errors are worth the wait.
        Err(_) => log.with_writer(std::io::stderr).init(),
    }
    last_lines
}

/// Writer of one event; the subscriber writes it in one call.
struct Line {
    sender: SyncSender<Vec<u8>>,
    counts: Arc<Counts>,
}

impl Write for Line {
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

fn write_all(waiting: &Receiver<Vec<u8>>, counts: &Counts, users: &Users) {
    let mut told_at = Instant::now();
    loop {
        match waiting.recv_timeout(PERIOD.saturating_sub(told_at.elapsed())) {
            Ok(mut line) => {
                let left_out = counts.left_out.swap(0, Ordering::Relaxed);
                if left_out > 0 {
                    line.extend(
                        format!("{left_out} log lines were dropped: the reader is too slow\n")
                            .bytes(),
                    );
                }
                write(&line);
                counts.written.fetch_add(1, Ordering::Release);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        if told_at.elapsed() >= PERIOD {
            told_at = Instant::now();
            for (uid, count) in users.left_out(told_at) {
                write(format!("{count} more log lines about uid {uid} were dropped\n").as_bytes());
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

/// Lines that users may still cause, by uid. Users without recent lines are forgotten.
#[derive(Default)]
struct Users(Mutex<HashMap<u64, Lines>>);

struct Lines {
    left: u64,
    /// `left` grows by one for each period since.
    since: Instant,
    left_out: u64,
}

impl Users {
    /// Whether a line about `uid` may be written; counts it if not.
    fn may_write(&self, uid: u64, now: Instant) -> bool {
        let mut users = self.0.lock().unwrap_or_else(|e| e.into_inner());
        let lines = users.entry(uid).or_insert(Lines {
            left: BURST,
            since: now,
            left_out: 0,
        });
        lines.refill(now);
        match lines.left {
            0 => lines.left_out += 1,
            _ => lines.left -= 1,
        }
        lines.left_out == 0
    }

    /// Returns the users and counts of lines dropped since the last call. The line about that is the user's line of this period.
    fn left_out(&self, now: Instant) -> Vec<(u64, u64)> {
        let mut users = self.0.lock().unwrap_or_else(|e| e.into_inner());
        let mut left_out = Vec::new();
        users.retain(|uid, lines| {
            match std::mem::take(&mut lines.left_out) {
                0 => lines.refill(now),
                count => {
                    lines.since = now;
                    left_out.push((*uid, count));
                }
            }
            lines.left < BURST
        });
        left_out
    }
}

impl Lines {
    fn refill(&mut self, now: Instant) {
        let periods = (now.saturating_duration_since(self.since)).as_secs() / PERIOD.as_secs();
        if periods > 0 {
            self.left = BURST.min(self.left + periods);
            self.since = now;
        }
    }
}

/// Drops lines over the limit of [`Users`].
struct PerUser(Arc<Users>);

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for PerUser {
    fn event_enabled(&self, event: &tracing::Event<'_>, _: Context<'_, S>) -> bool {
        if *event.metadata().level() > tracing::Level::INFO {
            return true;
        }
        let mut uid = Uid(None);
        event.record(&mut uid);
        uid.0
            .is_none_or(|uid| self.0.may_write(uid, Instant::now()))
    }
}

struct Uid(Option<u64>);

impl Visit for Uid {
    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "uid" {
            self.0 = Some(value);
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
}

/// Waits on drop until queued lines are written.
pub(super) struct LastLines(Arc<Counts>);

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
        let users = Users::default();
        let start = Instant::now();
        let written = |uid, count, now| (0..count).filter(|_| users.may_write(uid, now)).count();
        assert_eq!(written(7, 1000, start), BURST as usize);
        assert_eq!(written(8, 3, start), 3, "limits are per user");
        let mut now = start + PERIOD;
        assert_eq!(users.left_out(now), [(7, 1000 - BURST)]);
        // While it continues, the count is the one line.
        for _ in 0..5 {
            assert_eq!(written(7, 500, now + PERIOD / 2), 0);
            now += PERIOD;
            assert_eq!(users.left_out(now), [(7, 500)]);
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
}
