//! SIGTERM and SIGINT: the first asks to end after this step, with everything saved; the second ends at once. Either way the
//! exit status is 128 and the signal's number, as for a program that the signal ended: 0 means that the run is done.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// Whether somebody asked to stop, and by which signal.
#[derive(Clone)]
pub(super) struct Stop {
    asked: Arc<AtomicBool>,
    signal: Arc<AtomicUsize>,
}

impl Stop {
    /// Takes the signals over from here on.
    pub(super) fn register() -> std::io::Result<Self> {
        let asked = Arc::new(AtomicBool::new(false));
        // What a rank answers that was not asked itself.
        let signal_asked = Arc::new(AtomicUsize::new(SIGTERM as usize));
        for signal in [SIGTERM, SIGINT] {
            // In this order: the first signal finds the flag unset, and sets it.
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

    /// Exit status of a process that ends because it was asked to: 128 and the signal's number.
    pub(super) fn status(&self) -> u8 {
        128 + self.signal.load(Ordering::Relaxed) as u8
    }
}
