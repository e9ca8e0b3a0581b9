//! Faults that a test injects into operations of this process (`test_hooks::injected_fault`), in test builds only.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use test_hooks::injected_fault::{InjectedFault, Instead, failing_flushes, injected_fault};

use super::power_cut_sim;
use super::{Io, IoDone, Memory};

static STARTED: AtomicU64 = AtomicU64::new(0);
static ENDED: AtomicU64 = AtomicU64::new(0);

fn asked_for() -> Option<InjectedFault> {
    static ASKED_FOR: OnceLock<Option<InjectedFault>> = OnceLock::new();
    *ASKED_FOR.get_or_init(injected_fault)
}

/// Called before an operation is given to a device.
pub(super) fn before(io: &Io) {
    let Some(injected_fault) = asked_for() else {
        return;
    };
    let number = STARTED.fetch_add(1, Ordering::Relaxed);
    match injected_fault.instead_of(number) {
        Some(Instead::Kill) => end(),
        Some(Instead::Cut) => {
            power_cut_sim::cut(number);
            end();
        }
        _ => power_cut_sim::begins(io),
    }
}

fn end() {
    let me = rustix::process::getpid();
    rustix::process::kill_process(me, rustix::process::Signal::KILL)
        .expect("a process may kill itself");
}

/// Called after operations have ended, to change their outcomes.
pub(super) fn after(done: &mut [IoDone]) {
    fail_flushes(done);
    let Some(injected_fault) = asked_for() else {
        return;
    };
    for done in done {
        let number = ENDED.fetch_add(1, Ordering::Relaxed);
        match (injected_fault.instead_of(number), done.outcome) {
            (Some(Instead::Errno(errno)), _) => done.outcome = Err(errno),
            // A flush moves no bytes, so it fails instead.
            (Some(Instead::Short), Ok(0)) => done.outcome = Err(libc::EIO),
            (Some(Instead::Short), Ok(moved)) => done.outcome = Ok(moved / 2),
            (Some(Instead::Kill | Instead::Cut) | None, _) | (Some(Instead::Short), Err(_)) => {}
        }
        power_cut_sim::has_ended(done);
    }
}

/// Fails the flushes among `done` while the test asks for it. The device has flushed, so no bytes are lost.
fn fail_flushes(done: &mut [IoDone]) {
    static WHILE: OnceLock<Option<PathBuf>> = OnceLock::new();
    let Some(path) = WHILE.get_or_init(failing_flushes) else {
        return;
    };
    let flushes = done
        .iter_mut()
        .filter(|done| matches!(done.memory, Memory::None));
    for flush in flushes {
        if path.exists() {
            flush.outcome = Err(libc::EIO);
        }
    }
}
