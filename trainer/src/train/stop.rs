//! Handles SIGTERM and SIGINT: the first one asks the run to end after the current step with everything
//! saved, the second one ends the process at once. The exit status is 128 plus the signal's number in both
//! cases; 0 means that the run is done.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// Records whether a signal asked the run to stop, and which one.
#[derive(Clone)]
pub(super) struct Stop {
    asked: Arc<AtomicBool>,
    signal: Arc<AtomicUsize>,
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
        Ok(Self {
            asked,
            signal: signal_asked,
        })
    }

    pub(super) fn asked(&self) -> bool {
        self.asked.load(Ordering::Relaxed)
    }

    /// Exit status after a stop by signal: 128 plus the signal's number.
    pub(super) fn status(&self) -> u8 {
        128 + self.signal.load(Ordering::Relaxed) as u8
    }
}
