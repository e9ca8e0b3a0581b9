//! Notices a rank that is gone while this one waits for its own tiles: a commit waits for all ranks without a
//! time limit.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use kernels_torch::collective::Comm;
use swapper::Canceller;

/// Interval between two checks. A death is known some seconds later, so this adds little.
const LOOK: Duration = Duration::from_millis(250);

/// Thread that watches the other ranks until it is dropped.
pub(super) struct PeerWatchdog {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl PeerWatchdog {
    /// Starts the thread. It cancels with the reason when a rank is gone.
    pub(super) fn start(comm: Arc<Comm>, canceller: Canceller) -> Self {
        let (stop, stopped) = channel();
        let thread = std::thread::spawn(move || {
            while stopped.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                if let Some(gone) = comm.gone() {
                    return canceller.cancel(gone.to_string());
                }
            }
        });
        Self {
            stop: Some(stop),
            thread: Some(thread),
        }
    }
}

impl Drop for PeerWatchdog {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // The thread holds no state, and it has printed its own panic.
            let _ = thread.join();
        }
    }
}
