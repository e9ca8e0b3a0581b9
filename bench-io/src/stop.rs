//! Ends a measurement in order on Ctrl-C, SIGTERM or the end of the terminal: everything made for it is removed.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use tokio::signal::unix::{Signal, SignalKind, signal};

static STOPPED: AtomicBool = AtomicBool::new(false);

/// Starts recording signals instead of ending the process. A second signal ends it.
///
/// # Errors
/// No thread can be started.
pub(crate) fn listen() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .context("waiting for signals")?;
    let guard = runtime.enter();
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = match ignores_hangup() {
        true => None,
        false => Some(signal(SignalKind::hangup())?),
    };
    drop(guard);
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                    () = recv(&mut hangup) => {}
                }
                STOPPED.store(true, Ordering::Relaxed);
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                    () = recv(&mut hangup) => {}
                }
                std::process::exit(130);
            });
        })
        .context("waiting for signals")?;
    Ok(())
}

async fn recv(hangup: &mut Option<Signal>) {
    match hangup {
        Some(hangup) => drop(hangup.recv().await),
        None => std::future::pending().await,
    }
}

/// Under nohup the process outlives its terminal.
fn ignores_hangup() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    // Signals are numbered from 1, bits from 0.
    ignored.is_some_and(|mask| mask & 1 << (SignalKind::hangup().as_raw_value() - 1) != 0)
}

/// Fails once a signal arrived.
pub(crate) fn check() -> Result<()> {
    if STOPPED.load(Ordering::Relaxed) {
        bail!("stopped");
    }
    Ok(())
}
