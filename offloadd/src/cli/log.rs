//! The log to stderr, through a thread of its own: whoever reads it may be slow or stuck (a full pipe, a service manager that
//! hangs), and nobody who moves tiles waits for that. What does not fit is left out, and how much is said.

use std::io::{IsTerminal, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

/// Lines that may wait: some hundred kilobytes at most.
const WAITING_MAX: usize = 1024;

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
    let seen = counts.clone();
    let writing = std::thread::Builder::new()
        .name("log".into())
        .spawn(move || write_all(&waiting, &seen));
    let last_lines = LastLines(counts.clone());
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal());
    match writing {
        Ok(_) => log
            .with_writer(move || Line {
                sender: sender.clone(),
                counts: counts.clone(),
            })
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

fn write_all(waiting: &Receiver<Vec<u8>>, counts: &Counts) {
    while let Ok(mut line) = waiting.recv() {
        let left_out = counts.left_out.swap(0, Ordering::Relaxed);
        if left_out > 0 {
            let told = format!("{left_out} lines of the log were left out: nobody took them\n");
            line.extend(told.bytes());
        }
        let mut rest = &line[..];
        // Not by the locked stderr: a panic elsewhere must not wait for this.
        while !rest.is_empty() {
            match rustix::io::write(std::io::stderr(), rest) {
                Ok(written) => rest = &rest[written..],
                Err(rustix::io::Errno::INTR) => {}
                // Nobody is left to be told that nobody reads.
                Err(_) => break,
            }
        }
        counts.written.fetch_add(1, Ordering::Release);
    }
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
