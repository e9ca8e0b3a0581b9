//! Ctrl-C and SIGTERM end a measurement in order: what was made for it is taken away.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use tokio::signal::unix::{SignalKind, signal};

static STOPPED: AtomicBool = AtomicBool::new(false);

/// From now on signals are noted instead of ending this process. A second one ends it.
///
/// # Errors
/// No thread is to be had.
pub(crate) fn listen() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .context("waiting for signals")?;
    let guard = runtime.enter();
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    drop(guard);
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
                STOPPED.store(true, Ordering::Relaxed);
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
                std::process::exit(130);
            });
        })
        .context("waiting for signals")?;
    Ok(())
}

/// Fails once a signal came.
///
/// # Errors
/// It came.
pub(crate) fn check() -> Result<()> {
    if STOPPED.load(Ordering::Relaxed) {
        bail!("stopped");
    }
    Ok(())
}
