//! Ends a communicator when a rank is dead or NCCL failed, and at the end of a run.
//!
//! NCCL's kernels wait for their peers without a limit. Aborting is the only way to end them, from another thread than
//! the one that may be in a call.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::table::Table;
use crate::collective::link::Link;
use training_ranks::CollectiveError;

/// Interval of checks.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Time for a thread to return from a call before the communicator is aborted under it.
const CALL_MAX: Duration = Duration::from_secs(2);

/// Time for NCCL to end an idle communicator; after it the communicator is left behind.
const END_MAX: Duration = Duration::from_secs(5);

const OP: &str = "work of the GPUs together";

/// State shared by the callers and the watchdog.
pub(super) struct WatchdogState {
    table: &'static Table,
    /// The communicator, until it is ended. Locked during a call.
    handle: Mutex<Option<usize>>,
    /// The same, to abort during a call that does not return.
    raw: usize,
    broken: OnceLock<CollectiveError>,
    stop: AtomicBool,
    /// Heartbeats, with several ranks.
    link: Option<Arc<Link>>,
}

/// The watchdog's thread; dropping it ends the communicator.
pub(super) struct Watchdog {
    shared: Arc<WatchdogState>,
    thread: Option<JoinHandle<()>>,
}

impl WatchdogState {
    pub(super) fn new(
        table: &'static Table,
        handle: usize,
        link: Option<Arc<Link>>,
    ) -> WatchdogState {
        WatchdogState {
            table,
            handle: Mutex::new(Some(handle)),
            raw: handle,
            broken: OnceLock::new(),
            stop: AtomicBool::new(false),
            link,
        }
    }

    /// Makes one call that enqueues.
    pub(super) fn enqueue(
        &self,
        call: impl FnOnce(&Table, usize) -> i32,
    ) -> Result<(), CollectiveError> {
        let handle = self.lock();
        self.check()?;
        let code = call(self.table, handle.expect("there until it is broken"));
        drop(handle);
        let called = self.table.check(code, OP);
        if let Err(error) = called {
            // NCCL's error does not name the dead rank.
            let gone = self.link.as_ref().and_then(|link| link.attribute(OP));
            self.end(gone.unwrap_or(error));
        }
        self.check()
    }

    pub(super) fn check(&self) -> Result<(), CollectiveError> {
        self.broken.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    fn lock(&self) -> MutexGuard<'_, Option<usize>> {
        self.handle.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The error that makes the communicator useless, if there is one.
    fn trouble(&self) -> Option<CollectiveError> {
        if let Some(gone) = self.link.as_ref().and_then(|link| link.gone(OP)) {
            return Some(gone);
        }
        // Does not wait: a call in progress reports its own end.
        let handle = self.handle.try_lock().ok()?;
        let mut code = 0;
        // SAFETY: the communicator is live while its handle is locked; the pointer is live for the call.
        let asked = unsafe { (self.table.async_error)((*handle)?, &mut code) };
        let failed = self.table.check(asked, OP).and(self.table.check(code, OP));
        drop(handle);
        let error = failed.err()?;
        let gone = self.link.as_ref().and_then(|link| link.attribute(OP));
        Some(gone.unwrap_or(error))
    }

    /// Aborts the communicator, once. Enqueued work ends without a result.
    fn end(&self, error: CollectiveError) {
        if self.broken.set(error).is_err() {
            return;
        }
        let until = Instant::now() + CALL_MAX;
        let mut held = self.handle.try_lock();
        while held.is_err() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
            held = self.handle.try_lock();
        }
        let handle = match &mut held {
            Ok(handle) => handle.take(),
            Err(_) => Some(self.raw),
        };
        if let Some(handle) = handle {
            // SAFETY: it is ended only here, once (`broken` is set once, and the drop below checks it). A thread that
            // is still in a call would never return otherwise; NCCL allows an abort from another thread for this.
            let _ = unsafe { (self.table.abort)(handle) };
        }
    }
}

impl Watchdog {
    pub(super) fn start(shared: Arc<WatchdogState>) -> Watchdog {
        let its = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("gpu watchdog".to_owned())
            .spawn(move || {
                while !its.stop.load(Ordering::Acquire) && its.check().is_ok() {
                    match its.trouble() {
                        Some(error) => its.end(error),
                        None => std::thread::park_timeout(CHECK_INTERVAL),
                    }
                }
            })
            .expect("a process may start a thread");
        Watchdog {
            shared,
            thread: Some(thread),
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
        let Some(handle) = self.shared.lock().take() else {
            return;
        };
        if self.shared.check().is_err() {
            return;
        }
        // During unwinding, work may be enqueued that the other ranks never join.
        let table = self.shared.table;
        let end = if std::thread::panicking() {
            table.abort
        } else {
            table.destroy
        };
        let (ended, waiting) = mpsc::channel();
        std::thread::spawn(move || {
            // SAFETY: taken out above, so it is ended only here.
            let _ = unsafe { end(handle) };
            let _ = ended.send(());
        });
        let _ = waiting.recv_timeout(END_MAX);
    }
}
