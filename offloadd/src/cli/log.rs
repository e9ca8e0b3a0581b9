//! The log to stderr, through a thread of its own: whoever reads it may be slow or stuck (a full pipe, a service manager that
//! hangs), and nobody who moves tiles waits for that. What does not fit is left out, and how much is said.
//!
//! Lines about one user (events with a field `uid`) are limited, as any user can cause thousands a second: [`BURST`] at once and
//! one a second from then on, which says how many were left out.

use std::collections::HashMap;
use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tracing::field::{Field, Visit};
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

/// Lines that may wait: some hundred kilobytes at most.
const WAITING_MAX: usize = 1024;

/// Lines of one user that are written at once: the ranks of a node begin and end together.
const BURST: u64 = 16;

/// Between two lines of a user who causes more.
const PERIOD: Duration = Duration::from_secs(1);

/// How long the end of the program waits for lines to be taken.
const END: Duration = Duration::from_secs(1);

#[derive(Default)]
struct Counts {
    given: AtomicU64,
    written: AtomicU64,
    left_out: AtomicU64,
}

/// What is logged goes to stderr from now on. The lines that wait are written when this is dropped.
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
        // No thread is to be had: what else goes wrong is worth waiting for.
        Err(_) => log.with_writer(std::io::stderr).init(),
    }
    last_lines
}

/// One event: the subscriber writes it whole.
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
                    let told =
                        format!("{left_out} lines of the log were left out: nobody took them\n");
                    line.extend(told.bytes());
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
                write(format!("{count} more lines about uid {uid} were left out\n").as_bytes());
            }
        }
    }
}

fn write(mut line: &[u8]) {
    // Not by the locked stderr: a panic elsewhere must not wait for this.
    while !line.is_empty() {
        match rustix::io::write(std::io::stderr(), line) {
            Ok(written) => line = &line[written..],
            Err(rustix::io::Errno::INTR) => {}
            // Nobody is left to be told that nobody reads.
            Err(_) => break,
        }
    }
}

/// Lines that users have left, by uid. One without lines of late is forgotten.
#[derive(Default)]
struct Users(Mutex<HashMap<u64, Lines>>);

struct Lines {
    left: u64,
    /// One more for each period since.
    since: Instant,
    left_out: u64,
}

impl Users {
    /// Whether a line about `uid` may be written; counted if not.
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

    /// What was left out since the last time, which is that user's line of this period.
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

/// Leaves out what [`Users`] does not let through.
struct PerUser(Arc<Users>);

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for PerUser {
    fn event_enabled(&self, event: &tracing::Event<'_>, _: Context<'_, S>) -> bool {
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

/// Lines that wait to be written.
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
    fn a_user_has_some_lines_at_once_and_then_one_a_period_and_what_is_left_out_is_counted() {
        let users = Users::default();
        let start = Instant::now();
        let written = |uid, count, now| (0..count).filter(|_| users.may_write(uid, now)).count();
        assert_eq!(written(7, 1000, start), BURST as usize);
        assert_eq!(written(8, 3, start), 3, "another's are not his");
        let mut now = start + PERIOD;
        assert_eq!(users.left_out(now), [(7, 1000 - BURST)]);
        // While it goes on, the count is the one line.
        for _ in 0..5 {
            assert_eq!(written(7, 500, now + PERIOD / 2), 0);
            now += PERIOD;
            assert_eq!(users.left_out(now), [(7, 500)]);
        }
        assert_eq!(written(7, 2, now + PERIOD), 1);
        now += (BURST as u32 + 2) * PERIOD;
        users.left_out(now);
        users.left_out(now + (BURST as u32 + 2) * PERIOD);
        assert!(users.0.lock().unwrap().is_empty(), "nothing is kept");
    }
}
