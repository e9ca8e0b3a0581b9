//! Handles the signals that a run answers.
//!
//! ```text
//!   SIGTERM, SIGINT   the first one ends the run after the current step with everything saved, the second one at once
//!   SIGHUP            the same as the first one, any number of times: a closing terminal sends several
//!   SIGUSR1           makes a checkpoint after the next step; a run that waits for space tries again at once
//! ```
//!
//! The exit status after a signal is 128 plus the signal's number; 0 means that the run is done.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use offload_support::signals::is_ignored;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::flag;

/// Records which signals arrived.
#[derive(Clone)]
pub(super) struct Stop {
    /// SIGTERM or SIGINT.
    asked: Arc<AtomicBool>,
    hung_up: Arc<AtomicBool>,
    signal: Arc<AtomicUsize>,
    checkpoint: Arc<AtomicBool>,
}

impl Stop {
    /// Installs the signal handlers.
    pub(super) fn register() -> std::io::Result<Self> {
        let asked = Arc::new(AtomicBool::new(false));
        // Used by a rank that stops because another rank got the signal.
        let signal_asked = Arc::new(AtomicUsize::new(SIGTERM as usize));
        for signal in [SIGTERM, SIGINT] {
            // Order matters: the first signal finds the flag unset and sets it.
            flag::register_conditional_shutdown(signal, 128 + signal, asked.clone())?;
            flag::register_usize(signal, signal_asked.clone(), signal as usize)?;
            flag::register(signal, asked.clone())?;
        }
        let hung_up = Arc::new(AtomicBool::new(false));
        // nohup ignores it, so that the run goes on.
        if !is_ignored(SIGHUP) {
            flag::register_usize(SIGHUP, signal_asked.clone(), SIGHUP as usize)?;
            flag::register(SIGHUP, hung_up.clone())?;
        }
        let checkpoint = Arc::new(AtomicBool::new(false));
        flag::register(SIGUSR1, checkpoint.clone())?;
        Ok(Self {
            asked,
            hung_up,
            signal: signal_asked,
            checkpoint,
        })
    }

    /// Whether a signal asked the run to stop.
    pub(super) fn asked(&self) -> bool {
        self.asked.load(Ordering::Relaxed) || self.hung_up.load(Ordering::Relaxed)
    }

    /// Whether SIGTERM or SIGINT arrived. The next one ends the process at once.
    pub(super) fn terminated(&self) -> bool {
        self.asked.load(Ordering::Relaxed)
    }

    /// Whether SIGUSR1 arrived since the last call.
    pub(super) fn take_checkpoint_request(&self) -> bool {
        self.checkpoint.swap(false, Ordering::Relaxed)
    }

    /// Exit status after a stop by signal: 128 plus the signal's number.
    pub(super) fn status(&self) -> u8 {
        128 + self.signal.load(Ordering::Relaxed) as u8
    }
}
